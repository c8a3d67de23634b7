//! Finds changes that no signal announced, so that a lost signal only costs time.
//!
//! Behind a pooler that loses notifications it is the only way to find jobs that other nodes accepted, so it polls more often
//! while there is work.

use std::sync::atomic::{AtomicI64, Ordering};

use faena_domain::Timestamp;
use faena_store::Poll;

use crate::{Engine, EngineError, Round};

/// Age at which the throughput is sampled again. Callers that ask for it take samples too.
const SAMPLE_MS: i64 = 20_000;

/// Time between two polls while signals of other nodes do not arrive and there is work.
const BUSY_POLL_MS: i64 = 50;

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
    Ok(Round { next_at: next_poll(engine, &poll, now), ..Round::default() })
}

/// Returns when to poll again, if that is earlier than usual: other nodes exist, their signals do not arrive, and there is work.
fn next_poll(engine: &Engine, poll: &Poll, now: Timestamp) -> Option<Timestamp> {
    let has_work = !poll.ready_lanes.is_empty() || engine.dispatch.in_flight.count() > 0;
    let has_no_signals = poll.nodes > 1 && engine.store.signal_problem().is_some();
    if !has_no_signals {
        return None;
    }
    engine.poller.record(has_work, now);
    engine.poller.was_busy(now).then(|| now.plus_ms(BUSY_POLL_MS))
}

/// When a poll last found work.
#[derive(Default)]
pub struct PollHistory(AtomicI64);

/// How long polls stay frequent after the last work.
const BUSY_FOR_MS: i64 = 10_000;

impl PollHistory {
    fn record(&self, has_work: bool, now: Timestamp) {
        if has_work {
            self.0.store(now.as_ms(), Ordering::Relaxed);
        }
    }

    fn was_busy(&self, now: Timestamp) -> bool {
        now.as_ms() - self.0.load(Ordering::Relaxed) <= BUSY_FOR_MS
    }
}
