//! Consumes a stream through a durable pull consumer, with a limit on unacknowledged messages.
//!
//! A rejected message is copied to a dead-letter subject, which has its own stream, before it is terminated
//! (JetStream's `Term`). That subject must not match the consumer's filter, or the consumer would receive its own
//! dead letters.

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

use super::{Health, connect, ensure_stream};
use crate::{BrokerError, BrokerUrl, Consumer, DEFAULT_TIMEOUT, Declare, Delivery, delivery};

/// Time for which the NATS server keeps one request for messages (a pull) open.
const PULL_EXPIRES: Duration = Duration::from_secs(20);
/// Interval of the NATS server's heartbeats while a pull is open.
const PULL_HEARTBEAT: Duration = Duration::from_secs(5);

/// Settings of a [`NatsConsumer`].
#[derive(Clone, Debug)]
pub struct NatsConsumerOptions {
    pub url: BrokerUrl,
    /// Name of the connection in the NATS server's list of connections.
    pub name: String,
    pub stream: String,
    /// Which subjects of the stream to consume: `orders.>`.
    pub filter: String,
    /// Durable name, under which the NATS server stores acknowledgements.
    pub durable: String,
    /// Limit for messages delivered and not yet acknowledged.
    pub prefetch: u16,
    /// The NATS server redelivers a message that is not acknowledged within this time.
    pub ack_wait: Duration,
    /// Subject for rejected messages.
    pub dead_letter_subject: String,
    /// Stream that keeps rejected messages.
    pub dead_letter_stream: String,
    /// Subjects of the stream, if the consumer creates it.
    pub stream_subjects: Vec<String>,
    pub declare: Declare,
    /// Time limit for connecting, and for acknowledging one message.
    pub timeout: Duration,
}

