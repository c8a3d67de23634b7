//! What both engines decide alike about workers: through which states they go, how long they are waited for, how their rows are
//! shown.

use faena_domain::{JobId, NodeId, Timestamp, WorkerCapabilities, WorkerChange, WorkerKind, WorkerState, WorkerView};
use uuid::Uuid;

use crate::{GracePeriods, Result, StoreError, WorkerEnd, disposition::ReleaseReason};

/// Changes of state that are kept of one life.
pub const HISTORY: i64 = 200;
/// Workers that one round gives up, or lets go of.
pub const ROUND: i64 = 100;
/// Ended workers that one round forgets.
pub const FORGET: i64 = 1_000;

pub const COLUMNS: &str =
    "id, key, name, kind, transport, node, state, reason, capabilities, queues, concurrency, pool,
    registered_at, seen_at, ended_at, deadline, completed, failed, breaker";

/// The columns above, in their order.
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
}

impl WorkerRow {
    pub fn view(self) -> Result<WorkerView> {
        let state = worker_state(self.state);
        let capabilities = read_capabilities(&self.capabilities, &self.queues)?;
        Ok(WorkerView {
            id: self.key,
            registration_id: self.id.to_string(),
            name: self.name,
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
            jobs: Vec::new(),
            history: Vec::new(),
        })
    }
}

/// A worker as the jobs that it has or had in hand show it.
#[derive(Clone, Debug)]
pub struct Holder {
    pub key: String,
    /// It is not connected yet: what it holds is not assigned but scheduled.
    pub is_coming: bool,
}

/// The jobs in its hands, as they are named.
pub fn shown_jobs(jobs: impl Iterator<Item = JobId>) -> Vec<String> {
    jobs.map(|id| id.to_string()).collect()
}

/// The number by which a state is stored.
pub fn worker_code(state: WorkerState) -> i16 {
    let at = WorkerState::ALL.iter().position(|known| *known == state);
    at.and_then(|at| i16::try_from(at).ok()).expect("seven states")
}

/// A damaged row must not keep anybody from giving the worker up: whatever it is, it can end. `doctor` tells of it.
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
    kind.ok_or_else(|| StoreError::Broken(format!("{code} is no kind of worker")))
}

pub fn names(list: &[String]) -> String {
    serde_json::to_string(list).expect("names are JSON")
}

pub fn read_capabilities(capabilities: &str, queues: &str) -> Result<WorkerCapabilities> {
    let read = |text: &str| {
        serde_json::from_str(text).map_err(|e| StoreError::Broken(format!("what a worker can do: {e}: {text}")))
    };
    Ok(WorkerCapabilities { types: read(capabilities)?, queues: read(queues)? })
}

/// The states through which a worker goes when it is let in as `wanted`. One that was connected before stays what it was.
pub fn path_in(was: Option<WorkerState>, wanted: WorkerState) -> &'static [WorkerState] {
    use WorkerState::*;
    const WAY: [WorkerState; 3] = [Creating, Connecting, Ready];
    let place = |state| WAY.iter().position(|known| *known == state);
    let from = match was {
        None => 0,
        Some(state) => place(state).map_or(WAY.len(), |at| at + 1),
    };
    let to = place(wanted).unwrap_or(WAY.len() - 1) + 1;
    WAY.get(from..to).unwrap_or_default()
}

/// Those of these changes that are allowed, each after the last one that was.
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

/// A way through states, told at one moment for one reason.
pub fn changes(path: &[WorkerState], reason: Option<&str>, now: Timestamp) -> Vec<WorkerChange> {
    path.iter().map(|state| WorkerChange { at: now, state: *state, reason: reason.map(str::to_owned) }).collect()
}

/// How a worker's server went.
#[derive(Clone, Copy)]
pub enum ServerExit {
    Died,
    Stopped,
}

impl ServerExit {
    /// Of the workers inside it.
    pub fn reason(self) -> &'static str {
        match self {
            ServerExit::Died => "its server died",
            ServerExit::Stopped => "its server stopped",
        }
    }

    /// Of the workers that were connected to it; true before their deadline and after it.
    pub fn waiting_reason(self) -> &'static str {
        match self {
            ServerExit::Died => "its server died, and it has not come back",
            ServerExit::Stopped => "its server stopped, and it has not come back",
        }
    }
}

/// How long a worker is waited for that has no server any more.
pub fn deadline_without_server(
    transport: &str,
    before: Option<i64>,
    grace_periods: GracePeriods,
    now: Timestamp,
) -> i64 {
    if transport == "http" {
        return now.plus_ms(grace_periods.silence_ms).as_ms();
    }
    let reconnect = now.plus_ms(grace_periods.reconnect_ms).as_ms();
    before.map_or(reconnect, |before| before.min(reconnect))
}

/// What the sweep says of a worker that nobody gave a reason for.
pub const NO_HEARTBEAT: &str = "it was not heard of";

impl WorkerEnd {
    /// What stands in the worker's record.
    pub(crate) fn reason(&self) -> String {
        match self {
            WorkerEnd::Left { reason } => reason.clone(),
            WorkerEnd::Lost { reason, .. } => format!("lost: {reason}"),
        }
    }

    /// What the logs of its jobs say.
    pub(crate) fn text(&self, key: &str) -> String {
        match self {
            WorkerEnd::Left { reason } => format!("worker {key} left: {reason}"),
            WorkerEnd::Lost { reason, .. } => format!("worker {key} was lost: {reason}"),
        }
    }

    pub(crate) fn release_reason<'a>(&self, worker: faena_domain::WorkerId, text: &'a str) -> ReleaseReason<'a> {
        match self {
            WorkerEnd::Left { .. } => ReleaseReason::Left { text, worker: Some(worker) },
            WorkerEnd::Lost { delay_ms, .. } => ReleaseReason::Lost { text, worker, delay_ms: *delay_ms },
        }
    }
}

#[cfg(test)]
mod tests {
    use WorkerState::*;

    use super::*;

    #[test]
    fn a_worker_is_let_in_through_allowed_moves_only() {
        assert_eq!(path_in(None, Ready), [Creating, Connecting, Ready]);
        assert_eq!(path_in(None, Creating), [Creating]);
        assert_eq!(path_in(Some(Creating), Ready), [Connecting, Ready]);
        assert_eq!(path_in(Some(Connecting), Ready), [Ready]);
        for was in WorkerState::ALL {
            for wanted in WorkerState::ALL {
                let mut state = was;
                for next in path_in(Some(was), wanted) {
                    assert!(state.can_transition_to(*next), "{was} to {wanted}: {state} -> {next}");
                    state = *next;
                }
                if !matches!(was, Creating | Connecting) {
                    assert_eq!(state, was, "one that was connected stays what it was");
                }
            }
        }
    }

    #[test]
    fn changes_that_are_not_allowed_are_passed() {
        let told = changes(&[Busy, Busy, Creating, Draining, Ready], None, Timestamp::from_ms(1));
        let kept: Vec<_> = allowed(Ready, &told).into_iter().map(|change| change.state).collect();
        assert_eq!(kept, [Busy, Draining, Ready]);
        assert!(allowed(Terminated, &told).is_empty());
    }

    #[test]
    fn stored_numbers_stay_what_they_are() {
        assert_eq!(WorkerState::ALL.map(worker_code), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(WorkerKind::ALL.map(kind_code), [0, 1, 2]);
        assert!(WorkerState::ALL.into_iter().all(|state| worker_state(worker_code(state)) == state));
        assert_eq!(worker_state(77), WorkerState::Busy, "it can end");
        assert!(worker_kind(-1).is_err());
    }
}
