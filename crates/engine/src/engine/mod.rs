//! The engine: its parts, how they are wired, and what callers can ask of it.
//!
//! `loops.rs` lists everything that runs, `signals.rs` wakes the loops after a commit, `jobs.rs` changes jobs and
//! announces the change, `shutdown.rs` stops everything in order.

mod jobs;
mod loops;
mod shutdown;
mod signals;

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use faena_domain::{AddressRule, NodeId, Timestamp, WorkerId, WorkerView, parse::JobParser};
use faena_store::{InputView, Store};
use parking_lot::Mutex;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Bus, Driver, EngineConfig, EngineError, KeyUsage, LoopHealth, Round,
    builtin::{self, BuiltInRecord, BuiltInWorker, EndCounts, HttpCaller, LlmCaller, SlotState},
    config::ms,
    dispatcher::{Dispatcher, ReadyLanes},
    event_reader::EventReader,
    guardian,
    handlers::UnhandledTypes,
    in_flight::InFlight,
    inbox::Inbox,
    measure::Measures,
    nodes::{self, CurrentNode},
    outbox::{Outbox, Source},
    poller::PollHistory,
    pool::Pools,
    queue::JobQueue,
    reporter::Reporter,
    schedules::Schedules,
    tasks,
    throughput::Throughput,
    traces::Tracer,
    wakeups::Wakeups,
    webhooks::Webhooks,
    workers::{ReportHandler, Workers, status_writer},
};

pub use jobs::CancelResult;

pub struct Engine {
    pub store: Arc<dyn Store>,
    pub config: EngineConfig,
    /// Announces job changes inside this process.
    pub bus: Bus,
    pub(crate) wakeups: Wakeups,
    pub(crate) node: NodeState,
    pub(crate) dispatch: Dispatch,
    /// The queue from which jobs are claimed.
    pub queue: Arc<JobQueue>,
    pub reports: Reports,
    /// The workers connected to this node.
    pub workers: Arc<Workers>,
    pub(crate) local: LocalWorkers,
    pub schedules: Arc<Schedules>,
    pub(crate) task_timer: tasks::TaskTimer,
    pub guardian: Guardian,
    pub events: Events,
    pub inputs: Inputs,
    /// Parser of the jobs that callers, sources and inboxes submit.
    pub job_parser: JobParser,
    /// Runs that end per minute, by lane.
    pub throughput: Throughput,
    pub(crate) poller: PollHistory,
    /// How long jobs and workers spend in their states.
    pub measures: Arc<Measures>,
    pub started_at: Timestamp,
    /// Last uses of API keys, until they are stored.
    pub key_usage: KeyUsage,
    /// `None` if no collector is configured.
    pub tracer: Option<Arc<Tracer>>,
    pub loops: Loops,
}

/// This process as a node: its current id and its lease.
pub(crate) struct NodeState {
    pub current: CurrentNode,
    pub lease: Arc<nodes::Lease>,
}

/// Claims ready jobs and knows which of them are in flight here.
pub(crate) struct Dispatch {
    pub lanes: Arc<ReadyLanes>,
    pub in_flight: Arc<InFlight>,
    pub dispatcher: Dispatcher,
    pub unhandled: UnhandledTypes,
}

/// Takes reports of workers and stores how runs ended.
pub struct Reports {
    pub handler: Arc<ReportHandler>,
    pub(crate) reporter: Arc<Reporter>,
}

/// The workers that this process starts itself: the built-in worker and the processes of pools.
pub(crate) struct LocalWorkers {
    pub record: BuiltInRecord,
    pub worker: Arc<BuiltInWorker>,
    pub slots: TaskTracker,
    /// Cancelled when the slots must take no more jobs.
    pub drain: CancellationToken,
    pub pools: Pools,
}

impl LocalWorkers {
    fn new(worker: Arc<BuiltInWorker>, drain: CancellationToken, config: &EngineConfig) -> LocalWorkers {
        LocalWorkers {
            record: BuiltInRecord::default(),
            worker,
            slots: TaskTracker::new(),
            drain,
            pools: Pools::new(&config.pools),
        }
    }
}

/// State of the guardian of this node.
pub struct Guardian {
    /// How often it had to act.
    pub actions: guardian::ActionCounts,
    pub(crate) due_checks: guardian::DueChecks,
    /// When it next checks the jobs of connected workers, in milliseconds.
    pub(crate) next_check_at: AtomicI64,
}

impl Guardian {
    fn new() -> Guardian {
        Guardian {
            actions: guardian::ActionCounts::default(),
            due_checks: guardian::DueChecks::default(),
            next_check_at: AtomicI64::new(i64::MAX),
        }
    }
}

