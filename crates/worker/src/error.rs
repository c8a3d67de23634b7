//! Errors: of calls to the server and of workers ([`Error`]), and of handlers ([`JobError`]).

use std::{error::Error as StdError, fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{JobId, JobState, open_enum::open_enum};

type Source = Box<dyn StdError + Send + Sync>;

open_enum! {
    /// The code of an error that the server answered with.
    ErrorCode {
        /// The request has invalid fields; 400.
        ValidationError = "VALIDATION_ERROR",
        /// The API key is missing or unknown; 401.
        Unauthorized = "UNAUTHORIZED",
        /// The API key does not allow this; 403.
        Forbidden = "FORBIDDEN",
        /// The resource does not exist; 404.
        NotFound = "NOT_FOUND",
        /// The request conflicts with what is stored; 409.
        Conflict = "CONFLICT",
        /// The report belongs to a run that has ended: a later run has the job, or the job has finished; 409.
        StaleRun = "STALE_RUN",
        /// The job is in a state that does not allow this; 409.
        InvalidTransition = "INVALID_TRANSITION",
        /// The request is too large; 413.
        PayloadTooLarge = "PAYLOAD_TOO_LARGE",
        /// The type or compression of the body is not accepted; 415.
        UnsupportedMediaType = "UNSUPPORTED_MEDIA_TYPE",
        /// The headers of the request are too large; 431.
        HeadersTooLarge = "HEADERS_TOO_LARGE",
        /// Too many requests; 429.
        RateLimited = "RATE_LIMITED",
        /// The server failed; 500.
        InternalError = "INTERNAL_ERROR",
        /// The server is starting, stopping or overloaded, or its database is not available; 503.
        Unavailable = "UNAVAILABLE",
    }
}

impl ErrorCode {
    /// Returns the HTTP status of this code; 503 for an unknown one.
    pub(crate) fn status(&self) -> u16 {
        match self {
            ErrorCode::ValidationError => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::Conflict | ErrorCode::StaleRun | ErrorCode::InvalidTransition => 409,
            ErrorCode::PayloadTooLarge => 413,
            ErrorCode::UnsupportedMediaType => 415,
            ErrorCode::HeadersTooLarge => 431,
            ErrorCode::RateLimited => 429,
            ErrorCode::InternalError => 500,
            ErrorCode::Unavailable | ErrorCode::Unknown(_) => 503,
        }
    }
}

/// One invalid field of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FieldError {
    /// The path of the field, such as `jobs[3].maxRetries`.
    pub path: String,
    /// What is wrong with it.
    pub message: String,
}

/// An error of a call to the server, or of a worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server answered with an error status.
    #[error("{message} ({code}){}", listed(.details))]
    #[non_exhaustive]
    Response {
        /// The HTTP status.
        status: u16,
        /// How long the server asks the caller to wait (`Retry-After`), up to a minute.
        retry_after: Option<Duration>,
        /// The code to branch on.
        code: ErrorCode,
        /// A readable text.
        message: String,
        /// Every invalid field if the code is [`ErrorCode::ValidationError`]; the id of the existing job (path `id`) if it is
        /// [`ErrorCode::Conflict`].
        details: Vec<FieldError>,
    },
    /// The server did not answer.
    ///
    /// The server may or may not have done what was asked. With an idempotency key it is safe to ask again.
    #[error("cannot reach {url}")]
    #[non_exhaustive]
    Unreachable {
        /// The address of the server.
        url: String,
        /// What happened to the connection.
        source: Source,
    },
    /// The request could not be sent: an invalid address, a payload that is not JSON, a worker without handlers.
    #[error("{0}")]
    Invalid(String),
    /// An answer, or the result of a job, does not have the expected form.
    #[error("cannot read {what}")]
    #[non_exhaustive]
    Decode {
        /// What could not be read.
        what: &'static str,
        /// Why not.
        source: Source,
    },
    /// The job has failed or was cancelled.
    #[error("job {id} is {status}{}", after_colon(.error))]
    #[non_exhaustive]
    NotCompleted {
        /// The job.
        id: JobId,
        /// Its state.
        status: JobState,
        /// Its latest error.
        error: Option<String>,
    },
    /// The job did not finish within the given time. It may still be running.
    #[error("job {id} did not finish within {limit:?}")]
    #[non_exhaustive]
    StillRunning {
        /// The job.
        id: JobId,
        /// How long the call waited.
        limit: Duration,
    },
}

impl Error {
    /// Returns how long the server asks the caller to wait before the next call (`Retry-After`), up to a minute.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Error::Response { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns the message of the error followed by those of its causes: `cannot reach …: connection refused`.
    pub fn with_causes(&self) -> String {
        with_causes(self)
    }
}

