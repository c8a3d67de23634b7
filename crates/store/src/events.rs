//! Events, as far as both engines agree: who wants which, and what one is. How they come to be stands in
//! `docs/decisions/004-events-from-rows.md`: triggers derive them from where rows go, in the transaction that moves them, and exist only
//! while somebody wants events.

use faena_domain::{CloudEvent, Timestamp};
use uuid::Uuid;

/// Somebody wants events of some types.
#[derive(Clone, PartialEq, Debug)]
pub struct EventSubscription {
    pub name: String,
    /// `job.*`, `schedule.missed`, `*`.
    pub types: Vec<String>,
    pub mode: SubscriptionMode,
    /// The wish is forgotten then, unless it is repeated.
    pub until: Timestamp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubscriptionMode {
    /// They are kept, for whoever reads them.
    Keep,
    /// They wait in the outbox until the sink of this name has confirmed them.
    Queue(OnRejected),
}

/// What becomes of the later messages of a subject when a sink refuses one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnRejected {
    /// They wait until it has gone through or somebody has resolved it.
    Park,
    /// They go on without it.
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

/// Where an event stands among all. Readers go on from there.
pub type EventPosition = i64;

/// From where to where events are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventRange {
    /// Everything that happened after this place is kept. Before, nobody wanted it, or it was removed as old.
    pub after: EventPosition,
    /// No event has a later place yet.
    pub last: EventPosition,
}

/// What happened.
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
    /// As it is told to the outside.
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

/// Which events are looked for.
#[derive(Clone, PartialEq, Debug)]
pub enum EventQuery {
    /// What was committed after this place.
    After(EventPosition),
    /// What belongs together, the first one first.
    Correlation(String),
}

/// What `event` rows are read from.
pub const COLUMNS: &str = "position, id, type, subject, sequence, at, correlation, actor, traceparent, data";

/// How long is remembered what came in from outside, so that it is dealt with once.
pub const INBOX_KEPT_MS: i64 = 30 * 24 * 3_600_000;
