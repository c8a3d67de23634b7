//! OpenTelemetry spans for requests, jobs, their runs and steps, and webhook attempts.
//!
//! A job may wait for hours and outlive the process that accepted it, so its spans are not kept in memory until they
//! end. They are created from the stored times when a run ends. Their ids are derived from the ids of job and run, so
//! every node, and the worker, knows the id of a run's span before that span is exported. None of this runs without a
//! configured collector.
//!
//! ```text
//! POST /api/v1/jobs        the request; a job that no request submitted has "create TYPE" instead
//! ├── queued               from ready to claimed, for each run
//! ├── run TYPE             from started to ended, for each run; spans of the worker are below it
//! │   └── step NAME
//! └── POST webhook         each attempt
//! ```

mod exporter;
mod otlp;
mod run;

use std::{sync::Arc, time::Duration};

use faena_domain::{JobId, NodeId, Run, Timestamp};
use faena_store::{Delivery, RunEnd, Store};
use parking_lot::Mutex;
use reqwest::header::HeaderMap;
use sha2::{Digest, Sha256};
use url::Url;
use uuid::Uuid;

pub use exporter::Collector;
pub use faena_domain::TraceContext;
pub use otlp::{Span, SpanKind};
pub(crate) use run::RunTrace;

use crate::{Round, dispatcher::ReadyLanes, in_flight::InFlightJob};
use exporter::Exporter;

/// Longest time that a finished span waits for others before it is sent.
pub(crate) const INTERVAL: Duration = Duration::from_secs(1);
/// Resource attribute that distinguishes the nodes.
const INSTANCE: &str = "service.instance.id";
/// Maximum number of ended runs whose earlier runs are still to be looked up. Further ones are dropped.
const MAX_RETRIED: usize = 1_000;

#[derive(Clone, Debug)]
pub struct TraceConfig {
    pub collector: Collector,
    /// Share of the traces beginning here that are recorded, from 0 to 1. The sampled flag of a caller's trace context takes precedence.
    pub sample_ratio: f64,
}

impl TraceConfig {
    /// Returns a configuration that records every trace beginning here and sends it to `url`.
    pub fn new(url: Url) -> TraceConfig {
        let attributes = vec![("service.name".into(), "faena".into())];
        TraceConfig { collector: Collector { url, headers: HeaderMap::new(), attributes }, sample_ratio: 1.0 }
    }
}

/// Creates spans and exports them.
pub struct Tracer {
    sample_ratio: f64,
    pub exporter: Exporter,
    lanes: Arc<ReadyLanes>,
    /// Ended runs of jobs that had runs before. The earlier runs may have been lost with their server and have no span
    /// yet.
    retried: Mutex<Vec<RunTrace>>,
}

/// Trace context of a job: the parent of its runs and webhooks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobContext {
    pub context: TraceContext,
    /// The span of `context` is not exported yet: no request submitted the job.
    pub is_derived: bool,
}

impl Tracer {
    pub(crate) fn new(config: &TraceConfig, node: NodeId, lanes: Arc<ReadyLanes>) -> Tracer {
        let mut collector = config.collector.clone();
        if collector.attributes.iter().all(|(key, _)| key != INSTANCE) {
            collector.attributes.push((INSTANCE.into(), node.to_string()));
        }
        Tracer {
            sample_ratio: config.sample_ratio,
            exporter: Exporter::new(collector),
            lanes,
            retried: Mutex::default(),
        }
    }

    /// Begins a trace with this id. Nodes with the same ratio agree on whether it is recorded.
    pub fn begin(&self, id: Uuid) -> TraceContext {
        let is_sampled = is_sampled(id, self.sample_ratio);
        TraceContext::new(id.into_bytes(), span_id("root", &[id.as_bytes()]), is_sampled)
    }

    /// Exports a finished span.
    pub fn record(&self, span: Span) {
        self.exporter.push([span]);
    }

    /// Returns the trace context of a job. A job without one is a trace of its own, whose id is that of the job.
    pub(crate) fn job_context(&self, id: JobId, traceparent: Option<&str>) -> JobContext {
        match traceparent.and_then(TraceContext::parse) {
            Some(context) => JobContext { context, is_derived: false },
            None => JobContext { context: self.begin(id.0), is_derived: true },
        }
    }

    /// Returns the context for everything that a run causes. Its parent is the span of the run.
    pub(crate) fn run_context(&self, job: &InFlightJob) -> TraceContext {
        let parent = self.job_context(job.id(), job.claimed.options.traceparent.as_deref()).context;
        // A trace that is not recorded has no span for the run.
        if parent.is_sampled() { parent.with_span(run_span_id(job.id(), job.run())) } else { parent }
    }

    /// Returns the context of a webhook's job or task, and the context of one attempt to deliver it.
    pub(crate) fn webhook_context(&self, delivery: &Delivery) -> (TraceContext, TraceContext) {
        let parent = self.job_context(JobId(delivery.subject.id()), delivery.traceparent.as_deref()).context;
        if !parent.is_sampled() {
            return (parent, parent);
        }
        let own = span_id("webhook", &[delivery.id.0.as_bytes(), &delivery.number.to_be_bytes()]);
        (parent, parent.with_span(own))
    }

