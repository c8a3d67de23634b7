//! Posts events to a web address, signed as webhooks are.
//!
//! The messages of a subject go one after another, those of several subjects at once. What the receiver says about a message (a status of
//! 4xx) is the message's fault; everything else that is no success (no connection, no answer, 408, 429, 5xx, a redirection) means that
//! the receiver is down.

use std::{
    collections::HashMap,
    fmt,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use faena_brokers::{BrokerError, Message, PublishOutcome, PublishReport, Sink};
use faena_domain::{AddressRule, Timestamp};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use reqwest::{
    Client,
    header::{CONTENT_TYPE, HeaderMap, HeaderValue},
    redirect,
};
use url::Url;

use crate::{
    address::{GuardedResolver, describe},
    signature::{Secret, sign},
};

#[derive(Clone)]
pub struct WebhookSinkOptions {
    pub url: Url,
    /// None: nothing is signed.
    pub secret: Option<Secret>,
    /// How long one call to `publish` may take.
    pub timeout: Duration,
}

/// Subjects whose messages are posted at once.
const AT_ONCE: usize = 8;
const ANSWER_BYTES: usize = 64 << 10;

impl fmt::Display for WebhookSinkOptions {
    /// Without what stands behind the question mark: it may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.url.origin().ascii_serialization())?;
        f.write_str(self.url.path())
    }
}

impl fmt::Debug for WebhookSinkOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WebhookSinkOptions({self}, {:?})", self.timeout)
    }
}

pub struct WebhookSink {
    options: WebhookSinkOptions,
    rule: AddressRule,
    client: Client,
}

/// How one call goes.
struct Call {
    began: Instant,
    outcomes: Mutex<Vec<Option<PublishOutcome>>>,
    outage: Mutex<Option<BrokerError>>,
}

impl WebhookSink {
    pub fn new(options: WebhookSinkOptions, rule: AddressRule) -> WebhookSink {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            // A connection is kept only to an address that has passed.
            .dns_resolver(GuardedResolver(rule.clone()))
            .timeout(options.timeout / 2)
            .pool_max_idle_per_host(AT_ONCE)
            .http1_only()
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .retry(reqwest::retry::never())
            .build()
            .expect("a client without files or system proxies can be built");
        WebhookSink { options, rule, client }
    }

    /// The messages of one subject. Stops when the receiver is down, or when the next answer might come too late to be heard.
    async fn post_subject(&self, messages: &[Message], indexes: Vec<usize>, call: &Call) {
        for index in indexes {
            if call.outage.lock().is_some() || call.began.elapsed() >= self.options.timeout / 2 {
                return;
            }
            match self.post(&messages[index]).await {
                Ok(outcome) => call.outcomes.lock()[index] = Some(outcome),
                Err(reason) => {
                    call.outage.lock().get_or_insert_with(|| BrokerError::new(format!("{}: {reason}", self.options)));
                    return;
                }
            }
        }
    }

    /// `Err`: why the receiver is down.
    async fn post(&self, message: &Message) -> Result<PublishOutcome, String> {
        self.rule.check_url(&self.options.url).map_err(|error| error.to_string())?;
        let call = self.client.post(self.options.url.clone()).headers(self.headers(message));
        let answer = call.body(message.body.clone()).send().await.map_err(describe)?;
        let status = answer.status();
        read_off(answer).await;
        match status.as_u16() {
            200..300 => Ok(PublishOutcome::Confirmed),
            300..400 => Err(format!("HTTP {status}; redirections are not followed")),
            408 | 429 => Err(format!("HTTP {status}")),
            400..500 => Ok(PublishOutcome::Rejected(format!("HTTP {status}"))),
            _ => Err(format!("HTTP {status}")),
        }
    }

    fn headers(&self, message: &Message) -> HeaderMap {
        let timestamp = Timestamp::now().as_ms().div_euclid(1_000);
        let body = std::str::from_utf8(&message.body).unwrap_or_default();
        let signature = sign(self.options.secret.as_slice(), &message.id, timestamp, body);
        let mut headers = HeaderMap::new();
        headers.insert("webhook-timestamp", HeaderValue::from(timestamp));
        for (name, value) in [
            (CONTENT_TYPE.as_str(), message.content_type.as_ref()),
            ("webhook-id", message.id.as_str()),
            ("webhook-signature", signature.as_str()),
            ("x-correlation-id", message.correlation_id.as_deref().unwrap_or_default()),
            ("traceparent", message.traceparent.as_deref().unwrap_or_default()),
        ] {
            // What cannot stand in a header is left out; the body has all that counts.
            if let Ok(value) = HeaderValue::from_str(value)
                && !value.is_empty()
                && let Ok(name) = reqwest::header::HeaderName::from_bytes(name.as_bytes())
            {
                headers.insert(name, value);
            }
        }
        headers
    }
}

#[async_trait]
impl Sink for WebhookSink {
    async fn publish(&self, messages: &[Message]) -> PublishReport {
        let call =
            Call { began: Instant::now(), outcomes: Mutex::new(vec![None; messages.len()]), outage: Mutex::default() };
        stream::iter(by_subject(messages))
            .for_each_concurrent(AT_ONCE, |indexes| self.post_subject(messages, indexes, &call))
            .await;
        PublishReport { outcomes: call.outcomes.into_inner(), outage: call.outage.into_inner() }
    }

    async fn close(&self) {}
}

/// A short answer is read to its end, so that the connection can be used again. What it says does not count.
async fn read_off(mut answer: reqwest::Response) {
    let mut bytes = 0;
    while bytes < ANSWER_BYTES
        && let Ok(Some(part)) = answer.chunk().await
    {
        bytes += part.len();
    }
}

/// The places of each subject's messages, whoever comes first first.
fn by_subject(messages: &[Message]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (index, message) in messages.iter().enumerate() {
        let group = *known.entry(&message.key).or_insert(groups.len());
        if group == groups.len() {
            groups.push(Vec::new());
        }
        groups[group].push(index);
    }
    groups
}
