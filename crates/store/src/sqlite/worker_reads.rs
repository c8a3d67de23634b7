//! Reads workers: views, capabilities, jobs in flight.

use std::collections::{BTreeMap, HashMap};

use faena_domain::{JobId, Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerState, WorkerView};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{Shared, claim::decode_claimed_jobs, end::outcome_of_run, read};
use crate::{
    COUNT_LIMIT, ClaimedJob, LaneId, Result, ResumedJob, UnattendedJob,
    assemble::parse_options,
    sql::sql,
    workers::{COLUMNS, UNATTENDED, WorkerRow, read_capabilities, shown_jobs, worker_code, worker_state},
};

/// Returns the jobs in flight of a worker.
pub fn in_flight_jobs(connection: &Connection, shared: &Shared, id: WorkerId) -> Result<Vec<ResumedJob>> {
    let mut jobs = Vec::new();
    for claim in claims_of(connection, id.0)? {
        for (job, retry_count) in &claim.jobs {
            if let Some(job) = in_flight_job(connection, shared, &claim, *job, *retry_count)? {
                jobs.push(job);
            }
        }
    }
    Ok(jobs)
}

/// Returns a job of a claim; `None` if its run has ended or the job was deleted.
pub fn in_flight_job(
    connection: &Connection,
    shared: &Shared,
    claim: &Claim,
    id: JobId,
    retry_count: u32,
) -> Result<Option<ResumedJob>> {
    type Columns = (LaneId, Option<String>, Option<String>, String);
    let columns: Option<Columns> = connection
        .prepare_cached("SELECT lane, correlation, options, payload FROM job WHERE id = ?")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    let Some((lane, correlation_id, options, payload)) = columns else { return Ok(None) };
    if outcome_of_run(connection, lane, id, claim.run)?.is_some() {
        return Ok(None);
    }
    let running: Option<(i64, i64)> = connection
        .prepare_cached("SELECT started_at, ready_at FROM running WHERE id = ? AND run = ?")?
        .query_row((id.0, claim.run), |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let ready_at = running.map_or(claim.first_ready_at, |(_, ready_at)| ready_at);
    Ok(Some(ResumedJob {
        job: ClaimedJob {
            id,
            run: claim.run,
            lane,
            ready_at: Timestamp::from_ms(ready_at).max(id.created_at()),
            retry_count,
            must_record_start: false,
            limited: None,
            correlation_id,
            options: parse_options(options.as_deref())?,
            payload,
        },
        kind: read::lane(connection, shared, lane)?.kind,
        claimed_at: Timestamp::from_ms(claim.claimed_at),
        started_at: running.map(|(at, _)| Timestamp::from_ms(at)),
    }))
}

pub fn unattended_jobs(connection: &Connection, shared: &Shared) -> Result<Vec<UnattendedJob>> {
    let workers: Vec<(Uuid, String, i16)> = connection
        .prepare_cached(
            "SELECT id, key, state FROM worker WHERE ended_at IS NULL AND node IS NULL ORDER BY id LIMIT ?",
        )?
        .query_map([UNATTENDED], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let mut jobs = Vec::new();
    for (id, key, state) in workers {
        let in_flight = in_flight_jobs(connection, shared, WorkerId(id))?;
        jobs.extend(in_flight.into_iter().map(|job| job.unattended(WorkerId(id), &key, state)));
    }
    Ok(jobs)
}

pub struct Claim {
    pub run: Run,
    pub claimed_at: i64,
    pub first_ready_at: i64,
    pub jobs: Vec<(JobId, u32)>,
}

/// Returns the claims of a worker or a node, oldest run first.
pub fn claims_of(connection: &Connection, owner: Uuid) -> Result<Vec<Claim>> {
    let mut statement = connection.prepare_cached(
        "SELECT run, claimed_at, first_ready_at, ids, retries FROM claim WHERE owner = ? ORDER BY run",
    )?;
    let rows = statement.query_map([owner], |row| {
        let (ids, retries): (Vec<u8>, Option<Vec<u8>>) = (row.get(3)?, row.get(4)?);
        Ok(Claim {
            run: row.get(0)?,
            claimed_at: row.get(1)?,
            first_ready_at: row.get(2)?,
            jobs: decode_claimed_jobs(&ids, retries.as_deref()),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub fn session(connection: &Connection, id: WorkerId) -> Result<Option<i64>> {
    let sql = "SELECT session FROM worker WHERE id = ? AND ended_at IS NULL";
    Ok(connection.prepare_cached(sql)?.query_row([id.0], |row| row.get(0)).optional()?)
}

pub fn get(connection: &Connection, key: &str) -> Result<Option<WorkerView>> {
    let by_key = format!(
        "SELECT {COLUMNS} FROM worker WHERE key = ? ORDER BY ended_at IS NULL DESC, registered_at DESC, id DESC LIMIT 1"
    );
    let mut row = connection.prepare_cached(&by_key)?.query_row([key], worker_row).optional()?;
    if row.is_none()
        && let Ok(id) = key.parse::<Uuid>()
    {
        let by_id = format!("SELECT {COLUMNS} FROM worker WHERE id = ?");
        row = connection.prepare_cached(&by_id)?.query_row([id], worker_row).optional()?;
    }
    let Some(row) = row else { return Ok(None) };
    let id = WorkerId(row.id);
    let mut view = row.view()?;
    view.jobs = shown_jobs(in_flight_ids(connection, id.0)?.into_iter());
    view.history = history(connection, id)?;
    Ok(Some(view))
}

/// Returns the jobs in the claims of a worker or a node whose run has not ended, oldest run first.
fn in_flight_ids(connection: &Connection, owner: Uuid) -> Result<Vec<JobId>> {
    let mut lane_of = connection.prepare_cached("SELECT lane FROM job WHERE id = ?")?;
    let mut jobs = Vec::new();
    for claim in claims_of(connection, owner)? {
        for (job, _) in claim.jobs {
            let Some(lane) = lane_of.query_row([job.0], |row| row.get(0)).optional()? else { continue };
            if outcome_of_run(connection, lane, job, claim.run)?.is_none() {
                jobs.push(job);
            }
        }
    }
    Ok(jobs)
}

/// SQLite: reads the claims of one worker after another. There is no round trip to save, and `ids` is not an array that one
/// statement could join.
pub fn in_flight_counts(connection: &Connection, workers: &[WorkerId]) -> Result<HashMap<WorkerId, u64>> {
    let mut owner_of = connection.prepare_cached(sql!(
        "SELECT CASE kind WHEN {BUILT_IN_WORKER} THEN node ELSE id END FROM worker WHERE id = ? AND ended_at IS NULL"
    ))?;
    let mut counts = HashMap::new();
    for id in workers {
        let owner: Option<Option<Uuid>> = owner_of.query_row([id.0], |row| row.get(0)).optional()?;
        let Some(owner) = owner.flatten() else { continue };
        let jobs = in_flight_ids(connection, owner)?.len() as u64;
        if jobs > 0 {
            counts.insert(*id, jobs);
        }
    }
    Ok(counts)
}

pub fn history(connection: &Connection, id: WorkerId) -> Result<Vec<WorkerChange>> {
    let mut statement =
        connection.prepare_cached("SELECT at, state, reason FROM worker_change WHERE worker = ? ORDER BY sequence")?;
    let mut rows = statement.query([id.0])?;
    let mut history = Vec::new();
    while let Some(row) = rows.next()? {
        let at = Timestamp::from_ms(row.get(0)?);
        history.push(WorkerChange { at, state: worker_state(row.get(1)?), reason: row.get(2)? });
    }
    Ok(history)
}

pub fn list(connection: &Connection, states: &[WorkerState], limit: usize) -> Result<Vec<WorkerView>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM worker WHERE state IN ({})
         ORDER BY ended_at IS NULL DESC, registered_at DESC, id DESC LIMIT ?",
        codes(states)
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map([limit as i64], worker_row)?.collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter().map(WorkerRow::view).collect()
}

pub fn total(connection: &Connection, states: &[WorkerState]) -> Result<u64> {
    let sql =
        format!("SELECT count(*) FROM (SELECT 1 FROM worker WHERE state IN ({}) LIMIT {COUNT_LIMIT})", codes(states));
    Ok(connection.prepare_cached(&sql)?.query_row([], |row| row.get::<_, i64>(0))?.unsigned_abs())
}

pub fn counts_by_state(connection: &Connection) -> Result<BTreeMap<WorkerState, u64>> {
    let mut statement = connection.prepare_cached("SELECT state, count(*) FROM worker GROUP BY state")?;
    let rows = statement.query_map([], |row| Ok((worker_state(row.get(0)?), row.get::<_, i64>(1)?.unsigned_abs())))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Returns the numbers of these states, or of all states if the list is empty.
fn codes(states: &[WorkerState]) -> String {
    let wanted = if states.is_empty() { &WorkerState::ALL[..] } else { states };
    let codes: Vec<String> = wanted.iter().map(|state| worker_code(*state).to_string()).collect();
    codes.join(", ")
}

pub fn worker_capabilities(connection: &Connection) -> Result<Vec<WorkerCapabilities>> {
    let mut statement =
        connection.prepare_cached("SELECT capabilities, queues FROM worker WHERE ended_at IS NULL AND state < ?")?;
    let mut rows = statement.query([worker_code(WorkerState::Draining)])?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push(read_capabilities(&row.get::<_, String>(0)?, &row.get::<_, String>(1)?)?);
    }
    Ok(all)
}

pub fn worker_row(row: &Row) -> rusqlite::Result<WorkerRow> {
    Ok(WorkerRow {
        id: row.get(0)?,
        key: row.get(1)?,
        name: row.get(2)?,
        kind: row.get(3)?,
        transport: row.get(4)?,
        node: row.get(5)?,
        state: row.get(6)?,
        reason: row.get(7)?,
        capabilities: row.get(8)?,
        queues: row.get(9)?,
        concurrency: row.get(10)?,
        pool: row.get(11)?,
        registered_at: row.get(12)?,
        seen_at: row.get(13)?,
        ended_at: row.get(14)?,
        deadline: row.get(15)?,
        completed: row.get(16)?,
        failed: row.get(17)?,
        breaker: row.get(18)?,
        version: row.get(19)?,
    })
}
