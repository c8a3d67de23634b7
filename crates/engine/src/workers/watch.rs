//! Watches what workers have in hand, by due time: jobs that run too long or are not started, requests to stop that are not
//! heeded, workers that fell silent or did not come back.
//!
//! A timed-out job is told to stop and ends at once; what its worker says later is refused. A worker given up for lost costs
//! its jobs a try. Each act goes through the fence (the block, the worker's session), so one that comes too late does nothing.

use std::sync::{Arc, atomic::Ordering};

use faena_domain::{ErrorReason, Failure, NodeId, Timestamp, WorkerState};
use faena_store::{NoteKind, RunNote, StoreError, WorkerEnd};

use super::{ConnectedWorker, ReportKind, Transport, connected::Stopping};
use crate::{
    Engine, Round,
    config::ms,
    guardian::{ACTOR, Check},
    in_flight::InFlightJob,
};

/// How long a handler may take to stop after it was told to.
const STOP_MS: i64 = 10_000;

/// The earliest of what is to come.
struct Next(Option<Timestamp>);

impl Next {
    /// `true`: its time has come.
    fn is_due(&mut self, at: Timestamp, now: Timestamp) -> bool {
        if at <= now {
            return true;
        }
        self.0 = Some(self.0.map_or(at, |known| known.min(at)));
        false
    }
}

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let mut next = Next(None);
    let mut handled = 0;
    for worker in engine.workers.all() {
        if let Some(reason) = lost(engine, &worker, &mut next, now) {
            let end = WorkerEnd::Lost { reason: reason.clone(), delay_ms: ms(engine.config.orphan_delay) };
            engine.worker_ends(&worker, end, &reason, now).await?;
            engine.actions.count(Check::Workers, 1);
            handled += 1;
            continue;
        }
        handled += watch_jobs(engine, &worker, &mut next, now);
        complain(engine, &worker, &mut next, now).await?;
        let opens_at = worker.standing.lock().breaker.opens_at(now);
        if opens_at.is_some_and(|at| !next.is_due(at, now)) {
            // It will take jobs again without anybody telling.
            engine.lanes.nudge.notify_one();
        }
    }
    let next_at = next.0.map_or(i64::MAX, Timestamp::as_ms);
    engine.next_check_at.store(next_at, Ordering::Release);
    Ok(Round { handled, more: false, next_at: next.0 })
}

/// Why a worker is given up, if it is.
fn lost(engine: &Engine, worker: &ConnectedWorker, next: &mut Next, now: Timestamp) -> Option<String> {
    let standing = worker.standing.lock();
    let config = &engine.config;
    if matches!(standing.state, WorkerState::Creating | WorkerState::Connecting) {
        // Its process is the pool's business.
        return None;
    }
    if let Some(since) = standing.away_since {
        let due = next.is_due(since.plus_ms(ms(config.reconnect_grace)), now);
        return due
            .then(|| format!("its connection closed and it did not come back within {:?}", config.reconnect_grace));
    }
    let due = next.is_due(standing.seen_at.plus_ms(ms(config.worker_silence)), now);
    due.then(|| format!("nothing was heard of it for {:?}", config.worker_silence))
}

fn watch_jobs(engine: &Engine, worker: &Arc<ConnectedWorker>, next: &mut Next, now: Timestamp) -> usize {
    let jobs: Vec<Arc<InFlightJob>> = worker.standing.lock().held.values().cloned().collect();
    let mut handled = 0;
    for held in jobs {
        if let Some(failure) = overdue(engine, worker, &held, next, now) {
            let waits_for_start = held.started_at().is_none();
            let reason = failure.message.clone();
            let run = held.job.run;
            engine.report_handler.end(worker, &held, ReportKind::Fail(failure), None, now);
            if waits_for_start {
                engine.workers.dispatch_failed(worker, now);
            }
            let stopping = Stopping { run, since: now, reason: reason.clone(), complained: false };
            worker.standing.lock().stopping.insert(held.job.id, stopping);
            held.tell_to_stop(&reason);
            tracing::warn!(
                actor = ACTOR,
                job = %held.job.id,
                correlation_id = held.correlation_id(),
                worker = worker.key,
                "a job was taken from its worker: {reason}"
            );
            next.is_due(now.plus_ms(STOP_MS), now);
            engine.actions.count(Check::Jobs, 1);
            handled += 1;
        }
    }
    handled
}

/// What is wrong with a job in a worker's hands, if its time is up.
fn overdue(
    engine: &Engine,
    worker: &ConnectedWorker,
    held: &InFlightJob,
    next: &mut Next,
    now: Timestamp,
) -> Option<Failure> {
    let there = worker.standing.lock().state.is_operational() || worker.is_draining();
    if let Some(asked_at) = held.cancel_asked_at()
        && next.is_due(if there { asked_at.plus_ms(STOP_MS) } else { asked_at }, now)
    {
        return Some(Failure::error("its worker did not stop in time").with_reason(ErrorReason::Cancelled));
    }
    if held.started_at().is_some() {
        let deadline = engine.deadline_of(held, now);
        let limit_ms = deadline.ms_since(held.started_at()?);
        return next.is_due(deadline, now).then(|| {
            Failure::error(format!("took longer than its limit of {limit_ms} ms")).with_reason(ErrorReason::Timeout)
        });
    }
    let limit = engine.config.assigned_timeout;
    let waits = worker.standing.lock().state.is_operational();
    (waits && next.is_due(held.claimed_at.plus_ms(ms(limit)), now)).then(|| {
        let text = format!("worker {} did not start it within {limit:?}", worker.key);
        Failure::error(text).with_reason(ErrorReason::Timeout)
    })
}

/// Handlers that go on although they were told to stop are said by name, once.
async fn complain(
    engine: &Engine,
    worker: &ConnectedWorker,
    next: &mut Next,
    now: Timestamp,
) -> Result<(), StoreError> {
    let mut deaf = Vec::new();
    {
        let mut standing = worker.standing.lock();
        for (id, stopping) in standing.stopping.iter_mut().filter(|(_, stopping)| !stopping.complained) {
            if next.is_due(stopping.since.plus_ms(STOP_MS), now) {
                stopping.complained = true;
                deaf.push((*id, stopping.run));
            }
        }
    }
    let text = format!("worker {} was told to stop and its handler goes on", worker.key);
    let node: NodeId = engine.node_id();
    let notes: Vec<RunNote> = deaf
        .into_iter()
        .map(|(id, run)| {
            tracing::warn!(job = %id, worker = worker.key, "a handler was told to stop and goes on");
            let kind = NoteKind::Stale(text.clone());
            let worker = worker.id;
            RunNote { id, run, lane: 0, node, worker, retry_count: 0, ready_at: now, started_at: now, at: now, kind }
        })
        .collect();
    if !notes.is_empty() {
        engine.store.job_note(notes, now).await?;
    }
    Ok(())
}

impl ConnectedWorker {
    /// Whether its breaker has something against it.
    pub(crate) fn is_flapping(&self, now: Timestamp) -> bool {
        self.transport != Transport::Http && self.breaker_state(now) != crate::breaker::BreakerState::Closed
    }
}
