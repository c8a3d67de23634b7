//! Retries, deletes, searches and counts dead letters: jobs that failed permanently.

use async_trait::async_trait;
use faena_domain::{Attempt, JobId, JobState, Timestamp};
use rusqlite::Connection;

use super::{Sqlite, audit, change, read, writer::Tx};
use crate::{
    DeadLetterStats, DeadLetterStore, LaneId, Result, StoreError,
    assemble::{self, FinishedRow},
    audit::{audit_entry, retried_by},
    lists::{self, LaneSearch, ListQuery, Range, Window},
    sql::FAILED,
};

#[async_trait]
impl DeadLetterStore for Sqlite {
    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| retry(tx, id, &by, now)).await
    }

    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| delete(tx, id, &by, now)).await
    }

    async fn dead_letter_stats(&self) -> Result<DeadLetterStats> {
        self.read(|connection, _| stats(connection)).await
    }
}

pub fn retry(tx: &Tx, id: JobId, by: &str, now: Timestamp) -> Result<()> {
    require_failed(tx, id, "be retried as a dead letter")?;
    audit::run_audited(tx, audit_entry(Some(by), "dead_letter.retry", id, serde_json::json!({})), now, |tx| {
        change::retry(tx, id, &retried_by(Some(by)), now).map(|_| ())
    })
}

pub fn delete(tx: &Tx, id: JobId, by: &str, now: Timestamp) -> Result<()> {
    require_failed(tx, id, "be deleted as a dead letter")?;
    audit::run_audited(tx, audit_entry(Some(by), "dead_letter.delete", id, serde_json::json!({})), now, |tx| {
        change::delete(tx, id, now)
    })
}

fn require_failed(tx: &Tx, id: JobId, wanted: &'static str) -> Result<()> {
    match read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))? {
        JobState::Failed => Ok(()),
        from => Err(StoreError::InvalidTransition { from, wanted }),
    }
}

/// Returns the failed jobs of these lanes that match the search.
pub fn search(connection: &Connection, query: &ListQuery, lanes: &[LaneId], range: Range) -> Result<Window> {
    let per_lane = lists::per_lane(lanes.len());
    let mut statement = connection.prepare_cached(&format!(
        "SELECT id, substr(error, 1, {}), reason FROM ended
         WHERE lane = ?1 AND state = {FAILED} AND id < ?2 AND id >= ?3 ORDER BY id {} LIMIT ?4",
        lists::SEARCHED_ERROR_CHARS,
        query.order()
    ))?;
    let mut scans = Vec::with_capacity(lanes.len());
    for lane in lanes {
        let mut scan = LaneSearch::default();
        let mut rows = statement.query((lane, range.before.0, range.from.0, per_lane as i64))?;
        while let Some(row) = rows.next()? {
            let id = JobId(row.get(0)?);
            let (error, reason): (Option<String>, Option<String>) = (row.get(1)?, row.get(2)?);
            scan.record(id, query.matches_error(error.as_deref(), reason.as_deref()));
        }
        scans.push(scan);
    }
    Ok(query.dead_letters(scans, per_lane))
}

pub fn stats(connection: &Connection) -> Result<DeadLetterStats> {
    let lanes = lists::failing(&read::counts(connection)?);
    let mut stats = DeadLetterStats::default();
    let mut newest: Vec<(JobId, String)> = Vec::new();
    let mut reasons = connection.prepare_cached(&format!(
        "SELECT id, coalesce(reason, 'error') FROM ended WHERE lane = ? AND state = {FAILED} ORDER BY id DESC LIMIT ?"
    ))?;
    let mut oldest = connection
        .prepare_cached(&format!("SELECT id FROM ended WHERE lane = ? AND state = {FAILED} ORDER BY id LIMIT 1"))?;
    for lane in &lanes {
        let rows = reasons.query_map((lane, lists::per_lane(lanes.len()) as i64), |row| {
            Ok((JobId(row.get(0)?), row.get::<_, String>(1)?))
        })?;
        for row in rows {
            newest.push(row?);
        }
        for id in oldest.query_map([lane], |row| Ok(JobId(row.get(0)?)))? {
            let id = id?;
            stats.oldest = Some(stats.oldest.map_or(id, |known| known.min(id)));
        }
    }
    stats.add_reasons(newest);
    Ok(stats)
}

pub fn attempts(connection: &Connection, id: JobId) -> Result<Vec<Attempt>> {
    let rows = read::ends_of(connection, id)?;
    let job_workers = read::job_workers(connection, rows.iter().filter_map(|row: &FinishedRow| row.worker))?;
    Ok(assemble::attempts(rows, &job_workers))
}
