//! Publishes to a Redis stream: one entry per message, appended by pipelined `XADD`.
//!
//! Redis confirms an entry once it is in memory. Its settings `appendonly` and `appendfsync` decide which entries survive a
//! crash of Redis.

use std::time::Duration;

use async_trait::async_trait;
use redis::{AsyncConnectionConfig, Client, Pipeline, RedisError, ServerErrorKind, aio::MultiplexedConnection};
use tokio::sync::Mutex;

use crate::{
    BrokerError, BrokerUrl, CONNECT_TIMEOUT, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Message, PublishOutcome, PublishReport,
    Sink,
};

/// Settings of a [`RedisSink`].
#[derive(Clone, Debug)]
pub struct RedisSinkOptions {
    pub url: BrokerUrl,
    /// Key of the stream. Redis creates the stream with its first entry.
    pub stream: String,
    /// Approximate number of entries to keep; Redis removes the oldest.
    pub max_length: Option<u64>,
    /// Time limit for one call to `publish`, including connecting.
    pub timeout: Duration,
    /// Limit for messages sent and not yet confirmed.
    pub window: usize,
    /// Size limit; the sink rejects larger bodies.
    ///
    /// Must not exceed the server's `proto-max-bulk-len`: the server closes a connection that sends more.
    pub max_body_bytes: usize,
}

const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

impl RedisSinkOptions {
    pub fn new(url: BrokerUrl, stream: impl Into<String>) -> Self {
        RedisSinkOptions {
            url,
            stream: stream.into(),
            max_length: None,
            timeout: DEFAULT_TIMEOUT,
            window: DEFAULT_WINDOW,
            max_body_bytes: MAX_BODY_BYTES,
        }
    }
}

/// A publisher to a stream.
pub struct RedisSink {
    options: RedisSinkOptions,
    /// The idle connection. A call takes it out and puts it back only if it still works.
    idle: Mutex<Option<MultiplexedConnection>>,
}

/// What an error reply is about.
enum ReplyError {
    Message(String),
    Server(BrokerError),
}

impl RedisSink {
    pub fn new(options: RedisSinkOptions) -> Self {
        RedisSink { options, idle: Mutex::new(None) }
    }

    async fn send(&self, messages: &[Message], outcomes: &mut [Option<PublishOutcome>]) -> Result<(), BrokerError> {
        let mut idle = self.idle.lock().await;
        let mut connection = match idle.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let window = self.options.window.max(1);
        let sendable: Vec<usize> = (0..messages.len()).filter(|index| outcomes[*index].is_none()).collect();
        for indexes in sendable.chunks(window) {
            let pipeline = self.pipeline(indexes.iter().map(|index| &messages[*index]));
            let replies: Result<Vec<Result<String, RedisError>>, RedisError> =
                pipeline.query_async(&mut connection).await;
            let replies = replies.map_err(|error| {
                BrokerError::new(format!("lost the connection to {}", self.options.url)).with_source(&error)
            })?;
            self.record_replies(indexes, replies, outcomes)?;
        }
        *idle = Some(connection);
        Ok(())
    }

