//! Measures how long jobs spent in their states, and how their runs ended.
//!
//! A batch is measured without a lock and added under one, so that the cost per run stays far below that of storing it.

use std::collections::HashMap;

use faena_domain::{JobState, Timestamp};
use faena_store::{HistoryMeasure, LaneId, RunEnd, RunOutcome, RunTrace, TimingCount};
use parking_lot::Mutex;

use super::histogram::{BUCKETS, Exemplar, Histogram, bucket_of, elapsed_ms};

/// The states whose duration is measured: all states that are not final.
pub const TIMED_STATES: [JobState; 6] = [
    JobState::Pending,
    JobState::Queued,
    JobState::Scheduled,
    JobState::Assigned,
    JobState::Processing,
    JobState::Retrying,
];

/// How a run can end, in the order of [`JobSnapshot::outcomes`].
pub const RUN_OUTCOMES: [&str; 5] = ["completed", "retried", "failed", "cancelled", "released"];

/// Longest text of an exemplar's id. The format allows 128 characters with the name of the label.
const MAX_TRACE_CHARS: usize = 100;

#[derive(Default)]
pub struct JobMeasures(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    states: [Histogram; TIMED_STATES.len()],
    outcomes: [u64; RUN_OUTCOMES.len()],
    lanes: HashMap<LaneId, Lane>,
}

#[derive(Default)]
struct Lane {
    times: LaneTimes,
    /// The part of these times that is already in the history.
    saved: LaneTimes,
}

/// Times of the runs of a lane.
#[derive(Clone, Debug, Default)]
pub struct LaneTimes {
    /// From becoming ready to the start.
    pub wait: Histogram,
    /// From the start to the end.
    pub run: Histogram,
}

/// Everything measured so far.
pub struct JobSnapshot {
    /// In the order of [`TIMED_STATES`].
    pub states: [Histogram; TIMED_STATES.len()],
    /// In the order of [`RUN_OUTCOMES`].
    pub outcomes: [u64; RUN_OUTCOMES.len()],
    pub lanes: HashMap<LaneId, LaneTimes>,
}

/// Histogram of a batch. Remembers the last run of each bucket, so that only a few exemplars are created per batch.
#[derive(Clone, Copy)]
struct BatchHistogram {
    counts: [u64; BUCKETS],
    sum_ms: u64,
    last: [Option<(u32, u64)>; BUCKETS],
}

impl Default for BatchHistogram {
    fn default() -> Self {
        BatchHistogram { counts: [0; BUCKETS], sum_ms: 0, last: [None; BUCKETS] }
    }
}

impl BatchHistogram {
    fn observe(&mut self, ms: u64, index: u32) {
        let bucket = bucket_of(ms);
        self.counts[bucket] += 1;
        self.sum_ms += ms;
        self.last[bucket] = Some((index, ms));
    }

    fn add_to(&self, histogram: &mut Histogram, ends: &[&RunEnd]) {
        for (count, more) in histogram.counts.iter_mut().zip(self.counts) {
            *count += more;
        }
        histogram.sum_ms += self.sum_ms;
        for (bucket, last) in self.last.iter().enumerate() {
            let Some((index, ms)) = last else { continue };
            let end = ends[*index as usize];
            histogram.set_exemplar(bucket, Exemplar { trace: trace_of(end), ms: *ms, at: end.at });
        }
    }
}

/// Returns the id that identifies a run in other systems: its trace id, its correlation id, or the id of its job.
fn trace_of(end: &RunEnd) -> RunTrace {
    let own = || RunTrace::Correlation(end.id.to_string());
    match &end.timing.trace {
        Some(RunTrace::Correlation(id)) if id.chars().count() > MAX_TRACE_CHARS => own(),
        known => known.clone().unwrap_or_else(own),
    }
}

#[derive(Default)]
struct Batch {
    states: [BatchHistogram; TIMED_STATES.len()],
    outcomes: [u64; RUN_OUTCOMES.len()],
    lanes: Vec<(LaneId, BatchHistogram, BatchHistogram)>,
}

impl Batch {
    fn add(&mut self, end: &RunEnd, index: u32) {
        self.outcomes[outcome_index(&end.outcome)] += 1;
        self.add_states(end, index);
        let Some(started_at) = end.started_at else { return };
        // Runs of one lane mostly follow each other.
        let at = match self.lanes.iter().rposition(|(lane, _, _)| *lane == end.lane) {
            Some(at) => at,
            None => {
                self.lanes.push((end.lane, BatchHistogram::default(), BatchHistogram::default()));
                self.lanes.len() - 1
            }
        };
        let (_, wait, run) = &mut self.lanes[at];
        wait.observe(elapsed_ms(end.ready_at, started_at), index);
        run.observe(elapsed_ms(started_at, end.at), index);
    }

