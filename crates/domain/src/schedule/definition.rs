//! Schedules: their definition, their stored state, and how the API shows them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{CompiledTiming, DstGap, DstOverlap, Timing, template};
use crate::{
    FieldError, JobId, JobLimits, JobOptions, JobView, NewJob, Priority, ScheduleId, Timestamp,
    field_error::{check_range, check_text},
    retry::retry_on_schema,
};

/// What happens to due times at which no server was running.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Misfire {
    /// One job, for the latest due time.
    #[default]
    RunOnce,
    /// No job, unless the latest due time is within `misfireGraceMs`.
    Skip,
    /// A job for each of the latest due times, up to `catchUpLimit`.
    CatchUp,
}

/// What happens at a due time while the job of an earlier one has not finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    #[default]
    Allow,
    Skip,
    /// One job waits for the unfinished one; further due times are skipped.
    QueueOne,
    /// The unfinished job is cancelled, and the new one starts once it has stopped.
    CancelPrevious,
}

/// Template of the jobs that a schedule creates.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobTemplate {
    pub kind: String,
    pub queue: String,
    pub priority: Priority,
    /// A JSON object. Placeholders such as `{{due}}` in its strings are filled in for each job.
    pub payload: String,
    pub options: JobOptions,
}

impl Default for JobTemplate {
    fn default() -> Self {
        let NewJob { queue, priority, payload, options, .. } = NewJob::new("");
        JobTemplate { kind: String::new(), queue, priority, payload, options }
    }
}

/// Definition of a schedule, as its author wrote it. Stored as JSON.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleSpec {
    pub name: String,
    pub description: Option<String>,
    pub timing: Timing,
    pub job: JobTemplate,
    pub misfire: Misfire,
    /// How late a due time may be processed without counting as missed.
    pub misfire_grace_ms: u64,
    pub catch_up_limit: u32,
    pub overlap: Overlap,
    /// Upper bound of the random delay of each job.
    pub jitter_ms: u64,
    pub max_runs: Option<u64>,
}

pub const DEFAULT_GRACE_MS: u64 = 60_000;
pub const DEFAULT_CATCH_UP: u32 = 100;
const MAX_CATCH_UP: u32 = 10_000;
const DAY_MS: u64 = 86_400_000;

impl Default for ScheduleSpec {
    fn default() -> Self {
        ScheduleSpec {
            name: String::new(),
            description: None,
            timing: Timing::default(),
            job: JobTemplate::default(),
            misfire: Misfire::default(),
            misfire_grace_ms: DEFAULT_GRACE_MS,
            catch_up_limit: DEFAULT_CATCH_UP,
            overlap: Overlap::default(),
            jitter_ms: 0,
            max_runs: None,
        }
    }
}

impl ScheduleSpec {
    /// Validates the definition. Returns the compiled timing, or every invalid field.
    pub fn check(&self, limits: &JobLimits, anchor_at: Timestamp) -> Result<CompiledTiming, Vec<FieldError>> {
        let mut errors = Vec::new();
        check_text(&mut errors, "name", &self.name, 255);
        if let Some(description) = &self.description {
            check_text(&mut errors, "description", &description.replace('\n', " "), 2_000);
        }
        check_range(&mut errors, "misfireGraceMs", self.misfire_grace_ms, 1_000..=DAY_MS);
        check_range(&mut errors, "catchUpLimit", u64::from(self.catch_up_limit), 1..=u64::from(MAX_CATCH_UP));
        check_range(&mut errors, "jitterMs", self.jitter_ms, 0..=DAY_MS);
        if let Some(runs) = self.max_runs {
            check_range(&mut errors, "maxRuns", runs, 1..=i64::MAX.unsigned_abs());
        }
        errors.extend(self.job.check(limits));
        match self.timing.compile(anchor_at) {
            Ok(timing) if errors.is_empty() => Ok(timing),
            Ok(_) => Err(errors),
            Err(timing_errors) => {
                errors.splice(0..0, timing_errors);
                Err(errors)
            }
        }
    }
}

impl JobTemplate {
    fn check(&self, limits: &JobLimits) -> Vec<FieldError> {
        let mut job = NewJob::new(self.kind.clone());
        job.queue.clone_from(&self.queue);
        job.options = self.options.clone();
        let with_schedule_path = |error: FieldError| {
            let path = match error.path.as_str() {
                "name" => "jobName".into(),
                "type" => if self.options.name.is_some() { "jobType" } else { "jobName" }.into(),
                _ => error.path,
            };
            FieldError::new(path, error.message)
        };
        let mut errors: Vec<FieldError> = job.check(limits).into_iter().map(with_schedule_path).collect();
        errors.extend(template::check(&self.payload).map(|message| FieldError::new("jobPayload", message)));
        let message = "cannot be set for a schedule; it applies to a single job";
        errors.extend(self.single_job_options().map(|path| FieldError::new(path, message)));
        errors
    }

