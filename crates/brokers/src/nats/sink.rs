//! Publishes to a JetStream stream: each message under its own subject, acknowledged by the stream.
//!
//! The NATS server drops messages whose `Nats-Msg-Id` it has seen within the stream's duplicate window (two minutes by
//! default). It confirms a message before it is on disk (`sync_interval`): a NATS server that loses power may lose
//! messages that it confirmed.

use std::{collections::VecDeque, future::IntoFuture, time::Duration};

use async_nats::{
    Client, HeaderMap,
    jetstream::{
        self,
        context::{PublishAckFuture, PublishError, PublishErrorKind},
        message::PublishMessage,
    },
};
use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::sync::{Mutex, watch};

use super::{Health, connect, ensure_stream, missing_stream, stream_exists};
use crate::{
    BrokerError, BrokerUrl, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Declare, Message, PublishOutcome, PublishReport, Sink,
    routing::message_key,
};

/// Settings of a [`NatsSink`].
#[derive(Clone, Debug)]
pub struct NatsSinkOptions {
    pub url: BrokerUrl,
    /// Name of the connection in the NATS server's list of connections.
    pub name: String,
    pub stream: String,
    /// Prefix of the routing key: `faena` makes the subject `faena.job.completed`. May be empty.
    pub prefix: String,
    pub declare: Declare,
    /// Time limit for one call to `publish`, including connecting.
    pub timeout: Duration,
    /// Limit for messages sent and not yet confirmed.
    pub window: usize,
}

impl NatsSinkOptions {
    pub fn new(url: BrokerUrl, stream: impl Into<String>, prefix: impl Into<String>) -> Self {
        NatsSinkOptions {
            url,
            name: "faena".into(),
            stream: stream.into(),
            prefix: prefix.into(),
            declare: Declare::IfMissing,
            timeout: DEFAULT_TIMEOUT,
            window: DEFAULT_WINDOW,
        }
    }
}

/// A publisher to a stream.
pub struct NatsSink {
    options: NatsSinkOptions,
    /// The idle connection. A call takes it out and puts it back only if it still works.
    idle: Mutex<Option<Connection>>,
}

struct Connection {
    client: Client,
    context: jetstream::Context,
    health: watch::Receiver<Health>,
}

type PendingAck = <PublishAckFuture as IntoFuture>::IntoFuture;

/// The messages of one call: those sent and not yet confirmed, and the outcomes so far.
struct Window<'a> {
    unconfirmed: VecDeque<(usize, PendingAck)>,
    outcomes: &'a mut [Option<PublishOutcome>],
    /// Indexes of messages whose subject no stream accepted.
    without_stream: Vec<usize>,
    outage: Option<BrokerError>,
    health: Option<watch::Receiver<Health>>,
}

impl NatsSink {
    pub fn new(options: NatsSinkOptions) -> Self {
        NatsSink { options, idle: Mutex::new(None) }
    }

    /// Returns the subject of a message, or the reason to reject it.
    fn subject(&self, message: &Message) -> Result<String, String> {
        let key = message_key(message).map_err(|error| error.to_string())?;
        if message.id.is_empty() {
            return Err("id is empty".into());
        }
        let header_values = [
            ("id", message.id.as_str()),
            ("type", &message.kind),
            ("key", &message.key),
            ("content type", &message.content_type),
            ("correlation id", message.correlation_id.as_deref().unwrap_or_default()),
            ("traceparent", message.traceparent.as_deref().unwrap_or_default()),
        ];
        if let Some((name, _)) = header_values.iter().find(|(_, value)| value.contains(['\r', '\n'])) {
            return Err(format!("{name} contains a line break and cannot be sent as a header"));
        }
        Ok(if self.options.prefix.is_empty() { key } else { format!("{}.{key}", self.options.prefix) })
    }

