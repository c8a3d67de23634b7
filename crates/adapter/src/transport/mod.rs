//! How a service receives tasks and sends results: over Faena's HTTP API and event stream, or over a message broker.

pub mod broker;
pub mod http;

use crate::{CannotStart, outgoing::Outgoing};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TransportKind {
    /// The server's HTTP API and event stream
    Http,
    /// A RabbitMQ topic exchange
    Rabbitmq,
    /// A NATS JetStream stream
    Nats,
}

#[derive(clap::Args)]
pub struct TransportArguments {
    /// Transport of messages; the URL of a broker is read from FAENA_BROKER_URL
    #[arg(long, value_enum, default_value = "http")]
    pub transport: TransportKind,
    /// Server URL; the API key is read from FAENA_TOKEN [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    #[command(flatten)]
    pub broker: broker::BrokerArguments,
}

/// Receives tasks and sends results.
pub enum Transport {
    Http(http::Http),
    Broker(broker::Broker),
}

/// Result of sending an event.
#[derive(Debug, PartialEq)]
pub enum Delivered {
    /// The receiver has accepted the event, with this outcome.
    Accepted(String),
    /// The event can never be accepted.
    Refused(String),
}

/// Why sending or receiving failed. Another attempt may succeed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Outage(pub String);

impl Transport {
    pub fn new(arguments: &TransportArguments, machines: &[String], service: &str) -> Result<Transport, CannotStart> {
        Ok(match arguments.transport {
            TransportKind::Http => Transport::Http(http::Http::new(arguments.url.as_deref(), machines, service)?),
            kind => Transport::Broker(broker::Broker::new(kind, &arguments.broker, service)?),
        })
    }

    /// Sends an event once.
    pub async fn send(&self, event: &Outgoing) -> Result<Delivered, Outage> {
        match self {
            Transport::Http(http) => http.send(event).await,
            Transport::Broker(broker) => broker.send(event).await,
        }
    }

    pub async fn close(&self) {
        if let Transport::Broker(broker) = self {
            broker.close().await;
        }
    }
}
