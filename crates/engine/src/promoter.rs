//! Moves what is due: delayed and retrying jobs become ready, those that wait for parents look again.
//!
//! Sleeps until the next due time; whoever puts something off nudges it. Safe on every node at once: the store skips what
//! another node has in its hands.

use faena_domain::Timestamp;
use faena_store::{Store, StoreError};

use crate::Round;

const BATCH: usize = 1_000;

pub async fn run_once(store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
    let due = store.job_promote(BATCH, now).await?;
    Ok(Round { handled: due.handled(), more: due.more, next_at: due.next_at })
}
