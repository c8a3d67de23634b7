//! Reads the queue of the database for an external queue.

use async_trait::async_trait;
use faena_domain::{JobId, JobState, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};

use super::{Sqlite, read};
use crate::{
    LaneId, QueueFeed, QueueLocation, QueuePosition, QueueStore, Result, Signal,
    sql::{FAILED, sql},
};

#[async_trait]
impl QueueStore for Sqlite {
    fn queue_feed(&self) -> &QueueFeed {
        &self.shared.queue_feed
    }

    fn signal_ready(&self, lanes: &[LaneId]) {
        for lane in lanes {
            let _ = self.signals.send(Signal::Ready(*lane));
        }
    }

    async fn ready_page(&self, lane: LaneId, after: Option<QueuePosition>, limit: usize) -> Result<Vec<QueuePosition>> {
        self.read(move |connection, _| ready_page(connection, lane, after, limit)).await
    }

    async fn delayed_page(&self, after: Option<QueuePosition>, limit: usize) -> Result<Vec<(LaneId, QueuePosition)>> {
        self.read(move |connection, _| delayed_page(connection, after, limit)).await
    }

    async fn dead_page(&self, lane: LaneId, after: Option<JobId>, limit: usize) -> Result<Vec<QueuePosition>> {
        self.read(move |connection, _| dead_page(connection, lane, after, limit)).await
    }

    async fn queue_locations(&self, ids: Vec<JobId>) -> Result<Vec<QueueLocation>> {
        self.read(move |connection, _| ids.into_iter().map(|id| location(connection, id)).collect()).await
    }
}

fn position(row: &Row) -> rusqlite::Result<QueuePosition> {
    Ok(QueuePosition { at: Timestamp::from_ms(row.get(0)?), id: JobId(row.get(1)?) })
}

fn ready_page(
    connection: &Connection,
    lane: LaneId,
    after: Option<QueuePosition>,
    limit: usize,
) -> Result<Vec<QueuePosition>> {
    let (at, id) = start(after);
    let mut statement = connection.prepare_cached(
        "SELECT ready_at, id FROM ready WHERE lane = ?1 AND (ready_at, id) > (?2, ?3) ORDER BY ready_at, id LIMIT ?4",
    )?;
    let rows = statement.query_map((lane, at, id.0, limit as i64), position)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn delayed_page(
    connection: &Connection,
    after: Option<QueuePosition>,
    limit: usize,
) -> Result<Vec<(LaneId, QueuePosition)>> {
    let (at, id) = start(after);
    let mut statement = connection.prepare_cached(
        "SELECT due_at, id, lane FROM waiting INDEXED BY waiting_due
         WHERE (due_at, id) > (?1, ?2) AND NOT blocked ORDER BY due_at, id LIMIT ?3",
    )?;
    let rows = statement.query_map((at, id.0, limit as i64), |row| Ok((row.get(2)?, position(row)?)))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn dead_page(connection: &Connection, lane: LaneId, after: Option<JobId>, limit: usize) -> Result<Vec<QueuePosition>> {
    let after = after.map_or(uuid::Uuid::nil(), |id| id.0);
    let mut statement = connection.prepare_cached(sql!(
        "SELECT finished_at, id FROM ended WHERE lane = ?1 AND state = {FAILED} AND id > ?2 ORDER BY id LIMIT ?3"
    ))?;
    let rows = statement.query_map((lane, after, limit as i64), position)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn start(after: Option<QueuePosition>) -> (i64, JobId) {
    after.map_or((i64::MIN, JobId(uuid::Uuid::nil())), |position| (position.at.as_ms(), position.id))
}

fn location(connection: &Connection, id: JobId) -> Result<QueueLocation> {
    let Some(state) = read::state_of(connection, id)? else { return Ok(QueueLocation::Elsewhere) };
    let Some((lane, _)) = read::lane_and_options(connection, id)? else { return Ok(QueueLocation::Elsewhere) };
    Ok(match state {
        JobState::Queued => read::ready_at_of(connection, lane, id)?
            .map_or(QueueLocation::Elsewhere, |at| QueueLocation::Ready { lane, ready_at: Timestamp::from_ms(at) }),
        JobState::Pending | JobState::Retrying => connection
            .prepare_cached(sql!(
                "SELECT due_at FROM waiting WHERE lane = ? AND state IN ({PENDING}, {RETRYING}) AND id = ? AND NOT blocked"
            ))?
            .query_row((lane, id.0), |row| row.get(0))
            .optional()?
            .map_or(QueueLocation::Elsewhere, |at| QueueLocation::Delayed { lane, due_at: Timestamp::from_ms(at) }),
        JobState::Failed => connection
            .prepare_cached(&format!("SELECT finished_at FROM ended WHERE lane = ? AND state = {FAILED} AND id = ?"))?
            .query_row((lane, id.0), |row| row.get(0))
            .optional()?
            .map_or(QueueLocation::Elsewhere, |at| QueueLocation::Failed { at: Timestamp::from_ms(at) }),
        state if state.is_in_flight() => QueueLocation::InFlight,
        _ => QueueLocation::Elsewhere,
    })
}
