//! Dead letters of sinks: lists, replays and resolves them. Also republishes events that were already published.

use deadpool_postgres::Object;
use faena_domain::Timestamp;
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{Shared, audit, end::storable, events::like, outbox::id_of};
use crate::{
    COUNT_LIMIT, DeadEvent, DeadFilter, Republish, Result,
    outbox::{self, MAX_REPLAY_BATCH, MAX_REPUBLISHED, REPLAYED},
};

/// SQL condition of a `DeadFilter` on `faena.outbox_dlq d`, with the parameters `$1` to `$7` of `dead_filter_args`.
pub const MATCHES: &str = "($1::text IS NULL OR d.sink = $1) AND ($2::text IS NULL OR d.event_type LIKE $2)
    AND ($3::uuid IS NULL OR d.aggregate_id = $3) AND ($4::int8 IS NULL OR d.moved_at >= to_timestamp($4::int8 / 1000.0))
    AND ($5::int8 IS NULL OR d.moved_at < to_timestamp($5::int8 / 1000.0))
    AND ($6::bool IS NULL OR (d.resolved_at IS NOT NULL) = $6) AND (cardinality($7::uuid[]) = 0 OR d.id = ANY($7))";

/// The columns that `dead_row` reads. PostgreSQL: the table has real timestamps, for people who query it themselves.
const COLUMNS: &str = "id, sink, original_event_id, aggregate_id, aggregate_type, event_type, payload, metadata, error_message, \
     retry_count, (extract(epoch FROM original_created_at) * 1000)::int8, (extract(epoch FROM moved_at) * 1000)::int8, \
     (extract(epoch FROM resolved_at) * 1000)::int8, resolved_by, resolution_notes";

pub type Parameters = Vec<Box<dyn ToSql + Sync + Send>>;

/// Returns the parameters of `MATCHES`.
pub fn dead_filter_args(filter: &DeadFilter) -> Parameters {
    vec![
        Box::new(filter.sink.as_deref().map(|sink| storable(sink).into_owned())),
        Box::new(filter.event_type.as_deref().map(like)),
        Box::new(filter.aggregate_id),
        Box::new(filter.moved_after.map(Timestamp::as_ms)),
        Box::new(filter.moved_before.map(Timestamp::as_ms)),
        Box::new(filter.is_resolved),
        Box::new(filter.ids.clone()),
    ]
}

pub async fn query(client: &Object, sql: &str, parameters: &Parameters) -> Result<Vec<Row>> {
    let parameters: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|value| &**value as &(dyn ToSql + Sync)).collect();
    Ok(client.query(sql, &parameters).await?)
}

/// Lists matching dead letters whose id is below `after`, newest first.
pub async fn dead(shared: &Shared, filter: &DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
    let mut parameters = dead_filter_args(filter);
    parameters.push(Box::new(after));
    parameters.push(Box::new(i64::try_from(limit).unwrap_or(i64::MAX)));
    let sql = format!(
        "SELECT {COLUMNS} FROM faena.outbox_dlq d WHERE {MATCHES} AND ($8::uuid IS NULL OR d.id < $8) ORDER BY d.id DESC LIMIT $9"
    );
    let client = shared.client().await?;
    let rows = query(&client, &sql, &parameters).await;
    Ok(client.return_to_pool(rows)?.iter().map(dead_row).collect())
}

pub async fn dead_total(shared: &Shared, filter: &DeadFilter) -> Result<u64> {
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM faena.outbox_dlq d WHERE {MATCHES} LIMIT {COUNT_LIMIT}) x");
    let client = shared.client().await?;
    let rows = query(&client, &sql, &dead_filter_args(filter)).await;
    Ok(client.return_to_pool(rows)?.first().map_or(0, |row| row.get::<_, i64>(0).unsigned_abs()))
}

