//! Lists of jobs: runs the queries that `lists.rs` decides on.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, JobView};
use uuid::Uuid;

use super::{
    Shared, dead_letters,
    read::{BEGIN_READ, counts_in, job_workers, rows_of, states_of},
    search::{last_details, last_runs, payload_matches, sort_keys},
};
use crate::{
    Counts, Filter, JobIdPage, JobPage, LaneId, Page, Result, SortBy,
    assemble::{self, parse_options},
    lists::{self, Candidate, LaneSearch, ListQuery, Range, Selected, Source, Span, Window},
    pages::{Listed, PriorityPage, page_by_key},
    plan::LabelKind,
    sql::{NAME_LABEL, sql},
};

pub async fn list(shared: &Shared, filter: &Filter, page: Page) -> Result<JobPage> {
    shared.load_lanes().await?;
    let client = shared.client().await?;
    client.batch_execute(BEGIN_READ).await?;
    let result = list_in(shared, &client, filter, page).await;
    client.end(result).await
}

pub async fn list_in(shared: &Shared, client: &Object, filter: &Filter, page: Page) -> Result<JobPage> {
    let counts = counts_in(client).await?;
    let query = query(shared, client, filter, Span::of(page)?).await?;
    let selected = select(client, &query, &counts).await?;
    let listed = match page.sort.by {
        SortBy::Created => query.listed(&selected),
        SortBy::Priority => by_priority(shared, client, filter, page).await?,
        SortBy::Updated | SortBy::Scheduled => by_time(shared, client, filter, page, &selected).await?,
    };
    Ok(JobPage {
        jobs: views(shared, client, &listed.ids).await?,
        total: selected.total,
        total_is_exact: selected.total_is_exact,
        next: listed.next,
        is_partial: listed.is_partial,
        sort_is_exact: listed.sort_is_exact,
    })
}

async fn query(shared: &Shared, client: &Object, filter: &Filter, span: Span) -> Result<ListQuery> {
    let mut query = ListQuery::new(filter, span, &shared.lanes.all());
    if let Some(key) = query.worker() {
        query.workers = registrations(client, key).await?;
    }
    Ok(query)
}

/// Returns the registrations of a worker. A deleted registration is found by its id.
async fn registrations(client: &Object, key: &str) -> Result<Vec<Uuid>> {
    let rows = client.query("SELECT id FROM faena.worker WHERE key = $1", &[&key]).await?;
    Ok(rows.iter().map(|row| row.get(0)).chain(key.parse::<Uuid>()).collect())
}

/// Returns one page in order of creation, and the total.
async fn select(client: &Object, query: &ListQuery, counts: &Counts) -> Result<Selected> {
    let is_first = query.page == query.allowed;
    match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(client, query, query.page).await?;
            let all_named = if is_first { named.clone() } else { ids_by_name(client, query, query.allowed).await? };
            let end = named.end;
            let ids = ids_by_lane(client, query, counts, lanes, query.page, query.wanted).await?;
            let ids = query.certain(ids.into_iter().chain(named.ids).collect(), end);
            let (total, exact) = match query.counted(counts, lanes) {
                Some(total) => (total, true),
                None => {
                    let total = count_by_lane(client, query, counts, lanes).await?;
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
            let all = dead_letters_of(client, query, &lanes, query.allowed).await?;
            let (total, total_is_exact) = (all.ids.len() as u64, all.end.is_none());
            let page = if is_first { all } else { dead_letters_of(client, query, &lanes, query.page).await? };
            Ok(Selected { ids: query.page_of(page.ids), total, total_is_exact, end: page.end })
        }
        Source::Label { .. } | Source::Correlation(_) | Source::Scan { .. } => {
            let all = filtered(client, query, query.allowed).await?;
            let (total, total_is_exact) = (all.ids.len() as u64, all.end.is_none());
            let mut page = all;
            if total_is_exact {
                page.ids.retain(|id| query.page.contains(*id));
            } else if !is_first {
                page = filtered(client, query, query.page).await?;
            }
            Ok(Selected { ids: query.page_of(page.ids), total, total_is_exact, end: page.end })
        }
    }
}

async fn by_priority(shared: &Shared, client: &Object, filter: &Filter, page: Page) -> Result<Listed> {
    let mut sorted = PriorityPage::new(filter, page)?;
    while let Some((filter, span)) = sorted.next_search() {
        sorted.add(find_in(shared, client, &filter, span).await?);
    }
    Ok(sorted.listed())
}

