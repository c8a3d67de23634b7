//! An event as it travels: CloudEvents 1.0, JSON, structured mode.

use std::borrow::Cow;

use bytes::Bytes;
use faena_brokers::Message;
use faena_domain::Timestamp;
use faena_store::StoredEvent;
use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

const CONTENT_TYPE: &str = "application/cloudevents+json";

#[derive(Serialize)]
struct CloudEvent<'a> {
    specversion: &'static str,
    id: Uuid,
    source: &'a str,
    r#type: &'a str,
    subject: Uuid,
    time: Timestamp,
    datacontenttype: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    correlationid: &'a str,
    /// Within the subject. A text: CloudEvents' whole numbers end at 2³¹.
    sequence: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    actor: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
    data: Data<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Data<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

pub fn message(event: &StoredEvent, source: &str) -> Message {
    let cloud_event = CloudEvent {
        specversion: "1.0",
        id: event.id,
        source,
        r#type: &event.kind,
        subject: event.subject,
        time: event.at,
        datacontenttype: "application/json",
        correlationid: &event.correlation_id,
        sequence: event.sequence.to_string(),
        actor: &event.actor,
        traceparent: event.traceparent.as_deref(),
        // A text is JSON too.
        data: serde_json::from_str(&event.data).map_or(Data::Text(&event.data), Data::Json),
    };
    let body = serde_json::to_vec(&cloud_event).expect("texts, numbers and JSON are JSON");
    Message {
        id: event.id.to_string(),
        kind: event.kind.clone(),
        key: event.subject.to_string(),
        sequence: event.sequence,
        at: event.at,
        correlation_id: Some(event.correlation_id.clone()).filter(|id| !id.is_empty()),
        traceparent: event.traceparent.clone(),
        content_type: Cow::Borrowed(CONTENT_TYPE),
        body: Bytes::from(body),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> StoredEvent {
        StoredEvent {
            place: 7,
            id: Uuid::from_u128(1),
            kind: "job.completed".into(),
            subject: Uuid::from_u128(2),
            sequence: 3,
            at: Timestamp::from_ms(1_700_000_000_123),
            correlation_id: "order-1".into(),
            actor: "worker:w1".into(),
            traceparent: None,
            data: r#"{"status":"COMPLETED"}"#.into(),
        }
    }

    #[test]
    fn an_event_travels_as_a_cloud_event() {
        let message = message(&event(), "/faena");
        assert_eq!(
            std::str::from_utf8(&message.body).expect("text"),
            concat!(
                r#"{"specversion":"1.0","id":"00000000-0000-0000-0000-000000000001","source":"/faena","type":"job.completed","#,
                r#""subject":"00000000-0000-0000-0000-000000000002","time":"2023-11-14T22:13:20.123Z","datacontenttype":"application/json","#,
                r#""correlationid":"order-1","sequence":"3","actor":"worker:w1","data":{"status":"COMPLETED"}}"#
            )
        );
        assert_eq!((message.id, message.content_type), (event().id.to_string(), CONTENT_TYPE.into()));
    }

    #[test]
    fn data_that_is_no_json_travels_as_a_text() {
        let message = message(&StoredEvent { data: "{broken".into(), ..event() }, "/faena");
        let body: serde_json::Value = serde_json::from_slice(&message.body).expect("JSON");
        assert_eq!(body["data"], "{broken");
    }
}
