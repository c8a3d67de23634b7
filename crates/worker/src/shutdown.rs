//! How a worker shuts down: it accepts no new jobs, lets handlers finish, cancels those that do not, releases what is left, and
//! waits until the server has acknowledged everything.

use std::time::Duration;

use tokio::time::Instant;

use crate::{outgoing, session::Session};

/// How long cancelled handlers may take before their jobs are released.
const CANCEL_WAIT: Duration = Duration::from_secs(1);
/// How long the last reports may take to be acknowledged.
const ACKNOWLEDGE_WAIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Working,
    /// The server has asked the worker to drain, and may resume it until the last run has ended.
    Draining,
    /// Handlers may finish.
    Finishing {
        until: Instant,
    },
    /// Handlers are cancelled and may still end by themselves.
    Cancelling {
        until: Instant,
    },
    /// No handler runs; the worker waits until the last reports are acknowledged.
    Acknowledging {
        until: Instant,
    },
}

impl Phase {
    pub fn accepts_jobs(self) -> bool {
        self == Phase::Working
    }

    /// Returns whether the worker itself has decided to stop.
    pub fn is_shutting_down(self) -> bool {
        !matches!(self, Phase::Working | Phase::Draining)
    }

    /// Returns whether the shutdown has cancelled the handlers, so that a failure now must not use an attempt.
    pub fn cancels_runs(self) -> bool {
        matches!(self, Phase::Cancelling { .. } | Phase::Acknowledging { .. })
    }

    pub fn until(self) -> Option<Instant> {
        match self {
            Phase::Working | Phase::Draining => None,
            Phase::Finishing { until } | Phase::Cancelling { until } | Phase::Acknowledging { until } => Some(until),
        }
    }
}

impl Session {
    /// Starts the shutdown.
    pub fn shut_down(&mut self, now: Instant) {
        if self.phase.is_shutting_down() {
            return;
        }
        self.phase = Phase::Finishing { until: now + self.settings.grace_period };
        if self.is_registered() {
            self.outbox.push_back(outgoing::drain());
        }
    }

    pub fn on_drain(&mut self) {
        if self.phase == Phase::Working {
            tracing::info!("drain requested by the server");
            self.phase = Phase::Draining;
        }
    }

    pub fn on_resume(&mut self) {
        if self.phase == Phase::Draining {
            tracing::info!("drain cancelled by the server");
            self.phase = Phase::Working;
        }
    }

    pub fn advance_phase(&mut self, now: Instant) {
        match self.phase {
            Phase::Finishing { until } if now >= until => {
                for key in self.runs.all() {
                    self.runs.cancel(key, now);
                }
                self.phase = Phase::Cancelling { until: now + CANCEL_WAIT };
            }
            Phase::Cancelling { until } if now >= until || self.runs.is_empty() => {
                for key in self.runs.all() {
                    let is_in_flight = self.runs.is_in_flight(key);
                    self.runs.abort(key);
                    if is_in_flight {
                        self.release(key);
                    }
                }
                self.phase = Phase::Acknowledging { until: now + ACKNOWLEDGE_WAIT };
            }
            _ => {}
        }
    }

    /// Returns `true` if the worker can end.
    ///
    /// That is the case if it is draining, shutting down or has received its only job, no run is in flight, and every
    /// report is acknowledged; or if the time for acknowledgements has run out.
    pub fn is_over(&self, now: Instant) -> bool {
        let is_done = self.runs.in_flight_count() == 0 && self.reports.is_empty();
        match self.phase {
            Phase::Working => self.has_taken_only_job && is_done,
            Phase::Acknowledging { until } if now >= until => {
                tracing::warn!(reports = self.reports.len(), "stopped before every report was acknowledged");
                true
            }
            _ => is_done,
        }
    }
}
