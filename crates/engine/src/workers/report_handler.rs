//! Takes what workers report: starts, progress, steps, log lines, ends.
//!
//! Reports of one worker are taken in order: what a job told is stored before its end is. An end is acknowledged after its
//! commit; one that is told again counts once, one of an older run changes nothing and is refused.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use faena_domain::{
    ErrorCode, ErrorReason, Failure, JobId, JobState, JobView, LogEvent, LogLine, NodeId, Progress, Run, Timestamp,
};
use faena_store::{NoteKind, RunNote, RunOutcome, Store, StoreError};
use parking_lot::RwLock;
use tokio::sync::oneshot;

use super::{Ack, ConnectedWorker, Order, Refusal, Workers};
use crate::{
    Bus,
    dispatcher::ReadyLanes,
    in_flight::{InFlight, InFlightJob},
    recorder,
    reporter::{Receipt, Reporter},
    verdict::judge,
};

/// Something that a worker says about a job.
#[derive(Clone, Debug)]
pub struct Report {
    pub job_id: JobId,
    /// `None`: the run that it was handed.
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
    /// It does not run it and hands it back; that costs no try.
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
    pub store: Arc<dyn Store>,
    pub node: Arc<RwLock<NodeId>>,
    pub in_flight: Arc<InFlight>,
    pub reporter: Arc<Reporter>,
    pub lanes: Arc<ReadyLanes>,
    pub workers: Arc<Workers>,
    pub bus: Bus,
    /// Reports that were refused.
    pub stale_reports: AtomicU64,
}

/// A note on its way into the store, and what is to be answered.
struct Pending {
    note: RunNote,
    of: &'static str,
    progress: Option<Progress>,
}

impl ReportHandler {
    /// Takes what a worker on a stream has said, in order. The answers leave as orders to it.
    pub async fn take(&self, worker: &Arc<ConnectedWorker>, reports: Vec<Report>, now: Timestamp) {
        let mut notes: Vec<Pending> = Vec::new();
        for report in reports {
            let held = match self.held_by(worker, &report) {
                Ok(held) => held,
                Err(()) => {
                    self.persist(worker, std::mem::take(&mut notes), now).await;
                    self.repeated(worker, report, now).await;
                    continue;
                }
            };
            if report.kind.is_end() {
                if notes.iter().any(|pending| pending.note.id == report.job_id) {
                    self.persist(worker, std::mem::take(&mut notes), now).await;
                }
                let of = report.kind.name();
                self.end(worker, &held, report.kind, Receipt::Worker(worker.clone(), of), now);
            } else {
                notes.push(self.note(&held, report.kind, now));
            }
        }
        self.persist(worker, notes, now).await;
        self.reporter.room().await;
    }

    /// Takes one report and waits until it is stored.
    pub async fn take_one(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: Report,
        now: Timestamp,
    ) -> Result<Result<(), Refusal>, StoreError> {
        let Ok(held) = self.held_by(worker, &report) else {
            let (sender, told) = oneshot::channel();
            let under_way = self.reporter.join(report.job_id, report.run, worker.id, Receipt::Call(sender)).is_none();
            if under_way && report.kind.is_end() && told.await == Ok(true) {
                return Ok(Ok(()));
            }
            return self.explain(worker, &report, now).await;
        };
        if report.kind.is_end() {
            let (sender, told) = oneshot::channel();
            let run = held.job.run;
            self.end(worker, &held, report.kind, Receipt::Call(sender), now);
            return Ok(match told.await {
                Ok(true) => Ok(()),
                _ => Err(Refusal::stale(run)),
            });
        }
        let run = held.job.run;
        let Pending { note, progress, .. } = self.note(&held, report.kind, now);
        let id = note.id;
        let counts = self.store.job_note(vec![note], now).await?.first() == Some(&true);
        if !counts {
            return Ok(Err(Refusal::stale(run)));
        }
        if let Some(progress) = progress {
            self.bus.progress(id, run, progress, now);
        }
        Ok(Ok(()))
    }

