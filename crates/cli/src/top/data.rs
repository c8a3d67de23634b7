//! Reads the data that `faena top` shows, and performs its actions.

use std::{sync::Arc, time::Duration};

use faena::{ErrorCode, Job, LogEntry};
use faena_domain::WorkerView;
use faena_wire::{QueueList, QueueView, WorkerList, metrics::MetricsOverview};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use crate::{
    Api, CommandError,
    api::segment,
    jobs::{JobList, cancelled_text, path, retried_text},
    watch::KnownFields,
};

const QUEUES: &str = "/api/v1/queues";
const WORKERS: &str = "/api/v1/workers";
const JOBS: &str = "/api/v1/jobs";
const METRICS: &str = "/api/v1/metrics/overview";
/// States of jobs that a worker has.
const RUNNING: &str = "SCHEDULED,ASSIGNED,PROCESSING";
/// Maximum number of rows of a list.
const ROWS: u32 = 100;
/// Delay before a job is followed again after it has finished or its stream has ended.
const FOLLOW_AGAIN: Duration = Duration::from_secs(2);
/// Maximum number of log entries that are kept of the open job.
const LOG_ENTRIES: usize = 1_000;

/// Which jobs are listed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scope {
    Running,
    Queue(String),
    Worker(String),
    Dead,
}

impl Scope {
    /// Returns the title of the list.
    pub fn title(&self) -> String {
        match self {
            Scope::Running => "running jobs".to_owned(),
            Scope::Queue(name) => format!("jobs of queue {name}, newest first"),
            Scope::Worker(id) => format!("jobs of worker {id}, newest first"),
            Scope::Dead => "dead letters, newest first".to_owned(),
        }
    }

    fn query(&self) -> (&'static str, &str) {
        match self {
            Scope::Running => ("status", RUNNING),
            Scope::Queue(name) => ("queue", name),
            Scope::Worker(id) => ("workerId", id),
            Scope::Dead => ("status", "FAILED"),
        }
    }
}

/// Everything that one refresh reads from the server.
pub struct Snapshot {
    pub metrics: MetricsOverview,
    pub queues: Vec<QueueView>,
    /// `None` if the API key may not see workers.
    pub workers: Option<Vec<WorkerView>>,
    pub scope: Scope,
    pub jobs: JobList,
}

impl Snapshot {
    pub async fn read(api: &Api, scope: &Scope) -> Result<Snapshot, CommandError> {
        let (name, value) = scope.query();
        let queues = api.get(QUEUES).query("limit", 1_000);
        let workers =
            api.get(WORKERS).query("limit", ROWS).query("state", "Connecting,Ready,Busy,Draining,Terminating");
        let jobs = api.get(JOBS).query(name, value).query("limit", ROWS);
        let (metrics, queues, workers, jobs) = tokio::join!(
            api.get(METRICS).send(),
            queues.send::<QueueList>(),
            workers.send::<WorkerList>(),
            jobs.send()
        );
        let workers = match workers {
            Ok(list) => Some(list.workers),
            Err(faena::Error::Response { code: ErrorCode::Forbidden, .. }) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Snapshot { metrics: metrics?, queues: queues?.queues, workers, scope: scope.clone(), jobs: jobs? })
    }

    /// Returns how many runs end per minute, or `None` while the server does not know.
    pub fn finished_per_minute(&self) -> Option<f64> {
        let rates: Vec<f64> = self.queues.iter().filter_map(|queue| queue.rate_per_minute).collect();
        (!rates.is_empty() || self.queues.is_empty()).then(|| rates.iter().sum())
    }
}

