//! The outbox and the inbox: the store methods, leases of partitions, dead letters of sinks.

use async_trait::async_trait;
use faena_domain::{FieldError, NewJob, NodeId, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{AuditEntry, NewTask, Result, StoreError, StoredEvent, Submitted};

/// The outbox of events for sinks, and the inbox of messages from brokers.
#[async_trait]
pub trait OutboxStore: Send + Sync + 'static {
    /// Leases this node's share of a sink's partitions, and reads their due events.
    ///
    /// No partition belongs to two nodes at the same time. Returns nothing if the sink has no subscription.
    async fn outbox_take(&self, request: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken>;

    /// Records the answers of a sink in one transaction: confirmed events leave the outbox, rejected ones are due again or become dead
    /// letters.
    ///
    /// For a partition that another node has leased meanwhile, only confirmations count.
    async fn outbox_settle(
        &self,
        sink: &str,
        owned: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()>;

    /// Records since when and why a sink is unusable, or (`None`) that it works again. Uses no attempt of any event.
    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()>;

    /// Releases this node's partitions of every sink. Called on shutdown.
    async fn outbox_leave(&self, node: NodeId) -> Result<()>;

    /// Lists the sinks with the state of their outbox.
    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>>;

    /// Lists matching dead letters of sinks whose id is below `after`, newest first.
    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>>;

    /// Returns how many dead events match, counted up to [`crate::COUNT_LIMIT`].
    async fn outbox_dead_total(&self, filter: DeadFilter) -> Result<u64>;

    /// Puts matching unresolved dead letters back into the outbox and marks them resolved, with an entry in the audit log.
    ///
    /// They keep their order and their ids, and are due at a rate of `per_second` (`None`: now). Returns their number.
    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize>;

    /// Marks matching dead letters as resolved, so that parked events continue, with an entry in the audit log. Returns their number.
    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize>;

    /// Puts events that were already published back into the outbox, if they are still kept, with an entry in the audit log.
    ///
    /// They keep their order and their ids. Returns `None` if the sink does not exist.
    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>>;

    /// Stores the jobs of a message from outside, once per consumer and message id, in one transaction.
    ///
    /// Returns `None` if the message was processed before.
    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>>;

    /// Stores the task of a message from outside, once per consumer and message id, in one transaction.
    ///
    /// Returns `false` if the message was processed before.
    async fn inbox_task(&self, consumer: &str, message: &str, task: NewTask, now: Timestamp) -> Result<bool>;
}

/// Number of partitions of a sink's events, so that several nodes can publish.
pub const PARTITIONS: i16 = 16;

/// How often a sink may reject an event before the event becomes a dead letter.
pub const MAX_ATTEMPTS: u32 = 5;

/// A partition of a sink's events, which one node publishes while its lease lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partition {
    pub number: i16,
    /// Grows with each owner; rejections with an old epoch are ignored.
    pub epoch: i64,
}

/// A request for the due events of one sink.
#[derive(Clone, Debug)]
pub struct OutboxTakeRequest {
    pub sink: String,
    pub node: NodeId,
    pub lease_ms: i64,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct OutboxTaken {
    /// The partitions of this node until the lease ends.
    pub partitions: Vec<Partition>,
    /// Their due events in order, without those of a subject that has an earlier event that waits for a retry or is
    /// dead.
    pub events: Vec<OutboxEvent>,
    /// When the next rejected event is due again.
    pub next_at: Option<Timestamp>,
}

#[derive(Clone, Debug)]
pub struct OutboxEvent {
    pub partition: i16,
    pub event: StoredEvent,
    /// How often the sink rejected it.
    pub attempts: u32,
}

/// Answer of a sink to one event.
#[derive(Clone, Debug)]
pub struct OutboxResult {
    pub partition: i16,
    pub position: i64,
    /// Why it was rejected; `None`: confirmed. After `MAX_ATTEMPTS` it becomes a dead letter, until then it is due again
    /// at `retry_at`.
    pub rejected: Option<String>,
    pub retry_at: Timestamp,
}

/// State of a sink.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SinkView {
    pub name: String,
    pub types: Vec<String>,
    /// `park` or `skip`.
    pub on_rejected: String,
    /// Waiting events, counted up to 1 000 000.
    pub pending: u64,
    pub oldest_pending_at: Option<Timestamp>,
    /// Unresolved dead letters.
    pub dead: u64,
    pub sent: u64,
    pub down_since: Option<Timestamp>,
    pub down_reason: Option<String>,
    /// The nodes that publish to it.
    pub nodes: Vec<PublishingNode>,
}

/// A node that publishes to a sink.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishingNode {
    pub node_id: NodeId,
    /// How many of the sink's 16 partitions it publishes.
    pub partitions: u32,
}

/// A dead letter: an event that a sink rejected too often.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
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
    /// A type, or a pattern with `*`.
    pub event_type: Option<String>,
    pub aggregate_id: Option<Uuid>,
    pub moved_after: Option<Timestamp>,
    pub moved_before: Option<Timestamp>,
    /// `None`: both.
    pub is_resolved: Option<bool>,
    pub ids: Vec<Uuid>,
}

/// Which published events to publish again.
#[derive(Clone, PartialEq, Debug)]
pub struct Republish {
    pub sink: String,
    pub from: Timestamp,
    pub to: Timestamp,
    /// A type, or a pattern with `*`.
    pub event_type: Option<String>,
}

/// Maximum number of dead letters that one replay puts back; another call continues.
pub const MAX_REPLAY_BATCH: i64 = 100_000;

