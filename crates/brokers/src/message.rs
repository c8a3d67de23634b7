//! What is published, and what is known about it afterwards.

use std::borrow::Cow;

use async_trait::async_trait;
use bytes::Bytes;
use faena_domain::Timestamp;

/// One message, as the caller wants it to arrive.
#[derive(Clone, Debug)]
pub struct Message {
    /// The same however often it is published: receivers drop repetitions by it.
    pub id: String,
    /// The type: `job.completed`, or a type name like `TicketFlow.Domain.Events.TicketStatusChangedEvent`.
    pub kind: String,
    /// The aggregate it is about; order counts among messages of one key.
    pub key: String,
    pub sequence: i64,
    pub at: Timestamp,
    pub correlation_id: Option<String>,
    pub traceparent: Option<String>,
    pub content_type: Cow<'static, str>,
    pub body: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The broker has it and said so.
    Confirmed,
    /// The message is bad, for this reason: no routing key, nobody bound, too large, nacked.
    Refused(String),
}

/// What became of the messages of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// One per message; `None` where nothing is known: not sent, or sent and not confirmed.
    pub verdicts: Vec<Option<Verdict>>,
    /// Why the broker as a whole is unusable. Without it, messages with no verdict may be published again at once.
    pub down: Option<String>,
}

impl Published {
    pub fn confirmed(&self) -> usize {
        self.verdicts.iter().filter(|verdict| **verdict == Some(Verdict::Confirmed)).count()
    }
}

/// Whether what is missing on the broker (exchange, queue, stream) may be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Declare {
    #[default]
    IfMissing,
    Never,
}

#[async_trait]
pub trait Sink: Send + Sync {
    /// Sends the messages one behind the other without waiting in between, waits for all confirmations, and comes back within the sink's timeout.
    ///
    /// Messages are sent in the order given, but a refused one does not hold back those behind it: who needs that sends one message of a key at a time.
    async fn publish(&self, messages: &[Message]) -> Published;

    /// Says goodbye to the broker. A later `publish` would connect again.
    async fn close(&self);
}
