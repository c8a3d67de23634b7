//! Figures of tasks: how many there are, and what the inputs that this process applied did to them.

use std::{collections::BTreeMap, time::Duration};

use faena_domain::Timestamp;
use parking_lot::Mutex;

use crate::{HISTORY_BOUNDS_MS, TaskAnswer, TasksFired};

/// Tasks that have not ended, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskFigures {
    /// Without those that are queued: they are in no state.
    pub states: Vec<TasksInState>,
    pub queued: Vec<QueuedTasks>,
    /// Tasks that wait for a decision.
    pub approvals: u64,
    /// When the task that has waited longest for a decision entered its state.
    pub oldest_approval_at: Option<Timestamp>,
    /// When the next timer is due, or was due if no node has fired it.
    pub next_at: Option<Timestamp>,
}

/// Tasks of one machine in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TasksInState {
    pub machine: String,
    /// The active states, joined by dots.
    pub state: String,
    pub tasks: u64,
    /// When the task that has been in the state longest entered it.
    pub since: Timestamp,
}

/// Queued tasks of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedTasks {
    pub machine: String,
    pub tasks: u64,
    /// When the first of them was queued.
    pub since: Timestamp,
}

/// What this process has done to tasks since its start.
#[derive(Clone, Debug)]
pub struct TaskMeasures {
    /// Number of inputs by what they did.
    pub outcomes: BTreeMap<&'static str, u64>,
    pub deadlines_missed: u64,
    /// Number of calls by how long their commit took: one number per bound of [`HISTORY_BOUNDS_MS`], and one for all above.
    pub commits: [u64; HISTORY_BOUNDS_MS.len() + 1],
    pub commits_sum_ms: u64,
}

/// Every outcome, so that those that have not happened yet are counted as 0.
const OUTCOMES: [&str; 9] =
    ["applied", "deferred", "ignored", "stale", "rejected", "forbidden", "invalid", "duplicate", "unknown_task"];

#[derive(Default)]
pub struct TaskMeter(Mutex<TaskMeasures>);

impl Default for TaskMeasures {
    fn default() -> Self {
        TaskMeasures {
            outcomes: OUTCOMES.into_iter().map(|outcome| (outcome, 0)).collect(),
            deadlines_missed: 0,
            commits: [0; HISTORY_BOUNDS_MS.len() + 1],
            commits_sum_ms: 0,
        }
    }
}

impl TaskMeter {
    /// Counts the answers of a call that was committed.
    pub fn count(&self, answers: &[Option<TaskAnswer>], took: Duration) {
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let mut measures = self.0.lock();
        for answer in answers {
            *measures.outcomes.entry(outcome(answer.as_ref())).or_default() += 1;
        }
        measures.commits[HISTORY_BOUNDS_MS.partition_point(|bound| *bound < ms)] += 1;
        measures.commits_sum_ms = measures.commits_sum_ms.saturating_add(ms);
    }

    pub fn count_fired(&self, fired: &TasksFired) {
        self.0.lock().deadlines_missed += fired.deadlines_missed as u64;
    }

    pub fn measures(&self) -> TaskMeasures {
        self.0.lock().clone()
    }
}

fn outcome(answer: Option<&TaskAnswer>) -> &'static str {
    match answer {
        None => "unknown_task",
        Some(answer) if answer.duplicate => "duplicate",
        Some(answer) => answer.outcome.as_str(),
    }
}
