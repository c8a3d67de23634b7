//! Takes messages from a stream through a durable pull consumer, a bounded number at a time.
//!
//! What is rejected is copied to a subject of its own, kept by a stream of its own, before it is given up. That subject must lie outside of what the
//! consumer listens to, or its dead letters would come back to it.

use std::time::Duration;

use async_nats::{
    Client,
    jetstream::{
        self, AckKind,
        consumer::{AckPolicy, pull},
        context::PublishErrorKind,
        message::PublishMessage,
    },
};
use async_trait::async_trait;
use futures_util::StreamExt;
use tokio::sync::watch;

use super::{Health, chain, connect, prepare_stream};
use crate::{BrokerUrl, Consumer, DEFAULT_TIMEOUT, Declare, Delivery, Down, delivery};

#[derive(Clone, Debug)]
pub struct NatsConsumerOptions {
    pub url: BrokerUrl,
    pub name: String,
    pub stream: String,
    /// Which subjects of the stream: `orders.>`.
    pub filter: String,
    /// The durable name, under which the server remembers what is acknowledged.
    pub durable: String,
    /// How many messages may be handed out without an acknowledgement.
    pub prefetch: u16,
    /// After this time without an acknowledgement a message comes again.
    pub ack_wait: Duration,
    /// Where rejected messages go, and which stream keeps them.
    pub dead_subject: String,
    pub dead_stream: String,
    pub declare: Declare,
    /// How long connecting, and acknowledging one message, may take.
    pub timeout: Duration,
}

impl NatsConsumerOptions {
    pub fn new(
        url: BrokerUrl,
        stream: impl Into<String>,
        filter: impl Into<String>,
        durable: impl Into<String>,
    ) -> Self {
        let (stream, durable) = (stream.into(), durable.into());
        NatsConsumerOptions {
            url,
            name: "faena".into(),
            filter: filter.into(),
            prefetch: 100,
            ack_wait: Duration::from_secs(30),
            dead_subject: format!("{durable}.dead"),
            dead_stream: format!("{stream}-{durable}-dead"),
            stream,
            durable,
            declare: Declare::IfMissing,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

pub struct NatsConsumer {
    options: NatsConsumerOptions,
    link: Option<Link>,
}

struct Link {
    client: Client,
    context: jetstream::Context,
    health: watch::Receiver<Health>,
    deliveries: pull::Stream,
}

#[derive(Debug)]
pub(crate) struct Handle {
    message: jetstream::Message,
    context: jetstream::Context,
    id: String,
    dead_subject: String,
    timeout: Duration,
}

impl NatsConsumer {
    pub fn new(options: NatsConsumerOptions) -> Self {
        NatsConsumer { options, link: None }
    }

    async fn connect(&self) -> Result<Link, String> {
        let options = &self.options;
        let (client, health) = connect(&options.url, &options.name).await?;
        let builder = jetstream::context::ContextBuilder::new().timeout(options.timeout).ack_timeout(options.timeout);
        let context = builder.build(client.clone());
        prepare_stream(&context, &options.stream, vec![options.filter.clone()], options.declare).await?;
        if options.declare == Declare::IfMissing {
            prepare_stream(&context, &options.dead_stream, vec![options.dead_subject.clone()], options.declare).await?;
        }
        let consumer = self.prepare_consumer(&context).await?;
        let stream = consumer.stream().max_messages_per_batch(usize::from(options.prefetch.max(1)));
        let stream = stream.expires(Duration::from_secs(20)).heartbeat(Duration::from_secs(5));
        let deliveries = stream.messages().await.map_err(|error| chain(&error))?;
        Ok(Link { client, context, health, deliveries })
    }

    async fn prepare_consumer(
        &self,
        context: &jetstream::Context,
    ) -> Result<jetstream::consumer::Consumer<pull::Config>, String> {
        let options = &self.options;
        let stream = context.get_stream(&options.stream).await.map_err(|error| chain(&error))?;
        if options.declare == Declare::Never {
            let found = stream.get_consumer(&options.durable).await;
            return found.map_err(|error| {
                format!(
                    "cannot use the consumer {:?} of stream {:?}, and it may not be declared: {error}",
                    options.durable, options.stream
                )
            });
        }
        let config = pull::Config {
            durable_name: Some(options.durable.clone()),
            filter_subject: options.filter.clone(),
            ack_policy: AckPolicy::Explicit,
            ack_wait: options.ack_wait,
            max_ack_pending: i64::from(options.prefetch.max(1)),
            ..Default::default()
        };
        let made = stream.get_or_create_consumer(&options.durable, config).await;
        made.map_err(|error| {
            format!("cannot make the consumer {:?} of stream {:?}: {}", options.durable, options.stream, chain(&error))
        })
    }

    fn down(&mut self, reason: String) -> Down {
        self.link = None;
        Down(self.options.url.clean(reason))
    }
}

#[async_trait]
impl Consumer for NatsConsumer {
    async fn next(&mut self) -> Result<Delivery, Down> {
        if self.link.is_none() {
            let connected = tokio::time::timeout(self.options.timeout, self.connect()).await;
            let silent = || format!("{} did not answer within {:?}", self.options.url, self.options.timeout);
            match connected.unwrap_or_else(|_| Err(silent())) {
                Ok(link) => self.link = Some(link),
                Err(reason) => return Err(self.down(reason)),
            }
        }
        let Some(link) = &mut self.link else { return Err(Down("there is no connection".into())) };
        let lost = format!("lost {}: the connection broke", self.options.url);
        let arrived = tokio::select! {
            arrived = link.deliveries.next() => arrived,
            _ = link.health.wait_for(|health| health.lost) => None,
        };
        match arrived {
            Some(Ok(message)) => Ok(self.options.arrived(message, link.context.clone())),
            Some(Err(error)) => {
                let reason = format!("lost {}: {}", self.options.url, chain(&error));
                Err(self.down(reason))
            }
            None => Err(self.down(lost)),
        }
    }

    async fn close(&mut self) {
        if let Some(link) = self.link.take() {
            // It may be gone already, which is just as well.
            let _ = tokio::time::timeout(self.options.timeout, link.client.drain()).await;
        }
    }
}

impl NatsConsumerOptions {
    fn arrived(&self, message: jetstream::Message, context: jetstream::Context) -> Delivery {
        let header =
            |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name)).map(ToString::to_string);
        let place =
            message.info().ok().map(|info| (format!("{}:{}", info.stream, info.stream_sequence), info.delivered));
        let given = header("Nats-Msg-Id").filter(|id| !id.is_empty());
        let id = given.or_else(|| place.as_ref().map(|(place, _)| place.clone()));
        let subject = message.subject.to_string();
        Delivery {
            kind: header("Type").unwrap_or_else(|| subject.clone()),
            subject,
            correlation_id: header("CorrelationId"),
            traceparent: header("traceparent"),
            content_type: header("Content-Type"),
            body: message.payload.clone(),
            redelivered: place.is_some_and(|(_, delivered)| delivered > 1),
            handle: delivery::Handle::Nats(Box::new(Handle {
                id: id.clone().unwrap_or_default(),
                message,
                context,
                dead_subject: self.dead_subject.clone(),
                timeout: self.timeout,
            })),
            id,
        }
    }
}

impl Handle {
    /// Waits until the server has noted it.
    pub(crate) async fn ack(self) -> Result<(), Down> {
        self.bounded(async { self.message.double_ack().await.map_err(|error| error.to_string()) }).await
    }

