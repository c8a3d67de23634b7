//! Deletes finished jobs and tasks, events and history that are older than their retention, in small batches, and creates the
//! partitions of the coming days. Reclaims lanes that no longer have jobs.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_store::{HistoryCutoffs, Retention, Store, StoreError};

use crate::{Round, config::ms};

const BATCH: usize = 500;
const LANE_BATCH: usize = 500;
/// Events are smaller than jobs, and there are more of them.
const EVENT_BATCH: usize = 5_000;
/// The history per minute shows the last hour. Twice that is kept, so that a caller may ask for a little more.
const MINUTES_KEPT_MS: i64 = 2 * 3_600_000;

pub async fn run_once(
    store: &dyn Store,
    retention: &Retention,
    keep_events: Duration,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let jobs = store.job_prune(retention, BATCH, now).await?;
    let tasks = store.task_prune(now.plus_ms(-retention.longest_ms()), BATCH).await?;
    let events = store.event_prune(now.plus_ms(-ms(keep_events)), EVENT_BATCH, now).await?;
    let cutoffs = HistoryCutoffs {
        minutes: now.plus_ms(-MINUTES_KEPT_MS),
        hours: now.plus_ms(-retention.hourly_history_ms),
        days: now.plus_ms(-retention.daily_history_ms),
    };
    let history = store.history_prune(cutoffs, EVENT_BATCH).await?;
    let lanes = store.lane_reclaim(LANE_BATCH).await?;
    let more =
        jobs == BATCH || tasks == BATCH || events == EVENT_BATCH || history >= EVENT_BATCH || lanes == LANE_BATCH;
    Ok(Round { handled: jobs + tasks + events + history + lanes, more, next_at: None })
}
