//! The outbox: leases of partitions, due events, their outcome, and dead letters.

use async_trait::async_trait;
use faena_domain::{JobId, NewJob, NodeId, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{
    Sqlite,
    events::{self, from_glob},
    inbox,
    outbox_dlq::{dead, dead_total, replay, republish, resolve},
    writer::Tx,
};
use crate::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, NewTask, OutboxEvent, OutboxResult, OutboxStore, OutboxTakeRequest,
    OutboxTaken, Partition, PublishingNode, Republish, Result, SinkView, Submitted,
    outbox::{self, Lease, MAX_COUNTED, PartitionLeases, rejected_while_owned},
};

#[async_trait]
impl OutboxStore for Sqlite {
    async fn outbox_take(&self, request: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
        let peeked = request.clone();
        if let Some(taken) = self.read(move |connection, _| peek(connection, &peeked, now)).await? {
            return Ok(taken);
        }
        self.writer.call(move |tx| take(tx, &request, now)).await
    }

    async fn outbox_settle(
        &self,
        sink: &str,
        owned: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()> {
        let sink = sink.to_owned();
        self.writer.call(move |tx| settle(tx, &sink, &owned, &results, now)).await
    }

    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()> {
        let sink = sink.to_owned();
        self.writer.call(move |tx| down(tx, &sink, reason.as_deref(), now)).await
    }

    async fn outbox_leave(&self, node: NodeId) -> Result<()> {
        self.writer.call(move |tx| leave(tx, node)).await
    }

    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>> {
        self.read(move |connection, _| sinks(connection, now)).await
    }

    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
        self.read(move |connection, _| dead(connection, &filter, after, limit)).await
    }

    async fn outbox_dead_total(&self, filter: DeadFilter) -> Result<u64> {
        self.read(move |connection, _| dead_total(connection, &filter)).await
    }

    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize> {
        let by = by.to_owned();
        self.writer.call(move |tx| replay(tx, &filter, per_second, &by, now)).await
    }

    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
        let (notes, by) = (notes.to_owned(), by.to_owned());
        self.writer.call(move |tx| resolve(tx, &filter, &notes, &by, now)).await
    }

    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>> {
        let by = by.to_owned();
        self.writer.call(move |tx| republish(tx, &what, per_second, &by, now)).await
    }

    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>> {
        let (consumer, message) = (consumer.to_owned(), message.to_owned());
        self.writer.call(move |tx| inbox::submit(tx, &consumer, &message, jobs, now)).await
    }

    async fn inbox_task(&self, consumer: &str, message: &str, task: NewTask, now: Timestamp) -> Result<bool> {
        let (consumer, message) = (consumer.to_owned(), message.to_owned());
        self.writer.call(move |tx| inbox::create_task(tx, &consumer, &message, &task, now)).await
    }
}

/// A sink with a live subscription.
struct Sink {
    id: i64,
    /// Whether events of a subject wait for an earlier event of that subject that became a dead letter.
    park: bool,
}

/// Reads due events, unless the leases must be rebalanced first. SQLite: reads without the writer connection, so that a node
/// with nothing to write does not wait for it.
pub fn peek(connection: &Connection, request: &OutboxTakeRequest, now: Timestamp) -> Result<Option<OutboxTaken>> {
    let Some(sink) = live_sink(connection, &request.sink, now)? else { return Ok(Some(OutboxTaken::default())) };
    let partition_leases = partition_leases(connection, &sink)?;
    if partition_leases.rebalance(request, now).is_some() {
        return Ok(None);
    }
    read(connection, request, &sink, partition_leases.owned_by(request.node, now), now).map(Some)
}

pub fn take(tx: &Tx, request: &OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
    let Some(sink) = live_sink(tx.connection, &request.sink, now)? else { return Ok(OutboxTaken::default()) };
    if let Some(leases) = partition_leases(tx.connection, &sink)?.rebalance(request, now) {
        store_leases(tx, request, &sink, &leases, now)?;
    }
    let owned = partition_leases(tx.connection, &sink)?.owned_by(request.node, now);
    read(tx.connection, request, &sink, owned, now)
}

