//! Support for an external queue, which is outside the database: it follows which jobs become ready, and compares
//! itself with the database.
//!
//! The database stays authoritative. Changes are announced in memory after their commits. If a node dies before it
//! announces a change, the next comparison finds the difference.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use async_trait::async_trait;
use faena_domain::{JobId, Timestamp};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{LaneId, Result};

/// Lets an external queue follow the queue of the database and compare itself with it.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// Returns the feed of changes of this process. It is empty until it is switched on.
    fn queue_feed(&self) -> &QueueFeed;

    /// Signals on every node that these lanes have ready jobs.
    fn signal_ready(&self, lanes: &[LaneId]);

    /// Returns ready jobs of a lane in claim order, after a position.
    async fn ready_page(&self, lane: LaneId, after: Option<QueuePosition>, limit: usize) -> Result<Vec<QueuePosition>>;

    /// Returns jobs that wait for a time, by that time, after a position.
    async fn delayed_page(&self, after: Option<QueuePosition>, limit: usize) -> Result<Vec<(LaneId, QueuePosition)>>;

    /// Returns failed jobs of a lane with the times of their failures, ordered by id, after the job `after`.
    async fn dead_page(&self, lane: LaneId, after: Option<JobId>, limit: usize) -> Result<Vec<QueuePosition>>;

    /// Returns the location of each of these jobs.
    async fn queue_locations(&self, ids: Vec<JobId>) -> Result<Vec<QueueLocation>>;
}

/// Position of a job in the order of a queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct QueuePosition {
    pub at: Timestamp,
    pub id: JobId,
}

/// Location of a job from the point of view of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueLocation {
    Ready {
        lane: LaneId,
        ready_at: Timestamp,
    },
    Delayed {
        lane: LaneId,
        due_at: Timestamp,
    },
    InFlight,
    Failed {
        at: Timestamp,
    },
    /// Completed, cancelled, waiting for its parents, or unknown.
    Elsewhere,
}

/// A job that has become ready, waits for a time, or has left the queue without a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueChange {
    pub lane: LaneId,
    pub at: Timestamp,
    pub id: JobId,
    pub kind: QueueChangeKind,
    /// Order among all changes and stamps of a [`QueueFeed`].
    pub stamp: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueChangeKind {
    Ready,
    Delayed,
    /// It was cancelled, deleted or changed, or has expired. If it is still in a queue, another change gives its
    /// location.
    Left,
}

impl QueueChange {
    pub fn ready(lane: LaneId, at_ms: i64, id: JobId) -> QueueChange {
        QueueChange { lane, at: Timestamp::from_ms(at_ms), id, kind: QueueChangeKind::Ready, stamp: 0 }
    }

    pub fn delayed(lane: LaneId, at_ms: i64, id: JobId) -> QueueChange {
        QueueChange { kind: QueueChangeKind::Delayed, ..QueueChange::ready(lane, at_ms, id) }
    }

    /// Creates the change of a job that has left a lane without a claim.
    pub fn left(lane: LaneId, id: JobId) -> QueueChange {
        QueueChange { kind: QueueChangeKind::Left, ..QueueChange::ready(lane, 0, id) }
    }
}

/// Maximum number of unread changes. Beyond that they are dropped, and a comparison has to find them.
const MAX_CHANGES: usize = 500_000;

/// The changes of this process, in the order of their commits.
#[derive(Default)]
pub struct QueueFeed {
    is_on: AtomicBool,
    changes: Mutex<Vec<QueueChange>>,
    has_overflowed: AtomicBool,
    stamps: AtomicU64,
    wakeup: Arc<Notify>,
}

impl QueueFeed {
    pub fn switch_on(&self) {
        self.is_on.store(true, Ordering::Release);
    }

    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Announces changes, after their commit.
    pub(crate) fn add(&self, changes: impl IntoIterator<Item = QueueChange>) {
        if !self.is_on() {
            return;
        }
        let mut waiting = self.changes.lock();
        waiting.extend(changes.into_iter().map(|change| QueueChange { stamp: self.stamp(), ..change }));
        if waiting.len() > MAX_CHANGES {
            waiting.clear();
            self.has_overflowed.store(true, Ordering::Release);
        }
        if !waiting.is_empty() || self.has_overflowed.load(Ordering::Acquire) {
            self.wakeup.notify_one();
        }
    }

    /// Takes up to `limit` changes.
    pub fn take(&self, limit: usize) -> Vec<QueueChange> {
        let mut waiting = self.changes.lock();
        let count = limit.min(waiting.len());
        waiting.drain(..count).collect()
    }

    /// Returns whether changes were dropped since the last call.
    pub fn take_overflow(&self) -> bool {
        self.has_overflowed.swap(false, Ordering::AcqRel)
    }

    /// Returns a number that orders an action among the changes: those that were added before have smaller numbers.
    pub fn stamp(&self) -> u64 {
        self.stamps.fetch_add(1, Ordering::AcqRel)
    }

    /// Returns the notifier that fires when there are changes.
    pub fn wakeup(&self) -> Arc<Notify> {
        self.wakeup.clone()
    }

    pub fn len(&self) -> usize {
        self.changes.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