    /// Returns the options that many jobs cannot share: the second job would be rejected, or expire before it starts.
    fn single_job_options(&self) -> impl Iterator<Item = &'static str> {
        let JobOptions { idempotency_key, unique_key, scheduled_at, expires_at, depends_on, .. } = &self.options;
        let options = [
            ("idempotencyKey", idempotency_key.is_some()),
            ("uniqueKey", unique_key.is_some()),
            ("scheduledAt", scheduled_at.is_some()),
            ("expiresAt", expires_at.is_some()),
            ("dependsOn", !depends_on.is_empty()),
        ];
        options.into_iter().filter(|(_, is_set)| *is_set).map(|(path, _)| path)
    }
}

/// A stored schedule: its definition and its state.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    pub id: ScheduleId,
    pub spec: ScheduleSpec,
    pub is_active: bool,
    /// Time that intervals without `startAt` are counted from.
    pub anchor_at: Timestamp,
    /// Every due time up to this one has been processed.
    pub cursor_at: Timestamp,
    /// Next due time outside blackouts. `None`: the schedule is not active.
    pub next_at: Option<Timestamp>,
    /// Number of due times that created a job.
    pub runs: u64,
    /// Latest due time that created a job.
    pub last_due_at: Option<Timestamp>,
    /// When the latest job was created.
    pub last_run_at: Option<Timestamp>,
    pub last_job: Option<JobId>,
    /// Jobs of this schedule that may be unfinished, oldest first.
    pub recent: Vec<JobId>,
    /// Job that waits for the unfinished jobs to end.
    pub queued: Option<JobId>,
    /// Reason why it no longer fires by itself.
    pub finished: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// A schedule together with its compiled timing.
pub struct CompiledSchedule {
    pub schedule: Schedule,
    pub timing: CompiledTiming,
}

/// Changes of a schedule. A field that is `None` stays unchanged.
#[derive(Clone, Debug, Default)]
pub struct SchedulePatch {
    pub spec: Option<ScheduleSpec>,
    pub is_active: Option<bool>,
}

impl Schedule {
    /// Creates an active schedule whose due times begin after `now`.
    #[expect(clippy::new_ret_no_self, reason = "the caller also needs the compiled timing")]
    pub fn new(spec: ScheduleSpec, limits: &JobLimits, now: Timestamp) -> Result<CompiledSchedule, Vec<FieldError>> {
        let timing = spec.check(limits, now)?;
        let schedule = Schedule {
            id: ScheduleId::new(),
            spec,
            is_active: false,
            anchor_at: now,
            cursor_at: now,
            next_at: None,
            runs: 0,
            last_due_at: None,
            last_run_at: None,
            last_job: None,
            recent: Vec::new(),
            queued: None,
            finished: None,
            created_at: now,
            updated_at: now,
        };
        let mut compiled = CompiledSchedule { schedule, timing };
        compiled.enable(now)?;
        Ok(compiled)
    }

    /// Compiles the stored timing. Fails if it is no longer valid, for example after its time zone was removed.
    pub fn compile(self) -> Result<CompiledSchedule, Vec<FieldError>> {
        let timing = self.spec.timing.compile(self.anchor_at)?;
        Ok(CompiledSchedule { schedule: self, timing })
    }

    /// Applies `patch`. Computes the next due time again only if the timing has changed.
    pub fn patched(
        self,
        patch: SchedulePatch,
        limits: &JobLimits,
        now: Timestamp,
    ) -> Result<CompiledSchedule, Vec<FieldError>> {
        let mut schedule = self;
        let mut timing_changed = false;
        if let Some(spec) = patch.spec {
            if spec.timing.interval_ms != schedule.spec.timing.interval_ms {
                schedule.anchor_at = now;
            }
            timing_changed = spec.timing != schedule.spec.timing || spec.max_runs != schedule.spec.max_runs;
            schedule.spec = spec;
        }
        let timing = schedule.spec.check(limits, schedule.anchor_at)?;
        let was_active = schedule.is_active;
        let mut compiled = CompiledSchedule { schedule, timing };
        match patch.is_active {
            Some(false) => compiled.disable(),
            Some(true) if !was_active || timing_changed => compiled.enable(now)?,
            None if was_active && timing_changed => compiled.enable(now)?,
            // The reason for its end may no longer apply; it stays inactive until the user enables it.
            None if timing_changed => compiled.schedule.finished = None,
            _ => {}
        }
        compiled.schedule.updated_at = now;
        Ok(compiled)
    }

