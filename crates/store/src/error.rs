//! What can go wrong, as far as somebody branches on it.

use faena_domain::{FieldError, JobId, JobState};

#[derive(thiserror::Error, Debug)]
pub enum StoreError {
    /// The database does not answer, or refuses to write. Nothing was changed; the same call may work later.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// Something that the operator must put right before Faena can start.
    #[error("{0}")]
    Setup(String),
    #[error("there is no job {0}")]
    NotFound(JobId),
    #[error("a job that is {from} cannot {wanted}")]
    InvalidTransition { from: JobState, wanted: &'static str },
    #[error("{message}")]
    Conflict { message: String, holder: Option<JobId> },
    #[error("the request is not valid")]
    Invalid(Vec<FieldError>),
    /// Two transactions stood in each other's way; the same call works when it is made again.
    #[error("the database is busy: {0}")]
    Contended(String),
    /// A defect of Faena or of the database's content.
    #[error("{0}")]
    Broken(String),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::*;
        match error.sqlite_error_code() {
            Some(DiskFull) => StoreError::Unavailable("the disk is full; free some space".into()),
            Some(DatabaseBusy | DatabaseLocked | SystemIoFailure | CannotOpen | ReadOnly | PermissionDenied) => {
                StoreError::Unavailable(error.to_string())
            }
            _ => StoreError::Broken(format!("SQLite: {error}")),
        }
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let text = chain(&error);
        match error.code().map(|code| code.code()) {
            // No SQLSTATE: the connection itself failed. 08: connection, 53: out of resources, 57P: shutting down, 25006: the
            // server has become read-only (a demoted primary), 57014: statement timeout, 55P03: lock timeout, 40: conflicts that
            // outlived their retries, 58: I/O.
            None => StoreError::Unavailable(text),
            Some(code) if code.starts_with("40") || code == "55P03" => StoreError::Contended(text),
            Some(code)
                if code.starts_with("08")
                    || code.starts_with("53")
                    || code.starts_with("57")
                    || code.starts_with("58")
                    || code == "25006"
                    || code == "26000" =>
            {
                StoreError::Unavailable(text)
            }
            Some(code) => StoreError::Broken(format!("PostgreSQL {code}: {text}")),
        }
    }
}

/// The error with its causes: the library leaves them out of its text.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}
