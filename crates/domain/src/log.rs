//! The execution log of a job: what happened, when, and in which run.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::{Run, Timestamp};

macro_rules! log_events {
    ($($variant:ident $name:literal),+ $(,)?) => {
        /// Kind of an entry in a job's execution log.
        #[derive(Clone, PartialEq, Eq, Hash, Debug)]
        pub enum LogEvent {
            $($variant,)+
            /// An event that a worker named. [`LogEvent::custom`] checks the name.
            Custom(String),
        }

        impl LogEvent {
            /// The built-in events.
            pub const ALL: &'static [LogEvent] = &[$(LogEvent::$variant),+];

            pub fn as_str(&self) -> &str {
                match self {
                    $(LogEvent::$variant => $name,)+
                    LogEvent::Custom(name) => name,
                }
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
    Released "released",
    Recovered "recovered",
    StaleReport "stale_report",
    Retried "retried",
    Patched "patched",
    ParentsDone "parents_done",
    WebhookSent "webhook_sent",
    WebhookFailed "webhook_failed",
    Dropped "dropped",
}

const MAX_NAME_BYTES: usize = 64;

impl LogEvent {
    /// Returns the event that a worker names.
    ///
    /// # Errors
    /// Returns what is wrong if the name is not 1 to 64 characters of `a-z 0-9 _ .`, or is the name of a built-in event.
    pub fn custom(name: &str) -> Result<LogEvent, String> {
        match LogEvent::parse(name) {
            Some(event @ LogEvent::Custom(_)) => Ok(event),
            Some(_) => Err(format!("\"{name}\" is the name of a built-in event; choose another")),
            None => Err(format!("must be 1 to {MAX_NAME_BYTES} characters of a-z, 0-9, _ and .")),
        }
    }

    /// Returns the event with this name: a built-in one, or one that a worker may name.
    fn parse(name: &str) -> Option<LogEvent> {
        if let Some(known) = LogEvent::ALL.iter().find(|event| event.as_str() == name) {
            return Some(known.clone());
        }
        let is_allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.');
        let is_valid = (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_allowed);
        is_valid.then(|| LogEvent::Custom(name.to_owned()))
    }
}

impl Serialize for LogEvent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl JsonSchema for LogEvent {
    fn schema_name() -> Cow<'static, str> {
        "LogEvent".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let built_in: Vec<&str> = LogEvent::ALL.iter().map(LogEvent::as_str).collect();
        json_schema!({
            "type": "string",
            "pattern": "^[a-z0-9_.]{1,64}$",
            "description": "A built-in event, or one that a worker names. Newer versions may add events.",
            "examples": built_in,
        })
    }
}

impl<'de> Deserialize<'de> for LogEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<LogEvent, D::Error> {
        let name = String::deserialize(deserializer)?;
        LogEvent::parse(&name).ok_or_else(|| D::Error::custom(format!("not the name of an event: \"{name}\"")))
    }
}

/// An entry as it is stored: `[ms, event]` or `[ms, event, details]`. The run is stored once per chunk of entries.
#[derive(Clone, PartialEq, Debug)]
pub struct LogLine {
    pub at: Timestamp,
    pub event: LogEvent,
    pub details: String,
}

/// An entry as the API shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
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

    /// Appends the entries of a chunk to `into`. Skips entries whose event has an invalid name, and damaged chunks.
    pub fn read_chunk(chunk: &str, run: Option<Run>, into: &mut Vec<LogEntry>) {
        let Ok(lines) = serde_json::from_str::<Vec<Stored>>(&format!("[{chunk}]")) else {
            return;
        };
        into.extend(lines.into_iter().filter_map(|Stored(ms, name, details)| {
            Some(LogEntry { timestamp: Timestamp::from_ms(ms), event: LogEvent::parse(&name)?, details, run })
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
        assert_eq!((&entries[0].event, entries[0].run), (&LogEvent::Queued, Some(7)));
        assert_eq!((entries[1].timestamp, entries[1].details.as_str()), (at.plus_ms(5), "said \"no\"\n"));
    }

    #[test]
    fn a_worker_may_name_any_event_that_is_not_built_in() {
        let named = LogEvent::custom("training_started").expect("a valid name");
        let chunk = LogLine::chunk(&[LogLine::new(Timestamp::from_ms(1), named.clone(), "epoch 1")]);
        let mut entries = Vec::new();
        LogEntry::read_chunk(&chunk, None, &mut entries);
        assert_eq!((&entries[0].event, entries[0].details.as_str()), (&named, "epoch 1"));
        let json = serde_json::to_string(&entries[0]).expect("JSON");
        assert_eq!(serde_json::from_str::<LogEntry>(&json).expect("JSON"), entries[0]);
        assert!(LogEvent::ALL.iter().all(|event| LogEvent::custom(event.as_str()).is_err()));
        for name in ["", "Training", "two words", "a\"b", "é", "a-b", &"a".repeat(65)] {
            assert!(LogEvent::custom(name).is_err(), "{name}");
        }
        assert!(LogEvent::custom(&"a".repeat(64)).is_ok());
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
