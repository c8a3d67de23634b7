//! Dependents: jobs that are released, or cancelled, when their parents end.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, OnParentFailure, Timestamp};
use uuid::Uuid;

use super::{
    Shared,
    cleanup::clean_up,
    end::{QueueRows, saturating_i16, storable},
    read,
    run_updates::add_log_entry,
    submit::apply,
};
use crate::{
    JobExit, LaneId, Result, Signal, Tally,
    assemble::parse_options,
    plan::{Deltas, Taken, parent_cause},
    sql::sql,
    sql::{CANCELLED, PENDING},
};

/// Releases the dependents of `finished`, and so on down the graph. Can be repeated: everything happens once.
pub async fn release_dependents(shared: &Shared, finished: &[JobId], now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = release_all(&client, finished, now).await;
    let result = match result {
        Ok((deltas, lanes, signals)) => apply(&client, shared.own_shard(), &deltas).await.map(|()| (lanes, signals)),
        Err(error) => Err(error),
    };
    let (lanes, signals) = client.end(result).await?;
    for lane in lanes {
        shared.cursors.lower(lane, now.as_ms());
        shared.signal([Signal::Ready(lane)]);
    }
    shared.signal([Signal::Waiting]);
    shared.signal(signals);
    Ok(())
}

/// Returns what to count, which lanes have ready jobs, and the signals to send after the commit.
async fn release_all(
    client: &Object,
    finished: &[JobId],
    now: Timestamp,
) -> Result<(Deltas, HashSet<LaneId>, Vec<Signal>)> {
    let mut deltas = Deltas::default();
    let mut signals = Vec::new();
    let mut lanes = HashSet::new();
    let mut parents: Vec<JobId> = finished.to_vec();
    while !parents.is_empty() {
        let states = read::states_of(client, &parents).await?;
        let edges = edges(client, &parents).await?;
        let mut cancelled: HashMap<Uuid, String> = HashMap::new();
        let mut good: (Vec<Uuid>, Vec<Uuid>) = Default::default();
        for edge in &edges {
            let state = states.get(&edge.parent).copied();
            if state.is_some_and(|state| !state.is_terminal()) {
                continue;
            }
            if state == Some(JobState::Completed) || edge.on_failure == OnParentFailure::Run {
                good.0.push(edge.parent.0);
                good.1.push(edge.child.0);
            } else {
                cancelled.insert(edge.child.0, parent_cause(edge.parent, state));
            }
        }
        release(client, &good, &cancelled, now, &mut deltas, &mut lanes).await?;
        parents = cancel(client, cancelled, now, &mut deltas, &mut signals).await?;
    }
    Ok((deltas, lanes, signals))
}

struct Edge {
    parent: JobId,
    child: JobId,
    on_failure: OnParentFailure,
}

/// Returns the edges from these parents, with their children locked: of two parents that end concurrently, the second sees
/// what the first has done.
async fn edges(client: &Object, parents: &[JobId]) -> Result<Vec<Edge>> {
    let ids: Vec<Uuid> = parents.iter().map(|id| id.0).collect();
    client
        .execute(
            sql!("SELECT FROM faena.job j JOIN faena.waiting w ON w.lane = j.lane AND w.state = {PENDING} AND w.id = j.id
             WHERE j.id IN (SELECT child FROM faena.dependency WHERE parent = ANY($1)) ORDER BY w.id FOR UPDATE OF w"),
            &[&ids],
        )
        .await?;
    let rows = client
        .query(
            "SELECT d.parent, d.child, j.options FROM faena.dependency d LEFT JOIN faena.job j ON j.id = d.child
             WHERE d.parent = ANY($1)",
            &[&ids],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let options = parse_options(row.get(2))?;
            Ok(Edge { parent: JobId(row.get(0)), child: JobId(row.get(1)), on_failure: options.on_parent_failure })
        })
        .collect()
}

