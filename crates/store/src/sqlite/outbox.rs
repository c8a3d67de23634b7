//! The outbox: who publishes which part, what is due, what became of it, and the dead letters.

use faena_domain::{JobId, NodeId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{
    audit,
    events::{self, from_glob, glob},
    writer::Tx,
};
use crate::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, OutboxEvent, OutboxResult, OutboxTakeRequest, OutboxTaken, Partition,
    Republish, Result, SinkView,
    outbox::{
        self, COUNTED, DEAD_COLUMNS, Lease, PartitionLeases, REPLAYED, REPLAYED_AT_ONCE, REPUBLISHED_AT_ONCE, counted,
        due_at, partition_of,
    },
};

/// A sink that is wanted.
struct Sink {
    id: i64,
    park: bool,
}

/// What is due, if this node's share is as it should be. SQLite: a look, so that who has nothing to write does not wait for the writer.
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
        claim(tx, request, &sink, &leases, now)?;
    }
    let held = partition_leases(tx.connection, &sink)?.owned_by(request.node, now);
    read(tx.connection, request, &sink, held, now)
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

fn claim(tx: &Tx, request: &OutboxTakeRequest, sink: &Sink, leases: &[Lease], now: Timestamp) -> Result<()> {
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

/// Up to `share` rows of each part. Of a subject of which an earlier message is late, none; of one of which an earlier message was refused,
/// that one alone; of one that is parked behind a dead letter, none.
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

pub fn settle(tx: &Tx, name: &str, held: &[Partition], results: &[OutboxResult], now: Timestamp) -> Result<()> {
    let Some(sink) = id_of(tx.connection, name)? else { return Ok(()) };
    let mut sent = 0;
    let mut remove =
        tx.connection.prepare_cached("DELETE FROM outbox WHERE sink = ? AND partition = ? AND position = ?")?;
    for result in results.iter().filter(|result| result.refused.is_none()) {
        sent += remove.execute((sink, result.partition, result.position))?;
    }
    if sent > 0 {
        tx.connection
            .prepare_cached("UPDATE subscription SET sent = sent + ? WHERE id = ?")?
            .execute((i64::try_from(sent).unwrap_or(0), sink))?;
    }
    if results.iter().any(|result| result.refused.is_some()) {
        refuse(tx, name, sink, held, results, now)?;
    }
    Ok(())
}

fn refuse(tx: &Tx, name: &str, sink: i64, held: &[Partition], results: &[OutboxResult], now: Timestamp) -> Result<()> {
    let epochs: Vec<(i16, i64)> = tx
        .connection
        .prepare_cached("SELECT partition, epoch FROM outbox_lease WHERE sink = ?")?
        .query_map([sink], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    for result in counted(results, held, &epochs) {
        let attempts: Option<u32> = tx
            .connection
            .prepare_cached(
                "UPDATE outbox SET attempts = attempts + 1, due_at = max(?, 1), error = ?
                 WHERE sink = ? AND partition = ? AND position = ? RETURNING attempts",
            )?
            .query_row((result.again_at.as_ms(), &result.refused, sink, result.partition, result.position), |row| {
                row.get(0)
            })
            .optional()?;
        if attempts.is_some_and(|attempts| attempts >= MAX_ATTEMPTS) {
            move_to_dlq(tx, name, sink, result, now)?;
        }
    }
    Ok(())
}

/// Moves a message to the dead letters.
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

fn id_of(connection: &Connection, name: &str) -> Result<Option<i64>> {
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
    let rows = statement.query_map([COUNTED], |row| {
        let view = SinkView {
            name: row.get(1)?,
            types: Vec::new(),
            on_bad: outbox::on_bad(row.get(2)?).into(),
            sent: u64::try_from(row.get::<_, i64>(3)?).unwrap_or(0),
            down_since: row.get::<_, Option<i64>>(4)?.map(Timestamp::from_ms),
            down_reason: row.get(5)?,
            pending: u64::try_from(row.get::<_, i64>(6)?).unwrap_or(0),
            oldest_pending_at: row.get::<_, Option<i64>>(7)?.map(Timestamp::from_ms),
            dead: u64::try_from(row.get::<_, i64>(8)?).unwrap_or(0),
            holders: Vec::new(),
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
        view.holders = connection
            .prepare_cached(
                "SELECT node, count(*) FROM outbox_lease WHERE sink = ? AND node IS NOT NULL AND until > ? GROUP BY node ORDER BY node",
            )?
            .query_map((id, now.as_ms()), |row| Ok((NodeId(row.get(0)?), row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?;
        views.push(view);
    }
    Ok(views)
}

/// Which dead letters match. SQLite: ids come as a JSON list of hex numbers.
const MATCHES: &str = "(?1 IS NULL OR d.sink = ?1) AND (?2 IS NULL OR d.event_type GLOB ?2) AND (?3 IS NULL OR d.aggregate_id = ?3)
    AND (?4 IS NULL OR d.moved_at >= ?4) AND (?5 IS NULL OR d.moved_at < ?5) AND (?6 IS NULL OR (d.resolved_at IS NOT NULL) = ?6)
    AND (?7 IS NULL OR d.id IN (SELECT unhex(value) FROM json_each(?7)))";

type DeadFilterArgs<'a> =
    (&'a Option<String>, Option<String>, Option<Uuid>, Option<i64>, Option<i64>, Option<bool>, Option<String>);

fn dead_filter_args(filter: &DeadFilter) -> DeadFilterArgs<'_> {
    let ids: Vec<String> = filter.ids.iter().map(|id| id.simple().to_string()).collect();
    (
        &filter.sink,
        filter.event_type.as_deref().map(glob),
        filter.aggregate_id,
        filter.moved_after.map(Timestamp::as_ms),
        filter.moved_before.map(Timestamp::as_ms),
        filter.is_resolved,
        (!ids.is_empty()).then(|| serde_json::json!(ids).to_string()),
    )
}

pub fn dead(connection: &Connection, filter: &DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
    let (sink, kind, aggregate, from, to, resolved, ids) = dead_filter_args(filter);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = connection
        .prepare_cached(&format!(
            "SELECT {DEAD_COLUMNS} FROM outbox_dlq d WHERE {MATCHES} AND (?8 IS NULL OR d.id < ?8) ORDER BY d.id DESC LIMIT ?9"
        ))?
        .query_map((sink, kind, aggregate, from, to, resolved, ids, after, limit), dead_row)?
        .collect::<rusqlite::Result<_>>()?;
    Ok(rows)
}

fn dead_row(row: &Row) -> rusqlite::Result<DeadEvent> {
    let json = |text: Option<String>| text.and_then(|text| serde_json::from_str(&text).ok());
    Ok(DeadEvent {
        id: row.get(0)?,
        sink: row.get(1)?,
        original_event_id: row.get(2)?,
        aggregate_id: row.get(3)?,
        aggregate_type: row.get(4)?,
        event_type: row.get(5)?,
        payload: json(row.get(6)?).unwrap_or_default(),
        metadata: json(row.get(7)?),
        error_message: row.get(8)?,
        retry_count: row.get(9)?,
        original_created_at: Timestamp::from_ms(row.get(10)?),
        moved_at: Timestamp::from_ms(row.get(11)?),
        resolved_at: row.get::<_, Option<i64>>(12)?.map(Timestamp::from_ms),
        resolved_by: row.get(13)?,
        resolution_notes: row.get(14)?,
    })
}

pub fn replay(tx: &Tx, filter: &DeadFilter, per_second: Option<u32>, by: &str, now: Timestamp) -> Result<usize> {
    let (sink, kind, aggregate, from, to, resolved, ids) = dead_filter_args(filter);
    let dead_letters: Vec<(Uuid, i64, i64, Uuid)> = tx
        .connection
        .prepare_cached(&format!(
            "SELECT d.id, s.id, d.position, d.aggregate_id FROM outbox_dlq d JOIN subscription s ON s.name = d.sink AND s.queued
             WHERE d.resolved_at IS NULL AND {MATCHES} AND EXISTS (SELECT 1 FROM event e WHERE e.position = d.position)
             ORDER BY d.position, d.id LIMIT ?8"
        ))?
        .query_map((sink, kind, aggregate, from, to, resolved, ids, REPLAYED_AT_ONCE), |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    for (n, (id, sink, position, subject)) in dead_letters.iter().enumerate() {
        put_back(tx, *sink, *position, *subject, due_at(n, per_second, now))?;
        tx.connection
            .prepare_cached(
                "UPDATE outbox_dlq SET resolved_at = ?, resolved_by = ?, resolution_notes = ? WHERE id = ?",
            )?
            .execute((now.as_ms(), by, REPLAYED, id))?;
    }
    if !dead_letters.is_empty() {
        audit::add(tx, &outbox::replayed(filter, by, dead_letters.len()), now)?;
    }
    Ok(dead_letters.len())
}

/// Unless it waits already.
fn put_back(tx: &Tx, sink: i64, position: i64, subject: Uuid, due_at: i64) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT OR IGNORE INTO outbox (sink, partition, position, subject, due_at) VALUES (?, ?, ?, ?, ?)",
        )?
        .execute((sink, partition_of(subject), position, subject, due_at))?;
    Ok(())
}

pub fn resolve(tx: &Tx, filter: &DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
    let (sink, kind, aggregate, from, to, resolved, ids) = dead_filter_args(filter);
    let count = tx
        .connection
        .prepare_cached(&format!(
            "UPDATE outbox_dlq AS d SET resolved_at = ?8, resolved_by = ?9, resolution_notes = ?10
             WHERE d.resolved_at IS NULL AND {MATCHES}"
        ))?
        .execute((sink, kind, aggregate, from, to, resolved, ids, now.as_ms(), by, notes))?;
    if count > 0 {
        audit::add(tx, &outbox::resolved(filter, notes, by, count), now)?;
    }
    Ok(count)
}

pub fn republish(
    tx: &Tx,
    what: &Republish,
    per_second: Option<u32>,
    by: &str,
    now: Timestamp,
) -> Result<Option<usize>> {
    let Some(sink) = id_of(tx.connection, &what.sink)? else { return Ok(None) };
    let events: Vec<(i64, Uuid)> = tx
        .connection
        .prepare_cached(
            "SELECT e.position, e.subject FROM event e
             WHERE e.at >= ?1 AND e.at < ?2 AND (?3 IS NULL OR e.type GLOB ?3)
               AND EXISTS (SELECT 1 FROM subscription_pattern p WHERE p.subscription = ?4 AND e.type GLOB p.pattern)
               AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.position = e.position AND o.sink = ?4)
               AND NOT EXISTS (SELECT 1 FROM outbox_dlq d WHERE d.position = e.position AND d.sink = ?5 AND d.resolved_at IS NULL)
             ORDER BY e.position LIMIT ?6",
        )?
        .query_map(
            (
                what.from.as_ms(),
                what.to.as_ms(),
                what.event_type.as_deref().map(glob),
                sink,
                &what.sink,
                REPUBLISHED_AT_ONCE + 1,
            ),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?
        .collect::<rusqlite::Result<_>>()?;
    if i64::try_from(events.len()).is_ok_and(|count| count > REPUBLISHED_AT_ONCE) {
        return Err(outbox::too_many_republished());
    }
    for (n, (position, subject)) in events.iter().enumerate() {
        put_back(tx, sink, *position, *subject, due_at(n, per_second, now))?;
    }
    audit::add(tx, &outbox::republished(what, by, events.len()), now)?;
    Ok(Some(events.len()))
}
