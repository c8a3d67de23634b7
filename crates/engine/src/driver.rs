//! Runs a loop: waiting, nudges, failures, panics, the beat and stopping, once for all loops.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use faena_domain::Timestamp;
use faena_store::StoreError;
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::beats::Beats;

/// What one round did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Round {
    pub handled: usize,
    /// There is more to do at once.
    pub more: bool,
    /// When there is something to do next, if that is known.
    pub next_at: Option<Timestamp>,
}

impl Round {
    pub fn done(handled: usize) -> Round {
        Round { handled, ..Round::default() }
    }
}

/// What all loops share.
#[derive(Clone)]
pub struct Driver {
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
    pub beats: Beats,
}

const LONGEST_BACKOFF: Duration = Duration::from_secs(5);

impl Driver {
    /// Starts the loop `name`: a round at once, then on every nudge, when its next time has come, and at least once per
    /// `period`.
    pub fn start<F, Fut>(&self, name: impl Into<Arc<str>>, period: Duration, nudge: Arc<Notify>, mut run_once: F)
    where
        F: FnMut(Timestamp) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Round, StoreError>> + Send,
    {
        let Driver { stop, beats, .. } = self.clone();
        let name: Arc<str> = name.into();
        beats.announce(&name, period, Timestamp::now());
        self.tasks.spawn(async move {
            let mut failures: u32 = 0;
            while !stop.is_cancelled() {
                let now = Timestamp::now();
                beats.update(&name, |beat| beat.busy_since = Some(now));
                let result = AssertUnwindSafe(run_once(now)).catch_unwind().await;
                let result = result.unwrap_or_else(|panic| Err(StoreError::Broken(panic_text(panic.as_ref()))));
                let wait = match result {
                    Ok(round) => {
                        if failures > 0 {
                            tracing::info!(name = &*name, failures, "the loop works again");
                        }
                        failures = 0;
                        beats.update(&name, |beat| {
                            beat.last_at = Some(Timestamp::now());
                            beat.rounds += 1;
                            beat.handled += round.handled as u64;
                            beat.failures = 0;
                            beat.last_error = None;
                            beat.busy_since = None;
                        });
                        if round.more { Duration::ZERO } else { until(round.next_at, period) }
                    }
                    Err(error) => {
                        failures += 1;
                        // Once per change of fortune, not once per try.
                        if failures == 1 {
                            match &error {
                                StoreError::Unavailable(text) => {
                                    tracing::warn!(name = &*name, error = text, "the loop has to wait")
                                }
                                other => tracing::error!(name = &*name, error = %other, "a round failed"),
                            }
                        }
                        beats.update(&name, |beat| {
                            beat.failures = u64::from(failures);
                            beat.last_error = Some(error.to_string());
                            beat.busy_since = None;
                        });
                        (Duration::from_millis(50) * 2u32.saturating_pow(failures.min(10))).min(LONGEST_BACKOFF)
                    }
                };
                if wait.is_zero() {
                    tokio::task::yield_now().await;
                    continue;
                }
                tokio::select! {
                    () = stop.cancelled() => break,
                    // After a failure a nudge does not shorten the wait: the database needs the rest.
                    () = nudge.notified(), if failures == 0 => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
            beats.update(&name, |beat| beat.stopped = true);
        });
    }
}

fn until(next_at: Option<Timestamp>, period: Duration) -> Duration {
    match next_at {
        Some(at) => {
            let ms = at.ms_since(Timestamp::now()).max(0);
            // A due time is never met early by a rounded-down timer.
            Duration::from_millis(u64::try_from(ms).unwrap_or(0) + 1).min(period)
        }
        None => period,
    }
}

pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    format!("panic: {text}")
}
