//! Removes finished jobs and events that are older than they are kept, in small batches, and keeps the coming days' partitions ready.

use faena_domain::Timestamp;
use faena_store::{Retention, Store, StoreError};

use crate::Round;

const BATCH: usize = 500;
/// What happened can be read again, and published again, for so long.
const EVENTS_KEPT_MS: i64 = 3 * 24 * 3_600_000;

pub async fn run_once(store: &dyn Store, retention: &Retention, now: Timestamp) -> Result<Round, StoreError> {
    let jobs = store.job_prune(retention, BATCH, now).await?;
    let events = store.event_settle(now.plus_ms(-EVENTS_KEPT_MS), BATCH, now).await?;
    Ok(Round { handled: jobs + events, more: jobs == BATCH || events == BATCH, next_at: None })
}
