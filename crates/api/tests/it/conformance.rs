//! Compares requests and answers with the OpenAPI document. `App::send` does so for every request that it sends.

use std::sync::LazyLock;

use axum::http::{HeaderMap, Method, StatusCode, Uri};
use faena_domain::JobLimits;
use serde_json::Value;

pub static DOCUMENT: LazyLock<Value> = LazyLock::new(|| faena_api::document(&JobLimits::default()));

/// A request and its answer.
pub struct Exchange<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub request_body: Option<&'a [u8]>,
    pub status: StatusCode,
    pub headers: &'a HeaderMap,
    pub text: &'a str,
}

impl Exchange<'_> {
    /// Panics if the document does not permit the answer, or does not describe a request that the server accepted.
    pub fn check(&self) {
        let Some(operation) = find_operation(self.method, self.uri.path()) else { return };
        let name = format!("{} {}", self.method, self.uri);
        let answer = &operation["responses"][self.status.as_str()];
        assert!(answer.is_object(), "{name}: the status {} is not documented", self.status);
        let answer = resolve(answer);
        self.check_headers(&name, answer);
        self.check_answer(&name, answer);
        if self.status.is_success() {
            self.check_parameters(&name, operation);
            self.check_body(&name, operation);
        }
    }

    fn check_headers(&self, name: &str, answer: &Value) {
        for header in self.headers.keys().map(|header| header.as_str()) {
            let is_ours = header.starts_with("x-") && header != "x-content-type-options";
            let is_documented =
                answer["headers"].as_object().unwrap().keys().any(|known| known.eq_ignore_ascii_case(header));
            let must_be_documented = is_ours || ["location", "retry-after", "www-authenticate"].contains(&header);
            assert!(is_documented || !must_be_documented, "{name}: the header {header} is not documented");
        }
    }

    fn check_answer(&self, name: &str, answer: &'static Value) {
        let Some(content) = answer["content"].as_object() else {
            assert_eq!(self.text, "", "{name}: no body is documented");
            return;
        };
        let given = self.headers["content-type"].to_str().unwrap();
        let known = content.iter().find(|(known, _)| given.split(';').next() == Some(known.as_str()));
        let (kind, content) = known.unwrap_or_else(|| panic!("{name}: the content type {given} is not documented"));
        if kind == "application/json" {
            // A payload is returned unchanged, so it may have a number that no `Value` can hold.
            let body: Value = match serde_json::from_str(self.text) {
                Err(error) if error.to_string().starts_with("number out of range") => return,
                body => body.unwrap(),
            };
            let found = violations(&content["schema"], &body);
            assert!(found.is_empty(), "{name}: the answer {} is not as documented: {found:#?}\n{body:#}", self.status);
        }
    }

    fn check_parameters(&self, name: &str, operation: &'static Value) {
        let known: Vec<&str> =
            operation["parameters"].as_array().unwrap().iter().filter_map(|p| resolve(p)["name"].as_str()).collect();
        for part in self.uri.query().unwrap_or("").split('&').filter(|part| !part.is_empty()) {
            let parameter = part.split('=').next().unwrap();
            assert!(known.contains(&parameter), "{name}: the parameter {parameter} is accepted and not documented");
        }
    }

    fn check_body(&self, name: &str, operation: &'static Value) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let body = self.request_body.and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok());
        if let (true, Some(body)) = (schema.is_object(), body) {
            let found = violations(schema, &body);
            assert!(found.is_empty(), "{name}: the body is accepted and not as documented: {found:#?}\n{body:#}");
        }
    }
}

/// Finds the operation of a request. A fixed segment takes precedence over a variable one.
fn find_operation(method: &Method, path: &str) -> Option<&'static Value> {
    let segments: Vec<&str> = path.trim_end_matches('/').split('/').collect();
    let is_variable = |part: &str| part.starts_with('{');
    let matches = |template: &str| {
        let parts: Vec<&str> = template.split('/').collect();
        parts.len() == segments.len()
            && parts.iter().zip(&segments).all(|(part, given)| is_variable(part) || part == given)
    };
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let found = paths.iter().filter(|(template, _)| matches(template));
    let (_, operations) =
        found.min_by_key(|(template, _)| template.split('/').filter(|part| is_variable(part)).count())?;
    operations.get(method.as_str().to_lowercase())
}

