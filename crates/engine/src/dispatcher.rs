//! Claims ready jobs for the free slots of this process's worker, and for the workers that are connected to it.
//!
//! Each worker gets as many jobs as it has room for, at once. A slot that becomes free is filled at once. While jobs are short, more are claimed at a time than there are slots, up to
//! what is worth a few milliseconds of work, so that one transaction serves many; while they are long, none is claimed
//! before a slot is free, so that no job waits here while another node could run it.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use faena_domain::Timestamp;
use faena_store::{ClaimRequest, ClaimResult, Lane, LaneId, Limited, Owner, Store, StoreError};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use crate::{
    Engine, Round,
    in_flight::InFlight,
    workers::{ConnectedWorker, Workers},
};

/// The most jobs that one claim takes.
const LARGEST_CLAIM: usize = 2_000;
/// A batch that is used up faster than this is followed by a larger one; slower than the second, by a smaller one.
const QUICK_MS: i64 = 25;
const SLOW_MS: i64 = 150;

/// Lanes that may have ready jobs.
#[derive(Default)]
pub struct ReadyLanes {
    lanes: Mutex<HashSet<LaneId>>,
    /// Lanes that nobody who is here can serve. Looked at again when somebody comes.
    unserved: Mutex<HashSet<LaneId>>,
    /// Lanes with jobs that a limit or a pause holds back.
    limited: Mutex<Held>,
    /// Lanes never change.
    known: RwLock<HashMap<LaneId, Known>>,
    pub nudge: Arc<Notify>,
}

#[derive(Default)]
struct Held {
    lanes: HashSet<LaneId>,
    /// When a rate lets the first of them go on.
    opens_at: Option<Timestamp>,
    /// Counts the times at which they were let go, so that a claim that was under way meanwhile is seen to be out of date.
    openings: u64,
}

struct Known {
    lane: Arc<Lane>,
    /// The name of its type, which every job in hand refers to.
    kind: Arc<str>,
}

impl ReadyLanes {
    pub fn add(&self, lane: LaneId) {
        self.lanes.lock().insert(lane);
        self.nudge.notify_one();
    }

    /// Somebody has come who may serve what nobody could.
    pub fn reconsider(&self) {
        let unserved: Vec<LaneId> = self.unserved.lock().drain().collect();
        self.lanes.lock().extend(unserved);
        self.nudge.notify_one();
    }

    /// A job has ended that counted for a limit, or a rule has changed: what was held back may go on.
    pub fn open_limited(&self) {
        let lanes: Vec<LaneId> = {
            let mut limited = self.limited.lock();
            limited.openings += 1;
            limited.opens_at = None;
            limited.lanes.drain().collect()
        };
        if !lanes.is_empty() {
            self.lanes.lock().extend(lanes);
            self.nudge.notify_one();
        }
    }

    /// What a rate held back until now may go on.
    fn open_due(&self, now: Timestamp) -> u64 {
        if self.limited.lock().opens_at.is_some_and(|at| at <= now) {
            self.open_limited();
        }
        self.limited.lock().openings
    }

    /// Puts lanes aside until there is room. If there was some since `openings`, they are looked at again at once.
    fn hold_back(&self, limited: Vec<Limited>, openings: u64) -> Option<Timestamp> {
        let mut held = self.limited.lock();
        if held.openings != openings && !limited.is_empty() {
            self.lanes.lock().extend(limited.iter().map(|limited| limited.lane));
            self.nudge.notify_one();
            return held.opens_at;
        }
        for Limited { lane, until } in limited {
            held.lanes.insert(lane);
            held.opens_at = [held.opens_at, until].into_iter().flatten().min();
        }
        held.opens_at
    }

    pub fn lane(&self, id: LaneId) -> Option<Arc<Lane>> {
        self.known.read().get(&id).map(|known| known.lane.clone())
    }

    fn kind(&self, id: LaneId) -> Arc<str> {
        self.known.read().get(&id).map_or_else(|| Arc::from(""), |known| known.kind.clone())
    }

    /// Sees to it that these lanes are known, if the store knows them.
    pub async fn learn(&self, store: &dyn Store, lanes: &[LaneId]) -> Result<(), StoreError> {
        if lanes.iter().all(|lane| self.known.read().contains_key(lane)) {
            return Ok(());
        }
        let all = store.lanes().await?;
        let mut known = self.known.write();
        for lane in all {
            let kind = Arc::from(lane.kind.as_str());
            known.entry(lane.id).or_insert_with(|| Known { lane: Arc::new(lane), kind });
        }
        Ok(())
    }
}

pub struct Dispatcher {
    pub lanes: Arc<ReadyLanes>,
    pub in_flight: Arc<InFlight>,
    pub workers: Arc<Workers>,
    /// Slots of the worker inside this process.
    pub slots: usize,
    /// Slots that wait for a job.
    pub idle: Arc<AtomicUsize>,
    /// Tells the slots that there are jobs.
    pub line: Arc<Notify>,
    /// The length of the line at which the slots tell that a claim is due.
    pub low_water: Arc<AtomicUsize>,
    /// The types that can be run here.
    pub kinds: HashSet<&'static str>,
    state: Mutex<State>,
}

