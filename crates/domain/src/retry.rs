//! Decides whether and when a failed attempt is followed by a retry.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Cause of a job's failure or cancellation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorReason {
    Error,
    Timeout,
    Orphaned,
    Cancelled,
    Expired,
    NoHandler,
}

impl ErrorReason {
    pub const ALL: [ErrorReason; 6] = [
        ErrorReason::Error,
        ErrorReason::Timeout,
        ErrorReason::Orphaned,
        ErrorReason::Cancelled,
        ErrorReason::Expired,
        ErrorReason::NoHandler,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            ErrorReason::Error => "error",
            ErrorReason::Timeout => "timeout",
            ErrorReason::Orphaned => "orphaned",
            ErrorReason::Cancelled => "cancelled",
            ErrorReason::Expired => "expired",
            ErrorReason::NoHandler => "no_handler",
        }
    }

    pub fn parse(text: &str) -> Option<ErrorReason> {
        ErrorReason::ALL.into_iter().find(|reason| reason.as_str() == text)
    }
}

/// A failed run, reported by its worker, or by the server if the worker was lost.
#[derive(Clone, PartialEq, Debug)]
pub struct Failure {
    pub message: String,
    pub reason: ErrorReason,
    /// If `false`, the job fails immediately, even if retries are left.
    pub retryable: bool,
    /// Delay requested by the worker; replaces the computed backoff.
    pub retry_after_ms: Option<u64>,
}

impl Failure {
    pub fn error(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), reason: ErrorReason::Error, retryable: true, retry_after_ms: None }
    }

    pub fn fatal(message: impl Into<String>) -> Failure {
        Failure { retryable: false, ..Failure::error(message) }
    }

    pub fn with_reason(self, reason: ErrorReason) -> Failure {
        Failure { reason, ..self }
    }
}

/// Failures that are retried.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetryOn {
    #[default]
    All,
    /// Failures that look temporary: rate limits, timeouts, 429, 503, connection errors, lost workers.
    Transient,
    /// Failures whose message contains one of these patterns, ignoring case; `*` stands for any text.
    Patterns(Vec<String>),
}

impl RetryOn {
    /// Returns the value of the `retryOn` field: `"all"`, `"transient"` or the patterns.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            RetryOn::All => "all".into(),
            RetryOn::Transient => "transient".into(),
            RetryOn::Patterns(patterns) => patterns.clone().into(),
        }
    }
}

/// Describes [`RetryOn::to_json`].
pub(crate) fn retry_on_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [
        {"type": "string", "enum": ["all", "transient"]},
        {"type": "array", "items": {"type": "string"}},
    ]})
}

/// Number of retries, their delays, and the failures that are retried.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RetryPolicy {
    pub max_retries: u32,
    pub retry_delay_ms: u64,
    pub backoff_multiplier: f64,
    pub max_delay_ms: u64,
    /// Delays before the first, second, … retry, instead of the computed backoff. The last one applies to all further retries.
    pub retry_delays_ms: Vec<u64>,
    /// Largest random addition, as a fraction of the delay.
    pub jitter: f64,
    pub retry_on: RetryOn,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            max_retries: 3,
            retry_delay_ms: 1_000,
            backoff_multiplier: 2.0,
            max_delay_ms: 60_000,
            retry_delays_ms: Vec::new(),
            jitter: 0.0,
            retry_on: RetryOn::All,
        }
    }
}

/// What follows a failed run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RetryDecision {
    RetryAfter { delay_ms: u64 },
    Fail,
}

/// Longest delay before a retry, even if the worker asks for a longer one.
const HARD_MAX_DELAY_MS: u64 = 7 * 24 * 3_600_000;

/// Patterns of messages that look temporary.
const TRANSIENT: [&str; 15] = [
    "rate limit",
    "too many requests",
    "timeout",
    "timed out",
    "429",
    "503",
    "service unavailable",
    "temporarily unavailable",
    "connection",
    "cannot connect",
    "broken pipe",
    "unreachable",
    "overloaded",
    "try again",
    "error sending request",
];

impl RetryPolicy {
    /// Decides what follows a failure of a job that has been retried `retry_count` times. `random` is in 0..1.
    pub fn decide(&self, retry_count: u32, failure: &Failure, random: f64) -> RetryDecision {
        if retry_count >= self.max_retries || !failure.retryable || !self.retry_on.accepts(failure) {
            return RetryDecision::Fail;
        }
        let delay_ms = failure.retry_after_ms.unwrap_or_else(|| self.delay_ms(retry_count, random));
        RetryDecision::RetryAfter { delay_ms: delay_ms.min(HARD_MAX_DELAY_MS) }
    }

    /// Returns the delay before retry number `retry_count` + 1.
    pub fn delay_ms(&self, retry_count: u32, random: f64) -> u64 {
        let nth = usize::try_from(retry_count).unwrap_or(usize::MAX);
        let base = match self.retry_delays_ms.get(nth).or(self.retry_delays_ms.last()) {
            Some(&listed) => listed as f64,
            None => {
                let exponent = i32::try_from(retry_count).unwrap_or(i32::MAX);
                let grown = self.retry_delay_ms as f64 * self.backoff_multiplier.powi(exponent);
                grown.min(self.max_delay_ms as f64)
            }
        };
        // A float beyond u64 saturates, NaN becomes 0.
        (base * (1.0 + self.jitter * random)) as u64
    }
}

