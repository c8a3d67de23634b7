//! What goes into the verbs and comes out of them.

use std::collections::BTreeMap;

use faena_domain::{
    Bucket, BulkId, ErrorReason, Fairness, JobId, JobOptions, JobState, JobView, Limit, NodeId, Pause, Priority,
    Progress, QueueRule, Rate, Run, Scope, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind,
    WorkerState,
};

use serde::{Deserialize, Serialize};

use crate::{
    LaneId,
    migrate::{MIGRATIONS, Migration},
};

#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// `false`: refuse to start on an old schema.
    pub migrate: bool,
    /// How long one statement may take.
    pub statement_timeout_ms: u64,
    /// The migrations to apply. Only tests of the migrations change it.
    #[doc(hidden)]
    pub migrations: &'static [Migration],
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions { migrate: true, statement_timeout_ms: 30_000, migrations: MIGRATIONS }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct Submitted {
    pub id: JobId,
    pub status: JobState,
    pub created_at: Timestamp,
    /// It was there already, under the same idempotency key.
    pub existed: bool,
}

#[derive(Clone, Debug)]
pub struct ClaimRequest {
    pub owner: Owner,
    pub lanes: Vec<LaneId>,
    pub limit: usize,
    /// How many of them can start at once. What is claimed ahead of that must not take a limit's room from others.
    pub at_once: usize,
}

