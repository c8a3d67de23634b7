//! Events in the format that sinks and the event stream share: CloudEvents 1.0 in JSON.

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::Timestamp;

/// Default `source` of events.
pub const SOURCE: &str = "/faena";

/// An event that serialises to the JSON format of CloudEvents, with its data unchanged.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CloudEvent<'a> {
    pub id: Uuid,
    pub source: &'a str,
    pub kind: &'a str,
    /// Id of the job, task, worker or schedule that the event is about.
    pub subject: Uuid,
    pub time: Timestamp,
    pub correlation_id: &'a str,
    /// Number of the event among those of its subject.
    pub sequence: i64,
    pub actor: &'a str,
    pub traceparent: Option<&'a str>,
    /// JSON text.
    pub data: &'a str,
}

impl CloudEvent<'_> {
    pub const CONTENT_TYPE: &'static str = "application/cloudevents+json";

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers and JSON always serialise")
    }
}

impl Serialize for CloudEvent<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("specversion", "1.0")?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("source", self.source)?;
        map.serialize_entry("type", self.kind)?;
        map.serialize_entry("subject", &self.subject)?;
        map.serialize_entry("time", &self.time)?;
        map.serialize_entry("datacontenttype", "application/json")?;
        map.serialize_entry("correlationid", self.correlation_id)?;
        // A string, because an integer of CloudEvents has only 32 bits.
        map.serialize_entry("sequence", &self.sequence.to_string())?;
        map.serialize_entry("actor", self.actor)?;
        if let Some(traceparent) = self.traceparent {
            map.serialize_entry("traceparent", traceparent)?;
        }
        match serde_json::from_str::<&RawValue>(self.data) {
            Ok(data) => map.serialize_entry("data", data)?,
            // Invalid JSON is sent as a string.
            Err(_) => map.serialize_entry("data", self.data)?,
        }
        map.end()
    }
}

/// Returns whether an event type matches `pattern`, in which `*` stands for any text.
pub fn event_type_matches(pattern: &str, kind: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = kind.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    // The leftmost match of each part leaves the most text for the parts after it.
    for part in parts {
        match rest.find(part) {
            Some(start) => rest = &rest[start + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_serialises_as_a_cloud_event_with_its_data_unchanged() {
        let event = CloudEvent {
            id: Uuid::nil(),
            source: SOURCE,
            kind: "job.completed",
            subject: Uuid::max(),
            time: Timestamp::parse("2026-11-15T20:00:00Z").expect("a time"),
            correlation_id: "order \"7\"",
            sequence: 5,
            actor: "worker:a",
            traceparent: None,
            data: r#"{"n":12345678901234567890123}"#,
        };
        assert_eq!(
            event.to_json(),
            concat!(
                r#"{"specversion":"1.0","id":"00000000-0000-0000-0000-000000000000","source":"/faena","type":"job.completed","#,
                r#""subject":"ffffffff-ffff-ffff-ffff-ffffffffffff","time":"2026-11-15T20:00:00.000Z","#,
                r#""datacontenttype":"application/json","correlationid":"order \"7\"","sequence":"5","actor":"worker:a","#,
                r#""data":{"n":12345678901234567890123}}"#
            )
        );
        let traced = CloudEvent { traceparent: Some("00-ab-cd-01"), ..event };
        assert!(traced.to_json().contains(r#""traceparent":"00-ab-cd-01""#));
        assert!(
            CloudEvent { data: "{", ..event }.to_json().ends_with(r#""data":"{"}"#),
            "invalid JSON is sent as a string"
        );
    }

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, kind) in [
            ("*", "job.created"),
            ("job.*", "job.created"),
            ("*.changed", "job.status.changed"),
            ("job.*.changed", "job.status.changed"),
            ("job.created", "job.created"),
            ("j*b*.*ed", "job.created"),
            ("**", ""),
        ] {
            assert!(event_type_matches(pattern, kind), "{pattern} {kind}");
        }
        for (pattern, kind) in [
            ("job.*", "worker.terminated"),
            ("job", "job.created"),
            ("*.created", "job.created.twice"),
            ("job.c*c", "job.c"),
            ("", "job"),
            ("j.b*", "job.created"),
        ] {
            assert!(!event_type_matches(pattern, kind), "{pattern} {kind}");
        }
    }
}
