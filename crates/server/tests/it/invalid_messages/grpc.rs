//! Invalid messages on a gRPC stream.

use faena_wire::v1::{
    Complete, ConnectRequest, ConnectResponse, Drain, Register, ReportLog, ReportProgress, ReportStep,
    connect_request::Message as FromWorker, connect_response::Message as FromServer,
    worker_service_client::WorkerServiceClient,
};
use serde_json::json;
use tokio::sync::mpsc;
use tonic::Code;

use super::{Fixture, UNKNOWN_JOB};
use crate::{
    faena::Faena,
    load::assert_completed_once,
    workers::{StreamWorker, TestWorker, WebSocket, WorkerOptions, within_timeout},
};

/// A gRPC stream that sends any message, valid or not.
struct RawStream {
    sender: mpsc::UnboundedSender<ConnectRequest>,
    received: tonic::Streaming<ConnectResponse>,
}

impl RawStream {
    async fn open(faena: &Faena, first: Option<FromWorker>) -> RawStream {
        let channel = tonic::transport::Channel::from_shared(faena.url.clone()).unwrap().connect().await.unwrap();
        let (sender, to_send) = mpsc::unbounded_channel();
        sender.send(ConnectRequest { message: first }).unwrap();
        let outgoing =
            futures_util::stream::unfold(to_send, |mut to_send| async move { Some((to_send.recv().await?, to_send)) });
        let mut client = WorkerServiceClient::new(channel).max_encoding_message_size(64 << 20);
        let received = client.connect(outgoing).await.unwrap().into_inner();
        RawStream { sender, received }
    }

    async fn register(faena: &Faena, id: &str, kind: &str) -> RawStream {
        let mut stream = RawStream::open(faena, Some(register(id, &[kind]))).await;
        assert!(matches!(stream.receive().await, Ok(FromServer::Registered(_))));
        stream
    }

    /// Returns the next message, without heartbeats, or the code with which the stream ended.
    async fn receive(&mut self) -> Result<FromServer, Code> {
        loop {
            match within_timeout("an answer", self.received.message()).await {
                Ok(Some(message)) if matches!(message.message, Some(FromServer::Heartbeat(_))) => {}
                Ok(Some(message)) => return Ok(message.message.unwrap()),
                Ok(None) => return Err(Code::Ok),
                Err(status) => return Err(status.code()),
            }
        }
    }

    async fn call(&mut self, message: Option<FromWorker>) -> Result<FromServer, Code> {
        self.sender.send(ConnectRequest { message }).unwrap();
        self.receive().await
    }

    async fn call_expecting_error(&mut self, message: Option<FromWorker>) -> String {
        match self.call(message).await {
            Ok(FromServer::Error(error)) => error.code,
            Ok(FromServer::Ack(ack)) => ack.error.expect("an error").code,
            other => panic!("not an error: {other:?}"),
        }
    }
}

fn register(id: &str, capabilities: &[&str]) -> FromWorker {
    let capabilities = capabilities.iter().map(|&name| name.to_owned()).collect();
    FromWorker::Register(Register { worker_id: Some(id.into()), capabilities, ..Register::default() })
}

fn complete(job_id: &str, run: Option<i64>, result: &str) -> Option<FromWorker> {
    Some(FromWorker::Complete(Complete { job_id: job_id.into(), run, result_json: Some(result.into()) }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_does_not_begin_with_a_valid_register_message_ends_with_an_error() {
    let fixture = Fixture::start(&[]).await;
    let version = Register { capabilities: vec!["bad".into()], version: Some(String::new()), ..Register::default() };
    for first in [
        None,
        complete(&fixture.job.id, None, "1"),
        Some(register("bad", &[])),
        Some(register("", &["bad"])),
        Some(FromWorker::Register(version)),
    ] {
        let mut stream = RawStream::open(&fixture.faena, first.clone()).await;
        assert_eq!(stream.receive().await.unwrap_err(), Code::InvalidArgument, "{first:?}");
    }
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_invalid_message_is_answered_with_its_code_and_the_stream_stays_open() {
    let fixture = Fixture::start(&[]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&fixture.faena, WorkerOptions::new("bad", &["bad"])).await;
    let old = fixture.complete_in_second_run(&mut worker, "bad").await;
    worker.leave().await;
    let mut stream = RawStream::register(&fixture.faena, "bad", "bad").await;
    let running = fixture.faena.submit(json!({"name": "bad"})).await;
    let Ok(FromServer::Job(assigned)) = stream.receive().await else { panic!("no job") };
    assert_eq!(assigned.id, running);
    let (other, other_run) = (fixture.job.id.as_str(), Some(fixture.job.run));
    let step =
        ReportStep { job_id: running.clone(), name: String::new(), result_json: "1".into(), ..ReportStep::default() };
    let progress = ReportProgress { job_id: running.clone(), run: None, progress: None };
    let log = ReportLog { job_id: running.clone(), run: None, message: String::new(), event: None };
    let built_in = ReportLog { message: "x".into(), event: Some("queued".into()), ..log.clone() };
    let cases = [
        (None, "VALIDATION_ERROR"),
        (Some(register("bad", &["bad"])), "CONFLICT"),
        (complete("x", None, "1"), "VALIDATION_ERROR"),
        (complete(&running, None, "{not json"), "VALIDATION_ERROR"),
        (complete(&running, None, "\"\\ud800\""), "VALIDATION_ERROR"),
        (Some(FromWorker::Step(step)), "VALIDATION_ERROR"),
        (Some(FromWorker::Progress(progress)), "VALIDATION_ERROR"),
        (Some(FromWorker::Log(log)), "VALIDATION_ERROR"),
        (Some(FromWorker::Log(built_in)), "VALIDATION_ERROR"),
        (complete(&running, None, "1"), "VALIDATION_ERROR"),
        (complete(other, other_run, "1"), "CONFLICT"),
        (complete(UNKNOWN_JOB, Some(1), "1"), "NOT_FOUND"),
        (complete(&old.id, Some(old.run - 1), "1"), "STALE_RUN"),
        (complete(&running, None, &json!("x".repeat(2 << 20)).to_string()), "PAYLOAD_TOO_LARGE"),
    ];
    for (number, (message, expected)) in cases.into_iter().enumerate() {
        assert_eq!(stream.call_expecting_error(message).await, expected, "case {number}");
    }
    let Ok(FromServer::Ack(ack)) = stream.call(complete(&running, Some(assigned.run), "\"well\"")).await else {
        panic!("no ack")
    };
    assert!(ack.ok, "{ack:?}");
    assert_completed_once(&fixture.faena.wait_for_state(&running, "COMPLETED").await);
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_with_a_flood_or_an_oversized_message_ends() {
    let fixture = Fixture::start(&[]).await;
    for (id, message) in [("nothing", None), ("drains", Some(FromWorker::Drain(Drain {})))] {
        let mut stream = RawStream::register(&fixture.faena, id, "bad").await;
        for _ in 0..20_000 {
            let _ = stream.sender.send(ConnectRequest { message: message.clone() });
        }
        let end = loop {
            if let Err(code) = stream.receive().await {
                break code;
            }
        };
        assert_eq!(end, Code::ResourceExhausted, "{id}");
    }
    let mut stream = RawStream::register(&fixture.faena, "huge", "bad").await;
    let huge = json!("x".repeat(17 << 20)).to_string();
    let end = stream.call(complete(&fixture.job.id, None, &huge)).await;
    assert!(end.is_err(), "{end:?}");
    fixture.assert_undisturbed().await;
}
