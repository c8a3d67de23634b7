//! Creates and reclaims lanes.

use std::collections::HashSet;

use async_trait::async_trait;
use faena_domain::NewJob;
use rusqlite::{Connection, OptionalExtension};

use super::{Sqlite, read, writer::Tx};
use crate::{
    Lane, LaneId, LaneStore, LaneUsage, Result,
    lanes::{LaneName, empty_lanes, successors, too_many_lanes},
    sql::sql,
};

#[async_trait]
impl LaneStore for Sqlite {
    async fn lanes(&self) -> Result<Vec<Lane>> {
        Ok(self.shared.lanes.all())
    }

    async fn lane_usage(&self) -> Result<LaneUsage> {
        Ok(LaneUsage { used: self.shared.lanes.len(), max: self.shared.options.max_lanes })
    }

    async fn lane_reclaim(&self, limit: usize) -> Result<usize> {
        // SQLite: the search reads all counters, so a reader does it. Usually no lane is empty.
        let empty = self
            .read(move |connection, shared| {
                let mut empty = empty_lanes(&shared.lanes.all(), &read::counts(connection)?);
                empty.truncate(limit);
                Ok(empty)
            })
            .await?;
        if empty.is_empty() {
            return Ok(0);
        }
        self.writer.call_alone(move |tx| reclaim(tx, &empty)).await
    }
}

/// Deletes those of these lanes that are still empty.
fn reclaim(tx: &Tx, lanes: &[LaneId]) -> Result<usize> {
    let mut empty = Vec::new();
    for lane in lanes {
        if !is_used(tx.connection, *lane)? {
            empty.push(*lane);
        }
    }
    for (lane, successor) in successors(&tx.shared.lanes.all(), &empty) {
        let execute = |sql: &str| tx.connection.prepare_cached(sql)?.execute((lane, successor));
        execute(
            "INSERT INTO counter (lane, tally, n) SELECT ?2, tally, n FROM counter WHERE lane = ?1 AND n <> 0
             ON CONFLICT DO UPDATE SET n = n + excluded.n",
        )?;
        execute(
            "INSERT INTO history_mark (lane, measure, n) SELECT ?2, measure, n FROM history_mark WHERE lane = ?1
             ON CONFLICT DO UPDATE SET n = n + excluded.n",
        )?;
        for sql in [
            "DELETE FROM counter WHERE lane = ?",
            "DELETE FROM history_mark WHERE lane = ?",
            "DELETE FROM key_queue WHERE lane = ?",
            "DELETE FROM lane WHERE id = ?",
        ] {
            tx.connection.prepare_cached(sql)?.execute([lane])?;
        }
    }
    let count = empty.len();
    tx.removed_lanes.borrow_mut().extend(empty);
    Ok(count)
}

/// Returns whether a lane has a job. The counters know about jobs in flight, which no table lists by lane.
fn is_used(connection: &Connection, lane: LaneId) -> Result<bool> {
    Ok(connection
        .prepare_cached(sql!(
            "SELECT 1 FROM counter WHERE lane = ?1 AND tally < {TALLY_RAN} AND n <> 0
             UNION ALL SELECT 1 FROM ready WHERE lane = ?1
             UNION ALL SELECT 1 FROM waiting WHERE lane = ?1
             UNION ALL SELECT 1 FROM done WHERE lane = ?1
             UNION ALL SELECT 1 FROM ended WHERE lane = ?1
             LIMIT 1"
        ))?
        .exists([lane])?)
}

/// Returns the lane of each job, and creates those that do not exist. If there are too many lanes, it writes nothing.
pub fn lanes_of(tx: &Tx, jobs: &[NewJob]) -> Result<Vec<LaneId>> {
    let unknown: HashSet<LaneName> =
        jobs.iter().map(LaneName::of).filter(|name| tx.shared.lanes.id_of(*name).is_none()).collect();
    if !unknown.is_empty() {
        let mut new = 0;
        for name in &unknown {
            new += usize::from(stored_lane(tx, *name)?.is_none());
        }
        check_room(tx, new)?;
    }
    jobs.iter().map(|job| lane_of(tx, LaneName::of(job))).collect()
}

/// Returns the lane with this name, and creates it if it does not exist.
pub fn lane_of(tx: &Tx, name: LaneName) -> Result<LaneId> {
    if let Some(id) = tx.shared.lanes.id_of(name) {
        return Ok(id);
    }
    if let Some(id) = stored_lane(tx, name)? {
        return Ok(id);
    }
    check_room(tx, 1)?;
    let id = tx
        .connection
        .prepare_cached("INSERT INTO lane (queue, type, priority, keyed) VALUES (?, ?, ?, ?) RETURNING id")?
        .query_row((name.queue, name.kind, name.priority.rank(), name.keyed), |row| row.get(0))?;
    tx.add_lane(name.with_id(id));
    Ok(id)
}

/// Returns the lane with this name. This transaction may have created it.
fn stored_lane(tx: &Tx, name: LaneName) -> Result<Option<LaneId>> {
    Ok(tx
        .connection
        .prepare_cached("SELECT id FROM lane WHERE queue = ? AND type = ? AND priority = ? AND keyed = ?")?
        .query_row((name.queue, name.kind, name.priority.rank(), name.keyed), |row| row.get(0))
        .optional()?)
}

fn check_room(tx: &Tx, new: usize) -> Result<()> {
    let max = tx.shared.options.max_lanes;
    if new > 0 && tx.lane_count() + new > max { Err(too_many_lanes(max)) } else { Ok(()) }
}