/// Removes edges, and releases the children that have none left.
async fn release(
    client: &Object,
    (parents, children): &(Vec<Uuid>, Vec<Uuid>),
    cancelled: &HashMap<Uuid, String>,
    now: Timestamp,
    deltas: &mut Deltas,
    lanes: &mut HashSet<LaneId>,
) -> Result<()> {
    if parents.is_empty() {
        return Ok(());
    }
    client
        .execute(
            "DELETE FROM faena.dependency d USING unnest($1::uuid[], $2::uuid[]) AS e(parent, child)
             WHERE d.parent = e.parent AND d.child = e.child",
            &[parents, children],
        )
        .await?;
    let stay: Vec<Uuid> = cancelled.keys().copied().collect();
    let rows = client
        .query(
            sql!(
                "DELETE FROM faena.waiting w USING faena.job j
             WHERE j.id = ANY($1) AND NOT (j.id = ANY($2))
               AND w.lane = j.lane AND w.state = {PENDING} AND w.id = j.id AND w.blocked
               AND NOT EXISTS (SELECT FROM faena.dependency d WHERE d.child = j.id)
             RETURNING w.id, w.lane, j.options"
            ),
            &[children, &stay],
        )
        .await?;
    let mut ready = QueueRows::default();
    let mut waiting = QueueRows::default();
    for row in rows {
        let (id, lane) = (JobId(row.get(0)), row.get::<_, LaneId>(1));
        add_log_entry(client, id, None, LogLine::new(now, LogEvent::ParentsDone, "")).await?;
        match parse_options(row.get(2))?.scheduled_at {
            Some(due_at) if due_at > now => waiting.push(lane, id, due_at, 0),
            _ => {
                ready.push(lane, id, now, 0);
                deltas.moved(lane, Tally::Pending, Tally::Queued, 1);
                lanes.insert(lane);
            }
        }
    }
    ready.put_ready(client, false).await?;
    waiting.put_waiting(client, PENDING).await
}

/// Cancels children, and returns those that were cancelled.
async fn cancel(
    client: &Object,
    causes: HashMap<Uuid, String>,
    now: Timestamp,
    deltas: &mut Deltas,
    signals: &mut Vec<Signal>,
) -> Result<Vec<JobId>> {
    if causes.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = causes.keys().copied().collect();
    client.execute("DELETE FROM faena.dependency WHERE child = ANY($1)", &[&ids]).await?;
    let rows = client
        .query(
            sql!(
                "DELETE FROM faena.waiting w USING faena.job j
             WHERE j.id = ANY($1) AND w.lane = j.lane AND w.state = {PENDING} AND w.id = j.id AND w.blocked
             RETURNING w.id, w.lane"
            ),
            &[&ids],
        )
        .await?;
    let mut cancelled = Vec::new();
    for row in rows {
        let (id, lane) = (JobId(row.get(0)), row.get::<_, LaneId>(1));
        let cause = causes.get(&id.0).cloned().unwrap_or_default();
        put_ended(client, lane, CANCELLED, id, Taken::default(), &cause, "cancelled", LogEvent::Cancelled, now).await?;
        deltas.moved(lane, Tally::Pending, Tally::Cancelled, 1);
        cancelled.push(id);
    }
    signals.extend(clean_up(client, &cancelled.iter().map(|id| (id.0, JobExit::Finished)).collect::<Vec<_>>()).await?);
    Ok(cancelled)
}

/// Ends a job that is not in flight.
#[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
pub async fn put_ended(
    client: &Object,
    lane: LaneId,
    state: i16,
    id: JobId,
    taken: Taken,
    error: &str,
    reason: &str,
    event: LogEvent,
    now: Timestamp,
) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.ended (lane, state, id, finished_at, run, retry_count, error, reason, log)
             VALUES ($1, $2, $3, $4, 0, $5, $6, $7, $8)",
            &[
                &lane,
                &state,
                &id.0,
                &now.as_ms(),
                &saturating_i16(taken.retry_count),
                &storable(error),
                &reason,
                &taken.log(now, event, error),
            ],
        )
        .await?;
    Ok(())
}
