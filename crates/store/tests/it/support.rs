//! What every test needs: a fresh database, builders of jobs, short forms of the store methods, and SQL access to the tables.

mod raw_database;
mod redis_claims;
mod workers;

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use faena_domain::{
    ErrorReason, JobId, JobState, JobView, KeyHash, Limit, LogEvent, LogLine, NewJob, NodeId, Priority, Progress, Rate,
    Scope, Timestamp, WorkerId,
};
use faena_store::{
    CancelOutcome, ClaimRequest, ClaimResult, ClaimedJob, DueResult, Filter, GracePeriods, JobPatch, Lane, LaneId,
    NodeInfo, Owner, Page, QueuePatch, RecoveryCounts, RunEnd, RunOutcome, RunTiming, RunUpdate, RunUpdateKind, Store,
    StoreError, StoreOptions, Submitted, Tally, UpdateResult,
};
use futures_util::FutureExt;

pub use raw_database::{RawDatabase, run_on};
use redis_claims::RedisClaims;

/// One store on its own database, with a node that has joined and a worker.
pub struct Fixture {
    pub store: Arc<dyn Store>,
    pub node: NodeId,
    pub worker: WorkerId,
    /// SQL access to the tables, without the store.
    pub database: RawDatabase,
    pub url: String,
    /// Chooses the jobs of claims, if the tests run again with the queue in Redis.
    redis: Option<Arc<RedisClaims>>,
    /// The time at which a test begins; its times are milliseconds after this time.
    pub start: Timestamp,
}

pub const LEASE_MS: i64 = 30_000;
/// Hash of the session token of every worker, unless a test sets another one.
pub const TOKEN: KeyHash = KeyHash([7; 32]);
pub const GRACE_PERIODS: GracePeriods = GracePeriods { orphan_delay_ms: 0, reconnect_ms: 10_000, silence_ms: 60_000 };

pub async fn on_sqlite(test: impl AsyncFnOnce(&Fixture)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    let fixture =
        Fixture::open(format!("sqlite:{}", path.display()), RawDatabase::Sqlite(path), StoreOptions::default()).await;
    let outcome = fixture.run(test).await;
    fixture.store.close().await;
    drop(folder);
    finish(outcome);
}

pub async fn on_postgres(test: impl AsyncFnOnce(&Fixture)) {
    let scratch = raw_database::ScratchDatabase::create().await;
    let database = RawDatabase::postgres(&scratch.url);
    let fixture = Fixture::open(scratch.url.clone(), database, StoreOptions::default()).await;
    let outcome = fixture.run(test).await;
    fixture.store.close().await;
    scratch.drop().await;
    finish(outcome);
}

/// Runs a test on a new PostgreSQL database that no store has opened yet.
pub async fn on_empty_postgres(test: impl AsyncFnOnce(&str, &RawDatabase)) {
    let scratch = raw_database::ScratchDatabase::create().await;
    let database = RawDatabase::postgres(&scratch.url);
    let outcome = AssertUnwindSafe(test(&scratch.url, &database)).catch_unwind().await;
    scratch.drop().await;
    finish(outcome);
}

