//! A job as the server shows it.
//!
//! Every type here accepts what a newer server may add: unknown fields are ignored, unknown values become `Unknown`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, value::RawValue};

use crate::{JobId, RunNumber, Timestamp, open_enum::open_enum};

open_enum! {
    /// The state of a job.
    JobState {
        /// Stored; waits for its time or for the jobs it depends on.
        Pending = "PENDING",
        /// Ready to run.
        Queued = "QUEUED",
        /// A worker process is being started for it.
        Scheduled = "SCHEDULED",
        /// Assigned to a worker that has not started it yet.
        Assigned = "ASSIGNED",
        /// Running.
        Processing = "PROCESSING",
        /// Failed; waits for its next attempt.
        Retrying = "RETRYING",
        /// Finished with a result.
        Completed = "COMPLETED",
        /// Failed, with no attempt left: dead-lettered.
        Failed = "FAILED",
        /// Cancelled before it completed.
        Cancelled = "CANCELLED",
    }
}

impl JobState {
    /// Returns `true` if a job in this state no longer changes, unless it is retried manually.
    ///
    /// Returns `false` for an unknown state; [`Job::is_finished`] also recognises unknown states that are final.
    pub fn is_final(&self) -> bool {
        matches!(self, JobState::Completed | JobState::Failed | JobState::Cancelled)
    }
}

open_enum! {
    /// How urgent a job is.
    Priority {
        /// The lowest priority.
        Low = "LOW",
        /// The default.
        Normal = "NORMAL",
        /// Higher than normal.
        High = "HIGH",
        /// The highest priority.
        Critical = "CRITICAL",
    }
}

open_enum! {
    /// What happens to a job when a job it depends on fails or is cancelled.
    OnParentFailure {
        /// The dependent job is cancelled. The default.
        Cancel = "cancel",
        /// The dependent job runs anyway.
        Run = "run",
    }
}

open_enum! {
    /// Why a run did not complete.
    ErrorReason {
        /// The handler reported an error.
        Error = "error",
        /// The run exceeded its timeout.
        Timeout = "timeout",
        /// Its worker was lost.
        Orphaned = "orphaned",
        /// It was cancelled.
        Cancelled = "cancelled",
        /// It did not start before its expiry time.
        Expired = "expired",
        /// No worker handles its type.
        NoHandler = "no_handler",
    }
}

open_enum! {
    /// What an entry of a job's log reports. `Unknown` also stands for events that a handler named.
    LogEvent {
        /// The job was stored.
        Created = "created",
        /// The job became ready to run.
        Queued = "queued",
        /// A limit delayed the job.
        Limited = "limited",
        /// A worker process is being started for the job.
        Scheduled = "scheduled",
        /// The job was assigned to a worker.
        Assigned = "assigned",
        /// The run started.
        Started = "started",
        /// A step was completed.
        StepCompleted = "step_completed",
        /// The worker reported progress.
        Progress = "progress",
        /// The worker logged a message.
        Message = "message",
        /// The run failed and a retry was scheduled.
        RetryScheduled = "retry_scheduled",
        /// A retry completed the job.
        RetrySuccess = "retry_success",
        /// The job completed.
        Completed = "completed",
        /// The job failed permanently.
        Failed = "failed",
        /// The run exceeded its timeout.
        Timeout = "timeout",
        /// The worker of the run was lost.
        Orphaned = "orphaned",
        /// The job did not start before its expiry time.
        Expired = "expired",
        /// A cancellation was requested.
        CancelRequested = "cancel_requested",
        /// The job was cancelled.
        Cancelled = "cancelled",
        /// A worker released the job, so that another run can start without using an attempt.
        Released = "released",
        /// The job was recovered after its server process died.
        Recovered = "recovered",
        /// A report of an old run was rejected.
        StaleReport = "stale_report",
        /// All jobs it depends on are finished.
        ParentsDone = "parents_done",
        /// A failed or cancelled job was retried manually.
        Retried = "retried",
        /// The job was changed.
        Patched = "patched",
        /// A webhook about the job was delivered.
        WebhookSent = "webhook_sent",
        /// A webhook about the job could not be delivered.
        WebhookFailed = "webhook_failed",
    }
}

/// Which failures of a job are retried.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum RetryOn {
    /// Every failure that the handler marks as retryable.
    All,
    /// Only failures that look temporary: rate limits, timeouts, lost connections, lost workers.
    Transient,
    /// Only errors that contain one of these texts; `*` matches anything.
    Patterns(Vec<String>),
    /// A rule that this version of the crate does not know, as the server sent it.
    Unknown(Value),
}

