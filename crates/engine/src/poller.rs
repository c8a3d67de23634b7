//! Looks for changes that no signal announced. It makes every signal dispensable.

use faena_domain::Timestamp;

use crate::{Engine, EngineError, Round};

/// Age at which the throughput is sampled again. Callers that ask for it take samples too.
const SAMPLE_MS: i64 = 20_000;

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let poll = engine.store.poll(engine.node_id(), now).await?;
    for lane in &poll.ready_lanes {
        engine.dispatch.lanes.add(*lane);
    }
    for (id, reason) in &poll.cancel_requests {
        engine.request_stop(*id, reason, now);
    }
    if poll.next_due_at.is_some_and(|at| at <= now) {
        engine.check_due_times();
    }
    if poll.needs_recovery {
        engine.guardian.due_checks.check_orphans();
        engine.wakeups.deadline_changed();
    }
    if engine.throughput.is_older(now, SAMPLE_MS) {
        engine.throughput.add(&engine.store.counts().await?, now);
    }
    Ok(Round::done(0))
}
