//! The outbox, as far as both engines agree: what a relay takes, what it tells, what people see and do.

use faena_domain::{NodeId, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::StoredEvent;

/// Into how many parts a sink's events are divided, so that several nodes can publish.
pub const PARTITIONS: i16 = 16;

/// How often a sink may refuse a message before it goes to the dead letters.
pub const MAX_ATTEMPTS: u32 = 5;

/// A part of a sink's events that one node alone publishes for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partition {
    pub number: i16,
    /// Grows with each holder: who comes with an old one changes nothing.
    pub epoch: i64,
}

/// What a relay wants to publish to one sink.
#[derive(Clone, Debug)]
pub struct OutboxAsk {
    pub sink: String,
    pub node: NodeId,
    pub lease_ms: i64,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct OutboxTaken {
    /// The parts that are this node's until the lease ends.
    pub partitions: Vec<Partition>,
    /// What is due of them, in order; of a subject of which an earlier message is late or dead and that is parked, nothing.
    pub events: Vec<OutboxEvent>,
    /// When something that is late is due again.
    pub next_at: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct OutboxEvent {
    pub partition: i16,
    pub event: StoredEvent,
    /// How often the sink refused it.
    pub attempts: u32,
}

/// What a sink said of one message.
#[derive(Clone, Debug)]
pub struct OutboxResult {
    pub partition: i16,
    pub position: i64,
    /// Why it was refused; `None`: it was confirmed. After `MAX_ATTEMPTS` it is a dead letter, until then it is due again at `again_at`.
    pub refused: Option<String>,
    pub again_at: Timestamp,
}

/// How a sink stands.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SinkView {
    pub name: String,
    pub types: Vec<String>,
    /// `park` or `skip`.
    pub on_bad: String,
    /// Events that wait; counted up to 1 000 000.
    pub pending: u64,
    pub oldest_pending_at: Option<Timestamp>,
    /// Unresolved dead letters.
    pub dead: u64,
    pub sent: u64,
    pub down_since: Option<Timestamp>,
    pub down_reason: Option<String>,
    /// The nodes that publish to it now, and how many parts each.
    pub holders: Vec<(NodeId, u32)>,
}

/// A message that a sink would not take, in the words of seed 000's table.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadEvent {
    pub id: Uuid,
    pub sink: String,
    pub original_event_id: Uuid,
    pub aggregate_id: Uuid,
    pub aggregate_type: String,
    pub event_type: String,
    pub payload: serde_json::Value,
    pub metadata: Option<serde_json::Value>,
    pub error_message: String,
    pub retry_count: u32,
    pub original_created_at: Timestamp,
    pub moved_at: Timestamp,
    pub resolved_at: Option<Timestamp>,
    pub resolved_by: Option<String>,
    pub resolution_notes: Option<String>,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeadFilter {
    pub sink: Option<String>,
    /// A whole type, or with `*`.
    pub event_type: Option<String>,
    pub aggregate_id: Option<Uuid>,
    pub moved_after: Option<Timestamp>,
    pub moved_before: Option<Timestamp>,
    /// `None`: both.
    pub is_resolved: Option<bool>,
    pub ids: Vec<Uuid>,
}

/// Which sent events shall be published again.
#[derive(Clone, PartialEq, Debug)]
pub struct Republish {
    pub sink: String,
    pub from: Timestamp,
    pub to: Timestamp,
    /// A whole type, or with `*`.
    pub event_type: Option<String>,
}
