//! Sends webhooks: notifies a URL when a job has ended, and the receivers of an approval when something happens to it.
//!
//! A round stores the results since the last one, then takes as many due webhooks as there is capacity for and sends each in
//! a task of its own, so that a receiver that does not answer delays no other. Each host has a bounded number of concurrent
//! attempts and a breaker; while the breaker is open the host's webhooks wait and use no attempt.
//!
//! Safe to run on all nodes concurrently: each attempt is taken by one node and fenced by its number. If that node dies, another sends
//! the webhook again when the lease has expired. So every webhook arrives at least once, and its id identifies repetitions.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use faena_domain::{AddressRule, NodeId, Timestamp};
use faena_store::{Delivery, Store, StoreError, WebhookNext, WebhookResult, WebhookTakeRequest, host_of};
use futures_util::FutureExt;
use parking_lot::Mutex;
use rand::seq::SliceRandom;
use reqwest::{
    Client,
    header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER},
    redirect,
};

use crate::{
    Round,
    address::{GuardedResolver, describe, is_forbidden},
    breaker::{Breaker, BreakerRule, BreakerState},
    config::ms,
    driver::panic_text,
    log_throttle::LogThrottle,
    signature::{Secret, sign},
    traces::Tracer,
    wakeups::Wakeups,
};

#[derive(Clone, Debug)]
pub struct WebhookConfig {
    pub attempts: u32,
    /// Delay before the second attempt. It doubles with each attempt, up to five minutes.
    pub base_delay: Duration,
    /// Timeout of one attempt.
    pub timeout: Duration,
    /// Concurrent attempts of this node.
    pub concurrency: usize,
    /// Concurrent attempts of this node to one host.
    pub per_host: usize,
    /// How long the breaker of a failing host stays open.
    pub breaker: Duration,
    /// Signing secrets, newest first. Without one, nothing is signed.
    pub secrets: Vec<Secret>,
}

impl Default for WebhookConfig {
    fn default() -> Self {
        WebhookConfig {
            attempts: 3,
            base_delay: Duration::from_secs(1),
            timeout: Duration::from_secs(10),
            concurrency: 32,
            per_host: 8,
            breaker: Duration::from_secs(30),
            secrets: Vec::new(),
        }
    }
}

const MAX_DELAY: Duration = Duration::from_secs(5 * 60);
/// Time beyond the timeout to store a result, before another node sends the webhook again.
const LEASE_MARGIN: Duration = Duration::from_secs(30);
/// Maximum number of bytes of a response body that are kept.
const RESPONSE_BYTES: usize = 1_024;
/// How long to read the response body after its status.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay before failing hosts that got no capacity are considered again.
const RECHECK_MS: i64 = 1_000;
/// After this time without a failure a host is forgotten.
const FORGET_MS: i64 = 3_600_000;

pub struct Webhooks {
    config: WebhookConfig,
    /// Which addresses may be called.
    pub rule: AddressRule,
    client: Client,
    wakeups: Wakeups,
    state: Mutex<SenderState>,
    tracer: Option<Arc<Tracer>>,
    pub delivered: AtomicU64,
    pub failed: AtomicU64,
    /// Results that were reported after another node had taken the webhook.
    pub late: AtomicU64,
    failure_log: LogThrottle,
}

/// Attempts in progress and results that are not stored yet.
#[derive(Default)]
struct SenderState {
    hosts: HashMap<String, Host>,
    in_progress: usize,
    /// Results that are not stored yet.
    results: Vec<WebhookResult>,
}

struct Host {
    breaker: Breaker,
    in_progress: usize,
    failed_at: Option<Timestamp>,
}

/// Result of one attempt.
struct AttemptResult {
    status: Option<u16>,
    error: Option<String>,
    answer: Option<String>,
    retry_after: Option<Duration>,
    /// A retry cannot succeed.
    is_permanent: bool,
}

impl AttemptResult {
    fn failed(error: String) -> AttemptResult {
        AttemptResult { status: None, is_permanent: false, error: Some(error), answer: None, retry_after: None }
    }

    fn rejected(error: String) -> AttemptResult {
        AttemptResult { is_permanent: true, ..AttemptResult::failed(error) }
    }

