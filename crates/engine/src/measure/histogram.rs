//! Histograms of times in milliseconds.

use faena_domain::Timestamp;
use faena_store::{HISTORY_BOUNDS_MS, RunTrace};

/// Number of buckets: one per bound, and one for everything above.
pub const BUCKETS: usize = HISTORY_BOUNDS_MS.len() + 1;

/// Number of measured times per bucket.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    pub counts: [u64; BUCKETS],
    pub sum_ms: u64,
    exemplars: Vec<(usize, Exemplar)>,
}

/// One of the measured times of a bucket, and what it belongs to.
#[derive(Clone, PartialEq, Debug)]
pub struct Exemplar {
    pub trace: RunTrace,
    pub ms: u64,
    pub at: Timestamp,
}

/// Returns the bucket of a time.
pub(super) fn bucket_of(ms: u64) -> usize {
    HISTORY_BOUNDS_MS.partition_point(|bound| *bound < ms)
}

/// Returns how long it is from `start` to `end`. A clock that was set back makes it 0.
pub(super) fn elapsed_ms(start: Timestamp, end: Timestamp) -> u64 {
    u64::try_from(end.ms_since(start)).unwrap_or(0)
}

impl Histogram {
    /// Returns a histogram of times that were counted elsewhere.
    pub fn from_counts(counts: [u64; BUCKETS], sum_ms: u64) -> Histogram {
        Histogram { counts, sum_ms, exemplars: Vec::new() }
    }

    pub fn observe(&mut self, ms: u64) {
        self.counts[bucket_of(ms)] += 1;
        self.sum_ms += ms;
    }

    /// Returns the last exemplar of a bucket.
    pub fn exemplar(&self, bucket: usize) -> Option<&Exemplar> {
        self.exemplars.iter().find(|(known, _)| *known == bucket).map(|(_, exemplar)| exemplar)
    }

    /// Replaces the exemplar of a bucket.
    pub(super) fn set_exemplar(&mut self, bucket: usize, exemplar: Exemplar) {
        self.exemplars.retain(|(known, _)| *known != bucket);
        self.exemplars.push((bucket, exemplar));
    }

    /// Adds the times of another histogram. Its exemplars replace those of the same buckets.
    pub fn merge(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum_ms += other.sum_ms;
        for (bucket, exemplar) in &other.exemplars {
            self.set_exemplar(*bucket, exemplar.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        for (ms, bucket) in [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2), (6, 3), (7_200_000, 17), (7_200_001, 18)] {
            assert_eq!(bucket_of(ms), bucket, "{ms} ms");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_bucket_keeps_its_last_exemplar() {
        let exemplar = |ms| Exemplar { trace: RunTrace::Trace("t".into()), ms, at: Timestamp::from_ms(0) };
        let mut histogram = Histogram::default();
        histogram.set_exemplar(3, exemplar(7));
        let mut more = Histogram::default();
        more.observe(8);
        more.set_exemplar(3, exemplar(8));
        histogram.merge(&more);
        assert_eq!(histogram.exemplar(3), Some(&exemplar(8)));
        assert_eq!((histogram.exemplar(2), histogram.counts[3], histogram.sum_ms), (None, 1, 8));
    }
}
