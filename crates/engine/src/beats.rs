//! The last sign of life of every loop, for `/health/ready`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use faena_domain::Timestamp;
use parking_lot::Mutex;

#[derive(Clone, Default)]
pub struct Beats(Arc<Mutex<BTreeMap<Arc<str>, Beat>>>);

#[derive(Clone, Debug)]
pub struct Beat {
    /// When a round last ended well.
    pub last_at: Option<Timestamp>,
    pub period: Duration,
    pub rounds: u64,
    pub handled: u64,
    /// Rounds that failed since the last good one, and why.
    pub failures: u64,
    pub last_error: Option<String>,
    /// When the round began that is under way.
    pub busy_since: Option<Timestamp>,
    pub stopped: bool,
}

impl Beat {
    /// Whether it has been silent for longer than a minute beyond its period.
    pub fn is_late(&self, now: Timestamp) -> bool {
        let limit_ms = i64::try_from(self.period.as_millis()).unwrap_or(i64::MAX).saturating_add(60_000);
        self.stopped || self.last_at.is_none_or(|at| now.ms_since(at) > limit_ms)
    }
}

impl Beats {
    /// A loop exists from here on, whether it ever beats or not.
    pub fn announce(&self, name: &Arc<str>, period: Duration, now: Timestamp) {
        let beat = Beat {
            last_at: Some(now),
            period,
            rounds: 0,
            handled: 0,
            failures: 0,
            last_error: None,
            busy_since: None,
            stopped: false,
        };
        self.0.lock().insert(name.clone(), beat);
    }

    pub fn update(&self, name: &str, change: impl FnOnce(&mut Beat)) {
        if let Some(beat) = self.0.lock().get_mut(name) {
            change(beat);
        }
    }

    pub fn all(&self) -> BTreeMap<Arc<str>, Beat> {
        self.0.lock().clone()
    }
}
