//! Converts between the protobuf types and the domain types.
//!
//! Requests become the JSON bodies of the HTTP API, so that one parser checks both. An enum value has the name of its JSON
//! value after the prefix: `PRIORITY_HIGH` is `HIGH`, `OVERLAP_QUEUE_ONE` is `queue_one`.

use faena_domain::{
    Attempt, ErrorReason, JobState, JobView, LogEntry, Priority, Step, Timestamp, schedule::TickOutcome,
};
use faena_wire::v1;
use serde_json::{Map, Value, value::RawValue};

pub fn timestamp(at: Timestamp) -> prost_types::Timestamp {
    let ms = at.as_ms();
    let nanos = i32::try_from(ms.rem_euclid(1_000)).unwrap_or(0) * 1_000_000;
    prost_types::Timestamp { seconds: ms.div_euclid(1_000), nanos }
}

/// Returns a time as JSON, truncated to milliseconds.
pub fn time_json(at: prost_types::Timestamp) -> Value {
    let ms = at.seconds.saturating_mul(1_000).saturating_add(i64::from(at.nanos / 1_000_000));
    Timestamp::from_ms(ms).to_string().into()
}

pub fn duration(ms: u64) -> prost_types::Duration {
    let nanos = i32::try_from(ms % 1_000).unwrap_or(0) * 1_000_000;
    prost_types::Duration { seconds: i64::try_from(ms / 1_000).unwrap_or(i64::MAX), nanos }
}

/// Returns the milliseconds of a duration; a negative one stays negative, for the parser to reject.
pub fn milliseconds(duration: prost_types::Duration) -> i64 {
    duration.seconds.saturating_mul(1_000).saturating_add(i64::from(duration.nanos / 1_000_000))
}

/// Returns the number of the enum value whose name is `prefix` followed by `name`; 0 if there is none.
fn number<E: Into<i32>>(parse: fn(&str) -> Option<E>, prefix: &str, name: &str) -> i32 {
    parse(&format!("{prefix}{}", name.to_ascii_uppercase())).map_or(0, Into::into)
}

/// Returns the name of an enum value without its prefix.
///
/// An unspecified value is absent. An unknown number stays a number, so that the parser rejects it with the field's path.
fn name<E: TryFrom<i32>>(number: i32, name: fn(&E) -> &'static str, prefix: &str) -> Option<Value> {
    match E::try_from(number) {
        _ if number == 0 => None,
        Ok(value) => name(&value).strip_prefix(prefix).map(Value::from),
        Err(_) => Some(number.into()),
    }
}

fn lower_name<E: TryFrom<i32>>(number: i32, get: fn(&E) -> &'static str, prefix: &str) -> Option<Value> {
    name(number, get, prefix).map(|value| value.as_str().map_or(value.clone(), |text| text.to_ascii_lowercase().into()))
}

/// Returns the name that a value has in JSON.
pub fn json_name(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(name)) => name,
        _ => String::new(),
    }
}

/// Returns the value of a query parameter: the name of an enum value, or the number of an unknown one.
pub fn query_text(value: Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub fn job_state(state: JobState) -> i32 {
    number(v1::JobState::from_str_name, "JOB_STATE_", state.as_str())
}

pub fn job_state_name(state: i32) -> Option<Value> {
    name(state, v1::JobState::as_str_name, "JOB_STATE_")
}

pub fn priority(priority: Priority) -> i32 {
    number(v1::Priority::from_str_name, "PRIORITY_", priority.as_str())
}

pub fn priority_name(priority: i32) -> Option<Value> {
    name(priority, v1::Priority::as_str_name, "PRIORITY_")
}

pub fn on_parent_failure_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::OnParentFailure::as_str_name, "ON_PARENT_FAILURE_")
}

fn on_parent_failure(name: &str) -> i32 {
    number(v1::OnParentFailure::from_str_name, "ON_PARENT_FAILURE_", name)
}

