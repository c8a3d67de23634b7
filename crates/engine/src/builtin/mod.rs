//! The worker inside the server: slots that take jobs from the line and run the built-in types.

mod http;
mod record;
mod run;
mod shell;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use faena_domain::{ErrorReason, Failure, JobId, JobState, LogEvent, LogLine, NodeId, Progress, Timestamp};
use faena_store::{NoteKind, RunOutcome, Store, StoreError};
use futures_util::FutureExt;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, EngineConfig,
    dispatcher::ReadyLanes,
    driver::panic_text,
    in_flight::{InFlight, InFlightJob},
    recorder,
    reporter::Reporter,
    verdict::judge,
};

pub use http::HttpCaller;
pub use record::BuiltIn;
pub use shell::INHERITED;

/// The types that need nothing but this process.
pub fn kinds() -> HashSet<&'static str> {
    HashSet::from(["noop", "sleep", "http.request", "shell.run"])
}

pub struct Worker {
    pub node: Arc<RwLock<NodeId>>,
    pub store: Arc<dyn Store>,
    pub config: EngineConfig,
    pub in_flight: Arc<InFlight>,
    pub reporter: Arc<Reporter>,
    pub lanes: Arc<ReadyLanes>,
    pub line: Arc<Notify>,
    pub idle: Arc<AtomicUsize>,
    /// The length of the line at which the dispatcher wants to know.
    pub low_water: Arc<AtomicUsize>,
    pub record: Arc<Notify>,
    pub bus: Bus,
    pub http: HttpCaller,
    /// No new jobs.
    pub drain: CancellationToken,
}

/// What a handler sees of its job.
pub struct Context<'a> {
    worker: &'a Worker,
    held: &'a InFlightJob,
}

impl Context<'_> {
    pub fn payload(&self) -> &str {
        &self.held.job.payload
    }

    pub fn kind(&self) -> &str {
        &self.held.kind
    }

    pub fn id(&self) -> JobId {
        self.held.job.id
    }

    pub fn run(&self) -> i64 {
        self.held.job.run
    }

    pub fn correlation_id(&self) -> String {
        self.held.job.correlation_id.clone().unwrap_or_else(|| self.id().to_string())
    }

    /// Stores how far the job is. A progress that cannot be stored is not worth the job's failure.
    pub async fn progress(&self, progress: Progress) {
        let now = Timestamp::now();
        self.held.mark_recorded();
        let node = *self.worker.node.read();
        let note = recorder::note(self.held, node, NoteKind::Progress(progress.clone()), now);
        if let Some(note) = note {
            if let Err(error) = self.worker.store.job_note(vec![note], now).await {
                tracing::debug!(job = %self.id(), %error, "a progress could not be stored");
            }
            self.worker.bus.progress(self.id(), self.run(), progress, now);
        }
    }
}

impl Worker {
    /// One slot: takes a job, runs it, reports it, takes the next.
    pub async fn slot(self: Arc<Self>) {
        while let Some(held) = self.next_job().await {
            self.run_one(held).await;
            self.reporter.room().await;
        }
    }

    async fn next_job(&self) -> Option<Arc<InFlightJob>> {
        loop {
            if self.drain.is_cancelled() {
                return None;
            }
            let notified = self.line.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(held) = self.in_flight.next_in_line() {
                if self.in_flight.waiting() == self.low_water.load(Ordering::Relaxed) {
                    self.lanes.nudge.notify_one();
                }
                return Some(held);
            }
            self.idle.fetch_add(1, Ordering::AcqRel);
            self.lanes.nudge.notify_one();
            tokio::select! { () = notified => {}, () = self.drain.cancelled() => {} }
            self.idle.fetch_sub(1, Ordering::AcqRel);
        }
    }

    async fn run_one(&self, held: Arc<InFlightJob>) {
        let now = Timestamp::now();
        if let Some(cause) = held.cancel_reason() {
            let line = LogLine::new(now, LogEvent::Cancelled, cause.clone());
            return self.finish(&held, RunOutcome::Cancelled { cause }, vec![line], now);
        }
        if held.job.options.expires_at.is_some_and(|at| at <= now) {
            let error = "expired before it could start".to_owned();
            let line = LogLine::new(now, LogEvent::Expired, error.clone());
            let outcome = RunOutcome::Failed { error, reason: ErrorReason::Expired };
            return self.finish(&held, outcome, vec![line], now);
        }
        held.start(now);
        if held.job.start_first && !self.start_is_on_record(&held, now).await {
            return self.finish(&held, RunOutcome::HandedBack, vec![LogLine::new(now, LogEvent::HandedBack, "")], now);
        }
        self.bus.changed(held.job.id, JobState::Processing, Some(held.job.run), now);
        let result = match &*held.kind {
            // Nothing to wait for, nothing to stop.
            "noop" => Ok(None),
            _ => self.run_handler(&held).await,
        };
        let now = Timestamp::now();
        let (outcome, lines) = judge(&held, result, now);
        self.finish(&held, outcome, lines, now);
    }

    /// Runs a handler until it ends, its time is up, or it is told to stop. Dropping a handler stops what it does.
    async fn run_handler(&self, held: &InFlightJob) -> Result<Option<String>, Failure> {
        self.record.notify_one();
        let context = Context { worker: self, held };
        let limit =
            held.job.options.timeout_ms.map_or(self.config.processing_timeout, std::time::Duration::from_millis);
        let handler = std::panic::AssertUnwindSafe(run::run(&context)).catch_unwind();
        tokio::select! {
            biased;
            () = held.cancel.cancelled() => {
                let cause = held.cancel_reason().unwrap_or_else(|| "the server stops".into());
                Err(Failure::error(cause).with_reason(ErrorReason::Cancelled))
            }
            ended = tokio::time::timeout(limit, handler) => match ended {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => Err(Failure::error(panic_text(panic.as_ref()))),
                Err(_) => {
                    let text = format!("took longer than its limit of {} ms", limit.as_millis());
                    Err(Failure::error(text).with_reason(ErrorReason::Timeout))
                }
            }
        }
    }

    /// `false`: this run does not hold the job any more, or the store is away; either way it must not begin.
    async fn start_is_on_record(&self, held: &InFlightJob, now: Timestamp) -> bool {
        held.mark_recorded();
        let node = *self.node.read();
        let Some(note) = recorder::note(held, node, NoteKind::Started, now) else { return false };
        match self.store.job_note(vec![note], now).await {
            Ok(answers) => answers.first() == Some(&true),
            Err(StoreError::Unavailable(_)) => false,
            Err(error) => {
                tracing::error!(job = %held.job.id, %error, "a start could not be written down");
                false
            }
        }
    }

    fn finish(&self, held: &InFlightJob, outcome: RunOutcome, lines: Vec<LogLine>, now: Timestamp) {
        let end = held.end(outcome, lines, now);
        self.in_flight.finish(held, end, |end| self.reporter.push(end, None));
    }

    /// InFlight back everything that waits for a slot.
    pub fn hand_back_line(&self) {
        let now = Timestamp::now();
        for held in self.in_flight.empty_line() {
            let line = LogLine::new(now, LogEvent::HandedBack, "the server stops");
            self.finish(&held, RunOutcome::HandedBack, vec![line], now);
        }
    }
}
