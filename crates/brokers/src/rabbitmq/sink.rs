//! Publishes to a topic exchange: persistent, mandatory, with publisher confirms.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use lapin::{
    BasicProperties, Channel,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use tokio::sync::Mutex;

use super::{
    ACCESS_REFUSED, PRECONDITION_FAILED, REPLY_SUCCESS, caused_by, connect, connection::GuardedConnection,
    ensure_exchange, protocol_error, window::Window,
};
use crate::{
    BrokerError, BrokerUrl, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Declare, Message, PublishOutcome, PublishReport, Sink,
    routing::message_key,
};

const PERSISTENT: u8 = 2;
/// Default limit of current brokers. Older brokers accept more; this sink does not send them more.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;
/// AMQP's limit for the text properties of a message.
const MAX_PROPERTY_BYTES: usize = 255;
/// All headers of a message travel in one frame.
const MAX_HEADER_BYTES: usize = 64 * 1024;

/// Settings of a [`RabbitMqSink`].
#[derive(Clone, Debug)]
pub struct RabbitMqSinkOptions {
    pub url: BrokerUrl,
    /// Shown in the broker's list of connections.
    pub name: String,
    /// Name of a durable topic exchange.
    pub exchange: String,
    pub declare: Declare,
    /// Time limit for one call to `publish`, including connecting.
    pub timeout: Duration,
    /// Limit for messages sent and not yet confirmed.
    pub window: usize,
}

impl RabbitMqSinkOptions {
    pub fn new(url: BrokerUrl, exchange: impl Into<String>) -> Self {
        RabbitMqSinkOptions {
            url,
            name: "faena".into(),
            exchange: exchange.into(),
            declare: Declare::IfMissing,
            timeout: DEFAULT_TIMEOUT,
            window: DEFAULT_WINDOW,
        }
    }
}

/// A publisher to a topic exchange.
pub struct RabbitMqSink {
    options: RabbitMqSinkOptions,
    /// The idle channel. A call takes it out and puts it back only if it still works, so a cancelled call leaves none.
    idle: Mutex<Option<ConfirmChannel>>,
    /// The broker's limit. It becomes known only when the broker closes a channel because of a larger message.
    max_body_bytes: AtomicUsize,
}

/// A channel with publisher confirms, and its connection.
struct ConfirmChannel {
    connection: GuardedConnection,
    channel: Channel,
}

impl ConfirmChannel {
    fn is_connected(&self) -> bool {
        self.connection.inner.status().connected() && self.channel.status().connected()
    }
}

impl RabbitMqSink {
    pub fn new(options: RabbitMqSinkOptions) -> Self {
        RabbitMqSink { options, idle: Mutex::new(None), max_body_bytes: AtomicUsize::new(MAX_BODY_BYTES) }
    }

    /// Returns the routing key of each message; rejects messages that are invalid regardless of the broker.
    fn routing_keys(&self, messages: &[Message], outcomes: &mut [Option<PublishOutcome>]) -> Vec<Option<String>> {
        let limit = self.max_body_bytes.load(Ordering::Relaxed);
        let keys = messages.iter().zip(outcomes).map(|(message, outcome)| {
            let key = message_key(message).map_err(|error| error.to_string());
            let key = key.and_then(|key| check_size(message, limit).map(|()| key));
            key.map_err(|reason| *outcome = Some(PublishOutcome::Rejected(reason))).ok()
        });
        keys.collect()
    }

    async fn send(
        &self,
        messages: &[Message],
        keys: &[Option<String>],
        window: &mut Window,
    ) -> Result<(), BrokerError> {
        let mut idle = self.idle.lock().await;
        let confirm_channel = match idle.take() {
            Some(confirm_channel) if confirm_channel.is_connected() => confirm_channel,
            _ => self.connect().await?,
        };
        for (index, (message, key)) in messages.iter().zip(keys).enumerate() {
            let Some(key) = key else { continue };
            if window.unconfirmed() >= self.options.window {
                window.wait_for_oldest().await;
            }
            if window.channel_error.is_some() {
                break;
            }
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let sent = confirm_channel.channel.basic_publish(
                self.options.exchange.as_str().into(),
                key.as_str().into(),
                options,
                &message.body,
                properties(message),
            );
            match sent.await {
                Ok(confirm) => window.push(index, confirm),
                Err(error) => window.record_channel_error(error),
            }
        }
        while window.unconfirmed() > 0 {
            window.wait_for_oldest().await;
        }
        if window.channel_error.is_none() {
            *idle = Some(confirm_channel);
        }
        Ok(())
    }

