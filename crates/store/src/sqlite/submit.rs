//! Stores new jobs.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, LogEvent, NewJob, Timestamp};
use rusqlite::OptionalExtension;

use super::{cleanup::clean_up, lanes::lanes_of, read, writer::Tx};
use crate::{
    JobExit, LaneId, QueueChange, Result, Signal, StoreError, Submitted, Tally,
    jobs::UNIQUE_KEY_TAKEN,
    plan::{self, Deltas, Dequeued, KeyKind, Parents, Placement, PlannedJob},
    sql::{CANCELLED, PENDING},
};

pub fn submit(tx: &Tx, mut jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>> {
    let mut known = Parents::new();
    for parent in plan::parent_ids(&jobs) {
        if let Some(state) = read::state_of(tx.connection, parent)? {
            known.insert(parent, state.is_terminal().then_some(state));
        }
    }
    plan::check_parents(&jobs, &known)?;
    let lanes = lanes_of(tx, &jobs)?;

    let repeated = plan::repeated(&jobs)?;
    let mut existing: HashMap<JobId, Submitted> = HashMap::new();
    let with_keys = |job: &&NewJob| job.options.idempotency_key.is_some() || job.options.unique_key.is_some();
    for job in jobs.iter().filter(|job| !repeated.contains_key(&job.id)).filter(with_keys) {
        if let Some(found) = take_keys(tx, job)? {
            known.insert(found.id, found.status.is_terminal().then_some(found.status));
            existing.insert(job.id, found);
        }
    }
    for job in &mut jobs {
        for parent in &mut job.options.depends_on {
            *parent = repeated.get(parent).copied().unwrap_or(*parent);
            *parent = existing.get(parent).map_or(*parent, |found| found.id);
        }
    }

    let mut deltas = Deltas::default();
    let mut answers = Vec::with_capacity(jobs.len());
    let mut answered: HashMap<JobId, Submitted> = HashMap::new();
    for (job, lane) in jobs.into_iter().zip(lanes) {
        if let Some(found) = existing.get(&job.id).or(repeated.get(&job.id).and_then(|first| answered.get(first))) {
            let found = Submitted { existed: true, ..found.clone() };
            answered.insert(job.id, found.clone());
            answers.push(found);
            continue;
        }
        let planned = plan::plan(&job, lane, &known, now);
        insert(tx, &planned, now)?;
        deltas.created(lane, Tally::of(planned.placement.state()));
        let status = planned.placement.state();
        if status == JobState::Cancelled {
            known.insert(planned.id, Some(status));
        }
        let answer = Submitted { id: planned.id, status, created_at: planned.id.created_at(), existed: false };
        if !repeated.is_empty() {
            answered.insert(planned.id, answer.clone());
        }
        answers.push(answer);
    }
    apply(tx, deltas);
    Ok(answers)
}

/// Takes the keys of a job, or returns the job that has its idempotency key.
fn take_keys(tx: &Tx, job: &NewJob) -> Result<Option<Submitted>> {
    let mut find = tx.connection.prepare_cached("SELECT id, fingerprint FROM job_key WHERE kind = ? AND key = ?")?;
    let mut find_existing = |kind: KeyKind, key: &str| {
        find.query_row((kind as i16, key), |row| Ok((JobId(row.get(0)?), row.get::<_, Option<Vec<u8>>>(1)?))).optional()
    };
    let mut insert =
        tx.connection.prepare_cached("INSERT INTO job_key (kind, key, id, fingerprint) VALUES (?, ?, ?, ?)")?;
    if let Some(key) = &job.options.idempotency_key {
        if let Some((id, fingerprint)) = find_existing(KeyKind::Idempotency, key)? {
            if fingerprint.as_deref() != job.fingerprint.as_ref().map(|f| f.as_slice()) {
                return Err(StoreError::Conflict {
                    message: "this idempotency key was used for another request".into(),
                    existing_job: Some(id),
                });
            }
            let status = read::state_of(tx.connection, id)?.unwrap_or(JobState::Completed);
            return Ok(Some(Submitted { id, status, created_at: id.created_at(), existed: true }));
        }
        insert.execute((KeyKind::Idempotency as i16, key, job.id.0, job.fingerprint.as_ref().map(|f| f.as_slice())))?;
    }
    if let Some(key) = &job.options.unique_key {
        if let Some((id, _)) = find_existing(KeyKind::Unique, key)? {
            return Err(StoreError::Conflict { message: UNIQUE_KEY_TAKEN.into(), existing_job: Some(id) });
        }
        insert.execute((KeyKind::Unique as i16, key, job.id.0, None::<&[u8]>))?;
    }
    Ok(None)
}

fn insert(tx: &Tx, job: &PlannedJob, now: Timestamp) -> Result<()> {
    let connection = tx.connection;
    connection
        .prepare_cached("INSERT INTO job (id, lane, correlation, options, payload) VALUES (?, ?, ?, ?, ?)")?
        .execute((job.id.0, job.lane, &job.correlation, &job.options, &job.payload))?;
    match &job.placement {
        Placement::Ready => put_ready(tx, job.lane, job.id.created_at(), job.id, 0, false)?,
        Placement::Delayed { due_at } => put_waiting(tx, job.lane, PENDING, job.id, *due_at, false, 0)?,
        Placement::Blocked { recheck_at } => put_waiting(tx, job.lane, PENDING, job.id, *recheck_at, true, 0)?,
        Placement::Cancelled { cause } => {
            let log = Dequeued::default().log(now, LogEvent::Cancelled, cause);
            put_ended_without_run(tx, job.lane, CANCELLED, job.id, 0, cause, "cancelled", log, now)?;
            clean_up(tx, job.id, JobExit::Finished)?;
        }
    }
    for (kind, value) in &job.labels {
        connection.prepare_cached("INSERT OR IGNORE INTO label (kind, value, id) VALUES (?, ?, ?)")?.execute((
            *kind as i16,
            value,
            job.id.0,
        ))?;
    }
    if let Some(expires_at) = job.expires_at
        && job.placement.state() != JobState::Cancelled
    {
        connection
            .prepare_cached("INSERT INTO expiry (expires_at, id) VALUES (?, ?)")?
            .execute((expires_at.as_ms(), job.id.0))?;
        tx.signal(Signal::Waiting);
    }
    for parent in &job.parents {
        connection
            .prepare_cached("INSERT OR IGNORE INTO dependency (parent, child) VALUES (?, ?)")?
            .execute((parent.0, job.id.0))?;
    }
    Ok(())
}

pub fn put_ready(
    tx: &Tx,
    lane: LaneId,
    ready_at: Timestamp,
    id: JobId,
    retry_count: u32,
    must_record_start: bool,
) -> Result<()> {
    let key = if tx.is_keyed(lane) { key_of(tx, id)? } else { None };
    tx.connection
        .prepare_cached(
            "INSERT INTO ready (lane, ready_at, id, retry_count, must_record_start, key) VALUES (?, ?, ?, ?, ?, ?)",
        )?
        .execute((lane, ready_at.as_ms(), id.0, retry_count, must_record_start, key))?;
    if let Some(key) = key {
        put_key_queue(tx, lane, key, ready_at)?;
    }
    tx.queue_changed(QueueChange::ready(lane, ready_at.as_ms(), id));
    tx.signal(Signal::Ready(lane));
    Ok(())
}

/// Returns the number of a job's `concurrencyKey`.
fn key_of(tx: &Tx, id: JobId) -> Result<Option<i64>> {
    let options = read::lane_and_options(tx.connection, id)?.map(|(_, options)| options);
    Ok(options.and_then(|options| options.concurrency_key).map(|key| plan::key_number(&key)))
}

/// Creates the key queue for a job that became ready at `ready_at`. An existing key queue gets this time as its rank,
/// if that is lower.
pub fn put_key_queue(tx: &Tx, lane: LaneId, key: i64, ready_at: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO key_queue (lane, key, rank) VALUES (?, ?, ?)
             ON CONFLICT DO UPDATE SET rank = excluded.rank WHERE excluded.rank < rank",
        )?
        .execute((lane, key, ready_at.as_ms()))?;
    Ok(())
}

