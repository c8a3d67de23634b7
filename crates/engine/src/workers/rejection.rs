//! Rejections of worker messages. A rejected message changes nothing.

use faena_domain::{ErrorCode, Run};

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejection {
    pub code: ErrorCode,
    pub message: String,
}

impl Rejection {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Rejection {
        Rejection { code, message: message.into() }
    }

    pub(crate) fn stale(run: Run) -> Rejection {
        Rejection::new(ErrorCode::StaleRun, format!("run {run} of this job has ended; nothing was changed"))
    }

    pub(crate) fn unavailable() -> Rejection {
        Rejection::new(ErrorCode::Unavailable, "the database is not available; send the report again")
    }
}
