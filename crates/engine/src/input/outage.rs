//! An outage of something a source or inbox depends on: logged once when it begins and once when it ends, with a growing
//! delay between attempts.

use std::time::Duration;

use faena_domain::Timestamp;

use crate::config::ms;

const FIRST_DELAY: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Outage {
    /// What is down.
    dependency: Option<&'static str>,
    failures: u32,
    retry_at: Option<Timestamp>,
}

impl Outage {
    /// Returns when to try again, if that is later than `now`.
    pub fn retry_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.retry_at.filter(|at| *at > now)
    }

    /// Records that `dependency` failed and returns when to try again. The delay doubles up to `max_delay`.
    pub fn record_failure(
        &mut self,
        name: &str,
        dependency: &'static str,
        reason: &str,
        max_delay: Duration,
        now: Timestamp,
    ) -> Timestamp {
        if self.dependency != Some(dependency) {
            tracing::warn!(name, dependency, reason, "dependency is down, retrying");
            self.failures = 0;
        }
        self.dependency = Some(dependency);
        let delay = (FIRST_DELAY * 2u32.saturating_pow(self.failures.min(16))).min(max_delay);
        self.failures += 1;
        let retry_at = now.plus_ms(ms(delay));
        self.retry_at = Some(retry_at);
        retry_at
    }

    /// Records a success.
    pub fn clear(&mut self, name: &str) {
        if let Some(dependency) = self.dependency.take() {
            tracing::info!(name, dependency, failures = self.failures, "dependency is up again");
        }
        *self = Outage::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_the_maximum_and_starts_again_after_a_success() {
        let (mut outage, now) = (Outage::default(), Timestamp::from_ms(0));
        let max = Duration::from_secs(60);
        let delays: Vec<i64> = (0..9).map(|_| outage.record_failure("x", "broker", "down", max, now).as_ms()).collect();
        assert_eq!(delays, [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]);
        outage.clear("x");
        assert_eq!(outage.retry_at(now), None);
        assert_eq!(outage.record_failure("x", "broker", "down", max, now).as_ms(), 1_000);
    }
}
