//! Registers nodes, and releases the claims of nodes that stopped or died.

use async_trait::async_trait;
use faena_domain::{NodeId, Run, Timestamp};
use rusqlite::Connection;

use super::{
    Sqlite, read,
    release::release_claims,
    webhooks,
    workers::{detach, live_workers},
    writer::Tx,
};
use crate::{
    ClaimCutoff, GracePeriods, InputView, NodeInfo, NodeReport, NodeStore, Poll, RecoveryCounts, Result,
    disposition::ReleaseReason,
    nodes::{VERSION, inputs_text, read_inputs},
    sql::sql,
    workers::NodeExit,
};

#[async_trait]
impl NodeStore for Sqlite {
    async fn shared_time(&self) -> Result<Option<Timestamp>> {
        Ok(None)
    }

    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| join(tx, &node, lease_ms, now)).await
    }

    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        // SQLite: the lock on the file is the lease. While this process has it, no other process can take its jobs, so
        // nothing is written.
        let _ = lease_ms;
        self.read(move |connection, _| is_known(connection, node, now)).await
    }

    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
        self.writer.call(move |tx| leave(tx, node, grace_periods, now)).await
    }

    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<RecoveryCounts> {
        self.writer.call(move |tx| recover(tx, grace_periods, now)).await
    }

    async fn node_reconcile(
        &self,
        node: NodeId,
        known: Vec<Run>,
        cutoff: ClaimCutoff,
        now: Timestamp,
    ) -> Result<usize> {
        // SQLite: a claim is lost only if the response with its jobs was lost, which is rare. So a read looks for lost claims first,
        // and the writer is usually not needed.
        let lost = self.read(move |connection, _| unknown_claims(connection, node, &known, cutoff)).await?;
        if lost.is_empty() {
            return Ok(0);
        }
        self.writer.call(move |tx| requeue_claims(tx, &lost, UNDELIVERED, now)).await
    }

    async fn metrics_lease(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        // SQLite: there is one node, so it always has the lease.
        let _ = (node, lease_ms, now);
        Ok(true)
    }

    async fn poll(&self, node: NodeId, _now: Timestamp) -> Result<Poll> {
        self.read(move |connection, _| read::poll(connection, node)).await
    }

    async fn node_report(&self, node: NodeId, inputs: Vec<InputView>) -> Result<()> {
        self.writer.call(move |tx| report(tx, node, &inputs)).await
    }

    async fn node_reports(&self, now: Timestamp) -> Result<Vec<NodeReport>> {
        self.read(move |connection, _| reports(connection, now)).await
    }
}

pub fn join(tx: &Tx, node: &NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
    tx.connection.execute(
        "INSERT INTO node (id, name, started_at, lease_until, seen_at, version) VALUES (?1, ?2, ?3, ?4, ?3, ?5)",
        (node.id.0, &node.name, now.as_ms(), now.plus_ms(lease_ms).as_ms(), VERSION),
    )?;
    Ok(())
}

pub fn is_known(connection: &Connection, node: NodeId, _now: Timestamp) -> Result<bool> {
    Ok(connection.prepare_cached("SELECT 1 FROM node WHERE id = ?")?.exists([node.0])?)
}

pub fn leave(tx: &Tx, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
    // The claims of the node itself and of its built-in worker.
    let runs: Vec<Run> = tx
        .connection
        .prepare(
            sql!("SELECT run FROM claim WHERE owner = ?1 OR owner IN (SELECT id FROM worker WHERE node = ?1 AND kind = {BUILT_IN_WORKER})
             ORDER BY run"),
        )?
        .query_map([node.0], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let returned = requeue_claims(tx, &runs, "its server stopped", now)?;
    // `live_workers` returns a bounded number per call.
    loop {
        let live = live_workers(tx, "node = ?", &[&node.0])?;
        if live.is_empty() {
            break;
        }
        for worker in live {
            detach(tx, &worker, NodeExit::Stopped, grace_periods, now)?;
        }
    }
    tx.connection.execute("DELETE FROM node WHERE id = ?", [node.0])?;
    webhooks::release_abandoned(tx, now)?;
    Ok(returned)
}

/// Returns the claims before the cutoff that are not in `known`, of this node and of workers connected to it.
pub fn unknown_claims(connection: &Connection, node: NodeId, known: &[Run], cutoff: ClaimCutoff) -> Result<Vec<Run>> {
    let runs: Vec<Run> = connection
        .prepare_cached(
            "SELECT run FROM claim WHERE claimed_at < ?2 AND (owner = ?1 OR owner IN (
                 SELECT id FROM worker WHERE node = ?1 AND ended_at IS NULL AND connected_at < ?3))",
        )?
        .query_map((node.0, cutoff.made_before.as_ms(), cutoff.connected_before.as_ms()), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    Ok(runs.into_iter().filter(|run| !known.contains(run)).collect())
}

/// Log text of a job whose claim never reached its worker.
pub const UNDELIVERED: &str = "the claim did not reach its worker";

pub fn requeue_claims(tx: &Tx, runs: &[Run], text: &str, now: Timestamp) -> Result<usize> {
    let released = release_claims(tx, runs, ReleaseReason::Left { text, worker: None, was_starting: false }, now)?;
    Ok(released.returned + released.orphaned)
}

/// Releases claims without an owner, and detaches workers from dead nodes; a bounded number of each.
pub fn recover(tx: &Tx, grace_periods: GracePeriods, now: Timestamp) -> Result<RecoveryCounts> {
    // SQLite: the table `node` contains only the running process; opening the file removed all earlier rows.
    for worker in live_workers(tx, "node IS NOT NULL AND node NOT IN (SELECT id FROM node)", &[])? {
        detach(tx, &worker, NodeExit::Died, grace_periods, now)?;
    }
    webhooks::release_abandoned(tx, now)?;
    let runs: Vec<Run> = tx
        .connection
        .prepare(&format!("SELECT run FROM claim WHERE {OWNERLESS} ORDER BY run LIMIT 20"))?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let released = release_claims(tx, &runs, ReleaseReason::Died { delay_ms: grace_periods.orphan_delay_ms }, now)?;
    Ok(RecoveryCounts { nodes: usize::from(!runs.is_empty()), ..released })
}

pub fn report(tx: &Tx, node: NodeId, inputs: &[InputView]) -> Result<()> {
    tx.connection.execute("UPDATE node SET inputs = ? WHERE id = ?", (inputs_text(inputs), node.0))?;
    Ok(())
}

pub fn reports(connection: &Connection, now: Timestamp) -> Result<Vec<NodeReport>> {
    let sql = "SELECT id, name, version, started_at, inputs FROM node ORDER BY started_at, id";
    let mut statement = connection.prepare_cached(sql)?;
    let rows = statement.query_map([], |row| {
        let inputs: String = row.get(4)?;
        Ok(NodeReport {
            node: NodeId(row.get(0)?),
            name: row.get(1)?,
            version: row.get(2)?,
            started_at: Timestamp::from_ms(row.get(3)?),
            // SQLite: the table contains only the running process, whose lease is the lock on the file.
            seen_at: now,
            inputs: read_inputs(&inputs),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// SQL condition for claims whose owner no longer exists, no matter which node removed the owner, or when.
pub const OWNERLESS: &str =
    "owner NOT IN (SELECT id FROM node) AND owner NOT IN (SELECT id FROM worker WHERE ended_at IS NULL)";
