//! The circuit breaker: stops sending to somebody who keeps failing, and tries again with a few probes.
//!
//! Closed until `failures` in a row; open for `rest`; then half open: at most `probes` at a time may go through, and as many
//! successes in a row close it, one failure opens it again. A pure state machine: the time is handed in, whoever uses it keeps
//! it under a lock, so there is nothing to race.

use faena_domain::Timestamp;

#[derive(Clone, Copy, Debug)]
pub struct BreakerRule {
    pub failures: u32,
    pub rest_ms: i64,
    pub probes: u32,
}

impl Default for BreakerRule {
    fn default() -> Self {
        BreakerRule { failures: 5, rest_ms: 30_000, probes: 3 }
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
    HalfOpen { under_way: u32, successes: u32 },
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

    /// How many may go through now, of `wanted`.
    pub fn room(&self, wanted: usize, now: Timestamp) -> usize {
        let free = match self.inner {
            Inner::Closed { .. } => return wanted,
            Inner::Open { until } if now < until => 0,
            Inner::Open { .. } => self.rule.probes,
            Inner::HalfOpen { under_way, .. } => self.rule.probes.saturating_sub(under_way),
        };
        wanted.min(free as usize)
    }

    /// `count` of them have gone through.
    pub fn sent(&mut self, count: usize, now: Timestamp) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        match &mut self.inner {
            Inner::Closed { .. } => {}
            Inner::Open { until } if now < *until => {}
            Inner::Open { .. } if count > 0 => self.inner = Inner::HalfOpen { under_way: count, successes: 0 },
            Inner::Open { .. } => {}
            Inner::HalfOpen { under_way, .. } => *under_way = under_way.saturating_add(count),
        }
    }

    pub fn succeeded(&mut self) {
        match &mut self.inner {
            Inner::Closed { failures } => *failures = 0,
            // Of something that was sent before it opened: says nothing about now.
            Inner::Open { .. } => {}
            Inner::HalfOpen { under_way, successes } => {
                *under_way = under_way.saturating_sub(1);
                *successes += 1;
                if *successes >= self.rule.probes {
                    self.inner = Inner::Closed { failures: 0 };
                }
            }
        }
    }

    pub fn failed(&mut self, now: Timestamp) {
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

    /// When it will let something through again, while it does not.
    pub fn opens_at(&self, now: Timestamp) -> Option<Timestamp> {
        match self.inner {
            Inner::Open { until } if now < until => Some(until),
            _ => None,
        }
    }

    fn open(&mut self, now: Timestamp) {
        self.inner = Inner::Open { until: now.plus_ms(self.rule.rest_ms) };
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
            breaker.failed(at(0));
        }
        breaker
    }

    #[test]
    fn five_failures_in_a_row_open_it() {
        let breaker = opened();
        assert_eq!(breaker.state(at(0)), BreakerState::Open);
        assert_eq!(breaker.room(10, at(29_999)), 0);
        assert_eq!(breaker.opens_at(at(1)), Some(at(30_000)));
    }

    #[test]
    fn a_success_in_between_starts_the_count_again() {
        let mut breaker = Breaker::new(BreakerRule::default());
        for _ in 0..10 {
            (0..4).for_each(|_| breaker.failed(at(0)));
            breaker.succeeded();
        }
        assert_eq!(breaker.state(at(0)), BreakerState::Closed);
    }

    #[test]
    fn after_its_rest_it_lets_three_probes_through_and_no_more() {
        let mut breaker = opened();
        let now = at(30_000);
        assert_eq!(breaker.state(now), BreakerState::HalfOpen);
        assert_eq!(breaker.room(10, now), 3);
        breaker.sent(2, now);
        assert_eq!(breaker.room(10, now), 1);
        breaker.sent(1, now);
        assert_eq!(breaker.room(10, now), 0);
    }

    #[test]
    fn three_good_probes_close_it_and_one_bad_one_opens_it_again() {
        let mut good = opened();
        good.sent(3, at(30_000));
        (0..3).for_each(|_| good.succeeded());
        assert_eq!(good.state(at(30_000)), BreakerState::Closed);
        let mut bad = opened();
        bad.sent(3, at(30_000));
        bad.succeeded();
        bad.failed(at(31_000));
        assert_eq!(bad.state(at(31_000)), BreakerState::Open);
        assert_eq!(bad.opens_at(at(31_000)), Some(at(61_000)));
        bad.succeeded();
        assert_eq!(bad.state(at(31_000)), BreakerState::Open, "an old success says nothing about now");
    }

    proptest! {
        #[test]
        fn while_it_is_not_closed_never_more_than_the_probes_are_under_way(actions in prop::collection::vec((0u8..3, 0i64..20_000), 1..200)) {
            let mut breaker = Breaker::new(BreakerRule::default());
            let mut now = 0i64;
            for (act, pause) in actions {
                now += pause;
                match act {
                    0 => {
                        let room = breaker.room(7, at(now));
                        if breaker.state(at(now)) != BreakerState::Closed {
                            prop_assert!(room <= 3);
                        }
                        breaker.sent(room, at(now));
                    }
                    1 => breaker.succeeded(),
                    _ => breaker.failed(at(now)),
                }
                if let Inner::HalfOpen { under_way, .. } = breaker.inner {
                    prop_assert!(under_way <= 3);
                }
            }
        }
    }
}
