//! Keeps the log readable when many jobs or webhooks fail: the first events of a period are logged one by one, the rest
//! are counted and logged together.

use faena_domain::Timestamp;
use parking_lot::Mutex;

const PERIOD_MS: i64 = 10_000;
const EVENTS_PER_PERIOD: u64 = 10;

#[derive(Default)]
pub(crate) struct LogThrottle(Mutex<Option<Period>>);

struct Period {
    ends_at: Timestamp,
    logged: u64,
    suppressed: u64,
}

impl LogThrottle {
    /// Counts an event. Returns whether to log it by itself.
    pub fn admit(&self, now: Timestamp) -> bool {
        let mut period = self.0.lock();
        let is_over = period.as_ref().is_none_or(|period| period.ends_at <= now && period.suppressed == 0);
        if is_over {
            *period = Some(Period { ends_at: now.plus_ms(PERIOD_MS), logged: 0, suppressed: 0 });
        }
        let Some(period) = period.as_mut() else { return true };
        if period.logged < EVENTS_PER_PERIOD {
            period.logged += 1;
            return true;
        }
        period.suppressed += 1;
        false
    }

    /// Returns how many events of a period that is over were not logged. Each is returned once.
    pub fn take_suppressed(&self, now: Timestamp) -> Option<u64> {
        let mut period = self.0.lock();
        let ended = period.take_if(|period| period.ends_at <= now)?;
        Some(ended.suppressed).filter(|suppressed| *suppressed > 0)
    }

    /// Returns when to call `take_suppressed`, if events were not logged.
    pub fn summary_at(&self) -> Option<Timestamp> {
        self.0.lock().as_ref().filter(|period| period.suppressed > 0).map(|period| period.ends_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_events_of_a_period_are_logged_and_the_rest_counted_once() {
        let (throttle, at) = (LogThrottle::default(), Timestamp::from_ms);
        let admitted = (0..25).filter(|ms| throttle.admit(at(*ms))).count();
        assert_eq!((admitted, throttle.summary_at()), (10, Some(at(PERIOD_MS))));
        assert_eq!(throttle.take_suppressed(at(PERIOD_MS - 1)), None);
        assert_eq!(throttle.take_suppressed(at(PERIOD_MS)), Some(15));
        assert_eq!((throttle.take_suppressed(at(PERIOD_MS)), throttle.summary_at()), (None, None));
        assert!(throttle.admit(at(PERIOD_MS + 1)), "a new period has begun");
    }

    #[test]
    fn a_few_events_need_no_summary() {
        let (throttle, at) = (LogThrottle::default(), Timestamp::from_ms);
        assert!(throttle.admit(at(0)) && throttle.admit(at(PERIOD_MS)));
        assert_eq!((throttle.summary_at(), throttle.take_suppressed(at(3 * PERIOD_MS))), (None, None));
    }
}
