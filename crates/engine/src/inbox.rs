//! Turns messages of a broker into jobs.
//!
//! A message is acknowledged after the commit of its job. A message that was in progress when something failed is delivered
//! again, recognised by its id, and creates no second job. A message that can never become a job is rejected, to the dead
//! letters of its queue. While the job database is down, messages are kept here and not returned: a broker counts deliveries,
//! and some discard a message after too many.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use faena_brokers::{
    Consumer, Delivery,
    nats::{NatsConsumer, NatsConsumerOptions},
    rabbitmq::{RabbitMqConsumer, RabbitMqConsumerOptions},
};
use faena_domain::{NewJob, Priority, Timestamp, TraceContext, parse::JobParser};
use faena_store::{InputKind, InputView, Store, StoreError};
use futures_util::{FutureExt, StreamExt, stream};
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, Round,
    input::{Backlog, InputHealth, Outage, Submission, submit_once},
};

#[derive(Clone, Debug)]
pub struct InboxConfig {
    pub name: String,
    pub broker: InboxBroker,
    pub job_type: String,
    pub queue: Option<String>,
    pub priority: Option<Priority>,
}

/// Where messages come from. Its debug output contains no password.
#[derive(Clone, Debug)]
pub enum InboxBroker {
    RabbitMq(RabbitMqConsumerOptions),
    Nats(NatsConsumerOptions),
}

impl InboxBroker {
    fn open(&self) -> Box<dyn Consumer> {
        match self.clone() {
            InboxBroker::RabbitMq(options) => Box::new(RabbitMqConsumer::new(options)),
            InboxBroker::Nats(options) => Box::new(NatsConsumer::new(options)),
        }
    }
}

/// How long a round waits for a message. Longer than it takes to connect.
const WAIT: Duration = Duration::from_secs(15);
/// Longest delay while the broker is down.
const MAX_BROKER_BACKOFF: Duration = Duration::from_secs(60);
/// Longest delay while the job database is down. Shorter, because messages wait here.
const MAX_STORE_BACKOFF: Duration = Duration::from_secs(5);
const BATCH: usize = 100;
const CONCURRENT_SUBMITS: usize = 8;
/// Longest message id that is stored. Of a longer id the hash is stored.
const MAX_ID: usize = 255;

pub struct Inbox {
    pub name: String,
    pub wakeup: Arc<Notify>,
    /// Jobs that this node stored.
    pub jobs: AtomicU64,
    /// Messages of this node that had been processed before.
    pub duplicates: AtomicU64,
    /// Messages that this node rejected.
    pub rejected: AtomicU64,
    /// Messages that wait for the job database.
    pub waiting: AtomicU64,
    config: InboxConfig,
    parser: JobParser,
    stop: CancellationToken,
    health: InputHealth,
    state: Mutex<State>,
}

struct State {
    consumer: Box<dyn Consumer>,
    /// Messages that the job database has not accepted yet.
    waiting: Vec<Delivery>,
    outage: Outage,
}

/// Body of `POST /api/v1/jobs` for the job of a message.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    r#type: &'a str,
    payload: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<Priority>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<&'a str>,
}

impl Inbox {
    pub fn new(config: &InboxConfig, parser: JobParser, stop: CancellationToken) -> Inbox {
        Inbox {
            name: format!("inbox:{}", config.name),
            wakeup: Arc::new(Notify::new()),
            jobs: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            parser,
            stop,
            health: InputHealth::default(),
            state: Mutex::new(State {
                consumer: config.broker.open(),
                waiting: Vec::new(),
                outage: Outage::new(InputKind::Inbox, &config.name),
            }),
            config: config.clone(),
        }
    }

    pub async fn run_once(&self, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(at) = state.outage.retry_at(now) {
            return Ok(Round::idle_until(Some(at)));
        }
        let mut down = None;
        if state.waiting.is_empty() {
            match self.receive(&mut state).await {
                Ok(messages) => state.waiting = messages,
                Err(reason) => down = Some(reason),
            }
        }
        // The wait may have been long.
        let now = now.max(Timestamp::now());
        let messages = std::mem::take(&mut state.waiting);
        let count = messages.len();
        let outcomes: Vec<Outcome> = stream::iter(messages)
            .map(|message| self.process(store, bus, message, now))
            .buffer_unordered(CONCURRENT_SUBMITS)
            .collect()
            .await;
        let mut store_error = None;
        for outcome in outcomes {
            match outcome {
                Outcome::Done => {}
                Outcome::NotAcknowledged(reason) => down = Some(reason),
                Outcome::Deferred(message, error) => {
                    state.waiting.push(*message);
                    store_error = Some(error);
                }
            }
        }
        let handled = count - state.waiting.len();
        self.waiting.store(state.waiting.len() as u64, Ordering::Relaxed);
        let State { outage, waiting, .. } = &mut *state;
        let next_at = if let Some(error) = store_error {
            Some(outage.record_failure("job database", &error.to_string(), MAX_STORE_BACKOFF, now))
        } else if let Some(reason) = down {
            Some(outage.record_failure("broker", &reason, MAX_BROKER_BACKOFF, now))
        } else {
            outage.clear();
            None
        };
        let oldest_at = outage.status().map(|(since, _)| since).filter(|_| !waiting.is_empty());
        self.health.set_backlog(Some(Backlog { pending: waiting.len() as u64, oldest_at }));
        self.health.set_outage(outage);
        Ok(Round { handled, more: next_at.is_none(), next_at })
    }

