//! Fires the timers of tasks, and tells tasks about the ends of their jobs.
//!
//! There is no leader: the store gives each due task to one node under the lock of its row, and what follows from a timer is
//! one transaction with it.

use std::sync::Arc;

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

/// How soon a node looks again for the end of a job that a task waits for, and at a task that another node has.
const RECHECK_MS: i64 = 250;

pub async fn run_once(store: &dyn Store, now: Timestamp) -> Result<Round, StoreError> {
    let fired = store.task_fire(BATCH, now).await?;
    let handled = fired.tasks + fired.jobs;
    let is_due = fired.next_at.is_some_and(|at| at <= now);
    let recheck = (fired.has_jobs || is_due).then(|| now.plus_ms(RECHECK_MS));
    let next_at = match (fired.next_at.filter(|_| !is_due), recheck) {
        (Some(due), Some(recheck)) => Some(due.min(recheck)),
        (due, recheck) => due.or(recheck),
    };
    Ok(Round { handled, more: fired.tasks == BATCH || fired.jobs == BATCH, next_at })
}