pub fn job_sort_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::JobSort::as_str_name, "JOB_SORT_")
}

pub fn sort_order_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::SortOrder::as_str_name, "SORT_ORDER_")
}

pub fn error_reason_name(reason: i32) -> Option<Value> {
    lower_name(reason, v1::ErrorReason::as_str_name, "ERROR_REASON_")
}

pub fn migration_entry_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::MigrationEntry::as_str_name, "MIGRATION_ENTRY_")
}

fn error_reason(reason: ErrorReason) -> i32 {
    number(v1::ErrorReason::from_str_name, "ERROR_REASON_", reason.as_str())
}

pub fn dst_gap(name: &str) -> i32 {
    number(v1::DstGap::from_str_name, "DST_GAP_", name)
}

pub fn dst_gap_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::DstGap::as_str_name, "DST_GAP_")
}

pub fn dst_overlap(name: &str) -> i32 {
    number(v1::DstOverlap::from_str_name, "DST_OVERLAP_", name)
}

pub fn dst_overlap_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::DstOverlap::as_str_name, "DST_OVERLAP_")
}

pub fn misfire(name: &str) -> i32 {
    number(v1::Misfire::from_str_name, "MISFIRE_", name)
}

pub fn misfire_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::Misfire::as_str_name, "MISFIRE_")
}

pub fn overlap(name: &str) -> i32 {
    number(v1::Overlap::from_str_name, "OVERLAP_", name)
}

pub fn overlap_name(choice: i32) -> Option<Value> {
    lower_name(choice, v1::Overlap::as_str_name, "OVERLAP_")
}

pub fn tick_outcome(outcome: TickOutcome) -> i32 {
    number(v1::TickOutcome::from_str_name, "TICK_OUTCOME_", outcome.as_str())
}

pub fn task_status(name: &str) -> i32 {
    number(v1::TaskStatus::from_str_name, "TASK_STATUS_", name)
}

pub fn task_status_name(status: i32) -> Option<Value> {
    lower_name(status, v1::TaskStatus::as_str_name, "TASK_STATUS_")
}

pub fn task_outcome(name: &str) -> i32 {
    number(v1::TaskOutcome::from_str_name, "TASK_OUTCOME_", name)
}

pub fn report_kind(name: &str) -> i32 {
    number(v1::ReportKind::from_str_name, "REPORT_KIND_", name)
}

fn retry_on(name: &str) -> i32 {
    number(v1::RetryOn::from_str_name, "RETRY_ON_", name)
}

/// The JSON object that a request is converted to.
#[derive(Default)]
pub struct JsonBody(pub Map<String, Value>);

impl JsonBody {
    pub fn put(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value.into());
        }
    }

    pub fn put_list(&mut self, name: &str, list: Vec<String>) {
        self.put(name, (!list.is_empty()).then_some(list));
    }

    pub fn put_time(&mut self, name: &str, at: Option<prost_types::Timestamp>) {
        self.put(name, at.map(time_json));
    }

    pub fn put_duration(&mut self, name: &str, duration: Option<prost_types::Duration>) {
        self.put(name, duration.map(milliseconds));
    }

    pub fn put_retry_policy(&mut self, policy: Option<v1::RetryPolicy>) {
        let Some(policy) = policy else { return };
        self.put("maxRetries", policy.max_retries);
        self.put_duration("retryDelay", policy.delay);
        self.put("backoffMultiplier", policy.backoff_multiplier);
        self.put_duration("maxDelay", policy.max_delay);
        let delays: Vec<i64> = policy.delays.into_iter().map(milliseconds).collect();
        self.put("retryDelays", (!delays.is_empty()).then_some(delays));
        self.put("jitter", policy.jitter);
        self.put("retryOn", lower_name(policy.retry_on, v1::RetryOn::as_str_name, "RETRY_ON_"));
        self.put_list("retryOn", policy.error_patterns);
    }

    pub fn into_bytes(self) -> Vec<u8> {
        Value::Object(self.0).to_string().into_bytes()
    }

    /// Writes the object, with `json` unchanged as the value of the field `name`.
    ///
    /// A text that is not JSON becomes a string, which the parser rejects with the field's path.
    pub fn into_text(mut self, name: &str, json: &str) -> String {
        let raw = serde_json::from_str::<&RawValue>(json).ok();
        if !json.is_empty() && raw.is_none() {
            self.0.insert(name.to_owned(), json.into());
        }
        let fields = self.0.into_iter().map(|(name, value)| format!("{}:{value}", Value::from(name)));
        let raw = raw.map(|raw| format!("{}:{}", Value::from(name), raw.get()));
        format!("{{{}}}", fields.chain(raw).collect::<Vec<_>>().join(","))
    }
}

