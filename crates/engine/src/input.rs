//! What sources and inboxes share: they store the job of a message once, wait during an outage, and report their state.

mod outage;

use std::sync::atomic::{AtomicU64, Ordering};

use faena_domain::{FieldError, NewJob, Timestamp};
use faena_store::{InputKind, InputState, InputView, NodeReport, Store, StoreError};
use parking_lot::Mutex;

use crate::{Bus, Engine};

pub(crate) use outage::Outage;

/// Health of a source or inbox, updated by its loop.
#[derive(Default)]
pub(crate) struct InputHealth(Mutex<HealthState>);

#[derive(Clone, Default)]
struct HealthState {
    down: Option<(Timestamp, String)>,
    backlog: Option<Backlog>,
}

/// What waits in a source or inbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Backlog {
    pub pending: u64,
    pub oldest_at: Option<Timestamp>,
}

impl InputHealth {
    pub fn set_outage(&self, outage: &Outage) {
        self.0.lock().down = outage.status();
    }

    /// Sets the backlog. `None`: another node has the lock, so the backlog is not known here.
    pub fn set_backlog(&self, backlog: Option<Backlog>) {
        self.0.lock().backlog = backlog;
    }

    /// Returns the state of the source or inbox `name`. The name begins with the kind and a colon, which are left out.
    pub fn view<const N: usize>(
        &self,
        kind: InputKind,
        name: &str,
        processed: [(&'static str, &AtomicU64); N],
    ) -> InputView {
        let HealthState { down, backlog } = self.0.lock().clone();
        let (down_since, down_reason) = down.unzip();
        InputView {
            name: name.split_once(':').map_or(name, |(_, name)| name).to_owned(),
            kind,
            state: if down_since.is_some() { InputState::Down } else { InputState::Up },
            down_since,
            down_reason,
            pending: backlog.map(|backlog| backlog.pending),
            oldest_pending_at: backlog.and_then(|backlog| backlog.oldest_at),
            processed: processed.map(|(outcome, count)| (outcome.to_owned(), count.load(Ordering::Relaxed))).into(),
        }
    }
}

impl Engine {
    /// Returns the state of the sources and inboxes that this node runs.
    pub fn input_views(&self) -> Vec<InputView> {
        if !self.config.roles.engine {
            return Vec::new();
        }
        let sources = self.inputs.sources.iter().map(|source| source.view());
        sources.chain(self.inputs.inboxes.iter().map(|inbox| inbox.view())).collect()
    }

    /// Returns the state of the sources and inboxes of every live node. That of other nodes may be some seconds old.
    pub async fn input_reports(&self, now: Timestamp) -> Result<Vec<NodeReport>, StoreError> {
        let mut reports = self.store.node_reports(now).await?;
        // A node that has just lost its lease is not in the list until it joins again.
        if let Some(own) = reports.iter_mut().find(|report| report.node == self.node_id()) {
            own.inputs = self.input_views();
        }
        Ok(reports)
    }

    /// Stores the state of this node's sources and inboxes for the other nodes, if it has changed.
    pub(crate) async fn report_inputs(&self) -> Result<(), StoreError> {
        let inputs = self.input_views();
        if !self.store.is_shared() || inputs == *self.inputs.reported.lock() {
            return Ok(());
        }
        self.store.node_report(self.node_id(), inputs.clone()).await?;
        *self.inputs.reported.lock() = inputs;
        Ok(())
    }
}

/// Result of submitting the job of a message.
#[derive(Debug)]
pub(crate) enum Submission {
    Stored,
    /// The message was processed before.
    Duplicate,
    /// The message can never become a job.
    Rejected(String),
    /// The database does not accept it now.
    Deferred(StoreError),
}

/// Stores the job of a message once, however often the message is delivered.
pub(crate) async fn submit_once(
    store: &dyn Store,
    bus: &Bus,
    consumer: &str,
    message: &str,
    job: NewJob,
    now: Timestamp,
) -> Submission {
    match store.inbox_submit(consumer, message, vec![job], now).await {
        Ok(Some(stored)) => {
            for job in stored {
                bus.changed(job.id, job.status, None, job.created_at);
            }
            Submission::Stored
        }
        Ok(None) => Submission::Duplicate,
        Err(StoreError::Invalid(errors)) => Submission::Rejected(FieldError::join(&errors)),
        Err(
            rejection @ (StoreError::Conflict { .. } | StoreError::NotFound(_) | StoreError::InvalidTransition { .. }),
        ) => Submission::Rejected(rejection.to_string()),
        Err(error) => Submission::Deferred(error),
    }
}
