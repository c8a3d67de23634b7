//! Who is alive, and what the dead held.

use faena_domain::{ErrorReason, JobId, JobState, LogEvent, LogLine, NodeId, Run, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{
    claim::block_jobs,
    end::{ended_as, forget, tell_children},
    read,
    submit::{apply, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    LaneId, NodeInfo, Recovered, Result, Tally,
    plan::Deltas,
    types::{CANCELLED, FAILED, RETRYING, state_code},
};

pub fn join(tx: &Tx, node: &NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
    tx.connection.execute(
        "INSERT INTO node (id, name, started_at, lease_until) VALUES (?, ?, ?, ?)",
        (node.id.0, &node.name, now.as_ms(), now.plus_ms(lease_ms).as_ms()),
    )?;
    Ok(())
}

pub fn is_known(connection: &Connection, node: NodeId, _now: Timestamp) -> Result<bool> {
    Ok(connection.prepare_cached("SELECT 1 FROM node WHERE id = ?")?.exists([node.0])?)
}

pub fn leave(tx: &Tx, node: NodeId, now: Timestamp) -> Result<usize> {
    let runs: Vec<Run> = tx
        .connection
        .prepare("SELECT run FROM block WHERE node = ?")?
        .query_map([node.0], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let returned = give_back(tx, &runs, now)?;
    tx.connection.execute("DELETE FROM node WHERE id = ?", [node.0])?;
    Ok(returned)
}

/// Blocks of this node from before `before` that it does not know.
pub fn unknown_blocks(connection: &Connection, node: NodeId, known: &[Run], before: Timestamp) -> Result<Vec<Run>> {
    let runs: Vec<Run> = connection
        .prepare_cached("SELECT run FROM block WHERE node = ? AND claimed_at < ?")?
        .query_map((node.0, before.as_ms()), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    Ok(runs.into_iter().filter(|run| !known.contains(run)).collect())
}

pub fn give_back(tx: &Tx, runs: &[Run], now: Timestamp) -> Result<usize> {
    let mut returned = 0;
    for run in runs {
        let freed = free_block(tx, *run, Why::Left, now)?;
        returned += freed.returned + freed.orphaned;
    }
    Ok(returned)
}

pub fn recover(tx: &Tx, delay_ms: i64, now: Timestamp) -> Result<Recovered> {
    // SQLite: the living process is the only one in `node` (the others were removed when it took the file's lock).
    let runs: Vec<Run> = tx
        .connection
        .prepare("SELECT run FROM block WHERE node NOT IN (SELECT id FROM node) ORDER BY run LIMIT 20")?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let mut all = Recovered::default();
    for run in runs {
        let freed = free_block(tx, run, Why::Died { delay_ms }, now)?;
        all.orphaned += freed.orphaned;
        all.returned += freed.returned;
        all.nodes = 1;
    }
    Ok(all)
}

#[derive(Clone, Copy)]
enum Why {
    /// It said goodbye: nothing costs a try.
    Left,
    Died {
        delay_ms: i64,
    },
}

struct Lost {
    id: JobId,
    lane: LaneId,
    retry_count: u32,
    run: Run,
    claimed_at: Timestamp,
    ready_at: Timestamp,
    started_at: Option<Timestamp>,
    worker: Option<Uuid>,
}

/// Takes the block away first, so that a late report finds none, then puts each of its jobs where it belongs.
fn free_block(tx: &Tx, run: Run, why: Why, now: Timestamp) -> Result<Recovered> {
    let (claimed_at, first_ready_at, ids, retries): (i64, i64, Vec<u8>, Option<Vec<u8>>) = tx
        .connection
        .prepare_cached("DELETE FROM block WHERE run = ? RETURNING claimed_at, first_ready_at, ids, retries")?
        .query_row([run], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?;
    let mut freed = Recovered::default();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    for (id, retry_count) in block_jobs(&ids, retries.as_deref()) {
        let Some((lane, options)) = read::lane_and_options(tx.connection, id)? else { continue };
        if ended_as(tx, lane, id, run)?.is_some() {
            continue;
        }
        let running: Option<(i64, Uuid, i64)> = tx
            .connection
            .prepare_cached("SELECT started_at, worker, ready_at FROM running WHERE id = ? AND run = ?")?
            .query_row((id.0, run), |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
            .optional()?;
        let cancel: Option<String> = tx
            .connection
            .prepare_cached("SELECT reason FROM cancel WHERE id = ?")?
            .query_row([id.0], |r| r.get(0))
            .optional()?;
        let lost = Lost {
            id,
            lane,
            retry_count,
            run,
            claimed_at: Timestamp::from_ms(claimed_at),
            ready_at: Timestamp::from_ms(running.map_or(first_ready_at, |(_, _, at)| at)).max(id.created_at()),
            started_at: running.map(|(at, _, _)| Timestamp::from_ms(at)),
            worker: running.map(|(_, worker, _)| worker),
        };
        let to = match (why, cancel) {
            (_, Some(reason)) => {
                put_lost_ended(tx, &lost, CANCELLED, &reason, "cancelled", LogEvent::Cancelled, now)?;
                finished.push(id);
                Tally::Cancelled
            }
            (Why::Died { delay_ms }, None) if running.is_some() => {
                freed.orphaned += 1;
                let reason = ErrorReason::Orphaned.as_str();
                if retry_count < options.retry.max_retries {
                    let log = lost.log(&[
                        LogLine::new(now, LogEvent::Orphaned, LOST),
                        LogLine::new(now, LogEvent::RetryScheduled, format!("in {delay_ms} ms")),
                    ]);
                    put_lost_attempt(tx, &lost, RETRYING, Some(LOST), Some(reason), log, now)?;
                    put_waiting(tx, lane, RETRYING, id, now.plus_ms(delay_ms), false, retry_count + 1)?;
                    Tally::Retrying
                } else {
                    put_lost_ended(tx, &lost, FAILED, LOST, reason, LogEvent::Orphaned, now)?;
                    finished.push(id);
                    Tally::Failed
                }
            }
            (why, None) => {
                freed.returned += 1;
                let died = matches!(why, Why::Died { .. });
                let (event, text) = if died {
                    (LogEvent::Recovered, "its server died before it is known to have started")
                } else {
                    (LogEvent::HandedBack, "its server stopped")
                };
                let log = lost.log(&[LogLine::new(now, event, text)]);
                put_lost_attempt(tx, &lost, state_code(JobState::Queued), None, None, log, now)?;
                put_ready(tx, lane, Timestamp::from_ms(first_ready_at), id, retry_count, died)?;
                Tally::Queued
            }
        };
        deltas.moved(lane, Tally::Held, to, 1);
        forget(tx, id, matches!(to, Tally::Cancelled | Tally::Failed))?;
    }
    tell_children(tx, finished, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(freed)
}

const LOST: &str = "the server that ran it died";

impl Lost {
    fn log(&self, last: &[LogLine]) -> String {
        let mut lines = vec![
            LogLine::new(self.ready_at, LogEvent::Queued, ""),
            LogLine::new(self.claimed_at, LogEvent::Assigned, ""),
        ];
        if let Some(started_at) = self.started_at {
            lines.push(LogLine::new(started_at, LogEvent::Started, ""));
        }
        lines.extend_from_slice(last);
        LogLine::chunk(&lines)
    }
}

fn put_lost_attempt(
    tx: &Tx,
    lost: &Lost,
    state: i16,
    error: Option<&str>,
    reason: Option<&str>,
    log: String,
    now: Timestamp,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            lost.id.0,
            lost.run,
            state,
            lost.retry_count,
            now.as_ms(),
            lost.started_at.map(Timestamp::as_ms),
            lost.worker,
            error,
            reason,
            log,
        ))?;
    Ok(())
}

fn put_lost_ended(
    tx: &Tx,
    lost: &Lost,
    state: i16,
    error: &str,
    reason: &str,
    event: LogEvent,
    now: Timestamp,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO ended (lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            lost.lane,
            state,
            lost.id.0,
            now.as_ms(),
            lost.run,
            lost.retry_count,
            lost.started_at.map(Timestamp::as_ms),
            lost.worker,
            error,
            reason,
            lost.log(&[LogLine::new(now, event, error)]),
        ))?;
    Ok(())
}
