//! The outbox: leases of partitions, due events and their outcome.

use std::borrow::Cow;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{JobId, NewJob, NodeId, Timestamp};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Postgres, Shared,
    end::storable,
    events::{self, from_like},
    inbox,
    outbox_dlq::{dead, dead_total, replay, republish, resolve},
    read::BEGIN_READ,
};
use crate::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, NewTask, OutboxEvent, OutboxResult, OutboxStore, OutboxTakeRequest,
    OutboxTaken, Partition, PublishingNode, Republish, Result, SinkView, Submitted,
    outbox::{self, Lease, MAX_COUNTED, PartitionLeases, rejected_while_owned},
};

#[async_trait]
impl OutboxStore for Postgres {
    async fn outbox_take(&self, request: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
        self.shared.retrying(|| take(&self.shared, &request, now)).await
    }

    async fn outbox_settle(
        &self,
        sink: &str,
        owned: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()> {
        self.shared.retrying(|| settle(&self.shared, sink, &owned, &results, now)).await
    }

    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| down(&self.shared, sink, reason.as_deref(), now)).await
    }

    async fn outbox_leave(&self, node: NodeId) -> Result<()> {
        self.shared.retrying(|| leave(&self.shared, node)).await
    }

    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>> {
        self.shared.retrying(|| sinks(&self.shared, now)).await
    }

    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
        self.shared.retrying(|| dead(&self.shared, &filter, after, limit)).await
    }

    async fn outbox_dead_total(&self, filter: DeadFilter) -> Result<u64> {
        self.shared.retrying(|| dead_total(&self.shared, &filter)).await
    }

    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize> {
        self.shared.retrying(|| replay(&self.shared, &filter, per_second, by, now)).await
    }

    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| resolve(&self.shared, &filter, notes, by, now)).await
    }

    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>> {
        self.shared.retrying(|| republish(&self.shared, &what, per_second, by, now)).await
    }

    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>> {
        self.shared.retrying(|| inbox::submit(&self.shared, consumer, message, &jobs, now)).await
    }

    async fn inbox_task(&self, consumer: &str, message: &str, task: NewTask, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| inbox::create_task(&self.shared, consumer, message, &task, now)).await
    }
}

/// A sink with a live subscription.
struct Sink {
    id: i16,
    /// Whether events of a subject wait for an earlier event of that subject that became a dead letter.
    park: bool,
}

/// Forces index lookups: the planner's statistics are misleading for tables that grow and shrink within minutes.
const BY_INDEX: &str =
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

/// What a read does if this node's share of the partitions must change.
#[derive(Clone, Copy, PartialEq)]
enum Share {
    /// Reads nothing, so that the caller claims partitions first.
    OnlyIfBalanced,
    /// Reads the partitions that the node owns now.
    Unchanged,
}

/// Returns due events of the partitions that the node owns.
///
/// PostgreSQL: reads without locks, in one snapshot. It claims partitions and reads again only if the leases must be
/// rebalanced.
pub async fn take(shared: &Shared, request: &OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
    if let Some(taken) = peek(shared, request, Share::OnlyIfBalanced, now).await? {
        return Ok(taken);
    }
    let client = shared.begin().await?;
    let stored = store_leases(&client, request, now).await;
    client.end(stored).await?;
    Ok(peek(shared, request, Share::Unchanged, now).await?.unwrap_or_default())
}

async fn peek(
    shared: &Shared,
    request: &OutboxTakeRequest,
    share: Share,
    now: Timestamp,
) -> Result<Option<OutboxTaken>> {
    let client = shared.client().await?;
    client.batch_execute(BEGIN_READ).await?;
    let result = peek_in(&client, request, share, now).await;
    client.end(result).await
}

async fn peek_in(
    client: &Object,
    request: &OutboxTakeRequest,
    share: Share,
    now: Timestamp,
) -> Result<Option<OutboxTaken>> {
    let Some(sink) = live_sink(client, &request.sink, now).await? else { return Ok(Some(OutboxTaken::default())) };
    let partition_leases = partition_leases(client, &sink).await?;
    if share == Share::OnlyIfBalanced && partition_leases.rebalance(request, now).is_some() {
        return Ok(None);
    }
    read(client, request, &sink, partition_leases.owned_by(request.node, now), now).await.map(Some)
}

