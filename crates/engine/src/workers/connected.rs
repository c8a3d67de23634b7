//! One worker that is connected to this process: what it can do, what it has in hand, what it is to be told.

use std::{
    collections::{HashMap, VecDeque},
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use faena_domain::{
    JobId, NodeId, Run, Step, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState,
};
use faena_store::{Lane, LaneId, WorkerEntry, WorkerUpdate};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Refusal;
use crate::{
    breaker::{Breaker, BreakerState},
    in_flight::InFlightJob,
};

/// By which door a worker has come in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    WebSocket,
    Grpc,
    /// It calls now and then; between two calls nothing can be told to it.
    Http,
    /// By none yet: its process is about to start.
    None,
}

impl Transport {
    pub fn as_str(self) -> &'static str {
        match self {
            Transport::WebSocket => "websocket",
            Transport::Grpc => "grpc",
            Transport::Http => "http",
            Transport::None => "",
        }
    }
}

/// What a worker is told.
pub enum Order {
    Job(Delivery),
    Ack(Ack),
    Cancel { job_id: JobId, run: Run, reason: String },
    Drain,
    Resume,
}

/// Why the server ends a worker's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    ServerStopping,
    /// Other nodes have declared this one dead and reassigned its jobs.
    ServerDeclaredDead,
    WorkerLost,
    /// The same worker has opened another connection.
    Reconnected,
    /// The database has another registration for this worker.
    RegisteredElsewhere,
    NotReading,
    TooManyMessages,
    Left,
}

impl CloseReason {
    pub fn as_str(self) -> &'static str {
        match self {
            CloseReason::ServerStopping => "the server is stopping; reconnect",
            CloseReason::ServerDeclaredDead => "the server was declared dead; reconnect",
            CloseReason::WorkerLost => "the worker was declared lost",
            CloseReason::Reconnected => "the worker has reconnected",
            CloseReason::RegisteredElsewhere => "the worker is connected to another node or was declared lost",
            CloseReason::NotReading => "the worker does not read its messages",
            CloseReason::TooManyMessages => "too many messages",
            CloseReason::Left => "the worker has left",
        }
    }
}

/// A job on its way to a worker.
pub struct Delivery {
    pub held: Arc<InFlightJob>,
    pub lane: Arc<Lane>,
    /// When it will be told to stop.
    pub deadline: Timestamp,
    pub steps: Vec<Step>,
}

/// The answer to a report: it is stored, or why it counts for nothing.
pub struct Ack {
    pub job_id: JobId,
    pub run: Option<Run>,
    pub of: &'static str,
    pub refusal: Option<Refusal>,
}

/// What a worker is at the moment.
pub(crate) struct WorkerStatus {
    pub state: WorkerState,
    pub held: HashMap<JobId, Arc<InFlightJob>>,
    /// Runs that are over for us, whose handler was told to stop and has not said that it did. They take a slot.
    pub stopping: HashMap<JobId, Stopping>,
    pub breaker: Breaker,
    pub seen_at: Timestamp,
    /// Since when its connection is gone.
    pub away_since: Option<Timestamp>,
    pub drain: bool,
    /// It has had the one job that it is there for.
    pub used: bool,
    /// It is there for one job.
    pub last_job: bool,
    /// What the store has not heard of yet.
    changes: Vec<WorkerChange>,
    completed: u64,
    failed: u64,
    told_seen_at: Timestamp,
    told_away: Option<Timestamp>,
    told_breaker: BreakerState,
}

pub(crate) struct Stopping {
    pub run: Run,
    pub reason: String,
    pub since: Timestamp,
    pub complained: bool,
}

pub struct ConnectedWorker {
    identity: WorkerIdentity,
    /// Cancelled when the connection shall end; the reason is beside it.
    pub closing: CancellationToken,
    close_reason: Mutex<Option<CloseReason>>,
    pub(crate) standing: Mutex<WorkerStatus>,
    orders: Mutex<VecDeque<Order>>,
    /// Told when there is something in `orders`.
    ordered: Notify,
    /// Transport::Http: how many jobs it waits for at this moment.
    pub(crate) waits_for: AtomicUsize,
    serves: Mutex<HashMap<LaneId, bool>>,
}

