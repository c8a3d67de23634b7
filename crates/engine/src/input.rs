//! Jobs from outside the API: how a source or inbox stores a job once, and waits while something is down.

mod outage;

use faena_domain::{FieldError, NewJob, Timestamp};
use faena_store::{Store, StoreError};

use crate::Bus;

pub(crate) use outage::Outage;

/// Result of submitting the job of a message.
#[derive(Debug)]
pub(crate) enum Submission {
    Stored,
    /// The message was processed before.
    Duplicate,
    /// The message can never become a job.
    Rejected(String),
    /// The database does not accept it now.
    Deferred(StoreError),
}

/// Stores the job of a message once, however often the message is delivered.
pub(crate) async fn submit_once(
    store: &dyn Store,
    bus: &Bus,
    consumer: &str,
    message: &str,
    job: NewJob,
    now: Timestamp,
) -> Submission {
    match store.inbox_submit(consumer, message, vec![job], now).await {
        Ok(Some(stored)) => {
            for job in stored {
                bus.changed(job.id, job.status, None, job.created_at);
            }
            Submission::Stored
        }
        Ok(None) => Submission::Duplicate,
        Err(StoreError::Invalid(errors)) => Submission::Rejected(FieldError::join(&errors)),
        Err(
            refusal @ (StoreError::Conflict { .. } | StoreError::NotFound(_) | StoreError::InvalidTransition { .. }),
        ) => Submission::Rejected(refusal.to_string()),
        Err(error) => Submission::Deferred(error),
    }
}
