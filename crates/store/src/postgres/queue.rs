//! Reads the queue of the database for an external queue.

use std::collections::HashMap;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::{Postgres, Shared, claim::BEGIN_CLAIM, read};
use crate::{
    LaneId, QueueFeed, QueueLocation, QueuePosition, QueueStore, Result, Signal,
    sql::{FAILED, sql},
};

#[async_trait]
impl QueueStore for Postgres {
    fn queue_feed(&self) -> &QueueFeed {
        &self.shared.queue_feed
    }

    fn signal_ready(&self, lanes: &[LaneId]) {
        self.shared.signal(lanes.iter().map(|lane| Signal::Ready(*lane)));
    }

    async fn ready_page(&self, lane: LaneId, after: Option<QueuePosition>, limit: usize) -> Result<Vec<QueuePosition>> {
        self.shared.retrying(|| ready_page(&self.shared, lane, after, limit)).await
    }

    async fn delayed_page(&self, after: Option<QueuePosition>, limit: usize) -> Result<Vec<(LaneId, QueuePosition)>> {
        self.shared.retrying(|| delayed_page(&self.shared, after, limit)).await
    }

    async fn dead_page(&self, lane: LaneId, after: Option<JobId>, limit: usize) -> Result<Vec<QueuePosition>> {
        self.shared.retrying(|| dead_page(&self.shared, lane, after, limit)).await
    }

    async fn queue_locations(&self, ids: Vec<JobId>) -> Result<Vec<QueueLocation>> {
        self.shared.retrying(|| locations(&self.shared, &ids)).await
    }
}

fn position(row: &Row) -> QueuePosition {
    QueuePosition { at: Timestamp::from_ms(row.get(0)), id: JobId(row.get(1)) }
}

async fn ready_page(
    shared: &Shared,
    lane: LaneId,
    after: Option<QueuePosition>,
    limit: usize,
) -> Result<Vec<QueuePosition>> {
    let (at, id) = start(after);
    let client = shared.client().await?;
    // Reads in the same order as a claim, so it needs the same settings.
    client.batch_execute(BEGIN_CLAIM).await?;
    let result = async {
        let statement = client
            .prepare_cached(
                "SELECT ready_at, id FROM faena.ready WHERE lane = $1 AND (ready_at, id) > ($2::int8, $3::uuid)
                 ORDER BY ready_at, id LIMIT $4",
            )
            .await?;
        let rows = client.query(&statement, &[&lane, &at, &id.0, &(limit as i64)]).await?;
        Ok(rows.iter().map(position).collect())
    }
    .await;
    client.end(result).await
}

async fn delayed_page(
    shared: &Shared,
    after: Option<QueuePosition>,
    limit: usize,
) -> Result<Vec<(LaneId, QueuePosition)>> {
    let (at, id) = start(after);
    let client = shared.client().await?;
    let result = async {
        let statement = client
            .prepare_cached(
                "SELECT due_at, id, lane FROM faena.waiting WHERE (due_at, id) > ($1::int8, $2::uuid) AND NOT blocked
                 ORDER BY due_at, id LIMIT $3",
            )
            .await?;
        let rows = client.query(&statement, &[&at, &id.0, &(limit as i64)]).await?;
        Ok(rows.iter().map(|row| (row.get(2), position(row))).collect())
    }
    .await;
    client.return_to_pool(result)
}

async fn dead_page(shared: &Shared, lane: LaneId, after: Option<JobId>, limit: usize) -> Result<Vec<QueuePosition>> {
    let after = after.map_or(Uuid::nil(), |id| id.0);
    let client = shared.client().await?;
    let result = async {
        let statement = client
            .prepare_cached(sql!(
                "SELECT finished_at, id FROM faena.ended WHERE lane = $1 AND state = {FAILED} AND id > $2 ORDER BY id LIMIT $3"
            ))
            .await?;
        let rows = client.query(&statement, &[&lane, &after, &(limit as i64)]).await?;
        Ok(rows.iter().map(position).collect())
    }
    .await;
    client.return_to_pool(result)
}

fn start(after: Option<QueuePosition>) -> (i64, JobId) {
    after.map_or((i64::MIN, JobId(Uuid::nil())), |position| (position.at.as_ms(), position.id))
}

async fn locations(shared: &Shared, ids: &[JobId]) -> Result<Vec<QueueLocation>> {
    let client = shared.client().await?;
    // Only single-row lookups; without statistics the planner would scan whole tables.
    client.batch_execute(BEGIN_CLAIM).await?;
    let result = locations_in(&client, ids).await;
    client.end(result).await
}

async fn locations_in(client: &Object, ids: &[JobId]) -> Result<Vec<QueueLocation>> {
    let states = read::states_of(client, ids).await?;
    let uuids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let statement = client
        .prepare_cached(&format!(
            "SELECT j.id, j.lane,
                 (SELECT r.ready_at FROM faena.ready r WHERE r.lane = j.lane AND r.id = j.id LIMIT 1),
                 (SELECT w.due_at FROM faena.waiting w
                  WHERE w.lane = j.lane AND w.state IN ({}, {}) AND w.id = j.id AND NOT w.blocked LIMIT 1),
                 (SELECT e.finished_at FROM faena.ended e WHERE e.lane = j.lane AND e.state = {FAILED} AND e.id = j.id)
             FROM faena.job j WHERE j.id = ANY($1)",
            crate::sql::PENDING,
            crate::sql::RETRYING,
        ))
        .await?;
    let rows = client.query(&statement, &[&uuids]).await?;
    let times: HashMap<Uuid, &Row> = rows.iter().map(|row| (row.get(0), row)).collect();
    Ok(ids.iter().map(|id| location(states.get(id).copied(), times.get(&id.0).copied())).collect())
}

fn location(state: Option<JobState>, row: Option<&Row>) -> QueueLocation {
    let (Some(state), Some(row)) = (state, row) else { return QueueLocation::Elsewhere };
    let lane = row.get(1);
    let at = |column: usize| row.get::<_, Option<i64>>(column).map(Timestamp::from_ms);
    let found = match state {
        JobState::Queued => at(2).map(|ready_at| QueueLocation::Ready { lane, ready_at }),
        JobState::Pending | JobState::Retrying => at(3).map(|due_at| QueueLocation::Delayed { lane, due_at }),
        JobState::Failed => at(4).map(|at| QueueLocation::Failed { at }),
        state if state.is_in_flight() => Some(QueueLocation::InFlight),
        _ => None,
    };
    found.unwrap_or(QueueLocation::Elsewhere)
}