async fn live_sink(client: &Object, name: &str, now: Timestamp) -> Result<Option<Sink>> {
    let statement = client
        .prepare_cached("SELECT id, park FROM faena.subscription WHERE name = $1 AND queued AND until > $2")
        .await?;
    let row = client.query_opt(&statement, &[&storable(name), &now.as_ms()]).await?;
    Ok(row.map(|row| Sink { id: row.get(0), park: row.get(1) }))
}

async fn partition_leases(client: &Object, sink: &Sink) -> Result<PartitionLeases> {
    let statement = client
        .prepare_cached(
            "SELECT partition, node, epoch, until FROM faena.outbox_lease WHERE sink = $1 ORDER BY partition",
        )
        .await?;
    let leases = client
        .query(&statement, &[&sink.id])
        .await?
        .iter()
        .map(|row| Lease {
            partition: row.get(0),
            node: row.get::<_, Option<Uuid>>(1).map(NodeId),
            epoch: row.get(2),
            until: Timestamp::from_ms(row.get(3)),
        })
        .collect();
    let statement = client.prepare_cached("SELECT node, until FROM faena.outbox_node WHERE sink = $1").await?;
    let nodes = client.query(&statement, &[&sink.id]).await?;
    let nodes = nodes.iter().map(|row| (NodeId(row.get(0)), Timestamp::from_ms(row.get(1)))).collect();
    Ok(PartitionLeases { leases, nodes })
}

/// Claims this node's share of the partitions.
///
/// PostgreSQL: locks the leases of this sink first, so that one node at a time rebalances them. It does not lock the
/// leases of other sinks.
async fn store_leases(client: &Object, request: &OutboxTakeRequest, now: Timestamp) -> Result<()> {
    let Some(sink) = live_sink(client, &request.sink, now).await? else { return Ok(()) };
    client.query("SELECT FROM faena.outbox_lease WHERE sink = $1 ORDER BY partition FOR UPDATE", &[&sink.id]).await?;
    let Some(leases) = partition_leases(client, &sink).await?.rebalance(request, now) else { return Ok(()) };
    client.execute("DELETE FROM faena.outbox_node WHERE sink = $1 AND until <= $2", &[&sink.id, &now.as_ms()]).await?;
    client
        .execute(
            "INSERT INTO faena.outbox_node (sink, node, until) VALUES ($1, $2, $3)
             ON CONFLICT (sink, node) DO UPDATE SET until = excluded.until",
            &[&sink.id, &request.node.0, &now.plus_ms(request.lease_ms).as_ms()],
        )
        .await?;
    let partitions: Vec<i16> = leases.iter().map(|lease| lease.partition).collect();
    let nodes: Vec<Option<Uuid>> = leases.iter().map(|lease| lease.node.map(|node| node.0)).collect();
    let epochs: Vec<i64> = leases.iter().map(|lease| lease.epoch).collect();
    let untils: Vec<i64> = leases.iter().map(|lease| lease.until.as_ms()).collect();
    client
        .execute(
            "UPDATE faena.outbox_lease l SET node = c.node, epoch = c.epoch, until = c.until
             FROM unnest($2::int2[], $3::uuid[], $4::int8[], $5::int8[]) AS c(partition, node, epoch, until)
             WHERE l.sink = $1 AND l.partition = c.partition",
            &[&sink.id, &partitions, &nodes, &epochs, &untils],
        )
        .await?;
    Ok(())
}

async fn read(
    client: &Object,
    request: &OutboxTakeRequest,
    sink: &Sink,
    partitions: Vec<Partition>,
    now: Timestamp,
) -> Result<OutboxTaken> {
    let share = outbox::share(request.limit, partitions.len());
    let mut events = due(client, request, sink, &partitions, share, now).await?;
    if outbox::is_short(&events, request.limit, share) {
        events = due(client, request, sink, &partitions, request.limit, now).await?;
    }
    let numbers: Vec<i16> = partitions.iter().map(|partition| partition.number).collect();
    let statement = client
        .prepare_cached(
            "SELECT due_at FROM faena.outbox WHERE sink = $1 AND due_at > $2 AND due_at > 0 AND partition = ANY($3)
             ORDER BY sink, due_at LIMIT 1",
        )
        .await?;
    let next = client.query_opt(&statement, &[&sink.id, &now.as_ms(), &numbers]).await?;
    Ok(OutboxTaken { partitions, events, next_at: next.map(|row| Timestamp::from_ms(row.get(0))) })
}