    async fn send(&self, messages: &[Message], subjects: &[Option<String>], window: &mut Window<'_>) {
        let mut idle = self.idle.lock().await;
        let connection = match idle.take() {
            Some(connection) if !connection.health.borrow().is_lost => connection,
            _ => match self.connect().await {
                Ok(connection) => connection,
                Err(error) => return window.outage = Some(error),
            },
        };
        let mut health = connection.health.clone();
        window.health = Some(health.clone());
        tokio::select! {
            () = self.send_over(&connection, messages, subjects, window) => {}
            _ = health.wait_for(|health| health.is_lost) => {
                let lost = BrokerError::new(format!("lost the connection to {}", self.options.url));
                window.outage = Some(lost.with_source(&BrokerError::new("the connection broke")));
            }
        }
        if window.outage.is_none() {
            self.reject_without_stream(&connection, subjects, window).await;
        }
        if window.outage.is_none() {
            *idle = Some(connection);
        }
    }

    async fn send_over(
        &self,
        connection: &Connection,
        messages: &[Message],
        subjects: &[Option<String>],
        window: &mut Window<'_>,
    ) {
        for (index, (message, subject)) in messages.iter().zip(subjects).enumerate() {
            let Some(subject) = subject else { continue };
            if window.unconfirmed.len() >= self.options.window {
                window.wait_for_oldest().await;
            }
            if window.outage.is_some() {
                return;
            }
            let publish = PublishMessage::build().payload(message.body.clone()).headers(headers(message));
            match connection.context.send_publish(subject.clone(), publish).await {
                Ok(ack) => window.unconfirmed.push_back((index, ack.into_future())),
                Err(error) => window.record_failure(index, &error),
            }
        }
        while !window.unconfirmed.is_empty() && window.outage.is_none() {
            window.wait_for_oldest().await;
        }
    }

    async fn connect(&self) -> Result<Connection, BrokerError> {
        let (client, health) = connect(&self.options.url, &self.options.name).await?;
        let builder =
            jetstream::context::ContextBuilder::new().timeout(self.options.timeout).ack_timeout(self.options.timeout);
        let context = builder.max_ack_inflight(self.options.window.max(1) * 2).build(client.clone());
        let subjects = if self.options.prefix.is_empty() { ">".into() } else { format!("{}.>", self.options.prefix) };
        ensure_stream(&context, &self.options.stream, vec![subjects], self.options.declare).await?;
        Ok(Connection { client, context, health })
    }

    /// Rejects messages whose subject the stream does not include; reports an outage if the stream no longer exists.
    async fn reject_without_stream(
        &self,
        connection: &Connection,
        subjects: &[Option<String>],
        window: &mut Window<'_>,
    ) {
        if window.without_stream.is_empty() {
            return;
        }
        let stream = &self.options.stream;
        match stream_exists(&connection.context, stream).await {
            Ok(true) => {
                for index in std::mem::take(&mut window.without_stream) {
                    let subject = subjects[index].as_deref().unwrap_or_default();
                    let reason = format!("no stream accepts subject {subject:?}");
                    window.outcomes[index] = Some(PublishOutcome::Rejected(reason));
                }
            }
            Ok(false) if self.options.declare == Declare::Never => window.outage = Some(missing_stream(stream)),
            Ok(false) => {
                let message = format!("stream {stream:?} was deleted; the next connection creates it again");
                window.outage = Some(BrokerError::new(message));
            }
            Err(error) => window.outage = Some(error),
        }
    }

    fn timeout_error(&self, outcomes: &[Option<PublishOutcome>], server_error: Option<String>) -> BrokerError {
        let unconfirmed = outcomes.iter().filter(|outcome| outcome.is_none()).count();
        let error = BrokerError::new(format!(
            "{} did not confirm {unconfirmed} of {} messages within {:?}",
            self.options.url,
            outcomes.len(),
            self.options.timeout
        ));
        match server_error {
            Some(text) => error.with_source(&BrokerError::new(text)),
            None => error,
        }
    }
}

