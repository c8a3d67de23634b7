//! Reading: one job whole, lists, counters, what there is to do.

use std::collections::{BTreeMap, HashSet};

use faena_domain::{JobId, JobOptions, JobState, JobView, NodeId, Step, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{Shared, claim::claim_jobs, dead_letters, nodes::OWNERLESS, rules};
use crate::{
    Counts, Filter, JobIdPage, JobPage, Lane, LaneId, Page, Poll, Result, StoreError, Tally,
    assemble::{self, Details, FinishedRow, Holders, JobRow, Place, RunningRow, StepRow, parse_options},
    claim_limits::waits_for,
    lists::{self, Candidate, DeadLetterMatches, ListQuery, Source},
    plan::key_number,
    progress::Steps,
    sql::sql,
    types::state_of_code,
    workers::Holder,
};

pub fn lanes(connection: &Connection) -> Result<Vec<Lane>> {
    let mut statement = connection.prepare("SELECT id, queue, type, priority, keyed FROM lane")?;
    let rows = statement.query_map([], |row| {
        let rank: i16 = row.get(3)?;
        Ok(Lane {
            id: row.get(0)?,
            queue: row.get(1)?,
            kind: row.get(2)?,
            priority: faena_domain::Priority::from_rank(rank).unwrap_or_default(),
            keyed: row.get(4)?,
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub fn lane_and_options(connection: &Connection, id: JobId) -> Result<Option<(LaneId, JobOptions)>> {
    let row: Option<(LaneId, Option<String>)> = connection
        .prepare_cached("SELECT lane, options FROM job WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    row.map(|(lane, options)| Ok((lane, parse_options(options.as_deref())?))).transpose()
}

/// The state of a job, from where its id stands. `None`: there is no such job.
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

/// Whether a job that is handed out waits for a worker that is not connected yet. Looks only at what such workers hold.
fn is_scheduled(connection: &Connection, id: JobId) -> Result<bool> {
    Ok(connection
        .prepare_cached(sql!(
            "SELECT 1 FROM worker CROSS JOIN claim ON claim.owner = worker.id
             WHERE worker.ended_at IS NULL AND worker.state < {WORKER_READY} AND instr(claim.ids, ?1) > 0
               AND NOT EXISTS (SELECT 1 FROM attempt WHERE attempt.id = ?1 AND attempt.run = claim.run)"
        ))?
        .exists([id.0])?)
}

/// The workers among these ids.
pub fn holders(connection: &Connection, ids: impl Iterator<Item = Uuid>) -> Result<Holders> {
    let mut holders = Holders::new();
    let ids: HashSet<Uuid> = ids.collect();
    let mut statement = connection
        .prepare_cached(sql!("SELECT key, ended_at IS NULL AND state < {WORKER_READY} FROM worker WHERE id = ?"))?;
    for id in ids {
        let holder =
            statement.query_row([id], |row| Ok(Holder { key: row.get(0)?, is_coming: row.get(1)? })).optional()?;
        holders.extend(holder.map(|holder| (id, holder)));
    }
    Ok(holders)
}

pub fn step_count(connection: &Connection, id: JobId) -> Result<Steps> {
    Ok(connection
        .prepare_cached(
            "SELECT count(*), (SELECT total FROM step WHERE id = ?1 AND total IS NOT NULL ORDER BY at DESC, name DESC LIMIT 1)
             FROM step WHERE id = ?1",
        )?
        .query_row([id.0], |row| Ok(Steps { completed: row.get(0)?, total: row.get(1)? }))?)
}

/// The finished steps of these jobs.
pub fn steps(connection: &Connection, ids: &[JobId]) -> Result<Vec<(JobId, Step)>> {
    let mut all = Vec::new();
    // Asked for every job that is sent to a worker; where nobody uses steps it costs one look, not one per job.
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
        connection.prepare_cached("SELECT name, run, at, result, total FROM step WHERE id = ? ORDER BY at, name")?;
    let rows = statement.query_map([id.0], |r| {
        Ok(StepRow {
            name: r.get(0)?,
            run: r.get(1)?,
            at: Timestamp::from_ms(r.get(2)?),
            result: r.get(3)?,
            total: r.get(4)?,
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Where in `ready` a job stands.
pub fn line_place(connection: &Connection, lane: LaneId, id: JobId) -> Result<Option<i64>> {
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

pub fn poll(connection: &Connection, node: NodeId) -> Result<Poll> {
    // Jumps from lane to lane in the index: the cost grows with the lanes that have work, not with the work.
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
    // SQLite: there is one node, so every request is for it.
    let _ = node;
    let cancels = connection
        .prepare_cached("SELECT id, reason FROM cancel_request LIMIT 1000")?
        .query_map([], |row| Ok((JobId(row.get(0)?), row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let orphans = connection
        .prepare_cached(&format!(
            "SELECT 1 FROM claim WHERE {OWNERLESS}
             UNION ALL
             SELECT 1 FROM worker WHERE ended_at IS NULL AND node IS NOT NULL AND node NOT IN (SELECT id FROM node)
             LIMIT 1"
        ))?
        .exists([])?;
    Ok(Poll {
        ready_lanes,
        cancels,
        next_due_at: next_due_at(connection)?.into_iter().chain(next_expiry_at(connection)?).min(),
        nodes: 1,
        orphans,
    })
}

pub fn get(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<JobView>> {
    let Some(row) = job_row(connection, shared, id)? else { return Ok(None) };
    let details = Details {
        attempts: attempt_rows(connection, id)?,
        notes: connection
            .prepare_cached("SELECT run, log FROM job_log WHERE id = ? ORDER BY sequence")?
            .query_map([id.0], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?,
        steps: step_rows(connection, id)?,
    };
    let mut place = place(connection, row.lane.id, id)?;
    if let Place::Ready { ready_at, limited, .. } = &mut place {
        *limited = limited_by(connection, &row, *ready_at)?;
    }
    let holders = holders(
        connection,
        place.holder().into_iter().chain(details.attempts.iter().filter_map(|attempt| attempt.worker)),
    )?;
    assemble::view(row, place, details, &holders).map(Some)
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

/// How the runs of a job ended, the last one included if it was the last word.
pub fn ends_of(connection: &Connection, id: JobId) -> Result<Vec<FinishedRow>> {
    let mut rows = attempt_rows(connection, id)?;
    if let Some((lane, _)) = lane_and_options(connection, id)?
        && let Place::Finished(end) = place(connection, lane, id)?
    {
        rows.push(end);
    }
    Ok(rows)
}

/// Since when a ready job waits for which limit.
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
    Ok(waits_for(&rules::limits(connection)?, &row.lane, ready_at))
}

fn job_row(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<JobRow>> {
    type Columns = (LaneId, Option<String>, Option<String>, String);
    let columns: Option<Columns> = connection
        .prepare_cached("SELECT lane, correlation, options, payload FROM job WHERE id = ?")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    let Some((lane, correlation, options, payload)) = columns else { return Ok(None) };
    if !shared.lanes.contains(lane) {
        shared.lanes.insert(lanes(connection)?);
    }
    Ok(Some(JobRow {
        id,
        lane: shared.lanes.require(lane)?,
        correlation,
        options: parse_options(options.as_deref())?,
        payload,
    }))
}

fn place(connection: &Connection, lane: LaneId, id: JobId) -> Result<Place> {
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
        return Ok(Place::Finished(end));
    }
    if let Some(place) = connection
        .prepare_cached("SELECT ready_at, retry_count FROM ready INDEXED BY ready_id WHERE lane = ? AND id = ?")?
        .query_row((lane, id.0), |r| {
            Ok(Place::Ready { ready_at: Timestamp::from_ms(r.get(0)?), retry_count: r.get(1)?, limited: None })
        })
        .optional()?
    {
        return Ok(place);
    }
    if let Some(place) = connection
        .prepare_cached(
            sql!("SELECT state, due_at, blocked, retry_count FROM waiting WHERE lane = ? AND state IN ({PENDING}, {RETRYING}) AND id = ?"),
        )?
        .query_row((lane, id.0), |r| {
            Ok(Place::Waiting {
                state: state_of_code(r.get(0)?),
                due_at: Timestamp::from_ms(r.get(1)?),
                blocked: r.get(2)?,
                retry_count: r.get(3)?,
            })
        })
        .optional()?
    {
        return Ok(place);
    }
    if let Some(running) = connection
        .prepare_cached(
            "SELECT running.run, worker, retry_count, ready_at, coalesce(claim.claimed_at, started_at), started_at,
                    updated_at, progress
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
                progress: r.get(7)?,
            })
        })
        .optional()?
    {
        return Ok(Place::Running(running));
    }
    let mut claims = connection
        .prepare_cached("SELECT run, claimed_at, first_ready_at, ids, retries, owner FROM claim ORDER BY run DESC")?;
    let mut rows = claims.query([])?;
    while let Some(row) = rows.next()? {
        let ids: Vec<u8> = row.get(3)?;
        let retries: Option<Vec<u8>> = row.get(4)?;
        if let Some((_, retry_count)) = claim_jobs(&ids, retries.as_deref()).into_iter().find(|(held, _)| *held == id) {
            return Ok(Place::Assigned {
                run: row.get(0)?,
                owner: row.get(5)?,
                claimed_at: Timestamp::from_ms(row.get(1)?),
                ready_at: Timestamp::from_ms(row.get(2)?).max(id.created_at()),
                retry_count,
            });
        }
    }
    Ok(Place::Between)
}

fn finished_row(row: &Row) -> rusqlite::Result<FinishedRow> {
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

pub fn list(connection: &Connection, shared: &Shared, filter: &Filter, page: Page) -> Result<JobPage> {
    let counts = counts(connection)?;
    shared.lanes.insert(lanes(connection)?);
    let query = ListQuery::new(filter, page, &shared.lanes.all())?;
    let (ids, total, end) = match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(connection, &query)?;
            let more = named.len() as u64;
            let ids = ids_by_lane(connection, &query, lanes, named)?;
            let (total, exact) = match query.counted(&counts, lanes) {
                Some(total) => (total, true),
                None => (count_by_lane(connection, &query, lanes)?, false),
            };
            (ids, (total + more, exact || total < lists::COUNT_LIMIT as u64), None)
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts);
            let all = dead_letters_of(connection, &query, &lanes, query.upper)?;
            let total = (all.ids.len() as u64, all.end.is_none());
            let page = if query.before == query.upper {
                all
            } else {
                dead_letters_of(connection, &query, &lanes, query.before)?
            };
            (query.cut(page.ids), total, page.end)
        }
        Source::Label { .. } | Source::Correlation(_) => {
            let all = ids_by_label(connection, &query, query.upper)?;
            let complete = all.len() < lists::COUNT_LIMIT;
            let counted = matching(connection, &query, all)?;
            let total = (counted.len() as u64, complete);
            let (page, end) = if complete {
                (counted.into_iter().filter(|id| query.is_on_page(*id)).collect(), None)
            } else {
                labelled(connection, &query)?
            };
            (query.cut(page), total, end)
        }
    };
    let next = query.next(&ids, end);
    let mut rows = Vec::with_capacity(ids.len());
    for id in ids {
        if let Some(row) = job_row(connection, shared, id)? {
            let place = place(connection, row.lane.id, id)?;
            rows.push((row, place));
        }
    }
    let holders = holders(connection, rows.iter().filter_map(|(_, place)| place.holder()))?;
    let mut jobs = Vec::with_capacity(rows.len());
    for (row, place) in rows {
        let mut view = assemble::view(row, place, Details::default(), &holders)?;
        view.execution_log = Vec::new();
        jobs.push(view);
    }
    Ok(JobPage { jobs, total: total.0, total_is_exact: total.1, next })
}

/// The ids of one page, without counting.
pub fn find(connection: &Connection, shared: &Shared, filter: &Filter, page: Page) -> Result<JobIdPage> {
    shared.lanes.insert(lanes(connection)?);
    let query = ListQuery::new(filter, page, &shared.lanes.all())?;
    let (ids, end) = match &query.source {
        Source::Lanes(lanes) => (ids_by_lane(connection, &query, lanes, ids_by_name(connection, &query)?)?, None),
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts(connection)?);
            let found = dead_letters_of(connection, &query, &lanes, query.before)?;
            (query.cut(found.ids), found.end)
        }
        Source::Label { .. } | Source::Correlation(_) => {
            let (found, end) = labelled(connection, &query)?;
            (query.cut(found), end)
        }
    };
    let next = query.next(&ids, end);
    Ok(JobIdPage { ids, next })
}

/// Those of the page and behind it that match, and where the search ended, if not with the last job.
fn labelled(connection: &Connection, query: &ListQuery) -> Result<(Vec<JobId>, Option<JobId>)> {
    let all = ids_by_label(connection, query, query.before)?;
    let end = all.last().copied().filter(|_| all.len() >= lists::COUNT_LIMIT);
    Ok((matching(connection, query, all)?, end))
}

fn dead_letters_of(
    connection: &Connection,
    query: &ListQuery,
    lanes: &[LaneId],
    before: JobId,
) -> Result<DeadLetterMatches> {
    let mut found = dead_letters::search(connection, query, lanes, before)?;
    if query.asks_for_more() {
        found.ids = matching(connection, query, found.ids)?;
    }
    Ok(found)
}

/// Since when the first ready job of each lane has been ready.
pub fn ready_since(connection: &Connection) -> Result<Vec<(LaneId, Timestamp)>> {
    // Jumps from lane to lane in the index, as a poll does.
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

fn matching(connection: &Connection, query: &ListQuery, ids: Vec<JobId>) -> Result<Vec<JobId>> {
    let mut found = Vec::new();
    for id in ids {
        if let Some((lane, correlation, options)) = row_of(connection, id)?
            && let Some(state) = state_of(connection, id)?
            && query.matches(&Candidate { id, state, lane, correlation: correlation.as_deref(), options: &options })
        {
            found.push(id);
        }
    }
    Ok(found)
}

fn row_of(connection: &Connection, id: JobId) -> Result<Option<(LaneId, Option<String>, JobOptions)>> {
    let row: Option<(LaneId, Option<String>, Option<String>)> = connection
        .prepare_cached("SELECT lane, correlation, options FROM job WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    row.map(|(lane, correlation, options)| Ok((lane, correlation, parse_options(options.as_deref())?))).transpose()
}

/// Jobs of other lanes that the searched text names as a whole: by id, correlation id or key.
fn ids_by_name(connection: &Connection, query: &ListQuery) -> Result<Vec<JobId>> {
    let Some(text) = query.search() else { return Ok(Vec::new()) };
    let mut ids = key_holders(connection, text)?;
    ids.extend(text.parse::<JobId>().ok());
    ids.extend(ids_by_correlation(connection, query, text, query.upper)?);
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.dedup();
    ids.retain(|id| *id < query.upper && *id >= query.from);
    let mut others = Vec::new();
    for id in matching(connection, query, ids)? {
        if !lane_and_options(connection, id)?.is_some_and(|(lane, _)| query.is_in_lanes(lane)) {
            others.push(id);
        }
    }
    Ok(others)
}

/// The newest matching ids: the newest of each lane and place, put together.
fn ids_by_lane(connection: &Connection, query: &ListQuery, lanes: &[LaneId], named: Vec<JobId>) -> Result<Vec<JobId>> {
    let mut ids: Vec<JobId> = named.into_iter().filter(|id| query.is_on_page(*id)).collect();
    let first = |place: &str, state: &str| {
        let order = query.order();
        format!("SELECT id FROM {place} WHERE lane = ?1 {state} AND id < ?2 AND id >= ?3 ORDER BY id {order} LIMIT ?4")
    };
    for lane in lanes {
        for sql in query.places(
            &first("ready INDEXED BY ready_id", ""),
            |state| first("waiting", &format!("AND state = {state}")),
            &first("done", ""),
            |state| first("ended", &format!("AND state = {state}")),
        ) {
            let mut statement = connection.prepare_cached(&sql)?;
            let rows = statement
                .query_map((lane, query.before.0, query.from.0, query.wanted as i64), |r| r.get::<_, Uuid>(0))?;
            for id in rows {
                ids.push(JobId(id?));
            }
        }
    }
    if query.includes_in_flight() {
        ids.extend(in_flight_ids(connection, query, lanes, query.before, query.wanted)?);
    }
    Ok(query.cut_sorted(ids))
}

/// Jobs that are handed out: few at any time.
fn in_flight_ids(
    connection: &Connection,
    query: &ListQuery,
    lanes: &[LaneId],
    before: JobId,
    limit: usize,
) -> Result<Vec<JobId>> {
    let mut held = Vec::new();
    let mut statement = connection.prepare_cached("SELECT ids FROM claim")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let ids: Vec<u8> = row.get(0)?;
        held.extend(claim_jobs(&ids, None).into_iter().map(|(id, _)| id));
    }
    held.retain(|id| *id < before && *id >= query.from);
    query.sort(&mut held);
    let mut ids = Vec::new();
    for id in held {
        if ids.len() >= limit {
            break;
        }
        if let Some(state) = state_of(connection, id)?
            && query.includes(state)
            && state.is_in_flight()
            && lane_and_options(connection, id)?.is_some_and(|(lane, _)| lanes.contains(&lane))
        {
            ids.push(id);
        }
    }
    Ok(ids)
}

fn count_by_lane(connection: &Connection, query: &ListQuery, lanes: &[LaneId]) -> Result<u64> {
    let mut total: u64 = 0;
    for lane in lanes {
        for sql in query.places(
            "SELECT count(*) FROM (SELECT 1 FROM ready INDEXED BY ready_id WHERE lane = ?1 AND id < ?2 AND id >= ?3 LIMIT ?4)",
            |state| format!("SELECT count(*) FROM (SELECT 1 FROM waiting WHERE lane = ?1 AND state = {state} AND id < ?2 AND id >= ?3 LIMIT ?4)"),
            "SELECT count(*) FROM (SELECT 1 FROM done WHERE lane = ?1 AND id < ?2 AND id >= ?3 LIMIT ?4)",
            |state| format!("SELECT count(*) FROM (SELECT 1 FROM ended WHERE lane = ?1 AND state = {state} AND id < ?2 AND id >= ?3 LIMIT ?4)"),
        ) {
            let left = (lists::COUNT_LIMIT as u64).saturating_sub(total) as i64;
            let count: i64 = connection
                .prepare_cached(&sql)?
                .query_row((lane, query.upper.0, query.from.0, left), |row| row.get(0))?;
            total += count.unsigned_abs();
        }
    }
    if query.includes_in_flight() {
        total += in_flight_ids(connection, query, lanes, query.upper, lists::COUNT_LIMIT)?.len() as u64;
    }
    Ok(total)
}

fn ids_by_label(connection: &Connection, query: &ListQuery, before: JobId) -> Result<Vec<JobId>> {
    match &query.source {
        Source::Label { kind, value } => {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT id FROM label WHERE kind = ? AND value = ? AND id < ? AND id >= ? ORDER BY id {} LIMIT ?",
                query.order()
            ))?;
            let limit = lists::COUNT_LIMIT as i64;
            let ids = statement
                .query_map((*kind as i16, value, before.0, query.from.0, limit), |row| Ok(JobId(row.get(0)?)))?
                .collect::<rusqlite::Result<_>>();
            Ok(ids?)
        }
        Source::Correlation(text) => ids_by_correlation(connection, query, text, before),
        Source::Lanes(_) | Source::DeadLetterMatches(_) => Ok(Vec::new()),
    }
}

/// A job without a correlation id of its own has its id for one.
fn ids_by_correlation(connection: &Connection, query: &ListQuery, text: &str, before: JobId) -> Result<Vec<JobId>> {
    let mut ids: Vec<JobId> = connection
        .prepare_cached(&format!(
            "SELECT id FROM job WHERE correlation = ? AND id < ? AND id >= ? ORDER BY id {} LIMIT ?",
            query.order()
        ))?
        .query_map((text, before.0, query.from.0, lists::COUNT_LIMIT as i64), |row| Ok(JobId(row.get(0)?)))?
        .collect::<rusqlite::Result<_>>()?;
    if let Some(own) = text.parse::<JobId>().ok().filter(|id| *id < before && *id >= query.from)
        && connection.prepare_cached("SELECT 1 FROM job WHERE id = ? AND correlation IS NULL")?.exists([own.0])?
    {
        ids.push(own);
    }
    query.sort(&mut ids);
    Ok(ids)
}

fn key_holders(connection: &Connection, key: &str) -> Result<Vec<JobId>> {
    let mut statement = connection
        .prepare_cached(sql!("SELECT id FROM job_key WHERE kind IN ({IDEMPOTENCY_KEY}, {UNIQUE_KEY}) AND key = ?"))?;
    let ids = statement.query_map([key], |row| Ok(JobId(row.get(0)?)))?.collect::<rusqlite::Result<_>>();
    ids.map_err(StoreError::from)
}
