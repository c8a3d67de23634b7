//! Operations below `/events` and `/trace`.

use faena_domain::{
    Trace,
    parse::schema::{text, uuid},
};
use schemars::SchemaGenerator;
use serde_json::{Value, json};

use crate::{
    openapi::operation::{Content, Operation, Tag},
    payloads::hidden_fields,
};

/// A CloudEvent in JSON.
pub fn cloud_event(_: &mut SchemaGenerator) -> Value {
    json!({
        "type": "object",
        "title": "CloudEvent",
        "description": "A CloudEvent 1.0 in JSON, or a `gap`: events that were deleted or never stored.",
        "properties": {
            "specversion": {"const": "1.0"},
            "id": {"type": "string"},
            "source": {"type": "string"},
            "type": {"type": "string"},
            "subject": {"type": "string"},
            "time": {"type": "string", "format": "date-time"},
            "datacontenttype": {"const": "application/json"},
            "correlationid": {"type": "string"},
            "sequence": {"type": "string"},
            "actor": {"type": "string"},
            "traceparent": {"type": "string"},
            "data": {"type": "object"},
            "after": {"type": "integer"},
            "first": {"type": "integer"},
            "message": {"type": "string"},
            "hidden": hidden_fields(),
        },
    })
}

pub fn stream() -> Operation {
    let position = json!({"type": "integer", "minimum": 0});
    let types = json!({"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 255}, "maxItems": 32});
    Operation::new(Tag::Events, "watchEvents", "Follow the events of all nodes")
        .about("Server-sent events: CloudEvents in JSON. The id of an event is its position, to resume after it.")
        .query(
            "types",
            types,
            "Types, or patterns such as `job.*`: repeat the parameter, or separate the values with commas.",
        )
        .query("queue", text(255), "Events about this queue.")
        .query("correlationId", text(255), "Events with this correlation id.")
        .query("jobId", uuid(), "Events about this job.")
        .query("taskId", uuid(), "Events about this task.")
        .query("lastEventId", position.clone(), "Resume after this event; 0 for the oldest. Default: from now on.")
        .header("Last-Event-ID", position, "The same as `lastEventId`, as browsers send it; takes precedence.")
        .answer(200, "The stream.", Content::Events(cloud_event))
}

pub fn trace() -> Operation {
    Operation::new(Tag::Events, "getTrace", "Show everything with one correlation id")
        .path("id", text(255), "The correlation id.")
        .ok::<Trace>("The tasks and jobs, and a timeline of what happened to them.")
}
