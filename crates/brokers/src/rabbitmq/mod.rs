//! RabbitMQ, by AMQP 0-9-1.
//!
//! The library's own recovery is not used: it repeats what was on its way by itself, and then nobody knows what was confirmed. A connection that
//! broke is dropped with everything on it, and the next call makes another.

mod consumer;
mod line;
mod sink;
mod window;

use lapin::{
    ConnectionProperties, ErrorKind, ExchangeKind, options::ExchangeDeclareOptions, types::FieldTable, uri::AMQPUri,
};

use self::line::Line;
use crate::{BrokerUrl, CONNECT_TIMEOUT, Declare};

pub(crate) use consumer::Handle;
pub use consumer::{Binding, RabbitMqConsumer, RabbitMqConsumerOptions};
pub use sink::{RabbitMqSink, RabbitMqSinkOptions};

/// How long a silent connection is believed in: two of these.
const HEARTBEAT_S: u16 = 10;

// AMQP's reply codes.
const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const PRECONDITION_FAILED: u16 = 406;

async fn connect(url: &BrokerUrl, name: &str) -> Result<Line, String> {
    let mut uri: AMQPUri = url.expose().parse().map_err(|error| url.clean(format!("cannot use {url}: {error}")))?;
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    uri.query.connection_timeout.get_or_insert(CONNECT_TIMEOUT.as_millis() as u64);
    let properties = ConnectionProperties::default().with_connection_name(name.to_owned().into());
    match tokio::time::timeout(CONNECT_TIMEOUT, Line::open(uri, properties)).await {
        Ok(Ok(line)) => Ok(line),
        Ok(Err(error)) => match protocol_error(&error) {
            Some((ACCESS_REFUSED, text)) => {
                Err(url.clean(format!("RabbitMQ at {url} does not let us in, check name and password: {text}")))
            }
            _ => Err(url.clean(format!("cannot connect to {url}: {}", told(&error)))),
        },
        Err(_) => Err(format!("{url} did not answer within {} s", CONNECT_TIMEOUT.as_secs())),
    }
}

/// Makes sure that the exchange is there. A channel on which this fails is closed by the broker.
async fn prepare_exchange(channel: &lapin::Channel, exchange: &str, declare: Declare) -> Result<(), String> {
    if exchange.is_empty() {
        return Ok(()); // the default exchange is always there and cannot be declared
    }
    let options = ExchangeDeclareOptions { durable: true, passive: declare == Declare::Never, ..Default::default() };
    let declared = channel.exchange_declare(exchange.into(), ExchangeKind::Topic, options, FieldTable::default()).await;
    declared.map_err(|error| match protocol_error(&error) {
        Some((NOT_FOUND, _)) => format!("the exchange {exchange:?} does not exist and may not be declared: make it, or allow it with declare = true"),
        Some((PRECONDITION_FAILED, text)) => format!(
            "the exchange {exchange:?} exists but is no durable topic exchange ({text}): delete it, name another, or use it as it is with declare = false"
        ),
        Some((ACCESS_REFUSED, text)) => format!(
            "may not declare the exchange {exchange:?} ({text}): give the user the right to configure it, or make it yourself and set declare = false"
        ),
        _ => format!("cannot declare the exchange {exchange:?}: {}", told(&error)),
    })
}

/// The reply code and text of the broker, if it is the broker that complains.
fn protocol_error(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
        _ => None,
    }
}

fn told(error: &lapin::Error) -> String {
    match (error.kind(), protocol_error(error)) {
        (_, Some((_, text))) if !text.is_empty() => text,
        (ErrorKind::IOError(error), _) => error.to_string(),
        (ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidConnectionState(_), _) => "the connection broke".into(),
        _ => error.to_string(),
    }
}
