//! Reads single jobs, counters and due work.

use std::collections::{BTreeMap, HashSet};

use faena_domain::{JobId, JobOptions, JobState, JobView, LogEntry, NodeId, Step, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{Shared, claim::decode_claimed_jobs, job_log, nodes::OWNERLESS, rules};
use crate::{
    Counts, InFlightCount, Lane, LaneId, Poll, Result, StoreError, Tally,
    assemble::{
        self, Details, FinishedRow, JobParts, JobRow, JobWorkers, Location, RunningRow, StepRow, parse_options,
    },
    claim_limits::stored_wait_cause,
    job_log::SHOWN_ENTRIES,
    jobs::state_of_code,
    plan::key_number,
    progress::Steps,
    sql::sql,
    workers::JobWorker,
};

pub fn lanes(connection: &Connection) -> Result<Vec<Lane>> {
    let mut statement = connection.prepare("SELECT id, queue, type, priority, keyed FROM lane")?;
    let rows = statement.query_map([], lane_row)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Returns a lane. The writer adds a new lane to the cache just after its commit, so a reader may see its jobs earlier.
pub fn lane(connection: &Connection, shared: &Shared, id: LaneId) -> Result<Lane> {
    if let Some(lane) = shared.lanes.get(id) {
        return Ok(lane);
    }
    let stored = connection
        .prepare_cached("SELECT id, queue, type, priority, keyed FROM lane WHERE id = ?")?
        .query_row([id], lane_row)
        .optional()?;
    stored.ok_or_else(|| StoreError::Internal(format!("lane {id} is unknown").into()))
}

fn lane_row(row: &Row) -> rusqlite::Result<Lane> {
    let rank: i16 = row.get(3)?;
    Ok(Lane {
        id: row.get(0)?,
        queue: row.get(1)?,
        kind: row.get(2)?,
        priority: faena_domain::Priority::from_rank(rank).unwrap_or_default(),
        keyed: row.get(4)?,
    })
}

pub fn lane_and_options(connection: &Connection, id: JobId) -> Result<Option<(LaneId, JobOptions)>> {
    let row: Option<(LaneId, Option<String>)> = connection
        .prepare_cached("SELECT lane, options FROM job WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    row.map(|(lane, options)| Ok((lane, parse_options(options.as_deref())?))).transpose()
}

/// Returns the state of a job, from the table its id is in. `None`: it does not exist.
pub fn state_of(connection: &Connection, id: JobId) -> Result<Option<JobState>> {
    let lane: Option<LaneId> = connection
        .prepare_cached("SELECT lane FROM job WHERE id = ?")?
        .query_row([id.0], |row| row.get(0))
        .optional()?;
    let Some(lane) = lane else { return Ok(None) };
    let code: Option<i16> = connection
        .prepare_cached(sql!(
            "SELECT {COMPLETED} FROM done WHERE lane = ?1 AND id = ?2
             UNION ALL SELECT {QUEUED} FROM ready INDEXED BY ready_id WHERE lane = ?1 AND id = ?2
             UNION ALL SELECT state FROM waiting WHERE lane = ?1 AND state IN ({PENDING}, {RETRYING}) AND id = ?2
             UNION ALL SELECT state FROM ended WHERE lane = ?1 AND state IN ({FAILED}, {CANCELLED}) AND id = ?2
             UNION ALL SELECT {PROCESSING} FROM running WHERE id = ?2
             LIMIT 1"
        ))?
        .query_row((lane, id.0), |row| row.get(0))
        .optional()?;
    match code {
        Some(code) => Ok(Some(state_of_code(code))),
        None if is_scheduled(connection, id)? => Ok(Some(JobState::Scheduled)),
        None => Ok(Some(JobState::Assigned)),
    }
}

/// Returns whether a claimed job waits for a worker that is not connected yet. Reads only claims of such workers.
fn is_scheduled(connection: &Connection, id: JobId) -> Result<bool> {
    Ok(connection
        .prepare_cached(sql!(
            "SELECT 1 FROM worker CROSS JOIN claim ON claim.owner = worker.id
             WHERE worker.ended_at IS NULL AND worker.state < {WORKER_READY} AND instr(claim.ids, ?1) > 0
               AND NOT EXISTS (SELECT 1 FROM attempt WHERE attempt.id = ?1 AND attempt.run = claim.run)"
        ))?
        .exists([id.0])?)
}

/// Returns the workers among these ids.
pub fn job_workers(connection: &Connection, ids: impl Iterator<Item = Uuid>) -> Result<JobWorkers> {
    let mut job_workers = JobWorkers::new();
    let ids: HashSet<Uuid> = ids.collect();
    let mut statement = connection
        .prepare_cached(sql!("SELECT key, ended_at IS NULL AND state < {WORKER_READY} FROM worker WHERE id = ?"))?;
    for id in ids {
        let worker =
            statement.query_row([id], |row| Ok(JobWorker { key: row.get(0)?, is_starting: row.get(1)? })).optional()?;
        job_workers.extend(worker.map(|worker| (id, worker)));
    }
    Ok(job_workers)
}

pub fn step_count(connection: &Connection, id: JobId) -> Result<Steps> {
    Ok(connection
        .prepare_cached(
            "SELECT count(*), (SELECT total FROM step WHERE id = ?1 AND total IS NOT NULL ORDER BY at DESC, name DESC LIMIT 1)
             FROM step WHERE id = ?1",
        )?
        .query_row([id.0], |row| Ok(Steps { completed: row.get(0)?, total: row.get(1)? }))?)
}

/// Returns the finished steps of these jobs.
pub fn steps(connection: &Connection, ids: &[JobId]) -> Result<Vec<(JobId, Step)>> {
    let mut all = Vec::new();
    // Called for every job that is sent to a worker: if the table is empty, one lookup is enough.
    if !connection.prepare_cached("SELECT 1 FROM step LIMIT 1")?.exists([])? {
        return Ok(all);
    }
    for id in ids {
        for row in step_rows(connection, *id)? {
            all.push((*id, row.step()?));
        }
    }
    Ok(all)
}

fn step_rows(connection: &Connection, id: JobId) -> Result<Vec<StepRow>> {
    let mut statement =
        connection.prepare_cached("SELECT name, run, at, result FROM step WHERE id = ? ORDER BY at, name")?;
    let rows = statement.query_map([id.0], |r| {
        Ok(StepRow { name: r.get(0)?, run: r.get(1)?, at: Timestamp::from_ms(r.get(2)?), result: r.get(3)? })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Returns the ready time of a job in `ready`.
pub fn ready_at_of(connection: &Connection, lane: LaneId, id: JobId) -> Result<Option<i64>> {
    Ok(connection
        .prepare_cached("SELECT ready_at FROM ready INDEXED BY ready_id WHERE lane = ? AND id = ?")?
        .query_row((lane, id.0), |row| row.get(0))
        .optional()?)
}

pub fn next_due_at(connection: &Connection) -> Result<Option<Timestamp>> {
    let next: Option<i64> =
        connection.prepare_cached("SELECT min(due_at) FROM waiting")?.query_row([], |row| row.get(0))?;
    Ok(next.map(Timestamp::from_ms))
}

pub fn next_expiry_at(connection: &Connection) -> Result<Option<Timestamp>> {
    let next: Option<i64> =
        connection.prepare_cached("SELECT min(expires_at) FROM expiry")?.query_row([], |row| row.get(0))?;
    Ok(next.map(Timestamp::from_ms))
}

pub fn counts(connection: &Connection) -> Result<Counts> {
    let mut by_lane = BTreeMap::new();
    let mut statement = connection.prepare_cached("SELECT lane, tally, n FROM counter")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(tally) = Tally::from_i16(row.get(1)?) {
            by_lane.insert((row.get(0)?, tally), row.get(2)?);
        }
    }
    Ok(Counts { by_lane })
}

/// Counts the jobs in flight that have started, and those whose worker is being started.
pub fn in_flight_counts(connection: &Connection) -> Result<Vec<InFlightCount>> {
    let mut running = connection.prepare_cached("SELECT lane, count(*) FROM running GROUP BY lane")?;
    let running = running.query_map([], |row| Ok((row.get(0)?, JobState::Processing, row.get(1)?)))?;
    let mut counts = running.collect::<rusqlite::Result<Vec<(LaneId, JobState, i64)>>>()?;
    // SQLite: a claim has the ids of its jobs in one column.
    let mut starting = connection.prepare_cached(sql!(
        "SELECT claim.ids FROM worker JOIN claim ON claim.owner = worker.id
         WHERE worker.ended_at IS NULL AND worker.state < {WORKER_READY}"
    ))?;
    let claims = starting.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<Vec<Vec<u8>>>>()?;
    let mut lane_of = connection.prepare_cached("SELECT lane FROM job WHERE id = ?")?;
    for (id, _) in claims.iter().flat_map(|ids| decode_claimed_jobs(ids, None)) {
        let lane: Option<LaneId> = lane_of.query_row([id.0], |row| row.get(0)).optional()?;
        counts.extend(lane.map(|lane| (lane, JobState::Scheduled, 1)));
    }
    Ok(counts.into_iter().map(|(lane, state, count)| InFlightCount { lane, state, count }).collect())
}

pub fn poll(connection: &Connection, node: NodeId) -> Result<Poll> {
    // Skips from lane to lane in the index: the cost grows with the number of lanes that have jobs, not with the jobs.
    let ready_lanes = connection
        .prepare_cached(
            "WITH RECURSIVE lanes(lane) AS (
                 SELECT min(lane) FROM ready
                 UNION ALL
                 SELECT (SELECT min(lane) FROM ready WHERE ready.lane > lanes.lane) FROM lanes WHERE lane IS NOT NULL)
             SELECT lane FROM lanes WHERE lane IS NOT NULL",
        )?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    // SQLite: there is one node, so every cancel request is for it.
    let _ = node;
    let cancel_requests = connection
        .prepare_cached("SELECT id, reason FROM cancel_request LIMIT 1000")?
        .query_map([], |row| Ok((JobId(row.get(0)?), row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let needs_recovery = connection
        .prepare_cached(&format!(
            "SELECT 1 FROM claim WHERE {OWNERLESS}
             UNION ALL
             SELECT 1 FROM worker WHERE ended_at IS NULL AND node IS NOT NULL AND node NOT IN (SELECT id FROM node)
             LIMIT 1"
        ))?
        .exists([])?;
    Ok(Poll {
        ready_lanes,
        cancel_requests,
        next_due_at: next_due_at(connection)?.into_iter().chain(next_expiry_at(connection)?).min(),
        nodes: 1,
        needs_recovery,
    })
}

pub fn get(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<JobView>> {
    parts(connection, shared, id, SHOWN_ENTRIES)?.map(assemble::view).transpose()
}

/// Returns the whole log of a job.
pub fn log(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<Vec<LogEntry>>> {
    let view = parts(connection, shared, id, usize::MAX)?.map(assemble::whole_view).transpose()?;
    Ok(view.map(|view| view.execution_log))
}

/// Returns the rows of a job, with up to `max_messages` of its newest messages.
fn parts(connection: &Connection, shared: &Shared, id: JobId, max_messages: usize) -> Result<Option<JobParts>> {
    let Some(row) = job_row(connection, shared, id)? else { return Ok(None) };
    let (messages, omitted) = job_log::messages(connection, id, max_messages)?;
    let details = Details {
        attempts: attempt_rows(connection, id)?,
        messages,
        omitted,
        stale: job_log::stale(connection, id)?,
        steps: step_rows(connection, id)?,
    };
    let mut location = location(connection, row.lane.id, id)?;
    if let Location::Ready { ready_at, limited, .. } = &mut location {
        *limited = limited_by(connection, &row, *ready_at)?;
    }
    let job_workers = job_workers(
        connection,
        location.worker_id().into_iter().chain(details.attempts.iter().filter_map(|attempt| attempt.worker)),
    )?;
    Ok(Some(JobParts { row, location, details, workers: job_workers }))
}

fn attempt_rows(connection: &Connection, id: JobId) -> Result<Vec<FinishedRow>> {
    Ok(connection
        .prepare_cached(
            "SELECT state, run, retry_count, worker, started_at, finished_at, NULL, error, reason, log
             FROM attempt WHERE id = ? ORDER BY run",
        )?
        .query_map([id.0], finished_row)?
        .collect::<rusqlite::Result<_>>()?)
}

/// Returns the ends of a job's runs, including the last one if the job has finished.
pub fn ends_of(connection: &Connection, id: JobId) -> Result<Vec<FinishedRow>> {
    let mut rows = attempt_rows(connection, id)?;
    if let Some((lane, _)) = lane_and_options(connection, id)?
        && let Location::Finished(end) = location(connection, lane, id)?
    {
        rows.push(end);
    }
    Ok(rows)
}

/// Returns when a ready job began to wait for a limit, and a description of the limit.
fn limited_by(connection: &Connection, row: &JobRow, ready_at: Timestamp) -> Result<Option<(Timestamp, String)>> {
    if let Some(key) = row.options.concurrency_key.as_deref().filter(|_| row.lane.keyed) {
        let closed = connection
            .prepare_cached("SELECT limited_at, limited_by FROM key_queue WHERE lane = ? AND key = ? AND open = 0")?
            .query_row((row.lane.id, key_number(key)), |r| Ok((Timestamp::from_ms(r.get(0)?), r.get(1)?)))
            .optional()?;
        if closed.is_some() {
            return Ok(closed);
        }
    }
    Ok(stored_wait_cause(&rules::limits(connection)?, &row.lane, ready_at))
}

pub fn job_row(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<JobRow>> {
    type Columns = (LaneId, Option<String>, Option<String>, String, Option<String>);
    let columns: Option<Columns> = connection
        .prepare_cached(
            "SELECT lane, correlation, options, payload, progress
             FROM job LEFT JOIN progress ON progress.id = job.id WHERE job.id = ?",
        )?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?)))
        .optional()?;
    let Some((lane, correlation, options, payload, progress)) = columns else { return Ok(None) };
    Ok(Some(JobRow {
        id,
        lane: self::lane(connection, shared, lane)?,
        correlation,
        options: parse_options(options.as_deref())?,
        payload,
        progress,
    }))
}

pub fn location(connection: &Connection, lane: LaneId, id: JobId) -> Result<Location> {
    if let Some(end) = connection
        .prepare_cached(sql!(
            "SELECT {COMPLETED}, run, retry_count, worker, started_at, finished_at, result, NULL, NULL, log
             FROM done WHERE lane = ?1 AND id = ?2
             UNION ALL
             SELECT state, run, retry_count, worker, started_at, finished_at, NULL, error, reason, log
             FROM ended WHERE lane = ?1 AND state IN ({FAILED}, {CANCELLED}) AND id = ?2"
        ))?
        .query_row((lane, id.0), finished_row)
        .optional()?
    {
        return Ok(Location::Finished(end));
    }
    if let Some(location) = connection
        .prepare_cached("SELECT ready_at, retry_count FROM ready INDEXED BY ready_id WHERE lane = ? AND id = ?")?
        .query_row((lane, id.0), |r| {
            Ok(Location::Ready { ready_at: Timestamp::from_ms(r.get(0)?), retry_count: r.get(1)?, limited: None })
        })
        .optional()?
    {
        return Ok(location);
    }
    if let Some(location) = connection
        .prepare_cached(
            sql!("SELECT state, due_at, blocked, retry_count FROM waiting WHERE lane = ? AND state IN ({PENDING}, {RETRYING}) AND id = ?"),
        )?
        .query_row((lane, id.0), |r| {
            Ok(Location::Waiting {
                state: state_of_code(r.get(0)?),
                due_at: Timestamp::from_ms(r.get(1)?),
                blocked: r.get(2)?,
                retry_count: r.get(3)?,
            })
        })
        .optional()?
    {
        return Ok(location);
    }
    if let Some(running) = connection
        .prepare_cached(
            "SELECT running.run, worker, retry_count, ready_at, coalesce(claim.claimed_at, started_at), started_at,
                    updated_at
             FROM running LEFT JOIN claim ON claim.run = running.run WHERE running.id = ?",
        )?
        .query_row([id.0], |r| {
            Ok(RunningRow {
                run: r.get(0)?,
                worker: r.get(1)?,
                retry_count: r.get(2)?,
                ready_at: Timestamp::from_ms(r.get(3)?),
                claimed_at: Timestamp::from_ms(r.get(4)?),
                started_at: Timestamp::from_ms(r.get(5)?),
                updated_at: Timestamp::from_ms(r.get(6)?),
            })
        })
        .optional()?
    {
        return Ok(Location::Running(running));
    }
    let mut claims = connection
        .prepare_cached("SELECT run, claimed_at, first_ready_at, ids, retries, owner FROM claim ORDER BY run DESC")?;
    let mut rows = claims.query([])?;
    while let Some(row) = rows.next()? {
        let ids: Vec<u8> = row.get(3)?;
        let retries: Option<Vec<u8>> = row.get(4)?;
        if let Some((_, retry_count)) =
            decode_claimed_jobs(&ids, retries.as_deref()).into_iter().find(|(claimed, _)| *claimed == id)
        {
            return Ok(Location::Assigned {
                run: row.get(0)?,
                owner: row.get(5)?,
                claimed_at: Timestamp::from_ms(row.get(1)?),
                ready_at: Timestamp::from_ms(row.get(2)?).max(id.created_at()),
                retry_count,
            });
        }
    }
    Ok(Location::Between)
}

pub fn finished_row(row: &Row) -> rusqlite::Result<FinishedRow> {
    Ok(FinishedRow {
        state: state_of_code(row.get(0)?),
        run: row.get(1)?,
        retry_count: row.get(2)?,
        worker: row.get(3)?,
        started_at: row.get::<_, Option<i64>>(4)?.map(Timestamp::from_ms),
        finished_at: Timestamp::from_ms(row.get(5)?),
        result: row.get(6)?,
        error: row.get(7)?,
        reason: row.get(8)?,
        log: row.get(9)?,
    })
}

/// Returns when the first ready job of each lane became ready.
pub fn ready_since(connection: &Connection) -> Result<Vec<(LaneId, Timestamp)>> {
    // Skips from lane to lane in the index, as a poll does.
    let mut statement = connection.prepare_cached(
        "WITH RECURSIVE lanes(lane) AS (
             SELECT min(lane) FROM ready
             UNION ALL
             SELECT (SELECT min(lane) FROM ready WHERE ready.lane > lanes.lane) FROM lanes WHERE lane IS NOT NULL)
         SELECT lane, (SELECT min(ready_at) FROM ready WHERE ready.lane = lanes.lane) FROM lanes WHERE lane IS NOT NULL",
    )?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, Timestamp::from_ms(row.get(1)?))))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
