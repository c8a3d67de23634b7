//! RabbitMQ, over AMQP 0-9-1.
//!
//! The automatic recovery of the client library is not used, because it sends unconfirmed messages again by itself, and the
//! caller could not know which were confirmed. A broken connection is dropped with all its channels, and the next call opens
//! a new one.

mod sink;
mod window;
mod consumer;
mod connection;

use lapin::{
    ConnectionProperties, ErrorKind, ExchangeKind, options::ExchangeDeclareOptions, types::FieldTable, uri::AMQPUri,
};

use self::connection::GuardedConnection;
use crate::{BrokerError, BrokerUrl, CONNECT_TIMEOUT, Declare};

pub(crate) use consumer::AckHandle;
pub use consumer::{Binding, RabbitMqConsumer, RabbitMqConsumerOptions};
pub use sink::{RabbitMqSink, RabbitMqSinkOptions};

/// Heartbeat interval. A connection that is silent for two intervals counts as lost.
const HEARTBEAT_S: u16 = 10;

// AMQP's reply codes.
const REPLY_SUCCESS: u16 = 200;
const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const PRECONDITION_FAILED: u16 = 406;

async fn connect(url: &BrokerUrl, name: &str) -> Result<GuardedConnection, BrokerError> {
    let parsed = url.expose().parse();
    let mut uri: AMQPUri = parsed.map_err(|error: String| {
        BrokerError::new(format!("invalid RabbitMQ URL {url}")).with_source(&BrokerError::new(error))
    })?;
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    uri.query.connection_timeout.get_or_insert(CONNECT_TIMEOUT.as_millis() as u64);
    let properties = ConnectionProperties::default().with_connection_name(name.to_owned().into());
    match tokio::time::timeout(CONNECT_TIMEOUT, GuardedConnection::open(uri, properties)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => {
            let message = match protocol_error(&error) {
                Some((ACCESS_REFUSED, _)) => format!("{url} denied access; check the user name and password"),
                _ => format!("cannot connect to {url}"),
            };
            Err(caused_by(message, &error))
        }
        Err(_) => Err(BrokerError::unanswered(url, CONNECT_TIMEOUT)),
    }
}

/// Creates the exchange if it is missing and `declare` allows it. If the broker rejects this, it closes the channel.
async fn ensure_exchange(channel: &lapin::Channel, exchange: &str, declare: Declare) -> Result<(), BrokerError> {
    if exchange.is_empty() {
        return Ok(()); // the default exchange always exists and cannot be declared
    }
    let options = ExchangeDeclareOptions { durable: true, passive: declare == Declare::Never, ..Default::default() };
    let declared = channel.exchange_declare(exchange.into(), ExchangeKind::Topic, options, FieldTable::default()).await;
    declared.map_err(|error| {
        let advice = match protocol_error(&error) {
            Some((NOT_FOUND, _)) => "does not exist; create it, or set declare = true",
            Some((PRECONDITION_FAILED, _)) => {
                "exists but is not a durable topic exchange; delete it, use another name, or set declare = false to use \
                 it unchanged"
            }
            Some((ACCESS_REFUSED, _)) => {
                "cannot be declared; grant the user permission to configure it, or create it and set declare = false"
            }
            _ => "cannot be declared",
        };
        caused_by(format!("exchange {exchange:?} {advice}"), &error)
    })
}

/// Returns the broker's reply code and text, if the error comes from the broker.
fn protocol_error(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
        _ => None,
    }
}

fn caused_by(message: impl Into<String>, cause: &lapin::Error) -> BrokerError {
    BrokerError::new(message).with_source(&library_error(cause))
}

/// Converts an error of the client library; the broker's own text replaces the library's where there is one.
fn library_error(error: &lapin::Error) -> BrokerError {
    match (error.kind(), protocol_error(error)) {
        (_, Some((_, text))) if !text.is_empty() => BrokerError::new(text),
        (ErrorKind::IOError(error), _) => BrokerError::copy_of(error.as_ref()),
        (ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidConnectionState(_), _) => {
            BrokerError::new("the connection broke")
        }
        _ => BrokerError::copy_of(error),
    }
}
