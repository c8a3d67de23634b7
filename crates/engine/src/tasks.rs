//! Fires the timers of tasks, notifies tasks of jobs that have ended, and starts queued tasks.
//!
//! There is no leader: the store assigns each due task to one node under the lock of its row. A timer and everything
//! that it causes are one transaction.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use faena_domain::Timestamp;
use faena_machine::{BUILT_IN, Definition};
use faena_store::{NewMachine, Store, StoreError};

use crate::Round;

/// Registers the built-in machines. A database that has another definition of the same version keeps it.
pub async fn register_built_in(store: &dyn Store, now: Timestamp) -> Result<(), StoreError> {
    for (name, text) in BUILT_IN {
        let definition = Definition::parse(text).expect("a test checks the built-in machines");
        let machine = NewMachine { definition: Arc::new(definition) };
        match store.machine_register(machine, ACTOR, now).await {
            Err(StoreError::Conflict { message, .. }) => {
                tracing::warn!(machine = name, message, "built-in machine not registered")
            }
            result => {
                result?;
            }
        }
    }
    Ok(())
}

/// Who registers the built-in machines.
const ACTOR: &str = "system:tasks";

/// Tasks per transaction.
const BATCH: usize = 500;

/// How soon a node retries a due task that another node is processing.
const RECHECK_MS: i64 = 250;

/// The latest time at which the loop runs again. Timers that are due after it do not wake the loop.
#[derive(Debug)]
pub(crate) struct TaskTimer(AtomicI64);

impl Default for TaskTimer {
    fn default() -> Self {
        TaskTimer(AtomicI64::new(i64::MAX))
    }
}

impl TaskTimer {
    /// Returns whether a timer that is due at `at` is earlier than the next round.
    pub fn must_wake_for(&self, at: Timestamp) -> bool {
        at.as_ms() < self.0.load(Ordering::Acquire)
    }

    fn set(&self, next_at: Option<Timestamp>) {
        self.0.store(next_at.map_or(i64::MAX, Timestamp::as_ms), Ordering::Release);
    }
}

pub async fn run_once(store: &dyn Store, timer: &TaskTimer, now: Timestamp) -> Result<Round, StoreError> {
    // During a round every new timer wakes the loop again, because the round may not have seen it.
    timer.set(None);
    let fired = store.task_fire(BATCH, now).await?;
    let handled = fired.tasks + fired.jobs + fired.started;
    let next_at = fired.next_at.map(|at| if at <= now { now.plus_ms(RECHECK_MS) } else { at });
    timer.set(next_at);
    Ok(Round { handled, more: fired.tasks == BATCH || fired.jobs == BATCH || fired.started >= BATCH, next_at })
}
