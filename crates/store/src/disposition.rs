//! Decides what happens to a job whose claim is released. The SQLite and PostgreSQL stores apply the decision.

use faena_domain::{LogEvent, WorkerId};

/// Why a claim is released.
#[derive(Clone, Copy, Debug)]
pub enum ReleaseReason<'a> {
    /// The owner left, or never received the jobs: no attempt is used. `was_starting`: its process had not connected.
    Left { text: &'a str, worker: Option<WorkerId>, was_starting: bool },
    /// The server died. Jobs whose start was recorded use an attempt; the others become ready again.
    Died { delay_ms: i64 },
    /// The worker was lost. It is unknown which jobs it had started, so each job uses an attempt.
    Lost { text: &'a str, worker: WorkerId, was_starting: bool, delay_ms: i64 },
}

/// What happens to a job of a released claim.
#[derive(Clone, PartialEq, Debug)]
pub enum Disposition<'a> {
    Cancelled { cause: &'a str },
    Retry { error: &'a str, delay_ms: i64 },
    Failed { error: &'a str },
    Ready { event: LogEvent, text: &'a str },
}

const DIED: &str = "the server that ran it died";
const DIED_BEFORE_START: &str = "its server died before a start was recorded";

impl<'a> ReleaseReason<'a> {
    /// Returns what happens to a job. `cancel`: the reason of a cancel request, if there is one; the job then does not return to its
    /// queue.
    pub fn disposition(self, cancel: Option<&'a str>, started: bool, has_attempts_left: bool) -> Disposition<'a> {
        if let Some(cause) = cancel {
            return Disposition::Cancelled { cause };
        }
        let (error, delay_ms) = match self {
            ReleaseReason::Left { text, .. } => return Disposition::Ready { event: LogEvent::Released, text },
            ReleaseReason::Died { .. } if !started => {
                return Disposition::Ready { event: LogEvent::Recovered, text: DIED_BEFORE_START };
            }
            ReleaseReason::Died { delay_ms } => (DIED, delay_ms),
            ReleaseReason::Lost { text, delay_ms, .. } => (text, delay_ms),
        };
        if has_attempts_left { Disposition::Retry { error, delay_ms } } else { Disposition::Failed { error } }
    }

    /// Returns whether the job's next start must be recorded before it runs, because it is unknown whether it had
    /// started.
    pub fn must_record_start(self) -> bool {
        matches!(self, ReleaseReason::Died { .. })
    }

    /// Returns whether the guardian releases the claim, not its owner.
    pub fn is_by_guardian(self) -> bool {
        matches!(self, ReleaseReason::Died { .. } | ReleaseReason::Lost { .. })
    }

    /// Returns the log event of the claim: `scheduled` if the worker's process never connected, otherwise `assigned`.
    pub fn claimed_as(self) -> LogEvent {
        match self {
            ReleaseReason::Left { was_starting: true, .. } | ReleaseReason::Lost { was_starting: true, .. } => {
                LogEvent::Scheduled
            }
            _ => LogEvent::Assigned,
        }
    }

    /// Returns the worker that had the jobs, if a worker had them.
    pub fn worker(self) -> Option<uuid::Uuid> {
        match self {
            ReleaseReason::Left { worker, .. } => worker.map(|id| id.0),
            ReleaseReason::Died { .. } => None,
            ReleaseReason::Lost { worker, .. } => Some(worker.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_release_reason_has_its_disposition() {
        let left = ReleaseReason::Left { text: "it stopped", worker: None, was_starting: false };
        let died = ReleaseReason::Died { delay_ms: 5 };
        let lost = ReleaseReason::Lost { text: "gone", worker: WorkerId::new(), was_starting: true, delay_ms: 7 };
        let ready = |event, text| Disposition::Ready { event, text };
        for (reason, started, has_attempts_left, disposition) in [
            (left, true, false, ready(LogEvent::Released, "it stopped")),
            (died, false, false, ready(LogEvent::Recovered, DIED_BEFORE_START)),
            (died, true, true, Disposition::Retry { error: DIED, delay_ms: 5 }),
            (died, true, false, Disposition::Failed { error: DIED }),
            (lost, false, true, Disposition::Retry { error: "gone", delay_ms: 7 }),
            (lost, false, false, Disposition::Failed { error: "gone" }),
        ] {
            assert_eq!(reason.disposition(None, started, has_attempts_left), disposition, "{reason:?}");
            let cancelled = Disposition::Cancelled { cause: "no" };
            assert_eq!(reason.disposition(Some("no"), started, has_attempts_left), cancelled);
        }
    }
}
