//! Publishes to a JetStream stream: each message under its own subject, acknowledged by the stream, a window at a time.
//!
//! The server drops repetitions of a `Nats-Msg-Id` within the stream's window (two minutes, if nobody said otherwise), and confirms before the message is
//! on disk (`sync_interval`): a server that loses power may forget what it confirmed.

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

use super::{Health, chain, connect, missing, prepare_stream, stream_exists};
use crate::{BrokerUrl, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Declare, Message, Published, Sink, Verdict, routing_key};

#[derive(Clone, Debug)]
pub struct NatsSinkOptions {
    pub url: BrokerUrl,
    /// Shown in the server's list of connections.
    pub name: String,
    pub stream: String,
    /// Stands before the routing key: `faena` makes `faena.job.completed`. May be empty.
    pub prefix: String,
    pub declare: Declare,
    /// How long one call to `publish` may take, connecting included.
    pub timeout: Duration,
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

pub struct NatsSink {
    options: NatsSinkOptions,
    /// Taken out while it is used, and put back only if it is still good.
    link: Mutex<Option<Link>>,
}

struct Link {
    client: Client,
    context: jetstream::Context,
    health: watch::Receiver<Health>,
}

type Ack = <PublishAckFuture as IntoFuture>::IntoFuture;

/// What is on its way, and what is known.
struct Window<'a> {
    on_their_way: VecDeque<(usize, Ack)>,
    verdicts: &'a mut [Option<Verdict>],
    /// A subject that no stream takes, and whose message that was.
    unheard: Vec<usize>,
    down: Option<String>,
    health: Option<watch::Receiver<Health>>,
}

impl NatsSink {
    pub fn new(options: NatsSinkOptions) -> Self {
        NatsSink { options, link: Mutex::new(None) }
    }

    fn subject(&self, message: &Message) -> Result<String, String> {
        let key = routing_key(&message.kind)?;
        let optional = [message.correlation_id.as_deref(), message.traceparent.as_deref()];
        let texts = [&*message.id, &message.kind, &message.key, &message.content_type]
            .into_iter()
            .chain(optional.into_iter().flatten());
        if message.id.is_empty() || texts.into_iter().any(|text| text.contains(['\r', '\n'])) {
            return Err("its id is empty, or a text for a header contains a line break".into());
        }
        Ok(if self.options.prefix.is_empty() { key } else { format!("{}.{key}", self.options.prefix) })
    }

    async fn send(&self, messages: &[Message], subjects: &[Option<String>], window: &mut Window<'_>) {
        let mut place = self.link.lock().await;
        let link = match place.take() {
            Some(link) if !link.health.borrow().lost => link,
            _ => match self.connect().await {
                Ok(link) => link,
                Err(reason) => return window.down = Some(reason),
            },
        };
        let mut health = link.health.clone();
        window.health = Some(health.clone());
        tokio::select! {
            () = self.transmit(&link, messages, subjects, window) => {}
            _ = health.wait_for(|health| health.lost) => window.down = Some(format!("lost {}: the connection broke", self.options.url)),
        }
        if window.down.is_none() {
            self.judge_unheard(&link, subjects, window).await;
        }
        if window.down.is_none() {
            *place = Some(link);
        }
    }

    async fn transmit(&self, link: &Link, messages: &[Message], subjects: &[Option<String>], window: &mut Window<'_>) {
        for (index, (message, subject)) in messages.iter().zip(subjects).enumerate() {
            let Some(subject) = subject else { continue };
            if window.on_their_way.len() >= self.options.window {
                window.settle_one().await;
            }
            if window.down.is_some() {
                return;
            }
            let publish = PublishMessage::build().payload(message.body.clone()).headers(headers(message));
            match link.context.send_publish(subject.clone(), publish).await {
                Ok(ack) => window.on_their_way.push_back((index, ack.into_future())),
                Err(error) => window.note_failure(index, error),
            }
        }
        while !window.on_their_way.is_empty() && window.down.is_none() {
            window.settle_one().await;
        }
    }

    async fn connect(&self) -> Result<Link, String> {
        let (client, health) = connect(&self.options.url, &self.options.name).await?;
        let builder =
            jetstream::context::ContextBuilder::new().timeout(self.options.timeout).ack_timeout(self.options.timeout);
        let context = builder.max_ack_inflight(self.options.window.max(1) * 2).build(client.clone());
        let subjects = if self.options.prefix.is_empty() { ">".into() } else { format!("{}.>", self.options.prefix) };
        prepare_stream(&context, &self.options.stream, vec![subjects], self.options.declare).await?;
        Ok(Link { client, context, health })
    }

