//! The audit log: the store methods, and the entries of actions on jobs and workers.

use async_trait::async_trait;
use faena_domain::{AuditRow, Timestamp};
use serde_json::Value;

use crate::Result;

/// The audit log.
#[async_trait]
pub trait AuditStore: Send + Sync + 'static {
    /// Adds an entry for an action that no other method records.
    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()>;

    /// Lists actions of people and API keys, newest first.
    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>>;

    /// Returns how many actions match, counted up to [`crate::COUNT_LIMIT`].
    async fn audit_total(&self, filter: AuditFilter) -> Result<u64>;
}

/// One action of a person or API key.
#[derive(Clone, PartialEq, Debug)]
pub struct AuditEntry {
    /// A person, an API key, or where the call came from.
    pub actor: String,
    /// For example `job.cancel`, `queue.pause`, `bulk.retry`.
    pub action: String,
    /// What the action changed.
    pub target: String,
    pub details: serde_json::Value,
    /// How many objects it changed.
    pub count: u64,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct AuditFilter {
    /// Only entries older than this one.
    pub before: Option<i64>,
    pub actor: Option<String>,
    pub action: Option<String>,
    pub target: Option<String>,
}

/// Returns the entry of an action. `None` if the system acts, or a bulk action that has its own entry.
pub fn audit_entry(by: Option<&str>, action: &str, target: impl ToString, details: Value) -> Option<AuditEntry> {
    by.map(|by| AuditEntry { actor: by.into(), action: action.into(), target: target.to_string(), details, count: 1 })
}

pub fn drain_action(drain: bool) -> &'static str {
    if drain { "worker.drain" } else { "worker.resume" }
}

/// Returns the log text of a manual retry.
pub fn retried_by(by: Option<&str>) -> String {
    format!("by {}", by.unwrap_or("a bulk action"))
}
