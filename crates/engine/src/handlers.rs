//! Says by name which job types nobody can run, and fails their jobs when they have waited for too long.
//!
//! A type is served if a living worker on any node has the capability. Safe on every node at once: a job that somebody takes
//! meanwhile is not there to be failed any more.

use std::collections::BTreeMap;

use faena_domain::Timestamp;
use faena_store::{LaneId, StoreError, Tally};
use parking_lot::Mutex;

use crate::{Engine, Round, config::ms};

/// What was said before, by type and queue: once per change, not once per round.
#[derive(Default)]
pub struct Said(Mutex<BTreeMap<(String, String), i64>>);

const BATCH: usize = 500;

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let counts = engine.store.counts().await?;
    let waiting: BTreeMap<LaneId, i64> = counts
        .by_lane
        .into_iter()
        .filter(|((_, tally), count)| *tally == Tally::Queued && *count > 0)
        .map(|((lane, _), count)| (lane, count))
        .collect();
    if waiting.is_empty() {
        engine.said.0.lock().clear();
        return Ok(Round::default());
    }
    let capabilities = engine.store.worker_capabilities().await?;
    let lanes = engine.store.lanes().await?;
    let unserved: Vec<_> = lanes
        .iter()
        .filter(|lane| waiting.contains_key(&lane.id))
        .filter(|lane| !capabilities.iter().any(|capabilities| capabilities.covers(&lane.queue, &lane.kind)))
        .collect();
    let mut by_name: BTreeMap<(String, String), i64> = BTreeMap::new();
    for lane in &unserved {
        *by_name.entry((lane.kind.clone(), lane.queue.clone())).or_default() += waiting[&lane.id];
    }
    engine.said.say(by_name);
    if unserved.is_empty() || engine.config.no_handler_timeout.is_zero() {
        return Ok(Round::default());
    }
    let before = now.plus_ms(-ms(engine.config.no_handler_timeout));
    let ids = unserved.iter().map(|lane| lane.id).collect();
    let failed = engine.store.job_fail_unhandled(ids, before, BATCH, now).await?;
    if failed > 0 {
        tracing::warn!(jobs = failed, "jobs have failed because no worker can run them");
    }
    Ok(Round { handled: failed, more: failed >= BATCH, next_at: None })
}

impl Said {
    fn say(&self, by_name: BTreeMap<(String, String), i64>) {
        let mut said = self.0.lock();
        for ((kind, queue), jobs) in by_name.iter().filter(|(name, _)| !said.contains_key(*name)) {
            tracing::warn!(
                job_type = kind,
                queue,
                jobs,
                "no worker that is connected can run this type; its jobs wait until one is"
            );
        }
        *said = by_name;
    }
}
