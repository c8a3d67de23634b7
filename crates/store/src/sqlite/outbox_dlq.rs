//! Dead letters of sinks: lists, replays and resolves them. Also republishes events that were already published.

use faena_domain::Timestamp;
use rusqlite::{Connection, Row};
use uuid::Uuid;

use super::{audit, events::glob, outbox::id_of, writer::Tx};
use crate::{
    COUNT_LIMIT, DeadEvent, DeadFilter, Republish, Result,
    outbox::{self, MAX_REPLAY_BATCH, MAX_REPUBLISHED, REPLAYED, due_at, partition_of},
};

/// SQL condition of a `DeadFilter` on `outbox_dlq d`, with the parameters `?1` to `?7` of `dead_filter_args`. SQLite:
/// ids are passed as a JSON array of hex numbers.
pub const MATCHES: &str = "(?1 IS NULL OR d.sink = ?1) AND (?2 IS NULL OR d.event_type GLOB ?2) AND (?3 IS NULL OR d.aggregate_id = ?3)
    AND (?4 IS NULL OR d.moved_at >= ?4) AND (?5 IS NULL OR d.moved_at < ?5) AND (?6 IS NULL OR (d.resolved_at IS NOT NULL) = ?6)
    AND (?7 IS NULL OR d.id IN (SELECT unhex(value) FROM json_each(?7)))";

/// The columns that `dead_row` reads.
const COLUMNS: &str = "id, sink, original_event_id, aggregate_id, aggregate_type, event_type, payload, metadata, error_message, \
     retry_count, original_created_at, moved_at, resolved_at, resolved_by, resolution_notes";

pub type DeadFilterArgs<'a> =
    (&'a Option<String>, Option<String>, Option<Uuid>, Option<i64>, Option<i64>, Option<bool>, Option<String>);

pub fn dead_filter_args(filter: &DeadFilter) -> DeadFilterArgs<'_> {
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
            "SELECT {COLUMNS} FROM outbox_dlq d WHERE {MATCHES} AND (?8 IS NULL OR d.id < ?8) ORDER BY d.id DESC LIMIT ?9"
        ))?
        .query_map((sink, kind, aggregate, from, to, resolved, ids, after, limit), dead_row)?
        .collect::<rusqlite::Result<_>>()?;
    Ok(rows)
}

pub fn dead_total(connection: &Connection, filter: &DeadFilter) -> Result<u64> {
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM outbox_dlq d WHERE {MATCHES} LIMIT {COUNT_LIMIT})");
    let total: i64 = connection.prepare_cached(&sql)?.query_row(dead_filter_args(filter), |row| row.get(0))?;
    Ok(total.unsigned_abs())
}

pub fn dead_row(row: &Row) -> rusqlite::Result<DeadEvent> {
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
        .query_map((sink, kind, aggregate, from, to, resolved, ids, MAX_REPLAY_BATCH), |row| {
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
        audit::add(tx, &outbox::replay_audit(filter, by, dead_letters.len()), now)?;
    }
    Ok(dead_letters.len())
}

/// Puts an event back into the outbox, unless it already waits there.
pub fn put_back(tx: &Tx, sink: i64, position: i64, subject: Uuid, due_at: i64) -> Result<()> {
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
        audit::add(tx, &outbox::resolve_audit(filter, notes, by, count), now)?;
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
                MAX_REPUBLISHED + 1,
            ),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?
        .collect::<rusqlite::Result<_>>()?;
    if i64::try_from(events.len()).is_ok_and(|count| count > MAX_REPUBLISHED) {
        return Err(outbox::too_many_republished());
    }
    for (n, (position, subject)) in events.iter().enumerate() {
        put_back(tx, sink, *position, *subject, due_at(n, per_second, now))?;
    }
    audit::add(tx, &outbox::republish_audit(what, by, events.len()), now)?;
    Ok(Some(events.len()))
}
