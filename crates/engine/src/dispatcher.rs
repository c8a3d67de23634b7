//! Claims ready jobs for the free slots of the built-in worker and for the connected workers.
//!
//! A connected worker receives as many jobs as it has free slots. The built-in worker claims in adaptive batches: while jobs
//! are short, more are claimed at a time than there are slots, up to a few milliseconds of work, so that one transaction
//! serves many; while they are long, none is claimed before a slot is free, so that no job waits here while another node
//! could run it.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
};

use faena_domain::Timestamp;
use faena_store::{ClaimRequest, ClaimResult, Lane, LaneId, Owner, StoreError};
use parking_lot::Mutex;

use crate::{
    Engine, Round,
    builtin::SlotState,
    in_flight::InFlight,
    workers::{ConnectedWorker, Workers},
};

mod ready_lanes;

pub use ready_lanes::ReadyLanes;

/// Maximum number of jobs in one claim.
const MAX_CLAIM: usize = 2_000;
/// The batch grows when it is used up within `QUICK_MS`, and shrinks when that takes longer than `SLOW_MS`.
const QUICK_MS: i64 = 25;
const SLOW_MS: i64 = 150;

pub struct Dispatcher {
    lanes: Arc<ReadyLanes>,
    in_flight: Arc<InFlight>,
    workers: Arc<Workers>,
    /// Number of slots of the built-in worker.
    slot_count: usize,
    slots: Arc<SlotState>,
    /// Types that the built-in worker runs.
    kinds: HashSet<&'static str>,
    state: Mutex<State>,
    /// Start of the round in progress. Claims that are not in flight yet were made since then.
    claiming_since: Mutex<Option<Timestamp>>,
}

struct State {
    batch: usize,
    last_full_claim: Option<Timestamp>,
    /// Counts rounds, so that another worker is first each time.
    round: usize,
}

/// The worker a claim is made for.
enum Claimer {
    BuiltIn,
    Connected(Arc<ConnectedWorker>),
}

/// The claims of one round.
#[derive(Default)]
struct Plan {
    requests: Vec<ClaimRequest>,
    claimers: Vec<Claimer>,
}

impl Dispatcher {
    pub fn new(
        lanes: Arc<ReadyLanes>,
        in_flight: Arc<InFlight>,
        workers: Arc<Workers>,
        slot_count: usize,
        slots: Arc<SlotState>,
        kinds: HashSet<&'static str>,
    ) -> Dispatcher {
        let state = Mutex::new(State { batch: slot_count, last_full_claim: None, round: 0 });
        Dispatcher { lanes, in_flight, workers, slot_count, slots, kinds, state, claiming_since: Mutex::default() }
    }

    /// Returns when the round in progress began. All claims of earlier rounds are in flight, or their answer was lost.
    pub fn claiming_since(&self) -> Option<Timestamp> {
        *self.claiming_since.lock()
    }

    pub async fn run_once(&self, engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
        *self.claiming_since.lock() = Some(now);
        let round = self.claim(engine, now).await;
        *self.claiming_since.lock() = None;
        round
    }

    async fn claim(&self, engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
        let store = &*engine.store;
        let openings = self.lanes.open_due(now);
        // Taken before the claim: a job that becomes ready from here on adds its lane again.
        let candidates = self.lanes.take();
        let wanted = self.wanted();
        if wanted == 0 {
            self.adapt_to_slow_jobs(now);
        }
        if candidates.is_empty() {
            return Ok(Round::idle_until(self.lanes.opens_at()));
        }
        if let Err(error) = self.lanes.load(store, &candidates).await {
            self.lanes.put_back(candidates);
            return Err(error);
        }
        let candidates: Vec<Arc<Lane>> = candidates.into_iter().filter_map(|id| self.lanes.lane(id)).collect();
        let plan = self.plan(engine, &candidates, wanted, now);
        self.keep_unrequested(&candidates, &plan);
        if plan.requests.is_empty() {
            return Ok(Round::idle_until(self.lanes.opens_at()));
        }
        let claims = match engine.queue.claim(engine, plan.requests.clone(), now).await {
            Ok(claims) => claims,
            Err(error) => {
                self.lanes.put_back(plan.requests.into_iter().flat_map(|request| request.lanes).collect());
                return Err(error);
            }
        };
        let (handled, more) = self.keep_full(&plan, &claims);
        let limited = claims.iter().flat_map(|claim| claim.limited.iter().copied()).collect();
        let next_at = self.lanes.mark_limited(limited, openings);
        self.start_claimed(engine, plan, claims, now).await;
        Ok(Round { handled, more: more && self.wanted() > 0, next_at })
    }

