//! Errors of the store. Each variant asks the caller for a different reaction.

use std::{error::Error, fmt, sync::Arc};

use faena_domain::{FieldError, JobId, JobState, error_chain};

#[derive(thiserror::Error, Debug)]
pub enum StoreError {
    /// The database does not respond or cannot write. Nothing was changed; the same call may succeed later.
    #[error("the database is not available: {0}")]
    Unavailable(#[source] Cause),
    /// The operator must change something before Faena can start.
    #[error("{0}")]
    Setup(String),
    #[error("there is no job {0}")]
    NotFound(JobId),
    #[error("a job that is {from} cannot {wanted}")]
    InvalidTransition { from: JobState, wanted: &'static str },
    #[error("{message}")]
    Conflict { message: String, existing_job: Option<JobId> },
    #[error("the request is not valid")]
    Invalid(Vec<FieldError>),
    /// Two transactions blocked each other; the same call succeeds when it is repeated.
    #[error("the database is busy: {0}")]
    Contended(#[source] Cause),
    /// A bug in Faena, or damaged data.
    #[error("{0}")]
    Internal(#[source] Cause),
}

impl StoreError {
    /// Returns a copy of the error of a shared transaction, for one of its callers.
    pub(crate) fn clone_for_caller(&self) -> StoreError {
        match self {
            StoreError::Unavailable(cause) => StoreError::Unavailable(cause.clone()),
            StoreError::Internal(cause) => StoreError::Internal(cause.clone()),
            other => StoreError::Internal(other.to_string().into()),
        }
    }
}

/// Description of a failure, with the database error that caused it. Cloning it shares the database error.
#[derive(Clone, Debug)]
pub struct Cause {
    message: String,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl Cause {
    pub fn new(message: impl fmt::Display, source: impl Error + Send + Sync + 'static) -> Cause {
        let message = format!("{message}: {}", error_chain(&source));
        Cause { message, source: Some(Arc::new(source)) }
    }

    pub fn of(source: impl Error + Send + Sync + 'static) -> Cause {
        Cause { message: error_chain(&source), source: Some(Arc::new(source)) }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn Error + 'static))
    }
}

impl From<String> for Cause {
    fn from(message: String) -> Cause {
        Cause { message, source: None }
    }
}

impl From<&str> for Cause {
    fn from(message: &str) -> Cause {
        Cause::from(message.to_owned())
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::*;
        match error.sqlite_error_code() {
            Some(DiskFull) => StoreError::Unavailable("the disk is full; free some space".into()),
            Some(DatabaseBusy | DatabaseLocked | SystemIoFailure | CannotOpen | ReadOnly | PermissionDenied) => {
                StoreError::Unavailable(Cause::of(error))
            }
            _ => StoreError::Internal(Cause::new("SQLite", error)),
        }
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(code) = error.code().map(|code| code.code().to_owned()) else {
            // No SQLSTATE: the connection itself failed.
            return StoreError::Unavailable(Cause::of(error));
        };
        // 08: connection, 53: out of resources, 57: shutdown or statement timeout, 58: I/O, 25006: the server has become read-only
        // (a demoted primary), 26000: unknown prepared statement (a transaction-mode pooler).
        let unavailable = ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class));
        // 40: serialization failure or deadlock, after all retries; 55P03: lock timeout.
        if code.starts_with("40") || code == "55P03" {
            StoreError::Contended(Cause::of(error))
        } else if unavailable || code == "25006" || code == "26000" {
            StoreError::Unavailable(Cause::of(error))
        } else {
            StoreError::Internal(Cause::new(format!("PostgreSQL {code}"), error))
        }
    }
}
