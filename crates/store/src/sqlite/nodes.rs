//! Who is alive, and what the dead held.

use faena_domain::{NodeId, Run, Timestamp};
use rusqlite::Connection;

use super::{
    release::release_claims,
    webhooks,
    workers::{detach, live_workers},
    writer::Tx,
};
use crate::sql::sql;
use crate::{GracePeriods, NodeInfo, Recovered, Result, disposition::ReleaseReason, workers::ServerExit};

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

pub fn leave(tx: &Tx, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
    // Its own, and those of the workers inside it.
    let runs: Vec<Run> = tx
        .connection
        .prepare(
            sql!("SELECT run FROM claim WHERE owner = ?1 OR owner IN (SELECT id FROM worker WHERE node = ?1 AND kind = {BUILT_IN_WORKER})
             ORDER BY run"),
        )?
        .query_map([node.0], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let returned = return_claims(tx, &runs, "its server stopped", now)?;
    loop {
        let live = live_workers(tx, "node = ?", &[&node.0])?;
        if live.is_empty() {
            break;
        }
        for worker in live {
            detach(tx, &worker, ServerExit::Stopped, grace_periods, now)?;
        }
    }
    tx.connection.execute("DELETE FROM node WHERE id = ?", [node.0])?;
    webhooks::free(tx, now)?;
    Ok(returned)
}

/// Blocks of this node, and of workers that have been connected to it since before `before`, from before `before`, that it
/// does not know.
pub fn unknown_claims(connection: &Connection, node: NodeId, known: &[Run], before: Timestamp) -> Result<Vec<Run>> {
    let runs: Vec<Run> = connection
        .prepare_cached(
            "SELECT run FROM claim WHERE claimed_at < ?2 AND (owner = ?1 OR owner IN (
                 SELECT id FROM worker WHERE node = ?1 AND ended_at IS NULL AND connected_at < ?2))",
        )?
        .query_map((node.0, before.as_ms()), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    Ok(runs.into_iter().filter(|run| !known.contains(run)).collect())
}

/// What a lost answer handed out: nobody has it.
pub const UNDELIVERED: &str = "nobody heard that it was handed out";

pub fn return_claims(tx: &Tx, runs: &[Run], text: &str, now: Timestamp) -> Result<usize> {
    let freed = release_claims(tx, runs, ReleaseReason::Left { text, worker: None }, now)?;
    Ok(freed.returned + freed.orphaned)
}

/// Frees what nobody holds any more, and lets go the workers of dead servers; a bounded part of each.
pub fn recover(tx: &Tx, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered> {
    // SQLite: the living process is the only one in `node` (the others were removed when it took the file's lock).
    for worker in live_workers(tx, "node IS NOT NULL AND node NOT IN (SELECT id FROM node)", &[])? {
        detach(tx, &worker, ServerExit::Died, grace_periods, now)?;
    }
    webhooks::free(tx, now)?;
    let runs: Vec<Run> = tx
        .connection
        .prepare(&format!("SELECT run FROM claim WHERE {OWNERLESS} ORDER BY run LIMIT 20"))?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let freed = release_claims(tx, &runs, ReleaseReason::Died { delay_ms: grace_periods.orphan_delay_ms }, now)?;
    Ok(Recovered { nodes: usize::from(!runs.is_empty()), ..freed })
}

/// Blocks are found by the absence of their owner, so it does not matter who removed it, or when.
pub const OWNERLESS: &str =
    "owner NOT IN (SELECT id FROM node) AND owner NOT IN (SELECT id FROM worker WHERE ended_at IS NULL)";