fn live_sink(connection: &Connection, name: &str, now: Timestamp) -> Result<Option<Sink>> {
    Ok(connection
        .prepare_cached("SELECT id, park FROM subscription WHERE name = ? AND queued AND until > ?")?
        .query_row((name, now.as_ms()), |row| Ok(Sink { id: row.get(0)?, park: row.get(1)? }))
        .optional()?)
}

fn partition_leases(connection: &Connection, sink: &Sink) -> Result<PartitionLeases> {
    let leases = connection
        .prepare_cached("SELECT partition, node, epoch, until FROM outbox_lease WHERE sink = ? ORDER BY partition")?
        .query_map([sink.id], |row| {
            Ok(Lease {
                partition: row.get(0)?,
                node: row.get::<_, Option<Uuid>>(1)?.map(NodeId),
                epoch: row.get(2)?,
                until: Timestamp::from_ms(row.get(3)?),
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    let nodes = connection
        .prepare_cached("SELECT node, until FROM outbox_node WHERE sink = ?")?
        .query_map([sink.id], |row| Ok((NodeId(row.get(0)?), Timestamp::from_ms(row.get(1)?))))?
        .collect::<rusqlite::Result<_>>()?;
    Ok(PartitionLeases { leases, nodes })
}

fn store_leases(tx: &Tx, request: &OutboxTakeRequest, sink: &Sink, leases: &[Lease], now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO outbox_node (sink, node, until) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET until = excluded.until",
        )?
        .execute((sink.id, request.node.0, now.plus_ms(request.lease_ms).as_ms()))?;
    tx.connection
        .prepare_cached("DELETE FROM outbox_node WHERE sink = ? AND until <= ?")?
        .execute((sink.id, now.as_ms()))?;
    let mut put = tx
        .connection
        .prepare_cached("UPDATE outbox_lease SET node = ?, epoch = ?, until = ? WHERE sink = ? AND partition = ?")?;
    for lease in leases {
        let node = lease.node.map(|node| node.0);
        put.execute((node, lease.epoch, lease.until.as_ms(), sink.id, lease.partition))?;
    }
    Ok(())
}

fn read(
    connection: &Connection,
    request: &OutboxTakeRequest,
    sink: &Sink,
    partitions: Vec<Partition>,
    now: Timestamp,
) -> Result<OutboxTaken> {
    let share = outbox::share(request.limit, partitions.len());
    let mut events = due(connection, request, sink, &partitions, share, now)?;
    if outbox::is_short(&events, request.limit, share) {
        events = due(connection, request, sink, &partitions, request.limit, now)?;
    }
    let mut next_at = None;
    for partition in &partitions {
        let next: Option<i64> = connection
            .prepare_cached(
                "SELECT min(due_at) FROM outbox INDEXED BY outbox_due WHERE sink = ? AND due_at > ? AND due_at > 0 AND partition = ?",
            )?
            .query_row((sink.id, now.as_ms().max(0), partition.number), |row| row.get(0))?;
        next_at = [next_at, next].into_iter().flatten().min();
    }
    Ok(OutboxTaken { partitions, events, next_at: next_at.map(Timestamp::from_ms) })
}

/// Reads up to `share` events of each partition.
///
/// Skips an event if an earlier event of its subject is not yet due or was rejected, or is a dead letter for which the
/// sink parks the subject.
fn due(
    connection: &Connection,
    request: &OutboxTakeRequest,
    sink: &Sink,
    partitions: &[Partition],
    share: usize,
    now: Timestamp,
) -> Result<Vec<OutboxEvent>> {
    let mut statement = connection.prepare_cached(
        "SELECT e.position, e.id, e.type, e.subject, e.sequence, e.at, e.correlation, e.actor, e.traceparent, e.data, o.attempts
         FROM outbox o CROSS JOIN event e ON e.position = o.position
         WHERE o.sink = ?1 AND o.partition = ?2 AND o.due_at <= ?3
           AND NOT EXISTS (SELECT 1 FROM outbox b INDEXED BY outbox_late
                           WHERE b.sink = o.sink AND b.subject = o.subject AND b.position < o.position AND b.due_at > 0
                             AND (b.due_at > ?3 OR b.attempts > 0))
           AND NOT (?4 AND EXISTS (SELECT 1 FROM outbox_dlq d INDEXED BY outbox_dlq_open
                                   WHERE d.sink = ?5 AND d.aggregate_id = o.subject AND d.resolved_at IS NULL
                                     AND d.position < o.position))
         ORDER BY o.position LIMIT ?6",
    )?;
    let limit = i64::try_from(share).unwrap_or(i64::MAX);
    let mut events: Vec<OutboxEvent> = Vec::new();
    for partition in partitions {
        let rows = statement
            .query_map((sink.id, partition.number, now.as_ms(), sink.park, &request.sink, limit), |row| {
                Ok(OutboxEvent { partition: partition.number, event: events::row(row)?, attempts: row.get(10)? })
            })?;
        for row in rows {
            events.push(row?);
        }
    }
    events.sort_by_key(|event| event.event.position);
    events.truncate(request.limit);
    Ok(events)
}

pub fn settle(tx: &Tx, name: &str, owned: &[Partition], results: &[OutboxResult], now: Timestamp) -> Result<()> {
    let Some(sink) = id_of(tx.connection, name)? else { return Ok(()) };
    let mut sent = 0;
    let mut remove =
        tx.connection.prepare_cached("DELETE FROM outbox WHERE sink = ? AND partition = ? AND position = ?")?;
    for result in results.iter().filter(|result| result.rejected.is_none()) {
        sent += remove.execute((sink, result.partition, result.position))?;
    }
    if sent > 0 {
        tx.connection
            .prepare_cached("UPDATE subscription SET sent = sent + ? WHERE id = ?")?
            .execute((i64::try_from(sent).unwrap_or(0), sink))?;
    }
    if results.iter().any(|result| result.rejected.is_some()) {
        reject(tx, name, sink, owned, results, now)?;
    }
    Ok(())
}

fn reject(tx: &Tx, name: &str, sink: i64, owned: &[Partition], results: &[OutboxResult], now: Timestamp) -> Result<()> {
    let epochs: Vec<(i16, i64)> = tx
        .connection
        .prepare_cached("SELECT partition, epoch FROM outbox_lease WHERE sink = ?")?
        .query_map([sink], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    for result in rejected_while_owned(results, owned, &epochs) {
        let attempts: Option<u32> = tx
            .connection
            .prepare_cached(
                "UPDATE outbox SET attempts = attempts + 1, due_at = max(?, 1), error = ?
                 WHERE sink = ? AND partition = ? AND position = ? RETURNING attempts",
            )?
            .query_row((result.retry_at.as_ms(), &result.rejected, sink, result.partition, result.position), |row| {
                row.get(0)
            })
            .optional()?;
        if attempts.is_some_and(|attempts| attempts >= MAX_ATTEMPTS) {
            move_to_dlq(tx, name, sink, result, now)?;
        }
    }
    Ok(())
}

/// Moves an event to the dead letters.
fn move_to_dlq(tx: &Tx, name: &str, sink: i64, result: &OutboxResult, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO outbox_dlq (id, sink, position, original_event_id, aggregate_id, aggregate_type, event_type, payload, metadata,
                 error_message, retry_count, original_created_at, moved_at)
             SELECT ?1, ?2, e.position, e.id, e.subject, substr(e.type, 1, instr(e.type || '.', '.') - 1), e.type, e.data,
                    json_patch('{}', json_object('type', e.type, 'correlationId', e.correlation, 'sequence', e.sequence, 'actor', e.actor,
                        'traceparent', e.traceparent)),
                    o.error, o.attempts, e.at, ?3
             FROM outbox o JOIN event e ON e.position = o.position WHERE o.sink = ?4 AND o.partition = ?5 AND o.position = ?6",
        )?
        .execute((JobId::at(now).0, name, now.as_ms(), sink, result.partition, result.position))?;
    tx.connection.prepare_cached("DELETE FROM outbox WHERE sink = ? AND partition = ? AND position = ?")?.execute((
        sink,
        result.partition,
        result.position,
    ))?;
    Ok(())
}

pub fn id_of(connection: &Connection, name: &str) -> Result<Option<i64>> {
    Ok(connection
        .prepare_cached("SELECT id FROM subscription WHERE name = ? AND queued")?
        .query_row([name], |row| row.get(0))
        .optional()?)
}

pub fn down(tx: &Tx, sink: &str, reason: Option<&str>, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "UPDATE subscription SET down_since = CASE WHEN ?1 IS NULL THEN NULL ELSE coalesce(down_since, ?2) END, down_reason = ?1
             WHERE name = ?3 AND down_reason IS NOT ?1",
        )?
        .execute((reason, now.as_ms(), sink))?;
    Ok(())
}

pub fn leave(tx: &Tx, node: NodeId) -> Result<()> {
    tx.connection.prepare_cached("UPDATE outbox_lease SET node = NULL, until = 0 WHERE node = ?")?.execute([node.0])?;
    tx.connection.prepare_cached("DELETE FROM outbox_node WHERE node = ?")?.execute([node.0])?;
    Ok(())
}

pub fn sinks(connection: &Connection, now: Timestamp) -> Result<Vec<SinkView>> {
    let mut statement = connection.prepare_cached(
        "SELECT s.id, s.name, s.park, s.sent, s.down_since, s.down_reason,
                (SELECT count(*) FROM (SELECT 1 FROM outbox o WHERE o.sink = s.id LIMIT ?1)),
                (SELECT e.at FROM event e WHERE e.position = (SELECT min(first) FROM (
                     SELECT (SELECT min(o.position) FROM outbox o WHERE o.sink = l.sink AND o.partition = l.partition) AS first
                     FROM outbox_lease l WHERE l.sink = s.id))),
                (SELECT count(*) FROM (SELECT 1 FROM outbox_dlq d WHERE d.sink = s.name AND d.resolved_at IS NULL LIMIT ?1))
         FROM subscription s WHERE s.queued ORDER BY s.name",
    )?;
    let rows = statement.query_map([MAX_COUNTED], |row| {
        let view = SinkView {
            name: row.get(1)?,
            types: Vec::new(),
            on_rejected: outbox::on_rejected(row.get(2)?).into(),
            sent: u64::try_from(row.get::<_, i64>(3)?).unwrap_or(0),
            down_since: row.get::<_, Option<i64>>(4)?.map(Timestamp::from_ms),
            down_reason: row.get(5)?,
            pending: u64::try_from(row.get::<_, i64>(6)?).unwrap_or(0),
            oldest_pending_at: row.get::<_, Option<i64>>(7)?.map(Timestamp::from_ms),
            dead: u64::try_from(row.get::<_, i64>(8)?).unwrap_or(0),
            nodes: Vec::new(),
        };
        Ok((row.get::<_, i64>(0)?, view))
    })?;
    let mut views = Vec::new();
    for row in rows {
        let (id, mut view) = row?;
        view.types = connection
            .prepare_cached("SELECT pattern FROM subscription_pattern WHERE subscription = ? ORDER BY pattern")?
            .query_map([id], |row| Ok(from_glob(&row.get::<_, String>(0)?)))?
            .collect::<rusqlite::Result<_>>()?;
        view.nodes = connection
            .prepare_cached(
                "SELECT node, count(*) FROM outbox_lease WHERE sink = ? AND node IS NOT NULL AND until > ? GROUP BY node ORDER BY node",
            )?
            .query_map((id, now.as_ms()), |row| Ok(PublishingNode { node_id: NodeId(row.get(0)?), partitions: row.get(1)? }))?
            .collect::<rusqlite::Result<_>>()?;
        views.push(view);
    }
    Ok(views)
}
