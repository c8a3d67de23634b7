//! The queue from which jobs are claimed: the database's own queue, or one in Redis.
//!
//! Redis only dispatches. A job that was taken from Redis starts only if the database grants its claim, with all the
//! checks of the database's own queue: limits, pauses, the worker's session. `dispatch.rs` takes jobs and claims them,
//! `follow.rs` applies changes of the database to Redis, and `reconcile.rs` compares both and repairs Redis. Whatever
//! Redis loses or gets wrong costs time, never a job.

mod dispatch;
pub(crate) mod follow;
pub(crate) mod reconcile;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::{ClaimOrder, Priority, Timestamp};
use faena_queue::{FinishedJob, Move, QueueError, RedisAddress, RedisQueue, RedisQueueOptions, RunResult};
use faena_store::{Lane, RunEnd, RunOutcome, Store, StoreError};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{Engine, EngineError, measure::Histogram};

/// Time limit for one round trip to Redis.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of moves that wait to be sent. With more, all of them are dropped, and a full comparison with the
/// database repairs Redis.
const MAX_MOVES: usize = 200_000;

/// Settings of a queue in Redis.
#[derive(Clone, Debug)]
pub struct RedisQueueConfig {
    pub address: RedisAddress,
    /// Prefix of all keys.
    pub prefix: String,
    /// Whether the database's own queue is used while Redis is not available.
    pub fallback: bool,
}

/// The queue from which jobs are claimed.
pub struct JobQueue {
    pub(crate) redis: Option<RedisDispatch>,
}

/// A queue in Redis, and the moves of this process that are not yet applied to it.
pub(crate) struct RedisDispatch {
    pub redis: RedisQueue,
    pub fallback: bool,
    /// Moves that are not yet applied to Redis, in order.
    moves: Mutex<Vec<(u64, Move)>>,
    /// Whether Redis must be compared with the database in full, because entries may be missing.
    must_compare: AtomicBool,
    /// The number of the connection after which Redis was last compared in full.
    compared_connection: AtomicU64,
    /// Which queue is served first; it changes from claim to claim.
    first_queue: AtomicUsize,
    pub follow_wakeup: Arc<Notify>,
    pub reconcile_wakeup: Arc<Notify>,
    pub measures: Arc<QueueMeasures>,
}

/// Measurements of a queue in Redis.
#[derive(Default)]
pub(crate) struct QueueMeasures {
    pub round_trips: Mutex<Histogram>,
    pub repaired: AtomicU64,
    pub last_drift: AtomicU64,
    pub fills: AtomicU64,
    pub fallback_claims: AtomicU64,
    /// Jobs taken from Redis that were no longer ready in the database.
    pub stale: AtomicU64,
}

/// State of a queue in Redis, for health, metrics and `faena doctor`.
#[derive(Clone, Debug)]
pub struct QueueStatus {
    pub address: String,
    pub fallback: bool,
    /// Why Redis cannot be used now.
    pub outage: Option<String>,
    pub round_trips: Histogram,
    /// Entries that the last comparison with the database had to add or remove.
    pub last_drift: u64,
    /// Entries that all comparisons had to add or remove.
    pub repaired: u64,
    /// How often Redis was empty and was filled from the database.
    pub fills: u64,
    /// Claims that were made by the database's own queue because Redis was not available.
    pub fallback_claims: u64,
    /// Jobs taken from Redis that were no longer ready in the database.
    pub stale: u64,
}

