//! Watches everything that could hang, by due time. Everything unfinished has a live owner or a deadline; this table says
//! which node acts when the owner is dead or the deadline has passed.
//!
//! | what | checked in | by |
//! |---|---|---|
//! | jobs of connected workers: not started, running too long, not stopping | `workers/watch.rs` | the node the worker is connected to |
//! | the same, of workers whose node has died | `unattended_jobs` | any node |
//! | workers that are silent or did not reconnect | `workers/watch.rs`, `lost_workers` | that node; after its death, any node |
//! | jobs that wait too long for a slot of this process | `slot_queue` | this node |
//! | processes that are being started for a job | `pool.rs` | this node |
//! | jobs past their expiry | `expired_jobs` | any node |
//! | dead nodes and their jobs | `dead_nodes` | any node |
//! | webhooks and bulk actions of a dead node | their own loops: they become due again | any node |
//!
//! Each action is guarded in its transaction by what was read before (the claim, the worker's session, the row's due time),
//! so a late action does nothing and all nodes may act concurrently. A check that fails, or has more than one batch to do, does
//! not delay the others.

use std::{
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use faena_domain::{LogEvent, LogLine, Timestamp};
use faena_store::{GUARDIAN, RunEnd, RunOutcome};

use crate::{
    Engine, EngineError, Round,
    config::ms,
    in_flight::InFlightJob,
    nodes,
    run_outcome::decide_outcome,
    workers::{CloseReason, watch},
};

/// Rows per check and round.
const BATCH: usize = 100;
/// How long ended workers are kept.
const KEEP_WORKERS: Duration = Duration::from_secs(24 * 3_600);
/// How long a job may wait here for a slot. After that another node may run it.
const MAX_SLOT_WAIT_MS: i64 = 10_000;

/// A check of the guardian, as the metrics label it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    Jobs,
    Workers,
    SlotQueue,
    Expired,
    Nodes,
}

impl Check {
    pub const ALL: [Check; 5] = [Check::Jobs, Check::Workers, Check::SlotQueue, Check::Expired, Check::Nodes];

    pub fn as_str(self) -> &'static str {
        match self {
            Check::Jobs => "jobs",
            Check::Workers => "workers",
            Check::SlotQueue => "slot_queue",
            Check::Expired => "expired",
            Check::Nodes => "nodes",
        }
    }
}

/// How often the guardian of this node had to act, by check.
#[derive(Default)]
pub struct ActionCounts([AtomicU64; 5]);

impl ActionCounts {
    pub(crate) fn add(&self, check: Check, actions: usize) {
        self.0[check as usize].fetch_add(actions as u64, Ordering::Relaxed);
    }

    pub fn of(&self, check: Check) -> u64 {
        self.0[check as usize].load(Ordering::Relaxed)
    }
}

/// When the checks that read the database are due. Changes in this process wake the guardian far more often than there is
/// anything to find there.
#[derive(Default)]
pub struct DueChecks {
    expired_at: AtomicI64,
    orphans_at: AtomicI64,
}

impl DueChecks {
    /// Makes the check for expired jobs due now, because a job was stored that may expire before all known ones.
    pub fn check_expired(&self) {
        self.expired_at.store(0, Ordering::Release);
    }

    /// Makes the check for orphans due now: a node or worker may have died.
    pub fn check_orphans(&self) {
        self.orphans_at.store(0, Ordering::Release);
    }
}

/// Runs a check if it is due, and sets when it is due next: at the time it names, and at least once per period.
async fn run_if_due(
    due: &AtomicI64,
    period: Duration,
    now: Timestamp,
    check: impl Future<Output = Result<Round, EngineError>>,
) -> Result<Round, EngineError> {
    let due_at = Timestamp::from_ms(due.load(Ordering::Acquire));
    if due_at > now {
        return Ok(Round::idle_until(Some(due_at)));
    }
    let latest = now.plus_ms(ms(period));
    // Before the check, so that a request that arrives meanwhile is not overwritten.
    due.store(latest.as_ms(), Ordering::Release);
    let round = match check.await {
        Ok(round) => round,
        Err(error) => {
            due.store(0, Ordering::Release);
            return Err(error);
        }
    };
    let next_at = if round.more { now } else { round.next_at.map_or(latest, |at| at.min(latest)) };
    due.fetch_min(next_at.as_ms(), Ordering::AcqRel);
    Ok(Round { next_at: Some(next_at), ..round })
}

impl Engine {
    /// Runs all checks that are due at `now`.
    pub async fn run_guardian(&self, now: Timestamp) -> Result<Round, EngineError> {
        let mut total = Round::default();
        let mut failure = None;
        let mut add = |round: Result<Round, EngineError>| match round {
            Ok(round) => total = total.and(round),
            Err(error) => failure = Some(error),
        };
        add(self.watch_workers(now).await);
        add(Ok(slot_queue(self, now)));
        if self.config.roles.engine {
            let (period, due) = (self.config.guardian_interval, &self.guardian.due_checks);
            add(run_if_due(&due.expired_at, period, now, expired_jobs(self, now)).await);
            add(run_if_due(&due.orphans_at, period, now, orphans(self, now)).await);
        }
        failure.map_or(Ok(total), Err)
    }