/// Returns what one refresh reads, as JSON. The responses of the server are not parsed: large numbers would lose digits.
pub async fn read_json(api: &Api) -> Result<String, CommandError> {
    let running = api.get(JOBS).query("status", RUNNING).query("limit", ROWS);
    let (metrics, queues, workers, jobs) = tokio::join!(
        api.get(METRICS).text(),
        api.get(QUEUES).query("limit", 1_000).text(),
        api.get(WORKERS).query("limit", ROWS).text(),
        running.text()
    );
    let workers = match workers {
        Err(faena::Error::Response { code: ErrorCode::Forbidden, .. }) => "null".to_owned(),
        workers => workers?,
    };
    Ok(format!(r#"{{"metrics":{},"queues":{},"workers":{workers},"running":{}}}"#, metrics?, queues?, jobs?))
}

/// A message to the screen.
pub enum Message {
    Read(Box<Snapshot>),
    /// The server does not answer, or rejects the request.
    Failed(String),
    /// The open job has changed.
    Job(Box<Job>),
    /// The open job cannot be read.
    JobFailed {
        id: String,
        reason: String,
    },
    /// An action has ended, with the text to show.
    Acted(Result<String, String>),
}

/// Reads the server every `refresh`, and immediately when the scope changes.
pub async fn poll(
    api: Arc<Api>,
    mut scope: watch::Receiver<Scope>,
    refresh: Duration,
    messages: mpsc::Sender<Message>,
) {
    let mut wait = refresh;
    loop {
        tokio::select! {
            () = sleep(wait) => {}
            changed = scope.changed() => if changed.is_err() { return },
        }
        let wanted = scope.borrow_and_update().clone();
        let message = match Snapshot::read(&api, &wanted).await {
            Ok(snapshot) => {
                wait = refresh;
                Message::Read(Box::new(snapshot))
            }
            Err(error) => {
                wait = refresh.max(error.retry_after().unwrap_or_default());
                Message::Failed(error.to_string())
            }
        };
        if messages.send(message).await.is_err() {
            return;
        }
    }
}

/// Follows a job, also across restarts of the server.
pub async fn follow(api: Arc<Api>, id: String, messages: mpsc::Sender<Message>) {
    loop {
        if let Err(error) = follow_once(&api, &id, &messages).await {
            let message = Message::JobFailed { id: id.clone(), reason: error.to_string() };
            if messages.send(message).await.is_err() {
                return;
            }
        }
        // A job that has finished can be retried.
        sleep(FOLLOW_AGAIN).await;
    }
}

async fn follow_once(api: &Api, id: &str, messages: &mpsc::Sender<Message>) -> Result<(), CommandError> {
    let mut stream = api.get(&path(id, "/events")).stream().await?;
    let mut known = KnownFields::default();
    let mut log: Vec<LogEntry> = Vec::new();
    while let Some(event) = stream.next().await {
        if event.data.is_empty() {
            continue;
        }
        let mut job = known
            .apply(&event.data)
            .map_err(|error| CommandError::Other(format!("cannot read an event of the job: {error}")))?;
        // Later events have only the new entries.
        log.append(&mut job.execution_log);
        log.drain(..log.len().saturating_sub(LOG_ENTRIES));
        job.execution_log = log.clone();
        if messages.send(Message::Job(Box::new(job))).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// A change that a key press starts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    Pause(String),
    Resume(String),
    Drain(String),
    CancelDrain(String),
    Cancel(String),
    Retry(String),
}

impl Action {
    /// Returns the question to answer before the action, if it cannot be undone.
    pub fn question(&self) -> Option<String> {
        match self {
            Action::Cancel(id) => Some(format!("cancel job {id}?")),
            _ => None,
        }
    }

    /// Performs the action, and returns the text to show.
    pub async fn run(&self, api: &Api) -> Result<String, String> {
        self.send(api).await.map_err(|error| error.to_string())
    }

    async fn send(&self, api: &Api) -> Result<String, CommandError> {
        Ok(match self {
            Action::Pause(name) => {
                let body = json!({ "reason": "paused in faena top" });
                api.post(&format!("{QUEUES}/{}/pause", segment(name))).json(&body).send::<Value>().await?;
                format!("queue {name} is paused")
            }
            Action::Resume(name) => {
                api.post(&format!("{QUEUES}/{}/resume", segment(name))).json(&json!({})).send::<Value>().await?;
                format!("queue {name} was resumed")
            }
            Action::Drain(id) => {
                api.post(&format!("{WORKERS}/{}/drain", segment(id))).send::<Value>().await?;
                format!("{id} drains: it receives no more jobs")
            }
            Action::CancelDrain(id) => {
                api.delete(&format!("{WORKERS}/{}/drain", segment(id))).send::<Value>().await?;
                format!("{id} was resumed: it receives jobs again")
            }
            Action::Cancel(id) => cancelled_text(&api.post(&path(id, "/cancel")).send().await?),
            Action::Retry(id) => retried_text(&api.post(&path(id, "/retry")).send().await?),
        })
    }
}
