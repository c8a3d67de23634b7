//! Warns about job types that no worker can run, and fails their jobs after `no_handler_timeout`.
//!
//! A type is served if a live worker on any node has the capability. Safe to run on all nodes concurrently: a job that a worker claims
//! meanwhile is no longer there to be failed.

use std::collections::BTreeMap;

use faena_domain::Timestamp;
use faena_store::{LaneId, Tally};
use parking_lot::Mutex;

use crate::{Engine, EngineError, Round, config::ms};

/// Types and queues that were unserved in the last round, with their number of jobs. Each is logged once, not once per
/// round.
#[derive(Default)]
pub struct UnhandledTypes(Mutex<BTreeMap<(String, String), i64>>);

const BATCH: usize = 500;
/// Maximum number of new types that one round logs one by one. If there are more, a single line names this many as
/// examples.
const LOGGED_TYPES: usize = 3;

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let counts = engine.store.counts().await?;
    let queued: BTreeMap<LaneId, i64> = counts
        .by_lane
        .into_iter()
        .filter(|((_, tally), count)| *tally == Tally::Queued && *count > 0)
        .map(|((lane, _), count)| (lane, count))
        .collect();
    if queued.is_empty() {
        engine.dispatch.unhandled.0.lock().clear();
        return Ok(Round::default());
    }
    let capabilities = engine.store.worker_capabilities().await?;
    let lanes = engine.store.lanes().await?;
    let unserved: Vec<_> = lanes
        .iter()
        .filter(|lane| queued.contains_key(&lane.id))
        .filter(|lane| !capabilities.iter().any(|capabilities| capabilities.covers(&lane.queue, &lane.kind)))
        .collect();
    let mut jobs_by_type: BTreeMap<(String, String), i64> = BTreeMap::new();
    for lane in &unserved {
        *jobs_by_type.entry((lane.kind.clone(), lane.queue.clone())).or_default() += queued[&lane.id];
    }
    engine.dispatch.unhandled.replace(jobs_by_type);
    if unserved.is_empty() || engine.config.no_handler_timeout.is_zero() {
        return Ok(Round::default());
    }
    let before = now.plus_ms(-ms(engine.config.no_handler_timeout));
    let ids = unserved.iter().map(|lane| lane.id).collect();
    let failed = engine.store.job_fail_unhandled(ids, before, BATCH, now).await?;
    if failed > 0 {
        tracing::warn!(jobs = failed, "jobs failed because no worker can run their type");
    }
    Ok(Round { handled: failed, more: failed >= BATCH, next_at: None })
}

impl UnhandledTypes {
    fn replace(&self, jobs_by_type: BTreeMap<(String, String), i64>) {
        let mut known = self.0.lock();
        let new: Vec<_> = jobs_by_type.iter().filter(|(name, _)| !known.contains_key(*name)).collect();
        match new.as_slice() {
            [] => {}
            few if few.len() <= LOGGED_TYPES => {
                for ((kind, queue), jobs) in few {
                    tracing::warn!(job_type = kind, queue, jobs, "no worker can run this job type");
                }
            }
            many => {
                let jobs: i64 = many.iter().map(|(_, jobs)| **jobs).sum();
                let examples: Vec<&str> = many.iter().take(LOGGED_TYPES).map(|((kind, _), _)| kind.as_str()).collect();
                tracing::warn!(
                    types = many.len(),
                    jobs,
                    examples = examples.join(","),
                    "no worker can run these job types"
                );
            }
        }
        drop(new);
        *known = jobs_by_type;
    }
}
