//! Carries out actions on many jobs, a few jobs per round, no faster than was asked for.
//!
//! How far an action has come is stored with each step, in its transaction, and a step counts only if nobody else has made
//! it. So it is safe on every node at once, goes on after a crash, and acts on no job twice.

use std::time::Duration;

use faena_domain::{BulkId, Timestamp};
use faena_store::{Bulk, BulkStep, NewBulk, Store, StoreError};

use crate::{Engine, Round, config::ms};

/// Jobs per step: they share a transaction.
const MOST: usize = 50;
/// One that shall be done at once is driven by whoever asked for it; should that one die, a loop goes on after this time.
const LEASE: Duration = Duration::from_secs(5);
/// Steps of such a one per round.
const STEPS: usize = 100;

pub async fn run_once(store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
    let Some(bulk) = store.bulk_due().await? else { return Ok(Round::default()) };
    if let Some(next_at) = bulk.due_at.filter(|at| *at > now) {
        return Ok(Round { next_at: Some(next_at), ..Round::default() });
    }
    let (id, before) = (bulk.id, bulk.done + bulk.skipped);
    let steps = if bulk.per_second.is_some() { 1 } else { STEPS };
    let mut next = Some(bulk);
    let mut after = before;
    for _ in 0..steps {
        let Some(bulk) = next.filter(|bulk| bulk.finished_at.is_none()) else { break };
        match step(store, bulk, now).await {
            Ok(()) => {}
            // It would fail again and hold up all that are due after it.
            Err(error @ (StoreError::Broken(_) | StoreError::Invalid(_))) => {
                tracing::error!(bulk = %id, %error, "a bulk action is given up");
                store.bulk_stop(id, &format!("faena: {error}"), now).await?;
            }
            Err(error) => return Err(error),
        }
        next = store.bulk_get(id).await?;
        after = next.as_ref().map_or(after, |bulk| bulk.done + bulk.skipped);
    }
    let handled = after.saturating_sub(before);
    Ok(Round { handled: usize::try_from(handled).unwrap_or(usize::MAX), more: true, next_at: None })
}

/// ActionCounts on the next few jobs. Should somebody else have done so, nothing happens.
async fn step(store: &dyn Store, bulk: Bulk, now: Timestamp) -> Result<(), StoreError> {
    let per_second = bulk.per_second.map(|n| n as usize);
    let size = per_second.map_or(MOST, |n| (n / 10).clamp(1, MOST));
    let found = store.job_find(&bulk.filter, bulk.last, bulk.upto, size).await?;
    let due_at = match found.next {
        Some(next) if next < bulk.upto => Some(match per_second {
            Some(n) => now.plus_ms(i64::try_from((found.ids.len() * 1_000).div_ceil(n)).unwrap_or(1_000)),
            None => now.plus_ms(ms(LEASE)),
        }),
        _ => None,
    };
    let last = found.next.or(found.ids.last().copied());
    store.bulk_step(BulkStep { bulk, ids: found.ids, last, due_at }, now).await?;
    Ok(())
}

impl Engine {
    /// Keeps an action that the loop of any node carries out at its rate.
    pub async fn bulk_begin(&self, bulk: NewBulk, now: Timestamp) -> Result<(), StoreError> {
        self.store.bulk_begin(bulk, now, now).await?;
        self.bulk.notify_one();
        Ok(())
    }

    /// Carries out an action at once and answers with how it stands in the end, or after `patience`; then a loop goes on.
    pub async fn bulk_run(&self, bulk: NewBulk, grace_periods: Duration, now: Timestamp) -> Result<Bulk, StoreError> {
        let id = bulk.id;
        self.store.bulk_begin(bulk, now.plus_ms(ms(LEASE)), now).await?;
        let until = now.plus_ms(ms(grace_periods));
        loop {
            let bulk = self.bulk_of(id).await?;
            if bulk.finished_at.is_some() || Timestamp::now() > until {
                return Ok(bulk);
            }
            step(&*self.store, bulk, Timestamp::now()).await?;
        }
    }

    async fn bulk_of(&self, id: BulkId) -> Result<Bulk, StoreError> {
        let bulk = self.store.bulk_get(id).await?;
        bulk.ok_or_else(|| StoreError::Broken("a bulk action has disappeared".into()))
    }
}
