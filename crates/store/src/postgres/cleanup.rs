//! Cleans up after jobs that leave a queue or a worker: deletes their related rows, releases their keys, writes
//! webhooks, and lets the tasks that wait for them continue.

use std::collections::HashSet;

use deadpool_postgres::Object;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{Shared, webhooks};
use crate::{
    JobExit, LaneId, Result, Signal,
    admit::{distinct, has_concurrency_limit},
    assemble::parse_options,
    plan::key_number,
    sql::sql,
};

/// Deletes the rows that only some jobs have (start, cancel request, keys, expiry), writes the webhooks of finished
/// jobs, marks that tasks can continue, and returns the signals to send after the commit.
///
/// The rows of finished jobs in `done` or `ended` must exist, because the webhooks read them. A requeued job gets its
/// row in `expiry` again, because that row is deleted if the job's expiry time passes during a run.
///
/// Callers put jobs into key queues only after this call, because keys are locked before key queues.
pub async fn clean_up(client: &Object, jobs: &[(Uuid, JobExit)]) -> Result<Vec<Signal>> {
    let all: Vec<Uuid> = jobs.iter().map(|(id, _)| *id).collect();
    let finished: HashSet<Uuid> =
        jobs.iter().filter(|(_, exit)| *exit != JobExit::Requeued).map(|(id, _)| *id).collect();
    client.execute("DELETE FROM faena.running WHERE id = ANY($1)", &[&all]).await?;
    if !finished.is_empty() {
        let ids: Vec<Uuid> = finished.iter().copied().collect();
        client.execute("DELETE FROM faena.cancel_request WHERE id = ANY($1)", &[&ids]).await?;
    }
    // Parsed here and not by SQL, which fails on JSON that a PostgreSQL text cannot contain.
    let rows =
        client.query("SELECT id, options FROM faena.job WHERE id = ANY($1) AND options IS NOT NULL", &[&all]).await?;
    let mut keys: (Vec<String>, Vec<Uuid>) = Default::default();
    let mut expiries_to_delete: (Vec<i64>, Vec<Uuid>) = Default::default();
    let mut expiries_to_restore: (Vec<i64>, Vec<Uuid>) = Default::default();
    let mut webhooks = Vec::new();
    let mut task_jobs = Vec::new();
    let mut keys_in_flight: (Vec<i64>, Vec<Uuid>) = Default::default();
    for row in &rows {
        let (id, options): (Uuid, _) = (row.get(0), parse_options(row.get(1))?);
        let finished = finished.contains(&id);
        if options.webhook_url.is_some() && jobs.contains(&(id, JobExit::Finished)) {
            webhooks.push((id, options.clone()));
        }
        if finished && options.task_id.is_some() {
            task_jobs.push(id);
        }
        if let Some(key) = &options.concurrency_key {
            keys_in_flight.0.push(key_number(key));
            keys_in_flight.1.push(id);
        }
        if finished && let Some(key) = options.unique_key {
            keys.0.push(key);
            keys.1.push(id);
        }
        if let Some(at) = options.expires_at {
            let rows = if finished { &mut expiries_to_delete } else { &mut expiries_to_restore };
            rows.0.push(at.as_ms());
            rows.1.push(id);
        }
    }
    let opened = release_keys(client, &keys_in_flight).await?;
    if !keys.0.is_empty() {
        client
            .execute(
                sql!("DELETE FROM faena.job_key WHERE ctid = ANY (ARRAY(
                     SELECT k.ctid FROM unnest($1::text[], $2::uuid[]) AS u(key, id)
                     CROSS JOIN LATERAL (
                         SELECT ctid FROM faena.job_key WHERE kind = {UNIQUE_KEY} AND key = u.key AND id = u.id LIMIT 1) AS k))"),
                &[&keys.0, &keys.1],
            )
            .await?;
    }
    if !expiries_to_delete.0.is_empty() {
        client
            .execute(
                "DELETE FROM faena.expiry WHERE ctid = ANY (ARRAY(
                     SELECT e.ctid FROM unnest($1::int8[], $2::uuid[]) AS u(at, id)
                     CROSS JOIN LATERAL (
                         SELECT ctid FROM faena.expiry WHERE expires_at = u.at AND id = u.id LIMIT 1) AS e))",
                &[&expiries_to_delete.0, &expiries_to_delete.1],
            )
            .await?;
    }
    if !expiries_to_restore.0.is_empty() {
        client
            .execute(
                "INSERT INTO faena.expiry (expires_at, id) SELECT * FROM unnest($1::int8[], $2::uuid[])
                 ON CONFLICT DO NOTHING",
                &[&expiries_to_restore.0, &expiries_to_restore.1],
            )
            .await?;
    }
    let mut signals: Vec<Signal> = opened.into_iter().map(Signal::Ready).collect();
    if !expiries_to_restore.0.is_empty() {
        signals.push(Signal::Waiting);
    }
    if !webhooks.is_empty() {
        webhooks::create(client, webhooks).await?;
        signals.push(Signal::Webhook);
    }
    if !task_jobs.is_empty() {
        let sql = "UPDATE faena.task_job SET ended = true WHERE job = ANY($1) AND NOT ended";
        if client.execute(sql, &[&task_jobs]).await? > 0 {
            signals.push(Signal::TaskJobEnded);
        }
    }
    Ok(signals)
}

