//! Records that jobs have started, once they have run for a moment.
//!
//! Most jobs end before their start is worth a write: the log of their end contains it. Longer runs are recorded here, so
//! that every node knows of them after a crash. Safe at any time: an update of a run that has ended changes nothing.

use std::time::Duration;

use faena_domain::{JobState, NodeId, Timestamp};
use faena_store::{RunUpdate, RunUpdateKind, Store, StoreError};

use crate::{
    Bus, Round,
    config::ms,
    in_flight::{InFlight, InFlightJob},
};

/// How long a job may run before its start is recorded.
pub const RECORD_AFTER: Duration = Duration::from_millis(100);

pub async fn run_once(
    store: &dyn Store,
    in_flight: &InFlight,
    bus: &Bus,
    node: NodeId,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let (due, next) = in_flight.take_unrecorded(now.plus_ms(-ms(RECORD_AFTER)));
    let updates: Vec<RunUpdate> = due.iter().filter_map(|job| update(job, node, RunUpdateKind::Started, now)).collect();
    let handled = updates.len();
    if handled > 0 {
        store.run_update(updates, now).await?;
        for job in &due {
            bus.changed(job.id(), JobState::Processing, Some(job.run()), now);
        }
    }
    Ok(Round { handled, more: false, next_at: next.map(|at| at.plus_ms(ms(RECORD_AFTER))) })
}

/// Returns an update about a job. Returns `None` if the job has not started.
pub fn update(job: &InFlightJob, node: NodeId, kind: RunUpdateKind, at: Timestamp) -> Option<RunUpdate> {
    let claimed = &job.claimed;
    Some(RunUpdate {
        id: claimed.id,
        run: claimed.run,
        lane: claimed.lane,
        node,
        worker: job.worker,
        retry_count: claimed.retry_count,
        ready_at: claimed.ready_at,
        started_at: job.started_at()?,
        at,
        kind,
    })
}
