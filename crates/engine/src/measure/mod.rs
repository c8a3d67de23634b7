//! Measures how long jobs and workers spend in their states, for the metrics and the history.
//!
//! Ends of runs are measured in batches, after they are stored, from times that the engine already has.

mod histogram;
mod jobs;
mod workers;

use faena_domain::Timestamp;

pub use histogram::{BUCKETS, Exemplar, Histogram};
pub use jobs::{JobMeasures, JobSnapshot, LaneTimes, RUN_OUTCOMES, TIMED_STATES};
pub use workers::WorkerMeasures;

use crate::{Engine, EngineError, Round};

/// Everything that this node measures.
#[derive(Default)]
pub struct Measures {
    pub jobs: JobMeasures,
    pub workers: WorkerMeasures,
}

/// Adds what happened since the last round to the history. If that fails, the next round adds it.
pub async fn record_history(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let timings = engine.measures.jobs.take_unsaved();
    match engine.store.history_record(timings.clone(), now).await {
        Ok(handled) => Ok(Round::done(handled)),
        Err(error) => {
            engine.measures.jobs.restore_unsaved(&timings);
            Err(error.into())
        }
    }
}
