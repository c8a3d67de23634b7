//! Schedules: the store methods, and what one round of firing writes.

use std::collections::HashMap;

use async_trait::async_trait;
use faena_domain::{
    FieldError, JobId, JobLimits, NewJob, ScheduleId, Timestamp,
    schedule::{
        JobStates, Overlap, Schedule, SchedulePatch, ScheduleSpec, TickRow, decide, fire, invalid_timing_reason,
    },
};
use serde_json::json;

use crate::{AuditEntry, Result, StoreError};

/// Schedules and their ticks.
#[async_trait]
pub trait ScheduleStore: Send + Sync + 'static {
    /// Stores a schedule, with its entry in the audit log.
    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()>;

    /// Changes a schedule by `change`, with its entry in the audit log.
    ///
    /// A rejected change changes nothing. Returns `None` if the schedule does not exist.
    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>>;

    /// Deletes a schedule and its ticks, with an entry in the audit log. Its jobs are kept. Returns `false` if it does not exist.
    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool>;

    /// Creates a job of a schedule now, with an entry in the audit log. Returns `None` if the schedule does not exist.
    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>>;

    /// Processes the due times of up to `limit` schedules, the most overdue first.
    ///
    /// Jobs, ticks and the schedules themselves change in one transaction: each due time is processed once, even if several nodes call
    /// this at the same time or a node dies.
    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired>;

    /// Returns a schedule.
    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>>;

    /// Lists matching schedules by name, and returns how many match.
    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)>;

    /// Lists the ticks of a schedule before `before`, newest first.
    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>>;

    /// Returns how many ticks a schedule has before `before`, counted up to [`crate::COUNT_LIMIT`].
    async fn schedule_tick_total(&self, id: ScheduleId, before: Option<Timestamp>) -> Result<u64>;

    /// Returns how many schedules are active and inactive, how many jobs they created, and the earliest due time.
    async fn schedule_counts(&self) -> Result<ScheduleCounts>;
}

/// The columns of `ScheduleRow`.
pub const COLUMNS: &str = "id, spec, active, anchor_at, cursor_at, next_at, runs, last_due_at, last_run_at, last_job, recent, queued, \
     finished, created_at, updated_at";

/// A row of `schedule`; an error if its definition is not readable.
pub type ScheduleRow = std::result::Result<Schedule, (ScheduleId, StoreError)>;

/// Parses the definition of a row.
pub fn parse_spec(id: ScheduleId, spec: &str) -> std::result::Result<ScheduleSpec, (ScheduleId, StoreError)> {
    let unreadable = |error| StoreError::Internal(format!("schedule {id} is not readable: {error}").into());
    serde_json::from_str(spec).map_err(|error: serde_json::Error| (id, unreadable(error)))
}

/// Parses the recent jobs of a row.
pub fn parse_recent(recent: &str) -> Vec<JobId> {
    serde_json::from_str(recent).unwrap_or_default()
}

/// Schedules whose stored definition is not readable, each with the reason.
pub type UnreadableSchedules = Vec<(ScheduleId, String)>;

/// Separates the readable schedules from the unreadable ones.
pub fn split_rows(rows: Vec<ScheduleRow>) -> (Vec<Schedule>, UnreadableSchedules) {
    let mut readable = Vec::with_capacity(rows.len());
    let mut unreadable = Vec::new();
    for row in rows {
        match row {
            Ok(schedule) => readable.push(schedule),
            Err((id, error)) => unreadable.push((id, error.to_string())),
        }
    }
    (readable, unreadable)
}

/// Returns the readable schedules of a list, and logs the others.
pub fn readable(rows: Vec<ScheduleRow>) -> Vec<Schedule> {
    let (readable, unreadable) = split_rows(rows);
    for (schedule, reason) in unreadable {
        tracing::warn!(%schedule, reason, "cannot read a schedule, leaving it out of the list");
    }
    readable
}

pub fn stored_spec(spec: &ScheduleSpec) -> String {
    serde_json::to_string(spec).expect("a schedule is JSON")
}

/// Returns a pattern that matches `part` anywhere.
///
/// Replaces zero bytes: SQLite would stop reading there, and PostgreSQL rejects them. No name contains one.
pub fn like(part: &str) -> String {
    let escaped = part.replace('\0', "\u{fffd}").replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    format!("%{escaped}%")
}

/// Schedules whose jobs cannot be stored, with the reason.
pub type RejectedSchedules = HashMap<ScheduleId, String>;

/// Returns why the jobs of a schedule are rejected. Any other error fails the whole round.
pub fn rejection(error: StoreError) -> Result<String> {
    match error {
        StoreError::Invalid(errors) => Ok(describe(&errors)),
        error => Err(error),
    }
}

/// Derives the patch of a schedule from its stored state, or rejects it.
pub type ScheduleEdit = Box<dyn Fn(&Schedule) -> std::result::Result<SchedulePatch, Vec<FieldError>> + Send + Sync>;

