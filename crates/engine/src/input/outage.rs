//! An outage of something a source or inbox depends on, with a growing delay between attempts. It is logged when it
//! begins, when another dependency fails instead, and when it ends.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_store::InputKind;

use crate::config::ms;

const FIRST_DELAY: Duration = Duration::from_secs(1);

pub(crate) struct Outage {
    kind: InputKind,
    name: String,
    current: Option<Current>,
    failures: u32,
    retry_at: Option<Timestamp>,
}

/// The outage in progress.
struct Current {
    /// What is down.
    dependency: &'static str,
    since: Timestamp,
    reason: String,
}

impl Outage {
    /// Returns the state of an input that is up. `kind` and `name` identify the source or inbox in the log.
    pub fn new(kind: InputKind, name: &str) -> Outage {
        Outage { kind, name: name.to_owned(), current: None, failures: 0, retry_at: None }
    }

    /// Returns when to try again, if that is later than `now`.
    pub fn retry_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.retry_at.filter(|at| *at > now)
    }

    /// Returns since when and why something is down.
    pub fn status(&self) -> Option<(Timestamp, String)> {
        let current = self.current.as_ref()?;
        Some((current.since, format!("{}: {}", current.dependency, current.reason)))
    }

    /// Records that `dependency` failed and returns when to try again. The delay doubles up to `max_delay`.
    pub fn record_failure(
        &mut self,
        dependency: &'static str,
        reason: &str,
        max_delay: Duration,
        now: Timestamp,
    ) -> Timestamp {
        let is_same = self.current.as_ref().is_some_and(|current| current.dependency == dependency);
        if !is_same {
            let name = &self.name;
            match self.kind {
                InputKind::Source => tracing::warn!(source = name, dependency, reason, "source is down"),
                InputKind::Inbox => tracing::warn!(inbox = name, dependency, reason, "inbox is down"),
            }
            self.failures = 0;
        }
        let since = self.current.as_ref().map_or(now, |current| current.since);
        self.current = Some(Current { dependency, since, reason: reason.to_owned() });
        let delay = (FIRST_DELAY * 2u32.saturating_pow(self.failures.min(16))).min(max_delay);
        self.failures += 1;
        let retry_at = now.plus_ms(ms(delay));
        self.retry_at = Some(retry_at);
        retry_at
    }

    /// Records a success.
    pub fn clear(&mut self) {
        if let Some(Current { dependency, .. }) = self.current.take() {
            let (name, failures) = (&self.name, self.failures);
            match self.kind {
                InputKind::Source => tracing::info!(source = name, dependency, failures, "source is up again"),
                InputKind::Inbox => tracing::info!(inbox = name, dependency, failures, "inbox is up again"),
            }
        }
        (self.failures, self.retry_at) = (0, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_the_maximum_and_starts_again_after_a_success() {
        let (mut outage, now) = (Outage::new(InputKind::Inbox, "x"), Timestamp::from_ms(0));
        let max = Duration::from_secs(60);
        let delays: Vec<i64> = (0..9).map(|_| outage.record_failure("broker", "down", max, now).as_ms()).collect();
        assert_eq!(delays, [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]);
        outage.clear();
        assert_eq!(outage.retry_at(now), None);
        assert_eq!(outage.record_failure("broker", "down", max, now).as_ms(), 1_000);
    }

    #[test]
    fn an_outage_keeps_its_start_and_shows_its_latest_reason() {
        let (mut outage, max) = (Outage::new(InputKind::Inbox, "x"), Duration::from_secs(60));
        assert_eq!(outage.status(), None);
        outage.record_failure("broker", "refused", max, Timestamp::from_ms(1));
        outage.record_failure("job database", "away", max, Timestamp::from_ms(2));
        assert_eq!(outage.status(), Some((Timestamp::from_ms(1), "job database: away".to_owned())));
        outage.clear();
        assert_eq!(outage.status(), None);
    }
}