fn finish(outcome: Result<(), Box<dyn Any + Send>>) {
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Makes a queue always prefer the higher priority.
pub async fn make_strict(fixture: &Fixture, queue: &str) {
    let patch = QueuePatch { strict: Some(true), ..QueuePatch::default() };
    fixture.store.queue_set(queue, patch, "test", fixture.start).await.unwrap();
}

impl Fixture {
    pub async fn open(url: String, database: RawDatabase, options: StoreOptions) -> Fixture {
        let store = faena_store::open(&url, options).await.unwrap();
        let start = Timestamp::now();
        let node = NodeId::new();
        let info = NodeInfo { id: node, name: "test".into() };
        store.node_join(info, LEASE_MS, start).await.unwrap();
        let redis = RedisClaims::for_store(&url, &store).await;
        Fixture { store, node, worker: WorkerId::new(), database, url, redis, start }
    }

    /// Opens another store on the same database: another node on PostgreSQL, the next process on SQLite.
    pub async fn reopen(&self, options: StoreOptions) -> Fixture {
        if self.store.database_kind() == "sqlite" {
            self.store.close().await;
        }
        Fixture { start: self.start, ..Fixture::open(self.url.clone(), self.database.clone(), options).await }
    }

    /// Runs a test, and then checks that every job is in one table and is counted there, whatever the test did.
    async fn run(&self, test: impl AsyncFnOnce(&Fixture)) -> Result<(), Box<dyn Any + Send>> {
        AssertUnwindSafe(async {
            test(self).await;
            self.database.assert_consistent().await;
        })
        .catch_unwind()
        .await
    }

    pub fn at(&self, ms: i64) -> Timestamp {
        self.start.plus_ms(ms)
    }

    // ---- submitting

    /// Returns a job of this type, created at `ms`.
    pub fn job(&self, kind: &str, ms: i64) -> NewJob {
        NewJob { id: self.id_at(ms), ..NewJob::new(kind) }
    }

    /// Returns an id with exactly this time that is larger than earlier ids of the same time.
    ///
    /// `JobId::at` never goes back in time within a process, but the tests of a process use different times.
    fn id_at(&self, ms: i64) -> JobId {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = u128::from(COUNT.fetch_add(1, Ordering::Relaxed));
        JobId(uuid::Uuid::from_u128(JobId::first_at_ms(self.at(ms).as_ms()).0.as_u128() | 7 << 76 | 2 << 62 | count))
    }

    pub async fn try_submit(&self, jobs: Vec<NewJob>, ms: i64) -> Result<Vec<Submitted>, StoreError> {
        self.store.job_submit(jobs, None, self.at(ms)).await
    }

    pub async fn submit(&self, job: NewJob) -> JobId {
        let now = job.id.created_at();
        self.store.job_submit(vec![job], None, now).await.unwrap().remove(0).id
    }

    pub async fn submit_all(&self, jobs: Vec<NewJob>) -> Vec<JobId> {
        let now = jobs[0].id.created_at();
        self.store.job_submit(jobs, None, now).await.unwrap().into_iter().map(|job| job.id).collect()
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
        self.request_claim(ClaimRequest { owner, lanes, limit, idle_slots: limit, candidates: None }, ms).await.jobs
    }

    async fn request_claim(&self, request: ClaimRequest, ms: i64) -> ClaimResult {
        match &self.redis {
            Some(redis) => redis.claim(&*self.store, request, self.at(ms)).await,
            None => self.store.job_claim(vec![request], self.at(ms)).await.unwrap().remove(0),
        }
    }

    /// Claims from all lanes, and also returns which lanes are limited.
    pub async fn claim_with_limits(&self, limit: usize, ms: i64) -> ClaimResult {
        let request = ClaimRequest {
            owner: Owner::Node(self.node),
            lanes: self.lanes().await,
            limit,
            idle_slots: limit,
            candidates: None,
        };
        self.request_claim(request, ms).await
    }

    /// Sets a concurrency limit, or removes it.
    pub async fn limit(&self, scope: Scope, concurrency: Option<u32>, ms: i64) {
        self.store.limit_set(scope, Limit { concurrency, rate: None }, "test", self.at(ms)).await.unwrap();
    }

    /// Sets a rate limit.
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
    pub async fn submit_and_claim(&self, job: NewJob) -> ClaimedJob {
        let now = job.id.created_at();
        let id = self.submit(job).await;
        let claimed = self.claim_one(now.ms_since(self.start)).await;
        assert_eq!(claimed.id, id);
        claimed
    }

    pub fn run_update(&self, job: &ClaimedJob, kind: RunUpdateKind, ms: i64) -> RunUpdate {
        RunUpdate {
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

    pub async fn report_update(&self, job: &ClaimedJob, kind: RunUpdateKind, ms: i64) -> bool {
        self.try_update(job, kind, ms).await.is_accepted()
    }

    pub async fn try_update(&self, job: &ClaimedJob, kind: RunUpdateKind, ms: i64) -> UpdateResult {
        self.store.run_update(vec![self.run_update(job, kind, ms)], self.at(ms)).await.unwrap().remove(0)
    }

    pub async fn report_start(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.report_update(job, RunUpdateKind::Started, ms).await, "the run owns the job");
    }

    /// Returns the end of a run as the engine reports it: with the log from `queued` on, with `may_have_other_rows`,
    /// and with the claim left open.
    pub fn run_end(&self, job: &ClaimedJob, outcome: RunOutcome, ms: i64) -> RunEnd {
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
            RunOutcome::Released => LogLine::new(at, LogEvent::Released, ""),
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
            may_have_other_rows: true,
            closes_claim: false,
            by_guardian: false,
            timing: RunTiming::default(),
        }
    }

    pub async fn end(&self, job: &ClaimedJob, outcome: RunOutcome, ms: i64) -> bool {
        self.report_end(self.run_end(job, outcome, ms)).await
    }

    pub async fn report_end(&self, end: RunEnd) -> bool {
        let now = end.at;
        self.store.job_end(vec![end], now).await.unwrap()[0]
    }

    pub async fn complete(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, completed(), ms).await, "the run owns the job");
    }

    pub async fn fail(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, failed("no"), ms).await, "the run owns the job");
    }

    pub async fn retry_at(&self, job: &ClaimedJob, due_ms: i64, ms: i64) {
        assert!(self.end(job, self.retry(due_ms), ms).await, "the run owns the job");
    }

    pub async fn release(&self, job: &ClaimedJob, ms: i64) {
        assert!(self.end(job, RunOutcome::Released, ms).await, "the run owns the job");
    }

    pub fn retry(&self, due_ms: i64) -> RunOutcome {
        RunOutcome::Retry { due_at: self.at(due_ms), error: "not now".into(), reason: ErrorReason::Error }
    }

    // ---- time and actions

    /// Expires and promotes due jobs.
    pub async fn promote(&self, ms: i64) -> DueResult {
        let expired = self.store.job_expire(1_000, self.at(ms)).await.unwrap();
        let due = self.store.job_promote(1_000, self.at(ms)).await.unwrap();
        let next_at = due.next_at.into_iter().chain(expired.next_at).min();
        DueResult { expired: expired.expired, more: due.more || expired.more, next_at, ..due }
    }

    pub async fn recover(&self, delay_ms: i64, ms: i64) -> RecoveryCounts {
        let grace_periods = GracePeriods { orphan_delay_ms: delay_ms, ..GRACE_PERIODS };
        self.store.node_recover(grace_periods, self.at(ms)).await.unwrap()
    }

    pub async fn cancel(&self, id: JobId, ms: i64) -> CancelOutcome {
        self.store.job_cancel(id, "not wanted", None, self.at(ms)).await.unwrap()
    }

    pub async fn retry_manually(&self, id: JobId, ms: i64) {
        self.store.job_retry(id, None, self.at(ms)).await.unwrap();
    }

    pub async fn patch(&self, id: JobId, patch: JobPatch, ms: i64) {
        self.store.job_patch(id, patch, None, self.at(ms)).await.unwrap();
    }

    // ---- reading

    pub async fn get(&self, id: JobId) -> JobView {
        self.store.job_get(id).await.unwrap().expect("the job exists")
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

    /// Returns the event names of the execution log, in order.
    pub async fn events(&self, id: JobId) -> Vec<String> {
        self.get(id).await.execution_log.iter().map(|entry| entry.event.as_str().to_owned()).collect()
    }

    pub async fn total(&self, tally: Tally) -> i64 {
        self.store.counts().await.unwrap().total(tally)
    }

    pub async fn list(&self, filter: Filter) -> Vec<JobId> {
        let page = self.store.job_list(&filter, Page::offset(0, 1_000)).await.unwrap();
        assert_eq!(page.total, page.jobs.len() as u64, "the total of {filter:?}");
        page.jobs.into_iter().map(|job| job.id).collect()
    }
}