impl NatsConsumerOptions {
    pub fn new(
        url: BrokerUrl,
        stream: impl Into<String>,
        filter: impl Into<String>,
        durable: impl Into<String>,
    ) -> Self {
        let (stream, filter, durable) = (stream.into(), filter.into(), durable.into());
        NatsConsumerOptions {
            url,
            name: "faena".into(),
            stream_subjects: vec![filter.clone()],
            filter,
            prefetch: 100,
            ack_wait: Duration::from_secs(30),
            dead_letter_subject: format!("{durable}.dead"),
            dead_letter_stream: format!("{stream}-{durable}-dead"),
            stream,
            durable,
            declare: Declare::IfMissing,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

/// A consumer of a stream.
pub struct NatsConsumer {
    options: NatsConsumerOptions,
    subscription: Option<Subscription>,
}

/// A connection with a running pull consumer.
struct Subscription {
    client: Client,
    context: jetstream::Context,
    health: watch::Receiver<Health>,
    deliveries: pull::Stream,
}

#[derive(Debug)]
pub(crate) struct AckHandle {
    message: jetstream::Message,
    context: jetstream::Context,
    id: String,
    dead_letter_subject: String,
    timeout: Duration,
}

impl NatsConsumer {
    pub fn new(options: NatsConsumerOptions) -> Self {
        NatsConsumer { options, subscription: None }
    }

    async fn receive(&mut self) -> Result<Delivery, BrokerError> {
        let NatsConsumerOptions { url, timeout, .. } = &self.options;
        let subscribe = self.options.subscribe();
        let subscription = delivery::ensure_subscribed(&mut self.subscription, url, *timeout, subscribe).await?;
        let received = tokio::select! {
            received = subscription.deliveries.next() => received,
            _ = subscription.health.wait_for(|health| health.is_lost) => None,
        };
        let context = subscription.context.clone();
        let lost = BrokerError::new(format!("lost the connection to {url}"));
        match received {
            Some(Ok(message)) => Ok(self.options.to_delivery(message, context)),
            Some(Err(error)) => Err(lost.with_source(&error)),
            None => Err(lost.with_source(&BrokerError::new("the connection broke"))),
        }
    }
}

#[async_trait]
impl Consumer for NatsConsumer {
    async fn next(&mut self) -> Result<Delivery, BrokerError> {
        let received = self.receive().await;
        received.map_err(|error| {
            self.subscription = None;
            error.redact(&self.options.url)
        })
    }

    async fn close(&mut self) {
        if let Some(subscription) = self.subscription.take() {
            // The connection may be broken already; then there is nothing to close.
            let _ = tokio::time::timeout(self.options.timeout, subscription.client.drain()).await;
        }
    }
}

impl NatsConsumerOptions {
    async fn subscribe(&self) -> Result<Subscription, BrokerError> {
        let (client, health) = connect(&self.url, &self.name).await?;
        let builder = jetstream::context::ContextBuilder::new().timeout(self.timeout).ack_timeout(self.timeout);
        let context = builder.build(client.clone());
        ensure_stream(&context, &self.stream, self.stream_subjects.clone(), self.declare).await?;
        if self.declare == Declare::IfMissing {
            let subjects = vec![self.dead_letter_subject.clone()];
            ensure_stream(&context, &self.dead_letter_stream, subjects, self.declare).await?;
        }
        let consumer = self.ensure_consumer(&context).await?;
        let stream = consumer.stream().max_messages_per_batch(usize::from(self.prefetch.max(1)));
        let stream = stream.expires(PULL_EXPIRES).heartbeat(PULL_HEARTBEAT);
        let deliveries = stream.messages().await.map_err(|error| self.consumer_error("cannot use", &error))?;
        Ok(Subscription { client, context, health, deliveries })
    }

    /// Creates the consumer if it is missing and `declare` allows it.
    async fn ensure_consumer(
        &self,
        context: &jetstream::Context,
    ) -> Result<jetstream::consumer::Consumer<pull::Config>, BrokerError> {
        let stream = context.get_stream(&self.stream).await;
        let stream = stream
            .map_err(|error| BrokerError::new(format!("cannot use stream {:?}", self.stream)).with_source(&error))?;
        if self.declare == Declare::Never {
            let found = stream.get_consumer(&self.durable).await;
            return found.map_err(|error| {
                let message = format!(
                    "cannot use consumer {:?} of stream {:?}; create it, or set declare = true",
                    self.durable, self.stream
                );
                BrokerError::new(message).with_source(error.as_ref())
            });
        }
        let config = pull::Config {
            durable_name: Some(self.durable.clone()),
            filter_subject: self.filter.clone(),
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.ack_wait,
            max_ack_pending: i64::from(self.prefetch.max(1)),
            ..Default::default()
        };
        let created = stream.get_or_create_consumer(&self.durable, config).await;
        created.map_err(|error| self.consumer_error("cannot create", &error))
    }

    fn consumer_error(&self, problem: &str, error: &(dyn std::error::Error + 'static)) -> BrokerError {
        let NatsConsumerOptions { durable, stream, .. } = self;
        BrokerError::new(format!("{problem} consumer {durable:?} of stream {stream:?}")).with_source(error)
    }

    fn to_delivery(&self, message: jetstream::Message, context: jetstream::Context) -> Delivery {
        let header =
            |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name)).map(ToString::to_string);
        let info = message.info().ok();
        let position = info.as_ref().map(|info| format!("{}:{}", info.stream, info.stream_sequence));
        let redelivered = info.is_some_and(|info| info.delivered > 1);
        let id = header("Nats-Msg-Id").filter(|id| !id.is_empty()).or(position);
        let subject = message.subject.to_string();
        let kind = header("Type");
        Delivery {
            has_kind: kind.is_some(),
            kind: kind.unwrap_or_else(|| subject.clone()),
            subject,
            correlation_id: header("CorrelationId"),
            traceparent: header("traceparent"),
            content_type: header("Content-Type"),
            body: message.payload.clone(),
            redelivered,
            ack_handle: delivery::AckHandle::Nats(Box::new(AckHandle {
                id: id.clone().unwrap_or_default(),
                message,
                context,
                dead_letter_subject: self.dead_letter_subject.clone(),
                timeout: self.timeout,
            })),
            id,
        }
    }
}

impl AckHandle {
    /// Acknowledges the message and waits until the NATS server has recorded it.
    pub(crate) async fn ack(self) -> Result<(), BrokerError> {
        self.with_timeout(async {
            self.message.double_ack().await.map_err(|error| BrokerError::copy_of(error.as_ref()))
        })
        .await
    }

    pub(crate) async fn requeue(self) -> Result<(), BrokerError> {
        let nak = async {
            self.message.ack_with(AckKind::Nak(None)).await.map_err(|error| BrokerError::copy_of(error.as_ref()))
        };
        self.with_timeout(nak).await
    }

    pub(crate) async fn reject(self, reason: &str) -> Result<(), BrokerError> {
        self.with_timeout(async {
            self.publish_dead_letter(reason).await?;
            self.message.double_ack_with(AckKind::Term).await.map_err(|error| BrokerError::copy_of(error.as_ref()))
        })
        .await
    }

    async fn publish_dead_letter(&self, reason: &str) -> Result<(), BrokerError> {
        let mut headers = self.message.headers.clone().unwrap_or_default();
        headers.insert("x-subject", self.message.subject.as_str());
        headers.insert("x-reason", reason.replace(['\r', '\n'], " "));
        headers.insert(async_nats::header::NATS_MESSAGE_ID, format!("dead {}", self.id));
        let publish = PublishMessage::build().payload(self.message.payload.clone()).headers(headers);
        let sent = self.context.send_publish(self.dead_letter_subject.clone(), publish).await;
        match sent.map_err(|error| BrokerError::copy_of(&error))?.await {
            Ok(_) => Ok(()),
            // No stream keeps dead letters. The message is terminated anyway; the original stream still contains it.
            Err(error) if error.kind() == PublishErrorKind::StreamNotFound => Ok(()),
            Err(error) => Err(BrokerError::copy_of(&error)),
        }
    }

    async fn with_timeout(
        &self,
        acknowledgement: impl Future<Output = Result<(), BrokerError>>,
    ) -> Result<(), BrokerError> {
        let no_answer = || BrokerError::new(format!("no answer within {:?}", self.timeout));
        let result = tokio::time::timeout(self.timeout, acknowledgement).await;
        result.unwrap_or_else(|_| Err(no_answer())).map_err(|error| BrokerError::unacknowledged(&error))
    }
}
