//! Reads what a job waits for, for `faena jobs why`.

use faena_domain::{Bucket, JobId, JobState, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{Shared, read};
use crate::{ClaimOwner, JobPosition, Lane, LaneId, Result};

pub fn position(
    connection: &Connection,
    shared: &Shared,
    id: JobId,
    without: &[LaneId],
) -> Result<Option<JobPosition>> {
    let Some((lane, _)) = read::lane_and_options(connection, id)? else { return Ok(None) };
    let mut position = JobPosition { parents: parents(connection, id)?, ..JobPosition::default() };
    if let Some((ready_at, key)) = ready_row(connection, lane, id)? {
        let lane = read::lane(connection, shared, lane)?;
        position.ahead = ahead(connection, shared, &lane, ready_at, id, without)?;
        if let Some(key) = key {
            (position.key_in_flight, position.key_jobs) = in_flight_of_key(connection, key)?;
            position.key_bucket = connection
                .prepare_cached("SELECT tokens, at FROM bucket WHERE key = ?")?
                .query_row([key], |row| Ok(Bucket { tokens: row.get(0)?, at: Timestamp::from_ms(row.get(1)?) }))
                .optional()?;
        }
    } else if read::state_of(connection, id)?.is_some_and(JobState::is_in_flight) {
        position.owner = owner(connection, id)?;
        position.cancel = connection
            .prepare_cached("SELECT at, reason FROM cancel_request WHERE id = ?")?
            .query_row([id.0], |row| Ok((Timestamp::from_ms(row.get(0)?), row.get(1)?)))
            .optional()?;
    }
    Ok(Some(position))
}

fn ready_row(connection: &Connection, lane: LaneId, id: JobId) -> Result<Option<(i64, Option<i64>)>> {
    Ok(connection
        .prepare_cached("SELECT ready_at, key FROM ready INDEXED BY ready_id WHERE lane = ? AND id = ?")?
        .query_row((lane, id.0), |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?)
}

fn parents(connection: &Connection, id: JobId) -> Result<Vec<(JobId, Option<JobState>)>> {
    let parents: Vec<Uuid> = connection
        .prepare_cached("SELECT parent FROM dependency WHERE child = ? ORDER BY parent")?
        .query_map([id.0], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    parents.into_iter().map(JobId).map(|parent| Ok((parent, read::state_of(connection, parent)?))).collect()
}

/// Counts the ready jobs of the queue that come before this one. In each lane, those are the jobs that became ready before a
/// certain time.
fn ahead(
    connection: &Connection,
    shared: &Shared,
    own: &Lane,
    ready_at: i64,
    id: JobId,
    without: &[LaneId],
) -> Result<u64> {
    let claim_order = shared.rules.current().claim_order(&own.queue);
    let score = claim_order.score(own.priority, Timestamp::from_ms(ready_at));
    let mut count = connection.prepare_cached(
        "SELECT count(*) FROM (SELECT 1 FROM ready WHERE lane = ?1 AND (ready_at, id) < (?2, ?3) LIMIT ?4)",
    )?;
    let mut ahead = 0;
    for lane in shared.lanes.all().into_iter().filter(|lane| lane.queue == own.queue && !without.contains(&lane.id)) {
        let before = score - claim_order.score(lane.priority, Timestamp::from_ms(0));
        let left = i64::try_from(JobPosition::MAX_AHEAD - ahead).unwrap_or(0);
        let found: i64 = count.query_row((lane.id, before, id.0, left), |row| row.get(0))?;
        ahead += u64::try_from(found).unwrap_or(0);
        if ahead >= JobPosition::MAX_AHEAD {
            break;
        }
    }
    Ok(ahead)
}

fn in_flight_of_key(connection: &Connection, key: i64) -> Result<(u64, Vec<JobId>)> {
    let count: i64 = connection
        .prepare_cached("SELECT count(*) FROM key_in_flight WHERE key = ?")?
        .query_row([key], |row| row.get(0))?;
    let named = connection
        .prepare_cached("SELECT id FROM key_in_flight WHERE key = ? ORDER BY id LIMIT ?")?
        .query_map((key, JobPosition::MAX_NAMED as i64), |row| row.get(0).map(JobId))?
        .collect::<rusqlite::Result<_>>()?;
    Ok((u64::try_from(count).unwrap_or(0), named))
}

/// Returns the claim of a job and its owner. SQLite: a registered server has the lock on the file, so it is alive.
fn owner(connection: &Connection, id: JobId) -> Result<Option<ClaimOwner>> {
    Ok(connection
        .prepare_cached(
            "SELECT c.claimed_at, n.name, w.deadline FROM claim c
             LEFT JOIN worker w ON w.id = c.owner AND w.ended_at IS NULL
             LEFT JOIN node n ON n.id = coalesce(w.node, c.owner)
             WHERE instr(c.ids, ?1) > 0 ORDER BY c.run DESC LIMIT 1",
        )?
        .query_row([id.0], |row| {
            let server: Option<String> = row.get(1)?;
            let alive = server.as_ref().map(|_| Timestamp::MAX);
            let deadline = row.get::<_, Option<i64>>(2)?.map(Timestamp::from_ms);
            let claimed_at = Timestamp::from_ms(row.get(0)?);
            Ok(ClaimOwner { claimed_at, server, lease_until: alive.or(deadline) })
        })
        .optional()?)
}
