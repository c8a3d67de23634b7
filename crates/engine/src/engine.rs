//! Everything that runs, in the order in which a job meets it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::{AddressRule, JobId, JobState, LogEvent, NewJob, NodeId, Timestamp, WorkerId, parse::JobParser};
use faena_store::{CancelOutcome, NodeInfo, RunEnd, Signal, Store, StoreError, Submitted};
use futures_util::future::{BoxFuture, join_all};
use parking_lot::RwLock;
use tokio::sync::{Notify, broadcast::error::RecvError};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Beats, Bus, EngineConfig, Round,
    builtin::{self, BuiltIn, HttpCaller, Worker},
    bulk,
    config::ms,
    dispatcher::{Dispatcher, ReadyLanes},
    driver::Driver,
    guardian, handlers,
    in_flight::{InFlight, InFlightJob},
    inbox::Inbox,
    live::Live,
    nodes,
    outbox::{Outbox, Relay, Source},
    poller,
    pool::Pools,
    promoter, recorder,
    reporter::Reporter,
    retention,
    schedules::{self, Schedules},
    throughput::Throughput,
    webhooks::Webhooks,
    workers::{CloseReason, KeyLocks, ReportHandler, Workers, status_writer},
};

pub struct Engine {
    pub store: Arc<dyn Store>,
    pub config: EngineConfig,
    pub beats: Beats,
    pub bus: Bus,
    /// The workers that are connected here, and what they report.
    pub workers: Arc<Workers>,
    pub report_handler: Arc<ReportHandler>,
    pub webhooks: Arc<Webhooks>,
    /// What became of due times on this node.
    pub schedules: Arc<Schedules>,
    pub(crate) node: Arc<RwLock<NodeId>>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) lanes: Arc<ReadyLanes>,
    pub(crate) recorder_nudge: Arc<Notify>,
    /// When the guardian looks next, in milliseconds.
    pub(crate) next_check_at: AtomicI64,
    pub(crate) builtin: BuiltIn,
    pub(crate) said: handlers::Said,
    pub(crate) pools: Pools,
    pub(crate) turns: KeyLocks,
    reporter: Arc<Reporter>,
    worker: Arc<Worker>,
    pub(crate) dispatcher: Dispatcher,
    idle: Arc<AtomicUsize>,
    drain: CancellationToken,
    pub(crate) promote: Arc<Notify>,
    pub(crate) lease_history: nodes::LeaseHistory,
    /// What the guardian has done.
    pub actions: guardian::ActionCounts,
    pub(crate) due_checks: guardian::DueChecks,
    pub(crate) bulk: Arc<Notify>,
    /// Brings events to sinks.
    pub outbox: Outbox,
    /// Where rows and messages of others come from.
    pub sources: Vec<Arc<Source>>,
    pub inboxes: Vec<Arc<Inbox>>,
    /// Whoever watches what happens.
    pub live: Arc<Live>,
    /// Parser of the jobs that callers, sources and inboxes submit.
    pub job_parser: JobParser,
    /// How many runs end per minute.
    pub throughput: Throughput,
    /// Loops that bring in new work end first, those that report last.
    intake: Driver,
    outgoing: Driver,
    slots: TaskTracker,
}

/// What became of a request to cancel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelResult {
    Cancelled,
    /// A worker has been told and has not stopped yet.
    Asked {
        state: JobState,
    },
}

/// The fallback's period. PostgreSQL: other nodes' signals may be lost; SQLite: there are no others.
const POLL_POSTGRES: Duration = Duration::from_secs(1);
const POLL_SQLITE: Duration = Duration::from_secs(30);
const SAFETY: Duration = Duration::from_secs(30);
/// A claim that this process has not heard of after this time will never be heard of: no call to the database takes as long.
const LOST_CLAIM: Duration = Duration::from_secs(45);
/// How soon a bulk action is found that another node was asked for.
const BULK: Duration = Duration::from_secs(10);
/// A clock that was put forward is noticed after this time; a timer does not see it.
const SCHEDULES: Duration = Duration::from_secs(10);
/// The longest rest of what is out of order elsewhere.
const FROM_OUTSIDE: Duration = Duration::from_secs(60);
const RECONCILE: Duration = Duration::from_secs(15);
/// How long those from whom work came have to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);
/// How long a server that stops waits for its webhooks.
const LAST_WEBHOOKS: Duration = Duration::from_secs(3);