    /// Returns whether the host is healthy. A client error says nothing about other requests to the host, and an address
    /// that was rejected here was never called.
    fn is_host_healthy(&self) -> bool {
        self.is_permanent || self.status.is_some_and(|status| status < 500 && status != 429)
    }
}

impl Webhooks {
    /// Creates a sender outside an engine: its caller runs every round.
    pub fn new(config: WebhookConfig, rule: AddressRule) -> Webhooks {
        Webhooks::with_wakeups(config, rule, Wakeups::default(), None)
    }

    pub(crate) fn with_wakeups(
        config: WebhookConfig,
        rule: AddressRule,
        wakeups: Wakeups,
        tracer: Option<Arc<Tracer>>,
    ) -> Webhooks {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            .dns_resolver(GuardedResolver(rule.clone()))
            .connect_timeout(config.timeout)
            // No connection is reused, so the address is checked for every request.
            .pool_max_idle_per_host(0)
            .http1_only()
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .retry(reqwest::retry::never())
            .build()
            .expect("a client without files or system proxies can be built");
        Webhooks {
            config,
            rule,
            client,
            wakeups,
            state: Mutex::default(),
            tracer,
            delivered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            late: AtomicU64::new(0),
            failure_log: LogThrottle::default(),
        }
    }

    pub async fn run_once(
        self: &Arc<Webhooks>,
        store: &dyn Store,
        node: NodeId,
        now: Timestamp,
    ) -> Result<Round, StoreError> {
        let stored = self.store_results(store, now).await?;
        let (request, recheck_at) = self.take_request(node, now);
        if request.limit == 0 {
            // The end of an attempt wakes the loop.
            return Ok(Round::done(stored));
        }
        if let Some(webhooks) = self.failure_log.take_suppressed(now) {
            tracing::warn!(webhooks, "more webhooks failed");
        }
        let taken = store.webhook_take(request, now).await?;
        let handled = stored + taken.deliveries.len();
        for delivery in taken.deliveries {
            self.start(delivery, now);
        }
        let next_at = [taken.next_at, recheck_at, self.failure_log.summary_at()].into_iter().flatten().min();
        Ok(Round { handled, more: false, next_at })
    }

    /// Stores the results of ended attempts and starts no new ones.
    pub async fn store_results(&self, store: &dyn Store, now: Timestamp) -> Result<usize, StoreError> {
        let results = self.state.lock().results.clone();
        if results.is_empty() {
            return Ok(0);
        }
        let accepted = store.webhook_settle(results.clone(), now).await?;
        let late = accepted.iter().filter(|accepted| !**accepted).count();
        self.late.fetch_add(late as u64, Ordering::Relaxed);
        // Removed only now: results that are not stored count as capacity in use, which bounds their number.
        self.state.lock().results.drain(..results.len());
        Ok(results.len())
    }

