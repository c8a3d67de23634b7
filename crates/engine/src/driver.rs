//! Runs loops: waiting, wake-ups, failures, panics, health and stopping, in one place for all of them.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use faena_domain::Timestamp;
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{EngineError, LoopHealth};

/// Result of one round of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Round {
    pub handled: usize,
    /// There is more work; the next round starts immediately.
    pub more: bool,
    /// When the next work is due, if that is known.
    pub next_at: Option<Timestamp>,
}

impl Round {
    pub fn done(handled: usize) -> Round {
        Round { handled, ..Round::default() }
    }

    /// Returns the result of a round that had nothing to do and waits until `at`, or for its period.
    pub fn idle_until(at: Option<Timestamp>) -> Round {
        Round { next_at: at, ..Round::default() }
    }

    /// Adds another part of the same round.
    pub(crate) fn and(self, other: Round) -> Round {
        Round {
            handled: self.handled + other.handled,
            more: self.more || other.more,
            next_at: self.next_at.into_iter().chain(other.next_at).min(),
        }
    }
}

/// Tasks, stop token and health of a group of loops that stop together.
#[derive(Clone)]
pub struct Driver {
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
    pub health: LoopHealth,
}

/// Shortest delay, for loops with a shorter period. The delay after the first failure is twice as long.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

impl Driver {
    pub fn new(health: LoopHealth) -> Driver {
        Driver { tasks: TaskTracker::new(), stop: CancellationToken::new(), health }
    }

    /// Starts the loop `name`.
    ///
    /// The first round runs immediately, the next ones on a wake-up, at the time the last round named, and at least once
    /// per `period`. A round that fails or panics is repeated with a growing delay.
    pub fn start<F, Fut>(&self, name: impl Into<Arc<str>>, period: Duration, wakeup: Arc<Notify>, mut run_once: F)
    where
        F: FnMut(Timestamp) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Round, EngineError>> + Send,
    {
        let Driver { stop, health, .. } = self.clone();
        let name: Arc<str> = name.into();
        health.register(&name, period, Timestamp::now());
        self.tasks.spawn(async move {
            let mut failures: u32 = 0;
            while !stop.is_cancelled() {
                let now = Timestamp::now();
                health.update(&name, |status| status.busy_since = Some(now));
                let result = AssertUnwindSafe(run_once(now)).catch_unwind().await;
                let result = result.unwrap_or_else(|panic| Err(EngineError::Panicked(panic_text(panic.as_ref()))));
                let wait = match result {
                    Ok(round) => {
                        record_success(&health, &name, round, failures);
                        failures = 0;
                        if round.more { Duration::ZERO } else { time_until(round.next_at, period) }
                    }
                    Err(error) => {
                        failures += 1;
                        record_failure(&health, &name, &error, failures);
                        backoff(failures, period)
                    }
                };
                if wait.is_zero() {
                    tokio::task::yield_now().await;
                    continue;
                }
                tokio::select! {
                    () = stop.cancelled() => break,
                    // After a failure a wake-up does not shorten the wait, so that the database can recover.
                    () = wakeup.notified(), if failures == 0 => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
            health.update(&name, |status| status.stopped = true);
        });
    }
}

/// Returns the delay after a failure. It does not exceed the period, unless that is shorter than `MIN_BACKOFF`: a node
/// that renews its lease later than that after an outage would be declared dead.
fn backoff(failures: u32, period: Duration) -> Duration {
    let delay = MIN_BACKOFF.saturating_mul(2u32.saturating_pow(failures.min(10)));
    delay.min(MAX_BACKOFF).min(period.max(MIN_BACKOFF))
}

fn record_success(health: &LoopHealth, name: &str, round: Round, failures: u32) {
    if failures > 0 {
        tracing::info!("loop" = name, failures, "loop recovered");
    }
    health.update(name, |status| {
        status.last_at = Some(Timestamp::now());
        status.rounds += 1;
        status.handled += round.handled as u64;
        status.failures = 0;
        status.last_error = None;
        status.busy_since = None;
    });
}

/// Logs the first of several failures in a row, and counts all of them.
fn record_failure(health: &LoopHealth, name: &str, error: &EngineError, failures: u32) {
    if failures == 1 && error.is_temporary() {
        tracing::warn!("loop" = name, %error, "loop waits for the database, retrying");
    } else if failures == 1 && matches!(error, EngineError::Queue(_)) {
        tracing::warn!("loop" = name, %error, "loop waits for Redis, retrying");
    } else if failures == 1 {
        tracing::error!("loop" = name, %error, "loop failed, retrying");
    }
    health.update(name, |status| {
        status.failures = u64::from(failures);
        status.all_failures += 1;
        status.last_error = Some(error.to_string());
        status.busy_since = None;
    });
}

fn time_until(next_at: Option<Timestamp>, period: Duration) -> Duration {
    match next_at {
        Some(at) => {
            let ms = at.ms_since(Timestamp::now()).max(0);
            // One more millisecond: a timer that rounds down must not fire before the due time.
            Duration::from_millis(u64::try_from(ms).unwrap_or(0) + 1).min(period)
        }
        None => period,
    }
}

/// Returns the message of a panic, with "panic: " in front.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    format!("panic: {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_five_seconds_or_the_period() {
        let delays = |period| (1..=8).map(|failures| backoff(failures, period).as_millis()).collect::<Vec<_>>();
        assert_eq!(delays(Duration::from_secs(60)), [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
        assert_eq!(delays(Duration::from_millis(333)), [100, 200, 333, 333, 333, 333, 333, 333]);
        assert_eq!(delays(Duration::ZERO), [50; 8]);
    }
}