impl Engine {
    pub async fn start(store: Arc<dyn Store>, config: EngineConfig) -> Result<Arc<Engine>, StoreError> {
        let now = Timestamp::now();
        let node = NodeId::new();
        let info = NodeInfo { id: node, name: config.node_name.clone() };
        store.node_join(info, ms(config.node_lease), now).await?;
        let engine = Arc::new(Engine::new(store, config, node)?);
        if engine.config.roles.worker {
            engine.builtin.admit(&engine, now).await?;
        }
        if engine.config.roles.engine
            && let Err(error) = engine.outbox.want(&*engine.store, now).await
        {
            tracing::warn!(%error, "what the sinks want could not be written down yet; events from before are missed");
        }
        engine.start_loops();
        Ok(engine)
    }

    /// An engine in which nothing runs by itself: its time is the caller's, who takes every `turn`. For simulations.
    pub async fn at_rest(
        store: Arc<dyn Store>,
        config: EngineConfig,
        now: Timestamp,
    ) -> Result<Arc<Engine>, StoreError> {
        let node = NodeId::new();
        let info = NodeInfo { id: node, name: config.node_name.clone() };
        store.node_join(info, ms(config.node_lease), now).await?;
        Ok(Arc::new(Engine::new(store, config, node)?))
    }

    fn new(store: Arc<dyn Store>, config: EngineConfig, node: NodeId) -> Result<Engine, StoreError> {
        let node = Arc::new(RwLock::new(node));
        let beats = Beats::default();
        let driver = || Driver { tasks: TaskTracker::new(), stop: CancellationToken::new(), beats: beats.clone() };
        let (intake, outgoing) = (driver(), driver());
        let bus = Bus::default();
        let in_flight = Arc::new(InFlight::default());
        let reporter = Arc::new(Reporter::new(bus.clone()));
        let lanes = Arc::new(ReadyLanes::default());
        let workers = Arc::new(Workers::default());
        let (line, recorder_nudge) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let idle = Arc::new(AtomicUsize::new(0));
        let low_water = Arc::new(AtomicUsize::new(usize::MAX));
        let drain = CancellationToken::new();
        let worker = Arc::new(Worker {
            node: node.clone(),
            store: store.clone(),
            in_flight: in_flight.clone(),
            reporter: reporter.clone(),
            lanes: lanes.clone(),
            line: line.clone(),
            idle: idle.clone(),
            low_water: low_water.clone(),
            record: recorder_nudge.clone(),
            bus: bus.clone(),
            http: HttpCaller::new(AddressRule::new(&config.allowed_networks), config.http_answer_bytes),
            drain: drain.clone(),
            config: config.clone(),
        });
        let report_handler = Arc::new(ReportHandler {
            store: store.clone(),
            node: node.clone(),
            in_flight: in_flight.clone(),
            reporter: reporter.clone(),
            lanes: lanes.clone(),
            workers: workers.clone(),
            bus: bus.clone(),
            stale_reports: AtomicU64::new(0),
        });
        let slots = if config.roles.worker { config.concurrency } else { 0 };
        let dispatcher = Dispatcher::new(
            lanes.clone(),
            in_flight.clone(),
            workers.clone(),
            slots,
            (idle.clone(), line, low_water),
            builtin::kinds(),
        );
        let pools = Pools::new(&config.pools);
        let rule = AddressRule::new(&config.allowed_networks);
        let outbox = Outbox::new(&config.outbox, &rule, &outgoing.stop);
        let job_parser = JobParser { limits: config.job_limits.clone(), addresses: rule.clone() };
        let sources = config.sources.iter().map(|source| Source::new(source, job_parser.clone()).map(Arc::new));
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        let inboxes = config.inboxes.iter();
        let inboxes =
            inboxes.map(|inbox| Arc::new(Inbox::new(inbox, job_parser.clone(), intake.stop.clone()))).collect();
        let webhooks = Arc::new(Webhooks::new(config.webhooks.clone(), rule));
        let live = Arc::new(Live::new(store.clone()));
        Ok(Engine {
            store,
            config,
            beats,
            bus,
            workers,
            report_handler,
            webhooks,
            schedules: Arc::default(),
            node,
            in_flight,
            lanes,
            recorder_nudge,
            next_check_at: AtomicI64::new(i64::MAX),
            builtin: BuiltIn::default(),
            said: handlers::Said::default(),
            pools,
            turns: KeyLocks::default(),
            reporter,
            worker,
            dispatcher,
            idle,
            drain,
            promote: Arc::new(Notify::new()),
            bulk: Arc::new(Notify::new()),
            outbox,
            sources,
            inboxes,
            live,
            job_parser,
            throughput: Throughput::default(),
            lease_history: nodes::LeaseHistory::default(),
            actions: guardian::ActionCounts::default(),
            due_checks: guardian::DueChecks::default(),
            intake,
            outgoing,
            slots: TaskTracker::new(),
        })
    }

