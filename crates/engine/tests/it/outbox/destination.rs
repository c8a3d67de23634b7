//! Reads what has arrived at a broker.

use async_trait::async_trait;
use futures_util::StreamExt;
use lapin::{
    Channel, Connection, ConnectionProperties, ExchangeKind,
    options::{BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::FieldTable,
};
use redis::{AsyncCommands, streams::StreamRangeReply};

use super::Arrived;

#[async_trait]
pub trait Destination: Sync {
    /// Returns everything that has arrived so far, in order.
    async fn arrived(&self) -> Vec<Arrived>;
}

/// A durable queue on a topic exchange. Reading consumes the messages, so a test reads once.
pub struct Queue {
    pub url: String,
    pub exchange: String,
    pub name: String,
}

pub async fn channel(url: &str) -> (Connection, Channel) {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

impl Queue {
    pub async fn bound(url: &str, exchange: &str, pattern: &str) -> Queue {
        let (_connection, channel) = channel(url).await;
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default()).await.unwrap();
        let name = format!("{exchange}-queue");
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.as_str().into(), durable, FieldTable::default()).await.unwrap();
        let queue = Queue { url: url.into(), exchange: exchange.into(), name };
        queue.bind(pattern).await;
        queue
    }

    pub async fn bind(&self, pattern: &str) {
        let (_connection, channel) = channel(&self.url).await;
        let (queue, exchange) = (self.name.as_str().into(), self.exchange.as_str().into());
        channel
            .queue_bind(queue, exchange, pattern.into(), QueueBindOptions::default(), FieldTable::default())
            .await
            .unwrap();
    }
}

#[async_trait]
impl Destination for Queue {
    async fn arrived(&self) -> Vec<Arrived> {
        let (connection, channel) = channel(&self.url).await;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = channel.queue_declare(self.name.as_str().into(), passive, FieldTable::default()).await.unwrap();
        let count = queue.message_count() as usize;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let consumer =
            channel.basic_consume(self.name.as_str().into(), "".into(), options, FieldTable::default()).await.unwrap();
        let arrived = consumer.take(count).map(|delivery| {
            let delivery = delivery.unwrap();
            Arrived::new(delivery.properties.message_id().as_ref().unwrap().as_str(), &delivery.data)
        });
        let arrived = arrived.collect().await;
        // A consumer that the broker still knows would take the messages of the next call.
        connection.close(200, "read".into()).await.unwrap();
        arrived
    }
}

/// A JetStream stream.
pub struct Stream {
    pub url: String,
    pub name: String,
}

#[async_trait]
impl Destination for Stream {
    async fn arrived(&self) -> Vec<Arrived> {
        let context = async_nats::jetstream::new(async_nats::connect(&self.url).await.unwrap());
        let mut stream = context.get_stream(&self.name).await.unwrap();
        let count = stream.info().await.unwrap().state.messages as usize;
        let ordered = async_nats::jetstream::consumer::pull::OrderedConfig::default();
        let reader = stream.create_consumer(ordered).await.unwrap();
        let arrived = reader.messages().await.unwrap().take(count).map(|message| {
            let message = message.unwrap();
            let id = message.headers.as_ref().unwrap().get("Nats-Msg-Id").unwrap().to_string();
            Arrived::new(id, &message.payload)
        });
        arrived.collect().await
    }
}

/// A Redis stream.
pub struct RedisStream {
    pub url: String,
    pub name: String,
}

#[async_trait]
impl Destination for RedisStream {
    async fn arrived(&self) -> Vec<Arrived> {
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(std::time::Duration::from_secs(60)));
        let client = redis::Client::open(self.url.as_str()).unwrap();
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
        let entries: StreamRangeReply = connection.xrange_all(&self.name).await.unwrap();
        let field = |entry: &redis::streams::StreamId, name: &str| entry.get::<String>(name).unwrap();
        entries.ids.iter().map(|entry| Arrived::new(field(entry, "id"), field(entry, "body").as_bytes())).collect()
    }
}