/// Reads up to `share` events of each partition.
///
/// Skips an event if an earlier event of its subject is not yet due or was rejected, or is a dead letter for which the
/// sink parks the subject.
async fn due(
    client: &Object,
    request: &OutboxTakeRequest,
    sink: &Sink,
    partitions: &[Partition],
    share: usize,
    now: Timestamp,
) -> Result<Vec<OutboxEvent>> {
    let statement = client
        .prepare_cached(
            "SELECT e.position, e.id, e.type, e.subject, e.sequence, e.at, e.correlation, e.actor, e.traceparent, e.data,
                    x.attempts, x.partition
             FROM unnest($2::int2[]) AS p(partition) CROSS JOIN LATERAL (
                 SELECT o.partition, o.position, o.attempts FROM faena.outbox o
                 WHERE o.sink = $1 AND o.partition = p.partition AND o.due_at <= $3
                   AND NOT EXISTS (SELECT FROM faena.outbox b
                                   WHERE b.sink = o.sink AND b.subject = o.subject AND b.position < o.position AND b.due_at > 0
                                     AND (b.due_at > $3 OR b.attempts > 0))
                   AND NOT ($4 AND EXISTS (SELECT FROM faena.outbox_dlq d
                                           WHERE d.sink = $5 AND d.aggregate_id = o.subject AND d.resolved_at IS NULL
                                             AND d.position < o.position))
                 ORDER BY o.position LIMIT $6) x
             JOIN faena.event e ON e.position = x.position
             ORDER BY x.position LIMIT $7",
        )
        .await?;
    let numbers: Vec<i16> = partitions.iter().map(|partition| partition.number).collect();
    let (share, limit) = (i64::try_from(share).unwrap_or(i64::MAX), i64::try_from(request.limit).unwrap_or(i64::MAX));
    let parameters: [&(dyn ToSql + Sync); 7] =
        [&sink.id, &numbers, &now.as_ms(), &sink.park, &storable(&request.sink), &share, &limit];
    let rows = client.query(&statement, &parameters).await?;
    Ok(rows
        .iter()
        .map(|row| OutboxEvent {
            partition: row.get(11),
            event: events::row(row),
            attempts: u32::try_from(row.get::<_, i16>(10)).unwrap_or(0),
        })
        .collect())
}

pub async fn settle(
    shared: &Shared,
    name: &str,
    owned: &[Partition],
    results: &[OutboxResult],
    now: Timestamp,
) -> Result<()> {
    let client = shared.begin().await?;
    let result = settle_in(&client, name, owned, results, now).await;
    client.end(result).await
}

async fn settle_in(
    client: &Object,
    name: &str,
    owned: &[Partition],
    results: &[OutboxResult],
    now: Timestamp,
) -> Result<()> {
    client.batch_execute(BY_INDEX).await?;
    let Some(sink) = id_of(client, name).await? else { return Ok(()) };
    if results.iter().any(|result| result.rejected.is_some()) {
        reject(client, name, sink, owned, results, now).await?;
    }
    let confirmed = || results.iter().filter(|result| result.rejected.is_none());
    let partitions: Vec<i16> = confirmed().map(|result| result.partition).collect();
    let positions: Vec<i64> = confirmed().map(|result| result.position).collect();
    if positions.is_empty() {
        return Ok(());
    }
    // Updates the counter last, because all nodes write it.
    let statement = client
        .prepare_cached(
            "WITH deleted AS (
                 DELETE FROM faena.outbox o USING unnest($2::int2[], $3::int8[]) AS c(partition, position)
                 WHERE o.sink = $1 AND o.partition = c.partition AND o.position = c.position RETURNING 1)
             UPDATE faena.subscription SET sent = sent + (SELECT count(*) FROM deleted) WHERE id = $1",
        )
        .await?;
    client.execute(&statement, &[&sink, &partitions, &positions]).await?;
    Ok(())
}