    /// Waits until no attempt is in progress and every result is stored.
    pub async fn wait_until_flushed(&self) {
        let is_busy = || {
            let state = self.state.lock();
            state.in_progress > 0 || !state.results.is_empty()
        };
        while is_busy() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns why webhooks to this URL are not sent now, if they are not.
    pub fn delay_reason(&self, url: &str, now: Timestamp) -> Option<String> {
        let host = host_of(url);
        let until = self.state.lock().hosts.get(&host)?.breaker.retry_at(now)?;
        Some(format!("{host} keeps failing; its circuit is open until {until}"))
    }

    /// Returns the breakers that are not closed, by host.
    pub fn breakers(&self, now: Timestamp) -> Vec<(String, BreakerState)> {
        let state = self.state.lock();
        let states = state.hosts.iter().map(|(host, known)| (host.clone(), known.breaker.state(now)));
        states.filter(|(_, state)| *state != BreakerState::Closed).collect()
    }

    /// Returns which webhooks to take now, and when to check hosts without capacity again.
    fn take_request(&self, node: NodeId, now: Timestamp) -> (WebhookTakeRequest, Option<Timestamp>) {
        let mut state = self.state.lock();
        state.hosts.retain(|_, host| {
            let failing = host.failed_at.is_some_and(|at| now.ms_since(at) < FORGET_MS);
            host.in_progress > 0 || failing
        });
        let per_host = self.config.per_host;
        let mut host_capacities = Vec::new();
        let mut recheck_at = None;
        // However many hosts fail, half of the capacity is for hosts that do not. The failing hosts share the other half; if
        // there are more of them than capacity, they are picked at random.
        let failing = || state.hosts.values().filter(|host| host.failed_at.is_some());
        let in_progress = failing().map(|host| host.in_progress).sum();
        let mut spare = self.config.concurrency.div_ceil(2).saturating_sub(in_progress);
        let share = spare.checked_div(failing().count()).unwrap_or(0).max(1);
        let mut hosts: Vec<(&String, &Host)> = state.hosts.iter().collect();
        hosts.shuffle(&mut rand::rng());
        for (name, host) in hosts {
            let mut capacity = host.breaker.capacity(per_host.saturating_sub(host.in_progress), now);
            if host.failed_at.is_some() {
                if capacity > 0 && spare == 0 {
                    recheck_at = recheck_at.into_iter().chain([now.plus_ms(RECHECK_MS)]).min();
                }
                capacity = capacity.min(spare).min(share);
                spare -= capacity;
            }
            if capacity < per_host {
                host_capacities.push((name.clone(), capacity));
            }
            recheck_at = recheck_at.into_iter().chain(host.breaker.retry_at(now)).min();
        }
        let limit = self.config.concurrency.saturating_sub(state.in_progress + state.results.len());
        let lease_ms = ms(self.config.timeout.saturating_add(LEASE_MARGIN));
        (
            WebhookTakeRequest { node, limit, per_host, host_capacities, allowed: self.config.attempts, lease_ms },
            recheck_at,
        )
    }

    fn start(self: &Arc<Webhooks>, delivery: Delivery, now: Timestamp) {
        {
            let mut state = self.state.lock();
            state.in_progress += 1;
            let rule = BreakerRule { open_ms: ms(self.config.breaker), ..BreakerRule::default() };
            let host = state.hosts.entry(delivery.host.clone()).or_insert_with(|| Host {
                breaker: Breaker::new(rule),
                in_progress: 0,
                failed_at: None,
            });
            host.in_progress += 1;
            host.breaker.record_sent(1, now);
        }
        let webhooks = self.clone();
        tokio::spawn(async move {
            let started = Instant::now();
            let call = tokio::time::timeout(webhooks.config.timeout, webhooks.call(&delivery, now));
            let outcome = match AssertUnwindSafe(call).catch_unwind().await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => AttemptResult::failed(format!("no answer within {:?}", webhooks.config.timeout)),
                Err(panic) => AttemptResult::failed(panic_text(panic.as_ref())),
            };
            webhooks.finish(&delivery, outcome, now, started.elapsed());
        });
    }

    async fn call(&self, delivery: &Delivery, now: Timestamp) -> AttemptResult {
        let url: url::Url = match delivery.url.parse() {
            Ok(url) => url,
            Err(error) => return AttemptResult::rejected(format!("the URL is not valid: {error}")),
        };
        if let Err(error) = self.rule.check_url(&url) {
            return AttemptResult::rejected(error.to_string());
        }
        let call = self.client.post(url).headers(self.headers(delivery, now)).body(delivery.body.clone());
        let mut answer = match call.send().await {
            Ok(answer) => answer,
            Err(error) if is_forbidden(&error) => return AttemptResult::rejected(describe(error)),
            Err(error) => return AttemptResult::failed(describe(error)),
        };
        let status = answer.status();
        let retry_after = matches!(status.as_u16(), 429 | 503).then(|| retry_after(answer.headers())).flatten();
        let error = if status.is_success() {
            None
        } else if status.is_redirection() {
            Some(format!("HTTP {status}; redirects are not followed"))
        } else {
            Some(format!("HTTP {status}"))
        };
        let text = read_start(&mut answer).await;
        let text = (!text.is_empty()).then_some(text);
        AttemptResult { status: Some(status.as_u16()), error, answer: text, retry_after, is_permanent: false }
    }

