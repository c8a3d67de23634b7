//! A job as it is submitted. Fields that are not set keep the defaults of the server.

use std::time::Duration;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::{Error, JobId, OnParentFailure, Priority, RetryOn, Timestamp};

/// A job to submit.
///
/// ```
/// # use std::time::Duration;
/// let job = faena::JobRequest::new("email.send")
///     .payload(&serde_json::json!({ "to": "ada@example.org" }))
///     .max_retries(5)
///     .delay(Duration::from_secs(60))
///     .idempotency_key("welcome-ada");
/// ```
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRequest {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<Priority>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_retries: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_delay: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backoff_multiplier: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_delay: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    retry_delays: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_on: Option<RetryOn>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduled_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    concurrency_key: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    depends_on: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_parent_failure: Option<OnParentFailure>,
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    webhook_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    /// Sent as a header.
    #[serde(skip)]
    pub(crate) traceparent: Option<String>,
    /// The error of a setter. Returned when the job is submitted.
    #[serde(skip)]
    invalid: Option<String>,
}

macro_rules! text_setters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, value: impl Into<String>) -> Self {
            self.$name = Some(value.into());
            self
        }
    )+};
}

impl JobRequest {
    /// Creates a request for a job of this type. The type decides which workers can run it.
    pub fn new(kind: impl Into<String>) -> JobRequest {
        JobRequest { kind: kind.into(), ..JobRequest::default() }
    }

    text_setters! {
        /// Sets a display name. Default: the type.
        name,
        /// Sets the queue. Default: `default`.
        queue,
        /// Sets a key under which a repeated submission is recognised.
        ///
        /// Submitting the same job again with the same key returns the first job; a different job with the same key is
        /// rejected.
        idempotency_key,
        /// Sets a key that only one unfinished job may have. A second job with the same key is rejected.
        unique_key,
        /// Sets a key whose jobs share a concurrency limit.
        concurrency_key,
        /// Sets the URL to notify when the job finishes.
        webhook_url,
        /// Sets the id that is shared by all jobs and events with the same cause. Default: the id of the job.
        correlation_id,
        /// Sets the W3C trace context of the job. Ignored for jobs of a batch.
        traceparent,
        /// Sets a name by which other jobs of the same batch may depend on this one.
        reference,
    }

    /// Sets the input of the handler: any value that serialises to a JSON object.
    #[must_use]
    pub fn payload(mut self, payload: &impl Serialize) -> Self {
        match to_raw_value(payload) {
            Ok(raw) => self.payload = Some(raw),
            Err(error) => self.invalid = Some(format!("payload: cannot be written as JSON: {error}")),
        }
        self
    }

    /// Sets how urgent the job is. Default: [`Priority::Normal`].
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Sets how many retries may follow the first run. Default: 3.
    #[must_use]
    pub fn max_retries(mut self, times: u32) -> Self {
        self.max_retries = Some(times);
        self
    }

