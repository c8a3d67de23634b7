//! Hides parts of a JSON answer, as its schema in the OpenAPI document requires.

use serde_json::{Map, Value, json};

use super::visible::is_visible;

/// Formats of texts that are never part of a payload.
const FORMATS: [&str; 3] = ["date-time", "date", "uuid"];

/// The schemas of the OpenAPI document.
pub struct Schemas<'a> {
    document: &'a Value,
}

/// Location of a value: the schema that it belongs to, and the name of its field.
#[derive(Clone, Copy)]
struct Location<'a> {
    schema: &'a str,
    field: &'a str,
}

impl<'a> Schemas<'a> {
    pub fn new(document: &'a Value) -> Schemas<'a> {
        Schemas { document }
    }

    /// Hides everything in an answer that its caller may not see.
    pub fn hide(&self, schema: &Value, value: &mut Value) {
        if !self.show(Location { schema: "", field: "" }, schema, value) {
            *value = Value::Null;
        }
    }

    /// Hides parts of a value. Returns whether the rest of it may be shown.
    fn show(&self, location: Location<'_>, schema: &Value, value: &mut Value) -> bool {
        if value.is_null() || is_visible(location.schema, location.field) {
            return true;
        }
        if let Some((name, named)) = self.resolve(schema) {
            return self.show(Location { schema: name, ..location }, named, value);
        }
        for combined in ["anyOf", "oneOf", "allOf"] {
            if let Some(alternatives) = schema.get(combined).and_then(Value::as_array) {
                return alternatives.iter().any(|alternative| {
                    let mut shown = value.clone();
                    let is_shown = self.show(location, alternative, &mut shown);
                    if is_shown {
                        *value = shown;
                    }
                    is_shown
                });
            }
        }
        match value {
            Value::Bool(_) | Value::Number(_) => {
                ["boolean", "integer", "number"].iter().any(|name| has_type(schema, name)) || is_constant(schema, value)
            }
            Value::String(_) => {
                let format = schema.get("format").and_then(Value::as_str);
                format.is_some_and(|format| FORMATS.contains(&format)) || is_constant(schema, value)
            }
            Value::Array(items) => {
                schema.get("items").is_some_and(|schema| items.iter_mut().all(|item| self.show(location, schema, item)))
            }
            Value::Object(fields) => match schema.get("properties").and_then(Value::as_object) {
                Some(properties) => {
                    self.hide_fields(schema, location, properties, fields);
                    true
                }
                None => false,
            },
            Value::Null => true,
        }
    }

    fn hide_fields(
        &self,
        schema: &Value,
        location: Location<'_>,
        properties: &Map<String, Value>,
        fields: &mut Map<String, Value>,
    ) {
        // A schema that is not named in the document has a title.
        let owner = schema.get("title").and_then(Value::as_str).unwrap_or(location.schema);
        let mut hidden = Vec::new();
        fields.retain(|name, value| {
            let Some(property) = properties.get(name) else {
                hidden.push(name.clone());
                return false;
            };
            if !self.show(Location { schema: owner, field: name }, property, value) {
                *value = self.empty(property);
                hidden.push(name.clone());
            }
            true
        });
        if !hidden.is_empty() {
            hidden.sort();
            fields.insert("hidden".into(), json!(hidden));
        }
    }

    /// Returns the value that replaces a hidden one: `null`, or an empty one of the type that the schema requires.
    fn empty(&self, schema: &Value) -> Value {
        match self.resolve(schema) {
            Some((_, named)) => self.empty(named),
            None if has_type(schema, "null") => Value::Null,
            None if has_type(schema, "string") => json!(""),
            None if has_type(schema, "array") => json!([]),
            None if has_type(schema, "object") => json!({}),
            None => Value::Null,
        }
    }

    /// Returns the schema that another one refers to, with its name.
    fn resolve(&self, schema: &Value) -> Option<(&'a str, &'a Value)> {
        let name = schema.get("$ref")?.as_str()?.strip_prefix("#/components/schemas/")?;
        let (name, named) = self.document["components"]["schemas"].as_object()?.get_key_value(name)?;
        Some((name, named))
    }
}

/// Adds `hidden` to the schemas of objects in which fields can be hidden.
pub fn document_hidden_fields(schemas: &mut Map<String, Value>) {
    for (name, schema) in schemas.iter_mut() {
        let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else { continue };
        let can_hide = properties.iter().any(|(field, schema)| !is_visible(name, field) && can_be_hidden(schema));
        if can_hide {
            properties.insert("hidden".into(), hidden_fields());
        }
    }
}

/// Returns the schema of `hidden`.
pub fn hidden_fields() -> Value {
    json!({
        "type": "array",
        "items": {"type": "string"},
        "description": "Fields that the API key may not see; they are empty. Only for keys without payloads.",
    })
}

/// Returns whether a field with this schema is hidden as a whole, if it is not listed as visible.
fn can_be_hidden(schema: &Value) -> bool {
    if let Some(items) = schema.get("items") {
        return can_be_hidden(items);
    }
    let is_text = has_type(schema, "string");
    let format = schema.get("format").and_then(Value::as_str);
    let has_format = format.is_some_and(|format| FORMATS.contains(&format));
    let is_known = ["$ref", "anyOf", "oneOf", "allOf", "const", "enum", "properties"]
        .iter()
        .any(|keyword| schema.get(keyword).is_some());
    let is_number = ["boolean", "integer", "number"].iter().any(|name| has_type(schema, name));
    !(is_known || is_number || is_text && has_format)
}

fn has_type(schema: &Value, name: &str) -> bool {
    match schema.get("type") {
        Some(Value::String(found)) => found == name,
        Some(Value::Array(types)) => types.iter().any(|found| found == name),
        _ => false,
    }
}

/// Returns whether the schema itself lists the value.
fn is_constant(schema: &Value, value: &Value) -> bool {
    schema.get("const") == Some(value)
        || schema.get("enum").and_then(Value::as_array).is_some_and(|values| values.contains(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(schema: Value, mut value: Value) -> Value {
        let document = json!({"components": {"schemas": {
            "Job": {"type": "object", "properties": {
                "id": {"type": "string", "format": "uuid"},
                "queue": {"type": "string"},
                "payload": {"type": "object", "additionalProperties": true},
                "result": true,
                "error": {"type": ["string", "null"]},
                "count": {"type": "integer"},
                "state": {"enum": ["QUEUED"]},
                "steps": {"type": "array", "items": {"$ref": "#/components/schemas/Step"}},
                "last": {"anyOf": [{"$ref": "#/components/schemas/Step"}, {"type": "null"}]},
                "lines": {"type": "array", "items": {"type": "string"}},
            }},
            "Step": {"type": "object", "properties": {"name": {"type": "string"}, "result": {}}},
        }}});
        Schemas::new(&document).hide(&schema, &mut value);
        value
    }

    fn job() -> Value {
        json!({"$ref": "#/components/schemas/Job"})
    }

    #[test]
    fn texts_and_values_of_any_form_are_hidden_and_listed() {
        let value = json!({
            "id": "01a1e7b8-1331-768b-9844-23e423e94c9d", "queue": "mail", "count": 3, "state": "QUEUED",
            "payload": {"id": "x"}, "result": 7, "error": "no such user", "lines": ["a"],
        });
        let expected = json!({
            "id": "01a1e7b8-1331-768b-9844-23e423e94c9d", "queue": "mail", "count": 3, "state": "QUEUED",
            "payload": {}, "result": null, "error": null, "lines": [], "hidden": ["error", "lines", "payload", "result"],
        });
        assert_eq!(hidden(job(), value), expected);
    }

    #[test]
    fn fields_of_nested_objects_are_hidden_in_place() {
        let value = json!({"steps": [{"name": "a", "result": {"x": 1}}], "last": {"name": "b", "result": "y"}});
        let step = |name: &str| json!({"name": name, "result": null, "hidden": ["result"]});
        assert_eq!(hidden(job(), value), json!({"steps": [step("a")], "last": step("b")}));
    }

    #[test]
    fn fields_that_the_schema_does_not_have_are_removed() {
        assert_eq!(hidden(job(), json!({"new": 1})), json!({"hidden": ["new"]}));
        assert_eq!(hidden(Value::Null, json!({"id": 1})), Value::Null, "an answer without a schema");
        assert_eq!(hidden(json!({"type": "object"}), json!({"id": 1})), Value::Null);
    }

    #[test]
    fn an_empty_value_is_not_listed_as_hidden() {
        assert_eq!(hidden(job(), json!({"result": null, "error": null})), json!({"result": null, "error": null}));
    }
}
