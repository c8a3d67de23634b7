//! The store in PostgreSQL, which many nodes can share.
//!
//! Busy methods go through batchers: calls that arrive while a transaction runs share the next one. Reports about the
//! same run always go through the same batcher, so they keep their order.

mod api_keys;
mod audit;
mod batch;
mod bulk;
mod candidates;
mod change;
pub mod claim;
mod cleanup;
mod complete;
pub mod connect;
mod dead_letters;
mod dependents;
pub mod doctor;
mod due;
pub mod end;
pub mod events;
mod graph;
mod history;
mod hosts;
mod inbox;
mod job_log;
mod jobs;
pub mod key_queues;
mod lanes;
pub mod limited_claim;
mod list;
mod machines;
mod nodes;
mod notify;
mod outbox;
mod outbox_dlq;
mod position;
mod queue;
mod read;
mod release;
mod rules;
mod run_updates;
pub mod schedules;
mod search;
mod submit;
mod submit_rows;
mod task_creates;
mod task_keys;
mod task_limits;
mod task_lists;
pub mod task_writes;
pub mod tasks;
pub mod transfer;
mod usage;
mod webhooks;
mod worker_reads;
mod workers;

use std::{
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use deadpool_postgres::{Object, Pool};
use faena_domain::Timestamp;
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::{
    Cause, QueueFeed, Result, Signal, Store, StoreError, StoreOptions, StoredJobLimits, UpdateResult,
    admit::RoundRobin, api_keys::ApiKeyCache, lanes::LaneCache, rules::RuleCache, task_meter::TaskMeter,
    tasks::MachineCache,
};
use batch::Batcher;
use claim::Cursors;
use hosts::Hosts;
use notify::Notifier;

pub struct Postgres {
    shared: Arc<Shared>,
    submits: Batcher<submit::Call>,
    reports: Vec<Batcher<end::Call>>,
    creates: Batcher<task_creates::CreateCall>,
    /// Each applies the inputs of some of the tasks.
    tasks: Vec<Batcher<tasks::Call>>,
    stop: CancellationToken,
}

pub struct Shared {
    pool: Pool,
    hosts: Hosts,
    /// Whether the last write that needed space found the disk full.
    is_full: AtomicBool,
    lanes: LaneCache,
    rules: RuleCache,
    /// A digest of the settings as the last poll saw them.
    rules_seen: Mutex<Option<String>>,
    api_keys: ApiKeyCache,
    machines: MachineCache,
    task_meter: TaskMeter,
    /// A digest of the API keys as the last poll saw them.
    api_keys_seen: Mutex<Option<String>>,
    options: StoreOptions,
    cursors: Cursors,
    round_robin: RoundRobin,
    /// Whether a subscription to events exists.
    events_on: AtomicBool,
    queue_feed: QueueFeed,
    notifier: Notifier,
    /// The first shard of this process, chosen at random. Processes with different shards change different counter rows, so that
    /// their writers do not wait for each other.
    first_shard: i16,
}

/// Where changes of jobs are counted, and how much may be stored about each job.
#[derive(Clone, Copy)]
pub struct Writes {
    pub shard: i16,
    pub limits: StoredJobLimits,
}

/// Number of connections that store submissions.
const SUBMITTERS: usize = 2;
/// Number of connections that store the reports of workers.
const REPORTERS: usize = 2;
/// Number of connections that apply inputs to tasks: while one waits for its commit, the other plans.
const TASK_WRITERS: usize = 2;
/// Maximum number of jobs with a concurrency key in one call: the end of each takes a lock on its key, and by default
/// PostgreSQL has room for 6 400 locks of all sessions.
const MAX_KEYED_PER_CALL: usize = 250;

/// Reports of one call to a batcher, with their indexes in the list of all reports.
struct Part<T> {
    indexes: Vec<usize>,
    reports: Vec<T>,
    keyed: usize,
}

impl Postgres {
    pub async fn open(url: &str, options: StoreOptions) -> Result<Postgres> {
        let hosts = Hosts::new(url)?;
        let pool = connect::pool(url, &hosts, options.timeout())?;
        connect::prepare_schema(&pool, &options).await?;
        let stop = CancellationToken::new();
        let notifier = Notifier::start(&hosts, options.listen_url.as_deref(), pool.clone(), stop.clone())?;
        let first_shard = i16::try_from(uuid::Uuid::new_v4().as_u128() % 16).unwrap_or(0) * 16;
        let shared = Arc::new(Shared {
            pool,
            hosts,
            is_full: AtomicBool::default(),
            lanes: LaneCache::default(),
            rules: RuleCache::default(),
            rules_seen: Mutex::default(),
            api_keys: ApiKeyCache::default(),
            machines: MachineCache::default(),
            task_meter: TaskMeter::default(),
            api_keys_seen: Mutex::default(),
            options,
            cursors: Cursors::default(),
            round_robin: RoundRobin::default(),
            events_on: AtomicBool::default(),
            queue_feed: QueueFeed::default(),
            notifier,
            first_shard,
        });
        shared.load_lanes().await?;
        rules::load(&shared).await?;
        api_keys::load(&shared).await?;
        events::refresh(&shared).await?;
        due::make_partitions(&shared, Timestamp::now()).await?;
        let submits = Batcher::start(shared.clone(), SUBMITTERS, 0, |shared, shard, calls| {
            Box::pin(submit::run(shared, shard, calls))
        });
        let reports = (0..REPORTERS)
            .map(|n| {
                let shard = SUBMITTERS + n;
                Batcher::start(shared.clone(), 1, shard, |shared, shard, calls| {
                    Box::pin(end::run(shared, shard, calls))
                })
            })
            .collect();
        let creates =
            Batcher::start(shared.clone(), 1, 0, |shared, _, calls| Box::pin(task_creates::run_creates(shared, calls)));
        let tasks = (0..TASK_WRITERS)
            .map(|_| Batcher::start(shared.clone(), 1, 0, |shared, _, calls| Box::pin(tasks::run(shared, calls))))
            .collect();
        Ok(Postgres { shared, submits, reports, creates, tasks, stop })
    }
}

impl Shared {
    /// Returns a connection for reads and single statements.
    pub async fn client(&self) -> Result<PooledClient> {
        let object = self.pool.get().await.map_err(|error| StoreError::Unavailable(connect::no_connection(error)))?;
        Ok(PooledClient(Some(object)))
    }

    pub async fn begin(&self) -> Result<PooledClient> {
        let client = self.client().await?;
        client.batch_execute("BEGIN; SET LOCAL jit = off").await?;
        Ok(client)
    }

    /// Repeats `work` when it conflicts with another transaction, for no longer than a call may take.
    pub async fn retrying<T, F: Future<Output = Result<T>>>(&self, work: impl Fn() -> F) -> Result<T> {
        let limit = self.options.timeout();
        let deadline = tokio::time::Instant::now() + limit;
        let mut retries = 0;
        loop {
            let result = tokio::time::timeout_at(deadline, work()).await;
            match result.unwrap_or_else(|_| Err(StoreError::timed_out(limit))) {
                Err(error @ StoreError::Contended(_)) if retries < 10 => {
                    retries += 1;
                    if error.is_lane_reclaimed() {
                        self.load_lanes().await?;
                    }
                    tokio::time::sleep(Duration::from_millis(retries * 3)).await;
                }
                Err(StoreError::Contended(text)) => return Err(StoreError::Unavailable(text)),
                Err(StoreError::Unavailable(cause)) => {
                    self.record_failure(&cause);
                    return Err(StoreError::Unavailable(cause));
                }
                result => return result,
            }
        }
    }

    /// Disconnects from a server that has become read-only, and remembers a full disk until `ping` finds space again.
    fn record_failure(&self, cause: &Cause) {
        if cause.is_read_only() {
            self.hosts.close_read_only();
        }
        if cause.is_disk_full() {
            self.is_full.store(true, Ordering::Relaxed);
        }
    }

    pub fn shard(&self, writer: usize) -> i16 {
        self.first_shard + i16::try_from(writer).unwrap_or(0)
    }

    /// Returns the shard of everything that does not go through a batcher.
    pub fn own_shard(&self) -> i16 {
        self.shard(SUBMITTERS + REPORTERS)
    }

    /// Returns the shard of bulk actions, whose transactions are longer.
    pub fn bulk_shard(&self) -> i16 {
        self.shard(SUBMITTERS + REPORTERS + 1)
    }

    /// Returns the shard and limits for writes that do not go through a batcher.
    pub fn own_writes(&self) -> Writes {
        Writes { shard: self.own_shard(), limits: self.options.job_limits }
    }

    /// Returns the shard and limits for the writes of bulk actions.
    pub fn bulk_writes(&self) -> Writes {
        Writes { shard: self.bulk_shard(), limits: self.options.job_limits }
    }

    pub async fn load_lanes(&self) -> Result<()> {
        let client = self.client().await?;
        let lanes = read::lanes(&client).await;
        let (lanes, retired) = client.return_to_pool(lanes)?;
        self.lanes.replace(lanes, &retired);
        Ok(())
    }

    pub fn signal(&self, signals: impl IntoIterator<Item = Signal>) {
        for signal in signals {
            self.notifier.send(signal);
        }
        self.signal_events();
    }

    /// Signals that events may have been recorded.
    pub fn signal_events(&self) {
        if self.events_on.load(Ordering::Relaxed) {
            self.notifier.send(Signal::Event);
        }
    }
}

/// A connection borrowed from the pool.
///
/// It goes back to the pool only by `return_to_pool` or `end`. Dropped before that (an error, a timeout, a caller that
/// disconnected) it is closed, so that no other call inherits an unfinished transaction.
pub struct PooledClient(Option<Object>);

impl PooledClient {
    /// Returns the connection to the pool if it is still good.
    pub fn return_to_pool<T>(mut self, result: Result<T>) -> Result<T> {
        if matches!(result, Ok(_) | Err(StoreError::NotFound(_) | StoreError::Invalid(_) | StoreError::Conflict { .. }))
        {
            drop(self.0.take());
        }
        result
    }

    /// Ends a transaction: commits on success, rolls back on failure.
    pub async fn end<T>(mut self, result: Result<T>) -> Result<T> {
        let word = match &result {
            Ok(_) => "COMMIT",
            Err(StoreError::Unavailable(_)) => return result,
            Err(_) => "ROLLBACK",
        };
        self.batch_execute(word).await?;
        drop(self.0.take());
        result
    }
}

impl std::ops::Deref for PooledClient {
    type Target = Object;

    fn deref(&self) -> &Object {
        self.0.as_ref().expect("a pooled client has its connection until it is returned")
    }
}

impl Drop for PooledClient {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}

#[async_trait]
impl Store for Postgres {
    async fn ping(&self) -> Result<()> {
        self.shared.retrying(|| read::ping(&self.shared)).await?;
        if self.shared.is_full.load(Ordering::Relaxed) {
            self.shared.retrying(|| read::check_space(&self.shared)).await?;
            self.shared.is_full.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    fn signals(&self) -> broadcast::Receiver<Signal> {
        self.shared.notifier.subscribe()
    }

    fn database_kind(&self) -> &'static str {
        "postgres"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn signal_problem(&self) -> Option<String> {
        self.shared.notifier.problem()
    }

    async fn storage_failure(&self) -> String {
        // PostgreSQL stops by itself when its disk fails.
        std::future::pending().await
    }

    async fn close(&self) {
        self.submits.stop().await;
        self.creates.stop().await;
        for tasks in &self.tasks {
            tasks.stop().await;
        }
        for reporter in &self.reports {
            reporter.stop().await;
        }
        self.stop.cancel();
        self.shared.pool.close();
    }
}

impl Postgres {
    /// Sends each report to the batcher of its run, and returns the answers in order.
    ///
    /// A part is sent when the one before it is stored: the report that closes a claim is the last of its run.
    async fn report<T>(
        &self,
        reports: Vec<T>,
        run_of: impl Fn(&T) -> i64,
        is_keyed: impl Fn(&T) -> bool,
        work: impl Fn(Vec<T>) -> end::Work,
        now: Timestamp,
    ) -> Result<Vec<UpdateResult>> {
        let count = reports.len();
        let mut batches: Vec<Vec<Part<T>>> = (0..REPORTERS).map(|_| Vec::new()).collect();
        for (at, report) in reports.into_iter().enumerate() {
            let batch = &mut batches[usize::try_from(run_of(&report)).unwrap_or(0) % REPORTERS];
            if batch.last().is_none_or(|part| part.keyed >= MAX_KEYED_PER_CALL) {
                batch.push(Part { indexes: Vec::new(), reports: Vec::new(), keyed: 0 });
            }
            let part = batch.last_mut().expect("there is one now");
            part.keyed += usize::from(is_keyed(&report));
            part.indexes.push(at);
            part.reports.push(report);
        }
        let work = &work;
        let calls = batches.into_iter().zip(&self.reports).map(|(batch, batcher)| async move {
            let mut answered = Vec::new();
            for Part { indexes, reports, .. } in batch {
                let work = work(reports);
                let answers = batcher.call(|answer| end::Call { work, now, answer }).await?;
                answered.extend(indexes.into_iter().zip(answers));
            }
            Ok::<_, StoreError>(answered)
        });
        let mut answers = vec![UpdateResult::Stale; count];
        for (at, owned) in futures_util::future::try_join_all(calls).await?.into_iter().flatten() {
            answers[at] = owned;
        }
        Ok(answers)
    }
}
