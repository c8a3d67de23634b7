//! The execution log of a job: what happened, when, and in which run.

use serde::{Deserialize, Serialize};

use crate::{Run, Timestamp};

macro_rules! log_events {
    ($($variant:ident $name:literal),+ $(,)?) => {
        /// Kind of an entry in a job's execution log.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        pub enum LogEvent { $(#[serde(rename = $name)] $variant),+ }

        impl LogEvent {
            pub const ALL: &'static [LogEvent] = &[$(LogEvent::$variant),+];

            pub fn as_str(self) -> &'static str {
                match self { $(LogEvent::$variant => $name),+ }
            }
        }
    };
}

log_events! {
    Created "created",
    Queued "queued",
    Limited "limited",
    Scheduled "scheduled",
    Assigned "assigned",
    Started "started",
    StepCompleted "step_completed",
    Progress "progress",
    Message "message",
    RetryScheduled "retry_scheduled",
    RetrySuccess "retry_success",
    Completed "completed",
    Failed "failed",
    Timeout "timeout",
    Orphaned "orphaned",
    Expired "expired",
    CancelRequested "cancel_requested",
    Cancelled "cancelled",
    HandedBack "handed_back",
    Recovered "recovered",
    StaleReport "stale_report",
    Retried "retried",
    Patched "patched",
    ParentsDone "parents_done",
    WebhookSent "webhook_sent",
    WebhookFailed "webhook_failed",
}

/// An entry as it is stored: `[ms, event]` or `[ms, event, details]`. The run is stored once per chunk of entries.
#[derive(Clone, PartialEq, Debug)]
pub struct LogLine {
    pub at: Timestamp,
    pub event: LogEvent,
    pub details: String,
}

/// An entry as the API shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LogEntry {
    pub timestamp: Timestamp,
    pub event: LogEvent,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
}

#[derive(Deserialize)]
struct Stored(i64, String, #[serde(default)] String);

impl LogLine {
    pub fn new(at: Timestamp, event: LogEvent, details: impl Into<String>) -> LogLine {
        LogLine { at, event, details: details.into() }
    }

    /// Appends this line to a chunk. A chunk is the inside of a JSON array, so that chunks can be concatenated with a comma.
    pub fn append_to(&self, chunk: &mut String) {
        use std::fmt::Write;
        if !chunk.is_empty() {
            chunk.push(',');
        }
        write!(chunk, "[{},\"{}\"", self.at.as_ms(), self.event.as_str()).expect("writing to a String cannot fail");
        if !self.details.is_empty() {
            chunk.push(',');
            chunk.push_str(&serde_json::to_string(&self.details).expect("a string is JSON"));
        }
        chunk.push(']');
    }

    /// Returns the chunk of `lines`.
    pub fn chunk(lines: &[LogLine]) -> String {
        let mut chunk = String::with_capacity(lines.len() * 40);
        for line in lines {
            line.append_to(&mut chunk);
        }
        chunk
    }
}

impl LogEntry {
    /// Returns the times (ms) and names of a chunk's entries, including names that this version does not know.
    ///
    /// Returns `None` if the chunk is damaged.
    pub fn outline(chunk: &str) -> Option<Vec<(i64, String)>> {
        let lines = serde_json::from_str::<Vec<Stored>>(&format!("[{chunk}]")).ok()?;
        Some(lines.into_iter().map(|Stored(ms, name, _)| (ms, name)).collect())
    }

    /// Reads a chunk. Skips entries of an older or newer version that this version does not know.
    pub fn read_chunk(chunk: &str, run: Option<Run>, into: &mut Vec<LogEntry>) {
        let Ok(lines) = serde_json::from_str::<Vec<Stored>>(&format!("[{chunk}]")) else {
            return;
        };
        into.extend(lines.into_iter().filter_map(|Stored(ms, name, details)| {
            let event = LogEvent::ALL.iter().copied().find(|event| event.as_str() == name)?;
            Some(LogEntry { timestamp: Timestamp::from_ms(ms), event, details, run })
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concatenated_chunks_are_read_back_in_order() {
        let at = Timestamp::from_ms(1_000);
        let mut chunk = LogLine::chunk(&[LogLine::new(at, LogEvent::Queued, "")]);
        LogLine::new(at.plus_ms(5), LogEvent::Failed, "said \"no\"\n").append_to(&mut chunk);
        let mut entries = Vec::new();
        LogEntry::read_chunk(&chunk, Some(7), &mut entries);
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].event, entries[0].run), (LogEvent::Queued, Some(7)));
        assert_eq!((entries[1].timestamp, entries[1].details.as_str()), (at.plus_ms(5), "said \"no\"\n"));
    }

    #[test]
    fn a_damaged_chunk_is_read_as_empty() {
        let mut entries = Vec::new();
        for chunk in ["", "[", "[1]", "[1,\"no such event\"]", "nonsense"] {
            LogEntry::read_chunk(chunk, None, &mut entries);
        }
        assert!(entries.is_empty());
    }
}
