//! Reads the dependency graph around a job.

use std::collections::HashMap;

use deadpool_postgres::Object;
use faena_domain::{JobGraph, JobId};
use uuid::Uuid;

use super::{Shared, read};
use crate::{
    LaneId, Result,
    assemble::parse_options,
    graph::{Direction, JobFacts, NeighbourQuery, Walk},
    lanes::lanes_of_queues,
    sql::sql,
};

/// Maximum number of dependents of a job that are read to find those of the caller's queues.
const MAX_READ: i64 = 10_000;

/// Selects the dependents of a job that are in these lanes; `NULL`: in any lane.
const CHILDREN: &str = sql!(
    "(SELECT l.id FROM faena.label l WHERE l.kind = {PARENT_LABEL} AND l.value = p.parent ORDER BY l.id LIMIT p.most) AS f
     WHERE $3::int4[] IS NULL OR EXISTS (SELECT FROM faena.job j WHERE j.id = f.id AND j.lane = ANY($3))"
);

pub async fn graph(shared: &Shared, id: JobId, queues: Option<&[String]>, limit: usize) -> Result<Option<JobGraph>> {
    shared.load_lanes().await?;
    let lanes = queues.map(|queues| lanes_of_queues(&shared.lanes.all(), queues));
    let client = shared.client().await?;
    let result = graph_in(shared, &client, id, lanes.as_deref(), limit).await;
    client.return_to_pool(result)
}

async fn graph_in(
    shared: &Shared,
    client: &Object,
    id: JobId,
    lanes: Option<&[LaneId]>,
    limit: usize,
) -> Result<Option<JobGraph>> {
    if lanes_of(client, &[id.0]).await?.get(&id).is_none_or(|lane| lanes.is_some_and(|lanes| !lanes.contains(lane))) {
        return Ok(None);
    }
    let mut walk = Walk::new(id, limit);
    while let Some(query) = walk.next() {
        let links = match query.direction {
            Direction::Parents => parents(client, &query, lanes).await?,
            Direction::Children => children(client, &query, lanes).await?,
        };
        walk.add_neighbours(query.direction, links);
    }
    let facts = facts_of(shared, client, walk.jobs()).await?;
    let counts = count_children(client, &walk, lanes).await?;
    Ok(Some(walk.graph(facts, &counts)))
}

async fn lanes_of(client: &Object, ids: &[Uuid]) -> Result<HashMap<JobId, LaneId>> {
    let statement = client.prepare_cached("SELECT id, lane FROM faena.job WHERE id = ANY($1)").await?;
    let rows = client.query(&statement, &[&ids]).await?;
    Ok(rows.iter().map(|row| (JobId(row.get(0)), row.get(1))).collect())
}

async fn parents(client: &Object, query: &NeighbourQuery, lanes: Option<&[LaneId]>) -> Result<Vec<(JobId, JobId)>> {
    let ids: Vec<Uuid> = query.jobs.iter().map(|job| job.0).collect();
    let statement = client.prepare_cached("SELECT id, options FROM faena.job WHERE id = ANY($1)").await?;
    let mut found = HashMap::new();
    for row in client.query(&statement, &[&ids]).await? {
        found.insert(JobId(row.get(0)), parse_options(row.get(1))?.depends_on);
    }
    let mut links: Vec<(JobId, JobId)> = Vec::new();
    for job in &query.jobs {
        let parents = found.remove(job).unwrap_or_default();
        links.extend(parents.into_iter().take(query.limit).map(|parent| (*job, parent)));
    }
    if let Some(lanes) = lanes {
        let ids: Vec<Uuid> = links.iter().map(|(_, parent)| parent.0).collect();
        let known = lanes_of(client, &ids).await?;
        links.retain(|(_, parent)| known.get(parent).is_some_and(|lane| lanes.contains(lane)));
    }
    Ok(links)
}

async fn children(client: &Object, query: &NeighbourQuery, lanes: Option<&[LaneId]>) -> Result<Vec<(JobId, JobId)>> {
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let max = if lanes.is_some() { MAX_READ } else { limit };
    let parents: Vec<String> = query.jobs.iter().map(JobId::to_string).collect();
    let statement = client
        .prepare_cached(&format!(
            "SELECT p.number, c.id FROM unnest($1::text[], $2::int8[]) WITH ORDINALITY AS p(parent, most, number)
             CROSS JOIN LATERAL (SELECT f.id FROM {CHILDREN} ORDER BY f.id LIMIT $4) AS c ORDER BY p.number, c.id"
        ))
        .await?;
    let rows = client.query(&statement, &[&parents, &vec![max; parents.len()], &lanes, &limit]).await?;
    let link = |row: &tokio_postgres::Row| {
        let number = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or(0);
        (query.jobs[number], JobId(row.get(1)))
    };
    Ok(rows.iter().map(link).collect())
}

async fn count_children(client: &Object, walk: &Walk, lanes: Option<&[LaneId]>) -> Result<HashMap<JobId, usize>> {
    let parents: Vec<String> = walk.jobs().iter().map(JobId::to_string).collect();
    let max: Vec<i64> = walk.jobs().iter().map(|job| walk.count_limit(*job) as i64).collect();
    let statement = client
        .prepare_cached(&format!(
            "SELECT p.number, (SELECT count(*) FROM {CHILDREN})
             FROM unnest($1::text[], $2::int8[]) WITH ORDINALITY AS p(parent, most, number)"
        ))
        .await?;
    let rows = client.query(&statement, &[&parents, &max, &lanes]).await?;
    let count = |row: &tokio_postgres::Row| {
        let number = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or(0);
        (walk.jobs()[number], usize::try_from(row.get::<_, i64>(1)).unwrap_or(0))
    };
    Ok(rows.iter().map(count).collect())
}

async fn facts_of(shared: &Shared, client: &Object, jobs: &[JobId]) -> Result<HashMap<JobId, JobFacts>> {
    let ids: Vec<Uuid> = jobs.iter().map(|job| job.0).collect();
    let statement = client.prepare_cached("SELECT id, lane, options FROM faena.job WHERE id = ANY($1)").await?;
    let rows = client.query(&statement, &[&ids]).await?;
    if rows.iter().any(|row| !shared.lanes.contains(row.get(1))) {
        shared.load_lanes().await?;
    }
    let states = read::states_of(client, jobs).await?;
    let mut facts = HashMap::new();
    for row in rows {
        let id = JobId(row.get(0));
        let Some(state) = states.get(&id).copied() else { continue };
        let (lane, options) = (shared.lanes.require(row.get(1))?, parse_options(row.get(2))?);
        let name = options.name.unwrap_or_else(|| lane.kind.clone());
        facts.insert(id, JobFacts { name, kind: lane.kind, queue: lane.queue, state, depends_on: options.depends_on });
    }
    Ok(facts)
}
