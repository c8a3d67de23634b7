//! What comes from outside and becomes a job: how it is read, stored once, and how often one tries where something is unusable.

use std::time::Duration;

use faena_domain::{FieldError, NewJob, Timestamp};
use faena_store::{Store, StoreError};

use crate::{Bus, config::ms};

/// What became of a message that makes a job.
#[derive(Debug)]
pub(crate) enum Arrival {
    Stored,
    /// It had come before.
    Known,
    /// It can never become a job.
    Refused(String),
    /// The database does not take it now.
    Later(StoreError),
}

/// Stores the job of a message, once however often the message comes.
pub(crate) async fn arrive(
    store: &dyn Store,
    bus: &Bus,
    consumer: &str,
    message: &str,
    job: NewJob,
    now: Timestamp,
) -> Arrival {
    match store.inbox_submit(consumer, message, vec![job], now).await {
        Ok(Some(stored)) => {
            for job in stored {
                bus.changed(job.id, job.status, None, job.created_at);
            }
            Arrival::Stored
        }
        Ok(None) => Arrival::Known,
        Err(StoreError::Invalid(faults)) => Arrival::Refused(FieldError::join(&faults)),
        Err(
            refusal @ (StoreError::Conflict { .. } | StoreError::NotFound(_) | StoreError::InvalidTransition { .. }),
        ) => Arrival::Refused(refusal.to_string()),
        Err(error) => Arrival::Later(error),
    }
}

/// Since when something outside is unusable, and when it is tried again. Says so once, and once when it works again.
#[derive(Default)]
pub(crate) struct Trouble {
    what: Option<&'static str>,
    failures: u32,
    until: Option<Timestamp>,
}

const FIRST_REST: Duration = Duration::from_secs(1);

impl Trouble {
    /// When to try again, if that is not now.
    pub fn rests_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.until.filter(|until| *until > now)
    }

    /// `what` is unusable. Each further failure doubles the rest, up to `longest`.
    pub fn came(
        &mut self,
        name: &str,
        what: &'static str,
        reason: &str,
        longest: Duration,
        now: Timestamp,
    ) -> Timestamp {
        if self.what != Some(what) {
            tracing::warn!(name, reason, "{what} cannot be used; nothing is lost, it is tried again");
            self.failures = 0;
        }
        self.what = Some(what);
        let rest = (FIRST_REST * 2u32.saturating_pow(self.failures.min(16))).min(longest);
        self.failures += 1;
        let until = now.plus_ms(ms(rest));
        self.until = Some(until);
        until
    }

    pub fn is_over(&mut self, name: &str) {
        if let Some(what) = self.what.take() {
            tracing::info!(name, failures = self.failures, "{what} can be used again");
        }
        *self = Trouble::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_doubles_up_to_the_longest_and_begins_anew_after_a_success() {
        let (mut trouble, now) = (Trouble::default(), Timestamp::from_ms(0));
        let longest = Duration::from_secs(60);
        let rests: Vec<i64> = (0..9).map(|_| trouble.came("x", "the broker", "away", longest, now).as_ms()).collect();
        assert_eq!(rests, [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]);
        trouble.is_over("x");
        assert_eq!(trouble.rests_until(now), None);
        assert_eq!(trouble.came("x", "the broker", "away", longest, now).as_ms(), 1_000);
    }
}
