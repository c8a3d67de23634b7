//! A lane is one queue, type and priority. Its ready jobs are claimed first in, first out. Jobs with a `concurrencyKey` have
//! lanes of their own, with one key queue per key.
//!
//! A claim reads only the lanes that it can serve, so a backlog in other lanes costs nothing. Counters and lists are kept by
//! lane. How a queue weighs priority against waiting time is decided when jobs are claimed, not when they are submitted.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use faena_domain::{NewJob, Priority, schedule::JobTemplate};
use parking_lot::RwLock;

use crate::{Counts, Result, StoreError, Tally};

pub type LaneId = i32;

/// Maximum number of lanes of a database. A caller that needs more probably puts ids into type or queue names.
pub const MAX_LANES: usize = 20_000;

/// Id under which the totals of reclaimed lanes are kept if their queue has no other lane, so that totals only grow.
pub const NO_LANE: LaneId = 0;

/// Lists, counts and reclaims lanes.
#[async_trait]
pub trait LaneStore: Send + Sync + 'static {
    /// Returns all lanes that exist.
    async fn lanes(&self) -> Result<Vec<Lane>>;

    /// Returns how many lanes exist and how many may exist.
    async fn lane_usage(&self) -> Result<LaneUsage>;

    /// Deletes up to `limit` lanes without jobs, and returns how many.
    ///
    /// A submission that uses the id of a reclaimed lane, because its node does not know yet that the lane was
    /// reclaimed, creates the lane again. The totals of the lane are added to another lane of its queue.
    ///
    /// PostgreSQL: takes three calls. The first retires the lane, the others wait until every transaction that may
    /// still use it has ended.
    async fn lane_reclaim(&self, limit: usize) -> Result<usize>;
}

/// How many lanes exist, and how many a database may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneUsage {
    pub used: usize,
    pub max: usize,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Lane {
    pub id: LaneId,
    pub queue: String,
    pub kind: String,
    pub priority: Priority,
    /// Its jobs have a `concurrencyKey` and form one key queue per key.
    pub keyed: bool,
}

/// What identifies a lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaneName<'a> {
    pub queue: &'a str,
    pub kind: &'a str,
    pub priority: Priority,
    pub keyed: bool,
}

impl<'a> LaneName<'a> {
    pub fn of(job: &'a NewJob) -> LaneName<'a> {
        let keyed = job.options.concurrency_key.is_some();
        LaneName { queue: &job.queue, kind: &job.kind, priority: job.priority, keyed }
    }

    pub fn of_template(job: &'a JobTemplate) -> LaneName<'a> {
        let keyed = job.options.concurrency_key.is_some();
        LaneName { queue: &job.queue, kind: &job.kind, priority: job.priority, keyed }
    }

    pub fn with_id(self, id: LaneId) -> Lane {
        Lane { id, queue: self.queue.into(), kind: self.kind.into(), priority: self.priority, keyed: self.keyed }
    }
}

impl Lane {
    pub fn name(&self) -> LaneName<'_> {
        LaneName { queue: &self.queue, kind: &self.kind, priority: self.priority, keyed: self.keyed }
    }
}

/// The lanes this process has seen.
///
/// A lane never changes, and its id is not used again. A node may know lanes that another node has reclaimed; PostgreSQL rejects
/// submissions to them.
#[derive(Default)]
pub struct LaneCache {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    by_id: HashMap<LaneId, Lane>,
    /// Queue, then type, then priority and whether it is keyed.
    by_name: HashMap<String, HashMap<String, [Option<LaneId>; 8]>>,
    keyed: HashSet<LaneId>,
}

impl LaneCache {
    pub fn id_of(&self, name: LaneName) -> Option<LaneId> {
        let inner = self.inner.read();
        inner.by_name.get(name.queue)?.get(name.kind)?[index_of(name)]
    }

    /// Returns whether any of these lanes is keyed. An unknown lane counts as keyed.
    pub fn any_keyed(&self, lanes: impl IntoIterator<Item = LaneId>) -> bool {
        let inner = self.inner.read();
        let mut last = None;
        lanes.into_iter().any(|lane| {
            // Consecutive entries are usually equal.
            let same = last.replace(lane) == Some(lane);
            !same && (inner.keyed.contains(&lane) || !inner.by_id.contains_key(&lane))
        })
    }

    pub fn get(&self, id: LaneId) -> Option<Lane> {
        self.inner.read().by_id.get(&id).cloned()
    }

    pub fn require(&self, id: LaneId) -> Result<Lane> {
        self.get(id).ok_or_else(|| StoreError::Internal(format!("lane {id} is unknown").into()))
    }

    pub fn contains(&self, id: LaneId) -> bool {
        self.inner.read().by_id.contains_key(&id)
    }

    pub fn insert(&self, lanes: impl IntoIterator<Item = Lane>) {
        let mut inner = self.inner.write();
        for lane in lanes {
            let kinds = inner.by_name.entry(lane.queue.clone()).or_default();
            kinds.entry(lane.kind.clone()).or_default()[index_of(lane.name())] = Some(lane.id);
            if lane.keyed {
                inner.keyed.insert(lane.id);
            }
            inner.by_id.insert(lane.id, lane);
        }
    }

