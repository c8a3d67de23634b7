//! Decides what happens at due times: a job is created, or a record says why not.
//!
//! A decision depends only on the schedule's row (its cursor) and the time. The same row and the same time give the same
//! decision, so any node can make it, any number of times before it is committed.

use std::{collections::HashMap, fmt};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Backlog, CompiledSchedule, CompiledTiming, DstGap, DstNote, EarlierTicks, Misfire, Overlap, Schedule,
    ScheduleReason, Tick, Timing, template,
};
use crate::{JobId, JobState, NewJob, OnParentFailure, ScheduleId, Timestamp};

/// Outcome of a due time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TickOutcome {
    /// A job was created.
    Fired,
    /// No server was running in time, or the job could not be stored.
    Missed,
    /// The due time was in a blackout, or the job of an earlier due time had not finished.
    Skipped,
    /// A user created a job outside the due times.
    Triggered,
}

impl TickOutcome {
    pub const ALL: [TickOutcome; 4] =
        [TickOutcome::Fired, TickOutcome::Missed, TickOutcome::Skipped, TickOutcome::Triggered];

    pub fn as_str(self) -> &'static str {
        match self {
            TickOutcome::Fired => "fired",
            TickOutcome::Missed => "missed",
            TickOutcome::Skipped => "skipped",
            TickOutcome::Triggered => "triggered",
        }
    }

    /// Returns the number that is stored.
    pub fn code(self) -> i16 {
        self as i16
    }

    pub fn from_code(code: i16) -> Option<TickOutcome> {
        TickOutcome::ALL.into_iter().find(|outcome| outcome.code() == code)
    }
}

/// Record of the outcome of one due time, or of several with the same outcome.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TickRow {
    pub schedule_id: ScheduleId,
    pub due_at: Timestamp,
    pub outcome: TickOutcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    /// When the outcome was decided.
    pub at: Timestamp,
    /// The record covers all due times from `dueAt` to this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub through_at: Option<Timestamp>,
    /// Number of due times that the record covers. `null`: too many to count.
    pub count: Option<u64>,
}

impl TickRow {
    /// Returns the record of a single due time without a job.
    fn new(schedule_id: ScheduleId, due_at: Timestamp, outcome: TickOutcome, now: Timestamp) -> TickRow {
        TickRow { schedule_id, due_at, outcome, reason: None, job_id: None, at: now, through_at: None, count: Some(1) }
    }
}

/// A future run, as previews show it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduledRun {
    pub at: Timestamp,
    /// The same time in the schedule's time zone.
    pub local: String,
    /// The notes as one text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<RunNote>,
}

/// What daylight saving does to a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum RunNote {
    /// The clocks skip the local time `from`; the run is right after the gap, at `to`.
    Moved { from: String, to: String },
    /// The local time occurs twice, and this is the first time.
    First,
    /// The local time occurs twice, and this is the second time.
    Second,
    /// The run before this one is skipped, because the local time `from` does not exist on `day`.
    Skipped { from: String, day: String },
}

impl From<DstNote> for RunNote {
    fn from(note: DstNote) -> RunNote {
        match note {
            DstNote::Moved { from, to } => RunNote::Moved { from, to },
            DstNote::First => RunNote::First,
            DstNote::Second => RunNote::Second,
        }
    }
}

impl fmt::Display for RunNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunNote::Moved { from, to } => DstNote::Moved { from: from.clone(), to: to.clone() }.fmt(f),
            RunNote::First => DstNote::First.fmt(f),
            RunNote::Second => DstNote::Second.fmt(f),
            RunNote::Skipped { from, day } => {
                write!(f, "the run before it is skipped: {from} does not exist on {day}")
            }
        }
    }
}

/// Returns up to `count` runs after `after`.
pub fn preview(compiled: &CompiledSchedule, after: Timestamp, count: usize) -> Vec<ScheduledRun> {
    let count = count.min(compiled.runs_left());
    let with_gaps = with_skipped_local_times(compiled);
    let mut last = after;
    let runs = std::iter::from_fn(|| {
        let tick = compiled.timing.next(last)?;
        let skipped = with_gaps.as_ref().and_then(|timing| timing.next(last)).filter(|other| other.due < tick.due);
        let skipped_note = skipped.and_then(|other| match other.note {
            Some(DstNote::Moved { from, .. }) => {
                let local = compiled.timing.local(other.due);
                Some(RunNote::Skipped { from, day: local.get(..10).unwrap_or_default().to_owned() })
            }
            _ => None,
        });
        last = tick.due;
        let notes: Vec<RunNote> = skipped_note.into_iter().chain(tick.note.map(RunNote::from)).collect();
        let note = notes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let note = (!note.is_empty()).then_some(note);
        Some(ScheduledRun { at: tick.due, local: compiled.timing.local(tick.due), note, notes })
    });
    runs.take(count).collect()
}

