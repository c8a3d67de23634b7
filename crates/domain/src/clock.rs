//! The clock of this process: it never goes back, and a step of the system clock does not move it.
//!
//! Leases, deadlines, due times and logs compare times of different moments. If the system clock steps by an hour, every such
//! comparison is wrong by an hour: live workers look silent, a retry waits for an hour, a log runs backwards. So the time of
//! this process advances with a clock that counts only elapsed time, suspensions of the machine included, and approaches the
//! reference slowly: by at most a tenth of the time that passes. The reference is the system clock or, on a shared database,
//! the clock of the database, which all nodes have in common.

use std::sync::{Mutex, PoisonError};

use crate::Timestamp;

/// A reference that is further ahead than this is followed immediately: the system clock was not set when the process started.
const FOLLOWED_AT_ONCE_US: i64 = 24 * 3_600 * 1_000_000;
/// The clock may run faster or slower by at most the elapsed time divided by this number.
const SLEW: i64 = 10;

/// A clock that advances with elapsed time and approaches a reference. All times are in microseconds.
#[derive(Debug, Default)]
pub struct SteadyClock {
    /// Elapsed time at the last reading, and the time that was returned.
    last: Option<(i64, i64)>,
    /// Elapsed time and reference at the last measurement of a shared clock, which then replaces the system clock.
    shared: Option<(i64, i64)>,
}

impl SteadyClock {
    /// Returns the time. `elapsed_us` never goes back; `system_us` may jump in either direction.
    pub fn read(&mut self, elapsed_us: i64, system_us: i64) -> i64 {
        let reference = self.shared.map_or(system_us, |(at, time)| time + (elapsed_us - at));
        let Some((last_elapsed, last)) = self.last else {
            self.last = Some((elapsed_us, reference));
            return reference;
        };
        let passed = (elapsed_us - last_elapsed).max(0);
        let missing = reference - (last + passed);
        let correction =
            if missing > FOLLOWED_AT_ONCE_US { missing } else { missing.clamp(-passed / SLEW, passed / SLEW) };
        let now = last + passed + correction;
        self.last = Some((elapsed_us.max(last_elapsed), now));
        now
    }

    /// Makes the clock follow a shared one, which showed `time_us` at `elapsed_us`.
    ///
    /// The first measurement sets the clock, because nothing depends on it yet; the clock approaches later ones slowly.
    pub fn follow(&mut self, elapsed_us: i64, time_us: i64) {
        if self.shared.is_none() {
            self.last = Some((elapsed_us, time_us));
        }
        self.shared = Some((elapsed_us, time_us));
    }
}

static CLOCK: Mutex<SteadyClock> = Mutex::new(SteadyClock { last: None, shared: None });

/// Returns the time of this process.
pub(crate) fn now() -> Timestamp {
    let system_us = jiff::Timestamp::now().as_microsecond();
    let mut clock = CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    Timestamp::from_ms(clock.read(elapsed_us(), system_us).div_euclid(1_000))
}

/// A measurement of a shared clock that has begun.
pub struct ClockMeasurement {
    began_us: i64,
}

impl ClockMeasurement {
    /// An answer that took longer than this is too inaccurate.
    const MAX_US: i64 = 1_000_000;

    pub fn begin() -> ClockMeasurement {
        ClockMeasurement { began_us: elapsed_us() }
    }

    /// Makes this process follow the shared clock. It showed `time` between the beginning and now.
    pub fn end(self, time: Timestamp) {
        let ended_us = elapsed_us();
        if ended_us - self.began_us <= Self::MAX_US {
            let at = self.began_us + (ended_us - self.began_us) / 2;
            let mut clock = CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
            clock.follow(at, time.as_ms().saturating_mul(1_000));
        }
    }
}

/// Returns the time since a fixed moment, suspensions of the machine included.
///
/// `Instant` does not count suspensions on Linux: after a night in a suspended laptop every due time would be late.
#[cfg(target_os = "linux")]
fn elapsed_us() -> i64 {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    at.tv_sec * 1_000_000 + at.tv_nsec / 1_000
}

#[cfg(not(target_os = "linux"))]
fn elapsed_us() -> i64 {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    i64::try_from(START.elapsed().as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3_600 * SECOND;

    /// Reads the clock every 10 ms for `seconds`, with the system clock off by `offset`.
    fn run(clock: &mut SteadyClock, from: i64, seconds: i64, offset: i64) -> Vec<i64> {
        (1..=seconds * 100).map(|n| from + n * SECOND / 100).map(|at| clock.read(at, at + offset)).collect()
    }

    #[test]
    fn a_step_of_the_system_clock_by_an_hour_does_not_move_the_clock() {
        for step in [HOUR, -HOUR] {
            let mut clock = SteadyClock::default();
            run(&mut clock, 0, 10, 0);
            let times = run(&mut clock, 10 * SECOND, 60, step);
            assert!(times.is_sorted(), "it never goes back");
            let passed = times[times.len() - 1] - 10 * SECOND;
            assert!((passed - 60 * SECOND).abs() <= 6 * SECOND, "60 s took {passed} µs after a step of {step}");
            let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
            assert!(gaps.into_iter().all(|gap| (9_000..=11_000).contains(&gap)), "no jump");
        }
    }

    #[test]
    fn the_clock_reaches_the_system_clock_again() {
        for offset in [20 * SECOND, -20 * SECOND] {
            let mut clock = SteadyClock::default();
            run(&mut clock, 0, 1, 0);
            let times = run(&mut clock, SECOND, 250, offset);
            assert_eq!(times[times.len() - 1], 251 * SECOND + offset);
        }
    }

    #[test]
    fn a_clock_that_was_not_set_at_the_start_is_followed_at_once() {
        let mut clock = SteadyClock::default();
        clock.read(0, 0);
        assert_eq!(clock.read(SECOND, 400 * 24 * HOUR), 400 * 24 * HOUR);
    }

    #[test]
    fn two_processes_that_follow_a_shared_clock_agree_whatever_their_system_clocks_do() {
        let (mut right, mut wrong) = (SteadyClock::default(), SteadyClock::default());
        wrong.read(0, 9 * HOUR);
        right.follow(0, 5 * HOUR);
        wrong.follow(0, 5 * HOUR);
        for second in 1..=100 {
            let at = second * SECOND;
            let times = [right.read(at, 5 * HOUR + at), wrong.read(at, if second % 2 == 0 { 0 } else { 9 * HOUR })];
            assert_eq!(times, [5 * HOUR + at; 2]);
        }
        // A step of the shared clock is approached like any other.
        right.follow(100 * SECOND, 4 * HOUR);
        let after = right.read(101 * SECOND, 0);
        assert!((5 * HOUR + 100 * SECOND..5 * HOUR + 102 * SECOND).contains(&after));
    }

    #[test]
    fn the_time_of_this_process_never_goes_back() {
        let times: Vec<Timestamp> = (0..10_000).map(|_| now()).collect();
        assert!(times.is_sorted());
        let difference = times[0].ms_since(Timestamp::from_ms(jiff::Timestamp::now().as_millisecond())).abs();
        assert!(difference < 60_000, "it follows the system clock");
    }
}
