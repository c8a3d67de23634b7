//! Messages to publish, and the report about them.

use std::borrow::Cow;

use async_trait::async_trait;
use bytes::Bytes;
use faena_domain::Timestamp;

use crate::BrokerError;

/// One message to publish.
#[derive(Clone, Debug)]
pub struct Message {
    /// Stays the same when the message is republished, so that receivers can drop duplicates.
    pub id: String,
    /// The type: `job.completed`, or a type name like `TicketFlow.Domain.Events.TicketStatusChangedEvent`.
    pub kind: String,
    /// Replaces the routing key that is derived from the type.
    pub routing_key: Option<String>,
    /// The aggregate that the message is about. Order matters among messages with the same key.
    pub key: String,
    pub sequence: i64,
    pub at: Timestamp,
    pub correlation_id: Option<String>,
    pub traceparent: Option<String>,
    pub content_type: Cow<'static, str>,
    pub body: Bytes,
}

/// Outcome of publishing one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The broker confirmed that it has the message.
    Confirmed,
    /// The message was rejected, with the reason: for example no routing key, no bound queue, too large, or a negative
    /// acknowledgement.
    Rejected(String),
}

/// Result of one call to [`Sink::publish`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishReport {
    /// One entry per message; `None` if the outcome is unknown: not sent, or sent and not confirmed.
    pub outcomes: Vec<Option<PublishOutcome>>,
    /// Why the broker is unavailable. If `None`, the caller may immediately republish messages whose outcome is unknown.
    pub outage: Option<BrokerError>,
}

impl PublishReport {
    /// Counts the confirmed messages.
    pub fn confirmed(&self) -> usize {
        self.outcomes.iter().filter(|outcome| **outcome == Some(PublishOutcome::Confirmed)).count()
    }
}

/// Whether a sink or consumer may create what is missing on the broker: an exchange, a queue, a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Declare {
    #[default]
    IfMissing,
    Never,
}

/// A destination for messages.
#[async_trait]
pub trait Sink: Send + Sync {
    /// Publishes the messages in the order given and waits for all confirmations, for at most the sink's timeout.
    ///
    /// Messages are sent without waiting for each confirmation, and a rejected message does not stop later ones. A caller that
    /// needs a rejection to stop later messages with the same key must publish one message per key at a time.
    async fn publish(&self, messages: &[Message]) -> PublishReport;

    /// Closes the connection to the broker. A later `publish` connects again.
    async fn close(&self);
}
