//! What becomes of due times: a job, or a line that says why not.
//!
//! Everything is derived from the schedule's own row (its cursor) and the time. The same row and the same time give the same
//! decision, so it does not matter who makes it, or how often it is made before it is committed.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{
    Backlog, CompiledSchedule, CompiledTiming, DstGap, DstNote, EarlierTicks, Misfire, Overlap, Schedule, Tick, Timing,
    template,
};
use crate::{JobId, JobState, NewJob, OnParentFailure, ScheduleId, Timestamp};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TickOutcome {
    Fired,
    /// Nobody was there in time.
    Missed,
    /// A blackout, or the job of an earlier due time was still going.
    Skipped,
    /// By a person, at a time of their own.
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

    /// The number by which it is stored.
    pub fn code(self) -> i16 {
        self as i16
    }

    pub fn from_code(code: i16) -> Option<TickOutcome> {
        TickOutcome::ALL.into_iter().find(|outcome| outcome.code() == code)
    }
}

/// What became of one due time, or of many alike.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TickRow {
    pub schedule_id: ScheduleId,
    pub due_at: Timestamp,
    pub outcome: TickOutcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    /// When that was decided.
    pub at: Timestamp,
    /// It stands for all due times from `due_at` to here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub through_at: Option<Timestamp>,
    /// For how many due times it stands. `None`: more than were counted.
    pub count: Option<u64>,
}

/// One coming run, as previews show it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduledRun {
    pub at: Timestamp,
    /// The same moment, as the clocks of the schedule's zone show it.
    pub local: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The next `count` runs after `after`.
pub fn preview(timed: &CompiledSchedule, after: Timestamp, count: usize) -> Vec<ScheduledRun> {
    let count = count.min(timed.runs_left());
    let moved = with_moved(timed);
    let mut last = after;
    let runs = std::iter::from_fn(|| {
        let tick = timed.timing.next(last)?;
        let left_out = moved.as_ref().and_then(|moved| moved.next(last)).filter(|other| other.due < tick.due);
        let note = tick.note.map(|note| note.to_string());
        let left_out = left_out.and_then(|other| match other.note {
            Some(DstNote::Moved { from, .. }) => {
                let day = timed.timing.local(other.due);
                Some(format!(
                    "before it, {from} does not exist on {} and is left out",
                    day.get(..10).unwrap_or_default()
                ))
            }
            _ => None,
        });
        last = tick.due;
        let notes: Vec<String> = left_out.into_iter().chain(note).collect();
        let note = (!notes.is_empty()).then(|| notes.join("; "));
        Some(ScheduledRun { at: tick.due, local: timed.timing.local(tick.due), note })
    });
    runs.take(count).collect()
}

/// The same timing with local times that do not exist moved instead of left out, to see which those are.
fn with_moved(timed: &CompiledSchedule) -> Option<CompiledTiming> {
    let timing = &timed.schedule.spec.timing;
    if timing.cron_expression.is_none() || timing.dst_gap != Some(DstGap::Skip) {
        return None;
    }
    Timing { dst_gap: Some(DstGap::Next), ..timing.clone() }.compile(timed.schedule.anchor_at).ok()
}

/// How far a due schedule has come, before anybody has looked at its last job.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// Due times that shall become jobs, the earliest first.
    pub due: Vec<Timestamp>,
    /// Due times that will not.
    pub not_fired: Vec<TickRow>,
    pub cursor_at: Timestamp,
    pub next_at: Option<Timestamp>,
}

impl Decision {
    /// Nothing can come of any of it, for this reason.
    pub fn mark_missed(&mut self, schedule_id: ScheduleId, reason: &str, now: Timestamp) {
        let missed = self.due.drain(..).map(|due_at| TickRow {
            schedule_id,
            due_at,
            outcome: TickOutcome::Missed,
            reason: Some(reason.to_owned()),
            job_id: None,
            at: now,
            through_at: None,
            count: Some(1),
        });
        self.not_fired.extend(missed);
    }
}

/// How many due times that nothing comes of get a record of their own in one decision; those before them share one.
const MAX_OWN_RECORDS: usize = 100;

/// How far back a decision looks for due times outside a blackout.
const MAX_LOOK_BACK: usize = 100_000;

