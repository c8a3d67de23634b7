//! Everything that runs, in the order in which a job meets it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::{JobId, JobState, NewJob, NodeId, Timestamp, WorkerId};
use faena_store::{CancelOutcome, NodeInfo, Signal, Store, StoreError, Submitted};
use parking_lot::RwLock;
use tokio::sync::{Notify, broadcast::error::RecvError};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Beats, Bus, EngineConfig, Round,
    address::AddressRule,
    builtin::{self, HttpCaller, Worker},
    config::ms,
    dispatcher::{Dispatcher, ReadyLanes},
    driver::Driver,
    held::Hands,
    nodes, poller, promoter, recorder,
    reporter::Reporter,
    retention,
};

pub struct Engine {
    pub store: Arc<dyn Store>,
    pub config: EngineConfig,
    pub beats: Beats,
    pub bus: Bus,
    pub worker_id: WorkerId,
    node: Arc<RwLock<NodeId>>,
    hands: Arc<Hands>,
    reporter: Arc<Reporter>,
    worker: Arc<Worker>,
    idle: Arc<AtomicUsize>,
    drain: CancellationToken,
    /// Loops that bring in new work end first, those that report last.
    intake: Driver,
    outgoing: Driver,
    slots: TaskTracker,
}

/// What became of a request to cancel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelAnswer {
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
const RECONCILE: Duration = Duration::from_secs(15);

impl Engine {
    pub async fn start(store: Arc<dyn Store>, config: EngineConfig) -> Result<Arc<Engine>, StoreError> {
        let now = Timestamp::now();
        let node = NodeId::new();
        let info = NodeInfo { id: node, name: config.node_name.clone() };
        store.node_join(info, ms(config.node_lease), now).await?;
        let node = Arc::new(RwLock::new(node));
        let beats = Beats::default();
        let driver = || Driver { tasks: TaskTracker::new(), stop: CancellationToken::new(), beats: beats.clone() };
        let (intake, outgoing) = (driver(), driver());
        let bus = Bus::default();
        let hands = Arc::new(Hands::default());
        let reporter = Arc::new(Reporter::new(bus.clone()));
        let lanes = Arc::new(ReadyLanes::default());
        let (line, record, promote) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(Notify::new()));
        let recover = Arc::new(Notify::new());
        let idle = Arc::new(AtomicUsize::new(0));
        let low_water = Arc::new(AtomicUsize::new(usize::MAX));
        let drain = CancellationToken::new();
        let slots = TaskTracker::new();
        let worker = Arc::new(Worker {
            id: WorkerId::new(),
            node: node.clone(),
            store: store.clone(),
            hands: hands.clone(),
            reporter: reporter.clone(),
            lanes: lanes.clone(),
            line: line.clone(),
            idle: idle.clone(),
            low_water: low_water.clone(),
            record: record.clone(),
            bus: bus.clone(),
            http: HttpCaller::new(AddressRule::new(&config.allowed_networks), config.http_answer_bytes),
            drain: drain.clone(),
            config: config.clone(),
        });
        let poll = if store.engine() == "sqlite" { POLL_SQLITE } else { POLL_POSTGRES };
        let roles = config.roles;
        let touch = Arc::new(nodes::Touch::default());

