//! Registers nodes, and releases the claims of nodes that stopped or died.

use async_trait::async_trait;
use faena_domain::{NodeId, Run, Timestamp};
use tokio_postgres::Row;

use super::{Postgres, Shared, read, release::release_claims, webhooks, workers::detach};
use crate::{
    ClaimCutoff, GracePeriods, InputView, NodeInfo, NodeReport, NodeStore, Poll, RecoveryCounts, Result,
    disposition::ReleaseReason,
    nodes::{VERSION, inputs_text, read_inputs},
    sql::sql,
    workers::NodeExit,
};

#[async_trait]
impl NodeStore for Postgres {
    async fn shared_time(&self) -> Result<Option<Timestamp>> {
        shared_time(&self.shared).await.map(Some)
    }

    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| join(&self.shared, &node, lease_ms, now)).await
    }

    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| renew(&self.shared, node, lease_ms, now)).await
    }

    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| leave(&self.shared, node, grace_periods, now)).await
    }

    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<RecoveryCounts> {
        self.shared.retrying(|| recover(&self.shared, grace_periods, now)).await
    }

    async fn node_reconcile(
        &self,
        node: NodeId,
        known: Vec<Run>,
        cutoff: ClaimCutoff,
        now: Timestamp,
    ) -> Result<usize> {
        self.shared.retrying(|| reconcile(&self.shared, node, &known, cutoff, now)).await
    }

    async fn metrics_lease(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| metrics_lease(&self.shared, node, lease_ms, now)).await
    }

    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll> {
        self.shared.retrying(|| read::poll(&self.shared, node, now)).await
    }

    async fn node_report(&self, node: NodeId, inputs: Vec<InputView>) -> Result<()> {
        self.shared.retrying(|| report(&self.shared, node, &inputs)).await
    }

    async fn node_reports(&self, now: Timestamp) -> Result<Vec<NodeReport>> {
        self.shared.retrying(|| reports(&self.shared, now)).await
    }
}

/// Returns the time of the database. The query is not repeated after a failure, because a late answer is inaccurate.
async fn shared_time(shared: &Shared) -> Result<Timestamp> {
    let client = shared.client().await?;
    let row = client.query_one("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8", &[]).await;
    client.return_to_pool(row.map(|row| Timestamp::from_ms(row.get(0))).map_err(Into::into))
}

pub async fn join(shared: &Shared, node: &NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let joined = client
        .execute(
            "INSERT INTO faena.node (id, name, started_at, lease_until, seen_at, version)
             VALUES ($1, $2, $3, $4, $3, $5)",
            &[&node.id.0, &node.name, &now.as_ms(), &now.plus_ms(lease_ms).as_ms(), &VERSION],
        )
        .await;
    client.return_to_pool(joined.map(|_| ()).map_err(Into::into))
}

/// Renews the lease of a node. The lease is the node's row, which is deleted before the node is declared dead.
pub async fn renew(shared: &Shared, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
    let client = shared.client().await?;
    let renewed = client
        .execute(
            "UPDATE faena.node SET lease_until = $2, seen_at = $3 WHERE id = $1",
            &[&node.0, &now.plus_ms(lease_ms).as_ms(), &now.as_ms()],
        )
        .await;
    client.return_to_pool(renewed.map(|rows| rows == 1).map_err(Into::into))
}

/// Renews the lease only when half of it is over, so that most calls write nothing.
async fn metrics_lease(shared: &Shared, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
    let client = shared.client().await?;
    let until = now.plus_ms(lease_ms).as_ms();
    let result = async {
        client
            .execute(
                "INSERT INTO faena.metrics_lease AS l (node, until) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE
                 SET node = excluded.node, until = excluded.until
                 WHERE (l.node = $1 AND l.until < $3) OR (l.node <> $1 AND (l.until < $4 OR NOT EXISTS (
                     SELECT FROM faena.node n WHERE n.id = l.node AND n.lease_until >= $4)))",
                &[&node.0, &until, &now.plus_ms(lease_ms / 2).as_ms(), &now.as_ms()],
            )
            .await?;
        Ok(client.query_opt("SELECT FROM faena.metrics_lease WHERE node = $1", &[&node.0]).await?.is_some())
    }
    .await;
    client.return_to_pool(result)
}

