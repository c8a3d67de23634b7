//! Details that the server writes into logs of jobs and into traces.
//!
//! Logs store details as English text, because workers write details too. This module writes the details of the server
//! that have a fixed form and parses them again, so that the dashboard can show them in another language. A test parses
//! every kind of details.

use std::fmt;

use crate::{JobState, Timestamp};

/// Details of a log entry or of an entry of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogDetails<'a> {
    /// Which worker received the job.
    Assigned { worker: &'a str },
    /// Which worker is being started for the job.
    Starting { worker: &'a str },
    /// How long the completed run took.
    Took { ms: i64 },
    /// How many retries the job needed.
    Retried { retries: u32 },
    /// When the next attempt starts. Attempts count from 1.
    NextAttempt { attempt: u32, attempts: u32, at: Timestamp },
    /// Which limit of concurrent jobs is reached. The scope is a word for its kind, a space and its name.
    Limited { scope: &'a str, running: u64, max: u64 },
    /// Which limit of starts per period is reached.
    LimitedByRate { scope: &'a str, rate: &'a str },
    /// An attempt to deliver a webhook, in the log of its job.
    Webhook { url: &'a str, outcome: &'a str, attempt: u32, attempts: u32, next: AfterAttempt },
    /// Why a dependent was cancelled. A parent that was deleted has no state.
    ParentEnded { parent: &'a str, state: Option<JobState> },
    /// A caller cancelled the job without a reason.
    CancelledByRequest,
    /// An attempt to deliver a webhook, in a trace. The outcome is an HTTP status or an error.
    Delivery { attempt: u32, outcome: DeliveryOutcome<'a>, took_ms: u64 },
    /// The state of a webhook in lower case and its receiver, in a trace. A webhook about a job has no event.
    Receiver { event: Option<&'a str>, state: &'a str, url: &'a str },
    /// How many approvals a task has.
    Approvals { given: u64, needed: u64 },
}

/// What follows an attempt to deliver a webhook.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterAttempt {
    Delivered { took_ms: u64 },
    Again { at: Timestamp },
    Abandoned,
}

/// Outcome of an attempt to deliver a webhook: the HTTP status of the answer, or an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeliveryOutcome<'a> {
    Status(u16),
    Error(&'a str),
}

impl fmt::Display for LogDetails<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LogDetails::Assigned { worker } => write!(f, "to worker {worker}"),
            LogDetails::Starting { worker } => write!(f, "worker {worker} is being started"),
            LogDetails::Took { ms } => write!(f, "after {ms} ms"),
            LogDetails::Retried { retries: 1 } => f.write_str("completed after 1 retry"),
            LogDetails::Retried { retries } => write!(f, "completed after {retries} retries"),
            LogDetails::NextAttempt { attempt, attempts, at } => write!(f, "attempt {attempt} of {attempts} at {at}"),
            LogDetails::Limited { scope, running, max } => write!(f, "{scope}: {running} of {max} running"),
            LogDetails::LimitedByRate { scope, rate } => write!(f, "{scope}: rate of {rate}"),
            LogDetails::Webhook { url, outcome, attempt, attempts, next } => {
                let count = format_args!("attempt {attempt} of {attempts}");
                match next {
                    AfterAttempt::Delivered { took_ms } => write!(f, "{url}: {outcome} in {took_ms} ms, {count}"),
                    AfterAttempt::Again { at } => write!(f, "{url}: {outcome}, {count}; again at {at}"),
                    AfterAttempt::Abandoned => write!(f, "{url}: {outcome}, {count}; abandoned"),
                }
            }
            LogDetails::ParentEnded { parent, state: Some(state) } => {
                write!(f, "it depends on job {parent}, which is {state}")
            }
            LogDetails::ParentEnded { parent, state: None } => {
                write!(f, "it depends on job {parent}, which was deleted")
            }
            LogDetails::CancelledByRequest => f.write_str("cancelled by request"),
            LogDetails::Delivery { attempt, outcome, took_ms } => match outcome {
                DeliveryOutcome::Status(status) => write!(f, "attempt {attempt}: answered {status} after {took_ms} ms"),
                DeliveryOutcome::Error(error) => write!(f, "attempt {attempt}: {error} after {took_ms} ms"),
            },
            LogDetails::Receiver { event: Some(event), state, url } => write!(f, "{event}, {state} to {url}"),
            LogDetails::Receiver { event: None, state, url } => write!(f, "{state} to {url}"),
            LogDetails::Approvals { given, needed } => write!(f, "approved: {given} of {needed}"),
        }
    }
}

impl<'a> LogDetails<'a> {
    /// Reads the details of a log entry. Returns `None` if the server does not write such details for this event.
    pub fn of_log(event: &str, text: &'a str) -> Option<LogDetails<'a>> {
        match event {
            "assigned" => Some(LogDetails::Assigned { worker: text.strip_prefix("to worker ")? }),
            "scheduled" => {
                let worker = text.strip_prefix("worker ")?.strip_suffix(" is being started")?;
                Some(LogDetails::Starting { worker })
            }
            "completed" => Some(LogDetails::Took { ms: milliseconds(text.strip_prefix("after ")?)? }),
            "retry_success" => {
                let (retries, word) = text.strip_prefix("completed after ")?.split_once(' ')?;
                matches!(word, "retry" | "retries").then_some(LogDetails::Retried { retries: retries.parse().ok()? })
            }
            "retry_scheduled" => {
                let (count, at) = text.strip_prefix("attempt ")?.split_once(" at ")?;
                let (attempt, attempts) = count_of(count)?;
                Some(LogDetails::NextAttempt { attempt, attempts, at: Timestamp::parse(at)? })
            }
            "limited" => limited(text),
            "webhook_sent" | "webhook_failed" => webhook(text),
            "cancelled" => LogDetails::of_cause(text),
            _ => None,
        }
    }

    /// Reads why a job was cancelled. Returns `None` if a caller gave the reason.
    pub fn of_cause(text: &'a str) -> Option<LogDetails<'a>> {
        if text == "cancelled by request" {
            return Some(LogDetails::CancelledByRequest);
        }
        let (parent, ended) = text.strip_prefix("it depends on job ")?.split_once(", which ")?;
        let state = match ended.strip_prefix("is ") {
            Some(state) => Some(state.parse().ok()?),
            None => (ended == "was deleted").then_some(None)?,
        };
        Some(LogDetails::ParentEnded { parent, state })
    }

    /// Reads the details of a trace's entry about a webhook.
    pub fn of_trace_webhook(text: &'a str) -> Option<LogDetails<'a>> {
        if let Some(rest) = text.strip_prefix("attempt ") {
            let (attempt, rest) = rest.split_once(": ")?;
            let (outcome, took) = rest.rsplit_once(" after ")?;
            let outcome = match outcome.strip_prefix("answered ").and_then(|status| status.parse().ok()) {
                Some(status) => DeliveryOutcome::Status(status),
                None => DeliveryOutcome::Error(outcome),
            };
            let (attempt, took_ms) = (attempt.parse().ok()?, milliseconds(took)?);
            return Some(LogDetails::Delivery { attempt, outcome, took_ms });
        }
        let (what, url) = text.split_once(" to ")?;
        let (event, state) = what.rsplit_once(", ").map_or((None, what), |(event, state)| (Some(event), state));
        Some(LogDetails::Receiver { event, state, url })
    }

    /// Reads the reason of a record about a decision.
    pub fn of_decision(text: &'a str) -> Option<LogDetails<'a>> {
        let (given, needed) = count_of(text.strip_prefix("approved: ")?)?;
        Some(LogDetails::Approvals { given, needed })
    }
}

/// Reads `3 ms`.
fn milliseconds<N: std::str::FromStr>(text: &str) -> Option<N> {
    text.strip_suffix(" ms")?.parse().ok()
}

/// Reads `1 of 4`.
fn count_of<N: std::str::FromStr>(text: &str) -> Option<(N, N)> {
    let (count, total) = text.split_once(" of ")?;
    Some((count.parse().ok()?, total.parse().ok()?))
}

fn limited(text: &str) -> Option<LogDetails<'_>> {
    let (scope, reached) = text.rsplit_once(": ")?;
    if let Some(rate) = reached.strip_prefix("rate of ") {
        return Some(LogDetails::LimitedByRate { scope, rate });
    }
    let (running, max) = count_of(reached.strip_suffix(" running")?)?;
    Some(LogDetails::Limited { scope, running, max })
}

fn webhook(text: &str) -> Option<LogDetails<'_>> {
    let (what, ending) = text.rsplit_once(", attempt ")?;
    let (url, what) = what.split_once(": ")?;
    let (count, rest) = ending.split_once("; ").map_or((ending, None), |(count, rest)| (count, Some(rest)));
    let (outcome, next) = match rest {
        None => {
            let (outcome, took) = what.rsplit_once(" in ")?;
            (outcome, AfterAttempt::Delivered { took_ms: milliseconds(took)? })
        }
        Some("abandoned") => (what, AfterAttempt::Abandoned),
        Some(rest) => (what, AfterAttempt::Again { at: Timestamp::parse(rest.strip_prefix("again at ")?)? }),
    };
    let (attempt, attempts) = count_of(count)?;
    Some(LogDetails::Webhook { url, outcome, attempt, attempts, next })
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Timestamp = Timestamp::from_ms(1_790_000_000_123);

    #[test]
    fn details_of_logs_are_read_as_they_were_written() {
        let webhook =
            |next| LogDetails::Webhook { url: "http://h/a", outcome: "HTTP 503", attempt: 1, attempts: 4, next };
        let parent = |state| LogDetails::ParentEnded { parent: "j1", state };
        for (event, details) in [
            ("assigned", LogDetails::Assigned { worker: "to worker w1" }),
            ("scheduled", LogDetails::Starting { worker: "w1" }),
            ("completed", LogDetails::Took { ms: 12_051 }),
            ("retry_success", LogDetails::Retried { retries: 1 }),
            ("retry_success", LogDetails::Retried { retries: 2 }),
            ("retry_scheduled", LogDetails::NextAttempt { attempt: 2, attempts: 4, at: AT }),
            ("limited", LogDetails::Limited { scope: "queue a: b", running: 2, max: 2 }),
            ("limited", LogDetails::LimitedByRate { scope: "type x", rate: "10 starts per 1 s" }),
            ("cancelled", parent(Some(JobState::Failed))),
            ("cancelled", parent(None)),
            ("cancelled", LogDetails::CancelledByRequest),
            ("webhook_sent", webhook(AfterAttempt::Delivered { took_ms: 3 })),
            ("webhook_failed", webhook(AfterAttempt::Again { at: AT })),
            ("webhook_failed", webhook(AfterAttempt::Abandoned)),
        ] {
            assert_eq!(LogDetails::of_log(event, &details.to_string()), Some(details), "{details}");
        }
    }

    #[test]
    fn details_of_traces_are_read_as_they_were_written() {
        let delivery = |outcome| LogDetails::Delivery { attempt: 1, outcome, took_ms: 3 };
        for details in [
            delivery(DeliveryOutcome::Status(204)),
            delivery(DeliveryOutcome::Error("no answer after 10 s")),
            LogDetails::Receiver { event: Some("task.ended"), state: "delivered", url: "http://h/a" },
            LogDetails::Receiver { event: None, state: "waiting", url: "http://h/a" },
        ] {
            assert_eq!(LogDetails::of_trace_webhook(&details.to_string()), Some(details), "{details}");
        }
        let approvals = LogDetails::Approvals { given: 1, needed: 2 };
        assert_eq!(LogDetails::of_decision(&approvals.to_string()), Some(approvals));
    }

    #[test]
    fn texts_of_another_form_are_not_read() {
        for (event, text) in [
            ("message", "to worker w1"),
            ("completed", "after all"),
            ("cancelled", "wrong customer"),
            ("cancelled", "it depends on job j1, which is late"),
            ("webhook_failed", "http://h/a: the sender was lost; abandoned"),
            ("limited", "queue mail: no limit"),
        ] {
            assert_eq!(LogDetails::of_log(event, text), None, "{text}");
        }
        assert_eq!(LogDetails::of_decision("denied"), None);
    }
}
