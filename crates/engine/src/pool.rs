//! Pools of worker processes that Faena starts and watches on its own machine.
//!
//! A pool has between `min` and `max` processes, more of them while jobs wait. Each is a worker like any other: it connects
//! under the id it was given. An ephemeral pool starts one process per job; the job is `SCHEDULED` until the process has
//! connected. A process that crashes during startup is started again with a growing delay.
//!
//! Each process runs under a guard, which kills it and everything it has started when this server ends for any reason.

mod output;
mod process;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use faena_domain::{
    ErrorReason, Failure, SecretText, Timestamp, WorkerCapabilities, WorkerId, WorkerKind, WorkerState, masked_words,
};
use faena_process::ProcessEnd;
use faena_store::{Counts, GUARDIAN, Lane, Tally, WorkerEnd};
use parking_lot::Mutex;

use crate::{
    Engine, EngineError, Round,
    breaker::{Breaker, BreakerRule},
    config::ms,
    guardian::Check,
    workers::{ConnectedWorker, Transport, WorkerIdentity, watch::not_connected},
};
use process::Process;

#[derive(Clone, Debug)]
pub struct PoolConfig {
    pub name: String,
    pub command: Vec<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    /// Slots of one process.
    pub concurrency: u32,
    pub min: usize,
    pub max: usize,
    /// Whether each process runs one job only.
    pub ephemeral: bool,
    /// How long a process without jobs is kept.
    pub idle: Duration,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
}

/// The pools of this process.
#[derive(Default)]
pub struct Pools(Vec<Pool>);

struct Pool {
    config: PoolConfig,
    members: Mutex<HashMap<WorkerId, Member>>,
    start_failures: Mutex<StartFailures>,
}

/// One process, or a slot for one that is not started yet.
struct Member {
    worker: Arc<ConnectedWorker>,
    /// What its process needs to connect as this worker.
    session_token: SecretText,
    process: Option<Process>,
    started_at: Timestamp,
    /// Since when it has had no job.
    idle_since: Option<Timestamp>,
    stopping_since: Option<Timestamp>,
    /// Whether its process did not connect in time and was killed.
    has_timed_out: bool,
}

/// A process that has ended, and what was known about it.
struct EndedProcess {
    worker: WorkerId,
    end: ProcessEnd,
    /// Whether it was asked to stop.
    was_asked: bool,
    has_timed_out: bool,
    /// Whether it ended by itself, soon after its start.
    has_ended_early: bool,
    /// Whether it has ever received a job.
    has_worked: bool,
}

impl EndedProcess {
    /// Returns `None` while the process runs.
    fn of(worker: WorkerId, member: &Member, now: Timestamp) -> Option<EndedProcess> {
        let end = member.process.as_ref()?.ended()?;
        let was_asked = member.stopping_since.is_some();
        let is_early = now.ms_since(member.started_at) < STARTED_MS;
        Some(EndedProcess {
            worker,
            was_asked,
            has_timed_out: member.has_timed_out,
            has_ended_early: is_early && !was_asked,
            has_worked: member.worker.has_received_jobs(),
            end,
        })
    }
}

impl EndedProcess {
    /// Returns whether it ended without doing any work: it never connected, or ended successfully without having had a job.
    ///
    /// Without this rule a command that exits immediately, such as `true`, would be started again without a pause.
    fn has_done_nothing(&self, worker: Option<&ConnectedWorker>) -> bool {
        match (self.end.is_success(), worker) {
            (true, Some(worker)) if worker.state().is_operational() => !worker.has_received_jobs(),
            (true, None) => !self.has_worked,
            (_, worker) => !worker.is_some_and(|worker| worker.state().is_operational()),
        }
    }
}

/// Consecutive processes that ended during startup.
#[derive(Default)]
struct StartFailures {
    count: u32,
    retry_at: Option<Timestamp>,
}

/// Time between two rounds.
const PERIOD: Duration = Duration::from_secs(1);
const MAX_BACKOFF_MS: i64 = 60_000;
/// After this many consecutive failures, a person has to check the pool.
const REPORTED_FAILURES: u32 = 5;
/// A process that has run for this long did not crash during startup.
const STARTED_MS: i64 = 10_000;