    async fn connect(&self) -> Result<ConfirmChannel, BrokerError> {
        let connection = connect(&self.options.url, &self.options.name).await?;
        let opening = async {
            let channel = connection.inner.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(channel)
        };
        let channel = opening.await.map_err(|error| caused_by("cannot open a channel", &error))?;
        ensure_exchange(&channel, &self.options.exchange, self.options.declare).await?;
        Ok(ConfirmChannel { connection, channel })
    }

    /// Rejects the messages because of which the broker closed the channel. Returns whether there are any.
    ///
    /// The outcome of the other messages stays unknown; the caller publishes them again over a new channel.
    fn reject_offending(
        &self,
        error: &lapin::Error,
        messages: &[Message],
        keys: &[Option<String>],
        outcomes: &mut [Option<PublishOutcome>],
    ) -> bool {
        let Some((code, text)) = protocol_error(error) else { return false };
        let cause = ChannelCloseCause::read(code, &text);
        if let Some(ChannelCloseCause::TooLarge { limit }) = cause {
            self.max_body_bytes.store(limit, Ordering::Relaxed);
        }
        let mut has_offender = false;
        let unknown = messages.iter().zip(keys).zip(outcomes).filter(|(_, outcome)| outcome.is_none());
        for ((message, key), outcome) in unknown {
            let reason = match cause {
                Some(ChannelCloseCause::TooLarge { limit }) => check_size(message, limit).err(),
                Some(ChannelCloseCause::ForbiddenKey(forbidden)) if key.as_deref() == Some(forbidden) => {
                    Some(text.clone())
                }
                _ => None,
            };
            has_offender |= reason.is_some();
            *outcome = reason.map(PublishOutcome::Rejected);
        }
        has_offender
    }

    fn timeout_error(&self, outcomes: &[Option<PublishOutcome>]) -> BrokerError {
        let unconfirmed = outcomes.iter().filter(|outcome| outcome.is_none()).count();
        BrokerError::new(format!(
            "{} did not confirm {unconfirmed} of {} messages within {:?}; check it for a memory or disk alarm, which \
             blocks publishers",
            self.options.url,
            outcomes.len(),
            self.options.timeout
        ))
    }
}

#[async_trait]
impl Sink for RabbitMqSink {
    async fn publish(&self, messages: &[Message]) -> PublishReport {
        let mut outcomes = vec![None; messages.len()];
        let keys = self.routing_keys(messages, &mut outcomes);
        if keys.iter().all(Option::is_none) {
            return PublishReport { outcomes, outage: None };
        }
        let mut window = Window::default();
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &keys, &mut window)).await;
        window.collect_arrived();
        window.write_outcomes(messages, &mut outcomes);
        let outage = match (sent, &window.channel_error) {
            (Ok(Err(error)), _) => Some(error),
            (_, Some(error)) if self.reject_offending(error, messages, &keys, &mut outcomes) => None,
            (_, Some(error)) => Some(caused_by(format!("lost the connection to {}", self.options.url), error)),
            (Err(_), None) => Some(self.timeout_error(&outcomes)),
            (Ok(Ok(())), None) => None,
        };
        PublishReport { outcomes, outage: outage.map(|error| error.redact(&self.options.url)) }
    }

    async fn close(&self) {
        let closing = async {
            if let Some(confirm_channel) = self.idle.lock().await.take() {
                // The connection may be broken already; then there is nothing to close.
                let _ = confirm_channel.connection.inner.close(REPLY_SUCCESS, "closed".into()).await;
            }
        };
        let _ = tokio::time::timeout(self.options.timeout, closing).await;
    }
}