/// Releases the keys of jobs that are no longer in flight, opens the key queues of these keys, and returns their lanes.
///
/// A claim closes a key queue only while it has the lock of the key, and after it has counted the jobs in flight. So no
/// claim closes a key queue because of a job that this call releases. A claim never waits for the lock of a key, and
/// this function takes the locks in the order of the keys, so neither can cause a deadlock.
async fn release_keys(client: &Object, (keys, ids): &(Vec<i64>, Vec<Uuid>)) -> Result<Vec<LaneId>> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let released = client
        .prepare_cached(
            // The planner cannot turn this subquery into a join, so it costs one index lookup per row.
            "SELECT DISTINCT u.key FROM unnest($1::int8[], $2::uuid[]) AS u(key, id)
             WHERE (SELECT 1 FROM faena.key_in_flight h WHERE h.key = u.key AND h.id = u.id) IS NOT NULL ORDER BY 1",
        )
        .await?;
    let released: Vec<i64> = client.query(&released, &[keys, ids]).await?.iter().map(|row| row.get(0)).collect();
    if released.is_empty() {
        return Ok(Vec::new());
    }
    let lock = client.prepare_cached("SELECT pg_advisory_xact_lock(key) FROM unnest($1::int8[]) AS k(key)").await?;
    client.query(&lock, &[&released]).await?;
    let delete = client
        .prepare_cached(
            "DELETE FROM faena.key_in_flight WHERE ctid = ANY (ARRAY(
                 SELECT h.ctid FROM unnest($1::int8[], $2::uuid[]) AS u(key, id)
                 CROSS JOIN LATERAL (SELECT ctid FROM faena.key_in_flight WHERE key = u.key AND id = u.id LIMIT 1) AS h))",
        )
        .await?;
    // A key queue that a rate limit has closed stays closed until `opens_at`.
    let open = client
        .prepare_cached(
            "WITH closed AS (
                 SELECT lane, key FROM faena.key_queue WHERE key = ANY($1) AND NOT open AND opens_at IS NULL
                 ORDER BY lane, key FOR NO KEY UPDATE)
             UPDATE faena.key_queue l SET open = true FROM closed c WHERE l.lane = c.lane AND l.key = c.key",
        )
        .await?;
    let lanes = client.prepare_cached("SELECT DISTINCT lane FROM faena.key_queue WHERE key = ANY($1)").await?;
    let (key_parameters, job_parameters): ([&(dyn ToSql + Sync); 1], [&(dyn ToSql + Sync); 2]) =
        ([&released], [keys, ids]);
    let (deleted, opened, lanes) = futures_util::future::join3(
        client.execute(&delete, &job_parameters),
        client.execute(&open, &key_parameters),
        client.query(&lanes, &key_parameters),
    )
    .await;
    deleted?;
    opened?;
    Ok(lanes?.iter().map(|row| row.get(0)).collect())
}

/// Returns whether the end of jobs in these lanes allows other jobs to start.
pub fn frees_capacity(shared: &Shared, lanes: impl Iterator<Item = LaneId>) -> bool {
    let rules = shared.rules.current();
    if rules.limits.is_empty() {
        return false;
    }
    distinct(lanes)
        .into_iter()
        .any(|lane| shared.lanes.get(lane).is_none_or(|lane| has_concurrency_limit(&rules, [&lane])))
}
