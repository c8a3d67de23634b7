//! Claims ready jobs for the free slots of this process's worker.
//!
//! A slot that becomes free is filled at once. While jobs are short, more are claimed at a time than there are slots, up to
//! what is worth a few milliseconds of work, so that one transaction serves many; while they are long, none is claimed
//! before a slot is free, so that no job waits here while another node could run it.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use faena_domain::{NodeId, Timestamp};
use faena_store::{ClaimAsk, LaneId, Store, StoreError};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{Round, held::Hands};

/// The most jobs that one claim takes.
const LARGEST_CLAIM: usize = 2_000;
/// A batch that is used up faster than this is followed by a larger one; slower than the second, by a smaller one.
const QUICK_MS: i64 = 25;
const SLOW_MS: i64 = 150;

/// Lanes that may have ready jobs.
#[derive(Default)]
pub struct ReadyLanes {
    lanes: Mutex<HashSet<LaneId>>,
    pub nudge: Arc<Notify>,
}

impl ReadyLanes {
    pub fn add(&self, lane: LaneId) {
        self.lanes.lock().insert(lane);
        self.nudge.notify_one();
    }
}

pub struct Dispatcher {
    pub lanes: Arc<ReadyLanes>,
    pub hands: Arc<Hands>,
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
    /// The type of each lane that can be run here. Lanes never change.
    runnable: HashMap<LaneId, Option<Arc<str>>>,
}

impl Dispatcher {
    pub fn new(
        lanes: Arc<ReadyLanes>,
        hands: Arc<Hands>,
        slots: usize,
        idle: Arc<AtomicUsize>,
        line: Arc<Notify>,
        low_water: Arc<AtomicUsize>,
        kinds: HashSet<&'static str>,
    ) -> Dispatcher {
        let state = Mutex::new(State { claim: slots, last_full_claim: None, runnable: HashMap::new() });
        Dispatcher { lanes, hands, slots, idle, line, low_water, kinds, state }
    }

    /// How many jobs to ask for now.
    fn wanted(&self) -> usize {
        let waiting = self.hands.waiting();
        let claim = self.state.lock().claim;
        if claim <= self.slots {
            self.idle.load(Ordering::Acquire).saturating_sub(waiting)
        } else if waiting * 2 <= claim {
            claim - waiting
        } else {
            0
        }
    }

    /// Whether so little is left in line that a claim is due.
    pub fn is_hungry(&self) -> bool {
        self.wanted() > 0
    }

    pub async fn run_once(&self, store: &dyn Store, node: NodeId, now: Timestamp) -> Result<Round, StoreError> {
        let limit = self.wanted();
        if limit == 0 {
            self.adapt_to_slow_jobs(now);
            return Ok(Round::default());
        }
        // Taken before the claim: whoever puts a job in from here on adds the lane again.
        let candidates: Vec<LaneId> = self.lanes.lanes.lock().drain().collect();
        if candidates.is_empty() {
            return Ok(Round::default());
        }
        let lanes = match self.runnable(store, &candidates).await {
            Ok(lanes) => lanes,
            Err(error) => return Err(self.put_back(candidates, error)),
        };
        if lanes.is_empty() {
            return Ok(Round::default());
        }
        let ask = ClaimAsk { node, lanes: lanes.clone(), limit };
        let claim = match store.job_claim(ask, now).await {
            Ok(claim) => claim,
            Err(error) => return Err(self.put_back(lanes, error)),
        };
        let count = claim.jobs.len();
        if count >= limit {
            let mut known = self.lanes.lanes.lock();
            known.extend(lanes);
        }
        self.adapt(count >= limit, now);
        {
            let state = self.state.lock();
            let jobs = claim.jobs.into_iter().map(|job| {
                let kind = state.runnable.get(&job.lane).cloned().flatten().unwrap_or_else(|| Arc::from(""));
                (job, kind)
            });
            self.hands.take_in(jobs, Timestamp::now());
        }
        if count == 1 {
            self.line.notify_one();
        } else if count > 0 {
            self.line.notify_waiters();
        }
        Ok(Round { handled: count, more: count >= limit && self.is_hungry(), next_at: None })
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

    fn adapt_to_slow_jobs(&self, now: Timestamp) {
        let mut state = self.state.lock();
        if let Some(last) = state.last_full_claim
            && now.ms_since(last) >= SLOW_MS
        {
            state.claim = (state.claim / 2).max(self.slots);
            state.last_full_claim = Some(now);
        }
    }

    async fn runnable(&self, store: &dyn Store, lanes: &[LaneId]) -> Result<Vec<LaneId>, StoreError> {
        let unknown = {
            let state = self.state.lock();
            lanes.iter().any(|lane| !state.runnable.contains_key(lane))
        };
        if unknown {
            let all = store.lanes().await?;
            let mut state = self.state.lock();
            for lane in all {
                let kind = self.kinds.contains(lane.kind.as_str()).then(|| lane.kind.into());
                state.runnable.insert(lane.id, kind);
            }
        }
        let state = self.state.lock();
        // A lane that the store does not know yet comes again with the next poll.
        Ok(lanes.iter().copied().filter(|lane| matches!(state.runnable.get(lane), Some(Some(_)))).collect())
    }
}
