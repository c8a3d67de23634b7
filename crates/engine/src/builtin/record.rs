//! The built-in worker's record among the workers. It has the same life cycle as that of any other worker.

use faena_domain::{Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState};
use faena_store::{StoreError, WorkerEntry, WorkerUpdate};
use parking_lot::Mutex;

use super::kinds;
use crate::{Engine, config::ms};

#[derive(Default)]
pub struct BuiltInRecord(Mutex<Option<Stored>>);

/// What the store knows.
#[derive(Clone, Copy)]
struct Stored {
    id: WorkerId,
    session: i64,
    state: WorkerState,
    updated_at: Timestamp,
}

impl BuiltInRecord {
    /// Registers the built-in worker under a new id. Called on start and after the node lost its lease.
    pub async fn register(&self, engine: &Engine, now: Timestamp) -> Result<(), StoreError> {
        let id = WorkerId::new();
        let mut capabilities: Vec<String> = kinds().into_iter().map(str::to_owned).collect();
        capabilities.sort_unstable();
        let entry = WorkerEntry {
            id,
            key: id.to_string(),
            name: Some(engine.config.node_name.clone()),
            kind: WorkerKind::BuiltIn,
            transport: String::new(),
            node: engine.node_id(),
            state: WorkerState::Ready,
            capabilities: WorkerCapabilities { types: capabilities, queues: Vec::new() },
            concurrency: u32::try_from(engine.config.concurrency).unwrap_or(u32::MAX),
            pool: None,
            deadline: None,
        };
        let admitted = engine.store.worker_admit(entry, now).await?;
        let (id, session) = (admitted.id, admitted.session);
        *self.0.lock() = Some(Stored { id, session, state: WorkerState::Ready, updated_at: now });
        Ok(())
    }

    pub fn id(&self) -> WorkerId {
        self.0.lock().map_or_else(WorkerId::default, |stored| stored.id)
    }

    /// Stores a heartbeat and the current state, if either is due. Returns how many updates were stored.
    pub async fn update(&self, engine: &Engine, now: Timestamp) -> Result<usize, StoreError> {
        let Some(stored) = *self.0.lock() else { return Ok(0) };
        let is_idle = engine.dispatch.in_flight.is_built_in_idle();
        let state = if is_idle { WorkerState::Ready } else { WorkerState::Busy };
        if state == stored.state && now.ms_since(stored.updated_at) < ms(engine.config.worker_heartbeat) {
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
            completed: 0,
            failed: 0,
            breaker: "closed",
        };
        engine.store.worker_update(vec![update], now).await?;
        if let Some(known) = self.0.lock().as_mut().filter(|known| known.id == stored.id) {
            (known.state, known.updated_at) = (state, now);
        }
        Ok(1)
    }
}
