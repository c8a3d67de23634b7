//! Schedules, as far as both engines agree: what a round of firing does to rows, and what goes in and comes out.

use std::collections::HashMap;

use faena_domain::{
    FieldError, JobId, JobLimits, NewJob, ScheduleId, Timestamp,
    schedule::{
        JobStates, Overlap, Schedule, SchedulePatch, ScheduleSpec, TickRow, decide, fire, invalid_timing_reason,
    },
};
use serde_json::json;

use crate::{AuditEntry, Result, StoreError};

/// What `ScheduleRow` is read from.
pub const COLUMNS: &str = "id, spec, active, anchor_at, cursor_at, next_at, runs, last_due_at, last_run_at, last_job, recent, queued, \
     finished, created_at, updated_at";

/// A row of `schedule`, before anybody has understood what people said.
pub struct ScheduleRow {
    pub id: ScheduleId,
    pub spec: String,
    pub is_active: bool,
    pub anchor_at: Timestamp,
    pub cursor_at: Timestamp,
    pub next_at: Option<Timestamp>,
    pub runs: u64,
    pub last_due_at: Option<Timestamp>,
    pub last_run_at: Option<Timestamp>,
    pub last_job: Option<JobId>,
    pub recent: String,
    pub queued: Option<JobId>,
    pub finished: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl ScheduleRow {
    pub fn schedule(self) -> Result<Schedule> {
        let spec = serde_json::from_str(&self.spec).map_err(|error| {
            StoreError::Broken(format!("what is stored of schedule {} is not readable: {error}", self.id))
        })?;
        Ok(Schedule {
            id: self.id,
            spec,
            is_active: self.is_active,
            anchor_at: self.anchor_at,
            cursor_at: self.cursor_at,
            next_at: self.next_at,
            runs: self.runs,
            last_due_at: self.last_due_at,
            last_run_at: self.last_run_at,
            last_job: self.last_job,
            recent: serde_json::from_str(&self.recent).unwrap_or_default(),
            queued: self.queued,
            finished: self.finished,
            created_at: self.created_at,
            updated_at: self.updated_at,
        })
    }
}

/// The readable ones, and the others with what is wrong with them.
pub fn sorted_out(rows: Vec<ScheduleRow>) -> (Vec<Schedule>, Vec<(ScheduleId, String)>) {
    let mut good = Vec::with_capacity(rows.len());
    let mut broken = Vec::new();
    for row in rows {
        let id = row.id;
        match row.schedule() {
            Ok(schedule) => good.push(schedule),
            Err(error) => broken.push((id, error.to_string())),
        }
    }
    (good, broken)
}

/// The readable ones of a list; the others are told to the operator, and stand in nobody's way.
pub fn readable(rows: Vec<ScheduleRow>) -> Vec<Schedule> {
    let (good, broken) = sorted_out(rows);
    for (_, reason) in broken {
        tracing::warn!("{reason}; `faena doctor` tells of it");
    }
    good
}

pub fn stored_spec(spec: &ScheduleSpec) -> String {
    serde_json::to_string(spec).expect("a schedule is JSON")
}

/// A pattern that finds `part` anywhere. No name has a zero in it, at which SQLite would stop reading and PostgreSQL refuses to begin.
pub fn like(part: &str) -> String {
    let escaped = part.replace('\0', "\u{fffd}").replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    format!("%{escaped}%")
}

/// Schedules whose jobs cannot be stored, with the reason.
pub type Refused = HashMap<ScheduleId, String>;

/// Why jobs of this kind are not taken; any other error is one of the whole round.
pub fn refusal(error: StoreError) -> Result<String> {
    match error {
        StoreError::Invalid(faults) => Ok(told(&faults)),
        error => Err(error),
    }
}

/// What a schedule that stands there shall become, or why it cannot.
pub type ScheduleEdit = Box<dyn Fn(&Schedule) -> std::result::Result<SchedulePatch, Vec<FieldError>> + Send + Sync>;

/// What is asked of a schedule that stands. The edit sees what stands there, under its lock.
pub struct ScheduleChange {
    pub edit: ScheduleEdit,
    pub limits: JobLimits,
    /// How the audit log calls it: `schedule.edit`, `schedule.enable`, `schedule.disable`.
    pub action: &'static str,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct ScheduleFilter {
    pub is_active: Option<bool>,
    /// A part of the name, in any case (SQLite: as far as letters are ASCII).
    pub q: Option<String>,
    /// The whole name.
    pub name: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SchedulePage {
    pub offset: usize,
    pub limit: usize,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ScheduleCounts {
    pub active: u64,
    pub inactive: u64,
    /// How many due times became jobs, of all schedules that there are.
    pub runs: u64,
}

/// What a round of firing did.
#[derive(Clone, Debug, Default)]
pub struct Fired {
    /// How many schedules were dealt with. None, although one is due: another node is dealing with it.
    pub schedules: usize,
    /// What became of due times.
    pub ticks: Vec<TickRow>,
    /// When the next schedule is due, be it due already.
    pub next_at: Option<Timestamp>,
}

/// Everything that a round of firing writes.
#[derive(Default)]
pub struct Round {
    pub schedules: Vec<Schedule>,
    pub jobs: Vec<NewJob>,
    /// The schedule of each job.
    pub makers: Vec<ScheduleId>,
    pub ticks: Vec<TickRow>,
    pub cancels: Vec<JobId>,
}

/// Why a job was cancelled that had to make way.
pub const CANCEL_REASON: &str = "the next due time of its schedule has come (overlap cancel_previous)";

/// After so many jobs and records a round leaves the rest to the next one: a thousand schedules with a long backlog each would be a
/// transaction without end.
const ROUND_ROWS: usize = 20_000;

/// The jobs whose states decide what happens to these schedules.
pub fn looked_at(schedules: &[Schedule]) -> Vec<JobId> {
    let watched = schedules.iter().filter(|schedule| schedule.spec.overlap != Overlap::Allow);
    watched.flat_map(|schedule| schedule.recent.iter().copied()).collect()
}

pub fn stored_recent(schedule: &Schedule) -> String {
    serde_json::to_string(&schedule.recent).expect("ids are JSON")
}

/// What is to be written about schedules that are due, as many of them as one round takes. One that cannot be understood stands still with the reason and is in nobody's way.
pub fn round(schedules: Vec<Schedule>, states: &JobStates, refused: &Refused, now: Timestamp) -> Round {
    let mut round = Round::default();
    for schedule in schedules {
        if round.jobs.len() + round.ticks.len() >= ROUND_ROWS {
            break;
        }
        let stays = schedule.clone();
        match schedule.compile() {
            Ok(mut timed) => {
                let mut decision = decide(&timed, now);
                if let Some(reason) = refused.get(&timed.schedule.id) {
                    decision.mark_missed(timed.schedule.id, reason, now);
                }
                let firing = fire(&mut timed, decision, states, now);
                round.makers.extend(firing.jobs.iter().map(|_| timed.schedule.id));
                round.jobs.extend(firing.jobs);
                round.ticks.extend(firing.ticks);
                round.cancels.extend(firing.cancels);
                round.schedules.push(timed.schedule);
            }
            Err(faults) => round.schedules.push(Schedule {
                next_at: None,
                is_active: false,
                finished: Some(invalid_timing_reason(&faults)),
                ..stays
            }),
        }
    }
    round
}

fn told(faults: &[FieldError]) -> String {
    let texts: Vec<String> = faults.iter().map(|fault| format!("{} {}", fault.path, fault.message)).collect();
    texts.join("; ")
}

/// What `change` makes of a schedule.
pub fn changed(schedule: Schedule, change: &ScheduleChange, now: Timestamp) -> Result<Schedule> {
    let patch = (change.edit)(&schedule).map_err(StoreError::Invalid)?;
    let timed = schedule.patched(patch, &change.limits, now).map_err(StoreError::Invalid)?;
    Ok(timed.schedule)
}

/// A person's act on a schedule.
pub fn act(by: &str, action: &str, schedule: &Schedule) -> AuditEntry {
    entry(by, action, schedule.id, json!({ "name": schedule.spec.name, "isActive": schedule.is_active }))
}

pub fn triggered(by: &str, job: JobId, schedule: &Schedule) -> AuditEntry {
    entry(by, "schedule.trigger", schedule.id, json!({ "name": schedule.spec.name, "jobId": job }))
}

pub fn removed(by: &str, id: ScheduleId, name: &str) -> AuditEntry {
    entry(by, "schedule.delete", id, json!({ "name": name }))
}

fn entry(by: &str, action: &str, id: ScheduleId, details: serde_json::Value) -> AuditEntry {
    AuditEntry { actor: by.into(), action: action.into(), target: id.to_string(), details, count: 1 }
}
