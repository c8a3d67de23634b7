//! Workers that a test controls step by step: one for each transport, and the SDK.

mod grpc;
mod http;
mod sdk;
mod stream;
mod websocket;

use std::time::Duration;

use serde_json::{Value, json};

pub use {
    grpc::Grpc,
    http::HttpWorker,
    sdk::SdkWorker,
    stream::{StreamWorker, Transport},
    websocket::WebSocket,
};

use crate::faena::{Faena, TIMEOUT};

/// Registration of a worker.
#[derive(Clone)]
pub struct WorkerOptions {
    pub id: String,
    pub capabilities: Vec<String>,
    pub queues: Vec<&'static str>,
    pub concurrency: u32,
    /// Version of its program.
    pub version: Option<&'static str>,
    /// Token of a registration to resume.
    pub session_token: Option<String>,
}

impl WorkerOptions {
    pub fn new(id: &str, capabilities: &[&str]) -> WorkerOptions {
        let capabilities = capabilities.iter().map(|&name| name.to_owned()).collect();
        let (id, queues) = (id.to_owned(), Vec::new());
        WorkerOptions { id, capabilities, queues, concurrency: 2, version: None, session_token: None }
    }

    fn registration(self) -> Value {
        let mut body = json!({"workerId": self.id, "capabilities": self.capabilities, "concurrency": self.concurrency});
        if let Some(token) = self.session_token {
            body["sessionToken"] = token.into();
        }
        if let Some(version) = self.version {
            body["version"] = version.into();
        }
        if !self.queues.is_empty() {
            body["queues"] = self.queues.into();
        }
        body
    }
}

/// A job as a worker receives it.
#[derive(Clone, Debug)]
pub struct Job {
    pub id: String,
    pub run: i64,
    pub kind: String,
    pub queue: String,
    pub payload: Value,
    pub attempt: u64,
    pub retry_count: u64,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    /// The schedule that created the job, and the due time.
    pub schedule: Option<(String, String)>,
    /// Steps that earlier runs completed. Empty for the SDK, which uses them without showing them.
    pub steps: Vec<(String, Value)>,
}

impl Job {
    pub fn from_frame(job: &Value) -> Job {
        let text = |name: &str| job[name].as_str().unwrap().to_owned();
        Job {
            id: text("id"),
            run: job["run"].as_i64().unwrap(),
            kind: text("type"),
            queue: text("queue"),
            payload: job["payload"].clone(),
            attempt: job["attempt"].as_u64().unwrap(),
            retry_count: job["retryCount"].as_u64().unwrap(),
            correlation_id: text("correlationId"),
            traceparent: job["traceparent"].as_str().map(str::to_owned),
            schedule: job["scheduleId"].as_str().map(|id| (id.to_owned(), text("scheduleDue"))),
            steps: job["steps"]
                .as_array()
                .unwrap()
                .iter()
                .map(|step| (step["name"].as_str().unwrap().to_owned(), step["result"].clone()))
                .collect(),
        }
    }
}

/// `Ok` if the server accepted a report, otherwise the error code.
pub type ReportResult = Result<(), String>;

#[derive(Clone, Default)]
pub struct Failure {
    pub error: &'static str,
    pub retryable: Option<bool>,
    pub retry_after_ms: Option<u64>,
}

pub fn failure(error: &'static str) -> Failure {
    Failure { error, ..Failure::default() }
}

/// How a worker becomes unreachable for a while without giving up its jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Interruption {
    /// The connection is closed.
    Closed,
    /// The connection stays open but transfers nothing.
    Silent,
}

/// A worker that a test controls.
pub trait TestWorker: Sized + Send {
    /// Whether reports return the server's answer. The SDK handles answers internally.
    const RETURNS_ANSWERS: bool = true;
    /// Whether the server notices immediately that the worker has disconnected.
    const HAS_CONNECTION: bool = true;

    async fn connect(faena: &Faena, options: WorkerOptions) -> Self;
    fn id(&self) -> &str;
    /// Returns what another connection needs to resume this worker's registration. The SDK keeps it to itself.
    fn session_token(&self) -> Option<String> {
        None
    }
    /// Waits for the next job.
    async fn next_job(&mut self) -> Job;
    /// Sends a report with the fields of `body`.
    async fn report(&mut self, job: &Job, report: &str, body: Value) -> ReportResult;
    async fn started(&mut self, job: &Job) -> ReportResult {
        self.report(job, "started", json!({})).await
    }
    async fn progress(&mut self, job: &Job, progress: Value) -> ReportResult {
        self.report(job, "progress", json!({ "progress": progress })).await
    }
    async fn log(&mut self, job: &Job, message: &str) -> ReportResult {
        self.report(job, "log", json!({ "message": message })).await
    }
    /// Writes a log entry with an event name of its own.
    async fn log_event(&mut self, job: &Job, event: &str, message: &str) -> ReportResult {
        self.report(job, "log", json!({ "event": event, "message": message })).await
    }
    /// Reports a step. Returns the result of an earlier run if there is one, otherwise `result`.
    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String> {
        if let Some((_, stored)) = job.steps.iter().find(|(known, _)| known == name) {
            return Ok(stored.clone());
        }
        let mut body = json!({"name": name, "result": result});
        if let Some(total) = total {
            body["totalSteps"] = total.into();
        }
        self.report(job, "step", body).await.map(|()| result)
    }
    async fn complete(&mut self, job: &Job, result: Value) -> ReportResult {
        self.report(job, "complete", json!({ "result": result })).await
    }
    async fn fail(&mut self, job: &Job, failure: Failure) -> ReportResult {
        let mut body = json!({"error": failure.error});
        if let Some(retryable) = failure.retryable {
            body["retryable"] = retryable.into();
        }
        if let Some(ms) = failure.retry_after_ms {
            body["retryAfterMs"] = ms.into();
        }
        self.report(job, "fail", body).await
    }
    /// Reports the same result twice, as if the answer to the first report had been lost.
    async fn complete_twice(&mut self, job: &Job, result: Value) -> [ReportResult; 2] {
        [self.complete(job, result.clone()).await, self.complete(job, result).await]
    }
    /// Waits for the next cancel. Returns the job and its run.
    async fn next_cancel(&mut self) -> (String, i64);
    async fn interrupt(&mut self, how: Interruption);
    /// Connects again under the same name. Returns whether the server resumed the registration, if the worker can see that.
    async fn reconnect(&mut self) -> Option<bool>;
    /// Disappears without a `leave`.
    async fn crash(self);
    /// Sends `leave` and disconnects.
    async fn leave(self);
}

/// Waits for a future. Panics with `what` after [`TIMEOUT`].
pub async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("not within {TIMEOUT:?}: {what}"),
    }
}

/// Returns how often a worker sends heartbeats: three times per interval of the server.
fn heartbeat_period(interval_ms: u64) -> Duration {
    Duration::from_millis(interval_ms.max(3) / 3)
}