/// Settings of a retry policy as the HTTP API shows them.
pub struct RetryFields {
    pub max_retries: u32,
    pub delay_ms: u64,
    pub backoff_multiplier: f64,
    pub max_delay_ms: u64,
    pub delays_ms: Vec<u64>,
    pub jitter: Option<f64>,
    /// A name, or a list of patterns.
    pub retry_on: Value,
}

pub fn retry_policy(fields: RetryFields) -> v1::RetryPolicy {
    let patterns = fields.retry_on.as_array().into_iter().flatten();
    v1::RetryPolicy {
        max_retries: Some(fields.max_retries),
        delay: Some(duration(fields.delay_ms)),
        backoff_multiplier: Some(fields.backoff_multiplier),
        max_delay: Some(duration(fields.max_delay_ms)),
        delays: fields.delays_ms.into_iter().map(duration).collect(),
        jitter: fields.jitter,
        retry_on: fields.retry_on.as_str().map_or(0, retry_on),
        error_patterns: patterns.filter_map(|pattern| pattern.as_str().map(str::to_owned)).collect(),
    }
}

pub fn log_entry(entry: LogEntry) -> v1::LogEntry {
    v1::LogEntry {
        timestamp: Some(timestamp(entry.timestamp)),
        event: entry.event.as_str().into(),
        details: entry.details,
        run: entry.run,
    }
}

pub fn job(job: JobView) -> v1::Job {
    let steps = job.steps.into_iter().map(step);
    let log = job.execution_log.into_iter().map(log_entry);
    let retry = RetryFields {
        max_retries: job.max_retries,
        delay_ms: job.retry_delay,
        backoff_multiplier: job.backoff_multiplier,
        max_delay_ms: job.max_delay,
        delays_ms: job.retry_delays,
        jitter: Some(job.jitter),
        retry_on: job.retry_on,
    };
    v1::Job {
        id: job.id.to_string(),
        name: job.name,
        r#type: job.kind,
        queue: job.queue,
        state: job_state(job.status),
        priority: priority(job.priority),
        payload_json: job.payload.get().into(),
        result_json: job.result.map(|result| result.get().into()),
        error: job.error,
        error_reason: job.error_reason.map_or(0, error_reason),
        retry_count: job.retry_count,
        max_retries: job.max_retries,
        run: job.run,
        attempt: job.attempt,
        worker_id: job.worker_id,
        correlation_id: job.correlation_id,
        created_at: Some(timestamp(job.created_at)),
        started_at: job.started_at.map(timestamp),
        completed_at: job.completed_at.map(timestamp),
        progress: job.progress.map(progress),
        steps: steps.collect(),
        execution_log: log.collect(),
        execution_log_omitted: job.execution_log_omitted,
        tags: job.tags,
        schedule_id: job.schedule_id,
        schedule_due: job.schedule_due.map(timestamp),
        next_attempt_at: job.next_attempt_at.map(timestamp),
        retry_policy: Some(retry_policy(retry)),
        timeout: job.timeout_ms.map(duration),
        updated_at: Some(timestamp(job.updated_at)),
        scheduled_at: job.scheduled_at.map(timestamp),
        expires_at: job.expires_at.map(timestamp),
        queued_at: job.queued_at.map(timestamp),
        attempts: job.attempts.into_iter().map(attempt).collect(),
        webhook_url: job.webhook_url,
        idempotency_key: job.idempotency_key,
        unique_key: job.unique_key,
        concurrency_key: job.concurrency_key,
        depends_on: job.depends_on.iter().map(ToString::to_string).collect(),
        on_parent_failure: on_parent_failure(&json_name(&job.on_parent_failure)),
    }
}