    /// Returns the schedule as the API shows it. The explanation of a timing that is no longer valid says why.
    pub fn view(&self) -> ScheduleView {
        let Schedule { spec, .. } = self;
        let (options, timing) = (&spec.job.options, &spec.timing);
        let (explanation, dst_gap, dst_overlap) = match timing.compile(self.anchor_at) {
            Ok(timing) => (timing.explain(), timing.dst_gap(), timing.dst_overlap()),
            Err(errors) => (
                invalid_timing_reason(&errors),
                timing.dst_gap.unwrap_or(DstGap::Next),
                timing.dst_overlap.unwrap_or(DstOverlap::First),
            ),
        };
        ScheduleView {
            id: self.id,
            name: spec.name.clone(),
            description: spec.description.clone(),
            cron_expression: timing.cron_expression.clone(),
            interval_ms: timing.interval_ms,
            timezone: timing.timezone.clone(),
            explanation,
            dst_gap,
            dst_overlap,
            start_at: timing.start_at,
            end_at: timing.end_at,
            except: timing.except.clone(),
            job_name: options.name.clone().unwrap_or_else(|| spec.job.kind.clone()),
            job_type: spec.job.kind.clone(),
            job_payload: raw(&spec.job.payload),
            job_priority: spec.job.priority,
            queue: spec.job.queue.clone(),
            max_retries: options.retry.max_retries,
            retry_delay: options.retry.retry_delay_ms,
            backoff_multiplier: options.retry.backoff_multiplier,
            max_delay: options.retry.max_delay_ms,
            retry_delays: options.retry.retry_delays_ms.clone(),
            retry_on: options.retry.retry_on.to_json(),
            timeout_ms: options.timeout_ms,
            webhook_url: options.webhook_url.clone(),
            concurrency_key: options.concurrency_key.clone(),
            tags: options.tags.clone(),
            misfire: spec.misfire,
            misfire_grace_ms: spec.misfire_grace_ms,
            catch_up_limit: spec.catch_up_limit,
            overlap: spec.overlap,
            jitter_ms: spec.jitter_ms,
            max_runs: spec.max_runs,
            is_active: self.is_active,
            next_run_at: self.next_at,
            last_run_at: self.last_run_at,
            last_due_at: self.last_due_at,
            last_job_id: self.last_job,
            run_count: self.runs,
            finished: self.finished.clone(),
            created_at: self.created_at,
            updated_at: self.updated_at,
            jobs: None,
        }
    }
}

/// Explains why a stored timing is no longer valid.
pub fn invalid_timing_reason(errors: &[FieldError]) -> String {
    format!("its timing is no longer valid: {}", FieldError::join(errors))
}

impl CompiledSchedule {
    /// Activates the schedule. Due times while it was inactive are not caught up, and no due time is processed twice.
    fn enable(&mut self, now: Timestamp) -> Result<(), Vec<FieldError>> {
        let schedule = &mut self.schedule;
        if schedule.spec.max_runs.is_some_and(|max| schedule.runs >= max) {
            let message = format!("must be greater than {}, the number of runs so far", schedule.runs);
            return Err(vec![FieldError::new("maxRuns", message)]);
        }
        schedule.cursor_at = schedule.cursor_at.max(now);
        let Some(next) = self.timing.next(schedule.cursor_at) else {
            return Err(vec![FieldError::new(self.ending_field(), "no due time is left; set a later end")]);
        };
        schedule.next_at = Some(next.due);
        schedule.is_active = true;
        schedule.finished = None;
        Ok(())
    }

    /// Deactivates the schedule.
    pub fn disable(&mut self) {
        self.schedule.is_active = false;
        self.schedule.next_at = None;
    }

    /// Returns the field that determines the last due time.
    fn ending_field(&self) -> &'static str {
        let timing = &self.schedule.spec.timing;
        match (&timing.end_at, &timing.cron_expression) {
            (Some(_), _) => "endAt",
            (None, Some(_)) => "cronExpression",
            (None, None) => "intervalMs",
        }
    }
}

fn raw(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// A schedule as `GET /api/v1/schedules/:id` shows it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleView {
    pub id: ScheduleId,
    pub name: String,
    pub description: Option<String>,
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    /// Description of its timing for people.
    pub explanation: String,
    pub dst_gap: DstGap,
    pub dst_overlap: DstOverlap,
    pub start_at: Option<Timestamp>,
    pub end_at: Option<Timestamp>,
    pub except: Vec<String>,
    pub job_name: String,
    pub job_type: String,
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    pub job_payload: Box<RawValue>,
    pub job_priority: Priority,
    pub queue: String,
    pub max_retries: u32,
    pub retry_delay: u64,
    pub backoff_multiplier: f64,
    pub max_delay: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retry_delays: Vec<u64>,
    #[schemars(schema_with = "retry_on_schema")]
    pub retry_on: serde_json::Value,
    pub timeout_ms: Option<u64>,
    pub webhook_url: Option<String>,
    pub concurrency_key: Option<String>,
    pub tags: Vec<String>,
    pub misfire: Misfire,
    pub misfire_grace_ms: u64,
    pub catch_up_limit: u32,
    pub overlap: Overlap,
    pub jitter_ms: u64,
    pub max_runs: Option<u64>,
    pub is_active: bool,
    pub next_run_at: Option<Timestamp>,
    pub last_run_at: Option<Timestamp>,
    pub last_due_at: Option<Timestamp>,
    pub last_job_id: Option<JobId>,
    pub run_count: u64,
    /// Reason why it no longer fires by itself.
    pub finished: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// Latest jobs; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jobs: Option<Vec<JobView>>,
}
