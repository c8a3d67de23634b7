//! JSON Schemas of the objects that are read field by field, for the OpenAPI document.
//!
//! The parsers report every bad field with its path, which no derived deserializer does, so their schemas are written beside
//! them. Tests of `faena-api` check that the two agree: every property of a schema is accepted, and every accepted body is valid.

use serde_json::{Map, Value, json};

use crate::{ErrorReason, JobLimits, JobState, KeyScope, Priority, RetryPolicy, Timestamp};

const DAY_MS: u64 = 86_400_000;
/// Matches text without control characters.
const PRINTABLE: &str = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$";
/// Matches the name of a group: printable, without commas, and without spaces at its ends.
const GROUP: &str =
    "^[^ ,\\u0000-\\u001f\\u007f-\\u009f]([^,\\u0000-\\u001f\\u007f-\\u009f]*[^ ,\\u0000-\\u001f\\u007f-\\u009f])?$";

/// Builds the schema of a JSON object that accepts no other fields.
#[derive(Default)]
pub struct Object {
    properties: Map<String, Value>,
    required: Vec<&'static str>,
    any_of: Vec<Value>,
    min_properties: usize,
}

impl Object {
    pub fn new() -> Object {
        Object::default()
    }

    pub fn required(mut self, name: &'static str, schema: Value) -> Object {
        self.required.push(name);
        self.properties.insert(name.into(), schema);
        self
    }

    /// Adds a field that may be absent. `null` counts as absent.
    pub fn optional(mut self, name: &str, schema: Value) -> Object {
        self.properties.insert(name.into(), or_null(schema));
        self
    }

    /// Requires at least one of these fields, not `null`.
    pub fn any_of<const N: usize>(mut self, names: [&str; N]) -> Object {
        let present = |name: &str| json!({"required": [name], "properties": {name: {"not": {"type": "null"}}}});
        self.any_of = names.into_iter().map(present).collect();
        self
    }

    /// Requires at least one of these schemas, which need not mention the other fields.
    pub fn one_of_cases(mut self, cases: Vec<Value>) -> Object {
        self.any_of = cases;
        self
    }

    /// Requires that some field is present.
    pub fn not_empty(mut self) -> Object {
        self.min_properties = 1;
        self
    }

    pub fn build(self) -> Value {
        let mut schema = json!({"type": "object", "properties": self.properties, "additionalProperties": false});
        if !self.required.is_empty() {
            schema["required"] = json!(self.required);
        }
        if !self.any_of.is_empty() {
            schema["anyOf"] = json!(self.any_of);
        }
        if self.min_properties > 0 {
            schema["minProperties"] = json!(self.min_properties);
        }
        schema
    }
}

/// Adds `null` to what a schema accepts.
fn or_null(mut schema: Value) -> Value {
    if let Some(alternatives) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        alternatives.push(json!({"type": "null"}));
        return schema;
    }
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.push(Value::Null);
    }
    if let Some(kind) = schema.get("type").cloned() {
        schema["type"] = json!([kind, "null"]);
    }
    schema
}

/// Adds a description.
pub fn about(mut schema: Value, description: &str) -> Value {
    schema["description"] = json!(description);
    schema
}

/// Adds the value that an absent field has.
pub fn with_default(mut schema: Value, default: impl Into<Value>) -> Value {
    schema["default"] = default.into();
    schema
}

/// Describes text of 1 to `max` characters without control characters.
pub fn text(max: usize) -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": max, "pattern": PRINTABLE})
}

pub fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub fn integer(min: u64, max: u64) -> Value {
    json!({"type": "integer", "minimum": min, "maximum": max})
}

pub fn uuid() -> Value {
    json!({"type": "string", "format": "uuid"})
}

/// Describes one of these texts.
pub fn one_of<'a>(values: impl IntoIterator<Item = &'a str>) -> Value {
    json!({"type": "string", "enum": values.into_iter().collect::<Vec<_>>()})
}

pub fn list(items: Value, min: usize, max: usize) -> Value {
    json!({"type": "array", "items": items, "minItems": min, "maxItems": max})
}

/// Describes a JSON object that is stored as it is.
pub fn any_object() -> Value {
    json!({"type": "object", "additionalProperties": true})
}