/// Orders that may wait for a worker that reads, beyond what its slots need. Who lets more pile up does not read.
const ORDERS: usize = 20_000;

/// Lanes of which a worker remembers whether it serves them.
const REMEMBERED_LANES: usize = 1_000;

/// Who a connected worker is. That does not change while it is connected.
pub struct WorkerIdentity {
    /// This life of it.
    pub id: WorkerId,
    /// What it calls itself.
    pub key: String,
    pub kind: WorkerKind,
    /// Which connection of this life.
    pub session: i64,
    pub transport: Transport,
    pub capabilities: WorkerCapabilities,
    pub concurrency: usize,
    /// It says itself when it starts a job.
    pub tells_starts: bool,
    pub pool: Option<String>,
    /// It runs one job and ends.
    pub ephemeral: bool,
}

impl Deref for ConnectedWorker {
    type Target = WorkerIdentity;

    fn deref(&self) -> &WorkerIdentity {
        &self.identity
    }
}

impl WorkerIdentity {
    /// How it is written down when it comes in.
    pub fn entry(&self, name: Option<String>, node: NodeId) -> WorkerEntry {
        let state = if self.transport == Transport::None { WorkerState::Creating } else { WorkerState::Ready };
        WorkerEntry {
            id: self.id,
            key: self.key.clone(),
            name,
            kind: self.kind,
            transport: self.transport.as_str().into(),
            node,
            state,
            capabilities: self.capabilities.clone(),
            concurrency: u32::try_from(self.concurrency).unwrap_or(u32::MAX),
            pool: self.pool.clone(),
            deadline: None,
        }
    }
}

impl ConnectedWorker {
    pub(crate) fn new(
        identity: WorkerIdentity,
        state: WorkerState,
        breaker: Breaker,
        now: Timestamp,
    ) -> ConnectedWorker {
        let last_job = identity.ephemeral;
        let told_breaker = breaker.state(now);
        ConnectedWorker {
            identity,
            closing: CancellationToken::new(),
            close_reason: Mutex::new(None),
            standing: Mutex::new(WorkerStatus {
                state,
                held: HashMap::new(),
                stopping: HashMap::new(),
                breaker,
                seen_at: now,
                away_since: None,
                drain: false,
                used: false,
                last_job,
                changes: Vec::new(),
                completed: 0,
                failed: 0,
                told_seen_at: now,
                told_away: None,
                told_breaker,
            }),
            orders: Mutex::default(),
            ordered: Notify::new(),
            waits_for: AtomicUsize::new(0),
            serves: Mutex::default(),
        }
    }

    /// A sign of life.
    pub fn seen(&self, now: Timestamp) {
        let mut standing = self.standing.lock();
        standing.seen_at = standing.seen_at.max(now);
    }

    /// Ends the connection, not the registration. The first reason counts.
    pub fn close(&self, reason: CloseReason) {
        self.close_reason.lock().get_or_insert(reason);
        self.closing.cancel();
    }

    pub fn close_reason(&self) -> Option<CloseReason> {
        *self.close_reason.lock()
    }

    pub(crate) fn order(&self, orders: impl IntoIterator<Item = Order>) {
        let full = {
            let mut queue = self.orders.lock();
            queue.extend(orders);
            queue.len() > ORDERS + 2 * self.concurrency
        };
        self.ordered.notify_one();
        if full {
            self.close(CloseReason::NotReading);
        }
    }

    /// What it is to be told next; waits until there is something. Safe to be dropped while it waits.
    pub async fn orders(&self) -> Vec<Order> {
        loop {
            let ordered = self.ordered.notified();
            let waiting = self.take_orders();
            if !waiting.is_empty() {
                return waiting;
            }
            ordered.await;
        }
    }

    /// What it is to be told besides jobs.
    pub fn take_words(&self) -> Vec<Order> {
        let mut orders = self.orders.lock();
        let (jobs, words): (VecDeque<Order>, Vec<Order>) = {
            let mut jobs = VecDeque::new();
            let mut words = Vec::new();
            for order in orders.drain(..) {
                if matches!(order, Order::Job(_)) { jobs.push_back(order) } else { words.push(order) }
            }
            (jobs, words)
        };
        *orders = jobs;
        words
    }