    /// Ends a run in a worker's hands; also for those who end it over the worker's head.
    pub(crate) fn end(
        &self,
        worker: &Arc<ConnectedWorker>,
        held: &InFlightJob,
        kind: ReportKind,
        receipt: impl Into<Option<Receipt>>,
        now: Timestamp,
    ) {
        let (outcome, lines) = match kind {
            ReportKind::Complete { result } => judge(held, Ok(result), now),
            ReportKind::Fail(failure) if held.cancel_reason().is_some() => {
                judge(held, Err(failure.with_reason(ErrorReason::Cancelled)), now)
            }
            ReportKind::Fail(failure) => judge(held, Err(failure), now),
            _ => {
                let text = format!("worker {} handed it back", worker.key);
                (RunOutcome::HandedBack, vec![LogLine::new(now, LogEvent::HandedBack, text)])
            }
        };
        let receipt = receipt.into();
        let (completed, refused) =
            (matches!(outcome, RunOutcome::Completed { .. }), matches!(outcome, RunOutcome::HandedBack));
        if held.started_at().is_none() && receipt.is_some() && !refused {
            // It never said so; whoever has ended a job has begun it.
            held.start(held.claimed_at);
        }
        let end = held.end(outcome, lines, now);
        let told = receipt.is_some();
        // A worker that hands jobs back although it is not draining does not take what it is sent.
        let unwilling = refused && told && !worker.is_draining();
        if !self.in_flight.finish(held, end, |end| self.reporter.push(end, receipt)) {
            return;
        }
        let mut standing = worker.standing.lock();
        standing.held.remove(&held.job.id);
        if told && !refused {
            // It has got through to the worker: that says the worker itself, not whoever ends a job over its head.
            standing.breaker.succeeded();
        }
        if !refused {
            standing.ended(completed);
        }
        standing.settle(now);
        drop(standing);
        if unwilling {
            self.workers.dispatch_failed(worker, now);
        }
        if worker.ephemeral {
            self.workers.pools.notify_one();
        }
        self.lanes.nudge.notify_one();
        self.workers.news.notify_one();
    }

    fn held_by(&self, worker: &Arc<ConnectedWorker>, report: &Report) -> Result<Arc<InFlightJob>, ()> {
        let mut standing = worker.standing.lock();
        if let Some(held) = standing.held.get(&report.job_id)
            && report.run.is_none_or(|run| run == held.job.run)
        {
            return Ok(held.clone());
        }
        // It has stopped at last: its slot is free.
        if report.kind.is_end()
            && standing.stopping.get(&report.job_id).is_some_and(|s| report.run.is_none_or(|run| run == s.run))
        {
            standing.stopping.remove(&report.job_id);
            drop(standing);
            self.lanes.nudge.notify_one();
        }
        Err(())
    }

    fn note(&self, held: &Arc<InFlightJob>, kind: ReportKind, now: Timestamp) -> Pending {
        let of = kind.name();
        if held.started_at().is_none() {
            held.start(now);
            self.bus.changed(held.job.id, JobState::Processing, Some(held.job.run), now);
            if let Some(worker) = held.connection() {
                worker.standing.lock().breaker.succeeded();
            }
        }
        held.hear();
        held.mark_recorded();
        let mut progress = None;
        let kind = match kind {
            ReportKind::Progress(told) => {
                progress = Some(told.clone());
                NoteKind::Progress(told)
            }
            ReportKind::Log(text) => NoteKind::Message(text),
            ReportKind::Step { name, result, total } => {
                progress =
                    Some(Progress { current_step: Some(name.clone()), total_steps: total, ..Progress::default() });
                NoteKind::Step { name, result, total }
            }
            _ => NoteKind::Started,
        };
        let note = recorder::note(held, *self.node.read(), kind, now).expect("it has started just above");
        Pending { note, of, progress }
    }

    async fn persist(&self, worker: &Arc<ConnectedWorker>, pending: Vec<Pending>, now: Timestamp) {
        if pending.is_empty() {
            return;
        }
        let notes = pending.iter().map(|pending| pending.note.clone()).collect();
        let answers = self.store.job_note(notes, now).await;
        let mut orders = Vec::with_capacity(pending.len());
        for (at, Pending { note, of, progress }) in pending.into_iter().enumerate() {
            let refusal = match &answers {
                Ok(answers) if answers.get(at) == Some(&true) => None,
                Ok(_) => Some(Refusal::stale(note.run)),
                Err(_) => Some(Refusal::new(
                    ErrorCode::Unavailable,
                    "the database is not available at the moment; say it again",
                )),
            };
            if refusal.is_none()
                && let Some(progress) = progress
            {
                self.bus.progress(note.id, note.run, progress, now);
            }
            orders.push(Order::Ack(Ack { job_id: note.id, run: Some(note.run), of, refusal }));
        }
        worker.order(orders);
    }

