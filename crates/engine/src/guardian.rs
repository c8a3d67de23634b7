//! Watches everything that could hang (SPEC 5), by due time: whatever is not finished has a living owner or a deadline, and here is
//! who acts when both are gone.
//!
//! | what | whose time is up | who looks |
//! |---|---|---|
//! | jobs in a worker's hands: not started, running too long, not stopping | `workers/watch.rs` | the node it is connected to |
//! | workers that fell silent, or did not come back | `workers/watch.rs`, `adrift` | that node; after its death, any |
//! | jobs in this process's line that no slot takes | `line` | this node |
//! | processes that are being started for a job | `pool.rs` | this node |
//! | jobs past their expiry | `expired` | any node |
//! | servers that died, with what they held | `servers` | any node |
//! | webhooks and bulk actions whose node does not tell how it went | their own loops: they are due again | any node |
//!
//! Each act is guarded in its transaction by what was read before (the block, the worker's session, the row's due time), so one that
//! comes too late does nothing, and all nodes may act at once. A check that fails, or has more to do than one batch, does not
//! keep the others from theirs.

use std::{
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use faena_domain::{LogEvent, LogLine, Timestamp};
use faena_store::{RunOutcome, StoreError};

use crate::{
    Engine, Round,
    config::ms,
    nodes,
    workers::{CloseReason, watch},
};

/// Whose acts are counted, for the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    Jobs,
    Workers,
    Line,
    Expired,
    Servers,
}

impl Check {
    pub const ALL: [Check; 5] = [Check::Jobs, Check::Workers, Check::Line, Check::Expired, Check::Servers];

    pub fn as_str(self) -> &'static str {
        match self {
            Check::Jobs => "jobs",
            Check::Workers => "workers",
            Check::Line => "line",
            Check::Expired => "expired",
            Check::Servers => "servers",
        }
    }
}

/// How often the guardian of this node had to act.
#[derive(Default)]
pub struct ActionCounts([AtomicU64; 5]);

impl ActionCounts {
    pub(crate) fn count(&self, check: Check, actions: usize) {
        self.0[check as usize].fetch_add(actions as u64, Ordering::Relaxed);
    }

    pub fn of(&self, check: Check) -> u64 {
        self.0[check as usize].load(Ordering::Relaxed)
    }
}

/// When the database is looked at next. What happens in this process wakes the guardian far more often than there is
/// anything to find there.
#[derive(Default)]
pub struct DueChecks {
    expiry_at: AtomicI64,
    orphans_at: AtomicI64,
}

impl DueChecks {
    /// Something was put off; it may expire before all that is known.
    pub fn look_for_expired(&self) {
        self.expiry_at.store(0, Ordering::Release);
    }

    /// A server or worker may have died.
    pub fn look_for_orphans(&self) {
        self.orphans_at.store(0, Ordering::Release);
    }
}

/// Takes a check's turn if its time has come, and sets the next: when there is something to do, and at least once per period.
async fn on_time(
    turn: &AtomicI64,
    period: Duration,
    now: Timestamp,
    check: impl Future<Output = Result<Round, StoreError>>,
) -> Result<Round, StoreError> {
    let due_at = Timestamp::from_ms(turn.load(Ordering::Acquire));
    if due_at > now {
        return Ok(Round { next_at: Some(due_at), ..Round::default() });
    }
    let latest = now.plus_ms(ms(period));
    // Before the check: who asks for another look meanwhile is heard.
    turn.store(latest.as_ms(), Ordering::Release);
    let round = match check.await {
        Ok(round) => round,
        Err(error) => {
            turn.store(0, Ordering::Release);
            return Err(error);
        }
    };
    let next_at = if round.more { now } else { round.next_at.map_or(latest, |at| at.min(latest)) };
    turn.fetch_min(next_at.as_ms(), Ordering::AcqRel);
    Ok(Round { next_at: Some(next_at), ..round })
}

/// As whom it acts.
pub const ACTOR: &str = "system:guardian";

