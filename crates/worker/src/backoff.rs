//! The delay before the next attempt to connect.

use std::time::Duration;

use rand::RngExt;

use crate::Error;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// Doubles the delay from 100 ms up to 5 s.
///
/// Each delay is a random value between half of that and all of it, so that a thousand workers do not reconnect to a
/// restarted server at the same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub fn new() -> Backoff {
        Backoff { next: FIRST }
    }

    pub fn reset(&mut self) {
        self.next = FIRST;
    }

    pub fn next_delay(&mut self) -> Duration {
        let longest = self.next;
        self.next = (longest * 2).min(LONGEST);
        longest.mul_f64(rand::rng().random_range(0.5..=1.0))
    }

    /// Returns the next delay, plus the time that the server asks for in its answer.
    pub fn delay_after(&mut self, error: Option<&Error>) -> Duration {
        // The random part keeps many clients from calling again at the same moment.
        self.next_delay() + error.and_then(Error::retry_after).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_five_seconds_and_start_over_after_a_reset() {
        let mut backoff = Backoff::new();
        for longest_ms in [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000] {
            let delay_ms = backoff.next_delay().as_millis();
            assert!((longest_ms / 2..=longest_ms).contains(&delay_ms), "{delay_ms} of {longest_ms}");
        }
        backoff.reset();
        assert!(backoff.next_delay() <= FIRST);
    }
}