    pub(crate) async fn give_back(self) -> Result<(), Down> {
        self.bounded(async { self.message.ack_with(AckKind::Nak(None)).await.map_err(|error| error.to_string()) }).await
    }

    pub(crate) async fn reject(self, reason: &str) -> Result<(), Down> {
        self.bounded(async {
            self.bury(reason).await?;
            self.message.double_ack_with(AckKind::Term).await.map_err(|error| error.to_string())
        })
        .await
    }

    async fn bury(&self, reason: &str) -> Result<(), String> {
        let mut headers = self.message.headers.clone().unwrap_or_default();
        headers.insert("x-subject", self.message.subject.as_str());
        headers.insert("x-reason", reason.replace(['\r', '\n'], " "));
        headers.insert(async_nats::header::NATS_MESSAGE_ID, format!("dead {}", self.id));
        let publish = PublishMessage::build().payload(self.message.payload.clone()).headers(headers);
        let sent =
            self.context.send_publish(self.dead_subject.clone(), publish).await.map_err(|error| chain(&error))?;
        match sent.await {
            Ok(_) => Ok(()),
            // Nobody keeps dead letters. It is given up, but its stream still has it.
            Err(error) if error.kind() == PublishErrorKind::StreamNotFound => Ok(()),
            Err(error) => Err(chain(&error)),
        }
    }

    async fn bounded(&self, answer: impl Future<Output = Result<(), String>>) -> Result<(), Down> {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(answered) => answered.map_err(|reason| Down(format!("the message comes again: {reason}"))),
            Err(_) => Err(Down(format!("could not answer within {:?}: the message comes again", self.timeout))),
        }
    }
}