pub fn step(step: Step) -> v1::Step {
    v1::Step {
        name: step.name,
        result_json: step.result.get().into(),
        run: Some(step.run),
        completed_at: Some(timestamp(step.at)),
    }
}

fn attempt(attempt: Attempt) -> v1::JobAttempt {
    v1::JobAttempt {
        run: attempt.run,
        state: job_state(attempt.status),
        worker_id: attempt.worker_id,
        started_at: attempt.started_at.map(timestamp),
        finished_at: Some(timestamp(attempt.finished_at)),
        error: attempt.error,
        error_reason: attempt.error_reason.map_or(0, error_reason),
    }
}

fn progress(progress: faena_domain::Progress) -> v1::Progress {
    v1::Progress {
        phase: progress.phase,
        current_step: progress.current_step,
        completed_steps: progress.completed_steps,
        total_steps: progress.total_steps,
        percentage: progress.percentage,
        message: progress.message,
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::OnParentFailure;

    use super::*;

    #[test]
    fn every_value_of_the_domain_has_a_value_in_the_protocol() {
        for state in JobState::ALL {
            assert_eq!(job_state_name(job_state(state)), Some(state.as_str().into()));
        }
        for value in Priority::ALL {
            assert_eq!(priority_name(priority(value)), Some(value.as_str().into()));
        }
        for reason in ErrorReason::ALL {
            assert_eq!(error_reason_name(error_reason(reason)), Some(reason.as_str().into()));
        }
        for choice in [OnParentFailure::Cancel, OnParentFailure::Run] {
            let name = json_name(&choice);
            assert_eq!(on_parent_failure_name(on_parent_failure(&name)), Some(name.into()));
        }
        assert!(TickOutcome::ALL.into_iter().all(|outcome| tick_outcome(outcome) != 0));
        for kind in ["started", "progress", "log", "step", "complete", "fail", "release"] {
            assert_ne!(report_kind(kind), 0, "{kind}");
        }
        for choice in ["run_once", "skip", "catch_up"] {
            assert_eq!(misfire_name(misfire(choice)), Some(choice.into()));
        }
        for choice in ["allow", "skip", "queue_one", "cancel_previous"] {
            assert_eq!(overlap_name(overlap(choice)), Some(choice.into()));
        }
    }

    #[test]
    fn an_unspecified_value_is_absent_and_an_unknown_one_is_left_to_the_parser() {
        assert_eq!(priority_name(0), None);
        assert_eq!(priority_name(99), Some(99.into()));
        assert_eq!(overlap_name(99), Some(99.into()));
    }

    #[test]
    fn times_and_durations_keep_their_milliseconds() {
        for ms in [0, 1, 999, 1_000, 1_763_300_000_123] {
            let at = Timestamp::from_ms(ms);
            assert_eq!(time_json(timestamp(at)), Value::from(at.to_string()));
            assert_eq!(milliseconds(duration(ms.unsigned_abs())), ms);
        }
    }

    #[test]
    fn a_payload_is_kept_unchanged_and_text_that_is_not_json_becomes_a_string() {
        let mut body = JsonBody::default();
        body.put("name", Some("a"));
        assert_eq!(body.into_text("payload", r#"{"n": 1.0e2}"#), r#"{"name":"a","payload":{"n": 1.0e2}}"#);
        assert_eq!(JsonBody::default().into_text("payload", "no json"), r#"{"payload":"no json"}"#);
        assert_eq!(JsonBody::default().into_text("payload", ""), "{}");
    }
}
