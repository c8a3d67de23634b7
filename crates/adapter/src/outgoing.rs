//! Events that services send to tasks.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub const PLAN_MADE: &str = "resultado.plan_generado";
pub const CHANGE_MADE: &str = "resultado.pr_generada";
pub const TESTED: &str = "resultado.integracion_finalizada";
pub const STATE: &str = "resultado.estado_actualizado";
pub const FAILED: &str = "resultado.error";

/// An event for a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outgoing {
    pub task: String,
    pub kind: String,
    /// Identifies the event: it is applied once, however often an event with this id is sent.
    pub trace: String,
    pub payload: Value,
}

impl Outgoing {
    /// Creates the result of a piece of work. Its id is derived from the work, so that a repeated result is a
    /// duplicate.
    pub fn result(task: &str, work: &str, kind: &str, payload: Value) -> Outgoing {
        Outgoing { task: task.into(), kind: kind.into(), trace: derived_id(&[task, work, "result"]), payload }
    }

    /// Creates a heartbeat. `cause` is the question that it answers, if there was one.
    pub fn heartbeat(task: &str, state: Value, cause: Option<&str>) -> Outgoing {
        let trace = match cause {
            Some(question) => derived_id(&[task, question, "state"]),
            None => uuid::Uuid::now_v7().to_string(),
        };
        Outgoing { task: task.into(), kind: STATE.into(), trace, payload: json!({"sessionId": task, "estado": state}) }
    }

    /// Returns the metadata of the envelope.
    pub fn metadata(&self, originator: &str) -> Value {
        let now = faena_domain::Timestamp::now();
        json!({"taskId": self.task, "traceId": self.trace, "timestamp": now, "originator": originator})
    }
}

/// Derives an id in the form of a UUID from the parts.
pub fn derived_id(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_result_has_the_same_id_and_another_round_another() {
        let result = |work: &str| Outgoing::result("t", work, PLAN_MADE, json!({})).trace;
        assert_eq!(result("epoch-2"), result("epoch-2"));
        assert_ne!(result("epoch-2"), result("epoch-5"));
        assert_ne!(derived_id(&["ab", "c"]), derived_id(&["a", "bc"]));
        assert_ne!(Outgoing::heartbeat("t", json!(1), None).trace, Outgoing::heartbeat("t", json!(1), None).trace);
    }
}