    /// A report of a run that is not in this worker's hands: told again, too late, or not its business.
    async fn repeated(&self, worker: &Arc<ConnectedWorker>, report: Report, now: Timestamp) {
        let of = report.kind.name();
        if report.kind.is_end() {
            let receipt = Receipt::Worker(worker.clone(), of);
            if self.reporter.join(report.job_id, report.run, worker.id, receipt).is_none() {
                return;
            }
        }
        let refusal = match self.explain(worker, &report, now).await {
            Ok(verdict) => verdict.err(),
            Err(_) => {
                Some(Refusal::new(ErrorCode::Unavailable, "the database is not available at the moment; say it again"))
            }
        };
        worker.order([Order::Ack(Ack { job_id: report.job_id, run: report.run, of, refusal })]);
    }

    /// What a report about a job means that this worker does not hold here.
    async fn explain(
        &self,
        worker: &Arc<ConnectedWorker>,
        report: &Report,
        now: Timestamp,
    ) -> Result<Result<(), Refusal>, StoreError> {
        let Some(job) = self.store.job_get(report.job_id).await? else {
            return Ok(Err(Refusal::new(ErrorCode::NotFound, format!("there is no job {}", report.job_id))));
        };
        let verdict = verdict_on(&job, report, &worker.key);
        if let Err(refusal) = &verdict {
            self.stale_reports.fetch_add(1, Ordering::Relaxed);
            let text = format!("{} from worker {}: {}", report.kind.name(), worker.key, refusal.message);
            tracing::warn!(job = %job.id, correlation_id = job.correlation_id, "refused a report: {text}");
            if refusal.code == ErrorCode::StaleRun {
                self.stale(&job, report, worker, text, now).await?;
            }
        }
        Ok(verdict)
    }

    async fn stale(
        &self,
        job: &JobView,
        report: &Report,
        worker: &ConnectedWorker,
        text: String,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let note = RunNote {
            id: job.id,
            run: report.run.or(job.run).unwrap_or_default(),
            lane: 0,
            node: *self.node.read(),
            worker: worker.id,
            retry_count: job.retry_count,
            ready_at: now,
            started_at: now,
            at: now,
            kind: NoteKind::Stale(text),
        };
        self.store.job_note(vec![note], now).await.map(|_| ())
    }
}

fn verdict_on(job: &JobView, report: &Report, key: &str) -> Result<(), Refusal> {
    let mine = job.worker_id.as_deref() == Some(key);
    let same_run = report.run.is_none_or(|run| Some(run) == job.run);
    if let (Some(told), Some(current)) = (report.run, job.run)
        && told != current
    {
        return Err(if told < current {
            Refusal::stale(told)
        } else {
            Refusal::new(ErrorCode::ValidationError, format!("run {told} was never handed out for this job"))
        });
    }
    let held = matches!(job.status, JobState::Scheduled | JobState::Assigned | JobState::Processing);
    if held || !same_run {
        return Err(Refusal::new(ErrorCode::Conflict, "this job is in other hands; nothing was changed"));
    }
    if !mine && (report.run.is_none() || job.worker_id.is_some()) {
        return Err(Refusal::new(ErrorCode::Conflict, "this job is not in your hands; nothing was changed"));
    }
    let told_again = match report.kind {
        ReportKind::Complete { .. } => job.status == JobState::Completed,
        ReportKind::Fail(_) => match job.error_reason {
            Some(ErrorReason::Orphaned | ErrorReason::Timeout) => false,
            _ => matches!(job.status, JobState::Retrying | JobState::Failed | JobState::Cancelled),
        },
        ReportKind::Release => job.status == JobState::Queued,
        _ => false,
    };
    if told_again {
        return Ok(());
    }
    match report.run {
        Some(run) if !job.status.is_terminal() => Err(Refusal::stale(run)),
        _ => Err(Refusal::new(ErrorCode::InvalidTransition, format!("the job is {}; nothing was changed", job.status))),
    }
}
