//! Gives back the jobs of server processes that died.
//!
//! Each process renews its lease; when that has run out, any other process takes its jobs: those known to have started cost a
//! try, the others do not. A process that was itself cut off (asleep, or without database) first lives through one whole
//! lease of its own before it judges others.
//!
//! Safe on every node at once: the block of a hand-out is deleted first, and only one can delete it.

use faena_domain::Timestamp;
use faena_store::{GracePeriods, Store, StoreError};
use parking_lot::Mutex;

use crate::{Round, guardian::ACTOR};

/// Since when this process has been in touch with the database without a break.
#[derive(Default)]
pub struct LeaseHistory(Mutex<Option<(Timestamp, Timestamp)>>);

impl LeaseHistory {
    /// Told at every renewal.
    pub fn renewed(&self, now: Timestamp, lease_ms: i64) {
        let mut lease_history = self.0.lock();
        let since = match *lease_history {
            Some((since, last)) if now.ms_since(last) <= lease_ms => since,
            _ => now,
        };
        *lease_history = Some((since, now));
    }

    fn can_reap(&self, now: Timestamp, lease_ms: i64) -> bool {
        matches!(*self.0.lock(), Some((since, last)) if now.ms_since(since) >= lease_ms && now.ms_since(last) <= lease_ms)
    }
}

pub async fn run_once(
    store: &dyn Store,
    lease_history: &LeaseHistory,
    lease_ms: i64,
    grace_periods: GracePeriods,
    now: Timestamp,
) -> Result<Round, StoreError> {
    // SQLite: whoever held something before this process is dead for certain.
    if store.engine() != "sqlite" && !lease_history.can_reap(now, lease_ms) {
        return Ok(Round::default());
    }
    let freed = store.node_recover(grace_periods, now).await?;
    let handled = freed.orphaned + freed.returned;
    if handled > 0 || freed.nodes > 0 {
        tracing::warn!(
            actor = ACTOR,
            nodes = freed.nodes,
            orphaned = freed.orphaned,
            returned = freed.returned,
            "a server died; its jobs go on elsewhere"
        );
    }
    Ok(Round { handled, more: handled > 0, next_at: None })
}
