//! Nodes that are alive, and the claims of dead ones.

use async_trait::async_trait;
use faena_domain::{NodeId, Run, Timestamp};

use super::{Postgres, Shared, read, release::release_claims, webhooks, workers::detach};
use crate::{
    GracePeriods, NodeInfo, NodeStore, Poll, Recovered, Result, disposition::ReleaseReason, sql::sql,
    workers::ServerExit,
};

#[async_trait]
impl NodeStore for Postgres {
    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| join(&self.shared, &node, lease_ms, now)).await
    }

    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| renew(&self.shared, node, lease_ms, now)).await
    }

    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| leave(&self.shared, node, grace_periods, now)).await
    }

    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered> {
        self.shared.retrying(|| recover(&self.shared, grace_periods, now)).await
    }

    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, before: Timestamp, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| reconcile(&self.shared, node, &known, before, now)).await
    }

    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll> {
        self.shared.retrying(|| read::poll(&self.shared, node, now)).await
    }
}

pub async fn join(shared: &Shared, node: &NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let joined = client
        .execute(
            "INSERT INTO faena.node (id, name, started_at, lease_until) VALUES ($1, $2, $3, $4)",
            &[&node.id.0, &node.name, &now.as_ms(), &now.plus_ms(lease_ms).as_ms()],
        )
        .await;
    client.keep(joined.map(|_| ()).map_err(Into::into))
}

/// The row itself is the lease: declaring a node dead deletes it first.
pub async fn renew(shared: &Shared, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
    let client = shared.client().await?;
    let renewed = client
        .execute("UPDATE faena.node SET lease_until = $2 WHERE id = $1", &[&node.0, &now.plus_ms(lease_ms).as_ms()])
        .await;
    client.keep(renewed.map(|rows| rows == 1).map_err(Into::into))
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
    client.keep(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let returned = return_claims(shared, &runs, "its server stopped", now).await?;
    while detach(shared, Some(node), ServerExit::Stopped, grace_periods, now).await? > 0 {}
    let client = shared.client().await?;
    client.execute("DELETE FROM faena.node WHERE id = $1", &[&node.0]).await?;
    client.keep(Ok(()))?;
    webhooks::free(shared, now).await?;
    Ok(returned)
}

pub async fn reconcile(
    shared: &Shared,
    node: NodeId,
    known: &[Run],
    before: Timestamp,
    now: Timestamp,
) -> Result<usize> {
    let client = shared.client().await?;
    // Workers count only if they have been connected here long enough for the node to know their jobs.
    let rows = client
        .query(
            "SELECT run FROM faena.claim WHERE claimed_at < $2 AND NOT (run = ANY($3)) AND (owner = $1 OR owner IN (
                 SELECT id FROM faena.worker WHERE node = $1 AND ended_at IS NULL AND connected_at < $2))",
            &[&node.0, &before.as_ms(), &known],
        )
        .await?;
    client.keep(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    return_claims(shared, &runs, UNDELIVERED, now).await
}

/// Log text of a job whose claim never reached its worker.
const UNDELIVERED: &str = "the claim did not reach its worker";

async fn return_claims(shared: &Shared, runs: &[Run], text: &str, now: Timestamp) -> Result<usize> {
    let freed = release_claims(shared, runs, ReleaseReason::Left { text, worker: None }, now).await?;
    Ok(freed.returned + freed.orphaned)
}

/// Releases claims without an owner, and detaches workers from dead servers; a bounded number of each.
pub async fn recover(shared: &Shared, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered> {
    let client = shared.client().await?;
    let dead = client.execute("DELETE FROM faena.node WHERE lease_until < $1", &[&now.as_ms()]).await?;
    client.keep(Ok(()))?;
    detach(shared, None, ServerExit::Died, grace_periods, now).await?;
    webhooks::free(shared, now).await?;
    let client = shared.client().await?;
    let rows =
        client.query(&format!("SELECT run FROM faena.claim b WHERE {OWNERLESS} ORDER BY run LIMIT 20"), &[]).await?;
    client.keep(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let freed =
        release_claims(shared, &runs, ReleaseReason::Died { delay_ms: grace_periods.orphan_delay_ms }, now).await?;
    Ok(Recovered { nodes: usize::try_from(dead).unwrap_or(0), ..freed })
}

/// Claims are found by the absence of their owner, so it does not matter which node removed it, or when.
pub const OWNERLESS: &str = "NOT EXISTS (SELECT FROM faena.node n WHERE n.id = b.owner)
    AND NOT EXISTS (SELECT FROM faena.worker w WHERE w.id = b.owner AND w.ended_at IS NULL)";
