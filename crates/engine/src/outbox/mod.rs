//! Publishes events to sinks: one relay per sink.
//!
//! The store keeps each event in the transaction of its change (`store/*/outbox.rs`). A relay takes events in order, publishes
//! them and stores the sink's answer. Every event arrives at least once, and its id identifies repetitions.

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

use crate::Engine;

pub use relay::{Relay, TimeSpent};
pub use source::{DatabaseUrl, JOB_TYPE, Source, SourceConfig};
pub use webhook_sink::{WebhookSink, WebhookSinkOptions};

#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// How long events are kept after they occurred; those that wait for a sink are kept longer. Until then they can be
    /// republished.
    pub keep: Duration,
    /// The `source` attribute of events.
    pub source: String,
    pub sinks: Vec<SinkConfig>,
    /// Delay after the first failure of a sink or a message. It doubles with each failure, up to a minute.
    pub first_backoff: Duration,
    /// How long a node keeps a partition of the outbox without renewing its lease. Longer if a sink's timeout needs it.
    pub lease: Duration,
    /// Messages that a relay takes at a time.
    pub batch: usize,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        OutboxConfig {
            keep: Duration::from_secs(3 * 24 * 3_600),
            source: "/faena".into(),
            sinks: Vec::new(),
            first_backoff: Duration::from_secs(1),
            lease: Duration::from_secs(30),
            batch: 1_000,
        }
    }
}

/// Longest timeout of a sink: below half the lease, so that no round outlives it.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(14);

#[derive(Clone, Debug)]
pub struct SinkConfig {
    pub name: String,
    /// Patterns of the types of events to publish, such as `job.*`, `tarea.crear` or `*`.
    pub types: Vec<String>,
    pub on_rejected: OnRejected,
    pub body: SinkBody,
    pub target: Target,
}

/// What a message to a sink contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SinkBody {
    /// The event as a CloudEvent.
    #[default]
    CloudEvent,
    /// Only the data of the event. The type is in the headers.
    Data,
}

/// Where events go. Its debug output contains no password.
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

    /// Returns how long one call may take.
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

/// How long a subscription is kept without renewal. Relays renew it much more often.
const SUBSCRIPTION_MS: i64 = 3 * 24 * 3_600_000;
/// How long a sink has to close on shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

impl SinkConfig {
    fn subscription(&self, now: Timestamp) -> EventSubscription {
        EventSubscription {
            name: self.name.clone(),
            types: self.types.clone(),
            mode: SubscriptionMode::Queue(self.on_rejected),
            until: now.plus_ms(SUBSCRIPTION_MS),
        }
    }
}

impl Engine {
    /// Returns the sinks that this node publishes to. For each that is down, as far as this node knows, also since when
    /// and why.
    pub fn sink_outages(&self) -> Vec<(String, Option<(Timestamp, String)>)> {
        let relays = self.events.outbox.relays.iter().filter(|_| self.config.roles.engine);
        relays.map(|relay| (relay.name().to_owned(), relay.outage())).collect()
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

    /// Wakes all relays: events were committed.
    pub fn wake_relays(&self) {
        for relay in &self.relays {
            // Each has a wake-up of its own: a shared one would wake only one of them.
            relay.wakeup.notify_one();
        }
    }

    /// Stores the subscriptions of all sinks, so that events are kept for them from now on.
    pub async fn subscribe(&self, store: &dyn Store, now: Timestamp) -> Result<(), StoreError> {
        if self.relays.is_empty() {
            return Ok(());
        }
        store.event_subscribe(self.relays.iter().map(|relay| relay.config.subscription(now)).collect(), now).await?;
        for relay in &self.relays {
            relay.record_renewal(now);
        }
        Ok(())
    }

    /// Releases this node's partitions of every sink and closes the sinks. Called on shutdown, after the last round.
    pub async fn leave(&self, store: &dyn Store, node: NodeId) {
        if self.relays.is_empty() {
            return;
        }
        let closed = join_all(self.relays.iter().map(|relay| relay.close()));
        let (left, _) = tokio::join!(
            tokio::time::timeout(CLOSE_TIMEOUT, store.outbox_leave(node)),
            tokio::time::timeout(CLOSE_TIMEOUT, closed)
        );
        if !matches!(left, Ok(Ok(()))) {
            tracing::warn!("outbox partitions not released, their leases will expire");
        }
    }
}
