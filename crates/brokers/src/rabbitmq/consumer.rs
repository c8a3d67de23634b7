//! Takes messages from a queue, a bounded number at a time.
//!
//! A queue that is declared here gets a second one beside it, `<queue>.dead`, to which the broker moves what is rejected. Of a queue that is used as it is,
//! rejected messages go where its owner has set up, or nowhere.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use lapin::{
    Acker, Channel,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};

use super::{
    ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, connect, line::Line, prepare_exchange, protocol_error, told,
};
use crate::{BrokerUrl, Consumer, DEFAULT_TIMEOUT, Declare, Delivery, Down, delivery};

#[derive(Clone, Debug)]
pub struct RabbitMqConsumerOptions {
    pub url: BrokerUrl,
    pub name: String,
    pub queue: String,
    pub bindings: Vec<Binding>,
    /// How many messages may be handed out without an acknowledgement.
    pub prefetch: u16,
    pub declare: Declare,
    /// How long connecting, and acknowledging one message, may take.
    pub timeout: Duration,
}

/// Which messages of an exchange come to the queue: `ticket.#`.
#[derive(Clone, Debug)]
pub struct Binding {
    pub exchange: String,
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

pub struct RabbitMqConsumer {
    options: RabbitMqConsumerOptions,
    link: Option<Link>,
}

struct Link {
    line: Line,
    /// Dropping it would close it.
    _channel: Channel,
    deliveries: lapin::Consumer,
}

#[derive(Debug)]
pub(crate) struct Handle {
    acker: Acker,
    timeout: Duration,
}

impl RabbitMqConsumer {
    pub fn new(options: RabbitMqConsumerOptions) -> Self {
        RabbitMqConsumer { options, link: None }
    }

    async fn connect(&self) -> Result<Link, String> {
        let line = connect(&self.options.url, &self.options.name).await?;
        let channel = line.connection.create_channel().await.map_err(|error| told(&error))?;
        self.prepare_queue(&channel).await?;
        channel
            .basic_qos(self.options.prefetch.max(1), BasicQosOptions::default())
            .await
            .map_err(|error| told(&error))?;
        let (queue, tag) = (self.options.queue.as_str().into(), "".into());
        let deliveries = channel.basic_consume(queue, tag, BasicConsumeOptions::default(), FieldTable::default()).await;
        let deliveries = deliveries
            .map_err(|error| format!("cannot consume from queue {:?}: {}", self.options.queue, told(&error)))?;
        Ok(Link { line, _channel: channel, deliveries })
    }

    async fn prepare_queue(&self, channel: &Channel) -> Result<(), String> {
        let (queue, dead) = (&self.options.queue, format!("{}.dead", self.options.queue));
        if self.options.declare == Declare::Never {
            let options = QueueDeclareOptions { passive: true, ..Default::default() };
            return self.declare_queue(channel, queue, options, FieldTable::default()).await;
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        self.declare_queue(channel, &dead, durable, FieldTable::default()).await?;
        let mut arguments = FieldTable::default();
        // The default exchange takes a queue's name for a routing key.
        arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
        arguments.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString(dead.into()));
        self.declare_queue(channel, queue, durable, arguments).await?;
        for Binding { exchange, pattern } in &self.options.bindings {
            prepare_exchange(channel, exchange, self.options.declare).await?;
            let (queue, exchange_name, key) =
                (queue.as_str().into(), exchange.as_str().into(), pattern.as_str().into());
            let bound =
                channel.queue_bind(queue, exchange_name, key, QueueBindOptions::default(), FieldTable::default()).await;
            bound.map_err(|error| {
                format!("cannot bind the queue to {pattern} of exchange {exchange:?}: {}", told(&error))
            })?;
        }
        Ok(())
    }

