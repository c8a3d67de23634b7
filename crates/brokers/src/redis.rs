//! Redis streams: one entry per message, appended by pipelined `XADD`.
//!
//! Redis confirms what it has in memory. What survives a crash of it is decided there (`appendonly`, `appendfsync`), not here.

use std::time::Duration;

use async_trait::async_trait;
use redis::{AsyncConnectionConfig, Client, Pipeline, RedisError, ServerErrorKind, aio::MultiplexedConnection};
use tokio::sync::Mutex;

use crate::{BrokerUrl, CONNECT_TIMEOUT, DEFAULT_TIMEOUT, DEFAULT_WINDOW, Message, Published, Sink, Verdict};

#[derive(Clone, Debug)]
pub struct RedisSinkOptions {
    pub url: BrokerUrl,
    /// The key of the stream. Redis makes it with the first entry.
    pub stream: String,
    /// Keep about this many entries, the newest.
    pub max_length: Option<u64>,
    /// How long one call to `publish` may take, connecting included.
    pub timeout: Duration,
    pub window: usize,
    /// Larger ones are refused. Must not be above the server's `proto-max-bulk-len`: that closes the connection over what is larger.
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

pub struct RedisSink {
    options: RedisSinkOptions,
    /// Taken out while it is used, and put back only if it is still good.
    link: Mutex<Option<MultiplexedConnection>>,
}

impl RedisSink {
    pub fn new(options: RedisSinkOptions) -> Self {
        RedisSink { options, link: Mutex::new(None) }
    }

    async fn send(&self, messages: &[Message], verdicts: &mut [Option<Verdict>]) -> Result<(), String> {
        let mut place = self.link.lock().await;
        let mut link = match place.take() {
            Some(link) => link,
            None => self.connect().await?,
        };
        let window = self.options.window.max(1);
        let fitting: Vec<usize> = (0..messages.len()).filter(|index| verdicts[*index].is_none()).collect();
        for indexes in fitting.chunks(window) {
            let pipeline = self.pipeline(indexes.iter().map(|index| &messages[*index]));
            let answers: Result<Vec<Result<String, RedisError>>, RedisError> = pipeline.query_async(&mut link).await;
            let answers = answers.map_err(|error| format!("lost {}: {error}", self.options.url))?;
            self.judge(indexes, answers, verdicts)?;
        }
        *place = Some(link);
        Ok(())
    }

    /// Takes down every answer, also those behind one that says the server as a whole takes nothing.
    fn judge(
        &self,
        indexes: &[usize],
        answers: Vec<Result<String, RedisError>>,
        verdicts: &mut [Option<Verdict>],
    ) -> Result<(), String> {
        let mut down = None;
        for (index, answer) in indexes.iter().zip(answers) {
            match answer.map_err(|error| self.message_error(error)) {
                Ok(_) => verdicts[*index] = Some(Verdict::Confirmed),
                Err(Ok(reason)) => verdicts[*index] = Some(Verdict::Refused(reason)),
                Err(Err(reason)) => down = down.or(Some(reason)),
            }
        }
        down.map_or(Ok(()), Err)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, String> {
        let client = Client::open(self.options.url.expose())
            .map_err(|error| format!("cannot use {}: {error}", self.options.url))?;
        // The whole call is bounded already; the library's own half second is too short for a pipeline.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(self.options.timeout));
        let connected = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut link = connected.map_err(|error| format!("cannot connect to {}: {error}", self.options.url))?;
        // A server that is still loading its data refuses commands until it suddenly does not: the first messages of a window would be
        // lost to it and the later ones taken.
        let ready: Result<(), RedisError> = redis::cmd("PING").query_async(&mut link).await;
        ready.map_err(|error| format!("{} does not take messages: {error}", self.options.url))?;
        Ok(link)
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

    fn too_large(&self, message: &Message) -> Option<Verdict> {
        let (bytes, limit) = (message.body.len(), self.options.max_body_bytes);
        (bytes > limit).then(|| Verdict::Refused(format!("it has {bytes} bytes, and {limit} are allowed at most")))
    }

    /// A plain `ERR` is about the one message; anything else (out of memory, loading, read only, no permission, a disk that fails) meets all. So do two
    /// kinds of `ERR`: of a connection that may not talk or is about to be closed, and of a stream that has come to the end of its numbers.
    fn message_error(&self, error: RedisError) -> Result<String, String> {
        let text = error.to_string();
        let meets_all = text.contains("Protocol error") || text.contains("exhausted the last possible ID");
        match error.kind() {
            redis::ErrorKind::Server(ServerErrorKind::ResponseError) if !meets_all => Ok(text),
            _ if error.code() == Some("WRONGTYPE") => {
                Err(format!("the key {:?} is no stream: name another, or delete it", self.options.stream))
            }
            _ => Err(format!("{} does not take messages: {text}", self.options.url)),
        }
    }
}

#[async_trait]
impl Sink for RedisSink {
    async fn publish(&self, messages: &[Message]) -> Published {
        let mut verdicts: Vec<Option<Verdict>> = messages.iter().map(|message| self.too_large(message)).collect();
        let sent = tokio::time::timeout(self.options.timeout, self.send(messages, &mut verdicts)).await;
        let down = match sent {
            Ok(sent) => sent.err(),
            Err(_) => Some(format!("{} did not answer within {:?}", self.options.url, self.options.timeout)),
        };
        Published { verdicts, down: down.map(|reason| self.options.url.clean(reason)) }
    }

    async fn close(&self) {
        // Bounded like everything that waits for the lock: whoever has it is.
        self.link.lock().await.take();
    }
}