fn properties(message: &Message) -> BasicProperties {
    let seconds = message.at.as_ms().div_euclid(1_000);
    let mut headers = FieldTable::default();
    headers.insert("Type".into(), text(&message.kind));
    headers.insert("Timestamp".into(), AMQPValue::LongLongInt(seconds));
    headers.insert("x-seq".into(), AMQPValue::LongLongInt(message.sequence));
    headers.insert("x-key".into(), text(&message.key));
    if let Some(id) = &message.correlation_id {
        headers.insert("CorrelationId".into(), text(id));
    }
    if let Some(parent) = &message.traceparent {
        headers.insert("traceparent".into(), text(parent));
    }
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_message_id(short(&message.id))
        .with_timestamp(seconds.max(0) as u64)
        .with_content_type(short(&message.content_type))
        .with_headers(headers);
    // The headers contain the whole text of a type or correlation id that is too long for a property.
    if message.kind.len() <= MAX_PROPERTY_BYTES {
        properties = properties.with_type(short(&message.kind));
    }
    if let Some(id) = message.correlation_id.as_deref().filter(|id| id.len() <= MAX_PROPERTY_BYTES) {
        properties = properties.with_correlation_id(id.into());
    }
    properties
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

/// Converts a text property. `check_size` has already rejected messages whose properties are too long.
fn short(value: &str) -> ShortString {
    value.into()
}

/// Returns an error with the reason if a message exceeds a limit of AMQP or of the broker.
fn check_size(message: &Message, limit: usize) -> Result<(), String> {
    if message.body.len() > limit {
        return Err(format!("body has {} bytes; the broker accepts at most {limit}", message.body.len()));
    }
    for (property, value) in [("id", message.id.as_str()), ("content type", &message.content_type)] {
        if value.len() > MAX_PROPERTY_BYTES {
            return Err(format!("{property} has {} bytes; use at most {MAX_PROPERTY_BYTES}", value.len()));
        }
    }
    if message.id.is_empty() {
        return Err("id is empty".into());
    }
    let header_bytes = message.key.len()
        + message.kind.len()
        + message.correlation_id.as_ref().map_or(0, String::len)
        + message.traceparent.as_ref().map_or(0, String::len);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(format!("headers have {header_bytes} bytes; shorten the key or the correlation id"));
    }
    Ok(())
}

/// Why the broker closed a channel, if single messages were the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChannelCloseCause<'a> {
    TooLarge {
        limit: usize,
    },
    /// The user may not publish with this routing key.
    ForbiddenKey(&'a str),
}

impl<'a> ChannelCloseCause<'a> {
    /// Reads the size limit or the routing key from the broker's reply.
    ///
    /// AMQP has no field for them: a reply is a code and a text. A text of an unknown form counts as an outage.
    fn read(code: u16, text: &'a str) -> Option<Self> {
        match code {
            PRECONDITION_FAILED => size_limit(text).map(|limit| ChannelCloseCause::TooLarge { limit }),
            ACCESS_REFUSED => quoted_after(text, "access to topic ").map(ChannelCloseCause::ForbiddenKey),
            _ => None,
        }
    }
}

/// Reads 512 from `message size 600 is larger than configured max size 512`. Newer brokers omit `configured`.
fn size_limit(text: &str) -> Option<usize> {
    let rest = text.split("max size ").nth(1)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn quoted_after<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    text.split(prefix).nth(1)?.split('\'').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offending_messages_are_read_from_the_brokers_reply() {
        let too_large = Some(ChannelCloseCause::TooLarge { limit: 512 });
        let old = "PRECONDITION_FAILED - message size 600 is larger than configured max size 512";
        assert_eq!(ChannelCloseCause::read(PRECONDITION_FAILED, old), too_large);
        let new = "PRECONDITION_FAILED - message size 600 is larger than max size 512";
        assert_eq!(ChannelCloseCause::read(PRECONDITION_FAILED, new), too_large);
        assert_eq!(ChannelCloseCause::read(PRECONDITION_FAILED, "PRECONDITION_FAILED - inequivalent arg"), None);
        let topic = "ACCESS_REFUSED - access to topic 'a.b' in exchange 'e' in vhost '/' refused for user 'u'";
        assert_eq!(ChannelCloseCause::read(ACCESS_REFUSED, topic), Some(ChannelCloseCause::ForbiddenKey("a.b")));
        assert_eq!(ChannelCloseCause::read(ACCESS_REFUSED, "ACCESS_REFUSED - access to exchange 'e'"), None);
    }
}
