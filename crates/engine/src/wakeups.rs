//! Wakes the loops after a change. This is the only place that knows which loop has to run after which change.
//!
//! Each function names a change, not a loop: code that changes something says what happened. A wake-up that is lost costs
//! one period of the loop, never a job, because every loop also runs on a period.

use std::sync::Arc;

use tokio::sync::Notify;

/// One handle per loop that does not only run on a period. Clones wake the same loops.
#[derive(Clone, Default)]
pub(crate) struct Wakeups {
    pub scheduler: Arc<Notify>,
    pub tasks: Arc<Notify>,
    pub promoter: Arc<Notify>,
    pub dispatcher: Arc<Notify>,
    pub recorder: Arc<Notify>,
    pub reporter: Arc<Notify>,
    pub webhooks: Arc<Notify>,
    pub event_reader: Arc<Notify>,
    pub worker_status: Arc<Notify>,
    pub guardian: Arc<Notify>,
    pub pools: Arc<Notify>,
    pub bulk: Arc<Notify>,
}

impl Wakeups {
    /// A lane has ready jobs, or a lane can be served again.
    pub fn lanes_ready(&self) {
        self.dispatcher.notify_one();
    }

    /// A slot of the built-in worker or of a connected worker is free.
    pub fn slot_freed(&self) {
        self.dispatcher.notify_one();
    }

    /// A job is delayed, retried later or expires: the next due time may be earlier than known.
    pub fn due_times_changed(&self) {
        self.promoter.notify_one();
        self.guardian.notify_one();
    }

    /// A node or worker may have died, a job was asked to stop, or a deadline is nearer than the guardian knows.
    pub fn deadline_changed(&self) {
        self.guardian.notify_one();
    }

    /// The status of a worker changed and has to be stored.
    pub fn worker_changed(&self) {
        self.worker_status.notify_one();
    }

    /// The status of workers was stored; one of them may accept jobs again.
    pub fn worker_status_stored(&self) {
        self.dispatcher.notify_one();
    }

    /// A worker connected or disconnected: its status has to be stored and its deadlines watched.
    pub fn connection_changed(&self) {
        self.worker_status.notify_one();
        self.guardian.notify_one();
    }

    /// A process of a pool has to be started, or its job has ended.
    pub fn pool_changed(&self) {
        self.pools.notify_one();
    }

    /// A job of a connected worker has ended.
    pub fn remote_job_ended(&self, is_ephemeral: bool) {
        if is_ephemeral {
            self.pools.notify_one();
        }
        self.dispatcher.notify_one();
        self.worker_status.notify_one();
    }

    /// A job has started, and may run long enough for its start to be recorded.
    pub fn job_started(&self) {
        self.recorder.notify_one();
    }

    /// The end of a run waits to be stored.
    pub fn run_ended(&self) {
        self.reporter.notify_one();
    }

    /// A webhook is due, or a sender has finished.
    pub fn webhooks_changed(&self) {
        self.webhooks.notify_one();
    }

    /// A schedule was created, changed or enabled.
    pub fn schedules_changed(&self) {
        self.scheduler.notify_one();
    }

    /// A task has a timer that is due earlier than known, or its job has ended.
    pub fn tasks_changed(&self) {
        self.tasks.notify_one();
    }

    /// Events were committed, or a subscriber arrived.
    pub fn events_changed(&self) {
        self.event_reader.notify_one();
    }

    /// A bulk action was stored for the loop to run.
    pub fn bulk_started(&self) {
        self.bulk.notify_one();
    }
}
