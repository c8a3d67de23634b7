//! Receives and sends messages through RabbitMQ or NATS. Each service has one queue; the routing key is the event type.
//!
//! A message is acknowledged when its work is recorded on disk. A message that cannot be parsed is dead-lettered.

use std::sync::Arc;

use faena_brokers::{
    BrokerUrl, Consumer, Delivery, Message, PublishOutcome, Sink,
    nats::{NatsConsumer, NatsConsumerOptions, NatsSink, NatsSinkOptions},
    rabbitmq::{Binding, RabbitMqConsumer, RabbitMqConsumerOptions, RabbitMqSink, RabbitMqSinkOptions},
};
use faena_domain::Timestamp;
use serde_json::json;

use super::{Delivered, Outage, TransportKind};
use crate::{
    CannotStart,
    backoff::Backoff,
    outgoing::Outgoing,
    runner::{ReceiveError, Runner},
    service::Service,
    task::TaskMessage,
};

/// Environment variable with the URL of the broker, which may contain a password.
pub const URL_VARIABLE: &str = "FAENA_BROKER_URL";
/// How many messages may be received and not yet acknowledged.
const PREFETCH: u16 = 20;

#[derive(clap::Args)]
pub struct BrokerArguments {
    /// RabbitMQ: exchange from which it receives messages and to which it sends results
    #[arg(long, value_name = "NAME", default_value = "faena")]
    exchange: String,
    /// Queue of this service; NATS: durable name [default: faena-smith or faena-sandbox]
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    /// NATS: stream from which it receives messages and to which it sends results
    #[arg(long, value_name = "NAME", default_value = "FAENA")]
    stream: String,
    /// NATS: first part of every subject
    #[arg(long, value_name = "PREFIX", default_value = "faena")]
    subject_prefix: String,
}

pub struct Broker {
    kind: TransportKind,
    url: BrokerUrl,
    exchange: String,
    queue: String,
    stream: String,
    prefix: String,
    originator: String,
    sink: Box<dyn Sink>,
}

impl Broker {
    pub fn new(kind: TransportKind, arguments: &BrokerArguments, service: &str) -> Result<Broker, CannotStart> {
        let text = std::env::var(URL_VARIABLE)
            .map_err(|_| CannotStart(format!("{URL_VARIABLE} is not set; set it to the URL of the broker")))?;
        let url = BrokerUrl::parse(&text).map_err(|error| CannotStart(format!("{URL_VARIABLE}: {error}")))?;
        let name = format!("faena-{service}");
        let sink: Box<dyn Sink> = match kind {
            TransportKind::Nats => {
                let options = NatsSinkOptions::new(url.clone(), &arguments.stream, &arguments.subject_prefix);
                Box::new(NatsSink::new(NatsSinkOptions { name: name.clone(), ..options }))
            }
            _ => {
                let options = RabbitMqSinkOptions::new(url.clone(), &arguments.exchange);
                Box::new(RabbitMqSink::new(RabbitMqSinkOptions { name: name.clone(), ..options }))
            }
        };
        Ok(Broker {
            kind,
            url,
            exchange: arguments.exchange.clone(),
            queue: arguments.queue.clone().unwrap_or(name),
            stream: arguments.stream.clone(),
            prefix: arguments.subject_prefix.clone(),
            originator: service.to_owned(),
            sink,
        })
    }

    fn consumer(&self, messages: &[&str]) -> Box<dyn Consumer> {
        if self.kind == TransportKind::Nats {
            let filter = format!("{}.>", self.prefix);
            let options = NatsConsumerOptions::new(self.url.clone(), &self.stream, filter, &self.queue);
            let name = self.queue.clone();
            return Box::new(NatsConsumer::new(NatsConsumerOptions { name, prefetch: PREFETCH, ..options }));
        }
        let bindings = messages.iter().map(|kind| {
            let (exchange, pattern) = (self.exchange.clone(), (*kind).to_owned());
            Binding { exchange, pattern }
        });
        let bindings = bindings.collect();
        let options = RabbitMqConsumerOptions::new(self.url.clone(), &self.queue);
        let name = self.queue.clone();
        Box::new(RabbitMqConsumer::new(RabbitMqConsumerOptions { name, bindings, prefetch: PREFETCH, ..options }))
    }

    pub async fn send(&self, event: &Outgoing) -> Result<Delivered, Outage> {
        let body = json!({"metadata": event.metadata(&self.originator), "payload": event.payload});
        let message = Message {
            id: event.trace.clone(),
            kind: event.kind.clone(),
            routing_key: Some(event.kind.clone()),
            key: event.task.clone(),
            sequence: 0,
            at: Timestamp::now(),
            correlation_id: None,
            traceparent: None,
            content_type: "application/json".into(),
            body: body.to_string().into(),
        };
        let report = self.sink.publish(&[message]).await;
        match (report.outcomes.into_iter().next().flatten(), report.outage) {
            (Some(PublishOutcome::Confirmed), _) => Ok(Delivered::Accepted("confirmed by the broker".into())),
            // The service sends it again, even if no queue is bound: the server may not have declared its queue yet.
            (Some(PublishOutcome::Rejected(reason)), _) => Err(Outage(reason)),
            (None, Some(error)) => Err(Outage(format!("{error:#}"))),
            (None, None) => Err(Outage("the broker did not confirm the message".into())),
        }
    }

    pub async fn close(&self) {
        self.sink.close().await;
    }
}

/// Receives messages until the program stops.
pub async fn consume<S: Service>(runner: &Arc<Runner<S>>, broker: &Broker) {
    runner.resume();
    let stop = runner.stop();
    let mut consumer = broker.consumer(runner.service.messages());
    let mut backoff = Backoff::new();
    loop {
        let received = tokio::select! {
            received = consumer.next() => received,
            () = stop.cancelled() => break,
        };
        let handled = match received {
            Ok(delivery) => handle(runner, &broker.prefix, delivery).await,
            Err(error) => Err(Outage(format!("{error:#}"))),
        };
        match handled {
            Ok(()) => backoff.reset(),
            Err(Outage(reason)) => {
                tracing::warn!(reason, "cannot receive messages from the broker, retrying");
                if !backoff.wait(stop).await {
                    break;
                }
            }
        }
    }
    consumer.close().await;
}

async fn handle<S: Service>(runner: &Arc<Runner<S>>, prefix: &str, delivery: Delivery) -> Result<(), Outage> {
    let kind = delivery.kind.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')).unwrap_or(&delivery.kind);
    let done = match TaskMessage::parse(kind, &delivery.body) {
        // A NATS stream also contains the messages of other services.
        Ok(message) if !runner.service.messages().contains(&message.kind.as_str()) => delivery.ack().await,
        Err(_) if !runner.service.messages().contains(&kind) => delivery.ack().await,
        Err(reason) => reject(delivery, &reason).await,
        Ok(message) => match runner.receive(&message) {
            Ok(()) => delivery.ack().await,
            Err(ReceiveError::Invalid(reason)) => reject(delivery, &reason).await,
            Err(error @ ReceiveError::Disk(_)) => {
                // The broker delivers the message again, to this or to another instance of the service.
                let _ = delivery.requeue().await;
                return Err(Outage(error.to_string()));
            }
        },
    };
    done.map_err(|error| Outage(format!("{error:#}")))
}

async fn reject(delivery: Delivery, reason: &str) -> Result<(), faena_brokers::BrokerError> {
    tracing::warn!(message = delivery.id, subject = delivery.subject, reason, "message dead-lettered");
    delivery.reject(reason).await
}