struct State {
    claim: usize,
    last_full_claim: Option<Timestamp>,
    /// Who is asked first changes from round to round.
    turn: usize,
}

/// For whom a claim is made.
enum Taker {
    Slots,
    Worker(Arc<ConnectedWorker>),
}

/// What one round asks the store for.
#[derive(Default)]
struct Plan {
    asks: Vec<ClaimRequest>,
    takers: Vec<Taker>,
}

impl Dispatcher {
    pub fn new(
        lanes: Arc<ReadyLanes>,
        in_flight: Arc<InFlight>,
        workers: Arc<Workers>,
        slots: usize,
        (idle, line, low_water): (Arc<AtomicUsize>, Arc<Notify>, Arc<AtomicUsize>),
        kinds: HashSet<&'static str>,
    ) -> Dispatcher {
        let state = Mutex::new(State { claim: slots, last_full_claim: None, turn: 0 });
        Dispatcher { lanes, in_flight, workers, slots, idle, line, low_water, kinds, state }
    }

    /// How many jobs to ask for now, for the slots of this process.
    fn wanted(&self) -> usize {
        let waiting = self.in_flight.waiting();
        let claim = self.state.lock().claim;
        if claim <= self.slots {
            self.idle.load(Ordering::Acquire).saturating_sub(waiting)
        } else if waiting * 2 <= claim {
            claim - waiting
        } else {
            0
        }
    }

    pub async fn run_once(&self, engine: &Engine, now: Timestamp) -> Result<Round, StoreError> {
        let store = &*engine.store;
        let openings = self.lanes.open_due(now);
        // Taken before the claim: whoever puts a job in from here on adds the lane again.
        let candidates: Vec<LaneId> = self.lanes.lanes.lock().drain().collect();
        let slots = self.wanted();
        if slots == 0 {
            self.adapt_to_slow_jobs(now);
        }
        if candidates.is_empty() {
            return Ok(Round { next_at: self.lanes.limited.lock().opens_at, ..Round::default() });
        }
        if let Err(error) = self.lanes.learn(store, &candidates).await {
            return Err(self.put_back(candidates, error));
        }
        let candidates: Vec<Arc<Lane>> = candidates.into_iter().filter_map(|id| self.lanes.lane(id)).collect();
        let plan = self.plan(engine, &candidates, slots, now);
        self.keep_unasked(&candidates, &plan);
        if plan.asks.is_empty() {
            return Ok(Round { next_at: self.lanes.limited.lock().opens_at, ..Round::default() });
        }
        let claims = match store.job_claim(plan.asks.clone(), now).await {
            Ok(claims) => claims,
            Err(error) => {
                let asked = plan.asks.into_iter().flat_map(|ask| ask.lanes).collect();
                return Err(self.put_back(asked, error));
            }
        };
        let (handled, more) = self.keep_full(&plan, &claims);
        let limited = claims.iter().flat_map(|claim| claim.limited.iter().copied()).collect();
        let next_at = self.lanes.hold_back(limited, openings);
        self.hand_out(engine, plan, claims, now).await;
        Ok(Round { handled, more: more && self.wanted() > 0, next_at })
    }

    fn plan(&self, engine: &Engine, candidates: &[Arc<Lane>], slots: usize, now: Timestamp) -> Plan {
        let mut plan = Plan::default();
        if slots > 0 {
            let lanes =
                candidates.iter().filter(|lane| self.kinds.contains(lane.kind.as_str())).map(|lane| lane.id).collect();
            let at_once = self.idle.load(Ordering::Acquire).saturating_sub(self.in_flight.waiting());
            plan.add(Owner::Node(engine.node_id()), lanes, (slots, at_once), Taker::Slots);
        }
        let mut workers: Vec<(usize, Arc<ConnectedWorker>)> = self
            .workers
            .all()
            .into_iter()
            .filter_map(|worker| {
                let room = worker.room(now);
                (room > 0).then_some((room, worker))
            })
            .collect();
        // Those with the least to do first; among equals everybody has a turn.
        let turn = {
            let mut state = self.state.lock();
            state.turn = state.turn.wrapping_add(1);
            state.turn
        };
        let count = workers.len().max(1);
        if !workers.is_empty() {
            workers.rotate_left(turn % count);
        }
        workers.sort_by_key(|(_, worker)| worker.load().0);
        for (room, worker) in workers {
            let lanes = candidates.iter().filter(|lane| worker.serves(lane)).map(|lane| lane.id).collect();
            let owner = Owner::Worker { id: worker.id, session: worker.session };
            let room = room.min(LARGEST_CLAIM);
            plan.add(owner, lanes, (room, room), Taker::Worker(worker));
        }
        plan
    }

