//! The workers that are connected to this process: who they are, what they can do, what they have in hand.
//!
//! Three doors lead here (WebSocket, gRPC, plain HTTP); behind them all workers are alike. A worker's life is stored and goes
//! on when its connection, or this whole process, does not: within the grace time it may connect again, here or to another
//! node, and has its jobs still. A session counts its connections; only the latest one is heard.

mod connected;
mod report_handler;
mod registration;
pub(crate) mod status_writer;
pub(crate) mod watch;

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use faena_domain::{ErrorCode, Timestamp, WorkerId, WorkerState};
use parking_lot::RwLock;
use tokio::sync::Notify;

pub use connected::WorkerIdentity;
pub use connected::{Ack, CloseReason, ConnectedWorker, Delivery, Order, Transport, Waiting};
pub use registration::{Connection, Registration};
pub use report_handler::{Report, ReportHandler, ReportKind};

use crate::{
    breaker::BreakerState,
    in_flight::{InFlight, InFlightJob},
};

/// Why something that a worker says counts for nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
}

impl Refusal {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }

    pub fn stale(run: faena_domain::Run) -> Refusal {
        Refusal::new(ErrorCode::StaleRun, format!("run {run} does not hold this job any more; nothing was changed"))
    }
}

/// Locks by name: whoever comes in under one name does so one after the other; others do not wait for it.
#[derive(Default)]
pub(crate) struct KeyLocks([tokio::sync::Mutex<()>; 32]);

impl KeyLocks {
    pub fn of(&self, key: &str) -> &tokio::sync::Mutex<()> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        &self.0[usize::try_from(hasher.finish() % 32).unwrap_or(0)]
    }
}

#[derive(Default)]
pub struct Workers {
    by_id: RwLock<HashMap<WorkerId, Arc<ConnectedWorker>>>,
    /// Something about workers is to be written down, or has come nearer.
    pub(crate) news: Arc<Notify>,
    pub(crate) watch: Arc<Notify>,
    /// Something has happened to a process of a pool, or to its job.
    pub(crate) pools: Arc<Notify>,
    /// Jobs that a worker was handed and did not take or start.
    pub dispatch_failures: AtomicU64,
}

impl Workers {
    pub fn all(&self) -> Vec<Arc<ConnectedWorker>> {
        self.by_id.read().values().cloned().collect()
    }

    pub fn count(&self) -> usize {
        self.by_id.read().len()
    }

    pub fn find(&self, id: WorkerId) -> Option<Arc<ConnectedWorker>> {
        self.by_id.read().get(&id).cloned()
    }

    pub fn find_by_key(&self, key: &str) -> Option<Arc<ConnectedWorker>> {
        self.by_id.read().values().find(|worker| worker.key == key).cloned()
    }

    pub(crate) fn put(&self, worker: Arc<ConnectedWorker>) -> Option<Arc<ConnectedWorker>> {
        self.by_id.write().insert(worker.id, worker)
    }

    /// Takes a worker out, with what it had in hand: it has ended, or is connected elsewhere. Nothing is told about its jobs.
    pub(crate) fn drop_worker(&self, worker: &Arc<ConnectedWorker>, in_flight: &InFlight) {
        let held = self.take_out(worker);
        for held in held {
            in_flight.forget(&held);
            held.cancel.cancel();
        }
    }

    fn take_out(&self, worker: &Arc<ConnectedWorker>) -> Vec<Arc<InFlightJob>> {
        {
            let mut by_id = self.by_id.write();
            // A worker that has come back in the meantime is somebody else's business.
            if by_id.get(&worker.id).is_some_and(|known| Arc::ptr_eq(known, worker)) {
                by_id.remove(&worker.id);
            }
        }
        let mut standing = worker.standing.lock();
        standing.held.drain().map(|(_, held)| held).collect()
    }

    /// Ends all connections, not the lives of the workers.
    pub fn close_all(&self, reason: CloseReason) {
        for worker in self.all() {
            worker.close(reason);
        }
    }

    /// This node was taken for dead: its workers have to come in again.
    pub(crate) fn drop_all(&self, in_flight: &InFlight, reason: CloseReason) {
        for worker in self.all() {
            worker.close(reason);
            self.drop_worker(&worker, in_flight);
        }
    }

    /// A job that was handed to this worker did not get through to it.
    pub fn dispatch_failed(&self, worker: &ConnectedWorker, now: Timestamp) {
        self.dispatch_failures.fetch_add(1, Ordering::Relaxed);
        let opened = {
            let mut standing = worker.standing.lock();
            let before = standing.breaker.state(now);
            standing.breaker.failed(now);
            before != BreakerState::Open && standing.breaker.state(now) == BreakerState::Open
        };
        if opened {
            tracing::warn!(
                worker = worker.key,
                "its breaker opens: jobs it was handed got lost again and again; it gets none for a while"
            );
        }
        self.news.notify_one();
    }

    /// How many are in each state.
    pub fn states(&self) -> Vec<(WorkerState, usize)> {
        let all = self.all();
        WorkerState::ALL
            .into_iter()
            .map(|state| (state, all.iter().filter(|worker| worker.state() == state).count()))
            .collect()
    }

    /// Something has happened to this worker elsewhere.
    pub(crate) fn ask(&self, id: WorkerId) {
        if let Some(worker) = self.find(id) {
            worker.standing.lock().ask();
            self.news.notify_one();
        }
    }

    /// Asks a worker to take no more jobs, or to take jobs again.
    pub fn drain(&self, id: WorkerId, drain: bool, now: Timestamp) {
        let Some(worker) = self.find(id) else { return };
        {
            let mut standing = worker.standing.lock();
            if standing.drain == drain {
                return;
            }
            standing.drain = drain;
            standing.settle(now);
        }
        worker.order([if drain { Order::Drain } else { Order::Resume }]);
        self.news.notify_one();
    }
}
