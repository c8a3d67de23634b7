//! Dependents: jobs that are released, or cancelled, when their parents end.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, OnParentFailure, Timestamp};
use uuid::Uuid;

use super::{
    Shared,
    cleanup::clean_up,
    end::{QueueRows, saturating_i16, storable},
    job_log::add_log_entries,
    read,
    submit::apply,
};
use crate::{
    JobExit, LaneId, QueueChange, Result, Signal, Tally,
    assemble::parse_options,
    dependents::{EDGES_PER_SLICE, PARENTS_PER_SLICE},
    plan::{Deltas, Dequeued, parent_cause},
    sql::PENDING,
    sql::sql,
};

/// Releases the dependents of `finished`, then the dependents of the jobs that this cancels, and so on. Idempotent.
///
/// One transaction processes one slice of a large graph. It records the parents of the rest in `unreleased`, and the promoter of any
/// node continues with them.
pub async fn release_dependents(shared: &Shared, finished: &[JobId], now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = release_slice(&client, shared, finished.to_vec(), now).await;
    client.end(result).await?.send(shared, now);
    Ok(())
}

/// Continues with parents whose dependents did not fit into an earlier transaction. Returns how many dependents it moved, and whether
/// more are left.
pub async fn continue_release(shared: &Shared, now: Timestamp) -> Result<(usize, bool)> {
    let client = shared.begin().await?;
    let result = async {
        let rows = client
            .query(
                "DELETE FROM faena.unreleased WHERE parent = ANY (ARRAY(
                     SELECT parent FROM faena.unreleased LIMIT $1 FOR UPDATE SKIP LOCKED)) RETURNING parent",
                &[&PARENTS_PER_SLICE],
            )
            .await?;
        if rows.is_empty() {
            return Ok(Released::default());
        }
        let parents = rows.iter().map(|row| JobId(row.get(0))).collect();
        let mut released = release_slice(&client, shared, parents, now).await?;
        released.more |= i64::try_from(rows.len()).is_ok_and(|count| count == PARENTS_PER_SLICE);
        Ok(released)
    }
    .await;
    let released = client.end(result).await?;
    let answer = (released.moved, released.more);
    released.send(shared, now);
    Ok(answer)
}

/// Result of one slice.
#[derive(Default)]
struct Released {
    deltas: Deltas,
    /// Lanes that have ready jobs now.
    lanes: HashSet<LaneId>,
    queue_changes: Vec<QueueChange>,
    signals: Vec<Signal>,
    moved: usize,
    /// Whether dependents are left.
    more: bool,
}

impl Released {
    /// Sends the signals, after the commit.
    fn send(self, shared: &Shared, now: Timestamp) {
        shared.queue_feed.add(self.queue_changes);
        for lane in self.lanes {
            shared.cursors.lower(lane, now.as_ms());
            shared.signal([Signal::Ready(lane)]);
        }
        // This signal wakes the promoter, which then calls `continue_release`. A slice without effect must not send it,
        // or the promoter would never rest.
        if self.moved > 0 || self.more {
            shared.signal([Signal::Waiting]);
        }
        shared.signal(self.signals);
    }
}

/// PostgreSQL: a level of the graph takes several round trips, so a slice of a chain is bounded by its length too.
const LEVELS_PER_SLICE: usize = 100;

async fn release_slice(client: &Object, shared: &Shared, mut parents: Vec<JobId>, now: Timestamp) -> Result<Released> {
    let mut released = Released::default();
    let (mut left, mut levels) = (EDGES_PER_SLICE, 0);
    while !parents.is_empty() && left > 0 && levels < LEVELS_PER_SLICE {
        levels += 1;
        let states = read::states_of(client, &parents).await?;
        // A parent that was retried meanwhile releases its dependents when it ends again.
        parents.retain(|id| states.get(id).is_none_or(|state| state.is_terminal()));
        let edges = edges(client, &parents, left).await?;
        let is_complete = edges.len() < left;
        left = left.saturating_sub(edges.len());
        let mut cancelled: HashMap<Uuid, String> = HashMap::new();
        let mut satisfied: (Vec<Uuid>, Vec<Uuid>) = Default::default();
        for edge in &edges {
            let state = states.get(&edge.parent).copied();
            if state == Some(JobState::Completed) || edge.on_failure == OnParentFailure::Run {
                satisfied.0.push(edge.parent.0);
                satisfied.1.push(edge.child.0);
            } else {
                cancelled.insert(edge.child.0, parent_cause(edge.parent, state));
            }
        }
        release(client, shared, &satisfied, &cancelled, now, &mut released).await?;
        let next = cancel(client, cancelled, now, &mut released).await?;
        if is_complete {
            parents = next;
        } else {
            parents.extend(next);
        }
    }
    if !parents.is_empty() {
        let ids: Vec<Uuid> = parents.iter().map(|id| id.0).collect();
        let postponed = client
            .execute(
                "INSERT INTO faena.unreleased (parent) SELECT DISTINCT p FROM unnest($1::uuid[]) AS p
                 WHERE EXISTS (SELECT FROM faena.dependency d WHERE d.parent = p) ON CONFLICT DO NOTHING",
                &[&ids],
            )
            .await?;
        released.more = postponed > 0;
    }
    apply(client, shared.own_shard(), &released.deltas).await?;
    Ok(released)
}

