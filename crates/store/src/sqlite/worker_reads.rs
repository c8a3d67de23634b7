//! Reads of workers: views, capabilities, jobs in flight.

use faena_domain::{JobId, Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerState, WorkerView};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{claim::claim_jobs, end::ended_as, read, writer::Tx};
use crate::{
    ClaimedJob, LaneId, Result, ResumedJob,
    assemble::parse_options,
    workers::{COLUMNS, WorkerRow, read_capabilities, shown_jobs, worker_code, worker_state},
};

/// Returns the jobs in flight of a worker.
pub fn resumed_jobs(tx: &Tx, id: WorkerId) -> Result<Vec<ResumedJob>> {
    let mut jobs = Vec::new();
    for claim in claims_of(tx.connection, id)? {
        for (job, retry_count) in &claim.jobs {
            if let Some(job) = resumed_job(tx, &claim, *job, *retry_count)? {
                jobs.push(job);
            }
        }
    }
    Ok(jobs)
}

/// `None`: it has ended under this run.
pub fn resumed_job(tx: &Tx, claim: &Claim, id: JobId, retry_count: u32) -> Result<Option<ResumedJob>> {
    type Columns = (LaneId, Option<String>, Option<String>, String);
    let columns: Option<Columns> = tx
        .connection
        .prepare_cached("SELECT lane, correlation, options, payload FROM job WHERE id = ?")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    let Some((lane, correlation_id, options, payload)) = columns else { return Ok(None) };
    if ended_as(tx.connection, lane, id, claim.run)?.is_some() {
        return Ok(None);
    }
    let running: Option<(i64, i64)> = tx
        .connection
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
            start_first: false,
            limited: None,
            correlation_id,
            options: parse_options(options.as_deref())?,
            payload,
        },
        kind: tx.shared.lanes.require(lane)?.kind,
        claimed_at: Timestamp::from_ms(claim.claimed_at),
        started_at: running.map(|(at, _)| Timestamp::from_ms(at)),
    }))
}

pub struct Claim {
    pub run: Run,
    pub claimed_at: i64,
    pub first_ready_at: i64,
    pub jobs: Vec<(JobId, u32)>,
}

/// Returns the claims of a worker, oldest run first.
pub fn claims_of(connection: &Connection, id: WorkerId) -> Result<Vec<Claim>> {
    let mut statement = connection.prepare_cached(
        "SELECT run, claimed_at, first_ready_at, ids, retries FROM claim WHERE owner = ? ORDER BY run",
    )?;
    let rows = statement.query_map([id.0], |row| {
        let (ids, retries): (Vec<u8>, Option<Vec<u8>>) = (row.get(3)?, row.get(4)?);
        Ok(Claim {
            run: row.get(0)?,
            claimed_at: row.get(1)?,
            first_ready_at: row.get(2)?,
            jobs: claim_jobs(&ids, retries.as_deref()),
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
    view.jobs = in_flight_ids(connection, id)?;
    view.history = history(connection, id)?;
    Ok(Some(view))
}

pub fn in_flight_ids(connection: &Connection, id: WorkerId) -> Result<Vec<String>> {
    let mut jobs = Vec::new();
    for claim in claims_of(connection, id)? {
        for (job, _) in claim.jobs {
            let Some((lane, _)) = read::lane_and_options(connection, job)? else { continue };
            if ended_as(connection, lane, job, claim.run)?.is_none() {
                jobs.push(job);
            }
        }
    }
    Ok(shown_jobs(jobs.into_iter()))
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
    let wanted = if states.is_empty() { &WorkerState::ALL[..] } else { states };
    let codes: Vec<String> = wanted.iter().map(|state| worker_code(*state).to_string()).collect();
    let sql = format!(
        "SELECT {COLUMNS} FROM worker WHERE state IN ({})
         ORDER BY ended_at IS NULL DESC, registered_at DESC, id DESC LIMIT ?",
        codes.join(", ")
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map([limit as i64], worker_row)?.collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter().map(WorkerRow::view).collect()
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
    })
}
