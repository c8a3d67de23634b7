//! Limits of running tasks per machine: which tasks start, and which are queued.
//!
//! The limit is a row of `limit_rule` with the scope `machine`. It comes from the newest version of the machine, unless an operator
//! set another one. Whatever starts a task locks that row and then counts, so the limit is never exceeded; a task whose end is not
//! committed yet counts as running. Running and paused tasks of all versions count together. Queued tasks start in the order of
//! their creation.

use std::collections::BTreeMap;

use faena_domain::{Limit, Rules};
use faena_machine::Definition;

use crate::tasks::Batch;

/// Whether a new task starts or is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Start,
    Queue,
}

/// How many tasks of each machine with a limit may start in a transaction that has locked the limits.
#[derive(Debug, Default)]
pub struct TaskCapacity(BTreeMap<String, MachineCapacity>);

#[derive(Debug)]
struct MachineCapacity {
    left: i64,
    has_queue: bool,
}

impl TaskCapacity {
    /// Sets how many tasks of a machine may start, and whether others are queued already.
    pub fn set(&mut self, machine: &str, left: i64, has_queue: bool) {
        self.0.insert(machine.to_owned(), MachineCapacity { left, has_queue });
    }

    /// Decides whether the next new task of a machine starts or is queued. A task that starts counts as running.
    pub fn admit(&mut self, machine: &str) -> Admission {
        match self.0.get_mut(machine) {
            None => Admission::Start,
            Some(capacity) if capacity.has_queue || capacity.left <= 0 => {
                capacity.has_queue = true;
                Admission::Queue
            }
            Some(capacity) => {
                capacity.left -= 1;
                Admission::Start
            }
        }
    }
}

/// Returns whether the tasks of a machine may have a limit. Without one nothing is locked or counted.
///
/// For a moment after an operator has set a limit on another node, this node does not know of it.
pub fn may_be_limited(rules: &Rules, definition: &Definition) -> bool {
    definition.limits.running.is_some() || rules.machines.contains_key(&definition.machine)
}

/// Returns whether the queued tasks must be checked after a batch: the batch queues a task, or ends one of a machine with a limit.
///
/// Checking only after ends is not enough: an end that is committed between the decision to queue a task and the commit of that
/// decision does not see the queued task.
pub fn affects_queue(rules: &Rules, batch: &Batch) -> bool {
    let mut tasks = batch.tasks.values();
    tasks.any(|task| task.is_queued() || (task.ends() && may_be_limited(rules, &task.definition)))
}

/// Position of a queued task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskPosition {
    /// Tasks of its machine that run or are paused, counted up to the limit.
    pub running: u64,
    /// Absent: there is no limit, so it starts immediately.
    pub limit: Option<u64>,
    /// Queued tasks of its machine that start before it, counted up to [`crate::COUNT_LIMIT`].
    pub ahead: u64,
}

/// The origin of a limit that a definition contains.
pub const MACHINE: &str = "machine";

/// Returns the limit in a definition.
pub fn limit_of(definition: &Definition) -> Option<Limit> {
    definition.limits.running.map(|running| Limit { concurrency: Some(running), rate: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_starts_if_there_is_capacity_and_no_task_is_queued() {
        let mut capacity = TaskCapacity::default();
        capacity.set("narrow", 2, false);
        capacity.set("queued", 9, true);
        let mut decide = |machine: &str| [(); 4].map(|()| capacity.admit(machine) == Admission::Start);
        assert_eq!(decide("unlimited"), [true; 4]);
        assert_eq!(decide("narrow"), [true, true, false, false], "tasks of the same batch count");
        assert_eq!(decide("queued"), [false; 4], "queued tasks start first");
    }
}
