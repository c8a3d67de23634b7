//! The store as a whole: the sum of its parts, its signals and options, and how to open it.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use faena_domain::{JobId, Timestamp, WorkerId};
use tokio::sync::broadcast;

use crate::{
    ApiKeyStore, AuditStore, BulkStore, ClaimStore, DeadLetterStore, EventStore, HistoryStore, JobCountStore, JobStore,
    LaneId, LaneStore, NodeStore, OutboxStore, QueueStore, Result, RuleStore, ScheduleStore, StoreError, TaskStore,
    UsageStore, WebhookStore, WorkerStore,
    job_log::StoredJobLimits,
    lanes::MAX_LANES,
    migrate::{MIGRATIONS, Migration},
    postgres, sqlite,
};

/// The whole store: one trait per kind of object.
///
/// As a rule, one method call is one transaction; concurrent calls of busy methods share a transaction. A method
/// returns after its commit.
#[async_trait]
pub trait Store:
    JobStore
    + JobCountStore
    + LaneStore
    + ClaimStore
    + QueueStore
    + DeadLetterStore
    + BulkStore
    + NodeStore
    + WorkerStore
    + RuleStore
    + AuditStore
    + ApiKeyStore
    + WebhookStore
    + ScheduleStore
    + TaskStore
    + EventStore
    + OutboxStore
    + HistoryStore
    + UsageStore
{
    /// Checks that the database answers.
    async fn ping(&self) -> Result<()>;

    /// Subscribes to signals.
    ///
    /// A signal follows every commit, on this node or another, after which a loop has something to do, for example because a lane has
    /// ready jobs. A lost signal costs one poll, never a job.
    fn signals(&self) -> broadcast::Receiver<Signal>;

    /// Returns the kind of the database, `sqlite` or `postgres`.
    fn database_kind(&self) -> &'static str;

    /// Returns whether other nodes can use the same database at the same time.
    ///
    /// If not, no other process changes anything: leases need not be compared, and polls are rare.
    fn is_shared(&self) -> bool;

    /// Returns why signals of other nodes do not arrive, or `None` if they do. Without them, only polls find what other nodes did.
    fn signal_problem(&self) -> Option<String>;

    /// Waits until the disk rejects a write or does not confirm it, and returns the error. With PostgreSQL, waits forever.
    ///
    /// From then on every write is rejected, because what was written before may be lost too. The process must end; the next one
    /// checks the database before it uses it.
    async fn storage_failure(&self) -> String;

    /// Finishes what is under way and closes the database.
    async fn close(&self);
}

#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// `false`: an old schema is an error.
    pub migrate: bool,
    /// Time limit for one call, from the moment it is made: waiting for a connection or for its turn counts too.
    pub timeout_ms: u64,
    /// PostgreSQL: URL of the session that listens, if the URL of the database leads to a transaction-mode pooler.
    pub listen_url: Option<String>,
    /// Limits on what is stored about one job.
    pub job_limits: StoredJobLimits,
    /// Maximum number of lanes of the database. Only tests change it.
    #[doc(hidden)]
    pub max_lanes: usize,
    /// The migrations to apply. Only tests of the migrations change it.
    #[doc(hidden)]
    pub migrations: &'static [Migration],
}

impl StoreOptions {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions {
            migrate: true,
            timeout_ms: 10_000,
            listen_url: None,
            job_limits: StoredJobLimits::default(),
            max_lanes: MAX_LANES,
            migrations: MIGRATIONS,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Signal {
    /// A lane has ready jobs.
    Ready(LaneId),
    /// The cancellation of a job was requested, wherever it runs.
    Cancel(JobId),
    /// A job waits until a time that may be earlier than the next due time that the promoter knows.
    Waiting,
    /// Something is requested of a worker, it has reconnected to another node, or it was declared lost.
    Worker(WorkerId),
    /// A job that counts for a limit has ended.
    Capacity,
    /// Settings of queues or limits have changed.
    Rules,
    /// An API key was created or changed.
    ApiKeys,
    /// A webhook is due.
    Webhook,
    /// A schedule is due, or its due time has changed.
    Schedule,
    /// A task has a timer that is due at this time, and had none before it.
    TaskDue(Timestamp),
    /// A job that a task waits for has ended.
    TaskJobEnded,
    /// A task was queued, or a task of a machine with a limit has ended.
    TaskQueue,
    /// An event was recorded.
    Event,
    /// Signals of other nodes may have been lost, so every loop checks.
    Missed,
}

impl Signal {
    /// Adds the signal to those that wait to be sent, unless it is already among them. Keeps only the earliest due
    /// time. Returns whether `signals` changed.
    pub(crate) fn add_to(self, signals: &mut Vec<Signal>) -> bool {
        let Signal::TaskDue(at) = self else {
            let is_new = !signals.contains(&self);
            if is_new {
                signals.push(self);
            }
            return is_new;
        };
        let known = signals.iter_mut().find_map(|signal| match signal {
            Signal::TaskDue(known) => Some(known),
            _ => None,
        });
        match known {
            Some(known) if *known <= at => return false,
            Some(known) => *known = at,
            None => signals.push(self),
        }
        true
    }
}

/// Opens the database at `url`, and migrates it if `options` allow.
pub async fn open(url: &str, options: StoreOptions) -> Result<Arc<dyn Store>> {
    if let Some(path) = url.strip_prefix("sqlite:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() || path.starts_with(":memory:") || path.starts_with("file:") {
            return Err(StoreError::Setup(
                "the database URL does not name a file, and jobs must survive a crash; use sqlite:faena-data/faena.db"
                    .into(),
            ));
        }
        Ok(Arc::new(sqlite::Sqlite::open(path, options).await?))
    } else if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        Ok(Arc::new(postgres::Postgres::open(url, options).await?))
    } else {
        Err(StoreError::Setup(
            "the database URL is not valid; use sqlite:faena-data/faena.db or postgres://user:password@host/database"
                .into(),
        ))
    }
}