    /// Returns how many jobs to claim now for the built-in worker.
    fn wanted(&self) -> usize {
        let queued = self.in_flight.queued();
        let batch = self.state.lock().batch;
        if batch <= self.slot_count {
            self.slots.idle.load(Ordering::Acquire).saturating_sub(queued)
        } else if queued * 2 <= batch {
            batch - queued
        } else {
            0
        }
    }

    fn plan(&self, engine: &Engine, candidates: &[Arc<Lane>], wanted: usize, now: Timestamp) -> Plan {
        let mut plan = Plan::default();
        if wanted > 0 {
            let lanes =
                candidates.iter().filter(|lane| self.kinds.contains(lane.kind.as_str())).map(|lane| lane.id).collect();
            let idle_slots = self.slots.idle.load(Ordering::Acquire).saturating_sub(self.in_flight.queued());
            plan.add(Owner::Node(engine.node_id()), lanes, (wanted, idle_slots), Claimer::BuiltIn);
        }
        for (capacity, worker) in self.workers_with_capacity(now) {
            let lanes = candidates.iter().filter(|lane| worker.serves(lane)).map(|lane| lane.id).collect();
            let owner = Owner::Worker { id: worker.id, session: worker.session };
            let limit = capacity.min(MAX_CLAIM);
            plan.add(owner, lanes, (limit, limit), Claimer::Connected(worker));
        }
        plan
    }

    /// Returns the workers that accept jobs now, those with the fewest jobs first. Workers with the same number take turns.
    fn workers_with_capacity(&self, now: Timestamp) -> Vec<(usize, Arc<ConnectedWorker>)> {
        let all = self.workers.all().into_iter();
        let mut workers: Vec<_> =
            all.map(|worker| (worker.capacity(now), worker)).filter(|(capacity, _)| *capacity > 0).collect();
        let round = {
            let mut state = self.state.lock();
            state.round = state.round.wrapping_add(1);
            state.round
        };
        if !workers.is_empty() {
            let offset = round % workers.len();
            workers.rotate_left(offset);
        }
        workers.sort_by_key(|(_, worker)| worker.load().0);
        workers
    }

    /// Keeps the lanes that no claim asks for now: as ready if a worker here can serve them, else as unserved.
    fn keep_unrequested(&self, candidates: &[Arc<Lane>], plan: &Plan) {
        let requested: HashSet<LaneId> =
            plan.requests.iter().flat_map(|request| request.lanes.iter().copied()).collect();
        let workers = self.workers.all();
        let (served, unserved): (Vec<_>, Vec<_>) =
            candidates.iter().filter(|lane| !requested.contains(&lane.id)).partition(|lane| {
                let is_built_in = self.slot_count > 0 && self.kinds.contains(lane.kind.as_str());
                is_built_in || workers.iter().any(|worker| worker.serves(lane))
            });
        self.lanes.put_back(served.iter().map(|lane| lane.id).collect());
        self.lanes.mark_unserved(unserved.iter().map(|lane| lane.id));
    }

