//! Key queues, as a claim reads and updates them.

use deadpool_postgres::Object;
use faena_domain::{Bucket, JobId, Rules, Timestamp};
use futures_util::future::try_join_all;

use super::limited_claim::Selection;
use crate::{
    Lane, LaneId, Result,
    admit::{self, Admission, OpenKeyQueue, ReadRequest},
    assemble::parse_options,
    claim_limits::ClaimLimit,
};

/// Reads the open key queues of a lane by rank, and tries to lock the key of each.
///
/// The `FOR KEY SHARE` lock of a submission does not conflict with this one, so its rows are not skipped.
pub const KEY_QUEUES: &str = "SELECT key, rank, limited_at, limited_by, pg_try_advisory_xact_lock(key) FROM (
         SELECT key, rank, limited_at, limited_by FROM faena.key_queue WHERE lane = $1 AND open ORDER BY rank, key LIMIT $2
         FOR NO KEY UPDATE SKIP LOCKED) AS l";

/// Reads for each key queue: the options of its first job, the number of jobs in flight of its key (counted up to `$3`), its rate bucket.
///
/// `BETWEEN` and `ORDER BY key`, here and below, make `ready_key` the only index that gives this order. Otherwise the planner
/// may scan the lane from its head and filter by key, if its statistics say that this key is common.
pub const KEYS: &str = "SELECT h.id IS NOT NULL, h.options,
         (SELECT count(*) FROM (SELECT FROM faena.key_in_flight WHERE key = l.key LIMIT $3) AS in_flight), b.tokens, b.at
     FROM unnest($1::int4[], $2::int8[]) WITH ORDINALITY AS l(lane, key, n)
     LEFT JOIN LATERAL (
         SELECT j.id, j.options FROM faena.ready r JOIN faena.job j ON j.id = r.id
         WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key ORDER BY r.key, r.ready_at, r.id LIMIT 1) AS h ON true
     LEFT JOIN faena.bucket b ON b.key = l.key
     ORDER BY l.n";

/// Reads the first jobs of each key queue, up to the requested number.
pub const KEY_QUEUE_HEADS: &str = "SELECT l.lane, l.key, r.ready_at, r.id
     FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS l(lane, key, count)
     CROSS JOIN LATERAL (
         SELECT ready_at, id FROM faena.ready WHERE lane = l.lane AND key BETWEEN l.key AND l.key
         ORDER BY key, ready_at, id LIMIT l.count) AS r";

/// Opens key queues whose rate allows a start again.
pub async fn open_due(client: &Object, lanes: &[Lane], now: Timestamp) -> Result<()> {
    let lanes: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    let statement = client
        .prepare_cached(
            "WITH due AS (
                 SELECT lane, key FROM faena.key_queue WHERE opens_at <= $1 AND lane = ANY($2) ORDER BY opens_at LIMIT 1000
                 FOR NO KEY UPDATE SKIP LOCKED)
             UPDATE faena.key_queue l SET open = true, opens_at = NULL FROM due d WHERE l.lane = d.lane AND l.key = d.key",
        )
        .await?;
    client.execute(&statement, &[&now.as_ms(), &lanes]).await?;
    Ok(())
}

/// Reads and locks up to `max` open key queues of each lane, and records the lanes that have more of them or whose key
/// queues another claim has locked.
pub async fn read_open_key_queues(
    client: &Object,
    lanes: &[Lane],
    max: usize,
    selection: &mut Selection,
) -> Result<Vec<OpenKeyQueue>> {
    let statement = client.prepare_cached(KEY_QUEUES).await?;
    let count = i64::try_from(max).unwrap_or(i64::MAX);
    let rows = try_join_all(lanes.iter().map(|lane| {
        let (statement, count) = (&statement, &count);
        async move { client.query(statement, &[&lane.id, count]).await }
    }))
    .await?;
    let mut key_queues = Vec::new();
    let another_open = client
        .prepare_cached("SELECT 1 FROM faena.key_queue WHERE lane = $1 AND open AND NOT (key = ANY($2)) LIMIT 1")
        .await?;
    for (lane, rows) in lanes.iter().zip(rows) {
        let keys: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        if rows.len() == max {
            selection.more.push(lane.id);
        } else if rows.iter().any(|row| !row.get::<_, bool>(4))
            || client.query_opt(&another_open, &[&lane.id, &keys]).await?.is_some()
        {
            selection.busy.push(lane.id);
        }
        key_queues.extend(rows.iter().filter(|row| row.get(4)).map(|row| {
            let limited = row.get::<_, Option<i64>>(2).zip(row.get(3));
            OpenKeyQueue { lane: lane.id, key: row.get(0), rank: row.get(1), limited }
        }));
    }
    Ok(key_queues)
}

