//! Looks once a second for what no signal has told: the fallback that makes every signal dispensable.

use faena_domain::Timestamp;
use faena_store::StoreError;

use crate::{Engine, Round};

/// How old the last look at the throughput may be. Whoever asks for it looks again.
const SAMPLE_MS: i64 = 20_000;

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let poll = engine.store.poll(engine.node_id(), now).await?;
    for lane in &poll.ready_lanes {
        engine.lanes.add(*lane);
    }
    for (id, reason) in &poll.cancels {
        engine.ask_to_stop(*id, reason, now);
    }
    if poll.next_due_at.is_some_and(|at| at <= now) {
        engine.promote.notify_one();
        engine.due_checks.look_for_expired();
        engine.workers.watch.notify_one();
    }
    if poll.orphans {
        engine.due_checks.look_for_orphans();
        engine.workers.watch.notify_one();
    }
    if engine.throughput.is_older(now, SAMPLE_MS) {
        engine.throughput.add(&engine.store.counts().await?, now);
    }
    Ok(Round::done(0))
}
