//! KeyLocks due times into jobs.
//!
//! There is no leader. Every node sleeps until the next due time and then asks the store, which gives each schedule that is due to one
//! of them, under its row's lock; the job, the record of the due time and the schedule's next time are one transaction. So a node
//! that dies in the middle has either done all of it or nothing, and a node that believes something old changes nothing.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use faena_domain::{
    Timestamp,
    schedule::{TickOutcome, TickRow},
};
use faena_store::{Store, StoreError};
use tokio::sync::Notify;

use crate::Round;

/// How many schedules one transaction deals with.
const BATCH: usize = 1_000;

/// How soon a node looks again after what another one is just dealing with.
const WITH_OTHERS_MS: i64 = 100;

/// What became of due times here, for the metrics.
#[derive(Default)]
pub struct Schedules {
    pub nudge: Arc<Notify>,
    counts: [AtomicU64; TickOutcome::ALL.len()],
    /// By how much the latest job that was made of a due time was late.
    late_ms: AtomicU64,
}

impl Schedules {
    pub fn count(&self, outcome: TickOutcome) -> u64 {
        self.counts[outcome as usize].load(Ordering::Relaxed)
    }

    pub fn late_ms(&self) -> u64 {
        self.late_ms.load(Ordering::Relaxed)
    }

    /// A person has made a job of a schedule.
    pub fn triggered(&self) {
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
        tracing::warn!(missed, "due times of schedules were missed; GET /api/v1/schedules/:id/ticks says why");
    }
    // What is due and was not given to us is with another node, which may yet fail.
    let is_due = fired.next_at.is_some_and(|at| at <= now);
    let with_others = fired.schedules == 0 && is_due;
    let next_at = if with_others { Some(now.plus_ms(WITH_OTHERS_MS)) } else { fired.next_at };
    Ok(Round { handled: fired.schedules, more: fired.schedules > 0 && is_due, next_at })
}
