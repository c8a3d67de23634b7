//! Tells whoever wanted to know how a job ended.
//!
//! A round writes down what the senders have told since the last one, then takes as many webhooks as there is room for and
//! hands each to a sender of its own, beside the loop: one that does not answer keeps nobody waiting. Each host has a bounded
//! number of senders and a breaker; while that is open its webhooks stay where they are and cost no attempt.
//!
//! Safe on every node at once: an attempt is handed out once and fenced by its number. A sender that dies is replaced when its
//! lease is over. So everything arrives at least once, and its id tells repetitions from news.

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
use tokio::sync::Notify;

use crate::{
    Round,
    address::{GuardedResolver, describe, is_forbidden},
    breaker::{Breaker, BreakerRule, BreakerState},
    config::ms,
    driver::panic_text,
    signature::{Secret, sign},
};

#[derive(Clone, Debug)]
pub struct WebhookConfig {
    pub attempts: u32,
    /// The delay before the second attempt; each further one doubles it, up to five minutes.
    pub base_delay: Duration,
    /// For all of one attempt.
    pub timeout: Duration,
    /// Attempts at once by this process, and of these to one host.
    pub concurrency: usize,
    pub per_host: usize,
    /// How long a host that keeps failing is left alone.
    pub breaker: Duration,
    /// The newest first. None: nothing is signed.
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

const LONGEST_DELAY: Duration = Duration::from_secs(5 * 60);
/// What a sender has beyond the timeout to have its result written down, before another one sends it again.
const LEASE_MARGIN: Duration = Duration::from_secs(30);
/// What is kept of an answer, and how long is waited for it once its status is known.
const ANSWER_BYTES: usize = 1_024;
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);
/// When failing hosts that had to give way to others get another chance.
const TURN_MS: i64 = 1_000;
/// After this time without a failure nothing is remembered of a host.
const REMEMBERED_MS: i64 = 3_600_000;

pub struct Webhooks {
    config: WebhookConfig,
    /// Which addresses may be told.
    pub rule: AddressRule,
    client: Client,
    pub nudge: Arc<Notify>,
    office: Mutex<SenderState>,
    /// Attempts that were delivered, were not, or of which nobody wanted to hear any more.
    pub delivered: AtomicU64,
    pub failed: AtomicU64,
    pub late: AtomicU64,
}

/// What the senders are at.
#[derive(Default)]
struct SenderState {
    hosts: HashMap<String, Host>,
    under_way: usize,
    /// Not written down yet.
    results: Vec<WebhookResult>,
}

struct Host {
    breaker: Breaker,
    under_way: usize,
    failed_at: Option<Timestamp>,
}

/// How one call went.
struct Outcome {
    status: Option<u16>,
    error: Option<String>,
    answer: Option<String>,
    retry_after: Option<Duration>,
    /// It will not go better another time.
    hopeless: bool,
}

impl Outcome {
    fn failed(error: String) -> Outcome {
        Outcome { status: None, hopeless: false, error: Some(error), answer: None, retry_after: None }
    }

    fn refused(error: String) -> Outcome {
        Outcome { hopeless: true, ..Outcome::failed(error) }
    }

    /// Whether the host does its work. That it does not like this request says nothing about others, which may be somebody
    /// else's; and what was refused here never reached it.
    fn host_works(&self) -> bool {
        self.hopeless || self.status.is_some_and(|status| status < 500 && status != 429)
    }
}

