//! Actions on many jobs, as both engines keep them and tell of them in the audit log.
//!
//! An action goes through the jobs in the order of their ids, parents before their children, and notes in the transaction of
//! each step how far it has come: that note is the fence between nodes, and what goes on after a crash.

use faena_domain::{BulkId, JobId, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{AuditEntry, Bulk, BulkAction, BulkStep, Filter, NewBulk, Result, StoreError};

pub const CANCEL_REASON: &str = "cancelled by request";

/// What became of the jobs of one step.
#[derive(Default)]
pub struct Acted {
    pub done: i64,
    pub skipped: i64,
}

impl Acted {
    /// Counts one job; an error that is no answer to this one job ends the step.
    pub fn count(&mut self, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => self.done += 1,
            Err(StoreError::NotFound(_) | StoreError::InvalidTransition { .. } | StoreError::Conflict { .. }) => {
                self.skipped += 1;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

pub struct BulkRow {
    pub id: Uuid,
    pub action: String,
    pub filter: String,
    pub actor: String,
    pub per_second: i64,
    pub created_at: i64,
    pub upto: Uuid,
    pub last: Option<Uuid>,
    pub matched: i64,
    pub done: i64,
    pub skipped: i64,
    pub due_at: Option<i64>,
    pub finished_at: Option<i64>,
    pub error: Option<String>,
}

pub const COLUMNS: &str = "id, action, filter, actor, per_second, created_at, upto, last, matched, done, skipped, due_at, \
     finished_at, error";

impl BulkRow {
    pub fn bulk(self) -> Result<Bulk> {
        let broken =
            |what: &str| StoreError::Broken(format!("the {what} of bulk action {} is not understood", self.id));
        Ok(Bulk {
            id: BulkId(self.id),
            action: BulkAction::parse(&self.action).ok_or_else(|| broken("kind"))?,
            filter: serde_json::from_str(&self.filter).map_err(|_| broken("filter"))?,
            actor: self.actor,
            per_second: u32::try_from(self.per_second).ok().filter(|n| *n > 0),
            created_at: Timestamp::from_ms(self.created_at),
            upto: JobId(self.upto),
            last: self.last.map(JobId),
            matched: self.matched.unsigned_abs(),
            done: self.done.unsigned_abs(),
            skipped: self.skipped.unsigned_abs(),
            due_at: self.due_at.map(Timestamp::from_ms),
            finished_at: self.finished_at.map(Timestamp::from_ms),
            error: self.error,
        })
    }
}

/// Rows that are looked at for one that is due.
pub const LOOK: usize = 50;

/// The first that this version understands. Others (of a newer version, say) are left alone and hold nobody up.
pub fn first_good(rows: Vec<BulkRow>) -> Option<Bulk> {
    rows.into_iter().find_map(|row| match row.bulk() {
        Ok(bulk) => Some(bulk),
        Err(error) => {
            tracing::warn!(%error, "a bulk action is left alone");
            None
        }
    })
}

impl Filter {
    /// As the API writes it, without what it does not ask for.
    pub fn shown(&self) -> Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Value::Object(fields) = &mut value {
            fields.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()));
        }
        value
    }
}

/// One that takes its time is told of when it begins and when it is over; one that is done at once, when it is done.
pub fn begin_audit(bulk: &NewBulk) -> Option<AuditEntry> {
    bulk.per_second.map(|per_second| AuditEntry {
        actor: bulk.actor.clone(),
        action: format!("bulk.{}", bulk.action.as_str()),
        target: bulk.id.to_string(),
        details: json!({ "filter": bulk.filter.shown(), "perSecond": per_second }),
        count: bulk.matched,
    })
}

pub fn end_audit(bulk: &Bulk, done: u64, skipped: u64) -> AuditEntry {
    let action = bulk.action.as_str();
    AuditEntry {
        actor: bulk.actor.clone(),
        action: if bulk.per_second.is_some() { format!("bulk.{action}.end") } else { format!("bulk.{action}") },
        target: bulk.id.to_string(),
        details: json!({ "filter": bulk.filter.shown(), "matched": bulk.matched, "skipped": skipped }),
        count: done,
    }
}

pub fn stop_audit(bulk: &Bulk, by: &str) -> AuditEntry {
    AuditEntry {
        actor: by.into(),
        action: "bulk.stop".into(),
        target: bulk.id.to_string(),
        details: json!({ "action": bulk.action.as_str(), "matched": bulk.matched, "skipped": bulk.skipped }),
        count: bulk.done,
    }
}

/// Whether a bulk action still stands where the step begins.
pub fn is_where(step: &BulkStep, last: Option<Uuid>, due_at: Option<i64>) -> bool {
    due_at.is_some() && due_at == step.bulk.due_at.map(Timestamp::as_ms) && last == step.bulk.last.map(|id| id.0)
}