        if roles.engine {
            let s = store.clone();
            intake.start("promoter", SAFETY, promote.clone(), move |now| {
                let s = s.clone();
                async move { promoter::run_once(&*s, now).await }
            });
        }
        if roles.worker {
            let (s, n) = (store.clone(), node.clone());
            let dispatcher = Arc::new(Dispatcher::new(
                lanes.clone(),
                hands.clone(),
                config.concurrency,
                idle.clone(),
                line.clone(),
                low_water,
                builtin::kinds(),
            ));
            intake.start("dispatcher", SAFETY, lanes.nudge.clone(), move |now| {
                let (s, n, d) = (s.clone(), *n.read(), dispatcher.clone());
                async move { d.run_once(&*s, n, now).await }
            });
            let (s, n, h, b, w) = (store.clone(), node.clone(), hands.clone(), bus.clone(), worker.id);
            outgoing.start("recorder", SAFETY, record.clone(), move |now| {
                let (s, n, h, b) = (s.clone(), *n.read(), h.clone(), b.clone());
                async move { recorder::run_once(&*s, &h, &b, n, w, now).await }
            });
            let (s, r) = (store.clone(), reporter.clone());
            outgoing.start("reporter", SAFETY, reporter.nudge.clone(), move |now| {
                let (s, r) = (s.clone(), r.clone());
                async move { r.run_once(&*s, now).await }
            });
            for _ in 0..config.concurrency {
                slots.spawn(worker.clone().slot());
            }
        }
        {
            let (s, n, l, h, p) = (store.clone(), node.clone(), lanes.clone(), hands.clone(), promote.clone());
            let r = recover.clone();
            intake.start("poller", poll, Arc::new(Notify::new()), move |now| {
                let (s, n, l, h, p, r) = (s.clone(), *n.read(), l.clone(), h.clone(), p.clone(), r.clone());
                async move { poller::run_once(&*s, n, &l, &h, &p, &r, now).await }
            });
        }
        {
            let (s, n, h, t, c) = (store.clone(), node.clone(), hands.clone(), touch.clone(), config.clone());
            outgoing.start("lease", config.node_lease / 3, Arc::new(Notify::new()), move |now| {
                let (s, n, h, t, c) = (s.clone(), n.clone(), h.clone(), t.clone(), c.clone());
                async move { renew(&*s, &n, &h, &t, &c, now).await }
            });
            let (s, n, h, r) = (store.clone(), node.clone(), hands.clone(), reporter.clone());
            outgoing.start("reconciler", RECONCILE, Arc::new(Notify::new()), move |now| {
                let (s, n, h, r) = (s.clone(), *n.read(), h.clone(), r.clone());
                async move { reconcile(&*s, n, &h, &r, now).await }
            });
        }
        if roles.engine {
            let (s, t, c) = (store.clone(), touch, config.clone());
            intake.start("recovery", SAFETY, recover, move |now| {
                let (s, t, c) = (s.clone(), t.clone(), c.clone());
                async move { nodes::run_once(&*s, &t, ms(c.node_lease), ms(c.orphan_delay), now).await }
            });
            let (s, r) = (store.clone(), config.retention.clone());
            intake.start("retention", Duration::from_secs(60), Arc::new(Notify::new()), move |now| {
                let (s, r) = (s.clone(), r.clone());
                async move { retention::run_once(&*s, &r, now).await }
            });
        }
        listen(&store, &intake, lanes, hands.clone(), promote);
        let worker_id = worker.id;
        Ok(Arc::new(Engine {
            store,
            config,
            beats,
            bus,
            worker_id,
            node,
            hands,
            reporter,
            worker,
            idle,
            drain,
            intake,
            outgoing,
            slots,
        }))
    }

    pub async fn submit(&self, jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>, StoreError> {
        self.store.job_submit(jobs, now).await
    }

    /// Cancels a job. One that runs is told to stop, and given a moment to do so before the answer.
    pub async fn cancel(&self, id: JobId, reason: &str, now: Timestamp) -> Result<CancelAnswer, StoreError> {
        let state = match self.store.job_cancel(id, reason, now).await? {
            CancelOutcome::Cancelled => {
                self.bus.changed(id, JobState::Cancelled, None, now);
                return Ok(CancelAnswer::Cancelled);
            }
            CancelOutcome::Asked { state } => state,
        };
        if let Some(held) = self.hands.find(id) {
            held.ask_to_stop(reason);
        }
        let mut events = self.bus.subscribe();
        let patience = tokio::time::sleep(Duration::from_secs(2));
        tokio::pin!(patience);
        loop {
            let current = self.store.job_get(id).await?.map(|job| job.status);
            match current {
                Some(JobState::Cancelled) => return Ok(CancelAnswer::Cancelled),
                Some(from) if from.is_terminal() => {
                    return Err(StoreError::InvalidTransition { from, wanted: "be cancelled" });
                }
                _ => {}
            }
            tokio::select! {
                () = &mut patience => return Ok(CancelAnswer::Asked { state: current.unwrap_or(state) }),
                // Its end on this node is told at once; that on another node is seen by looking again.
                _ = async { while events.recv().await.is_ok_and(|event| event.job_id != id) {} } => {}
                () = tokio::time::sleep(Duration::from_millis(100)) => {}
            }
        }
    }

    pub fn node_id(&self) -> NodeId {
        *self.node.read()
    }

    /// Jobs in this process's hands, and slots that are free.
    pub fn load(&self) -> (usize, usize) {
        (self.hands.count(), self.idle.load(Ordering::Relaxed))
    }

    /// Stops: no new jobs, what waits for a slot goes back at once, what runs may finish within the grace time (or until
    /// `hurry`), the rest goes back without costing a try.
    pub async fn stop(&self, hurry: CancellationToken) {
        self.intake.stop.cancel();
        self.intake.tasks.close();
        self.intake.tasks.wait().await;
        self.drain.cancel();
        self.worker.hand_back_line();
        self.slots.close();
        tokio::select! {
            () = self.slots.wait() => {}
            () = tokio::time::sleep(self.config.drain_grace) => {}
            () = hurry.cancelled() => {}
        }
        for held in self.hands.all() {
            // Without a reason: it is handed back, not cancelled.
            held.cancel.cancel();
        }
        let _ = tokio::time::timeout(Duration::from_secs(5), self.slots.wait()).await;
        let told = async {
            self.reporter.settled().await;
            self.outgoing.stop.cancel();
            self.outgoing.tasks.close();
            self.outgoing.tasks.wait().await;
        };
        if tokio::time::timeout(Duration::from_secs(10), told).await.is_err() {
            tracing::error!("the database did not take the last reports; other nodes will run these jobs again");
        }
        let node = self.node_id();
        let left = tokio::time::timeout(Duration::from_secs(5), self.store.node_leave(node, Timestamp::now())).await;
        if let Ok(Err(error)) = left {
            tracing::warn!(%error, "this node could not take leave; its lease will run out");
        }
    }
}