pub async fn leave(shared: &Shared, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
    let client = shared.client().await?;
    // Its own claims, and those of the workers inside it.
    let rows = client
        .query(
            sql!(
                "SELECT run FROM faena.claim WHERE owner = $1
                 OR owner IN (SELECT id FROM faena.worker WHERE node = $1 AND kind = {BUILT_IN_WORKER}) ORDER BY run"
            ),
            &[&node.0],
        )
        .await?;
    client.return_to_pool(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let returned = requeue_claims(shared, &runs, "its server stopped", now).await?;
    while detach(shared, Some(node), NodeExit::Stopped, grace_periods, now).await? > 0 {}
    let client = shared.client().await?;
    client.execute("DELETE FROM faena.node WHERE id = $1", &[&node.0]).await?;
    client.return_to_pool(Ok(()))?;
    webhooks::release_abandoned(shared, now).await?;
    Ok(returned)
}

pub async fn reconcile(
    shared: &Shared,
    node: NodeId,
    known: &[Run],
    cutoff: ClaimCutoff,
    now: Timestamp,
) -> Result<usize> {
    let client = shared.client().await?;
    // Workers count only if they have been connected here long enough for the node to know their jobs.
    let rows = client
        .query(
            "SELECT run FROM faena.claim WHERE claimed_at < $2 AND NOT (run = ANY($3)) AND (owner = $1 OR owner IN (
                 SELECT id FROM faena.worker WHERE node = $1 AND ended_at IS NULL AND connected_at < $4))",
            &[&node.0, &cutoff.made_before.as_ms(), &known, &cutoff.connected_before.as_ms()],
        )
        .await?;
    client.return_to_pool(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    requeue_claims(shared, &runs, UNDELIVERED, now).await
}

/// Log text of a job whose claim never reached its worker.
const UNDELIVERED: &str = "the claim did not reach its worker";

async fn requeue_claims(shared: &Shared, runs: &[Run], text: &str, now: Timestamp) -> Result<usize> {
    let released =
        release_claims(shared, runs, ReleaseReason::Left { text, worker: None, was_starting: false }, now).await?;
    Ok(released.returned + released.orphaned)
}

/// Releases claims without an owner, and detaches workers from dead nodes; a bounded number of each.
pub async fn recover(shared: &Shared, grace_periods: GracePeriods, now: Timestamp) -> Result<RecoveryCounts> {
    let client = shared.client().await?;
    let dead = client.execute("DELETE FROM faena.node WHERE lease_until < $1", &[&now.as_ms()]).await?;
    client.return_to_pool(Ok(()))?;
    detach(shared, None, NodeExit::Died, grace_periods, now).await?;
    webhooks::release_abandoned(shared, now).await?;
    let client = shared.client().await?;
    let rows =
        client.query(&format!("SELECT run FROM faena.claim c WHERE {OWNERLESS} ORDER BY run LIMIT 20"), &[]).await?;
    client.return_to_pool(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let released =
        release_claims(shared, &runs, ReleaseReason::Died { delay_ms: grace_periods.orphan_delay_ms }, now).await?;
    Ok(RecoveryCounts { nodes: usize::try_from(dead).unwrap_or(0), ..released })
}

pub async fn report(shared: &Shared, node: NodeId, inputs: &[InputView]) -> Result<()> {
    let client = shared.client().await?;
    let text = inputs_text(inputs);
    let stored = client.execute("UPDATE faena.node SET inputs = $2 WHERE id = $1", &[&node.0, &text]).await;
    client.return_to_pool(stored.map(|_| ()).map_err(Into::into))
}

pub async fn reports(shared: &Shared, now: Timestamp) -> Result<Vec<NodeReport>> {
    let client = shared.client().await?;
    let sql = "SELECT id, name, version, started_at, seen_at, inputs FROM faena.node WHERE lease_until >= $1
               ORDER BY started_at, id";
    let rows = client.query(sql, &[&now.as_ms()]).await;
    let rows = client.return_to_pool(rows.map_err(Into::into))?;
    let report = |row: &Row| NodeReport {
        node: NodeId(row.get(0)),
        name: row.get(1),
        version: row.get(2),
        started_at: Timestamp::from_ms(row.get(3)),
        seen_at: Timestamp::from_ms(row.get(4)),
        inputs: read_inputs(row.get(5)),
    };
    Ok(rows.iter().map(report).collect())
}

/// SQL condition for claims whose owner no longer exists, no matter which node removed the owner, or when.
pub const OWNERLESS: &str = "NOT EXISTS (SELECT FROM faena.node n WHERE n.id = c.owner)
    AND NOT EXISTS (SELECT FROM faena.worker w WHERE w.id = c.owner AND w.ended_at IS NULL)";
