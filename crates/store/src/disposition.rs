//! What becomes of a job that is taken from whoever had it in hand. Decided once, written by both engines.

use faena_domain::{LogEvent, WorkerId};

/// Why jobs are taken back.
#[derive(Clone, Copy, Debug)]
pub enum ReleaseReason<'a> {
    /// Somebody took leave, or never heard of them: nothing costs a try.
    Left { text: &'a str, worker: Option<WorkerId> },
    /// Their server died. What had started costs a try; the others were perhaps only standing by.
    Died { delay_ms: i64 },
    /// Their worker was lost. Nobody can tell which of them it had begun, so each costs a try: crashes count.
    Lost { text: &'a str, worker: WorkerId, delay_ms: i64 },
}

/// Where it goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Disposition<'a> {
    Cancelled { cause: &'a str },
    Retry { error: &'a str, delay_ms: i64 },
    Failed { error: &'a str },
    Ready { event: LogEvent, text: &'a str },
}

const DIED: &str = "the server that ran it died";
const DIED_BEFORE: &str = "its server died before it is known to have started";

impl<'a> ReleaseReason<'a> {
    /// `cancel`: somebody wants it cancelled; then it goes back to no line.
    pub fn disposition(self, cancel: Option<&'a str>, started: bool, tries_left: bool) -> Disposition<'a> {
        if let Some(cause) = cancel {
            return Disposition::Cancelled { cause };
        }
        let (error, delay_ms) = match self {
            ReleaseReason::Left { text, .. } => return Disposition::Ready { event: LogEvent::HandedBack, text },
            ReleaseReason::Died { .. } if !started => {
                return Disposition::Ready { event: LogEvent::Recovered, text: DIED_BEFORE };
            }
            ReleaseReason::Died { delay_ms } => (DIED, delay_ms),
            ReleaseReason::Lost { text, delay_ms, .. } => (text, delay_ms),
        };
        if tries_left { Disposition::Retry { error, delay_ms } } else { Disposition::Failed { error } }
    }

    /// Nobody knows whether what goes back had begun: the next one writes its start down first.
    pub fn start_first(self) -> bool {
        matches!(self, ReleaseReason::Died { .. })
    }

    /// In whose hands they were, if that was a worker.
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
    fn every_reason_has_its_fate() {
        let left = ReleaseReason::Left { text: "it stopped", worker: None };
        let died = ReleaseReason::Died { delay_ms: 5 };
        let lost = ReleaseReason::Lost { text: "gone", worker: WorkerId::new(), delay_ms: 7 };
        let back = |event, text| Disposition::Ready { event, text };
        for (why, started, tries_left, disposition) in [
            (left, true, false, back(LogEvent::HandedBack, "it stopped")),
            (died, false, false, back(LogEvent::Recovered, DIED_BEFORE)),
            (died, true, true, Disposition::Retry { error: DIED, delay_ms: 5 }),
            (died, true, false, Disposition::Failed { error: DIED }),
            (lost, false, true, Disposition::Retry { error: "gone", delay_ms: 7 }),
            (lost, false, false, Disposition::Failed { error: "gone" }),
        ] {
            assert_eq!(why.disposition(None, started, tries_left), disposition, "{why:?}");
            assert_eq!(why.disposition(Some("no"), started, tries_left), Disposition::Cancelled { cause: "no" });
        }
    }
}
