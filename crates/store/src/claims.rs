//! Claims: workers receive jobs under a run number, and report on them.

use async_trait::async_trait;
use faena_domain::{ErrorReason, JobId, JobOptions, JobState, NodeId, Progress, Run, Timestamp, WorkerId};

use crate::{LaneId, Result, jobs::state_code, sql::CANCELLED};

/// Claims: workers receive jobs, and report on them.
#[async_trait]
pub trait ClaimStore: Send + Sync + 'static {
    /// Claims up to `limit` ready jobs for each request in turn.
    ///
    /// Jobs of one queue come in the order of their score, queues take turns. No job is claimed twice. Jobs with the same run number form
    /// one claim with one owner (PostgreSQL: one claim per lane); the report of its last job closes it. A request of a worker that has ended,
    /// or that has reconnected since the session of the request, is refused. Lanes that one request has emptied are not read again for the
    /// next requests.
    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>>;

    /// Records what running jobs report: their start, progress, a log line, a finished step.
    ///
    /// Returns for each note whether its run still owns the job; a note of any other run changes nothing.
    async fn job_note(&self, notes: Vec<RunNote>, now: Timestamp) -> Result<Vec<bool>>;

    /// Ends runs: state and log in one transaction, then the jobs that depend on it.
    ///
    /// Returns for each end whether its run still owned the job; an end of any other run changes nothing. The same end (with the same time)
    /// may be reported again and counts once.
    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>>;
}

#[derive(Clone, Debug)]
pub struct ClaimRequest {
    pub owner: Owner,
    pub lanes: Vec<LaneId>,
    pub limit: usize,
    /// How many jobs can start immediately. Jobs claimed ahead of that leave room under a limit for other workers.
    pub at_once: usize,
}

/// Owner of a claim; its heartbeat keeps the claim alive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// The worker inside this server process. Alive while the lease of the process lasts.
    Node(NodeId),
    /// A worker that survives the server it is connected to. Once it has reconnected, a request with the old `session` is
    /// refused.
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

#[derive(Clone, Debug, Default)]
pub struct ClaimResult {
    /// In the order in which they run.
    pub jobs: Vec<ClaimedJob>,
    /// The request was refused: the worker has ended or reconnected.
    pub refused: bool,
    /// Lanes in which a limit or a pause delays jobs.
    pub limited: Vec<Limited>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limited {
    pub lane: LaneId,
    /// When a rate allows the next start. `None`: when a job ends or a setting changes.
    pub until: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct ClaimedJob {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub ready_at: Timestamp,
    pub retry_count: u32,
    /// A process died with this job, and it is unknown whether the job had started. Its start must be recorded before it
    /// runs, so that a job that kills its worker uses up its attempts.
    pub start_first: bool,
    /// Since when it had to wait, and for which limit.
    pub limited: Option<(Timestamp, String)>,
    pub correlation_id: Option<String>,
    pub options: JobOptions,
    pub payload: String,
}

#[derive(Clone, Debug)]
pub struct RunNote {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub node: NodeId,
    pub worker: WorkerId,
    pub retry_count: u32,
    pub ready_at: Timestamp,
    pub started_at: Timestamp,
    pub at: Timestamp,
    pub kind: NoteKind,
}

#[derive(Clone, Debug)]
pub enum NoteKind {
    Started,
    Progress(Progress),
    Message(String),
    /// `total`: the number of steps, if the worker reports it.
    Step {
        name: String,
        result: String,
        total: Option<u32>,
    },
    /// A report that came too late or from the wrong worker. Recorded in the log of the job, regardless of its owner.
    Stale(String),
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
    /// Whether rows may exist that the fast path does not know: its start, a cancel request, a unique key, an expiry.
    pub on_record: bool,
    /// Whether all other jobs of the claim have ended, so that the claim can be deleted.
    pub closes_claim: bool,
}

impl RunEnd {
    /// Returns whether this end is stored as `state` at `at_ms`.
    ///
    /// Tells a repeated report from one that another report has overtaken. An end that would requeue the job may be
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
    /// Back to the queue without using an attempt.
    HandedBack,
}

impl RunOutcome {
    pub fn state(&self) -> JobState {
        match self {
            RunOutcome::Completed { .. } => JobState::Completed,
            RunOutcome::Retry { .. } => JobState::Retrying,
            RunOutcome::Failed { .. } => JobState::Failed,
            RunOutcome::Cancelled { .. } => JobState::Cancelled,
            RunOutcome::HandedBack => JobState::Queued,
        }
    }
}