/// Reads a row of `COLUMNS`.
pub fn dead_row(row: &Row) -> DeadEvent {
    let json = |text: Option<&str>| text.and_then(|text| serde_json::from_str(text).ok());
    DeadEvent {
        id: row.get(0),
        sink: row.get(1),
        original_event_id: row.get(2),
        aggregate_id: row.get(3),
        aggregate_type: row.get(4),
        event_type: row.get(5),
        payload: json(row.get(6)).unwrap_or_default(),
        metadata: json(row.get(7)),
        error_message: row.get(8),
        retry_count: u32::try_from(row.get::<_, i32>(9)).unwrap_or(0),
        original_created_at: Timestamp::from_ms(row.get(10)),
        moved_at: Timestamp::from_ms(row.get(11)),
        resolved_at: row.get::<_, Option<i64>>(12).map(Timestamp::from_ms),
        resolved_by: row.get(13),
        resolution_notes: row.get(14),
    }
}

/// Replays matching dead letters in a new transaction.
pub async fn replay(
    shared: &Shared,
    filter: &DeadFilter,
    per_second: Option<u32>,
    by: &str,
    now: Timestamp,
) -> Result<usize> {
    let client = shared.begin().await?;
    let result = replay_in(&client, filter, per_second, by, now).await;
    let count = client.end(result).await?;
    shared.signal_events();
    Ok(count)
}

/// Puts matching unresolved dead letters back into the outbox and marks them resolved, in the caller's transaction.
///
/// Skips a dead letter whose sink does not exist any more or whose event was deleted. With a rate, the due times are
/// spread; without one, the events are due immediately (`due_at` is 0). Returns the number of dead letters.
pub async fn replay_in(
    client: &Object,
    filter: &DeadFilter,
    per_second: Option<u32>,
    by: &str,
    now: Timestamp,
) -> Result<usize> {
    let mut parameters = dead_filter_args(filter);
    parameters.push(Box::new(MAX_REPLAY_BATCH));
    parameters.push(Box::new(now.as_ms()));
    parameters.push(Box::new(storable(by).into_owned()));
    parameters.push(Box::new(REPLAYED));
    parameters.push(Box::new(per_second.map(|per_second| i64::from(per_second.max(1)))));
    // PostgreSQL: if two replays of the same dead letter run concurrently, the second finds it resolved and skips it.
    let sql = format!(
        "WITH chosen AS MATERIALIZED (
             SELECT d.id, s.id AS sink, d.position, d.aggregate_id,
                    row_number() OVER (ORDER BY d.position, d.id) - 1 AS n
             FROM faena.outbox_dlq d JOIN faena.subscription s ON s.name = d.sink AND s.queued
             WHERE d.resolved_at IS NULL AND {MATCHES} AND EXISTS (SELECT FROM faena.event e WHERE e.position = d.position)
             ORDER BY d.position, d.id LIMIT $8),
         resolved AS (
             UPDATE faena.outbox_dlq d SET resolved_at = to_timestamp($9::int8 / 1000.0), resolved_by = $10, resolution_notes = $11
             FROM chosen c WHERE d.id = c.id AND d.resolved_at IS NULL
             RETURNING c.sink, c.position, c.aggregate_id, c.n),
         put AS (
             INSERT INTO faena.outbox (sink, partition, position, subject, due_at)
             SELECT sink, get_byte(uuid_send(aggregate_id), 15) & 15, position, aggregate_id,
                    coalesce($9::int8 + n * 1000 / $12::int8, 0)
             FROM resolved ON CONFLICT DO NOTHING)
         SELECT count(*) FROM resolved"
    );
    let count = count(&query(client, &sql, &parameters).await?);
    if count > 0 {
        audit::add(client, &outbox::replay_audit(filter, by, count), now).await?;
    }
    Ok(count)
}

/// Returns the count that is the first column of the first row.
pub fn count(rows: &[Row]) -> usize {
    rows.first().and_then(|row| usize::try_from(row.get::<_, i64>(0)).ok()).unwrap_or(0)
}