/// In whose hands a hand-out is, and so by whose sign of life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// The worker inside this server process: alive while the process's lease lasts.
    Node(NodeId),
    /// A worker with a life of its own, which survives the server it is connected to. `session` is the connection for which is
    /// claimed: once the worker has connected anew, nothing is handed out through the old one.
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
    /// In the order in which they shall run.
    pub jobs: Vec<ClaimedJob>,
    /// Nothing was looked for: the worker has ended, or has connected anew.
    pub refused: bool,
    /// Lanes of which a limit or a pause held jobs back.
    pub limited: Vec<Limited>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limited {
    pub lane: LaneId,
    /// When a rate lets the next one go. `None`: when a job ends, or somebody changes a rule.
    pub until: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct ClaimedJob {
    pub id: JobId,
    pub run: Run,
    pub lane: LaneId,
    pub ready_at: Timestamp,
    pub retry_count: u32,
    /// It was in the hands of a process that died, and nobody knows whether it had begun: write its start down before it
    /// begins, so that a job that kills its worker is found out.
    pub start_first: bool,
    /// Since when it had to wait for which limit, if it had to.
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
    /// `total`: how many steps there are, if the worker knows.
    Step {
        name: String,
        result: String,
        total: Option<u32>,
    },
    /// A report that came too late or from the wrong hands. Written down whoever holds the job, if it exists.
    Stale(String),
}

/// How one run ended.
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
    /// Whether more than the fast path writes may be stored about it: its start, a request to cancel, a unique key, an expiry.
    pub on_record: bool,
    /// All other jobs of the same hand-out have ended, so its block can go.
    pub closes_claim: bool,
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
    /// Back to the queue without costing a try.
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

impl RunEnd {
    /// Whether this is the end that is stored as `state` at `at_ms`, told again; and not another one's, which has ended the
    /// run in the meantime. What was to come back may have been stored as cancelled.
    pub(crate) fn is_stored_as(&self, state: i16, at_ms: i64) -> bool {
        self.at.as_ms() == at_ms && (state == state_code(self.outcome.state()) || state == CANCELLED)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelOutcome {
    Cancelled,
    /// A worker has it and has been told.
    Asked {
        state: JobState,
    },
}

#[derive(Clone, Debug, Default)]
pub struct JobPatch {
    pub priority: Option<Priority>,
    pub payload: Option<String>,
    /// `Some(None)`: as soon as possible.
    pub scheduled_at: Option<Option<Timestamp>>,
    pub expires_at: Option<Option<Timestamp>>,
    pub max_retries: Option<u32>,
    pub retry_delay_ms: Option<u64>,
    pub timeout_ms: Option<u64>,
}

impl JobPatch {
    pub fn apply_to(&self, options: &mut JobOptions) {
        if let Some(scheduled_at) = self.scheduled_at {
            options.scheduled_at = scheduled_at;
        }
        if let Some(expires_at) = self.expires_at {
            options.expires_at = expires_at;
        }
        if let Some(max_retries) = self.max_retries {
            options.retry.max_retries = max_retries;
        }
        if let Some(retry_delay_ms) = self.retry_delay_ms {
            options.retry.retry_delay_ms = retry_delay_ms;
        }
        if self.timeout_ms.is_some() {
            options.timeout_ms = self.timeout_ms;
        }
    }

    /// For the log: what is changed, to what. Of the payload only that it is.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if let Some(priority) = self.priority {
            parts.push(format!("priority {priority}"));
        }
        if self.payload.is_some() {
            parts.push("payload".into());
        }
        for (name, time) in [("scheduledAt", self.scheduled_at), ("expiresAt", self.expires_at)] {
            match time {
                Some(Some(at)) => parts.push(format!("{name} {at}")),
                Some(None) => parts.push(format!("no {name}")),
                None => {}
            }
        }
        if let Some(n) = self.max_retries {
            parts.push(format!("maxRetries {n}"));
        }
        if let Some(ms) = self.retry_delay_ms {
            parts.push(format!("retryDelay {ms}"));
        }
        if let Some(ms) = self.timeout_ms {
            parts.push(format!("timeoutMs {ms}"));
        }
        parts.join(", ")
    }
}

/// A worker as it connects.
#[derive(Clone, Debug)]
pub struct WorkerEntry {
    /// Its identity if this is the beginning of a life.
    pub id: WorkerId,
    /// What it calls itself. A living worker of that name goes on living, on a new connection.
    pub key: String,
    pub name: Option<String>,
    pub kind: WorkerKind,
    pub transport: String,
    pub node: NodeId,
    /// What it is from now on: `Creating` (a process is about to be started), `Ready` (it is connected).
    pub state: WorkerState,
    pub capabilities: WorkerCapabilities,
    pub concurrency: u32,
    pub pool: Option<String>,
    /// Until when it has to be heard of again, where no connection tells that it is there.
    pub deadline: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct WorkerAdmitted {
    pub id: WorkerId,
    /// Grows with each connection of one life.
    pub session: i64,
    /// The state it was in, if its life had begun before.
    pub was: Option<WorkerState>,
    /// What it has in its hands, oldest run first.
    pub jobs: Vec<ResumedJob>,
}

/// A job that a worker has had in its hands since before it connected here.
#[derive(Clone, Debug)]
pub struct ResumedJob {
    pub job: ClaimedJob,
    pub kind: String,
    pub claimed_at: Timestamp,
    /// When it started, if that is on record.
    pub started_at: Option<Timestamp>,
}

/// What is new about a connected worker.
#[derive(Clone, Debug)]
pub struct WorkerUpdate {
    pub id: WorkerId,
    pub session: i64,
    /// The states it has gone through since the last news, each allowed after the one before; none: it is as it was.
    pub changes: Vec<WorkerChange>,
    pub seen_at: Timestamp,
    /// `None`: its node looks after it.
    pub deadline: Option<Timestamp>,
    /// Ends since the last news.
    pub completed: u64,
    pub failed: u64,
    pub breaker: &'static str,
}

/// What a node learns of a worker that it has news of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerUpdateResult {
    /// `false`: it has ended, or has connected anew, perhaps to another node.
    pub connected: bool,
    /// Somebody wants it to take no more jobs.
    pub drain: bool,
}

/// How a worker's life ends, and what that means for the jobs in its hands.
#[derive(Clone, PartialEq, Debug)]
pub enum WorkerEnd {
    /// It takes leave: its jobs are ready again without costing a try.
    Left { reason: String },
    /// It fell silent, or its process ended: its jobs cost a try and wait for `delay_ms`, or fail when no try is left.
    Lost { reason: String, delay_ms: i64 },
}

#[derive(Clone, Debug, Default)]
pub struct SweepResult {
    /// Who was given up for lost.
    pub lost: Vec<WorkerLost>,
    /// When to look again.
    pub next_at: Option<Timestamp>,
    /// There are more whose time is up.
    pub more: bool,
}

#[derive(Clone, Debug)]
pub struct WorkerLost {
    pub id: WorkerId,
    pub key: String,
    pub freed: Recovered,
}

/// How long who may be silent, and how long orphans wait.
#[derive(Clone, Copy, Debug)]
pub struct GracePeriods {
    pub orphan_delay_ms: i64,
    /// For a worker whose server has died, to connect to another one.
    pub reconnect_ms: i64,
    /// For a worker that only calls now and then.
    pub silence_ms: i64,
}

/// What a promotion round did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DueResult {
    pub promoted: usize,
    pub expired: usize,
    pub unblocked: usize,
    /// When there is something to do next.
    pub next_at: Option<Timestamp>,
    /// There is more that is due now.
    pub more: bool,
}

