//! Why a job is where it is, as `GET /api/v1/jobs/:id/why` says it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{JobId, JobState};

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Why {
    pub job_id: JobId,
    pub status: JobState,
    /// The reasons in one line.
    pub summary: String,
    /// What holds it, the most telling first.
    pub reasons: Vec<Reason>,
}

/// One reason: a code for programs, a sentence for people, and the facts behind both.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Reason {
    pub code: String,
    pub message: String,
    #[serde(flatten)]
    pub facts: Map<String, Value>,
}

impl Reason {
    /// `facts` is a JSON object.
    pub fn new(code: &str, message: impl Into<String>, facts: Value) -> Reason {
        let facts = match facts {
            Value::Object(facts) => facts,
            _ => Map::new(),
        };
        Reason { code: code.into(), message: message.into(), facts }
    }
}

impl Why {
    pub fn new(job_id: JobId, status: JobState, reasons: Vec<Reason>) -> Why {
        let summary = reasons.iter().map(|reason| reason.message.as_str()).collect::<Vec<_>>().join("; ");
        Why { job_id, status, summary, reasons }
    }
}
