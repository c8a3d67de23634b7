//! History of what happened to jobs, per queue and minute, hour or day. It outlives the jobs.
//!
//! Counts are the differences of the counters since the last recording, in one transaction with a mark of how far the
//! counters are recorded. So every job is counted once, whichever node records it and whenever a node dies. Times are measured
//! by each node and passed with the next recording.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use faena_domain::{Priority, Timestamp};

use crate::{Counts, JobTotal, Lane, LaneId, Result};

/// History of what happened to jobs.
#[async_trait]
pub trait HistoryStore: Send + Sync + 'static {
    /// Adds everything that happened since the last call, and these measured times, to the current minute, hour
    /// and day.
    ///
    /// Writes nothing if nothing happened. Returns how many entries changed.
    async fn history_record(&self, timings: Vec<TimingCount>, now: Timestamp) -> Result<usize>;

    /// Lists the entries that match, in the order of their time.
    async fn history_list(&self, query: HistoryQuery) -> Result<Vec<HistoryEntry>>;

    /// Deletes up to `limit` entries of each kind of period that are older than `before`.
    async fn history_prune(&self, before: HistoryCutoffs, limit: usize) -> Result<usize>;
}

/// Upper bounds of the buckets of measured times, in milliseconds, inclusive. A last bucket contains everything above.
pub const HISTORY_BOUNDS_MS: [u64; 18] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000, 7_200_000];

/// Maximum number of queues that are recorded under their own names. A caller with more probably puts ids into the
/// names.
const MAX_QUEUES: usize = 250;

/// Name under which all further queues are counted.
const OTHER_QUEUES: &str = "other";

/// A number in the history.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum HistoryMeasure {
    Total(JobTotal),
    /// Runs by the time that their job waited since it was ready.
    Wait,
    /// Sum of these times in milliseconds.
    WaitMs,
    /// Runs by the time that they took.
    Run,
    RunMs,
}

impl HistoryMeasure {
    pub fn code(self) -> i16 {
        match self {
            HistoryMeasure::Total(total) => total as i16,
            HistoryMeasure::Wait => 10,
            HistoryMeasure::WaitMs => 11,
            HistoryMeasure::Run => 12,
            HistoryMeasure::RunMs => 13,
        }
    }

    fn of_code(code: i16) -> Option<HistoryMeasure> {
        let totals = JobTotal::ALL.into_iter().map(HistoryMeasure::Total);
        let times =
            [HistoryMeasure::Wait, HistoryMeasure::WaitMs, HistoryMeasure::Run, HistoryMeasure::RunMs].into_iter();
        totals.chain(times).find(|measure| measure.code() == code)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum HistoryPeriod {
    Hour = 0,
    Day = 1,
    /// Has totals only, without measured times.
    Minute = 2,
}

impl HistoryPeriod {
    pub const ALL: [HistoryPeriod; 3] = [HistoryPeriod::Hour, HistoryPeriod::Day, HistoryPeriod::Minute];

    pub fn ms(self) -> i64 {
        match self {
            HistoryPeriod::Minute => 60_000,
            HistoryPeriod::Hour => 3_600_000,
            HistoryPeriod::Day => 24 * 3_600_000,
        }
    }

    /// Returns the start of the period that contains `at`. Days are those of UTC.
    pub fn start(self, at: Timestamp) -> Timestamp {
        Timestamp::from_ms(at.as_ms().div_euclid(self.ms()) * self.ms())
    }

    /// Returns whether the history of this period has a measure. Measured times per minute would take ten times as many rows.
    fn includes(self, measure: i16) -> bool {
        self != HistoryPeriod::Minute || matches!(HistoryMeasure::of_code(measure), Some(HistoryMeasure::Total(_)))
    }
}

/// Which entries of the history are deleted: those of periods that start before these times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryCutoffs {
    pub minutes: Timestamp,
    pub hours: Timestamp,
    pub days: Timestamp,
}

impl HistoryCutoffs {
    pub(crate) fn of(&self, period: HistoryPeriod) -> Timestamp {
        match period {
            HistoryPeriod::Minute => self.minutes,
            HistoryPeriod::Hour => self.hours,
            HistoryPeriod::Day => self.days,
        }
    }
}

/// Measured times of a lane that one node adds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TimingCount {
    pub lane: LaneId,
    pub measure: HistoryMeasure,
    pub bucket: i16,
    pub n: i64,
}

#[derive(Clone, PartialEq, Debug)]
pub struct HistoryQuery {
    pub period: HistoryPeriod,
    /// Periods that start at or after this time.
    pub from: Timestamp,
    /// Periods that start before this time.
    pub until: Timestamp,
    /// `None`: all queues.
    pub queues: Option<Vec<String>>,
    /// Whether each queue has its own entries. Otherwise they are added up, and the name of the queue is empty.
    pub by_queue: bool,
}

/// One number of one queue in one period.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HistoryEntry {
    pub starts_at: Timestamp,
    pub queue: String,
    pub measure: HistoryMeasure,
    pub bucket: i16,
    pub n: i64,
}

impl HistoryEntry {
    /// Reads a row: start, queue, measure, bucket, number. Rows of a newer version of Faena are skipped.
    pub(crate) fn of_row(starts_at: i64, queue: String, measure: i16, bucket: i16, n: i64) -> Option<HistoryEntry> {
        let measure = HistoryMeasure::of_code(measure)?;
        Some(HistoryEntry { starts_at: Timestamp::from_ms(starts_at), queue, measure, bucket, n })
    }
}

