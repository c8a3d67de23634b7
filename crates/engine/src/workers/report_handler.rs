//! Handles the reports of workers: starts, progress, steps, log lines, ends.
//!
//! The reports of one worker are handled in order: what a job reported is stored before its end. An end is acknowledged
//! after its commit. A repeated end counts once; a report of an older run changes nothing and is refused.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use faena_domain::{
    ErrorCode, ErrorReason, Failure, JobId, JobState, JobView, LogEvent, LogLine, Progress, Run, Timestamp,
};
use faena_store::{NoteKind, RunNote, RunOutcome, Store};
use tokio::sync::oneshot;

use super::{Ack, ConnectedWorker, Refusal, WorkerCommand, Workers};
use crate::{
    Bus, EngineError,
    in_flight::{InFlight, InFlightJob},
    nodes::CurrentNode,
    recorder,
    reporter::{Receipt, Reporter},
    verdict::judge,
    wakeups::Wakeups,
};

/// A report of a worker about a job.
#[derive(Clone, Debug)]
pub struct Report {
    pub job_id: JobId,
    /// `None`: the run that this worker has.
    pub run: Option<Run>,
    pub kind: ReportKind,
}

#[derive(Clone, Debug)]
pub enum ReportKind {
    Started,
    Progress(Progress),
    Log(String),
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

impl ReportKind {
    pub fn name(&self) -> &'static str {
        match self {
            ReportKind::Started => "started",
            ReportKind::Progress(_) => "progress",
            ReportKind::Log(_) => "log",
            ReportKind::Step { .. } => "step",
            ReportKind::Complete { .. } => "complete",
            ReportKind::Fail(_) => "fail",
            ReportKind::Release => "release",
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
    /// Reports that were refused.
    pub stale_reports: AtomicU64,
}

/// A note that waits to be stored, and what to answer.
struct PendingNote {
    note: RunNote,
    report: &'static str,
    progress: Option<Progress>,
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
        let mut notes: Vec<PendingNote> = Vec::new();
        for report in reports {
            let Some(job) = self.find_in_flight(worker, &report) else {
                self.persist(worker, std::mem::take(&mut notes), now).await;
                self.handle_unknown(worker, report, now).await;
                continue;
            };
            if report.kind.is_end() {
                if notes.iter().any(|pending| pending.note.id == report.job_id) {
                    self.persist(worker, std::mem::take(&mut notes), now).await;
                }
                let name = report.kind.name();
                self.end(worker, &job, report.kind, Receipt::Worker(worker.clone(), name), now);
            } else {
                notes.push(self.note(&job, report.kind, now));
            }
        }
        self.persist(worker, notes, now).await;
        self.reporter.wait_for_capacity().await;
    }

