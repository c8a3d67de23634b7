//! The outbox, as far as both engines agree: what a relay takes, what it tells, what people see and do.

use faena_domain::{FieldError, NodeId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{AuditEntry, StoreError, StoredEvent};

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
pub struct OutboxTakeRequest {
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

/// Dead letters that one replay puts back at most; asked again, it goes on.
pub const REPLAYED_AT_ONCE: i64 = 100_000;

/// Events that are published again at once at most: it is one transaction.
pub const REPUBLISHED_AT_ONCE: i64 = 250_000;

/// How far is counted what waits and what is dead.
pub const COUNTED: i64 = 1_000_000;

/// What is written down of a dead letter that was replayed.
pub const REPLAYED: &str = "replayed";

/// What `outbox_dlq` rows are read from.
pub const DEAD_COLUMNS: &str = "id, sink, original_event_id, aggregate_id, aggregate_type, event_type, payload, metadata, error_message, \
     retry_count, original_created_at, moved_at, resolved_at, resolved_by, resolution_notes";

/// A row of `outbox_lease`.
#[derive(Clone, PartialEq, Debug)]
pub struct Lease {
    pub partition: i16,
    pub node: Option<NodeId>,
    pub epoch: i64,
    pub until: Timestamp,
}

impl Lease {
    fn is_of(&self, node: NodeId) -> bool {
        self.node == Some(node)
    }

    fn is_free(&self, now: Timestamp) -> bool {
        self.node.is_none() || self.until <= now
    }
}

/// Who publishes to a sink, as it is read in one look.
#[derive(Clone, Default, Debug)]
pub struct PartitionLeases {
    pub leases: Vec<Lease>,
    /// Who asks, until when it counts.
    pub nodes: Vec<(NodeId, Timestamp)>,
}

impl PartitionLeases {
    /// What has to be written so that the asker has its share, and keeps it: the leases that change. `None`: nothing, not even that it asks.
    pub fn rebalance(&self, request: &OutboxTakeRequest, now: Timestamp) -> Option<Vec<Lease>> {
        let until = now.plus_ms(request.lease_ms);
        let is_late = |end: Timestamp| end.ms_since(now) < request.lease_ms / 2;
        let others = self.nodes.iter().filter(|(node, end)| *node != request.node && *end > now).count();
        let quota = usize::from(PARTITIONS.unsigned_abs()).div_ceil(others + 1);
        let (own, rest): (Vec<&Lease>, Vec<&Lease>) = self.leases.iter().partition(|lease| lease.is_of(request.node));
        let mut changed = Vec::new();
        for lease in own.iter().skip(quota) {
            changed.push(Lease { node: None, until: Timestamp::from_ms(0), ..(*lease).clone() });
        }
        for lease in rest.iter().filter(|lease| lease.is_free(now)).take(quota.saturating_sub(own.len())) {
            changed.push(Lease { partition: lease.partition, node: Some(request.node), epoch: lease.epoch + 1, until });
        }
        let requests = self.nodes.iter().any(|(node, end)| *node == request.node && !is_late(*end));
        if changed.is_empty() && requests && own.iter().all(|lease| !is_late(lease.until)) {
            return None;
        }
        changed.extend(own.iter().take(quota).map(|lease| Lease { until, ..(*lease).clone() }));
        Some(changed)
    }

    /// What is this node's now.
    pub fn owned_by(&self, node: NodeId, now: Timestamp) -> Vec<Partition> {
        let own = self.leases.iter().filter(|lease| lease.is_of(node) && lease.until > now);
        own.map(|lease| Partition { number: lease.partition, epoch: lease.epoch }).collect()
    }
}

/// How many rows of each part are looked at first: an even share, and as much again. Should one part have more than that and the others
/// too little, it is looked at again.
pub fn share(limit: usize, parts: usize) -> usize {
    (2 * limit).div_ceil(parts.max(1)).min(limit)
}

/// Whether there may be more than was read with this share.
pub fn is_short(events: &[OutboxEvent], limit: usize, share: usize) -> bool {
    let full = |number: i16| events.iter().filter(|event| event.partition == number).count() >= share;
    share < limit && events.len() < limit && (0..PARTITIONS).any(full)
}

/// The part that a subject's events are in.
pub fn partition_of(subject: Uuid) -> i16 {
    i16::from(subject.as_bytes()[15]) & (PARTITIONS - 1)
}

/// Refusals that count: those of parts that have had no other holder since.
pub fn counted<'a>(
    results: &'a [OutboxResult],
    owned_by: &[Partition],
    epochs: &[(i16, i64)],
) -> Vec<&'a OutboxResult> {
    let ours = |number: i16| {
        let epoch = owned_by.iter().find(|part| part.number == number).map(|part| part.epoch);
        epochs.iter().any(|(partition, now)| *partition == number && Some(*now) == epoch)
    };
    results.iter().filter(|result| result.refused.is_some() && ours(result.partition)).collect()
}

/// The n-th of several that go out at a pace.
pub fn due_at(n: usize, per_second: Option<u32>, now: Timestamp) -> i64 {
    match per_second {
        None => 0,
        Some(per_second) => {
            now.as_ms() + i64::try_from(n).unwrap_or(i64::MAX / 1_000) * 1_000 / i64::from(per_second.max(1))
        }
    }
}

pub fn replayed(filter: &DeadFilter, by: &str, count: usize) -> AuditEntry {
    act(filter, "outbox.replay", json!({}), by, count)
}

pub fn resolved(filter: &DeadFilter, notes: &str, by: &str, count: usize) -> AuditEntry {
    act(filter, "outbox.resolve", json!({ "notes": notes }), by, count)
}

pub fn republished(what: &Republish, by: &str, count: usize) -> AuditEntry {
    let mut details = json!({ "from": what.from, "to": what.to });
    if let Some(kind) = &what.event_type {
        details["type"] = json!(kind);
    }
    entry(by, "outbox.republish", what.sink.clone(), details, count)
}

pub fn too_many_republished() -> StoreError {
    let text = format!("more than {REPUBLISHED_AT_ONCE} events happened then; name a shorter time");
    StoreError::Invalid(vec![FieldError::new("to", text)])
}

fn act(filter: &DeadFilter, action: &str, mut details: Value, by: &str, count: usize) -> AuditEntry {
    let target = match (&filter.ids[..], &filter.sink) {
        ([id], _) => id.to_string(),
        (_, Some(sink)) => sink.clone(),
        _ => "*".into(),
    };
    let mut add = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            details[name] = value;
        }
    };
    add("type", filter.event_type.as_ref().map(|kind| json!(kind)));
    add("aggregateId", filter.aggregate_id.map(|id| json!(id)));
    add("movedAfter", filter.moved_after.map(|at| json!(at)));
    add("movedBefore", filter.moved_before.map(|at| json!(at)));
    add("ids", (filter.ids.len() > 1).then(|| json!(filter.ids.len())));
    entry(by, action, target, details, count)
}

fn entry(by: &str, action: &str, target: String, details: Value, count: usize) -> AuditEntry {
    AuditEntry { actor: by.into(), action: action.into(), target, details, count: count as u64 }
}

pub fn on_bad(park: bool) -> &'static str {
    if park { "park" } else { "skip" }
}
