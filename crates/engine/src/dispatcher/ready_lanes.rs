//! The lanes that may have ready jobs, as this node knows them.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use faena_domain::Timestamp;
use faena_store::{Lane, LaneId, Limited, Store, StoreError};
use parking_lot::{Mutex, RwLock};

use crate::wakeups::Wakeups;

pub struct ReadyLanes {
    ready: Mutex<HashSet<LaneId>>,
    /// Lanes that no worker of this node can serve. They become ready again when a worker connects.
    unserved: Mutex<HashSet<LaneId>>,
    limited: Mutex<LimitedLanes>,
    /// The lanes loaded so far. A lane never changes, and its id is not used again.
    known: RwLock<HashMap<LaneId, KnownLane>>,
    wakeups: Wakeups,
}

/// Lanes whose jobs cannot start because of a limit or a pause.
#[derive(Default)]
struct LimitedLanes {
    lanes: HashSet<LaneId>,
    /// When a rate allows the first of them to continue.
    opens_at: Option<Timestamp>,
    /// Counts how often they were opened, so that a claim that overlapped with an opening is recognised.
    openings: u64,
}

struct KnownLane {
    lane: Arc<Lane>,
    /// Name of its type, shared by all jobs in flight.
    kind: Arc<str>,
}

impl ReadyLanes {
    pub(crate) fn new(wakeups: Wakeups) -> ReadyLanes {
        ReadyLanes {
            ready: Mutex::default(),
            unserved: Mutex::default(),
            limited: Mutex::default(),
            known: RwLock::default(),
            wakeups,
        }
    }

    /// Adds a lane that may have ready jobs, and wakes the dispatcher.
    pub fn add(&self, lane: LaneId) {
        self.ready.lock().insert(lane);
        self.wakeups.lanes_ready();
    }

    /// Makes unserved lanes ready again, because a worker may be able to serve them now.
    pub fn reconsider(&self) {
        let unserved: Vec<LaneId> = self.unserved.lock().drain().collect();
        self.ready.lock().extend(unserved);
        self.wakeups.lanes_ready();
    }

    /// Makes limited lanes ready again, because a job that counted towards a limit has ended or a rule has changed.
    pub fn open_limited(&self) {
        let lanes: Vec<LaneId> = {
            let mut limited = self.limited.lock();
            limited.openings += 1;
            limited.opens_at = None;
            limited.lanes.drain().collect()
        };
        if !lanes.is_empty() {
            self.ready.lock().extend(lanes);
            self.wakeups.lanes_ready();
        }
    }

    /// Opens the limited lanes if a rate allows it by now. Returns the number of openings so far.
    pub(super) fn open_due(&self, now: Timestamp) -> u64 {
        if self.limited.lock().opens_at.is_some_and(|at| at <= now) {
            self.open_limited();
        }
        self.limited.lock().openings
    }

    /// Keeps lanes until their limits allow a start, and returns when a rate opens the first of them.
    ///
    /// If limited lanes were opened since `openings` was read, the lanes stay ready instead.
    pub(super) fn mark_limited(&self, lanes: Vec<Limited>, openings: u64) -> Option<Timestamp> {
        let mut limited = self.limited.lock();
        if limited.openings != openings && !lanes.is_empty() {
            self.ready.lock().extend(lanes.iter().map(|limited| limited.lane));
            self.wakeups.lanes_ready();
            return limited.opens_at;
        }
        for Limited { lane, until } in lanes {
            limited.lanes.insert(lane);
            limited.opens_at = [limited.opens_at, until].into_iter().flatten().min();
        }
        limited.opens_at
    }

    /// Returns when a rate opens the first of the limited lanes.
    pub(super) fn opens_at(&self) -> Option<Timestamp> {
        self.limited.lock().opens_at
    }

    pub(super) fn take(&self) -> Vec<LaneId> {
        self.ready.lock().drain().collect()
    }

    /// Makes lanes ready for the next round without waking the dispatcher.
    pub(super) fn put_back(&self, lanes: Vec<LaneId>) {
        self.ready.lock().extend(lanes);
    }

    pub(super) fn mark_unserved(&self, lanes: impl IntoIterator<Item = LaneId>) {
        self.unserved.lock().extend(lanes);
    }

    pub fn lane(&self, id: LaneId) -> Option<Arc<Lane>> {
        self.known.read().get(&id).map(|known| known.lane.clone())
    }

    pub(super) fn kind(&self, id: LaneId) -> Arc<str> {
        self.known.read().get(&id).map_or_else(|| Arc::from(""), |known| known.kind.clone())
    }

    /// Loads lanes from the store, unless all of these are known.
    pub async fn load(&self, store: &dyn Store, lanes: &[LaneId]) -> Result<(), StoreError> {
        if lanes.iter().all(|lane| self.known.read().contains_key(lane)) {
            return Ok(());
        }
        let all = store.lanes().await?;
        let mut known = self.known.write();
        // Lanes that were reclaimed have no jobs.
        let ids: HashSet<LaneId> = all.iter().map(|lane| lane.id).collect();
        known.retain(|id, _| ids.contains(id));
        for lane in all {
            let kind = Arc::from(lane.kind.as_str());
            known.entry(lane.id).or_insert_with(|| KnownLane { lane: Arc::new(lane), kind });
        }
        Ok(())
    }
}
