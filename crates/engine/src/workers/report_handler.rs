//! Handles the reports of workers: starts, progress, steps, log lines, ends.
//!
//! The reports of one worker are handled in order: what a job reported is stored before its end. An end is acknowledged
//! after its commit. A repeated end counts once; a report of an older run changes nothing and is rejected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use faena_domain::{
    ErrorCode, ErrorReason, Failure, JobId, JobState, JobView, LogEvent, LogLine, Progress, Run, Timestamp,
};
use faena_store::{RunEnd, RunOutcome, RunUpdate, RunUpdateKind, Store, UpdateResult};
use tokio::sync::oneshot;

use super::{Ack, ConnectedWorker, Rejection, WorkerCommand, Workers};
use crate::{
    Bus, EngineError,
    in_flight::{InFlight, InFlightJob},
    nodes::CurrentNode,
    recorder,
    reporter::{Receipt, Reporter},
    run_outcome::decide_outcome,
    traces::Span,
    wakeups::Wakeups,
};

/// A report of a worker about a job.
#[derive(Clone, Debug)]
pub struct Report {
    pub job_id: JobId,
    /// `None`: the run that this worker received on this connection.
    pub run: Option<Run>,
    pub kind: ReportKind,
}

#[derive(Clone, Debug)]
pub enum ReportKind {
    Started,
    Progress(Progress),
    /// A line for the log, with the event name `message` or a name that the worker chose.
    Log {
        event: LogEvent,
        text: String,
    },
    Step {
        name: String,
        result: String,
        total: Option<u32>,
    },
    Complete {
        result: Option<String>,
    },
    Fail(Failure),
    /// The worker releases the job without running it; that uses no attempt.
    Release,
}

impl Report {
    /// Returns whether it is about this run. A report may leave the run out.
    fn is_of_run(&self, run: Run) -> bool {
        self.run.is_none_or(|reported| reported == run)
    }
}

impl ReportKind {
    pub fn name(&self) -> &'static str {
        match self {
            ReportKind::Started => "started",
            ReportKind::Progress(_) => "progress",
            ReportKind::Log { .. } => "log",
            ReportKind::Step { .. } => "step",
            ReportKind::Complete { .. } => "complete",
            ReportKind::Fail(_) => "fail",
            ReportKind::Release => "release",
        }
    }

    /// Returns whether this report repeats the one that led to `end`.
    fn repeats(&self, end: &RunEnd) -> bool {
        match (self, &end.outcome) {
            _ if end.by_guardian => false,
            (ReportKind::Complete { result }, RunOutcome::Completed { result: stored }) => result == stored,
            (
                ReportKind::Fail(_),
                RunOutcome::Retry { .. } | RunOutcome::Failed { .. } | RunOutcome::Cancelled { .. },
            ) => true,
            (ReportKind::Release, RunOutcome::Released) => true,
            _ => false,
        }
    }

    fn is_end(&self) -> bool {
        matches!(self, ReportKind::Complete { .. } | ReportKind::Fail(_) | ReportKind::Release)
    }
}

pub struct ReportHandler {
    store: Arc<dyn Store>,
    node: CurrentNode,
    in_flight: Arc<InFlight>,
    reporter: Arc<Reporter>,
    workers: Arc<Workers>,
    bus: Bus,
    wakeups: Wakeups,
    /// Number of reports that were rejected because the worker does not have the run.
    pub stale_reports: AtomicU64,
}

/// How long a report about a job waits until the job's end is stored.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether a report of a run that has ended was expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lateness {
    Unexpected,
    /// This node has ended the run, because its time was up, and asked the worker to stop it.
    AfterStop,
}

/// An update that waits to be stored, and what to announce afterwards.
struct PendingUpdate {
    update: RunUpdate,
    /// Name of the report, for the acknowledgement.
    report: &'static str,
    progress: Option<Progress>,
    /// The span of a finished step, if its trace is recorded.
    span: Option<Span>,
}