impl Webhooks {
    pub fn new(config: WebhookConfig, rule: AddressRule) -> Webhooks {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            .dns_resolver(GuardedResolver(rule.clone()))
            .connect_timeout(config.timeout)
            // A connection is used once, so none gets round the look at its address.
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
            nudge: Arc::new(Notify::new()),
            office: Mutex::default(),
            delivered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            late: AtomicU64::new(0),
        }
    }

    pub async fn run_once(
        self: &Arc<Webhooks>,
        store: &dyn Store,
        node: NodeId,
        now: Timestamp,
    ) -> Result<Round, StoreError> {
        let settled = self.settle(store, now).await?;
        let (ask, look_at) = self.ask(node, now);
        if ask.limit == 0 {
            // Whoever finishes nudges.
            return Ok(Round { handled: settled, ..Round::default() });
        }
        let taken = store.webhook_take(ask, now).await?;
        let handled = settled + taken.deliveries.len();
        for delivery in taken.deliveries {
            self.start(delivery, now);
        }
        Ok(Round { handled, more: false, next_at: taken.next_at.into_iter().chain(look_at).min() })
    }

    /// Writes down what the senders have told, and nothing else: for a server that stops.
    pub async fn settle(&self, store: &dyn Store, now: Timestamp) -> Result<usize, StoreError> {
        let results = self.office.lock().results.clone();
        if results.is_empty() {
            return Ok(0);
        }
        let kept = store.webhook_settle(results.clone(), now).await?;
        let late = kept.iter().filter(|kept| !**kept).count();
        self.late.fetch_add(late as u64, Ordering::Relaxed);
        // Only now: what is not written down yet takes up room, so that there is never too much of it.
        self.office.lock().results.drain(..results.len());
        Ok(results.len())
    }

    /// Waits until nothing is under way and everything is written down.
    pub async fn settled(&self) {
        let busy = || {
            let office = self.office.lock();
            office.under_way > 0 || !office.results.is_empty()
        };
        while busy() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Why what goes to this address is not sent now, if it is not.
    pub fn held_back(&self, url: &str, now: Timestamp) -> Option<String> {
        let host = host_of(url);
        let until = self.office.lock().hosts.get(&host)?.breaker.opens_at(now)?;
        Some(format!("{host} keeps failing; its breaker is open until {until}"))
    }

    /// The breakers that are not closed.
    pub fn breakers(&self, now: Timestamp) -> Vec<(String, BreakerState)> {
        let office = self.office.lock();
        let states = office.hosts.iter().map(|(host, known)| (host.clone(), known.breaker.state(now)));
        states.filter(|(_, state)| *state != BreakerState::Closed).collect()
    }

    /// What there is room for, and when there is room again for a host that has none now.
    fn ask(&self, node: NodeId, now: Timestamp) -> (WebhookTakeRequest, Option<Timestamp>) {
        let mut office = self.office.lock();
        office.hosts.retain(|_, host| {
            let failing = host.failed_at.is_some_and(|at| now.ms_since(at) < REMEMBERED_MS);
            host.under_way > 0 || failing
        });
        let per_host = self.config.per_host;
        let mut rooms = Vec::new();
        let mut look_at = None;
        // However many hosts fail, half of the senders is for those that do not. The failing ones share the rest; if they are
        // more than it, each gets its turn by chance.
        let failing = || office.hosts.values().filter(|host| host.failed_at.is_some());
        let under_way = failing().map(|host| host.under_way).sum();
        let mut spare = self.config.concurrency.div_ceil(2).saturating_sub(under_way);
        let share = spare.checked_div(failing().count()).unwrap_or(0).max(1);
        let mut hosts: Vec<(&String, &Host)> = office.hosts.iter().collect();
        hosts.shuffle(&mut rand::rng());
        for (name, host) in hosts {
            let mut room = host.breaker.room(per_host.saturating_sub(host.under_way), now);
            if host.failed_at.is_some() {
                if room > 0 && spare == 0 {
                    look_at = look_at.into_iter().chain([now.plus_ms(TURN_MS)]).min();
                }
                room = room.min(spare).min(share);
                spare -= room;
            }
            if room < per_host {
                rooms.push((name.clone(), room));
            }
            look_at = look_at.into_iter().chain(host.breaker.opens_at(now)).min();
        }
        let limit = self.config.concurrency.saturating_sub(office.under_way + office.results.len());
        let lease_ms = ms(self.config.timeout.saturating_add(LEASE_MARGIN));
        (WebhookTakeRequest { node, limit, per_host, rooms, allowed: self.config.attempts, lease_ms }, look_at)
    }

    fn start(self: &Arc<Webhooks>, delivery: Delivery, now: Timestamp) {
        {
            let mut office = self.office.lock();
            office.under_way += 1;
            let rule = BreakerRule { rest_ms: ms(self.config.breaker), ..BreakerRule::default() };
            let host = office.hosts.entry(delivery.host.clone()).or_insert_with(|| Host {
                breaker: Breaker::new(rule),
                under_way: 0,
                failed_at: None,
            });
            host.under_way += 1;
            host.breaker.sent(1, now);
        }
        let webhooks = self.clone();
        tokio::spawn(async move {
            let began = Instant::now();
            let call = tokio::time::timeout(webhooks.config.timeout, webhooks.call(&delivery, now));
            let outcome = match AssertUnwindSafe(call).catch_unwind().await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Outcome::failed(format!("no answer within {:?}", webhooks.config.timeout)),
                Err(panic) => Outcome::failed(panic_text(panic.as_ref())),
            };
            webhooks.finish(&delivery, outcome, now, began.elapsed());
        });
    }

    async fn call(&self, delivery: &Delivery, now: Timestamp) -> Outcome {
        let url: url::Url = match delivery.url.parse() {
            Ok(url) => url,
            Err(error) => return Outcome::refused(format!("the URL is not valid: {error}")),
        };
        if let Err(error) = self.rule.check_url(&url) {
            return Outcome::refused(error.to_string());
        }
        let call = self.client.post(url).headers(self.headers(delivery, now)).body(delivery.body.clone());
        let mut answer = match call.send().await {
            Ok(answer) => answer,
            Err(error) if is_forbidden(&error) => return Outcome::refused(describe(error)),
            Err(error) => return Outcome::failed(describe(error)),
        };
        let status = answer.status();
        let retry_after = matches!(status.as_u16(), 429 | 503).then(|| retry_after(answer.headers())).flatten();
        let error = if status.is_success() {
            None
        } else if status.is_redirection() {
            Some(format!("HTTP {status}; redirections are not followed"))
        } else {
            Some(format!("HTTP {status}"))
        };
        let text = first_of(&mut answer).await;
        let text = (!text.is_empty()).then_some(text);
        Outcome { status: Some(status.as_u16()), error, answer: text, retry_after, hopeless: false }
    }

    fn headers(&self, delivery: &Delivery, now: Timestamp) -> HeaderMap {
        let timestamp = now.as_ms().div_euclid(1_000);
        let id = delivery.id.to_string();
        let signature = sign(&self.config.secrets, &id, timestamp, &delivery.body);
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert("x-webhook-event", HeaderValue::from_static("job.status"));
        headers.insert("webhook-timestamp", HeaderValue::from(timestamp));
        for (name, value) in [
            ("webhook-id", id.as_str()),
            ("webhook-signature", signature.as_str()),
            ("x-job-id", &delivery.job.to_string()),
            ("x-correlation-id", &delivery.correlation_id),
            ("traceparent", delivery.traceparent.as_deref().unwrap_or_default()),
        ] {
            // What cannot stand in a header is left out; the body has all that counts.
            if let Ok(value) = HeaderValue::from_bytes(value.as_bytes())
                && !value.is_empty()
            {
                headers.insert(name, value);
            }
        }
        headers
    }

    fn finish(&self, delivery: &Delivery, outcome: Outcome, began_at: Timestamp, took: Duration) {
        let at = began_at.plus_ms(ms(took));
        let next = self.next(delivery, &outcome, at);
        let counter = if next == WebhookNext::Delivered { &self.delivered } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        let mut office = self.office.lock();
        office.under_way -= 1;
        if let Some(host) = office.hosts.get_mut(&delivery.host) {
            host.under_way -= 1;
            let was = host.breaker.state(at);
            if outcome.host_works() {
                host.breaker.succeeded();
                if host.breaker.state(at) == BreakerState::Closed {
                    host.failed_at = None;
                }
            } else {
                host.breaker.failed(at);
                host.failed_at = Some(at);
            }
            if was == BreakerState::Closed && host.breaker.state(at) == BreakerState::Open {
                tracing::warn!(host = delivery.host, "a webhook receiver keeps failing and is left alone for a while");
            }
        }
        office.results.push(WebhookResult {
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
        drop(office);
        self.nudge.notify_one();
    }

    fn next(&self, delivery: &Delivery, outcome: &Outcome, at: Timestamp) -> WebhookNext {
        if outcome.error.is_none() {
            return WebhookNext::Delivered;
        }
        if outcome.hopeless || delivery.attempt >= self.config.attempts {
            return WebhookNext::Failed;
        }
        let own = delay(self.config.base_delay, delivery.attempt);
        let delay = outcome.retry_after.map_or(own, |wanted| wanted.max(own).min(LONGEST_DELAY));
        WebhookNext::Again { due_at: at.plus_ms(ms(delay)) }
    }
}

/// How long to wait after this attempt.
fn delay(base: Duration, attempt: u32) -> Duration {
    base.saturating_mul(2u32.saturating_pow(attempt.saturating_sub(1))).min(LONGEST_DELAY)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The beginning of an answer, as far as it comes soon. What it says does not count, so neither does how it breaks off.
async fn first_of(answer: &mut reqwest::Response) -> String {
    let mut bytes = Vec::new();
    let read = async {
        while bytes.len() < ANSWER_BYTES
            && let Ok(Some(part)) = answer.chunk().await
        {
            bytes.extend_from_slice(&part[..part.len().min(ANSWER_BYTES - bytes.len())]);
        }
    };
    let _ = tokio::time::timeout(ANSWER_PATIENCE, read).await;
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
        assert_eq!(delay(Duration::MAX, 50), LONGEST_DELAY);
    }
}
