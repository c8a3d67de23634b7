//! Decides what the end of a run means for its job: completed, retried, failed, cancelled or released.

use faena_domain::{ErrorReason, Failure, LogDetails, LogEvent, LogLine, RetryDecision, Timestamp};
use faena_store::RunOutcome;

use crate::in_flight::InFlightJob;

pub fn decide_outcome(
    job: &InFlightJob,
    result: Result<Option<String>, Failure>,
    now: Timestamp,
) -> (RunOutcome, Vec<LogLine>) {
    let claimed = &job.claimed;
    let failure = match result {
        Ok(result) => {
            let mut log = Vec::with_capacity(2);
            if claimed.retry_count > 0 {
                let details = LogDetails::Retried { retries: claimed.retry_count };
                log.push(LogLine::new(now, LogEvent::RetrySuccess, details.to_string()));
            }
            log.push(LogLine::new(now, LogEvent::Completed, ""));
            return (RunOutcome::Completed { result }, log);
        }
        Err(failure) => failure,
    };
    if failure.reason == ErrorReason::Cancelled {
        return match job.cancel_reason() {
            Some(cause) => {
                let line = LogLine::new(now, LogEvent::Cancelled, cause.clone());
                (RunOutcome::Cancelled { cause }, vec![line])
            }
            None => (RunOutcome::Released, vec![LogLine::new(now, LogEvent::Released, failure.message)]),
        };
    }
    let event = if failure.reason == ErrorReason::Timeout { LogEvent::Timeout } else { LogEvent::Failed };
    let line = LogLine::new(now, event, shortened(&failure.message));
    let random = rand::random::<f64>();
    match claimed.options.retry.decide(claimed.retry_count, &failure, random) {
        RetryDecision::RetryAfter { delay_ms } => {
            let due_at = now.plus_ms(i64::try_from(delay_ms).unwrap_or(i64::MAX));
            let text = claimed.options.next_attempt_text(claimed.retry_count, due_at);
            let next = LogLine::new(now, LogEvent::RetryScheduled, text);
            (RunOutcome::Retry { due_at, error: failure.message, reason: failure.reason }, vec![line, next])
        }
        RetryDecision::Fail => (RunOutcome::Failed { error: failure.message, reason: failure.reason }, vec![line]),
    }
}

/// Maximum number of bytes of an error in the log. The whole error is stored with the attempt.
const MAX_LOGGED_BYTES: usize = 8 << 10;

/// Returns the beginning of a long error.
fn shortened(error: &str) -> String {
    if error.len() <= MAX_LOGGED_BYTES {
        return error.to_owned();
    }
    let end = (0..=MAX_LOGGED_BYTES).rev().find(|at| error.is_char_boundary(*at)).unwrap_or(0);
    format!("{}…", &error[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_the_beginning_of_a_long_error() {
        assert_eq!(shortened("no"), "no");
        let long = shortened(&"é".repeat(MAX_LOGGED_BYTES));
        assert!(long.len() <= MAX_LOGGED_BYTES + 3 && long.ends_with("é…"));
    }
}
