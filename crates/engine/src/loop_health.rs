//! Health of every loop of this process, for `/health/ready`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use faena_domain::Timestamp;
use parking_lot::Mutex;

/// Statuses of all loops by name. Clones share them.
#[derive(Clone, Default)]
pub struct LoopHealth(Arc<Mutex<BTreeMap<Arc<str>, LoopStatus>>>);

#[derive(Clone, Debug)]
pub struct LoopStatus {
    /// End of the last successful round.
    pub last_at: Option<Timestamp>,
    pub period: Duration,
    pub rounds: u64,
    pub handled: u64,
    /// Rounds that failed since the last successful one.
    pub failures: u64,
    pub all_failures: u64,
    pub last_error: Option<String>,
    /// Start of the round in progress.
    pub busy_since: Option<Timestamp>,
    pub stopped: bool,
}

impl LoopStatus {
    /// Returns whether the last success is more than a minute older than the period, or the loop has stopped.
    pub fn is_late(&self, now: Timestamp) -> bool {
        let limit_ms = i64::try_from(self.period.as_millis()).unwrap_or(i64::MAX).saturating_add(60_000);
        self.stopped || self.last_at.is_none_or(|at| now.ms_since(at) > limit_ms)
    }
}

impl LoopHealth {
    /// Adds a loop. It counts as healthy from `now` on, so a loop that never completes a round becomes late.
    pub fn register(&self, name: &Arc<str>, period: Duration, now: Timestamp) {
        let status = LoopStatus {
            last_at: Some(now),
            period,
            rounds: 0,
            handled: 0,
            failures: 0,
            all_failures: 0,
            last_error: None,
            busy_since: None,
            stopped: false,
        };
        self.0.lock().insert(name.clone(), status);
    }

    pub fn update(&self, name: &str, change: impl FnOnce(&mut LoopStatus)) {
        if let Some(status) = self.0.lock().get_mut(name) {
            change(status);
        }
    }

    pub fn all(&self) -> BTreeMap<Arc<str>, LoopStatus> {
        self.0.lock().clone()
    }
}
