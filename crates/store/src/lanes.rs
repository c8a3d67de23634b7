//! A lane is one queue, type and priority. Its ready jobs are claimed first in, first out. Jobs with a `concurrencyKey` have
//! lanes of their own, with one key queue per key.
//!
//! A claim reads only the lanes that it can serve, so a backlog in other lanes costs nothing. Counters and lists are kept by
//! lane. How a queue weighs priority against waiting time is decided when jobs are claimed, not when they are submitted.

use std::collections::{HashMap, HashSet};

use faena_domain::{NewJob, Priority, schedule::JobTemplate};
use parking_lot::RwLock;

use crate::{Result, StoreError};

pub type LaneId = i32;

/// A caller that needs more lanes probably puts ids into type or queue names.
pub const MAX_LANES: usize = 20_000;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

/// The lanes this process has seen. Lanes are never removed, so the cache stays valid.
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

    pub fn all(&self) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = self.inner.read().by_id.values().cloned().collect();
        lanes.sort_by_key(|lane| lane.id);
        lanes
    }

    pub fn len(&self) -> usize {
        self.inner.read().by_id.len()
    }
}

fn index_of(name: LaneName) -> usize {
    usize::try_from(name.priority.rank()).unwrap_or(0) * 2 + usize::from(name.keyed)
}

pub fn too_many_lanes() -> StoreError {
    StoreError::Invalid(vec![faena_domain::FieldError::new(
        "type",
        format!(
            "would create more than {MAX_LANES} combinations of queue, type and priority; put ids into the payload"
        ),
    )])
}
