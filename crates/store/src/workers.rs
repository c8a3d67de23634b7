//! Workers: the store methods, and what both databases share: state changes, deadlines, how rows are shown.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use faena_domain::{
    ApiKeyId, JobId, KeyHash, NodeId, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState,
    WorkerView,
};
use uuid::Uuid;

use crate::{
    ClaimedJob, GracePeriods, RecoveryCounts, Result, StoreError,
    disposition::ReleaseReason,
    events::{GUARDIAN, SYSTEM},
};

/// Registers workers, records their status updates, ends their registrations, and lists them.
#[async_trait]
pub trait WorkerStore: Send + Sync + 'static {
    /// Registers a worker, or resumes the live registration under its key, with the jobs it has in flight.
    ///
    /// # Errors
    /// `StoreError::WorkerActive` if a registration is live and the worker has neither its session token nor its API key.
    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted>;

    /// Records status updates of connected workers.
    ///
    /// Returns for each worker whether it is still connected here and whether it must drain. Does not change a worker
    /// that has ended or reconnected.
    async fn worker_update(&self, updates: Vec<WorkerUpdate>, now: Timestamp) -> Result<Vec<WorkerUpdateResult>>;

    /// Requests that a live worker gets no more jobs, or gets jobs again. Returns `None` if no live worker has this key.
    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>>;

    /// Ends a registration and releases its claims in one transaction. Returns `None` if it has ended or reconnected.
    async fn worker_end(
        &self,
        id: WorkerId,
        session: i64,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<RecoveryCounts>>;

    /// Ends up to 100 workers whose deadline has passed, as `worker_end` does with `Lost`.
    ///
    /// Also deletes registrations that ended before `forget_before`.
    async fn worker_sweep(&self, orphan_delay_ms: i64, forget_before: Timestamp, now: Timestamp)
    -> Result<SweepResult>;

    /// Lists the jobs of live workers that no node is responsible for. Considers up to 1 000 workers.
    async fn worker_unattended_jobs(&self) -> Result<Vec<UnattendedJob>>;

    /// Returns a worker by its key (its latest registration) or by the id of a registration.
    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>>;

    /// Returns the current session of a live worker. `None` if it has ended.
    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>>;

    /// Lists workers in one of `states` (all if empty), live ones first, newest first, without jobs and history.
    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>>;

    /// Returns how many jobs in flight each of these live workers has. Workers without jobs are left out.
    ///
    /// The built-in worker of a node has the jobs that the node has claimed, including those that wait for a free slot.
    async fn worker_in_flight_counts(&self, workers: Vec<WorkerId>) -> Result<HashMap<WorkerId, u64>>;

    /// Returns how many registrations are in these states, counted up to [`crate::COUNT_LIMIT`].
    async fn worker_total(&self, states: Vec<WorkerState>) -> Result<u64>;

    /// Returns how many registrations are in each state. Ended ones are counted while they are kept.
    async fn worker_counts(&self) -> Result<BTreeMap<WorkerState, u64>>;

    /// Returns the capabilities of the workers of all nodes that are starting, ready or busy.
    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>>;
}