pub fn put_waiting(
    tx: &Tx,
    lane: LaneId,
    state: i16,
    id: JobId,
    due_at: Timestamp,
    blocked: bool,
    retry_count: u32,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO waiting (lane, state, id, due_at, blocked, retry_count) VALUES (?, ?, ?, ?, ?, ?)",
        )?
        .execute((lane, state, id.0, due_at.as_ms(), blocked, retry_count))?;
    if !blocked {
        tx.queue_changed(QueueChange::delayed(lane, due_at.as_ms(), id));
    }
    tx.signal(Signal::Waiting);
    Ok(())
}

/// Ends a job that is not in flight.
#[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
pub fn put_ended_without_run(
    tx: &Tx,
    lane: LaneId,
    state: i16,
    id: JobId,
    retry_count: u32,
    error: &str,
    reason: &str,
    log: String,
    now: Timestamp,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO ended (lane, state, id, finished_at, run, retry_count, error, reason, log)
             VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)",
        )?
        .execute((lane, state, id.0, now.as_ms(), retry_count, error, reason, log))?;
    Ok(())
}

/// Adds `deltas` to the changes of the counters, which are written at the end of the transaction.
pub fn apply(tx: &Tx, deltas: Deltas) {
    tx.deltas.borrow_mut().merge(deltas);
}
