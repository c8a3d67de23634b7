//! Sends finished spans to an OpenTelemetry collector, over OTLP/HTTP.
//!
//! Spans wait in a bounded queue. Spans that do not fit are dropped and counted, so a collector that is slow or
//! unreachable costs memory up to that bound and never delays a job. A batch that failed temporarily is sent again with
//! a growing delay; a batch that the collector rejects is dropped and counted.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use faena_domain::{Timestamp, error_chain};
use parking_lot::Mutex;
use prost::Message;
use reqwest::{
    Client, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER},
    redirect,
};
use tokio::sync::Notify;
use url::Url;

use super::otlp::{Attribute, ExportRequest, ExportResponse, Resource, ResourceSpans, Scope, ScopeSpans, Span};
use crate::Round;

/// Spans that may wait. At about 500 bytes each this is 10 MB.
const MAX_WAITING: usize = 20_000;
/// Maximum number of spans in one request.
const BATCH: usize = 1_000;
/// Time limit of one request, including its response.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after the first failure. It doubles with each failure.
const FIRST_DELAY_MS: i64 = 1_000;
const MAX_DELAY_MS: i64 = 30_000;
/// Bytes of a response that are read. A response to an export is a few bytes long.
const RESPONSE_BYTES: usize = 16 << 10;

/// Where to send spans, and how to describe their origin.
#[derive(Clone, Debug)]
pub struct Collector {
    /// The whole URL, which usually ends with `/v1/traces`.
    pub url: Url,
    /// Headers of each request, such as a token. Their values are marked as sensitive, which hides them from `Debug`.
    pub headers: HeaderMap,
    /// Attributes of the resource, such as `service.name`.
    pub attributes: Vec<(String, String)>,
}

pub struct Exporter {
    collector: Collector,
    client: Client,
    queue: Mutex<VecDeque<Span>>,
    /// The batch that is being sent, its failures, and the time of its next attempt.
    state: Mutex<State>,
    /// Notified when the queue contains a full batch, and when the exporter is flushed.
    pub(crate) wakeup: Arc<Notify>,
    pub exported: AtomicU64,
    /// Spans that did not fit into the queue, or that the collector rejected.
    pub dropped: AtomicU64,
}

#[derive(Default)]
struct State {
    batch: Option<Batch>,
    /// Consecutive failures.
    failures: u32,
    retry_at: Option<Timestamp>,
}

/// Encoded spans.
#[derive(Clone)]
struct Batch {
    body: Bytes,
    spans: u64,
}

/// Why a batch was not accepted.
struct ExportError {
    message: String,
    /// Sending the same batch again may succeed.
    is_temporary: bool,
    retry_after_ms: Option<i64>,
}