    /// Nobody took the subject: either the stream leaves it out, or there is no stream any more.
    async fn judge_unheard(&self, link: &Link, subjects: &[Option<String>], window: &mut Window<'_>) {
        if window.unheard.is_empty() {
            return;
        }
        match stream_exists(&link.context, &self.options.stream).await {
            Ok(true) => {
                for index in std::mem::take(&mut window.unheard) {
                    let subject = subjects[index].as_deref().unwrap_or_default();
                    window.verdicts[index] = Some(Verdict::Refused(format!("no stream takes subject {subject}")));
                }
            }
            Ok(false) if self.options.declare == Declare::Never => window.down = Some(missing(&self.options.stream)),
            Ok(false) => {
                window.down = Some(format!(
                    "the stream {:?} is gone; it is made again with the next connection",
                    self.options.stream
                ))
            }
            Err(reason) => window.down = Some(reason),
        }
    }

    fn silence(&self, verdicts: &[Option<Verdict>], complaint: Option<String>) -> String {
        let missing = verdicts.iter().filter(|verdict| verdict.is_none()).count();
        let complaint = complaint.map(|text| format!("; it said: {text}")).unwrap_or_default();
        format!(
            "{} did not confirm {missing} of {} messages within {:?}{complaint}",
            self.options.url,
            verdicts.len(),
            self.options.timeout
        )
    }
}

impl Window<'_> {
    /// Waits for the oldest. Dropping the wait leaves it where it was.
    async fn settle_one(&mut self) {
        let Some((index, ack)) = self.on_their_way.front_mut() else { return };
        let (index, outcome) = (*index, ack.await);
        self.on_their_way.pop_front();
        self.note(index, outcome);
    }

    /// Takes what is known by now, without waiting.
    fn settle_known(&mut self) {
        while let Some((index, ack)) = self.on_their_way.pop_front() {
            if let Some(outcome) = ack.now_or_never() {
                self.note(index, outcome);
            }
        }
    }

    fn note(&mut self, index: usize, outcome: Result<jetstream::publish::PublishAck, PublishError>) {
        match outcome {
            Ok(_) => self.verdicts[index] = Some(Verdict::Confirmed),
            Err(error) => self.note_failure(index, error),
        }
    }

    fn note_failure(&mut self, index: usize, error: PublishError) {
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => self.verdicts[index] = Some(Verdict::Refused(chain(&error))),
            PublishErrorKind::StreamNotFound => self.unheard.push(index),
            _ if blames_message(&error) => self.verdicts[index] = Some(Verdict::Refused(chain(&error))),
            _ => self.down = Some(self.down.take().unwrap_or_else(|| chain(&error))),
        }
    }
}

/// The stream answers 400 to what is wrong with the message, 5xx to what is wrong with itself.
fn blames_message(error: &PublishError) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<jetstream::Error>());
    cause.is_some_and(|cause| cause.code() == 400)
}

#[async_trait]
impl Sink for NatsSink {
    async fn publish(&self, messages: &[Message]) -> Published {
        let mut verdicts = vec![None; messages.len()];
        let subjects: Vec<Option<String>> = messages
            .iter()
            .zip(&mut verdicts)
            .map(|(message, verdict)| {
                self.subject(message).map_err(|reason| *verdict = Some(Verdict::Refused(reason))).ok()
            })
            .collect();
        if subjects.iter().all(Option::is_none) {
            return Published { verdicts, down: None };
        }
        let mut window = Window {
            on_their_way: VecDeque::new(),
            verdicts: &mut verdicts,
            unheard: Vec::new(),
            down: None,
            health: None,
        };
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &subjects, &mut window)).await;
        window.settle_known();
        let complaint = window.health.and_then(|health| health.borrow().complaint.clone());
        let mut down = window.down;
        if sent.is_err() {
            down = Some(self.silence(&verdicts, complaint));
        }
        Published { verdicts, down: down.map(|reason| self.options.url.clean(reason)) }
    }

    async fn close(&self) {
        let closing = async {
            if let Some(link) = self.link.lock().await.take() {
                // It may be gone already, which is just as well.
                let _ = link.client.drain().await;
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
