//! Reads the dependency graph around a job.

use std::collections::HashMap;

use faena_domain::{JobGraph, JobId};
use rusqlite::Connection;

use super::{Shared, read};
use crate::{
    LaneId, Result,
    graph::{Direction, JobFacts, NeighbourQuery, Walk},
    lanes::lanes_of_queues,
    sql::sql,
};

/// Maximum number of dependents of a job that are read to find those of the caller's queues.
const MAX_READ: i64 = 10_000;

/// Selects the dependents of a job that are in these lanes; `NULL`: in any lane.
const CHILDREN: &str = sql!(
    "(SELECT id FROM label WHERE kind = {PARENT_LABEL} AND value = ?1 ORDER BY id LIMIT ?2) AS c
     WHERE ?3 IS NULL OR EXISTS (
         SELECT 1 FROM job j WHERE j.id = c.id AND j.lane IN (SELECT value FROM json_each(?3)))"
);

pub fn graph(
    connection: &Connection,
    shared: &Shared,
    id: JobId,
    queues: Option<&[String]>,
    limit: usize,
) -> Result<Option<JobGraph>> {
    let lanes = queues.map(|queues| lanes_of_queues(&shared.lanes.all(), queues));
    let Some((lane, _)) = read::lane_and_options(connection, id)? else { return Ok(None) };
    if lanes.as_ref().is_some_and(|lanes| !lanes.contains(&lane)) {
        return Ok(None);
    }
    let mut walk = Walk::new(id, limit);
    while let Some(query) = walk.next() {
        let links = match query.direction {
            Direction::Parents => parents(connection, &query, lanes.as_deref())?,
            Direction::Children => children(connection, &query, lanes.as_deref())?,
        };
        walk.add_neighbours(query.direction, links);
    }
    let (mut facts, mut counts) = (HashMap::new(), HashMap::new());
    for id in walk.jobs().iter().copied() {
        if let Some(found) = facts_of(connection, shared, id)? {
            facts.insert(id, found);
        }
        counts.insert(id, count_children(connection, id, lanes.as_deref(), walk.count_limit(id))?);
    }
    Ok(Some(walk.graph(facts, &counts)))
}

fn parents(connection: &Connection, query: &NeighbourQuery, lanes: Option<&[LaneId]>) -> Result<Vec<(JobId, JobId)>> {
    let mut links = Vec::new();
    for job in &query.jobs {
        let Some((_, options)) = read::lane_and_options(connection, *job)? else { continue };
        for parent in options.depends_on.into_iter().take(query.limit) {
            let is_visible = match lanes {
                Some(lanes) => {
                    read::lane_and_options(connection, parent)?.is_some_and(|(lane, _)| lanes.contains(&lane))
                }
                None => true,
            };
            if is_visible {
                links.push((*job, parent));
            }
        }
    }
    Ok(links)
}

fn children(connection: &Connection, query: &NeighbourQuery, lanes: Option<&[LaneId]>) -> Result<Vec<(JobId, JobId)>> {
    let mut statement = connection.prepare_cached(&format!("SELECT c.id FROM {CHILDREN} LIMIT ?4"))?;
    let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
    let max = if lanes.is_some() { MAX_READ } else { limit };
    let mut links = Vec::new();
    for job in &query.jobs {
        let rows = statement.query_map((job.to_string(), max, json(lanes), limit), |row| Ok(JobId(row.get(0)?)))?;
        for child in rows {
            links.push((*job, child?));
        }
    }
    Ok(links)
}

fn count_children(connection: &Connection, id: JobId, lanes: Option<&[LaneId]>, limit: usize) -> Result<usize> {
    let count: i64 = connection
        .prepare_cached(&format!("SELECT count(*) FROM {CHILDREN}"))?
        .query_row((id.to_string(), i64::try_from(limit).unwrap_or(i64::MAX), json(lanes)), |row| row.get(0))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn json(lanes: Option<&[LaneId]>) -> Option<String> {
    lanes.map(|lanes| serde_json::to_string(lanes).expect("numbers are JSON"))
}

fn facts_of(connection: &Connection, shared: &Shared, id: JobId) -> Result<Option<JobFacts>> {
    let Some((lane, options)) = read::lane_and_options(connection, id)? else { return Ok(None) };
    let Some(state) = read::state_of(connection, id)? else { return Ok(None) };
    let lane = read::lane(connection, shared, lane)?;
    Ok(Some(JobFacts {
        name: options.name.unwrap_or_else(|| lane.kind.clone()),
        kind: lane.kind,
        queue: lane.queue,
        state,
        depends_on: options.depends_on,
    }))
}
