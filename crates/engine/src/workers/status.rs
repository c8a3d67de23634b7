//! Status of a connected worker, and its changes that are not stored yet.

use std::{collections::HashMap, sync::Arc};

use faena_domain::{JobId, Run, Timestamp, WorkerChange, WorkerState};
use faena_store::WorkerUpdate;

use super::ConnectedWorker;
use crate::{
    breaker::{Breaker, BreakerState},
    in_flight::InFlightJob,
    measure::Measures,
};

pub(crate) struct WorkerStatus {
    pub state: WorkerState,
    pub in_flight: HashMap<JobId, Arc<InFlightJob>>,
    /// Runs that this server has ended, but whose handler has not confirmed that it stopped. Each occupies a slot.
    pub stopping: HashMap<JobId, Stopping>,
    pub breaker: Breaker,
    pub seen_at: Timestamp,
    pub disconnected_at: Option<Timestamp>,
    pub drain: bool,
    /// It has received a job. An ephemeral worker gets no other.
    pub used: bool,
    pub is_ephemeral: bool,
    /// When it entered its state.
    since: Timestamp,
    measures: Arc<Measures>,
    changes: Vec<WorkerChange>,
    completed: u64,
    failed: u64,
    stored: StoredStatus,
}

/// What the store knows of a worker.
struct StoredStatus {
    seen_at: Timestamp,
    disconnected_at: Option<Timestamp>,
    breaker: BreakerState,
}

pub(crate) struct Stopping {
    pub run: Run,
    pub reason: String,
    pub since: Timestamp,
    /// Whether the job's log already says that the handler does not stop.
    pub is_reported: bool,
}

impl WorkerStatus {
    pub fn new(
        state: WorkerState,
        breaker: Breaker,
        is_ephemeral: bool,
        measures: Arc<Measures>,
        now: Timestamp,
    ) -> WorkerStatus {
        WorkerStatus {
            state,
            in_flight: HashMap::new(),
            stopping: HashMap::new(),
            stored: StoredStatus { seen_at: now, disconnected_at: None, breaker: breaker.state(now) },
            breaker,
            seen_at: now,
            disconnected_at: None,
            drain: false,
            used: false,
            is_ephemeral,
            since: now,
            measures,
            changes: Vec::new(),
            completed: 0,
            failed: 0,
        }
    }

    /// Changes the state to `next` if that is a legal transition; otherwise does nothing.
    pub fn transition(&mut self, next: WorkerState, reason: Option<&str>, now: Timestamp) {
        if self.state.can_transition_to(next) {
            self.measures.workers.observe(self.state, self.since, now);
            (self.state, self.since) = (next, now);
            self.changes.push(WorkerChange { at: now, state: next, reason: reason.map(str::to_owned) });
        }
    }

    /// Returns the worker's state and when the worker entered it.
    pub fn state_since(&self) -> (WorkerState, Timestamp) {
        (self.state, self.since)
    }

    /// Continues after an earlier connection of the worker, which entered `state` at `since`. If the state is the same,
    /// keeps its beginning; otherwise measures how long the earlier state lasted.
    pub fn continue_state(&mut self, (state, since): (WorkerState, Timestamp)) {
        if state == self.state {
            self.since = since;
        } else {
            self.measures.workers.observe(state, since, self.since);
        }
    }

    /// Sets the state to ready, busy or draining, according to its jobs and its drain request.
    pub fn update_state(&mut self, now: Timestamp) {
        use WorkerState::{Busy, Draining, Ready};
        if self.state == Draining && !self.drain {
            self.transition(Ready, Some("the drain was cancelled"), now);
        }
        if self.drain && matches!(self.state, Ready | Busy) {
            self.transition(Draining, None, now);
        }
        match (self.state, self.in_flight.is_empty()) {
            (Ready, false) => self.transition(Busy, None, now),
            // An ephemeral worker that has run its only job is never ready again.
            (Busy, true) if !self.is_ephemeral => self.transition(Ready, None, now),
            _ => {}
        }
    }

    pub fn count_end(&mut self, completed: bool) {
        if completed { self.completed += 1 } else { self.failed += 1 }
    }

    /// Returns what the store has to know, if anything changed. A heartbeat alone is stored every `heartbeat_ms`.
    pub fn take_update(
        &mut self,
        worker: &ConnectedWorker,
        grace_ms: i64,
        heartbeat_ms: i64,
        now: Timestamp,
    ) -> Option<WorkerUpdate> {
        let breaker = self.breaker.state(now);
        let is_changed = !self.changes.is_empty()
            || self.completed + self.failed > 0
            || self.disconnected_at != self.stored.disconnected_at
            || breaker != self.stored.breaker
            || self.seen_at.ms_since(self.stored.seen_at) >= heartbeat_ms;
        if !is_changed {
            return None;
        }
        self.stored = StoredStatus { seen_at: self.seen_at, disconnected_at: self.disconnected_at, breaker };
        Some(WorkerUpdate {
            id: worker.id,
            session: worker.session,
            changes: shorten(std::mem::take(&mut self.changes)),
            seen_at: self.seen_at,
            deadline: self.disconnected_at.map(|since| since.plus_ms(grace_ms)),
            completed: std::mem::take(&mut self.completed),
            failed: std::mem::take(&mut self.failed),
            breaker: breaker.as_str(),
        })
    }

    /// Makes the next update due. The store's answer to it contains the requests for this worker.
    pub fn request_update(&mut self) {
        self.stored.seen_at = Timestamp::from_ms(0);
    }

    /// Restores an update that could not be stored.
    pub fn restore_update(&mut self, update: WorkerUpdate) {
        let mut changes = update.changes;
        changes.append(&mut self.changes);
        self.changes = changes;
        self.completed += update.completed;
        self.failed += update.failed;
        self.request_update();
    }
}

/// Drops changes back and forth between ready and busy: the last of them is enough.
fn shorten(changes: Vec<WorkerChange>) -> Vec<WorkerChange> {
    use WorkerState::{Busy, Ready};
    let mut short: Vec<WorkerChange> = Vec::new();
    for change in changes {
        if let [.., before, last] = short.as_slice()
            && matches!((before.state, last.state, change.state), (Ready, Busy, Ready) | (Busy, Ready, Busy))
        {
            short.pop();
            short.pop();
        }
        short.push(change);
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_changes_between_ready_and_busy_are_shortened_to_a_legal_path() {
        use WorkerState::{Busy, Draining, Ready};
        let change = |state| WorkerChange { at: Timestamp::from_ms(0), state, reason: None };
        let states = [Busy, Ready, Busy, Ready, Busy, Ready, Draining, Ready, Busy];
        let short: Vec<_> = shorten(states.map(change).to_vec()).into_iter().map(|c| c.state).collect();
        assert_eq!(short, [Busy, Ready, Draining, Ready, Busy]);
    }
}