impl Serialize for RetryOn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            RetryOn::All => serializer.serialize_str("all"),
            RetryOn::Transient => serializer.serialize_str("transient"),
            RetryOn::Patterns(patterns) => patterns.serialize(serializer),
            RetryOn::Unknown(value) => value.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for RetryOn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RetryOn, D::Error> {
        let value = Value::deserialize(deserializer)?;
        Ok(match &value {
            Value::String(text) if text == "all" => RetryOn::All,
            Value::String(text) if text == "transient" => RetryOn::Transient,
            Value::Array(_) => serde_json::from_value(value.clone()).map_or(RetryOn::Unknown(value), RetryOn::Patterns),
            _ => RetryOn::Unknown(value),
        })
    }
}

/// How far a running job is, as its handler reports it. Every field is optional.
///
/// ```
/// let progress = faena::Progress::new().phase("upload").percentage(40.0);
/// assert_eq!(progress.percentage, Some(40.0));
/// ```
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct Progress {
    /// The phase that the job is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The step that is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current_step: Option<String>,
    /// How many steps are completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_steps: Option<u32>,
    /// How many steps the job has in total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u32>,
    /// From 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percentage: Option<f64>,
    /// A readable text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Progress {
    /// Creates a progress without any field.
    pub fn new() -> Progress {
        Progress::default()
    }

    /// Sets the phase that the job is in.
    #[must_use]
    pub fn phase(mut self, phase: impl Into<String>) -> Progress {
        self.phase = Some(phase.into());
        self
    }

    /// Sets the step that is running.
    #[must_use]
    pub fn current_step(mut self, step: impl Into<String>) -> Progress {
        self.current_step = Some(step.into());
        self
    }

    /// Sets how many steps are completed, and how many there are in total.
    #[must_use]
    pub fn steps(mut self, completed: u32, total: u32) -> Progress {
        (self.completed_steps, self.total_steps) = (Some(completed), Some(total));
        self
    }

    /// Sets the percentage, from 0 to 100.
    #[must_use]
    pub fn percentage(mut self, percentage: f64) -> Progress {
        self.percentage = Some(percentage);
        self
    }

    /// Sets a readable text.
    #[must_use]
    pub fn message(mut self, message: impl Into<String>) -> Progress {
        self.message = Some(message.into());
        self
    }
}

/// A completed step of a job.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Step {
    /// The name of the step.
    pub name: String,
    /// The stored result.
    pub result: Box<RawValue>,
    /// When the step was stored.
    pub at: Timestamp,
    /// The run that completed the step.
    pub run: RunNumber,
}

/// How one run of a dead-lettered job ended.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Attempt {
    /// `None` if the job failed without having run.
    pub run: Option<RunNumber>,
    /// The state of the job after this run.
    pub status: JobState,
    /// The worker of the run.
    pub worker_id: Option<String>,
    /// When the run started.
    pub started_at: Option<Timestamp>,
    /// When the run ended.
    pub finished_at: Timestamp,
    /// The error that the handler or the server reported.
    pub error: Option<String>,
    /// What kind of failure it was.
    pub error_reason: Option<ErrorReason>,
}

/// One entry of a job's log.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[non_exhaustive]
pub struct LogEntry {
    /// When it happened.
    pub timestamp: Timestamp,
    /// What happened.
    pub event: LogEvent,
    /// Details of what happened; may be empty.
    #[serde(default)]
    pub details: String,
    /// The run it belongs to.
    #[serde(default)]
    pub run: Option<RunNumber>,
}

