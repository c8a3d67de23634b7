//! Nodes, and the findings of `faena doctor`.

use faena_domain::{NodeId, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Response of `GET /api/v1/nodes`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NodeList {
    /// The oldest first.
    pub nodes: Vec<NodeView>,
}

/// A server process that is alive.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    pub id: NodeId,
    pub name: String,
    /// Version of Faena that it runs.
    pub version: String,
    pub started_at: Timestamp,
    /// When it last renewed its lease.
    pub last_seen_at: Timestamp,
    /// Whether it is the node that sent this response.
    pub is_this: bool,
}

/// Response of `GET /api/v1/doctor` and `POST /api/v1/doctor`: the last check of this node.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DoctorReport {
    /// Whether a check is running now. The other fields are about the one before it.
    pub is_running: bool,
    /// When the last check ended. `null`: this node has not checked anything since it started.
    pub checked_at: Option<Timestamp>,
    pub took_ms: Option<u64>,
    /// Number of jobs in the database.
    pub jobs: Option<u64>,
    /// Why the check itself failed.
    pub error: Option<String>,
    /// Errors first.
    pub findings: Vec<DoctorFinding>,
}

/// A violated invariant, or a problem of the configuration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DoctorFinding {
    pub code: String,
    pub severity: DoctorSeverity,
    pub count: u64,
    pub text: String,
    /// What the operator can do about it.
    pub advice: String,
    /// Whether `faena doctor --fix` repairs it.
    pub fixable: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DoctorSeverity {
    Error,
    Warning,
}
