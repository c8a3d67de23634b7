//! Wakes the loops of this node after commits of this node and of other nodes.
//!
//! The store emits a signal after every commit that gives a loop something to do, so no caller of the store has to
//! remember to wake anything. A signal may be lost: the poller finds what it would have announced.

use std::sync::Arc;

use faena_domain::{JobId, LogDetails, LogEvent, Timestamp};
use faena_store::Signal;
use tokio::sync::broadcast::error::RecvError;

use super::Engine;

impl Engine {
    pub(super) fn listen_for_signals(self: &Arc<Engine>) {
        let mut signals = self.store.signals();
        let engine = self.clone();
        let stop = self.loops.intake.stop.clone();
        self.loops.intake.tasks.spawn(async move {
            loop {
                let signal = tokio::select! { () = stop.cancelled() => break, signal = signals.recv() => signal };
                match signal {
                    Ok(signal) => engine.handle_signal(signal).await,
                    Err(RecvError::Lagged(_)) => engine.wake_all().await,
                    Err(RecvError::Closed) => break,
                }
            }
        });
    }

    async fn handle_signal(self: &Arc<Engine>, signal: Signal) {
        match signal {
            Signal::Ready(lane) => self.dispatch.lanes.add(lane),
            Signal::Waiting => self.check_due_times(),
            Signal::Worker(id) => self.workers.request_update(id),
            Signal::Capacity => self.dispatch.lanes.open_limited(),
            Signal::Rules => self.reload_rules().await,
            Signal::ApiKeys => self.reload_api_keys().await,
            Signal::Webhook => self.wakeups.webhooks_changed(),
            Signal::Schedule => self.wakeups.schedules_changed(),
            Signal::TaskDue(at) if !self.task_timer.must_wake_for(at) => {}
            Signal::TaskDue(_) | Signal::TaskJobEnded | Signal::TaskQueue => self.wakeups.tasks_changed(),
            Signal::Event => self.wake_event_loops(),
            Signal::Cancel(id) => {
                if self.dispatch.in_flight.find(id).is_some() {
                    tokio::spawn(stop_cancelled_job(self.clone(), id));
                }
            }
            // The listener's connection to the database was interrupted, so signals of other nodes may have been lost.
            Signal::Missed => self.wake_all().await,
        }
    }

    pub(crate) fn check_due_times(&self) {
        self.guardian.due_checks.check_expired();
        self.wakeups.due_times_changed();
    }

    fn wake_event_loops(&self) {
        self.events.outbox.wake_relays();
        self.wakeups.events_changed();
    }

    /// Wakes every loop that a signal can wake, because signals were lost.
    async fn wake_all(&self) {
        for lane in self.store.lanes().await.unwrap_or_default() {
            self.dispatch.lanes.add(lane.id);
        }
        self.check_due_times();
        self.wakeups.webhooks_changed();
        self.wakeups.schedules_changed();
        self.wakeups.tasks_changed();
        self.wake_event_loops();
        self.reload_rules().await;
        self.reload_api_keys().await;
    }

    /// Reloads the API keys. If that fails now, the poller does it later.
    async fn reload_api_keys(&self) {
        if let Err(error) = self.store.api_keys_load().await {
            tracing::debug!(%error, "API keys not reloaded");
        }
    }

    /// Reloads limits and pauses. If that fails now, the poller does it later.
    async fn reload_rules(&self) {
        if let Err(error) = self.store.rules_load().await {
            tracing::debug!(%error, "rules not reloaded");
        }
        // A changed rule may open the queues of many keys, and the store emits no signal for each of them.
        for lane in self.store.lanes().await.unwrap_or_default().into_iter().filter(|lane| lane.keyed) {
            self.dispatch.lanes.add(lane.id);
        }
        self.dispatch.lanes.open_limited();
        // A higher limit may let queued tasks start.
        self.wakeups.tasks_changed();
    }
}

/// Stops a job of this node whose cancellation was requested, with the reason in the job's log.
async fn stop_cancelled_job(engine: Arc<Engine>, id: JobId) {
    let reason = match engine.store.job_get(id).await {
        Ok(Some(job)) => {
            let request = job.execution_log.iter().rev().find(|entry| entry.event == LogEvent::CancelRequested);
            request.map(|entry| entry.details.clone())
        }
        _ => None,
    };
    let reason = reason.unwrap_or_else(|| LogDetails::CancelledByRequest.to_string());
    engine.request_stop(id, &reason, Timestamp::now());
}
