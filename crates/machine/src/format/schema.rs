//! The JSON Schema of the format, for editors.
//!
//! It uses draft 7, which every editor supports. Draft 7 ignores a description beside `$ref`, so references are wrapped in
//! `allOf`.

use serde_json::{Map, Value, json};

use super::{DEFINITION, Key, OBJECTS, Object, Rule, Shape};
use crate::{definition::MAX_RUNNING, job};

/// Returns the JSON Schema of a definition.
///
/// A definition that the schema accepts can still have an error that only [`crate::Definition::parse`] finds, such as a state that no
/// transition leads to.
pub fn schema() -> Value {
    let mut parts: Map<String, Value> = OBJECTS.iter().map(|table| (table.name.to_owned(), object(table))).collect();
    parts.extend(values());
    let mut schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Machine of Faena",
    });
    if let (Some(schema), Value::Object(definition)) = (schema.as_object_mut(), object(&DEFINITION)) {
        schema.extend(definition);
        schema.insert("definitions".into(), Value::Object(parts));
    }
    schema
}

fn object(table: &Object) -> Value {
    let properties: Map<String, Value> = table.keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<&str> = table.keys.iter().filter(|key| key.is_required).map(|key| key.name).collect();
    // An event without any key may be written without braces.
    let kind = if table.name == "event" { json!(["object", "null"]) } else { json!("object") };
    let mut schema = json!({
        "type": kind,
        "description": table.about,
        "properties": properties,
        "additionalProperties": false,
    });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    let requires = |names: &[&str]| -> Vec<Value> { names.iter().map(|name| json!({"required": [name]})).collect() };
    match table.rule {
        Rule::None => {}
        Rule::AnyOf(names) => schema["anyOf"] = json!(requires(names)),
        Rule::OneOf(names) => schema["oneOf"] = json!(requires(names)),
        Rule::Action | Rule::WholeAction => {
            let pairs = [["emit", "job"], ["emit", "llm"], ["job", "llm"]];
            schema["not"] = json!({"anyOf": pairs.map(|pair| json!({"required": pair}))});
            schema["dependencies"] = json!({
                "job": ["name"],
                "name": ["job"],
                "data": {"anyOf": requires(&["emit", "job", "llm"])},
                "options": {"anyOf": requires(&["job", "llm"])},
            });
            if matches!(table.rule, Rule::WholeAction) {
                schema["anyOf"] = json!(requires(&["set", "emit", "job", "llm"]));
            } else {
                schema["dependencies"]["exceeded"] = json!(["loop"]);
            }
        }
        Rule::State => schema["dependencies"] = json!({"ends": ["final"], "states": ["initial"]}),
    }
    schema
}

fn property(key: &Key) -> Value {
    let mut schema = match key.shape {
        Shape::Text => json!({"type": "string"}),
        Shape::Flag => json!({"type": "boolean"}),
        Shape::Count => json!({"type": "integer", "minimum": 1, "maximum": u32::MAX}),
        Shape::Part(name) => json!({"allOf": [part(name)]}),
        Shape::List(name) => json!({"anyOf": [part(name), {"type": "array", "items": part(name)}]}),
        Shape::Named(name) => {
            json!({"type": "object", "propertyNames": part("name"), "additionalProperties": part(name)})
        }
    };
    schema["description"] = json!(key.about);
    schema
}

fn part(name: &str) -> Value {
    json!({"$ref": format!("#/definitions/{name}")})
}

/// Returns the parts that are not maps with known keys.
fn values() -> Map<String, Value> {
    // Anything but spaces and the characters that no name has, because editors support different classes of letters.
    let name = "^[^\\s!-,/:-@\\[-^`{-~]+$";
    let name_without_dot = "^[^\\s!-,./:-@\\[-^`{-~]+$";
    let text = |pattern: &str, about: &str| json!({"type": "string", "pattern": pattern, "description": about});
    let one_of = |values: &[&str], about: &str| json!({"enum": values, "description": about});
    let values = json!({
        "name": text(name, "Letters, digits, `_`, `-` and `.`."),
        "eventName": text(name, "Name of an event that `events` declares."),
        "stateName": text(name, "Name of a state."),
        "counterName": text(name, "Name of a counter that `counters` declares."),
        "groupName": {"type": "string", "description": "Name of a group."},
        "runningTasks": {
            "type": "integer", "minimum": 1, "maximum": MAX_RUNNING,
            "description": "A number of tasks from 1 to 10000.",
        },
        "receiver": {
            "type": "string",
            "description": "A URL that begins with http:// or https://, or a CEL expression that returns one, a list of them, or null for none.",
        },
        "jobName": text(name_without_dot, "Name of a job in this machine, without a dot."),
        "duration": text("^\\s*([0-9]+(ms|s|m|h|d))+\\s*$", "A duration such as 90s, 5m, 1h30m or 7d."),
        "size": {
            "description": "A size such as 64KiB or 2MiB, or a number of bytes; at most 16MiB.",
            "anyOf": [
                {"type": "string", "pattern": "^[0-9]+\\s*(B|KiB|MiB)?\\s*$"},
                {"type": "integer", "minimum": 1, "maximum": 16 << 20},
            ],
        },
        "expression": {
            "description": "An expression in CEL with the variables ctx, event, meta, task and now.",
            "type": ["string", "boolean"],
        },
        "template": {"description": "Any JSON value. Its strings are CEL expressions."},
        "values": {
            "description": "Values by name. Their strings are CEL expressions.",
            "type": "object",
            "additionalProperties": part("template"),
        },
        "jsonSchema": {"description": "A JSON Schema without references to other documents.", "type": ["object", "boolean"]},
        "policy": one_of(&["defer", "ignore", "reject"], "defer: kept, and offered again after each transition. ignore: recorded, without effect. reject: the sender gets an error."),
        "statePolicy": {
            "description": "One policy, or one per event.",
            "anyOf": [part("policy"), {"type": "object", "additionalProperties": part("policy")}],
        },
        "ending": one_of(&["success", "failure", "cancelled"], "How a task ends."),
        "counter": {
            "description": "How often the counted transitions may be taken: a number, or `max` and `exceeded`.",
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": u32::MAX}, part("counterRule")],
        },
        "transition": {
            "description": "The name of a state, or what the event does.",
            "anyOf": [part("stateName"), part("transitionRule")],
        },
        "transitions": {
            "description": "Transitions by the name of an event.",
            "type": "object",
            "additionalProperties": {
                "anyOf": [part("transition"), {"type": "array", "minItems": 1, "items": part("transition")}],
            },
        },
        "jobOptions": job::options_schema(),
    });
    match values {
        Value::Object(values) => values,
        _ => Map::new(),
    }
}