    /// Keeps the lanes that may have more jobs: the last claim of the lane got as many as it asked for. Returns how
    /// many jobs were claimed, and whether any lane was kept.
    fn keep_full(&self, plan: &Plan, claims: &[ClaimResult]) -> (usize, bool) {
        let mut last: HashMap<LaneId, bool> = HashMap::new();
        let mut handled = 0;
        for (request, claim) in plan.requests.iter().zip(claims) {
            // A rejected claim says nothing about its lanes.
            let is_full = claim.jobs.len() >= request.limit || claim.rejected;
            handled += claim.jobs.len();
            last.extend(request.lanes.iter().map(|lane| (*lane, is_full)));
        }
        let full: Vec<LaneId> = last.into_iter().filter(|(_, is_full)| *is_full).map(|(lane, _)| lane).collect();
        let more = !full.is_empty();
        self.lanes.put_back(full);
        (handled, more)
    }

    /// Queues claimed jobs for the slots and sends them to connected workers.
    async fn start_claimed(&self, engine: &Engine, plan: Plan, claims: Vec<ClaimResult>, now: Timestamp) {
        let mut deliveries = Vec::new();
        for ((request, claimer), claim) in plan.requests.into_iter().zip(plan.claimers).zip(claims) {
            let count = claim.jobs.len();
            let mut last: Option<(LaneId, Arc<str>)> = None;
            let jobs = claim.jobs.into_iter().map(|job| {
                // Jobs of one lane mostly follow each other.
                let known = last.take().filter(|(lane, _)| *lane == job.lane);
                let (lane, kind) = known.unwrap_or_else(|| (job.lane, self.lanes.kind(job.lane)));
                last = Some((lane, kind.clone()));
                (job, kind)
            });
            match claimer {
                Claimer::BuiltIn => {
                    self.adapt(count >= request.limit, now);
                    self.in_flight.add(jobs, engine.worker_id(), now);
                    self.slots.wake(count);
                }
                Claimer::Connected(worker) if count > 0 => {
                    let jobs = self.in_flight.add_for(&worker, jobs.map(|(job, kind)| (job, kind, now)));
                    worker.assign(&jobs, now);
                    deliveries.push((worker, jobs));
                }
                Claimer::Connected(_) => {}
            }
        }
        if !deliveries.is_empty() {
            engine.wakeups.worker_changed();
            engine.deliver(deliveries, now).await;
        }
    }

    /// Adapts the batch after a claim: two full claims in quick succession mean that jobs are short and many.
    fn adapt(&self, is_full: bool, now: Timestamp) {
        let mut state = self.state.lock();
        if !is_full {
            state.last_full_claim = None;
            return;
        }
        if let Some(last) = state.last_full_claim {
            let took_ms = now.ms_since(last);
            if took_ms <= QUICK_MS {
                state.batch = (state.batch * 2).min(MAX_CLAIM);
            } else if took_ms >= SLOW_MS {
                state.batch = (state.batch / 2).max(self.slot_count);
            }
        }
        state.last_full_claim = Some(now);
        let low_water = if state.batch > self.slot_count { state.batch / 2 } else { usize::MAX };
        self.slots.low_water.store(low_water, Ordering::Relaxed);
    }

    fn adapt_to_slow_jobs(&self, now: Timestamp) {
        let mut state = self.state.lock();
        if let Some(last) = state.last_full_claim
            && now.ms_since(last) >= SLOW_MS
        {
            state.batch = (state.batch / 2).max(self.slot_count);
            state.last_full_claim = Some(now);
        }
    }

    /// Stops prefetching: from now on only jobs for free slots are claimed.
    pub fn stop_claiming_ahead(&self) {
        let mut state = self.state.lock();
        state.batch = self.slot_count;
        state.last_full_claim = None;
        self.slots.low_water.store(usize::MAX, Ordering::Relaxed);
    }
}

impl Plan {
    fn add(&mut self, owner: Owner, lanes: Vec<LaneId>, (limit, idle_slots): (usize, usize), claimer: Claimer) {
        if !lanes.is_empty() {
            self.requests.push(ClaimRequest { owner, lanes, limit, idle_slots, candidates: None });
            self.claimers.push(claimer);
        }
    }
}