impl DueResult {
    pub fn handled(&self) -> usize {
        self.promoted + self.expired + self.unblocked
    }
}

/// How long finished jobs are kept.
#[derive(Clone, Debug)]
pub struct Retention {
    pub completed_ms: i64,
    pub cancelled_ms: i64,
    pub failed_ms: i64,
    /// Entries of the audit log, and bulk actions that are over.
    pub audit_ms: i64,
}

impl Retention {
    /// After this time no finished job is kept.
    pub fn longest_ms(&self) -> i64 {
        self.completed_ms.max(self.cancelled_ms).max(self.failed_ms)
    }
}

impl Default for Retention {
    fn default() -> Self {
        const DAY_MS: i64 = 24 * 3_600_000;
        Retention { completed_ms: 7 * DAY_MS, cancelled_ms: 7 * DAY_MS, failed_ms: 30 * DAY_MS, audit_ms: 365 * DAY_MS }
    }
}

/// As it is stored with a bulk action, it has the names that the API gives it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Filter {
    #[serde(rename = "status")]
    pub states: Vec<JobState>,
    pub priority: Option<Priority>,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub queue: Option<String>,
    pub tag: Option<String>,
    pub correlation_id: Option<String>,
    pub schedule_id: Option<String>,
    pub created_after: Option<Timestamp>,
    pub created_before: Option<Timestamp>,
    /// Part of a type or queue name, or exactly an id, a correlation id, a unique or idempotency key.
    pub q: Option<String>,
    /// Part of the error that a failed job ended with, in any case. Only together with the state FAILED.
    pub error: Option<String>,
    /// Why a failed job ended. Only together with the state FAILED.
    pub reason: Option<ErrorReason>,
}

#[derive(Clone, Copy, Debug)]
pub enum Page {
    Offset {
        offset: usize,
        limit: usize,
    },
    /// The jobs after (older than) this one.
    After {
        id: Option<JobId>,
        limit: usize,
    },
    /// The other way round: the jobs after (newer than) this one, up to another, the oldest first. Nothing is counted.
    Upward {
        after: Option<JobId>,
        upto: JobId,
        limit: usize,
    },
}

impl Page {
    pub fn limit(&self) -> usize {
        match *self {
            Page::Offset { limit, .. } | Page::After { limit, .. } | Page::Upward { limit, .. } => limit,
        }
    }
}

/// The ids of jobs that match, the oldest first.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct JobIdPage {
    pub ids: Vec<JobId>,
    /// From where to go on; `None`: these were the last.
    pub next: Option<JobId>,
}

/// What the dead letters have in common.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeadLetterStats {
    /// Of the newest ones: how many failed for which reason, and how many were looked at.
    pub by_reason: BTreeMap<String, u64>,
    pub looked_at: u64,
    /// By their creation.
    pub oldest: Option<JobId>,
    pub newest: Option<JobId>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BulkAction {
    Cancel,
    Retry,
    Delete,
}

impl BulkAction {
    pub const ALL: [BulkAction; 3] = [BulkAction::Cancel, BulkAction::Retry, BulkAction::Delete];

    pub fn as_str(self) -> &'static str {
        match self {
            BulkAction::Cancel => "cancel",
            BulkAction::Retry => "retry",
            BulkAction::Delete => "delete",
        }
    }

    pub fn parse(text: &str) -> Option<BulkAction> {
        BulkAction::ALL.into_iter().find(|action| action.as_str() == text)
    }

    /// Whether it makes sense for a job in this state.
    pub fn fits(self, state: JobState) -> bool {
        match self {
            BulkAction::Cancel => !state.is_terminal(),
            BulkAction::Retry => state.can_transition_to(JobState::Pending),
            BulkAction::Delete => !state.is_in_flight(),
        }
    }
}

