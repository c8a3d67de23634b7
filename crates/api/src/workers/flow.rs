//! How much one worker may say: a bucket of messages that fills up again.
//!
//! Ends of jobs in hand are free, they are bounded by the jobs. Everything else takes a drop: notes, heartbeats, frames that are
//! not understood (ten drops each), reports about jobs that are not in hand. Who empties the bucket is sent away.

use std::time::Instant;

pub struct Flow {
    drops: f64,
    most: f64,
    per_second: f64,
    filled_at: Instant,
}

impl Flow {
    pub fn new(concurrency: usize) -> Flow {
        let per_second = 500.0 + 20.0 * concurrency as f64;
        Flow { drops: per_second * 10.0, most: per_second * 10.0, per_second, filled_at: Instant::now() }
    }

    /// `false`: it is empty.
    pub fn take(&mut self, drops: f64) -> bool {
        let now = Instant::now();
        let filled = now.duration_since(self.filled_at).as_secs_f64() * self.per_second;
        self.drops = (self.drops + filled).min(self.most) - drops;
        self.filled_at = now;
        self.drops >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_empties_it_and_a_stream_does_not() {
        let mut flow = Flow::new(1);
        assert!((0..5_000).all(|_| flow.take(1.0)));
        assert!((0..10_000).any(|_| !flow.take(1.0)), "a flood");
    }
}
