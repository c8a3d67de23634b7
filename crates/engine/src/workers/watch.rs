//! Watches connected workers and their jobs by due time: jobs that run too long or are not started, requests to stop that
//! are ignored, workers that are silent or did not reconnect.
//!
//! A timed-out job ends immediately and its worker is asked to stop it; later reports about it are rejected. A lost worker's
//! jobs use an attempt. Each action is fenced (by the claim, by the worker's session), so a late action does nothing.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use faena_domain::{ErrorReason, Failure, Timestamp, WorkerState};
use faena_store::{GUARDIAN, RunUpdate};

use super::{ConnectedWorker, status::Stopping};
use crate::{Engine, EngineError, Round, config::ms, guardian::Check, in_flight::InFlightJob};

/// How long a handler may take to stop after it was asked to.
const STOP_MS: i64 = 10_000;

/// The earliest of all due times that are not reached yet.
struct NextDue(Option<Timestamp>);

impl NextDue {
    /// Returns whether `at` is reached; otherwise remembers it.
    fn check_due(&mut self, at: Timestamp, now: Timestamp) -> bool {
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
        let open_until = worker.status.lock().breaker.open_until();
        if open_until.is_some_and(|until| next.check_due(until, now)) {
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
        let is_due = next.check_due(since.plus_ms(ms(config.reconnect_grace)), now);
        return is_due.then(|| format!("did not reconnect within {:?}", config.reconnect_grace));
    }
    let is_due = next.check_due(status.seen_at.plus_ms(ms(config.worker_silence)), now);
    is_due.then(|| format!("no heartbeat for {:?}", config.worker_silence))
}

fn watch_jobs(engine: &Engine, worker: &Arc<ConnectedWorker>, next: &mut NextDue, now: Timestamp) -> usize {
    let jobs: Vec<Arc<InFlightJob>> = worker.status.lock().in_flight.values().cloned().collect();
    let mut handled = 0;
    for job in jobs {
        if let Some(failure) = overdue(engine, worker, &job, next, now) {
            end_overdue(engine, worker, &job, failure, now);
            next.check_due(now.plus_ms(STOP_MS), now);
            engine.guardian.actions.add(Check::Jobs, 1);
            handled += 1;
        }
    }
    handled
}

/// Ends a job without waiting for its worker, and asks the worker to stop it.
fn end_overdue(engine: &Engine, worker: &Arc<ConnectedWorker>, job: &InFlightJob, failure: Failure, now: Timestamp) {
    let was_not_started = job.started_at().is_none();
    let reason = failure.message.clone();
    engine.reports.handler.end_overdue(worker, job, failure, now);
    if was_not_started {
        engine.workers.record_dispatch_failure(worker, now);
    }
    let stopping = Stopping { run: job.run(), since: now, reason: reason.clone(), is_reported: false };
    worker.status.lock().stopping.insert(job.id(), stopping);
    job.send_stop(&reason);
    tracing::warn!(
        actor = GUARDIAN,
        job = %job.id(),
        correlation_id = job.correlation_id(),
        worker = worker.key,
        reason,
        "job timed out, stopping it"
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
        && next.check_due(if is_connected { requested_at.plus_ms(STOP_MS) } else { requested_at }, now)
    {
        return Some(Failure::error("the worker did not stop in time").with_reason(ErrorReason::Cancelled));
    }
    let is_operational = worker.status.lock().state.is_operational();
    if job.started_at().is_none() && !is_operational {
        return None;
    }
    let (deadline, failure) = engine.time_limit(job, &worker.key, false, now);
    next.check_due(deadline, now).then_some(failure)
}

impl Engine {
    /// Returns when the time of a job is up, and the failure with which it then ends.
    ///
    /// `is_starting`: the process of its worker has not connected.
    pub(crate) fn time_limit(
        &self,
        job: &InFlightJob,
        worker: &str,
        is_starting: bool,
        now: Timestamp,
    ) -> (Timestamp, Failure) {
        let (deadline, text) = if let Some(started_at) = job.started_at() {
            let deadline = self.deadline_of(job, now);
            (deadline, timed_out(Duration::from_millis(deadline.ms_since(started_at).unsigned_abs())))
        } else if is_starting {
            let limit = self.config.scheduled_timeout;
            (job.claimed_at.plus_ms(ms(limit)), not_connected(worker, limit))
        } else {
            let limit = self.config.assigned_timeout;
            (job.claimed_at.plus_ms(ms(limit)), format!("worker {worker} did not start it within {limit:?}"))
        };
        (deadline, Failure::error(text).with_reason(ErrorReason::Timeout))
    }
}

/// Returns the error of a job that ran for too long.
pub(crate) fn timed_out(limit: Duration) -> String {
    format!("took longer than its limit of {limit:?}")
}

/// Returns the error of a job whose worker never connected.
pub(crate) fn not_connected(worker: &str, limit: Duration) -> String {
    format!("the process of worker {worker} did not connect within {limit:?}")
}

/// Logs once, in the server's log and in the job's, that a handler does not stop.
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
            if next.check_due(stopping.since.plus_ms(STOP_MS), now) {
                stopping.is_reported = true;
                ignored.push((*id, stopping.run));
            }
        }
    }
    let text = format!("worker {} was asked to stop it and its handler is still running", worker.key);
    let updates: Vec<RunUpdate> = ignored
        .into_iter()
        .map(|(id, run)| {
            tracing::warn!(job = %id, worker = worker.key, "handler does not stop, its slot stays occupied");
            RunUpdate::stale(id, run, text.clone(), now)
        })
        .collect();
    if !updates.is_empty() {
        engine.store.run_update(updates, now).await?;
    }
    Ok(())
}
