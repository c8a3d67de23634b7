//! Limits how many messages one worker may send: a token bucket.
//!
//! Reporting the end of a job in flight is free, because the worker's concurrency limits how many of these there are.
//! Every other message costs one token: log lines, progress, heartbeats, reports about jobs that are not in flight. An
//! invalid message and a repeated registration cost ten. The server disconnects a worker that has used up its budget.

use std::time::Instant;

const TOKENS_PER_SECOND: f64 = 500.0;
const TOKENS_PER_SECOND_AND_SLOT: f64 = 20.0;
/// The budget is full after this time without messages.
const BURST_SECONDS: f64 = 10.0;

pub struct MessageBudget {
    tokens: f64,
    max_tokens: f64,
    tokens_per_second: f64,
    refilled_at: Instant,
}

impl MessageBudget {
    pub fn new(concurrency: usize) -> MessageBudget {
        let tokens_per_second = TOKENS_PER_SECOND + TOKENS_PER_SECOND_AND_SLOT * concurrency as f64;
        let max_tokens = tokens_per_second * BURST_SECONDS;
        MessageBudget { tokens: max_tokens, max_tokens, tokens_per_second, refilled_at: Instant::now() }
    }

    /// Takes `tokens` and returns whether the budget had enough. Takes them even if it did not have enough.
    pub fn take(&mut self, tokens: f64) -> bool {
        let now = Instant::now();
        let refill = now.duration_since(self.refilled_at).as_secs_f64() * self.tokens_per_second;
        self.tokens = (self.tokens + refill).min(self.max_tokens) - tokens;
        self.refilled_at = now;
        self.tokens >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_ten_seconds_is_allowed_and_a_flood_is_not() {
        let mut budget = MessageBudget::new(1);
        assert!((0..5_000).all(|_| budget.take(1.0)));
        assert!((0..10_000).any(|_| !budget.take(1.0)), "a flood");
    }
}
