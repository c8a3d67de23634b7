//! Runs actions on many jobs or tasks, a few per round, no faster than requested.
//!
//! Each step stores its progress in its own transaction and counts only if no other node has made the same step. So the
//! loop is safe to run on all nodes concurrently, continues after a crash, and acts on nothing twice.

use std::time::Duration;

use faena_domain::{BulkId, JobId, TaskId, Timestamp};
use faena_store::{Bulk, BulkStep, BulkWork, NewBulk, Store, StoreError};
use uuid::Uuid;

use crate::{Engine, EngineError, Round, config::ms};

/// Jobs or tasks per step: they share a transaction.
const MAX_STEP: usize = 50;
/// Jobs or tasks that an action without a rate searches for at a time. The search takes longer than a step if there are many lanes.
const MAX_FOUND: usize = 1_000;
/// An action without a rate is run by the caller that requested it. If that caller dies, a loop continues after this time.
const LEASE: Duration = Duration::from_secs(5);
/// Searches per round of an action without a rate. Each is followed by several steps.
const MAX_SEARCHES: usize = 100;

pub async fn run_once(store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
    let Some(bulk) = store.bulk_due().await? else { return Ok(Round::default()) };
    if let Some(next_at) = bulk.due_at.filter(|at| *at > now) {
        return Ok(Round::idle_until(Some(next_at)));
    }
    let (id, before) = (bulk.id, bulk.done + bulk.skipped);
    let searches = if bulk.per_second.is_some() { 1 } else { MAX_SEARCHES };
    let mut next = Some(bulk);
    let mut after = before;
    for _ in 0..searches {
        let Some(bulk) = next.filter(|bulk| bulk.finished_at.is_none()) else { break };
        match search_and_step(store, bulk, now).await {
            Ok(()) => {}
            // The action would fail again and delay all actions that are due after it.
            Err(error @ (StoreError::Internal { .. } | StoreError::Invalid(_))) => {
                tracing::error!(bulk = %id, %error, "bulk action stopped by an error");
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

/// Searches for the next jobs or tasks and acts on them, a few per step. Stops if another node has made a step.
async fn search_and_step(store: &dyn Store, mut bulk: Bulk, now: Timestamp) -> Result<(), StoreError> {
    let per_second = bulk.per_second.map(|n| n as usize);
    let size = per_second.map_or(MAX_STEP, |n| (n / 10).clamp(1, MAX_STEP));
    let (ids, next) = find(store, &bulk, if per_second.is_some() { size } else { MAX_FOUND }).await?;
    let end = next.filter(|next| *next < bulk.up_to);
    let pause_ms = match per_second {
        Some(n) => i64::try_from((ids.len() * 1_000).div_ceil(n)).unwrap_or(1_000),
        None => ms(LEASE),
    };
    let mut parts: Vec<&[Uuid]> = ids.chunks(size).collect();
    if parts.is_empty() {
        parts.push(&[]);
    }
    let count = parts.len();
    for (index, part) in parts.into_iter().enumerate() {
        let is_last = index + 1 == count;
        let due_at = (!is_last || end.is_some()).then(|| now.plus_ms(pause_ms));
        let last = if is_last { next.or(part.last().copied()) } else { part.last().copied() };
        let step = BulkStep { bulk: bulk.clone(), ids: part.to_vec(), last, due_at };
        if !store.bulk_step(step, now).await? {
            break;
        }
        (bulk.last, bulk.due_at) = (last.or(bulk.last), due_at);
    }
    Ok(())
}

/// Returns the next jobs or tasks of an action, and where to continue after them if there may be more.
async fn find(store: &dyn Store, bulk: &Bulk, size: usize) -> Result<(Vec<Uuid>, Option<Uuid>), StoreError> {
    match &bulk.work {
        BulkWork::Jobs { filter, .. } => {
            let found = store.job_find(filter, bulk.last.map(JobId), JobId(bulk.up_to), size).await?;
            Ok((found.ids.into_iter().map(|id| id.0).collect(), found.next.map(|id| id.0)))
        }
        BulkWork::Tasks(work) => {
            let found = store.task_find(&work.filter, bulk.last.map(TaskId), TaskId(bulk.up_to), size).await?;
            let ids: Vec<Uuid> = found.into_iter().map(|id| id.0).collect();
            let next = ids.last().copied().filter(|_| ids.len() == size);
            Ok((ids, next))
        }
    }
}

impl Engine {
    /// Stores an action that the loop of any node runs at its rate.
    pub async fn bulk_begin(&self, bulk: NewBulk, now: Timestamp) -> Result<(), EngineError> {
        self.store.bulk_begin(bulk, now, now).await?;
        self.wakeups.bulk_started();
        Ok(())
    }

    /// Runs an action and returns its state when it has finished, or after `timeout`; then a loop continues it.
    pub async fn bulk_run(&self, bulk: NewBulk, timeout: Duration, now: Timestamp) -> Result<Bulk, EngineError> {
        let id = bulk.id;
        self.store.bulk_begin(bulk, now.plus_ms(ms(LEASE)), now).await?;
        let until = now.plus_ms(ms(timeout));
        loop {
            let bulk = self.load_bulk(id).await?;
            if bulk.finished_at.is_some() || Timestamp::now() > until {
                return Ok(bulk);
            }
            search_and_step(&*self.store, bulk, Timestamp::now()).await?;
        }
    }

    async fn load_bulk(&self, id: BulkId) -> Result<Bulk, EngineError> {
        self.store.bulk_get(id).await?.ok_or(EngineError::BulkNotFound(id))
    }
}