    /// Lanes of which nothing is asked now stay, if somebody here could serve them later.
    fn keep_unasked(&self, candidates: &[Arc<Lane>], plan: &Plan) {
        let asked: HashSet<LaneId> = plan.asks.iter().flat_map(|ask| ask.lanes.iter().copied()).collect();
        let workers = self.workers.all();
        for lane in candidates.iter().filter(|lane| !asked.contains(&lane.id)) {
            let here = self.slots > 0 && self.kinds.contains(lane.kind.as_str());
            if here || workers.iter().any(|worker| worker.serves(lane)) {
                self.lanes.lanes.lock().insert(lane.id);
            } else {
                self.lanes.unserved.lock().insert(lane.id);
            }
        }
    }

    /// A lane of which the last ask got all it wanted may have more.
    fn keep_full(&self, plan: &Plan, claims: &[ClaimResult]) -> (usize, bool) {
        let mut last: HashMap<LaneId, bool> = HashMap::new();
        let mut handled = 0;
        for (ask, claim) in plan.asks.iter().zip(claims) {
            // A worker that is refused has found nothing out about its lanes.
            let full = claim.jobs.len() >= ask.limit || claim.refused;
            handled += claim.jobs.len();
            last.extend(ask.lanes.iter().map(|lane| (*lane, full)));
        }
        let full: Vec<LaneId> = last.into_iter().filter(|(_, full)| *full).map(|(lane, _)| lane).collect();
        let more = !full.is_empty();
        self.lanes.lanes.lock().extend(full);
        (handled, more)
    }

    async fn hand_out(&self, engine: &Engine, plan: Plan, claims: Vec<ClaimResult>, now: Timestamp) {
        let mut deliveries = Vec::new();
        for ((ask, taker), claim) in plan.asks.into_iter().zip(plan.takers).zip(claims) {
            let count = claim.jobs.len();
            let mut last: Option<(LaneId, Arc<str>)> = None;
            let jobs = claim.jobs.into_iter().map(|job| {
                // Jobs of one lane mostly follow each other.
                let known = last.take().filter(|(lane, _)| *lane == job.lane);
                let (lane, kind) = known.unwrap_or_else(|| (job.lane, self.lanes.kind(job.lane)));
                last = Some((lane, kind.clone()));
                (job, kind)
            });
            match taker {
                Taker::Slots => {
                    self.adapt(count >= ask.limit, now);
                    self.in_flight.add(jobs, engine.worker_id(), now);
                    if count == 1 {
                        self.line.notify_one();
                    } else if count > 0 {
                        self.line.notify_waiters();
                    }
                }
                Taker::Worker(worker) if count > 0 => {
                    let held = self.in_flight.add_for(&worker, jobs.map(|(job, kind)| (job, kind, now)));
                    worker.takes(&held, now);
                    deliveries.push((worker, held));
                }
                Taker::Worker(_) => {}
            }
        }
        if !deliveries.is_empty() {
            engine.workers.news.notify_one();
            engine.deliver(deliveries, now).await;
        }
    }

    fn put_back(&self, lanes: Vec<LaneId>, error: StoreError) -> StoreError {
        self.lanes.lanes.lock().extend(lanes);
        error
    }

    /// Two full claims in quick succession: jobs are short and there are many.
    fn adapt(&self, full: bool, now: Timestamp) {
        let mut state = self.state.lock();
        if !full {
            state.last_full_claim = None;
            return;
        }
        if let Some(last) = state.last_full_claim {
            let took_ms = now.ms_since(last);
            if took_ms <= QUICK_MS {
                state.claim = (state.claim * 2).min(LARGEST_CLAIM);
            } else if took_ms >= SLOW_MS {
                state.claim = (state.claim / 2).max(self.slots);
            }
        }
        state.last_full_claim = Some(now);
        let low = if state.claim > self.slots { state.claim / 2 } else { usize::MAX };
        self.low_water.store(low, Ordering::Relaxed);
    }

    /// What was claimed ahead was not needed: from here on only what a free slot can start.
    pub fn claim_no_more_ahead(&self) {
        let mut state = self.state.lock();
        state.claim = self.slots;
        state.last_full_claim = None;
        self.low_water.store(usize::MAX, Ordering::Relaxed);
    }

    fn adapt_to_slow_jobs(&self, now: Timestamp) {
        let mut state = self.state.lock();
        if let Some(last) = state.last_full_claim
            && now.ms_since(last) >= SLOW_MS
        {
            state.claim = (state.claim / 2).max(self.slots);
            state.last_full_claim = Some(now);
        }
    }
}

impl Plan {
    fn add(&mut self, owner: Owner, lanes: Vec<LaneId>, (limit, at_once): (usize, usize), taker: Taker) {
        if !lanes.is_empty() {
            self.asks.push(ClaimRequest { owner, lanes, limit, at_once });
            self.takers.push(taker);
        }
    }
}
