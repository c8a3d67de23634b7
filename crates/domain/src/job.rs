//! A job as it is handed in, and as it is shown.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{ErrorReason, JobId, JobState, LogEntry, Priority, RetryOn, RetryPolicy, Run, Timestamp};

pub const DEFAULT_QUEUE: &str = "default";

/// A job that somebody wants done. `check` says what is wrong with it.
#[derive(Clone, Debug)]
pub struct NewJob {
    pub id: JobId,
    /// The name of what it does; workers are chosen by it.
    pub kind: String,
    pub queue: String,
    pub priority: Priority,
    /// A JSON object, kept to the letter.
    pub payload: String,
    /// `None`: the job's own id is its correlation id.
    pub correlation_id: Option<String>,
    pub options: JobOptions,
    /// A name that other jobs of the same batch may use in their `depends_on_refs`.
    pub reference: Option<String>,
    pub depends_on_refs: Vec<String>,
    /// SHA-256 of what was asked for, so that a repeated idempotency key with another body is refused.
    pub fingerprint: Option<[u8; 32]>,
}

/// Everything about a job that most jobs leave as it is. Only what differs from the default is stored.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct JobOptions {
    /// When it is not the type.
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
    /// For which due time of its schedule.
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

/// What happens to a job when one that it depends on does not complete.
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

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FieldError {
    pub path: String,
    pub message: String,
}

impl FieldError {
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> FieldError {
        FieldError { path: path.into(), message: message.into() }
    }

    /// Joins several errors into one line, separated by semicolons.
    pub fn join(errors: &[FieldError]) -> String {
        errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
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

    /// Everything that is wrong with it, each fault with the path of its field.
    pub fn check(&self, limits: &JobLimits) -> Vec<FieldError> {
        let mut faults = Vec::new();
        let mut text = |path: &str, value: &str, max: usize| {
            let length = value.chars().count();
            if length == 0 || length > max {
                faults.push(FieldError::new(path, format!("must have 1 to {max} characters, has {length}")));
            } else if value.chars().any(char::is_control) {
                faults.push(FieldError::new(path, "must not contain control characters"));
            }
        };
        let options = &self.options;
        if let Some(name) = &options.name {
            text("name", name, 255);
        }
        text("type", &self.kind, 100);
        text("queue", &self.queue, 100);
        for (path, value) in [
            ("correlationId", &self.correlation_id),
            ("idempotencyKey", &options.idempotency_key),
            ("uniqueKey", &options.unique_key),
            ("concurrencyKey", &options.concurrency_key),
            ("ref", &self.reference),
            ("scheduleId", &options.schedule_id),
        ] {
            if let Some(value) = value {
                text(path, value, 255);
            }
        }
        for (index, tag) in options.tags.iter().enumerate() {
            text(&format!("tags[{index}]"), tag, 100);
        }
        if let Some(url) = &options.webhook_url {
            text("webhookUrl", url, 2_048);
            if !(url.starts_with("http://") || url.starts_with("https://")) {
                faults.push(FieldError::new("webhookUrl", "must start with http:// or https://"));
            }
        }
        self.options.retry.check(limits, &mut faults);
        let mut range = |path: &str, value: u64, min: u64, max: u64| {
            if !(min..=max).contains(&value) {
                faults.push(FieldError::new(path, format!("must be from {min} to {max}, is {value}")));
            }
        };
        if let Some(timeout_ms) = options.timeout_ms {
            range("timeoutMs", timeout_ms, 1, 30 * 24 * 3_600_000);
        }
        let parents = options.depends_on.len() + self.depends_on_refs.len();
        range("dependsOn", parents as u64, 0, limits.max_depends_on as u64);
        range("tags", options.tags.len() as u64, 0, limits.max_tags as u64);
        if let (Some(start), Some(end)) = (options.scheduled_at, options.expires_at)
            && end <= start
        {
            faults.push(FieldError::new("expiresAt", "must be later than scheduledAt"));
        }
        if options.depends_on.contains(&self.id) {
            faults.push(FieldError::new("dependsOn", "must not contain the job itself"));
        }
        faults
    }
}

impl RetryPolicy {
    pub fn check(&self, limits: &JobLimits, faults: &mut Vec<FieldError>) {
        let mut range = |path: &str, value: u64, min: u64, max: u64| {
            if !(min..=max).contains(&value) {
                faults.push(FieldError::new(path, format!("must be from {min} to {max}, is {value}")));
            }
        };
        range("maxRetries", u64::from(self.max_retries), 0, u64::from(limits.max_retries));
        range("retryDelay", self.retry_delay_ms, 100, 3_600_000);
        range("maxDelay", self.max_delay_ms, 100, 7 * 24 * 3_600_000);
        range("retryDelays", self.retry_delays_ms.len() as u64, 0, 100);
        for (index, &delay) in self.retry_delays_ms.iter().enumerate() {
            range(&format!("retryDelays[{index}]"), delay, 0, 7 * 24 * 3_600_000);
        }
        if !(1.0..=100.0).contains(&self.backoff_multiplier) {
            faults.push(FieldError::new("backoffMultiplier", "must be from 1 to 100"));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            faults.push(FieldError::new("jitter", "must be true, false or a number from 0 to 1"));
        }
        if let RetryOn::Patterns(patterns) = &self.retry_on
            && (patterns.is_empty() || patterns.len() > 50 || patterns.iter().any(|p| p.is_empty() || p.len() > 200))
        {
            faults.push(FieldError::new(
                "retryOn",
                "must be \"all\", \"transient\" or 1 to 50 patterns of 1 to 200 bytes",
            ));
        }
    }
}

/// How far a running job is, as its worker told it. Never invented.
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

/// A finished step of a job that goes on where it was.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    pub name: String,
    pub result: Box<RawValue>,
    pub at: Timestamp,
    pub run: Run,
}

/// How one run of a job ended, in the words of `GET /api/v1/dead-letter/:id`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// `None`: it ended without having run.
    pub run: Option<Run>,
    /// What the job became.
    pub status: JobState,
    pub worker_id: Option<String>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Timestamp,
    pub error: Option<String>,
    pub error_reason: Option<ErrorReason>,
}

/// A job whole, as `GET /api/v1/jobs/:id` shows it.
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
    /// When it will be tried again, while it is `RETRYING`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_retry_at: Option<Timestamp>,
    pub result: Option<Box<RawValue>>,
    pub error: Option<String>,
    pub error_reason: Option<ErrorReason>,
    pub progress: Option<Progress>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// Only of a dead letter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub execution_log: Vec<LogEntry>,
    pub schedule_id: Option<String>,
    /// For which due time of its schedule.
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
        job.check(&JobLimits::default()).into_iter().map(|fault| fault.path).collect()
    }

    #[test]
    fn a_plain_job_is_in_order() {
        assert_eq!(paths(&NewJob::new("noop")), Vec::<String>::new());
    }

    #[test]
    fn every_bad_field_is_named() {
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
    fn only_what_is_not_default_is_stored() {
        let mut options = JobOptions::default();
        assert_eq!(serde_json::to_string(&options).expect("json"), "{}");
        options.retry.max_retries = 5;
        options.tags = vec!["a".into()];
        let text = serde_json::to_string(&options).expect("json");
        assert_eq!(serde_json::from_str::<JobOptions>(&text).expect("json"), options);
    }
}