fn after_colon(error: &Option<String>) -> String {
    error.as_ref().map(|text| format!(": {text}")).unwrap_or_default()
}

/// Lists the invalid fields. A single one is already the message.
fn listed(details: &[FieldError]) -> String {
    if details.len() < 2 {
        return String::new();
    }
    details.iter().map(|field| format!("\n  {}: {}", field.path, field.message)).collect()
}

/// Joins the messages of an error and its causes. Many errors repeat the message of their cause; it appears once.
fn with_causes(error: &dyn StdError) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        cause = error.source();
    }
    message
}

/// The error of a handler, and whether the job is retried.
///
/// Every [`std::error::Error`] converts into a retryable `JobError` with `?`. `JobError` does not implement that trait itself,
/// because the conversion would then overlap with `impl From<T> for T` of the standard library.
///
/// ```
/// # use std::time::Duration;
/// # use faena::JobError;
/// fn parse(text: &str) -> Result<u32, JobError> {
///     if text.is_empty() {
///         return Err(JobError::fail("the number is missing"));    // fails the job immediately
///     }
///     if text == "later" {
///         return Err(JobError::retry("not ready").after(Duration::from_secs(60)));
///     }
///     Ok(text.parse()?)                                           // any other error is retried
/// }
/// assert!(!parse("").unwrap_err().is_retryable());
/// assert!(parse("x").unwrap_err().is_retryable());
/// ```
pub struct JobError {
    message: String,
    retryable: bool,
    retry_after: Option<Duration>,
}

/// Longer messages are truncated, because people read them.
const MAX_MESSAGE_BYTES: usize = 16 * 1024;

impl JobError {
    /// Creates an error that is retried while the job has attempts left.
    pub fn retry(message: impl fmt::Display) -> JobError {
        JobError { message: truncated(message.to_string()), retryable: true, retry_after: None }
    }

    /// Creates an error that fails the job immediately, because another attempt would fail the same way.
    pub fn fail(message: impl fmt::Display) -> JobError {
        JobError { retryable: false, ..JobError::retry(message) }
    }

    /// Creates the error of a handler that stops because its run was cancelled. See [`Context::cancelled`](crate::Context::cancelled).
    pub fn cancelled() -> JobError {
        JobError::retry("the run was cancelled")
    }

    /// Sets the delay before the next attempt, instead of the delay of the job's retry policy. Makes the error retryable.
    #[must_use]
    pub fn after(self, delay: Duration) -> JobError {
        JobError { retryable: true, retry_after: Some(delay), ..self }
    }

    /// Puts a text before the message: `context: message`.
    #[must_use]
    pub fn context(self, context: impl fmt::Display) -> JobError {
        JobError { message: truncated(format!("{context}: {}", self.message)), ..self }
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns `true` if the job is retried while it has attempts left.
    pub fn is_retryable(&self) -> bool {
        self.retryable
    }

    /// Returns the delay that [`after`](Self::after) has set.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl<E: StdError> From<E> for JobError {
    fn from(error: E) -> JobError {
        JobError::retry(with_causes(&error))
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.retryable { "retry" } else { "fail" };
        write!(f, "{kind}({:?}", self.message)?;
        if let Some(delay) = self.retry_after {
            write!(f, ", after {delay:?}")?;
        }
        f.write_str(")")
    }
}

fn truncated(mut message: String) -> String {
    if message.len() > MAX_MESSAGE_BYTES {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
        message.push_str(" …");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<u32, JobError> {
        Ok(text.parse::<u32>()?)
    }

    #[test]
    fn any_error_converts_into_a_retryable_one() {
        let error = parse("x").expect_err("not a number");
        assert!(error.is_retryable());
        assert_eq!(error.message(), "invalid digit found in string");
    }

    #[test]
    fn each_cause_of_an_error_appears_once() {
        let unreachable = Error::Unreachable { url: "http://here".into(), source: "refused".into() };
        assert_eq!(unreachable.with_causes(), "cannot reach http://here: refused");
        assert_eq!(JobError::from(unreachable).message(), "cannot reach http://here: refused");
    }

    #[test]
    fn a_delay_makes_an_error_retryable() {
        let error = JobError::fail("busy").after(Duration::from_secs(5)).context("sending");
        assert_eq!(format!("{error:?}"), r#"retry("sending: busy", after 5s)"#);
        assert!(!JobError::fail("no such address").is_retryable());
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let error = JobError::retry("ä".repeat(20_000));
        assert!(error.message().len() < MAX_MESSAGE_BYTES + 10 && error.message().ends_with("ä …"));
    }
}