async fn reject(
    client: &Object,
    name: &str,
    sink: i16,
    owned: &[Partition],
    results: &[OutboxResult],
    now: Timestamp,
) -> Result<()> {
    // Locks the leases, so that no partition changes its owner before the rejections are written.
    let leases = client
        .query("SELECT partition, epoch FROM faena.outbox_lease WHERE sink = $1 ORDER BY partition FOR SHARE", &[&sink])
        .await?;
    let epochs: Vec<(i16, i64)> = leases.iter().map(|row| (row.get(0), row.get(1))).collect();
    let rejected = rejected_while_owned(results, owned, &epochs);
    let partitions: Vec<i16> = rejected.iter().map(|result| result.partition).collect();
    let positions: Vec<i64> = rejected.iter().map(|result| result.position).collect();
    let retry_times: Vec<i64> = rejected.iter().map(|result| result.retry_at.as_ms().max(1)).collect();
    let errors: Vec<Cow<'_, str>> =
        rejected.iter().filter_map(|result| result.rejected.as_deref()).map(storable).collect();
    let rows = client
        .query(
            "UPDATE faena.outbox o SET attempts = o.attempts + 1, due_at = c.due_at, error = c.error
             FROM unnest($2::int2[], $3::int8[], $4::int8[], $5::text[]) AS c(partition, position, due_at, error)
             WHERE o.sink = $1 AND o.partition = c.partition AND o.position = c.position
             RETURNING o.partition, o.position, o.attempts",
            &[&sink, &partitions, &positions, &retry_times, &errors],
        )
        .await?;
    let exhausted =
        rows.iter().filter(|row| u32::try_from(row.get::<_, i16>(2)).is_ok_and(|attempts| attempts >= MAX_ATTEMPTS));
    let mut exhausted: Vec<(i64, i16)> = exhausted.map(|row| (row.get(1), row.get(0))).collect();
    exhausted.sort_unstable();
    if exhausted.is_empty() { Ok(()) } else { move_to_dlq(client, name, sink, &exhausted, now).await }
}

/// Moves events to the dead letters.
async fn move_to_dlq(client: &Object, name: &str, sink: i16, exhausted: &[(i64, i16)], now: Timestamp) -> Result<()> {
    let ids: Vec<Uuid> = exhausted.iter().map(|_| JobId::at(now).0).collect();
    let positions: Vec<i64> = exhausted.iter().map(|(position, _)| *position).collect();
    let partitions: Vec<i16> = exhausted.iter().map(|(_, partition)| *partition).collect();
    client
        .execute(
            "INSERT INTO faena.outbox_dlq (id, sink, position, original_event_id, aggregate_id, aggregate_type, event_type, payload,
                 metadata, error_message, retry_count, original_created_at, moved_at)
             SELECT c.id, $5, e.position, e.id, e.subject, split_part(e.type, '.', 1), e.type, e.data,
                    json_strip_nulls(json_build_object('type', e.type, 'correlationId', e.correlation, 'sequence', e.sequence,
                        'actor', e.actor, 'traceparent', e.traceparent))::text,
                    o.error, o.attempts, to_timestamp(e.at / 1000.0), to_timestamp($6::int8 / 1000.0)
             FROM unnest($2::int2[], $3::int8[], $4::uuid[]) AS c(partition, position, id)
             JOIN faena.outbox o ON o.sink = $1 AND o.partition = c.partition AND o.position = c.position
             JOIN faena.event e ON e.position = o.position",
            &[&sink, &partitions, &positions, &ids, &storable(name), &now.as_ms()],
        )
        .await?;
    client
        .execute(
            "DELETE FROM faena.outbox o USING unnest($2::int2[], $3::int8[]) AS c(partition, position)
             WHERE o.sink = $1 AND o.partition = c.partition AND o.position = c.position",
            &[&sink, &partitions, &positions],
        )
        .await?;
    Ok(())
}

pub async fn id_of(client: &Object, name: &str) -> Result<Option<i16>> {
    let statement = client.prepare_cached("SELECT id FROM faena.subscription WHERE name = $1 AND queued").await?;
    Ok(client.query_opt(&statement, &[&storable(name)]).await?.map(|row| row.get(0)))
}

