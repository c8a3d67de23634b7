//! What a worker must not say: it is told so, and nobody else notices.

use faena_wire::v1::{
    Complete, Drain, LogReport, ProgressReport, Register, StepReport, WorkerMessage, server_message::Message as Told,
    worker_message::Message as Says, worker_service_client::WorkerServiceClient,
};
use futures_util::{SinkExt, StreamExt};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpStream, sync::mpsc};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};
use tonic::Code;

use crate::{
    faena::{Faena, events, eventually},
    hands::{Frames, Hand, Job, WebSocket, Who, in_time, who},
    load::assert_completed_once,
};

const NOBODYS_JOB: &str = "01a1e1d5-1161-725e-af1b-3dd571b21dd7";

/// A server, and a worker that does its job while others misbehave.
struct Scene {
    faena: Faena,
    honest: Frames<WebSocket>,
    /// The job in its hands.
    job: Job,
    _folder: TempDir,
}

impl Scene {
    async fn open(environment: &[(&str, &str)]) -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let faena = Faena::start(folder.path(), environment).await;
        let mut honest = Frames::connect(&faena, who("honest", &["honest"])).await;
        faena.submit(json!({"name": "honest"})).await;
        let job = honest.next_job().await;
        honest.log(&job, "at work").await.unwrap();
        Scene { faena, honest, job, _folder: folder }
    }

    /// Nobody has noticed anything.
    async fn close(mut self) {
        self.honest.complete(&self.job, json!("undisturbed")).await.unwrap();
        let done = self.faena.job_is(&self.job.id, "COMPLETED").await;
        assert_completed_once(&done);
        assert_eq!((&done["result"], &done["run"]), (&json!("undisturbed"), &json!(self.job.run)));
        assert_eq!(done["retryCount"], 0);
        assert!(!self.faena.log().contains("panick"), "{}", self.faena.log());
    }

    /// A job that this worker has completed under its second run.
    async fn finished_job(&self, hand: &mut Frames<WebSocket>, kind: &str) -> Job {
        self.faena.submit(json!({"name": kind, "retryDelay": 100})).await;
        let first = hand.next_job().await;
        hand.fail(&first, crate::hands::failure("once more")).await.unwrap();
        let second = hand.next_job().await;
        hand.complete(&second, json!(1)).await.unwrap();
        second
    }
}