impl Exporter {
    pub fn new(collector: Collector) -> Exporter {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            .timeout(TIMEOUT)
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .retry(reqwest::retry::never())
            .build()
            .expect("a client without files or system proxies can be built");
        Exporter {
            collector,
            client,
            queue: Mutex::default(),
            state: Mutex::default(),
            wakeup: Arc::default(),
            exported: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Queues finished spans. Never waits.
    pub fn push(&self, spans: impl IntoIterator<Item = Span>) {
        let mut queue = self.queue.lock();
        for span in spans {
            if queue.len() >= MAX_WAITING {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            } else {
                queue.push_back(span);
            }
        }
        if queue.len() >= BATCH {
            self.wakeup.notify_one();
        }
    }

    /// Sends one batch. A failure is not an error of the loop: traces are not needed to run jobs.
    pub async fn run_once(&self, now: Timestamp) -> Round {
        let Some(batch) = self.next_batch(now) else {
            return Round::idle_until(self.state.lock().retry_at);
        };
        let result = self.send(batch.body.clone()).await;
        let is_sent = result.is_ok();
        self.finish(result, batch.spans, now);
        Round {
            handled: if is_sent { usize::try_from(batch.spans).unwrap_or(usize::MAX) } else { 0 },
            more: is_sent && self.queue.lock().len() >= BATCH,
            next_at: self.state.lock().retry_at,
        }
    }

    /// Waits until every span is sent. Returns early if the last request failed.
    pub async fn wait_until_flushed(&self) {
        loop {
            self.wakeup.notify_one();
            {
                let state = self.state.lock();
                if state.failures > 0 || (state.batch.is_none() && self.queue.lock().is_empty()) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the batch to send now: the one that failed before, or a new one.
    fn next_batch(&self, now: Timestamp) -> Option<Batch> {
        let mut state = self.state.lock();
        if state.retry_at.is_some_and(|at| at > now) {
            return None;
        }
        if state.batch.is_none() {
            let mut queue = self.queue.lock();
            let count = queue.len().min(BATCH);
            let spans: Vec<Span> = queue.drain(..count).collect();
            drop(queue);
            if !spans.is_empty() {
                state.batch = Some(self.encode(spans));
            }
        }
        state.batch.clone()
    }

    fn encode(&self, spans: Vec<Span>) -> Batch {
        let count = spans.len() as u64;
        let attributes = self.collector.attributes.iter().map(|(key, value)| Attribute::text(key, value));
        let scope = Scope { name: "faena".into(), version: env!("CARGO_PKG_VERSION").into() };
        let request = ExportRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(Resource { attributes: attributes.collect() }),
                scope_spans: vec![ScopeSpans { scope: Some(scope), spans }],
            }],
        };
        Batch { body: request.encode_to_vec().into(), spans: count }
    }

    /// Returns how many spans of the batch the collector rejected.
    async fn send(&self, body: Bytes) -> Result<u64, ExportError> {
        let request = self.client.post(self.collector.url.clone()).headers(self.collector.headers.clone());
        let request = request.header(CONTENT_TYPE, "application/x-protobuf").body(body);
        let mut response = request.send().await.map_err(|error| ExportError {
            // The URL of a collector may contain a token.
            message: error_chain(&error.without_url()),
            is_temporary: true,
            retry_after_ms: None,
        })?;
        let status = response.status();
        if !status.is_success() {
            return Err(rejection(status, response.headers()));
        }
        let mut body = Vec::new();
        while body.len() < RESPONSE_BYTES
            && let Ok(Some(part)) = response.chunk().await
        {
            body.extend_from_slice(&part);
        }
        // A response that cannot be read does not undo what was accepted.
        let rejected = ExportResponse::decode(body.as_slice()).ok().and_then(|response| response.partial_success);
        Ok(rejected.map_or(0, |rejected| u64::try_from(rejected.rejected_spans).unwrap_or(0)))
    }

    /// Records the result of a batch, and logs when an outage begins and ends.
    fn finish(&self, result: Result<u64, ExportError>, spans: u64, now: Timestamp) {
        let mut state = self.state.lock();
        let was_failing = state.failures > 0;
        match result {
            Ok(rejected) => {
                let rejected = rejected.min(spans);
                self.exported.fetch_add(spans - rejected, Ordering::Relaxed);
                self.dropped.fetch_add(rejected, Ordering::Relaxed);
                if rejected > 0 {
                    tracing::debug!(rejected, "spans rejected by the collector");
                }
                *state = State::default();
                if was_failing {
                    let dropped = self.dropped.load(Ordering::Relaxed);
                    tracing::info!(dropped, "span export recovered");
                }
            }
            Err(error) => {
                if !was_failing {
                    let host = self.collector.url.host_str().unwrap_or_default();
                    tracing::warn!(host, error = error.message, "span export failed, jobs are not affected");
                }
                state.failures = state.failures.saturating_add(1);
                let backoff_ms = FIRST_DELAY_MS << (state.failures - 1).min(5);
                let delay_ms = error.retry_after_ms.map_or(backoff_ms, |requested| requested.max(backoff_ms));
                state.retry_at = Some(now.plus_ms(delay_ms.min(MAX_DELAY_MS)));
                if !error.is_temporary {
                    state.batch = None;
                    self.dropped.fetch_add(spans, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Returns the error of a response without success. The OTLP specification says which statuses allow a retry.
fn rejection(status: StatusCode, headers: &HeaderMap) -> ExportError {
    let retry_after = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
    ExportError {
        message: format!("HTTP {status}"),
        is_temporary: matches!(status.as_u16(), 429 | 502 | 503 | 504),
        retry_after_ms: retry_after.map(|seconds| seconds.clamp(0, MAX_DELAY_MS).saturating_mul(1_000)),
    }
}
