//! Turns due times of schedules into jobs.
//!
//! There is no leader. Every node sleeps until the next due time and then asks the store, which gives each due schedule to
//! one of them under the lock of its row. The job, the tick and the schedule's next due time are one transaction: a node
//! that dies in between has done all of it or nothing, and a node with an outdated view changes nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use faena_domain::{
    Timestamp,
    schedule::{TickOutcome, TickRow},
};
use faena_store::{Store, StoreError};

use crate::Round;

/// Schedules per transaction.
const BATCH: usize = 1_000;

/// How soon a node retries a schedule that another node is processing.
const RECHECK_MS: i64 = 100;

/// Counts of ticks on this node, for the metrics.
#[derive(Default)]
pub struct Schedules {
    counts: [AtomicU64; TickOutcome::ALL.len()],
    /// Lateness of the last job that was created at a due time.
    late_ms: AtomicU64,
}

impl Schedules {
    pub fn count(&self, outcome: TickOutcome) -> u64 {
        self.counts[outcome as usize].load(Ordering::Relaxed)
    }

    pub fn late_ms(&self) -> u64 {
        self.late_ms.load(Ordering::Relaxed)
    }

    /// Counts a job that a caller triggered.
    pub(crate) fn record_trigger(&self) {
        self.counts[TickOutcome::Triggered as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn add(&self, tick: &TickRow) {
        self.counts[tick.outcome as usize].fetch_add(tick.count.unwrap_or(1), Ordering::Relaxed);
        if tick.outcome == TickOutcome::Fired {
            let late = u64::try_from(tick.at.ms_since(tick.due_at)).unwrap_or(0);
            self.late_ms.store(late, Ordering::Relaxed);
        }
    }
}

pub async fn run_once(store: &dyn Store, schedules: &Schedules, now: Timestamp) -> Result<Round, StoreError> {
    let fired = store.schedule_fire(BATCH, now).await?;
    fired.ticks.iter().for_each(|tick| schedules.add(tick));
    let missed: u64 =
        fired.ticks.iter().filter(|tick| tick.outcome == TickOutcome::Missed).map(|tick| tick.count.unwrap_or(1)).sum();
    if missed > 0 {
        tracing::warn!(missed, "schedule due times missed");
    }
    // Another node is processing the due schedule that this node did not get; that node may still fail.
    let is_due = fired.next_at.is_some_and(|at| at <= now);
    let is_elsewhere = fired.schedules == 0 && is_due;
    let next_at = if is_elsewhere { Some(now.plus_ms(RECHECK_MS)) } else { fired.next_at };
    Ok(Round { handled: fired.schedules, more: fired.schedules > 0 && is_due, next_at })
}