    /// Sets the delay before the first retry. Default: 1 s. Each later delay is the previous one times
    /// the [`backoff_multiplier`](Self::backoff_multiplier).
    #[must_use]
    pub fn retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = Some(ms(delay));
        self
    }

    /// Sets the factor between one retry delay and the next. Default: 2.
    #[must_use]
    pub fn backoff_multiplier(mut self, factor: f64) -> Self {
        self.backoff_multiplier = Some(factor);
        self
    }

    /// Sets the longest delay between two attempts. Default: 60 s.
    #[must_use]
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = Some(ms(delay));
        self
    }

    /// Sets the retry delays themselves, instead of the computed backoff. The last one also applies to all later retries.
    #[must_use]
    pub fn retry_delays(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.retry_delays = delays.into_iter().map(ms).collect();
        self
    }

    /// Sets the part of a retry delay, from 0 to 1, that is added at random. Default: 0.
    #[must_use]
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = Some(part);
        self
    }

    /// Retries only failures that look temporary: rate limits, timeouts, lost connections.
    #[must_use]
    pub fn retry_transient_only(mut self) -> Self {
        self.retry_on = Some(RetryOn::Transient);
        self
    }

    /// Retries only errors that contain one of these texts; `*` matches anything.
    #[must_use]
    pub fn retry_on<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Self {
        self.retry_on = Some(RetryOn::Patterns(patterns.into_iter().map(Into::into).collect()));
        self
    }

    /// Sets how long one run may take.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout_ms = Some(ms(limit));
        self
    }

    /// Sets the earliest time at which the job may run.
    #[must_use]
    pub fn scheduled_at(mut self, at: Timestamp) -> Self {
        self.scheduled_at = Some(at);
        self
    }

    /// Sets the earliest time at which the job may run, as a delay from now by the clock of this machine.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        self.scheduled_at(Timestamp::now() + delay)
    }

    /// Sets the time at which the job fails as expired unless it has started.
    #[must_use]
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.expires_at = Some(at);
        self
    }

    /// Adds a job that has to complete first.
    #[must_use]
    pub fn depends_on(mut self, id: JobId) -> Self {
        self.depends_on.push(id.to_string());
        self
    }

    /// Adds the job of the same batch with this [`reference`](Self::reference) as one that has to complete first.
    #[must_use]
    pub fn depends_on_ref(mut self, reference: impl Into<String>) -> Self {
        self.depends_on.push(reference.into());
        self
    }

    /// Sets what happens when a job it depends on fails or is cancelled. Default: [`OnParentFailure::Cancel`].
    #[must_use]
    pub fn on_parent_failure(mut self, choice: OnParentFailure) -> Self {
        self.on_parent_failure = Some(choice);
        self
    }

    /// Adds a label to find the job by.
    #[must_use]
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Returns the error of a setter, if there was one.
    pub(crate) fn validated(&self) -> Result<&Self, Error> {
        match &self.invalid {
            Some(message) => Err(Error::Invalid(message.clone())),
            None => Ok(self),
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_are_not_set_are_not_sent() {
        let job = JobRequest::new("noop").traceparent("00-a-b-01");
        assert_eq!(serde_json::to_string(&job).expect("json"), r#"{"type":"noop"}"#);
    }

    #[test]
    fn every_field_has_its_name_in_the_api() {
        let at = Timestamp::from_millis(1_763_236_800_000);
        let job = JobRequest::new("a.b")
            .name("n")
            .payload(&serde_json::json!({"x": 1}))
            .queue("q")
            .priority(Priority::High)
            .max_retries(2)
            .retry_delays([Duration::from_secs(10)])
            .retry_transient_only()
            .timeout(Duration::from_secs(1))
            .scheduled_at(at)
            .idempotency_key("i")
            .unique_key("u")
            .concurrency_key("c")
            .depends_on_ref("other")
            .on_parent_failure(OnParentFailure::Run)
            .reference("me")
            .tag("t")
            .webhook_url("http://w")
            .correlation_id("corr");
        assert_eq!(
            serde_json::to_string(&job).expect("json"),
            concat!(
                r#"{"type":"a.b","name":"n","payload":{"x":1},"queue":"q","priority":"HIGH","maxRetries":2,"#,
                r#""retryDelays":[10000],"retryOn":"transient","timeoutMs":1000,"scheduledAt":"2025-11-15T20:00:00.000Z","#,
                r#""idempotencyKey":"i","uniqueKey":"u","concurrencyKey":"c","dependsOn":["other"],"#,
                r#""onParentFailure":"run","ref":"me","tags":["t"],"webhookUrl":"http://w","correlationId":"corr"}"#
            )
        );
    }

    #[test]
    fn a_payload_that_is_not_json_is_an_error_at_submission() {
        let map = std::collections::HashMap::from([((1, 2), 3)]);
        assert!(matches!(JobRequest::new("noop").payload(&map).validated(), Err(Error::Invalid(_))));
    }
}
