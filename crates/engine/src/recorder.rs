//! Writes down that jobs have started, once they have run for a moment, and what they tell.
//!
//! Most jobs are over before their start is worth a write: their start stands in the log of their end. What runs longer is
//! put on record here, so that every restart sees it. Safe at any time: a note of a run that is over changes nothing.

use std::time::Duration;

use faena_domain::{NodeId, Timestamp};
use faena_store::{NoteKind, RunNote, Store, StoreError};

use crate::{
    Bus, Round,
    config::ms,
    in_flight::{InFlight, InFlightJob},
};

/// How long a job may run without its start being on record.
pub const RECORD_AFTER: Duration = Duration::from_millis(100);

pub async fn run_once(
    store: &dyn Store,
    in_flight: &InFlight,
    bus: &Bus,
    node: NodeId,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let (due, next) = in_flight.to_record(now.plus_ms(-ms(RECORD_AFTER)));
    let notes: Vec<RunNote> = due.iter().filter_map(|held| note(held, node, NoteKind::Started, now)).collect();
    let handled = notes.len();
    if handled > 0 {
        store.job_note(notes, now).await?;
        for held in &due {
            bus.changed(held.job.id, faena_domain::JobState::Processing, Some(held.job.run), now);
        }
    }
    Ok(Round { handled, more: false, next_at: next.map(|at| at.plus_ms(ms(RECORD_AFTER))) })
}

/// A note about a job that has started.
pub fn note(held: &InFlightJob, node: NodeId, kind: NoteKind, at: Timestamp) -> Option<RunNote> {
    let job = &held.job;
    Some(RunNote {
        id: job.id,
        run: job.run,
        lane: job.lane,
        node,
        worker: held.worker,
        retry_count: job.retry_count,
        ready_at: job.ready_at,
        started_at: held.started_at()?,
        at,
        kind,
    })
}
