//! Lists of jobs: runs the queries that `lists.rs` decides on.

use faena_domain::{JobId, JobOptions};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{
    Shared,
    claim::claim_jobs,
    dead_letters,
    read::{counts, job_row, job_workers, lane_and_options, lanes, location, state_of},
};
use crate::{
    Filter, JobIdPage, JobPage, LaneId, Page, Result, StoreError,
    assemble::{self, Details, parse_options},
    lists::{self, Candidate, DeadLetterMatches, ListQuery, Source},
    sql::sql,
};

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
            let location = location(connection, row.lane.id, id)?;
            rows.push((row, location));
        }
    }
    let job_workers = job_workers(connection, rows.iter().filter_map(|(_, location)| location.worker_id()))?;
    let mut jobs = Vec::with_capacity(rows.len());
    for (row, location) in rows {
        let mut view = assemble::view(row, location, Details::default(), &job_workers)?;
        view.execution_log = Vec::new();
        jobs.push(view);
    }
    Ok(JobPage { jobs, total: total.0, total_is_exact: total.1, next })
}

/// Returns the ids of one page, without counting.
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

/// Returns matching ids from the page on, and where the search ended, if not with the last job.
pub fn labelled(connection: &Connection, query: &ListQuery) -> Result<(Vec<JobId>, Option<JobId>)> {
    let all = ids_by_label(connection, query, query.before)?;
    let end = all.last().copied().filter(|_| all.len() >= lists::COUNT_LIMIT);
    Ok((matching(connection, query, all)?, end))
}

pub fn dead_letters_of(
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

pub fn matching(connection: &Connection, query: &ListQuery, ids: Vec<JobId>) -> Result<Vec<JobId>> {
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

pub fn row_of(connection: &Connection, id: JobId) -> Result<Option<(LaneId, Option<String>, JobOptions)>> {
    let row: Option<(LaneId, Option<String>, Option<String>)> = connection
        .prepare_cached("SELECT lane, correlation, options FROM job WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    row.map(|(lane, correlation, options)| Ok((lane, correlation, parse_options(options.as_deref())?))).transpose()
}

/// Returns jobs of other lanes whose id, correlation id or key is exactly the search text.
pub fn ids_by_name(connection: &Connection, query: &ListQuery) -> Result<Vec<JobId>> {
    let Some(text) = query.search() else { return Ok(Vec::new()) };
    let mut ids = key_holders(connection, text)?;
    ids.extend(text.parse::<JobId>().ok());
    ids.extend(ids_by_correlation(connection, query, text, query.upper)?);
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.dedup();
    ids.retain(|id| *id < query.upper && *id >= query.from);
    let mut named = Vec::new();
    for id in matching(connection, query, ids)? {
        if !lane_and_options(connection, id)?.is_some_and(|(lane, _)| query.is_in_lanes(lane)) {
            named.push(id);
        }
    }
    Ok(named)
}

/// Returns the newest matching ids: the newest of each lane and table, merged.
pub fn ids_by_lane(
    connection: &Connection,
    query: &ListQuery,
    lanes: &[LaneId],
    named: Vec<JobId>,
) -> Result<Vec<JobId>> {
    let mut ids: Vec<JobId> = named.into_iter().filter(|id| query.is_on_page(*id)).collect();
    let first = |location: &str, state: &str| {
        let order = query.order();
        format!(
            "SELECT id FROM {location} WHERE lane = ?1 {state} AND id < ?2 AND id >= ?3 ORDER BY id {order} LIMIT ?4"
        )
    };
    for lane in lanes {
        for sql in query.queries(
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

/// Returns jobs in flight. There are few at any time.
pub fn in_flight_ids(
    connection: &Connection,
    query: &ListQuery,
    lanes: &[LaneId],
    before: JobId,
    limit: usize,
) -> Result<Vec<JobId>> {
    let mut in_flight = Vec::new();
    let mut statement = connection.prepare_cached("SELECT ids FROM claim")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let ids: Vec<u8> = row.get(0)?;
        in_flight.extend(claim_jobs(&ids, None).into_iter().map(|(id, _)| id));
    }
    in_flight.retain(|id| *id < before && *id >= query.from);
    query.sort(&mut in_flight);
    let mut ids = Vec::new();
    for id in in_flight {
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

pub fn count_by_lane(connection: &Connection, query: &ListQuery, lanes: &[LaneId]) -> Result<u64> {
    let mut total: u64 = 0;
    for lane in lanes {
        for sql in query.queries(
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

pub fn ids_by_label(connection: &Connection, query: &ListQuery, before: JobId) -> Result<Vec<JobId>> {
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

/// A job without a correlation id of its own has its id as one.
pub fn ids_by_correlation(connection: &Connection, query: &ListQuery, text: &str, before: JobId) -> Result<Vec<JobId>> {
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

pub fn key_holders(connection: &Connection, key: &str) -> Result<Vec<JobId>> {
    let mut statement = connection
        .prepare_cached(sql!("SELECT id FROM job_key WHERE kind IN ({IDEMPOTENCY_KEY}, {UNIQUE_KEY}) AND key = ?"))?;
    let ids = statement.query_map([key], |row| Ok(JobId(row.get(0)?)))?.collect::<rusqlite::Result<_>>();
    ids.map_err(StoreError::from)
}