/// A worker that registers.
#[derive(Clone, Debug)]
pub struct WorkerEntry {
    /// Id of the registration, if a new one begins.
    pub id: WorkerId,
    /// The name the worker gives itself. A live registration with this key continues on the new connection.
    pub key: String,
    pub name: Option<String>,
    /// Version of its program. A worker that resumes without one has none from then on.
    pub version: Option<String>,
    pub kind: WorkerKind,
    pub transport: String,
    pub node: NodeId,
    /// Its state from now on: `Creating` (its process is about to start) or `Ready` (it is connected).
    pub state: WorkerState,
    pub capabilities: WorkerCapabilities,
    pub concurrency: u32,
    pub pool: Option<String>,
    /// API key that the worker registers with. With this key it can resume the registration without the session token.
    pub api_key: Option<ApiKeyId>,
    /// Hash of its session token, unless it resumes a registration with another token.
    pub token: KeyHash,
    /// Hash of the session token that it sent to resume a registration.
    pub presented_token: Option<KeyHash>,
    /// When it is declared lost unless it calls again. `None` if a connection shows that it is alive.
    pub deadline: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct WorkerAdmitted {
    pub id: WorkerId,
    /// Grows with each connection of a registration.
    pub session: i64,
    /// The previous state, if the registration continues.
    pub was: Option<WorkerState>,
    /// Its jobs in flight, oldest run first.
    pub jobs: Vec<ResumedJob>,
    /// Hash of its session token: that of the entry, or the one it presented.
    pub token: KeyHash,
}

/// A job that a worker already had when it connected.
#[derive(Clone, Debug)]
pub struct ResumedJob {
    pub job: ClaimedJob,
    pub kind: String,
    pub claimed_at: Timestamp,
    /// When it started, if that was recorded.
    pub started_at: Option<Timestamp>,
}

/// A live registration with the columns that the store methods need.
pub struct LiveWorker {
    pub id: WorkerId,
    pub key: String,
    pub kind: WorkerKind,
    pub transport: String,
    pub node: Option<Uuid>,
    pub session: i64,
    pub state: WorkerState,
    pub reason: Option<String>,
    pub owner: RegistrationOwner,
}

/// Owner of a live registration, and when the worker is declared lost unless it reconnects.
pub struct RegistrationOwner {
    pub api_key: Option<Uuid>,
    pub token: Vec<u8>,
    pub deadline: Option<i64>,
}

impl RegistrationOwner {
    /// Returns the hash of the session token that the registration has from now on.
    ///
    /// Fails unless the caller sent its token or, without a token, uses the API key that registered it.
    pub fn admit(&self, entry: &WorkerEntry) -> Result<KeyHash> {
        let stored = <[u8; 32]>::try_from(self.token.as_slice()).ok().map(KeyHash);
        let has_its_key = entry.api_key.is_some() && entry.api_key == self.api_key.map(ApiKeyId);
        match (&entry.presented_token, &stored) {
            (Some(presented), Some(stored)) if presented.matches(stored) => Ok(*presented),
            (None, _) if has_its_key => Ok(entry.token),
            _ => Err(StoreError::WorkerActive { deadline: self.deadline.map(Timestamp::from_ms) }),
        }
    }
}

impl ResumedJob {
    /// Converts it to a job of a worker without a server. `state`: the stored state of the worker.
    pub(crate) fn unattended(mut self, worker: WorkerId, key: &str, state: i16) -> UnattendedJob {
        self.job.payload = String::new();
        let is_starting = matches!(worker_state(state), WorkerState::Creating | WorkerState::Connecting);
        UnattendedJob { worker, worker_key: key.to_owned(), is_starting, job: self }
    }
}

/// A job whose worker has no server: the server it was connected to has stopped or died.
#[derive(Clone, Debug)]
pub struct UnattendedJob {
    pub worker: WorkerId,
    pub worker_key: String,
    /// Whether the process of the worker was still being started.
    pub is_starting: bool,
    /// Without its payload.
    pub job: ResumedJob,
}

/// Status update of a connected worker.
#[derive(Clone, Debug)]
pub struct WorkerUpdate {
    pub id: WorkerId,
    pub session: i64,
    /// State changes since the last update, each allowed after the one before. Empty: no change.
    pub changes: Vec<WorkerChange>,
    pub seen_at: Timestamp,
    /// `None`: its node watches it.
    pub deadline: Option<Timestamp>,
    /// Jobs completed since the last update.
    pub completed: u64,
    pub failed: u64,
    pub breaker: &'static str,
}

/// Answer to a status update.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerUpdateResult {
    /// `false`: it has ended or reconnected, perhaps to another node.
    pub connected: bool,
    /// Whether it must get no more jobs.
    pub drain: bool,
}

