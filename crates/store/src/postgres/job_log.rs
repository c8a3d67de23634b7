//! Stores log entries and rejected reports of a job, and limits its log, steps and attempts.

use deadpool_postgres::Object;
use faena_domain::{JobId, LogLine, Run, Timestamp};
use uuid::Uuid;

use super::end::storable;
use crate::{
    Result, RunUpdate, StoredJobLimits,
    job_log::{KEPT_ATTEMPTS, MessageRow, StaleRow},
};

/// A log entry of a job.
pub type JobLogEntry = (JobId, Option<Run>, LogLine);

pub async fn add_log_entry(
    client: &Object,
    limits: &StoredJobLimits,
    id: JobId,
    run: Option<Run>,
    entry: LogLine,
) -> Result<()> {
    add_log_entries(client, limits, vec![(id, run, entry)]).await
}

/// Adds log entries of many jobs, in order.
pub async fn add_log_entries(client: &Object, limits: &StoredJobLimits, entries: Vec<JobLogEntry>) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = entries.iter().map(|(id, _, _)| id.0).collect();
    let runs: Vec<Option<Run>> = entries.iter().map(|(_, run, _)| *run).collect();
    let logs: Vec<String> = entries.iter().map(|(_, _, line)| LogLine::chunk(std::slice::from_ref(line))).collect();
    let insert = client
        .prepare_cached(
            "INSERT INTO faena.job_log (id, run, log)
             SELECT id, run, log FROM unnest($1::uuid[], $2::int8[], $3::text[]) WITH ORDINALITY AS e(id, run, log, n) ORDER BY n",
        )
        .await?;
    client.execute(&insert, &[&ids, &runs, &logs]).await?;
    trim_logs(client, limits, &ids).await
}

/// Drops entries between the first and the newest ones of each log that has become too large.
pub async fn trim_logs(client: &Object, limits: &StoredJobLimits, ids: &[Uuid]) -> Result<()> {
    let sizes = client
        .prepare_cached("SELECT id, count(*), sum(bytes) FROM faena.job_log WHERE id = ANY($1) GROUP BY id")
        .await?;
    for row in client.query(&sizes, &[&ids]).await? {
        if limits.is_exceeded_by(row.get(1), row.get(2)) {
            trim_log(client, limits, row.get(0)).await?;
        }
    }
    Ok(())
}

async fn trim_log(client: &Object, limits: &StoredJobLimits, id: Uuid) -> Result<()> {
    let rows =
        client.query("SELECT sequence, bytes FROM faena.job_log WHERE id = $1 ORDER BY sequence", &[&id]).await?;
    let sizes: Vec<i64> = rows.iter().map(|row| i64::from(row.get::<_, i32>(1))).collect();
    let Some((first, last)) = limits.plan_trim(&sizes) else { return Ok(()) };
    let sequence = |at: usize| rows[at].get::<_, i64>(0);
    client
        .execute(
            "WITH deleted AS (DELETE FROM faena.job_log WHERE id = $1 AND sequence BETWEEN $2 AND $3 RETURNING dropped)
             UPDATE faena.job_log SET dropped = dropped + (SELECT count(*) + coalesce(sum(deleted.dropped), 0) FROM deleted)
             WHERE sequence = $4",
            &[&id, &sequence(first), &sequence(last), &sequence(last + 1)],
        )
        .await?;
    Ok(())
}

/// Returns the newest `limit` messages, oldest first, and how many came before them.
pub async fn messages(client: &Object, id: JobId, limit: usize) -> Result<(Vec<MessageRow>, u64)> {
    let limit_number = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = client
        .query(
            "SELECT run, log, dropped FROM faena.job_log WHERE id = $1 ORDER BY sequence DESC LIMIT $2",
            &[&id.0, &limit_number],
        )
        .await?;
    let message = |row: &tokio_postgres::Row| MessageRow { run: row.get(0), log: row.get(1), dropped: row.get(2) };
    let rows: Vec<MessageRow> = rows.iter().rev().map(message).collect();
    let mut omitted = 0;
    if rows.len() >= limit {
        let all: i64 = client
            .query_one("SELECT (count(*) + coalesce(sum(dropped), 0))::int8 FROM faena.job_log WHERE id = $1", &[&id.0])
            .await?
            .get(0);
        let shown: i64 = rows.iter().map(|row| 1 + row.dropped).sum();
        omitted = u64::try_from(all - shown).unwrap_or(0);
    }
    Ok((rows, omitted))
}

/// Counts a report that was rejected. Only the last one is stored.
pub async fn add_stale(client: &Object, update: &RunUpdate, text: &str) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.stale_report AS s (id, run, at, count, text) VALUES ($1, $2, $3, 1, $4)
             ON CONFLICT (id) DO UPDATE
             SET run = excluded.run, at = greatest(s.at, excluded.at), count = s.count + 1, text = excluded.text",
            &[&update.id.0, &update.run, &update.at.as_ms(), &storable(text)],
        )
        .await?;
    Ok(())
}

pub async fn stale(client: &Object, id: JobId) -> Result<Option<StaleRow>> {
    let row = client.query_opt("SELECT run, at, count, text FROM faena.stale_report WHERE id = $1", &[&id.0]).await?;
    Ok(row.map(|row| StaleRow {
        run: row.get(0),
        at: Timestamp::from_ms(row.get(1)),
        count: row.get(2),
        text: row.get(3),
    }))
}

/// Returns why a step is rejected, if the job already has too many steps.
pub async fn step_rejection(
    client: &Object,
    limits: &StoredJobLimits,
    id: JobId,
    name: &str,
    result: &str,
) -> Result<Option<String>> {
    let row = client
        .query_one(
            "SELECT count(*), coalesce(sum(octet_length(name) + octet_length(result)), 0)::int8
             FROM faena.step WHERE id = $1 AND name <> $2",
            &[&id.0, &storable(name)],
        )
        .await?;
    Ok(limits.step_rejection(row.get(0), row.get(1), name.len() + result.len()))
}

/// Deletes all but the newest attempts of each of these jobs. Keeps those of claims that exist: they show which of the jobs
/// of a claim have ended.
pub async fn trim_attempts(client: &Object, ids: &[Uuid]) -> Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let delete = client
        .prepare_cached(
            "DELETE FROM faena.attempt a USING (
                 SELECT u.id, (SELECT run FROM faena.attempt b WHERE b.id = u.id ORDER BY run DESC LIMIT 1 OFFSET $2) AS run
                 FROM unnest($1::uuid[]) AS u(id)) old
             WHERE a.id = old.id AND a.run <= old.run AND NOT EXISTS (SELECT FROM faena.claim c WHERE c.run = a.run)",
        )
        .await?;
    client.execute(&delete, &[&ids, &KEPT_ATTEMPTS]).await?;
    Ok(())
}
