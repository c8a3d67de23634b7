//! Manual actions on a job: cancel, retry, patch, delete.

use std::collections::HashSet;

use faena_domain::{JobId, JobOptions, JobState, LogEvent, LogLine, Timestamp};
use rusqlite::OptionalExtension;

use super::{
    cleanup::clean_up,
    dependents::release_dependents,
    job_log::{add_log_entry, trim_attempts},
    lanes::lane_of,
    read,
    submit::{apply, put_ended_without_run, put_key_queue, put_ready, put_waiting},
    webhooks,
    writer::Tx,
};
use crate::{
    CancelOutcome, JobExit, JobPatch, LaneId, QueueChange, Result, Retried, Signal, StoreError, Tally,
    assemble::Location,
    jobs::UNIQUE_KEY_TAKEN,
    lanes::LaneName,
    plan::{
        Deltas, Dequeued, FIRST_RECHECK_MS, KeyKind, Label, key_number, labels_of, next_recheck_at, stored_options,
    },
    sql::sql,
    sql::{CANCELLED, PENDING},
};

pub fn cancel(tx: &Tx, id: JobId, reason: &str, now: Timestamp) -> Result<CancelOutcome> {
    let state = read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if state.is_terminal() {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be cancelled" });
    }
    if state.is_in_flight() {
        tx.connection
            .prepare_cached("INSERT OR IGNORE INTO cancel_request (id, reason, at) VALUES (?, ?, ?)")?
            .execute((id.0, reason, now.as_ms()))?;
        add_log_entry(tx, id, None, LogLine::new(now, LogEvent::CancelRequested, reason))?;
        tx.signal(Signal::Cancel(id));
        return Ok(CancelOutcome::Requested { state });
    }
    let lane = read::lane_and_options(tx.connection, id)?.ok_or(StoreError::NotFound(id))?.0;
    let dequeued = dequeue(tx, lane, id)?;
    let log = dequeued.log(now, LogEvent::Cancelled, reason);
    put_ended_without_run(tx, lane, CANCELLED, id, dequeued.retry_count, reason, "cancelled", log, now)?;
    clean_up(tx, id, JobExit::Finished)?;
    let mut deltas = Deltas::default();
    deltas.moved(lane, Tally::of(state), Tally::Cancelled, 1);
    release_dependents(tx, vec![id], &mut deltas, now)?;
    apply(tx, deltas);
    Ok(CancelOutcome::Cancelled)
}

