//! Group commit: calls that arrive while a transaction runs share the next one.

use std::{panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::Shared;
use crate::{Result, StoreError};

/// Maximum number of calls that wait; further callers wait until there is room.
const MAX_WAITING_CALLS: usize = 4_096;
/// Maximum number of calls, and of jobs, that share one transaction.
const MAX_GROUP_CALLS: usize = 512;
const MAX_GROUP_JOBS: usize = 2_000;
/// Groups with fewer jobs are committed one at a time.
const SMALL_GROUP_JOBS: usize = 500;

pub type Answer<T> = oneshot::Sender<Result<T>>;

pub trait Weight {
    /// Returns the number of jobs of a call.
    fn weight(&self) -> usize;

    /// Returns whether the caller no longer waits, so that the call must not be made.
    fn is_abandoned(&self) -> bool;
}

pub struct Batcher<C> {
    /// Limit for one call, including the wait for its turn.
    timeout: Duration,
    calls: Mutex<Option<mpsc::Sender<C>>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

type Run<C> = for<'a> fn(&'a Shared, i16, Vec<C>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<C: Weight + Send + 'static> Batcher<C> {
    pub fn start(shared: Arc<Shared>, workers: usize, first_shard: usize, run: Run<C>) -> Batcher<C> {
        let (sender, receiver) = mpsc::channel::<C>(MAX_WAITING_CALLS);
        let timeout = shared.options.timeout();
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let workers = (0..workers)
            .map(|n| {
                let (shared, receiver) = (shared.clone(), receiver.clone());
                let shard = shared.shard(first_shard + n);
                tokio::spawn(async move {
                    loop {
                        let mut calls = receiver.lock().await;
                        let Some(group) = next_group(&mut calls).await else { break };
                        // A small group deliberately blocks other groups: calls that arrive while it
                        // commits form one large group instead of many small ones (measured with 64
                        // callers: three times the submissions).
                        let _alone = (group.iter().map(C::weight).sum::<usize>() < SMALL_GROUP_JOBS).then_some(calls);
                        // A panic fails the calls of the group (their answers are dropped), not the
                        // batcher.
                        if AssertUnwindSafe(run(&shared, shard, group)).catch_unwind().await.is_err() {
                            tracing::error!("database calls failed because of a panic, report this as a bug");
                        }
                    }
                })
            })
            .collect();
        Batcher { timeout, calls: Mutex::new(Some(sender)), workers: Mutex::new(workers) }
    }

    pub async fn call<T>(&self, make: impl FnOnce(Answer<T>) -> C) -> Result<T> {
        let (answer, receiver) = oneshot::channel();
        let calls = self.calls.lock().clone().ok_or_else(closed)?;
        let answered = async {
            calls.send(make(answer)).await.map_err(|_| closed())?;
            receiver.await.map_err(|_| closed())?
        };
        tokio::time::timeout(self.timeout, answered).await.unwrap_or_else(|_| Err(StoreError::timed_out(self.timeout)))
    }

    /// Finishes the waiting calls, then stops.
    pub async fn stop(&self) {
        self.calls.lock().take();
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers {
            let _ = worker.await;
        }
    }
}

async fn next_group<C: Weight>(receiver: &mut mpsc::Receiver<C>) -> Option<Vec<C>> {
    let mut first = receiver.recv().await?;
    while first.is_abandoned() {
        first = receiver.recv().await?;
    }
    let mut jobs = first.weight();
    let mut group = vec![first];
    while group.len() < MAX_GROUP_CALLS
        && jobs < MAX_GROUP_JOBS
        && let Ok(call) = receiver.try_recv()
    {
        if !call.is_abandoned() {
            jobs += call.weight();
            group.push(call);
        }
    }
    Some(group)
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".into())
}
