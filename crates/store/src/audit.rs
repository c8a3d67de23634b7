//! How the audit log tells of what people do to jobs and workers.

use serde_json::Value;

use crate::AuditEntry;

/// One act on one thing. `None`: nobody's, or part of something that has an entry of its own.
pub fn act(by: Option<&str>, action: &str, target: impl ToString, details: Value) -> Option<AuditEntry> {
    by.map(|by| AuditEntry { actor: by.into(), action: action.into(), target: target.to_string(), details, count: 1 })
}

pub fn drain_action(drain: bool) -> &'static str {
    if drain { "worker.drain" } else { "worker.resume" }
}

/// How a job's log tells who has given it new tries.
pub fn retried_by(by: Option<&str>) -> String {
    format!("by {}", by.unwrap_or("a bulk action"))
}
