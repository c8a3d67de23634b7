//! A lane is one queue, type and priority. Ready jobs stand in line per lane, first in first out.
//!
//! So a claim reads just the lanes that it can serve, whatever is piled up in the others; counters and lists go by lane; and
//! how a queue weighs priorities against waiting is decided when a job leaves, not when it comes.

use std::collections::HashMap;

use faena_domain::Priority;
use parking_lot::RwLock;

use crate::{Result, StoreError};

pub type LaneId = i32;

/// More than this many is a sign that an id has been put into a type or queue name.
pub const MAX_LANES: usize = 20_000;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Lane {
    pub id: LaneId,
    pub queue: String,
    pub kind: String,
    pub priority: Priority,
}

/// The lanes this process has met. Lanes are never removed, so what is in here stays true.
#[derive(Default)]
pub struct LaneCache {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    by_id: HashMap<LaneId, Lane>,
    /// Queue, type, priority.
    by_name: HashMap<String, HashMap<String, [Option<LaneId>; 4]>>,
}

impl LaneCache {
    pub fn id_of(&self, queue: &str, kind: &str, priority: Priority) -> Option<LaneId> {
        let inner = self.inner.read();
        inner.by_name.get(queue)?.get(kind)?[place(priority)]
    }

    pub fn get(&self, id: LaneId) -> Option<Lane> {
        self.inner.read().by_id.get(&id).cloned()
    }

    pub fn require(&self, id: LaneId) -> Result<Lane> {
        self.get(id).ok_or_else(|| StoreError::Broken(format!("lane {id} is not known")))
    }

    pub fn contains(&self, id: LaneId) -> bool {
        self.inner.read().by_id.contains_key(&id)
    }

    pub fn insert(&self, lanes: impl IntoIterator<Item = Lane>) {
        let mut inner = self.inner.write();
        for lane in lanes {
            let kinds = inner.by_name.entry(lane.queue.clone()).or_default();
            kinds.entry(lane.kind.clone()).or_default()[place(lane.priority)] = Some(lane.id);
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

fn place(priority: Priority) -> usize {
    usize::try_from(priority.rank()).unwrap_or(0)
}

pub fn too_many_lanes() -> StoreError {
    StoreError::Invalid(vec![faena_domain::Fault::new(
        "type",
        format!(
            "would be one of more than {MAX_LANES} combinations of queue, type and priority; put ids into the payload"
        ),
    )])
}