/// How a registration ends, and what happens to its jobs.
#[derive(Clone, PartialEq, Debug)]
pub enum WorkerEnd {
    /// It disconnected properly: its jobs are ready again without using an attempt.
    Left { reason: String },
    /// It missed its heartbeats, or its process ended: its jobs use an attempt and wait for `delay_ms`, or fail if no
    /// attempt is left.
    Lost { reason: String, delay_ms: i64 },
}

#[derive(Clone, Debug, Default)]
pub struct SweepResult {
    /// Workers that were declared lost.
    pub lost: Vec<WorkerLost>,
    /// When the next deadline passes.
    pub next_at: Option<Timestamp>,
    /// Whether more deadlines have passed.
    pub more: bool,
}

#[derive(Clone, Debug)]
pub struct WorkerLost {
    pub id: WorkerId,
    pub key: String,
    pub released: RecoveryCounts,
}

/// Maximum number of state changes that are kept per registration.
pub const HISTORY: i64 = 200;
/// Maximum number of workers that one round declares lost or detaches.
pub const ROUND: i64 = 100;
/// Maximum number of workers without a server whose jobs one round checks.
pub const UNATTENDED: i64 = 1_000;
/// Maximum number of ended registrations that one round deletes.
pub const FORGET: i64 = 1_000;

pub const COLUMNS: &str =
    "id, key, name, kind, transport, node, state, reason, capabilities, queues, concurrency, pool,
    registered_at, seen_at, ended_at, deadline, completed, failed, breaker, version";

/// A row of `worker`, with the columns above in their order.
pub struct WorkerRow {
    pub id: Uuid,
    pub key: String,
    pub name: Option<String>,
    pub kind: i16,
    pub transport: String,
    pub node: Option<Uuid>,
    pub state: i16,
    pub reason: Option<String>,
    pub capabilities: String,
    pub queues: String,
    pub concurrency: i32,
    pub pool: Option<String>,
    pub registered_at: i64,
    pub seen_at: i64,
    pub ended_at: Option<i64>,
    pub deadline: Option<i64>,
    pub completed: i64,
    pub failed: i64,
    pub breaker: String,
    pub version: Option<String>,
}

impl WorkerRow {
    pub fn view(self) -> Result<WorkerView> {
        let state = worker_state(self.state);
        let capabilities = read_capabilities(&self.capabilities, &self.queues)?;
        Ok(WorkerView {
            id: self.key,
            registration_id: self.id.to_string(),
            name: self.name,
            version: self.version,
            kind: worker_kind(self.kind)?,
            transport: self.transport,
            state,
            category: state.category().as_str().to_owned(),
            reason: self.reason,
            capabilities: capabilities.types,
            queues: capabilities.queues,
            concurrency: u32::try_from(self.concurrency).unwrap_or(0),
            pool: self.pool,
            node: self.node.map(|node| NodeId(node).to_string()),
            registered_at: Timestamp::from_ms(self.registered_at),
            last_seen_at: Timestamp::from_ms(self.seen_at),
            ended_at: self.ended_at.map(Timestamp::from_ms),
            deadline: self.deadline.map(Timestamp::from_ms),
            completed: self.completed.unsigned_abs(),
            failed: self.failed.unsigned_abs(),
            breaker: self.breaker,
            in_flight: None,
            jobs: Vec::new(),
            history: Vec::new(),
        })
    }
}

/// The worker of a job, as shown with the job.
#[derive(Clone, Debug)]
pub struct JobWorker {
    pub key: String,
    /// Whether it is not connected yet, so that its jobs are scheduled and not assigned.
    pub is_starting: bool,
}

/// Returns the ids of a worker's jobs as text.
pub fn shown_jobs(jobs: impl Iterator<Item = JobId>) -> Vec<String> {
    jobs.map(|id| id.to_string()).collect()
}