impl Pools {
    pub fn new(configs: &[PoolConfig]) -> Pools {
        let pool = |config: &PoolConfig| Pool {
            config: config.clone(),
            members: Mutex::default(),
            start_failures: Mutex::default(),
        };
        Pools(configs.iter().map(pool).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub async fn run_once(&self, engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
        if self.0.is_empty() {
            return Ok(Round::default());
        }
        let counts = engine.store.counts().await?;
        let lanes = engine.store.lanes().await?;
        let mut handled = 0;
        for pool in &self.0 {
            handled += pool.remove_ended(engine, now).await?;
            handled += pool.update_members(engine, now);
            handled += pool.grow(engine, &counts, &lanes, now).await?;
            handled += pool.shrink(engine, now);
        }
        Ok(Round { handled, more: false, next_at: Some(now.plus_ms(ms(PERIOD))) })
    }

    /// Asks all processes to stop and waits until they have.
    pub async fn stop(&self) {
        for pool in &self.0 {
            for member in pool.members.lock().values_mut() {
                if let Some(process) = &mut member.process {
                    process.request_stop();
                }
            }
        }
        while !self.all_ended() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills the remaining processes with their process groups.
    pub fn kill(&self) {
        for pool in &self.0 {
            pool.members.lock().clear();
        }
    }

    fn all_ended(&self) -> bool {
        let ended = |member: &Member| member.process.as_ref().is_none_or(|process| process.ended().is_some());
        self.0.iter().all(|pool| pool.members.lock().values().all(ended))
    }
}

impl Pool {
    /// Ends the workers of processes that have ended.
    async fn remove_ended(&self, engine: &Engine, now: Timestamp) -> Result<usize, EngineError> {
        let ended: Vec<EndedProcess> = {
            let members = self.members.lock();
            members.iter().filter_map(|(id, member)| EndedProcess::of(*id, member, now)).collect()
        };
        for process in &ended {
            self.end_worker_of(engine, process, now).await?;
            self.members.lock().remove(&process.worker);
        }
        Ok(ended.len())
    }

    async fn end_worker_of(&self, engine: &Engine, process: &EndedProcess, now: Timestamp) -> Result<(), EngineError> {
        let worker = engine.workers.find(process.worker);
        let has_failed = process.has_ended_early && process.has_done_nothing(worker.as_deref());
        let retry_in = has_failed.then(|| self.delay_next_start(now));
        let reason = match (process.has_timed_out, retry_in) {
            (true, _) => format!("process did not connect within {:?}", engine.config.scheduled_timeout),
            (false, Some(delay)) => format!("process {} during startup; the next one starts in {delay:?}", process.end),
            (false, None) => format!("process {}", process.end),
        };
        // A process that ends successfully and without jobs is not lost.
        let has_left = (process.end.is_success() || process.was_asked)
            && worker.as_ref().is_none_or(|worker| worker.load().0 == 0);
        let end = if has_left { WorkerEnd::Left { reason: reason.clone() } } else { engine.lost(&reason) };
        let is_logged = has_failed || process.has_timed_out;
        let jobs = match worker {
            Some(worker) if is_logged => engine.end_registration(&worker, end, now).await?.unwrap_or(0),
            Some(worker) => {
                engine.end_worker(&worker, end, &reason, now).await?;
                0
            }
            // The worker has deregistered, or never connected. In the second case the store still has its registration.
            None => {
                if engine.store.worker_end(process.worker, 1, end, now).await?.is_some() {
                    engine.measures.workers.record_end(None, now);
                }
                0
            }
        };
        match retry_in {
            Some(delay) => self.report_failed_start(&process.end, jobs, delay),
            None => *self.start_failures.lock() = StartFailures::default(),
        }
        Ok(())
    }

    /// Counts a process that ended during startup, and returns how long the next one waits.
    fn delay_next_start(&self, now: Timestamp) -> Duration {
        let mut failures = self.start_failures.lock();
        failures.count += 1;
        let delay_ms = (500_i64 << failures.count.min(10)).min(MAX_BACKOFF_MS);
        failures.retry_at = Some(now.plus_ms(delay_ms));
        Duration::from_millis(delay_ms.unsigned_abs())
    }

    fn report_failed_start(&self, end: &ProcessEnd, jobs: usize, retry_in: Duration) {
        let (pool, failures) = (&self.config.name, self.start_failures.lock().count);
        let error = match end {
            ProcessEnd::NotStarted(error) => Some(error),
            ProcessEnd::Exited(_) | ProcessEnd::KilledBySignal(_) | ProcessEnd::GuardLost => None,
        };
        let exit_code = end.exit_code();
        tracing::warn!(pool, exit_code, error, jobs, failures, ?retry_in, "pool process failed to start");
        if failures == REPORTED_FAILURES {
            tracing::error!(
                pool,
                exit_code,
                error,
                failures,
                command = masked_words(&self.config.command),
                "pool processes keep failing, check the command"
            );
        }
    }

    /// Updates each member: starts its process if it has a job, and stops a process that is late or has finished its
    /// only job.
    fn update_members(&self, engine: &Engine, now: Timestamp) -> usize {
        let mut handled = 0;
        let mut removed = Vec::new();
        for (id, member) in self.members.lock().iter_mut() {
            match engine.workers.find(*id) {
                Some(worker) => member.worker = worker,
                None if member.process.is_none() => {
                    removed.push(*id);
                    continue;
                }
                // It has deregistered: its process ends by itself, or is killed.
                None => {
                    member.stopping_since.get_or_insert(now);
                }
            }
            let (jobs, _) = member.worker.load();
            if member.process.is_none() && jobs > 0 && self.can_start(now) {
                self.launch(engine, member, now);
                handled += 1;
            }
            let starting = matches!(member.worker.state(), WorkerState::Creating | WorkerState::Connecting);
            let is_late = now.ms_since(member.started_at) >= ms(engine.config.scheduled_timeout);
            if starting && is_late && member.process.is_some() && !member.has_timed_out {
                self.time_out(engine, member, now);
                handled += 1;
            }
            if member.worker.has_finished_only_job() && member.stopping_since.is_none() {
                member.stopping_since = Some(now);
                engine.workers.set_draining(*id, true, now);
                member.process.as_mut().into_iter().for_each(Process::request_stop);
            }
            if member.stopping_since.is_some_and(|since| now.ms_since(since) >= ms(engine.config.drain_grace)) {
                member.process.as_mut().into_iter().for_each(Process::kill);
            }
            member.idle_since = if jobs > 0 { None } else { member.idle_since.or(Some(now)) };
        }
        let mut members = self.members.lock();
        for id in removed {
            members.remove(&id);
        }
        handled
    }

    /// Kills a process that did not connect in time. The jobs it was started for time out.
    fn time_out(&self, engine: &Engine, member: &mut Member, now: Timestamp) {
        member.has_timed_out = true;
        member.process.as_mut().into_iter().for_each(Process::kill);
        let worker = &member.worker;
        let jobs: Vec<_> = worker.status.lock().in_flight.values().cloned().collect();
        tracing::warn!(
            actor = GUARDIAN,
            pool = self.config.name,
            worker = worker.key,
            timeout = ?engine.config.scheduled_timeout,
            jobs = jobs.len(),
            "pool process did not connect in time, killing it"
        );
        let reason = not_connected(&worker.key, engine.config.scheduled_timeout);
        for job in &jobs {
            let failure = Failure::error(reason.clone()).with_reason(ErrorReason::Timeout);
            engine.reports.handler.end_overdue(worker, job, failure, now);
        }
        engine.guardian.actions.add(Check::Jobs, jobs.len());
    }

    fn can_start(&self, now: Timestamp) -> bool {
        self.start_failures.lock().retry_at.is_none_or(|at| at <= now)
    }

    fn launch(&self, engine: &Engine, member: &mut Member, now: Timestamp) {
        member.started_at = now;
        member.worker.transition(WorkerState::Connecting, now);
        engine.wakeups.worker_changed();
        let (worker, token) = (&member.worker, &member.session_token);
        match Process::start(&self.config, worker, token, &engine.config, engine.wakeups.pools.clone()) {
            Ok(process) => member.process = Some(process),
            // The next round logs it.
            Err(error) => member.process = Some(Process::not_started(&error)),
        }
    }

    async fn grow(
        &self,
        engine: &Engine,
        counts: &Counts,
        lanes: &[Lane],
        now: Timestamp,
    ) -> Result<usize, EngineError> {
        if !self.can_start(now) {
            return Ok(0);
        }
        let capabilities = self.capabilities();
        let rules = engine.store.rules();
        // Jobs that cannot start because of a pause or a limit need no process.
        let waiting: i64 = lanes
            .iter()
            .filter(|lane| capabilities.covers(&lane.queue, &lane.kind) && rules.pause(&lane.queue).is_none())
            .filter_map(|lane| {
                let queued = *counts.by_lane.get(&(lane.id, Tally::Queued))?;
                let limits = rules.lane_limits(&lane.queue, &lane.kind);
                let most = limits.iter().filter_map(|(_, limit)| limit.concurrency).min();
                Some(most.map_or(queued, |most| queued.min(i64::from(most))))
            })
            .sum();
        let waiting = usize::try_from(waiting).unwrap_or(0);
        let (size, unstarted, in_flight) = {
            let members = self.members.lock();
            let unstarted = members.values().filter(|member| member.process.is_none()).count();
            (members.len(), unstarted, members.values().map(|member| member.worker.load().0).sum::<usize>())
        };
        let missing = if self.config.ephemeral {
            // One slot is kept open; its process is started when it gets a job.
            let wanted = waiting.clamp(1, 16);
            wanted.saturating_sub(unstarted).min(self.config.max.saturating_sub(size))
        } else {
            let wanted = (in_flight + waiting).div_ceil(self.config.concurrency as usize);
            wanted.clamp(self.config.min, self.config.max).saturating_sub(size)
        };
        for _ in 0..missing {
            self.add(engine, now).await?;
        }
        Ok(missing)
    }

    /// Adds a member. The process of an ephemeral pool is started when it has a job, others immediately.
    async fn add(&self, engine: &Engine, now: Timestamp) -> Result<(), EngineError> {
        let id = WorkerId::new();
        let config = &self.config;
        let session_token = SecretText::session_token(rand::random());
        let mut identity = WorkerIdentity {
            id,
            key: id.to_string(),
            // The process sends it when it registers.
            version: None,
            kind: WorkerKind::Pool,
            session: 0,
            transport: Transport::None,
            capabilities: self.capabilities(),
            concurrency: config.concurrency as usize,
            reports_starts: false,
            pool: Some(config.name.clone()),
            ephemeral: config.ephemeral,
            api_key: None,
            token: session_token.hash(),
        };
        let entry = identity.entry(Some(config.name.clone()), engine.node_id(), None);
        let admitted = engine.store.worker_admit(entry, now).await?;
        identity.session = admitted.session;
        engine.measures.workers.record_registration(admitted.was, false, now);
        let breaker = Breaker::new(BreakerRule::default());
        let worker =
            Arc::new(ConnectedWorker::new(identity, WorkerState::Creating, breaker, engine.measures.clone(), now));
        let mut member = Member {
            worker: worker.clone(),
            session_token,
            process: None,
            started_at: now,
            idle_since: None,
            stopping_since: None,
            has_timed_out: false,
        };
        engine.workers.add(worker);
        if !config.ephemeral {
            self.launch(engine, &mut member, now);
        }
        self.members.lock().insert(admitted.id, member);
        engine.dispatch.lanes.reconsider();
        Ok(())
    }

    /// Stops processes that have had no job for a while.
    fn shrink(&self, engine: &Engine, now: Timestamp) -> usize {
        if self.config.ephemeral {
            return 0;
        }
        let mut members = self.members.lock();
        let alive = members.values().filter(|member| member.stopping_since.is_none()).count();
        let spare = alive.saturating_sub(self.config.min);
        let idle_ms = ms(self.config.idle);
        let mut stopped = 0;
        for (id, member) in members.iter_mut() {
            let idle = member.idle_since.is_some_and(|since| now.ms_since(since) >= idle_ms);
            if stopped < spare && idle && member.stopping_since.is_none() && member.worker.state() == WorkerState::Ready
            {
                member.stopping_since = Some(now);
                engine.workers.set_draining(*id, true, now);
                member.process.as_mut().into_iter().for_each(Process::request_stop);
                stopped += 1;
            }
        }
        stopped
    }

    fn capabilities(&self) -> WorkerCapabilities {
        WorkerCapabilities { types: self.config.capabilities.clone(), queues: self.config.queues.clone() }
    }
}
