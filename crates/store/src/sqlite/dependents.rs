//! Dependents: jobs that are released, or cancelled, when their parents end.

use faena_domain::{JobId, JobState, LogEvent, LogLine, OnParentFailure, Timestamp};
use uuid::Uuid;

use super::{
    cleanup::clean_up,
    events,
    job_log::add_log_entry,
    read,
    submit::{put_ended_without_run, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    JobExit, LaneId, Result, Signal, Tally,
    dependents::PARENTS_PER_SLICE,
    events::SYSTEM,
    plan::{Deltas, Dequeued, parent_cause},
    sql::sql,
    sql::{CANCELLED, PENDING},
};

/// Releases the jobs that depend on `finished`, or cancels them, and so on down the graph. Returns how many jobs it moved.
///
/// A transaction processes one slice of a large graph. It records the parents of the rest in `unreleased`, and the promoter
/// continues with them.
pub fn release_dependents(tx: &Tx, mut finished: Vec<JobId>, deltas: &mut Deltas, now: Timestamp) -> Result<usize> {
    let mut moved = 0;
    while let Some(parent) = finished.pop() {
        let left = tx.dependents_left.get();
        let mut children: Vec<Uuid> = tx
            .connection
            .prepare_cached("SELECT child FROM dependency WHERE parent = ? LIMIT ?")?
            .query_map((parent.0, left as i64 + 1), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        if children.is_empty() {
            continue;
        }
        if children.len() > left {
            children.truncate(left);
            postpone(tx, parent)?;
        }
        // The server releases or cancels the dependents, whichever actor ended the parent.
        events::set_actor(tx, SYSTEM)?;
        let state = read::state_of(tx.connection, parent)?;
        if state.is_some_and(|state| !state.is_terminal()) {
            // The parent was retried meanwhile, and will release its dependents when it ends again.
            continue;
        }
        for child in children {
            if tx.dependents_left.get() == 0 {
                postpone(tx, parent)?;
                break;
            }
            let ended = parent_ended(tx, JobId(child), parent, state, deltas, now)?;
            tx.dependents_left.set(tx.dependents_left.get().saturating_sub(ended.edges.max(1)));
            moved += usize::from(ended.moved);
            if ended.cancelled {
                finished.push(JobId(child));
            }
        }
    }
    Ok(moved)
}

/// Continues with parents whose dependents did not fit into an earlier transaction. Returns how many dependents it moved, and whether
/// more are left.
pub fn continue_release(tx: &Tx, deltas: &mut Deltas, now: Timestamp) -> Result<(usize, bool)> {
    let parents: Vec<Uuid> = tx
        .connection
        .prepare_cached("SELECT parent FROM unreleased LIMIT ?")?
        .query_map([PARENTS_PER_SLICE], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    if parents.is_empty() {
        return Ok((0, false));
    }
    for parent in &parents {
        tx.connection.prepare_cached("DELETE FROM unreleased WHERE parent = ?")?.execute([parent])?;
    }
    let moved = release_dependents(tx, parents.into_iter().map(JobId).collect(), deltas, now)?;
    let more = tx.connection.prepare_cached("SELECT 1 FROM unreleased LIMIT 1")?.exists([])?;
    Ok((moved, more))
}

/// Leaves the dependents of this parent to the promoter.
fn postpone(tx: &Tx, parent: JobId) -> Result<()> {
    tx.connection.prepare_cached("INSERT OR IGNORE INTO unreleased (parent) VALUES (?)")?.execute([parent.0])?;
    tx.signal(Signal::Waiting);
    Ok(())
}

/// Effect of the end of a parent on a child.
#[derive(Default)]
struct ParentEnded {
    /// The number of deleted edges.
    edges: usize,
    /// The child was released or cancelled.
    moved: bool,
    cancelled: bool,
}

/// Removes one parent of a child. Then cancels the child because of this parent, or releases it if no parent is left.
fn parent_ended(
    tx: &Tx,
    child: JobId,
    parent: JobId,
    state: Option<JobState>,
    deltas: &mut Deltas,
    now: Timestamp,
) -> Result<ParentEnded> {
    let delete_all = |id: JobId| -> Result<usize> {
        Ok(tx.connection.prepare_cached("DELETE FROM dependency WHERE child = ?")?.execute([id.0])?)
    };
    let Some((lane, options)) = read::lane_and_options(tx.connection, child)? else {
        return Ok(ParentEnded { edges: delete_all(child)?, ..ParentEnded::default() });
    };
    let is_satisfied = state == Some(JobState::Completed) || options.on_parent_failure == OnParentFailure::Run;
    if !is_satisfied {
        let edges = delete_all(child)?;
        if !take_blocked(tx, lane, child)? {
            return Ok(ParentEnded { edges, ..ParentEnded::default() });
        }
        let cause = parent_cause(parent, state);
        let log = Dequeued::default().log(now, LogEvent::Cancelled, &cause);
        put_ended_without_run(tx, lane, CANCELLED, child, 0, &cause, "cancelled", log, now)?;
        clean_up(tx, child, JobExit::Finished)?;
        deltas.moved(lane, Tally::Pending, Tally::Cancelled, 1);
        return Ok(ParentEnded { edges, moved: true, cancelled: true });
    }
    let edges = tx
        .connection
        .prepare_cached("DELETE FROM dependency WHERE parent = ? AND child = ?")?
        .execute((parent.0, child.0))?;
    let has_other_parents =
        tx.connection.prepare_cached("SELECT 1 FROM dependency WHERE child = ? LIMIT 1")?.exists([child.0])?;
    let moved = !has_other_parents && take_blocked(tx, lane, child)?;
    if moved {
        add_log_entry(tx, child, None, LogLine::new(now, LogEvent::ParentsDone, ""))?;
        match options.scheduled_at {
            Some(due_at) if due_at > now => put_waiting(tx, lane, PENDING, child, due_at, false, 0)?,
            _ => {
                put_ready(tx, lane, now, child, 0, false)?;
                deltas.moved(lane, Tally::Pending, Tally::Queued, 1);
            }
        }
    }
    Ok(ParentEnded { edges, moved, cancelled: false })
}

fn take_blocked(tx: &Tx, lane: LaneId, child: JobId) -> Result<bool> {
    let taken = tx
        .connection
        .prepare_cached(sql!("DELETE FROM waiting WHERE lane = ? AND state = {PENDING} AND id = ? AND blocked = 1"))?
        .execute((lane, child.0))?;
    Ok(taken == 1)
}