    /// Everything that runs, in the order in which a job meets it.
    fn loops(&self) -> Vec<Loop> {
        let poll = if self.store.engine() == "sqlite" { POLL_SQLITE } else { POLL_POSTGRES };
        let beat = self.config.worker_heartbeat / 2;
        let guard = self.config.guardian_interval;
        let lease = self.config.node_lease / 3;
        let none = || Arc::new(Notify::new());
        let mut loops = Vec::new();
        let mut add = |loop_: Loop| loops.push(loop_);
        if self.config.roles.engine {
            add(Loop::intake("scheduler", SCHEDULES, self.schedules.nudge.clone(), |e, now| async move {
                schedules::run_once(&*e.store, &e.schedules, now).await
            }));
            add(Loop::intake("promoter", SAFETY, self.promote.clone(), |e, now| async move {
                promoter::run_once(&*e.store, now).await
            }));
        }
        add(Loop::intake("dispatcher", SAFETY, self.lanes.nudge.clone(), |e, now| async move {
            e.dispatcher.run_once(&e, now).await
        }));
        add(Loop::outgoing("recorder", SAFETY, self.recorder_nudge.clone(), |e, now| async move {
            recorder::run_once(&*e.store, &e.in_flight, &e.bus, e.node_id(), now).await
        }));
        add(Loop::outgoing("reporter", SAFETY, self.reporter.nudge.clone(), |e, now| async move {
            e.reporter.run_once(&*e.store, now).await
        }));
        if self.config.roles.engine {
            add(Loop::outgoing("webhooks", SAFETY, self.webhooks.nudge.clone(), |e, now| async move {
                deliver_webhooks(&e, now).await
            }));
            // PostgreSQL: what other nodes write is told by signals that may be lost, and what they leave behind by none.
            let period = if self.store.engine() == "sqlite" { SAFETY } else { POLL_POSTGRES };
            for relay in &self.outbox.relays {
                add(relay_loop(relay.clone(), period));
            }
            for source in &self.sources {
                add(source_loop(source.clone()));
            }
            for inbox in &self.inboxes {
                add(inbox_loop(inbox.clone()));
            }
        }
        add(Loop::outgoing("live", poll, self.live.nudge.clone(), |e, now| async move { e.live.run_once(now).await }));
        add(Loop::outgoing("keeper", beat, self.workers.news.clone(), |e, now| async move {
            let round = e.persist(now).await?;
            if round.handled > 0 {
                // Changes are gathered, not chased.
                tokio::time::sleep(status_writer::GATHER).await;
            }
            Ok(round)
        }));
        add(Loop::outgoing("guardian", guard, self.workers.watch.clone(), |e, now| async move { e.guard(now).await }));
        add(Loop::intake("poller", poll, none(), |e, now| async move { poller::run_once(&e, now).await }));
        add(Loop::outgoing("lease", lease, none(), |e, now| async move { renew(&e, now).await }));
        add(Loop::outgoing("reconciler", RECONCILE, none(), |e, now| async move { reconcile(&e, now).await }));
        if self.config.roles.engine {
            add(Loop::intake("handlers", guard, none(), |e, now| async move { handlers::run_once(&e, now).await }));
            add(Loop::intake(
                "bulk",
                BULK,
                self.bulk.clone(),
                |e, now| async move { bulk::run_once(&*e.store, now).await },
            ));
            add(Loop::intake("retention", Duration::from_secs(60), none(), |e, now| async move {
                retention::run_once(&*e.store, &e.config.retention, e.config.outbox.keep, now).await
            }));
        }
        if !self.pools.is_empty() {
            add(Loop::intake("pools", SAFETY, self.workers.pools.clone(), |e, now| async move {
                e.pools.run_once(&e, now).await
            }));
        }
        loops
    }

