//! What can go wrong: for those who hand jobs in ([`Error`]), and for those who do them ([`JobError`]).

use std::{fmt, time::Duration};

use faena_domain::{FieldError, JobId, JobState};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A call to the server, or a worker, did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server said no. `code` is one of the codes of the API, such as `NOT_FOUND` or `VALIDATION_ERROR`.
    #[error("{message} ({code}){}", listed(.details))]
    Refused { status: u16, code: String, message: String, details: Vec<FieldError> },
    /// There was no answer. Whether the server has done what was asked is not known; with an idempotency key it is safe to
    /// ask again.
    #[error("cannot reach {url}")]
    Unreachable { url: String, source: Cause },
    /// What was asked for could not be sent as it is: an address that is none, a payload that is no JSON.
    #[error("{0}")]
    Invalid(String),
    /// An answer, or the result of a job, is not what was expected.
    #[error("{what} was not understood")]
    NotUnderstood { what: &'static str, source: Cause },
    /// The job has ended, and not well.
    #[error("job {id} is {status}{}", because(.error))]
    NotCompleted { id: JobId, status: JobState, error: Option<String> },
    /// The job has not ended within the time given.
    #[error("job {id} has not ended within {limit:?}")]
    StillRunning { id: JobId, limit: Duration },
}

fn because(error: &Option<String>) -> String {
    error.as_ref().map(|text| format!(": {text}")).unwrap_or_default()
}

/// One fault is the message itself.
fn listed(details: &[FieldError]) -> String {
    if details.len() < 2 {
        return String::new();
    }
    details.iter().map(|fault| format!("\n  {}: {}", fault.path, fault.message)).collect()
}

/// Why a handler did not do its job, and what is to become of the job.
///
/// Every `std` error turns into one by `?`, and is tried again. It is no `std` error itself, as that would forbid the `?`.
pub struct JobError {
    message: String,
    retryable: bool,
    retry_after: Option<Duration>,
}

/// A message is cut here: an error is for people, not for dumps.
const LONGEST_MESSAGE_BYTES: usize = 16 * 1024;

impl JobError {
    /// To be tried again while tries are left.
    pub fn retry(why: impl fmt::Display) -> JobError {
        JobError { message: shortened(why.to_string()), retryable: true, retry_after: None }
    }

    /// Not to be tried again: it would fail the same way.
    pub fn fail(why: impl fmt::Display) -> JobError {
        JobError { retryable: false, ..JobError::retry(why) }
    }

    /// To be given back by a handler that stops because it was told to.
    pub fn cancelled() -> JobError {
        JobError::retry("stopped because it was told to")
    }

    /// The next try not before this time has passed. Goes before the delay of the job's own policy.
    #[must_use]
    pub fn after(self, delay: Duration) -> JobError {
        JobError { retryable: true, retry_after: Some(delay), ..self }
    }

    /// The same, told with what was being done: `context: message`.
    #[must_use]
    pub fn context(self, context: impl fmt::Display) -> JobError {
        JobError { message: shortened(format!("{context}: {}", self.message)), ..self }
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn is_retryable(&self) -> bool {
        self.retryable
    }

    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl<E: std::error::Error> From<E> for JobError {
    fn from(error: E) -> JobError {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Many errors already tell their cause.
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            cause = error.source();
        }
        JobError::retry(message)
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

fn shortened(mut message: String) -> String {
    if message.len() > LONGEST_MESSAGE_BYTES {
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE_BYTES));
        message.push_str(" …");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(text: &str) -> Result<u32, JobError> {
        Ok(text.parse::<u32>()?)
    }

    #[test]
    fn any_error_becomes_one_that_is_tried_again() {
        let error = reads("x").expect_err("no number");
        assert!(error.is_retryable());
        assert_eq!(error.message(), "invalid digit found in string");
    }

    #[test]
    fn the_causes_of_an_error_are_told_once_each() {
        let unreachable = Error::Unreachable { url: "http://here".into(), source: "refused".into() };
        assert_eq!(JobError::from(unreachable).message(), "cannot reach http://here: refused");
    }

    #[test]
    fn a_delay_means_another_try() {
        let error = JobError::fail("busy").after(Duration::from_secs(5)).context("sending");
        assert_eq!(format!("{error:?}"), r#"retry("sending: busy", after 5s)"#);
        assert!(!JobError::fail("no such address").is_retryable());
    }

    #[test]
    fn an_endless_message_is_cut_between_characters() {
        let error = JobError::retry("ä".repeat(20_000));
        assert!(error.message().len() < LONGEST_MESSAGE_BYTES + 10 && error.message().ends_with("ä …"));
    }
}