    /// Removes lanes that were reclaimed.
    pub fn remove(&self, lanes: &[LaneId]) {
        let mut inner = self.inner.write();
        for id in lanes {
            let Some(lane) = inner.by_id.remove(id) else { continue };
            inner.keyed.remove(id);
            inner.forget_name(&lane);
        }
    }

    /// Replaces the cache. Lanes in `retired` are known by id but not by name, so a submission asks the database for
    /// them.
    pub fn replace(&self, lanes: Vec<Lane>, retired: &[LaneId]) {
        let fresh = LaneCache::default();
        fresh.insert(lanes);
        let mut fresh = fresh.inner.into_inner();
        for lane in retired.iter().filter_map(|id| fresh.by_id.get(id).cloned()).collect::<Vec<_>>() {
            fresh.forget_name(&lane);
        }
        *self.inner.write() = fresh;
    }

    pub fn all(&self) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = self.inner.read().by_id.values().cloned().collect();
        lanes.sort_by_key(|lane| lane.id);
        lanes
    }

    pub fn len(&self) -> usize {
        self.inner.read().by_id.len()
    }
}

/// Returns the lanes of these queues.
pub fn lanes_of_queues(lanes: &[Lane], queues: &[String]) -> Vec<LaneId> {
    lanes.iter().filter(|lane| queues.contains(&lane.queue)).map(|lane| lane.id).collect()
}

impl Inner {
    fn forget_name(&mut self, lane: &Lane) {
        let Some(kinds) = self.by_name.get_mut(&lane.queue) else { return };
        if let Some(ids) = kinds.get_mut(&lane.kind) {
            ids[index_of(lane.name())] = None;
            if ids.iter().all(Option::is_none) {
                kinds.remove(&lane.kind);
            }
        }
        if kinds.is_empty() {
            self.by_name.remove(&lane.queue);
        }
    }
}

/// Returns those of `lanes` that have no job in any state, according to the counters.
pub fn empty_lanes(lanes: &[Lane], counts: &Counts) -> Vec<LaneId> {
    let used: HashSet<LaneId> = counts
        .by_lane
        .iter()
        .filter(|((_, tally), n)| (*tally as i16) < Tally::Ran as i16 && **n != 0)
        .map(|((lane, _), _)| *lane)
        .collect();
    lanes.iter().map(|lane| lane.id).filter(|id| !used.contains(id)).collect()
}

/// Returns which lane takes over the counters of each lane in `deleted`: another lane of its queue, or [`NO_LANE`].
pub fn successors(lanes: &[Lane], deleted: &[LaneId]) -> Vec<(LaneId, LaneId)> {
    let deleted: HashSet<LaneId> = deleted.iter().copied().collect();
    let mut first: HashMap<&str, LaneId> = HashMap::new();
    for lane in lanes.iter().filter(|lane| !deleted.contains(&lane.id)) {
        first.entry(&lane.queue).or_insert(lane.id);
    }
    let of = |lane: &Lane| (lane.id, first.get(lane.queue.as_str()).copied().unwrap_or(NO_LANE));
    lanes.iter().filter(|lane| deleted.contains(&lane.id)).map(of).collect()
}

fn index_of(name: LaneName) -> usize {
    usize::try_from(name.priority.rank()).unwrap_or(0) * 2 + usize::from(name.keyed)
}

pub fn too_many_lanes(max: usize) -> StoreError {
    StoreError::Invalid(vec![faena_domain::FieldError::new(
        "type",
        format!(
            "the database has {max} combinations of queue, type and priority, and may not have more; put ids into the payload instead \
             of the names of types and queues; a combination is reclaimed when its last job is deleted"
        ),
    )])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(id: LaneId, queue: &str, kind: &str) -> Lane {
        Lane { id, queue: queue.into(), kind: kind.into(), priority: Priority::Normal, keyed: false }
    }

    #[test]
    fn a_lane_without_a_job_is_empty_whatever_it_has_counted() {
        let mut counts = Counts::default();
        counts.by_lane.insert((1, Tally::Completed), 0);
        counts.by_lane.insert((1, Tally::RemovedCompleted), 7);
        counts.by_lane.insert((2, Tally::InFlight), 1);
        let lanes = [lane(1, "a", "x"), lane(2, "a", "y"), lane(3, "b", "x")];
        assert_eq!(empty_lanes(&lanes, &counts), [1, 3]);
        assert_eq!(successors(&lanes, &[1, 3]), [(1, 2), (3, NO_LANE)]);
    }

    #[test]
    fn a_removed_lane_is_known_neither_by_id_nor_by_name() {
        let cache = LaneCache::default();
        cache.insert([lane(1, "a", "x"), lane(2, "a", "y")]);
        cache.remove(&[1]);
        assert_eq!((cache.id_of(lane(1, "a", "x").name()), cache.contains(1), cache.len()), (None, false, 1));
        cache.replace(vec![lane(2, "a", "y"), lane(3, "b", "y")], &[3]);
        assert_eq!((cache.id_of(lane(3, "b", "y").name()), cache.contains(3)), (None, true));
        assert_eq!(cache.id_of(lane(2, "a", "y").name()), Some(2));
    }
}
