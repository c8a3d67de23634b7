//! Makes jobs of the messages of a broker.
//!
//! A message is acknowledged after the commit that holds its job, so one that was on its way when something broke comes again; it is known again by its id and
//! makes no second job. What can never become a job is rejected, to the dead letters of its queue. While the database of jobs is away messages are kept in hand
//! and not given back: a broker counts how often it hands out a message, and some give up on it.

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
use faena_domain::{NewJob, Priority, Timestamp, parse::JobParser};
use faena_store::{Store, StoreError};
use futures_util::{FutureExt, StreamExt, stream};
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, Round,
    arrivals::{Arrival, Trouble, arrive},
};

#[derive(Clone, Debug)]
pub struct InboxConfig {
    pub name: String,
    pub broker: InboxBroker,
    pub job_type: String,
    pub queue: Option<String>,
    pub priority: Option<Priority>,
}

/// Where messages come from. Shows no password.
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

/// How long a round waits for a message. Longer than connecting takes.
const WAIT: Duration = Duration::from_secs(15);
const LONGEST_REST: Duration = Duration::from_secs(60);
/// The database of jobs is looked at more often: messages are in hand.
const LONGEST_REST_STORE: Duration = Duration::from_secs(5);
const BATCH: usize = 100;
const SUBMITS_AT_ONCE: usize = 8;
/// A longer message id is known by its hash.
const LONGEST_ID: usize = 255;

pub struct Inbox {
    pub name: String,
    pub nudge: Arc<Notify>,
    /// Through this node: jobs that were stored, messages that had come before, messages that were rejected.
    pub jobs: AtomicU64,
    pub known: AtomicU64,
    pub rejected: AtomicU64,
    /// Messages that wait for the database of jobs.
    pub in_hand: AtomicU64,
    config: InboxConfig,
    parser: JobParser,
    stop: CancellationToken,
    state: Mutex<State>,
}

struct State {
    consumer: Box<dyn Consumer>,
    /// Messages that the database of jobs could not take yet.
    in_hand: Vec<Delivery>,
    trouble: Trouble,
}

/// What a message says that becomes a job: the body of `POST /api/v1/jobs`.
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
            nudge: Arc::new(Notify::new()),
            jobs: AtomicU64::new(0),
            known: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            in_hand: AtomicU64::new(0),
            parser,
            stop,
            state: Mutex::new(State {
                consumer: config.broker.open(),
                in_hand: Vec::new(),
                trouble: Trouble::default(),
            }),
            config: config.clone(),
        }
    }

    pub async fn run_once(&self, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(until) = state.trouble.rests_until(now) {
            return Ok(Round { next_at: Some(until), ..Round::default() });
        }
        let mut down = None;
        if state.in_hand.is_empty() {
            match self.gather(&mut state).await {
                Ok(messages) => state.in_hand = messages,
                Err(reason) => down = Some(reason),
            }
        }
        // The wait may have been long.
        let now = now.max(Timestamp::now());
        let messages = std::mem::take(&mut state.in_hand);
        let count = messages.len();
        let dealt: Vec<Outcome> = stream::iter(messages)
            .map(|message| self.deal_with(store, bus, message, now))
            .buffer_unordered(SUBMITS_AT_ONCE)
            .collect()
            .await;
        let mut store_error = None;
        for outcome in dealt {
            match outcome {
                Outcome::Done => {}
                Outcome::Unanswered(reason) => down = Some(reason),
                Outcome::Later(message, error) => {
                    state.in_hand.push(*message);
                    store_error = Some(error);
                }
            }
        }
        let handled = count - state.in_hand.len();
        self.in_hand.store(state.in_hand.len() as u64, Ordering::Relaxed);
        let next_at = if let Some(error) = store_error {
            let reason = error.to_string();
            Some(state.trouble.came(&self.name, "the database of jobs", &reason, LONGEST_REST_STORE, now))
        } else if let Some(reason) = down {
            Some(state.trouble.came(&self.name, "the broker of an inbox", &reason, LONGEST_REST, now))
        } else {
            state.trouble.is_over(&self.name);
            None
        };
        Ok(Round { handled, more: next_at.is_none(), next_at })
    }

    /// Ends the connection; what is in hand comes again.
    pub async fn close(&self) {
        let mut state = self.state.lock().await;
        state.in_hand.clear();
        state.consumer.close().await;
    }

    /// Waits for a message, and takes those along that are there already.
    async fn gather(&self, state: &mut State) -> Result<Vec<Delivery>, String> {
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
                // Those that came are dealt with; the next round meets the error again, or a new connection.
                Some(Err(_)) | None => break,
            }
        }
        Ok(messages)
    }

    async fn deal_with(&self, store: &dyn Store, bus: &Bus, message: Delivery, now: Timestamp) -> Outcome {
        let job = match self.read(&message) {
            Ok(job) => job,
            Err(reason) => return self.reject(message, &reason).await,
        };
        match arrive(store, bus, &self.name, &known_as(&message), job, now).await {
            Arrival::Stored => self.jobs.fetch_add(1, Ordering::Relaxed),
            Arrival::Known => self.known.fetch_add(1, Ordering::Relaxed),
            Arrival::Refused(reason) => return self.reject(message, &reason).await,
            Arrival::Later(error) => return Outcome::Later(Box::new(message), error),
        };
        message.ack().await.map_or_else(|error| Outcome::Unanswered(format!("{error:#}")), |()| Outcome::Done)
    }

    async fn reject(&self, message: Delivery, reason: &str) -> Outcome {
        let (id, subject) = (message.id.clone(), message.subject.clone());
        match message.reject(reason).await {
            Ok(()) => {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(name = self.name, id, subject, reason, "a message cannot become a job and was rejected");
                Outcome::Done
            }
            Err(error) => Outcome::Unanswered(format!("{error:#}")),
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
        job.options.traceparent = message.traceparent.clone().filter(|trace| trace.len() <= 100);
        Ok(job)
    }
}

enum Outcome {
    Done,
    /// The broker could not be told; the message comes again.
    Unanswered(String),
    Later(Box<Delivery>, StoreError),
}

/// Its id, or what it says if its sender gave it none.
fn known_as(message: &Delivery) -> String {
    match &message.id {
        Some(id) if id.len() <= LONGEST_ID => id.clone(),
        Some(id) => hash(id.as_bytes()),
        None => hash(&message.body),
    }
}

fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