    /// Returns the state of this inbox. Only messages that this node has received and not stored yet count as pending: the
    /// broker does not say how many wait behind them.
    pub fn view(&self) -> InputView {
        let processed = [("job", &self.jobs), ("duplicate", &self.duplicates), ("rejected", &self.rejected)];
        self.health.view(InputKind::Inbox, &self.name, processed)
    }

    /// Closes the connection. The broker delivers the waiting messages again.
    pub async fn close(&self) {
        let mut state = self.state.lock().await;
        state.waiting.clear();
        state.consumer.close().await;
    }

    /// Waits for a message and also returns those that have arrived already.
    async fn receive(&self, state: &mut State) -> Result<Vec<Delivery>, String> {
        let first = tokio::select! {
            () = self.stop.cancelled() => return Ok(Vec::new()),
            first = tokio::time::timeout(WAIT, state.consumer.next()) => first,
        };
        let mut messages = match first {
            Ok(Ok(message)) => vec![message],
            Ok(Err(error)) => return Err(format!("{error:#}")),
            Err(_) => return Ok(Vec::new()),
        };
        while messages.len() < BATCH {
            match state.consumer.next().now_or_never() {
                Some(Ok(message)) => messages.push(message),
                // The messages so far are processed; the next round gets the error again, or a new connection.
                Some(Err(_)) | None => break,
            }
        }
        Ok(messages)
    }

    async fn process(&self, store: &dyn Store, bus: &Bus, message: Delivery, now: Timestamp) -> Outcome {
        let job = match self.read(&message) {
            Ok(job) => job,
            Err(reason) => return self.reject(message, &reason).await,
        };
        match submit_once(store, bus, &self.name, &message_id(&message), job, now).await {
            Submission::Stored => self.jobs.fetch_add(1, Ordering::Relaxed),
            Submission::Duplicate => self.duplicates.fetch_add(1, Ordering::Relaxed),
            Submission::Rejected(reason) => return self.reject(message, &reason).await,
            Submission::Deferred(error) => return Outcome::Deferred(Box::new(message), error),
        };
        message.ack().await.map_or_else(|error| Outcome::NotAcknowledged(format!("{error:#}")), |()| Outcome::Done)
    }

    async fn reject(&self, message: Delivery, reason: &str) -> Outcome {
        let (id, subject) = (message.id.clone(), message.subject.clone());
        match message.reject(reason).await {
            Ok(()) => {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(inbox = self.config.name, id, subject, reason, "inbox message rejected");
                Outcome::Done
            }
            Err(error) => Outcome::NotAcknowledged(format!("{error:#}")),
        }
    }

    fn read(&self, message: &Delivery) -> Result<NewJob, String> {
        let text = std::str::from_utf8(&message.body).map_err(|_| "the message is not UTF-8".to_owned())?;
        let payload: &RawValue =
            serde_json::from_str(text).map_err(|error| format!("the message is not JSON: {error}"))?;
        if !payload.get().starts_with('{') {
            return Err("the message is not a JSON object".into());
        }
        let body = Body {
            r#type: &self.config.job_type,
            payload,
            queue: self.config.queue.as_deref(),
            priority: self.config.priority,
            correlation_id: message.correlation_id.as_deref().filter(|id| !id.is_empty()),
        };
        let body = serde_json::to_string(&body).map_err(|error| error.to_string())?;
        let mut job = self.parser.parse(body.as_bytes()).map_err(|error| error.to_string())?;
        job.options.traceparent =
            message.traceparent.as_deref().and_then(TraceContext::parse).map(|trace| trace.to_string());
        Ok(job)
    }
}

enum Outcome {
    Done,
    /// The broker could not be reached; it delivers the message again.
    NotAcknowledged(String),
    /// The job database did not accept it yet.
    Deferred(Box<Delivery>, StoreError),
}

/// Returns the id under which a message is stored: its own, or a hash of its body if it has none.
fn message_id(message: &Delivery) -> String {
    match &message.id {
        Some(id) if id.len() <= MAX_ID => id.clone(),
        Some(id) => hash(id.as_bytes()),
        None => hash(&message.body),
    }
}

fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
