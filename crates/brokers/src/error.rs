//! The error type for an unavailable broker.

use std::{error::Error, fmt, time::Duration};

use crate::BrokerUrl;

/// Why a broker is unavailable. The next call connects again.
///
/// `{}` shows this error alone, `{:#}` appends its causes, each after a colon. Causes are kept as text: an error of a
/// client library may contain the password, and only text can be redacted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct BrokerError {
    message: String,
    source: Option<Box<BrokerError>>,
}

impl BrokerError {
    pub fn new(message: impl Into<String>) -> Self {
        BrokerError { message: message.into(), source: None }
    }

    /// Returns the error of a broker that did not answer in time.
    pub(crate) fn unanswered(url: &BrokerUrl, timeout: Duration) -> Self {
        BrokerError::new(format!("{url} did not answer within {timeout:?}"))
    }

    /// Returns the error of a message whose acknowledgement did not reach the broker.
    pub(crate) fn unacknowledged(cause: &(dyn Error + 'static)) -> Self {
        BrokerError::new("message not acknowledged; the broker redelivers it").with_source(cause)
    }

    /// Adds the cause, including its own causes.
    pub fn with_source(self, source: &(dyn Error + 'static)) -> Self {
        BrokerError { source: Some(Box::new(BrokerError::copy_of(source))), ..self }
    }

    /// Copies an error and its causes, without causes whose text an outer error already shows.
    pub(crate) fn copy_of(error: &(dyn Error + 'static)) -> Self {
        let mut messages = vec![error.to_string()];
        let mut cause = error.source();
        while let Some(error) = cause {
            let message = error.to_string();
            if !messages.iter().any(|outer| outer.contains(&message)) {
                messages.push(message);
            }
            cause = error.source();
        }
        let innermost = BrokerError::new(messages.pop().unwrap_or_default());
        messages
            .into_iter()
            .rev()
            .fold(innermost, |source, message| BrokerError { message, source: Some(Box::new(source)) })
    }

    /// Removes the password of `url` from the message and from every cause.
    pub(crate) fn redact(self, url: &BrokerUrl) -> Self {
        BrokerError {
            message: url.redact(&self.message),
            source: self.source.map(|source| Box::new(source.redact(url))),
        }
    }
}

impl fmt::Display for BrokerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) if f.alternate() => write!(f, ": {source:#}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a failed test must point at its line")]
mod tests {
    use super::*;

    #[test]
    fn causes_are_sources_and_are_shown_on_request() {
        let inner = BrokerError::new("connection refused");
        let error = BrokerError::new("cannot connect").with_source(&inner);
        assert_eq!(error.to_string(), "cannot connect");
        assert_eq!(format!("{error:#}"), "cannot connect: connection refused");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }

    #[test]
    fn a_cause_that_an_outer_error_already_shows_is_left_out() {
        let library_error =
            std::io::Error::other(BrokerError::new("timed out: 5 s").with_source(&BrokerError::new("5 s")));
        assert_eq!(format!("{:#}", BrokerError::new("lost").with_source(&library_error)), "lost: timed out: 5 s");
    }

    #[test]
    fn the_password_is_removed_from_every_cause() {
        let url = BrokerUrl::parse("amqp://user:secret@host").unwrap();
        let inner = BrokerError::new("inner secret").with_source(&BrokerError::new("innermost secret"));
        let error = BrokerError::new("outer secret").with_source(&inner).redact(&url);
        assert_eq!(format!("{error:#}"), "outer ***: inner ***: innermost ***");
    }
}
