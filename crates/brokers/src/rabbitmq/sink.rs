//! Publishes to a topic exchange: persistent, mandatory, confirmed, a window at a time.

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
    ACCESS_REFUSED, PRECONDITION_FAILED, connect, line::Line, prepare_exchange, protocol_error, told, window::Window,
};
use crate::{BrokerUrl, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Declare, Message, Published, Sink, Verdict, routing_key};

const PERSISTENT: u8 = 2;
/// What newer brokers take if nobody told them otherwise; an older one takes more, and is asked to take less.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

#[derive(Clone, Debug)]
pub struct RabbitMqSinkOptions {
    pub url: BrokerUrl,
    /// Shown in the broker's list of connections.
    pub name: String,
    /// A durable topic exchange.
    pub exchange: String,
    pub declare: Declare,
    /// How long one call to `publish` may take, connecting included.
    pub timeout: Duration,
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

pub struct RabbitMqSink {
    options: RabbitMqSinkOptions,
    /// Taken out while it is used, and put back only if it is still good: who is interrupted in between leaves none behind.
    link: Mutex<Option<Link>>,
    /// The broker names its limit only when it closes the channel over it.
    max_body_bytes: AtomicUsize,
}

struct Link {
    line: Line,
    channel: Channel,
}

impl RabbitMqSink {
    pub fn new(options: RabbitMqSinkOptions) -> Self {
        RabbitMqSink { options, link: Mutex::new(None), max_body_bytes: AtomicUsize::new(MAX_BODY_BYTES) }
    }

    /// What can be said without the broker: the routing key of each message, or its verdict.
    fn address(&self, messages: &[Message], verdicts: &mut [Option<Verdict>]) -> Vec<Option<String>> {
        let limit = self.max_body_bytes.load(Ordering::Relaxed);
        let keys = messages.iter().zip(verdicts).map(|(message, verdict)| {
            let key = routing_key(&message.kind).and_then(|key| fits(message, limit).map(|()| key));
            key.map_err(|reason| *verdict = Some(Verdict::Refused(reason))).ok()
        });
        keys.collect()
    }

    async fn send(&self, messages: &[Message], keys: &[Option<String>], window: &mut Window) -> Result<(), String> {
        let mut place = self.link.lock().await;
        let link = match place.take() {
            Some(link) if link.line.connection.status().connected() && link.channel.status().connected() => link,
            _ => self.connect().await?,
        };
        for (index, (message, key)) in messages.iter().zip(keys).enumerate() {
            let Some(key) = key else { continue };
            if window.len() >= self.options.window {
                window.settle_one().await;
            }
            if window.broken.is_some() {
                break;
            }
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let sent = link.channel.basic_publish(
                self.options.exchange.as_str().into(),
                key.as_str().into(),
                options,
                &message.body,
                properties(message),
            );
            match sent.await {
                Ok(confirm) => window.push(index, confirm),
                Err(error) => window.break_with(error),
            }
        }
        while window.len() > 0 {
            window.settle_one().await;
        }
        if window.broken.is_none() {
            *place = Some(link);
        }
        Ok(())
    }

    async fn connect(&self) -> Result<Link, String> {
        let line = connect(&self.options.url, &self.options.name).await?;
        let opening = async {
            let channel = line.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(channel)
        };
        let channel =
            opening.await.map_err(|error: lapin::Error| format!("cannot open a channel: {}", told(&error)))?;
        prepare_exchange(&channel, &self.options.exchange, self.options.declare).await?;
        Ok(Link { line, channel })
    }

    /// A channel that the broker closed because of one kind of message blames those; the others go on over another channel.
    fn blame(
        &self,
        error: &lapin::Error,
        messages: &[Message],
        keys: &[Option<String>],
        verdicts: &mut [Option<Verdict>],
    ) -> bool {
        let Some((code, text)) = protocol_error(error) else { return false };
        let mut blamed = false;
        let limit = (code == PRECONDITION_FAILED).then(|| size_limit(&text)).flatten();
        let forbidden = (code == ACCESS_REFUSED).then(|| quoted_after(&text, "access to topic ")).flatten();
        if let Some(limit) = limit {
            self.max_body_bytes.store(limit, Ordering::Relaxed);
        }
        for ((message, key), verdict) in
            messages.iter().zip(keys).zip(verdicts).filter(|(_, verdict)| verdict.is_none())
        {
            let reason = match (limit, forbidden) {
                (Some(limit), _) => fits(message, limit).err(),
                (None, Some(topic)) if key.as_deref() == Some(topic) => Some(text.clone()),
                _ => None,
            };
            blamed |= reason.is_some();
            *verdict = reason.map(Verdict::Refused);
        }
        blamed
    }

