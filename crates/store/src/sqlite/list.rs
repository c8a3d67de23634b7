//! Lists of jobs: runs the queries that `lists.rs` decides on.

use std::collections::HashSet;

use faena_domain::{JobId, JobOptions, JobView};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{
    Shared,
    claim::decode_claimed_jobs,
    dead_letters,
    read::{counts, job_row, job_workers, lane_and_options, location, state_of},
    search::{last_details, last_run, payload_of, sort_keys},
};
use crate::{
    Counts, Filter, JobIdPage, JobPage, LaneId, Page, Result, SortBy, StoreError,
    assemble::{self, parse_options},
    lists::{self, Candidate, LaneSearch, LastRun, ListQuery, Range, Selected, Source, Span, Window},
    pages::{Listed, PriorityPage, page_by_key},
    plan::LabelKind,
    sql::{NAME_LABEL, sql},
};

pub fn list(connection: &Connection, shared: &Shared, filter: &Filter, page: Page) -> Result<JobPage> {
    let counts = counts(connection)?;
    let query = query(connection, shared, filter, Span::of(page)?)?;
    let selected = select(connection, &query, &counts)?;
    let listed = match page.sort.by {
        SortBy::Created => query.listed(&selected),
        SortBy::Priority => by_priority(connection, shared, filter, page)?,
        SortBy::Updated | SortBy::Scheduled => by_time(connection, shared, filter, page, &selected)?,
    };
    Ok(JobPage {
        jobs: views(connection, shared, &listed.ids)?,
        total: selected.total,
        total_is_exact: selected.total_is_exact,
        next: listed.next,
        is_partial: listed.is_partial,
        sort_is_exact: listed.sort_is_exact,
    })
}

fn query(connection: &Connection, shared: &Shared, filter: &Filter, span: Span) -> Result<ListQuery> {
    let mut query = ListQuery::new(filter, span, &shared.lanes.all());
    if let Some(key) = query.worker() {
        query.workers = registrations(connection, key)?;
    }
    Ok(query)
}

/// Returns the registrations of a worker. A deleted registration is found by its id.
fn registrations(connection: &Connection, key: &str) -> Result<Vec<Uuid>> {
    let mut ids: Vec<Uuid> = connection
        .prepare_cached("SELECT id FROM worker WHERE key = ?")?
        .query_map([key], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    ids.extend(key.parse::<Uuid>());
    Ok(ids)
}

/// Returns one page in order of creation, and the total.
fn select(connection: &Connection, query: &ListQuery, counts: &Counts) -> Result<Selected> {
    let is_first = query.page == query.allowed;
    match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(connection, query, query.page)?;
            let all_named = if is_first { named.clone() } else { ids_by_name(connection, query, query.allowed)? };
            let end = named.end;
            let ids = ids_by_lane(connection, query, counts, lanes, query.page, query.wanted)?;
            let ids = query.certain(ids.into_iter().chain(named.ids).collect(), end);
            let (total, exact) = match query.counted(counts, lanes) {
                Some(total) => (total, true),
                None => {
                    let total = count_by_lane(connection, query, counts, lanes)?;
                    (total, total < lists::COUNT_LIMIT as u64)
                }
            };
            Ok(Selected {
                ids: query.page_of(ids),
                total: total + all_named.ids.len() as u64,
                total_is_exact: exact && all_named.end.is_none(),
                end,
            })
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, counts);
            let all = dead_letters_of(connection, query, &lanes, query.allowed)?;
            let (total, total_is_exact) = (all.ids.len() as u64, all.end.is_none());
            let page = if is_first { all } else { dead_letters_of(connection, query, &lanes, query.page)? };
            Ok(Selected { ids: query.page_of(page.ids), total, total_is_exact, end: page.end })
        }
        Source::Label { .. } | Source::Correlation(_) | Source::Scan { .. } => {
            let all = filtered(connection, query, query.allowed)?;
            let (total, total_is_exact) = (all.ids.len() as u64, all.end.is_none());
            let mut page = all;
            if total_is_exact {
                page.ids.retain(|id| query.page.contains(*id));
            } else if !is_first {
                page = filtered(connection, query, query.page)?;
            }
            Ok(Selected { ids: query.page_of(page.ids), total, total_is_exact, end: page.end })
        }
    }
}

