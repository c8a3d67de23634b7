//! Claims: owners receive jobs under a run number, update their runs and end them.

use async_trait::async_trait;
use faena_domain::{ErrorReason, JobId, JobOptions, JobState, LogEvent, NodeId, Progress, Run, Timestamp, WorkerId};

use crate::{LaneId, Result, jobs::state_code, sql::CANCELLED};

/// Claims jobs, and updates and ends their runs.
#[async_trait]
pub trait ClaimStore: Send + Sync + 'static {
    /// Claims up to `limit` ready jobs for each request, one request after the other.
    ///
    /// Jobs of one queue are claimed in the order of their score, queues round robin. No job is claimed twice. Jobs with the
    /// same run number form one claim with one owner (PostgreSQL: one claim per lane); the end of its last job deletes it.
    ///
    /// Rejects a request of a worker that has ended, or that has reconnected with a newer session. Lanes that one request has
    /// emptied are not read again for the next requests.
    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>>;

    /// Records reports about running jobs: their start, progress, a log line, a finished step.
    ///
    /// Returns for each update whether it was stored; an update of a run that does not own the job changes nothing.
    async fn run_update(&self, updates: Vec<RunUpdate>, now: Timestamp) -> Result<Vec<UpdateResult>>;

    /// Ends runs: writes state and log in one transaction, then releases the dependents of the jobs.
    ///
    /// Returns for each end whether its run still owned the job; an end of any other run changes nothing. An end that is
    /// reported again, with the same time, counts once.
    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>>;
}

/// Request of one owner for ready jobs.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    pub owner: Owner,
    pub lanes: Vec<LaneId>,
    pub limit: usize,
    /// How many jobs can start immediately. The request prefetches the others; under a limit it may prefetch only some, so
    /// that other workers also get jobs.
    pub idle_slots: usize,
    /// The jobs of lanes without concurrency keys that may be claimed, in this order. `None`: the first of each lane.
    /// The store always chooses the jobs of lanes with keys, because only the store knows what is in flight for each
    /// key.
    pub candidates: Option<Vec<ClaimCandidate>>,
}

/// A job that the external queue has chosen. It is claimed only if it became ready in this lane at this time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClaimCandidate {
    pub lane: LaneId,
    pub ready_at: Timestamp,
    pub id: JobId,
}

/// Owner of a claim; its heartbeat keeps the claim alive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// The built-in worker of a server process. Alive while the lease of the process lasts.
    Node(NodeId),
    /// A connected worker, which survives the server it is connected to. Once it has reconnected, requests with an older
    /// `session` are rejected.
    Worker { id: WorkerId, session: i64 },
}

impl Owner {
    pub fn uuid(self) -> uuid::Uuid {
        match self {
            Owner::Node(id) => id.0,
            Owner::Worker { id, .. } => id.0,
        }
    }
}

/// Answer to a [`ClaimRequest`].
#[derive(Clone, Debug, Default)]
pub struct ClaimResult {
    /// In the order in which they run.
    pub jobs: Vec<ClaimedJob>,
    /// The request was rejected: the worker has ended or reconnected, or the database was not available (PostgreSQL).
    pub rejected: bool,
    /// Lanes in which a limit or a pause delays jobs.
    pub limited: Vec<Limited>,
}

/// A lane in which a limit or a pause delays jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limited {
    pub lane: LaneId,
    /// When to claim again. `None`: after a job ends or a setting changes.
    pub until: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct ClaimedJob {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub ready_at: Timestamp,
    pub retry_count: u32,
    /// Whether its start must be recorded before it runs. True after a server died with this job in flight and it is unknown
    /// whether the job had started, so that a job that kills its server uses up its attempts.
    pub must_record_start: bool,
    /// When it began to wait for a limit, and a description of that limit.
    pub limited: Option<(Timestamp, String)>,
    pub correlation_id: Option<String>,
    pub options: JobOptions,
    pub payload: String,
}

impl ClaimedJob {
    /// Returns which attempt of the job this run is: 1 for the first.
    pub fn attempt(&self) -> u32 {
        self.options.earlier_attempts + self.retry_count + 1
    }
}

#[derive(Clone, Debug)]
pub struct RunUpdate {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub node: NodeId,
    pub worker: WorkerId,
    pub retry_count: u32,
    pub ready_at: Timestamp,
    pub started_at: Timestamp,
    pub at: Timestamp,
    pub kind: RunUpdateKind,
}

