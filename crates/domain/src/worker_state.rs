//! The states of a worker, and the only table of transitions between them.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of a worker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
pub enum WorkerState {
    /// Its process is being started.
    Creating,
    /// Its process runs and has not registered yet.
    Connecting,
    /// Connected, without a job.
    Ready,
    /// Connected, with at least one job.
    Busy,
    /// Finishes its jobs and receives no more.
    Draining,
    /// About to stop, without a job.
    Terminating,
    /// Ended or lost.
    Terminated,
}

/// Group of states, used to count workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerCategory {
    Provisioning,
    Available,
    Working,
    ShuttingDown,
    Terminated,
}

impl WorkerState {
    pub const ALL: [WorkerState; 7] = [
        WorkerState::Creating,
        WorkerState::Connecting,
        WorkerState::Ready,
        WorkerState::Busy,
        WorkerState::Draining,
        WorkerState::Terminating,
        WorkerState::Terminated,
    ];

    /// Returns whether a worker in this state may enter `next`. No state may enter itself.
    pub fn can_transition_to(self, next: WorkerState) -> bool {
        use WorkerState::*;
        match self {
            Creating => matches!(next, Connecting | Terminated),
            Connecting => matches!(next, Ready | Terminated),
            Ready => matches!(next, Busy | Draining | Terminating),
            Busy => matches!(next, Ready | Draining | Terminated),
            // `Ready`: the drain was cancelled.
            Draining => matches!(next, Ready | Terminating | Terminated),
            Terminating => matches!(next, Terminated),
            Terminated => false,
        }
    }

    /// Returns the states that a lost worker passes through, up to and including `Terminated`.
    ///
    /// Every step is a legal transition. Only `Ready` needs an intermediate state.
    pub fn path_when_lost(self) -> &'static [WorkerState] {
        match self {
            WorkerState::Terminated => &[],
            WorkerState::Ready => &[WorkerState::Terminating, WorkerState::Terminated],
            _ => &[WorkerState::Terminated],
        }
    }

    pub fn is_terminal(self) -> bool {
        self == WorkerState::Terminated
    }

    /// Returns whether the worker may receive jobs. A draining worker only finishes those it has.
    pub fn is_operational(self) -> bool {
        matches!(self, WorkerState::Ready | WorkerState::Busy)
    }

    pub fn category(self) -> WorkerCategory {
        match self {
            WorkerState::Creating | WorkerState::Connecting => WorkerCategory::Provisioning,
            WorkerState::Ready => WorkerCategory::Available,
            WorkerState::Busy => WorkerCategory::Working,
            WorkerState::Draining | WorkerState::Terminating => WorkerCategory::ShuttingDown,
            WorkerState::Terminated => WorkerCategory::Terminated,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            WorkerState::Creating => "Creating",
            WorkerState::Connecting => "Connecting",
            WorkerState::Ready => "Ready",
            WorkerState::Busy => "Busy",
            WorkerState::Draining => "Draining",
            WorkerState::Terminating => "Terminating",
            WorkerState::Terminated => "Terminated",
        }
    }
}

impl WorkerCategory {
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerCategory::Provisioning => "provisioning",
            WorkerCategory::Available => "available",
            WorkerCategory::Working => "working",
            WorkerCategory::ShuttingDown => "shutting_down",
            WorkerCategory::Terminated => "terminated",
        }
    }
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for WorkerState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        WorkerState::ALL.into_iter().find(|state| state.as_str() == text).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rows are the old state, columns the new state in the order of `ALL`; `x` is a legal transition.
    const TABLE: [(&str, &str); 7] = [
        //               Cr Co R  B  D  Ti Td
        ("Creating", "    .  x  .  .  .  .  x"),
        ("Connecting", "  .  .  x  .  .  .  x"),
        ("Ready", "       .  .  .  x  x  x  ."),
        ("Busy", "        .  .  x  .  x  .  x"),
        ("Draining", "    .  .  x  .  .  x  x"),
        ("Terminating", " .  .  .  .  .  .  x"),
        ("Terminated", "  .  .  .  .  .  .  ."),
    ];

    #[test]
    fn every_pair_of_states_is_allowed_or_rejected_as_in_the_table() {
        let mut pairs = 0;
        for (from, row) in TABLE {
            let from: WorkerState = from.parse().expect("a state");
            for (to, mark) in WorkerState::ALL.into_iter().zip(row.split_whitespace()) {
                assert_eq!(from.can_transition_to(to), mark == "x", "{from} -> {to}");
                pairs += 1;
            }
        }
        assert_eq!(pairs, 49);
    }

    #[test]
    fn a_lost_worker_ends_through_legal_transitions_from_any_live_state() {
        for start in WorkerState::ALL.into_iter().filter(|state| !state.is_terminal()) {
            let mut state = start;
            for &next in start.path_when_lost() {
                assert!(state.can_transition_to(next), "{state} -> {next}");
                state = next;
            }
            assert_eq!(state, WorkerState::Terminated, "from {start}");
        }
        assert!(WorkerState::Terminated.path_when_lost().is_empty());
    }

    #[test]
    fn only_ready_and_busy_workers_are_operational() {
        let operational: Vec<_> = WorkerState::ALL.into_iter().filter(|s| s.is_operational()).collect();
        assert_eq!(operational, [WorkerState::Ready, WorkerState::Busy]);
    }

    #[test]
    fn every_state_has_its_category() {
        let names: Vec<_> = WorkerState::ALL.into_iter().map(|s| s.category().as_str()).collect();
        assert_eq!(
            names,
            ["provisioning", "provisioning", "available", "working", "shutting_down", "shutting_down", "terminated"]
        );
    }

    proptest! {
        #[test]
        fn no_transition_leaves_the_final_state(choices in prop::collection::vec(0usize..7, 1..40)) {
            let mut state = WorkerState::Creating;
            for choice in choices {
                let next = WorkerState::ALL[choice];
                if state.can_transition_to(next) {
                    prop_assert!(!state.is_terminal());
                    prop_assert_ne!(state, next);
                    state = next;
                }
            }
        }
    }
}