fn by_priority(connection: &Connection, shared: &Shared, filter: &Filter, page: Page) -> Result<Listed> {
    let mut sorted = PriorityPage::new(filter, page)?;
    while let Some((filter, span)) = sorted.next_search() {
        sorted.add(find(connection, shared, &filter, span)?);
    }
    Ok(sorted.listed())
}

fn by_time(
    connection: &Connection,
    shared: &Shared,
    filter: &Filter,
    page: Page,
    selected: &Selected,
) -> Result<Listed> {
    let newest = find(connection, shared, filter, Span::newest(lists::COUNT_LIMIT))?;
    let is_complete = newest.next.is_none() || selected.total_is_exact && selected.total == newest.ids.len() as u64;
    page_by_key(sort_keys(connection, page.sort.by, &newest.ids)?, page, is_complete)
}

/// Returns the jobs as lists show them: with their last attempt and last message, without log and steps.
fn views(connection: &Connection, shared: &Shared, ids: &[JobId]) -> Result<Vec<JobView>> {
    let mut rows = Vec::with_capacity(ids.len());
    for id in ids {
        if let Some(row) = job_row(connection, shared, *id)? {
            let location = location(connection, row.lane.id, *id)?;
            rows.push((row, location));
        }
    }
    let job_workers = job_workers(connection, rows.iter().filter_map(|(_, location)| location.worker_id()))?;
    let mut jobs = Vec::with_capacity(rows.len());
    for (row, location) in rows {
        let details = last_details(connection, row.id)?;
        let mut view = assemble::listed_view(row, location, details, &job_workers)?;
        (view.execution_log, view.execution_log_omitted) = (Vec::new(), 0);
        jobs.push(view);
    }
    Ok(jobs)
}

/// Returns the ids of one page, without counting.
pub fn find(connection: &Connection, shared: &Shared, filter: &Filter, span: Span) -> Result<JobIdPage> {
    let query = query(connection, shared, filter, span)?;
    let window = match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(connection, &query, query.page)?;
            let ids = ids_by_lane(connection, &query, &counts(connection)?, lanes, query.page, query.wanted)?;
            let ids = query.certain(ids.into_iter().chain(named.ids).collect(), named.end);
            Window { ids, end: named.end }
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts(connection)?);
            dead_letters_of(connection, &query, &lanes, query.page)?
        }
        Source::Label { .. } | Source::Correlation(_) | Source::Scan { .. } => {
            filtered(connection, &query, query.page)?
        }
    };
    let ids = query.page_of(window.ids);
    let next = query.next(&ids, window.end);
    Ok(JobIdPage { ids, next })
}

/// Returns the first candidates that match the whole filter.
fn filtered(connection: &Connection, query: &ListQuery, range: Range) -> Result<Window> {
    let Window { ids, end } = query.window(candidates(connection, query, range)?);
    Ok(Window { ids: matching(connection, query, ids)?, end })
}

/// Returns the ids from the most selective index, before the rest of the filter is applied.
fn candidates(connection: &Connection, query: &ListQuery, range: Range) -> Result<Vec<JobId>> {
    match &query.source {
        Source::Label { kind, value } => ids_by_label(connection, query, *kind, value, range),
        Source::Correlation(text) => ids_by_correlation(connection, query, text, range),
        Source::Scan { lanes, name } => {
            let mut ids = ids_by_lane(connection, query, &counts(connection)?, lanes, range, lists::COUNT_LIMIT)?;
            if let Some(name) = name {
                ids.extend(ids_by_label(connection, query, LabelKind::Name, name, range)?);
            }
            Ok(ids)
        }
        Source::Lanes(_) | Source::DeadLetterMatches(_) => Ok(Vec::new()),
    }
}

pub fn dead_letters_of(connection: &Connection, query: &ListQuery, lanes: &[LaneId], range: Range) -> Result<Window> {
    let mut found = dead_letters::search(connection, query, lanes, range)?;
    if query.compares_more_than_error() {
        found.ids = matching(connection, query, found.ids)?;
    }
    Ok(found)
}