/// Returns the timing with `dstGap: next` if the schedule skips gaps, to find the local times that it skips.
fn with_skipped_local_times(compiled: &CompiledSchedule) -> Option<CompiledTiming> {
    let timing = &compiled.schedule.spec.timing;
    if timing.cron_expression.is_none() || timing.dst_gap != Some(DstGap::Skip) {
        return None;
    }
    Timing { dst_gap: Some(DstGap::Next), ..timing.clone() }.compile(compiled.schedule.anchor_at).ok()
}

/// What to do about the due times of a schedule, before the state of its jobs is known.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// Due times that may create a job, earliest first. `overlap` and `maxRuns` can still prevent it.
    pub due: Vec<Timestamp>,
    /// Records of the due times that create no job.
    pub not_fired: Vec<TickRow>,
    pub cursor_at: Timestamp,
    pub next_at: Option<Timestamp>,
}

impl Decision {
    /// Turns every due time into a missed one, for `reason`.
    pub fn mark_missed(&mut self, schedule_id: ScheduleId, reason: &str, now: Timestamp) {
        let missed = self.due.drain(..).map(|due_at| TickRow {
            reason: Some(reason.to_owned()),
            ..TickRow::new(schedule_id, due_at, TickOutcome::Missed, now)
        });
        self.not_fired.extend(missed);
    }
}

/// Maximum number of due times without a job that get a record of their own in one decision; earlier ones share one.
const MAX_OWN_RECORDS: usize = 100;

/// Maximum number of due times that a decision examines to find some outside blackouts.
const MAX_LOOK_BACK: usize = 100_000;

/// Decides what to do about every due time up to `now`.
pub fn decide(compiled: &CompiledSchedule, now: Timestamp) -> Decision {
    let Schedule { spec, cursor_at, .. } = &compiled.schedule;
    let wanted = match spec.misfire {
        Misfire::CatchUp => spec.catch_up_limit as usize,
        Misfire::RunOnce | Misfire::Skip => 1,
    };
    let backlog = backlog(compiled, wanted, now);
    let (blacked_out, due): (Vec<&Tick>, Vec<&Tick>) = backlog.latest.iter().partition(|tick| tick.blackout.is_some());
    let grace_ms = i64::try_from(spec.misfire_grace_ms).unwrap_or(i64::MAX);
    let is_late = |tick: &Tick| now.ms_since(tick.due) > grace_ms;
    let was_outage = backlog.earlier.is_some() || due.first().is_some_and(|first| is_late(first));
    let kept = match (was_outage, spec.misfire) {
        (false, _) => due.len(),
        (true, Misfire::CatchUp | Misfire::RunOnce) => wanted,
        (true, Misfire::Skip) => usize::from(due.last().is_some_and(|last| !is_late(last))),
    };
    let (missed, kept) = due.split_at(due.len().saturating_sub(kept));
    let recorder = TickRecorder { schedule_id: compiled.schedule.id, now };
    let in_blackout = |tick: &Tick| {
        let except = tick.blackout.as_deref().unwrap_or_default();
        ScheduleReason::Blackout { except }.to_string()
    };
    let mut not_fired = recorder.record(&blacked_out, None, TickOutcome::Skipped, in_blackout);
    let is_missed = |_: &Tick| ScheduleReason::Missed(spec.misfire).to_string();
    not_fired.extend(recorder.record(missed, backlog.earlier.as_ref(), TickOutcome::Missed, is_missed));
    let cursor_at = backlog.latest.last().map_or(*cursor_at, |tick| tick.due);
    let next_at = compiled.timing.next(cursor_at).map(|tick| tick.due);
    Decision { due: kept.iter().map(|tick| tick.due).collect(), not_fired, cursor_at, next_at }
}