impl ReportHandler {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        node: CurrentNode,
        in_flight: Arc<InFlight>,
        reporter: Arc<Reporter>,
        workers: Arc<Workers>,
        bus: Bus,
        wakeups: Wakeups,
    ) -> ReportHandler {
        ReportHandler { store, node, in_flight, reporter, workers, bus, wakeups, stale_reports: AtomicU64::new(0) }
    }

    /// Handles reports of a worker on a stream, in order. The answers are sent to it as commands.
    pub async fn handle(&self, worker: &Arc<ConnectedWorker>, reports: Vec<Report>, now: Timestamp) {
        let mut updates: Vec<PendingUpdate> = Vec::new();
        for report in reports {
            let Some(job) = find_in_flight(worker, &report) else {
                self.persist(worker, std::mem::take(&mut updates), now).await;
                self.handle_unknown(worker, report, now).await;
                continue;
            };
            if report.kind.is_end() {
                if updates.iter().any(|pending| pending.update.id == report.job_id) {
                    self.persist(worker, std::mem::take(&mut updates), now).await;
                }
                let name = report.kind.name();
                self.end(worker, &job, report.kind, Receipt::Worker(worker.clone(), name), now);
            } else {
                updates.push(self.update(&job, report.kind, now));
            }
        }
        self.persist(worker, updates, now).await;
        self.reporter.wait_for_capacity().await;
    }

    /// Handles one report and waits until it is stored.
    pub async fn handle_one(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: Report,
        now: Timestamp,
    ) -> Result<Result<(), Rejection>, EngineError> {
        let Some(job) = find_in_flight(worker, &report) else {
            let lateness = self.confirm_stopped(worker, &report);
            let (sender, stored) = oneshot::channel();
            let is_repeated = |end: &RunEnd| report.kind.repeats(end);
            let receipt = Receipt::Call(sender);
            let is_waiting =
                self.reporter.add_receipt(report.job_id, report.run, worker.id, is_repeated, receipt).is_none();
            if is_waiting && report.kind.is_end() && stored.await == Ok(true) {
                return Ok(Ok(()));
            }
            return self.check_unknown(worker, &report, lateness, now).await;
        };
        let (run, name) = (job.run(), report.kind.name());
        if report.kind.is_end() {
            let (sender, stored) = oneshot::channel();
            self.end(worker, &job, report.kind, Receipt::Call(sender), now);
            if stored.await == Ok(true) {
                return Ok(Ok(()));
            }
            return self.reject_stale(worker, job.id(), run, name, Lateness::Unexpected, now).await.map(Err);
        }
        let PendingUpdate { update, progress, span, .. } = self.update(&job, report.kind, now);
        let id = update.id;
        match self.store.run_update(vec![update], now).await?.pop() {
            Some(UpdateResult::Accepted) => {}
            Some(UpdateResult::Rejected(reason)) => return Ok(Err(self.reject_over_limit(worker, id, name, reason))),
            Some(UpdateResult::Stale) | None => {
                return self.reject_stale(worker, id, run, name, Lateness::Unexpected, now).await.map(Err);
            }
        }
        self.announce(id, run, progress, span, now);
        Ok(Ok(()))
    }

    /// Ends a run of a worker. Without a receipt the end was not reported by the worker but decided by this node.
    pub(crate) fn end(
        &self,
        worker: &Arc<ConnectedWorker>,
        job: &InFlightJob,
        kind: ReportKind,
        receipt: impl Into<Option<Receipt>>,
        now: Timestamp,
    ) {
        let (outcome, lines) = decide(worker, job, kind, now);
        let receipt = receipt.into();
        if job.started_at().is_none() && receipt.is_some() && !matches!(outcome, RunOutcome::Released) {
            // The worker never reported the start, but a job that has ended has started.
            job.start(job.claimed_at);
        }
        self.finish(worker, job, job.end(outcome, lines, now), receipt, now);
    }

    /// Ends a run because the guardian decided so.
    pub(crate) fn end_overdue(
        &self,
        worker: &Arc<ConnectedWorker>,
        job: &InFlightJob,
        failure: Failure,
        now: Timestamp,
    ) {
        let (outcome, lines) = decide(worker, job, ReportKind::Fail(failure), now);
        let end = RunEnd { by_guardian: true, ..job.end(outcome, lines, now) };
        self.finish(worker, job, end, None, now);
    }

    fn finish(
        &self,
        worker: &Arc<ConnectedWorker>,
        job: &InFlightJob,
        end: RunEnd,
        receipt: Option<Receipt>,
        now: Timestamp,
    ) {
        let is_completed = matches!(end.outcome, RunOutcome::Completed { .. });
        let is_released = matches!(end.outcome, RunOutcome::Released);
        let is_reported = receipt.is_some();
        if !self.in_flight.finish(job, end, |end| self.reporter.push(job, end, receipt)) {
            return;
        }
        // A worker that releases jobs although it is not draining does not accept what it is sent.
        let is_refusing = is_released && is_reported && !worker.is_draining();
        {
            let mut status = worker.status.lock();
            status.in_flight.remove(&job.id());
            if is_reported && !is_released {
                // Only a report of the worker itself proves that jobs get through to it.
                status.breaker.record_success();
            }
            if !is_released {
                status.count_end(is_completed);
            }
            status.update_state(now);
        }
        if is_refusing {
            self.workers.record_dispatch_failure(worker, now);
        }
        self.wakeups.remote_job_ended(worker.ephemeral);
    }

    /// Frees the slot of a handler that was asked to stop, if this report is its end. Returns whether a late report was
    /// expected.
    fn confirm_stopped(&self, worker: &ConnectedWorker, report: &Report) -> Lateness {
        let mut status = worker.status.lock();
        let was_asked = status.stopping.get(&report.job_id).is_some_and(|stopping| report.is_of_run(stopping.run));
        if !was_asked {
            return Lateness::Unexpected;
        }
        if report.kind.is_end() {
            status.stopping.remove(&report.job_id);
            drop(status);
            self.wakeups.slot_freed();
        }
        Lateness::AfterStop
    }

    fn update(&self, job: &Arc<InFlightJob>, kind: ReportKind, now: Timestamp) -> PendingUpdate {
        let report = kind.name();
        if job.started_at().is_none() {
            job.start(now);
            self.bus.changed(job.id(), JobState::Processing, Some(job.run()), now);
            if let Some(worker) = job.connection() {
                worker.status.lock().breaker.record_success();
            }
        }
        job.acknowledge();
        job.mark_recorded();
        let mut progress = None;
        let mut span = None;
        let kind = match kind {
            ReportKind::Progress(reported) => {
                progress = Some(reported.clone());
                RunUpdateKind::Progress(reported)
            }
            ReportKind::Log { event, text } => RunUpdateKind::Message { event, text },
            ReportKind::Step { name, result, total } => {
                span = self.reporter.tracer.as_ref().and_then(|tracer| tracer.step(job, &name, now));
                progress =
                    Some(Progress { current_step: Some(name.clone()), total_steps: total, ..Progress::default() });
                RunUpdateKind::Step { name, result, total }
            }
            _ => RunUpdateKind::Started,
        };
        let update = recorder::update(job, self.node.id(), kind, now).expect("the job was started above");
        PendingUpdate { update, report, progress, span }
    }

    async fn persist(&self, worker: &Arc<ConnectedWorker>, pending: Vec<PendingUpdate>, now: Timestamp) {
        if pending.is_empty() {
            return;
        }
        let updates = pending.iter().map(|pending| pending.update.clone()).collect();
        let accepted = self.store.run_update(updates, now).await;
        let mut acks = Vec::with_capacity(pending.len());
        for (at, PendingUpdate { update, report, progress, span }) in pending.into_iter().enumerate() {
            let result = accepted.as_ref().map(|results| results.get(at).cloned().unwrap_or(UpdateResult::Stale));
            let rejection = match result {
                Ok(UpdateResult::Accepted) => None,
                Ok(UpdateResult::Rejected(reason)) => Some(self.reject_over_limit(worker, update.id, report, reason)),
                Ok(UpdateResult::Stale) => {
                    let lateness = Lateness::Unexpected;
                    let rejected = self.reject_stale(worker, update.id, update.run, report, lateness, now).await;
                    Some(rejected.unwrap_or_else(|_| Rejection::unavailable()))
                }
                Err(_) => Some(Rejection::unavailable()),
            };
            if rejection.is_none() {
                self.announce(update.id, update.run, progress, span, now);
            }
            acks.push(WorkerCommand::Ack(Ack { job_id: update.id, run: Some(update.run), report, rejection }));
        }
        worker.send(acks);
    }

    /// Announces the progress and exports the span of an update that is stored.
    fn announce(&self, id: JobId, run: Run, progress: Option<Progress>, span: Option<Span>, now: Timestamp) {
        if let Some(progress) = progress {
            self.bus.progress(id, run, progress, now);
        }
        if let (Some(tracer), Some(span)) = (&self.reporter.tracer, span) {
            tracer.record(span);
        }
    }

    /// Answers a report of a run that this worker does not have: repeated, late, or of another worker's job.
    async fn handle_unknown(&self, worker: &Arc<ConnectedWorker>, report: Report, now: Timestamp) {
        let (name, lateness) = (report.kind.name(), self.confirm_stopped(worker, &report));
        if report.kind.is_end() {
            let receipt = Receipt::Worker(worker.clone(), name);
            let is_repeated = |end: &RunEnd| report.kind.repeats(end);
            if self.reporter.add_receipt(report.job_id, report.run, worker.id, is_repeated, receipt).is_none() {
                return;
            }
        }
        let rejection = match self.check_unknown(worker, &report, lateness, now).await {
            Ok(checked) => checked.err(),
            Err(_) => Some(Rejection::unavailable()),
        };
        worker.send([WorkerCommand::Ack(Ack { job_id: report.job_id, run: report.run, report: name, rejection })]);
    }

    /// Decides from the store whether a report repeats a stored end or is rejected, and logs a rejection.
    async fn check_unknown(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: &Report,
        lateness: Lateness,
        now: Timestamp,
    ) -> Result<Result<(), Rejection>, EngineError> {
        if report.run.is_none() && worker.has_job(report.job_id) {
            let message = "run: is required, because the job was received on another connection";
            return Ok(Err(Rejection::new(ErrorCode::ValidationError, message)));
        }
        // Otherwise a job whose end is not stored yet would count as in flight.
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.reporter.wait_until_job_flushed(report.job_id)).await;
        let Some(job) = self.store.job_get(report.job_id).await? else {
            return Ok(Err(Rejection::new(ErrorCode::NotFound, format!("there is no job {}", report.job_id))));
        };
        match check_repeated(&job, report, &worker.key) {
            Err(rejection) if rejection.code == ErrorCode::StaleRun => {
                let run = report.run.or(job.run).unwrap_or_default();
                self.reject_stale(worker, job.id, run, report.kind.name(), lateness, now).await.map(Err)
            }
            Err(rejection) => {
                self.count_rejected(worker, job.id, report.kind.name(), &rejection, lateness);
                Ok(Err(rejection))
            }
            Ok(()) => Ok(Ok(())),
        }
    }

    /// Rejects a report of a run that has ended, and adds it to the job's log.
    async fn reject_stale(
        &self,
        worker: &ConnectedWorker,
        id: JobId,
        run: Run,
        report: &'static str,
        lateness: Lateness,
        now: Timestamp,
    ) -> Result<Rejection, EngineError> {
        let rejection = Rejection::stale(run);
        self.count_rejected(worker, id, report, &rejection, lateness);
        let text = format!("{report} from worker {}: {}", worker.key, rejection.message);
        self.store.run_update(vec![RunUpdate::stale(id, run, text, now)], now).await?;
        Ok(rejection)
    }

    /// Rejects a report because the job has reached the limit for reports of this kind.
    fn reject_over_limit(
        &self,
        worker: &ConnectedWorker,
        id: JobId,
        report: &'static str,
        reason: String,
    ) -> Rejection {
        let rejection = Rejection::new(ErrorCode::PayloadTooLarge, reason);
        tracing::warn!(job = %id, worker = worker.key, report, reason = rejection.message, "report rejected");
        rejection
    }

    fn count_rejected(
        &self,
        worker: &ConnectedWorker,
        id: JobId,
        report: &'static str,
        rejection: &Rejection,
        lateness: Lateness,
    ) {
        self.stale_reports.fetch_add(1, Ordering::Relaxed);
        let (worker, reason) = (&worker.key, &rejection.message);
        match lateness {
            Lateness::Unexpected => tracing::warn!(job = %id, worker, report, reason, "report rejected"),
            Lateness::AfterStop => tracing::debug!(job = %id, worker, report, reason, "report rejected"),
        }
    }
}

