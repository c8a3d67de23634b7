//! A schedule as people wrote it, as it stands, and as it is shown.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{CompiledTiming, DstGap, DstOverlap, Timing, template};
use crate::{FieldError, JobId, JobLimits, JobOptions, JobView, NewJob, Priority, ScheduleId, Timestamp};

/// What becomes of due times that nobody was there for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misfire {
    /// One job, for the latest of them.
    #[default]
    RunOnce,
    /// No job, unless the latest is not earlier than the grace.
    Skip,
    /// A job for each of the latest, up to `catchUpLimit`.
    CatchUp,
}

/// What becomes of a due time while the job of an earlier one is still going.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    #[default]
    Allow,
    Skip,
    /// One job waits for the one that is going; further due times are skipped.
    QueueOne,
    /// The one that is going is cancelled, and the next one begins when it has stopped.
    CancelPrevious,
}

/// The job that every due time becomes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobTemplate {
    pub kind: String,
    pub queue: String,
    pub priority: Priority,
    /// A JSON object. `{{due}}` and the like in its texts are filled in for each job.
    pub payload: String,
    pub options: JobOptions,
}

impl Default for JobTemplate {
    fn default() -> Self {
        let NewJob { queue, priority, payload, options, .. } = NewJob::new("");
        JobTemplate { kind: String::new(), queue, priority, payload, options }
    }
}

/// What people said. Stored as JSON, whole.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleSpec {
    pub name: String,
    pub description: Option<String>,
    pub timing: Timing,
    pub job: JobTemplate,
    pub misfire: Misfire,
    /// How late a due time may be met without counting as missed.
    pub misfire_grace_ms: u64,
    pub catch_up_limit: u32,
    pub overlap: Overlap,
    /// Each job waits a while of its own, up to this, before it is ready.
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
    /// Everything that is wrong with it, each fault with the name of its field; otherwise when it is due.
    pub fn check(&self, limits: &JobLimits, anchor_at: Timestamp) -> Result<CompiledTiming, Vec<FieldError>> {
        let mut faults = Vec::new();
        let mut text = |path: &str, value: &str, max: usize| {
            let length = value.chars().count();
            if length == 0 || length > max {
                faults.push(FieldError::new(path, format!("must have 1 to {max} characters, has {length}")));
            } else if value.chars().any(|c| c.is_control() && !(path == "description" && c == '\n')) {
                faults.push(FieldError::new(path, "must not contain control characters"));
            }
        };
        text("name", &self.name, 255);
        if let Some(description) = &self.description {
            text("description", description, 2_000);
        }
        let mut range = |path: &str, value: u64, min: u64, max: u64| {
            if !(min..=max).contains(&value) {
                faults.push(FieldError::new(path, format!("must be from {min} to {max}, is {value}")));
            }
        };
        range("misfireGraceMs", self.misfire_grace_ms, 1_000, DAY_MS);
        range("catchUpLimit", u64::from(self.catch_up_limit), 1, u64::from(MAX_CATCH_UP));
        range("jitterMs", self.jitter_ms, 0, DAY_MS);
        if let Some(runs) = self.max_runs {
            range("maxRuns", runs, 1, i64::MAX.unsigned_abs());
        }
        faults.extend(self.job.check(limits));
        match self.timing.compile(anchor_at) {
            Ok(timing) if faults.is_empty() => Ok(timing),
            Ok(_) => Err(faults),
            Err(wrong) => {
                faults.splice(0..0, wrong);
                Err(faults)
            }
        }
    }
}

impl JobTemplate {
    fn check(&self, limits: &JobLimits) -> Vec<FieldError> {
        let mut job = NewJob::new(self.kind.clone());
        job.queue.clone_from(&self.queue);
        job.options = self.options.clone();
        let named = |fault: FieldError| {
            let path = match fault.path.as_str() {
                "name" => "jobName".into(),
                "type" => if self.options.name.is_some() { "jobType" } else { "jobName" }.into(),
                _ => fault.path,
            };
            FieldError::new(path, fault.message)
        };
        let faults = job.check(limits).into_iter().map(named);
        let faults = faults.chain(template::check(&self.payload).map(|message| FieldError::new("jobPayload", message)));
        faults
            .chain(
                self.of_one_job()
                    .map(|path| FieldError::new(path, "belongs to one job, not to every job of a schedule")),
            )
            .collect()
    }

    /// What cannot be the same for many jobs: the second would be refused, or be over before it begins.
    fn of_one_job(&self) -> impl Iterator<Item = &'static str> {
        let JobOptions { idempotency_key, unique_key, scheduled_at, expires_at, depends_on, .. } = &self.options;
        let said = [
            ("idempotencyKey", idempotency_key.is_some()),
            ("uniqueKey", unique_key.is_some()),
            ("scheduledAt", scheduled_at.is_some()),
            ("expiresAt", expires_at.is_some()),
            ("dependsOn", !depends_on.is_empty()),
        ];
        said.into_iter().filter(|(_, is_said)| *is_said).map(|(path, _)| path)
    }
}

