//! Cleans up after jobs that leave a queue or a worker: deletes their related rows, releases their keys, writes
//! webhooks, and lets the tasks that wait for them continue.

use faena_domain::JobId;

use super::{read, webhooks, writer::Tx};
use crate::{
    JobExit, Lane, LaneId, Result, Signal,
    admit::{distinct, has_concurrency_limit},
    plan::{KeyKind, key_number},
};

/// Deletes the rows that only some jobs have (start, cancel request, keys, expiry), writes the webhook of a finished job, and marks
/// that a task can continue.
///
/// The row of a finished job in `done` or `ended` must exist, because the webhook reads it. A requeued job gets its row
/// in `expiry` again, because that row is deleted if the job's expiry time passes during a run.
pub fn clean_up(tx: &Tx, id: JobId, exit: JobExit) -> Result<()> {
    let terminal = exit != JobExit::Requeued;
    tx.connection.prepare_cached("DELETE FROM running WHERE id = ?")?.execute([id.0])?;
    if terminal {
        tx.connection.prepare_cached("DELETE FROM cancel_request WHERE id = ?")?.execute([id.0])?;
    }
    let Some((lane, options)) = read::lane_and_options(tx.connection, id)? else { return Ok(()) };
    if exit == JobExit::Finished
        && let Some(url) = options.webhook_url.clone()
    {
        webhooks::create(tx, lane, id, url, &options)?;
    }
    if terminal && options.task_id.is_some() {
        let sql = "UPDATE task_job SET ended = 1 WHERE job = ? AND ended = 0";
        if tx.connection.prepare_cached(sql)?.execute([id.0])? > 0 {
            tx.signal(Signal::TaskJobEnded);
        }
    }
    if terminal && let Some(key) = options.unique_key {
        tx.connection.prepare_cached("DELETE FROM job_key WHERE kind = ? AND key = ? AND id = ?")?.execute((
            KeyKind::Unique as i16,
            key,
            id.0,
        ))?;
    }
    if let Some(key) = options.concurrency_key {
        release_key(tx, key_number(&key), id)?;
    }
    if let Some(expires_at) = options.expires_at {
        let sql = if terminal {
            "DELETE FROM expiry WHERE expires_at = ? AND id = ?"
        } else {
            tx.signal(Signal::Waiting);
            "INSERT OR IGNORE INTO expiry (expires_at, id) VALUES (?, ?)"
        };
        tx.connection.prepare_cached(sql)?.execute((expires_at.as_ms(), id.0))?;
    }
    Ok(())
}

/// Releases the key of a job that is no longer in flight, and opens the key queues of that key.
fn release_key(tx: &Tx, key: i64, id: JobId) -> Result<()> {
    let deleted =
        tx.connection.prepare_cached("DELETE FROM key_in_flight WHERE key = ? AND id = ?")?.execute((key, id.0))?;
    if deleted == 0 {
        return Ok(());
    }
    // A key queue that a rate limit has closed stays closed until `opens_at`.
    tx.connection
        .prepare_cached("UPDATE key_queue SET open = 1 WHERE key = ? AND open = 0 AND opens_at IS NULL")?
        .execute([key])?;
    let mut statement = tx.connection.prepare_cached("SELECT lane FROM key_queue WHERE key = ?")?;
    let mut lanes = statement.query([key])?;
    while let Some(row) = lanes.next()? {
        tx.signal(Signal::Ready(row.get(0)?));
    }
    Ok(())
}

/// Signals that jobs of these lanes have ended, if that allows other jobs to start.
pub fn signal_capacity(tx: &Tx, lanes: impl Iterator<Item = LaneId>) {
    let rules = tx.shared.rules.current();
    if !rules.limits.is_empty() {
        let lanes: Vec<Lane> = distinct(lanes).into_iter().filter_map(|lane| tx.shared.lanes.get(lane)).collect();
        if has_concurrency_limit(&rules, &lanes) {
            tx.signal(Signal::Capacity);
        }
    }
}