/// Returns the due times up to `now`, with `wanted` of them outside blackouts if there are that many.
///
/// An outage may end in a long blackout, so a second search over a longer time may be needed.
fn backlog(compiled: &CompiledSchedule, wanted: usize, now: Timestamp) -> Backlog {
    let cursor_at = compiled.schedule.cursor_at;
    let backlog = compiled.timing.backlog(cursor_at, now, wanted + MAX_OWN_RECORDS);
    let outside = backlog.latest.iter().filter(|tick| tick.blackout.is_none()).count();
    if backlog.earlier.is_none() || outside >= wanted {
        return backlog;
    }
    compiled.timing.backlog(cursor_at, now, MAX_LOOK_BACK)
}

/// Builds the records of due times that create no job.
struct TickRecorder {
    schedule_id: ScheduleId,
    now: Timestamp,
}

impl TickRecorder {
    /// Returns one record for each of the latest `ticks`, and one for all ticks before those, including `earlier`.
    fn record(
        &self,
        ticks: &[&Tick],
        earlier: Option<&EarlierTicks>,
        outcome: TickOutcome,
        reason: impl Fn(&Tick) -> String,
    ) -> Vec<TickRow> {
        let (shared, own) = ticks.split_at(ticks.len().saturating_sub(MAX_OWN_RECORDS));
        let row = |due_at, reason| TickRow {
            reason: Some(reason),
            ..TickRow::new(self.schedule_id, due_at, outcome, self.now)
        };
        let mut rows: Vec<TickRow> = own.iter().map(|tick| row(tick.due, reason(tick))).collect();
        let first = earlier.map(|earlier| earlier.first).or(shared.first().map(|tick| tick.due));
        let last = shared.last().map(|tick| tick.due).or(earlier.map(|earlier| earlier.last));
        if let (Some(first), Some(last)) = (first, last) {
            let text = ticks
                .last()
                .map_or_else(|| reason(&Tick { due: last, note: None, blackout: None }), |tick| reason(tick));
            let before = earlier.map_or(Some(0), |earlier| earlier.count);
            let count = before.map(|before| before + shared.len() as u64);
            rows.push(TickRow { through_at: Some(last), count, ..row(first, text) });
        }
        rows
    }
}

/// Jobs, records and cancellations that follow from a decision.
#[derive(Clone, Debug, Default)]
pub struct Firing {
    pub jobs: Vec<NewJob>,
    pub ticks: Vec<TickRow>,
    /// Unfinished jobs to cancel, because `overlap` is `cancel_previous`.
    pub cancels: Vec<JobId>,
}

/// States of jobs. A job that is missing no longer exists.
pub type JobStates = HashMap<JobId, JobState>;

/// Maximum number of possibly unfinished jobs that a schedule remembers.
const MAX_RECENT: usize = 50;

/// Turns a decision into jobs, depending on the state of earlier jobs, and advances the schedule.
pub fn fire(compiled: &mut CompiledSchedule, decision: Decision, states: &JobStates, now: Timestamp) -> Firing {
    let mut firing = Firing { ticks: decision.not_fired, ..Firing::default() };
    let overlap = compiled.schedule.spec.overlap;
    let mut waiting = None;
    if overlap != Overlap::Allow {
        compiled.schedule.recent.retain(|job| states.get(job).is_some_and(|state| !state.is_terminal()));
        waiting = compiled.schedule.queued.filter(|job| states.get(job) == Some(&JobState::Pending));
    }
    let last_due = decision.due.last().copied();
    for due in decision.due {
        if compiled.runs_left() == 0 {
            break;
        }
        let tick = TickRow::new(compiled.schedule.id, due, TickOutcome::Fired, now);
        if let Some(reason) = skip_reason(compiled, due, last_due, waiting) {
            firing.ticks.push(TickRow { outcome: TickOutcome::Skipped, reason: Some(reason), ..tick });
            continue;
        }
        let mut job = compiled.job(due, now);
        if matches!(overlap, Overlap::QueueOne | Overlap::CancelPrevious) && !compiled.schedule.recent.is_empty() {
            job.options.depends_on.clone_from(&compiled.schedule.recent);
            job.options.on_parent_failure = OnParentFailure::Run;
            waiting = Some(job.id);
        }
        if overlap == Overlap::CancelPrevious {
            firing.cancels.clone_from(&compiled.schedule.recent);
        }
        compiled.schedule.runs += 1;
        compiled.schedule.last_due_at = Some(due);
        compiled.schedule.queued = waiting;
        compiled.schedule.remember(job.id, now);
        firing.ticks.push(TickRow { job_id: Some(job.id), ..tick });
        firing.jobs.push(job);
    }
    compiled.schedule.cursor_at = decision.cursor_at;
    compiled.schedule.next_at = decision.next_at;
    compiled.finish_if_over();
    firing
}

