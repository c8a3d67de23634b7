//! Writes down what is new about the workers that are connected here: state, sign of life, figures.
//!
//! Signs of life are gathered in memory and written in one go for all workers. A worker that the store knows to be connected
//! elsewhere, or to have ended, is let go.

use faena_domain::Timestamp;
use faena_store::{Store, StoreError, WorkerUpdate};

use super::{CloseReason, ConnectedWorker, Workers};
use crate::{Round, in_flight::InFlight};

/// How long changes are gathered before the next are written.
pub const GATHER: std::time::Duration = std::time::Duration::from_millis(250);
const BATCH: usize = 1_000;

pub async fn run_once(
    store: &dyn Store,
    workers: &Workers,
    in_flight: &InFlight,
    (grace_ms, beat_ms): (i64, i64),
    now: Timestamp,
) -> Result<Round, StoreError> {
    let mut told = Vec::new();
    let mut news: Vec<WorkerUpdate> = Vec::new();
    for worker in workers.all() {
        let item = worker.standing.lock().news(&worker, grace_ms, beat_ms, now);
        if let Some(item) = item {
            news.push(item);
            told.push(worker);
        }
        if news.len() >= BATCH {
            break;
        }
    }
    if news.is_empty() {
        return Ok(Round::default());
    }
    let standings = match store.worker_update(news.clone(), now).await {
        Ok(standings) => standings,
        Err(error) => {
            for (worker, item) in told.iter().zip(news) {
                worker.standing.lock().unsaid(item);
            }
            return Err(error);
        }
    };
    for (worker, standing) in told.iter().zip(standings) {
        if standing.connected {
            workers.drain(worker.id, standing.drain, now);
        } else {
            worker.close(CloseReason::RegisteredElsewhere);
            workers.drop_worker(worker, in_flight);
        }
    }
    Ok(Round { handled: told.len(), more: told.len() >= BATCH, next_at: None })
}

/// What there is to say about a worker before its life ends.
pub async fn tell_last(store: &dyn Store, worker: &ConnectedWorker, now: Timestamp) -> Result<(), StoreError> {
    let last = worker.standing.lock().news(worker, 0, i64::MAX, now);
    if let Some(news) = last {
        store.worker_update(vec![news], now).await?;
    }
    Ok(())
}
