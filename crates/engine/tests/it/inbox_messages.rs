//! Messages for inboxes, and outages while they arrive.

use std::sync::atomic::Ordering;

use faena_engine::Engine;
use faena_store::InputState;

use crate::fixture::{TestDatabase, eventually};

/// A message to publish.
#[derive(Clone, Default)]
pub struct InboxMessage {
    /// Routing key, or the end of the subject.
    pub key: String,
    pub id: Option<String>,
    /// The header `Type`.
    pub kind: Option<String>,
    /// The header `CorrelationId`.
    pub correlation: Option<&'static str>,
    pub body: Vec<u8>,
}

/// Publishes while the database rejects connections, and ends the outage when a message waits for the database.
pub async fn during_database_outage(engine: &Engine, database: &TestDatabase, publish: impl AsyncFnOnce()) {
    database.reject_connections().await;
    publish().await;
    let inbox = &engine.inputs.inboxes[0];
    eventually("a message waits for the database", async || (inbox.waiting.load(Ordering::Relaxed) > 0).then_some(()))
        .await;
    eventually("the inbox is down", async || (inbox.view().state == InputState::Down).then_some(())).await;
    database.accept_connections().await;
}

pub mod rabbitmq {
    use faena_brokers::{
        BrokerUrl,
        rabbitmq::{Binding, RabbitMqConsumerOptions},
    };
    use faena_engine::InboxBroker;
    use lapin::{
        BasicProperties,
        options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
        types::{AMQPValue, FieldTable},
    };

    use super::InboxMessage;
    use crate::{fixture::eventually, outbox::destination::channel};

    /// Returns an inbox for all messages of the exchange `name`.
    pub fn inbox_broker(url: &str, name: &str) -> InboxBroker {
        let options = RabbitMqConsumerOptions::new(BrokerUrl::parse(url).unwrap(), name);
        let bindings = vec![Binding { exchange: name.into(), pattern: "#".into() }];
        InboxBroker::RabbitMq(RabbitMqConsumerOptions { bindings, ..options })
    }

    pub async fn publish(url: &str, exchange: &str, messages: Vec<InboxMessage>) {
        let (_connection, channel) = channel(url).await;
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        for message in messages {
            let mut headers = FieldTable::default();
            if let Some(kind) = message.kind {
                headers.insert("Type".into(), AMQPValue::LongString(kind.into()));
            }
            if let Some(correlation) = message.correlation {
                headers.insert("CorrelationId".into(), AMQPValue::LongString(correlation.into()));
            }
            let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
            if let Some(id) = message.id {
                properties = properties.with_message_id(id.into());
            }
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let sent = channel.basic_publish(exchange.into(), message.key.into(), options, &message.body, properties);
            sent.await.unwrap().await.unwrap();
        }
    }

    /// Waits until the inbox consumes from its queue.
    pub async fn wait_for_consumer(url: &str, queue: &str) {
        eventually("the inbox consumes from the queue", async || {
            let (_connection, channel) = channel(url).await;
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
            (queue.consumer_count() > 0).then_some(())
        })
        .await;
    }

    pub async fn message_count(url: &str, queue: &str) -> u32 {
        let (_connection, channel) = channel(url).await;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap().message_count()
    }
}

pub mod nats {
    use async_nats::jetstream::context::PublishErrorKind;
    use faena_brokers::{BrokerUrl, nats::NatsConsumerOptions};
    use faena_engine::InboxBroker;

    use super::InboxMessage;
    use crate::fixture::eventually;

    /// Returns an inbox for all messages of the stream `name`.
    pub fn inbox_broker(url: &str, name: &str) -> InboxBroker {
        let url = BrokerUrl::parse(url).unwrap();
        InboxBroker::Nats(NatsConsumerOptions::new(url, name, format!("{name}.>"), format!("inbox-{name}")))
    }

    pub async fn publish(url: &str, name: &str, messages: Vec<InboxMessage>) {
        let context = async_nats::jetstream::new(async_nats::connect(url).await.unwrap());
        for message in messages {
            let mut headers = async_nats::HeaderMap::new();
            if let Some(kind) = message.kind {
                headers.insert("Type", kind);
            }
            if let Some(correlation) = message.correlation {
                headers.insert("CorrelationId", correlation);
            }
            if let Some(id) = message.id {
                headers.insert("Nats-Msg-Id", id);
            }
            let subject = format!("{name}.{}", message.key);
            // The NATS server reports a stream as existing before it accepts messages, so only an acknowledgement counts.
            // Without a stream the message is not stored, so it can be sent again.
            eventually("the stream accepts the message", async || {
                let published =
                    context.publish_with_headers(subject.clone(), headers.clone(), message.body.clone().into());
                match published.await.unwrap().await {
                    Err(error) if error.kind() == PublishErrorKind::StreamNotFound => None,
                    answer => Some(answer.unwrap()),
                }
            })
            .await;
        }
    }
}
