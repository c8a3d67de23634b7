//! Processes what is due: waiting jobs become ready, expired jobs fail, old jobs are deleted.

use faena_domain::{ErrorReason, JobId, JobState, LogEvent, Timestamp};
use rusqlite::Connection;
use uuid::Uuid;

use super::{
    audit,
    change::{dequeue, remove, schedule_recheck},
    cleanup::clean_up,
    dependents::{continue_release, release_dependents},
    read, schedules,
    submit::{apply, put_ended_without_run, put_ready},
    webhooks,
    writer::Tx,
};
use crate::{
    DueResult, JobExit, LaneId, QueueChange, Result, Retention, Tally,
    dependents::EDGES_PER_CHECK,
    jobs::state_of_code,
    plan::{Deltas, Dequeued, no_handler},
    sql::{CANCELLED, FAILED},
};

pub fn promote(tx: &Tx, limit: usize, now: Timestamp) -> Result<DueResult> {
    let mut due = DueResult::default();
    let mut deltas = Deltas::default();
    let rows: Vec<(LaneId, i16, Uuid, i64, bool, u32)> = tx
        .connection
        .prepare_cached(
            "SELECT lane, state, id, due_at, blocked, retry_count FROM waiting WHERE due_at <= ? ORDER BY due_at, id LIMIT ?",
        )?
        .query_map((now.as_ms(), limit as i64), |r| {
            Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    let (released, more) = continue_release(tx, &mut deltas, now)?;
    due.unblocked = released;
    due.more = more || rows.len() == limit;
    let (mut ended, mut checked) = (Vec::new(), 0);
    for (lane, state, id, due_at, blocked, retry_count) in rows {
        let id = JobId(id);
        if blocked {
            if checked >= EDGES_PER_CHECK {
                due.more = true;
                continue;
            }
            let (parents, ended_now) = ended_parents(tx, lane, id, now)?;
            checked += parents;
            ended.extend(ended_now);
            continue;
        }
        tx.connection
            .prepare_cached("DELETE FROM waiting WHERE lane = ? AND state = ? AND id = ?")?
            .execute((lane, state, id.0))?;
        put_ready(tx, lane, Timestamp::from_ms(due_at), id, retry_count, false)?;
        deltas.moved(lane, Tally::of(state_of_code(state)), Tally::Queued, 1);
        due.promoted += 1;
    }
    due.unblocked += release_dependents(tx, ended, &mut deltas, now)?;
    apply(tx, deltas);
    due.next_at = read::next_due_at(tx.connection)?;
    Ok(due)
}

pub fn expire(tx: &Tx, limit: usize, now: Timestamp) -> Result<DueResult> {
    let mut deltas = Deltas::default();
    let mut expired = Vec::new();
    let rows: Vec<(i64, Uuid)> = tx
        .connection
        .prepare_cached("SELECT expires_at, id FROM expiry WHERE expires_at <= ? ORDER BY expires_at, id LIMIT ?")?
        .query_map((now.as_ms(), limit as i64), |r| Ok((r.get(0)?, r.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let more = rows.len() == limit;
    for (expires_at, id) in rows {
        let id = JobId(id);
        tx.connection
            .prepare_cached("DELETE FROM expiry WHERE expires_at = ? AND id = ?")?
            .execute((expires_at, id.0))?;
        let Some(state) = read::state_of(tx.connection, id)? else { continue };
        if state.is_in_flight() || state.is_terminal() {
            continue;
        }
        let Some((lane, _)) = read::lane_and_options(tx.connection, id)? else { continue };
        let dequeued = dequeue(tx, lane, id)?;
        let error = format!("expired at {}", Timestamp::from_ms(expires_at));
        let reason = ErrorReason::Expired.as_str();
        let log = dequeued.log(now, LogEvent::Expired, &error);
        put_ended_without_run(tx, lane, FAILED, id, dequeued.retry_count, &error, reason, log, now)?;
        clean_up(tx, id, JobExit::Finished)?;
        deltas.moved(lane, Tally::of(state), Tally::Failed, 1);
        deltas.timed_out(lane, ErrorReason::Expired);
        expired.push(id);
    }
    let count = expired.len();
    release_dependents(tx, expired, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(DueResult { expired: count, more, next_at: read::next_expiry_at(tx.connection)?, ..DueResult::default() })
}

/// Fails jobs that have been ready for too long without a worker that can run them.
pub fn fail_unhandled(tx: &Tx, lanes: &[LaneId], before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
    let mut deltas = Deltas::default();
    let mut failed = Vec::new();
    for lane in lanes {
        let Some(known) = tx.shared.lanes.get(*lane) else { continue };
        let left = limit.saturating_sub(failed.len());
        let rows: Vec<(i64, Uuid, u32)> = tx
            .connection
            .prepare_cached(
                "SELECT ready_at, id, retry_count FROM ready WHERE lane = ? AND ready_at < ? ORDER BY ready_at, id LIMIT ?",
            )?
            .query_map((lane, before.as_ms(), left as i64), |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?
            .collect::<rusqlite::Result<_>>()?;
        let error = no_handler(&known);
        let reason = ErrorReason::NoHandler.as_str();
        for (ready_at, id, retry_count) in rows {
            let id = JobId(id);
            tx.connection
                .prepare_cached("DELETE FROM ready WHERE lane = ? AND ready_at = ? AND id = ?")?
                .execute((lane, ready_at, id.0))?;
            tx.queue_changed(QueueChange::left(*lane, id));
            let dequeued = Dequeued { retry_count, ready_at: Some(Timestamp::from_ms(ready_at)) };
            let log = dequeued.log(now, LogEvent::Failed, &error);
            put_ended_without_run(tx, *lane, FAILED, id, retry_count, &error, reason, log, now)?;
            clean_up(tx, id, JobExit::Finished)?;
            deltas.moved(*lane, Tally::Queued, Tally::Failed, 1);
            failed.push(id);
        }
    }
    let count = failed.len();
    release_dependents(tx, failed, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(count)
}

/// Returns how many parents a job waits for and which of them have ended without releasing it. Schedules the next check
/// of the parents.
fn ended_parents(tx: &Tx, lane: LaneId, id: JobId, now: Timestamp) -> Result<(usize, Vec<JobId>)> {
    schedule_recheck(tx, lane, id, now)?;
    let parents: Vec<Uuid> = tx
        .connection
        .prepare_cached("SELECT parent FROM dependency WHERE child = ?")?
        .query_map([id.0], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let (count, mut ended) = (parents.len(), Vec::new());
    for parent in parents.into_iter().map(JobId) {
        if read::state_of(tx.connection, parent)?.is_none_or(JobState::is_terminal) {
            ended.push(parent);
        }
    }
    Ok((count, ended))
}

/// Returns up to `limit` finished jobs that are older than their retention.
pub fn old_jobs(
    connection: &Connection,
    retention: &Retention,
    limit: usize,
    now: Timestamp,
) -> Result<Vec<(LaneId, Tally, JobId)>> {
    let mut old = Vec::new();
    for ((lane, tally), n) in read::counts(connection)?.by_lane {
        let (keep_ms, sql, state) = match tally {
            Tally::Completed => (retention.completed_ms, DONE, None),
            Tally::Failed => (retention.failed_ms, ENDED, Some(FAILED)),
            Tally::Cancelled => (retention.cancelled_ms, ENDED, Some(CANCELLED)),
            _ => continue,
        };
        let left = limit.saturating_sub(old.len());
        if left == 0 {
            break;
        }
        if n <= 0 {
            continue;
        }
        let cutoff = now.plus_ms(-keep_ms).as_ms();
        // The id contains the creation time, so the oldest jobs come first in their lane.
        let bound = JobId::first_at_ms(cutoff).0;
        let mut statement = connection.prepare_cached(sql)?;
        let id = |row: &rusqlite::Row| row.get::<_, Uuid>(0);
        let ids: rusqlite::Result<Vec<Uuid>> = match state {
            None => statement.query_map((lane, bound, cutoff, left as i64), id)?.collect(),
            Some(state) => statement.query_map((lane, bound, cutoff, left as i64, state), id)?.collect(),
        };
        old.extend(ids?.into_iter().map(|id| (lane, tally, JobId(id))));
    }
    Ok(old)
}

pub fn prune(
    tx: &Tx,
    old: Vec<(LaneId, Tally, JobId)>,
    retention: &Retention,
    limit: usize,
    now: Timestamp,
) -> Result<usize> {
    let mut deltas = Deltas::default();
    for (lane, tally, id) in &old {
        // It may have been retried or deleted since it was found.
        if read::state_of(tx.connection, *id)?.map(Tally::of) == Some(*tally) {
            remove(tx, *lane, *id)?;
            deltas.removed(*lane, *tally, 1);
        }
    }
    apply(tx, deltas);
    webhooks::prune(tx, retention, limit, now)?;
    schedules::prune(tx, now.plus_ms(-retention.longest_ms()), limit)?;
    delete_obsolete_cancel_requests(tx, now)?;
    audit::prune(tx, now.plus_ms(-retention.audit_ms))?;
    Ok(old.len())
}

/// Deletes cancel requests of jobs that ended before the worker noticed.
fn delete_obsolete_cancel_requests(tx: &Tx, now: Timestamp) -> Result<()> {
    let old: Vec<Uuid> = tx
        .connection
        .prepare_cached("SELECT id FROM cancel_request WHERE at < ?")?
        .query_map([now.plus_ms(-3_600_000).as_ms()], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    for id in old {
        if !read::state_of(tx.connection, JobId(id))?.is_some_and(JobState::is_in_flight) {
            tx.connection.prepare_cached("DELETE FROM cancel_request WHERE id = ?")?.execute([id])?;
        }
    }
    Ok(())
}

const DONE: &str = "SELECT id FROM done WHERE lane = ?1 AND id < ?2 AND finished_at < ?3 ORDER BY id LIMIT ?4";
const ENDED: &str =
    "SELECT id FROM ended WHERE lane = ?1 AND state = ?5 AND id < ?2 AND finished_at < ?3 ORDER BY id LIMIT ?4";