pub fn matching(connection: &Connection, query: &ListQuery, ids: Vec<JobId>) -> Result<Vec<JobId>> {
    let mut found = Vec::new();
    for id in ids {
        if let Some((lane, correlation, options)) = row_of(connection, id)?
            && let Some(state) = state_of(connection, id)?
        {
            let correlation = correlation.as_deref();
            let last_run =
                if query.compares_last_run() { last_run(connection, lane, id, state)? } else { LastRun::default() };
            let is_match = query.matches(&Candidate { id, state, lane, correlation, options: &options, last_run });
            if is_match && (!query.compares_payload() || query.matches_payload(&payload_of(connection, id)?)) {
                found.push(id);
            }
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

/// Returns jobs of other lanes that the search text names: a part of their name, or exactly their id, correlation id or key.
pub fn ids_by_name(connection: &Connection, query: &ListQuery, range: Range) -> Result<Window> {
    let Some(text) = query.search() else { return Ok(Window::default()) };
    let Window { mut ids, end } = ids_by_part_of_name(connection, query, range)?;
    ids.extend(key_jobs(connection, text)?);
    ids.extend(text.parse::<JobId>().ok());
    ids.extend(ids_by_correlation(connection, query, text, range)?);
    query.sort(&mut ids);
    ids.retain(|id| range.contains(*id));
    let mut named = Vec::new();
    for id in matching(connection, query, ids)? {
        if !lane_and_options(connection, id)?.is_some_and(|(lane, _)| query.is_in_lanes(lane)) {
            named.push(id);
        }
    }
    Ok(Window { ids: named, end })
}

/// Searches the newest (or oldest) names that differ from the type.
fn ids_by_part_of_name(connection: &Connection, query: &ListQuery, range: Range) -> Result<Window> {
    let mut scan = LaneSearch::default();
    let mut statement = connection.prepare_cached(&format!(
        "SELECT id, value FROM label INDEXED BY label_name WHERE kind = {NAME_LABEL} AND id < ? AND id >= ?
         ORDER BY id {} LIMIT ?",
        query.order()
    ))?;
    let mut rows = statement.query((range.before.0, range.from.0, lists::COUNT_LIMIT as i64))?;
    while let Some(row) = rows.next()? {
        scan.record(JobId(row.get(0)?), query.finds_name(&row.get::<_, String>(1)?));
    }
    Ok(scan.window(lists::COUNT_LIMIT))
}

/// Returns the first ids of each lane and table, in the order of the list. The counters say which lanes have jobs in a table.
pub fn ids_by_lane(
    connection: &Connection,
    query: &ListQuery,
    counts: &Counts,
    lanes: &[LaneId],
    range: Range,
    wanted: usize,
) -> Result<Vec<JobId>> {
    let mut ids = Vec::new();
    let first = |location: &str, state: &str| {
        let order = query.order();
        format!(
            "SELECT id FROM {location} WHERE lane = ?1 {state} AND id < ?2 AND id >= ?3 ORDER BY id {order} LIMIT ?4"
        )
    };
    let queries = query.queries(
        &first("ready INDEXED BY ready_id", ""),
        |state| first("waiting", &format!("AND state = {state}")),
        &first("done", ""),
        |state| first("ended", &format!("AND state = {state}")),
    );
    let mut left = range;
    for (tally, sql) in queries {
        let mut statement = connection.prepare_cached(&sql)?;
        for lane in lists::with_jobs(lanes, tally, counts) {
            let rows =
                statement.query_map((lane, left.before.0, left.from.0, wanted as i64), |r| r.get::<_, Uuid>(0))?;
            for id in rows {
                ids.push(JobId(id?));
            }
            query.keep_first(&mut ids, wanted, &mut left);
        }
    }
    if query.includes_in_flight() {
        ids.extend(in_flight_ids(connection, query, lanes, range, wanted)?);
    }
    Ok(ids)
}

/// Returns jobs in flight. There are few at any time.
pub fn in_flight_ids(
    connection: &Connection,
    query: &ListQuery,
    lanes: &[LaneId],
    range: Range,
    limit: usize,
) -> Result<Vec<JobId>> {
    let mut in_flight = Vec::new();
    let mut statement = connection.prepare_cached("SELECT ids FROM claim")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let ids: Vec<u8> = row.get(0)?;
        in_flight.extend(decode_claimed_jobs(&ids, None).into_iter().map(|(id, _)| id));
    }
    in_flight.retain(|id| range.contains(*id));
    query.sort(&mut in_flight);
    let lanes: HashSet<LaneId> = lanes.iter().copied().collect();
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

pub fn count_by_lane(connection: &Connection, query: &ListQuery, counts: &Counts, lanes: &[LaneId]) -> Result<u64> {
    let mut total: u64 = 0;
    let queries = query.queries(
        "SELECT count(*) FROM (SELECT 1 FROM ready INDEXED BY ready_id WHERE lane = ?1 AND id < ?2 AND id >= ?3 LIMIT ?4)",
        |state| format!("SELECT count(*) FROM (SELECT 1 FROM waiting WHERE lane = ?1 AND state = {state} AND id < ?2 AND id >= ?3 LIMIT ?4)"),
        "SELECT count(*) FROM (SELECT 1 FROM done WHERE lane = ?1 AND id < ?2 AND id >= ?3 LIMIT ?4)",
        |state| format!("SELECT count(*) FROM (SELECT 1 FROM ended WHERE lane = ?1 AND state = {state} AND id < ?2 AND id >= ?3 LIMIT ?4)"),
    );
    for (tally, sql) in queries {
        let mut statement = connection.prepare_cached(&sql)?;
        for lane in lists::with_jobs(lanes, tally, counts) {
            let left = (lists::COUNT_LIMIT as u64).saturating_sub(total) as i64;
            let count: i64 =
                statement.query_row((lane, query.allowed.before.0, query.allowed.from.0, left), |row| row.get(0))?;
            total += count.unsigned_abs();
        }
    }
    if query.includes_in_flight() {
        total += in_flight_ids(connection, query, lanes, query.allowed, lists::COUNT_LIMIT)?.len() as u64;
    }
    Ok(total)
}

pub fn ids_by_label(
    connection: &Connection,
    query: &ListQuery,
    kind: LabelKind,
    value: &str,
    range: Range,
) -> Result<Vec<JobId>> {
    let mut statement = connection.prepare_cached(&format!(
        "SELECT id FROM label WHERE kind = ? AND value = ? AND id < ? AND id >= ? ORDER BY id {} LIMIT ?",
        query.order()
    ))?;
    let limit = lists::COUNT_LIMIT as i64;
    let ids = statement
        .query_map((kind as i16, value, range.before.0, range.from.0, limit), |row| Ok(JobId(row.get(0)?)))?
        .collect::<rusqlite::Result<_>>();
    Ok(ids?)
}

/// Returns the jobs with this correlation id. For a job without its own, that is the id of the job.
pub fn ids_by_correlation(connection: &Connection, query: &ListQuery, text: &str, range: Range) -> Result<Vec<JobId>> {
    let mut ids: Vec<JobId> = connection
        .prepare_cached(&format!(
            "SELECT id FROM job WHERE correlation = ? AND id < ? AND id >= ? ORDER BY id {} LIMIT ?",
            query.order()
        ))?
        .query_map((text, range.before.0, range.from.0, lists::COUNT_LIMIT as i64), |row| Ok(JobId(row.get(0)?)))?
        .collect::<rusqlite::Result<_>>()?;
    if let Some(own) = text.parse::<JobId>().ok().filter(|id| range.contains(*id))
        && connection.prepare_cached("SELECT 1 FROM job WHERE id = ? AND correlation IS NULL")?.exists([own.0])?
    {
        ids.push(own);
    }
    Ok(ids)
}

pub fn key_jobs(connection: &Connection, key: &str) -> Result<Vec<JobId>> {
    let mut statement = connection
        .prepare_cached(sql!("SELECT id FROM job_key WHERE kind IN ({IDEMPOTENCY_KEY}, {UNIQUE_KEY}) AND key = ?"))?;
    let ids = statement.query_map([key], |row| Ok(JobId(row.get(0)?)))?.collect::<rusqlite::Result<_>>();
    ids.map_err(StoreError::from)
}