impl RetryOn {
    fn accepts(&self, failure: &Failure) -> bool {
        match self {
            RetryOn::All => true,
            RetryOn::Transient => {
                matches!(failure.reason, ErrorReason::Timeout | ErrorReason::Orphaned)
                    || TRANSIENT.iter().any(|pattern| contains(&failure.message, pattern))
            }
            RetryOn::Patterns(patterns) => patterns.iter().any(|pattern| contains(&failure.message, pattern)),
        }
    }
}

/// Returns whether `text` contains the parts of `pattern` that `*` separates, in order, ignoring case.
fn contains(text: &str, pattern: &str) -> bool {
    let text = text.to_lowercase();
    let mut rest = text.as_str();
    for piece in pattern.to_lowercase().split('*').filter(|piece| !piece.is_empty()) {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delays(policy: &RetryPolicy) -> Vec<RetryDecision> {
        (0..6).map(|count| policy.decide(count, &Failure::error("no"), 0.0)).collect()
    }

    fn after(delay_ms: u64) -> RetryDecision {
        RetryDecision::RetryAfter { delay_ms }
    }

    #[test]
    fn the_delay_doubles_up_to_its_maximum_until_no_retry_is_left() {
        let policy = RetryPolicy { max_retries: 5, max_delay_ms: 6_000, ..RetryPolicy::default() };
        assert_eq!(
            delays(&policy),
            [after(1_000), after(2_000), after(4_000), after(6_000), after(6_000), RetryDecision::Fail]
        );
    }

    #[test]
    fn listed_delays_replace_the_computed_backoff() {
        let policy = RetryPolicy { max_retries: 3, retry_delays_ms: vec![10_000, 30_000], ..RetryPolicy::default() };
        assert_eq!(delays(&policy)[..4], [after(10_000), after(30_000), after(30_000), RetryDecision::Fail]);
    }

    #[test]
    fn a_failure_that_is_not_retryable_fails_the_job_immediately() {
        assert_eq!(RetryPolicy::default().decide(0, &Failure::fatal("no such user"), 0.0), RetryDecision::Fail);
    }

    #[test]
    fn the_delay_that_the_worker_requests_replaces_the_computed_backoff() {
        let failure = Failure { retry_after_ms: Some(77), ..Failure::error("slow down") };
        assert_eq!(RetryPolicy::default().decide(0, &failure, 0.9), after(77));
        let forever = Failure { retry_after_ms: Some(u64::MAX), ..Failure::error("slow down") };
        assert_eq!(RetryPolicy::default().decide(0, &forever, 0.9), after(HARD_MAX_DELAY_MS));
    }

    #[test]
    fn retry_on_transient_retries_only_failures_that_look_temporary() {
        let policy = RetryPolicy { retry_on: RetryOn::Transient, ..RetryPolicy::default() };
        let retried = |message: &str| policy.decide(0, &Failure::error(message), 0.0) != RetryDecision::Fail;
        for message in
            ["OpenAI API rate limit exceeded", "HTTP 429", "status 503", "Connection refused", "request timed out"]
        {
            assert!(retried(message), "{message}");
        }
        for message in ["invalid address", "HTTP 404", "division by zero"] {
            assert!(!retried(message), "{message}");
        }
        let lost = Failure::error("worker lost").with_reason(ErrorReason::Orphaned);
        assert_ne!(policy.decide(0, &lost, 0.0), RetryDecision::Fail, "a lost worker is transient");
    }

    #[test]
    fn retry_on_patterns_retries_only_matching_failures() {
        let on = RetryOn::Patterns(vec!["deadlock".into(), "code * of 7".into()]);
        let policy = RetryPolicy { retry_on: on, ..RetryPolicy::default() };
        let retried = |message: &str| policy.decide(0, &Failure::error(message), 0.0) != RetryDecision::Fail;
        assert!(retried("ERROR: Deadlock detected"));
        assert!(retried("exit code 3 of 7"));
        assert!(!retried("exit code 3 of 8"));
    }

    proptest! {
        #[test]
        fn the_delay_is_between_the_base_and_the_base_plus_jitter(
            count in 0u32..200, random in 0.0f64..1.0, jitter in 0.0f64..=1.0, multiplier in 1.0f64..10.0,
            delay in 100u64..3_600_000, max in 100u64..86_400_000,
        ) {
            let policy = RetryPolicy { max_retries: 1_000, retry_delay_ms: delay, backoff_multiplier: multiplier,
                max_delay_ms: max, jitter, ..RetryPolicy::default() };
            let base = policy.delay_ms(count, 0.0);
            let with_jitter = policy.delay_ms(count, random);
            prop_assert!(base <= max);
            prop_assert!(base >= delay.min(max));
            prop_assert!(with_jitter >= base);
            prop_assert!(with_jitter as f64 <= base as f64 * (1.0 + jitter) + 1.0);
        }
    }
}
