//! A circuit breaker: stops sending to a receiver that keeps failing, and tries again with a few probes.
//!
//! It is closed until `failures` occur in a row, then open for `open_ms`, then half open: at most `probes` may be in
//! progress at a time, as many successes in a row close it, and one failure opens it again. It is a pure state machine:
//! the caller passes the time, and protects the breaker with a lock.

use faena_domain::Timestamp;

#[derive(Clone, Copy, Debug)]
pub struct BreakerRule {
    pub failures: u32,
    pub open_ms: i64,
    pub probes: u32,
}

impl Default for BreakerRule {
    fn default() -> Self {
        BreakerRule { failures: 5, open_ms: 30_000, probes: 3 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BreakerState {
    Closed,
    Open,
    HalfOpen,
}

impl BreakerState {
    pub fn as_str(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half_open",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Breaker {
    rule: BreakerRule,
    inner: Inner,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Inner {
    Closed { failures: u32 },
    Open { until: Timestamp },
    HalfOpen { in_progress: u32, successes: u32 },
}

impl Breaker {
    pub fn new(rule: BreakerRule) -> Breaker {
        Breaker { rule, inner: Inner::Closed { failures: 0 } }
    }

    pub fn state(&self, now: Timestamp) -> BreakerState {
        match self.inner {
            Inner::Closed { .. } => BreakerState::Closed,
            Inner::Open { until } if now < until => BreakerState::Open,
            Inner::Open { .. } | Inner::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Returns how many of `wanted` requests may be sent now.
    pub fn capacity(&self, wanted: usize, now: Timestamp) -> usize {
        let free = match self.inner {
            Inner::Closed { .. } => return wanted,
            Inner::Open { until } if now < until => 0,
            Inner::Open { .. } => self.rule.probes,
            Inner::HalfOpen { in_progress, .. } => self.rule.probes.saturating_sub(in_progress),
        };
        wanted.min(free as usize)
    }

    /// Records that `count` requests were sent.
    pub fn record_sent(&mut self, count: usize, now: Timestamp) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        match &mut self.inner {
            Inner::Closed { .. } => {}
            Inner::Open { until } if now < *until => {}
            Inner::Open { .. } if count > 0 => self.inner = Inner::HalfOpen { in_progress: count, successes: 0 },
            Inner::Open { .. } => {}
            Inner::HalfOpen { in_progress, .. } => *in_progress = in_progress.saturating_add(count),
        }
    }

    pub fn record_success(&mut self) {
        match &mut self.inner {
            Inner::Closed { failures } => *failures = 0,
            // The request was sent before the breaker opened, so its success says nothing about the receiver now.
            Inner::Open { .. } => {}
            Inner::HalfOpen { in_progress, successes } => {
                *in_progress = in_progress.saturating_sub(1);
                *successes += 1;
                if *successes >= self.rule.probes {
                    self.inner = Inner::Closed { failures: 0 };
                }
            }
        }
    }

    pub fn record_failure(&mut self, now: Timestamp) {
        match &mut self.inner {
            Inner::Closed { failures } => {
                *failures += 1;
                if *failures >= self.rule.failures {
                    self.open(now);
                }
            }
            Inner::Open { .. } => {}
            Inner::HalfOpen { .. } => self.open(now),
        }
    }

    /// Returns when requests may be sent again, if none may now.
    pub fn retry_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.open_until().filter(|until| now < *until)
    }

    /// Returns when the open period ends. Also returns that time after the period, until the first request is sent.
    pub fn open_until(&self) -> Option<Timestamp> {
        match self.inner {
            Inner::Open { until } => Some(until),
            _ => None,
        }
    }

    fn open(&mut self, now: Timestamp) {
        self.inner = Inner::Open { until: now.plus_ms(self.rule.open_ms) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_ms(ms)
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::new(BreakerRule::default());
        for _ in 0..5 {
            assert_eq!(breaker.state(at(0)), BreakerState::Closed);
            breaker.record_failure(at(0));
        }
        breaker
    }

    #[test]
    fn five_failures_in_a_row_open_it() {
        let breaker = opened();
        assert_eq!(breaker.state(at(0)), BreakerState::Open);
        assert_eq!(breaker.capacity(10, at(29_999)), 0);
        assert_eq!(breaker.retry_at(at(1)), Some(at(30_000)));
    }

    #[test]
    fn a_success_in_between_starts_the_count_again() {
        let mut breaker = Breaker::new(BreakerRule::default());
        for _ in 0..10 {
            (0..4).for_each(|_| breaker.record_failure(at(0)));
            breaker.record_success();
        }
        assert_eq!(breaker.state(at(0)), BreakerState::Closed);
    }

    #[test]
    fn after_the_open_period_it_allows_three_probes_and_no_more() {
        let mut breaker = opened();
        let now = at(30_000);
        assert_eq!(breaker.state(now), BreakerState::HalfOpen);
        assert_eq!(breaker.capacity(10, now), 3);
        breaker.record_sent(2, now);
        assert_eq!(breaker.capacity(10, now), 1);
        breaker.record_sent(1, now);
        assert_eq!(breaker.capacity(10, now), 0);
    }

    #[test]
    fn three_successful_probes_close_it_and_one_failed_probe_opens_it_again() {
        let mut good = opened();
        good.record_sent(3, at(30_000));
        (0..3).for_each(|_| good.record_success());
        assert_eq!(good.state(at(30_000)), BreakerState::Closed);
        let mut bad = opened();
        bad.record_sent(3, at(30_000));
        bad.record_success();
        bad.record_failure(at(31_000));
        assert_eq!(bad.state(at(31_000)), BreakerState::Open);
        assert_eq!(bad.retry_at(at(31_000)), Some(at(61_000)));
        bad.record_success();
        assert_eq!(bad.state(at(31_000)), BreakerState::Open, "an old success says nothing about now");
    }

    proptest! {
        #[test]
        fn while_it_is_not_closed_no_more_probes_than_allowed_are_in_progress(actions in prop::collection::vec((0u8..3, 0i64..20_000), 1..200)) {
            let mut breaker = Breaker::new(BreakerRule::default());
            let mut now = 0i64;
            for (action, pause) in actions {
                now += pause;
                match action {
                    0 => {
                        let room = breaker.capacity(7, at(now));
                        if breaker.state(at(now)) != BreakerState::Closed {
                            prop_assert!(room <= 3);
                        }
                        breaker.record_sent(room, at(now));
                    }
                    1 => breaker.record_success(),
                    _ => breaker.record_failure(at(now)),
                }
                if let Inner::HalfOpen { in_progress, .. } = breaker.inner {
                    prop_assert!(in_progress <= 3);
                }
            }
        }
    }
}
