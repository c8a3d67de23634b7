//! Lists of jobs: runs the queries that `lists.rs` decides on.

use std::collections::HashSet;

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState};
use uuid::Uuid;

use super::{
    Shared, dead_letters,
    read::{BEGIN_READ, counts_in, job_workers, rows_of, states_of},
};
use crate::{
    Filter, JobIdPage, JobPage, LaneId, Page, Result,
    assemble::{self, Details, parse_options},
    lists::{self, Candidate, DeadLetterMatches, ListQuery, Source},
    sql::sql,
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
    let query = ListQuery::new(filter, page, &shared.lanes.all())?;
    let (ids, total, end) = match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(client, &query).await?;
            let more = named.len() as u64;
            let ids = ids_by_lane(client, &query, lanes, named).await?;
            let (total, exact) = match query.counted(&counts, lanes) {
                Some(total) => (total, true),
                None => (count_by_lane(client, &query, lanes).await?, false),
            };
            (ids, (total + more, exact || total < lists::COUNT_LIMIT as u64), None)
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts);
            let all = dead_letters_of(client, &query, &lanes, query.upper).await?;
            let total = (all.ids.len() as u64, all.end.is_none());
            let page = if query.before == query.upper {
                all
            } else {
                dead_letters_of(client, &query, &lanes, query.before).await?
            };
            (query.cut(page.ids), total, page.end)
        }
        Source::Label { .. } | Source::Correlation(_) => {
            let all = ids_by_label(client, &query, query.upper).await?;
            let complete = all.len() < lists::COUNT_LIMIT;
            let counted = ids_of(matching(client, &query, all).await?);
            let total = (counted.len() as u64, complete);
            let (page, end) = if complete {
                (counted.into_iter().filter(|id| query.is_on_page(*id)).collect(), None)
            } else {
                labelled(client, &query).await?
            };
            (query.cut(page), total, end)
        }
    };
    let next = query.next(&ids, end);
    let rows = rows_of(shared, client, &ids).await?;
    let job_workers = job_workers(client, rows.iter().filter_map(|(_, location)| location.worker_id())).await?;
    let mut jobs = Vec::with_capacity(rows.len());
    for (row, location) in rows {
        let mut view = assemble::view(row, location, Details::default(), &job_workers)?;
        view.execution_log = Vec::new();
        jobs.push(view);
    }
    Ok(JobPage { jobs, total: total.0, total_is_exact: total.1, next })
}

/// Returns the ids of one page, without counting.
pub async fn find(shared: &Shared, filter: &Filter, page: Page) -> Result<JobIdPage> {
    shared.load_lanes().await?;
    let client = shared.client().await?;
    client.batch_execute(BEGIN_READ).await?;
    let result = find_in(shared, &client, filter, page).await;
    client.end(result).await
}

pub async fn find_in(shared: &Shared, client: &Object, filter: &Filter, page: Page) -> Result<JobIdPage> {
    let query = ListQuery::new(filter, page, &shared.lanes.all())?;
    let (ids, end) = match &query.source {
        Source::Lanes(lanes) => {
            let named = ids_by_name(client, &query).await?;
            (ids_by_lane(client, &query, lanes, named).await?, None)
        }
        Source::DeadLetterMatches(lanes) => {
            let lanes = lists::failing_of(lanes, &counts_in(client).await?);
            let found = dead_letters_of(client, &query, &lanes, query.before).await?;
            (query.cut(found.ids), found.end)
        }
        Source::Label { .. } | Source::Correlation(_) => {
            let (found, end) = labelled(client, &query).await?;
            (query.cut(found), end)
        }
    };
    let next = query.next(&ids, end);
    Ok(JobIdPage { ids, next })
}

/// Returns matching ids from the page on, and where the search ended, if not with the last job.
pub async fn labelled(client: &Object, query: &ListQuery) -> Result<(Vec<JobId>, Option<JobId>)> {
    let all = ids_by_label(client, query, query.before).await?;
    let end = all.last().copied().filter(|_| all.len() >= lists::COUNT_LIMIT);
    let mut found = ids_of(matching(client, query, all).await?);
    query.sort(&mut found);
    Ok((found, end))
}

pub async fn dead_letters_of(
    client: &Object,
    query: &ListQuery,
    lanes: &[LaneId],
    before: JobId,
) -> Result<DeadLetterMatches> {
    let mut found = dead_letters::search(client, query, lanes, before).await?;
    if query.asks_for_more() {
        found.ids = ids_of(matching(client, query, found.ids).await?);
        query.sort(&mut found.ids);
    }
    Ok(found)
}

/// Returns those of `ids` that match the whole filter, with their lanes.
pub async fn matching(client: &Object, query: &ListQuery, ids: Vec<JobId>) -> Result<Vec<(JobId, LaneId)>> {
    let states = states_of(client, &ids).await?;
    let raw: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let rows = client
        .query("SELECT id, lane, correlation, options FROM faena.job WHERE id = ANY($1) ORDER BY id DESC", &[&raw])
        .await?;
    let mut found = Vec::new();
    for row in rows {
        let (id, lane) = (JobId(row.get(0)), row.get(1));
        let Some(state) = states.get(&id).copied() else { continue };
        let options = parse_options(row.get(3))?;
        if query.matches(&Candidate { id, state, lane, correlation: row.get(2), options: &options }) {
            found.push((id, lane));
        }
    }
    Ok(found)
}

pub fn ids_of(jobs: Vec<(JobId, LaneId)>) -> Vec<JobId> {
    jobs.into_iter().map(|(id, _)| id).collect()
}

