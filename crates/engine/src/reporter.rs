//! Stores how runs ended, many at a time, in order.
//!
//! One batch is in progress at a time; ends that arrive meanwhile go into the next. While the database is not
//! available, ends wait here and are sent again until they are stored. Sending an end twice is harmless. If too many
//! wait, the slots take no more jobs.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena_domain::{JobId, Run, Timestamp, WorkerId};
use faena_store::{RunEnd, RunOutcome, RunUpdate, Store, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::{
    Bus, Round,
    in_flight::InFlightJob,
    log_throttle::LogThrottle,
    measure::Measures,
    queue::JobQueue,
    traces::{RunTrace, Tracer},
    wakeups::Wakeups,
    workers::{Ack, ConnectedWorker, Rejection, WorkerCommand},
};

/// Ends that may wait. Beyond that, slots wait before they take another job.
const MAX_WAITING: usize = 10_000;
const BATCH: usize = 2_000;
/// How much of an error is logged. The whole error is stored with the job.
const LOGGED_ERROR_BYTES: usize = 200;

/// Where to confirm that an end is stored.
pub enum Receipt {
    /// A connected worker, about its report of this name.
    Worker(Arc<ConnectedWorker>, &'static str),
    /// A call that waits. Receives `true` if the end was accepted.
    Call(oneshot::Sender<bool>),
}

struct PendingEnd {
    end: RunEnd,
    receipts: Vec<Receipt>,
    /// For the spans of the run, if its trace is recorded.
    trace: Option<Box<RunTrace>>,
    /// For the log, if the job has failed permanently.
    failed_type: Option<Arc<str>>,
}

pub struct Reporter {
    queue: Mutex<VecDeque<PendingEnd>>,
    wakeups: Wakeups,
    /// Notified after each batch.
    batch_stored: Notify,
    bus: Bus,
    measures: Arc<Measures>,
    pub(crate) tracer: Option<Arc<Tracer>>,
    job_queue: Arc<JobQueue>,
    dead_letter_log: LogThrottle,
}

impl Reporter {
    pub(crate) fn new(
        bus: Bus,
        wakeups: Wakeups,
        measures: Arc<Measures>,
        tracer: Option<Arc<Tracer>>,
        job_queue: Arc<JobQueue>,
    ) -> Reporter {
        Reporter {
            queue: Mutex::default(),
            wakeups,
            batch_stored: Notify::new(),
            bus,
            measures,
            tracer,
            job_queue,
            dead_letter_log: LogThrottle::default(),
        }
    }

    pub fn push(&self, job: &InFlightJob, end: RunEnd, receipt: Option<Receipt>) {
        let trace = self.tracer.as_ref().and_then(|tracer| tracer.run(job));
        let failed_type = matches!(end.outcome, RunOutcome::Failed { .. }).then(|| job.kind.clone());
        let mut queue = self.queue.lock();
        queue.push_back(PendingEnd { end, receipts: receipt.into_iter().collect(), trace, failed_type });
        if queue.len() == 1 {
            self.wakeups.run_ended();
        }
    }

    /// Adds a receipt to an end that was reported again before it is stored. Returns the receipt if no such end waits.
    pub fn add_receipt(
        &self,
        id: JobId,
        run: Option<Run>,
        worker: WorkerId,
        is_repeated: impl Fn(&RunEnd) -> bool,
        receipt: Receipt,
    ) -> Option<Receipt> {
        let mut queue = self.queue.lock();
        let same = |end: &RunEnd| {
            end.id == id && end.worker == worker && run.is_none_or(|run| run == end.run) && is_repeated(end)
        };
        match queue.iter_mut().rev().find(|pending| same(&pending.end)) {
            Some(pending) => {
                pending.receipts.push(receipt);
                None
            }
            None => Some(receipt),
        }
    }

    /// Waits until every end that this worker has reported is stored.
    pub async fn wait_until_worker_flushed(&self, worker: WorkerId) {
        self.wait_while(|queue| queue.iter().any(|pending| pending.end.worker == worker)).await;
    }

    /// Waits until no end of this job waits.
    pub async fn wait_until_job_flushed(&self, id: JobId) {
        self.wait_while(|queue| queue.iter().any(|pending| pending.end.id == id)).await;
    }

    /// Waits while too many ends are waiting.
    pub async fn wait_for_capacity(&self) {
        self.wait_while(|queue| queue.len() > MAX_WAITING).await;
    }

    /// Waits until every end is stored.
    pub async fn wait_until_flushed(&self) {
        self.wait_while(|queue| !queue.is_empty()).await;
    }

    async fn wait_while(&self, condition: impl Fn(&VecDeque<PendingEnd>) -> bool) {
        while condition(&self.queue.lock()) {
            let stored = self.batch_stored.notified();
            tokio::select! { () = stored => {}, () = tokio::time::sleep(Duration::from_millis(20)) => {} }
        }
    }

    /// Returns the run numbers of ends that are not stored yet.
    pub fn runs(&self) -> Vec<Run> {
        self.queue.lock().iter().map(|pending| pending.end.run).collect()
    }

    pub async fn run_once(&self, store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
        let batch: Vec<RunEnd> = self.queue.lock().iter().take(BATCH).map(|pending| pending.end.clone()).collect();
        if let Some(jobs) = self.dead_letter_log.take_suppressed(now) {
            tracing::warn!(jobs, "more jobs dead-lettered");
        }
        if batch.is_empty() {
            return Ok(Round::idle_until(self.dead_letter_log.summary_at()));
        }
        let accepted = store.job_end(batch, now).await?;
        let (stored, more) = {
            let mut queue = self.queue.lock();
            let stored: Vec<PendingEnd> = queue.drain(..accepted.len()).collect();
            (stored, !queue.is_empty())
        };
        self.batch_stored.notify_waiters();
        let handled = stored.len();
        let measured: Vec<&RunEnd> =
            stored.iter().zip(&accepted).filter(|(_, accepted)| **accepted).map(|(pending, _)| &pending.end).collect();
        self.measures.jobs.add(&measured);
        self.job_queue.record_ends(store, measured.iter().copied());
        let stale = self.acknowledge(stored, &accepted, now);
        if !stale.is_empty() {
            store.run_update(stale, now).await?;
        }
        Ok(Round { handled, more, next_at: self.dead_letter_log.summary_at() })
    }

    /// Logs a job that has failed permanently.
    fn log_dead_letter(&self, end: &RunEnd, job_type: Option<&str>, now: Timestamp) {
        let RunOutcome::Failed { error, reason } = &end.outcome else { return };
        if self.dead_letter_log.admit(now) {
            let (reason, error) = (reason.as_str(), error.get(..error.floor_char_boundary(LOGGED_ERROR_BYTES)));
            tracing::warn!(job = %end.id, job_type, run = end.run, reason, error, "job dead-lettered");
        }
    }

    /// Answers all receipts. Returns entries for the logs of the jobs whose reports were rejected.
    fn acknowledge(&self, stored: Vec<PendingEnd>, accepted: &[bool], now: Timestamp) -> Vec<RunUpdate> {
        let mut stale = Vec::new();
        // Acknowledgements of one worker mostly follow each other, and are sent together.
        let mut acks: Vec<WorkerCommand> = Vec::new();
        let mut to: Option<Arc<ConnectedWorker>> = None;
        for (PendingEnd { end, receipts, trace, failed_type }, accepted) in stored.into_iter().zip(accepted) {
            if *accepted {
                self.bus.changed(end.id, end.outcome.state(), Some(end.run), end.at);
                self.log_dead_letter(&end, failed_type.as_deref(), now);
                if let (Some(tracer), Some(trace)) = (&self.tracer, trace) {
                    tracer.export_run(*trace, &end);
                }
            } else {
                tracing::warn!(job = %end.id, run = end.run, "late report rejected");
            }
            for receipt in receipts {
                match receipt {
                    Receipt::Call(call) => {
                        let _ = call.send(*accepted);
                    }
                    Receipt::Worker(worker, report) => {
                        if let Some(known) = to.as_ref().filter(|known| !Arc::ptr_eq(known, &worker)) {
                            known.send(acks.drain(..));
                        }
                        let rejection = (!accepted).then(|| Rejection::stale(end.run));
                        if let Some(rejection) = &rejection {
                            let text = format!("{report} from worker {}: {}", worker.key, rejection.message);
                            stale.push(RunUpdate::stale(end.id, end.run, text, now));
                        }
                        acks.push(WorkerCommand::Ack(Ack { job_id: end.id, run: Some(end.run), report, rejection }));
                        to = Some(worker);
                    }
                }
            }
        }
        if let Some(worker) = to {
            worker.send(acks);
        }
        stale
    }
}
