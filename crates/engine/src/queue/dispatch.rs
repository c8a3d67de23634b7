//! Takes jobs from Redis and claims them in the database.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use faena_domain::{JobId, Rules, Timestamp};
use faena_queue::{GrantedJob, LaneTake, Move, Placement, QueueError, ReadyEntry, TakeRequest, TakenJob};
use faena_store::{ClaimCandidate, ClaimRequest, ClaimResult, Lane, LaneId, Owner, QueueLocation, Store, StoreError};
use uuid::Uuid;

use super::{JobQueue, RedisDispatch, offset, score};
use crate::{Engine, config::ms, dispatcher::ReadyLanes};

/// How long a taken job may wait for the decision of the database. Longer than a claim can take.
const TAKE_LEASE: Duration = Duration::from_secs(20);

impl JobQueue {
    /// Claims jobs for the requests. See `ClaimStore::job_claim` for what both queues guarantee.
    pub(crate) async fn claim(
        &self,
        engine: &Engine,
        requests: Vec<ClaimRequest>,
        now: Timestamp,
    ) -> Result<Vec<ClaimResult>, StoreError> {
        let Some(redis) = &self.redis else { return engine.store.job_claim(requests, now).await };
        match redis.take(engine, &requests, now).await {
            Ok(taken) => redis.claim_taken(engine, requests, taken, now).await,
            Err(error) => {
                redis.record_failure(&error);
                if !redis.fallback {
                    return Err(Engine::queue_unavailable(&error));
                }
                let claims = engine.store.job_claim(requests, now).await?;
                redis.measures.fallback_claims.fetch_add(1, Ordering::Relaxed);
                Ok(claims)
            }
        }
    }
}

/// What a request has taken.
#[derive(Clone, Default)]
struct Taken {
    jobs: Vec<TakenJob>,
    lanes: Vec<LaneId>,
    /// Whether Redis returned as many jobs as requested, so that it may have more.
    is_full: bool,
}

impl RedisDispatch {
    /// Takes jobs for the requests from the lanes without keys whose queues are not paused.
    async fn take(&self, engine: &Engine, requests: &[ClaimRequest], now: Timestamp) -> Result<Vec<Taken>, QueueError> {
        let rules = engine.store.rules();
        let first_queue = self.first_queue.fetch_add(1, Ordering::Relaxed);
        let takes: Vec<TakeRequest> = requests
            .iter()
            .map(|request| {
                let lanes = dispatched_lanes(&engine.dispatch.lanes, request, &rules);
                TakeRequest {
                    owner: worker_of(engine, request.owner),
                    limit: take_limit(&lanes, request.limit, &rules),
                    first_queue,
                    lanes: take_lanes(&lanes, &rules),
                }
            })
            .collect();
        let (numbers, wanted): (Vec<usize>, Vec<TakeRequest>) =
            takes.into_iter().enumerate().filter(|(_, take)| !take.lanes.is_empty()).unzip();
        let mut taken = vec![Taken::default(); requests.len()];
        if !wanted.is_empty() {
            let lease_until = now.plus_ms(ms(TAKE_LEASE)).as_ms();
            let found = self.redis.take(&wanted, lease_until).await?;
            for ((number, jobs), take) in numbers.into_iter().zip(found).zip(&wanted) {
                let lanes = take.lanes.iter().map(|lane| lane.lane).collect();
                taken[number] = Taken { is_full: jobs.len() >= take.limit, jobs, lanes };
            }
        }
        Ok(taken)
    }

    /// Claims the taken jobs. Puts the jobs that the database did not grant back into Redis.
    async fn claim_taken(
        &self,
        engine: &Engine,
        mut requests: Vec<ClaimRequest>,
        taken: Vec<Taken>,
        now: Timestamp,
    ) -> Result<Vec<ClaimResult>, StoreError> {
        let lanes = &engine.dispatch.lanes;
        for (request, taken) in requests.iter_mut().zip(&taken) {
            request.candidates = Some(taken.jobs.iter().filter_map(|job| candidate(lanes, job)).collect());
        }
        let limits: Vec<usize> = requests.iter().map(|request| request.limit).collect();
        let owners: Vec<Uuid> = requests.iter().map(|request| worker_of(engine, request.owner)).collect();
        let claims = match engine.store.job_claim(requests, now).await {
            Ok(claims) => claims,
            Err(error) => {
                // Some jobs may be claimed although no answer arrived. That is noticed when they are taken again.
                self.send(taken.into_iter().flat_map(|taken| taken.jobs).map(Move::Put).collect()).await;
                return Err(error);
            }
        };
        let lease_until_ms = now.plus_ms(ms(engine.config.guardian_interval) * 2).as_ms();
        let mut granted = Vec::new();
        let mut limited = Vec::new();
        let mut refused = Vec::new();
        for (at, claim) in claims.iter().enumerate() {
            let known: HashSet<Uuid> = taken[at].jobs.iter().map(|job| job.id).collect();
            granted.extend(claim.jobs.iter().map(|job| {
                let (id, lane, run) = (job.id.0, job.lane, job.run);
                let was_taken = known.contains(&id);
                Move::Grant(GrantedJob { id, lane, owner: owners[at], run, was_taken, lease_until_ms })
            }));
            let ids: HashSet<JobId> = claim.jobs.iter().map(|job| job.id).collect();
            let limited_lanes: HashSet<LaneId> = claim.limited.iter().map(|limited| limited.lane).collect();
            let left = taken[at].jobs.iter().copied().filter(|job| !ids.contains(&JobId(job.id)));
            let (delayed, unknown): (Vec<TakenJob>, Vec<TakenJob>) =
                left.partition(|job| claim.rejected || limited_lanes.contains(&job.lane));
            // The dispatcher treats a lane as empty if it gets less than it asked for. Redis may have more jobs of this
            // lane.
            if taken[at].is_full && claim.jobs.len() < limits[at] && !claim.rejected {
                taken[at].lanes.iter().filter(|lane| !limited_lanes.contains(lane)).for_each(|lane| lanes.add(*lane));
            }
            limited.extend(delayed.into_iter().map(Move::Put));
            refused.extend(unknown);
        }
        self.push(&*engine.store, granted);
        limited.extend(self.settle(&*engine.store, lanes, refused).await);
        self.send(limited).await;
        Ok(claims)
    }