impl JobQueue {
    pub(crate) fn new(config: Option<&RedisQueueConfig>, store: &dyn Store) -> JobQueue {
        let Some(config) = config else { return JobQueue { redis: None } };
        store.queue_feed().switch_on();
        let measures = Arc::<QueueMeasures>::default();
        let measured = measures.clone();
        let round_trip = move |took: Duration| {
            measured.round_trips.lock().observe(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
        };
        let redis = RedisQueue::new(RedisQueueOptions {
            address: config.address.clone(),
            prefix: config.prefix.clone(),
            timeout: TIMEOUT,
            round_trip: Box::new(round_trip),
        });
        JobQueue {
            redis: Some(RedisDispatch {
                redis,
                fallback: config.fallback,
                moves: Mutex::default(),
                must_compare: AtomicBool::new(true),
                compared_connection: AtomicU64::new(0),
                first_queue: AtomicUsize::new(0),
                follow_wakeup: store.queue_feed().wakeup(),
                reconcile_wakeup: Arc::default(),
                measures,
            }),
        }
    }

    /// Checks on startup that Redis can be used.
    ///
    /// # Errors
    /// Fails if Redis cannot be used, and the database's own queue must not be used instead.
    pub(crate) async fn check(&self, store: &dyn Store, now: Timestamp) -> Result<(), EngineError> {
        let Some(redis) = &self.redis else { return Ok(()) };
        let lanes: Vec<i32> = store.lanes().await?.iter().map(|lane| lane.id).collect();
        match redis.redis.prepare(&lanes, now.as_ms()).await {
            Ok(_) => Ok(()),
            Err(error) if redis.fallback => {
                tracing::warn!(%error, "queue in Redis not available, the database dispatches");
                Ok(())
            }
            Err(error) => Err(EngineError::Queue(error)),
        }
    }

    /// Returns the state of the queue in Redis, if there is one.
    pub fn status(&self) -> Option<QueueStatus> {
        let RedisDispatch { redis, fallback, measures, .. } = self.redis.as_ref()?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(QueueStatus {
            address: redis.address().to_string(),
            fallback: *fallback,
            outage: redis.outage(),
            round_trips: measures.round_trips.lock().clone(),
            last_drift: count(&measures.last_drift),
            repaired: count(&measures.repaired),
            fills: count(&measures.fills),
            fallback_claims: count(&measures.fallback_claims),
            stale: count(&measures.stale),
        })
    }

    /// Checks that Redis answers, if it is used.
    pub async fn ping(&self) -> Result<(), QueueError> {
        match &self.redis {
            Some(redis) => redis.redis.ping().await,
            None => Ok(()),
        }
    }

    /// Adds the ends of runs that the database has stored to the moves for Redis.
    pub(crate) fn record_ends<'a>(&self, store: &dyn Store, ends: impl Iterator<Item = &'a RunEnd>) {
        let Some(redis) = &self.redis else { return };
        let finished = ends.map(|end| {
            let result = match end.outcome {
                RunOutcome::Completed { .. } => RunResult::Completed,
                RunOutcome::Failed { .. } => RunResult::Failed,
                _ => RunResult::Other,
            };
            Move::Finish(FinishedJob { id: end.id.0, run: end.run, result, at_ms: end.at.as_ms() })
        });
        redis.push(store, finished.collect());
    }
}

impl RedisDispatch {
    /// Adds moves that `follow.rs` sends, in the order of the changes of the database.
    fn push(&self, store: &dyn Store, moves: Vec<Move>) {
        if moves.is_empty() {
            return;
        }
        let stamp = store.queue_feed().stamp();
        let mut waiting = self.moves.lock();
        waiting.extend(moves.into_iter().map(|queue_move| (stamp, queue_move)));
        if waiting.len() > MAX_MOVES {
            waiting.clear();
            self.request_comparison();
        }
        drop(waiting);
        self.follow_wakeup.notify_one();
    }

    /// Requests a full comparison of Redis with the database.
    fn request_comparison(&self) {
        self.must_compare.store(true, Ordering::Release);
        self.reconcile_wakeup.notify_one();
    }

    /// Requests a comparison, which restores whatever the failed operation lost. Logs the error if Redis rejected a
    /// command or contains a newer format.
    fn record_failure(&self, error: &QueueError) {
        match error {
            QueueError::NotFilled | QueueError::ForeignKey { .. } | QueueError::Unavailable { .. } => {}
            QueueError::NewerFormat { .. } | QueueError::Rejected { .. } => {
                tracing::error!(%error, "queue in Redis failed");
            }
        }
        self.request_comparison();
    }
}

/// Returns the offset that a priority adds to a score. It is the offset that the task scheduler service uses, also in a
/// strict queue.
fn offset(priority: Priority) -> i64 {
    ClaimOrder::Aging.score(priority, Timestamp::from_ms(0))
}

/// Returns the score of a job.
pub(crate) fn score(lane: &Lane, ready_at: Timestamp) -> i64 {
    ready_at.as_ms() + offset(lane.priority)
}

impl Engine {
    /// Returns the error of a claim that failed because of Redis.
    fn queue_unavailable(error: &QueueError) -> StoreError {
        StoreError::Unavailable(error.to_string().into())
    }
}
