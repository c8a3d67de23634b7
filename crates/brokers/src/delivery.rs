//! What arrives from a broker, and how it is acknowledged.

use async_trait::async_trait;
use bytes::Bytes;

use crate::{nats, rabbitmq};

/// The broker is unusable, for this reason. The next call tries to connect again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Down(pub String);

/// One message that arrived. It comes again until it is acknowledged or rejected.
#[derive(Debug)]
pub struct Delivery {
    /// What the sender calls it, the same over repetitions. With NATS, where the sender gave none, its place in the stream.
    pub id: Option<String>,
    /// The type the sender gave it, else the routing key or subject.
    pub kind: String,
    /// The routing key or subject it came by.
    pub subject: String,
    pub correlation_id: Option<String>,
    pub traceparent: Option<String>,
    pub content_type: Option<String>,
    pub body: Bytes,
    /// It was handed out before, here or elsewhere.
    pub redelivered: bool,
    pub(crate) handle: Handle,
}

#[derive(Debug)]
pub(crate) enum Handle {
    RabbitMq(rabbitmq::Handle),
    Nats(Box<nats::Handle>),
}

impl Delivery {
    /// It is dealt with and does not come again, unless the connection breaks now: RabbitMQ does not confirm acknowledgements. Whoever deals with messages
    /// must know them again by their id.
    pub async fn ack(self) -> Result<(), Down> {
        match self.handle {
            Handle::RabbitMq(handle) => handle.ack().await,
            Handle::Nats(handle) => handle.ack().await,
        }
    }

    /// It can never be dealt with: it goes to the dead letters of its queue or consumer.
    pub async fn reject(self, reason: &str) -> Result<(), Down> {
        match self.handle {
            Handle::RabbitMq(handle) => handle.reject().await,
            Handle::Nats(handle) => handle.reject(reason).await,
        }
    }

    /// It could not be dealt with now: it comes again, soon.
    pub async fn give_back(self) -> Result<(), Down> {
        match self.handle {
            Handle::RabbitMq(handle) => handle.give_back().await,
            Handle::Nats(handle) => handle.give_back().await,
        }
    }
}

#[async_trait]
pub trait Consumer: Send {
    /// Waits for the next message, for as long as it takes; connects first if there is no connection. Dropping the wait loses nothing.
    ///
    /// After an error what was handed out and not acknowledged comes again. The caller waits a while before it calls again.
    async fn next(&mut self) -> Result<Delivery, Down>;

    async fn close(&mut self);
}