/// Removes a job from `ready` or `waiting`.
pub fn dequeue(tx: &Tx, lane: LaneId, id: JobId) -> Result<Dequeued> {
    tx.queue_changed(QueueChange::left(lane, id));
    let ready: Option<(i64, u32)> = tx
        .connection
        .prepare_cached("SELECT ready_at, retry_count FROM ready INDEXED BY ready_id WHERE lane = ? AND id = ?")?
        .query_row((lane, id.0), |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    if let Some((ready_at, retry_count)) = ready {
        tx.connection
            .prepare_cached("DELETE FROM ready WHERE lane = ? AND ready_at = ? AND id = ?")?
            .execute((lane, ready_at, id.0))?;
        return Ok(Dequeued { retry_count, ready_at: Some(Timestamp::from_ms(ready_at)) });
    }
    let retry_count: Option<u32> = tx
        .connection
        .prepare_cached(sql!(
            "DELETE FROM waiting WHERE lane = ? AND state IN ({PENDING}, {RETRYING}) AND id = ? RETURNING retry_count"
        ))?
        .query_row((lane, id.0), |row| row.get(0))
        .optional()?;
    tx.connection.prepare_cached("DELETE FROM dependency WHERE child = ?")?.execute([id.0])?;
    Ok(Dequeued { retry_count: retry_count.unwrap_or(0), ready_at: None })
}

pub fn retry(tx: &Tx, id: JobId, by: &str, now: Timestamp) -> Result<Retried> {
    let state = read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if state == JobState::Retrying {
        return retry_now(tx, id, by, now);
    }
    if !state.can_transition_to(JobState::Pending) {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be retried" });
    }
    let (lane, options) = read::lane_and_options(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if let Some(key) = &options.unique_key {
        let taken = tx
            .connection
            .prepare_cached("INSERT OR IGNORE INTO job_key (kind, key, id) VALUES (?, ?, ?)")?
            .execute((KeyKind::Unique as i16, key, id.0))?;
        if taken == 0 {
            let existing_job: JobId = tx
                .connection
                .prepare_cached("SELECT id FROM job_key WHERE kind = ? AND key = ?")?
                .query_row((KeyKind::Unique as i16, key), |row| Ok(JobId(row.get(0)?)))?;
            return Err(StoreError::Conflict { message: UNIQUE_KEY_TAKEN.into(), existing_job: Some(existing_job) });
        }
    }
    let open = open_parents(tx, &options)?;
    restore_options(tx, lane, id, options, now)?;
    // A cancel request that came too late for the ended run does not apply to the next one.
    tx.connection.prepare_cached("DELETE FROM cancel_request WHERE id = ?")?.execute([id.0])?;
    // The history is kept: the last run becomes an attempt, an end without a run becomes a log entry.
    tx.connection.execute(
        sql!("INSERT OR IGNORE INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
         SELECT id, run, state, retry_count, finished_at, started_at, worker, error, reason, log
         FROM ended WHERE lane = ? AND state IN ({FAILED}, {CANCELLED}) AND id = ? AND run > 0"),
        (lane, id.0),
    )?;
    trim_attempts(tx, id)?;
    tx.connection.execute(
        sql!(
            "INSERT INTO job_log (id, run, log)
         SELECT id, NULL, log FROM ended WHERE lane = ? AND state IN ({FAILED}, {CANCELLED}) AND id = ? AND run = 0"
        ),
        (lane, id.0),
    )?;
    tx.connection.execute(
        sql!("DELETE FROM ended WHERE lane = ? AND state IN ({FAILED}, {CANCELLED}) AND id = ?"),
        (lane, id.0),
    )?;
    add_log_entry(tx, id, None, LogLine::new(now, LogEvent::Retried, by))?;
    for parent in &open {
        tx.connection
            .prepare_cached("INSERT OR IGNORE INTO dependency (parent, child) VALUES (?, ?)")?
            .execute((parent.0, id.0))?;
    }
    let due_at = if open.is_empty() { now } else { now.plus_ms(FIRST_RECHECK_MS) };
    put_waiting(tx, lane, PENDING, id, due_at, !open.is_empty(), 0)?;
    let mut deltas = Deltas::default();
    deltas.moved(lane, Tally::of(state), Tally::Pending, 1);
    apply(tx, deltas);
    Ok(Retried::FROM_START)
}

/// Makes the next attempt of a retrying job due now.
fn retry_now(tx: &Tx, id: JobId, by: &str, now: Timestamp) -> Result<Retried> {
    let lane = read::lane_and_options(tx.connection, id)?.ok_or(StoreError::NotFound(id))?.0;
    let retry_count = tx
        .connection
        .prepare_cached(sql!(
            "UPDATE waiting SET due_at = min(due_at, ?) WHERE lane = ? AND state = {RETRYING} AND id = ? RETURNING retry_count"
        ))?
        .query_row((now.as_ms(), lane, id.0), |row| row.get(0))?;
    add_log_entry(tx, id, None, LogLine::new(now, LogEvent::Retried, by))?;
    tx.signal(Signal::Waiting);
    Ok(Retried { state: JobState::Retrying, retry_count })
}

/// Returns the parents that a retried job waits for: those that have not finished. The caller of a retry knows how the others
/// ended.
fn open_parents(tx: &Tx, options: &JobOptions) -> Result<Vec<JobId>> {
    let mut open = Vec::new();
    for parent in &options.depends_on {
        if read::state_of(tx.connection, *parent)?.is_some_and(|state| !state.is_terminal()) {
            open.push(*parent);
        }
    }
    Ok(open)
}

/// Adds the attempts so far to the options of a job that is retried, and restores its expiry. An expiry that has passed
/// is removed, because the caller wants the job to run anyway.
fn restore_options(tx: &Tx, lane: LaneId, id: JobId, before: JobOptions, now: Timestamp) -> Result<()> {
    let mut options = before.clone();
    if let Location::Finished(end) = read::location(tx.connection, lane, id)? {
        options.earlier_attempts += end.attempts();
    }
    options.expires_at = before.expires_at.filter(|at| *at > now);
    if let Some(at) = options.expires_at {
        tx.connection
            .prepare_cached("INSERT OR IGNORE INTO expiry (expires_at, id) VALUES (?, ?)")?
            .execute((at.as_ms(), id.0))?;
    }
    if options != before {
        tx.connection
            .prepare_cached("UPDATE job SET options = ? WHERE id = ?")?
            .execute((stored_options(&options), id.0))?;
    }
    Ok(())
}

pub fn patch(tx: &Tx, id: JobId, patch: JobPatch, now: Timestamp) -> Result<()> {
    let state = read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if !matches!(state, JobState::Pending | JobState::Queued | JobState::Retrying) {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be changed" });
    }
    let (lane, mut options) = read::lane_and_options(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    let old = tx.shared.lanes.require(lane)?;
    let new_lane = match patch.priority {
        Some(priority) if priority != old.priority => lane_of(tx, LaneName { priority, ..old.name() })?,
        _ => lane,
    };
    let (expires_at_before, labels_before) = (options.expires_at, labels_of(&options));
    patch.apply_to(&mut options);
    options.name = options.name.filter(|name| *name != old.kind);
    replace_labels(tx, id, &labels_before, &labels_of(&options))?;
    let text = stored_options(&options);
    tx.connection
        .prepare_cached("UPDATE job SET lane = ?, options = ?, payload = coalesce(?, payload) WHERE id = ?")?
        .execute((new_lane, text, &patch.payload, id.0))?;
    if expires_at_before != options.expires_at {
        if let Some(at) = expires_at_before {
            tx.connection.execute("DELETE FROM expiry WHERE expires_at = ? AND id = ?", (at.as_ms(), id.0))?;
        }
        if let Some(at) = options.expires_at {
            tx.connection.execute("INSERT OR IGNORE INTO expiry VALUES (?, ?)", (at.as_ms(), id.0))?;
            tx.signal(Signal::Waiting);
        }
    }

    move_patched(tx, id, (lane, new_lane), state, &patch, &options, now)?;
    add_log_entry(tx, id, None, LogLine::new(now, LogEvent::Patched, patch.describe()))?;
    Ok(())
}

/// Replaces the labels of a job.
fn replace_labels(tx: &Tx, id: JobId, before: &[Label], after: &[Label]) -> Result<()> {
    let (old, new): (HashSet<&Label>, HashSet<&Label>) = (before.iter().collect(), after.iter().collect());
    for (kind, value) in before.iter().filter(|label| !new.contains(label)) {
        tx.connection.prepare_cached("DELETE FROM label WHERE kind = ? AND value = ? AND id = ?")?.execute((
            *kind as i16,
            value,
            id.0,
        ))?;
    }
    for (kind, value) in after.iter().filter(|label| !old.contains(label)) {
        tx.connection.prepare_cached("INSERT OR IGNORE INTO label (kind, value, id) VALUES (?, ?, ?)")?.execute((
            *kind as i16,
            value,
            id.0,
        ))?;
    }
    Ok(())
}

/// Moves a patched job to its new lane and time.
fn move_patched(
    tx: &Tx,
    id: JobId,
    (lane, new_lane): (LaneId, LaneId),
    state: JobState,
    patch: &JobPatch,
    options: &JobOptions,
    now: Timestamp,
) -> Result<()> {
    let blocked = tx.connection.prepare_cached("SELECT 1 FROM dependency WHERE child = ? LIMIT 1")?.exists([id.0])?;
    let ready_at_before = read::ready_at_of(tx.connection, lane, id)?;
    let mut deltas = Deltas::default();
    let mut new_state = state;
    match (state, patch.scheduled_at) {
        // It waits for its parents: only the lane can change.
        _ if blocked => {
            tx.connection.execute(MOVE_WAITING, (new_lane, None::<i64>, lane, id.0))?;
        }
        // Changes the time of its next attempt.
        (JobState::Retrying, when) => {
            let due_at = when.map(|when| when.unwrap_or(now).as_ms());
            tx.connection.execute(MOVE_WAITING, (new_lane, due_at, lane, id.0))?;
            if let Some(due_at) = due_at {
                tx.queue_changed(QueueChange::delayed(new_lane, due_at, id));
            }
            tx.signal(Signal::Waiting);
        }
        (_, Some(when)) => {
            let retry_count = dequeue(tx, lane, id)?.retry_count;
            match when.filter(|due_at| *due_at > now) {
                Some(due_at) => {
                    put_waiting(tx, new_lane, PENDING, id, due_at, false, retry_count)?;
                    new_state = JobState::Pending;
                }
                None => {
                    put_ready(tx, new_lane, now, id, retry_count, false)?;
                    new_state = JobState::Queued;
                }
            }
        }
        (JobState::Queued, None) => {
            if let Some(ready_at) = ready_at_before {
                tx.connection.execute(
                    "UPDATE ready SET lane = ? WHERE lane = ? AND ready_at = ? AND id = ?",
                    (new_lane, lane, ready_at, id.0),
                )?;
                if tx.is_keyed(new_lane)
                    && let Some(key) = &options.concurrency_key
                {
                    put_key_queue(tx, new_lane, key_number(key), Timestamp::from_ms(ready_at))?;
                }
                if new_lane != lane {
                    tx.queue_changed(QueueChange::left(lane, id));
                }
                tx.queue_changed(QueueChange::ready(new_lane, ready_at, id));
                tx.signal(Signal::Ready(new_lane));
            }
        }
        (_, None) => {
            tx.connection.execute(MOVE_WAITING, (new_lane, None::<i64>, lane, id.0))?;
        }
    }
    deltas.add(lane, Tally::of(state), -1);
    deltas.add(new_lane, Tally::of(new_state), 1);
    apply(tx, deltas);
    Ok(())
}

const MOVE_WAITING: &str = sql!(
    "UPDATE waiting SET lane = ?, due_at = coalesce(?, due_at) WHERE lane = ? AND state IN ({PENDING}, {RETRYING}) AND id = ?"
);

pub fn delete(tx: &Tx, id: JobId, now: Timestamp) -> Result<()> {
    let state = read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if state.is_in_flight() {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be deleted; cancel it first" });
    }
    let lane = read::lane_and_options(tx.connection, id)?.ok_or(StoreError::NotFound(id))?.0;
    if !state.is_terminal() {
        dequeue(tx, lane, id)?;
    }
    remove(tx, lane, id)?;
    // If a claim contains the deleted job, reports about its jobs must be checked one by one from now on.
    tx.connection.prepare_cached("UPDATE claim SET check_each = 1 WHERE instr(ids, ?) > 0")?.execute([id.0])?;
    let mut deltas = Deltas::default();
    deltas.removed(lane, Tally::of(state), 1);
    // Jobs that wait for it will never see it complete.
    release_dependents(tx, vec![id], &mut deltas, now)?;
    apply(tx, deltas);
    Ok(())
}

/// Deletes a job that is in no queue, with everything that belongs to it.
pub fn remove(tx: &Tx, lane: LaneId, id: JobId) -> Result<()> {
    clean_up(tx, id, JobExit::Deleted)?;
    webhooks::remove(tx, id.0)?;
    let options = read::lane_and_options(tx.connection, id)?.map(|(_, options)| options).unwrap_or_default();
    let connection = tx.connection;
    replace_labels(tx, id, &labels_of(&options), &[])?;
    if let Some(key) = &options.idempotency_key {
        connection.prepare_cached("DELETE FROM job_key WHERE kind = ? AND key = ? AND id = ?")?.execute((
            KeyKind::Idempotency as i16,
            key,
            id.0,
        ))?;
    }
    connection.prepare_cached("DELETE FROM done WHERE lane = ? AND id = ?")?.execute((lane, id.0))?;
    connection
        .prepare_cached(sql!("DELETE FROM ended WHERE lane = ? AND state IN ({FAILED}, {CANCELLED}) AND id = ?"))?
        .execute((lane, id.0))?;
    connection.prepare_cached("DELETE FROM attempt WHERE id = ?")?.execute([id.0])?;
    connection.prepare_cached("DELETE FROM job_log WHERE id = ?")?.execute([id.0])?;
    connection.prepare_cached("DELETE FROM stale_report WHERE id = ?")?.execute([id.0])?;
    connection.prepare_cached("DELETE FROM step WHERE id = ?")?.execute([id.0])?;
    connection.prepare_cached("DELETE FROM progress WHERE id = ?")?.execute([id.0])?;
    connection.prepare_cached("DELETE FROM job WHERE id = ?")?.execute([id.0])?;
    Ok(())
}

/// Sets when a blocked job is checked next, if no parent releases it before.
pub fn schedule_recheck(tx: &Tx, lane: LaneId, id: JobId, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(sql!(
            "UPDATE waiting SET due_at = ? WHERE lane = ? AND state = {PENDING} AND id = ? AND blocked = 1"
        ))?
        .execute((next_recheck_at(id, now).as_ms(), lane, id.0))?;
    Ok(())
}
