//! This process as a node: joining, renewing its lease, and recovering the jobs of nodes that died.
//!
//! Each node renews its lease. When a lease has expired, any other node recovers the dead node's jobs: those known to have
//! started use an attempt, the others do not. A node that was itself cut off (suspended, or without database) keeps its own
//! lease for one whole period before it declares others dead.
//!
//! Safe to run on all nodes concurrently: recovery deletes the claim first, and only one node can delete it.

use std::{sync::Arc, time::Duration};

use faena_domain::{ClockMeasurement, NodeId, Timestamp};
use faena_store::{ClaimCutoff, GUARDIAN, GracePeriods, NodeInfo, Store, StoreError};
use parking_lot::{Mutex, RwLock};

use crate::{Engine, EngineConfig, EngineError, Round, config::ms, workers::CloseReason};

/// Age from which a claim that is unknown to this process counts as never received, if it was made before the dispatcher's
/// current round.
const LOST_CLAIM: Duration = Duration::from_secs(3);

/// Id of this process as a node. It changes when the node loses its lease. Clones share it.
#[derive(Clone)]
pub struct CurrentNode(Arc<RwLock<NodeId>>);

impl CurrentNode {
    pub fn new(id: NodeId) -> CurrentNode {
        CurrentNode(Arc::new(RwLock::new(id)))
    }

    pub fn id(&self) -> NodeId {
        *self.0.read()
    }

    fn replace(&self, id: NodeId) {
        *self.0.write() = id;
    }
}

/// When this node began to renew its lease without interruption, and when it last renewed it.
#[derive(Default)]
pub struct LeaseHistory(Mutex<Option<(Timestamp, Timestamp)>>);

impl LeaseHistory {
    fn record_renewal(&self, now: Timestamp, lease_ms: i64) {
        let mut history = self.0.lock();
        let since = match *history {
            Some((since, last)) if now.ms_since(last) <= lease_ms => since,
            _ => now,
        };
        *history = Some((since, now));
    }

    /// Returns whether the last renewal is so recent that no other node can have declared this one dead.
    fn is_fresh(&self, now: Timestamp, lease_ms: i64) -> bool {
        matches!(*self.0.lock(), Some((_, last)) if now.ms_since(last) <= lease_ms * 2 / 3)
    }

    fn may_declare_dead(&self, now: Timestamp, lease_ms: i64) -> bool {
        matches!(*self.0.lock(), Some((since, last)) if now.ms_since(since) >= lease_ms && now.ms_since(last) <= lease_ms)
    }
}

/// The lease of this process, which is checked before each job starts.
///
/// A process that was suspended for longer than its lease continues where it was, with jobs that other nodes may have
/// started meanwhile.
pub struct Lease {
    store: Arc<dyn Store>,
    node: CurrentNode,
    pub(crate) history: LeaseHistory,
    lease_ms: i64,
    /// Makes one renewal serve all callers that wait for it.
    renewing: tokio::sync::Mutex<()>,
}

impl Lease {
    pub(crate) fn new(store: Arc<dyn Store>, node: CurrentNode, lease_ms: i64, now: Timestamp) -> Lease {
        let history = LeaseHistory::default();
        // Joining was the first renewal.
        history.record_renewal(now, lease_ms);
        Lease { store, node, history, lease_ms, renewing: tokio::sync::Mutex::default() }
    }

    /// Returns whether this node certainly owns its claims. Renews the lease first if that was too long ago.
    ///
    /// SQLite: the lock on the file is the lease, so no other process can have taken anything.
    pub async fn holds(&self, now: Timestamp) -> bool {
        if !self.store.is_shared() || self.history.is_fresh(now, self.lease_ms) {
            return true;
        }
        let _renewing = self.renewing.lock().await;
        if self.history.is_fresh(now, self.lease_ms) {
            return true;
        }
        match self.store.node_renew(self.node.id(), self.lease_ms, now).await {
            Ok(true) => {
                self.history.record_renewal(now, self.lease_ms);
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::warn!(%error, "node lease not renewed, no job starts until it is");
                false
            }
        }
    }
}