    fn add_states(&mut self, end: &RunEnd, index: u32) {
        let mut observe = |state: JobState, from: Timestamp, to: Timestamp| {
            self.states[state as usize].observe(elapsed_ms(from, to), index);
        };
        let created_at = end.id.created_at();
        if end.retry_count == 0 && end.ready_at > created_at && end.outcome != RunOutcome::Released {
            observe(JobState::Pending, created_at, end.ready_at);
        }
        let claimed_at = end.timing.claimed_at.unwrap_or(end.ready_at);
        observe(JobState::Queued, end.ready_at, claimed_at);
        let assigned_at = match (end.timing.was_scheduled, end.timing.assigned_at) {
            (true, at) => {
                observe(JobState::Scheduled, claimed_at, at.unwrap_or(end.at));
                at
            }
            (false, _) => Some(claimed_at),
        };
        if let Some(assigned_at) = assigned_at {
            observe(JobState::Assigned, assigned_at, end.started_at.unwrap_or(end.at));
        }
        if let Some(started_at) = end.started_at {
            observe(JobState::Processing, started_at, end.at);
        }
        // The planned delay: a manual retry shortens it.
        if let RunOutcome::Retry { due_at, .. } = end.outcome {
            observe(JobState::Retrying, end.at, due_at);
        }
    }
}

fn outcome_index(outcome: &RunOutcome) -> usize {
    match outcome {
        RunOutcome::Completed { .. } => 0,
        RunOutcome::Retry { .. } => 1,
        RunOutcome::Failed { .. } => 2,
        RunOutcome::Cancelled { .. } => 3,
        RunOutcome::Released => 4,
    }
}

impl JobMeasures {
    /// Adds runs that have ended and whose end is stored.
    pub fn add(&self, ends: &[&RunEnd]) {
        let mut batch = Batch::default();
        for (index, end) in (0u32..).zip(ends) {
            batch.add(end, index);
        }
        let mut inner = self.0.lock();
        for (histogram, more) in inner.states.iter_mut().zip(&batch.states) {
            more.add_to(histogram, ends);
        }
        for (count, more) in inner.outcomes.iter_mut().zip(batch.outcomes) {
            *count += more;
        }
        for (lane, wait, run) in &batch.lanes {
            let times = &mut inner.lanes.entry(*lane).or_default().times;
            wait.add_to(&mut times.wait, ends);
            run.add_to(&mut times.run, ends);
        }
    }

    pub fn snapshot(&self) -> JobSnapshot {
        let inner = self.0.lock();
        JobSnapshot {
            states: inner.states.clone(),
            outcomes: inner.outcomes,
            lanes: inner.lanes.iter().map(|(lane, known)| (*lane, known.times.clone())).collect(),
        }
    }

    /// Returns the times that are not in the history, and marks them as saved.
    pub fn take_unsaved(&self) -> Vec<TimingCount> {
        let mut inner = self.0.lock();
        let mut unsaved = Vec::new();
        for (lane, Lane { times, saved }) in &mut inner.lanes {
            for (current, saved, buckets, sum) in [
                (&times.wait, &mut saved.wait, HistoryMeasure::Wait, HistoryMeasure::WaitMs),
                (&times.run, &mut saved.run, HistoryMeasure::Run, HistoryMeasure::RunMs),
            ] {
                let mut push = |measure, bucket: usize, n: u64| {
                    if n > 0 {
                        let (bucket, n) = (i16::try_from(bucket).unwrap_or(0), i64::try_from(n).unwrap_or(i64::MAX));
                        unsaved.push(TimingCount { lane: *lane, measure, bucket, n });
                    }
                };
                for (bucket, (current, saved)) in current.counts.iter().zip(&mut saved.counts).enumerate() {
                    push(buckets, bucket, current - *saved);
                    *saved = *current;
                }
                push(sum, 0, current.sum_ms - saved.sum_ms);
                saved.sum_ms = current.sum_ms;
            }
        }
        unsaved
    }

    /// Marks times that could not be stored as unsaved again.
    pub fn restore_unsaved(&self, timings: &[TimingCount]) {
        let mut inner = self.0.lock();
        for TimingCount { lane, measure, bucket, n } in timings {
            let Some(Lane { saved, .. }) = inner.lanes.get_mut(lane) else { continue };
            let bucket = usize::try_from(*bucket).unwrap_or(0);
            let count = match measure {
                HistoryMeasure::Wait => &mut saved.wait.counts[bucket],
                HistoryMeasure::WaitMs => &mut saved.wait.sum_ms,
                HistoryMeasure::Run => &mut saved.run.counts[bucket],
                HistoryMeasure::RunMs => &mut saved.run.sum_ms,
                HistoryMeasure::Total(_) => continue,
            };
            *count = count.saturating_sub(n.unsigned_abs());
        }
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::{ErrorReason, JobId, WorkerId};
    use faena_store::RunTiming;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_ms(1_000_000 + ms)
    }

