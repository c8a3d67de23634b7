//! A worker: what it can run, and how the API shows it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Timestamp, WorkerState};

/// Kind of a worker: where it runs, and what manages its process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerKind {
    /// Part of a server process.
    BuiltIn,
    /// A program that connects to a server, and that its operator manages.
    Remote,
    /// A process that a server starts and stops.
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

/// Job types and queues that a worker serves.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct WorkerCapabilities {
    /// Names, or prefixes followed by `*`.
    pub types: Vec<String>,
    /// Empty: all queues.
    pub queues: Vec<String>,
}

impl WorkerCapabilities {
    /// Returns whether the worker can run jobs of type `kind` from `queue`.
    pub fn covers(&self, queue: &str, kind: &str) -> bool {
        let runs = self.types.iter().any(|capability| match capability.strip_suffix('*') {
            Some(prefix) => kind.starts_with(prefix),
            None => capability == kind,
        });
        runs && (self.queues.is_empty() || self.queues.iter().any(|known| known == queue))
    }
}

/// A worker with all its details, as `GET /api/v1/workers/:id` shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerView {
    /// Name that the worker chose, or received when it first registered.
    pub id: String,
    /// Id of this registration. A worker that was lost and reconnects gets a new one.
    pub registration_id: String,
    pub name: Option<String>,
    /// Version of the worker's program, if it sent one. For the built-in worker, the version of Faena.
    pub version: Option<String>,
    pub kind: WorkerKind,
    /// `websocket`, `grpc` or `http`; empty for the built-in worker and for a worker that has not connected yet.
    pub transport: String,
    pub state: WorkerState,
    pub category: String,
    /// Cause of its state, if the state alone does not explain it.
    pub reason: Option<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    pub concurrency: u32,
    pub pool: Option<String>,
    /// Node that the worker is connected to.
    pub node: Option<String>,
    pub registered_at: Timestamp,
    pub last_seen_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// Time at which it is declared lost unless it reconnects.
    pub deadline: Option<Timestamp>,
    pub completed: u64,
    pub failed: u64,
    /// State of the circuit breaker: while it is open, the worker receives no jobs.
    #[schemars(extend("enum" = ["closed", "open", "half_open"]))]
    pub breaker: String,
    /// How many jobs it has in flight. For the built-in worker this includes jobs that wait for a free slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// Jobs in flight; not in lists, and empty for the built-in worker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<String>,
    /// Changes of its state, oldest first; not in lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<WorkerChange>,
}

/// A change of a worker's state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
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

    fn serves(types: &[&str], queues: &[&str]) -> WorkerCapabilities {
        let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        WorkerCapabilities { types: own(types), queues: own(queues) }
    }

    #[test]
    fn a_worker_runs_the_types_it_names() {
        assert!(serves(&["email.send"], &[]).covers("default", "email.send"));
        assert!(!serves(&["email.send"], &[]).covers("default", "email.sender"));
        assert!(!serves(&[], &[]).covers("default", "email.send"));
    }

    #[test]
    fn a_star_matches_every_suffix() {
        assert!(serves(&["email.*"], &[]).covers("default", "email.send"));
        assert!(!serves(&["email.*"], &[]).covers("default", "mail.send"));
        assert!(serves(&["*"], &[]).covers("default", "anything"));
    }

    #[test]
    fn a_worker_with_queues_serves_only_these() {
        let worker = serves(&["*"], &["fast", "slow"]);
        assert!(worker.covers("slow", "x"));
        assert!(!worker.covers("default", "x"));
    }
}
