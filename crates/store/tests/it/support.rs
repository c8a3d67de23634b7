//! What every test needs: a fresh database, builders, short forms of the verbs, and access to the tables.

mod ledger;

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use faena_domain::{
    ErrorReason, JobId, JobState, JobView, Limit, LogEvent, LogLine, NewJob, NodeId, Priority, Progress, Rate, Scope,
    Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView,
};
use faena_store::{
    CancelOutcome, ClaimRequest, ClaimResult, ClaimedJob, DueResult, Filter, GracePeriods, JobPatch, Lane, LaneId,
    NodeInfo, NoteKind, Owner, Page, QueuePatch, Recovered, RunEnd, RunNote, RunOutcome, Store, StoreError,
    StoreOptions, Submitted, SweepResult, Tally, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerUpdate,
    WorkerUpdateResult,
};
use futures_util::FutureExt;

pub use ledger::{Ledger, run_on};

/// One store on its own database, with a node that has joined and a worker.
pub struct World {
    pub store: Arc<dyn Store>,
    pub node: NodeId,
    pub worker: WorkerId,
    pub ledger: Ledger,
    pub url: String,
    /// The time at which a test begins; its times are milliseconds from here.
    pub start: Timestamp,
}

pub const LEASE_MS: i64 = 30_000;
pub const GRACE_PERIODS: GracePeriods = GracePeriods { orphan_delay_ms: 0, reconnect_ms: 10_000, silence_ms: 60_000 };

pub async fn on_sqlite(test: impl AsyncFnOnce(&World)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    let world = World::open(format!("sqlite:{}", path.display()), Ledger::Sqlite(path), StoreOptions::default()).await;
    let outcome = world.play(test).await;
    world.store.close().await;
    drop(folder);
    finish(outcome);
}

pub async fn on_postgres(test: impl AsyncFnOnce(&World)) {
    let database = ledger::Database::create().await;
    let world = World::open(database.url.clone(), Ledger::postgres(&database.url), StoreOptions::default()).await;
    let outcome = world.play(test).await;
    world.store.close().await;
    database.drop().await;
    finish(outcome);
}

/// A fresh PostgreSQL database without a store on it yet.
pub async fn on_empty_postgres(test: impl AsyncFnOnce(&str, &Ledger)) {
    let database = ledger::Database::create().await;
    let ledger = Ledger::postgres(&database.url);
    let outcome = AssertUnwindSafe(test(&database.url, &ledger)).catch_unwind().await;
    database.drop().await;
    finish(outcome);
}