    /// Checks the workers connected to this node and their jobs.
    pub async fn watch_workers(&self, now: Timestamp) -> Result<Round, EngineError> {
        watch::run_once(self, now).await
    }
}

/// Releases jobs that were claimed ahead while runs were short and now wait behind long runs.
fn slot_queue(engine: &Engine, now: Timestamp) -> Round {
    let (late, next_at) = engine.dispatch.in_flight.take_late(now.plus_ms(-MAX_SLOT_WAIT_MS));
    if !late.is_empty() {
        // Otherwise this node would claim them again immediately.
        engine.dispatch.dispatcher.stop_claiming_ahead();
    }
    for job in &late {
        let line = LogLine::new(now, LogEvent::Released, "no slot became free here in time");
        let end = job.end(RunOutcome::Released, vec![line], now);
        engine.finish_job(job, RunEnd { by_guardian: true, ..end });
    }
    engine.guardian.actions.add(Check::SlotQueue, late.len());
    Round { handled: late.len(), more: false, next_at: next_at.map(|at| at.plus_ms(MAX_SLOT_WAIT_MS)) }
}

async fn expired_jobs(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let due = engine.store.job_expire(BATCH, now).await?;
    engine.guardian.actions.add(Check::Expired, due.expired);
    if due.expired > 0 {
        tracing::warn!(actor = GUARDIAN, jobs = due.expired, "expired jobs failed");
    }
    Ok(Round { handled: due.expired, more: due.more, next_at: due.next_at })
}

/// Recovers the jobs of dead nodes and of workers that no live node is responsible for.
async fn orphans(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let nodes = dead_nodes(engine, now).await;
    // Before the workers are declared lost: a job whose time is up has timed out and is not orphaned.
    let jobs = unattended_jobs(engine, now).await;
    let workers = lost_workers(engine, now).await?;
    Ok(nodes?.and(jobs?).and(workers))
}

/// Ends jobs whose time is up and whose worker is not connected to a live server.
async fn unattended_jobs(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let mut next: Option<Timestamp> = None;
    let mut ends = Vec::new();
    for unattended in engine.store.worker_unattended_jobs().await? {
        let (worker, is_starting) = (unattended.worker_key.clone(), unattended.is_starting);
        let job = InFlightJob::unattended(unattended);
        let (deadline, failure) = engine.time_limit(&job, &worker, is_starting, now);
        if deadline > now {
            next = Some(next.map_or(deadline, |known| known.min(deadline)));
            continue;
        }
        let reason = failure.message.clone();
        tracing::warn!(actor = GUARDIAN, job = %job.id(), worker, reason, "job of a dead server timed out");
        let (outcome, lines) = decide_outcome(&job, Err(failure), now);
        ends.push(RunEnd { by_guardian: true, ..job.end(outcome, lines, now) });
    }
    if ends.is_empty() {
        return Ok(Round::idle_until(next));
    }
    let accepted = engine.store.job_end(ends.clone(), now).await?;
    // If the worker has just reported the end of the job, through any node, that report counts.
    let ended: Vec<&RunEnd> = ends.iter().zip(accepted).filter(|(_, accepted)| *accepted).map(|(end, _)| end).collect();
    for end in &ended {
        engine.bus.changed(end.id, end.outcome.state(), Some(end.run), now);
    }
    engine.measures.jobs.add(&ended);
    engine.guardian.actions.add(Check::Jobs, ended.len());
    Ok(Round { handled: ended.len(), more: false, next_at: next })
}

async fn dead_nodes(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let (config, history) = (&engine.config, &engine.node.lease.history);
    let round =
        nodes::recover_dead(&*engine.store, history, ms(config.node_lease), config.grace_periods(), now).await?;
    engine.guardian.actions.add(Check::Nodes, round.handled);
    Ok(round)
}

/// Declares lost the workers whose deadline has passed and that no live node is responsible for.
async fn lost_workers(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let keep_since = now.plus_ms(-ms(KEEP_WORKERS));
    let swept = engine.store.worker_sweep(ms(engine.config.orphan_delay), keep_since, now).await?;
    for lost in &swept.lost {
        let jobs = lost.released.orphaned + lost.released.returned;
        tracing::warn!(actor = GUARDIAN, worker = lost.key, reason = "did not reconnect", jobs, "worker lost");
        let known = engine.workers.find(lost.id);
        engine.measures.workers.record_end(known.as_ref().map(|worker| worker.status.lock().state_since()), now);
        if let Some(worker) = known {
            worker.close(CloseReason::WorkerLost);
            engine.workers.drop_worker(&worker, &engine.dispatch.in_flight);
        }
    }
    engine.guardian.actions.add(Check::Workers, swept.lost.len());
    Ok(Round { handled: swept.lost.len(), more: swept.more, next_at: swept.next_at })
}
