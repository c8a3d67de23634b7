//! The delay before the next attempt.

use std::time::Duration;

use rand::RngExt;
use tokio_util::sync::CancellationToken;

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(15);

/// Delays with a limit that doubles from 200 ms up to 15 s. Each delay is random, between half the limit and the limit.
#[derive(Debug)]
pub struct Backoff(Duration);

impl Backoff {
    pub fn new() -> Backoff {
        Backoff(FIRST)
    }

    pub fn reset(&mut self) {
        self.0 = FIRST;
    }

    fn next_delay(&mut self) -> Duration {
        let longest = self.0;
        self.0 = (longest * 2).min(LONGEST);
        longest.mul_f64(rand::rng().random_range(0.5..=1.0))
    }

    /// Waits. Returns `false` if the program stops.
    pub async fn wait(&mut self, stop: &CancellationToken) -> bool {
        let delay = self.next_delay();
        tokio::select! {
            () = tokio::time::sleep(delay) => true,
            () = stop.cancelled() => false,
        }
    }
}