/// One action on every job that a filter finds, as somebody asks for it.
#[derive(Clone, PartialEq, Debug)]
pub struct NewBulk {
    pub id: BulkId,
    pub action: BulkAction,
    /// Names the states in which the action fits.
    pub filter: Filter,
    pub actor: String,
    /// `None`: as fast as it goes.
    pub per_second: Option<u32>,
    /// The newest job that is meant.
    pub upto: JobId,
    pub matched: u64,
}

/// How far it has come.
#[derive(Clone, PartialEq, Debug)]
pub struct Bulk {
    pub id: BulkId,
    pub action: BulkAction,
    pub filter: Filter,
    pub actor: String,
    pub per_second: Option<u32>,
    pub created_at: Timestamp,
    pub upto: JobId,
    /// Every job up to this one has had its turn.
    pub last: Option<JobId>,
    pub matched: u64,
    pub done: u64,
    /// Had moved on before their turn came.
    pub skipped: u64,
    /// When it goes on.
    pub due_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub error: Option<String>,
}

/// The next few jobs of a bulk action, all or none of them.
#[derive(Clone, PartialEq, Debug)]
pub struct BulkStep {
    /// As it was read: if it has come further since, nothing is done.
    pub bulk: Bulk,
    pub ids: Vec<JobId>,
    pub last: Option<JobId>,
    /// `None`: that was all.
    pub due_at: Option<Timestamp>,
}

#[derive(Clone, Debug, Default)]
pub struct JobPage {
    pub jobs: Vec<JobView>,
    pub total: u64,
    /// `false`: there are at least `total`; counting all would take too long.
    pub total_is_exact: bool,
    /// Give this as `cursor` to go on.
    pub next: Option<JobId>,
}

/// Where jobs are counted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(i16)]
pub enum Tally {
    Pending = 0,
    Queued = 1,
    /// Handed out: `ASSIGNED` or `PROCESSING`.
    InFlight = 2,
    Retrying = 3,
    Completed = 4,
    Failed = 5,
    Cancelled = 6,
    /// Runs that have ended, ever. It only grows, so throughput can be read from it.
    Ran = 7,
}

impl JobExit {
    pub fn of(state: JobState) -> JobExit {
        if state.is_terminal() { JobExit::Finished } else { JobExit::Requeued }
    }
}

impl Tally {
    pub const ALL: [Tally; 8] = [
        Tally::Pending,
        Tally::Queued,
        Tally::InFlight,
        Tally::Retrying,
        Tally::Completed,
        Tally::Failed,
        Tally::Cancelled,
        Tally::Ran,
    ];

    pub fn of(state: JobState) -> Tally {
        match state {
            JobState::Pending => Tally::Pending,
            JobState::Queued => Tally::Queued,
            JobState::Scheduled | JobState::Assigned | JobState::Processing => Tally::InFlight,
            JobState::Retrying => Tally::Retrying,
            JobState::Completed => Tally::Completed,
            JobState::Failed => Tally::Failed,
            JobState::Cancelled => Tally::Cancelled,
        }
    }