/// What is to be done about everything that has become due by `now`.
pub fn decide(timed: &CompiledSchedule, now: Timestamp) -> Decision {
    let Schedule { spec, cursor_at, .. } = &timed.schedule;
    let wanted = match spec.misfire {
        Misfire::CatchUp => spec.catch_up_limit as usize,
        Misfire::RunOnce | Misfire::Skip => 1,
    };
    let backlog = backlog(timed, wanted, now);
    let (blackout, due): (Vec<&Tick>, Vec<&Tick>) = backlog.latest.iter().partition(|tick| tick.blackout.is_some());
    let grace_ms = i64::try_from(spec.misfire_grace_ms).unwrap_or(i64::MAX);
    let is_late = |tick: &Tick| now.ms_since(tick.due) > grace_ms;
    let outage = backlog.earlier.is_some() || due.first().is_some_and(|first| is_late(first));
    let kept = match (outage, spec.misfire) {
        (false, _) => due.len(),
        (true, Misfire::CatchUp | Misfire::RunOnce) => wanted,
        (true, Misfire::Skip) => usize::from(due.last().is_some_and(|last| !is_late(last))),
    };
    let (missed, kept) = due.split_at(due.len().saturating_sub(kept));
    let records = Records { schedule_id: timed.schedule.id, now };
    let in_blackout = |tick: &Tick| format!("in a blackout: {}", tick.blackout.as_deref().unwrap_or_default());
    let mut not_fired = records.of(&blackout, None, TickOutcome::Skipped, in_blackout);
    let reason = missed_reason(spec.misfire);
    not_fired.extend(records.of(missed, backlog.earlier.as_ref(), TickOutcome::Missed, |_| reason.into()));
    let cursor_at = backlog.latest.last().map_or(*cursor_at, |tick| tick.due);
    let next_at = timed.timing.next(cursor_at).map(|tick| tick.due);
    Decision { due: kept.iter().map(|tick| tick.due).collect(), not_fired, cursor_at, next_at }
}

/// What has become due, and enough of it outside a blackout if there is: an outage may end in a long one.
fn backlog(timed: &CompiledSchedule, wanted: usize, now: Timestamp) -> Backlog {
    let cursor_at = timed.schedule.cursor_at;
    let backlog = timed.timing.backlog(cursor_at, now, wanted + MAX_OWN_RECORDS);
    let fit = backlog.latest.iter().filter(|tick| tick.blackout.is_none()).count();
    if backlog.earlier.is_none() || fit >= wanted {
        return backlog;
    }
    timed.timing.backlog(cursor_at, now, MAX_LOOK_BACK)
}

struct Records {
    schedule_id: ScheduleId,
    now: Timestamp,
}