/// Describes what [`Timestamp::parse`] accepts.
pub fn time() -> Value {
    json!({"anyOf": [
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "date", "description": "Midnight in UTC."},
        {
            "type": "integer",
            "minimum": Timestamp::FIRST_MS,
            "maximum": Timestamp::MAX.as_ms(),
            "description": "Milliseconds since 1970.",
        },
    ]})
}

pub fn priority() -> Value {
    one_of(Priority::ALL.map(Priority::as_str))
}

pub fn job_state() -> Value {
    one_of(JobState::ALL.map(JobState::as_str))
}

pub fn error_reason() -> Value {
    one_of(ErrorReason::ALL.map(ErrorReason::as_str))
}

pub fn webhook_url() -> Value {
    json!({"type": "string", "format": "uri", "pattern": "^https?://", "maxLength": 2_048})
}

/// Adds the fields of [`super::parse_retry_policy`].
pub fn with_retry_policy(object: Object, limits: &JobLimits) -> Object {
    let default = RetryPolicy::default();
    let patterns = list(json!({"type": "string", "minLength": 1, "maxLength": 200}), 1, 50);
    let retry_on = json!({"anyOf": [one_of(["all", "transient"]), patterns]});
    let delays = list(integer(0, 7 * DAY_MS), 0, 100);
    let multiplier = json!({"type": "number", "minimum": 1, "maximum": 100});
    object
        .optional(
            "maxRetries",
            with_default(
                about(integer(0, u64::from(limits.max_retries)), "Retries after the first attempt."),
                default.max_retries,
            ),
        )
        .optional(
            "retryDelay",
            with_default(
                about(integer(100, 3_600_000), "Delay before the first retry, in ms."),
                default.retry_delay_ms,
            ),
        )
        .optional(
            "backoffMultiplier",
            with_default(
                about(multiplier, "Factor by which the delay grows with each retry."),
                default.backoff_multiplier,
            ),
        )
        .optional(
            "maxDelay",
            with_default(about(integer(100, 7 * DAY_MS), "Upper bound of the delay, in ms."), default.max_delay_ms),
        )
        .optional("retryDelays", about(delays, "Explicit delays in ms, instead of the computed ones."))
        .optional(
            "retryOn",
            with_default(
                about(retry_on, "Which errors are retried: all, transient ones, or those that match a pattern."),
                "all",
            ),
        )
}

/// Describes a job outside a batch: what [`super::JobParser::parse`] accepts.
pub fn job(limits: &JobLimits) -> Value {
    let parents = list(uuid(), 0, limits.max_depends_on);
    job_fields(limits).optional("dependsOn", about(parents, "Jobs that must complete first.")).build()
}

/// Describes a batch: what [`super::JobParser::parse_batch`] accepts.
pub fn batch(limits: &JobLimits) -> Value {
    let parents = list(text(255), 0, limits.max_depends_on);
    let job = job_fields(limits)
        .optional("ref", about(text(255), "Name of the job within its batch, for `dependsOn`."))
        .optional("dependsOn", about(parents, "Jobs that must complete first: ids, or `ref` names of this batch."));
    let jobs = about(list(job.build(), 1, limits.max_batch), "All of them are stored, or none.");
    Object::new().required("jobs", jobs).build()
}

