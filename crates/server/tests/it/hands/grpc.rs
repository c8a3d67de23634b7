//! The same frames as messages of `faena.v1`.

use faena_wire::v1::{
    Complete, Drain, Fail, Heartbeat, Leave, LogReport, Progress, ProgressReport, Register, Release, ServerMessage,
    Started, StepReport, WorkerMessage, server_message::Message as Told, worker_message::Message as Says,
    worker_service_client::WorkerServiceClient,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::stream::{Transport, Wire};

pub struct Grpc;

impl Transport for Grpc {
    async fn open(url: &str) -> Wire {
        let channel = Channel::from_shared(url.to_owned()).unwrap().connect().await.unwrap();
        let (say, to_say) = mpsc::unbounded_channel::<Value>();
        let (hear, heard) = mpsc::unbounded_channel();
        let outgoing = futures_util::stream::unfold(to_say, |mut to_say| async move {
            let frame = to_say.recv().await?;
            Some((message(&frame), to_say))
        });
        let mut client = WorkerServiceClient::new(channel);
        let mut incoming = client.connect(outgoing).await.unwrap().into_inner();
        let hush = CancellationToken::new();
        let quiet = hush.clone();
        let task = tokio::spawn(async move {
            let _open = client;
            loop {
                let message = tokio::select! {
                    () = quiet.cancelled() => std::future::pending().await,
                    message = incoming.message() => message,
                };
                match message {
                    Ok(Some(message)) => {
                        let _ = hear.send(frame(message));
                    }
                    Ok(None) => return,
                    Err(status) => {
                        let _ = hear.send(json!({"type": "closed", "reason": status.message()}));
                        return;
                    }
                }
            }
        });
        Wire { say, heard, task: task.abort_handle(), hush }
    }
}

fn message(frame: &Value) -> WorkerMessage {
    let text = |name: &str| frame[name].as_str().map(str::to_owned);
    let list = |name: &str| -> Vec<String> {
        frame[name].as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    let number = |name: &str| frame[name].as_u64().map(|number| u32::try_from(number).unwrap());
    let raw = |name: &str| frame.get(name).map(Value::to_string);
    let (job_id, run) = (text("jobId").unwrap_or_default(), frame["run"].as_i64());
    let says = match frame["type"].as_str().unwrap() {
        "register" => Says::Register(Register {
            worker_id: text("workerId"),
            name: text("name"),
            capabilities: list("capabilities"),
            queues: list("queues"),
            concurrency: number("concurrency"),
            ..Register::default()
        }),
        "heartbeat" => Says::Heartbeat(Heartbeat {}),
        "started" => Says::Started(Started { job_id, run }),
        "progress" => {
            let told = &frame["progress"];
            let text = |name: &str| told[name].as_str().map(str::to_owned);
            let number = |name: &str| told[name].as_u64().map(|number| u32::try_from(number).unwrap());
            let progress = Progress {
                phase: text("phase"),
                current_step: text("currentStep"),
                completed_steps: number("completedSteps"),
                total_steps: number("totalSteps"),
                percentage: told["percentage"].as_f64(),
                message: text("message"),
            };
            Says::Progress(ProgressReport { job_id, run, progress: Some(progress) })
        }
        "log" => Says::Log(LogReport { job_id, run, message: text("message").unwrap() }),
        "step" => Says::Step(StepReport {
            job_id,
            run,
            name: text("name").unwrap(),
            result_json: raw("result").unwrap(),
            total_steps: number("totalSteps"),
        }),
        "complete" => Says::Complete(Complete { job_id, run, result_json: raw("result") }),
        "fail" => Says::Fail(Fail {
            job_id,
            run,
            error: text("error").unwrap(),
            retryable: frame["retryable"].as_bool(),
            retry_after_ms: frame["retryAfterMs"].as_u64(),
        }),
        "release" => Says::Release(Release { job_id, run }),
        "drain" => Says::Drain(Drain {}),
        "leave" => Says::Leave(Leave {}),
        other => panic!("{other} cannot be said"),
    };
    WorkerMessage { message: Some(says) }
}

fn frame(message: ServerMessage) -> Value {
    let error = |error: faena_wire::v1::Error| json!({"code": error.code, "message": error.message});
    match message.message.unwrap() {
        Told::Registered(told) => json!({
            "type": "registered", "workerId": told.worker_id, "heartbeatIntervalMs": told.heartbeat_interval_ms,
            "resumed": told.resumed,
        }),
        Told::Job(job) => {
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            let steps: Vec<Value> =
                job.steps.iter().map(|step| json!({"name": step.name, "result": json(&step.result_json)})).collect();
            json!({"type": "job", "job": {
                "id": job.id, "name": job.name, "type": job.r#type, "queue": job.queue,
                "payload": json(&job.payload_json), "run": job.run, "retryCount": job.retry_count,
                "maxRetries": job.max_retries, "correlationId": job.correlation_id, "traceparent": job.traceparent,
                "scheduleId": job.schedule_id,
                "scheduleDue": job.schedule_due_ms.map(|ms| faena_domain::Timestamp::from_ms(ms).to_string()),
                "deadlineMs": job.deadline_ms, "steps": steps,
            }})
        }
        Told::Ack(ack) => json!({
            "type": "ack", "jobId": ack.job_id, "run": ack.run, "of": ack.of, "ok": ack.ok,
            "error": ack.error.map(error),
        }),
        Told::Cancel(told) => {
            json!({"type": "cancel", "jobId": told.job_id, "run": told.run, "reason": told.reason})
        }
        Told::Drain(_) => json!({"type": "drain"}),
        Told::Resume(_) => json!({"type": "resume"}),
        Told::Heartbeat(_) => json!({"type": "heartbeat"}),
        Told::Error(told) => json!({"type": "error", "error": error(told)}),
    }
}