    /// Exports the span of an attempt to deliver a webhook. The path of its URL may be a secret and is left out.
    pub(crate) fn export_webhook_attempt(
        &self,
        delivery: &Delivery,
        status: Option<u16>,
        error: Option<&str>,
        (started_at, ended_at): (Timestamp, Timestamp),
    ) {
        let (parent, own) = self.webhook_context(delivery);
        if !own.is_sampled() {
            return;
        }
        let period = (nanoseconds(started_at), nanoseconds(ended_at));
        let mut span = Span::new(own, Some(parent.span_id), SpanKind::Client, "POST webhook", period)
            .text("http.request.method", "POST")
            .text("server.address", delivery.host.rsplit_once(':').map_or("", |(host, _)| host))
            .text("messaging.message.id", &delivery.subject.id().to_string())
            .text("messaging.message.conversation_id", &delivery.correlation_id)
            .text("faena.webhook.id", &delivery.id.to_string())
            .number("faena.webhook.attempt", i64::from(delivery.attempt));
        if let Some(status) = status {
            span = span.number("http.response.status_code", i64::from(status));
        }
        if let Some(error) = error {
            let error_type = status.map_or_else(|| "no_response".to_owned(), |status| status.to_string());
            span = span.failed(&error_type, error);
        }
        self.record(span);
    }

    /// Runs one round of the loop that exports spans.
    pub(crate) async fn run_once(&self, store: &dyn Store, now: Timestamp) -> Round {
        let retried = std::mem::take(&mut *self.retried.lock());
        for run in retried {
            // If this fails, the trace only lacks these spans.
            if let Ok(attempts) = store.job_attempts(run.id).await {
                self.exporter.push(run.lost_runs(&attempts));
            }
        }
        self.exporter.run_once(now).await
    }

    /// Exports the spans of a run that has ended.
    pub(crate) fn export_run(&self, run: RunTrace, end: &RunEnd) {
        self.exporter.push(run.spans(end));
        if run.attempt > 1 {
            let mut retried = self.retried.lock();
            if retried.len() < MAX_RETRIED {
                retried.push(run);
            }
        }
    }
}

/// Returns the trace context that the worker of a run receives.
pub(crate) fn traceparent_of(tracer: Option<&Tracer>, job: &InFlightJob) -> Option<String> {
    match tracer {
        Some(tracer) => Some(tracer.run_context(job).to_string()),
        None => job.claimed.options.traceparent.clone(),
    }
}

/// Decides by the last 32 bits of an id. The bits before them count up in ids of the same millisecond.
fn is_sampled(id: Uuid, ratio: f64) -> bool {
    let random = id.as_u128() as u32;
    f64::from(random) < ratio * 2f64.powi(32)
}

/// Derives the id of a span from what it is about.
fn span_id(kind: &str, parts: &[&[u8]]) -> [u8; 8] {
    let mut hash = Sha256::new_with_prefix(kind);
    for part in parts {
        hash.update(part);
    }
    let mut id = [0; 8];
    id.copy_from_slice(&hash.finalize()[..8]);
    // An id of zeros is not valid.
    id[7] |= u8::from(id == [0; 8]);
    id
}

fn run_span_id(job: JobId, run: Run) -> [u8; 8] {
    span_id("run", &[job.0.as_bytes(), &run.to_be_bytes()])
}

/// Converts a time to nanoseconds since 1970.
pub(crate) fn nanoseconds(at: Timestamp) -> u64 {
    u64::try_from(at.as_ms()).unwrap_or(0).saturating_mul(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_decides_how_many_traces_are_recorded() {
        // The ratio also holds for ids that are created in the same millisecond.
        let now = Timestamp::from_ms(1_763_000_000_000);
        let ids: Vec<Uuid> = (0..10_000).map(|_| JobId::at(now).0).collect();
        let share = |ratio| ids.iter().filter(|id| is_sampled(**id, ratio)).count();
        assert_eq!((share(0.0), share(1.0)), (0, 10_000));
        let tenth = share(0.1);
        assert!((700..1_300).contains(&tenth), "{tenth}");
    }

    #[test]
    fn a_trace_that_a_small_ratio_records_is_recorded_by_a_larger_one_too() {
        for _ in 0..1_000 {
            let id = Uuid::now_v7();
            assert!(!is_sampled(id, 0.2) || is_sampled(id, 0.5));
        }
    }

    #[test]
    fn spans_of_different_runs_and_kinds_have_different_ids() {
        let job = JobId::new();
        let ids =
            [run_span_id(job, 1), run_span_id(job, 2), span_id("queued", &[job.0.as_bytes(), &1i64.to_be_bytes()])];
        assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
        assert_eq!(run_span_id(job, 1), run_span_id(job, 1));
    }
}