    /// Handles one report and waits until it is stored.
    pub async fn handle_one(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: Report,
        now: Timestamp,
    ) -> Result<Result<(), Refusal>, EngineError> {
        let Some(job) = self.find_in_flight(worker, &report) else {
            let (sender, stored) = oneshot::channel();
            let is_waiting = self.reporter.join(report.job_id, report.run, worker.id, Receipt::Call(sender)).is_none();
            if is_waiting && report.kind.is_end() && stored.await == Ok(true) {
                return Ok(Ok(()));
            }
            return self.judge_unknown(worker, &report, now).await;
        };
        let run = job.run();
        if report.kind.is_end() {
            let (sender, stored) = oneshot::channel();
            self.end(worker, &job, report.kind, Receipt::Call(sender), now);
            let is_accepted = stored.await == Ok(true);
            return Ok(if is_accepted { Ok(()) } else { Err(Refusal::stale(run)) });
        }
        let PendingNote { note, progress, .. } = self.note(&job, report.kind, now);
        let id = note.id;
        let is_accepted = self.store.job_note(vec![note], now).await?.first() == Some(&true);
        if !is_accepted {
            return Ok(Err(Refusal::stale(run)));
        }
        if let Some(progress) = progress {
            self.bus.progress(id, run, progress, now);
        }
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
        let is_completed = matches!(outcome, RunOutcome::Completed { .. });
        let is_released = matches!(outcome, RunOutcome::HandedBack);
        let is_reported = receipt.is_some();
        if job.started_at().is_none() && is_reported && !is_released {
            // The worker never reported the start, but a job that has ended has started.
            job.start(job.claimed_at);
        }
        let end = job.end(outcome, lines, now);
        if !self.in_flight.finish(job, end, |end| self.reporter.push(end, receipt)) {
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

    /// Returns the job of a report if this worker has this run.
    fn find_in_flight(&self, worker: &Arc<ConnectedWorker>, report: &Report) -> Option<Arc<InFlightJob>> {
        let is_same_run = |run: Run| report.run.is_none_or(|reported| reported == run);
        let mut status = worker.status.lock();
        if let Some(job) = status.in_flight.get(&report.job_id).filter(|job| is_same_run(job.run())) {
            return Some(job.clone());
        }
        // A handler that was asked to stop has stopped: its slot is free.
        if report.kind.is_end() && status.stopping.get(&report.job_id).is_some_and(|stopping| is_same_run(stopping.run))
        {
            status.stopping.remove(&report.job_id);
            drop(status);
            self.wakeups.slot_freed();
        }
        None
    }

    fn note(&self, job: &Arc<InFlightJob>, kind: ReportKind, now: Timestamp) -> PendingNote {
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
        let kind = match kind {
            ReportKind::Progress(reported) => {
                progress = Some(reported.clone());
                NoteKind::Progress(reported)
            }
            ReportKind::Log(text) => NoteKind::Message(text),
            ReportKind::Step { name, result, total } => {
                progress =
                    Some(Progress { current_step: Some(name.clone()), total_steps: total, ..Progress::default() });
                NoteKind::Step { name, result, total }
            }
            _ => NoteKind::Started,
        };
        let note = recorder::note(job, self.node.id(), kind, now).expect("the job was started above");
        PendingNote { note, report, progress }
    }

    async fn persist(&self, worker: &Arc<ConnectedWorker>, pending: Vec<PendingNote>, now: Timestamp) {
        if pending.is_empty() {
            return;
        }
        let notes = pending.iter().map(|pending| pending.note.clone()).collect();
        let accepted = self.store.job_note(notes, now).await;
        let mut acks = Vec::with_capacity(pending.len());
        for (at, PendingNote { note, report, progress }) in pending.into_iter().enumerate() {
            let refusal = match &accepted {
                Ok(accepted) if accepted.get(at) == Some(&true) => None,
                Ok(_) => Some(Refusal::stale(note.run)),
                Err(_) => Some(Refusal::unavailable()),
            };
            if refusal.is_none()
                && let Some(progress) = progress
            {
                self.bus.progress(note.id, note.run, progress, now);
            }
            acks.push(WorkerCommand::Ack(Ack { job_id: note.id, run: Some(note.run), report, refusal }));
        }
        worker.send(acks);
    }

    /// Answers a report of a run that this worker does not have: repeated, late, or of another worker's job.
    async fn handle_unknown(&self, worker: &Arc<ConnectedWorker>, report: Report, now: Timestamp) {
        let name = report.kind.name();
        if report.kind.is_end() {
            let receipt = Receipt::Worker(worker.clone(), name);
            if self.reporter.join(report.job_id, report.run, worker.id, receipt).is_none() {
                return;
            }
        }
        let refusal = match self.judge_unknown(worker, &report, now).await {
            Ok(verdict) => verdict.err(),
            Err(_) => Some(Refusal::unavailable()),
        };
        worker.send([WorkerCommand::Ack(Ack { job_id: report.job_id, run: report.run, report: name, refusal })]);
    }

    /// Decides from the store whether a report repeats a stored end or is refused, and logs a refusal.
    async fn judge_unknown(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: &Report,
        now: Timestamp,
    ) -> Result<Result<(), Refusal>, EngineError> {
        let Some(job) = self.store.job_get(report.job_id).await? else {
            return Ok(Err(Refusal::new(ErrorCode::NotFound, format!("there is no job {}", report.job_id))));
        };
        let verdict = judge_repeated(&job, report, &worker.key);
        if let Err(refusal) = &verdict {
            self.stale_reports.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                job = %job.id,
                correlation_id = job.correlation_id,
                worker = worker.key,
                report = report.kind.name(),
                reason = refusal.message,
                "report refused"
            );
            if refusal.code == ErrorCode::StaleRun {
                let text = format!("{} from worker {}: {}", report.kind.name(), worker.key, refusal.message);
                self.log_stale(&job, report, worker, text, now).await?;
            }
        }
        Ok(verdict)
    }

    /// Adds a refused report to the job's log.
    async fn log_stale(
        &self,
        job: &JobView,
        report: &Report,
        worker: &ConnectedWorker,
        text: String,
        now: Timestamp,
    ) -> Result<(), EngineError> {
        let note = RunNote {
            id: job.id,
            run: report.run.or(job.run).unwrap_or_default(),
            lane: 0,
            node: self.node.id(),
            worker: worker.id,
            retry_count: job.retry_count,
            ready_at: now,
            started_at: now,
            at: now,
            kind: NoteKind::Stale(text),
        };
        self.store.job_note(vec![note], now).await?;
        Ok(())
    }
}

/// Returns the outcome of a run that ends with this report, and its last log lines.
fn decide(worker: &ConnectedWorker, job: &InFlightJob, kind: ReportKind, now: Timestamp) -> (RunOutcome, Vec<LogLine>) {
    match kind {
        ReportKind::Complete { result } => judge(job, Ok(result), now),
        ReportKind::Fail(failure) if job.cancel_reason().is_some() => {
            judge(job, Err(failure.with_reason(ErrorReason::Cancelled)), now)
        }
        ReportKind::Fail(failure) => judge(job, Err(failure), now),
        _ => {
            let text = format!("released by worker {}", worker.key);
            (RunOutcome::HandedBack, vec![LogLine::new(now, LogEvent::HandedBack, text)])
        }
    }
}

/// Returns `Ok` if the report repeats what is stored, otherwise why it is refused.
fn judge_repeated(job: &JobView, report: &Report, key: &str) -> Result<(), Refusal> {
    if let (Some(reported), Some(current)) = (report.run, job.run)
        && reported != current
    {
        return Err(if reported < current {
            Refusal::stale(reported)
        } else {
            Refusal::new(ErrorCode::ValidationError, format!("run {reported} of this job does not exist"))
        });
    }
    let is_same_run = report.run.is_none_or(|run| Some(run) == job.run);
    if job.status.is_in_flight() || !is_same_run {
        return Err(Refusal::new(ErrorCode::Conflict, "another worker has this job; nothing was changed"));
    }
    let is_own = job.worker_id.as_deref() == Some(key);
    if !is_own && (report.run.is_none() || job.worker_id.is_some()) {
        return Err(Refusal::new(ErrorCode::Conflict, "this worker does not have this job; nothing was changed"));
    }
    let is_repeated = match report.kind {
        ReportKind::Complete { .. } => job.status == JobState::Completed,
        ReportKind::Fail(_) => match job.error_reason {
            Some(ErrorReason::Orphaned | ErrorReason::Timeout) => false,
            _ => matches!(job.status, JobState::Retrying | JobState::Failed | JobState::Cancelled),
        },
        ReportKind::Release => job.status == JobState::Queued,
        _ => false,
    };
    if is_repeated {
        return Ok(());
    }
    match report.run {
        Some(run) if !job.status.is_terminal() => Err(Refusal::stale(run)),
        _ => {
            let message = format!("the job is {}; nothing was changed", job.status);
            Err(Refusal::new(ErrorCode::InvalidTransition, message))
        }
    }
}