/// Returns the name under which each lane's queue is shown: its own, or `other` for all but the first `max` queues.
///
/// A queue keeps the name it has here until its last lane is reclaimed; then one of the others may get a name.
pub fn named_queues(lanes: &[Lane], max: usize) -> HashMap<LaneId, &str> {
    let mut named: Vec<&str> = Vec::new();
    let mut sorted: Vec<&Lane> = lanes.iter().collect();
    sorted.sort_unstable_by_key(|lane| lane.id);
    sorted
        .into_iter()
        .map(|lane| {
            let queue = lane.queue.as_str();
            if !named.contains(&queue) {
                if named.len() == max {
                    return (lane.id, OTHER_QUEUES);
                }
                named.push(queue);
            }
            (lane.id, queue)
        })
        .collect()
}

/// How much of each counter is recorded.
pub type Marks = HashMap<(LaneId, i16), i64>;

/// What a recording writes.
#[derive(Default)]
pub struct Recording {
    /// Numbers to add, by queue, measure and bucket. No number is 0.
    pub add: BTreeMap<(String, i16, i16), i64>,
    /// New marks, by lane and measure.
    pub marks: Vec<(LaneId, i16, i64)>,
}

impl Recording {
    /// Returns what to write so that the history contains these counters and times.
    pub fn plan(counts: &Counts, marks: &Marks, lanes: &[Lane], timings: &[TimingCount]) -> Recording {
        let queues = named_queues(lanes, MAX_QUEUES);
        let queue_of = |lane: LaneId| queues.get(&lane).copied().unwrap_or(OTHER_QUEUES).to_owned();
        let priorities: HashMap<LaneId, Priority> = lanes.iter().map(|lane| (lane.id, lane.priority)).collect();
        let mut recording = Recording::default();
        for lane in counts.lanes() {
            for total in JobTotal::ALL {
                let code = HistoryMeasure::Total(total).code();
                let so_far = counts.so_far(lane, total);
                let change = so_far - marks.get(&(lane, code)).copied().unwrap_or(0);
                if change == 0 {
                    continue;
                }
                recording.marks.push((lane, code, so_far));
                let bucket = match (total, priorities.get(&lane)) {
                    (JobTotal::Completed, Some(priority)) => priority.rank(),
                    _ => 0,
                };
                *recording.add.entry((queue_of(lane), code, bucket)).or_default() += change;
            }
        }
        for timing in timings {
            *recording.add.entry((queue_of(timing.lane), timing.measure.code(), timing.bucket)).or_default() +=
                timing.n;
        }
        // The changes of a job that moved from one lane to another of its queue add up to 0.
        recording.add.retain(|_, n| *n > 0);
        recording
    }

    /// Returns the numbers to add to the rows of one period.
    pub fn rows(&self, period: HistoryPeriod) -> impl Iterator<Item = (&str, i16, i16, i64)> {
        let rows = self.add.iter().filter(move |((_, measure, _), _)| period.includes(*measure));
        rows.map(|((queue, measure, bucket), n)| (queue.as_str(), *measure, *bucket, *n))
    }

    pub fn is_empty(&self) -> bool {
        self.add.is_empty() && self.marks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::Priority;

    use super::*;
    use crate::Tally;

    fn lane(id: LaneId, queue: &str) -> Lane {
        Lane { id, queue: queue.into(), kind: "noop".into(), priority: Priority::Normal, keyed: false }
    }

    #[test]
    fn the_first_queues_keep_their_names_and_the_others_share_one() {
        let lanes = [lane(3, "c"), lane(1, "a"), lane(2, "b"), lane(4, "a"), lane(5, "d")];
        let named = named_queues(&lanes, 2);
        assert_eq!([1, 2, 3, 4, 5].map(|lane| named[&lane]), ["a", "b", "other", "a", "other"]);
    }

    #[test]
    fn a_recording_contains_only_what_happened_since_the_last() {
        let mut counts = Counts::default();
        counts.by_lane.insert((1, Tally::Completed), 5);
        counts.by_lane.insert((1, Tally::RemovedCompleted), 2);
        let first = Recording::plan(&counts, &Marks::new(), &[lane(1, "a")], &[]);
        assert_eq!(first.add[&("a".into(), JobTotal::Created as i16, 0)], 7);
        let priority = Priority::Normal.rank();
        assert_eq!(first.add[&("a".into(), JobTotal::Completed as i16, priority)], 7);
        let marks: Marks = first.marks.iter().map(|(lane, measure, n)| ((*lane, *measure), *n)).collect();
        assert!(Recording::plan(&counts, &marks, &[lane(1, "a")], &[]).is_empty());
    }

    #[test]
    fn a_job_that_changes_its_priority_is_counted_as_created_once() {
        let lanes = [lane(1, "a"), lane(2, "a")];
        let mut counts = Counts::default();
        counts.by_lane.insert((1, Tally::Queued), 1);
        let first = Recording::plan(&counts, &Marks::new(), &lanes, &[]);
        let marks: Marks = first.marks.iter().map(|(lane, measure, n)| ((*lane, *measure), *n)).collect();
        let mut moved = Counts::default();
        moved.by_lane.insert((1, Tally::Queued), 0);
        moved.by_lane.insert((2, Tally::Queued), 1);
        let second = Recording::plan(&moved, &marks, &lanes, &[]);
        assert!(second.add.is_empty() && second.marks.len() == 2);
    }

    #[test]
    fn days_and_hours_start_where_they_do_in_utc() {
        let at = Timestamp::from_ms(26 * 3_600_000 + 5);
        assert_eq!(HistoryPeriod::Hour.start(at).as_ms(), 26 * 3_600_000);
        assert_eq!(HistoryPeriod::Day.start(at).as_ms(), 24 * 3_600_000);
    }
}
