//! The record of the built-in worker in the list of workers. It has the same life cycle as the record of any other worker.

use faena_domain::{
    SecretText, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView,
};
use faena_store::{StoreError, WorkerEntry, WorkerUpdate};
use parking_lot::Mutex;

use super::kinds;
use crate::{Engine, config::ms};

#[derive(Default)]
pub struct BuiltInRecord(Mutex<Option<Stored>>);

/// The registration as the store knows it.
#[derive(Clone, Copy)]
struct Stored {
    id: WorkerId,
    session: i64,
    state: WorkerState,
    since: Timestamp,
    updated_at: Timestamp,
    /// Completed and failed runs of this process before this registration.
    before: (u64, u64),
    /// Completed and failed runs of this process that the store has counted, including those before this registration.
    counted: (u64, u64),
}

impl BuiltInRecord {
    /// Registers the built-in worker under a new id. Called on start and after the node lost its lease.
    pub async fn register(&self, engine: &Engine, now: Timestamp) -> Result<(), StoreError> {
        let id = WorkerId::new();
        let mut capabilities: Vec<String> = kinds(&engine.config).into_iter().map(str::to_owned).collect();
        capabilities.sort_unstable();
        let entry = WorkerEntry {
            id,
            key: id.to_string(),
            name: Some(engine.config.node_name.clone()),
            version: Some(env!("CARGO_PKG_VERSION").into()),
            kind: WorkerKind::BuiltIn,
            transport: String::new(),
            node: engine.node_id(),
            state: WorkerState::Ready,
            capabilities: WorkerCapabilities { types: capabilities, queues: Vec::new() },
            concurrency: u32::try_from(engine.config.concurrency).unwrap_or(u32::MAX),
            pool: None,
            api_key: None,
            // Nothing resumes it: the token is not kept.
            token: SecretText::session_token(rand::random()).hash(),
            presented_token: None,
            deadline: None,
        };
        let admitted = engine.store.worker_admit(entry, now).await?;
        let (id, session) = (admitted.id, admitted.session);
        let before = engine.local.worker.ends.totals();
        let state = WorkerState::Ready;
        let stored = Stored { id, session, state, since: now, updated_at: now, before, counted: before };
        engine.measures.workers.record_registration(admitted.was, true, now);
        *self.0.lock() = Some(stored);
        Ok(())
    }

    pub fn id(&self) -> WorkerId {
        self.0.lock().map_or_else(WorkerId::default, |stored| stored.id)
    }

    /// Stores the state, the counts and a heartbeat, if the state or the counts have changed or a heartbeat is due.
    /// Returns how many updates were stored.
    ///
    /// A run that ends does not wake the loop that calls this, so the counts of many runs are stored together.
    pub async fn update(&self, engine: &Engine, now: Timestamp) -> Result<usize, StoreError> {
        let Some(stored) = *self.0.lock() else { return Ok(0) };
        let (state, counts) = (current_state(engine), engine.local.worker.ends.totals());
        let is_heartbeat_due = now.ms_since(stored.updated_at) >= ms(engine.config.worker_heartbeat);
        if state == stored.state && counts == stored.counted && !is_heartbeat_due {
            return Ok(0);
        }
        let changes =
            if state == stored.state { Vec::new() } else { vec![WorkerChange { at: now, state, reason: None }] };
        let update = WorkerUpdate {
            id: stored.id,
            session: stored.session,
            changes,
            seen_at: now,
            deadline: None,
            completed: counts.0 - stored.counted.0,
            failed: counts.1 - stored.counted.1,
            breaker: "closed",
        };
        engine.store.worker_update(vec![update], now).await?;
        if let Some(known) = self.0.lock().as_mut().filter(|known| known.id == stored.id) {
            if state != stored.state {
                engine.measures.workers.observe(stored.state, stored.since, now);
                known.since = now;
            }
            (known.state, known.updated_at, known.counted) = (state, now, counts);
        }
        Ok(1)
    }

    /// Brings the view of this process's built-in worker up to date: the stored values may be older.
    pub fn refresh(&self, engine: &Engine, view: &mut WorkerView, now: Timestamp) {
        let Some(stored) = self.0.lock().filter(|stored| stored.id.to_string() == view.registration_id) else { return };
        if view.ended_at.is_some() {
            return;
        }
        if view.state.is_operational() {
            view.state = current_state(engine);
            view.category = view.state.category().as_str().to_owned();
        }
        let (completed, failed) = engine.local.worker.ends.totals();
        (view.completed, view.failed) = (completed - stored.before.0, failed - stored.before.1);
        view.last_seen_at = now;
    }
}

fn current_state(engine: &Engine) -> WorkerState {
    if engine.dispatch.in_flight.is_built_in_idle() { WorkerState::Ready } else { WorkerState::Busy }
}
