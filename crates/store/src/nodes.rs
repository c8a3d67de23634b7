//! Nodes: the server processes that share one database.

use async_trait::async_trait;
use faena_domain::{JobId, NodeId, Run, Timestamp};

use crate::{LaneId, Result};

/// Nodes: the server processes and their leases.
#[async_trait]
pub trait NodeStore: Send + Sync + 'static {
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
    /// Workers that were connected to a dead node keep their jobs and have a grace period to reconnect; built-in workers end with their node.
    /// Also releases the claims of workers that have ended, and webhooks that dead nodes were sending.
    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered>;

    /// Releases claims of this node, and of workers connected to it, that were made before `before` and whose answer was lost.
    ///
    /// `known` are the runs of which the node has jobs.
    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, before: Timestamp, now: Timestamp) -> Result<usize>;

    /// Returns what a node may have missed without signals: lanes with ready jobs, requested cancellations, the next due time, dead nodes.
    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll>;
}

/// How long workers may be silent, and how long orphaned jobs wait.
#[derive(Clone, Copy, Debug)]
pub struct GracePeriods {
    pub orphan_delay_ms: i64,
    /// Time for a worker whose server died to reconnect to another one.
    pub reconnect_ms: i64,
    /// Time between two calls of a worker without a connection.
    pub silence_ms: i64,
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
    /// Jobs that had started; they use an attempt.
    pub orphaned: usize,
    /// Jobs that had not started, as far as is known; they are ready again.
    pub returned: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Poll {
    pub ready_lanes: Vec<LaneId>,
    /// Jobs of this node whose cancellation was requested, with the reason.
    pub cancels: Vec<(JobId, String)>,
    pub next_due_at: Option<Timestamp>,
    /// Live nodes, including this one.
    pub nodes: usize,
    /// Whether something must be recovered: a lease has ended, a claim has no live owner, or a live worker has a dead
    /// server.
    pub orphans: bool,
}
