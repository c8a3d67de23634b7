//! Workers of a fixture: their entries, claims and updates.

use faena_domain::{WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView};
use faena_store::{
    ClaimedJob, Owner, RecoveryCounts, SweepResult, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerUpdate,
    WorkerUpdateResult,
};

use super::{Fixture, TOKEN};

impl Fixture {
    /// Returns the entry of a worker with this key, connected to this node over a WebSocket.
    pub fn worker(&self, key: &str) -> WorkerEntry {
        WorkerEntry {
            id: WorkerId::new(),
            key: key.into(),
            name: None,
            version: None,
            kind: WorkerKind::Remote,
            transport: "websocket".into(),
            node: self.node,
            state: WorkerState::Ready,
            capabilities: WorkerCapabilities { types: vec!["*".into()], queues: Vec::new() },
            concurrency: 10,
            pool: None,
            api_key: None,
            token: TOKEN,
            presented_token: Some(TOKEN),
            deadline: None,
        }
    }

    pub async fn admit(&self, entry: WorkerEntry, ms: i64) -> WorkerAdmitted {
        self.store.worker_admit(entry, self.at(ms)).await.unwrap()
    }

    pub async fn claim_by(&self, worker: &WorkerAdmitted, limit: usize, ms: i64) -> Vec<ClaimedJob> {
        let owner = Owner::Worker { id: worker.id, session: worker.session };
        self.claim_for(owner, self.lanes().await, limit, ms).await
    }

    /// Registers a worker and claims `count` new jobs for it.
    pub async fn worker_with_jobs(&self, key: &str, count: usize, ms: i64) -> (WorkerAdmitted, Vec<ClaimedJob>) {
        let worker = self.admit(self.worker(key), ms).await;
        self.submit_all((0..count).map(|_| self.job("a", ms)).collect()).await;
        let jobs = self.claim_by(&worker, count, ms).await;
        assert_eq!(jobs.len(), count);
        (worker, jobs)
    }

    pub fn worker_update(&self, worker: &WorkerAdmitted, states: &[WorkerState], ms: i64) -> WorkerUpdate {
        let at = self.at(ms);
        WorkerUpdate {
            id: worker.id,
            session: worker.session,
            changes: states.iter().map(|state| WorkerChange { at, state: *state, reason: None }).collect(),
            seen_at: at,
            deadline: None,
            completed: 0,
            failed: 0,
            breaker: "closed",
        }
    }

    pub async fn send_update(&self, update: WorkerUpdate) -> WorkerUpdateResult {
        let now = update.seen_at;
        self.store.worker_update(vec![update], now).await.unwrap()[0]
    }

    /// Ends a worker as lost.
    pub async fn end_as_lost(&self, worker: &WorkerAdmitted, delay_ms: i64, ms: i64) -> Option<RecoveryCounts> {
        let end = WorkerEnd::Lost { reason: "its connection closed".into(), delay_ms };
        self.store.worker_end(worker.id, worker.session, end, self.at(ms)).await.unwrap()
    }

    /// Sweeps workers at `ms`; deletes registrations that ended before `forget_ms`.
    pub async fn sweep(&self, forget_ms: i64, ms: i64) -> SweepResult {
        self.store.worker_sweep(500, self.at(forget_ms), self.at(ms)).await.unwrap()
    }

    pub async fn worker_view(&self, key: &str) -> WorkerView {
        self.store.worker_get(key).await.unwrap().expect("the worker exists")
    }

    pub async fn needs_recovery(&self, ms: i64) -> bool {
        self.store.poll(self.node, self.at(ms)).await.unwrap().needs_recovery
    }
}
