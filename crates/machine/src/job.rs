//! Jobs as actions: which fields they may have, and the job that a request becomes.

use faena_domain::{
    AddressRule, FieldError, JobLimits, NewJob,
    parse::{JobParser, ParseError, schema},
};
use serde_json::{Map, Value, json};

use crate::task::JobRequest;

/// Fields of a job that an action cannot set: Faena sets them, or a value that is fixed in the machine makes no sense.
const NOT_OPTIONS: [&str; 9] = [
    "type",
    "name",
    "payload",
    "correlationId",
    "uniqueKey",
    "idempotencyKey",
    "dependsOn",
    "scheduledAt",
    "expiresAt",
];

impl JobRequest {
    /// Returns the job, or what is wrong with it.
    pub fn job(&self, correlation: &str) -> Result<NewJob, Vec<FieldError>> {
        let mut body = self.options.clone();
        body.insert("type".into(), json!(self.job_type));
        body.insert("name".into(), json!(self.name));
        body.insert("payload".into(), self.payload.clone());
        body.insert("correlationId".into(), json!(correlation));
        parse(body)
    }
}

/// Returns the JSON Schema of the options of a job in a machine.
pub(crate) fn options_schema() -> Value {
    let mut job = schema::job(&JobLimits::default());
    let mut properties = job["properties"].take();
    if let Some(properties) = properties.as_object_mut() {
        properties.retain(|name, _| !NOT_OPTIONS.contains(&name.as_str()));
        properties["priority"]["description"] = json!("Order among the jobs of a queue.");
    }
    json!({
        "type": "object",
        "description": "Fields of the job, as in a request that submits one.",
        "properties": properties,
        "additionalProperties": false,
    })
}

/// Returns what is wrong with the type and the options of a job, before any payload is known.
pub(crate) fn check(job_type: &str, options: &Map<String, Value>) -> Vec<FieldError> {
    let forbidden = NOT_OPTIONS.iter().filter(|name| options.contains_key(**name));
    let forbidden: Vec<FieldError> =
        forbidden.map(|name| FieldError::new(*name, "cannot be an option of a job in a machine")).collect();
    if !forbidden.is_empty() {
        return forbidden;
    }
    let mut body = options.clone();
    body.insert("type".into(), json!(job_type));
    parse(body).err().unwrap_or_default()
}

fn parse(body: Map<String, Value>) -> Result<NewJob, Vec<FieldError>> {
    let parser = JobParser { limits: JobLimits::default(), addresses: AddressRule::default() };
    parser.parse(Value::Object(body).to_string().as_bytes()).map_err(|error| match error {
        ParseError::Invalid(errors) => errors,
        other => vec![FieldError::new("payload", other.to_string())],
    })
}