/// Follows a reference into the document.
pub fn resolve(value: &'static Value) -> &'static Value {
    match value.get("$ref").and_then(Value::as_str) {
        Some(reference) => {
            resolve(DOCUMENT.pointer(&reference[1..]).unwrap_or_else(|| panic!("{reference} is missing")))
        }
        None => value,
    }
}

/// Returns where a value differs from a schema of the document. A field that an object does not list counts as a difference.
///
/// Knows the keywords that the document uses, except `pattern`.
pub fn violations(schema: &'static Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(schema, value, "", &mut found);
    found
}

fn check(schema: &'static Value, value: &Value, path: &str, found: &mut Vec<String>) {
    let schema = resolve(schema);
    let mut reject = |message: String| found.push(format!("{path}: {message}"));
    if let Some(kinds) = schema.get("type") {
        let kinds: Vec<&str> = kinds
            .as_array()
            .map_or_else(|| vec![kinds.as_str().unwrap()], |all| all.iter().filter_map(Value::as_str).collect());
        if !kinds.iter().any(|kind| is_of_type(value, kind)) {
            return reject(format!("{value} is not {kinds:?}"));
        }
    }
    if schema.get("enum").is_some_and(|values| !values.as_array().unwrap().contains(value))
        || schema.get("const").is_some_and(|only| only != value)
    {
        reject(format!("{value} is not one of {}", schema.get("enum").unwrap_or(&schema["const"])));
    }
    if let Some(number) = value.as_f64() {
        let (min, max) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
        if min.is_some_and(|min| number < min) || max.is_some_and(|max| number > max) {
            reject(format!("{number} is out of range"));
        }
    }
    if let Some(text) = value.as_str() {
        let length = text.chars().count() as u64;
        if schema["minLength"].as_u64().is_some_and(|min| length < min)
            || schema["maxLength"].as_u64().is_some_and(|max| length > max)
        {
            reject(format!("{text:?} has {length} characters"));
        }
        let is_valid = match schema["format"].as_str() {
            Some("uuid") => text.parse::<uuid::Uuid>().is_ok(),
            Some("date-time") => faena_domain::Timestamp::parse(text).is_some() && text.contains('T'),
            Some("date") => faena_domain::Timestamp::parse(text).is_some() && !text.contains('T'),
            _ => true,
        };
        if !is_valid {
            reject(format!("{text:?} is not a {}", schema["format"]));
        }
    }
    check_parts(schema, value, path, found);
    if schema.get("not").is_some_and(|not| violations(not, value).is_empty()) {
        found.push(format!("{path}: {value} is excluded"));
    }
    for name in ["anyOf", "oneOf"] {
        let alternatives = schema.get(name).map(|all| all.as_array().unwrap());
        if alternatives.is_some_and(|all| all.iter().all(|one| !violations(one, value).is_empty())) {
            found.push(format!("{path}: {value} is none of {name}"));
        }
    }
}

fn check_parts(schema: &'static Value, value: &Value, path: &str, found: &mut Vec<String>) {
    if let (Some(items), Some(values)) = (schema.get("items"), value.as_array()) {
        let count = values.len() as u64;
        if schema["minItems"].as_u64().is_some_and(|min| count < min)
            || schema["maxItems"].as_u64().is_some_and(|max| count > max)
        {
            found.push(format!("{path}: has {count} entries"));
        }
        for (index, value) in values.iter().enumerate() {
            check(items, value, &format!("{path}/{index}"), found);
        }
    }
    let Some(fields) = value.as_object() else { return };
    for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            found.push(format!("{path}: {name} is missing"));
        }
    }
    let Some(properties) = schema.get("properties") else { return };
    for (name, value) in fields {
        match (properties.get(name), schema.get("additionalProperties")) {
            (Some(property), _) => check(property, value, &format!("{path}/{name}"), found),
            (None, Some(Value::Bool(true))) => {}
            (None, Some(other @ Value::Object(_))) => check(other, value, &format!("{path}/{name}"), found),
            // A schema without a type only adds a rule to the fields of another schema.
            (None, None) if schema.get("type").is_none() => {}
            (None, _) => found.push(format!("{path}: {name} is not documented")),
        }
    }
}

fn is_of_type(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        _ => value.is_object(),
    }
}
