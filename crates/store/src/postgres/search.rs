//! Reads values that lists show, filter or sort by, and that are neither in the row of the job nor in that of its
//! state.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEntry, Timestamp};
use uuid::Uuid;

use super::read::{finished_row, in_flight_locations};
use crate::{
    Result, SortBy,
    assemble::{Details, parse_options},
    job_log::MessageRow,
    lists::{LastRun, ListQuery, SEARCHED_ERROR_CHARS, SEARCHED_PAYLOAD_CHARS},
    sql::{CANCELLED, FAILED, sql},
};

/// Returns the last attempt and the last message of each job.
pub async fn last_details(client: &Object, ids: &[JobId]) -> Result<HashMap<JobId, Details>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let mut details: HashMap<JobId, Details> = HashMap::new();
    let rows = client
        .query(
            "SELECT DISTINCT ON (id) id, state, run, retry_count, worker, started_at, finished_at, NULL::text, error, reason, log
             FROM faena.attempt WHERE id = ANY($1) ORDER BY id, run DESC",
            &[&ids],
        )
        .await?;
    for row in rows {
        details.entry(JobId(row.get(0))).or_default().attempts.push(finished_row(&row, 1));
    }
    let rows = client
        .query(
            "SELECT DISTINCT ON (id) id, run, log FROM faena.job_log WHERE id = ANY($1) ORDER BY id, sequence DESC",
            &[&ids],
        )
        .await?;
    for row in rows {
        details.entry(JobId(row.get(0))).or_default().messages.push(MessageRow {
            run: row.get(1),
            log: row.get(2),
            dropped: 0,
        });
    }
    Ok(details)
}

/// Returns the worker and the error that each job shows.
pub async fn last_runs(
    client: &Object,
    query: &ListQuery,
    ids: &[JobId],
    states: &HashMap<JobId, JobState>,
) -> Result<HashMap<JobId, LastRun>> {
    let ids_where = |matches: fn(JobState) -> bool| -> Vec<Uuid> {
        ids.iter().filter(|id| states.get(id).is_some_and(|state| matches(*state))).map(|id| id.0).collect()
    };
    let mut found = HashMap::new();
    let rows = client
        .query(
            &format!(
                "SELECT j.id, x.worker, x.error, x.reason FROM faena.job j CROSS JOIN LATERAL (
                     SELECT d.worker, NULL::text AS error, NULL::text AS reason FROM faena.done d
                     WHERE d.lane = j.lane AND d.id = j.id
                     UNION ALL
                     SELECT e.worker, left(e.error, {SEARCHED_ERROR_CHARS}), e.reason FROM faena.ended e
                     WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id) x
                 WHERE j.id = ANY($1)"
            ),
            &[&ids_where(JobState::is_terminal)],
        )
        .await?;
    for row in rows {
        found.insert(JobId(row.get(0)), LastRun { worker: row.get(1), error: row.get(2), reason: row.get(3) });
    }
    let rows = client
        .query(
            &format!(
                "SELECT DISTINCT ON (id) id, left(error, {SEARCHED_ERROR_CHARS}), reason FROM faena.attempt WHERE id = ANY($1)
                 ORDER BY id, run DESC"
            ),
            &[&ids_where(|state| !state.is_terminal())],
        )
        .await?;
    for row in rows {
        found.insert(JobId(row.get(0)), LastRun { worker: None, error: row.get(1), reason: row.get(2) });
    }
    let in_flight = ids_where(JobState::is_in_flight);
    if query.compares_worker() && !in_flight.is_empty() {
        let mut locations = HashMap::new();
        in_flight_locations(client, &in_flight, &mut locations).await?;
        for (id, location) in locations {
            found.entry(JobId(id)).or_default().worker = location.worker_id();
        }
    }
    Ok(found)
}

/// Returns the jobs whose payloads match. Reads them in chunks, so that not all payloads are in memory at the same
/// time.
pub async fn payload_matches(client: &Object, query: &ListQuery, ids: &[Uuid]) -> Result<HashSet<JobId>> {
    let statement = client
        .prepare_cached(&format!(
            "SELECT id, substr(payload, 1, {SEARCHED_PAYLOAD_CHARS}) FROM faena.job WHERE id = ANY($1)"
        ))
        .await?;
    let mut found = HashSet::new();
    for part in ids.chunks(500) {
        for row in client.query(&statement, &[&part]).await? {
            if query.matches_payload(row.get(1)) {
                found.insert(JobId(row.get(0)));
            }
        }
    }
    Ok(found)
}

/// Returns the value of each job by which a list is sorted.
pub async fn sort_keys(client: &Object, by: SortBy, ids: &[JobId]) -> Result<Vec<(i64, JobId)>> {
    let raw: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    if by == SortBy::Updated {
        return updated_at(client, &raw).await;
    }
    let rows = client.query("SELECT id, options FROM faena.job WHERE id = ANY($1)", &[&raw]).await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in rows {
        let id = JobId(row.get(0));
        let at = parse_options(row.get(1))?.scheduled_at.unwrap_or(id.created_at());
        keys.push((at.as_ms(), id));
    }
    Ok(keys)
}

/// Returns when each job in a claim was claimed.
async fn claim_times(client: &Object) -> Result<HashMap<Uuid, i64>> {
    let rows = client
        .query("SELECT u.id, c.claimed_at FROM faena.claim c, unnest(c.ids) AS u(id) ORDER BY c.run", &[])
        .await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Returns when each job last changed.
async fn updated_at(client: &Object, ids: &[Uuid]) -> Result<Vec<(i64, JobId)>> {
    let claimed = claim_times(client).await?;
    let statement = client
        .prepare_cached(sql!(
            "SELECT j.id, greatest(
                 (SELECT finished_at FROM faena.done d WHERE d.lane = j.lane AND d.id = j.id LIMIT 1),
                 (SELECT finished_at FROM faena.ended e
                  WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id LIMIT 1),
                 (SELECT ready_at FROM faena.ready r WHERE r.lane = j.lane AND r.id = j.id LIMIT 1),
                 (SELECT updated_at FROM faena.running u WHERE u.id = j.id),
                 (SELECT finished_at FROM faena.attempt a WHERE a.id = j.id ORDER BY run DESC LIMIT 1)),
                 (SELECT log FROM faena.job_log l WHERE l.id = j.id ORDER BY sequence DESC LIMIT 1)
             FROM faena.job j WHERE j.id = ANY($1)"
        ))
        .await?;
    let mut keys = Vec::with_capacity(ids.len());
    for row in client.query(&statement, &[&ids]).await? {
        let (id, changed, chunk): (Uuid, Option<i64>, Option<&str>) = (row.get(0), row.get(1), row.get(2));
        let mut log = Vec::new();
        LogEntry::read_chunk(chunk.unwrap_or(""), None, &mut log);
        let logged_at = log.iter().map(|entry| entry.timestamp).max().map(Timestamp::as_ms);
        let times = [changed, logged_at, claimed.get(&id).copied()];
        let created = JobId(id).created_at().as_ms();
        keys.push((times.into_iter().flatten().fold(created, i64::max), JobId(id)));
    }
    Ok(keys)
}
