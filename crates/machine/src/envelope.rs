//! The envelope in which services and Faena exchange events of tasks over a broker.

use faena_domain::TaskId;
use serde_json::{Map, Value};

/// The originator of the events that Faena publishes.
pub const ORIGINATOR: &str = "faena";

/// Longest id of an event, in bytes.
const MAX_ID: usize = 200;

/// A message `{"metadata": {"taskId", "traceId", "timestamp", "originator"}, "payload"}`, or a CloudEvent whose data has that form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Envelope {
    /// The type of the CloudEvent.
    pub kind: Option<String>,
    /// The id of the CloudEvent.
    pub message_id: Option<String>,
    /// The task that the event is for. An event that creates a task has none.
    pub task: Option<TaskId>,
    /// The id that its sender gave to the event, by which repeated messages are recognised.
    pub trace_id: Option<String>,
    pub originator: Option<String>,
    pub payload: Value,
}

impl Envelope {
    /// Reads a message.
    ///
    /// # Errors
    /// Returns what is wrong with the message.
    pub fn parse(body: &[u8]) -> Result<Envelope, String> {
        let text = std::str::from_utf8(body).map_err(|_| "the message is not UTF-8".to_owned())?;
        let message: Value = serde_json::from_str(text).map_err(|error| format!("the message is not JSON: {error}"))?;
        let Value::Object(mut message) = message else {
            return Err("the message is not a JSON object".into());
        };
        if !message.contains_key("specversion") {
            return read(message);
        }
        let (kind, message_id) = (text_of(&message, "", "type")?, text_of(&message, "", "id")?);
        match message.remove("data") {
            Some(Value::Object(data)) => Ok(Envelope { kind, message_id, ..read(data)? }),
            _ => Err("data: must be an object with metadata and payload".into()),
        }
    }

    /// Returns whether Faena published the message itself.
    pub fn is_own(&self) -> bool {
        self.originator.as_deref() == Some(ORIGINATOR)
    }
}

fn read(mut message: Map<String, Value>) -> Result<Envelope, String> {
    let payload = message.remove("payload").unwrap_or_else(|| Value::Object(Map::new()));
    let metadata = match message.remove("metadata") {
        Some(Value::Object(metadata)) => metadata,
        Some(_) => return Err("metadata: must be an object".into()),
        None => return Err("metadata: is required; a message has the fields metadata and payload".into()),
    };
    if let Some(field) = message.keys().next() {
        return Err(format!("{}: unknown field; a message has the fields metadata and payload", shorten(field)));
    }
    const FIELDS: [&str; 4] = ["taskId", "traceId", "timestamp", "originator"];
    if let Some(field) = metadata.keys().find(|field| !FIELDS.contains(&field.as_str())) {
        return Err(format!("metadata.{}: unknown field; the fields are {}", shorten(field), FIELDS.join(", ")));
    }
    text_of(&metadata, "metadata.", "timestamp")?;
    let task = text_of(&metadata, "metadata.", "taskId")?;
    let task = task.map(|id| id.parse().map_err(|_| "metadata.taskId: must be a UUID".to_owned())).transpose()?;
    let trace_id = text_of(&metadata, "metadata.", "traceId")?;
    if trace_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > MAX_ID || id.contains(char::is_control)) {
        return Err(format!("metadata.traceId: must be a string of 1 to {MAX_ID} bytes without control characters"));
    }
    let originator = text_of(&metadata, "metadata.", "originator")?;
    Ok(Envelope { kind: None, message_id: None, task, trace_id, originator, payload })
}

fn text_of(fields: &Map<String, Value>, path: &str, name: &str) -> Result<Option<String>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("{path}{name}: must be a string")),
    }
}

/// Returns the beginning of a name for an error message.
fn shorten(name: &str) -> String {
    name.chars().filter(|character| !character.is_control()).take(50).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(message: &Value) -> Result<Envelope, String> {
        Envelope::parse(message.to_string().as_bytes())
    }

    #[test]
    fn an_envelope_is_read_alone_and_as_the_data_of_a_cloud_event() {
        let task = TaskId::new();
        let metadata =
            json!({"taskId": task, "traceId": "t1", "timestamp": "2026-01-31T12:00:00Z", "originator": "smith"});
        let bare = json!({"metadata": metadata, "payload": {"planId": "p"}});
        let read = parse(&bare).expect("good");
        let expected = Envelope {
            kind: None,
            message_id: None,
            task: Some(task),
            trace_id: Some("t1".into()),
            originator: Some("smith".into()),
            payload: json!({"planId": "p"}),
        };
        assert_eq!(read, expected);
        let event = json!({"specversion": "1.0", "id": "e1", "type": "resultado.plan_generado", "source": "/smith", "data": bare});
        let kind = Some("resultado.plan_generado".into());
        assert_eq!(parse(&event).expect("good"), Envelope { kind, message_id: Some("e1".into()), ..expected });
        let least = parse(&json!({"metadata": {}})).expect("good");
        assert_eq!((least.task, least.payload), (None, json!({})));
        let own = parse(&json!({"metadata": {"originator": "faena"}})).expect("good");
        assert!(own.is_own() && !read.is_own());
    }

    #[test]
    fn a_message_that_is_not_an_envelope_is_rejected_with_the_reason() {
        let cases = [
            (json!(7), "the message is not a JSON object"),
            (json!({"payload": {}}), "metadata: is required"),
            (json!({"metadata": "x"}), "metadata: must be an object"),
            (json!({"metadata": {}, "body": 1}), "body: unknown field"),
            (json!({"metadata": {"taskID": "x"}}), "metadata.taskID: unknown field; the fields are taskId"),
            (json!({"metadata": {"taskId": "x"}}), "metadata.taskId: must be a UUID"),
            (json!({"metadata": {"taskId": 7}}), "metadata.taskId: must be a string"),
            (json!({"metadata": {"traceId": ""}}), "metadata.traceId: must be a string of 1 to 200 bytes"),
            (json!({"metadata": {"traceId": "a\u{0}"}}), "without control characters"),
            (json!({"metadata": {"timestamp": 7}}), "metadata.timestamp: must be a string"),
            (json!({"specversion": "1.0", "type": "a"}), "data: must be an object"),
            (json!({"specversion": "1.0", "type": 1, "data": {}}), "type: must be a string"),
        ];
        for (message, reason) in cases {
            let found = parse(&message).expect_err("rejected");
            assert!(found.contains(reason), "{message}: {found}");
        }
        assert_eq!(Envelope::parse(b"\xff").expect_err("rejected"), "the message is not UTF-8");
        assert!(Envelope::parse(b"{").expect_err("rejected").starts_with("the message is not JSON"));
    }
}
