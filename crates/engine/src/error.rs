//! Errors of the engine that a caller distinguishes.

use std::time::Duration;

use faena_domain::{BulkId, FieldError, Timestamp};
use faena_queue::QueueError;
use faena_store::StoreError;

#[derive(thiserror::Error, Debug)]
pub enum EngineError {
    /// The store rejected the call or failed. Its error says whether a later call may succeed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A worker registered with invalid fields.
    #[error("the registration is not valid")]
    InvalidRegistration(Vec<FieldError>),
    /// A worker with this id is alive, and the caller did not prove that it is this worker.
    #[error("{}", worker_active(worker, *deadline, *silence))]
    WorkerActive {
        worker: String,
        /// When it is declared lost unless it reconnects. `None` while it is connected.
        deadline: Option<Timestamp>,
        /// After this time without a heartbeat it is declared lost.
        silence: Duration,
    },
    /// A call of a polling worker has no session token.
    #[error("worker \"{0}\" must send its session token with every call, in the header X-Session-Token")]
    SessionTokenMissing(String),
    /// A call of a polling worker has the session token of another registration.
    #[error("the session token does not belong to worker \"{0}\"; register to get one")]
    WrongSessionToken(String),
    /// This server is stopping and admits no more workers.
    #[error("the server is stopping; connect again in a moment, or to another server")]
    Stopping,
    /// This server was suspended for longer than its lease.
    #[error("the server was suspended and is rejoining; retry in a moment")]
    LeaseLost,
    /// The configuration of an outbox source cannot be used.
    #[error("outbox source \"{name}\" cannot be used: {source}")]
    InvalidSource { name: String, source: StoreError },
    /// The queue in Redis cannot be used.
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error("no loop is called \"{0}\"")]
    UnknownLoop(String),
    /// A round of a loop panicked. The driver catches the panic and runs the loop again.
    #[error("{0}")]
    Panicked(String),
    #[error("bulk action {0} no longer exists")]
    BulkNotFound(BulkId),
}

/// Explains why a worker's id cannot be used, and when it can.
fn worker_active(worker: &str, deadline: Option<Timestamp>, silence: Duration) -> String {
    match deadline {
        Some(at) => format!(
            "worker \"{worker}\" is disconnected and keeps its jobs until {at}; resume it with its sessionToken, register \
             again after that time, or choose another workerId"
        ),
        None => format!(
            "worker \"{worker}\" is connected; resume it with its sessionToken, choose another workerId, or register again \
             when it has left or has been silent for {silence:?}"
        ),
    }
}

impl EngineError {
    /// Returns whether the database is not available or busy, so that the same call may succeed later.
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            EngineError::Store(StoreError::Unavailable { .. } | StoreError::Contended { .. })
                | EngineError::InvalidSource { source: StoreError::Unavailable { .. }, .. }
        )
    }
}