/// A schedule as it stands.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    pub id: ScheduleId,
    pub spec: ScheduleSpec,
    pub is_active: bool,
    /// What intervals are counted from, unless they have a start.
    pub anchor_at: Timestamp,
    /// Every due time up to here has been dealt with.
    pub cursor_at: Timestamp,
    /// The next due time at which something fires. `None`: it is not active.
    pub next_at: Option<Timestamp>,
    /// How many due times became jobs.
    pub runs: u64,
    /// The latest due time that became a job, and when it did.
    pub last_due_at: Option<Timestamp>,
    pub last_run_at: Option<Timestamp>,
    pub last_job: Option<JobId>,
    /// Jobs that it made and that are not known to be over, the latest last.
    pub recent: Vec<JobId>,
    /// The job that waits for those that are going.
    pub queued: Option<JobId>,
    /// Why it will not fire any more by itself.
    pub finished: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// A schedule together with its compiled timing.
pub struct CompiledSchedule {
    pub schedule: Schedule,
    pub timing: CompiledTiming,
}

/// What shall be different. A field that is not set stays.
#[derive(Clone, Debug, Default)]
pub struct SchedulePatch {
    pub spec: Option<ScheduleSpec>,
    pub is_active: Option<bool>,
}

impl Schedule {
    /// A new one, which counts and fires from `now` on.
    #[expect(clippy::new_ret_no_self, reason = "who makes one wants to know when it is due")]
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
        let mut timed = CompiledSchedule { schedule, timing };
        timed.enable(now)?;
        Ok(timed)
    }

    pub fn compile(self) -> Result<CompiledSchedule, Vec<FieldError>> {
        let timing = self.spec.timing.compile(self.anchor_at)?;
        Ok(CompiledSchedule { schedule: self, timing })
    }

    /// What `patch` makes of it. Due times are derived anew only if the timing has changed.
    pub fn patched(
        self,
        patch: SchedulePatch,
        limits: &JobLimits,
        now: Timestamp,
    ) -> Result<CompiledSchedule, Vec<FieldError>> {
        let mut schedule = self;
        let mut re_timed = false;
        if let Some(spec) = patch.spec {
            if spec.timing.interval_ms != schedule.spec.timing.interval_ms {
                schedule.anchor_at = now;
            }
            re_timed = spec.timing != schedule.spec.timing || spec.max_runs != schedule.spec.max_runs;
            schedule.spec = spec;
        }
        let timing = schedule.spec.check(limits, schedule.anchor_at)?;
        let was_active = schedule.is_active;
        let mut timed = CompiledSchedule { schedule, timing };
        match patch.is_active {
            Some(false) => timed.disable(),
            Some(true) if !was_active || re_timed => timed.enable(now)?,
            None if was_active && re_timed => timed.enable(now)?,
            // Why it was over may not hold any more; who wants it to go on enables it.
            None if re_timed => timed.schedule.finished = None,
            _ => {}
        }
        timed.schedule.updated_at = now;
        Ok(timed)
    }

    /// As it is shown. A stored timing that is not understood any more (a zone that is gone) is shown with the reason.
    pub fn view(&self) -> ScheduleView {
        let Schedule { spec, .. } = self;
        let (options, timing) = (&spec.job.options, &spec.timing);
        let (explanation, dst_gap, dst_overlap) = match timing.compile(self.anchor_at) {
            Ok(timing) => (timing.explain(), timing.dst_gap(), timing.dst_overlap()),
            Err(faults) => (
                invalid_timing_reason(&faults),
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
            jobs: Vec::new(),
        }
    }
}

/// What is said of a schedule whose stored timing does not hold any more.
pub fn invalid_timing_reason(faults: &[FieldError]) -> String {
    let texts: Vec<String> = faults.iter().map(|fault| format!("{} {}", fault.path, fault.message)).collect();
    format!("it cannot be understood any more: {}", texts.join("; "))
}

impl CompiledSchedule {
    /// Fires from now on. What was due while it was off is not made up for, and no due time is dealt with twice.
    fn enable(&mut self, now: Timestamp) -> Result<(), Vec<FieldError>> {
        let schedule = &mut self.schedule;
        if schedule.spec.max_runs.is_some_and(|max| schedule.runs >= max) {
            let message = format!("it has run {} times; to go on it has to be allowed more than that", schedule.runs);
            return Err(vec![FieldError::new("maxRuns", message)]);
        }
        schedule.cursor_at = schedule.cursor_at.max(now);
        let Some(next) = self.timing.next(schedule.cursor_at) else {
            return Err(vec![FieldError::new(
                self.ending_field(),
                "nothing is due any more after now; give a later end",
            )]);
        };
        schedule.next_at = Some(next.due);
        schedule.is_active = true;
        schedule.finished = None;
        Ok(())
    }

    /// Fires no more by itself.
    pub fn disable(&mut self) {
        self.schedule.is_active = false;
        self.schedule.next_at = None;
    }

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

/// As `GET /api/v1/schedules/:id` shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleView {
    pub id: ScheduleId,
    pub name: String,
    pub description: Option<String>,
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    /// When it is due, in words.
    pub explanation: String,
    pub dst_gap: DstGap,
    pub dst_overlap: DstOverlap,
    pub start_at: Option<Timestamp>,
    pub end_at: Option<Timestamp>,
    pub except: Vec<String>,
    pub job_name: String,
    pub job_type: String,
    pub job_payload: Box<RawValue>,
    pub job_priority: Priority,
    pub queue: String,
    pub max_retries: u32,
    pub retry_delay: u64,
    pub backoff_multiplier: f64,
    pub max_delay: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retry_delays: Vec<u64>,
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
    /// Why it will not fire any more by itself.
    pub finished: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// Its latest jobs; not in lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobView>,
}
