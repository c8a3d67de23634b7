//! A job as a caller submits it, and as the API shows it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, value::RawValue};

use crate::{
    ErrorReason, FieldError, JobId, JobState, LogEntry, Priority, RetryOn, RetryPolicy, Run, TaskId, Timestamp,
    field_error::{check_range, check_text},
    log_details::LogDetails,
    retry::retry_on_schema,
};

pub const DEFAULT_QUEUE: &str = "default";
const DAY_MS: u64 = 86_400_000;

/// A job to submit. [`NewJob::check`] validates it.
#[derive(Clone, Debug)]
pub struct NewJob {
    pub id: JobId,
    /// Job type; only workers with this type among their capabilities receive it.
    pub kind: String,
    pub queue: String,
    pub priority: Priority,
    /// A JSON object; its text is stored unchanged.
    pub payload: String,
    /// `None`: the correlation id is the id of the job.
    pub correlation_id: Option<String>,
    pub options: JobOptions,
    /// Name that other jobs of the same batch can use in their `depends_on_refs`.
    pub reference: Option<String>,
    pub depends_on_refs: Vec<String>,
    /// SHA-256 of the request, so that a repeated idempotency key with another body is rejected.
    pub fingerprint: Option<[u8; 32]>,
}

/// Optional settings of a job. Only settings that differ from the default are stored.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct JobOptions {
    /// `None`: the name is the type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "is_default")]
    pub retry: RetryPolicy,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduled_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_id: Option<String>,
    /// Due time of the schedule that created it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_due: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<JobId>,
    #[serde(skip_serializing_if = "is_default")]
    pub on_parent_failure: OnParentFailure,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The task that waits for the end of this job. Not set by callers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    /// Attempts before the last manual retry, after which retries are counted from 0 again. Not set by callers.
    #[serde(skip_serializing_if = "is_default")]
    pub earlier_attempts: u32,
}

impl JobOptions {
    /// Describes the attempt that follows after `retry_count` retries: `attempt 2 of 4 at …`. Attempts before a manual retry
    /// count too, as in every view of the job.
    pub fn next_attempt_text(&self, retry_count: u32, due_at: Timestamp) -> String {
        let attempt = self.earlier_attempts + retry_count + 2;
        let attempts = self.earlier_attempts + self.retry.max_retries + 1;
        LogDetails::NextAttempt { attempt, attempts, at: due_at }.to_string()
    }
}

/// Reaction of a job to a parent that fails or is cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnParentFailure {
    #[default]
    Cancel,
    Run,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Limits on what callers may submit.
#[derive(Clone, Debug)]
pub struct JobLimits {
    /// Largest body of one job or of another request.
    pub max_body_bytes: usize,
    /// Largest body of a batch.
    pub max_batch_bytes: usize,
    pub max_retries: u32,
    pub max_batch: usize,
    pub max_depends_on: usize,
    /// Dependencies of all jobs of a batch together. A batch is one transaction, for which other writers wait.
    pub max_batch_depends_on: usize,
    pub max_tags: usize,
}

impl Default for JobLimits {
    fn default() -> Self {
        JobLimits {
            max_body_bytes: 1 << 20,
            max_batch_bytes: 16 << 20,
            max_retries: 10,
            max_batch: 10_000,
            max_depends_on: 1_000,
            max_batch_depends_on: 20_000,
            max_tags: 32,
        }
    }
}

impl NewJob {
    pub fn new(kind: impl Into<String>) -> NewJob {
        NewJob {
            id: JobId::new(),
            kind: kind.into(),
            queue: DEFAULT_QUEUE.into(),
            priority: Priority::Normal,
            payload: "{}".into(),
            correlation_id: None,
            options: JobOptions::default(),
            reference: None,
            depends_on_refs: Vec::new(),
            fingerprint: None,
        }
    }

    /// Returns every invalid field.
    pub fn check(&self, limits: &JobLimits) -> Vec<FieldError> {
        let mut errors = Vec::new();
        self.check_texts(&mut errors);
        let options = &self.options;
        options.retry.check(limits, &mut errors);
        if let Some(timeout_ms) = options.timeout_ms {
            check_range(&mut errors, "timeoutMs", timeout_ms, 1..=30 * DAY_MS);
        }
        let parents = options.depends_on.len() + self.depends_on_refs.len();
        let lists = [("dependsOn", parents, limits.max_depends_on), ("tags", options.tags.len(), limits.max_tags)];
        for (path, count, max) in lists.into_iter().filter(|(_, count, max)| count > max) {
            errors.push(FieldError::new(path, format!("must have at most {max} entries, has {count}")));
        }
        if let (Some(start), Some(end)) = (options.scheduled_at, options.expires_at)
            && end <= start
        {
            errors.push(FieldError::new("expiresAt", "must be later than scheduledAt"));
        }
        if options.depends_on.contains(&self.id) {
            errors.push(FieldError::new("dependsOn", "must not contain the job itself"));
        }
        errors
    }

