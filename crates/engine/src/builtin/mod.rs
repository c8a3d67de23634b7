//! The built-in worker: slots inside the server that run the built-in job types.

mod http;
mod llm;
mod record;
mod run;
mod shell;

use std::{
    collections::HashSet,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::{ErrorReason, Failure, JobId, JobState, LogEvent, LogLine, Progress, Timestamp};
use faena_store::{RunOutcome, RunUpdateKind, Store, StoreError, UpdateResult};
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, EngineConfig,
    driver::panic_text,
    in_flight::{InFlight, InFlightJob},
    nodes::{CurrentNode, Lease},
    recorder,
    reporter::Reporter,
    run_outcome::decide_outcome,
    traces::{Tracer, traceparent_of},
    wakeups::Wakeups,
    workers::watch::timed_out,
};

pub use http::HttpCaller;
pub use llm::{LlmCaller, LlmConfig};
pub use record::BuiltInRecord;
pub use shell::inherited_environment;

/// Returns the job types that the built-in worker runs. `shell.run` is one of them only if the operator allows it; another node or
/// worker may still run it.
pub fn kinds(config: &EngineConfig) -> HashSet<&'static str> {
    let mut kinds = HashSet::from(["noop", "sleep", "http.request", "llm.chat"]);
    if config.is_shell_allowed {
        kinds.insert(shell::KIND);
    }
    kinds
}

/// Returns how the operator can enable this type in the built-in worker, if it is disabled.
pub fn how_to_allow(kind: &str, config: &EngineConfig) -> Option<&'static str> {
    let is_disabled = kind == shell::KIND && !config.is_shell_allowed;
    is_disabled
        .then_some("the built-in worker runs it if the operator sets worker.shell = true (FAENA_WORKER_SHELL=true)")
}

/// State that the slots share with the dispatcher.
pub struct SlotState {
    /// Slots that wait for a job.
    pub idle: AtomicUsize,
    /// Notified when jobs are queued for the slots.
    jobs_queued: Notify,
    /// Number of queued jobs at which a slot wakes the dispatcher, so that the queue does not run empty.
    pub low_water: AtomicUsize,
}

impl Default for SlotState {
    fn default() -> Self {
        SlotState { idle: AtomicUsize::new(0), jobs_queued: Notify::new(), low_water: AtomicUsize::new(usize::MAX) }
    }
}

impl SlotState {
    /// Wakes slots for `count` new jobs.
    pub fn wake(&self, count: usize) {
        match count {
            0 => {}
            1 => self.jobs_queued.notify_one(),
            _ => self.jobs_queued.notify_waiters(),
        }
    }
}

/// How many runs have ended in the slots of this process.
#[derive(Default)]
pub struct EndCounts {
    completed: AtomicU64,
    failed: AtomicU64,
}

impl EndCounts {
    fn add(&self, outcome: &RunOutcome) {
        match outcome {
            RunOutcome::Completed { .. } => self.completed.fetch_add(1, Ordering::Relaxed),
            RunOutcome::Released => 0,
            _ => self.failed.fetch_add(1, Ordering::Relaxed),
        };
    }