/// Returns the number by which a state is stored.
pub fn worker_code(state: WorkerState) -> i16 {
    let at = WorkerState::ALL.iter().position(|known| *known == state);
    at.and_then(|at| i16::try_from(at).ok()).expect("seven states")
}

/// Returns the state for a stored number.
///
/// An unknown number counts as `Busy`, so that a worker with a damaged row can still be declared lost; `faena doctor` reports
/// it.
pub fn worker_state(code: i16) -> WorkerState {
    let state = usize::try_from(code).ok().and_then(|at| WorkerState::ALL.get(at)).copied();
    state.unwrap_or(WorkerState::Busy)
}

pub fn kind_code(kind: WorkerKind) -> i16 {
    let at = WorkerKind::ALL.iter().position(|known| *known == kind);
    at.and_then(|at| i16::try_from(at).ok()).expect("three kinds")
}

pub fn worker_kind(code: i16) -> Result<WorkerKind> {
    let kind = usize::try_from(code).ok().and_then(|at| WorkerKind::ALL.get(at)).copied();
    kind.ok_or_else(|| StoreError::Internal(format!("worker kind {code} is unknown").into()))
}

pub fn names(list: &[String]) -> String {
    serde_json::to_string(list).expect("names are JSON")
}

pub fn read_capabilities(capabilities: &str, queues: &str) -> Result<WorkerCapabilities> {
    let read = |text: &str| {
        serde_json::from_str(text)
            .map_err(|e| StoreError::Internal(format!("capabilities of a worker: {e}: {text}").into()))
    };
    Ok(WorkerCapabilities { types: read(capabilities)?, queues: read(queues)? })
}

/// Returns the states that a worker passes through until it is connected as `wanted`. A worker that was connected
/// before keeps its state.
pub fn path_when_connecting(was: Option<WorkerState>, wanted: WorkerState) -> &'static [WorkerState] {
    use WorkerState::*;
    const PATH: [WorkerState; 3] = [Creating, Connecting, Ready];
    let index = |state| PATH.iter().position(|known| *known == state);
    let from = match was {
        None => 0,
        Some(state) => index(state).map_or(PATH.len(), |at| at + 1),
    };
    let to = index(wanted).unwrap_or(PATH.len() - 1) + 1;
    PATH.get(from..to).unwrap_or_default()
}

/// Keeps the changes that are allowed, each after the last allowed one.
pub fn allowed(mut state: WorkerState, changes: &[WorkerChange]) -> Vec<WorkerChange> {
    let mut kept = Vec::new();
    for change in changes {
        if state.can_transition_to(change.state) {
            state = change.state;
            kept.push(change.clone());
        }
    }
    kept
}

/// Turns a path through states into changes at one moment, with one reason.
pub fn changes(path: &[WorkerState], reason: Option<&str>, now: Timestamp) -> Vec<WorkerChange> {
    path.iter().map(|state| WorkerChange { at: now, state: *state, reason: reason.map(str::to_owned) }).collect()
}

/// How the server of a worker ended.
#[derive(Clone, Copy)]
pub enum NodeExit {
    Died,
    Stopped,
}

impl NodeExit {
    /// Returns the reason for the built-in worker of the server.
    pub fn reason(self) -> &'static str {
        match self {
            NodeExit::Died => "its server died",
            NodeExit::Stopped => "its server stopped",
        }
    }

    /// Returns the actor of the events of the built-in worker of the server.
    pub fn actor(self) -> &'static str {
        match self {
            NodeExit::Died => GUARDIAN,
            NodeExit::Stopped => SYSTEM,
        }
    }

    /// Returns the reason for workers that were connected to the server. It is true before and after their deadline.
    pub fn waiting_reason(self) -> &'static str {
        match self {
            NodeExit::Died => "its server died, and it has not reconnected",
            NodeExit::Stopped => "its server stopped, and it has not reconnected",
        }
    }
}

