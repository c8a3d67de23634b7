//! Events: the store methods, subscriptions and stored events.
//!
//! Triggers create events in the transaction that moves a row, while a subscription exists
//! (`docs/decisions/004-events-from-rows.md`).

use async_trait::async_trait;
use faena_domain::{CloudEvent, Timestamp};
use uuid::Uuid;

use crate::Result;

/// Events and the subscriptions to them.
#[async_trait]
pub trait EventStore: Send + Sync + 'static {
    /// Registers or renews subscriptions to events.
    ///
    /// While a subscription exists, a transaction that changes a job, worker or schedule also records the event. Without a
    /// subscription, only events of tasks are recorded.
    async fn event_subscribe(&self, subscriptions: Vec<EventSubscription>, now: Timestamp) -> Result<()>;

    /// Returns whether a subscription exists, as far as this process knows.
    fn has_event_subscriptions(&self) -> bool;

    /// Deletes expired subscriptions, up to `limit` events older than `before` that no sink still has to publish, and
    /// ids of inbox messages that are too old.
    ///
    /// Returns the number of deleted events.
    async fn event_prune(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize>;

    /// Lists matching events in commit order.
    ///
    /// A reader that continues from the position of the last event skips none, however late other transactions commit.
    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>>;

    /// Returns the position of the last event; a reader that starts there sees only later events.
    async fn event_last_position(&self) -> Result<EventPosition>;

    /// Returns the range of events that are kept for a subscription. `None` if it does not exist.
    ///
    /// A reader at a position before this range has permanently missed events.
    async fn event_range(&self, name: &str) -> Result<Option<EventRange>>;
}

/// A subscription to events of some types.
#[derive(Clone, PartialEq, Debug)]
pub struct EventSubscription {
    pub name: String,
    /// For example `job.*`, `schedule.missed`, `*`.
    pub types: Vec<String>,
    pub mode: SubscriptionMode,
    /// When the subscription expires unless it is renewed.
    pub until: Timestamp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubscriptionMode {
    /// Events are kept for readers.
    Keep,
    /// Events wait in the outbox until the sink with the name of the subscription confirms them.
    Queue(OnRejected),
}

/// What happens to later events of a subject when a sink rejects one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnRejected {
    /// They wait until it is confirmed or resolved.
    Park,
    /// They are published without it.
    #[default]
    Skip,
}

impl SubscriptionMode {
    pub fn is_queued(self) -> bool {
        matches!(self, SubscriptionMode::Queue(_))
    }

    pub fn parks(self) -> bool {
        self == SubscriptionMode::Queue(OnRejected::Park)
    }
}

/// Position of an event in commit order. Readers continue from the last position they read.
pub type EventPosition = i64;

/// The range of events that are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventRange {
    /// Every event after this position is kept. Earlier ones were pruned or never recorded.
    pub after: EventPosition,
    /// No event has a later position yet.
    pub last: EventPosition,
}

/// A recorded event.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredEvent {
    pub position: EventPosition,
    pub id: Uuid,
    pub kind: String,
    pub subject: Uuid,
    pub sequence: i64,
    pub at: Timestamp,
    pub correlation_id: String,
    pub actor: String,
    pub traceparent: Option<String>,
    /// JSON.
    pub data: String,
}

impl StoredEvent {
    /// Returns the event as a CloudEvent.
    pub fn cloud_event<'a>(&'a self, source: &'a str) -> CloudEvent<'a> {
        CloudEvent {
            source,
            id: self.id,
            kind: &self.kind,
            subject: self.subject,
            time: self.at,
            correlation_id: &self.correlation_id,
            sequence: self.sequence,
            actor: &self.actor,
            traceparent: self.traceparent.as_deref(),
            data: &self.data,
        }
    }
}

/// Which events to list.
#[derive(Clone, PartialEq, Debug)]
pub enum EventQuery {
    /// Events after this position.
    After(EventPosition),
    /// Events with this correlation id, oldest first.
    Correlation(String),
    /// Events about one job, task, worker or schedule after this sequence number, oldest first.
    Subject { id: Uuid, after: i64 },
}

/// Actor of events that no caller, worker or named part of the server causes.
pub(crate) const SYSTEM: &str = "system";
/// Actor of everything that the guardian decides: lost workers, dead servers, missed deadlines.
pub const GUARDIAN: &str = "system:guardian";
/// Actor of what schedules do at their due times.
pub(crate) const SCHEDULER: &str = "system:scheduler";

/// The columns of `event` rows that are read.
pub const COLUMNS: &str = "position, id, type, subject, sequence, at, correlation, actor, traceparent, data";

/// How long the ids of processed inbox messages are kept.
pub const INBOX_KEPT_MS: i64 = 30 * 24 * 3_600_000;