/// Adds locked key queues to the admission, with the limits of their keys.
pub async fn read_keys(
    client: &Object,
    admission: &mut Admission<'_>,
    key_queues: Vec<OpenKeyQueue>,
    idle_slots: usize,
    rules: &Rules,
    now: Timestamp,
) -> Result<()> {
    if key_queues.is_empty() {
        return Ok(());
    }
    let statement = client.prepare_cached(KEYS).await?;
    let lanes: Vec<LaneId> = key_queues.iter().map(|key_queue| key_queue.lane).collect();
    let keys: Vec<i64> = key_queues.iter().map(|key_queue| key_queue.key).collect();
    let max = i64::try_from(admit::max_key_concurrency(rules)).unwrap_or(i64::MAX);
    let rows = client.query(&statement, &[&lanes, &keys, &max]).await?;
    for (key_queue, row) in key_queues.into_iter().zip(rows) {
        if !row.get::<_, bool>(0) {
            admission.add_empty(&key_queue);
            continue;
        }
        let name = parse_options(row.get(1))?.concurrency_key.unwrap_or_default();
        let in_flight = usize::try_from(row.get::<_, i64>(2)).unwrap_or(0);
        let bucket = row
            .get::<_, Option<f64>>(3)
            .zip(row.get::<_, Option<i64>>(4))
            .map(|(tokens, at)| Bucket { tokens, at: Timestamp::from_ms(at) });
        admission.add_key_queue(key_queue, || ClaimLimit::of_key(rules, name, in_flight, bucket, now), idle_slots);
    }
    Ok(())
}

/// Adds the first jobs of the wanted key queues to the admission.
pub async fn read_key_queue_jobs(client: &Object, admission: &mut Admission<'_>, wanted: &[ReadRequest]) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let statement = client.prepare_cached(KEY_QUEUE_HEADS).await?;
    let lanes: Vec<LaneId> = wanted.iter().map(|key_queue| key_queue.lane).collect();
    let keys: Vec<i64> = wanted.iter().map(|key_queue| key_queue.key).collect();
    let counts: Vec<i64> = wanted.iter().map(|key_queue| i64::try_from(key_queue.count).unwrap_or(i64::MAX)).collect();
    for row in client.query(&statement, &[&lanes, &keys, &counts]).await? {
        admission.add_job(row.get(0), row.get(1), Timestamp::from_ms(row.get(2)), JobId(row.get(3)));
    }
    Ok(())
}

