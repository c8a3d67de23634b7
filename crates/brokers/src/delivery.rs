//! Messages received from a broker, and their acknowledgement.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{BrokerError, BrokerUrl, nats, rabbitmq};

/// One received message. The broker redelivers it until it is acknowledged or rejected.
#[derive(Debug)]
pub struct Delivery {
    /// The sender's message id, the same in every redelivery.
    ///
    /// NATS: the position in the stream if the sender set no id.
    pub id: Option<String>,
    /// The type that the sender set, else the routing key or subject.
    pub kind: String,
    /// Whether the sender set the type.
    pub has_kind: bool,
    /// The routing key or subject under which the message was published.
    pub subject: String,
    pub correlation_id: Option<String>,
    pub traceparent: Option<String>,
    pub content_type: Option<String>,
    pub body: Bytes,
    /// Whether the broker has delivered the message before, to this consumer or to another.
    pub redelivered: bool,
    pub(crate) ack_handle: AckHandle,
}

#[derive(Debug)]
pub(crate) enum AckHandle {
    RabbitMq(rabbitmq::AckHandle),
    Nats(Box<nats::AckHandle>),
}

impl Delivery {
    /// Marks the message as processed, so that the broker does not redeliver it.
    ///
    /// RabbitMQ does not confirm acknowledgements: if the connection breaks now, the message is redelivered. The caller
    /// must detect redelivered messages by their id.
    pub async fn ack(self) -> Result<(), BrokerError> {
        match self.ack_handle {
            AckHandle::RabbitMq(handle) => handle.ack().await,
            AckHandle::Nats(handle) => handle.ack().await,
        }
    }

    /// Moves a message that can never be processed to the dead letters of its queue or consumer, with the header `x-reason`.
    ///
    /// If the connection breaks meanwhile, the message is redelivered and may become a dead letter twice.
    pub async fn reject(self, reason: &str) -> Result<(), BrokerError> {
        match self.ack_handle {
            AckHandle::RabbitMq(handle) => handle.reject(reason).await,
            AckHandle::Nats(handle) => handle.reject(reason).await,
        }
    }

    /// Returns a message that cannot be processed now to the broker, which redelivers it soon.
    pub async fn requeue(self) -> Result<(), BrokerError> {
        match self.ack_handle {
            AckHandle::RabbitMq(handle) => handle.requeue().await,
            AckHandle::Nats(handle) => handle.requeue().await,
        }
    }
}

/// A receiver of messages.
#[async_trait]
pub trait Consumer: Send {
    /// Waits for the next message without a time limit; connects first if there is no connection.
    ///
    /// Dropping the future loses no message. After an error the broker redelivers every message that was delivered and
    /// not acknowledged, and the caller waits before it calls again.
    async fn next(&mut self) -> Result<Delivery, BrokerError>;

    /// Closes the connection to the broker. A later `next` connects again.
    async fn close(&mut self);
}

/// Returns the current subscription; subscribes first if there is none.
pub(crate) async fn ensure_subscribed<'a, S>(
    current: &'a mut Option<S>,
    url: &BrokerUrl,
    timeout: Duration,
    subscribe: impl Future<Output = Result<S, BrokerError>>,
) -> Result<&'a mut S, BrokerError> {
    let subscription = match current.take() {
        Some(subscription) => subscription,
        None => tokio::time::timeout(timeout, subscribe)
            .await
            .unwrap_or_else(|_| Err(BrokerError::unanswered(url, timeout)))?,
    };
    Ok(current.insert(subscription))
}