fn job_fields(limits: &JobLimits) -> Object {
    let object = Object::new()
        .any_of(["name", "type"])
        .optional(
            "name",
            about(text(255), "Display name. Without `type` it is also the type, and has at most 100 characters."),
        )
        .optional("type", about(text(100), "Type of the job. It selects the workers."))
        .optional(
            "queue",
            with_default(about(text(100), "A queue exists as soon as it is named."), crate::DEFAULT_QUEUE),
        )
        .optional("payload", with_default(about(any_object(), "Input of the handler, stored unchanged."), json!({})))
        .optional("priority", with_default(priority(), Priority::default().as_str()))
        .optional("correlationId", about(text(255), "Default: that of the request, else the id of the job."));
    let jitter = json!({"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": 1}]});
    let on_parent_failure = one_of(["cancel", "run"]);
    with_retry_policy(object, limits)
        .optional("jitter", with_default(about(jitter, "Random part of the delay; `true` is 0.2."), false))
        .optional("timeoutMs", about(integer(1, 30 * DAY_MS), "Time limit of one run. Default: `processing.timeout`."))
        .optional("scheduledAt", about(time(), "Earliest start."))
        .optional(
            "expiresAt",
            about(time(), "The job fails if it has not started by then. Must be later than `scheduledAt`."),
        )
        .optional("webhookUrl", about(webhook_url(), "URL to notify when the job finishes."))
        .optional("idempotencyKey", about(text(255), "A repeated submission with this key returns the existing job."))
        .optional("uniqueKey", about(text(255), "At most one unfinished job has this key."))
        .optional("concurrencyKey", about(text(255), "Jobs with the same key share a concurrency limit."))
        .optional(
            "onParentFailure",
            with_default(about(on_parent_failure, "What happens if a parent does not complete."), "cancel"),
        )
        .optional("tags", about(list(text(100), 0, limits.max_tags), "Labels to search for."))
}

/// Describes the changes of a job that is neither in flight nor finished.
pub fn job_patch(limits: &JobLimits) -> Value {
    Object::new()
        .optional("name", about(text(255), "`null`: the type is the name."))
        .optional("priority", priority())
        .optional("payload", any_object())
        .optional("tags", list(text(100), 0, limits.max_tags))
        .optional("scheduledAt", about(time(), "`null`: as soon as possible."))
        .optional("expiresAt", about(time(), "`null`: never."))
        .optional("maxRetries", integer(0, u64::from(limits.max_retries)))
        .optional("retryDelay", integer(100, 3_600_000))
        .optional("timeoutMs", integer(1, 30 * DAY_MS))
        .optional("webhookUrl", about(webhook_url(), "`null`: none."))
        .not_empty()
        .build()
}

/// Describes the settings of an API key, as `NewApiKey::parse` reads them.
pub fn api_key(_: &JobLimits) -> Value {
    let scopes = about(list(one_of(KeyScope::ALL.map(KeyScope::as_str)), 1, 4), "What the key permits.");
    let mut group = text(100);
    group["pattern"] = json!(GROUP);
    Object::new()
        .required("name", about(text(100), "For lists and the audit log."))
        .required("scopes", scopes)
        .optional(
            "queues",
            about(list(text(100), 1, 100), "Queues that the key is restricted to; not with `admin`. Default: all."),
        )
        .optional(
            "groups",
            about(list(group, 0, 50), "Groups that the key belongs to, for approvals of tasks. Default: none."),
        )
        .optional(
            "withoutPayloads",
            about(
                json!({"type": "boolean"}),
                "Hides payloads, results, data, logs and errors from the key; only with the scope `read` alone. Default: false.",
            ),
        )
        .optional("expiresAt", about(time(), "A time in the future. Default: never."))
        .build()
}

#[cfg(test)]
mod tests {
    use super::{super::JobParser, *};

    #[test]
    fn an_optional_field_may_be_null_and_a_required_one_may_not() {
        let schema = Object::new().required("a", text(3)).optional("b", one_of(["x"])).optional("c", time()).build();
        assert_eq!(schema["properties"]["a"]["type"], "string");
        assert_eq!(schema["properties"]["b"], json!({"type": ["string", "null"], "enum": ["x", null]}));
        assert_eq!(schema["properties"]["c"]["anyOf"][3], json!({"type": "null"}));
        assert_eq!((&schema["required"], &schema["additionalProperties"]), (&json!(["a"]), &json!(false)));
    }

    #[test]
    fn the_defaults_of_a_job_are_those_of_the_parser() {
        let schema = job(&JobLimits::default());
        let mut given = Map::from_iter([("type".to_owned(), json!("a"))]);
        for (name, property) in schema["properties"].as_object().expect("an object") {
            given.extend(property.get("default").map(|default| (name.clone(), default.clone())));
        }
        let parse = |body: Value| JobParser::default().parse(body.to_string().as_bytes()).expect("a valid job");
        let (given, bare) = (parse(Value::Object(given)), parse(json!({"type": "a"})));
        assert_eq!((given.options, given.queue, given.payload), (bare.options, bare.queue, bare.payload));
    }
}