/// Maximum number of events that one call republishes. There is a limit because the call is one transaction.
pub const MAX_REPUBLISHED: i64 = 250_000;

/// Maximum number of waiting, and of dead, events that are counted.
pub const MAX_COUNTED: i64 = 1_000_000;

/// Resolution of a dead letter that was replayed.
pub const REPLAYED: &str = "replayed";

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

/// The leases of a sink's partitions, and the nodes that share them.
#[derive(Clone, Default, Debug)]
pub struct PartitionLeases {
    pub leases: Vec<Lease>,
    /// Nodes that request events, with the time until which they count.
    pub nodes: Vec<(NodeId, Timestamp)>,
}

impl PartitionLeases {
    /// Returns the leases that must change so that the requesting node has its share and keeps it. `None` if nothing
    /// must be written, not even that this node still requests events.
    pub fn rebalance(&self, request: &OutboxTakeRequest, now: Timestamp) -> Option<Vec<Lease>> {
        let until = now.plus_ms(request.lease_ms);
        let needs_renewal = |end: Timestamp| end.ms_since(now) < request.lease_ms / 2;
        let other_nodes = self.nodes.iter().filter(|(node, end)| *node != request.node && *end > now).count();
        let quota = usize::from(PARTITIONS.unsigned_abs()).div_ceil(other_nodes + 1);
        let (own, rest): (Vec<&Lease>, Vec<&Lease>) = self.leases.iter().partition(|lease| lease.is_of(request.node));
        let mut changed = Vec::new();
        for lease in own.iter().skip(quota) {
            changed.push(Lease { node: None, until: Timestamp::from_ms(0), ..(*lease).clone() });
        }
        for lease in rest.iter().filter(|lease| lease.is_free(now)).take(quota.saturating_sub(own.len())) {
            changed.push(Lease { partition: lease.partition, node: Some(request.node), epoch: lease.epoch + 1, until });
        }
        let is_registered = self.nodes.iter().any(|(node, end)| *node == request.node && !needs_renewal(*end));
        if changed.is_empty() && is_registered && own.iter().all(|lease| !needs_renewal(lease.until)) {
            return None;
        }
        changed.extend(own.iter().take(quota).map(|lease| Lease { until, ..(*lease).clone() }));
        Some(changed)
    }

    /// Returns the partitions that a node has leased now.
    pub fn owned_by(&self, node: NodeId, now: Timestamp) -> Vec<Partition> {
        let own = self.leases.iter().filter(|lease| lease.is_of(node) && lease.until > now);
        own.map(|lease| Partition { number: lease.partition, epoch: lease.epoch }).collect()
    }
}

/// Returns how many rows the first read takes per partition: twice an even share. If [`is_short`], a second read takes up to the
/// whole limit from each.
pub fn share(limit: usize, parts: usize) -> usize {
    (2 * limit).div_ceil(parts.max(1)).min(limit)
}

/// Returns whether more events may be due than were read with this share.
pub fn is_short(events: &[OutboxEvent], limit: usize, share: usize) -> bool {
    let full = |number: i16| events.iter().filter(|event| event.partition == number).count() >= share;
    share < limit && events.len() < limit && (0..PARTITIONS).any(full)
}

/// Returns the partition of a subject.
pub fn partition_of(subject: Uuid) -> i16 {
    i16::from(subject.as_bytes()[15]) & (PARTITIONS - 1)
}

/// Returns the rejections that count: those of partitions that have kept their owner.
pub fn rejected_while_owned<'a>(
    results: &'a [OutboxResult],
    owned_by: &[Partition],
    epochs: &[(i16, i64)],
) -> Vec<&'a OutboxResult> {
    let is_still_owned = |number: i16| {
        let epoch = owned_by.iter().find(|part| part.number == number).map(|part| part.epoch);
        epochs.iter().any(|(partition, now)| *partition == number && Some(*now) == epoch)
    };
    results.iter().filter(|result| result.rejected.is_some() && is_still_owned(result.partition)).collect()
}

/// Returns when the n-th of several events is due at this rate, in milliseconds; 0 without a rate.
pub fn due_at(n: usize, per_second: Option<u32>, now: Timestamp) -> i64 {
    match per_second {
        None => 0,
        Some(per_second) => {
            now.as_ms() + i64::try_from(n).unwrap_or(i64::MAX / 1_000) * 1_000 / i64::from(per_second.max(1))
        }
    }
}

pub fn replay_audit(filter: &DeadFilter, by: &str, count: usize) -> AuditEntry {
    filter_entry(filter, "outbox.replay", json!({}), by, count)
}

pub fn resolve_audit(filter: &DeadFilter, notes: &str, by: &str, count: usize) -> AuditEntry {
    filter_entry(filter, "outbox.resolve", json!({ "notes": notes }), by, count)
}

pub fn republish_audit(what: &Republish, by: &str, count: usize) -> AuditEntry {
    let mut details = json!({ "from": what.from, "to": what.to });
    if let Some(kind) = &what.event_type {
        details["type"] = json!(kind);
    }
    entry(by, "outbox.republish", what.sink.clone(), details, count)
}

pub fn too_many_republished() -> StoreError {
    let text = format!("more than {MAX_REPUBLISHED} events are in this time range; choose a shorter one");
    StoreError::Invalid(vec![FieldError::new("to", text)])
}

fn filter_entry(filter: &DeadFilter, action: &str, mut details: Value, by: &str, count: usize) -> AuditEntry {
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

pub fn on_rejected(park: bool) -> &'static str {
    if park { "park" } else { "skip" }
}