/// Returns the job of a report if this worker has this run. Without a run, the job must have come on this connection.
fn find_in_flight(worker: &ConnectedWorker, report: &Report) -> Option<Arc<InFlightJob>> {
    let is_reported_run = |job: &&Arc<InFlightJob>| match report.run {
        Some(run) => job.run() == run,
        None => job.was_delivered_to(worker.session),
    };
    worker.status.lock().in_flight.get(&report.job_id).filter(is_reported_run).cloned()
}

/// Returns the outcome of a run that ends with this report, and its last log lines.
fn decide(worker: &ConnectedWorker, job: &InFlightJob, kind: ReportKind, now: Timestamp) -> (RunOutcome, Vec<LogLine>) {
    match kind {
        ReportKind::Complete { result } => decide_outcome(job, Ok(result), now),
        ReportKind::Fail(failure) if job.cancel_reason().is_some() => {
            decide_outcome(job, Err(failure.with_reason(ErrorReason::Cancelled)), now)
        }
        ReportKind::Fail(failure) => decide_outcome(job, Err(failure), now),
        _ => {
            let text = format!("released by worker {}", worker.key);
            (RunOutcome::Released, vec![LogLine::new(now, LogEvent::Released, text)])
        }
    }
}

/// Returns `Ok` if the report repeats what is stored, otherwise why it is rejected.
fn check_repeated(job: &JobView, report: &Report, key: &str) -> Result<(), Rejection> {
    if let (Some(reported), Some(current)) = (report.run, job.run)
        && reported != current
    {
        return Err(if reported < current {
            Rejection::stale(reported)
        } else {
            Rejection::new(ErrorCode::ValidationError, format!("run {reported} of this job does not exist"))
        });
    }
    let is_same_run = report.run.is_none_or(|run| Some(run) == job.run);
    if job.status.is_in_flight() || !is_same_run {
        return Err(Rejection::new(ErrorCode::Conflict, "another worker has this job; nothing was changed"));
    }
    let is_own = job.worker_id.as_deref() == Some(key);
    if !is_own && (report.run.is_none() || job.worker_id.is_some()) {
        return Err(Rejection::new(ErrorCode::Conflict, "this worker does not have this job; nothing was changed"));
    }
    let is_repeated = match &report.kind {
        ReportKind::Complete { result } => job.status == JobState::Completed && is_same_result(job, result.as_deref()),
        ReportKind::Fail(_) => match job.error_reason {
            Some(ErrorReason::Orphaned | ErrorReason::Timeout) => false,
            _ => matches!(job.status, JobState::Retrying | JobState::Failed | JobState::Cancelled),
        },
        ReportKind::Release => job.status == JobState::Queued,
        _ => false,
    };
    if is_repeated { Ok(()) } else { Err(Rejection::stale(report.run.or(job.run).unwrap_or_default())) }
}

fn is_same_result(job: &JobView, result: Option<&str>) -> bool {
    job.result.as_ref().map(|stored| stored.get()) == result
}