/// Returns the time by which a worker without a server must reconnect.
pub fn deadline_without_node(transport: &str, before: Option<i64>, grace_periods: GracePeriods, now: Timestamp) -> i64 {
    if transport == "http" {
        return now.plus_ms(grace_periods.silence_ms).as_ms();
    }
    let reconnect = now.plus_ms(grace_periods.reconnect_ms).as_ms();
    before.map_or(reconnect, |before| before.min(reconnect))
}

/// Reason of a worker that the sweep declares lost without any other reason.
pub const NO_HEARTBEAT: &str = "no heartbeat";

impl WorkerEnd {
    /// Returns the reason in the worker's record.
    pub(crate) fn reason(&self) -> String {
        match self {
            WorkerEnd::Left { reason } => reason.clone(),
            WorkerEnd::Lost { reason, .. } => format!("lost: {reason}"),
        }
    }

    /// Returns the text in the logs of its jobs.
    pub(crate) fn text(&self, key: &str) -> String {
        match self {
            WorkerEnd::Left { reason } => format!("worker {key} left: {reason}"),
            WorkerEnd::Lost { reason, .. } => format!("worker {key} was lost: {reason}"),
        }
    }

    /// Returns why its claims are released. `state`: its last state.
    pub(crate) fn release_reason<'a>(&self, worker: WorkerId, state: WorkerState, text: &'a str) -> ReleaseReason<'a> {
        let was_starting = matches!(state, WorkerState::Creating | WorkerState::Connecting);
        match self {
            WorkerEnd::Left { .. } => ReleaseReason::Left { text, worker: Some(worker), was_starting },
            WorkerEnd::Lost { delay_ms, .. } => ReleaseReason::Lost { text, worker, was_starting, delay_ms: *delay_ms },
        }
    }

    /// Returns the actor of its events.
    pub(crate) fn actor(&self) -> &'static str {
        match self {
            WorkerEnd::Left { .. } => SYSTEM,
            WorkerEnd::Lost { .. } => GUARDIAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use WorkerState::*;

    use super::*;

    #[test]
    fn a_worker_connects_through_allowed_states_only() {
        assert_eq!(path_when_connecting(None, Ready), [Creating, Connecting, Ready]);
        assert_eq!(path_when_connecting(None, Creating), [Creating]);
        assert_eq!(path_when_connecting(Some(Creating), Ready), [Connecting, Ready]);
        assert_eq!(path_when_connecting(Some(Connecting), Ready), [Ready]);
        for was in WorkerState::ALL {
            for wanted in WorkerState::ALL {
                let mut state = was;
                for next in path_when_connecting(Some(was), wanted) {
                    assert!(state.can_transition_to(*next), "{was} to {wanted}: {state} -> {next}");
                    state = *next;
                }
                if !matches!(was, Creating | Connecting) {
                    assert_eq!(state, was, "a worker that was connected keeps its state");
                }
            }
        }
    }

    #[test]
    fn changes_that_are_not_allowed_are_skipped() {
        let all = changes(&[Busy, Busy, Creating, Draining, Ready], None, Timestamp::from_ms(1));
        let kept: Vec<_> = allowed(Ready, &all).into_iter().map(|change| change.state).collect();
        assert_eq!(kept, [Busy, Draining, Ready]);
        assert!(allowed(Terminated, &all).is_empty());
    }

    #[test]
    fn stored_worker_numbers_do_not_change() {
        assert_eq!(WorkerState::ALL.map(worker_code), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(WorkerKind::ALL.map(kind_code), [0, 1, 2]);
        assert!(WorkerState::ALL.into_iter().all(|state| worker_state(worker_code(state)) == state));
        assert_eq!(worker_state(77), WorkerState::Busy, "a worker with a damaged row can end");
        assert!(worker_kind(-1).is_err());
    }
}