/// A WebSocket on which anything may be said.
struct Raw(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Raw {
    async fn connect(faena: &Faena) -> Raw {
        let url = format!("{}/api/v1/workers/connect", faena.url.replacen("http", "ws", 1));
        Raw(connect_async(url).await.unwrap().0)
    }

    async fn registered(faena: &Faena, id: &str, kind: &str) -> Raw {
        let mut raw = Raw::connect(faena).await;
        let frame = json!({"type": "register", "workerId": id, "capabilities": [kind]});
        assert_eq!(raw.ask(frame.to_string()).await["type"], "registered");
        raw
    }

    async fn say(&mut self, message: impl Into<Message>) {
        self.0.send(message.into()).await.unwrap();
    }

    /// The next frame but heartbeats; a closed connection is `{"type": "closed", "reason": …}`.
    async fn answer(&mut self) -> Value {
        loop {
            match in_time("an answer", self.0.next()).await {
                Some(Ok(Message::Text(text))) => {
                    let frame: Value = serde_json::from_str(&text).unwrap();
                    if frame["type"] != "heartbeat" {
                        return frame;
                    }
                }
                Some(Ok(Message::Close(end))) => {
                    return json!({"type": "closed", "reason": end.map(|end| end.reason.to_string())});
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return json!({"type": "closed", "reason": null}),
            }
        }
    }

    async fn ask(&mut self, message: impl Into<Message>) -> Value {
        self.say(message).await;
        self.answer().await
    }

    /// Says the same until the server has had enough, and answers with its reason.
    async fn flood(&mut self, text: &str) -> Value {
        let flooding = async {
            for round in 0..2_000 {
                for _ in 0..50 {
                    if self.0.feed(Message::text(text)).await.is_err() {
                        return self.closed().await;
                    }
                }
                if self.0.flush().await.is_err() {
                    return self.closed().await;
                }
                // What has been answered is read, as a good client does.
                if round % 2 == 0 {
                    while let Ok(frame) = tokio::time::timeout(std::time::Duration::ZERO, self.answer()).await {
                        if frame["type"] == "closed" {
                            return frame;
                        }
                    }
                }
            }
            json!({"type": "never closed"})
        };
        in_time("the flood is stopped", flooding).await
    }

    async fn closed(&mut self) -> Value {
        loop {
            let frame = self.answer().await;
            if frame["type"] == "closed" {
                return frame;
            }
        }
    }
}

fn code(answer: &Value) -> &str {
    answer["error"]["code"].as_str().unwrap_or_else(|| panic!("no refusal: {answer}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn before_it_is_registered_a_websocket_is_told_what_is_wrong_and_may_try_again() {
    let scene = Scene::open(&[]).await;
    let mut raw = Raw::connect(&scene.faena).await;
    for frame in [
        "nonsense".to_owned(),
        "[]".into(),
        "{}".into(),
        json!({"type": "heartbeat"}).to_string(),
        json!({"type": "complete", "jobId": scene.job.id}).to_string(),
        json!({"type": "register"}).to_string(),
        json!({"type": "register", "capabilities": []}).to_string(),
        json!({"type": "register", "capabilities": [""]}).to_string(),
        json!({"type": "register", "capabilities": "mail"}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "concurrency": 0}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "concurrency": -1}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "workerId": ""}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "workerId": "a\u{0}b"}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "colour": "red"}).to_string(),
    ] {
        let answer = raw.ask(frame.clone()).await;
        assert_eq!((answer["type"].as_str(), code(&answer)), (Some("error"), "VALIDATION_ERROR"), "{frame}: {answer}");
    }
    let answer = raw.ask(json!({"type": "register", "capabilities": ["mail"]}).to_string()).await;
    assert_eq!(answer["type"], "registered", "{answer}");
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_websocket_each_wrong_frame_is_answered_with_its_code_and_the_connection_stays() {
    let scene = Scene::open(&[]).await;
    let mut worker = Frames::<WebSocket>::connect(&scene.faena, who("bad", &["bad"])).await;
    let old = scene.finished_job(&mut worker, "bad").await;
    worker.leave().await;
    let mut raw = Raw::registered(&scene.faena, "bad", "bad").await;
    let running = scene.faena.submit(json!({"name": "bad"})).await;
    let given = raw.answer().await;
    assert_eq!(given["job"]["id"], running.as_str(), "{given}");
    let (other, other_run) = (scene.job.id.as_str(), scene.job.run);
    let cases = [
        (json!("a text"), "VALIDATION_ERROR"),
        (json!({"type": "dance"}), "VALIDATION_ERROR"),
        (json!({"type": 7}), "VALIDATION_ERROR"),
        (json!({"kind": "complete"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "colour": "red"}), "VALIDATION_ERROR"),
        (json!({"type": "complete"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": "x"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "run": "1"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "run": 99}), "CONFLICT|VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running}), "VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running, "progress": {"percentage": 101}}), "VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running, "progress": {"percent": 1}}), "VALIDATION_ERROR"),
        (json!({"type": "step", "jobId": running, "result": 1}), "VALIDATION_ERROR"),
        (json!({"type": "step", "jobId": running, "name": "", "result": 1}), "VALIDATION_ERROR"),
        (json!({"type": "log", "jobId": running}), "VALIDATION_ERROR"),
        (json!({"type": "register", "capabilities": ["bad"]}), "CONFLICT"),
        // Somebody else's job, with and without the right number.
        (json!({"type": "complete", "jobId": other, "result": "stolen"}), "CONFLICT"),
        (json!({"type": "complete", "jobId": other, "run": other_run, "result": "stolen"}), "CONFLICT"),
        (json!({"type": "fail", "jobId": other, "run": other_run, "error": "stolen"}), "CONFLICT"),
        (json!({"type": "progress", "jobId": other, "run": other_run, "progress": {"percentage": 1}}), "CONFLICT"),
        (json!({"type": "step", "jobId": other, "run": other_run, "name": "E1", "result": 1}), "CONFLICT"),
        (json!({"type": "log", "jobId": other, "run": other_run, "message": "stolen"}), "CONFLICT"),
        (json!({"type": "release", "jobId": other, "run": other_run}), "CONFLICT"),
        (json!({"type": "complete", "jobId": NOBODYS_JOB}), "NOT_FOUND"),
        // A job that has ended.
        (json!({"type": "fail", "jobId": old.id, "run": old.run, "error": "after all"}), "INVALID_TRANSITION"),
        (json!({"type": "log", "jobId": old.id, "run": old.run, "message": "after all"}), "INVALID_TRANSITION"),
        (json!({"type": "release", "jobId": old.id, "run": old.run}), "INVALID_TRANSITION"),
        (json!({"type": "complete", "jobId": old.id, "run": old.run - 1}), "STALE_RUN"),
        (json!({"type": "step", "jobId": old.id, "run": old.run - 1, "name": "E1", "result": 1}), "STALE_RUN"),
        (json!({"type": "complete", "jobId": old.id, "run": old.run + 1}), "VALIDATION_ERROR"),
    ];
    for (frame, expected) in cases {
        let answer = raw.ask(frame.to_string()).await;
        assert!(expected.split('|').any(|expected| expected == code(&answer)), "{frame}: {answer}");
    }
    let bytes: &[u8] = b"{\"type\":\"heartbeat\"}";
    assert_eq!(code(&raw.ask(Message::binary(bytes.to_vec())).await), "VALIDATION_ERROR");
    let half = format!(r#"{{"type":"complete","jobId":"{running}","result":"\ud800"}}"#);
    assert_eq!(code(&raw.ask(half).await), "VALIDATION_ERROR");
    let deep =
        format!(r#"{{"type":"complete","jobId":"{running}","result":{}1{}}}"#, "[".repeat(50_000), "]".repeat(50_000));
    assert_eq!(code(&raw.ask(deep).await), "VALIDATION_ERROR");
    let large = json!({"type": "complete", "jobId": running, "result": "x".repeat(2 << 20)});
    assert_eq!(code(&raw.ask(large.to_string()).await), "PAYLOAD_TOO_LARGE");
    // After all that the job is still in its hands.
    let job = scene.faena.job_is(&running, "PROCESSING").await;
    assert_eq!((&job["run"], &job["retryCount"]), (&given["job"]["run"], &json!(0)), "{job:#}");
    let answer = raw.ask(json!({"type": "complete", "jobId": running, "result": "well"}).to_string()).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(scene.faena.job_is(&running, "COMPLETED").await["result"], "well");
    let old_now = scene.faena.job(&old.id).await;
    assert_completed_once(&old_now);
    assert_eq!(events(&old_now).iter().filter(|event| **event == "stale_report").count(), 2, "{old_now:#}");
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_floods_a_websocket_is_sent_away_with_a_reason() {
    let scene = Scene::open(&[]).await;
    let other = json!({"type": "log", "jobId": scene.job.id, "message": "hello"}).to_string();
    for (id, text, reason) in [
        ("nonsense", "nonsense", "too many messages"),
        ("beats", r#"{"type":"heartbeat"}"#, "too many messages"),
        ("others", other.as_str(), "too many messages"),
        ("registers", r#"{"type":"register","capabilities":["bad"]}"#, "too many messages"),
        ("drains", r#"{"type":"drain"}"#, "too many messages"),
    ] {
        let mut raw = Raw::registered(&scene.faena, id, "bad").await;
        let closed = raw.flood(text).await;
        // The reason is overtaken by the reset when the server closes with bytes unread.
        assert_eq!(closed["type"], "closed", "{id}: {closed}");
        assert!([json!(reason), json!(null)].contains(&closed["reason"]), "{id}: {closed}");
    }
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_beyond_all_bounds_ends_the_connection_and_its_worker_may_come_back_to_its_job() {
    let scene = Scene::open(&[]).await;
    let mut raw = Raw::registered(&scene.faena, "bad", "bad").await;
    let id = scene.faena.submit(json!({"name": "bad"})).await;
    assert_eq!(raw.answer().await["job"]["id"], id.as_str());
    let huge = json!({"type": "complete", "jobId": id, "result": "x".repeat(17 << 20)}).to_string();
    // It may be closed before all of it is sent.
    let _ = raw.0.send(Message::text(huge)).await;
    assert_eq!(raw.closed().await["type"], "closed");
    let mut raw = Raw::registered(&scene.faena, "bad", "bad").await;
    let answer = raw.ask(json!({"type": "complete", "jobId": id, "result": "short"}).to_string()).await;
    assert_eq!(answer["ok"], true, "{answer}");
    let done = scene.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["retryCount"], 0);
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_jobs_of_a_worker_that_never_reads_are_done_by_one_that_does() {
    let settings = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        // Long enough to hand in and out eighteen megabytes on a busy machine.
        ("FAENA_WORKER_SILENCE", "8s"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let scene = Scene::open(&settings).await;
    let mut deaf = Raw::connect(&scene.faena).await;
    deaf.say(json!({"type": "register", "workerId": "deaf", "capabilities": ["big"], "concurrency": 100}).to_string())
        .await;
    // More than the buffers between us hold.
    let mut ids = Vec::new();
    for _ in 0..20 {
        ids.push(scene.faena.submit(json!({"name": "big", "payload": {"text": "x".repeat(900_000)}})).await);
    }
    eventually("it has them all", async || (scene.faena.count("type=big&status=QUEUED").await == 0).then_some(()))
        .await;
    let mut other =
        Frames::<WebSocket>::connect(&scene.faena, Who { concurrency: 100, ..who("other", &["big"]) }).await;
    for _ in &ids {
        let job = other.next_job().await;
        assert_eq!(job.retry_count, 1);
        other.complete(&job, json!(null)).await.unwrap();
    }
    for id in &ids {
        assert_completed_once(&scene.faena.job_is(id, "COMPLETED").await);
    }
    let (_, worker) = scene.faena.get("/api/v1/workers/deaf").await;
    assert_eq!(worker["state"], "Terminated", "{worker:#}");
    drop(deaf);
    scene.close().await;
}

/// A gRPC stream on which anything may be said.
struct Stream {
    say: mpsc::UnboundedSender<WorkerMessage>,
    heard: tonic::Streaming<faena_wire::v1::ServerMessage>,
}

impl Stream {
    async fn open(faena: &Faena, first: Option<Says>) -> Stream {
        let channel = tonic::transport::Channel::from_shared(faena.url.clone()).unwrap().connect().await.unwrap();
        let (say, to_say) = mpsc::unbounded_channel();
        say.send(WorkerMessage { message: first }).unwrap();
        let outgoing =
            futures_util::stream::unfold(to_say, |mut to_say| async move { Some((to_say.recv().await?, to_say)) });
        let mut client = WorkerServiceClient::new(channel).max_encoding_message_size(64 << 20);
        let heard = client.connect(outgoing).await.unwrap().into_inner();
        Stream { say, heard }
    }

    async fn registered(faena: &Faena, id: &str, kind: &str) -> Stream {
        let mut stream = Stream::open(faena, Some(register(id, &[kind]))).await;
        assert!(matches!(stream.answer().await, Ok(Told::Registered(_))));
        stream
    }

    /// The next message but heartbeats, or how the stream ended.
    async fn answer(&mut self) -> Result<Told, Code> {
        loop {
            match in_time("an answer", self.heard.message()).await {
                Ok(Some(message)) if matches!(message.message, Some(Told::Heartbeat(_))) => {}
                Ok(Some(message)) => return Ok(message.message.unwrap()),
                Ok(None) => return Err(Code::Ok),
                Err(status) => return Err(status.code()),
            }
        }
    }

    async fn ask(&mut self, says: Option<Says>) -> Result<Told, Code> {
        self.say.send(WorkerMessage { message: says }).unwrap();
        self.answer().await
    }

    async fn refusal(&mut self, says: Option<Says>) -> String {
        match self.ask(says).await {
            Ok(Told::Error(error)) => error.code,
            Ok(Told::Ack(ack)) => ack.error.expect("a refusal").code,
            other => panic!("no refusal: {other:?}"),
        }
    }
}

fn register(id: &str, capabilities: &[&str]) -> Says {
    let capabilities = capabilities.iter().map(|&name| name.to_owned()).collect();
    Says::Register(Register { worker_id: Some(id.into()), capabilities, ..Register::default() })
}

fn complete(job_id: &str, run: Option<i64>, result: &str) -> Option<Says> {
    Some(Says::Complete(Complete { job_id: job_id.into(), run, result_json: Some(result.into()) }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_stream_that_does_not_begin_with_a_sound_register_ends_with_the_reason() {
    let scene = Scene::open(&[]).await;
    for first in [None, complete(&scene.job.id, None, "1"), Some(register("bad", &[])), Some(register("", &["bad"]))] {
        let mut stream = Stream::open(&scene.faena, first.clone()).await;
        assert_eq!(stream.answer().await.unwrap_err(), Code::InvalidArgument, "{first:?}");
    }
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_grpc_stream_each_wrong_message_is_answered_with_its_code_and_the_stream_stays() {
    let scene = Scene::open(&[]).await;
    let mut worker = Frames::<WebSocket>::connect(&scene.faena, who("bad", &["bad"])).await;
    let old = scene.finished_job(&mut worker, "bad").await;
    worker.leave().await;
    let mut stream = Stream::registered(&scene.faena, "bad", "bad").await;
    let running = scene.faena.submit(json!({"name": "bad"})).await;
    let Ok(Told::Job(given)) = stream.answer().await else { panic!("no job") };
    assert_eq!(given.id, running);
    let (other, other_run) = (scene.job.id.as_str(), Some(scene.job.run));
    let step =
        StepReport { job_id: running.clone(), name: String::new(), result_json: "1".into(), ..StepReport::default() };
    let progress = ProgressReport { job_id: running.clone(), run: None, progress: None };
    let log = LogReport { job_id: running.clone(), run: None, message: String::new() };
    let cases = [
        (None, "VALIDATION_ERROR"),
        (Some(register("bad", &["bad"])), "CONFLICT"),
        (complete("x", None, "1"), "VALIDATION_ERROR"),
        (complete(&running, None, "{not json"), "VALIDATION_ERROR"),
        (complete(&running, None, "\"\\ud800\""), "VALIDATION_ERROR"),
        (Some(Says::Step(step)), "VALIDATION_ERROR"),
        (Some(Says::Progress(progress)), "VALIDATION_ERROR"),
        (Some(Says::Log(log)), "VALIDATION_ERROR"),
        (complete(other, None, "1"), "CONFLICT"),
        (complete(other, other_run, "1"), "CONFLICT"),
        (complete(NOBODYS_JOB, None, "1"), "NOT_FOUND"),
        (complete(&old.id, Some(old.run - 1), "1"), "STALE_RUN"),
        (complete(&running, None, &json!("x".repeat(2 << 20)).to_string()), "PAYLOAD_TOO_LARGE"),
    ];
    for (number, (says, expected)) in cases.into_iter().enumerate() {
        assert_eq!(stream.refusal(says).await, expected, "case {number}");
    }
    let Ok(Told::Ack(ack)) = stream.ask(complete(&running, None, "\"well\"")).await else { panic!("no ack") };
    assert!(ack.ok, "{ack:?}");
    assert_completed_once(&scene.faena.job_is(&running, "COMPLETED").await);
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_stream_that_floods_or_sends_a_message_beyond_all_bounds_ends() {
    let scene = Scene::open(&[]).await;
    for (id, says) in [("nothing", None), ("drains", Some(Says::Drain(Drain {})))] {
        let mut stream = Stream::registered(&scene.faena, id, "bad").await;
        for _ in 0..20_000 {
            let _ = stream.say.send(WorkerMessage { message: says.clone() });
        }
        let end = loop {
            if let Err(code) = stream.answer().await {
                break code;
            }
        };
        assert_eq!(end, Code::ResourceExhausted, "{id}");
    }
    let mut stream = Stream::registered(&scene.faena, "huge", "bad").await;
    let huge = json!("x".repeat(17 << 20)).to_string();
    let end = stream.ask(complete(&scene.job.id, None, &huge)).await;
    assert!(end.is_err(), "{end:?}");
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_plain_http_each_wrong_request_is_answered_with_its_status_and_code() {
    let scene = Scene::open(&[]).await;
    let mut worker = Frames::<WebSocket>::connect(&scene.faena, who("other", &["bad"])).await;
    let old = scene.finished_job(&mut worker, "bad").await;
    worker.leave().await;
    let (status, _) =
        scene.faena.post("/api/v1/workers/register", json!({"workerId": "bad", "capabilities": ["bad"]})).await;
    assert_eq!(status, StatusCode::CREATED);
    let running = scene.faena.submit(json!({"name": "bad"})).await;
    let (_, claimed) = scene.faena.post("/api/v1/workers/bad/claim", json!({})).await;
    assert_eq!(claimed["jobs"][0]["id"], running.as_str(), "{claimed}");
    let mine = format!("/bad/jobs/{running}");
    let other = format!("/bad/jobs/{}", scene.job.id);
    let past = format!("/bad/jobs/{}", old.id);
    let large = json!({"result": "x".repeat(2 << 20)}).to_string();
    let (run, stale) = (json!({"run": scene.job.run}).to_string(), json!({"run": old.run - 1}).to_string());
    let cases = [
        ("/register".to_owned(), "nonsense", 400, "VALIDATION_ERROR"),
        ("/register".into(), "{}", 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "colour": "red"}"#, 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "concurrency": 0}"#, 400, "VALIDATION_ERROR"),
        ("/nobody/claim".into(), "{}", 404, "NOT_FOUND"),
        ("/nobody/heartbeat".into(), "", 404, "NOT_FOUND"),
        ("/bad/claim".into(), r#"{"max": 0}"#, 400, "VALIDATION_ERROR"),
        ("/bad/claim".into(), r#"{"waitMs": 3600000}"#, 400, "VALIDATION_ERROR"),
        ("/bad/claim".into(), r#"{"waitMs": -1}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/dance"), "{}", 404, "NOT_FOUND"),
        (format!("{mine}/complete"), "{nonsense", 400, "VALIDATION_ERROR"),
        (format!("{mine}/complete"), r#"{"colour": "red"}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/complete"), r#"{"run": "one"}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/complete"), r#"{"result": "\ud800"}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/complete"), &large, 413, "PAYLOAD_TOO_LARGE"),
        (format!("{mine}/progress"), r#"{"progress": {"percentage": 101}}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/progress"), "{}", 400, "VALIDATION_ERROR"),
        (format!("{mine}/step"), r#"{"result": 1}"#, 400, "VALIDATION_ERROR"),
        (format!("{mine}/log"), "{}", 400, "VALIDATION_ERROR"),
        (format!("{other}/complete"), "{}", 409, "CONFLICT"),
        (format!("{other}/complete"), &run, 409, "CONFLICT"),
        (format!("{other}/release"), &run, 409, "CONFLICT"),
        (format!("/honest/jobs/{}/complete", scene.job.id), &run, 404, "NOT_FOUND"),
        (format!("/bad/jobs/{NOBODYS_JOB}/complete"), "{}", 404, "NOT_FOUND"),
        (format!("{past}/complete"), &stale, 409, "STALE_RUN"),
    ];
    for (path, body, status, code) in cases {
        let url = format!("{}/api/v1/workers{path}", scene.faena.url);
        // A refused body is not read to its end, so the connection is of no further use.
        let request = scene.faena.http.post(url).header("connection", "close").body(body.to_owned());
        let answer = request.send().await.unwrap();
        let (found, answer) = (answer.status().as_u16(), answer.json::<Value>().await.unwrap());
        let short: String = body.chars().take(80).collect();
        assert_eq!((found, answer["error"]["code"].as_str()), (status, Some(code)), "{path} {short}: {answer}");
    }
    let (status, answer) = scene.faena.post(&format!("/api/v1/workers{mine}/complete"), json!({"result": 1})).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_completed_once(&scene.faena.job_is(&running, "COMPLETED").await);
    scene.close().await;
}

/// Something that a worker says, sensible or not.
#[derive(Clone, Debug)]
enum Word {
    About { what: &'static str, job: usize, run: Option<i64>, odd: bool },
    Plain(&'static str),
    Text(String),
    Bytes(Vec<u8>),
}

fn words() -> impl Strategy<Value = Vec<Word>> {
    let what = prop::sample::select(vec!["started", "progress", "log", "step", "complete", "fail", "release"]);
    let run = prop_oneof![3 => Just(None), 3 => Just(Some(0)), 1 => Just(Some(-1)), 1 => Just(Some(1))];
    // 0 and 1: its own jobs, 2: another worker's, 3: nobody's.
    let about = (what, 0_usize..4, run, prop::bool::weighted(0.1)).prop_map(|(what, job, run, odd)| Word::About {
        what,
        job,
        run,
        odd,
    });
    let plain = prop::sample::select(vec!["heartbeat", "register", "drain", "dance"]).prop_map(Word::Plain);
    let bytes = prop::collection::vec(any::<u8>(), 0..40).prop_map(Word::Bytes);
    prop::collection::vec(
        prop_oneof![8 => about, 2 => plain, 1 => "\\PC{0,40}".prop_map(Word::Text), 1 => bytes],
        1..25,
    )
}

fn spoken(word: &Word, jobs: &[(String, i64)]) -> Message {
    match word {
        Word::Plain(kind) => Message::text(json!({ "type": kind }).to_string()),
        Word::Text(text) => Message::text(text.clone()),
        Word::Bytes(bytes) => Message::binary(bytes.clone()),
        Word::About { what, job, run, odd } => {
            let (id, current) = &jobs[*job];
            let mut frame = json!({"type": what, "jobId": id});
            if let Some(offset) = run {
                frame["run"] = (current + offset).into();
            }
            let (field, value) = match *what {
                "progress" => ("progress", json!({"percentage": 50})),
                "log" => ("message", json!("hello")),
                "step" => ("name", json!("E1")),
                "complete" => ("result", json!({"n": 1})),
                "fail" => ("error", json!("no")),
                _ => ("jobId", json!(id)),
            };
            frame[field] = if *odd { json!([[null]]) } else { value };
            Message::text(frame.to_string())
        }
    }
}

async fn says_anything(scene: &Scene, case: usize, words: &[Word]) {
    let kind = format!("talk.{case}");
    let jobs = json!({"jobs": [
        {"name": kind, "maxRetries": 1, "retryDelay": 100},
        {"name": kind, "maxRetries": 0},
    ]});
    let (status, answer) = scene.faena.post("/api/v1/jobs/batch", jobs).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let mut raw = Raw::connect(&scene.faena).await;
    let register = json!({"type": "register", "workerId": kind, "capabilities": [kind], "concurrency": 2});
    raw.say(register.to_string()).await;
    assert_eq!(raw.answer().await["type"], "registered");
    let mut known = Vec::new();
    for _ in 0..2 {
        let given = raw.answer().await;
        known.push((given["job"]["id"].as_str().unwrap().to_owned(), given["job"]["run"].as_i64().unwrap()));
    }
    known.push((scene.job.id.clone(), scene.job.run));
    known.push((NOBODYS_JOB.into(), 1));
    for word in words {
        raw.say(spoken(word, &known)).await;
    }
    // The server has read all of it when it answers this; it answers in order.
    raw.say(json!({"type": "the last word"}).to_string()).await;
    loop {
        let answer = raw.answer().await;
        assert_ne!(answer["type"], "closed", "{answer}");
        if answer["error"]["message"].as_str().is_some_and(|message| message.contains("the last word")) {
            break;
        }
    }
    for (id, _) in &known[..2] {
        let job = scene.faena.job(id).await;
        let count = |event: &str| events(&job).iter().filter(|found| **found == event).count();
        let ends = count("completed") + usize::from(job["status"] == "FAILED");
        assert!(ends <= 1, "{job:#}");
        assert!(count("failed") <= 2, "{job:#}");
        if job["status"] == "COMPLETED" {
            assert_completed_once(&job);
        }
    }
    let honest = scene.faena.job(&scene.job.id).await;
    assert_eq!((&honest["status"], &honest["run"]), (&json!("PROCESSING"), &json!(scene.job.run)), "{honest:#}");
    raw.say(json!({"type": "leave"}).to_string()).await;
    raw.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_worker_says_in_whatever_order_the_server_answers_and_no_job_ends_twice() {
    let scene = Scene::open(&[]).await;
    scene.faena.job_is(&scene.job.id, "PROCESSING").await;
    let case = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    tokio::task::block_in_place(|| {
        let runtime = tokio::runtime::Handle::current();
        let verdict = runner.run(&words(), |words| {
            case.set(case.get() + 1);
            runtime.block_on(says_anything(&scene, case.get(), &words));
            Ok(())
        });
        verdict.unwrap_or_else(|error| panic!("{error}"));
    });
    scene.close().await;
}