pub async fn down(shared: &Shared, sink: &str, reason: Option<&str>, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let result = client
        .execute(
            "UPDATE faena.subscription SET down_since = CASE WHEN $1::text IS NOT NULL THEN coalesce(down_since, $2) END, down_reason = $1
             WHERE name = $3 AND down_reason IS DISTINCT FROM $1",
            &[&reason.map(storable), &now.as_ms(), &storable(sink)],
        )
        .await;
    client.return_to_pool(result.map(drop).map_err(Into::into))
}

pub async fn leave(shared: &Shared, node: NodeId) -> Result<()> {
    let client = shared.begin().await?;
    let result = leave_in(&client, node).await;
    client.end(result).await
}

async fn leave_in(client: &Object, node: NodeId) -> Result<()> {
    // PostgreSQL: locks the leases in the same order as other transactions do.
    client
        .query("SELECT FROM faena.outbox_lease WHERE node = $1 ORDER BY sink, partition FOR UPDATE", &[&node.0])
        .await?;
    client.execute("UPDATE faena.outbox_lease SET node = NULL, until = 0 WHERE node = $1", &[&node.0]).await?;
    client.execute("DELETE FROM faena.outbox_node WHERE node = $1", &[&node.0]).await?;
    Ok(())
}

pub async fn sinks(shared: &Shared, now: Timestamp) -> Result<Vec<SinkView>> {
    let client = shared.client().await?;
    client.batch_execute(BEGIN_READ).await?;
    let result = sinks_in(&client, now).await;
    client.end(result).await
}

async fn sinks_in(client: &Object, now: Timestamp) -> Result<Vec<SinkView>> {
    let rows = client
        .query(
            "SELECT s.name, s.park, s.sent, s.down_since, s.down_reason,
                    (SELECT count(*) FROM (SELECT FROM faena.outbox o WHERE o.sink = s.id LIMIT $1) x),
                    (SELECT e.at FROM faena.event e WHERE e.position = (SELECT min(first) FROM (
                         SELECT (SELECT min(o.position) FROM faena.outbox o WHERE o.sink = s.id AND o.partition = l.partition) AS first
                         FROM faena.outbox_lease l WHERE l.sink = s.id) f)),
                    (SELECT count(*) FROM (SELECT FROM faena.outbox_dlq d WHERE d.sink = s.name AND d.resolved_at IS NULL LIMIT $1) x),
                    ARRAY(SELECT p.pattern FROM faena.subscription_pattern p WHERE p.subscription = s.id ORDER BY p.pattern),
                    h.nodes, h.parts
             FROM faena.subscription s CROSS JOIN LATERAL (
                 SELECT array_agg(n.node ORDER BY n.node) AS nodes, array_agg(n.parts ORDER BY n.node) AS parts
                 FROM (SELECT node, count(*) AS parts FROM faena.outbox_lease l
                       WHERE l.sink = s.id AND node IS NOT NULL AND l.until > $2 GROUP BY node) n) h
             WHERE s.queued ORDER BY s.name",
            &[&MAX_COUNTED, &now.as_ms()],
        )
        .await?;
    Ok(rows.iter().map(view).collect())
}

fn view(row: &Row) -> SinkView {
    let count = |at: usize| u64::try_from(row.get::<_, i64>(at)).unwrap_or(0);
    let time = |at: usize| row.get::<_, Option<i64>>(at).map(Timestamp::from_ms);
    let nodes = row.get::<_, Option<Vec<Uuid>>>(9).unwrap_or_default().into_iter().map(NodeId);
    let parts = row.get::<_, Option<Vec<i64>>>(10).unwrap_or_default();
    SinkView {
        name: row.get(0),
        types: row.get::<_, Vec<&str>>(8).into_iter().map(from_like).collect(),
        on_rejected: outbox::on_rejected(row.get(1)).into(),
        pending: count(5),
        oldest_pending_at: time(6),
        dead: count(7),
        sent: count(2),
        down_since: time(3),
        down_reason: row.get(4),
        nodes: nodes
            .zip(parts)
            .map(|(node_id, partitions)| PublishingNode { node_id, partitions: u32::try_from(partitions).unwrap_or(0) })
            .collect(),
    }
}
