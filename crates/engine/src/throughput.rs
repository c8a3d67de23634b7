//! Measures how many runs end per minute and lane, from samples of counters that only grow.
//!
//! The counters are those of the whole system, so every node measures the same. Samples of about the last minute are kept;
//! with fewer than two samples the throughput is unknown.

use std::collections::{HashMap, VecDeque};

use faena_domain::Timestamp;
use faena_store::{Counts, LaneId, Tally};
use parking_lot::Mutex;

/// Shortest time between two samples.
const SAMPLE_MS: i64 = 5_000;
/// How long samples are kept: a minute and a little more, so that samples half a minute apart cover a minute.
const KEEP_MS: i64 = 65_000;

#[derive(Default)]
pub struct Throughput(Mutex<VecDeque<Sample>>);

/// Throughput of the whole system over about the last minute.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Overall {
    /// Runs that end per second.
    pub per_second: f64,
    /// Fraction of them that failed, from 0 to 1.
    pub error_ratio: f64,
}

struct Sample {
    at: Timestamp,
    ran: HashMap<LaneId, i64>,
    /// Runs that failed, of all lanes.
    failed: i64,
}

impl Throughput {
    /// Returns whether another sample is due.
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.is_older(now, SAMPLE_MS)
    }

    /// Returns whether the last sample is at least this old.
    pub fn is_older(&self, now: Timestamp, age_ms: i64) -> bool {
        self.0.lock().back().is_none_or(|last| now.ms_since(last.at) >= age_ms)
    }

    /// Adds a sample, unless the last one is too recent.
    pub fn add(&self, counts: &Counts, now: Timestamp) {
        if !self.is_due(now) {
            return;
        }
        let ran = counts.by_lane.iter().filter(|((_, tally), _)| *tally == Tally::Ran);
        let ran = ran.map(|((lane, _), n)| (*lane, *n)).collect();
        let mut samples = self.0.lock();
        samples.retain(|sample| now.ms_since(sample.at) <= KEEP_MS);
        samples.push_back(Sample { at: now, ran, failed: counts.total(Tally::FailedRuns) });
    }

    /// Returns how many runs end per second, and what fraction of them fails, or `None` if that is unknown.
    pub fn overall(&self, now: Timestamp) -> Option<Overall> {
        let samples = self.0.lock();
        let (first, last, passed_ms) = window(&samples, now)?;
        let ran = |sample: &Sample| sample.ran.values().sum::<i64>();
        let (ran, failed) = ((ran(last) - ran(first)).max(0), (last.failed - first.failed).max(0));
        let error_ratio = if ran == 0 { 0.0 } else { failed as f64 / ran as f64 };
        Some(Overall { per_second: ran as f64 * 1_000.0 / passed_ms as f64, error_ratio })
    }

    /// Returns how many runs of these lanes end per minute, or `None` if that is unknown.
    pub fn per_minute(&self, lanes: &[LaneId], now: Timestamp) -> Option<f64> {
        let samples = self.0.lock();
        let (first, last, passed_ms) = window(&samples, now)?;
        let ran = |sample: &Sample| lanes.iter().filter_map(|lane| sample.ran.get(lane)).sum::<i64>();
        Some((ran(last) - ran(first)).max(0) as f64 * 60_000.0 / passed_ms as f64)
    }
}

/// Returns the first and the last sample of about the last minute, and the milliseconds between them. `None`: there are fewer than two.
fn window(samples: &VecDeque<Sample>, now: Timestamp) -> Option<(&Sample, &Sample, i64)> {
    let first = samples.iter().find(|sample| now.ms_since(sample.at) <= KEEP_MS)?;
    let last = samples.back()?;
    let passed_ms = last.at.ms_since(first.at);
    (passed_ms > 0).then_some((first, last, passed_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(ran: &[(LaneId, i64)]) -> Counts {
        let mut counts = Counts::default();
        for (lane, n) in ran {
            counts.by_lane.insert((*lane, Tally::Ran), *n);
            counts.by_lane.insert((*lane, Tally::Completed), 1_000_000);
        }
        counts
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_ms(seconds * 1_000)
    }

    #[test]
    fn the_throughput_is_unknown_before_the_second_sample() {
        let throughput = Throughput::default();
        assert_eq!(throughput.per_minute(&[1], at(0)), None);
        throughput.add(&counts(&[(1, 100)]), at(0));
        assert_eq!(throughput.per_minute(&[1], at(0)), None);
    }

    #[test]
    fn the_throughput_is_the_growth_of_the_requested_lanes() {
        let throughput = Throughput::default();
        throughput.add(&counts(&[(1, 100), (2, 7)]), at(0));
        throughput.add(&counts(&[(1, 110), (2, 8), (3, 5)]), at(30));
        assert_eq!(throughput.per_minute(&[1], at(30)), Some(20.0));
        assert_eq!(throughput.per_minute(&[1, 2], at(30)), Some(22.0));
        assert_eq!(throughput.per_minute(&[3], at(30)), Some(10.0), "a new lane started at zero");
        assert_eq!(throughput.per_minute(&[4], at(30)), Some(0.0));
    }

    #[test]
    fn the_error_ratio_is_the_fraction_of_the_runs_that_failed() {
        let throughput = Throughput::default();
        throughput.add(&counts(&[(1, 100)]), at(0));
        assert_eq!(throughput.overall(at(0)), None);
        let mut later = counts(&[(1, 110), (2, 10)]);
        later.by_lane.insert((1, Tally::FailedRuns), 5);
        throughput.add(&later, at(10));
        assert_eq!(throughput.overall(at(10)), Some(Overall { per_second: 2.0, error_ratio: 0.25 }));
    }

    #[test]
    fn samples_older_than_a_minute_do_not_count() {
        let throughput = Throughput::default();
        throughput.add(&counts(&[(1, 0)]), at(0));
        throughput.add(&counts(&[(1, 600)]), at(10));
        for step in 2..=12 {
            throughput.add(&counts(&[(1, 600)]), at(step * 10));
        }
        assert_eq!(throughput.per_minute(&[1], at(120)), Some(0.0));
        assert_eq!(throughput.per_minute(&[1], at(300)), None, "there is no recent sample");
    }

    #[test]
    fn samples_that_are_too_close_are_ignored() {
        let throughput = Throughput::default();
        throughput.add(&counts(&[(1, 0)]), at(0));
        assert!(!throughput.is_due(at(4)));
        throughput.add(&counts(&[(1, 99)]), at(4));
        throughput.add(&counts(&[(1, 10)]), at(6));
        assert_eq!(throughput.per_minute(&[1], at(6)), Some(100.0));
    }
}
