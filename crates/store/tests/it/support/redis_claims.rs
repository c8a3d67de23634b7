//! Claims jobs that Redis chooses, for tests that run again with `FAENA_TEST_QUEUE=redis`.
//!
//! Once a store is open, Redis learns of jobs only from the changes that the store announces, as in a server between
//! two comparisons with the database. If a store does not announce a ready job, the job is not claimed.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::{ClaimOrder, JobId, Priority, Timestamp};
use faena_queue::{
    GrantedJob, LaneTake, Move, Placement, ReadyEntry, RedisQueue, RedisQueueOptions, TakeRequest, TakenJob,
};
use faena_store::{
    ClaimCandidate, ClaimRequest, ClaimResult, Lane, LaneId, QueueChange, QueueChangeKind, QueueLocation, Store,
};
use tokio::sync::Mutex;

/// The queue of one database, which its stores share.
pub struct RedisClaims {
    redis: RedisQueue,
    stores: Mutex<Vec<Weak<dyn Store>>>,
    /// Which queue is served first; it changes from claim to claim.
    first_queue: AtomicUsize,
}

/// The queues by the URL of their database.
static QUEUES: LazyLock<Mutex<HashMap<String, Arc<RedisClaims>>>> = LazyLock::new(Mutex::default);

impl RedisClaims {
    /// Lets Redis choose the jobs that a store claims, if this run of the tests asks for it.
    pub async fn for_store(url: &str, store: &Arc<dyn Store>) -> Option<Arc<RedisClaims>> {
        if std::env::var("FAENA_TEST_QUEUE").as_deref() != Ok("redis") {
            return None;
        }
        store.queue_feed().switch_on();
        let mut queues = QUEUES.lock().await;
        let claims = queues.entry(url.to_owned()).or_insert_with(|| Arc::new(RedisClaims::new())).clone();
        claims.stores.lock().await.push(Arc::downgrade(store));
        // The announcements of the previous process may not have arrived.
        claims.fill(&**store).await;
        Some(claims)
    }

    fn new() -> RedisClaims {
        let url = std::env::var("FAENA_TEST_REDIS").expect("FAENA_TEST_REDIS is not set: run this test with ./test");
        let options = RedisQueueOptions {
            address: url.parse().unwrap(),
            prefix: format!("test-{}", uuid::Uuid::new_v4().simple()),
            timeout: Duration::from_secs(10),
            round_trip: Box::new(|_| {}),
        };
        RedisClaims { redis: RedisQueue::new(options), stores: Mutex::default(), first_queue: AtomicUsize::new(0) }
    }

    /// Adds every ready job of the database.
    async fn fill(&self, store: &dyn Store) {
        let lanes = store.lanes().await.unwrap();
        self.redis.prepare(&lanes.iter().map(|lane| lane.id).collect::<Vec<_>>(), 0).await.unwrap();
        for lane in lanes.iter().filter(|lane| !lane.keyed) {
            let ready = store.ready_page(lane.id, None, 100_000).await.unwrap();
            let entry = |id: JobId, at| ReadyEntry { id: id.0, lane: lane.id, score: score(lane.priority, at) };
            let moves: Vec<Move> = ready.iter().map(|job| Move::Put(entry(job.id, job.at))).collect();
            self.redis.apply(&moves, Placement::Fill).await.unwrap();
        }
    }

    /// Claims jobs for one request. Redis chooses until the limit is reached or it has no more.
    pub async fn claim(&self, store: &dyn Store, request: ClaimRequest, now: Timestamp) -> ClaimResult {
        let lanes: HashMap<LaneId, Lane> =
            store.lanes().await.unwrap().into_iter().map(|lane| (lane.id, lane)).collect();
        let mut result = ClaimResult::default();
        loop {
            self.follow(&lanes).await;
            let limit = request.limit - result.jobs.len();
            let limited_lanes: Vec<LaneId> = result.limited.iter().map(|limited| limited.lane).collect();
            let takes = take_lanes(store, &request, &lanes, &limited_lanes);
            let taken = self.take(takes, request.owner.uuid(), limit, now).await;
            let candidates = taken.iter().map(|job| candidate(&lanes, job)).collect();
            let part = ClaimRequest { limit, candidates: Some(candidates), ..request.clone() };
            let claim = store.job_claim(vec![part], now).await.unwrap().remove(0);
            let may_have_more = self.settle(store, &lanes, &taken, &claim, request.owner.uuid(), now).await;
            let is_done = (taken.len() < limit && !may_have_more) || claim.rejected;
            result.jobs.extend(claim.jobs);
            result.limited.extend(claim.limited.into_iter().filter(|limited| !limited_lanes.contains(&limited.lane)));
            result.rejected |= claim.rejected;
            if is_done || result.jobs.len() >= request.limit {
                return result;
            }
        }
    }

