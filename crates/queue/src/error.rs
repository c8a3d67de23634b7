//! The error type of all operations.

/// Why an operation failed in Redis. Never contains a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// There is no usable connection. The client reconnects with backoff.
    #[error("Redis at {address} is not available: {cause}")]
    Unavailable { address: String, cause: String },
    /// The data is missing or has an older format: Redis was flushed, restarted without its data, or never filled.
    #[error("the queue in Redis is empty or has another format; Faena fills it from the database")]
    NotFilled,
    /// A newer Faena has written the data.
    #[error(
        "the queue in Redis has format {found}, but this version of faena knows only up to {known}; use a newer version or set another queue.prefix"
    )]
    NewerFormat { found: u32, known: u32 },
    /// A key has a value of another kind: another program uses the same name.
    #[error("a key of the queue has a value of another type; another program uses the prefix {prefix:?} ({cause})")]
    ForeignKey { prefix: String, cause: String },
    /// Redis rejected a command for a reason that a new connection does not change.
    #[error("Redis at {address} rejected a command: {cause}")]
    Rejected { address: String, cause: String },
}

impl QueueError {
    /// Returns whether there is no usable connection.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, QueueError::Unavailable { .. })
    }
}