    /// Returns the number of completed runs and the number of others.
    fn totals(&self) -> (u64, u64) {
        (self.completed.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

pub struct BuiltInWorker {
    pub node: CurrentNode,
    pub lease: Arc<Lease>,
    pub store: Arc<dyn Store>,
    pub config: EngineConfig,
    pub in_flight: Arc<InFlight>,
    pub reporter: Arc<Reporter>,
    pub slots: Arc<SlotState>,
    pub(crate) wakeups: Wakeups,
    pub bus: Bus,
    pub http: HttpCaller,
    pub llm: LlmCaller,
    pub ends: EndCounts,
    pub tracer: Option<Arc<Tracer>>,
    /// Cancelled when the slots must take no more jobs.
    pub drain: CancellationToken,
}

/// A handler's view of its job.
pub struct Context<'a> {
    worker: &'a BuiltInWorker,
    job: &'a InFlightJob,
}

impl Context<'_> {
    pub fn payload(&self) -> &str {
        &self.job.claimed.payload
    }

    pub fn kind(&self) -> &str {
        &self.job.kind
    }

    pub fn id(&self) -> JobId {
        self.job.id()
    }

    pub fn run(&self) -> i64 {
        self.job.run()
    }

    pub fn correlation_id(&self) -> String {
        self.job.correlation_id()
    }

    /// Returns the trace context for what the run calls.
    pub fn traceparent(&self) -> Option<String> {
        traceparent_of(self.worker.tracer.as_deref(), self.job)
    }

    /// Returns how many attempts of the job have failed.
    pub fn retry_count(&self) -> u32 {
        self.job.claimed.retry_count
    }

    /// Returns what an earlier run has stored under this name. Fails if it cannot be read, because the run might repeat its work.
    pub async fn step(&self, name: &str) -> Result<Option<String>, Failure> {
        let steps = self.worker.store.job_steps(vec![self.id()]).await.map_err(|error| {
            tracing::warn!(job = %self.id(), %error, "cannot read the steps of a job, job will be retried");
            Failure::error("the steps of earlier runs cannot be read; the job will be retried")
        })?;
        let found = steps.into_iter().find(|(_, step)| step.name == name);
        Ok(found.map(|(_, step)| step.result.get().to_owned()))
    }

    /// Stores a result before the job ends, so that another run does not repeat the work. A failure to store it does not fail
    /// the job: its end has the result too.
    pub async fn store_step(&self, name: &str, result: String) {
        let now = Timestamp::now();
        self.job.mark_recorded();
        let step = RunUpdateKind::Step { name: name.to_owned(), result, total: None };
        if let Some(update) = recorder::update(self.job, self.worker.node.id(), step, now) {
            match self.worker.store.run_update(vec![update], now).await.as_deref() {
                Ok([UpdateResult::Rejected(reason)]) => {
                    tracing::warn!(job = %self.id(), reason, "step of a job not stored, a retry repeats it");
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(job = %self.id(), %error, "step of a job not stored, a retry repeats it"),
            }
        }
    }

    /// Stores the job's progress. A failure to store it does not fail the job.
    pub async fn progress(&self, progress: Progress) {
        let now = Timestamp::now();
        self.job.mark_recorded();
        let update = recorder::update(self.job, self.worker.node.id(), RunUpdateKind::Progress(progress.clone()), now);
        if let Some(update) = update {
            if let Err(error) = self.worker.store.run_update(vec![update], now).await {
                tracing::debug!(job = %self.id(), %error, "progress not stored");
            }
            self.worker.bus.progress(self.id(), self.run(), progress, now);
        }
    }
}

impl BuiltInWorker {
    /// Runs one slot: takes a job, runs it, reports its end, takes the next, until the worker drains.
    pub async fn run_slot(self: Arc<Self>) {
        while let Some(job) = self.next_job().await {
            self.run_one(job).await;
            self.reporter.wait_for_capacity().await;
        }
    }

    async fn next_job(&self) -> Option<Arc<InFlightJob>> {
        loop {
            if self.drain.is_cancelled() {
                return None;
            }
            let notified = self.slots.jobs_queued.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(job) = self.in_flight.next_queued() {
                if self.in_flight.queued() == self.slots.low_water.load(Ordering::Relaxed) {
                    self.wakeups.slot_freed();
                }
                return Some(job);
            }
            self.slots.idle.fetch_add(1, Ordering::AcqRel);
            self.wakeups.slot_freed();
            tokio::select! { () = notified => {}, () = self.drain.cancelled() => {} }
            self.slots.idle.fetch_sub(1, Ordering::AcqRel);
        }
    }

    async fn run_one(&self, job: Arc<InFlightJob>) {
        if !self.lease.holds(Timestamp::now()).await {
            // Another node may have recovered the job by now. Then the claim no longer exists, and the store rejects
            // this report.
            let line = LogLine::new(Timestamp::now(), LogEvent::Released, "this server was suspended");
            return self.finish(&job, RunOutcome::Released, vec![line], Timestamp::now());
        }
        let now = Timestamp::now();
        if let Some(cause) = job.cancel_reason() {
            let line = LogLine::new(now, LogEvent::Cancelled, cause.clone());
            return self.finish(&job, RunOutcome::Cancelled { cause }, vec![line], now);
        }
        if job.claimed.options.expires_at.is_some_and(|at| at <= now) {
            let error = "expired before it could start".to_owned();
            let line = LogLine::new(now, LogEvent::Expired, error.clone());
            let outcome = RunOutcome::Failed { error, reason: ErrorReason::Expired };
            return self.finish(&job, outcome, vec![line], now);
        }
        job.start(now);
        if job.claimed.must_record_start && !self.record_start(&job, now).await {
            return self.finish(&job, RunOutcome::Released, vec![LogLine::new(now, LogEvent::Released, "")], now);
        }
        self.bus.changed(job.id(), JobState::Processing, Some(job.run()), now);
        let result = match &*job.kind {
            // There is nothing to wait for and nothing to stop.
            "noop" => Ok(None),
            _ => self.run_handler(&job).await,
        };
        let now = Timestamp::now();
        let (outcome, lines) = decide_outcome(&job, result, now);
        self.finish(&job, outcome, lines, now);
    }

    /// Runs a handler until it ends, times out, or is asked to stop. Dropping a handler stops it.
    async fn run_handler(&self, job: &InFlightJob) -> Result<Option<String>, Failure> {
        self.wakeups.job_started();
        let context = Context { worker: self, job };
        let limit = job.claimed.options.timeout_ms.map_or(self.config.processing_timeout, Duration::from_millis);
        let handler = AssertUnwindSafe(run::run(&context)).catch_unwind();
        tokio::select! {
            biased;
            () = job.cancel.cancelled() => {
                let cause = job.cancel_reason().unwrap_or_else(|| "the server is stopping".into());
                Err(Failure::error(cause).with_reason(ErrorReason::Cancelled))
            }
            ended = tokio::time::timeout(limit, handler) => match ended {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => Err(Failure::error(panic_text(panic.as_ref()))),
                Err(_) => {
                    let text = timed_out(limit);
                    Err(Failure::error(text).with_reason(ErrorReason::Timeout))
                }
            }
        }
    }

    /// Stores the start of a job before it runs. Returns `false` if the job must not run: this run no longer has it, or
    /// the database is not available.
    async fn record_start(&self, job: &InFlightJob, now: Timestamp) -> bool {
        job.mark_recorded();
        let Some(update) = recorder::update(job, self.node.id(), RunUpdateKind::Started, now) else { return false };
        match self.store.run_update(vec![update], now).await {
            Ok(results) => results.first().is_some_and(UpdateResult::is_accepted),
            Err(StoreError::Unavailable { .. }) => false,
            Err(error) => {
                tracing::error!(job = %job.id(), %error, "job start not stored, the job does not run");
                false
            }
        }
    }

    fn finish(&self, job: &InFlightJob, outcome: RunOutcome, lines: Vec<LogLine>, now: Timestamp) {
        let end = job.end(outcome, lines, now);
        self.in_flight.finish(job, end, |end| {
            self.ends.add(&end.outcome);
            self.reporter.push(job, end, None);
        });
    }

    /// Releases all jobs that wait for a slot.
    pub fn release_queued(&self) {
        let now = Timestamp::now();
        for job in self.in_flight.take_queued() {
            let line = LogLine::new(now, LogEvent::Released, "the server is stopping");
            self.finish(&job, RunOutcome::Released, vec![line], now);
        }
    }
}
