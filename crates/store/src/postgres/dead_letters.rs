//! Retries, deletes, searches and counts dead letters: jobs that failed permanently.

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{Attempt, JobId, JobState, Timestamp};
use serde_json::json;
use uuid::Uuid;

use super::{Postgres, Shared, audit, change, dependents, read};
use crate::{
    DeadLetterStats, DeadLetterStore, LaneId, Result, Signal, StoreError,
    assemble::{self, FinishedRow},
    audit::{audit_entry, retried_by},
    lists::{self, LaneSearch, ListQuery, Range, Window},
    sql::FAILED,
};

#[async_trait]
impl DeadLetterStore for Postgres {
    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| retry(&self.shared, id, by, now)).await
    }

    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| delete(&self.shared, id, by, now)).await
    }

    async fn dead_letter_stats(&self) -> Result<DeadLetterStats> {
        self.shared.retrying(|| stats(&self.shared)).await
    }
}

pub async fn retry(shared: &Shared, id: JobId, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let entry = audit_entry(Some(by), "dead_letter.retry", id, json!({}));
    let work = async {
        require_failed(&client, id, "be retried as a dead letter").await?;
        change::retry_in(&client, shared.own_writes(), id, retried_by(Some(by)), now).await?;
        Ok(())
    };
    let result = audit::run_audited(&client, entry, now, work).await;
    client.end(result).await?;
    shared.signal([Signal::Waiting]);
    Ok(())
}

pub async fn delete(shared: &Shared, id: JobId, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let entry = audit_entry(Some(by), "dead_letter.delete", id, json!({}));
    let work = async {
        require_failed(&client, id, "be deleted as a dead letter").await?;
        change::delete_in(&client, shared.own_shard(), id).await
    };
    let result = audit::run_audited(&client, entry, now, work).await;
    client.end(result).await?.send(shared);
    dependents::release_dependents(shared, &[id], now).await
}

async fn require_failed(client: &Object, id: JobId, wanted: &'static str) -> Result<()> {
    // Locks the row first, as every change does: what is read afterwards does not change.
    client
        .query_opt("SELECT 1 FROM faena.job WHERE id = $1 FOR UPDATE", &[&id.0])
        .await?
        .ok_or(StoreError::NotFound(id))?;
    match read::states_of(client, &[id]).await?.get(&id).ok_or(StoreError::NotFound(id))? {
        JobState::Failed => Ok(()),
        from => Err(StoreError::InvalidTransition { from: *from, wanted }),
    }
}

/// Returns the failed jobs of these lanes that match the search.
///
/// PostgreSQL: the database searches, so that the texts are not transferred. It ignores case according to its locale;
/// with the locale C only for ASCII.
pub async fn search(client: &Object, query: &ListQuery, lanes: &[LaneId], range: Range) -> Result<Window> {
    let per_lane = lists::per_lane(lanes.len());
    let statement = client
        .prepare_cached(&format!(
            "SELECT w.seen, w.last, w.ids FROM unnest($1::int4[]) AS l(lane) CROSS JOIN LATERAL (
                 SELECT count(*) AS seen, (array_agg(x.id))[count(*)::int4] AS last,
                        array_agg(x.id) FILTER (WHERE ($5::text IS NULL OR strpos(lower(left(x.error, {})), lower($5)) > 0)
                                                  AND ($6::text IS NULL OR x.reason = $6)) AS ids
                 FROM (SELECT id, error, reason FROM faena.ended
                       WHERE lane = l.lane AND state = {FAILED} AND id < $2 AND id >= $3 ORDER BY id {} LIMIT $4) x) w",
            lists::SEARCHED_ERROR_CHARS,
            query.order()
        ))
        .await?;
    let (error, reason) = query.search_terms();
    let rows = client
        .query(&statement, &[&lanes, &range.before.0, &range.from.0, &(per_lane as i64), &error, &reason])
        .await?;
    let scans = rows.iter().map(|row| LaneSearch {
        seen: usize::try_from(row.get::<_, i64>(0)).unwrap_or(0),
        last: row.get::<_, Option<Uuid>>(1).map(JobId),
        ids: row.get::<_, Option<Vec<Uuid>>>(2).unwrap_or_default().into_iter().map(JobId).collect(),
    });
    Ok(query.dead_letters(scans.collect(), per_lane))
}

pub async fn stats(shared: &Shared) -> Result<DeadLetterStats> {
    let client = shared.client().await?;
    client.batch_execute(read::BEGIN_READ).await?;
    let stats = stats_in(&client).await;
    client.end(stats).await
}

async fn stats_in(client: &Object) -> Result<DeadLetterStats> {
    let lanes = lists::failing(&read::counts_in(client).await?);
    let first = |order: &str| {
        format!(
            "SELECT x.id, x.reason FROM unnest($1::int4[]) AS l(lane) CROSS JOIN LATERAL (
                 SELECT id, coalesce(reason, 'error') AS reason FROM faena.ended
                 WHERE lane = l.lane AND state = {FAILED} ORDER BY id {order} LIMIT $2) x"
        )
    };
    let mut stats = DeadLetterStats::default();
    let rows = client.query(&first("DESC"), &[&lanes, &(lists::per_lane(lanes.len()) as i64)]).await?;
    stats.add_reasons(rows.iter().map(|row| (JobId(row.get(0)), row.get(1))).collect());
    let rows = client.query(&first("ASC"), &[&lanes, &1_i64]).await?;
    stats.oldest = rows.iter().map(|row| JobId(row.get(0))).min();
    Ok(stats)
}

pub async fn attempts(shared: &Shared, id: JobId) -> Result<Vec<Attempt>> {
    let client = shared.client().await?;
    client.batch_execute(read::BEGIN_READ).await?;
    let attempts = attempts_in(&client, id).await;
    client.end(attempts).await
}

async fn attempts_in(client: &Object, id: JobId) -> Result<Vec<Attempt>> {
    let rows = read::ends_of(client, id).await?;
    let job_workers = read::job_workers(client, rows.iter().filter_map(|row: &FinishedRow| row.worker)).await?;
    Ok(assemble::attempts(rows, &job_workers))
}