    fn silence(&self, verdicts: &[Option<Verdict>]) -> String {
        let missing = verdicts.iter().filter(|verdict| verdict.is_none()).count();
        format!(
            "{} did not confirm {missing} of {} messages within {:?}; if it is alive, it may be blocking publishers (memory or disk alarm)",
            self.options.url,
            verdicts.len(),
            self.options.timeout
        )
    }
}

#[async_trait]
impl Sink for RabbitMqSink {
    async fn publish(&self, messages: &[Message]) -> Published {
        let mut verdicts = vec![None; messages.len()];
        let keys = self.address(messages, &mut verdicts);
        if keys.iter().all(Option::is_none) {
            return Published { verdicts, down: None };
        }
        let mut window = Window::default();
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &keys, &mut window)).await;
        window.settle_known();
        window.judge(messages, &mut verdicts);
        let down = match (sent, &window.broken) {
            (Ok(Err(reason)), _) => Some(reason),
            (_, Some(error)) if self.blame(error, messages, &keys, &mut verdicts) => None,
            (_, Some(error)) => Some(format!("lost {}: {}", self.options.url, told(error))),
            (Err(_), None) => Some(self.silence(&verdicts)),
            (Ok(Ok(())), None) => None,
        };
        Published { verdicts, down: down.map(|reason| self.options.url.clean(reason)) }
    }

    async fn close(&self) {
        let closing = async {
            if let Some(link) = self.link.lock().await.take() {
                // It may be gone already, which is just as well.
                let _ = link.line.connection.close(200, "goodbye".into()).await;
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
        .with_type(short(&message.kind))
        .with_timestamp(seconds.max(0) as u64)
        .with_content_type(short(&message.content_type))
        .with_headers(headers);
    if let Some(id) = message.correlation_id.as_deref().filter(|id| id.len() <= MAX_SHORT_BYTES) {
        properties = properties.with_correlation_id(id.into());
    }
    properties
}

/// AMQP's limit for the texts among a message's properties.
const MAX_SHORT_BYTES: usize = 255;

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

/// `fits` has refused messages whose texts are too long.
fn short(value: &str) -> ShortString {
    value.into()
}

fn fits(message: &Message, limit: usize) -> Result<(), String> {
    if message.body.len() > limit {
        return Err(format!("it has {} bytes, and the broker takes {limit} at most", message.body.len()));
    }
    if message.id.is_empty() || message.id.len() > MAX_SHORT_BYTES || message.content_type.len() > MAX_SHORT_BYTES {
        return Err(format!("its id and its content type must have 1 to {MAX_SHORT_BYTES} bytes"));
    }
    // All headers travel in one frame.
    let headers = message.key.len()
        + message.kind.len()
        + message.correlation_id.as_ref().map_or(0, String::len)
        + message.traceparent.as_ref().map_or(0, String::len);
    if headers > 64 * 1024 {
        return Err("its key and correlation id are too long for headers".into());
    }
    Ok(())
}

/// `… message size 600 is larger than configured max size 512` or, in newer brokers, `… than max size 512`.
fn size_limit(text: &str) -> Option<usize> {
    let rest = text.split("max size ").nth(1)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn quoted_after<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    text.split(before).nth(1)?.split('\'').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_brokers_words_tell_what_is_to_blame() {
        assert_eq!(
            size_limit("PRECONDITION_FAILED - message size 600 is larger than configured max size 512"),
            Some(512)
        );
        assert_eq!(size_limit("PRECONDITION_FAILED - message size 600 is larger than max size 512"), Some(512));
        assert_eq!(size_limit("PRECONDITION_FAILED - inequivalent arg"), None);
        let refused = "ACCESS_REFUSED - access to topic 'a.b' in exchange 'e' in vhost '/' refused for user 'u'";
        assert_eq!(quoted_after(refused, "access to topic "), Some("a.b"));
        assert_eq!(quoted_after("ACCESS_REFUSED - access to exchange 'e'", "access to topic "), None);
    }
}
