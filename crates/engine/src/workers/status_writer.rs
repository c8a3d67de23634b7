//! Stores what changed about the workers connected to this node: state, heartbeat, counts.
//!
//! Heartbeats are collected in memory and stored together for all workers. A worker that is connected to another node by
//! now, or is no longer registered, is dropped here.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_store::{Store, StoreError, WorkerUpdate};

use super::{CloseReason, ConnectedWorker, Workers};
use crate::{Round, in_flight::InFlight};

/// How long changes are collected before they are stored together.
pub const BATCH_WINDOW: Duration = Duration::from_millis(250);
const BATCH: usize = 1_000;

pub async fn run_once(
    store: &dyn Store,
    workers: &Workers,
    in_flight: &InFlight,
    (grace_ms, heartbeat_ms): (i64, i64),
    now: Timestamp,
) -> Result<Round, StoreError> {
    let mut changed = Vec::new();
    let mut updates: Vec<WorkerUpdate> = Vec::new();
    for worker in workers.all() {
        let update = worker.status.lock().take_update(&worker, grace_ms, heartbeat_ms, now);
        if let Some(update) = update {
            updates.push(update);
            changed.push(worker);
        }
        if updates.len() >= BATCH {
            break;
        }
    }
    if updates.is_empty() {
        return Ok(Round::default());
    }
    let results = match store.worker_update(updates.clone(), now).await {
        Ok(results) => results,
        Err(error) => {
            for (worker, update) in changed.iter().zip(updates) {
                worker.status.lock().restore_update(update);
            }
            return Err(error);
        }
    };
    for (worker, result) in changed.iter().zip(results) {
        if result.connected {
            workers.set_draining(worker.id, result.drain, now);
        } else {
            worker.close(CloseReason::RegisteredElsewhere);
            workers.drop_worker(worker, in_flight);
        }
    }
    Ok(Round { handled: changed.len(), more: changed.len() >= BATCH, next_at: None })
}

/// Stores the last update of a worker before it is deregistered.
pub async fn store_last(store: &dyn Store, worker: &ConnectedWorker, now: Timestamp) -> Result<(), StoreError> {
    let last = worker.status.lock().take_update(worker, 0, i64::MAX, now);
    if let Some(update) = last {
        store.worker_update(vec![update], now).await?;
    }
    Ok(())
}