    /// Applies what the stores of this database have announced.
    async fn follow(&self, lanes: &HashMap<LaneId, Lane>) {
        let mut stores = self.stores.lock().await;
        stores.retain(|store| store.strong_count() > 0);
        for store in stores.iter().filter_map(Weak::upgrade) {
            let changes = store.queue_feed().take(usize::MAX);
            let moves: Vec<Move> = changes.iter().filter_map(|change| announced(lanes, change)).collect();
            self.redis.apply(&moves, Placement::Now).await.unwrap();
        }
    }

    async fn take(&self, lanes: Vec<LaneTake>, owner: uuid::Uuid, limit: usize, now: Timestamp) -> Vec<TakenJob> {
        if lanes.is_empty() || limit == 0 {
            return Vec::new();
        }
        let request =
            TakeRequest { owner, limit, first_queue: self.first_queue.fetch_add(1, Ordering::Relaxed), lanes };
        self.redis.take(&[request], now.plus_ms(20_000).as_ms()).await.unwrap().remove(0)
    }

    /// Records the runs that the database has granted, and returns the other jobs to where the database has them. Returns whether one
    /// of those may be claimed after all.
    async fn settle(
        &self,
        store: &dyn Store,
        lanes: &HashMap<LaneId, Lane>,
        taken: &[TakenJob],
        claim: &ClaimResult,
        owner: uuid::Uuid,
        now: Timestamp,
    ) -> bool {
        let lease_until_ms = now.plus_ms(60_000).as_ms();
        let mut moves: Vec<Move> = Vec::new();
        for job in &claim.jobs {
            let was_taken = taken.iter().any(|taken| taken.id == job.id.0);
            let (id, lane, run) = (job.id.0, job.lane, job.run);
            moves.push(Move::Grant(GrantedJob { id, lane, owner, run, was_taken, lease_until_ms }));
        }
        let refused: Vec<&TakenJob> =
            taken.iter().filter(|taken| claim.jobs.iter().all(|job| job.id.0 != taken.id)).collect();
        let locations = store.queue_locations(refused.iter().map(|job| JobId(job.id)).collect()).await.unwrap();
        let mut is_ready = false;
        for (job, location) in refused.into_iter().zip(locations) {
            let entry = |lane, score| ReadyEntry { id: job.id, lane, score };
            moves.push(match location {
                QueueLocation::Ready { lane, ready_at } => {
                    is_ready |= claim.limited.iter().all(|limited| limited.lane != lane);
                    Move::Put(entry(lane, score(lanes[&lane].priority, ready_at)))
                }
                QueueLocation::Delayed { lane, due_at } => Move::Delay(entry(lane, due_at.as_ms())),
                _ => Move::Remove { id: job.id, lane: job.lane },
            });
        }
        self.redis.apply(&moves, Placement::Now).await.unwrap();
        is_ready
    }
}

/// Returns the lanes of a request that Redis chooses from: without keys, not paused, and not at a limit.
fn take_lanes(
    store: &dyn Store,
    request: &ClaimRequest,
    lanes: &HashMap<LaneId, Lane>,
    limited_lanes: &[LaneId],
) -> Vec<LaneTake> {
    let rules = store.rules();
    let mut known: Vec<&Lane> = request.lanes.iter().filter_map(|lane| lanes.get(lane)).collect();
    known.retain(|lane| !lane.keyed && rules.pause(&lane.queue).is_none() && !limited_lanes.contains(&lane.id));
    known.sort_by(|one, other| (&one.queue, one.id).cmp(&(&other.queue, other.id)));
    known.dedup_by_key(|lane| lane.id);
    let mut queues: HashMap<&str, usize> = HashMap::new();
    let takes = known.into_iter().map(|lane| {
        let count = queues.len();
        let queue = *queues.entry(&lane.queue).or_insert(count);
        let order = rules.claim_order(&lane.queue);
        let bias = order.score(lane.priority, Timestamp::from_ms(0)) - score(lane.priority, Timestamp::from_ms(0));
        LaneTake { lane: lane.id, queue, bias }
    });
    takes.collect()
}

fn announced(lanes: &HashMap<LaneId, Lane>, change: &QueueChange) -> Option<Move> {
    let lane = lanes.get(&change.lane)?;
    let entry = |score| ReadyEntry { id: change.id.0, lane: change.lane, score };
    Some(match change.kind {
        QueueChangeKind::Ready => Move::Put(entry(score(lane.priority, change.at))),
        QueueChangeKind::Delayed => Move::Delay(entry(change.at.as_ms())),
        QueueChangeKind::Left => Move::Remove { id: change.id.0, lane: change.lane },
    })
}

fn candidate(lanes: &HashMap<LaneId, Lane>, job: &TakenJob) -> ClaimCandidate {
    let offset = score(lanes[&job.lane].priority, Timestamp::from_ms(0));
    ClaimCandidate { lane: job.lane, ready_at: Timestamp::from_ms(job.score - offset), id: JobId(job.id) }
}

fn score(priority: Priority, at: Timestamp) -> i64 {
    ClaimOrder::Aging.score(priority, at)
}