/// Everything that leaves Faena when something happens: event streams, sinks, webhooks.
pub struct Events {
    pub reader: Arc<EventReader>,
    pub outbox: Outbox,
    pub webhooks: Arc<Webhooks>,
}

/// Where jobs come from besides the API: outboxes of applications and queues of brokers.
pub struct Inputs {
    pub sources: Vec<Arc<Source>>,
    pub inboxes: Vec<Arc<Inbox>>,
    /// The state of the sources and inboxes that was last stored for the other nodes.
    pub(crate) reported: Mutex<Vec<InputView>>,
}

/// The running loops. On shutdown those that bring in work stop first, those that report stop last.
pub struct Loops {
    pub health: LoopHealth,
    pub(crate) intake: Driver,
    pub(crate) outgoing: Driver,
}

impl Engine {
    /// Joins as a new node and starts all loops.
    pub async fn start(store: Arc<dyn Store>, config: EngineConfig) -> Result<Arc<Engine>, EngineError> {
        nodes::follow_database_clock(&*store).await?;
        let now = Timestamp::now();
        let engine = Engine::without_loops(store, config, now).await?;
        if engine.config.roles.worker {
            engine.local.record.register(&engine, now).await?;
        }
        engine.queue.check(&*engine.store, now).await?;
        tasks::register_built_in(&*engine.store, now).await?;
        if engine.config.roles.engine
            && let Err(error) = engine.events.outbox.subscribe(&*engine.store, now).await
        {
            tracing::warn!(%error, "sink subscriptions not stored, events may be missed");
        }
        engine.start_loops();
        Ok(engine)
    }

    /// Joins as a new node without starting a loop: the caller runs each round with `run_loop`, at times of its choice.
    pub async fn without_loops(
        store: Arc<dyn Store>,
        config: EngineConfig,
        now: Timestamp,
    ) -> Result<Arc<Engine>, EngineError> {
        let node = NodeId::new();
        nodes::join(&*store, node, &config, now).await?;
        Ok(Arc::new(Engine::new(store, config, node, now)?))
    }

    fn new(store: Arc<dyn Store>, config: EngineConfig, node: NodeId, now: Timestamp) -> Result<Engine, EngineError> {
        let wakeups = Wakeups::default();
        let bus = Bus::default();
        let current = CurrentNode::new(node);
        let lease = Arc::new(nodes::Lease::new(store.clone(), current.clone(), ms(config.node_lease), now));
        let node = NodeState { current, lease };
        let loops = Loops::new();
        let measures = Arc::<Measures>::default();
        let workers = Arc::new(Workers::new(wakeups.clone()));
        let in_flight = Arc::new(InFlight::default());
        let lanes = Arc::new(ReadyLanes::new(wakeups.clone()));
        let slots = Arc::new(SlotState::default());
        let tracer =
            config.traces.as_ref().map(|traces| Arc::new(Tracer::new(traces, node.current.id(), lanes.clone())));
        let queue = Arc::new(JobQueue::new(config.redis_queue.as_ref(), &*store));
        let reporter =
            Arc::new(Reporter::new(bus.clone(), wakeups.clone(), measures.clone(), tracer.clone(), queue.clone()));
        let handler = Arc::new(ReportHandler::new(
            store.clone(),
            node.current.clone(),
            in_flight.clone(),
            reporter.clone(),
            workers.clone(),
            bus.clone(),
            wakeups.clone(),
        ));
        let drain = CancellationToken::new();
        let worker = Arc::new(BuiltInWorker {
            node: node.current.clone(),
            lease: node.lease.clone(),
            store: store.clone(),
            in_flight: in_flight.clone(),
            reporter: reporter.clone(),
            slots: slots.clone(),
            wakeups: wakeups.clone(),
            bus: bus.clone(),
            http: HttpCaller::new(AddressRule::new(&config.allowed_networks), config.http_response_bytes),
            llm: LlmCaller::new(config.llm.clone()),
            ends: EndCounts::default(),
            tracer: tracer.clone(),
            drain: drain.clone(),
            config: config.clone(),
        });
        let slot_count = if config.roles.worker { config.concurrency } else { 0 };
        let dispatcher = Dispatcher::new(
            lanes.clone(),
            in_flight.clone(),
            workers.clone(),
            slot_count,
            slots,
            builtin::kinds(&config),
        );
        let addresses = AddressRule::new(&config.allowed_networks);
        let job_parser = JobParser { limits: config.job_limits.clone(), addresses };
        Ok(Engine {
            events: Events::new(&store, &config, &loops, &wakeups, &tracer),
            inputs: Inputs::new(&config, &job_parser, &loops)?,
            job_parser,
            dispatch: Dispatch { lanes, in_flight, dispatcher, unhandled: UnhandledTypes::default() },
            queue,
            reports: Reports { handler, reporter },
            local: LocalWorkers::new(worker, drain, &config),
            schedules: Arc::default(),
            task_timer: tasks::TaskTimer::default(),
            guardian: Guardian::new(),
            throughput: Throughput::default(),
            poller: PollHistory::default(),
            measures,
            started_at: Timestamp::now(),
            key_usage: KeyUsage::default(),
            tracer,
            store,
            config,
            bus,
            wakeups,
            node,
            workers,
            loops,
        })
    }

