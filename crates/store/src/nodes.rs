//! Nodes: the server processes that share one database.

use std::collections::BTreeMap;

use async_trait::async_trait;
use faena_domain::{JobId, NodeId, Run, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LaneId, Result};

/// Nodes: the server processes and their leases.
#[async_trait]
pub trait NodeStore: Send + Sync + 'static {
    /// Returns the time of the database's clock if several nodes can share the database. `None`: only this process uses
    /// it.
    async fn shared_time(&self) -> Result<Option<Timestamp>>;

    /// Registers this process as a node. It owns its claims while its lease lasts.
    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()>;

    /// Renews the lease. Returns `false` if the node was declared dead and has lost its claims.
    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool>;

    /// Unregisters a node that stops. Its jobs go back to the queue without using an attempt.
    ///
    /// Workers that were connected to it keep their jobs and have a grace period to reconnect.
    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize>;

    /// Releases the claims of dead nodes: jobs that had started use an attempt and wait, the others are ready again.
    ///
    /// Workers that were connected to a dead node keep their jobs and have a grace period to reconnect; built-in workers end with their
    /// node. Also releases the claims of workers that have ended, and webhooks that dead nodes were sending.
    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<RecoveryCounts>;

    /// Releases claims of this node, and of workers connected to it, that never reached the node or the worker.
    ///
    /// `known`: the runs whose jobs the node has in flight.
    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, cutoff: ClaimCutoff, now: Timestamp)
    -> Result<usize>;

    /// Returns the state that signals would have announced: lanes with ready jobs, requested cancellations, the next due time, dead nodes.
    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll>;

    /// Stores the state of this node's sources and inboxes, so that the other nodes can show it.
    async fn node_report(&self, node: NodeId, inputs: Vec<InputView>) -> Result<()>;

    /// Returns whether this node exports the figures of the whole database. Takes or renews the lease for that.
    ///
    /// One node has the lease at a time. Another node gets it when the lease ends, or when the node that has it has died.
    async fn metrics_lease(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool>;

    /// Returns what each live node last reported, oldest node first.
    async fn node_reports(&self, now: Timestamp) -> Result<Vec<NodeReport>>;
}

/// Selects the claims that a node must know by now.
#[derive(Clone, Copy, Debug)]
pub struct ClaimCutoff {
    /// Claims made before this time, by calls that have ended.
    pub made_before: Timestamp,
    /// Only claims of workers that connected before this time: the node learns the jobs of a worker when its
    /// registration is stored.
    pub connected_before: Timestamp,
}

/// A live node, and what it has reported about its sources and inboxes.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeReport {
    pub node: NodeId,
    pub name: String,
    /// Version of Faena that it runs.
    pub version: String,
    pub started_at: Timestamp,
    /// When it last renewed its lease.
    pub seen_at: Timestamp,
    pub inputs: Vec<InputView>,
}

/// State of a source or inbox on one node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InputView {
    pub name: String,
    pub kind: InputKind,
    pub state: InputState,
    pub down_since: Option<Timestamp>,
    pub down_reason: Option<String>,
    /// Rows or messages that wait, as far as this node knows. `null`: another node works on it.
    pub pending: Option<u64>,
    pub oldest_pending_at: Option<Timestamp>,
    /// What this node has processed since it started, by outcome.
    pub processed: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InputKind {
    Source,
    Inbox,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InputState {
    Up,
    Down,
}

/// Version of Faena that this process runs.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the stored form of a report.
pub(crate) fn inputs_text(inputs: &[InputView]) -> String {
    serde_json::to_string(inputs).expect("views are JSON")
}

/// Reads a stored report. A report of another version of Faena counts as empty.
pub(crate) fn read_inputs(text: &str) -> Vec<InputView> {
    serde_json::from_str(text).unwrap_or_default()
}

/// How long workers may be silent, and how long orphaned jobs wait.
#[derive(Clone, Copy, Debug)]
pub struct GracePeriods {
    pub orphan_delay_ms: i64,
    /// Time for a worker whose node died to reconnect to another one.
    pub reconnect_ms: i64,
    /// Longest time between two requests of a worker that has no open connection.
    pub silence_ms: i64,
}

#[derive(Clone, Debug)]
pub struct NodeInfo {
    pub id: NodeId,
    /// Display name, such as the host name.
    pub name: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RecoveryCounts {
    /// Dead nodes that were removed; with SQLite 1 if any claim was released.
    pub nodes: usize,
    /// Jobs that use an attempt, because they had started or their worker was lost.
    pub orphaned: usize,
    /// Jobs that are ready again without using an attempt.
    pub returned: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Poll {
    pub ready_lanes: Vec<LaneId>,
    /// Jobs of this node whose cancellation was requested, with the reason.
    pub cancel_requests: Vec<(JobId, String)>,
    pub next_due_at: Option<Timestamp>,
    /// Live nodes, including this one.
    pub nodes: usize,
    /// Whether something must be recovered: a lease has ended, a claim has no live owner, or the node of a live
    /// worker is dead.
    pub needs_recovery: bool,
}
