//! A job as it is handed in. What is not said is left to the server.

use std::time::Duration;

use faena_domain::{JobId, OnParentFailure, Priority, Timestamp};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::Error;

/// A job that somebody wants done.
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
    /// Travels as a header.
    #[serde(skip)]
    pub(crate) traceparent: Option<String>,
    /// What is wrong with it already; told when it is submitted.
    #[serde(skip)]
    fault: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum RetryOn {
    Named(&'static str),
    Patterns(Vec<String>),
}

macro_rules! texts {
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
    /// A job of this type; workers are chosen by it.
    pub fn new(kind: impl Into<String>) -> JobRequest {
        JobRequest { kind: kind.into(), ..JobRequest::default() }
    }

    texts! {
        /// A name for people, when the type is not enough.
        name,
        /// `default`, when not named.
        queue,
        /// The same key with the same job gives the same job; with another job it is refused.
        idempotency_key,
        /// While a job with this key has not ended, no second one is taken.
        unique_key,
        /// Jobs with the same key share a limit on how many of them run at once.
        concurrency_key,
        /// Where its end is told.
        webhook_url,
        /// Ties together what follows from one cause. Without one it is the job's own id.
        correlation_id,
        /// The trace (W3C) that this job belongs to. For single jobs; those of a batch carry none.
        traceparent,
        /// A name by which other jobs of the same batch may depend on this one.
        reference,
    }

    /// What the handler gets: anything that is written as a JSON object.
    #[must_use]
    pub fn payload(mut self, payload: &impl Serialize) -> Self {
        match to_raw_value(payload) {
            Ok(raw) => self.payload = Some(raw),
            Err(error) => self.fault = Some(format!("the payload cannot be written as JSON: {error}")),
        }
        self
    }

    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = Some(priority);
        self
    }

    /// How many tries may follow the first.
    #[must_use]
    pub fn max_retries(mut self, times: u32) -> Self {
        self.max_retries = Some(times);
        self
    }

    /// The delay before the first retry. Each next one is longer by [`backoff_multiplier`](Self::backoff_multiplier).
    #[must_use]
    pub fn retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = Some(ms(delay));
        self
    }

    #[must_use]
    pub fn backoff_multiplier(mut self, factor: f64) -> Self {
        self.backoff_multiplier = Some(factor);
        self
    }

    /// No delay between tries is longer.
    #[must_use]
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = Some(ms(delay));
        self
    }

    /// The delays themselves, instead of the formula. The last holds for all that follow.
    #[must_use]
    pub fn retry_delays(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.retry_delays = delays.into_iter().map(ms).collect();
        self
    }

    /// Up to this part of a delay is added at random (0 to 1).
    #[must_use]
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = Some(part);
        self
    }

    /// Only what looks as if it will pass is tried again: rate limits, timeouts, lost connections.
    #[must_use]
    pub fn retry_transient_only(mut self) -> Self {
        self.retry_on = Some(RetryOn::Named("transient"));
        self
    }

    /// Only errors that contain one of these texts are tried again; `*` stands for anything.
    #[must_use]
    pub fn retry_on<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Self {
        self.retry_on = Some(RetryOn::Patterns(patterns.into_iter().map(Into::into).collect()));
        self
    }

    /// How long one try may take.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout_ms = Some(ms(limit));
        self
    }

    /// Not before this time.
    #[must_use]
    pub fn scheduled_at(mut self, at: Timestamp) -> Self {
        self.scheduled_at = Some(at);
        self
    }

    /// Not before so much time has passed, by the clock of this machine.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        let at = Timestamp::now().plus_ms(i64::try_from(ms(delay)).unwrap_or(i64::MAX));
        self.scheduled_at(at)
    }

    /// Not after this time: what has not started by then fails as expired.
    #[must_use]
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.expires_at = Some(at);
        self
    }

    /// Waits for this job to complete. Call it once for each.
    #[must_use]
    pub fn depends_on(mut self, id: JobId) -> Self {
        self.depends_on.push(id.to_string());
        self
    }

    /// Waits for the job of the same batch that has this [`reference`](Self::reference).
    #[must_use]
    pub fn depends_on_ref(mut self, reference: impl Into<String>) -> Self {
        self.depends_on.push(reference.into());
        self
    }

    /// What happens when a job that it depends on does not complete. Without a word, it is cancelled.
    #[must_use]
    pub fn on_parent_failure(mut self, choice: OnParentFailure) -> Self {
        self.on_parent_failure = Some(choice);
        self
    }

    #[must_use]
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    pub(crate) fn checked(&self) -> Result<&Self, Error> {
        match &self.fault {
            Some(fault) => Err(Error::Invalid(fault.clone())),
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
    fn only_what_was_said_is_sent() {
        let job = JobRequest::new("noop").traceparent("00-a-b-01");
        assert_eq!(serde_json::to_string(&job).expect("json"), r#"{"type":"noop"}"#);
    }

    #[test]
    fn every_field_has_the_name_that_the_server_knows() {
        let at = Timestamp::from_ms(1_763_236_800_000);
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
    fn a_payload_that_is_no_json_is_told_at_submission() {
        let map = std::collections::HashMap::from([((1, 2), 3)]);
        assert!(matches!(JobRequest::new("noop").payload(&map).checked(), Err(Error::Invalid(_))));
    }
}