struct Edge {
    parent: JobId,
    child: JobId,
    on_failure: OnParentFailure,
}

/// Returns up to `limit` edges from these parents, and locks their children. If two parents end concurrently, the
/// second transaction sees what the first has done.
async fn edges(client: &Object, parents: &[JobId], limit: usize) -> Result<Vec<Edge>> {
    let ids: Vec<Uuid> = parents.iter().map(|id| id.0).collect();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows =
        client.query("SELECT child FROM faena.dependency WHERE parent = ANY($1) LIMIT $2", &[&ids, &limit]).await?;
    let children: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    if children.is_empty() {
        return Ok(Vec::new());
    }
    client
        .execute(
            sql!("SELECT FROM faena.job j JOIN faena.waiting w ON w.lane = j.lane AND w.state = {PENDING} AND w.id = j.id
             WHERE j.id = ANY($1) ORDER BY w.id FOR UPDATE OF w"),
            &[&children],
        )
        .await?;
    let rows = client
        .query(
            "SELECT d.parent, d.child, j.options FROM faena.dependency d LEFT JOIN faena.job j ON j.id = d.child
             WHERE d.parent = ANY($1) AND d.child = ANY($2) LIMIT $3",
            &[&ids, &children, &limit],
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
    shared: &Shared,
    (parents, children): &(Vec<Uuid>, Vec<Uuid>),
    cancelled: &HashMap<Uuid, String>,
    now: Timestamp,
    released: &mut Released,
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
    let to_cancel: Vec<Uuid> = cancelled.keys().copied().collect();
    let rows = client
        .query(
            sql!(
                "DELETE FROM faena.waiting w USING faena.job j
             WHERE j.id = ANY($1) AND NOT (j.id = ANY($2))
               AND w.lane = j.lane AND w.state = {PENDING} AND w.id = j.id AND w.blocked
               AND NOT EXISTS (SELECT FROM faena.dependency d WHERE d.child = j.id)
             RETURNING w.id, w.lane, j.options"
            ),
            &[children, &to_cancel],
        )
        .await?;
    let mut ready = QueueRows::default();
    let mut waiting = QueueRows::default();
    let done = LogLine::new(now, LogEvent::ParentsDone, "");
    let entries = rows.iter().map(|row| (JobId(row.get(0)), None, done.clone())).collect();
    add_log_entries(client, &shared.options.job_limits, entries).await?;
    released.moved += rows.len();
    for row in rows {
        let (id, lane) = (JobId(row.get(0)), row.get::<_, LaneId>(1));
        match parse_options(row.get(2))?.scheduled_at {
            Some(due_at) if due_at > now => {
                waiting.push(lane, id, due_at, 0);
                released.queue_changes.push(QueueChange::delayed(lane, due_at.as_ms(), id));
            }
            _ => {
                released.queue_changes.push(QueueChange::ready(lane, now.as_ms(), id));
                ready.push(lane, id, now, 0);
                released.deltas.moved(lane, Tally::Pending, Tally::Queued, 1);
                released.lanes.insert(lane);
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
    released: &mut Released,
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
    let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let lanes: Vec<LaneId> = rows.iter().map(|row| row.get(1)).collect();
    let errors: Vec<String> = ids.iter().map(|id| causes.get(id).cloned().unwrap_or_default()).collect();
    let log = |error: &String| Dequeued::default().log(now, LogEvent::Cancelled, error);
    let logs: Vec<String> = errors.iter().map(log).collect();
    client
        .execute(
            sql!(
                "INSERT INTO faena.ended (lane, state, id, finished_at, run, retry_count, error, reason, log)
             SELECT lane, {CANCELLED}, id, $5, 0, 0, error, 'cancelled', log
             FROM unnest($1::int4[], $2::uuid[], $3::text[], $4::text[]) AS e(lane, id, error, log)"
            ),
            &[&lanes, &ids, &errors, &logs, &now.as_ms()],
        )
        .await?;
    for lane in lanes {
        released.deltas.moved(lane, Tally::Pending, Tally::Cancelled, 1);
    }
    released.moved += ids.len();
    let exits: Vec<(Uuid, JobExit)> = ids.iter().map(|id| (*id, JobExit::Finished)).collect();
    released.signals.extend(clean_up(client, &exits).await?);
    Ok(ids.into_iter().map(JobId).collect())
}

/// Ends a job that is not in flight.
#[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
pub async fn put_ended(
    client: &Object,
    lane: LaneId,
    state: i16,
    id: JobId,
    dequeued: Dequeued,
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
                &saturating_i16(dequeued.retry_count),
                &storable(error),
                &reason,
                &dequeued.log(now, event, error),
            ],
        )
        .await?;
    Ok(())
}