    /// Records the outcome of every reply, including those after a reply that shows that the server cannot be used.
    fn record_replies(
        &self,
        indexes: &[usize],
        replies: Vec<Result<String, RedisError>>,
        outcomes: &mut [Option<PublishOutcome>],
    ) -> Result<(), BrokerError> {
        let mut outage = None;
        for (index, reply) in indexes.iter().zip(replies) {
            match reply.map_err(|error| self.classify(&error)) {
                Ok(_) => outcomes[*index] = Some(PublishOutcome::Confirmed),
                Err(ReplyError::Message(reason)) => outcomes[*index] = Some(PublishOutcome::Rejected(reason)),
                Err(ReplyError::Server(error)) => outage = outage.or(Some(error)),
            }
        }
        outage.map_or(Ok(()), Err)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, BrokerError> {
        let url = &self.options.url;
        let client = Client::open(url.expose())
            .map_err(|error| BrokerError::new(format!("invalid Redis URL {url}")).with_source(&error))?;
        // `publish` limits the whole call; the library's default response timeout of half a second is too short for a pipeline.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(self.options.timeout));
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(|error| BrokerError::new(format!("cannot connect to {url}")).with_source(&error))?;
        // A server that is loading its data rejects commands until it has finished: without this check it could reject
        // the first messages of a window and accept the later ones, out of order.
        let ready: Result<(), RedisError> = redis::cmd("PING").query_async(&mut connection).await;
        ready.map_err(|error| self.unusable(&error))?;
        Ok(connection)
    }

    fn pipeline<'a>(&self, messages: impl ExactSizeIterator<Item = &'a Message>) -> Pipeline {
        let mut pipeline = Pipeline::with_capacity(messages.len());
        for message in messages {
            let command = pipeline.cmd("XADD").arg(&self.options.stream);
            if let Some(length) = self.options.max_length {
                command.arg("MAXLEN").arg("~").arg(length);
            }
            command.arg("*").arg("id").arg(&message.id).arg("type").arg(&message.kind).arg("key").arg(&message.key);
            command.arg("sequence").arg(message.sequence).arg("at").arg(message.at.to_string());
            command.arg("contentType").arg(message.content_type.as_ref());
            for (field, value) in [("correlationId", &message.correlation_id), ("traceparent", &message.traceparent)] {
                if let Some(value) = value {
                    command.arg(field).arg(value);
                }
            }
            command.arg("body").arg(message.body.as_ref());
        }
        pipeline.ignore_errors();
        pipeline
    }

    fn reject_too_large(&self, message: &Message) -> Option<PublishOutcome> {
        let (bytes, limit) = (message.body.len(), self.options.max_body_bytes);
        let reason = || format!("body has {bytes} bytes; the sink accepts at most {limit}");
        (bytes > limit).then(|| PublishOutcome::Rejected(reason()))
    }

    /// Decides whether an error reply is about one message or about the server.
    ///
    /// Only a plain `ERR` is about the message. Every other code (out of memory, loading, read only, no permission, disk
    /// failure) concerns all messages, and so do two kinds of `ERR`: a protocol error, after which the server closes the
    /// connection, and a stream that has used up its entry ids. Redis distinguishes these two by their text alone.
    fn classify(&self, error: &RedisError) -> ReplyError {
        let text = error.to_string();
        let concerns_all = text.contains("Protocol error") || text.contains("exhausted the last possible ID");
        match error.kind() {
            redis::ErrorKind::Server(ServerErrorKind::ResponseError) if !concerns_all => ReplyError::Message(text),
            _ if error.code() == Some("WRONGTYPE") => ReplyError::Server(
                BrokerError::new(format!(
                    "key {:?} is not a stream; use another key or delete it",
                    self.options.stream
                ))
                .with_source(error),
            ),
            _ => ReplyError::Server(self.unusable(error)),
        }
    }

    fn unusable(&self, error: &RedisError) -> BrokerError {
        BrokerError::new(format!("{} does not accept messages", self.options.url)).with_source(error)
    }
}

#[async_trait]
impl Sink for RedisSink {
    async fn publish(&self, messages: &[Message]) -> PublishReport {
        let mut outcomes: Vec<Option<PublishOutcome>> =
            messages.iter().map(|message| self.reject_too_large(message)).collect();
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &mut outcomes)).await;
        let outage = match sent {
            Ok(sent) => sent.err(),
            Err(_) => Some(BrokerError::unanswered(&self.options.url, self.options.timeout)),
        };
        PublishReport { outcomes, outage: outage.map(|error| error.redact(&self.options.url)) }
    }

    async fn close(&self) {
        // Needs no timeout: every call that holds the lock has one.
        self.idle.lock().await.take();
    }
}