    fn start_loops(self: &Arc<Engine>) {
        for Loop { name, period, nudge, brings_work, round } in self.loops() {
            let driver = if brings_work { &self.intake } else { &self.outgoing };
            let engine = self.clone();
            driver.start(name, period, nudge, move |now| round(engine.clone(), now));
        }
        if self.config.roles.worker {
            for _ in 0..self.config.concurrency {
                self.slots.spawn(self.worker.clone().slot());
            }
        }
        self.listen();
    }

    /// One round of the loop `name`, at a time of the caller's choice.
    pub async fn turn(self: &Arc<Engine>, name: &str, now: Timestamp) -> Result<Round, StoreError> {
        match self.loops().into_iter().find(|known| *known.name == *name) {
            Some(known) => (known.round)(self.clone(), now).await,
            None => Err(StoreError::Broken(format!("there is no loop {name}"))),
        }
    }

    pub async fn submit(&self, jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>, StoreError> {
        self.store.job_submit(jobs, now).await
    }

    /// Cancels a job. One that runs is told to stop, and given a moment to do so before the answer.
    pub async fn cancel(&self, id: JobId, reason: &str, by: &str, now: Timestamp) -> Result<CancelResult, StoreError> {
        let state = match self.store.job_cancel(id, reason, Some(by), now).await? {
            CancelOutcome::Cancelled => {
                self.bus.changed(id, JobState::Cancelled, None, now);
                return Ok(CancelResult::Cancelled);
            }
            CancelOutcome::Asked { state } => state,
        };
        self.ask_to_stop(id, reason, now);
        let mut events = self.bus.subscribe();
        let grace_periods = tokio::time::sleep(Duration::from_secs(2));
        tokio::pin!(grace_periods);
        loop {
            let current = self.store.job_get(id).await?.map(|job| job.status);
            match current {
                Some(JobState::Cancelled) => return Ok(CancelResult::Cancelled),
                Some(from) if from.is_terminal() => {
                    return Err(StoreError::InvalidTransition { from, wanted: "be cancelled" });
                }
                _ => {}
            }
            tokio::select! {
                () = &mut grace_periods => return Ok(CancelResult::Asked { state: current.unwrap_or(state) }),
                // Its end on this node is told at once; that on another node is seen by looking again.
                _ = async { while events.recv().await.is_ok_and(|event| event.job_id != id) {} } => {}
                () = tokio::time::sleep(Duration::from_millis(100)) => {}
            }
        }
    }

    /// A job leaves this process's hands.
    pub(crate) fn hand_in(&self, held: &InFlightJob, end: RunEnd) {
        self.in_flight.finish(held, end, |end| self.reporter.push(end, None));
    }

    /// Tells whoever has this job here to stop it, and sees to it that this is heeded.
    pub(crate) fn ask_to_stop(&self, id: JobId, reason: &str, now: Timestamp) {
        if let Some(held) = self.in_flight.find(id) {
            held.ask_to_stop(reason, now);
            self.workers.watch.notify_one();
        }
    }

    pub fn node_id(&self) -> NodeId {
        *self.node.read()
    }

    /// The worker inside this process.
    pub fn worker_id(&self) -> WorkerId {
        self.builtin.id()
    }

    /// Asks a worker, wherever it is connected, to take no more jobs, or to take jobs again. `false`: no such worker lives.
    pub async fn worker_drain(
        &self,
        key: &str,
        drain: bool,
        by: Option<&str>,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let Some(id) = self.store.worker_drain(key, drain, by, now).await? else { return Ok(false) };
        self.workers.drain(id, drain, now);
        if !drain {
            // Jobs may have waited for it.
            self.lanes.reconsider();
        }
        Ok(true)
    }

    /// Writes down what is new about the workers here.
    pub async fn persist(&self, now: Timestamp) -> Result<Round, StoreError> {
        let limits = (ms(self.config.reconnect_grace), ms(self.config.worker_heartbeat));
        let built_in = self.builtin.tell(self, now).await?;
        let round = status_writer::run_once(&*self.store, &self.workers, &self.in_flight, limits, now).await?;
        if round.handled > 0 {
            // One of them may take jobs again.
            self.lanes.nudge.notify_one();
        }
        Ok(Round { handled: round.handled + built_in, ..round })
    }

    /// Goes by the new rules from now on. Should they not be read now, the poller reads them.
    async fn rules_changed(&self) {
        if let Err(error) = self.store.rules_load().await {
            tracing::debug!(%error, "the new rules will be read later");
        }
        // Lines of keys were opened, and nobody tells of each.
        for lane in self.store.lanes().await.unwrap_or_default().into_iter().filter(|lane| lane.keyed) {
            self.lanes.add(lane.id);
        }
        self.lanes.open_limited();
    }

    /// Jobs in this process's hands, and slots that are free.
    pub fn load(&self) -> (usize, usize) {
        (self.in_flight.count(), self.idle.load(Ordering::Relaxed))
    }

    /// Hears what has become ready, here or on another node.
    fn listen(self: &Arc<Engine>) {
        let mut signals = self.store.signals();
        let engine = self.clone();
        let stop = self.intake.stop.clone();
        self.intake.tasks.spawn(async move {
            loop {
                let signal = tokio::select! { () = stop.cancelled() => break, signal = signals.recv() => signal };
                match signal {
                    Ok(Signal::Ready(lane)) => engine.lanes.add(lane),
                    Ok(Signal::Waiting) => {
                        engine.promote.notify_one();
                        engine.due_checks.look_for_expired();
                        engine.workers.watch.notify_one();
                    }
                    Ok(Signal::Worker(id)) => engine.workers.ask(id),
                    Ok(Signal::Room) => engine.lanes.open_limited(),
                    Ok(Signal::Rules) => engine.rules_changed().await,
                    Ok(Signal::Webhook) => engine.webhooks.nudge.notify_one(),
                    Ok(Signal::Schedule) => engine.schedules.nudge.notify_one(),
                    Ok(Signal::Event) => {
                        engine.outbox.nudge();
                        engine.live.nudge.notify_one();
                    }
                    Ok(Signal::Cancel(id)) => {
                        if engine.in_flight.find(id).is_some() {
                            tokio::spawn(stop_here(engine.clone(), id));
                        }
                    }
                    // Too many to follow, or the line to other nodes was cut: anything may have happened.
                    Ok(Signal::Missed) | Err(RecvError::Lagged(_)) => engine.look_everywhere().await,
                    Err(RecvError::Closed) => break,
                }
            }
        });
    }

    /// Whatever a signal could have told.
    async fn look_everywhere(&self) {
        for lane in self.store.lanes().await.unwrap_or_default() {
            self.lanes.add(lane.id);
        }
        self.promote.notify_one();
        self.due_checks.look_for_expired();
        self.workers.watch.notify_one();
        self.webhooks.nudge.notify_one();
        self.schedules.nudge.notify_one();
        self.outbox.nudge();
        self.live.nudge.notify_one();
        self.rules_changed().await;
    }

    /// Locks and connections that bring in work go to whoever comes next.
    async fn leave_the_outside(&self) {
        let sources = join_all(self.sources.iter().map(|source| source.close()));
        let inboxes = join_all(self.inboxes.iter().map(|inbox| inbox.close()));
        let _ = tokio::time::timeout(GOODBYE, async { tokio::join!(sources, inboxes) }).await;
    }

    /// Stops: no new jobs, what waits for a slot goes back at once, what runs may finish within the grace time (or until
    /// `hurry`), the rest goes back without costing a try.
    pub async fn stop(&self, hurry: CancellationToken) {
        self.intake.stop.cancel();
        self.intake.tasks.close();
        self.intake.tasks.wait().await;
        self.leave_the_outside().await;
        self.drain.cancel();
        self.worker.hand_back_line();
        self.slots.close();
        tokio::select! {
            _ = async { tokio::join!(self.slots.wait(), self.pools.stop()) } => {}
            () = tokio::time::sleep(self.config.drain_grace) => {}
            () = hurry.cancelled() => {}
        }
        self.pools.kill();
        for held in self.in_flight.all().into_iter().filter(|held| !held.is_remote()) {
            // Without a reason: it is handed back, not cancelled.
            held.cancel.cancel();
        }
        let _ = tokio::time::timeout(Duration::from_secs(5), self.slots.wait()).await;
        let told = async {
            // Workers elsewhere keep their jobs and connect to another server, or to this one when it is back.
            self.workers.close_all(CloseReason::ServerStopping);
            self.reporter.settled().await;
            // A receiver that does not answer is not waited for; another node, or the next start, sends it again.
            let _ = tokio::time::timeout(LAST_WEBHOOKS, self.webhooks.settled()).await;
            self.outgoing.stop.cancel();
            self.outgoing.tasks.close();
            self.outgoing.tasks.wait().await;
        };
        if tokio::time::timeout(Duration::from_secs(10), told).await.is_err() {
            tracing::error!("the database did not take the last reports; other nodes will run these jobs again");
        }
        let node = self.node_id();
        self.outbox.leave(&*self.store, node).await;
        let left = tokio::time::timeout(
            Duration::from_secs(5),
            self.store.node_leave(node, self.config.grace_periods(), Timestamp::now()),
        )
        .await;
        if let Ok(Err(error)) = left {
            tracing::warn!(%error, "this node could not take leave; its lease will run out");
        }
    }
}

type RoundOf = Box<dyn Fn(Arc<Engine>, Timestamp) -> BoxFuture<'static, Result<Round, StoreError>> + Send>;

/// One loop: how often it looks at the least, what wakes it, what it does.
struct Loop {
    name: Arc<str>,
    period: Duration,
    nudge: Arc<Notify>,
    /// It ends first when the engine stops.
    brings_work: bool,
    round: RoundOf,
}

impl Loop {
    fn intake<Fut>(
        name: impl Into<Arc<str>>,
        period: Duration,
        nudge: Arc<Notify>,
        round: impl Fn(Arc<Engine>, Timestamp) -> Fut + Send + 'static,
    ) -> Loop
    where
        Fut: Future<Output = Result<Round, StoreError>> + Send + 'static,
    {
        let round: RoundOf = Box::new(move |engine, now| Box::pin(round(engine, now)));
        Loop { name: name.into(), period, nudge, brings_work: true, round }
    }