/// A change of a stored schedule. The edit sees the schedule under its lock.
pub struct ScheduleChange {
    pub edit: ScheduleEdit,
    pub limits: JobLimits,
    /// The audit action: `schedule.edit`, `schedule.enable` or `schedule.disable`.
    pub action: &'static str,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct ScheduleFilter {
    pub is_active: Option<bool>,
    /// Part of the name, case-insensitive (SQLite: only ASCII letters).
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
    /// Number of jobs that all existing schedules created.
    pub runs: u64,
    /// The earliest due time of the active schedules.
    pub next_at: Option<Timestamp>,
}

/// Result of a round of firing.
#[derive(Clone, Debug, Default)]
pub struct Fired {
    /// Number of processed schedules. It is 0 although one is due if another node is processing that one.
    pub schedules: usize,
    /// The ticks that were recorded.
    pub ticks: Vec<TickRow>,
    /// When the next schedule is due; may be in the past.
    pub next_at: Option<Timestamp>,
}

/// Everything that a round of firing writes.
#[derive(Default)]
pub struct Round {
    pub schedules: Vec<Schedule>,
    pub jobs: Vec<NewJob>,
    /// The schedule of each job.
    pub job_schedules: Vec<ScheduleId>,
    pub ticks: Vec<TickRow>,
    pub cancels: Vec<JobId>,
}

/// Reason for the cancellation of a job because of `overlap`.
pub const CANCEL_REASON: &str = "the next due time of its schedule has come (overlap cancel_previous)";

/// A round stops after this number of jobs and ticks: a thousand schedules with a long backlog each would make one
/// very long transaction.
const ROUND_ROWS: usize = 20_000;

/// Returns the jobs whose states decide what happens to these schedules.
pub fn jobs_to_check(schedules: &[Schedule]) -> Vec<JobId> {
    let watched = schedules.iter().filter(|schedule| schedule.spec.overlap != Overlap::Allow);
    watched.flat_map(|schedule| schedule.recent.iter().copied()).collect()
}

pub fn stored_recent(schedule: &Schedule) -> String {
    serde_json::to_string(&schedule.recent).expect("ids are JSON")
}

/// Decides what to write for due schedules, until the round is full.
///
/// A schedule whose timing is invalid is deactivated with the reason and does not delay others.
pub fn plan_round(schedules: Vec<Schedule>, states: &JobStates, rejected: &RejectedSchedules, now: Timestamp) -> Round {
    let mut round = Round::default();
    for schedule in schedules {
        if round.jobs.len() + round.ticks.len() >= ROUND_ROWS {
            break;
        }
        let stored = schedule.clone();
        match schedule.compile() {
            Ok(mut compiled) => {
                let mut decision = decide(&compiled, now);
                if let Some(reason) = rejected.get(&compiled.schedule.id) {
                    decision.mark_missed(compiled.schedule.id, reason, now);
                }
                let firing = fire(&mut compiled, decision, states, now);
                round.job_schedules.extend(firing.jobs.iter().map(|_| compiled.schedule.id));
                round.jobs.extend(firing.jobs);
                round.ticks.extend(firing.ticks);
                round.cancels.extend(firing.cancels);
                round.schedules.push(compiled.schedule);
            }
            Err(errors) => round.schedules.push(Schedule {
                next_at: None,
                is_active: false,
                finished: Some(invalid_timing_reason(&errors)),
                ..stored
            }),
        }
    }
    round
}

fn describe(errors: &[FieldError]) -> String {
    let texts: Vec<String> = errors.iter().map(|error| format!("{} {}", error.path, error.message)).collect();
    texts.join("; ")
}

/// Applies `change` to a schedule.
pub fn apply_change(schedule: Schedule, change: &ScheduleChange, now: Timestamp) -> Result<Schedule> {
    let patch = (change.edit)(&schedule).map_err(StoreError::Invalid)?;
    let compiled = schedule.patched(patch, &change.limits, now).map_err(StoreError::Invalid)?;
    Ok(compiled.schedule)
}

/// Returns the audit entry of an action on a schedule.
pub fn audit_entry(by: &str, action: &str, schedule: &Schedule) -> AuditEntry {
    entry(by, action, schedule.id, json!({ "name": schedule.spec.name, "isActive": schedule.is_active }))
}

pub fn trigger_audit_entry(by: &str, job: JobId, schedule: &Schedule) -> AuditEntry {
    entry(by, "schedule.trigger", schedule.id, json!({ "name": schedule.spec.name, "jobId": job }))
}

pub fn delete_audit_entry(by: &str, id: ScheduleId, name: &str) -> AuditEntry {
    entry(by, "schedule.delete", id, json!({ "name": name }))
}

fn entry(by: &str, action: &str, id: ScheduleId, details: serde_json::Value) -> AuditEntry {
    AuditEntry { actor: by.into(), action: action.into(), target: id.to_string(), details, count: 1 }
}
