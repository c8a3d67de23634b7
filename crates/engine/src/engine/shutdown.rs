//! Stops the engine: first the inputs that bring in work, then the slots and the reports, and finally releases this
//! node's leases.

use std::time::Duration;

use faena_domain::Timestamp;
use futures_util::future::join_all;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Engine;
use crate::{in_flight::InFlightJob, measure, workers::CloseReason};

/// How long sources and inboxes have to release their locks and close their connections.
const CLOSE_INPUTS: Duration = Duration::from_secs(2);
/// How long handlers have to stop after the grace period.
const STOP_SLOTS: Duration = Duration::from_secs(5);
/// How long the last webhook attempts may take. Another node, or this one after its next start, repeats the others.
const LAST_WEBHOOKS: Duration = Duration::from_secs(3);
/// How long sending the last spans may take.
const LAST_SPANS: Duration = Duration::from_secs(2);
const LAST_REPORTS: Duration = Duration::from_secs(10);
const LEAVE: Duration = Duration::from_secs(5);

impl Engine {
    /// Returns whether `stop` was called: no new job is assigned.
    pub fn is_stopping(&self) -> bool {
        self.loops.intake.stop.is_cancelled()
    }

    /// Returns how many jobs end with this process: those of the built-in worker and of pools. Other workers keep theirs.
    pub fn local_jobs(&self) -> usize {
        let is_local = |job: &InFlightJob| job.connection().is_none_or(|worker| worker.pool.is_some());
        self.dispatch.in_flight.all().iter().filter(|job| is_local(job)).count()
    }

    /// Stops the engine.
    ///
    /// No new jobs start, and jobs that wait for a slot are released immediately. Running jobs may finish within the
    /// grace period, or until `force` is cancelled; after that they are released too, without using an attempt.
    /// Connected workers keep their jobs and connect to another node.
    pub async fn stop(&self, force: CancellationToken) {
        self.loops.intake.stop.cancel();
        self.loops.intake.tasks.close();
        self.loops.intake.tasks.wait().await;
        self.close_inputs().await;
        self.stop_local_workers(force).await;
        if timeout(LAST_REPORTS, self.flush_reports()).await.is_err() {
            tracing::error!("last reports not stored, their jobs will run again");
        }
        self.leave().await;
    }

    /// Releases the locks and connections that bring in work, so that another node can take them.
    async fn close_inputs(&self) {
        let sources = join_all(self.inputs.sources.iter().map(|source| source.close()));
        let inboxes = join_all(self.inputs.inboxes.iter().map(|inbox| inbox.close()));
        let _ = timeout(CLOSE_INPUTS, async { tokio::join!(sources, inboxes) }).await;
    }

    async fn stop_local_workers(&self, force: CancellationToken) {
        let local = &self.local;
        local.drain.cancel();
        local.worker.release_queued();
        local.slots.close();
        tokio::select! {
            _ = async { tokio::join!(local.slots.wait(), local.pools.stop()) } => {}
            () = tokio::time::sleep(self.config.drain_grace) => {
                tracing::warn!(jobs = self.local_jobs(), "grace period is over, jobs released");
            }
            () = force.cancelled() => tracing::warn!(jobs = self.local_jobs(), "forced stop, jobs released"),
        }
        local.pools.kill();
        for job in self.dispatch.in_flight.all().into_iter().filter(|job| !job.is_remote()) {
            // Without a reason the job is released, not cancelled.
            job.cancel.cancel();
        }
        let _ = timeout(STOP_SLOTS, local.slots.wait()).await;
    }

    /// Stores the last reports and webhook results, then stops the loops that did it.
    async fn flush_reports(&self) {
        self.workers.close_all(CloseReason::ServerStopping);
        self.reports.reporter.wait_until_flushed().await;
        let _ = timeout(LAST_WEBHOOKS, self.events.webhooks.wait_until_flushed()).await;
        if let Err(error) = self.local.record.update(self, Timestamp::now()).await {
            tracing::warn!(%error, "last counts of the built-in worker not stored");
        }
        if let Err(error) = self.key_usage.run_once(&*self.store).await {
            tracing::warn!(%error, "last uses of API keys not stored");
        }
        if let Err(error) = measure::record_history(self, Timestamp::now()).await {
            tracing::warn!(%error, "last run times not added to the history");
        }
        if let Some(tracer) = &self.tracer {
            let _ = timeout(LAST_SPANS, tracer.exporter.wait_until_flushed()).await;
        }
        self.loops.outgoing.stop.cancel();
        self.loops.outgoing.tasks.close();
        self.loops.outgoing.tasks.wait().await;
    }

    /// Releases this node's leases, so that other nodes need not wait for them to expire.
    async fn leave(&self) {
        let node = self.node_id();
        self.events.outbox.leave(&*self.store, node).await;
        let left = timeout(LEAVE, self.store.node_leave(node, self.config.grace_periods(), Timestamp::now())).await;
        if let Ok(Err(error)) = left {
            tracing::warn!(%error, "node not unregistered, its lease will expire");
        }
    }
}
