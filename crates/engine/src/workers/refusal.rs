//! Refusals: why a message of a worker changes nothing.

use faena_domain::{ErrorCode, Run};

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
}

impl Refusal {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }

    pub(crate) fn stale(run: Run) -> Refusal {
        Refusal::new(ErrorCode::StaleRun, format!("run {run} no longer has this job; nothing was changed"))
    }

    pub(crate) fn unavailable() -> Refusal {
        Refusal::new(ErrorCode::Unavailable, "the database is not available at the moment; report it again")
    }
}
