//! Turns messages from a broker into jobs, or delivers them to tasks as events.
//!
//! A message is acknowledged after its effect is committed. A message that was in progress when something failed is
//! delivered again, recognised by its id, and has no second effect. A message that can never have an effect is
//! dead-lettered. While the job database is down, messages are kept here and not returned: a broker counts deliveries,
//! and some brokers discard a message after too many.

mod task_events;

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

pub use task_events::{TaskCounts, TaskEvents};

use crate::{
    Bus, Round,
    input::{Backlog, InputHealth, Outage, Submission, submit_once},
};

#[derive(Clone, Debug)]
pub struct InboxConfig {
    pub name: String,
    pub broker: InboxBroker,
    pub deliver: Deliver,
}

/// What the messages of an inbox become.
#[derive(Clone, Debug)]
pub enum Deliver {
    Jobs(JobTemplate),
    TaskEvents(TaskEvents),
}

/// The job that each message becomes.
#[derive(Clone, Debug)]
pub struct JobTemplate {
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
/// Longest delay while the job database or a machine is not available. Shorter, because messages wait here.
const MAX_STORE_BACKOFF: Duration = Duration::from_secs(5);
const BATCH: usize = 100;
const CONCURRENT_SUBMITS: usize = 8;
/// Longest message id that is stored. A longer id is replaced by its hash.
const MAX_ID: usize = 255;

pub struct Inbox {
    pub name: String,
    pub wakeup: Arc<Notify>,
    /// Jobs that this node stored.
    pub jobs: AtomicU64,
    /// Messages that this node delivered to tasks.
    pub task_counts: TaskCounts,
    /// Messages that this node received and that had been processed before.
    pub duplicates: AtomicU64,
    /// Messages that this node rejected.
    pub rejected: AtomicU64,
    /// Messages that wait for the job database or for a machine.
    pub waiting: AtomicU64,
    config: InboxConfig,
    parser: JobParser,
    stop: CancellationToken,
    health: InputHealth,
    state: Mutex<State>,
}

struct State {
    consumer: Box<dyn Consumer>,
    /// Messages that were received and are not processed yet.
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
            task_counts: TaskCounts::default(),
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
        let outcomes: Vec<DeliveryOutcome> = match &self.config.deliver {
            Deliver::Jobs(template) => {
                let outcomes = stream::iter(messages).map(|message| self.submit(store, bus, template, message, now));
                outcomes.buffer_unordered(CONCURRENT_SUBMITS).collect().await
            }
            Deliver::TaskEvents(rule) => self.deliver_events(store, rule, messages, now).await,
        };
        let mut stopped = None;
        for outcome in outcomes {
            match outcome {
                DeliveryOutcome::Done => {}
                DeliveryOutcome::NotAcknowledged(reason) => down = Some(reason),
                DeliveryOutcome::Deferred(message, cause) => {
                    state.waiting.push(*message);
                    stopped = Some(cause);
                }
            }
        }
        let handled = count - state.waiting.len();
        self.waiting.store(state.waiting.len() as u64, Ordering::Relaxed);
        let State { outage, waiting, .. } = &mut *state;
        let next_at = if let Some(Stopped { dependency, reason }) = stopped {
            Some(outage.record_failure(dependency, &reason, MAX_STORE_BACKOFF, now))
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
        let (duplicate, rejected) = (("duplicate", &self.duplicates), ("rejected", &self.rejected));
        match &self.config.deliver {
            Deliver::Jobs(_) => {
                self.health.view(InputKind::Inbox, &self.name, [("job", &self.jobs), duplicate, rejected])
            }
            Deliver::TaskEvents(_) => {
                let TaskCounts { created, applied, deferred, ignored, stale, own } = &self.task_counts;
                let processed = [
                    ("created", created),
                    ("applied", applied),
                    ("deferred", deferred),
                    ("ignored", ignored),
                    ("stale", stale),
                    ("own", own),
                    duplicate,
                    rejected,
                ];
                self.health.view(InputKind::Inbox, &self.name, processed)
            }
        }
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

    async fn submit(
        &self,
        store: &dyn Store,
        bus: &Bus,
        template: &JobTemplate,
        message: Delivery,
        now: Timestamp,
    ) -> DeliveryOutcome {
        let job = match self.read(template, &message) {
            Ok(job) => job,
            Err(reason) => return self.reject(message, &reason).await,
        };
        match submit_once(store, bus, &self.name, &message_id(&message), job, now).await {
            Submission::Stored => self.jobs.fetch_add(1, Ordering::Relaxed),
            Submission::Duplicate => self.duplicates.fetch_add(1, Ordering::Relaxed),
            Submission::Rejected(reason) => return self.reject(message, &reason).await,
            Submission::Deferred(error) => return DeliveryOutcome::Deferred(Box::new(message), Stopped::of(&error)),
        };
        self.acknowledge(message).await
    }

    async fn acknowledge(&self, message: Delivery) -> DeliveryOutcome {
        message
            .ack()
            .await
            .map_or_else(|error| DeliveryOutcome::NotAcknowledged(format!("{error:#}")), |()| DeliveryOutcome::Done)
    }

    async fn reject(&self, message: Delivery, reason: &str) -> DeliveryOutcome {
        let (id, subject) = (message.id.clone(), message.subject.clone());
        match message.reject(reason).await {
            Ok(()) => {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(inbox = self.config.name, id, subject, reason, "inbox message rejected");
                DeliveryOutcome::Done
            }
            Err(error) => DeliveryOutcome::NotAcknowledged(format!("{error:#}")),
        }
    }

    fn read(&self, template: &JobTemplate, message: &Delivery) -> Result<NewJob, String> {
        let text = std::str::from_utf8(&message.body).map_err(|_| "the message is not UTF-8".to_owned())?;
        let payload: &RawValue =
            serde_json::from_str(text).map_err(|error| format!("the message is not JSON: {error}"))?;
        if !payload.get().starts_with('{') {
            return Err("the message is not a JSON object".into());
        }
        let body = Body {
            r#type: &template.job_type,
            payload,
            queue: template.queue.as_deref(),
            priority: template.priority,
            correlation_id: message.correlation_id.as_deref().filter(|id| !id.is_empty()),
        };
        let body = serde_json::to_string(&body).map_err(|error| error.to_string())?;
        let mut job = self.parser.parse(body.as_bytes()).map_err(|error| error.to_string())?;
        job.options.traceparent =
            message.traceparent.as_deref().and_then(TraceContext::parse).map(|trace| trace.to_string());
        Ok(job)
    }
}

enum DeliveryOutcome {
    Done,
    /// The broker could not be reached; it delivers the message again.
    NotAcknowledged(String),
    /// The message is kept here until the job database, or a missing machine, is available.
    Deferred(Box<Delivery>, Stopped),
}

/// What messages wait for, and why.
#[derive(Clone)]
struct Stopped {
    dependency: &'static str,
    reason: String,
}

impl Stopped {
    fn of(error: &StoreError) -> Stopped {
        Stopped { dependency: "job database", reason: error.to_string() }
    }
}

/// Returns the id under which a message is stored: its own, or a hash of its body if it has none.
fn message_id(message: &Delivery) -> String {
    match &message.id {
        Some(id) => storable_id(id),
        None => hash(&message.body),
    }
}

/// Returns an id as it is stored: the hash of one that is too long or contains control characters.
fn storable_id(id: &str) -> String {
    if id.len() <= MAX_ID && !id.contains(char::is_control) { id.to_owned() } else { hash(id.as_bytes()) }
}

fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