    fn headers(&self, delivery: &Delivery, now: Timestamp) -> HeaderMap {
        let timestamp = now.as_ms().div_euclid(1_000);
        let id = delivery.id.to_string();
        let signature = sign(&self.config.secrets, &id, timestamp, &delivery.body);
        let traceparent = match &self.tracer {
            Some(tracer) => Some(tracer.webhook_context(delivery).1.to_string()),
            None => delivery.traceparent.clone(),
        };
        let subject_header = if delivery.subject.job().is_some() { "x-job-id" } else { "x-task-id" };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert("webhook-timestamp", HeaderValue::from(timestamp));
        for (name, value) in [
            ("webhook-id", id.as_str()),
            ("webhook-signature", signature.as_str()),
            ("x-webhook-event", delivery.event.as_str()),
            (subject_header, &delivery.subject.id().to_string()),
            ("x-correlation-id", &delivery.correlation_id),
            ("traceparent", traceparent.as_deref().unwrap_or_default()),
        ] {
            // Values that are not valid in a header are left out; the body contains everything that matters.
            if let Ok(value) = HeaderValue::from_bytes(value.as_bytes())
                && !value.is_empty()
            {
                headers.insert(name, value);
            }
        }
        headers
    }

    fn finish(&self, delivery: &Delivery, outcome: AttemptResult, started_at: Timestamp, took: Duration) {
        let at = started_at.plus_ms(ms(took));
        let next = self.next(delivery, &outcome, at);
        let counter = if next == WebhookNext::Delivered { &self.delivered } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        if let Some(tracer) = &self.tracer {
            tracer.export_webhook_attempt(delivery, outcome.status, outcome.error.as_deref(), (started_at, at));
        }
        if next == WebhookNext::Failed && self.failure_log.admit(at) {
            let (host, attempts, error) = (&delivery.host, delivery.attempt, outcome.error.as_deref());
            tracing::warn!(webhook = %delivery.id, subject = delivery.subject.to_string(), host, attempts, error, "webhook failed");
        }
        let mut state = self.state.lock();
        state.in_progress -= 1;
        if let Some(host) = state.hosts.get_mut(&delivery.host) {
            host.in_progress -= 1;
            let was = host.breaker.state(at);
            if outcome.is_host_healthy() {
                host.breaker.record_success();
                if host.breaker.state(at) == BreakerState::Closed {
                    host.failed_at = None;
                }
            } else {
                host.breaker.record_failure(at);
                host.failed_at = Some(at);
            }
            if was == BreakerState::Closed && host.breaker.state(at) == BreakerState::Open {
                let (failures, retry_in) = (BreakerRule::default().failures, self.config.breaker);
                tracing::warn!(host = delivery.host, failures, ?retry_in, "webhook circuit opened");
            }
        }
        state.results.push(WebhookResult {
            id: delivery.id,
            number: delivery.number,
            attempt: delivery.attempt,
            allowed: self.config.attempts,
            at,
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            status: outcome.status,
            error: outcome.error,
            answer: outcome.answer,
            next,
        });
        drop(state);
        self.wakeups.webhooks_changed();
    }

    fn next(&self, delivery: &Delivery, outcome: &AttemptResult, at: Timestamp) -> WebhookNext {
        if outcome.error.is_none() {
            return WebhookNext::Delivered;
        }
        if outcome.is_permanent || delivery.attempt >= self.config.attempts {
            return WebhookNext::Failed;
        }
        let backoff = delay(self.config.base_delay, delivery.attempt);
        let delay = outcome.retry_after.map_or(backoff, |requested| requested.max(backoff).min(MAX_DELAY));
        WebhookNext::Again { due_at: at.plus_ms(ms(delay)) }
    }
}

/// Returns the delay after this attempt.
fn delay(base: Duration, attempt: u32) -> Duration {
    base.saturating_mul(2u32.saturating_pow(attempt.saturating_sub(1))).min(MAX_DELAY)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Reads the beginning of a response body. It is informational, so errors and timeouts while reading do not matter.
async fn read_start(answer: &mut reqwest::Response) -> String {
    let mut bytes = Vec::new();
    let read = async {
        while bytes.len() < RESPONSE_BYTES
            && let Ok(Some(part)) = answer.chunk().await
        {
            bytes.extend_from_slice(&part[..part.len().min(RESPONSE_BYTES - bytes.len())]);
        }
    };
    let _ = tokio::time::timeout(RESPONSE_TIMEOUT, read).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_five_minutes() {
        let base = Duration::from_secs(1);
        let seconds: Vec<u64> = [1, 2, 3, 9, 10, 50].map(|attempt| delay(base, attempt).as_secs()).into();
        assert_eq!(seconds, [1, 2, 4, 256, 300, 300]);
        assert_eq!(delay(Duration::MAX, 50), MAX_DELAY);
    }
}