impl Records {
    /// Of each of the latest of `ticks` its own, and one for all that lie before those, `earlier` among them.
    fn of(
        &self,
        ticks: &[&Tick],
        earlier: Option<&EarlierTicks>,
        outcome: TickOutcome,
        reason: impl Fn(&Tick) -> String,
    ) -> Vec<TickRow> {
        let (shared, own) = ticks.split_at(ticks.len().saturating_sub(MAX_OWN_RECORDS));
        let row = |due_at, reason| TickRow {
            schedule_id: self.schedule_id,
            due_at,
            outcome,
            reason: Some(reason),
            job_id: None,
            at: self.now,
            through_at: None,
            count: Some(1),
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

fn missed_reason(misfire: Misfire) -> &'static str {
    match misfire {
        Misfire::RunOnce => "no server was there in time; misfire run_once makes one job for the latest due time",
        Misfire::Skip => "no server was there in time; misfire skip makes no job for it",
        Misfire::CatchUp => "no server was there in time, and it is further back than catchUpLimit reaches",
    }
}

/// What comes of a decision.
#[derive(Clone, Debug, Default)]
pub struct Firing {
    pub jobs: Vec<NewJob>,
    pub ticks: Vec<TickRow>,
    /// Jobs that were still going and have to make way.
    pub cancels: Vec<JobId>,
}

/// The states of jobs. One that is not in here is not known any more.
pub type JobStates = HashMap<JobId, JobState>;

/// How many of its jobs a schedule keeps in mind.
const MAX_RECENT: usize = 50;

/// Turns a decision into jobs, by what the jobs before them are doing, and moves the schedule on.
pub fn fire(timed: &mut CompiledSchedule, decision: Decision, states: &JobStates, now: Timestamp) -> Firing {
    let mut firing = Firing { ticks: decision.not_fired, ..Firing::default() };
    let overlap = timed.schedule.spec.overlap;
    let mut waiting = None;
    if overlap != Overlap::Allow {
        timed.schedule.recent.retain(|job| states.get(job).is_some_and(|state| !state.is_terminal()));
        waiting = timed.schedule.queued.filter(|job| states.get(job) == Some(&JobState::Pending));
    }
    let last_due = decision.due.last().copied();
    for due in decision.due {
        if timed.runs_left() == 0 {
            break;
        }
        let going = &timed.schedule.recent;
        let skipped = match overlap {
            Overlap::Allow => None,
            Overlap::Skip => going.last().map(|job| format!("job {job} of an earlier due time is not over yet")),
            Overlap::QueueOne => waiting.map(|job| format!("job {job} waits already")),
            Overlap::CancelPrevious => {
                let later = last_due.filter(|last| *last > due);
                later.map(|later| format!("the job of {later}, due by now too, takes its place"))
            }
        };
        let mut row = TickRow {
            schedule_id: timed.schedule.id,
            due_at: due,
            outcome: TickOutcome::Skipped,
            reason: skipped,
            job_id: None,
            at: now,
            through_at: None,
            count: Some(1),
        };
        if row.reason.is_none() {
            let mut job = timed.job(due, now);
            if matches!(overlap, Overlap::QueueOne | Overlap::CancelPrevious) && !timed.schedule.recent.is_empty() {
                job.options.depends_on.clone_from(&timed.schedule.recent);
                job.options.on_parent_failure = OnParentFailure::Run;
                waiting = Some(job.id);
            }
            if overlap == Overlap::CancelPrevious {
                firing.cancels.clone_from(&timed.schedule.recent);
            }
            row.outcome = TickOutcome::Fired;
            row.job_id = Some(job.id);
            timed.schedule.runs += 1;
            timed.schedule.last_due_at = Some(due);
            timed.schedule.queued = waiting;
            timed.schedule.made(job.id, now);
            firing.jobs.push(job);
        }
        firing.ticks.push(row);
    }
    timed.schedule.cursor_at = decision.cursor_at;
    timed.schedule.next_at = decision.next_at;
    timed.finish_if_over();
    firing
}

impl Schedule {
    /// Keeps in mind that it made this job.
    fn made(&mut self, job: JobId, now: Timestamp) {
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
        let over = match schedule.spec.max_runs {
            Some(max) if schedule.runs >= max => Some(format!("it has run {max} of {max} times")),
            _ if schedule.next_at.is_none() => Some("nothing is due any more before its end".into()),
            _ => None,
        };
        if over.is_some() {
            schedule.is_active = false;
            schedule.next_at = None;
            schedule.finished = over;
        }
    }

    /// A run at the wish of a person. The next due time sees it as it sees the not_fired.
    pub fn trigger(&mut self, now: Timestamp) -> (NewJob, TickRow) {
        let mut job = self.job(now, now);
        job.options.scheduled_at = None;
        self.schedule.made(job.id, now);
        let row = TickRow {
            schedule_id: self.schedule.id,
            due_at: now,
            outcome: TickOutcome::Triggered,
            reason: None,
            job_id: Some(job.id),
            at: now,
            through_at: None,
            count: Some(1),
        };
        (job, row)
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
        options.scheduled_at = Some(due.plus_ms(self.delay_ms(due)));
        NewJob {
            id: JobId::at(now),
            queue: spec.job.queue.clone(),
            priority: spec.job.priority,
            payload: template::render(&spec.job.payload, &values),
            options,
            ..NewJob::new(spec.job.kind.clone())
        }
    }

    /// The share of the jitter that the job of this due time gets: always the same, whoever works it out.
    fn delay_ms(&self, due: Timestamp) -> i64 {
        let jitter = self.schedule.spec.jitter_ms;
        let seed = self.schedule.id.0.as_u128() as u64 ^ due.as_ms().unsigned_abs().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (seed ^ (seed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        i64::try_from((mixed ^ (mixed >> 29)) % (jitter + 1)).unwrap_or(0)
    }
}
