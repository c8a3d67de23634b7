//! Examples of answers, generated from their schemas, so that they are always valid.

use serde_json::{Map, Value, json};

/// Adds an example to every object.
pub fn add_examples(schemas: &mut Map<String, Value>) {
    let all = schemas.clone();
    for schema in schemas.values_mut().filter(|schema| schema["type"] == "object") {
        schema["examples"] = json!([example(schema, "", &|name| all.get(name))]);
    }
}

fn example<'a>(schema: &Value, name: &str, find: &dyn Fn(&str) -> Option<&'a Value>) -> Value {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let target = reference.rsplit('/').next().and_then(find);
        return target.map_or(Value::Null, |target| example(target, name, find));
    }
    if let Some(value) = schema.get("const").or_else(|| schema["enum"].as_array()?.first()) {
        return value.clone();
    }
    for alternatives in ["oneOf", "anyOf"] {
        if let Some(first) = schema.get(alternatives).and_then(|all| all.get(0)) {
            return example(first, name, find);
        }
    }
    let kind = schema.get("type").map(|kind| kind.as_str().or_else(|| kind.get(0)?.as_str()).unwrap_or_default());
    match kind {
        Some("object") => {
            let fields = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
            fields.map(|(name, field)| (name.clone(), example(field, name, find))).collect()
        }
        Some("array") => {
            let items = schema.get("items").map(|items| example(items, name.trim_end_matches('s'), find));
            json!(items.into_iter().collect::<Vec<_>>())
        }
        Some("integer") => json!(if name == "limit" { 20 } else { 1 }),
        Some("number") => json!(1.5),
        Some("boolean") => json!(true),
        Some("string") => text_example(schema, name),
        _ => json!({}),
    }
}

fn text_example(schema: &Value, name: &str) -> Value {
    if let Some(first) = schema.get("examples").and_then(|all| all.get(0)) {
        return first.clone();
    }
    json!(match (schema.get("format").and_then(Value::as_str), name) {
        (Some("uuid"), _) => "01a1e7b8-1331-768b-9844-23e423e94c9d",
        (Some("date-time"), _) => "2026-11-20T09:00:00.000Z",
        // An entry of `capabilities` is named like its list without the last letter.
        (_, "type" | "jobType" | "name" | "jobName" | "capabilitie") => "email.send",
        (_, "queue" | "queues") => "mail",
        (_, "timezone") => "Europe/Madrid",
        (_, "cronExpression") => "0 9 * * 1-5",
        (_, "correlationId") => "order-7",
        (_, "webhookUrl" | "url") => "https://example.org/hooks",
        (_, "workerId") => "mailer-1",
        (_, "key") => "fna_k7m2p9qx4tbn_…",
        (_, "lookup") => "k7m2p9qx4tbn",
        (_, "actor" | "createdBy" | "changedBy" | "by") => "key ops (ffudmp3b3225)",
        _ => "…",
    })
}