/// Hears what has become ready, here or on another node.
fn listen(store: &Arc<dyn Store>, driver: &Driver, lanes: Arc<ReadyLanes>, hands: Arc<Hands>, promote: Arc<Notify>) {
    let mut signals = store.signals();
    let store = store.clone();
    let stop = driver.stop.clone();
    driver.tasks.spawn(async move {
        loop {
            let signal = tokio::select! { () = stop.cancelled() => break, signal = signals.recv() => signal };
            match signal {
                Ok(Signal::Ready(lane)) => lanes.add(lane),
                Ok(Signal::Waiting) => promote.notify_one(),
                Ok(Signal::Cancel(id)) => {
                    if let Some(held) = hands.find(id) {
                        held.ask_to_stop("cancelled by request");
                    }
                }
                // Too many to follow: every lane may have work.
                Err(RecvError::Lagged(_)) => {
                    for lane in store.lanes().await.unwrap_or_default() {
                        lanes.add(lane.id);
                    }
                    promote.notify_one();
                }
                Err(RecvError::Closed) => break,
            }
        }
    });
}

async fn renew(
    store: &dyn Store,
    node: &RwLock<NodeId>,
    hands: &Hands,
    touch: &nodes::Touch,
    config: &EngineConfig,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let lease_ms = ms(config.node_lease);
    let id = *node.read();
    if store.node_renew(id, lease_ms, now).await? {
        touch.renewed(now, lease_ms);
        return Ok(Round::done(1));
    }
    // Another node has taken this one for dead and given its jobs away. Start afresh, as a new node.
    let lost = hands.drop_all();
    tracing::error!(jobs = lost.len(), "this node was taken for dead (was it asleep?); its jobs run elsewhere now");
    for held in lost {
        held.ask_to_stop("this node lost its lease");
    }
    let fresh = NodeId::new();
    store.node_join(NodeInfo { id: fresh, name: config.node_name.clone() }, lease_ms, now).await?;
    *node.write() = fresh;
    Ok(Round::done(1))
}

/// Gives back what the database thinks is here and is not: the answer to a claim got lost on the way.
async fn reconcile(
    store: &dyn Store,
    node: NodeId,
    hands: &Hands,
    reporter: &Reporter,
    now: Timestamp,
) -> Result<Round, StoreError> {
    // In this order: a job that ends meanwhile goes from the hands to the reporter.
    let mut known = hands.runs();
    known.extend(reporter.runs());
    let lost = store.node_reconcile(node, known, now.plus_ms(-ms(LOST_CLAIM)), now).await?;
    if lost > 0 {
        tracing::warn!(jobs = lost, "the answer to a claim got lost; its jobs are ready again");
    }
    Ok(Round::done(lost))
}
