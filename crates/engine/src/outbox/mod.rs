//! Brings events to where they are wanted: one relay per sink.
//!
//! The store keeps what happened together with what it happened to (`store/*/outbox.rs`); a relay takes it in order, publishes it and writes
//! down what the sink said. Everything arrives at least once, under an id that tells repetitions from news.

mod relay;
mod source;
mod webhook_sink;

use std::{sync::Arc, time::Duration};

use faena_brokers::{
    Sink,
    file::{FileSink, FileSinkOptions},
    nats::{NatsSink, NatsSinkOptions},
    rabbitmq::{RabbitMqSink, RabbitMqSinkOptions},
    redis::{RedisSink, RedisSinkOptions},
};
use faena_domain::{AddressRule, NodeId, Timestamp};
use faena_store::{EventSubscription, OnRejected, Store, StoreError, SubscriptionMode};
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

pub use relay::{Relay, Spent};
pub use source::{DatabaseUrl, JOB_TYPE, Source, SourceConfig};
pub use webhook_sink::{WebhookSink, WebhookSinkOptions};

#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// How long events are kept, sent or not wanted by any sink; they can be published again for so long.
    pub keep: Duration,
    /// What the events say where they come from.
    pub source: String,
    pub sinks: Vec<SinkConfig>,
    /// The first rest after a failure, of a sink or of a message; each further one doubles it, up to a minute.
    pub first_rest: Duration,
    /// How long a part of the outbox stays a node's without a sign of life; longer where a sink's timeout needs it.
    pub lease: Duration,
    /// How many messages a relay takes at a time.
    pub batch: usize,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        OutboxConfig {
            keep: Duration::from_secs(3 * 24 * 3_600),
            source: "/faena".into(),
            sinks: Vec::new(),
            first_rest: Duration::from_secs(1),
            lease: Duration::from_secs(30),
            batch: 1_000,
        }
    }
}

/// The longest that a sink may take for one call: below half the lease, so that no round outlives it.
pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(14);

#[derive(Clone, Debug)]
pub struct SinkConfig {
    pub name: String,
    /// `job.*`, `schedule.missed`, `*`.
    pub types: Vec<String>,
    pub on_bad: OnRejected,
    pub target: Target,
}

/// Where events go. Shows no password.
#[derive(Clone, Debug)]
pub enum Target {
    RabbitMq(RabbitMqSinkOptions),
    Nats(NatsSinkOptions),
    Redis(RedisSinkOptions),
    Webhook(WebhookSinkOptions),
    File(FileSinkOptions),
}

impl Target {
    fn open(&self, rule: &AddressRule) -> Box<dyn Sink> {
        match self.clone() {
            Target::RabbitMq(options) => Box::new(RabbitMqSink::new(options)),
            Target::Nats(options) => Box::new(NatsSink::new(options)),
            Target::Redis(options) => Box::new(RedisSink::new(options)),
            Target::Webhook(options) => Box::new(WebhookSink::new(options, rule.clone())),
            Target::File(options) => Box::new(FileSink::new(options)),
        }
    }

    /// How long one call may take.
    pub fn timeout(&self) -> Duration {
        match self {
            Target::RabbitMq(options) => options.timeout,
            Target::Nats(options) => options.timeout,
            Target::Redis(options) => options.timeout,
            Target::Webhook(options) => options.timeout,
            Target::File(options) => options.timeout,
        }
    }
}

/// A wish is forgotten after this time, unless it is repeated, which happens much more often.
const WISH_MS: i64 = 3 * 24 * 3_600_000;
/// A server that stops gives sinks this time to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);

impl SinkConfig {
    fn want(&self, now: Timestamp) -> EventSubscription {
        EventSubscription {
            name: self.name.clone(),
            types: self.types.clone(),
            mode: SubscriptionMode::Queue(self.on_bad),
            until: now.plus_ms(WISH_MS),
        }
    }
}

/// The relays of this node.
pub struct Outbox {
    pub relays: Vec<Arc<Relay>>,
}

impl Outbox {
    pub fn new(config: &OutboxConfig, rule: &AddressRule, stop: &CancellationToken) -> Outbox {
        let relay = |sink: &SinkConfig| Arc::new(Relay::new(config, sink, sink.target.open(rule), stop.clone()));
        Outbox { relays: config.sinks.iter().map(relay).collect() }
    }

    /// Something has happened.
    pub fn nudge(&self) {
        for relay in &self.relays {
            // Each has a bell of its own: one rung for all would wake one of them.
            relay.nudge.notify_one();
        }
    }

    /// Makes known what all sinks want, before anything happens that they would miss.
    pub async fn want(&self, store: &dyn Store, now: Timestamp) -> Result<(), StoreError> {
        if self.relays.is_empty() {
            return Ok(());
        }
        store.event_subscribe(self.relays.iter().map(|relay| relay.config.want(now)).collect(), now).await?;
        for relay in &self.relays {
            relay.wished(now);
        }
        Ok(())
    }

    /// Gives everything back that this node has taken, and closes the sinks. After the last round.
    pub async fn leave(&self, store: &dyn Store, node: NodeId) {
        if self.relays.is_empty() {
            return;
        }
        let goodbyes = join_all(self.relays.iter().map(|relay| relay.close()));
        let (left, _) = tokio::join!(
            tokio::time::timeout(GOODBYE, store.outbox_leave(node)),
            tokio::time::timeout(GOODBYE, goodbyes)
        );
        if !matches!(left, Ok(Ok(()))) {
            tracing::warn!(
                "this node's parts of the outbox could not be given back; other nodes take them when its lease is over"
            );
        }
    }
}
