//! Tells the store how runs ended, many at a time, in order.
//!
//! One batch is under way at a time; what ends meanwhile goes into the next. While the database is away, ends wait here (the
//! slots wait too once there are too many) and are told until they are heard: repeating an end is harmless.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena_domain::{Run, Timestamp};
use faena_store::{RunEnd, Store, StoreError};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{Bus, Round};

/// Ends that may wait; beyond that, slots wait before they take another job.
const QUEUE: usize = 10_000;
const BATCH: usize = 2_000;

pub struct Reporter {
    queue: Mutex<VecDeque<RunEnd>>,
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

    pub fn push(&self, end: RunEnd) {
        let mut queue = self.queue.lock();
        queue.push_back(end);
        if queue.len() == 1 {
            self.nudge.notify_one();
        }
    }

    /// The hand-outs of which ends are untold.
    pub fn runs(&self) -> Vec<Run> {
        self.queue.lock().iter().map(|end| end.run).collect()
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
        let batch: Vec<RunEnd> = self.queue.lock().iter().take(BATCH).cloned().collect();
        if batch.is_empty() {
            return Ok(Round::default());
        }
        let answers = store.job_end(batch.clone(), now).await?;
        let more = {
            let mut queue = self.queue.lock();
            queue.drain(..batch.len());
            !queue.is_empty()
        };
        self.room.notify_waiters();
        if !more {
            self.settled.notify_waiters();
        }
        for (end, held) in batch.iter().zip(answers) {
            if held {
                self.bus.changed(end.id, end.outcome.state(), Some(end.run), end.at);
            } else {
                tracing::warn!(job = %end.id, run = end.run, "a run ended after its job was given to somebody else; nothing was changed");
            }
        }
        Ok(Round { handled: batch.len(), more, next_at: None })
    }
}
