//! Reads values that lists show, filter or sort by, and that are neither in the row of the job nor in that of its state.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use super::{
    claim::decode_claimed_jobs,
    read::{finished_row, lane_and_options, location},
};
use crate::{
    LaneId, Result, SortBy,
    assemble::Details,
    job_log::MessageRow,
    lists::{LastRun, SEARCHED_ERROR_CHARS, SEARCHED_PAYLOAD_CHARS},
    sql::sql,
};

/// Returns the last attempt and the last message of a job.
pub fn last_details(connection: &Connection, id: JobId) -> Result<Details> {
    let attempt = connection
        .prepare_cached(
            "SELECT state, run, retry_count, worker, started_at, finished_at, NULL, error, reason, log
             FROM attempt WHERE id = ? ORDER BY run DESC LIMIT 1",
        )?
        .query_row([id.0], finished_row)
        .optional()?;
    let message = last_message(connection, id)?;
    Ok(Details {
        attempts: attempt.into_iter().collect(),
        messages: message.into_iter().collect(),
        ..Details::default()
    })
}

fn last_message(connection: &Connection, id: JobId) -> Result<Option<MessageRow>> {
    Ok(connection
        .prepare_cached("SELECT run, log FROM job_log WHERE id = ? ORDER BY sequence DESC LIMIT 1")?
        .query_row([id.0], |row| Ok(MessageRow { run: row.get(0)?, log: row.get(1)?, dropped: 0 }))
        .optional()?)
}

/// Returns the worker and the error that a job in this state shows.
pub fn last_run(connection: &Connection, lane: LaneId, id: JobId, state: JobState) -> Result<LastRun> {
    let read = |row: &rusqlite::Row| Ok(LastRun { worker: row.get(0)?, error: row.get(1)?, reason: row.get(2)? });
    let found = match state {
        JobState::Completed => connection
            .prepare_cached("SELECT worker, NULL, NULL FROM done WHERE lane = ? AND id = ?")?
            .query_row((lane, id.0), read)
            .optional()?,
        JobState::Failed | JobState::Cancelled => connection
            .prepare_cached(&format!(
                "SELECT worker, substr(error, 1, {SEARCHED_ERROR_CHARS}), reason FROM ended WHERE lane = ? AND state = ? AND id = ?"
            ))?
            .query_row((lane, state as i16, id.0), read)
            .optional()?,
        _ => connection
            .prepare_cached(&format!(
                "SELECT NULL, substr(error, 1, {SEARCHED_ERROR_CHARS}), reason FROM attempt WHERE id = ? ORDER BY run DESC LIMIT 1"
            ))?
            .query_row([id.0], read)
            .optional()?,
    };
    let mut found = found.unwrap_or_default();
    if state.is_in_flight() {
        found.worker = location(connection, lane, id)?.worker_id();
    }
    Ok(found)
}

/// Returns the beginning of a payload, in which a search looks.
pub fn payload_of(connection: &Connection, id: JobId) -> Result<String> {
    let payload = connection
        .prepare_cached(&format!("SELECT substr(payload, 1, {SEARCHED_PAYLOAD_CHARS}) FROM job WHERE id = ?"))?
        .query_row([id.0], |row| row.get(0))
        .optional()?;
    Ok(payload.unwrap_or_default())
}

/// Returns the value of each job by which a list is sorted.
pub fn sort_keys(connection: &Connection, by: SortBy, ids: &[JobId]) -> Result<Vec<(i64, JobId)>> {
    let claimed = if by == SortBy::Updated { claim_times(connection)? } else { HashMap::new() };
    let mut keys = Vec::with_capacity(ids.len());
    for id in ids {
        let Some((lane, options)) = lane_and_options(connection, *id)? else { continue };
        let at = match by {
            SortBy::Updated => updated_at(connection, lane, *id)?.max(claimed.get(id).copied().unwrap_or_default()),
            _ => options.scheduled_at.unwrap_or(id.created_at()),
        };
        keys.push((at.as_ms(), *id));
    }
    Ok(keys)
}

/// Returns when each job in a claim was claimed.
fn claim_times(connection: &Connection) -> Result<HashMap<JobId, Timestamp>> {
    let mut times = HashMap::new();
    let mut statement = connection.prepare_cached("SELECT claimed_at, ids FROM claim ORDER BY run")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (at, ids): (i64, Vec<u8>) = (row.get(0)?, row.get(1)?);
        times.extend(decode_claimed_jobs(&ids, None).into_iter().map(|(id, _)| (id, Timestamp::from_ms(at))));
    }
    Ok(times)
}

/// Returns when a job last changed, apart from being claimed.
fn updated_at(connection: &Connection, lane: LaneId, id: JobId) -> Result<Timestamp> {
    let changed: Option<i64> = connection
        .prepare_cached(sql!(
            "SELECT max(at) FROM (
                 SELECT finished_at AS at FROM done WHERE lane = ?1 AND id = ?2
                 UNION ALL SELECT finished_at FROM ended WHERE lane = ?1 AND state IN ({FAILED}, {CANCELLED}) AND id = ?2
                 UNION ALL SELECT ready_at FROM ready INDEXED BY ready_id WHERE lane = ?1 AND id = ?2
                 UNION ALL SELECT updated_at FROM running WHERE id = ?2
                 UNION ALL SELECT * FROM (SELECT finished_at FROM attempt WHERE id = ?2 ORDER BY run DESC LIMIT 1))"
        ))?
        .query_row((lane, id.0), |row| row.get(0))?;
    let mut log = Vec::new();
    if let Some(message) = last_message(connection, id)? {
        message.read(&mut log);
    }
    let logged_at = log.iter().map(|entry| entry.timestamp).max();
    Ok(id.created_at().max(changed.map(Timestamp::from_ms).unwrap_or_default()).max(logged_at.unwrap_or_default()))
}
