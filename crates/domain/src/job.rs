//! A job as a caller submits it, and as the API shows it.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    ErrorReason, FieldError, JobId, JobState, LogEntry, Priority, RetryOn, RetryPolicy, Run, Timestamp,
    field_error::{check_range, check_text},
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
}

/// Reaction of a job to a parent that fails or is cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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
        check_range(&mut errors, "dependsOn", parents as u64, 0..=limits.max_depends_on as u64);
        check_range(&mut errors, "tags", options.tags.len() as u64, 0..=limits.max_tags as u64);
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
            errors.push(FieldError::new("backoffMultiplier", "must be from 1 to 100"));
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

/// Progress of a running job, as its worker reported it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percentage: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A completed step of a job. A later run skips it and uses its result.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    pub name: String,
    pub result: Box<RawValue>,
    pub at: Timestamp,
    pub run: Run,
}

/// End of one run of a job, as `GET /api/v1/dead-letter/:id` shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// `None`: the job ended without a run.
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
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobView {
    pub id: JobId,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: JobState,
    pub priority: Priority,
    pub payload: Box<RawValue>,
    pub max_retries: u32,
    pub retry_count: u32,
    pub retry_delay: u64,
    pub backoff_multiplier: f64,
    pub max_delay: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retry_delays: Vec<u64>,
    pub jitter: f64,
    pub retry_on: serde_json::Value,
    pub timeout_ms: Option<u64>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub scheduled_at: Option<Timestamp>,
    pub expires_at: Option<Timestamp>,
    pub queued_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub completed_at: Option<Timestamp>,
    /// Time of the next attempt, while the job is `RETRYING`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_retry_at: Option<Timestamp>,
    pub result: Option<Box<RawValue>>,
    pub error: Option<String>,
    pub error_reason: Option<ErrorReason>,
    pub progress: Option<Progress>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// Ended runs; only for dead letters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub execution_log: Vec<LogEntry>,
    pub schedule_id: Option<String>,
    /// Due time of the schedule that created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_due: Option<Timestamp>,
    pub worker_id: Option<String>,
    pub run: Option<Run>,
    pub webhook_url: Option<String>,
    pub correlation_id: String,
    pub idempotency_key: Option<String>,
    pub unique_key: Option<String>,
    pub concurrency_key: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<JobId>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_parent_failure: OnParentFailure,
    #[serde(default)]
    pub tags: Vec<String>,
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
    fn only_settings_that_differ_from_the_default_are_stored() {
        let mut options = JobOptions::default();
        assert_eq!(serde_json::to_string(&options).expect("json"), "{}");
        options.retry.max_retries = 5;
        options.tags = vec!["a".into()];
        let text = serde_json::to_string(&options).expect("json");
        assert_eq!(serde_json::from_str::<JobOptions>(&text).expect("json"), options);
    }
}