impl<'a> Window<'a> {
    fn new(outcomes: &'a mut [Option<PublishOutcome>]) -> Self {
        Window { unconfirmed: VecDeque::new(), outcomes, without_stream: Vec::new(), outage: None, health: None }
    }

    /// Waits for the oldest confirmation. Dropping the future leaves the message unconfirmed.
    async fn wait_for_oldest(&mut self) {
        let Some((index, ack)) = self.unconfirmed.front_mut() else { return };
        let (index, result) = (*index, ack.await);
        self.unconfirmed.pop_front();
        self.record(index, result);
    }

    /// Records the confirmations that have arrived, without waiting.
    fn collect_arrived(&mut self) {
        while let Some((index, ack)) = self.unconfirmed.pop_front() {
            if let Some(result) = ack.now_or_never() {
                self.record(index, result);
            }
        }
    }

    fn record(&mut self, index: usize, result: Result<jetstream::publish::PublishAck, PublishError>) {
        match result {
            Ok(_) => self.outcomes[index] = Some(PublishOutcome::Confirmed),
            Err(error) => self.record_failure(index, &error),
        }
    }

    fn record_failure(&mut self, index: usize, error: &PublishError) {
        let error_copy = BrokerError::copy_of(error);
        match error.kind() {
            PublishErrorKind::StreamNotFound => self.without_stream.push(index),
            PublishErrorKind::MaxPayloadExceeded => self.reject(index, &error_copy),
            _ if concerns_message(error) => self.reject(index, &error_copy),
            _ => {
                self.outage.get_or_insert(error_copy);
            }
        }
    }

    fn reject(&mut self, index: usize, error: &BrokerError) {
        self.outcomes[index] = Some(PublishOutcome::Rejected(format!("{error:#}")));
    }
}

/// Returns whether the error is about the message (code 400) and not about the stream itself (5xx).
fn concerns_message(error: &PublishError) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<jetstream::Error>());
    cause.is_some_and(|cause| cause.code() == 400)
}

#[async_trait]
impl Sink for NatsSink {
    async fn publish(&self, messages: &[Message]) -> PublishReport {
        let mut outcomes = vec![None; messages.len()];
        let subjects: Vec<Option<String>> = messages
            .iter()
            .zip(&mut outcomes)
            .map(|(message, outcome)| {
                self.subject(message).map_err(|reason| *outcome = Some(PublishOutcome::Rejected(reason))).ok()
            })
            .collect();
        if subjects.iter().all(Option::is_none) {
            return PublishReport { outcomes, outage: None };
        }
        let mut window = Window::new(&mut outcomes);
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &subjects, &mut window)).await;
        window.collect_arrived();
        let server_error = window.health.and_then(|health| health.borrow().server_error.clone());
        let mut outage = window.outage;
        if sent.is_err() {
            outage = Some(self.timeout_error(&outcomes, server_error));
        }
        PublishReport { outcomes, outage: outage.map(|error| error.redact(&self.options.url)) }
    }

    async fn close(&self) {
        let closing = async {
            if let Some(connection) = self.idle.lock().await.take() {
                // The connection may be broken already; then there is nothing to close.
                let _ = connection.client.drain().await;
            }
        };
        let _ = tokio::time::timeout(self.options.timeout, closing).await;
    }
}

fn headers(message: &Message) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(async_nats::header::NATS_MESSAGE_ID, message.id.as_str());
    headers.insert("Type", message.kind.as_str());
    headers.insert("Content-Type", message.content_type.as_ref());
    headers.insert("Timestamp", message.at.as_ms().div_euclid(1_000).to_string());
    headers.insert("x-seq", message.sequence.to_string());
    headers.insert("x-key", message.key.as_str());
    if let Some(id) = &message.correlation_id {
        headers.insert("CorrelationId", id.as_str());
    }
    if let Some(parent) = &message.traceparent {
        headers.insert("traceparent", parent.as_str());
    }
    headers
}
