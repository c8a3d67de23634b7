//! Deletes finished jobs and events that are older than their retention, in small batches, and creates the partitions of
//! the coming days.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_store::{Retention, Store, StoreError};

use crate::{Round, config::ms};

const BATCH: usize = 500;
/// Events are smaller than jobs, and there are more of them.
const EVENT_BATCH: usize = 5_000;

pub async fn run_once(
    store: &dyn Store,
    retention: &Retention,
    keep_events: Duration,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let jobs = store.job_prune(retention, BATCH, now).await?;
    let events = store.event_settle(now.plus_ms(-ms(keep_events)), EVENT_BATCH, now).await?;
    Ok(Round { handled: jobs + events, more: jobs == BATCH || events == EVENT_BATCH, next_at: None })
}