    pub fn from_i16(number: i16) -> Option<Tally> {
        Tally::ALL.into_iter().find(|tally| *tally as i16 == number)
    }
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Counts {
    pub by_lane: BTreeMap<(LaneId, Tally), i64>,
}

impl Counts {
    pub fn total(&self, tally: Tally) -> i64 {
        self.by_lane.iter().filter(|((_, t), _)| *t == tally).map(|(_, n)| n).sum()
    }
}

#[derive(Clone, Debug)]
pub struct NodeInfo {
    pub id: NodeId,
    /// Where it runs, for people.
    pub name: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovered {
    pub nodes: usize,
    /// Had started; a try is gone.
    pub orphaned: usize,
    /// Had not started, as far as is known; ready again.
    pub returned: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Poll {
    pub ready_lanes: Vec<LaneId>,
    /// Jobs of this node that shall stop, with the reason.
    pub cancels: Vec<(JobId, String)>,
    pub next_due_at: Option<Timestamp>,
    /// Living nodes, this one included.
    pub nodes: usize,
    /// There is something to recover: a lease has ended, a hand-out has no living owner, or a living worker has a dead server.
    pub orphans: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// This lane has ready jobs.
    Ready(LaneId),
    /// This job, wherever it runs, shall stop.
    Cancel(JobId),
    /// Something was put off until a time that may be earlier than what the promoter waits for.
    Waiting,
    /// Somebody wants something of this worker, or it has connected anew.
    Worker(WorkerId),
    /// A job that counts for a limit has ended.
    Room,
    /// What was said about queues and limits has changed.
    Rules,
    /// A webhook is to be sent.
    Webhook,
    /// A schedule is due, or at another time than it was.
    Schedule,
    /// Something has happened that somebody wants to know.
    Event,
    /// Signals of other nodes may have been missed: whoever waits for one looks.
    Missed,
}

/// What becomes of a job that leaves somebody's hands or a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JobExit {
    /// Goes back to a queue.
    Requeued,
    /// Has finished.
    Finished,
    /// Is deleted with everything that belongs to it.
    Deleted,
}

/// How to change what was said about a queue; what is absent stays.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct QueuePatch {
    /// `Some(None)`: no limit.
    pub concurrency: Option<Option<u32>>,
    pub rate: Option<Option<Rate>>,
    pub strict: Option<bool>,
    pub fairness: Option<Fairness>,
    /// `Some(None)`: goes on.
    pub paused: Option<Option<Pause>>,
}

/// Where a job stands among others, for whoever wants to know why it is not running.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct JobPosition {
    /// Ready jobs of its queue that go before it, counted up to `JobPosition::MOST_AHEAD`.
    pub ahead: u64,
    /// What it waits for; `None`: that was deleted.
    pub parents: Vec<(JobId, Option<JobState>)>,
    /// Jobs with its concurrencyKey that are in somebody's hands, and the first of them.
    pub key_held: u64,
    pub key_holders: Vec<JobId>,
    /// What is left of its key's rate.
    pub key_bucket: Option<Bucket>,
    pub owner: Option<ClaimOwner>,
    /// Since when somebody wants it cancelled, and why.
    pub cancel: Option<(Timestamp, String)>,
}

impl JobPosition {
    pub const MOST_AHEAD: u64 = 10_000;
    pub(crate) const MOST_NAMED: usize = 10;
}

/// Who has a job in hand, as far as the database knows.
#[derive(Clone, PartialEq, Debug)]
pub struct ClaimOwner {
    pub claimed_at: Timestamp,
    /// The server that looks after it, while that is on record.
    pub server: Option<String>,
    /// Until when the server's last sign of life is good. `None`: nobody's is; it is about to be freed.
    pub lease_until: Option<Timestamp>,
}

/// One act of a person or key.
#[derive(Clone, PartialEq, Debug)]
pub struct AuditEntry {
    /// Who: a key, a person, or from where it came.
    pub actor: String,
    /// What: `job.cancel`, `queue.pause`, `bulk.retry` …
    pub action: String,
    /// To what.
    pub target: String,
    pub details: serde_json::Value,
    /// How many things it changed.
    pub count: u64,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct AuditFilter {
    /// Older than this one.
    pub before: Option<i64>,
    pub actor: Option<String>,
    pub action: Option<String>,
    pub target: Option<String>,
}

/// What the configuration says about queues and limits.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Configured {
    pub limits: Vec<(Scope, Limit)>,
    pub queues: Vec<(String, QueueRule)>,
}

/// A limit with where it comes from.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredLimit {
    pub scope: Scope,
    pub limit: Limit,
    /// `config` or `api`.
    pub origin: String,
    pub changed_at: Timestamp,
    pub changed_by: String,
    /// When it last held a job back.
    pub reached_at: Option<Timestamp>,
    /// What is left of its rate. Of a limit of keys: each key has its own.
    pub bucket: Option<Bucket>,
}

/// Returns the number by which a state is stored.
pub fn state_code(state: JobState) -> i16 {
    state as i16
}

pub fn state_of_code(code: i16) -> JobState {
    usize::try_from(code).ok().and_then(|at| JobState::ALL.get(at)).copied().unwrap_or(JobState::Pending)
}

pub use crate::sql::{CANCELLED, FAILED, PENDING, RETRYING};
