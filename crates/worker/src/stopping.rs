//! How a worker ends: it takes nothing new, lets its handlers finish, stops those that do not, gives back what is left, and
//! waits until the server has heard all of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{outgoing, session::Session};

/// Between telling handlers to stop and giving their jobs back.
const STOP_WAIT: Duration = Duration::from_secs(1);
/// How long the last reports may take to be acknowledged.
const SETTLE_WAIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Working,
    /// The server has said so; it may take it back.
    Drained,
    /// Handlers may finish until then.
    Finishing {
        until: Instant,
    },
    /// Handlers have been told to stop and may do so until then.
    Cancelling {
        until: Instant,
    },
    /// Nothing runs; reports may be acknowledged until then.
    Settling {
        until: Instant,
    },
}

impl Phase {
    pub fn takes_jobs(self) -> bool {
        self == Phase::Working
    }

    /// By its own will.
    pub fn is_stopping(self) -> bool {
        !matches!(self, Phase::Working | Phase::Drained)
    }

    /// Handlers fail now because they are made to.
    pub fn cancels(self) -> bool {
        matches!(self, Phase::Cancelling { .. } | Phase::Settling { .. })
    }

    pub fn until(self) -> Option<Instant> {
        match self {
            Phase::Working | Phase::Drained => None,
            Phase::Finishing { until } | Phase::Cancelling { until } | Phase::Settling { until } => Some(until),
        }
    }
}

impl Session {
    /// Begins the end.
    pub fn stop(&mut self, now: Instant) {
        if self.phase.is_stopping() {
            return;
        }
        self.phase = Phase::Finishing { until: now + self.definition.grace };
        if self.is_registered() {
            self.outbox.push_back(outgoing::plain("drain"));
        }
    }

    pub fn told_to_drain(&mut self) {
        if self.phase == Phase::Working {
            tracing::info!("told to drain: finishing what runs, then the end");
            self.phase = Phase::Drained;
        }
    }

    pub fn told_to_resume(&mut self) {
        if self.phase == Phase::Drained {
            tracing::info!("told to go on");
            self.phase = Phase::Working;
        }
    }

    pub fn move_phase(&mut self, now: Instant) {
        match self.phase {
            Phase::Finishing { until } if now >= until => {
                for key in self.runs.all() {
                    self.runs.cancel(key, now);
                }
                self.phase = Phase::Cancelling { until: now + STOP_WAIT };
            }
            Phase::Cancelling { until } if now >= until || self.runs.is_empty() => {
                for key in self.runs.all() {
                    let held = self.runs.is_held(key);
                    self.runs.abort(key);
                    if held {
                        self.give_back(key);
                    }
                }
                self.phase = Phase::Settling { until: now + SETTLE_WAIT };
            }
            _ => {}
        }
    }

    /// Everything is done and told, or there is no more time to tell it.
    pub fn is_over(&self, now: Instant) -> bool {
        let done = self.runs.held_count() == 0 && self.ledger.is_empty();
        match self.phase {
            Phase::Working => self.had_its_job && done,
            Phase::Settling { until } if now >= until => {
                tracing::warn!(reports = self.ledger.len(), "stopped before the server acknowledged everything");
                true
            }
            _ => done,
        }
    }
}
