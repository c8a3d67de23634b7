//! A sink that posts events to a URL, signed as webhooks are.
//!
//! The messages of one subject are posted one after another, those of several subjects concurrently. A 4xx status other
//! than 408 and 429 means that the receiver rejects the message; everything else that is not a success (no connection,
//! no answer, 408, 429, 5xx, a redirect) means that the receiver is down.

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
    /// Signing secret. Without one, nothing is signed.
    pub secret: Option<Secret>,
    /// How long one call to `publish` may take.
    pub timeout: Duration,
}

/// How many subjects have their messages posted concurrently.
const CONCURRENCY: usize = 8;
const ANSWER_BYTES: usize = 64 << 10;

impl fmt::Display for WebhookSinkOptions {
    /// Writes the URL without its query, which may contain a token.
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

/// State of one call to `publish`.
struct Call {
    started: Instant,
    outcomes: Mutex<Vec<Option<PublishOutcome>>>,
    outage: Mutex<Option<BrokerError>>,
}

impl WebhookSink {
    pub fn new(options: WebhookSinkOptions, rule: AddressRule) -> WebhookSink {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            // The resolver returns only permitted addresses, so a pooled connection never needs another check.
            .dns_resolver(GuardedResolver(rule.clone()))
            .timeout(options.timeout / 2)
            .pool_max_idle_per_host(CONCURRENCY)
            .http1_only()
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .retry(reqwest::retry::never())
            .build()
            .expect("a client without files or system proxies can be built");
        WebhookSink { options, rule, client }
    }

    /// Posts the messages of one subject. Stops if the receiver is down, or if there may be no time for the next answer.
    async fn post_subject(&self, messages: &[Message], indexes: Vec<usize>, call: &Call) {
        for index in indexes {
            if call.outage.lock().is_some() || call.started.elapsed() >= self.options.timeout / 2 {
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

    /// Posts one message.
    ///
    /// # Errors
    /// Why the receiver is down.
    async fn post(&self, message: &Message) -> Result<PublishOutcome, String> {
        self.rule.check_url(&self.options.url).map_err(|error| error.to_string())?;
        let call = self.client.post(self.options.url.clone()).headers(self.headers(message));
        let answer = call.body(message.body.clone()).send().await.map_err(describe)?;
        let status = answer.status();
        discard_body(answer).await;
        match status.as_u16() {
            200..300 => Ok(PublishOutcome::Confirmed),
            300..400 => Err(format!("HTTP {status}; redirects are not followed")),
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
            // Values that are not valid in a header are left out; the body contains everything that matters.
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
        let call = Call {
            started: Instant::now(),
            outcomes: Mutex::new(vec![None; messages.len()]),
            outage: Mutex::default(),
        };
        stream::iter(by_subject(messages))
            .for_each_concurrent(CONCURRENCY, |indexes| self.post_subject(messages, indexes, &call))
            .await;
        PublishReport { outcomes: call.outcomes.into_inner(), outage: call.outage.into_inner() }
    }

    async fn close(&self) {}
}

/// Reads a short response body to its end, so that the connection can be reused.
async fn discard_body(mut answer: reqwest::Response) {
    let mut bytes = 0;
    while bytes < ANSWER_BYTES
        && let Ok(Some(part)) = answer.chunk().await
    {
        bytes += part.len();
    }
}

/// Returns the indexes of each subject's messages, in the order of their first message.
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