/// Returns why `due` creates no job: an unfinished job, or a later due time that replaces it.
fn skip_reason(
    compiled: &CompiledSchedule,
    due: Timestamp,
    last_due: Option<Timestamp>,
    waiting: Option<JobId>,
) -> Option<String> {
    let unfinished = &compiled.schedule.recent;
    match compiled.schedule.spec.overlap {
        Overlap::Allow => None,
        Overlap::Skip => unfinished.last().map(|job| ScheduleReason::Unfinished { job: &job.to_string() }.to_string()),
        Overlap::QueueOne => waiting.map(|job| ScheduleReason::Waiting { job: &job.to_string() }.to_string()),
        Overlap::CancelPrevious => {
            let later = last_due.filter(|last| *last > due);
            later.map(|by| ScheduleReason::Replaced { by }.to_string())
        }
    }
}

impl Schedule {
    /// Remembers a job that the schedule has created.
    fn remember(&mut self, job: JobId, now: Timestamp) {
        self.last_run_at = Some(now);
        self.last_job = Some(job);
        self.recent.push(job);
        let surplus = self.recent.len().saturating_sub(MAX_RECENT);
        self.recent.drain(..surplus);
    }
}

impl CompiledSchedule {
    fn runs_left(&self) -> usize {
        let Schedule { spec, runs, .. } = &self.schedule;
        spec.max_runs.map_or(usize::MAX, |max| usize::try_from(max.saturating_sub(*runs)).unwrap_or(usize::MAX))
    }

    fn finish_if_over(&mut self) {
        let schedule = &mut self.schedule;
        let reason = match schedule.spec.max_runs {
            Some(max) if schedule.runs >= max => Some(ScheduleReason::MaxRuns { max }),
            _ if schedule.next_at.is_none() => Some(ScheduleReason::NoneLeft),
            _ => None,
        };
        if reason.is_some() {
            schedule.is_active = false;
            schedule.next_at = None;
            schedule.finished = reason.map(|reason| reason.to_string());
        }
    }

    /// Creates a job for a user, outside the due times. `overlap` treats it like every other job of the schedule.
    pub fn trigger(&mut self, now: Timestamp) -> (NewJob, TickRow) {
        let mut job = self.job(now, now);
        job.options.scheduled_at = None;
        self.schedule.remember(job.id, now);
        let tick = TickRow::new(self.schedule.id, now, TickOutcome::Triggered, now);
        let tick = TickRow { job_id: Some(job.id), ..tick };
        (job, tick)
    }

    fn job(&self, due: Timestamp, now: Timestamp) -> NewJob {
        let Schedule { id, spec, .. } = &self.schedule;
        let values = template::Values {
            id: *id,
            name: &spec.name,
            timezone: &spec.timing.timezone,
            timing: &self.timing,
            due,
            previous: self.schedule.last_due_at.filter(|last| *last < due),
            run: self.schedule.runs + 1,
        };
        let mut options = spec.job.options.clone();
        options.schedule_id = Some(id.to_string());
        options.schedule_due = Some(due);
        options.scheduled_at = Some(due.plus_ms(self.jitter_ms(due)));
        NewJob {
            id: JobId::at(now),
            queue: spec.job.queue.clone(),
            priority: spec.job.priority,
            payload: template::render(&spec.job.payload, &values),
            options,
            ..NewJob::new(spec.job.kind.clone())
        }
    }

    /// Returns the random delay of the job of a due time. It is the same on every node.
    fn jitter_ms(&self, due: Timestamp) -> i64 {
        let max = self.schedule.spec.jitter_ms;
        let seed = self.schedule.id.0.as_u128() as u64 ^ due.as_ms().unsigned_abs().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (seed ^ (seed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        i64::try_from((mixed ^ (mixed >> 29)) % (max + 1)).unwrap_or(0)
    }
}