/// Returns a cutoff for claims made, and workers connected, before this time.
pub fn cutoff(at: faena_domain::Timestamp) -> faena_store::ClaimCutoff {
    faena_store::ClaimCutoff { made_before: at, connected_before: at }
}

pub fn completed() -> RunOutcome {
    RunOutcome::Completed { result: Some("{\"ok\":true}".into()) }
}

pub fn failed(error: &str) -> RunOutcome {
    RunOutcome::Failed { error: error.into(), reason: ErrorReason::Error }
}

pub fn cancelled() -> RunOutcome {
    RunOutcome::Cancelled { cause: "as requested".into() }
}

pub fn message(text: &str) -> RunUpdateKind {
    RunUpdateKind::Message { event: LogEvent::Message, text: text.into() }
}

pub fn step(name: &str, result: &str) -> RunUpdateKind {
    RunUpdateKind::Step { name: name.into(), result: result.into(), total: None }
}

pub fn percent(percentage: f64, message: &str) -> RunUpdateKind {
    RunUpdateKind::Progress(Progress {
        percentage: Some(percentage),
        message: Some(message.into()),
        ..Progress::default()
    })
}

/// Sets options of a job in short form.
pub trait JobBuilder: Sized {
    fn queue(self, queue: &str) -> Self;
    fn priority(self, priority: Priority) -> Self;
    fn retries(self, max_retries: u32) -> Self;
    fn unique(self, key: &str) -> Self;
    /// Sets the `concurrencyKey`.
    fn concurrency_key(self, key: &str) -> Self;
    fn idempotent(self, key: &str, fingerprint: u8) -> Self;
    fn after(self, parents: &[JobId]) -> Self;
    fn run_on_parent_failure(self) -> Self;
    fn scheduled(self, at: Timestamp) -> Self;
    fn expires(self, at: Timestamp) -> Self;
    fn timeout(self, timeout_ms: u64) -> Self;
    fn tag(self, tag: &str) -> Self;
    fn schedule(self, schedule: &str) -> Self;
    fn named(self, name: &str) -> Self;
    fn correlation(self, correlation: &str) -> Self;
}

impl JobBuilder for NewJob {
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

    fn timeout(mut self, timeout_ms: u64) -> Self {
        self.options.timeout_ms = Some(timeout_ms);
        self
    }

    fn unique(mut self, key: &str) -> Self {
        self.options.unique_key = Some(key.into());
        self
    }

    fn concurrency_key(mut self, key: &str) -> Self {
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

    fn run_on_parent_failure(mut self) -> Self {
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

    fn named(mut self, name: &str) -> Self {
        self.options.name = Some(name.into());
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
pub struct SeededRandom(pub u64);

impl SeededRandom {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { all.get(self.below(all.len())) }
    }
}
