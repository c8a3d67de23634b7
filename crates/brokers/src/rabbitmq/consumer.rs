//! Consumes a RabbitMQ queue, with a limit on unacknowledged messages.
//!
//! A queue that this consumer declares gets a dead-letter queue, `<queue>.dead`. AMQP has no field for the reason of a
//! rejection, so the consumer itself publishes a rejected message there, with the header `x-reason`, and acknowledges it
//! once the broker has confirmed that. With `Declare::Never` the queue is used unchanged and its owner decides where
//! rejected messages go; without a dead-letter exchange the broker drops them.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use lapin::{
    Acker, BasicProperties, Channel, Confirmation,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};

use super::{
    ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, REPLY_SUCCESS, caused_by, connect, connection::GuardedConnection,
    ensure_exchange, library_error, protocol_error,
};
use crate::{BrokerError, BrokerUrl, Consumer, DEFAULT_TIMEOUT, Declare, Delivery, delivery};

/// Settings of a [`RabbitMqConsumer`].
#[derive(Clone, Debug)]
pub struct RabbitMqConsumerOptions {
    pub url: BrokerUrl,
    /// Shown in the broker's list of connections.
    pub name: String,
    pub queue: String,
    pub bindings: Vec<Binding>,
    /// Limit for messages delivered and not yet acknowledged.
    pub prefetch: u16,
    pub declare: Declare,
    /// Time limit for connecting, and for acknowledging one message.
    pub timeout: Duration,
}

/// Routes messages of an exchange to the queue.
#[derive(Clone, Debug)]
pub struct Binding {
    pub exchange: String,
    /// Pattern of the routing keys to accept, such as `ticket.#`.
    pub pattern: String,
}

