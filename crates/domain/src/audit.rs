//! The audit log: `GET /api/v1/audit`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// One action of a user or an API key.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct AuditRow {
    pub sequence: i64,
    pub at: Timestamp,
    /// API key, user, or address of the caller.
    pub actor: String,
    pub action: String,
    pub target: String,
    pub details: serde_json::Value,
    /// Number of objects that the action changed.
    pub count: u64,
}