async fn by_time(shared: &Shared, client: &Object, filter: &Filter, page: Page, selected: &Selected) -> Result<Listed> {
    let newest = find_in(shared, client, filter, Span::newest(lists::COUNT_LIMIT)).await?;
    let is_complete = newest.next.is_none() || selected.total_is_exact && selected.total == newest.ids.len() as u64;
    page_by_key(sort_keys(client, page.sort.by, &newest.ids).await?, page, is_complete)
}

/// Returns the jobs as lists show them: with their last attempt and last message, without log and steps.
async fn views(shared: &Shared, client: &Object, ids: &[JobId]) -> Result<Vec<JobView>> {
    let rows = rows_of(shared, client, ids).await?;
    let job_workers = job_workers(client, rows.iter().filter_map(|(_, location)| location.worker_id())).await?;
    let mut details = last_details(client, ids).await?;
    let mut jobs = HashMap::with_capacity(rows.len());
    for (row, location) in rows {
        let id = row.id;
        let mut view = assemble::listed_view(row, location, details.remove(&id).unwrap_or_default(), &job_workers)?;
        (view.execution_log, view.execution_log_omitted) = (Vec::new(), 0);
        jobs.insert(id, view);
    }
    Ok(ids.iter().filter_map(|id| jobs.remove(id)).collect())
}

/// Returns the ids of one page, without counting.
pub async fn find(shared: &Shared, filter: &Filter, span: Span) -> Result<JobIdPage> {
    shared.load_lanes().await?;
    let client = shared.client().await?;
    client.batch_execute(BEGIN_READ).await?;
    let result = find_in(shared, &client, filter, span).await;
    client.end(result).await
}

pub async fn find_in(shared: &Shared, client: &Object, filter: &Filter, span: Span) -> Result<JobIdPage> {
    let query = query(shared, client, filter, span).await?;
    let window = match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(client, &query, query.page).await?;
            let ids = ids_by_lane(client, &query, &counts_in(client).await?, lanes, query.page, query.wanted).await?;
            let ids = query.certain(ids.into_iter().chain(named.ids).collect(), named.end);
            Window { ids, end: named.end }
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts_in(client).await?);
            dead_letters_of(client, &query, &lanes, query.page).await?
        }
        Source::Label { .. } | Source::Correlation(_) | Source::Scan { .. } => {
            filtered(client, &query, query.page).await?
        }
    };
    let ids = query.page_of(window.ids);
    let next = query.next(&ids, window.end);
    Ok(JobIdPage { ids, next })
}

/// Returns the first candidates that match the whole filter.
async fn filtered(client: &Object, query: &ListQuery, range: Range) -> Result<Window> {
    let Window { ids, end } = query.window(candidates(client, query, range).await?);
    Ok(Window { ids: ids_of(query, matching(client, query, ids).await?), end })
}

/// Returns the ids from the most selective index, before the rest of the filter is applied.
async fn candidates(client: &Object, query: &ListQuery, range: Range) -> Result<Vec<JobId>> {
    match &query.source {
        Source::Label { kind, value } => ids_by_label(client, query, *kind, value, range).await,
        Source::Correlation(text) => ids_by_correlation(client, query, text, range).await,
        Source::Scan { lanes, name } => {
            let mut ids =
                ids_by_lane(client, query, &counts_in(client).await?, lanes, range, lists::COUNT_LIMIT).await?;
            if let Some(name) = name {
                ids.extend(ids_by_label(client, query, LabelKind::Name, name, range).await?);
            }
            Ok(ids)
        }
        Source::Lanes(_) | Source::DeadLetterMatches(_) => Ok(Vec::new()),
    }
}

pub async fn dead_letters_of(client: &Object, query: &ListQuery, lanes: &[LaneId], range: Range) -> Result<Window> {
    let mut found = dead_letters::search(client, query, lanes, range).await?;
    if query.compares_more_than_error() {
        found.ids = ids_of(query, matching(client, query, found.ids).await?);
    }
    Ok(found)
}

