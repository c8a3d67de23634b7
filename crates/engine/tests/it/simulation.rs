//! Simulates servers, workers and webhook senders that die, stall, fall silent and reconnect.
//!
//! Every job of a dead owner must be recovered within one guardian interval after the deadline of that owner, and no job before
//! it. The same applies to webhooks.
//!
//! The seed decides everything that happens; a failure names it. FAENA_TEST_SEEDS=100 runs that many seeds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use faena_domain::{Failure, JobId, JobState, NewJob, Run, SecretText, Timestamp, WebhookId};
use faena_engine::{
    Engine, EngineConfig, RedisQueueConfig, Roles,
    workers::{ConnectedWorker, Registration, Report, ReportKind, Transport, WorkerCommand},
};
use faena_store::{ClaimRequest, Delivery, Owner, Store, Tally, WebhookNext, WebhookResult, WebhookTakeRequest};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::fixture::{TestDatabase, open_postgres, redis_queue};

const REMOTE: &str = "remote";
const BUILT_IN: &str = "built-in";
const STEPS: usize = 150;
/// Longest step of the simulated time. An action that is due immediately happens within one step.
const STEP_MS: i64 = 6_000;

struct Server {
    engine: Arc<Engine>,
    /// When the driver would wake the guardian.
    guardian_due_at: Timestamp,
    renewed_at: Timestamp,
    alive: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum WorkerCondition {
    /// Runs jobs and reports.
    Healthy,
    /// Sends heartbeats but never reports on its jobs.
    Stalled,
    /// Is connected but sends nothing.
    Silent,
    Disconnected,
}

struct Worker {
    key: String,
    session_token: SecretText,
    connected: Arc<ConnectedWorker>,
    server: usize,
    condition: WorkerCondition,
    seen_at: Timestamp,
    /// Earliest and latest time at which it must be declared lost.
    lost_between: Option<(Timestamp, Timestamp)>,
}

#[derive(Clone, Copy)]
enum ClaimOwner {
    Worker(usize),
    Server(usize),
}

struct Claimed {
    owner: ClaimOwner,
    started_at: Timestamp,
    timeout_ms: i64,
}

/// A webhook that a server is sending.
struct Sending {
    delivery: Delivery,
    server: usize,
    lease_ends: Timestamp,
}

const WEBHOOK_LEASE_MS: i64 = 40_000;

struct Simulation {
    seed: u64,
    random: StdRng,
    store: Arc<dyn Store>,
    _database: TestDatabase,
    redis_queue: Option<RedisQueueConfig>,
    now: Timestamp,
    servers: Vec<Server>,
    workers: Vec<Worker>,
    in_flight: HashMap<(JobId, Run), Claimed>,
    jobs: Vec<JobId>,
    completed: HashMap<JobId, usize>,
    orphaned: usize,
    returned: usize,
    sending: HashMap<WebhookId, Sending>,
    sent_again: usize,
}

fn config(redis_queue: Option<RedisQueueConfig>) -> EngineConfig {
    let mut config = EngineConfig { roles: Roles { worker: false, ..Roles::ALL }, ..EngineConfig::default() };
    if redis_queue.is_some() {
        // One server is chosen for this long, in real time, to compare Redis with the database.
        config.guardian_interval = Duration::from_millis(1);
    }
    EngineConfig { redis_queue, ..config }
}

impl Simulation {
    async fn new(seed: u64) -> Simulation {
        let (store, database) = open_postgres().await;
        Simulation {
            seed,
            random: StdRng::seed_from_u64(seed),
            store,
            _database: database,
            redis_queue: redis_queue(),
            now: Timestamp::now(),
            servers: Vec::new(),
            workers: Vec::new(),
            in_flight: HashMap::new(),
            jobs: Vec::new(),
            completed: HashMap::new(),
            orphaned: 0,
            returned: 0,
            sending: HashMap::new(),
            sent_again: 0,
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn random_index(&mut self, count: usize) -> usize {
        self.random.random_range(0..count)
    }

    fn live_servers(&self) -> Vec<usize> {
        (0..self.servers.len()).filter(|at| self.servers[*at].alive).collect()
    }

    async fn start_server(&mut self) {
        let engine =
            Engine::without_loops(self.store.clone(), config(self.redis_queue.clone()), self.now).await.unwrap();
        self.servers.push(Server { engine, guardian_due_at: self.now, renewed_at: self.now, alive: true });
    }

    /// Kills a server as `kill -9` does: it reports nothing.
    fn kill_server(&mut self, at: usize) {
        self.servers[at].alive = false;
        let lease_ends = self.servers[at].renewed_at.plus_ms(15_000);
        // Its workers may reconnect within the grace period after its lease has expired, which another server notices within two steps.
        let earliest = lease_ends.plus_ms(10_000).max(self.now);
        let latest = lease_ends.plus_ms(10_000 + 30_000 + 3 * STEP_MS);
        for worker in self.workers.iter_mut().filter(|worker| worker.server == at) {
            // An earlier deadline of a lost worker does not count: the server that watched it is dead.
            let known = worker.lost_between.map_or(earliest, |(known, _)| known.min(earliest));
            worker.condition = WorkerCondition::Disconnected;
            worker.lost_between = Some((known, latest));
        }
    }

    async fn connect(&mut self, at: Option<usize>) {
        let live_servers = self.live_servers();
        if live_servers.is_empty() {
            return;
        }
        let server = live_servers[self.random_index(live_servers.len())];
        let key = match at {
            Some(at) => self.workers[at].key.clone(),
            None => format!("worker-{}", self.workers.len()),
        };
        let registration = Registration {
            session_token: at.map(|at| self.workers[at].session_token.clone()),
            worker_id: Some(key.clone()),
            capabilities: vec![REMOTE.into()],
            concurrency: Some(3),
            ..Registration::default()
        };
        let connection =
            self.servers[server].engine.register_worker(registration, Transport::WebSocket, self.now).await.unwrap();
        let worker = Worker {
            key,
            session_token: connection.session_token,
            connected: connection.worker,
            server,
            condition: WorkerCondition::Healthy,
            seen_at: self.now,
            lost_between: None,
        };
        match at {
            Some(at) => self.workers[at] = worker,
            None => self.workers.push(worker),
        }
    }

    async fn inject_event(&mut self) {
        match self.random_index(12) {
            0 if self.live_servers().len() > 1 => {
                let live_servers = self.live_servers();
                let at = live_servers[self.random_index(live_servers.len())];
                self.kill_server(at);
            }
            1 if self.live_servers().len() < 3 => self.start_server().await,
            2 if self.workers.len() < 8 => self.connect(None).await,
            3 | 4 => self.disturb_worker(WorkerCondition::Disconnected).await,
            5 => self.disturb_worker(WorkerCondition::Silent).await,
            6 => self.disturb_worker(WorkerCondition::Stalled).await,
            7 | 8 => {
                let unhealthy: Vec<usize> = (0..self.workers.len())
                    .filter(|at| self.workers[*at].condition != WorkerCondition::Healthy)
                    .collect();
                if !unhealthy.is_empty() {
                    let at = unhealthy[self.random_index(unhealthy.len())];
                    self.connect(Some(at)).await;
                }
            }
            _ => {}
        }
        if self.chance(60) {
            self.submit().await;
        }
        if self.chance(30) {
            self.claim_built_in().await;
        }
    }

    async fn disturb_worker(&mut self, condition: WorkerCondition) {
        let healthy: Vec<usize> = (0..self.workers.len())
            .filter(|at| {
                self.workers[*at].condition == WorkerCondition::Healthy && self.servers[self.workers[*at].server].alive
            })
            .collect();
        if healthy.is_empty() {
            return;
        }
        let at = healthy[self.random_index(healthy.len())];
        let worker = &mut self.workers[at];
        worker.condition = condition;
        match condition {
            WorkerCondition::Disconnected => {
                let due = self.now.plus_ms(10_000);
                worker.lost_between = Some((due, due.plus_ms(30_000 + STEP_MS)));
                let (engine, connected) = (self.servers[worker.server].engine.clone(), worker.connected.clone());
                engine.disconnect_worker(&connected, false, self.now).await;
            }
            WorkerCondition::Silent => {
                let due = worker.seen_at.plus_ms(90_000);
                worker.lost_between = Some((due, due.plus_ms(30_000 + STEP_MS)));
            }
            WorkerCondition::Healthy | WorkerCondition::Stalled => {}
        }
    }

    async fn submit(&mut self) {
        for _ in 0..self.random.random_range(1..4) {
            let mut job = NewJob::new(if self.chance(75) { REMOTE } else { BUILT_IN });
            job.options.retry.max_retries = 10;
            job.options.webhook_url = self.chance(50).then(|| "https://example.org/hook".to_owned());
            job.options.timeout_ms = Some(u64::from(self.random.random_range(60..400u32)) * 1_000);
            self.jobs.push(self.store.job_submit(vec![job], None, self.now).await.unwrap()[0].id);
        }
    }

    /// Claims jobs as the built-in worker of a server does.
    async fn claim_built_in(&mut self) {
        let live_servers = self.live_servers();
        if live_servers.is_empty() {
            return;
        }
        let at = live_servers[self.random_index(live_servers.len())];
        let lanes: Vec<i32> =
            self.store.lanes().await.unwrap().into_iter().filter(|l| l.kind == BUILT_IN).map(|l| l.id).collect();
        if lanes.is_empty() {
            return;
        }
        let owner = Owner::Node(self.servers[at].engine.node_id());
        let request = ClaimRequest { owner, lanes, limit: 3, idle_slots: 3, candidates: None };
        for job in self.store.job_claim(vec![request], self.now).await.unwrap().remove(0).jobs {
            let claimed = Claimed { owner: ClaimOwner::Server(at), started_at: self.now, timeout_ms: i64::MAX / 4 };
            self.in_flight.insert((job.id, job.run), claimed);
        }
    }

    async fn run_loops(&mut self) {
        for at in self.live_servers() {
            let engine = self.servers[at].engine.clone();
            engine.run_loop("lease", self.now).await.unwrap();
            self.servers[at].renewed_at = self.now;
            for name in ["poller", "promoter", "queue", "dispatcher", "recorder", "reporter", "queue-reconciler"] {
                if self.redis_queue.is_some() || !name.starts_with("queue") {
                    engine.run_loop(name, self.now).await.unwrap();
                }
            }
            engine.persist_worker_status(self.now).await.unwrap();
            let needs_recovery = self.store.poll(engine.node_id(), self.now).await.unwrap().needs_recovery;
            if needs_recovery || self.servers[at].guardian_due_at <= self.now {
                let mut round = engine.run_loop("guardian", self.now).await.unwrap();
                while round.more {
                    round = engine.run_loop("guardian", self.now).await.unwrap();
                }
                engine.run_loop("reporter", self.now).await.unwrap();
                let latest = self.now.plus_ms(30_000);
                self.servers[at].guardian_due_at = round.next_at.map_or(latest, |at| at.min(latest));
            }
        }
    }

    async fn run_workers(&mut self) {
        for at in 0..self.workers.len() {
            let (condition, server) = (self.workers[at].condition, self.workers[at].server);
            if !self.servers[server].alive || !matches!(condition, WorkerCondition::Healthy | WorkerCondition::Stalled)
            {
                continue;
            }
            let connected = self.workers[at].connected.clone();
            connected.record_heartbeat(self.now);
            self.workers[at].seen_at = self.now;
            for command in connected.drain_commands() {
                if let WorkerCommand::Job(delivery) = command {
                    let job = &delivery.job.claimed;
                    let claimed = Claimed {
                        owner: ClaimOwner::Worker(at),
                        started_at: delivery.job.started_at().unwrap_or(self.now),
                        timeout_ms: i64::try_from(job.options.timeout_ms.unwrap()).unwrap(),
                    };
                    self.in_flight.entry((job.id, job.run)).or_insert(claimed);
                }
            }
            if condition == WorkerCondition::Healthy {
                self.report_some(at).await;
            }
        }
    }

    /// Ends some of the jobs of a worker.
    async fn report_some(&mut self, at: usize) {
        let own_runs: Vec<(JobId, Run)> = self
            .in_flight
            .iter()
            .filter(|(_, claimed)| matches!(claimed.owner, ClaimOwner::Worker(w) if w == at))
            .map(|(k, _)| *k)
            .collect();
        for (id, run) in own_runs {
            if !self.chance(40) {
                continue;
            }
            let succeeds = self.chance(80);
            let kind = if succeeds {
                ReportKind::Complete { result: None }
            } else {
                ReportKind::Fail(Failure::error("it failed"))
            };
            let engine = self.servers[self.workers[at].server].engine.clone();
            let connected = self.workers[at].connected.clone();
            let report = Report { job_id: id, run: Some(run), kind };
            let (answer, _) = tokio::join!(engine.reports.handler.handle_one(&connected, report, self.now), async {
                // The reporter runs when there is something to report.
                tokio::task::yield_now().await;
                engine.run_loop("reporter", self.now).await.unwrap();
            });
            if answer.unwrap().is_ok() {
                if succeeds {
                    *self.completed.entry(id).or_default() += 1;
                }
                self.in_flight.remove(&(id, run));
            }
        }
    }

    /// Makes every live server take due webhooks and store the results of some of them.
    async fn send_webhooks(&mut self) {
        for at in self.live_servers() {
            let request = WebhookTakeRequest {
                node: self.servers[at].engine.node_id(),
                limit: 50,
                per_host: 50,
                host_capacities: Vec::new(),
                allowed: 50,
                lease_ms: WEBHOOK_LEASE_MS,
            };
            for delivery in self.store.webhook_take(request, self.now).await.unwrap().deliveries {
                if let Some(before) = self.sending.get(&delivery.id) {
                    self.sent_again += 1;
                    let sender = &self.servers[before.server];
                    let sender_lease_ends =
                        if sender.alive { Timestamp::MAX } else { sender.renewed_at.plus_ms(15_000) };
                    let earliest = before.lease_ends.min(sender_lease_ends);
                    assert!(self.now >= earliest, "seed {}: a webhook was taken from its sender early", self.seed);
                    assert!(delivery.number > before.delivery.number);
                }
                let lease_ends = self.now.plus_ms(WEBHOOK_LEASE_MS);
                self.sending.insert(delivery.id, Sending { delivery, server: at, lease_ends });
            }
        }
        let in_progress: Vec<WebhookId> = self.sending.keys().copied().collect();
        for id in in_progress {
            let Sending { delivery, server, lease_ends } = &self.sending[&id];
            assert!(
                self.now <= lease_ends.plus_ms(STEP_MS),
                "seed {}: a webhook of a lost sender was missed",
                self.seed
            );
            if !self.servers[*server].alive {
                continue;
            }
            let delivery = delivery.clone();
            if self.chance(30) {
                let next = match self.chance(60) {
                    true => WebhookNext::Delivered,
                    false => WebhookNext::Again { due_at: self.now.plus_ms(5_000) },
                };
                let result = WebhookResult {
                    id,
                    number: delivery.number,
                    attempt: delivery.attempt,
                    allowed: 50,
                    at: self.now,
                    took_ms: 1,
                    status: Some(200),
                    error: None,
                    answer: None,
                    next,
                };
                assert_eq!(self.store.webhook_settle(vec![result], self.now).await.unwrap(), [true]);
                self.sending.remove(&id);
            }
        }
    }

    /// Returns the earliest and the latest time at which a job may be recovered.
    fn recovery_window(&self, claimed: &Claimed) -> (Timestamp, Timestamp) {
        let never = Timestamp::MAX;
        match claimed.owner {
            ClaimOwner::Worker(at) => {
                let worker = &self.workers[at];
                let overdue = claimed.started_at.plus_ms(claimed.timeout_ms);
                let is_watched = self.servers[worker.server].alive
                    && matches!(worker.condition, WorkerCondition::Healthy | WorkerCondition::Stalled);
                let by_timeout = if is_watched { overdue.plus_ms(30_000 + STEP_MS) } else { never };
                match worker.lost_between {
                    Some((earliest, latest)) => (earliest.min(overdue), latest.min(by_timeout)),
                    None => (overdue, by_timeout),
                }
            }
            ClaimOwner::Server(at) if self.servers[at].alive => (never, never),
            ClaimOwner::Server(at) => {
                let lease_ends = self.servers[at].renewed_at.plus_ms(15_000);
                // A server declares others dead only after it has kept its own lease for a whole period.
                (lease_ends, lease_ends.plus_ms(15_000 + 30_000 + 2 * STEP_MS))
            }
        }
    }

    async fn check(&mut self) {
        let open: Vec<(JobId, Run)> = self.in_flight.keys().copied().collect();
        for (id, run) in open {
            let job = self.store.job_get(id).await.unwrap().unwrap();
            let (earliest, latest) = self.recovery_window(&self.in_flight[&(id, run)]);
            let context = || {
                let claimed = &self.in_flight[&(id, run)];
                let owner = match claimed.owner {
                    ClaimOwner::Worker(at) => {
                        format!("worker {at} ({:?}, server {})", self.workers[at].condition, self.workers[at].server)
                    }
                    ClaimOwner::Server(at) => format!("server {at}"),
                };
                format!(
                    "seed {}, at {}, run {run} of {owner}, started {}: {job:#?}",
                    self.seed, self.now, claimed.started_at
                )
            };
            if job.status.is_in_flight() && job.run.is_none_or(|current| current == run) {
                assert!(self.now <= latest, "an orphan was missed (latest {latest}): {}", context());
                continue;
            }
            assert!(self.now >= earliest, "a job was recovered early (earliest {earliest}): {}", context());
            if job
                .execution_log
                .iter()
                .any(|line| line.run == Some(run) && matches!(line.event.as_str(), "orphaned" | "timeout"))
            {
                self.orphaned += 1;
            } else {
                self.returned += 1;
            }
            self.in_flight.remove(&(id, run));
        }
    }

    async fn step(&mut self) {
        self.now = self.now.plus_ms(self.random.random_range(500..=STEP_MS));
        self.inject_event().await;
        self.run_loops().await;
        self.run_workers().await;
        self.send_webhooks().await;
        self.check().await;
    }

    /// Stops all faults and lets the remaining jobs finish.
    async fn settle(&mut self) {
        if self.live_servers().is_empty() {
            self.start_server().await;
        }
        self.connect(None).await;
        for _ in 0..600 {
            self.now = self.now.plus_ms(STEP_MS);
            self.claim_built_in().await;
            self.run_loops().await;
            self.run_workers().await;
            let built_in: Vec<(JobId, Run)> = self
                .in_flight
                .iter()
                .filter(|(_, claimed)| matches!(claimed.owner, ClaimOwner::Server(s) if self.servers[s].alive))
                .map(|(k, _)| *k)
                .collect();
            if !built_in.is_empty() {
                self.end_built_in(built_in).await;
            }
            self.send_webhooks().await;
            self.check().await;
            let open = self.store.counts().await.unwrap();
            let unfinished: i64 = open
                .by_lane
                .iter()
                .filter(|((_, tally), _)| (*tally as i16) < Tally::Completed as i16)
                .map(|(_, n)| n)
                .sum();
            let undelivered = self.store.webhook_counts().await.unwrap();
            let undelivered: u64 = undelivered.iter().filter(|(state, _)| !state.is_terminal()).map(|(_, n)| n).sum();
            if unfinished == 0 && undelivered == 0 {
                return;
            }
        }
        panic!("seed {}: some jobs or webhooks are unfinished: {:?}", self.seed, self.store.counts().await);
    }

    async fn end_built_in(&mut self, runs: Vec<(JobId, Run)>) {
        for (id, run) in runs {
            let job = self.store.job_get(id).await.unwrap().unwrap();
            let lanes = self.store.lanes().await.unwrap();
            let lane = lanes.iter().find(|lane| lane.kind == BUILT_IN).unwrap().id;
            let end = faena_store::RunEnd {
                id,
                run,
                lane,
                retry_count: job.retry_count,
                ready_at: job.created_at,
                worker: self.servers[0].engine.worker_id(),
                started_at: Some(self.now),
                at: self.now,
                log: String::new(),
                outcome: faena_store::RunOutcome::Completed { result: None },
                may_have_other_rows: true,
                closes_claim: false,
                by_guardian: false,
                timing: faena_store::RunTiming::default(),
            };
            if self.store.job_end(vec![end], self.now).await.unwrap()[0] {
                *self.completed.entry(id).or_default() += 1;
                self.in_flight.remove(&(id, run));
            }
        }
    }
}

async fn simulate(seed: u64) -> [usize; 3] {
    let mut simulation = Simulation::new(seed).await;
    simulation.start_server().await;
    simulation.start_server().await;
    simulation.connect(None).await;
    simulation.connect(None).await;
    for _ in 0..STEPS {
        simulation.step().await;
    }
    simulation.settle().await;
    for id in &simulation.jobs {
        let job = simulation.store.job_get(*id).await.unwrap().unwrap();
        let completions = simulation.completed.get(id).copied().unwrap_or(0);
        assert_eq!(completions, usize::from(job.status == JobState::Completed), "seed {seed}: {job:#?}");
    }
    [simulation.orphaned, simulation.returned, simulation.sent_again]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_orphan_is_recovered_in_time_and_none_early_on_postgres() {
    let seeds: u64 = std::env::var("FAENA_TEST_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let mut sum = [0; 3];
    for seed in 0..seeds {
        for (total, more) in sum.iter_mut().zip(simulate(seed).await) {
            *total += more;
        }
    }
    let [orphaned, returned, sent_again] = sum;
    println!(
        "{seeds} seeds: {orphaned} orphaned runs used an attempt, {returned} were requeued without one, {sent_again} webhooks were sent again"
    );
    assert!(orphaned + returned > 10 && sent_again > 3, "the simulation caused too few faults: {sum:?}");
}