impl RunUpdate {
    /// Creates the log entry for a report that came too late or from the wrong worker.
    pub fn stale(id: JobId, run: Run, text: String, at: Timestamp) -> RunUpdate {
        RunUpdate {
            id,
            run,
            lane: 0,
            node: NodeId(uuid::Uuid::nil()),
            worker: WorkerId(uuid::Uuid::nil()),
            retry_count: 0,
            ready_at: at,
            started_at: at,
            at,
            kind: RunUpdateKind::Stale(text),
        }
    }
}

#[derive(Clone, Debug)]
pub enum RunUpdateKind {
    Started,
    Progress(Progress),
    /// A line for the log, with the event name `message` or a name that the worker chose.
    Message {
        event: LogEvent,
        text: String,
    },
    /// `total`: the number of steps, if the worker reports it.
    Step {
        name: String,
        result: String,
        total: Option<u32>,
    },
    /// A report that was rejected because it came too late or from the wrong worker. Added to the log of the job even though
    /// its run does not own the job.
    Stale(String),
}

/// Result of an update.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UpdateResult {
    Accepted,
    /// Its run does not own the job.
    Stale,
    /// The job has reached a limit; the text says which, and what to do.
    Rejected(String),
}

impl UpdateResult {
    pub fn is_accepted(&self) -> bool {
        *self == UpdateResult::Accepted
    }

    pub(crate) fn of(owned: bool) -> UpdateResult {
        if owned { UpdateResult::Accepted } else { UpdateResult::Stale }
    }
}

/// End of one run.
#[derive(Clone, Debug)]
pub struct RunEnd {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub retry_count: u32,
    pub ready_at: Timestamp,
    pub worker: WorkerId,
    pub started_at: Option<Timestamp>,
    pub at: Timestamp,
    /// The log of this run, from `queued` to its end.
    pub log: String,
    pub outcome: RunOutcome,
    /// Whether rows may exist that the fast path does not delete: its start, a cancel request, a unique key, an expiry.
    pub may_have_other_rows: bool,
    /// Whether all other jobs of the claim have ended, so that the claim can be deleted.
    pub closes_claim: bool,
    /// Whether the guardian ended the run, not the worker.
    pub by_guardian: bool,
    /// Not stored; measured once the end is stored.
    pub timing: RunTiming,
}

/// When a run changed its state, for the metrics.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RunTiming {
    pub claimed_at: Option<Timestamp>,
    /// A process was started for it, so it was `SCHEDULED` first.
    pub was_scheduled: bool,
    /// When that process received it.
    pub assigned_at: Option<Timestamp>,
    /// Trace or correlation id from the caller, if any.
    pub trace: Option<RunTrace>,
}

/// Id that identifies a run in other systems.
#[derive(Clone, PartialEq, Debug)]
pub enum RunTrace {
    Trace(String),
    Correlation(String),
}

impl RunEnd {
    /// Returns whether this end is stored as `state` at `at_ms`.
    ///
    /// Distinguishes a repeated report from one that lost to another report. An end that would requeue the job may have been
    /// stored as cancelled.
    pub(crate) fn is_stored_as(&self, state: i16, at_ms: i64) -> bool {
        self.at.as_ms() == at_ms && (state == state_code(self.outcome.state()) || state == CANCELLED)
    }
}

#[derive(Clone, PartialEq, Debug)]
pub enum RunOutcome {
    Completed {
        result: Option<String>,
    },
    Retry {
        due_at: Timestamp,
        error: String,
        reason: ErrorReason,
    },
    Failed {
        error: String,
        reason: ErrorReason,
    },
    Cancelled {
        cause: String,
    },
    /// The job returns to its queue without using an attempt.
    Released,
}

impl RunOutcome {
    /// Returns why the run failed, if it did.
    pub fn error_reason(&self) -> Option<ErrorReason> {
        match self {
            RunOutcome::Retry { reason, .. } | RunOutcome::Failed { reason, .. } => Some(*reason),
            _ => None,
        }
    }

    pub fn state(&self) -> JobState {
        match self {
            RunOutcome::Completed { .. } => JobState::Completed,
            RunOutcome::Retry { .. } => JobState::Retrying,
            RunOutcome::Failed { .. } => JobState::Failed,
            RunOutcome::Cancelled { .. } => JobState::Cancelled,
            RunOutcome::Released => JobState::Queued,
        }
    }
}
