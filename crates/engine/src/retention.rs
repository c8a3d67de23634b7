//! Removes finished jobs that are older than they are kept, in small batches, and keeps the coming days' partitions ready.

use faena_domain::Timestamp;
use faena_store::{Retention, Store, StoreError};

use crate::Round;

const BATCH: usize = 500;

pub async fn run_once(store: &dyn Store, retention: &Retention, now: Timestamp) -> Result<Round, StoreError> {
    let handled = store.job_prune(retention, BATCH, now).await?;
    Ok(Round { handled, more: handled == BATCH, next_at: None })
}