    /// Returns the end of a run that was ready at 0, claimed at 10, started at 30 and ended at 130.
    fn end(lane: LaneId, outcome: RunOutcome) -> RunEnd {
        RunEnd {
            id: JobId(uuid::Uuid::from_u128(JobId::first_at_ms(at(0).as_ms()).0.as_u128() | 7 << 76 | 2 << 62 | 1)),
            run: 1,
            lane,
            retry_count: 0,
            ready_at: at(0),
            worker: WorkerId::new(),
            started_at: Some(at(30)),
            at: at(130),
            log: String::new(),
            outcome,
            may_have_other_rows: false,
            closes_claim: true,
            by_guardian: false,
            timing: RunTiming { claimed_at: Some(at(10)), ..RunTiming::default() },
        }
    }

    const COMPLETED: RunOutcome = RunOutcome::Completed { result: None };

    fn sums(measures: &JobMeasures) -> [(u64, u64); 6] {
        measures.snapshot().states.map(|states| (states.counts.iter().sum(), states.sum_ms))
    }

    #[test]
    fn each_state_of_a_run_is_measured() {
        let measures = JobMeasures::default();
        measures.add(&[&end(1, COMPLETED)]);
        assert_eq!(sums(&measures), [(0, 0), (1, 10), (0, 0), (1, 20), (1, 100), (0, 0)]);
        let snapshot = measures.snapshot();
        assert_eq!((snapshot.lanes[&1].wait.sum_ms, snapshot.lanes[&1].run.sum_ms), (30, 100));
        assert_eq!(snapshot.outcomes, [1, 0, 0, 0, 0]);
    }

    #[test]
    fn delayed_jobs_scheduled_jobs_and_retries_have_their_states_measured() {
        let measures = JobMeasures::default();
        let delayed = RunEnd { ready_at: at(4), ..end(1, COMPLETED) };
        let timing = RunTiming { was_scheduled: true, assigned_at: Some(at(25)), ..delayed.timing.clone() };
        let scheduled = RunEnd { timing, ..delayed };
        let retry = RunOutcome::Retry { due_at: at(1_130), error: "no".into(), reason: ErrorReason::Error };
        let retried = RunEnd { retry_count: 1, ..end(1, retry) };
        measures.add(&[&scheduled, &retried]);
        assert_eq!(sums(&measures), [(1, 4), (2, 16), (1, 15), (2, 25), (2, 200), (1, 1_000)]);
    }

    #[test]
    fn a_job_whose_process_never_connected_was_only_scheduled() {
        let measures = JobMeasures::default();
        let timing = RunTiming { was_scheduled: true, claimed_at: Some(at(10)), ..RunTiming::default() };
        measures.add(&[&RunEnd { started_at: None, timing, ..end(1, RunOutcome::Released) }]);
        assert_eq!(sums(&measures), [(0, 0), (1, 10), (1, 120), (0, 0), (0, 0), (0, 0)]);
        assert!(measures.snapshot().lanes.is_empty(), "it neither started nor ran");
    }

    #[test]
    fn exemplars_have_the_id_of_the_trace_or_of_the_job() {
        let measures = JobMeasures::default();
        let exemplar =
            || measures.snapshot().lanes[&1].run.exemplar(bucket_of(100)).map(|exemplar| exemplar.trace.clone());
        let mut run = end(1, COMPLETED);
        measures.add(&[&run]);
        assert_eq!(exemplar(), Some(RunTrace::Correlation(run.id.to_string())));
        run.timing.trace = Some(RunTrace::Trace("4bf92f3577b34da6a3ce929d0e0e4736".into()));
        measures.add(&[&run]);
        assert_eq!(exemplar(), run.timing.trace);
        run.timing.trace = Some(RunTrace::Correlation("x".repeat(255)));
        measures.add(&[&run]);
        assert_eq!(exemplar(), Some(RunTrace::Correlation(run.id.to_string())), "too long for the format");
    }

    #[test]
    fn times_that_could_not_be_saved_are_saved_with_the_next() {
        let measures = JobMeasures::default();
        measures.add(&[&end(1, COMPLETED)]);
        let first = measures.take_unsaved();
        assert_eq!(first.len(), 4, "two buckets and two sums");
        assert_eq!(measures.take_unsaved(), []);
        measures.restore_unsaved(&first);
        measures.add(&[&end(1, COMPLETED)]);
        let second = measures.take_unsaved();
        assert!(first.iter().zip(&second).all(|(first, second)| second.n == 2 * first.n), "{second:?}");
    }
}