    fn check_texts(&self, errors: &mut Vec<FieldError>) {
        let options = &self.options;
        if let Some(name) = &options.name {
            check_text(errors, "name", name, 255);
        }
        check_text(errors, "type", &self.kind, 100);
        check_text(errors, "queue", &self.queue, 100);
        for (path, value) in [
            ("correlationId", &self.correlation_id),
            ("idempotencyKey", &options.idempotency_key),
            ("uniqueKey", &options.unique_key),
            ("concurrencyKey", &options.concurrency_key),
            ("ref", &self.reference),
            ("scheduleId", &options.schedule_id),
        ] {
            if let Some(value) = value {
                check_text(errors, path, value, 255);
            }
        }
        for (index, tag) in options.tags.iter().enumerate() {
            check_text(errors, &format!("tags[{index}]"), tag, 100);
        }
        if let Some(url) = &options.webhook_url {
            check_text(errors, "webhookUrl", url, 2_048);
            if !(url.starts_with("http://") || url.starts_with("https://")) {
                errors.push(FieldError::new("webhookUrl", "must start with http:// or https://"));
            }
        }
    }
}

impl RetryPolicy {
    /// Adds an error for every invalid field.
    pub fn check(&self, limits: &JobLimits, errors: &mut Vec<FieldError>) {
        check_range(errors, "maxRetries", u64::from(self.max_retries), 0..=u64::from(limits.max_retries));
        check_range(errors, "retryDelay", self.retry_delay_ms, 100..=3_600_000);
        check_range(errors, "maxDelay", self.max_delay_ms, 100..=7 * DAY_MS);
        check_range(errors, "retryDelays", self.retry_delays_ms.len() as u64, 0..=100);
        for (index, &delay) in self.retry_delays_ms.iter().enumerate() {
            check_range(errors, &format!("retryDelays[{index}]"), delay, 0..=7 * DAY_MS);
        }
        if !(1.0..=100.0).contains(&self.backoff_multiplier) {
            errors.push(FieldError::new("backoffMultiplier", "must be between 1 and 100"));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            errors.push(FieldError::new("jitter", "must be true, false or a number from 0 to 1"));
        }
        if let RetryOn::Patterns(patterns) = &self.retry_on
            && (patterns.is_empty() || patterns.len() > 50 || patterns.iter().any(|p| p.is_empty() || p.len() > 200))
        {
            errors.push(FieldError::new(
                "retryOn",
                "must be \"all\", \"transient\" or 1 to 50 patterns of 1 to 200 bytes",
            ));
        }
    }
}

/// Progress of a job, as its worker reported it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Progress {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current_step: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_steps: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "serialize_percentage")]
    pub percentage: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Progress {
    /// Returns the whole percentage of completed steps: 100 only when all are completed. `None` without steps.
    pub fn percentage_of(completed: u32, total: u32) -> Option<f64> {
        if completed >= total {
            return (total > 0).then_some(100.0);
        }
        Some((f64::from(completed) * 100.0 / f64::from(total)).round().min(99.0))
    }
}

/// Writes a whole percentage as a whole number: `33` and not `33.0`.
fn serialize_percentage<S: Serializer>(percentage: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match *percentage {
        Some(whole) if whole.fract() == 0.0 && (0.0..=100.0).contains(&whole) => serializer.serialize_u8(whole as u8),
        other => other.serialize(serializer),
    }
}

/// A completed step of a job. A later run skips it and uses its result.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    pub name: String,
    pub result: Box<RawValue>,
    pub at: Timestamp,
    pub run: Run,
}

/// End of one run of a job, as `GET /api/v1/dead-letter/:id` shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// `null`: the job ended without a run.
    pub run: Option<Run>,
    /// State that the job entered.
    pub status: JobState,
    pub worker_id: Option<String>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Timestamp,
    pub error: Option<String>,
    pub error_reason: Option<ErrorReason>,
}