/// Returns those of `ids` that match the whole filter, with their lanes.
pub async fn matching(client: &Object, query: &ListQuery, ids: Vec<JobId>) -> Result<Vec<(JobId, LaneId)>> {
    let states = states_of(client, &ids).await?;
    let mut last_runs =
        if query.compares_last_run() { last_runs(client, query, &ids, &states).await? } else { HashMap::new() };
    let raw: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let rows = client.query("SELECT id, lane, correlation, options FROM faena.job WHERE id = ANY($1)", &[&raw]).await?;
    let mut found = Vec::new();
    for row in rows {
        let (id, lane) = (JobId(row.get(0)), row.get(1));
        let Some(state) = states.get(&id).copied() else { continue };
        let options = parse_options(row.get(3))?;
        let last_run = last_runs.remove(&id).unwrap_or_default();
        if query.matches(&Candidate { id, state, lane, correlation: row.get(2), options: &options, last_run }) {
            found.push((id, lane));
        }
    }
    if query.compares_payload() {
        let ids: Vec<Uuid> = found.iter().map(|(id, _)| id.0).collect();
        let matching = payload_matches(client, query, &ids).await?;
        found.retain(|(id, _)| matching.contains(id));
    }
    Ok(found)
}

/// Returns the ids in the order of the list.
pub fn ids_of(query: &ListQuery, jobs: Vec<(JobId, LaneId)>) -> Vec<JobId> {
    let mut ids = jobs.into_iter().map(|(id, _)| id).collect();
    query.sort(&mut ids);
    ids
}

/// Returns jobs of other lanes that the search text names: a part of their name, or exactly their id, correlation id or key.
pub async fn ids_by_name(client: &Object, query: &ListQuery, range: Range) -> Result<Window> {
    let Some(text) = query.search() else { return Ok(Window::default()) };
    let Window { mut ids, end } = ids_by_part_of_name(client, query, range).await?;
    ids.extend(key_jobs(client, text).await?);
    ids.extend(text.parse::<JobId>().ok());
    ids.extend(ids_by_correlation(client, query, text, range).await?);
    query.sort(&mut ids);
    ids.retain(|id| range.contains(*id));
    let mut named = matching(client, query, ids).await?;
    named.retain(|(_, lane)| !query.is_in_lanes(*lane));
    Ok(Window { ids: ids_of(query, named), end })
}

/// Searches the newest (or oldest) names that differ from the type.
async fn ids_by_part_of_name(client: &Object, query: &ListQuery, range: Range) -> Result<Window> {
    let mut scan = LaneSearch::default();
    let statement = client
        .prepare_cached(&format!(
            "SELECT id, value FROM faena.label WHERE kind = {NAME_LABEL} AND id < $1 AND id >= $2
             ORDER BY id {} LIMIT $3",
            query.order()
        ))
        .await?;
    let limit = lists::COUNT_LIMIT as i64;
    for row in client.query(&statement, &[&range.before.0, &range.from.0, &limit]).await? {
        scan.record(JobId(row.get(0)), query.finds_name(row.get(1)));
    }
    Ok(scan.window(lists::COUNT_LIMIT))
}

/// Returns the first ids of each lane and table, in the order of the list. The counters say which lanes have jobs in a table.
pub async fn ids_by_lane(
    client: &Object,
    query: &ListQuery,
    counts: &Counts,
    lanes: &[LaneId],
    range: Range,
    wanted: usize,
) -> Result<Vec<JobId>> {
    let first_ids = |table: &str, state: &str| {
        format!(
            "SELECT x.id FROM unnest($1::int4[]) AS l(lane) CROSS JOIN LATERAL (
                 SELECT id FROM faena.{table} WHERE lane = l.lane {state} AND id < $2 AND id >= $3 ORDER BY id {order} LIMIT $4) x
             ORDER BY id {order} LIMIT $4",
            order = query.order()
        )
    };
    let mut ids = Vec::new();
    for (tally, sql) in query.queries(
        &first_ids("ready", ""),
        |state| first_ids("waiting", &format!("AND state = {state}")),
        &first_ids("done", ""),
        |state| first_ids("ended", &format!("AND state = {state}")),
    ) {
        let lanes = lists::with_jobs(lanes, tally, counts);
        if lanes.is_empty() {
            continue;
        }
        let statement = client.prepare_cached(&sql).await?;
        let rows = client.query(&statement, &[&lanes, &range.before.0, &range.from.0, &(wanted as i64)]).await?;
        ids.extend(rows.iter().map(|row| JobId(row.get(0))));
    }
    if query.includes_in_flight() {
        ids.extend(in_flight_ids(client, query, lanes, range, wanted).await?);
    }
    Ok(ids)
}

/// Number of jobs in flight that are checked together.
pub const CHECKED_TOGETHER: usize = 200;