/// Returns jobs of other lanes whose id, correlation id or key is exactly the search text.
pub async fn ids_by_name(client: &Object, query: &ListQuery) -> Result<Vec<JobId>> {
    let Some(text) = query.search() else { return Ok(Vec::new()) };
    let mut ids = key_holders(client, text).await?;
    ids.extend(text.parse::<JobId>().ok());
    ids.extend(ids_by_correlation(client, query, text, query.upper).await?);
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.dedup();
    ids.retain(|id| *id < query.upper && *id >= query.from);
    let mut named = matching(client, query, ids).await?;
    named.retain(|(_, lane)| !query.is_in_lanes(*lane));
    Ok(ids_of(named))
}

/// Returns the newest matching ids: the newest of each lane and table, merged.
pub async fn ids_by_lane(
    client: &Object,
    query: &ListQuery,
    lanes: &[LaneId],
    named: Vec<JobId>,
) -> Result<Vec<JobId>> {
    let newest = |table: &str, state: &str| {
        format!(
            "SELECT x.id FROM unnest($1::int4[]) AS l(lane) CROSS JOIN LATERAL (
                 SELECT id FROM faena.{table} WHERE lane = l.lane {state} AND id < $2 AND id >= $3 ORDER BY id {} LIMIT $4) x",
            query.order()
        )
    };
    let mut ids: Vec<JobId> = named.into_iter().filter(|id| query.is_on_page(*id)).collect();
    for sql in query.queries(
        &newest("ready", ""),
        |state| newest("waiting", &format!("AND state = {state}")),
        &newest("done", ""),
        |state| newest("ended", &format!("AND state = {state}")),
    ) {
        let statement = client.prepare_cached(&sql).await?;
        let rows = client.query(&statement, &[&lanes, &query.before.0, &query.from.0, &(query.wanted as i64)]).await?;
        ids.extend(rows.iter().map(|row| JobId(row.get(0))));
    }
    if query.includes_in_flight() {
        ids.extend(in_flight_ids(client, query, lanes, query.before, query.wanted).await?);
    }
    Ok(query.cut_sorted(ids))
}

/// Number of jobs in flight that are checked together.
pub const LOOK: usize = 200;

/// Returns jobs in flight, newest first.
pub async fn in_flight_ids(
    client: &Object,
    query: &ListQuery,
    lanes: &[LaneId],
    before: JobId,
    limit: usize,
) -> Result<Vec<JobId>> {
    let rows = client
        .query(
            &format!(
                "SELECT DISTINCT u.id FROM faena.claim b, unnest(b.ids) AS u(id) WHERE u.id < $1 AND u.id >= $2 ORDER BY 1 {}",
                query.order()
            ),
            &[&before.0, &query.from.0],
        )
        .await?;
    let ids: Vec<JobId> = rows.iter().map(|row| JobId(row.get(0))).collect();
    let mut in_flight = Vec::new();
    let mut seen = 0;
    for part in ids.chunks(LOOK) {
        // A claim contains jobs that have completed since. If those are listed too, they fill the page from the same
        // end, so what comes after a page of them is not on it.
        if lanes.is_empty()
            || in_flight.len() >= limit
            || (query.includes(JobState::Completed) && seen >= limit.max(LOOK))
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

pub async fn count_by_lane(client: &Object, query: &ListQuery, lanes: &[LaneId]) -> Result<u64> {
    let counted = |table: &str, state: &str| {
        format!(
            "SELECT count(*) FROM (SELECT 1 FROM faena.{table} WHERE lane = ANY($1) {state} AND id < $2 AND id >= $3 LIMIT $4) x"
        )
    };
    let mut total: u64 = 0;
    for sql in query.queries(
        &counted("ready", ""),
        |state| counted("waiting", &format!("AND state = {state}")),
        &counted("done", ""),
        |state| counted("ended", &format!("AND state = {state}")),
    ) {
        let left = (lists::COUNT_LIMIT as u64).saturating_sub(total) as i64;
        let row = client.query_one(&sql, &[&lanes, &query.upper.0, &query.from.0, &left]).await?;
        total += row.get::<_, i64>(0).unsigned_abs();
    }
    if query.includes_in_flight() {
        total += in_flight_ids(client, query, lanes, query.upper, lists::COUNT_LIMIT).await?.len() as u64;
    }
    Ok(total)
}

pub async fn ids_by_label(client: &Object, query: &ListQuery, before: JobId) -> Result<Vec<JobId>> {
    match &query.source {
        Source::Label { kind, value } => {
            let rows = client
                .query(
                    &format!(
                        "SELECT id FROM faena.label WHERE kind = $1 AND value = $2 AND id < $3 AND id >= $4
                         ORDER BY id {} LIMIT $5",
                        query.order()
                    ),
                    &[&(*kind as i16), value, &before.0, &query.from.0, &(lists::COUNT_LIMIT as i64)],
                )
                .await?;
            Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
        }
        Source::Correlation(text) => ids_by_correlation(client, query, text, before).await,
        Source::Lanes(_) | Source::DeadLetterMatches(_) => Ok(Vec::new()),
    }
}

/// A job without a correlation id of its own has its id as one.
pub async fn ids_by_correlation(client: &Object, query: &ListQuery, text: &str, before: JobId) -> Result<Vec<JobId>> {
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
            &[&text, &own, &before.0, &query.from.0, &(lists::COUNT_LIMIT as i64)],
        )
        .await?;
    Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
}

pub async fn key_holders(client: &Object, key: &str) -> Result<Vec<JobId>> {
    let rows = client
        .query(
            sql!("SELECT id FROM faena.job_key WHERE kind IN ({IDEMPOTENCY_KEY}, {UNIQUE_KEY}) AND key = $1"),
            &[&key],
        )
        .await?;
    Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
}
