//! Settings of queues, and limits: the store methods, and how rows are read. Each process caches all settings.
//!
//! A setting made through the API takes precedence over the configuration and survives a restart. Removing a limit leaves a row without
//! numbers, so that the configuration does not restore it.

use std::sync::Arc;

use async_trait::async_trait;
use faena_domain::{Bucket, Fairness, Limit, Pause, QueueRule, Rate, Rules, Scope, Timestamp};
use parking_lot::RwLock;
use serde_json::{Map, Value, json};

use crate::{AuditEntry, Result, task_limits::MACHINE};

/// Settings of queues, and limits.
#[async_trait]
pub trait RuleStore: Send + Sync + 'static {
    /// Returns the settings of queues and limits as this process last read them.
    fn rules(&self) -> Arc<Rules>;

    /// Reads the settings again, because another node may have changed them.
    async fn rules_load(&self) -> Result<Arc<Rules>>;

    /// Applies the configured settings wherever nothing was set through the API.
    async fn rules_configure(&self, configured: ConfiguredRules, now: Timestamp) -> Result<()>;

    /// Changes the settings of a queue, with its entry in the audit log. Creates the queue if it does not exist.
    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()>;

    /// Sets a limit, or removes it if it has no numbers, with its entry in the audit log.
    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()>;

    /// Removes what the API set for a limit, so that `configured` applies again, with its entry in the audit log.
    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()>;

    /// Lists all limits, including those of queues, with their origin.
    async fn limits(&self) -> Result<Vec<StoredLimit>>;
}

/// A change of the settings of a queue. Absent fields stay unchanged.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct QueuePatch {
    /// `Some(None)`: no limit.
    pub concurrency: Option<Option<u32>>,
    pub rate: Option<Option<Rate>>,
    pub strict: Option<bool>,
    pub fairness: Option<Fairness>,
    /// `Some(None)`: resume.
    pub paused: Option<Option<Pause>>,
}

/// The configured settings of queues and limits.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ConfiguredRules {
    pub limits: Vec<(Scope, Limit)>,
    pub queues: Vec<(String, QueueRule)>,
}

/// A limit with its origin.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredLimit {
    pub scope: Scope,
    pub limit: Limit,
    /// `config`, `api` or `machine`.
    pub origin: String,
    pub changed_at: Timestamp,
    pub changed_by: String,
    /// When it last delayed a job.
    pub reached_at: Option<Timestamp>,
    /// Remaining tokens of its rate. For a limit of keys, each key has its own bucket.
    pub bucket: Option<Bucket>,
}

/// The settings as this process last read them.
#[derive(Default)]
pub struct RuleCache(RwLock<Arc<Rules>>);

impl RuleCache {
    pub fn current(&self) -> Arc<Rules> {
        self.0.read().clone()
    }

    pub fn set(&self, rules: Rules) -> Arc<Rules> {
        let rules = Arc::new(rules);
        *self.0.write() = rules.clone();
        rules
    }
}

pub const CONFIG: &str = "config";
pub const API: &str = "api";

/// Returns the origin of a limit that was not set through the API, and who set it.
pub fn configured_by(scope: &Scope) -> (&'static str, &'static str) {
    match scope {
        Scope::Machine(_) => (MACHINE, "the machine"),
        _ => (CONFIG, "the configuration"),
    }
}

pub struct LimitRow {
    pub scope: i16,
    pub name: String,
    pub concurrency: Option<i64>,
    pub rate: Option<(i64, i64)>,
    pub bucket: Option<(f64, i64)>,
    pub origin: String,
    pub changed_at: i64,
    pub changed_by: String,
    pub reached_at: Option<i64>,
}

