//! Measures the rate of confirmed messages of about 500 bytes: with the bare client library, and through the sinks.
//!
//! `cargo run --release -p faena-brokers --example publish_rate -- amqp://guest:guest@127.0.0.1/%2f [nats://… redis://…]`

use std::{collections::VecDeque, time::Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use faena_brokers::{
    BrokerUrl, Message, Sink,
    file::{FileSink, FileSinkOptions},
    nats::{NatsSink, NatsSinkOptions},
    rabbitmq::{RabbitMqSink, RabbitMqSinkOptions},
    redis::{RedisSink, RedisSinkOptions},
};
use faena_domain::Timestamp;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind,
    options::{
        BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
        QueuePurgeOptions,
    },
    types::FieldTable,
};

const COUNT: usize = 50_000;
const BATCH: usize = 1_000;
const BODY_BYTES: usize = 500;
const NAME: &str = "faena-publish-rate";

#[tokio::main]
async fn main() -> Result<()> {
    let messages: Vec<Message> = (0..COUNT).map(message).collect();
    for url in std::env::args().skip(1) {
        let parsed = BrokerUrl::parse(&url)?;
        match url.split(':').next() {
            Some("amqp" | "amqps") => {
                let (_connection, channel) = create_rabbitmq_queue(&url).await?;
                for _ in 0..3 {
                    measure_bare_rabbitmq(&channel, &messages).await?;
                    channel.queue_purge(NAME.into(), QueuePurgeOptions::default()).await?;
                    measure_sink(
                        "RabbitMQ, sink",
                        &RabbitMqSink::new(RabbitMqSinkOptions::new(parsed.clone(), NAME)),
                        &messages,
                    )
                    .await?;
                    channel.queue_purge(NAME.into(), QueuePurgeOptions::default()).await?;
                }
            }
            Some("nats" | "tls") => {
                measure_sink("NATS, sink", &NatsSink::new(NatsSinkOptions::new(parsed, NAME, NAME)), &messages).await?
            }
            _ => measure_sink("Redis, sink", &RedisSink::new(RedisSinkOptions::new(parsed, NAME)), &messages).await?,
        }
    }
    let file = std::env::temp_dir().join(format!("{NAME}.log"));
    measure_sink("file, sink", &FileSink::new(FileSinkOptions::new(&file)), &messages).await?;
    std::fs::remove_file(file)?;
    Ok(())
}

fn message(number: usize) -> Message {
    Message {
        id: format!("0190c1c0-0000-7000-8000-{number:012}"),
        kind: "job.status.changed".into(),
        routing_key: None,
        key: format!("job-{}", number % 1_000),
        sequence: number as i64,
        at: Timestamp::now(),
        correlation_id: Some("b2f5ff47-4366-4bc9-8a1b-6f9b5f5b1d6c".into()),
        traceparent: None,
        content_type: "application/cloudevents+json".into(),
        body: Bytes::from(vec![b'x'; BODY_BYTES]),
    }
}

async fn measure_sink(label: &str, sink: &dyn Sink, messages: &[Message]) -> Result<()> {
    sink.publish(&messages[..1]).await;
    let started = Instant::now();
    for batch in messages.chunks(BATCH) {
        let report = sink.publish(batch).await;
        ensure!(report.confirmed() == batch.len(), "not every message was confirmed: {:?}", report.outage);
    }
    print_rate(label, started);
    sink.close().await;
    Ok(())
}

fn print_rate(label: &str, started: Instant) {
    println!("{label}: {:.0} confirmed messages/s", COUNT as f64 / started.elapsed().as_secs_f64());
}

async fn create_rabbitmq_queue(url: &str) -> Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.context("cannot connect")?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(NAME.into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(NAME.into(), durable, FieldTable::default()).await?;
    channel
        .queue_bind(NAME.into(), NAME.into(), "#".into(), QueueBindOptions::default(), FieldTable::default())
        .await?;
    Ok((connection, channel))
}

/// Measures persistent, confirmed messages with the client library alone: the upper bound for a sink.
async fn measure_bare_rabbitmq(channel: &Channel, messages: &[Message]) -> Result<()> {
    let started = Instant::now();
    for batch in messages.chunks(BATCH) {
        let mut confirms = VecDeque::with_capacity(BATCH);
        for message in batch {
            let properties = BasicProperties::default().with_delivery_mode(2);
            let sent = channel.basic_publish(
                NAME.into(),
                "job.status.changed".into(),
                BasicPublishOptions::default(),
                &message.body,
                properties,
            );
            confirms.push_back(sent.await?);
        }
        for confirm in confirms {
            ensure!(confirm.await?.is_ack(), "not confirmed");
        }
    }
    print_rate("RabbitMQ, bare client", started);
    Ok(())
}
