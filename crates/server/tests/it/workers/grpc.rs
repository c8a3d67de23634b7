//! Worker frames as gRPC messages of `faena.v1`.

use faena_wire::v1::{
    Complete, ConnectRequest, ConnectResponse, Drain, Fail, Heartbeat, Leave, Progress, Register, Release, ReportKind,
    ReportLog, ReportProgress, ReportStep, Started, connect_request::Message as FromWorker,
    connect_response::Message as FromServer, worker_service_client::WorkerServiceClient,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::stream::{Connection, Transport};

pub struct Grpc;

impl Transport for Grpc {
    async fn open(url: &str) -> Connection {
        let channel = Channel::from_shared(url.to_owned()).unwrap().connect().await.unwrap();
        let (sender, to_send) = mpsc::unbounded_channel::<Value>();
        let (received_sender, received) = mpsc::unbounded_channel();
        let outgoing = futures_util::stream::unfold(to_send, |mut to_send| async move {
            let frame = to_send.recv().await?;
            Some((message(&frame), to_send))
        });
        let mut client = WorkerServiceClient::new(channel);
        let mut incoming = client.connect(outgoing).await.unwrap().into_inner();
        let mute = CancellationToken::new();
        let muted = mute.clone();
        let task = tokio::spawn(async move {
            let _keeps_channel_open = client;
            loop {
                let message = tokio::select! {
                    () = muted.cancelled() => std::future::pending().await,
                    message = incoming.message() => message,
                };
                match message {
                    Ok(Some(message)) => {
                        let _ = received_sender.send(frame(message));
                    }
                    Ok(None) => return,
                    Err(status) => {
                        let _ = received_sender.send(json!({"type": "closed", "reason": status.message()}));
                        return;
                    }
                }
            }
        });
        Connection { sender, received, task: task.abort_handle(), mute }
    }
}

fn message(frame: &Value) -> ConnectRequest {
    let text = |name: &str| frame[name].as_str().map(str::to_owned);
    let list = |name: &str| -> Vec<String> {
        frame[name].as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    let number = |name: &str| frame[name].as_u64().map(|number| u32::try_from(number).unwrap());
    let raw = |name: &str| frame.get(name).map(Value::to_string);
    let (job_id, run) = (text("jobId").unwrap_or_default(), frame["run"].as_i64());
    let message = match frame["type"].as_str().unwrap() {
        "register" => FromWorker::Register(Register {
            worker_id: text("workerId"),
            session_token: text("sessionToken"),
            name: text("name"),
            version: text("version"),
            capabilities: list("capabilities"),
            queues: list("queues"),
            concurrency: number("concurrency"),
            ..Register::default()
        }),
        "heartbeat" => FromWorker::Heartbeat(Heartbeat {}),
        "started" => FromWorker::Started(Started { job_id, run }),
        "progress" => {
            let progress = &frame["progress"];
            let text = |name: &str| progress[name].as_str().map(str::to_owned);
            let number = |name: &str| progress[name].as_u64().map(|number| u32::try_from(number).unwrap());
            let progress = Progress {
                phase: text("phase"),
                current_step: text("currentStep"),
                completed_steps: number("completedSteps"),
                total_steps: number("totalSteps"),
                percentage: progress["percentage"].as_f64(),
                message: text("message"),
            };
            FromWorker::Progress(ReportProgress { job_id, run, progress: Some(progress) })
        }
        "log" => FromWorker::Log(ReportLog { job_id, run, message: text("message").unwrap(), event: text("event") }),
        "step" => FromWorker::Step(ReportStep {
            job_id,
            run,
            name: text("name").unwrap(),
            result_json: raw("result").unwrap(),
            total_steps: number("totalSteps"),
        }),
        "complete" => FromWorker::Complete(Complete { job_id, run, result_json: raw("result") }),
        "fail" => FromWorker::Fail(Fail {
            job_id,
            run,
            error: text("error").unwrap(),
            retryable: frame["retryable"].as_bool(),
            retry_after: frame["retryAfterMs"].as_i64().map(duration),
        }),
        "release" => FromWorker::Release(Release { job_id, run }),
        "drain" => FromWorker::Drain(Drain {}),
        "leave" => FromWorker::Leave(Leave {}),
        other => panic!("unknown frame type {other}"),
    };
    ConnectRequest { message: Some(message) }
}

fn frame(message: ConnectResponse) -> Value {
    let error = |error: faena_wire::v1::Error| json!({"code": error.code, "message": error.message});
    match message.message.unwrap() {
        FromServer::Registered(registered) => json!({
            "type": "registered", "workerId": registered.worker_id, "sessionToken": registered.session_token,
            "heartbeatIntervalMs": registered.heartbeat_interval.map(milliseconds),
            "resumed": registered.resumed,
        }),
        FromServer::Job(job) => {
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            let steps: Vec<Value> =
                job.steps.iter().map(|step| json!({"name": step.name, "result": json(&step.result_json)})).collect();
            json!({"type": "job", "job": {
                "id": job.id, "name": job.name, "type": job.r#type, "queue": job.queue,
                "payload": json(&job.payload_json), "run": job.run, "attempt": job.attempt, "retryCount": job.retry_count,
                "maxRetries": job.max_retries, "correlationId": job.correlation_id, "traceparent": job.traceparent,
                "scheduleId": job.schedule_id,
                "scheduleDue": job.schedule_due.map(time), "deadline": job.deadline.map(time), "steps": steps,
            }})
        }
        FromServer::Ack(ack) => json!({
            "type": "ack", "jobId": ack.job_id, "run": ack.run, "of": report_name(ack.of()), "ok": ack.ok,
            "error": ack.error.map(error),
        }),
        FromServer::Cancel(cancel) => {
            json!({"type": "cancel", "jobId": cancel.job_id, "run": cancel.run, "reason": cancel.reason})
        }
        FromServer::Drain(_) => json!({"type": "drain"}),
        FromServer::Resume(_) => json!({"type": "resume"}),
        FromServer::Heartbeat(_) => json!({"type": "heartbeat"}),
        FromServer::Error(cause) => json!({"type": "error", "error": error(cause)}),
    }
}

fn duration(ms: i64) -> prost_types::Duration {
    prost_types::Duration { seconds: ms / 1_000, nanos: i32::try_from(ms % 1_000).unwrap() * 1_000_000 }
}

fn milliseconds(duration: prost_types::Duration) -> i64 {
    duration.seconds * 1_000 + i64::from(duration.nanos) / 1_000_000
}

fn time(at: prost_types::Timestamp) -> String {
    faena_domain::Timestamp::from_ms(at.seconds * 1_000 + i64::from(at.nanos) / 1_000_000).to_string()
}

fn report_name(kind: ReportKind) -> String {
    kind.as_str_name().trim_start_matches("REPORT_KIND_").to_lowercase()
}
