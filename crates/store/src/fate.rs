//! What becomes of a job that is taken from whoever had it in hand. Decided once, written by both engines.

use faena_domain::{LogEvent, WorkerId};

/// Why jobs are taken back.
#[derive(Clone, Copy, Debug)]
pub enum Why<'a> {
    /// Somebody took leave, or never heard of them: nothing costs a try.
    Left { text: &'a str, worker: Option<WorkerId> },
    /// Their server died. What had started costs a try; the others were perhaps only standing by.
    Died { delay_ms: i64 },
    /// Their worker was lost. Nobody can tell which of them it had begun, so each costs a try: crashes count.
    Lost { text: &'a str, worker: WorkerId, delay_ms: i64 },
}

/// Where it goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Fate<'a> {
    Cancelled { cause: &'a str },
    Retry { error: &'a str, delay_ms: i64 },
    Failed { error: &'a str },
    Ready { event: LogEvent, text: &'a str },
}

const DIED: &str = "the server that ran it died";
const DIED_BEFORE: &str = "its server died before it is known to have started";

impl<'a> Why<'a> {
    /// `cancel`: somebody wants it cancelled; then it goes back to no line.
    pub fn fate(self, cancel: Option<&'a str>, started: bool, tries_left: bool) -> Fate<'a> {
        if let Some(cause) = cancel {
            return Fate::Cancelled { cause };
        }
        let (error, delay_ms) = match self {
            Why::Left { text, .. } => return Fate::Ready { event: LogEvent::HandedBack, text },
            Why::Died { .. } if !started => return Fate::Ready { event: LogEvent::Recovered, text: DIED_BEFORE },
            Why::Died { delay_ms } => (DIED, delay_ms),
            Why::Lost { text, delay_ms, .. } => (text, delay_ms),
        };
        if tries_left { Fate::Retry { error, delay_ms } } else { Fate::Failed { error } }
    }

    /// Nobody knows whether what goes back had begun: the next one writes its start down first.
    pub fn start_first(self) -> bool {
        matches!(self, Why::Died { .. })
    }

    /// In whose hands they were, if that was a worker.
    pub fn worker(self) -> Option<uuid::Uuid> {
        match self {
            Why::Left { worker, .. } => worker.map(|id| id.0),
            Why::Died { .. } => None,
            Why::Lost { worker, .. } => Some(worker.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_fate() {
        let left = Why::Left { text: "it stopped", worker: None };
        let died = Why::Died { delay_ms: 5 };
        let lost = Why::Lost { text: "gone", worker: WorkerId::new(), delay_ms: 7 };
        let back = |event, text| Fate::Ready { event, text };
        for (why, started, tries_left, fate) in [
            (left, true, false, back(LogEvent::HandedBack, "it stopped")),
            (died, false, false, back(LogEvent::Recovered, DIED_BEFORE)),
            (died, true, true, Fate::Retry { error: DIED, delay_ms: 5 }),
            (died, true, false, Fate::Failed { error: DIED }),
            (lost, false, true, Fate::Retry { error: "gone", delay_ms: 7 }),
            (lost, false, false, Fate::Failed { error: "gone" }),
        ] {
            assert_eq!(why.fate(None, started, tries_left), fate, "{why:?}");
            assert_eq!(why.fate(Some("no"), started, tries_left), Fate::Cancelled { cause: "no" });
        }
    }
}
