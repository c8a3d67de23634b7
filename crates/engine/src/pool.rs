//! Worker processes that Faena starts and looks after on its own machine.
//!
//! A pool has between `min` and `max` processes, more of them while jobs wait. Each is a worker like any other: it connects by one
//! of the doors, under the name it was given. An ephemeral pool starts one process per job; the job is `SCHEDULED` until the
//! process has connected. Who crashes at the start is started again later and later.
//!
//! Each process is started under a guard that kills its whole group when this process is gone, however it went.

mod process;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use faena_domain::{Timestamp, WorkerCapabilities, WorkerId, WorkerKind, WorkerState};
use faena_store::{Counts, Lane, StoreError, Tally, WorkerEnd};
use parking_lot::Mutex;

use crate::{
    Engine, Round,
    breaker::{Breaker, BreakerRule},
    config::ms,
    workers::{ConnectedWorker, Transport, WorkerIdentity},
};
use process::Process;

#[derive(Clone, Debug)]
pub struct PoolConfig {
    pub name: String,
    pub command: Vec<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    /// Jobs that one process runs at once.
    pub concurrency: u32,
    pub min: usize,
    pub max: usize,
    /// One process per job.
    pub ephemeral: bool,
    /// How long a process that is not needed stays.
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
    trouble: Mutex<Trouble>,
}

/// One process, or the place for one.
struct Member {
    worker: Arc<ConnectedWorker>,
    process: Option<Process>,
    started_at: Timestamp,
    /// Since when it has had nothing to do.
    idle_since: Option<Timestamp>,
    stopping_since: Option<Timestamp>,
}

#[derive(Default)]
struct Trouble {
    failures: u32,
    not_before: Option<Timestamp>,
}

/// How often pools are looked at while they have processes or jobs wait.
pub const LOOK: Duration = Duration::from_secs(1);
const SUCCESS: &str = "exit status: 0";
const LONGEST_BACKOFF_MS: i64 = 60_000;
/// A process that has lived for this long did not crash at its start.
const SETTLED_MS: i64 = 10_000;