    pub fn take_orders(&self) -> Vec<Order> {
        self.orders.lock().drain(..).collect()
    }

    pub(crate) fn serves(&self, lane: &Lane) -> bool {
        let mut known = self.serves.lock();
        if known.len() >= REMEMBERED_LANES {
            known.clear();
        }
        *known.entry(lane.id).or_insert_with(|| self.capabilities.covers(&lane.queue, &lane.kind))
    }

    /// How many jobs it may be handed now.
    pub(crate) fn room(&self, now: Timestamp) -> usize {
        let standing = self.standing.lock();
        let takes = match standing.state {
            // A process is started when it has something to do.
            WorkerState::Creating => self.ephemeral,
            state => state.is_operational(),
        };
        if !takes
            || (self.ephemeral && standing.used)
            || standing.drain
            || standing.away_since.is_some()
            || self.closing.is_cancelled()
        {
            return 0;
        }
        let free = self.concurrency.saturating_sub(standing.held.len() + standing.stopping.len());
        let wanted = match self.transport {
            Transport::Http => free.min(self.waits_for.load(Ordering::Acquire)),
            _ => free,
        };
        standing.breaker.room(wanted, now)
    }

    /// These jobs are in its hands from now on.
    pub(crate) fn takes(&self, jobs: &[Arc<InFlightJob>], now: Timestamp) {
        let mut standing = self.standing.lock();
        standing.held.extend(jobs.iter().map(|held| (held.job.id, held.clone())));
        standing.breaker.sent(jobs.len(), now);
        standing.used |= !jobs.is_empty();
        standing.settle(now);
    }

    pub(crate) fn becomes(&self, state: WorkerState, now: Timestamp) {
        self.standing.lock().become_state(state, None, now);
    }

    /// It was there for one job, and that has ended.
    pub(crate) fn has_done_its_job(&self) -> bool {
        let standing = self.standing.lock();
        self.ephemeral && standing.used && standing.held.is_empty() && standing.state.is_operational()
    }

    pub fn state(&self) -> WorkerState {
        self.standing.lock().state
    }

    pub fn holds(&self, id: JobId) -> bool {
        self.standing.lock().held.contains_key(&id)
    }

    /// What it is to stop: told again with each of its calls, until it has answered.
    pub fn to_stop(&self) -> Vec<(JobId, Run, String)> {
        let standing = self.standing.lock();
        let asked = standing.held.values().filter_map(|held| Some((held.job.id, held.job.run, held.cancel_reason()?)));
        let over = standing.stopping.iter().map(|(id, stopping)| (*id, stopping.run, stopping.reason.clone()));
        asked.chain(over).collect()
    }

    pub fn seen_at(&self) -> Timestamp {
        self.standing.lock().seen_at
    }

    pub fn is_draining(&self) -> bool {
        self.standing.lock().drain
    }

    /// Transport::Http: it waits for up to `count` jobs, until the guard is dropped.
    pub fn wait_for(self: &Arc<Self>, count: usize) -> Waiting {
        self.waits_for.fetch_add(count, Ordering::AcqRel);
        Waiting(self.clone(), count)
    }

    /// Slots that are free, as far as is known here.
    pub fn free(&self) -> usize {
        let standing = self.standing.lock();
        self.concurrency.saturating_sub(standing.held.len() + standing.stopping.len())
    }

    /// Up to `count` jobs that were sent to it and of which nothing was heard since, the oldest first: it says that it has room,
    /// so their delivery got lost.
    pub fn unheard(&self, count: usize) -> Vec<Arc<InFlightJob>> {
        let standing = self.standing.lock();
        let mut jobs: Vec<Arc<InFlightJob>> =
            standing.held.values().filter(|held| !held.was_heard_of()).cloned().collect();
        jobs.sort_by_key(|held| (held.claimed_at, held.job.id));
        jobs.truncate(count);
        jobs
    }

    pub fn breaker_state(&self, now: Timestamp) -> BreakerState {
        self.standing.lock().breaker.state(now)
    }

    /// When its breaker lets jobs pass again, if it does not now.
    pub fn breaker_opens_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.standing.lock().breaker.opens_at(now)
    }

    /// Jobs in hand, and slots taken by handlers that do not stop.
    pub fn load(&self) -> (usize, usize) {
        let standing = self.standing.lock();
        (standing.held.len(), standing.stopping.len())
    }
}

