//! The built-in worker's own entry among the workers: it has the same life cycle as all others.

use faena_domain::{Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState};
use faena_store::{StoreError, WorkerEntry, WorkerUpdate};
use parking_lot::Mutex;

use super::kinds;
use crate::Engine;

#[derive(Default)]
pub struct BuiltIn(Mutex<Option<Entry>>);

#[derive(Clone, Copy)]
struct Entry {
    id: WorkerId,
    session: i64,
    state: WorkerState,
    told_at: Timestamp,
}

impl BuiltIn {
    /// Begins a life. After the node was taken for dead, another one.
    pub async fn admit(&self, engine: &Engine, now: Timestamp) -> Result<(), StoreError> {
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
        *self.0.lock() = Some(Entry { id, session, state: WorkerState::Ready, told_at: now });
        Ok(())
    }

    pub fn id(&self) -> WorkerId {
        self.0.lock().map_or_else(WorkerId::default, |entry| entry.id)
    }

    /// Writes down that it lives, and whether it has something to do. Answers how much there was to tell.
    pub async fn tell(&self, engine: &Engine, now: Timestamp) -> Result<usize, StoreError> {
        let Some(entry) = *self.0.lock() else { return Ok(0) };
        let state = if engine.in_flight.is_idle_here() { WorkerState::Ready } else { WorkerState::Busy };
        let beat_ms = crate::config::ms(engine.config.worker_heartbeat);
        if state == entry.state && now.ms_since(entry.told_at) < beat_ms {
            return Ok(0);
        }
        let changes =
            if state == entry.state { Vec::new() } else { vec![WorkerChange { at: now, state, reason: None }] };
        let news = WorkerUpdate {
            id: entry.id,
            session: entry.session,
            changes,
            seen_at: now,
            deadline: None,
            completed: 0,
            failed: 0,
            breaker: "closed",
        };
        engine.store.worker_update(vec![news], now).await?;
        if let Some(known) = self.0.lock().as_mut().filter(|known| known.id == entry.id) {
            (known.state, known.told_at) = (state, now);
        }
        Ok(1)
    }
}
