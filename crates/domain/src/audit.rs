//! Who did what, as `GET /api/v1/audit` shows it.

use serde::{Deserialize, Serialize};

use crate::Timestamp;

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AuditRow {
    pub sequence: i64,
    pub at: Timestamp,
    /// A key, a person, or from where it came.
    pub actor: String,
    pub action: String,
    pub target: String,
    pub details: serde_json::Value,
    /// How many things it changed.
    pub count: u64,
}
