//! A worker as it is stored and shown.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, WorkerState};

/// Where a worker runs and who looks after its process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerKind {
    /// Inside a server process.
    BuiltIn,
    /// Any program that has connected.
    Remote,
    /// A process that Faena has started.
    Pool,
}

impl WorkerKind {
    pub const ALL: [WorkerKind; 3] = [WorkerKind::BuiltIn, WorkerKind::Remote, WorkerKind::Pool];

    pub fn as_str(self) -> &'static str {
        match self {
            WorkerKind::BuiltIn => "built_in",
            WorkerKind::Remote => "remote",
            WorkerKind::Pool => "pool",
        }
    }
}

/// What a worker can do: types by name, or by a prefix with `*` behind it; and from which queues (none named: from all).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct WorkerCapabilities {
    pub types: Vec<String>,
    pub queues: Vec<String>,
}

impl WorkerCapabilities {
    pub fn covers(&self, queue: &str, kind: &str) -> bool {
        let runs = self.types.iter().any(|capability| match capability.strip_suffix('*') {
            Some(prefix) => kind.starts_with(prefix),
            None => capability == kind,
        });
        runs && (self.queues.is_empty() || self.queues.iter().any(|known| known == queue))
    }
}

/// A worker whole, as `GET /api/v1/workers/:id` shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerView {
    /// What it calls itself, or was called at its first registration.
    pub id: String,
    /// One life of it: from its registration to its end. A worker that was lost and comes back has a new one.
    pub registration_id: String,
    pub name: Option<String>,
    pub kind: WorkerKind,
    /// `websocket`, `grpc`, `http`; empty for the built-in worker and for one that has not connected yet.
    pub transport: String,
    pub state: WorkerState,
    pub category: String,
    /// Why it is in this state, where that is not plain.
    pub reason: Option<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    pub concurrency: u32,
    pub pool: Option<String>,
    /// The server it is connected to.
    pub node: Option<String>,
    pub registered_at: Timestamp,
    pub last_seen_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// When it is given up for lost unless it comes back.
    pub deadline: Option<Timestamp>,
    pub completed: u64,
    pub failed: u64,
    /// `closed`, `open`, `half_open`.
    pub breaker: String,
    /// Jobs in its hands; only of the worker shown whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<String>,
    /// Its changes of state, oldest first; only of the worker shown whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<WorkerChange>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerChange {
    pub at: Timestamp,
    pub state: WorkerState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able(capabilities: &[&str], queues: &[&str]) -> WorkerCapabilities {
        let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        WorkerCapabilities { types: own(capabilities), queues: own(queues) }
    }

    #[test]
    fn a_worker_runs_the_types_it_names() {
        assert!(able(&["email.send"], &[]).covers("default", "email.send"));
        assert!(!able(&["email.send"], &[]).covers("default", "email.sender"));
        assert!(!able(&[], &[]).covers("default", "email.send"));
    }

    #[test]
    fn a_star_stands_for_every_ending() {
        assert!(able(&["email.*"], &[]).covers("default", "email.send"));
        assert!(!able(&["email.*"], &[]).covers("default", "mail.send"));
        assert!(able(&["*"], &[]).covers("default", "anything"));
    }

    #[test]
    fn a_worker_with_queues_takes_from_these_only() {
        let worker = able(&["*"], &["fast", "slow"]);
        assert!(worker.covers("slow", "x"));
        assert!(!worker.covers("default", "x"));
    }
}