    /// Returns the moves for taken jobs that no claim contains: ready jobs are put back, others are removed.
    async fn settle(&self, store: &dyn Store, lanes: &ReadyLanes, refused: Vec<TakenJob>) -> Vec<Move> {
        if refused.is_empty() {
            return Vec::new();
        }
        let locations = match store.queue_locations(refused.iter().map(|job| JobId(job.id)).collect()).await {
            Ok(locations) => locations,
            // They are compared with the database when their lease has ended.
            Err(_) => return Vec::new(),
        };
        let mut moves = Vec::with_capacity(refused.len());
        for (job, location) in refused.into_iter().zip(locations) {
            moves.push(match location {
                QueueLocation::Ready { lane, ready_at } => {
                    lanes.add(lane);
                    let actual = lanes.lane(lane).map(|known| score(&known, ready_at)).unwrap_or(job.score);
                    Move::Put(ReadyEntry { id: job.id, lane, score: actual })
                }
                QueueLocation::Delayed { lane, due_at } => {
                    Move::Delay(ReadyEntry { id: job.id, lane, score: due_at.as_ms() })
                }
                _ => {
                    self.measures.stale.fetch_add(1, Ordering::Relaxed);
                    Move::Remove { id: job.id, lane: job.lane }
                }
            });
        }
        moves
    }

    /// Applies moves now. If that fails, the jobs are compared with the database when their lease ends.
    async fn send(&self, mut moves: Vec<Move>) {
        if moves.is_empty() {
            return;
        }
        moves.sort_by_key(|one| match one {
            Move::Put(entry) | Move::Delay(entry) => entry.lane,
            Move::Remove { lane, .. } => *lane,
            Move::Grant(_) | Move::Finish(_) => 0,
        });
        if let Err(error) = self.redis.apply(&moves, Placement::Now).await {
            self.record_failure(&error);
        }
    }
}

/// Returns the lanes of a request that Redis dispatches, sorted by queue.
fn dispatched_lanes(lanes: &ReadyLanes, request: &ClaimRequest, rules: &Rules) -> Vec<Arc<Lane>> {
    let mut known: Vec<Arc<Lane>> = request.lanes.iter().filter_map(|lane| lanes.lane(*lane)).collect();
    known.retain(|lane| !lane.keyed && rules.pause(&lane.queue).is_none());
    known.sort_by(|one, other| (&one.queue, one.id).cmp(&(&other.queue, other.id)));
    known.dedup_by_key(|lane| lane.id);
    known
}

/// Returns how many jobs to take: at most as many as the limits allow to start, and one more to see whether a limit
/// delays any.
fn take_limit(lanes: &[Arc<Lane>], wanted: usize, rules: &Rules) -> usize {
    let most = lanes.iter().map(|lane| {
        let limits = rules.lane_limits(&lane.queue, &lane.kind).into_iter();
        let bounds = limits.flat_map(|(_, limit)| [limit.concurrency, limit.rate.map(|rate| rate.count)]).flatten();
        bounds.min().map_or(wanted, |bound| (bound as usize).saturating_add(1))
    });
    most.max().unwrap_or(wanted).min(wanted)
}

/// Returns each lane with the number of its queue and the bias of its scores.
fn take_lanes(known: &[Arc<Lane>], rules: &Rules) -> Vec<LaneTake> {
    let mut queues: HashMap<String, usize> = HashMap::new();
    let takes = known.iter().map(|lane| {
        let count = queues.len();
        let queue = *queues.entry(lane.queue.clone()).or_insert(count);
        let order = rules.claim_order(&lane.queue);
        let bias = order.score(lane.priority, Timestamp::from_ms(0)) - offset(lane.priority);
        LaneTake { lane: lane.id, queue, bias }
    });
    takes.collect()
}

/// Returns the id of the worker that a claim is made for.
fn worker_of(engine: &Engine, owner: Owner) -> Uuid {
    match owner {
        Owner::Node(_) => engine.worker_id().0,
        Owner::Worker { id, .. } => id.0,
    }
}

fn candidate(lanes: &ReadyLanes, job: &TakenJob) -> Option<ClaimCandidate> {
    let lane = lanes.lane(job.lane)?;
    Some(ClaimCandidate {
        lane: job.lane,
        ready_at: Timestamp::from_ms(job.score - offset(lane.priority)),
        id: JobId(job.id),
    })
}
