//! The states of a job, and the only table of transitions between them.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of a job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum JobState {
    /// Waits for its scheduled time or for the jobs it depends on.
    Pending,
    /// Ready to be claimed.
    Queued,
    /// Claimed for a worker whose process is being started.
    Scheduled,
    /// Claimed for a worker that has not started it yet.
    Assigned,
    /// Running.
    Processing,
    /// Failed, and waits for its next attempt.
    Retrying,
    Completed,
    /// Failed without a further attempt; dead-lettered.
    Failed,
    Cancelled,
}

impl JobState {
    pub const ALL: [JobState; 9] = [
        JobState::Pending,
        JobState::Queued,
        JobState::Scheduled,
        JobState::Assigned,
        JobState::Processing,
        JobState::Retrying,
        JobState::Completed,
        JobState::Failed,
        JobState::Cancelled,
    ];

    /// Returns whether a job in this state may enter `next`. No state may enter itself.
    pub fn can_transition_to(self, next: JobState) -> bool {
        use JobState::*;
        match self {
            Pending => matches!(next, Queued | Cancelled | Failed),
            Queued => matches!(next, Scheduled | Assigned | Cancelled | Failed),
            Scheduled => matches!(next, Assigned | Queued | Retrying | Failed | Cancelled),
            Assigned => matches!(next, Processing | Queued | Retrying | Failed | Cancelled),
            // `Queued`: released by a draining worker.
            Processing => matches!(next, Completed | Retrying | Failed | Cancelled | Queued),
            Retrying => matches!(next, Queued | Cancelled | Failed),
            Completed => false,
            // Only by a manual retry.
            Failed | Cancelled => matches!(next, Pending),
        }
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, JobState::Completed | JobState::Failed | JobState::Cancelled)
    }

    /// Returns whether a worker has the job, or is being started for it.
    pub fn is_in_flight(self) -> bool {
        matches!(self, JobState::Scheduled | JobState::Assigned | JobState::Processing)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Pending => "PENDING",
            JobState::Queued => "QUEUED",
            JobState::Scheduled => "SCHEDULED",
            JobState::Assigned => "ASSIGNED",
            JobState::Processing => "PROCESSING",
            JobState::Retrying => "RETRYING",
            JobState::Completed => "COMPLETED",
            JobState::Failed => "FAILED",
            JobState::Cancelled => "CANCELLED",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        JobState::ALL.into_iter().find(|state| state.as_str() == text).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rows are the old state, columns the new state in the order of `ALL`; `x` is a legal transition.
    const TABLE: [(&str, &str); 9] = [
        //             P Q S A R Y C F X
        ("PENDING", "    . x . . . . . x x"),
        ("QUEUED", "     . . x x . . . x x"),
        ("SCHEDULED", "  . x . x . x . x x"),
        ("ASSIGNED", "   . x . . x x . x x"),
        ("PROCESSING", " . x . . . x x x x"),
        ("RETRYING", "   . x . . . . . x x"),
        ("COMPLETED", "  . . . . . . . . ."),
        ("FAILED", "     x . . . . . . . ."),
        ("CANCELLED", "  x . . . . . . . ."),
    ];

    #[test]
    fn every_pair_of_states_is_allowed_or_rejected_as_in_the_table() {
        let mut pairs = 0;
        for (from, row) in TABLE {
            let from: JobState = from.parse().expect("a state");
            for (to, mark) in JobState::ALL.into_iter().zip(row.split_whitespace()) {
                assert_eq!(from.can_transition_to(to), mark == "x", "{from} -> {to}");
                pairs += 1;
            }
        }
        assert_eq!(pairs, 81);
    }

    #[test]
    fn the_documentation_lists_the_same_transitions() {
        let page = include_str!("../../../docs/concepts/life-cycle.md");
        for from in JobState::ALL {
            let row = page.lines().find(|line| line.starts_with(&format!("| `{from}` |"))).expect("a row per state");
            let documented = row.rsplit('|').nth(1).expect("a last column");
            for to in JobState::ALL {
                assert_eq!(documented.contains(&format!("`{to}`")), from.can_transition_to(to), "{from} -> {to}");
            }
        }
    }

    #[test]
    fn names_are_read_back() {
        for state in JobState::ALL {
            assert_eq!(state.to_string().parse(), Ok(state));
            assert_eq!(serde_json::to_string(&state).expect("json"), format!("\"{state}\""));
        }
        assert_eq!("queued".parse::<JobState>(), Err(()));
    }

    proptest! {
        /// Follows random legal transitions: no state enters itself, and only a manual retry leaves a final state.
        #[test]
        fn only_a_manual_retry_leaves_a_final_state(choices in prop::collection::vec(0usize..9, 1..60)) {
            let mut state = JobState::Pending;
            for choice in choices {
                let next = JobState::ALL[choice];
                if !state.can_transition_to(next) {
                    continue;
                }
                prop_assert_ne!(state, next);
                if state.is_terminal() {
                    prop_assert_eq!(next, JobState::Pending);
                    prop_assert_ne!(state, JobState::Completed);
                }
                if next == JobState::Completed {
                    prop_assert_eq!(state, JobState::Processing, "only a running job can complete");
                }
                state = next;
            }
        }

        /// No job can get stuck: every live state has a transition to a final state.
        #[test]
        fn every_live_state_can_fail_or_be_cancelled(index in 0usize..9) {
            let state = JobState::ALL[index];
            if !state.is_terminal() {
                prop_assert!(state.can_transition_to(JobState::Failed));
                prop_assert!(state.can_transition_to(JobState::Cancelled));
            }
        }
    }
}
