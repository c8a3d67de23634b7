//! Workers in the hands of a test: one for each door, and the SDK. A story says step by step what they do.

mod grpc;
mod http;
mod sdk;
mod stream;
mod websocket;

use std::time::Duration;

use serde_json::Value;

pub use {grpc::Grpc, http::Http, sdk::Sdk, stream::Frames, websocket::WebSocket};

use crate::faena::{Faena, PATIENCE};

/// How a worker introduces itself.
#[derive(Clone)]
pub struct Who {
    pub id: String,
    pub capabilities: Vec<String>,
    pub queues: Vec<&'static str>,
    pub concurrency: u32,
}

pub fn who(id: &str, capabilities: &[&str]) -> Who {
    let capabilities = capabilities.iter().map(|&name| name.to_owned()).collect();
    Who { id: id.to_owned(), capabilities, queues: Vec::new(), concurrency: 2 }
}

/// A job as a worker got it.
#[derive(Clone, Debug)]
pub struct Job {
    pub id: String,
    pub run: i64,
    pub kind: String,
    pub queue: String,
    pub payload: Value,
    pub retry_count: u64,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    /// The schedule that made it, and for which due time.
    pub schedule: Option<(String, String)>,
    /// What earlier runs have finished. The SDK does not show them: it uses them.
    pub steps: Vec<(String, Value)>,
}

impl Job {
    pub fn of_frame(job: &Value) -> Job {
        let text = |name: &str| job[name].as_str().unwrap().to_owned();
        Job {
            id: text("id"),
            run: job["run"].as_i64().unwrap(),
            kind: text("type"),
            queue: text("queue"),
            payload: job["payload"].clone(),
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

/// A report counts, or the code of its refusal.
pub type Answer = Result<(), String>;

#[derive(Clone, Default)]
pub struct Failure {
    pub error: &'static str,
    pub retryable: Option<bool>,
    pub retry_after_ms: Option<u64>,
}

pub fn failure(error: &'static str) -> Failure {
    Failure { error, ..Failure::default() }
}

/// How a worker is away for a while, with its jobs in its hands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Away {
    /// Its connection is closed.
    Closed,
    /// Its connection is open, and nothing comes.
    Silent,
}

/// A worker.
pub trait Hand: Sized + Send {
    /// Whether it hears what became of its reports. The SDK keeps that to itself.
    const HEARS_ANSWERS: bool = true;
    /// Whether the server knows at once that it is gone.
    const HAS_A_CONNECTION: bool = true;

    async fn connect(faena: &Faena, who: Who) -> Self;
    fn id(&self) -> &str;
    /// The next job it is handed.
    async fn next_job(&mut self) -> Job;
    async fn started(&mut self, job: &Job) -> Answer;
    async fn progress(&mut self, job: &Job, progress: Value) -> Answer;
    async fn log(&mut self, job: &Job, message: &str) -> Answer;
    /// Does a step: the result, or that of an earlier run if there is one.
    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String>;
    async fn complete(&mut self, job: &Job, result: Value) -> Answer;
    async fn fail(&mut self, job: &Job, failure: Failure) -> Answer;
    /// The same end twice, because the answer to the first did not arrive.
    async fn complete_twice(&mut self, job: &Job, result: Value) -> [Answer; 2] {
        [self.complete(job, result.clone()).await, self.complete(job, result).await]
    }
    /// The next job that it is told to stop, and its run.
    async fn next_cancel(&mut self) -> (String, i64);
    async fn away(&mut self, how: Away);
    /// It connects again under the same name. `Some(true)`: it was told that it has its jobs still.
    async fn back(&mut self) -> Option<bool>;
    /// It dies: no goodbye, no return.
    async fn cut(self);
    async fn leave(self);
}

/// Gives up after a while, and says what it waited for.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {PATIENCE:?} in vain: {what}"),
    }
}

/// A client beats this often.
fn beat(interval_ms: u64) -> Duration {
    Duration::from_millis(interval_ms.max(3) / 3)
}
