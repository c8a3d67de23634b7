//! Errors of the store. Callers handle each variant differently.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use faena_domain::{FieldError, JobId, JobState, Timestamp, error_chain};
use tokio_postgres::error::SqlState;

use crate::postgres::connect::{PREPARED_STATEMENTS_LOST, is_lost_statement};

#[derive(thiserror::Error, Debug)]
pub enum StoreError {
    /// The database does not respond or cannot write. The same call may succeed later. The change may have been
    /// stored if the connection was lost during the commit, or if the caller stopped waiting.
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
    /// A live registration belongs to another caller.
    #[error("the worker is registered; resume it with its session token")]
    WorkerActive {
        /// When it is declared lost unless its worker reconnects. `None` while it is connected.
        deadline: Option<Timestamp>,
    },
    #[error("the request is not valid")]
    Invalid(Vec<FieldError>),
    /// A concurrent transaction was in conflict with this one. The same call can succeed when it is repeated.
    #[error("the database is busy: {0}")]
    Contended(#[source] Cause),
    /// A bug in Faena, or damaged data.
    #[error("{0}")]
    Internal(#[source] Cause),
}

/// SQLSTATE of `faena.require_lanes`: a lane was reclaimed after this node had loaded it.
const LANE_RECLAIMED: &str = "FA001";

impl StoreError {
    pub(crate) fn timed_out(limit: Duration) -> StoreError {
        StoreError::Unavailable(format!("the database did not answer within {} s", limit.as_secs_f32()).into())
    }

    /// Returns whether a repeated call succeeds only after the lanes were loaded again.
    pub(crate) fn is_lane_reclaimed(&self) -> bool {
        matches!(self, StoreError::Contended(cause) if cause.sql_state() == Some(LANE_RECLAIMED))
    }

    /// Returns a copy of the error of a shared transaction, for one of its callers.
    pub(crate) fn clone_for_caller(&self) -> StoreError {
        match self {
            StoreError::Unavailable(cause) => StoreError::Unavailable(cause.clone()),
            StoreError::Internal(cause) => StoreError::Internal(cause.clone()),
            other => StoreError::Internal(other.to_string().into()),
        }
    }
}

/// Reason of a rejected write, as callers see it.
const DISK_FULL: &str = "the disk of the database is full; free some space";

/// Description of a failure, with the database error that caused it. Cloning it shares the database error.
#[derive(Clone, Debug)]
pub struct Cause {
    message: String,
    public: Option<&'static str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl Cause {
    pub fn new(message: impl fmt::Display, source: impl Error + Send + Sync + 'static) -> Cause {
        let message = format!("{message}: {}", error_chain(&source));
        Cause { message, public: None, source: Some(Arc::new(source)) }
    }

    pub fn of(source: impl Error + Send + Sync + 'static) -> Cause {
        Cause { message: error_chain(&source), public: None, source: Some(Arc::new(source)) }
    }

    /// Returns the SQLSTATE of an error of PostgreSQL.
    fn sql_state(&self) -> Option<&str> {
        let error = self.source.as_ref()?.downcast_ref::<tokio_postgres::Error>()?;
        error.code().map(SqlState::code)
    }

    /// Adds a reason that every caller may see.
    pub(crate) fn with_public_reason(self, reason: &'static str) -> Cause {
        Cause { public: Some(reason), ..self }
    }

    pub(crate) fn disk_full() -> Cause {
        Cause { message: DISK_FULL.to_owned(), public: Some(DISK_FULL), source: None }
    }

    /// Returns the reason if every caller may see it.
    pub fn public_reason(&self) -> Option<&'static str> {
        self.public
    }

    pub(crate) fn is_disk_full(&self) -> bool {
        self.public == Some(DISK_FULL)
    }

    /// Returns whether the disk rejected a write or did not confirm it, so that what was written before may be lost too.
    pub(crate) fn is_storage_failure(&self) -> bool {
        const FATAL: [i32; 6] = [
            rusqlite::ffi::SQLITE_IOERR_WRITE,
            rusqlite::ffi::SQLITE_IOERR_FSYNC,
            rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC,
            rusqlite::ffi::SQLITE_IOERR_TRUNCATE,
            rusqlite::ffi::SQLITE_IOERR_DATA,
            rusqlite::ffi::SQLITE_IOERR_CORRUPTFS,
        ];
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<rusqlite::Error>());
        source.and_then(rusqlite::Error::sqlite_error).is_some_and(|error| FATAL.contains(&error.extended_code))
    }

    /// Returns whether PostgreSQL rejected a write because the server is read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
        source.and_then(tokio_postgres::Error::code) == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
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
        Cause { message, public: None, source: None }
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
        // SQLite needs space for the index of its log too.
        let needs_space =
            error.sqlite_error().map(|error| error.extended_code) == Some(rusqlite::ffi::SQLITE_IOERR_SHMSIZE);
        match error.sqlite_error_code() {
            Some(DiskFull) => StoreError::Unavailable(Cause::disk_full()),
            _ if needs_space => StoreError::Unavailable(Cause::disk_full()),
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
        // (a demoted primary).
        let unavailable = ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class));
        // 40: serialization failure or deadlock, after all retries; 55P03: lock timeout.
        if code.starts_with("40") || code == "55P03" || code == LANE_RECLAIMED {
            StoreError::Contended(Cause::of(error))
        } else if code == "53100" {
            StoreError::Unavailable(Cause::disk_full())
        } else if is_lost_statement(&error) {
            StoreError::Unavailable(Cause::new(PREPARED_STATEMENTS_LOST, error))
        } else if unavailable || code == "25006" {
            StoreError::Unavailable(Cause::of(error))
        } else {
            StoreError::Internal(Cause::new(format!("PostgreSQL {code}"), error))
        }
    }
}