pub async fn join(store: &dyn Store, id: NodeId, config: &EngineConfig, now: Timestamp) -> Result<(), StoreError> {
    let info = NodeInfo { id, name: config.node_name.clone() };
    store.node_join(info, ms(config.node_lease), now).await
}

/// Recovers the jobs of nodes whose lease has expired.
pub async fn recover_dead(
    store: &dyn Store,
    lease_history: &LeaseHistory,
    lease_ms: i64,
    grace_periods: GracePeriods,
    now: Timestamp,
) -> Result<Round, StoreError> {
    // SQLite: a process that owned something before this one is certainly dead.
    if store.is_shared() && !lease_history.may_declare_dead(now, lease_ms) {
        return Ok(Round::default());
    }
    let released = store.node_recover(grace_periods, now).await?;
    let handled = released.orphaned + released.returned;
    if handled > 0 || released.nodes > 0 {
        tracing::warn!(
            actor = GUARDIAN,
            nodes = released.nodes,
            orphaned = released.orphaned,
            returned = released.returned,
            "jobs of dead nodes recovered"
        );
    }
    Ok(Round { handled, more: handled > 0, next_at: None })
}

/// Adjusts the clock of this process to that of a shared database, so that all nodes have the same time.
///
/// A node whose system clock is wrong, or is set while it runs, would declare the others dead or delay what they scheduled.
pub async fn follow_database_clock(store: &dyn Store) -> Result<(), StoreError> {
    let measurement = ClockMeasurement::begin();
    if let Some(time) = store.shared_time().await? {
        measurement.end(time);
    }
    Ok(())
}

/// Renews this node's lease and reports the state of its sources and inboxes. If another node has declared this one
/// dead, drops everything and joins again as a new node.
pub async fn renew_lease(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let lease_ms = ms(engine.config.node_lease);
    if engine.store.node_renew(engine.node_id(), lease_ms, now).await? {
        engine.node.lease.history.record_renewal(now, lease_ms);
        if let Err(error) = follow_database_clock(&*engine.store).await {
            tracing::debug!(%error, "cannot read the database clock");
        }
        engine.report_inputs().await?;
        return Ok(Round::done(1));
    }
    let lost = engine.dispatch.in_flight.drop_all();
    tracing::error!(jobs = lost.len(), "this node was declared dead, joining as a new node");
    engine.workers.drop_all(&engine.dispatch.in_flight, CloseReason::ServerDeclaredDead);
    for job in lost {
        job.request_stop("this node lost its lease", now);
    }
    let id = NodeId::new();
    join(&*engine.store, id, &engine.config, now).await?;
    engine.node.current.replace(id);
    engine.node.lease.history.record_renewal(now, lease_ms);
    engine.inputs.reported.lock().clear();
    if engine.config.roles.worker {
        engine.local.record.register(engine, now).await?;
    }
    Ok(Round::done(1))
}

/// Releases claims of this node that it never received, because the answer of the database was lost.
pub async fn reconcile(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    // Read in this order, so that no claim is missed: when the round of a claim ends, its jobs are in flight, and a job that
    // ends moves from there to the reporter.
    let claiming_since = engine.dispatch.dispatcher.claiming_since();
    let mut known = engine.dispatch.in_flight.runs();
    known.extend(engine.reports.reporter.runs());
    let before = now.plus_ms(-ms(LOST_CLAIM));
    let before = claiming_since.map_or(before, |since| since.min(before));
    let registration = engine.config.database_timeout + LOST_CLAIM;
    let cutoff = ClaimCutoff { made_before: before, connected_before: now.plus_ms(-ms(registration)) };
    let released = engine.store.node_reconcile(engine.node_id(), known, cutoff, now).await?;
    if released > 0 {
        tracing::warn!(jobs = released, "jobs of lost claims released");
    }
    Ok(Round::done(released))
}
