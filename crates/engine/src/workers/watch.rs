//! Watches connected workers and their jobs by due time: jobs that run too long or are not started, requests to stop that
//! are ignored, workers that are silent or did not reconnect.
//!
//! A timed-out job ends immediately and its worker is asked to stop it; later reports about it are refused. A lost worker's
//! jobs use an attempt. Each action is fenced (by the claim, by the worker's session), so a late action does nothing.

use std::sync::{Arc, atomic::Ordering};

use faena_domain::{ErrorReason, Failure, Timestamp, WorkerState};
use faena_store::{NoteKind, RunNote};

use super::{ConnectedWorker, ReportKind, status::Stopping};
use crate::{
    Engine, EngineError, Round,
    config::ms,
    guardian::{ACTOR, Check},
    in_flight::InFlightJob,
};

/// How long a handler may take to stop after it was asked to.
const STOP_MS: i64 = 10_000;

/// The earliest of all due times that are not reached yet.
struct NextDue(Option<Timestamp>);

impl NextDue {
    /// Returns whether `at` is reached; otherwise remembers it.
    fn is_due(&mut self, at: Timestamp, now: Timestamp) -> bool {
        if at <= now {
            return true;
        }
        self.0 = Some(self.0.map_or(at, |known| known.min(at)));
        false
    }
}

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let mut next = NextDue(None);
    let mut handled = 0;
    for worker in engine.workers.all() {
        if let Some(reason) = lost_reason(engine, &worker, &mut next, now) {
            engine.end_worker(&worker, engine.lost(&reason), &reason, now).await?;
            engine.guardian.actions.add(Check::Workers, 1);
            handled += 1;
            continue;
        }
        handled += watch_jobs(engine, &worker, &mut next, now);
        report_ignored_stops(engine, &worker, &mut next, now).await?;
        let retry_at = worker.status.lock().breaker.retry_at(now);
        if retry_at.is_some_and(|at| !next.is_due(at, now)) {
            // No signal announces that the breaker lets jobs pass again.
            engine.wakeups.lanes_ready();
        }
    }
    let next_at = next.0.map_or(i64::MAX, Timestamp::as_ms);
    engine.guardian.next_check_at.store(next_at, Ordering::Release);
    Ok(Round { handled, more: false, next_at: next.0 })
}

/// Returns why a worker is lost, if it is.
fn lost_reason(engine: &Engine, worker: &ConnectedWorker, next: &mut NextDue, now: Timestamp) -> Option<String> {
    let status = worker.status.lock();
    let config = &engine.config;
    if matches!(status.state, WorkerState::Creating | WorkerState::Connecting) {
        // The pool watches its process.
        return None;
    }
    if let Some(since) = status.disconnected_at {
        let is_due = next.is_due(since.plus_ms(ms(config.reconnect_grace)), now);
        return is_due.then(|| format!("it disconnected and did not reconnect within {:?}", config.reconnect_grace));
    }
    let is_due = next.is_due(status.seen_at.plus_ms(ms(config.worker_silence)), now);
    is_due.then(|| format!("no heartbeat for {:?}", config.worker_silence))
}

fn watch_jobs(engine: &Engine, worker: &Arc<ConnectedWorker>, next: &mut NextDue, now: Timestamp) -> usize {
    let jobs: Vec<Arc<InFlightJob>> = worker.status.lock().in_flight.values().cloned().collect();
    let mut handled = 0;
    for job in jobs {
        if let Some(failure) = overdue(engine, worker, &job, next, now) {
            take_away(engine, worker, &job, failure, now);
            next.is_due(now.plus_ms(STOP_MS), now);
            engine.guardian.actions.add(Check::Jobs, 1);
            handled += 1;
        }
    }
    handled
}

/// Ends a job without waiting for its worker, and asks the worker to stop it.
fn take_away(engine: &Engine, worker: &Arc<ConnectedWorker>, job: &InFlightJob, failure: Failure, now: Timestamp) {
    let was_not_started = job.started_at().is_none();
    let reason = failure.message.clone();
    engine.reports.handler.end(worker, job, ReportKind::Fail(failure), None, now);
    if was_not_started {
        engine.workers.record_dispatch_failure(worker, now);
    }
    let stopping = Stopping { run: job.run(), since: now, reason: reason.clone(), is_reported: false };
    worker.status.lock().stopping.insert(job.id(), stopping);
    job.send_stop(&reason);
    tracing::warn!(
        actor = ACTOR,
        job = %job.id(),
        correlation_id = job.correlation_id(),
        worker = worker.key,
        reason,
        "job taken from its worker"
    );
}

/// Returns the failure of a job whose time is up.
fn overdue(
    engine: &Engine,
    worker: &ConnectedWorker,
    job: &InFlightJob,
    next: &mut NextDue,
    now: Timestamp,
) -> Option<Failure> {
    let is_connected = worker.status.lock().state.is_operational() || worker.is_draining();
    if let Some(requested_at) = job.stop_requested_at()
        && next.is_due(if is_connected { requested_at.plus_ms(STOP_MS) } else { requested_at }, now)
    {
        return Some(Failure::error("its worker did not stop in time").with_reason(ErrorReason::Cancelled));
    }
    if let Some(started_at) = job.started_at() {
        let deadline = engine.deadline_of(job, now);
        let limit_ms = deadline.ms_since(started_at);
        return next.is_due(deadline, now).then(|| {
            Failure::error(format!("took longer than its limit of {limit_ms} ms")).with_reason(ErrorReason::Timeout)
        });
    }
    let limit = engine.config.assigned_timeout;
    let is_waiting = worker.status.lock().state.is_operational();
    (is_waiting && next.is_due(job.claimed_at.plus_ms(ms(limit)), now)).then(|| {
        let text = format!("worker {} did not start it within {limit:?}", worker.key);
        Failure::error(text).with_reason(ErrorReason::Timeout)
    })
}

/// Logs once, also in the job's log, that a handler does not stop.
async fn report_ignored_stops(
    engine: &Engine,
    worker: &ConnectedWorker,
    next: &mut NextDue,
    now: Timestamp,
) -> Result<(), EngineError> {
    let mut ignored = Vec::new();
    {
        let mut status = worker.status.lock();
        for (id, stopping) in status.stopping.iter_mut().filter(|(_, stopping)| !stopping.is_reported) {
            if next.is_due(stopping.since.plus_ms(STOP_MS), now) {
                stopping.is_reported = true;
                ignored.push((*id, stopping.run));
            }
        }
    }
    let text = format!("worker {} was asked to stop it and its handler is still running", worker.key);
    let node = engine.node_id();
    let notes: Vec<RunNote> = ignored
        .into_iter()
        .map(|(id, run)| {
            tracing::warn!(job = %id, worker = worker.key, "handler ignores the request to stop");
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