impl Pools {
    pub fn new(configs: &[PoolConfig]) -> Pools {
        let pool =
            |config: &PoolConfig| Pool { config: config.clone(), members: Mutex::default(), trouble: Mutex::default() };
        Pools(configs.iter().map(pool).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub async fn run_once(&self, engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
        if self.0.is_empty() {
            return Ok(Round::default());
        }
        let counts = engine.store.counts().await?;
        let lanes = engine.store.lanes().await?;
        let mut handled = 0;
        for pool in &self.0 {
            handled += pool.bury(engine, now).await?;
            handled += pool.follow(engine, now);
            handled += pool.grow(engine, &counts, &lanes, now).await?;
            handled += pool.shrink(engine, now);
        }
        Ok(Round { handled, more: false, next_at: Some(now.plus_ms(ms(LOOK))) })
    }

    /// Asks all processes to stop, and waits until they have.
    pub async fn stop(&self) {
        for pool in &self.0 {
            for member in pool.members.lock().values_mut() {
                if let Some(process) = &mut member.process {
                    process.ask_to_stop();
                }
            }
        }
        while !self.all_ended() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills what is left, each with all its group.
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
    /// Sees to processes that have ended.
    async fn bury(&self, engine: &Engine, now: Timestamp) -> Result<usize, StoreError> {
        let ended: Vec<(WorkerId, String, bool, bool)> = self
            .members
            .lock()
            .iter()
            .filter_map(|(id, member)| {
                let status = member.process.as_ref()?.ended()?;
                let early = now.ms_since(member.started_at) < SETTLED_MS;
                Some((*id, status, early, member.stopping_since.is_some()))
            })
            .collect();
        for (id, status, early, asked) in &ended {
            let worker = engine.workers.find(*id);
            let connected = worker.as_ref().is_some_and(|worker| worker.state().is_operational());
            let (reason, delay_ms) = (format!("its process ended: {status}"), ms(engine.config.orphan_delay));
            // One that ends well with empty hands has not been lost.
            let in_peace = (status == SUCCESS || *asked) && worker.as_ref().is_none_or(|worker| worker.load().0 == 0);
            let end = if in_peace {
                WorkerEnd::Left { reason: reason.clone() }
            } else {
                WorkerEnd::Lost { reason: reason.clone(), delay_ms }
            };
            match worker {
                Some(worker) => engine.worker_ends(&worker, end, &reason, now).await?,
                // It has left, or never connected; then it is still in the store.
                None => drop(engine.store.worker_end(*id, 1, end, now).await?),
            }
            self.count_failure(*early && !asked && status != SUCCESS && !connected, now, status);
            self.members.lock().remove(id);
        }
        Ok(ended.len())
    }

    fn count_failure(&self, failed: bool, now: Timestamp, status: &str) {
        let mut trouble = self.trouble.lock();
        if !failed {
            *trouble = Trouble::default();
            return;
        }
        trouble.failures += 1;
        let delay_ms = (500_i64 << trouble.failures.min(10)).min(LONGEST_BACKOFF_MS);
        trouble.not_before = Some(now.plus_ms(delay_ms));
        tracing::error!(
            pool = self.config.name,
            failures = trouble.failures,
            "a process ended at its start ({status}); the next one is started in {delay_ms} ms"
        );
    }

    /// Keeps up with what became of each member: connected again under the same life, ready to be started, too late, idle.
    fn follow(&self, engine: &Engine, now: Timestamp) -> usize {
        let mut handled = 0;
        let mut gone = Vec::new();
        for (id, member) in self.members.lock().iter_mut() {
            match engine.workers.find(*id) {
                Some(worker) => member.worker = worker,
                None if member.process.is_none() => {
                    gone.push(*id);
                    continue;
                }
                // It has left: its process ends by itself, or is made to.
                None => {
                    member.stopping_since.get_or_insert(now);
                }
            }
            let (held, _) = member.worker.load();
            if member.process.is_none() && held > 0 && self.may_start(now) {
                self.launch(engine, member, now);
                handled += 1;
            }
            let starting = matches!(member.worker.state(), WorkerState::Creating | WorkerState::Connecting);
            if starting
                && member.process.is_some()
                && now.ms_since(member.started_at) >= ms(engine.config.scheduled_timeout)
            {
                tracing::error!(pool = self.config.name, "a process did not connect in time; it is ended");
                member.process.as_mut().into_iter().for_each(Process::kill);
            }
            if member.worker.has_done_its_job() && member.stopping_since.is_none() {
                member.stopping_since = Some(now);
                engine.workers.drain(*id, true, now);
                member.process.as_mut().into_iter().for_each(Process::ask_to_stop);
            }
            if member.stopping_since.is_some_and(|since| now.ms_since(since) >= ms(engine.config.drain_grace)) {
                member.process.as_mut().into_iter().for_each(Process::kill);
            }
            member.idle_since = if held > 0 { None } else { member.idle_since.or(Some(now)) };
        }
        let mut members = self.members.lock();
        for id in gone {
            members.remove(&id);
        }
        handled
    }

    fn may_start(&self, now: Timestamp) -> bool {
        self.trouble.lock().not_before.is_none_or(|at| at <= now)
    }

    fn launch(&self, engine: &Engine, member: &mut Member, now: Timestamp) {
        member.started_at = now;
        member.worker.becomes(WorkerState::Connecting, now);
        engine.workers.news.notify_one();
        match Process::start(&self.config, &member.worker, &engine.config, engine.workers.pools.clone()) {
            Ok(process) => member.process = Some(process),
            Err(error) => {
                tracing::error!(pool = self.config.name, "cannot start {:?}: {error}", self.config.command);
                member.process = Some(Process::stillborn(error.to_string()));
            }
        }
    }

    async fn grow(
        &self,
        engine: &Engine,
        counts: &Counts,
        lanes: &[Lane],
        now: Timestamp,
    ) -> Result<usize, StoreError> {
        if !self.may_start(now) {
            return Ok(0);
        }
        let capabilities = self.capabilities();
        let rules = engine.store.rules();
        // What a pause or a limit holds back needs no process.
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
        let (size, places, held) = {
            let members = self.members.lock();
            let places = members.values().filter(|member| member.process.is_none()).count();
            (members.len(), places, members.values().map(|member| member.worker.load().0).sum::<usize>())
        };
        let missing = if self.config.ephemeral {
            // One place is kept open; whoever gets a job is started.
            let wanted = waiting.clamp(1, 16);
            wanted.saturating_sub(places).min(self.config.max.saturating_sub(size))
        } else {
            let wanted = (held + waiting).div_ceil(self.config.concurrency as usize);
            wanted.clamp(self.config.min, self.config.max).saturating_sub(size)
        };
        for _ in 0..missing {
            self.add(engine, now).await?;
        }
        Ok(missing)
    }

    /// Makes room for a process. An ephemeral one is started when it has a job, the others at once.
    async fn add(&self, engine: &Engine, now: Timestamp) -> Result<(), StoreError> {
        let id = WorkerId::new();
        let config = &self.config;
        let mut identity = WorkerIdentity {
            id,
            key: id.to_string(),
            kind: WorkerKind::Pool,
            session: 0,
            transport: Transport::None,
            capabilities: self.capabilities(),
            concurrency: config.concurrency as usize,
            tells_starts: false,
            pool: Some(config.name.clone()),
            ephemeral: config.ephemeral,
        };
        let entry = identity.entry(Some(config.name.clone()), engine.node_id());
        let admitted = engine.store.worker_admit(entry, now).await?;
        identity.session = admitted.session;
        let breaker = Breaker::new(BreakerRule::default());
        let worker = Arc::new(ConnectedWorker::new(identity, WorkerState::Creating, breaker, now));
        let mut member =
            Member { worker: worker.clone(), process: None, started_at: now, idle_since: None, stopping_since: None };
        engine.workers.put(worker);
        if !config.ephemeral {
            self.launch(engine, &mut member, now);
        }
        self.members.lock().insert(admitted.id, member);
        engine.lanes.reconsider();
        Ok(())
    }

    /// Lets processes go that have had nothing to do for a while.
    fn shrink(&self, engine: &Engine, now: Timestamp) -> usize {
        if self.config.ephemeral {
            return 0;
        }
        let mut members = self.members.lock();
        let alive = members.values().filter(|member| member.stopping_since.is_none()).count();
        let spare = alive.saturating_sub(self.config.min);
        let idle_ms = ms(self.config.idle);
        let mut finish = 0;
        for (id, member) in members.iter_mut() {
            let idle = member.idle_since.is_some_and(|since| now.ms_since(since) >= idle_ms);
            if finish < spare && idle && member.stopping_since.is_none() && member.worker.state() == WorkerState::Ready
            {
                member.stopping_since = Some(now);
                engine.workers.drain(*id, true, now);
                member.process.as_mut().into_iter().for_each(Process::ask_to_stop);
                finish += 1;
            }
        }
        finish
    }

    fn capabilities(&self) -> WorkerCapabilities {
        WorkerCapabilities { types: self.config.capabilities.clone(), queues: self.config.queues.clone() }
    }
}