    fn outgoing<Fut>(
        name: impl Into<Arc<str>>,
        period: Duration,
        nudge: Arc<Notify>,
        round: impl Fn(Arc<Engine>, Timestamp) -> Fut + Send + 'static,
    ) -> Loop
    where
        Fut: Future<Output = Result<Round, StoreError>> + Send + 'static,
    {
        Loop { brings_work: false, ..Loop::intake(name, period, nudge, round) }
    }
}

fn source_loop(source: Arc<Source>) -> Loop {
    let (name, nudge) = (source.name.clone(), source.nudge.clone());
    // It says itself when it is to look again.
    Loop::intake(name, FROM_OUTSIDE, nudge, move |e, now| {
        let source = source.clone();
        async move { source.run_once(&*e.store, &e.bus, now).await }
    })
}

fn inbox_loop(inbox: Arc<Inbox>) -> Loop {
    let (name, nudge) = (inbox.name.clone(), inbox.nudge.clone());
    Loop::intake(name, FROM_OUTSIDE, nudge, move |e, now| {
        let inbox = inbox.clone();
        async move { inbox.run_once(&*e.store, &e.bus, now).await }
    })
}

fn relay_loop(relay: Arc<Relay>, period: Duration) -> Loop {
    let (name, nudge) = (format!("relay:{}", relay.name()), relay.nudge.clone());
    Loop::outgoing(name, period, nudge, move |e, now| {
        let relay = relay.clone();
        async move { relay.run_once(&*e.store, e.node_id(), now).await }
    })
}

/// Sends webhooks; a server that stops only writes down how the last ones went.
async fn deliver_webhooks(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    if engine.intake.stop.is_cancelled() {
        return Ok(Round::done(engine.webhooks.settle(&*engine.store, now).await?));
    }
    engine.webhooks.run_once(&*engine.store, engine.node_id(), now).await
}

/// Stops a job that somebody wants stopped who is not at this node, and says why.
async fn stop_here(engine: Arc<Engine>, id: JobId) {
    let reason = match engine.store.job_get(id).await {
        Ok(Some(job)) => {
            let asked = job.execution_log.iter().rev().find(|entry| entry.event == LogEvent::CancelRequested);
            asked.map(|entry| entry.details.clone())
        }
        _ => None,
    };
    engine.ask_to_stop(id, reason.as_deref().unwrap_or("cancelled by request"), Timestamp::now());
}

async fn renew(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    let lease_ms = ms(engine.config.node_lease);
    if engine.store.node_renew(engine.node_id(), lease_ms, now).await? {
        engine.lease_history.renewed(now, lease_ms);
        return Ok(Round::done(1));
    }
    // Another node has taken this one for dead and given its jobs away. Start afresh, as a new node.
    let lost = engine.in_flight.drop_all();
    tracing::error!(jobs = lost.len(), "this node was taken for dead (was it asleep?); its jobs run elsewhere now");
    engine.workers.drop_all(&engine.in_flight, CloseReason::ServerDeclaredDead);
    for held in lost {
        held.ask_to_stop("this node lost its lease", now);
    }
    let fresh = NodeId::new();
    let info = NodeInfo { id: fresh, name: engine.config.node_name.clone() };
    engine.store.node_join(info, lease_ms, now).await?;
    *engine.node.write() = fresh;
    if engine.config.roles.worker {
        engine.builtin.admit(engine, now).await?;
    }
    Ok(Round::done(1))
}

/// Gives back what the database thinks is here and is not: the answer to a claim got lost on the way.
async fn reconcile(engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
    // In this order: a job that ends meanwhile goes from the hands to the reporter.
    let mut known = engine.in_flight.runs();
    known.extend(engine.reporter.runs());
    let before = now.plus_ms(-ms(LOST_CLAIM));
    let lost = engine.store.node_reconcile(engine.node_id(), known, before, now).await?;
    if lost > 0 {
        tracing::warn!(jobs = lost, "the answer to a claim got lost; its jobs are ready again");
    }
    Ok(Round::done(lost))
}