/// Returns jobs in flight, in the order of the list.
pub async fn in_flight_ids(
    client: &Object,
    query: &ListQuery,
    lanes: &[LaneId],
    range: Range,
    limit: usize,
) -> Result<Vec<JobId>> {
    let rows = client
        .query(
            &format!(
                "SELECT DISTINCT u.id FROM faena.claim c, unnest(c.ids) AS u(id) WHERE u.id < $1 AND u.id >= $2 ORDER BY 1 {}",
                query.order()
            ),
            &[&range.before.0, &range.from.0],
        )
        .await?;
    let ids: Vec<JobId> = rows.iter().map(|row| JobId(row.get(0))).collect();
    let mut in_flight = Vec::new();
    let mut seen = 0;
    for part in ids.chunks(CHECKED_TOGETHER) {
        // A claim also contains jobs that have completed since. If the list includes completed jobs, they fill the page
        // as well, so ids after a whole page of them cannot be on it.
        if lanes.is_empty()
            || in_flight.len() >= limit
            || (query.includes(JobState::Completed) && seen >= limit.max(CHECKED_TOGETHER))
        {
            break;
        }
        let raw: Vec<Uuid> = part.iter().map(|id| id.0).collect();
        let in_lanes: HashSet<Uuid> = client
            .query("SELECT id FROM faena.job WHERE id = ANY($1) AND lane = ANY($2)", &[&raw, &lanes])
            .await?
            .iter()
            .map(|row| row.get(0))
            .collect();
        let part: Vec<JobId> = part.iter().copied().filter(|id| in_lanes.contains(&id.0)).collect();
        seen += part.len();
        let states = states_of(client, &part).await?;
        let wanted = |id: &JobId| states.get(id).is_some_and(|state| state.is_in_flight() && query.includes(*state));
        in_flight.extend(part.into_iter().filter(wanted));
    }
    in_flight.truncate(limit);
    Ok(in_flight)
}

pub async fn count_by_lane(client: &Object, query: &ListQuery, counts: &Counts, lanes: &[LaneId]) -> Result<u64> {
    let counted = |table: &str, state: &str| {
        format!(
            "SELECT count(*) FROM (SELECT 1 FROM faena.{table} WHERE lane = ANY($1) {state} AND id < $2 AND id >= $3 LIMIT $4) x"
        )
    };
    let mut total: u64 = 0;
    for (tally, sql) in query.queries(
        &counted("ready", ""),
        |state| counted("waiting", &format!("AND state = {state}")),
        &counted("done", ""),
        |state| counted("ended", &format!("AND state = {state}")),
    ) {
        let lanes = lists::with_jobs(lanes, tally, counts);
        let left = (lists::COUNT_LIMIT as u64).saturating_sub(total) as i64;
        let row = client.query_one(&sql, &[&lanes, &query.allowed.before.0, &query.allowed.from.0, &left]).await?;
        total += row.get::<_, i64>(0).unsigned_abs();
    }
    if query.includes_in_flight() {
        total += in_flight_ids(client, query, lanes, query.allowed, lists::COUNT_LIMIT).await?.len() as u64;
    }
    Ok(total)
}

pub async fn ids_by_label(
    client: &Object,
    query: &ListQuery,
    kind: LabelKind,
    value: &str,
    range: Range,
) -> Result<Vec<JobId>> {
    let rows = client
        .query(
            &format!(
                "SELECT id FROM faena.label WHERE kind = $1 AND value = $2 AND id < $3 AND id >= $4
                 ORDER BY id {} LIMIT $5",
                query.order()
            ),
            &[&(kind as i16), &value, &range.before.0, &range.from.0, &(lists::COUNT_LIMIT as i64)],
        )
        .await?;
    Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
}

/// Returns the jobs with this correlation id. For a job without its own, that is the id of the job.
pub async fn ids_by_correlation(client: &Object, query: &ListQuery, text: &str, range: Range) -> Result<Vec<JobId>> {
    let own = text.parse::<JobId>().ok().map(|id| id.0);
    let rows = client
        .query(
            &format!(
                "SELECT id FROM (
                     SELECT id FROM faena.job WHERE correlation = $1
                     UNION ALL SELECT id FROM faena.job WHERE id = $2 AND correlation IS NULL) x
                 WHERE id < $3 AND id >= $4 ORDER BY id {} LIMIT $5",
                query.order()
            ),
            &[&text, &own, &range.before.0, &range.from.0, &(lists::COUNT_LIMIT as i64)],
        )
        .await?;
    Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
}

pub async fn key_jobs(client: &Object, key: &str) -> Result<Vec<JobId>> {
    let rows = client
        .query(
            sql!("SELECT id FROM faena.job_key WHERE kind IN ({IDEMPOTENCY_KEY}, {UNIQUE_KEY}) AND key = $1"),
            &[&key],
        )
        .await?;
    Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
}