impl LimitRow {
    pub fn stored(self) -> Option<StoredLimit> {
        let rate = self.rate.map(|(count, period_ms)| Rate {
            count: u32::try_from(count).unwrap_or(u32::MAX),
            period_ms: u64::try_from(period_ms).unwrap_or(1),
        });
        Some(StoredLimit {
            scope: Scope::from_parts(self.scope, self.name)?,
            limit: Limit { concurrency: self.concurrency.map(|n| u32::try_from(n).unwrap_or(u32::MAX)), rate },
            origin: self.origin,
            changed_at: Timestamp::from_ms(self.changed_at),
            changed_by: self.changed_by,
            reached_at: self.reached_at.map(Timestamp::from_ms),
            bucket: self.bucket.map(|(tokens, at)| Bucket { tokens, at: Timestamp::from_ms(at) }),
        })
    }
}

pub struct QueueRow {
    pub name: String,
    pub strict: Option<bool>,
    pub fairness: Option<i16>,
    pub paused_at: Option<i64>,
    pub paused_by: Option<String>,
    pub pause_reason: Option<String>,
}

impl QueueRow {
    fn rule(self) -> (String, QueueRule) {
        let paused = self.paused_at.map(|at| Pause {
            at: Timestamp::from_ms(at),
            by: self.paused_by.unwrap_or_default(),
            reason: self.pause_reason,
        });
        let fairness = self.fairness.map(|n| if n == 1 { Fairness::Key } else { Fairness::None });
        (self.name, QueueRule { strict: self.strict, fairness, paused })
    }
}

pub fn rules(limits: Vec<StoredLimit>, queues: Vec<QueueRow>) -> Rules {
    let queues = queues.into_iter().map(QueueRow::rule).collect();
    let mut rules = Rules { queues, ..Rules::default() };
    for StoredLimit { scope, limit, .. } in limits {
        match scope {
            Scope::Machine(name) => rules.machines.extend(limit.concurrency.map(|max| (name, max))),
            // An empty limit of one key overrides the limit of all keys, so it is kept.
            scope if !limit.is_none() || matches!(scope, Scope::Key(_)) => drop(rules.limits.insert(scope, limit)),
            _ => {}
        }
    }
    rules
}

/// Returns the columns of a limit: concurrency, rate_count, rate_period_ms.
pub fn columns(limit: &Limit) -> (Option<i64>, Option<i64>, Option<i64>) {
    (
        limit.concurrency.map(i64::from),
        limit.rate.map(|rate| i64::from(rate.count)),
        limit.rate.map(|rate| i64::try_from(rate.period_ms).unwrap_or(i64::MAX)),
    )
}

pub fn fairness_code(fairness: Fairness) -> i16 {
    match fairness {
        Fairness::None => 0,
        Fairness::Key => 1,
    }
}

/// Returns the audit entry of a changed queue.
pub fn queue_audit(name: &str, patch: &QueuePatch, by: &str) -> AuditEntry {
    let mut details = Map::new();
    if let Some(concurrency) = patch.concurrency {
        details.insert("concurrency".into(), json!(concurrency));
    }
    if let Some(rate) = patch.rate {
        details.insert("rate".into(), json!(rate));
    }
    if let Some(strict) = patch.strict {
        details.insert("strict".into(), json!(strict));
    }
    if let Some(fairness) = patch.fairness {
        details.insert("fairness".into(), json!(fairness));
    }
    let action = match &patch.paused {
        Some(Some(pause)) => {
            if let Some(reason) = &pause.reason {
                details.insert("reason".into(), json!(reason));
            }
            "queue.pause"
        }
        Some(None) => "queue.resume",
        None => "queue.set",
    };
    AuditEntry {
        actor: by.into(),
        action: action.into(),
        target: name.into(),
        details: Value::Object(details),
        count: 1,
    }
}

pub fn reset_audit(scope: &Scope, configured: Option<Limit>, by: &str) -> AuditEntry {
    let entry = limit_audit(scope, &configured.unwrap_or_default(), by);
    AuditEntry { action: "limit.reset".into(), ..entry }
}

pub fn limit_audit(scope: &Scope, limit: &Limit, by: &str) -> AuditEntry {
    let target = match scope {
        Scope::System => "system".to_owned(),
        other => format!("{} {}", other.kind(), other.parts().1),
    };
    AuditEntry { actor: by.into(), action: "limit.set".into(), target, details: json!(limit), count: 1 }
}
