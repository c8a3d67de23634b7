//! Counts the workers that this node has registered and ended, and measures how long they spent in their states.

use std::sync::atomic::{AtomicU64, Ordering};

use faena_domain::{Timestamp, WorkerState};
use parking_lot::Mutex;

use super::histogram::{Histogram, elapsed_ms};

#[derive(Default)]
pub struct WorkerMeasures {
    created: AtomicU64,
    terminated: AtomicU64,
    states: Mutex<[Histogram; WorkerState::ALL.len()]>,
}

impl WorkerMeasures {
    pub fn created(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    pub fn terminated(&self) -> u64 {
        self.terminated.load(Ordering::Relaxed)
    }

    /// Returns the durations of each state that a worker can leave.
    pub fn states(&self) -> Vec<(WorkerState, Histogram)> {
        let states = self.states.lock().clone();
        let all = WorkerState::ALL.into_iter().zip(states);
        all.filter(|(state, _)| *state != WorkerState::Terminated).collect()
    }

    /// Counts a new registration. `was`: its state before, if the registration continues.
    pub(crate) fn record_registration(&self, was: Option<WorkerState>, is_connected: bool, now: Timestamp) {
        if was.is_none() {
            self.created.fetch_add(1, Ordering::Relaxed);
        }
        if !is_connected {
            return;
        }
        // A worker that connects leaves `Creating` and `Connecting` immediately; the process of a pool was created
        // before.
        if was.is_none() {
            self.observe(WorkerState::Creating, now, now);
        }
        if matches!(was, None | Some(WorkerState::Creating)) {
            self.observe(WorkerState::Connecting, now, now);
        }
    }

    /// Counts a worker that has ended. `last`: its last state and since when, if this node knows it.
    pub(crate) fn record_end(&self, last: Option<(WorkerState, Timestamp)>, now: Timestamp) {
        self.terminated.fetch_add(1, Ordering::Relaxed);
        if let Some((state, since)) = last {
            self.observe(state, since, now);
            if state.can_transition_to(WorkerState::Terminating) {
                self.observe(WorkerState::Terminating, now, now);
            }
        }
    }

    /// Measures a state that a worker has left.
    pub(crate) fn observe(&self, state: WorkerState, since: Timestamp, now: Timestamp) {
        self.states.lock()[state as usize].observe(elapsed_ms(since, now));
    }
}
