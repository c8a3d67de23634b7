//! The spans of one run of a job.

use std::sync::Arc;

use faena_domain::{Attempt, ErrorReason, JobId, Run, Timestamp};
use faena_store::{Lane, RunEnd, RunOutcome};

use super::{JobContext, Span, SpanKind, TraceContext, Tracer, nanoseconds, run_span_id, span_id};
use crate::in_flight::InFlightJob;

/// Data for the spans of a run, in addition to its [`RunEnd`].
pub(crate) struct RunTrace {
    pub id: JobId,
    run: Run,
    pub attempt: u32,
    parent: JobContext,
    kind: Arc<str>,
    lane: Option<Arc<Lane>>,
    correlation_id: String,
    worker: String,
    claimed_at: Timestamp,
}

impl Tracer {
    /// Returns the data for the spans of a run that ends, or `None` if its trace is not recorded.
    pub(crate) fn run(&self, job: &InFlightJob) -> Option<Box<RunTrace>> {
        let parent = self.job_context(job.id(), job.claimed.options.traceparent.as_deref());
        parent.context.is_sampled().then(|| {
            Box::new(RunTrace {
                id: job.id(),
                run: job.run(),
                attempt: job.claimed.attempt(),
                parent,
                kind: job.kind.clone(),
                lane: self.lanes.lane(job.claimed.lane),
                correlation_id: job.correlation_id(),
                worker: job.connection().map_or_else(|| job.worker.to_string(), |worker| worker.key.clone()),
                claimed_at: job.claimed_at,
            })
        })
    }

    /// Returns the span of a step that ends now. It begins where the step before it ended, else with the run.
    pub(crate) fn step(&self, job: &InFlightJob, name: &str, now: Timestamp) -> Option<Span> {
        let run = self.run(job)?;
        let started_at = job.end_step(now);
        let id = span_id("step", &[job.id().0.as_bytes(), &job.run().to_be_bytes(), name.as_bytes()]);
        let period = (nanoseconds(started_at), nanoseconds(now));
        let parent = run_span_id(run.id, run.run);
        let span = run.span(id, Some(parent), SpanKind::Internal, format!("step {name}"), period);
        Some(span.text("faena.step.name", name))
    }
}

impl RunTrace {
    /// Returns the spans of a run that has ended.
    pub fn spans(&self, end: &RunEnd) -> Vec<Span> {
        if end.started_at.is_none() && matches!(end.outcome, RunOutcome::Released) {
            // Nothing happened but a claim; the job still waits.
            return Vec::new();
        }
        let queued = (nanoseconds(end.ready_at), nanoseconds(self.claimed_at));
        let ran = (nanoseconds(end.started_at.unwrap_or(self.claimed_at)), nanoseconds(end.at));
        let run = self.run_span(ran).text("faena.job.state", end.outcome.state().as_str());
        let run = match &end.outcome {
            RunOutcome::Retry { error, reason, .. } | RunOutcome::Failed { error, reason } => {
                run.failed(reason.as_str(), error)
            }
            _ => run,
        };
        self.created().into_iter().chain([self.queued_span(queued), run]).collect()
    }

    /// Returns the spans of the runs directly before this one that were lost with their worker or server, which could not
    /// report their end.
    pub fn lost_runs(&self, attempts: &[Attempt]) -> Vec<Span> {
        let earlier = attempts.iter().rev().filter(|attempt| attempt.run.is_some_and(|run| run < self.run));
        let lost = earlier.take_while(|attempt| attempt.error_reason == Some(ErrorReason::Orphaned));
        let numbers = (1..self.attempt).rev();
        lost.zip(numbers)
            .filter_map(|(attempt, number)| {
                let lost = RunTrace {
                    run: attempt.run?,
                    attempt: number,
                    kind: self.kind.clone(),
                    lane: self.lane.clone(),
                    correlation_id: self.correlation_id.clone(),
                    worker: attempt.worker_id.clone().unwrap_or_default(),
                    ..*self
                };
                let started_at = attempt.started_at.unwrap_or(attempt.finished_at);
                let span = lost.run_span((nanoseconds(started_at), nanoseconds(attempt.finished_at)));
                let error = attempt.error.as_deref().unwrap_or_default();
                let span = span.text("faena.job.state", attempt.status.as_str());
                Some(span.failed(ErrorReason::Orphaned.as_str(), error))
            })
            .collect()
    }

    /// Returns the span of the job's creation if no request submitted it. It is exported with the first attempt.
    fn created(&self) -> Option<Span> {
        if !self.parent.is_derived || self.attempt > 1 {
            return None;
        }
        let at = nanoseconds(self.id.created_at());
        let name = format!("create {}", self.kind);
        Some(self.span(self.parent.context.span_id, None, SpanKind::Producer, name, (at, at)))
    }

    fn queued_span(&self, period: (u64, u64)) -> Span {
        let id = span_id("queued", &[self.id.0.as_bytes(), &self.run.to_be_bytes()]);
        self.span(id, Some(self.parent.context.span_id), SpanKind::Internal, "queued".into(), period)
    }

    fn run_span(&self, period: (u64, u64)) -> Span {
        let parent = Some(self.parent.context.span_id);
        let name = format!("run {}", self.kind);
        let span = self.span(run_span_id(self.id, self.run), parent, SpanKind::Consumer, name, period);
        span.text("messaging.operation.name", "run")
            .text("messaging.operation.type", "process")
            .text("faena.worker.id", &self.worker)
    }

    fn span(&self, id: [u8; 8], parent: Option<[u8; 8]>, kind: SpanKind, name: String, period: (u64, u64)) -> Span {
        let context: TraceContext = self.parent.context.with_span(id);
        let span = Span::new(context, parent, kind, name, period)
            .text("messaging.system", "faena")
            .text("messaging.message.id", &self.id.to_string())
            .text("messaging.message.conversation_id", &self.correlation_id)
            .text("faena.job.type", &self.kind)
            .number("faena.job.run", self.run)
            .number("faena.job.attempt", i64::from(self.attempt));
        match &self.lane {
            Some(lane) => {
                span.text("messaging.destination.name", &lane.queue).text("faena.job.priority", lane.priority.as_str())
            }
            None => span,
        }
    }
}
