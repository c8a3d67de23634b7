//! Errors of the engine, as far as a caller tells them apart.

use faena_domain::{BulkId, FieldError};
use faena_store::StoreError;

#[derive(thiserror::Error, Debug)]
pub enum EngineError {
    /// The store rejected the call or failed. Its error says whether a later call may succeed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A worker registered with invalid fields.
    #[error("the registration is not valid")]
    InvalidRegistration(Vec<FieldError>),
    /// This server stops and admits no more workers.
    #[error("the server is stopping; connect again in a moment, or to another server")]
    Stopping,
    /// The configuration of an outbox source cannot be used.
    #[error("outbox source \"{name}\" cannot be used: {source}")]
    InvalidSource { name: String, source: StoreError },
    #[error("no loop is called \"{0}\"")]
    UnknownLoop(String),
    /// A round of a loop panicked. The driver catches the panic and runs the loop again.
    #[error("{0}")]
    Panicked(String),
    #[error("bulk action {0} no longer exists")]
    BulkNotFound(BulkId),
}

impl EngineError {
    /// Returns whether the database is away or busy, so that the same call may succeed later.
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            EngineError::Store(StoreError::Unavailable { .. } | StoreError::Contended { .. })
                | EngineError::InvalidSource { source: StoreError::Unavailable { .. }, .. }
        )
    }
}
