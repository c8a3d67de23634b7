//! The explanation of a job's state: `GET /api/v1/jobs/:id/why`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{JobId, JobState};

/// Explanation of why a job is in its state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub job_id: JobId,
    pub status: JobState,
    /// All messages in one line.
    pub summary: String,
    /// Most important first.
    pub reasons: Vec<Reason>,
}

/// One reason: a code for programs, a message for users, and the underlying facts.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Reason {
    pub code: String,
    pub message: String,
    #[serde(flatten)]
    pub facts: Map<String, Value>,
}

impl Reason {
    /// Creates a reason. `facts` is a JSON object.
    pub fn new(code: &str, message: impl Into<String>, facts: Value) -> Reason {
        let facts = match facts {
            Value::Object(facts) => facts,
            _ => Map::new(),
        };
        Reason { code: code.into(), message: message.into(), facts }
    }
}

impl Explanation {
    pub fn new(job_id: JobId, status: JobState, reasons: Vec<Reason>) -> Explanation {
        let summary = reasons.iter().map(|reason| reason.message.as_str()).collect::<Vec<_>>().join("; ");
        Explanation { job_id, status, summary, reasons }
    }
}