/// A job with all its details, as `GET /api/v1/jobs/:id` shows it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobView {
    pub id: JobId,
    /// Display name; the type if none was given.
    pub name: String,
    /// Selects the handler.
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: JobState,
    pub priority: Priority,
    /// Input of the handler, stored unchanged.
    #[schemars(with = "Map<String, Value>")]
    pub payload: Box<RawValue>,
    /// Retries after the first attempt.
    pub max_retries: u32,
    /// Retries so far.
    pub retry_count: u32,
    /// Delay before the first retry, in ms.
    pub retry_delay: u64,
    /// Factor by which the delay grows with each retry.
    pub backoff_multiplier: f64,
    /// Upper bound of the delay, in ms.
    pub max_delay: u64,
    /// Explicit delays in ms, instead of the computed ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retry_delays: Vec<u64>,
    /// Random part of the delay.
    pub jitter: f64,
    /// Which errors are retried.
    #[schemars(schema_with = "retry_on_schema")]
    pub retry_on: Value,
    /// Time limit of one run.
    pub timeout_ms: Option<u64>,
    /// Time of the submission.
    pub created_at: Timestamp,
    /// Time of the last change.
    pub updated_at: Timestamp,
    /// Earliest start.
    pub scheduled_at: Option<Timestamp>,
    /// The job fails if it has not started by then.
    pub expires_at: Option<Timestamp>,
    /// Time at which it last became ready.
    pub queued_at: Option<Timestamp>,
    /// Start of the latest run.
    pub started_at: Option<Timestamp>,
    /// Time at which it finished, in any final state.
    pub completed_at: Option<Timestamp>,
    /// Time of the next attempt, while the job is `RETRYING`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Timestamp>,
    /// Result of the handler.
    pub result: Option<Box<RawValue>>,
    /// Error of the latest failed run.
    pub error: Option<String>,
    /// Why it failed.
    pub error_reason: Option<ErrorReason>,
    /// Last progress that a run reported.
    pub progress: Option<Progress>,
    /// Completed steps with their results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// Ended runs; only for dead letters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    /// What happened to the job; not in lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub execution_log: Vec<LogEntry>,
    /// The number of older entries that `execution_log` does not contain; `GET /jobs/{id}/log` has those that are kept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub execution_log_omitted: u64,
    /// Schedule that created it.
    pub schedule_id: Option<String>,
    /// Due time of the schedule that created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_due: Option<Timestamp>,
    /// Worker of the latest run.
    pub worker_id: Option<String>,
    /// Number of the latest run. It only grows.
    pub run: Option<Run>,
    /// Attempts so far, including the current run once it has started. A released run does not count.
    pub attempt: u32,
    /// URL to notify when the job finishes.
    pub webhook_url: Option<String>,
    /// Id shared by everything that belongs together.
    pub correlation_id: String,
    /// A repeated submission with this key returns this job.
    pub idempotency_key: Option<String>,
    /// At most one unfinished job has this key.
    pub unique_key: Option<String>,
    /// Jobs with the same key share a concurrency limit.
    pub concurrency_key: Option<String>,
    /// Jobs that must complete first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<JobId>,
    /// What happens if one of them does not complete.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_parent_failure: OnParentFailure,
    /// Labels to search for.
    #[serde(default)]
    pub tags: Vec<String>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(job: &NewJob) -> Vec<String> {
        job.check(&JobLimits::default()).into_iter().map(|error| error.path).collect()
    }

    #[test]
    fn a_job_with_only_a_type_is_valid() {
        assert_eq!(paths(&NewJob::new("noop")), Vec::<String>::new());
    }

    #[test]
    fn every_invalid_field_is_reported() {
        let mut job = NewJob::new("");
        job.queue = "q".repeat(101);
        job.options.name = Some("two\nlines".into());
        job.options.retry.max_retries = 11;
        job.options.retry.retry_delay_ms = 99;
        job.options.retry.jitter = 2.0;
        job.options.timeout_ms = Some(0);
        job.options.webhook_url = Some("ftp://example.org".into());
        job.options.tags = vec![String::new()];
        assert_eq!(
            paths(&job),
            ["name", "type", "queue", "tags[0]", "webhookUrl", "maxRetries", "retryDelay", "jitter", "timeoutMs"]
        );
    }

    #[test]
    fn a_percentage_of_steps_is_whole_and_100_only_at_the_end() {
        for (completed, total, percentage) in [
            (0, 3, Some(0.0)),
            (1, 3, Some(33.0)),
            (2, 3, Some(67.0)),
            (999, 1_000, Some(99.0)),
            (3, 3, Some(100.0)),
            (4, 3, Some(100.0)),
            (0, 0, None),
        ] {
            assert_eq!(Progress::percentage_of(completed, total), percentage, "{completed} of {total}");
        }
        let json = |percentage| serde_json::to_string(&Progress { percentage, ..Progress::default() }).expect("JSON");
        assert_eq!(json(Some(33.0)), "{\"percentage\":33}");
        assert_eq!(json(Some(33.5)), "{\"percentage\":33.5}");
        assert_eq!(json(None), "{}");
    }

    #[test]
    fn only_settings_that_differ_from_the_default_are_stored() {
        let mut options = JobOptions::default();
        assert_eq!(serde_json::to_string(&options).expect("json"), "{}");
        options.retry.max_retries = 5;
        options.tags = vec!["a".into()];
        let text = serde_json::to_string(&options).expect("json");
        assert_eq!(serde_json::from_str::<JobOptions>(&text).expect("json"), options);
    }
}
