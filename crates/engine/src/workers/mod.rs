//! The workers connected to this node: identity, capabilities, jobs in flight.
//!
//! Workers connect by WebSocket, gRPC or plain HTTP; behind the transport all are handled the same way. A worker's registration is
//! stored and outlives its connection and this process: within the grace period the worker may reconnect, to this node or
//! to another, and keeps its jobs. Each connection has a session number, and only the latest session counts.

mod connected;
mod deliver;
mod rejection;
mod registration;
mod report_handler;
mod status;
pub(crate) mod status_writer;
pub(crate) mod watch;

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use faena_domain::{Timestamp, WorkerId, WorkerState};
use parking_lot::RwLock;

pub use connected::{Ack, CloseReason, ConnectedWorker, Delivery, PollGuard, Transport, WorkerCommand, WorkerIdentity};
pub use registration::{Connection, Registration};
pub use rejection::Rejection;
pub use report_handler::{Report, ReportHandler, ReportKind};

use crate::{
    breaker::BreakerState,
    in_flight::{InFlight, InFlightJob},
    wakeups::Wakeups,
};

/// Locks by worker key: registrations of one key run one after another. Another key waits for them only if it has the
/// same lock by chance.
#[derive(Default)]
pub(crate) struct KeyLocks([tokio::sync::Mutex<()>; 32]);

impl KeyLocks {
    pub fn lock_for(&self, key: &str) -> &tokio::sync::Mutex<()> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        &self.0[usize::try_from(hasher.finish() % 32).unwrap_or(0)]
    }
}

pub struct Workers {
    by_id: RwLock<HashMap<WorkerId, Arc<ConnectedWorker>>>,
    pub(crate) registration_locks: KeyLocks,
    wakeups: Wakeups,
    /// Whether all connections are closed and no new ones are accepted, because this server stops.
    is_closed: AtomicBool,
    /// Number of jobs that were sent to a worker and that it did not accept or did not start.
    pub dispatch_failures: AtomicU64,
}

impl Workers {
    pub(crate) fn new(wakeups: Wakeups) -> Workers {
        Workers {
            by_id: RwLock::default(),
            registration_locks: KeyLocks::default(),
            wakeups,
            is_closed: AtomicBool::new(false),
            dispatch_failures: AtomicU64::new(0),
        }
    }

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

    pub(crate) fn add(&self, worker: Arc<ConnectedWorker>) -> Option<Arc<ConnectedWorker>> {
        self.by_id.write().insert(worker.id, worker)
    }

    /// Removes a worker and its jobs without reporting an end: it was deregistered, or is connected to another node.
    pub(crate) fn drop_worker(&self, worker: &Arc<ConnectedWorker>, in_flight: &InFlight) {
        for job in self.remove(worker) {
            in_flight.forget(&job);
            job.cancel.cancel();
        }
    }

    fn remove(&self, worker: &Arc<ConnectedWorker>) -> Vec<Arc<InFlightJob>> {
        {
            let mut by_id = self.by_id.write();
            // A worker that has reconnected meanwhile stays.
            if by_id.get(&worker.id).is_some_and(|known| Arc::ptr_eq(known, worker)) {
                by_id.remove(&worker.id);
            }
        }
        worker.status.lock().in_flight.drain().map(|(_, job)| job).collect()
    }

    /// Closes all connections because this server stops, and accepts no new ones. The workers stay registered.
    pub(crate) fn close_all(&self, reason: CloseReason) {
        self.is_closed.store(true, Ordering::Release);
        for worker in self.all() {
            worker.close(reason);
        }
    }

    /// Returns whether this server no longer accepts connections of workers, not even of one that reconnects.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Closes all connections and drops all jobs: this node was declared dead and its workers have to register again.
    pub(crate) fn drop_all(&self, in_flight: &InFlight, reason: CloseReason) {
        for worker in self.all() {
            worker.close(reason);
            self.drop_worker(&worker, in_flight);
        }
    }

    /// Records that a job sent to this worker did not get through to it.
    pub fn record_dispatch_failure(&self, worker: &ConnectedWorker, now: Timestamp) {
        self.dispatch_failures.fetch_add(1, Ordering::Relaxed);
        let has_opened = {
            let mut status = worker.status.lock();
            let before = status.breaker.state(now);
            status.breaker.record_failure(now);
            before != BreakerState::Open && status.breaker.state(now) == BreakerState::Open
        };
        if has_opened {
            tracing::warn!(worker = worker.key, reason = "jobs were not accepted", "worker circuit opened");
        }
        self.wakeups.worker_changed();
    }

    /// Returns how many workers are in each state.
    pub fn state_counts(&self) -> Vec<(WorkerState, usize)> {
        let all = self.all();
        WorkerState::ALL
            .into_iter()
            .map(|state| (state, all.iter().filter(|worker| worker.state() == state).count()))
            .collect()
    }

    /// Makes the next status update ask the store about this worker: something about it changed on another node.
    pub(crate) fn request_update(&self, id: WorkerId) {
        if let Some(worker) = self.find(id) {
            worker.status.lock().request_update();
            self.wakeups.worker_changed();
        }
    }

    /// Drains a worker of this node, or cancels its drain.
    pub fn set_draining(&self, id: WorkerId, drain: bool, now: Timestamp) {
        let Some(worker) = self.find(id) else { return };
        {
            let mut status = worker.status.lock();
            if status.drain == drain {
                return;
            }
            status.drain = drain;
            status.update_state(now);
        }
        worker.send([if drain { WorkerCommand::Drain } else { WorkerCommand::Resume }]);
        self.wakeups.worker_changed();
    }
}
