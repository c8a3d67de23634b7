//! Tells the store how runs ended, many at a time, in order.
//!
//! One batch is under way at a time; what ends meanwhile goes into the next. While the database is away, ends wait here (the
//! slots wait too once there are too many) and are told until they are heard: repeating an end is harmless.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena_domain::{JobId, Run, Timestamp, WorkerId};
use faena_store::{RunEnd, Store, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::{
    Bus, Round,
    workers::{Ack, ConnectedWorker, Order, Refusal},
};

/// Ends that may wait; beyond that, slots wait before they take another job.
const QUEUE: usize = 10_000;
const BATCH: usize = 2_000;

/// Who wants to know that an end is stored.
pub enum Receipt {
    /// A worker on a stream, about its report `of`.
    Worker(Arc<ConnectedWorker>, &'static str),
    /// A call that waits: `true` if it counts.
    Call(oneshot::Sender<bool>),
}

struct Untold {
    end: RunEnd,
    receipts: Vec<Receipt>,
}

pub struct Reporter {
    queue: Mutex<VecDeque<Untold>>,
    pub nudge: Arc<Notify>,
    room: Notify,
    settled: Notify,
    bus: Bus,
}

impl Reporter {
    pub fn new(bus: Bus) -> Reporter {
        Reporter {
            queue: Mutex::default(),
            nudge: Arc::new(Notify::new()),
            room: Notify::new(),
            settled: Notify::new(),
            bus,
        }
    }

    pub fn push(&self, end: RunEnd, receipt: Option<Receipt>) {
        let mut queue = self.queue.lock();
        queue.push_back(Untold { end, receipts: receipt.into_iter().collect() });
        if queue.len() == 1 {
            self.nudge.notify_one();
        }
    }

    /// Somebody tells the same end again before it is stored: both hear of it. Gives the receipt back if there is no such end.
    pub fn join(&self, id: JobId, run: Option<Run>, worker: WorkerId, receipt: Receipt) -> Option<Receipt> {
        let mut queue = self.queue.lock();
        let same = |end: &RunEnd| end.id == id && end.worker == worker && run.is_none_or(|run| run == end.run);
        match queue.iter_mut().rev().find(|untold| same(&untold.end)) {
            Some(untold) => {
                untold.receipts.push(receipt);
                None
            }
            None => Some(receipt),
        }
    }

    /// Waits until every end that this worker has reported is stored.
    pub async fn settled_for(&self, worker: WorkerId) {
        while self.queue.lock().iter().any(|untold| untold.end.worker == worker) {
            let room = self.room.notified();
            tokio::select! { () = room => {}, () = tokio::time::sleep(Duration::from_millis(20)) => {} }
        }
    }

    /// The hand-outs of which ends are untold.
    pub fn runs(&self) -> Vec<Run> {
        self.queue.lock().iter().map(|untold| untold.end.run).collect()
    }

    /// Waits while too many ends are untold.
    pub async fn room(&self) {
        while self.queue.lock().len() > QUEUE {
            let room = self.room.notified();
            tokio::select! { () = room => {}, () = tokio::time::sleep(Duration::from_millis(100)) => {} }
        }
    }

    /// Waits until everything is told.
    pub async fn settled(&self) {
        while !self.queue.lock().is_empty() {
            let settled = self.settled.notified();
            tokio::select! { () = settled => {}, () = tokio::time::sleep(Duration::from_millis(20)) => {} }
        }
    }

    pub async fn run_once(&self, store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
        let batch: Vec<RunEnd> = self.queue.lock().iter().take(BATCH).map(|untold| untold.end.clone()).collect();
        if batch.is_empty() {
            return Ok(Round::default());
        }
        let answers = store.job_end(batch, now).await?;
        let (told, more) = {
            let mut queue = self.queue.lock();
            let told: Vec<Untold> = queue.drain(..answers.len()).collect();
            (told, !queue.is_empty())
        };
        self.room.notify_waiters();
        if !more {
            self.settled.notify_waiters();
        }
        let handled = told.len();
        self.acknowledge(told, &answers);
        Ok(Round { handled, more, next_at: None })
    }

    fn acknowledge(&self, told: Vec<Untold>, answers: &[bool]) {
        // Acknowledgements of one worker mostly follow each other, and leave together.
        let mut acks: Vec<Order> = Vec::new();
        let mut to: Option<Arc<ConnectedWorker>> = None;
        for (Untold { end, receipts }, counts) in told.into_iter().zip(answers) {
            if *counts {
                self.bus.changed(end.id, end.outcome.state(), Some(end.run), end.at);
            } else {
                tracing::warn!(job = %end.id, run = end.run, "a run ended after its job was given to somebody else; nothing was changed");
            }
            for receipt in receipts {
                match receipt {
                    Receipt::Call(call) => {
                        let _ = call.send(*counts);
                    }
                    Receipt::Worker(worker, of) => {
                        if let Some(known) = to.as_ref().filter(|known| !Arc::ptr_eq(known, &worker)) {
                            known.order(acks.drain(..));
                        }
                        let refusal = (!counts).then(|| Refusal::stale(end.run));
                        acks.push(Order::Ack(Ack { job_id: end.id, run: Some(end.run), of, refusal }));
                        to = Some(worker);
                    }
                }
            }
        }
        if let Some(worker) = to {
            worker.order(acks);
        }
    }
}