/// See `Connected::wait_for`.
pub struct Waiting(Arc<ConnectedWorker>, usize);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waits_for.fetch_sub(self.1, Ordering::AcqRel);
    }
}

impl WorkerStatus {
    /// Goes on to `next`, if that is allowed; otherwise nothing happens.
    pub fn become_state(&mut self, next: WorkerState, reason: Option<&str>, now: Timestamp) {
        if self.state.can_transition_to(next) {
            self.state = next;
            self.changes.push(WorkerChange { at: now, state: next, reason: reason.map(str::to_owned) });
        }
    }

    /// Ready, busy or draining, from what it has in hand and what is wanted of it.
    pub fn settle(&mut self, now: Timestamp) {
        use WorkerState::{Busy, Draining, Ready};
        if self.state == Draining && !self.drain {
            self.become_state(Ready, Some("the drain was called off"), now);
        }
        if self.drain && matches!(self.state, Ready | Busy) {
            self.become_state(Draining, None, now);
        }
        match (self.state, self.held.is_empty()) {
            (Ready, false) => self.become_state(Busy, None, now),
            // One that has done the one job it is there for is never ready again.
            (Busy, true) if !self.last_job => self.become_state(Ready, None, now),
            _ => {}
        }
    }

    pub fn ended(&mut self, completed: bool) {
        if completed { self.completed += 1 } else { self.failed += 1 }
    }

    /// What the store should hear, if there is anything. A life that is not interrupted is told about every `beat_ms`.
    pub fn news(
        &mut self,
        worker: &ConnectedWorker,
        grace_ms: i64,
        beat_ms: i64,
        now: Timestamp,
    ) -> Option<WorkerUpdate> {
        let breaker = self.breaker.state(now);
        let dirty = !self.changes.is_empty()
            || self.completed + self.failed > 0
            || self.away_since != self.told_away
            || breaker != self.told_breaker
            || self.seen_at.ms_since(self.told_seen_at) >= beat_ms;
        if !dirty {
            return None;
        }
        self.told_away = self.away_since;
        self.told_breaker = breaker;
        self.told_seen_at = self.seen_at;
        Some(WorkerUpdate {
            id: worker.id,
            session: worker.session,
            changes: shorten(std::mem::take(&mut self.changes)),
            seen_at: self.seen_at,
            deadline: self.away_since.map(|since| since.plus_ms(grace_ms)),
            completed: std::mem::take(&mut self.completed),
            failed: std::mem::take(&mut self.failed),
            breaker: breaker.as_str(),
        })
    }

    /// Somebody wants something of it: the store is asked what, with the next news.
    pub fn ask(&mut self) {
        self.told_seen_at = Timestamp::from_ms(0);
    }

    /// The store did not hear it after all.
    pub fn unsaid(&mut self, news: WorkerUpdate) {
        let mut changes = news.changes;
        changes.append(&mut self.changes);
        self.changes = changes;
        self.completed += news.completed;
        self.failed += news.failed;
        self.ask();
    }
}

/// A worker that went back and forth between ready and busy many times between two news: the last of it is enough.
fn shorten(changes: Vec<WorkerChange>) -> Vec<WorkerChange> {
    use WorkerState::{Busy, Ready};
    let mut short: Vec<WorkerChange> = Vec::new();
    for change in changes {
        if let [.., before, last] = short.as_slice()
            && matches!((before.state, last.state, change.state), (Ready, Busy, Ready) | (Busy, Ready, Busy))
        {
            short.pop();
            short.pop();
        }
        short.push(change);
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn going_back_and_forth_is_told_once_and_stays_a_legal_path() {
        use WorkerState::{Busy, Draining, Ready};
        let change = |state| WorkerChange { at: Timestamp::from_ms(0), state, reason: None };
        let states = [Busy, Ready, Busy, Ready, Busy, Ready, Draining, Ready, Busy];
        let short: Vec<_> = shorten(states.map(change).to_vec()).into_iter().map(|c| c.state).collect();
        assert_eq!(short, [Busy, Ready, Draining, Ready, Busy]);
    }
}