/// A job with everything the server knows about it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Job {
    /// The id.
    pub id: JobId,
    /// The display name; the type if none was given.
    pub name: String,
    /// The type. It selects the workers.
    #[serde(rename = "type")]
    pub kind: String,
    /// The queue.
    pub queue: String,
    /// The state.
    pub status: JobState,
    /// How urgent it is.
    pub priority: Priority,
    /// The payload, as it was submitted.
    pub payload: Box<RawValue>,
    /// How many retries may follow the first run.
    pub max_retries: u32,
    /// How many retries were needed so far.
    pub retry_count: u32,
    /// The delay before the first retry, in milliseconds.
    #[serde(rename = "retryDelay")]
    pub retry_delay_ms: u64,
    /// The factor between one retry delay and the next.
    pub backoff_multiplier: f64,
    /// The longest retry delay, in milliseconds.
    #[serde(rename = "maxDelay")]
    pub max_delay_ms: u64,
    /// The retry delays themselves, in milliseconds, if they replace the computed backoff.
    #[serde(default, rename = "retryDelays")]
    pub retry_delays_ms: Vec<u64>,
    /// The part of a retry delay, from 0 to 1, that is added at random.
    pub jitter: f64,
    /// Which failures are retried.
    pub retry_on: RetryOn,
    /// How long one run may take, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// When it was submitted.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// The earliest time at which it may run.
    pub scheduled_at: Option<Timestamp>,
    /// When it fails unless it has started.
    pub expires_at: Option<Timestamp>,
    /// When it last became ready to run.
    pub queued_at: Option<Timestamp>,
    /// When its latest run started.
    pub started_at: Option<Timestamp>,
    /// When it completed, failed permanently or was cancelled.
    pub completed_at: Option<Timestamp>,
    /// When the next attempt is due, while it is [`Retrying`](JobState::Retrying).
    pub next_attempt_at: Option<Timestamp>,
    /// The result of the handler.
    pub result: Option<Box<RawValue>>,
    /// The latest error.
    pub error: Option<String>,
    /// What kind of failure it was.
    pub error_reason: Option<ErrorReason>,
    /// The latest progress that its handler reported.
    pub progress: Option<Progress>,
    /// The completed steps.
    #[serde(default)]
    pub steps: Vec<Step>,
    /// How its runs ended; only for dead-lettered jobs.
    #[serde(default)]
    pub attempts: Vec<Attempt>,
    /// What happened to it, oldest first.
    #[serde(default)]
    pub execution_log: Vec<LogEntry>,
    /// The number of older entries that `execution_log` does not contain.
    #[serde(default)]
    pub execution_log_omitted: u64,
    /// The schedule that created it.
    pub schedule_id: Option<String>,
    /// The due time of the schedule for which it was created.
    pub schedule_due: Option<Timestamp>,
    /// The worker it is assigned to.
    pub worker_id: Option<String>,
    /// The number of its latest run.
    pub run: Option<RunNumber>,
    /// How many attempts it has had, including the current run once it has started. Released runs do not count.
    #[serde(default)]
    pub attempt: u32,
    /// The URL that is notified when it finishes.
    pub webhook_url: Option<String>,
    /// Groups related jobs, tasks and events; the job's own id if none was given.
    pub correlation_id: String,
    /// The key under which a repeated submission is recognised.
    pub idempotency_key: Option<String>,
    /// The key that only one unfinished job may have.
    pub unique_key: Option<String>,
    /// The key whose jobs share a concurrency limit.
    pub concurrency_key: Option<String>,
    /// The jobs that have to complete first.
    #[serde(default)]
    pub depends_on: Vec<JobId>,
    /// What happens when one of those fails.
    pub on_parent_failure: Option<OnParentFailure>,
    /// Labels to find it by.
    #[serde(default)]
    pub tags: Vec<String>,
    /// The fields that the API key may not see; they are empty.
    #[serde(default)]
    pub hidden: Vec<String>,
}

impl Job {
    /// Returns `true` if the job has completed, failed permanently or been cancelled.
    ///
    /// A state that this version does not know counts as final if the server also says when the job ended.
    pub fn is_finished(&self) -> bool {
        match &self.status {
            JobState::Unknown(_) => self.completed_at.is_some(),
            known => known.is_final(),
        }
    }
}

/// A job that was just submitted.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SubmittedJob {
    /// The id.
    pub id: JobId,
    /// The state: usually `QUEUED`, or `PENDING` if it has to wait.
    pub status: JobState,
    /// When the server stored it.
    pub created_at: Timestamp,
    /// Groups related jobs, tasks and events; the job's own id if none was given.
    pub correlation_id: String,
}

/// A job that was just cancelled or retried.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ChangedJob {
    /// The id.
    pub id: JobId,
    /// The state.
    pub status: JobState,
    /// How many retries it has used; only set after a retry.
    pub retry_count: Option<u32>,
    /// Whether its worker was asked to stop and has not stopped yet.
    #[serde(default)]
    pub cancel_requested: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn known_names_are_read_and_written_and_unknown_ones_are_kept() {
        let state: JobState = serde_json::from_value(json!("RETRYING")).expect("a state");
        assert_eq!(state, JobState::Retrying);
        let state: JobState = serde_json::from_value(json!("SUSPENDED")).expect("any text is a state");
        assert_eq!(state, JobState::Unknown("SUSPENDED".into()));
        assert!(!state.is_final());
        assert_eq!(serde_json::to_value(&state).expect("json"), json!("SUSPENDED"));
        assert_eq!(format!("{:<12}|", Priority::from("URGENT")), "URGENT      |");
    }

    #[test]
    fn every_form_of_a_retry_rule_is_read_and_an_unknown_one_is_kept() {
        let read = |value: Value| serde_json::from_value::<RetryOn>(value).expect("a rule");
        assert_eq!(read(json!("all")), RetryOn::All);
        assert_eq!(read(json!("transient")), RetryOn::Transient);
        assert_eq!(read(json!(["429"])), RetryOn::Patterns(vec!["429".into()]));
        for unknown in [json!("never"), json!({"status": 503}), json!([1])] {
            assert_eq!(read(unknown.clone()), RetryOn::Unknown(unknown.clone()));
            assert_eq!(serde_json::to_value(read(unknown.clone())).expect("json"), unknown);
        }
    }
}
