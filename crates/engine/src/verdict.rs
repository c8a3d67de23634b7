//! What the end of a run means for its job: completed, tried again, failed, cancelled, handed back.

use faena_domain::{ErrorReason, Failure, LogEvent, LogLine, RetryDecision, Timestamp};
use faena_store::RunOutcome;

use crate::in_flight::InFlightJob;

pub fn judge(
    held: &InFlightJob,
    result: Result<Option<String>, Failure>,
    now: Timestamp,
) -> (RunOutcome, Vec<LogLine>) {
    let job = &held.job;
    let failure = match result {
        Ok(result) => {
            let mut lines = Vec::with_capacity(2);
            if job.retry_count > 0 {
                let text = format!("completed after {} retries", job.retry_count);
                lines.push(LogLine::new(now, LogEvent::RetrySuccess, text));
            }
            lines.push(LogLine::new(now, LogEvent::Completed, ""));
            return (RunOutcome::Completed { result }, lines);
        }
        Err(failure) => failure,
    };
    if failure.reason == ErrorReason::Cancelled {
        return match held.cancel_reason() {
            Some(cause) => {
                let line = LogLine::new(now, LogEvent::Cancelled, cause.clone());
                (RunOutcome::Cancelled { cause }, vec![line])
            }
            None => (RunOutcome::HandedBack, vec![LogLine::new(now, LogEvent::HandedBack, failure.message)]),
        };
    }
    let event = if failure.reason == ErrorReason::Timeout { LogEvent::Timeout } else { LogEvent::Failed };
    let line = LogLine::new(now, event, failure.message.clone());
    let random = rand::random::<f64>();
    match job.options.retry.decide(job.retry_count, &failure, random) {
        RetryDecision::RetryAfter { delay_ms } => {
            let due_at = now.plus_ms(i64::try_from(delay_ms).unwrap_or(i64::MAX));
            let text = format!("try {} of {} at {due_at}", job.retry_count + 2, job.options.retry.max_retries + 1);
            let next = LogLine::new(now, LogEvent::RetryScheduled, text);
            (RunOutcome::Retry { due_at, error: failure.message, reason: failure.reason }, vec![line, next])
        }
        RetryDecision::Fail => (RunOutcome::Failed { error: failure.message, reason: failure.reason }, vec![line]),
    }
}