/// Rows that one round handles of each kind.
const BATCH: usize = 100;
/// How long workers that have ended are remembered.
const FORGET_WORKERS: Duration = Duration::from_secs(24 * 3_600);
/// How long a job may wait here for a slot that is taken by others: another node may have one.
const LINE_MS: i64 = 10_000;

impl Engine {
    /// One look at everything that could hang, at a time of the caller's choice.
    pub async fn guard(&self, now: Timestamp) -> Result<Round, StoreError> {
        let mut all = Round::default();
        let mut failed = None;
        let mut take = |round: Result<Round, StoreError>| match round {
            Ok(round) => {
                all.handled += round.handled;
                all.more |= round.more;
                all.next_at = all.next_at.into_iter().chain(round.next_at).min();
            }
            Err(error) => failed = Some(error),
        };
        take(self.look_after(now).await);
        take(Ok(line(self, now)));
        if self.config.roles.engine {
            let period = self.config.guardian_interval;
            take(on_time(&self.due_checks.expiry_at, period, now, expired(self, now)).await);
            take(on_time(&self.due_checks.orphans_at, period, now, orphans(self, now)).await);
        }
        failed.map_or(Ok(all), Err)
    }

    /// One look at what the workers have in hand that are connected here.
    pub async fn look_after(&self, now: Timestamp) -> Result<Round, StoreError> {
        watch::run_once(self, now).await
    }
}

/// Jobs that were claimed while jobs were short, and stand behind long ones now, go back to where others can take them.
fn line(engine: &Engine, now: Timestamp) -> Round {
    let (late, next_at) = engine.in_flight.late_in_line(now.plus_ms(-LINE_MS));
    if !late.is_empty() {
        // Or they would be claimed again at once.
        engine.dispatcher.claim_no_more_ahead();
    }
    for held in &late {
        let line = LogLine::new(now, LogEvent::HandedBack, "no slot became free here in time");
        let end = held.end(RunOutcome::HandedBack, vec![line], now);
        engine.hand_in(held, end);
    }
    engine.actions.count(Check::Line, late.len());
    Round { handled: late.len(), more: false, next_at: next_at.map(|at| at.plus_ms(LINE_MS)) }
}

async fn expired(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let due = engine.store.job_expire(BATCH, now).await?;
    engine.actions.count(Check::Expired, due.expired);
    Ok(Round { handled: due.expired, more: due.more, next_at: due.next_at })
}

/// What dead servers and workers that nobody looks after have left behind.
async fn orphans(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let servers = servers(engine, now).await;
    let adrift = adrift(engine, now).await?;
    let servers = servers?;
    Ok(Round {
        handled: servers.handled + adrift.handled,
        more: servers.more || adrift.more,
        next_at: servers.next_at.into_iter().chain(adrift.next_at).min(),
    })
}

async fn servers(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let lease_ms = ms(engine.config.node_lease);
    let round =
        nodes::run_once(&*engine.store, &engine.lease_history, lease_ms, engine.config.grace_periods(), now).await?;
    engine.actions.count(Check::Servers, round.handled);
    Ok(round)
}

/// Gives up the workers that no living node looks after, when their time is up.
async fn adrift(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let forget_before = now.plus_ms(-ms(FORGET_WORKERS));
    let swept = engine.store.worker_sweep(ms(engine.config.orphan_delay), forget_before, now).await?;
    for lost in &swept.lost {
        let jobs = lost.freed.orphaned + lost.freed.returned;
        tracing::warn!(actor = ACTOR, worker = lost.key, jobs, "a worker did not come back; its jobs go on elsewhere");
        if let Some(worker) = engine.workers.find(lost.id) {
            worker.close(CloseReason::WorkerLost);
            engine.workers.drop_worker(&worker, &engine.in_flight);
        }
    }
    engine.actions.count(Check::Workers, swept.lost.len());
    Ok(Round { handled: swept.lost.len(), more: swept.more, next_at: swept.next_at })
}