    async fn declare_queue(
        &self,
        channel: &Channel,
        queue: &str,
        options: QueueDeclareOptions,
        arguments: FieldTable,
    ) -> Result<(), String> {
        let declared = channel.queue_declare(queue.into(), options, arguments).await;
        declared.map(|_| ()).map_err(|error| match protocol_error(&error) {
            Some((NOT_FOUND, _)) => format!("the queue {queue:?} does not exist and may not be declared: make it, or allow it with declare = true"),
            Some((PRECONDITION_FAILED, text)) => format!(
                "the queue {queue:?} exists with other properties ({text}): delete it, name another, or use it as it is with declare = false"
            ),
            Some((ACCESS_REFUSED, text)) => {
                format!("may not declare the queue {queue:?} ({text}): give the user the right to, or make it yourself and set declare = false")
            }
            _ => format!("cannot declare the queue {queue:?}: {}", told(&error)),
        })
    }

    fn down(&self, reason: String) -> Down {
        Down(self.options.url.clean(reason))
    }
}

#[async_trait]
impl Consumer for RabbitMqConsumer {
    async fn next(&mut self) -> Result<Delivery, Down> {
        if self.link.is_none() {
            let connected = tokio::time::timeout(self.options.timeout, self.connect()).await;
            let silent = || format!("{} did not answer within {:?}", self.options.url, self.options.timeout);
            self.link = Some(connected.unwrap_or_else(|_| Err(silent())).map_err(|reason| self.down(reason))?);
        }
        let Some(link) = &mut self.link else { return Err(Down("there is no connection".into())) };
        match link.deliveries.next().await {
            Some(Ok(delivery)) => Ok(arrived(delivery, self.options.timeout)),
            Some(Err(error)) => {
                self.link = None;
                Err(self.down(format!("lost {}: {}", self.options.url, told(&error))))
            }
            None => {
                self.link = None;
                Err(self.down(format!(
                    "{} ended the consumer of queue {:?}: was the queue deleted?",
                    self.options.url, self.options.queue
                )))
            }
        }
    }

    async fn close(&mut self) {
        if let Some(link) = self.link.take() {
            // It may be gone already, which is just as well.
            let _ = tokio::time::timeout(self.options.timeout, link.line.connection.close(200, "goodbye".into())).await;
        }
    }
}

fn arrived(delivery: lapin::message::Delivery, timeout: Duration) -> Delivery {
    let properties = &delivery.properties;
    let header = |name: &str| {
        let value = properties.headers().as_ref().and_then(|headers| headers.inner().get(name))?;
        match value {
            AMQPValue::LongString(text) => Some(text.to_string()),
            AMQPValue::ShortString(text) => Some(text.to_string()),
            _ => None,
        }
    };
    let subject = delivery.routing_key.to_string();
    Delivery {
        id: properties.message_id().as_ref().map(ToString::to_string).filter(|id| !id.is_empty()),
        kind: header("Type")
            .or_else(|| properties.kind().as_ref().map(ToString::to_string))
            .unwrap_or_else(|| subject.clone()),
        subject,
        correlation_id: header("CorrelationId")
            .or_else(|| properties.correlation_id().as_ref().map(ToString::to_string)),
        traceparent: header("traceparent"),
        content_type: properties.content_type().as_ref().map(ToString::to_string),
        redelivered: delivery.redelivered,
        body: Bytes::from(delivery.data),
        handle: delivery::Handle::RabbitMq(Handle { acker: delivery.acker, timeout }),
    }
}

impl Handle {
    pub(crate) async fn ack(self) -> Result<(), Down> {
        self.bounded(self.acker.ack(BasicAckOptions::default())).await
    }

    pub(crate) async fn reject(self) -> Result<(), Down> {
        self.bounded(self.acker.nack(BasicNackOptions { requeue: false, multiple: false })).await
    }

    pub(crate) async fn give_back(self) -> Result<(), Down> {
        self.bounded(self.acker.nack(BasicNackOptions { requeue: true, multiple: false })).await
    }

    async fn bounded(&self, answer: impl Future<Output = lapin::Result<bool>>) -> Result<(), Down> {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err(Down("the connection it came by is gone: the message comes again".into())),
            Ok(Err(error)) => Err(Down(format!("the message comes again: {}", told(&error)))),
            Err(_) => Err(Down(format!("could not answer within {:?}: the message comes again", self.timeout))),
        }
    }
}