/// Stores the ranks of key queues, and which of them are closed.
pub async fn write_key_queues(client: &Object, admission: &mut Admission<'_>) -> Result<()> {
    let changes = admission.key_queue_changes();
    if !changes.is_empty() {
        let lanes: Vec<LaneId> = changes.iter().map(|change| change.lane).collect();
        let keys: Vec<i64> = changes.iter().map(|change| change.key).collect();
        let ranks: Vec<Option<i64>> = changes.iter().map(|change| change.rank).collect();
        let open: Vec<bool> = changes.iter().map(|change| change.open).collect();
        let opens: Vec<Option<i64>> = changes.iter().map(|change| change.opens_at).collect();
        let (limited_at, limited_by): (Vec<Option<i64>>, Vec<Option<String>>) =
            changes.into_iter().map(|change| change.limited.unzip()).unzip();
        let statement = client
            .prepare_cached(
                "UPDATE faena.key_queue l SET open = u.open, opens_at = u.opens_at,
                     rank = coalesce(u.rank, (SELECT r.ready_at FROM faena.ready r
                         WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key ORDER BY r.key, r.ready_at, r.id LIMIT 1), l.rank),
                     limited_at = coalesce(u.limited_at, l.limited_at), limited_by = coalesce(u.limited_by, l.limited_by)
                 FROM unnest($1::int4[], $2::int8[], $3::int8[], $4::bool[], $5::int8[], $6::int8[], $7::text[])
                     AS u(lane, key, rank, open, opens_at, limited_at, limited_by)
                 WHERE l.lane = u.lane AND l.key = u.key",
            )
            .await?;
        client.execute(&statement, &[&lanes, &keys, &ranks, &open, &opens, &limited_at, &limited_by]).await?;
    }
    remove_empty(client, admission.maybe_empty()).await?;
    let buckets = admission.buckets();
    if !buckets.is_empty() {
        let keys: Vec<i64> = buckets.iter().map(|(key, _)| *key).collect();
        let tokens: Vec<f64> = buckets.iter().map(|(_, bucket)| bucket.tokens).collect();
        let times: Vec<i64> = buckets.iter().map(|(_, bucket)| bucket.at.as_ms()).collect();
        let statement = client
            .prepare_cached(
                "INSERT INTO faena.bucket (key, tokens, at) SELECT * FROM unnest($1::int8[], $2::float8[], $3::int8[])
                 ON CONFLICT (key) DO UPDATE SET tokens = excluded.tokens, at = excluded.at",
            )
            .await?;
        client.execute(&statement, &[&keys, &tokens, &times]).await?;
    }
    Ok(())
}

/// Deletes key queues without jobs.
///
/// Keeps a key queue that another transaction has locked (`put_key_queues`), because that transaction adds a job to it. Checks
/// for jobs in a statement after the lock, which sees everything that was inserted before.
pub async fn remove_empty(client: &Object, key_queues: Vec<(LaneId, i64)>) -> Result<()> {
    if key_queues.is_empty() {
        return Ok(());
    }
    let (lanes, keys): (Vec<LaneId>, Vec<i64>) = key_queues.into_iter().unzip();
    let lock = client
        .prepare_cached(
            "SELECT l.lane, l.key FROM unnest($1::int4[], $2::int8[]) AS u(lane, key)
             JOIN faena.key_queue l ON l.lane = u.lane AND l.key = u.key FOR UPDATE OF l SKIP LOCKED",
        )
        .await?;
    let rows = client.query(&lock, &[&lanes, &keys]).await?;
    let lanes: Vec<LaneId> = rows.iter().map(|row| row.get(0)).collect();
    let keys: Vec<i64> = rows.iter().map(|row| row.get(1)).collect();
    let delete = client
        .prepare_cached(
            "DELETE FROM faena.key_queue l USING unnest($1::int4[], $2::int8[]) AS u(lane, key)
             WHERE l.lane = u.lane AND l.key = u.key
               AND (SELECT 1 FROM faena.ready r WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key
                    ORDER BY r.key, r.ready_at, r.id LIMIT 1) IS NULL",
        )
        .await?;
    client.execute(&delete, &[&lanes, &keys]).await?;
    Ok(())
}

/// Returns when the rate of a closed key queue first allows a start again, for each lane that has one.
pub async fn next_opening_at(client: &Object, lanes: &[LaneId]) -> Result<Vec<(LaneId, Timestamp)>> {
    let statement = client
        .prepare_cached(
            "SELECT k.lane, l.opens_at FROM unnest($1::int4[]) AS k(lane)
             CROSS JOIN LATERAL (
                 SELECT opens_at FROM faena.key_queue WHERE lane = k.lane AND opens_at IS NOT NULL ORDER BY opens_at LIMIT 1) AS l",
        )
        .await?;
    let rows = client.query(&statement, &[&lanes]).await?;
    Ok(rows.iter().map(|row| (row.get(0), Timestamp::from_ms(row.get(1)))).collect())
}