fn finish(outcome: Result<(), Box<dyn Any + Send>>) {
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Gives higher priorities of a queue precedence.
pub async fn make_strict(world: &World, queue: &str) {
    let patch = QueuePatch { strict: Some(true), ..QueuePatch::default() };
    world.store.queue_set(queue, patch, "test", world.start).await.unwrap();
}

impl World {
    pub async fn open(url: String, ledger: Ledger, options: StoreOptions) -> World {
        let store = faena_store::open(&url, options).await.unwrap();
        let start = Timestamp::now();
        let node = NodeId::new();
        let info = NodeInfo { id: node, name: "test".into() };
        store.node_join(info, LEASE_MS, start).await.unwrap();
        World { store, node, worker: WorkerId::new(), ledger, url, start }
    }

    /// Another store on the same database: another node on PostgreSQL, the next process on SQLite.
    pub async fn reopen(&self, options: StoreOptions) -> World {
        if self.store.engine() == "sqlite" {
            self.store.close().await;
        }
        World { start: self.start, ..World::open(self.url.clone(), self.ledger.clone(), options).await }
    }

    /// Runs a test, and then checks that every job is in one table and is counted there, whatever the test did.
    async fn play(&self, test: impl AsyncFnOnce(&World)) -> Result<(), Box<dyn Any + Send>> {
        AssertUnwindSafe(async {
            test(self).await;
            self.ledger.prove().await;
        })
        .catch_unwind()
        .await
    }

    pub fn at(&self, ms: i64) -> Timestamp {
        self.start.plus_ms(ms)
    }

    // ---- submitting

    /// A job of this type, created at `ms`.
    pub fn job(&self, kind: &str, ms: i64) -> NewJob {
        NewJob { id: self.id_at(ms), ..NewJob::new(kind) }
    }

    /// An id of exactly this time, larger than those before. `JobId::at` never goes back in time in one process, and
    /// tests of one process use different times.
    fn id_at(&self, ms: i64) -> JobId {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = u128::from(COUNT.fetch_add(1, Ordering::Relaxed));
        JobId(uuid::Uuid::from_u128(JobId::first_at_ms(self.at(ms).as_ms()).0.as_u128() | 7 << 76 | 2 << 62 | count))
    }

    pub async fn try_submit(&self, jobs: Vec<NewJob>, ms: i64) -> Result<Vec<Submitted>, StoreError> {
        self.store.job_submit(jobs, self.at(ms)).await
    }

    pub async fn submit(&self, job: NewJob) -> JobId {
        let now = job.id.created_at();
        self.store.job_submit(vec![job], now).await.unwrap().remove(0).id
    }

    pub async fn submit_all(&self, jobs: Vec<NewJob>) -> Vec<JobId> {
        let now = jobs[0].id.created_at();
        self.store.job_submit(jobs, now).await.unwrap().into_iter().map(|job| job.id).collect()
    }

    // ---- running

    pub async fn lanes(&self) -> Vec<LaneId> {
        self.store.lanes().await.unwrap().into_iter().map(|lane| lane.id).collect()
    }

    pub async fn lane_of(&self, id: JobId) -> Lane {
        let view = self.get(id).await;
        let lanes = self.store.lanes().await.unwrap();
        let keyed = view.concurrency_key.is_some();
        let same = |lane: &Lane| {
            (&lane.queue, &lane.kind, lane.priority, lane.keyed) == (&view.queue, &view.kind, view.priority, keyed)
        };
        lanes.into_iter().find(same).unwrap()
    }

    pub async fn claim(&self, limit: usize, ms: i64) -> Vec<ClaimedJob> {
        self.claim_as(self.node, limit, ms).await
    }

    pub async fn claim_as(&self, node: NodeId, limit: usize, ms: i64) -> Vec<ClaimedJob> {
        self.claim_lanes(node, self.lanes().await, limit, ms).await
    }

    pub async fn claim_lanes(&self, node: NodeId, lanes: Vec<LaneId>, limit: usize, ms: i64) -> Vec<ClaimedJob> {
        self.claim_for(Owner::Node(node), lanes, limit, ms).await
    }

    pub async fn claim_for(&self, owner: Owner, lanes: Vec<LaneId>, limit: usize, ms: i64) -> Vec<ClaimedJob> {
        let ask = ClaimRequest { owner, lanes, limit, at_once: limit };
        let ClaimResult { jobs, .. } = self.store.job_claim(vec![ask], self.at(ms)).await.unwrap().remove(0);
        jobs
    }

    /// Claims from all lanes, and returns the limits too.
    pub async fn claim_whole(&self, limit: usize, ms: i64) -> ClaimResult {
        let ask = ClaimRequest { owner: Owner::Node(self.node), lanes: self.lanes().await, limit, at_once: limit };
        self.store.job_claim(vec![ask], self.at(ms)).await.unwrap().remove(0)
    }

    /// Sets a concurrency limit, or removes it.
    pub async fn limit(&self, scope: Scope, concurrency: Option<u32>, ms: i64) {
        self.store.limit_set(scope, Limit { concurrency, rate: None }, "test", self.at(ms)).await.unwrap();
    }

    pub async fn rate(&self, scope: Scope, count: u32, period_ms: u64, ms: i64) {
        let limit = Limit { concurrency: None, rate: Some(Rate { count, period_ms }) };
        self.store.limit_set(scope, limit, "test", self.at(ms)).await.unwrap();
    }

    pub async fn claim_one(&self, ms: i64) -> ClaimedJob {
        let mut jobs = self.claim(1, ms).await;
        assert_eq!(jobs.len(), 1, "one job is ready at {ms}");
        jobs.remove(0)
    }

    /// Submits and claims one job.
    pub async fn running(&self, job: NewJob) -> ClaimedJob {
        let now = job.id.created_at();
        let id = self.submit(job).await;
        let claimed = self.claim_one(now.ms_since(self.start)).await;
        assert_eq!(claimed.id, id);
        claimed
    }

    pub fn a_note(&self, job: &ClaimedJob, kind: NoteKind, ms: i64) -> RunNote {
        RunNote {
            id: job.id,
            run: job.run,
            lane: job.lane,
            node: self.node,
            worker: self.worker,
            retry_count: job.retry_count,
            ready_at: job.ready_at,
            started_at: self.at(ms),
            at: self.at(ms),
            kind,
        }
    }

    pub async fn note(&self, job: &ClaimedJob, kind: NoteKind, ms: i64) -> bool {
        self.store.job_note(vec![self.a_note(job, kind, ms)], self.at(ms)).await.unwrap()[0]
    }

    pub async fn begin(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.note(job, NoteKind::Started, ms).await, "its run holds the job");
    }

    /// An end as the engine reports it: the log from `queued` on, `on_record`, and the claim left open.
    pub fn an_end(&self, job: &ClaimedJob, outcome: RunOutcome, ms: i64) -> RunEnd {
        let at = self.at(ms);
        let mut lines = vec![
            LogLine::new(job.ready_at, LogEvent::Queued, ""),
            LogLine::new(at, LogEvent::Assigned, ""),
            LogLine::new(at, LogEvent::Started, ""),
        ];
        lines.push(match &outcome {
            RunOutcome::Completed { .. } => LogLine::new(at, LogEvent::Completed, ""),
            RunOutcome::Retry { error, .. } => LogLine::new(at, LogEvent::RetryScheduled, error.clone()),
            RunOutcome::Failed { error, .. } => LogLine::new(at, LogEvent::Failed, error.clone()),
            RunOutcome::Cancelled { cause } => LogLine::new(at, LogEvent::Cancelled, cause.clone()),
            RunOutcome::HandedBack => LogLine::new(at, LogEvent::HandedBack, ""),
        });
        RunEnd {
            id: job.id,
            run: job.run,
            lane: job.lane,
            retry_count: job.retry_count,
            ready_at: job.ready_at,
            worker: self.worker,
            started_at: Some(at),
            at,
            log: LogLine::chunk(&lines),
            outcome,
            on_record: true,
            closes_claim: false,
        }
    }

    pub async fn end(&self, job: &ClaimedJob, outcome: RunOutcome, ms: i64) -> bool {
        self.report_end(self.an_end(job, outcome, ms)).await
    }

    pub async fn report_end(&self, end: RunEnd) -> bool {
        let now = end.at;
        self.store.job_end(vec![end], now).await.unwrap()[0]
    }

    pub async fn complete(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, completed(), ms).await, "its run holds the job");
    }

    pub async fn fail(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, failed("no"), ms).await, "its run holds the job");
    }

    pub async fn retry_at(&self, job: &ClaimedJob, due_ms: i64, ms: i64) {
        assert!(self.end(job, self.retry(due_ms), ms).await, "its run holds the job");
    }

    pub async fn hand_back(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, RunOutcome::HandedBack, ms).await, "its run holds the job");
    }

    pub fn retry(&self, due_ms: i64) -> RunOutcome {
        RunOutcome::Retry { due_at: self.at(due_ms), error: "not now".into(), reason: ErrorReason::Error }
    }

    // ---- workers

    /// A worker with this key, connected to this node by a WebSocket.
    pub fn worker(&self, key: &str) -> WorkerEntry {
        WorkerEntry {
            id: WorkerId::new(),
            key: key.into(),
            name: None,
            kind: WorkerKind::Remote,
            transport: "websocket".into(),
            node: self.node,
            state: WorkerState::Ready,
            capabilities: WorkerCapabilities { types: vec!["*".into()], queues: Vec::new() },
            concurrency: 10,
            pool: None,
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

    /// A worker with this many new jobs in flight.
    pub async fn holding(&self, key: &str, count: usize, ms: i64) -> (WorkerAdmitted, Vec<ClaimedJob>) {
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

    pub async fn lose(&self, worker: &WorkerAdmitted, delay_ms: i64, ms: i64) -> Option<Recovered> {
        let end = WorkerEnd::Lost { reason: "its connection closed".into(), delay_ms };
        self.store.worker_end(worker.id, worker.session, end, self.at(ms)).await.unwrap()
    }

    /// Sweeps workers at `ms`; deletes registrations that ended before `forget_ms`.
    pub async fn sweep(&self, forget_ms: i64, ms: i64) -> SweepResult {
        self.store.worker_sweep(500, self.at(forget_ms), self.at(ms)).await.unwrap()
    }

    pub async fn shown(&self, key: &str) -> WorkerView {
        self.store.worker_get(key).await.unwrap().expect("the worker is there")
    }

    pub async fn orphans(&self, ms: i64) -> bool {
        self.store.poll(self.node, self.at(ms)).await.unwrap().orphans
    }

    // ---- time and actions

    /// Expires and promotes due jobs.
    pub async fn promote(&self, ms: i64) -> DueResult {
        let expired = self.store.job_expire(1_000, self.at(ms)).await.unwrap();
        let due = self.store.job_promote(1_000, self.at(ms)).await.unwrap();
        let next_at = due.next_at.into_iter().chain(expired.next_at).min();
        DueResult { expired: expired.expired, more: due.more || expired.more, next_at, ..due }
    }

    pub async fn recover(&self, delay_ms: i64, ms: i64) -> Recovered {
        let grace_periods = GracePeriods { orphan_delay_ms: delay_ms, ..GRACE_PERIODS };
        self.store.node_recover(grace_periods, self.at(ms)).await.unwrap()
    }

    pub async fn cancel(&self, id: JobId, ms: i64) -> CancelOutcome {
        self.store.job_cancel(id, "not wanted", None, self.at(ms)).await.unwrap()
    }

    pub async fn retry_by_person(&self, id: JobId, ms: i64) {
        self.store.job_retry(id, None, self.at(ms)).await.unwrap();
    }

    pub async fn patch(&self, id: JobId, patch: JobPatch, ms: i64) {
        self.store.job_patch(id, patch, None, self.at(ms)).await.unwrap();
    }

    // ---- reading

    pub async fn get(&self, id: JobId) -> JobView {
        self.store.job_get(id).await.unwrap().expect("the job is there")
    }

    pub async fn state(&self, id: JobId) -> JobState {
        self.get(id).await.status
    }

    pub async fn states<const N: usize>(&self, ids: [JobId; N]) -> [JobState; N] {
        let mut states = [JobState::Pending; N];
        for (state, id) in states.iter_mut().zip(ids) {
            *state = self.state(id).await;
        }
        states
    }

    /// The event names of the execution log, in order.
    pub async fn events(&self, id: JobId) -> Vec<&'static str> {
        self.get(id).await.execution_log.iter().map(|entry| entry.event.as_str()).collect()
    }

    pub async fn total(&self, tally: Tally) -> i64 {
        self.store.counts().await.unwrap().total(tally)
    }

    pub async fn list(&self, filter: Filter) -> Vec<JobId> {
        let page = self.store.job_list(&filter, Page::Offset { offset: 0, limit: 1_000 }).await.unwrap();
        assert_eq!(page.total, page.jobs.len() as u64, "the total of {filter:?}");
        page.jobs.into_iter().map(|job| job.id).collect()
    }
}

pub fn completed() -> RunOutcome {
    RunOutcome::Completed { result: Some("{\"ok\":true}".into()) }
}

pub fn failed(error: &str) -> RunOutcome {
    RunOutcome::Failed { error: error.into(), reason: ErrorReason::Error }
}

pub fn cancelled() -> RunOutcome {
    RunOutcome::Cancelled { cause: "as asked".into() }
}

pub fn step(name: &str, result: &str) -> NoteKind {
    NoteKind::Step { name: name.into(), result: result.into(), total: None }
}

pub fn percent(percentage: f64, message: &str) -> NoteKind {
    NoteKind::Progress(Progress { percentage: Some(percentage), message: Some(message.into()), ..Progress::default() })
}

/// Options in short form, so that a test only says what it is about.
pub trait Build: Sized {
    fn queue(self, queue: &str) -> Self;
    fn priority(self, priority: Priority) -> Self;
    fn retries(self, max_retries: u32) -> Self;
    fn unique(self, key: &str) -> Self;
    /// With this concurrencyKey.
    fn of(self, key: &str) -> Self;
    fn idempotent(self, key: &str, fingerprint: u8) -> Self;
    fn after(self, parents: &[JobId]) -> Self;
    fn runs_anyway(self) -> Self;
    fn scheduled(self, at: Timestamp) -> Self;
    fn expires(self, at: Timestamp) -> Self;
    fn tag(self, tag: &str) -> Self;
    fn schedule(self, schedule: &str) -> Self;
    fn correlation(self, correlation: &str) -> Self;
}

impl Build for NewJob {
    fn queue(self, queue: &str) -> Self {
        NewJob { queue: queue.into(), ..self }
    }

    fn priority(self, priority: Priority) -> Self {
        NewJob { priority, ..self }
    }

    fn retries(mut self, max_retries: u32) -> Self {
        self.options.retry.max_retries = max_retries;
        self
    }

    fn unique(mut self, key: &str) -> Self {
        self.options.unique_key = Some(key.into());
        self
    }

    fn of(mut self, key: &str) -> Self {
        self.options.concurrency_key = Some(key.into());
        self
    }

    fn idempotent(mut self, key: &str, fingerprint: u8) -> Self {
        self.options.idempotency_key = Some(key.into());
        self.fingerprint = Some([fingerprint; 32]);
        self
    }

    fn after(mut self, parents: &[JobId]) -> Self {
        self.options.depends_on = parents.to_vec();
        self
    }

    fn runs_anyway(mut self) -> Self {
        self.options.on_parent_failure = faena_domain::OnParentFailure::Run;
        self
    }

    fn scheduled(mut self, at: Timestamp) -> Self {
        self.options.scheduled_at = Some(at);
        self
    }

    fn expires(mut self, at: Timestamp) -> Self {
        self.options.expires_at = Some(at);
        self
    }

    fn tag(mut self, tag: &str) -> Self {
        self.options.tags.push(tag.into());
        self
    }

    fn schedule(mut self, schedule: &str) -> Self {
        self.options.schedule_id = Some(schedule.into());
        self
    }

    fn correlation(self, correlation: &str) -> Self {
        NewJob { correlation_id: Some(correlation.into()), ..self }
    }
}

/// Random numbers that are the same for the same seed (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.roll() % n as u64).unwrap()
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len())) }
    }
}
