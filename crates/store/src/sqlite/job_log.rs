//! Stores log entries and rejected reports of a job, and limits its log, steps and attempts.

use faena_domain::{JobId, LogLine, Run};
use rusqlite::{Connection, OptionalExtension};

use super::writer::Tx;
use crate::{
    Result, RunUpdate,
    job_log::{KEPT_ATTEMPTS, MessageRow, StaleRow},
};

pub fn add_log_entry(tx: &Tx, id: JobId, run: Option<Run>, entry: LogLine) -> Result<()> {
    tx.connection.prepare_cached("INSERT INTO job_log (id, run, log) VALUES (?, ?, ?)")?.execute((
        id.0,
        run,
        LogLine::chunk(&[entry]),
    ))?;
    trim_log(tx, id)
}

/// Drops entries between the first and the newest ones if the log of a job has become too large.
pub fn trim_log(tx: &Tx, id: JobId) -> Result<()> {
    let limits = &tx.shared.options.job_limits;
    let (entries, bytes): (i64, i64) = tx
        .connection
        .prepare_cached("SELECT count(*), coalesce(sum(bytes), 0) FROM job_log INDEXED BY job_log_id WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    if !limits.is_exceeded_by(entries, bytes) {
        return Ok(());
    }
    let rows: Vec<(i64, i64)> = tx
        .connection
        .prepare_cached("SELECT sequence, bytes FROM job_log INDEXED BY job_log_id WHERE id = ? ORDER BY sequence")?
        .query_map([id.0], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let sizes: Vec<i64> = rows.iter().map(|(_, bytes)| *bytes).collect();
    let Some((first, last)) = limits.plan_trim(&sizes) else { return Ok(()) };
    let (from, to, next) = (rows[first].0, rows[last].0, rows[last + 1].0);
    let before: i64 = tx
        .connection
        .prepare_cached("SELECT coalesce(sum(dropped), 0) FROM job_log WHERE id = ? AND sequence BETWEEN ? AND ?")?
        .query_row((id.0, from, to), |row| row.get(0))?;
    let deleted = tx
        .connection
        .prepare_cached("DELETE FROM job_log WHERE id = ? AND sequence BETWEEN ? AND ?")?
        .execute((id.0, from, to))?;
    tx.connection
        .prepare_cached("UPDATE job_log SET dropped = dropped + ? WHERE sequence = ?")?
        .execute((before + i64::try_from(deleted).unwrap_or(0), next))?;
    Ok(())
}

/// Returns the newest `limit` messages, oldest first, and how many came before them.
pub fn messages(connection: &Connection, id: JobId, limit: usize) -> Result<(Vec<MessageRow>, u64)> {
    let mut rows: Vec<MessageRow> = connection
        .prepare_cached("SELECT run, log, dropped FROM job_log WHERE id = ? ORDER BY sequence DESC LIMIT ?")?
        .query_map((id.0, i64::try_from(limit).unwrap_or(i64::MAX)), |row| {
            Ok(MessageRow { run: row.get(0)?, log: row.get(1)?, dropped: row.get(2)? })
        })?
        .collect::<rusqlite::Result<_>>()?;
    rows.reverse();
    let mut omitted = 0;
    if rows.len() >= limit {
        let all: i64 = connection
            .prepare_cached("SELECT count(*) + coalesce(sum(dropped), 0) FROM job_log WHERE id = ?")?
            .query_row([id.0], |row| row.get(0))?;
        let shown: i64 = rows.iter().map(|row| 1 + row.dropped).sum();
        omitted = u64::try_from(all - shown).unwrap_or(0);
    }
    Ok((rows, omitted))
}

/// Counts a report that was rejected. Only the last one is stored.
pub fn add_stale(tx: &Tx, update: &RunUpdate, text: &str) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO stale_report (id, run, at, count, text) VALUES (?, ?, ?, 1, ?)
             ON CONFLICT DO UPDATE SET run = excluded.run, at = max(at, excluded.at), count = count + 1, text = excluded.text",
        )?
        .execute((update.id.0, update.run, update.at.as_ms(), text))?;
    Ok(())
}

pub fn stale(connection: &Connection, id: JobId) -> Result<Option<StaleRow>> {
    Ok(connection
        .prepare_cached("SELECT run, at, count, text FROM stale_report WHERE id = ?")?
        .query_row([id.0], |row| {
            let at = faena_domain::Timestamp::from_ms(row.get(1)?);
            Ok(StaleRow { run: row.get(0)?, at, count: row.get(2)?, text: row.get(3)? })
        })
        .optional()?)
}

/// Returns why a step is rejected, if the job's steps would become too many or too large.
pub fn step_rejection(tx: &Tx, id: JobId, name: &str, result: &str) -> Result<Option<String>> {
    let (count, bytes): (i64, i64) = tx
        .connection
        .prepare_cached(
            "SELECT count(*), coalesce(sum(octet_length(name) + octet_length(result)), 0) FROM step WHERE id = ? AND name <> ?",
        )?
        .query_row((id.0, name), |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(tx.shared.options.job_limits.step_rejection(count, bytes, name.len() + result.len()))
}

/// Deletes all but the newest attempts of a job. Keeps the attempts of a claim that still exists, because they show
/// which of its jobs have ended.
pub fn trim_attempts(tx: &Tx, id: JobId) -> Result<()> {
    tx.connection
        .prepare_cached(
            "DELETE FROM attempt WHERE id = ?1
                 AND run <= (SELECT run FROM attempt WHERE id = ?1 ORDER BY run DESC LIMIT 1 OFFSET ?2)
                 AND NOT EXISTS (SELECT 1 FROM claim WHERE claim.run = attempt.run)",
        )?
        .execute((id.0, KEPT_ATTEMPTS))?;
    Ok(())
}