    pub fn node_id(&self) -> NodeId {
        self.node.current.id()
    }

    /// Returns whether this node certainly owns its claims, so that their jobs may start.
    pub async fn holds_lease(&self, now: Timestamp) -> bool {
        self.node.lease.holds(now).await
    }

    /// Returns the id of the built-in worker.
    pub fn worker_id(&self) -> WorkerId {
        self.local.record.id()
    }

    /// Returns the number of jobs in flight in this process and the number of free slots.
    pub fn load(&self) -> (usize, usize) {
        (self.dispatch.in_flight.count(), self.local.worker.slots.idle.load(Ordering::Relaxed))
    }

    /// Returns how many slots the workers of this node have, and how many of them have a job.
    pub fn slots(&self) -> (usize, usize) {
        let built_in = if self.config.roles.worker { self.config.concurrency } else { 0 };
        let busy = built_in.saturating_sub(self.local.worker.slots.idle.load(Ordering::Relaxed));
        let workers = self.workers.all();
        let slots: usize = workers.iter().map(|worker| worker.concurrency).sum();
        let in_flight: usize = workers.iter().map(|worker| worker.load().0.min(worker.concurrency)).sum();
        (built_in + slots, busy + in_flight)
    }

    /// Drains a worker, wherever it is connected, or cancels its drain. Returns `false` if no such worker is registered.
    pub async fn set_worker_drain(
        &self,
        key: &str,
        drain: bool,
        by: Option<&str>,
        now: Timestamp,
    ) -> Result<bool, EngineError> {
        let Some(id) = self.store.worker_drain(key, drain, by, now).await? else { return Ok(false) };
        self.workers.set_draining(id, drain, now);
        if !drain {
            // Jobs may have waited for this worker.
            self.dispatch.lanes.reconsider();
        }
        Ok(true)
    }

    /// Brings the view of a worker of this node up to date: the stored values change in batches and may be older.
    pub fn refresh_worker(&self, view: &mut WorkerView, now: Timestamp) {
        let connected = view.registration_id.parse().ok().and_then(|id| self.workers.find(id));
        let Some(connected) = connected else { return self.local.record.refresh(self, view, now) };
        view.state = connected.state();
        view.category = view.state.category().as_str().into();
        view.last_seen_at = connected.seen_at();
        view.breaker = connected.breaker_state(now).as_str().into();
    }

    /// Stores what changed about the workers of this node.
    pub async fn persist_worker_status(&self, now: Timestamp) -> Result<Round, EngineError> {
        let limits = (ms(self.config.reconnect_grace), ms(self.config.worker_heartbeat));
        let built_in = self.local.record.update(self, now).await?;
        let round = status_writer::run_once(&*self.store, &self.workers, &self.dispatch.in_flight, limits, now).await?;
        if round.handled > 0 {
            self.wakeups.worker_status_stored();
        }
        Ok(Round { handled: round.handled + built_in, ..round })
    }
}

impl Events {
    fn new(
        store: &Arc<dyn Store>,
        config: &EngineConfig,
        loops: &Loops,
        wakeups: &Wakeups,
        tracer: &Option<Arc<Tracer>>,
    ) -> Events {
        let rule = AddressRule::new(&config.allowed_networks);
        Events {
            reader: Arc::new(EventReader::new(store.clone(), wakeups.clone())),
            outbox: Outbox::new(&config.outbox, &rule, &loops.outgoing.stop),
            webhooks: Arc::new(Webhooks::with_wakeups(config.webhooks.clone(), rule, wakeups.clone(), tracer.clone())),
        }
    }
}

impl Inputs {
    fn new(config: &EngineConfig, parser: &JobParser, loops: &Loops) -> Result<Inputs, EngineError> {
        let sources = config.sources.iter().map(|source| Source::new(source, parser.clone()).map(Arc::new));
        let inboxes = config.inboxes.iter();
        let inboxes = inboxes.map(|inbox| Arc::new(Inbox::new(inbox, parser.clone(), loops.intake.stop.clone())));
        Ok(Inputs {
            sources: sources.collect::<Result<Vec<_>, _>>()?,
            inboxes: inboxes.collect(),
            reported: Mutex::default(),
        })
    }
}

impl Loops {
    fn new() -> Loops {
        let health = LoopHealth::default();
        Loops { intake: Driver::new(health.clone()), outgoing: Driver::new(health.clone()), health }
    }
}