impl RabbitMqConsumerOptions {
    pub fn new(url: BrokerUrl, queue: impl Into<String>) -> Self {
        RabbitMqConsumerOptions {
            url,
            name: "faena".into(),
            queue: queue.into(),
            bindings: Vec::new(),
            prefetch: 100,
            declare: Declare::IfMissing,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

/// Consumes one queue. After an error, the next call connects again.
pub struct RabbitMqConsumer {
    options: RabbitMqConsumerOptions,
    subscription: Option<Subscription>,
}

/// A connection with a running consumer.
struct Subscription {
    connection: GuardedConnection,
    /// Dropping the channel would close it.
    channel: Channel,
    deliveries: lapin::Consumer,
}

/// Acknowledges, rejects or requeues one delivered message.
#[derive(Debug)]
pub(crate) struct AckHandle {
    acker: Acker,
    timeout: Duration,
    /// What a rejection publishes. `None`: the owner of the queue decides where rejected messages go.
    dead_letter: Option<Box<DeadLetter>>,
}

/// A copy of a message for the dead-letter queue.
#[derive(Debug)]
struct DeadLetter {
    channel: Channel,
    queue: String,
    routing_key: String,
    properties: BasicProperties,
    body: Bytes,
}

impl RabbitMqConsumer {
    pub fn new(options: RabbitMqConsumerOptions) -> Self {
        RabbitMqConsumer { options, subscription: None }
    }

    async fn receive(&mut self) -> Result<Delivery, BrokerError> {
        let RabbitMqConsumerOptions { url, queue, timeout, .. } = &self.options;
        let subscribe = self.options.subscribe();
        let subscription = delivery::ensure_subscribed(&mut self.subscription, url, *timeout, subscribe).await?;
        let received = subscription.deliveries.next().await;
        let channel = subscription.channel.clone();
        match received {
            Some(Ok(received)) => Ok(to_delivery(received, channel, &self.options)),
            Some(Err(error)) => Err(caused_by(format!("lost the connection to {url}"), &error)),
            None => {
                Err(BrokerError::new(format!("{url} cancelled the consumer; check that queue {queue:?} still exists")))
            }
        }
    }
}

impl RabbitMqConsumerOptions {
    async fn subscribe(&self) -> Result<Subscription, BrokerError> {
        let queue = &self.queue;
        let cannot_consume = |error| caused_by(format!("cannot consume from queue {queue:?}"), &error);
        let connection = connect(&self.url, &self.name).await?;
        let channel = connection.inner.create_channel().await.map_err(cannot_consume)?;
        self.ensure_queue(&channel).await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(cannot_consume)?;
        let prefetch = self.prefetch.max(1);
        channel.basic_qos(prefetch, BasicQosOptions::default()).await.map_err(cannot_consume)?;
        let (name, tag) = (queue.as_str().into(), "".into());
        let deliveries = channel.basic_consume(name, tag, BasicConsumeOptions::default(), FieldTable::default()).await;
        Ok(Subscription { connection, channel, deliveries: deliveries.map_err(cannot_consume)? })
    }

    /// Creates the queue, its dead-letter queue and its bindings. `Declare::Never`: only checks that the queue exists.
    async fn ensure_queue(&self, channel: &Channel) -> Result<(), BrokerError> {
        let (queue, dead_letter_queue) = (&self.queue, format!("{}.dead", self.queue));
        if self.declare == Declare::Never {
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            return declare_queue(channel, queue, passive, FieldTable::default()).await;
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        declare_queue(channel, &dead_letter_queue, durable, FieldTable::default()).await?;
        let mut arguments = FieldTable::default();
        // The default exchange routes by queue name.
        arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
        arguments.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString(dead_letter_queue.into()));
        declare_queue(channel, queue, durable, arguments).await?;
        for binding in &self.bindings {
            ensure_exchange(channel, &binding.exchange, self.declare).await?;
            bind_queue(channel, queue, binding).await?;
        }
        Ok(())
    }
}

async fn declare_queue(
    channel: &Channel,
    queue: &str,
    options: QueueDeclareOptions,
    arguments: FieldTable,
) -> Result<(), BrokerError> {
    let declared = channel.queue_declare(queue.into(), options, arguments).await;
    declared.map(|_| ()).map_err(|error| {
        let advice = match protocol_error(&error) {
            Some((NOT_FOUND, _)) => "does not exist; create it, or set declare = true",
            Some((PRECONDITION_FAILED, _)) => {
                "exists with other properties; delete it, use another name, or set declare = false to use it unchanged"
            }
            Some((ACCESS_REFUSED, _)) => {
                "cannot be declared; grant the user permission to configure it, or create it and set declare = false"
            }
            _ => "cannot be declared",
        };
        caused_by(format!("queue {queue:?} {advice}"), &error)
    })
}

async fn bind_queue(channel: &Channel, queue: &str, binding: &Binding) -> Result<(), BrokerError> {
    let Binding { exchange, pattern } = binding;
    let (name, source, key) = (queue.into(), exchange.as_str().into(), pattern.as_str().into());
    let bound = channel.queue_bind(name, source, key, QueueBindOptions::default(), FieldTable::default()).await;
    bound.map_err(|error| {
        caused_by(format!("cannot bind queue {queue:?} to exchange {exchange:?} with pattern {pattern:?}"), &error)
    })
}

#[async_trait]
impl Consumer for RabbitMqConsumer {
    async fn next(&mut self) -> Result<Delivery, BrokerError> {
        let received = self.receive().await;
        received.map_err(|error| {
            self.subscription = None;
            error.redact(&self.options.url)
        })
    }

    async fn close(&mut self) {
        if let Some(subscription) = self.subscription.take() {
            let closing = subscription.connection.inner.close(REPLY_SUCCESS, "closed".into());
            // The connection may be broken already; then there is nothing to close.
            let _ = tokio::time::timeout(self.options.timeout, closing).await;
        }
    }
}

fn to_delivery(received: lapin::message::Delivery, channel: Channel, options: &RabbitMqConsumerOptions) -> Delivery {
    let properties = &received.properties;
    let header = |name: &str| {
        let value = properties.headers().as_ref().and_then(|headers| headers.inner().get(name))?;
        match value {
            AMQPValue::LongString(text) => Some(text.to_string()),
            AMQPValue::ShortString(text) => Some(text.to_string()),
            _ => None,
        }
    };
    let subject = received.routing_key.to_string();
    let kind = header("Type").or_else(|| properties.kind().as_ref().map(ToString::to_string));
    let body = Bytes::from(received.data);
    let dead_letter = (options.declare == Declare::IfMissing).then(|| DeadLetter {
        channel,
        queue: format!("{}.dead", options.queue),
        routing_key: subject.clone(),
        properties: properties.clone(),
        body: body.clone(),
    });
    let ack_handle =
        AckHandle { acker: received.acker, timeout: options.timeout, dead_letter: dead_letter.map(Box::new) };
    Delivery {
        id: properties.message_id().as_ref().map(ToString::to_string).filter(|id| !id.is_empty()),
        has_kind: kind.is_some(),
        kind: kind.unwrap_or_else(|| subject.clone()),
        subject,
        correlation_id: header("CorrelationId")
            .or_else(|| properties.correlation_id().as_ref().map(ToString::to_string)),
        traceparent: header("traceparent"),
        content_type: properties.content_type().as_ref().map(ToString::to_string),
        redelivered: received.redelivered,
        body,
        ack_handle: delivery::AckHandle::RabbitMq(ack_handle),
    }
}

impl AckHandle {
    pub(crate) async fn ack(self) -> Result<(), BrokerError> {
        self.with_timeout(self.acker.ack(BasicAckOptions::default())).await
    }

    pub(crate) async fn reject(mut self, reason: &str) -> Result<(), BrokerError> {
        if let Some(dead_letter) = self.dead_letter.take() {
            match tokio::time::timeout(self.timeout, dead_letter.publish(reason)).await {
                Ok(Ok(true)) => return self.ack().await,
                // The broker moves the message itself, without the reason.
                Ok(Ok(false)) => {}
                Ok(Err(error)) => return Err(BrokerError::unacknowledged(&library_error(&error))),
                Err(_) => {
                    let cause = BrokerError::new(format!("no answer within {:?}", self.timeout));
                    return Err(BrokerError::unacknowledged(&cause));
                }
            }
        }
        self.with_timeout(self.acker.nack(BasicNackOptions { requeue: false, multiple: false })).await
    }

    pub(crate) async fn requeue(self) -> Result<(), BrokerError> {
        self.with_timeout(self.acker.nack(BasicNackOptions { requeue: true, multiple: false })).await
    }

    async fn with_timeout(
        &self,
        acknowledgement: impl Future<Output = lapin::Result<bool>>,
    ) -> Result<(), BrokerError> {
        let cause = match tokio::time::timeout(self.timeout, acknowledgement).await {
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => BrokerError::new("its connection is closed"),
            Ok(Err(error)) => library_error(&error),
            Err(_) => BrokerError::new(format!("no answer within {:?}", self.timeout)),
        };
        Err(BrokerError::unacknowledged(&cause))
    }
}

impl DeadLetter {
    /// Publishes the copy. Returns whether the dead-letter queue has it.
    async fn publish(self: Box<Self>, reason: &str) -> lapin::Result<bool> {
        let original = &self.properties;
        let mut headers = original.headers().clone().unwrap_or_default();
        headers.insert("x-reason".into(), AMQPValue::LongString(reason.into()));
        headers.insert("x-routing-key".into(), AMQPValue::LongString(self.routing_key.as_str().into()));
        // The copy has neither the sender's user id, which the broker would check, nor an expiry.
        let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
        if let Some(content_type) = original.content_type() {
            properties = properties.with_content_type(content_type.clone());
        }
        if let Some(encoding) = original.content_encoding() {
            properties = properties.with_content_encoding(encoding.clone());
        }
        if let Some(id) = original.message_id() {
            properties = properties.with_message_id(id.clone());
        }
        if let Some(id) = original.correlation_id() {
            properties = properties.with_correlation_id(id.clone());
        }
        if let Some(kind) = original.kind() {
            properties = properties.with_type(kind.clone());
        }
        if let Some(at) = original.timestamp() {
            properties = properties.with_timestamp(*at);
        }
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        // The default exchange routes by queue name.
        let sent = self.channel.basic_publish("".into(), self.queue.into(), options, &self.body, properties).await?;
        Ok(matches!(sent.await?, Confirmation::Ack(None)))
    }
}
