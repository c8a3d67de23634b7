//! Makes due jobs ready: delayed and retrying jobs, and jobs whose parents have completed.
//!
//! Sleeps until the next due time and is woken when a due time changes. Safe to run on all nodes concurrently: the store skips rows
//! that another node is processing.

use faena_domain::Timestamp;
use faena_store::{Store, StoreError};

use crate::Round;

const BATCH: usize = 1_000;

pub async fn run_once(store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
    let due = store.job_promote(BATCH, now).await?;
    Ok(Round { handled: due.handled(), more: due.more, next_at: due.next_at })
}