/// Marks matching dead letters as resolved in a new transaction.
pub async fn resolve(shared: &Shared, filter: &DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
    let client = shared.begin().await?;
    let result = resolve_in(&client, filter, notes, by, now).await;
    let count = client.end(result).await?;
    shared.signal_events();
    Ok(count)
}

/// Marks matching dead letters as resolved in the caller's transaction. Returns their number.
pub async fn resolve_in(client: &Object, filter: &DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
    let mut parameters = dead_filter_args(filter);
    parameters.push(Box::new(now.as_ms()));
    parameters.push(Box::new(storable(by).into_owned()));
    parameters.push(Box::new(storable(notes).into_owned()));
    let sql = format!(
        "WITH resolved AS (
             UPDATE faena.outbox_dlq d SET resolved_at = to_timestamp($8::int8 / 1000.0), resolved_by = $9, resolution_notes = $10
             WHERE d.resolved_at IS NULL AND {MATCHES} RETURNING 1)
         SELECT count(*) FROM resolved"
    );
    let count = count(&query(client, &sql, &parameters).await?);
    if count > 0 {
        audit::add(client, &outbox::resolve_audit(filter, notes, by, count), now).await?;
    }
    Ok(count)
}

/// Republishes events in a new transaction.
pub async fn republish(
    shared: &Shared,
    what: &Republish,
    per_second: Option<u32>,
    by: &str,
    now: Timestamp,
) -> Result<Option<usize>> {
    let client = shared.begin().await?;
    let result = republish_in(&client, what, per_second, by, now).await;
    let count = client.end(result).await?;
    shared.signal_events();
    Ok(count)
}

/// Puts events of a time range back into the outbox of a sink, in the caller's transaction.
///
/// Skips events that already wait in the outbox or are unresolved dead letters. Returns `None` if the sink does not
/// exist. Fails if more than `MAX_REPUBLISHED` events match; to detect this, the query selects up to one event more
/// than that.
pub async fn republish_in(
    client: &Object,
    what: &Republish,
    per_second: Option<u32>,
    by: &str,
    now: Timestamp,
) -> Result<Option<usize>> {
    let Some(sink) = id_of(client, &what.sink).await? else { return Ok(None) };
    let put = client
        .execute(
            "INSERT INTO faena.outbox (sink, partition, position, subject, due_at)
             SELECT $4, get_byte(uuid_send(c.subject), 15) & 15, c.position, c.subject,
                    coalesce($7::int8 + (row_number() OVER (ORDER BY c.position) - 1) * 1000 / $8::int8, 0)
             FROM (SELECT e.position, e.subject FROM faena.event e
                   WHERE e.at >= $1 AND e.at < $2 AND ($3::text IS NULL OR e.type LIKE $3)
                     AND EXISTS (SELECT FROM faena.subscription_pattern p WHERE p.subscription = $4 AND e.type LIKE p.pattern)
                     AND NOT EXISTS (SELECT FROM faena.outbox o WHERE o.position = e.position AND o.sink = $4)
                     AND NOT EXISTS (SELECT FROM faena.outbox_dlq d
                                     WHERE d.position = e.position AND d.sink = $5 AND d.resolved_at IS NULL)
                   ORDER BY e.position LIMIT $6) c
             ON CONFLICT DO NOTHING",
            &[
                &what.from.as_ms(),
                &what.to.as_ms(),
                &what.event_type.as_deref().map(like),
                &sink,
                &storable(&what.sink),
                &(MAX_REPUBLISHED + 1),
                &now.as_ms(),
                &per_second.map(|per_second| i64::from(per_second.max(1))),
            ],
        )
        .await?;
    let put = usize::try_from(put).unwrap_or(usize::MAX);
    if i64::try_from(put).is_ok_and(|put| put > MAX_REPUBLISHED) {
        return Err(outbox::too_many_republished());
    }
    audit::add(client, &outbox::republish_audit(what, by, put), now).await?;
    Ok(Some(put))
}
