//! Priority, and the score that orders the ready jobs of a queue: the smallest score is claimed first.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Timestamp;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum Priority {
    Low,
    #[default]
    Normal,
    High,
    Critical,
}

/// Order in which the ready jobs of a queue are claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClaimOrder {
    /// One priority step is worth 1 000 seconds of waiting, so no job starves.
    #[default]
    Aging,
    /// Jobs of a higher priority always come first; within a priority, first in, first out.
    Strict,
}

/// Milliseconds of waiting that equal one priority step.
const AGING_STEP_MS: i64 = 1_000_000;
/// Larger than every ready time that is accepted, so that a strict step outweighs all waiting.
const STRICT_STEP: i64 = 1 << 48;

impl Priority {
    pub const ALL: [Priority; 4] = [Priority::Low, Priority::Normal, Priority::High, Priority::Critical];

    /// Returns the number of steps below `Critical`.
    pub fn rank(self) -> i16 {
        match self {
            Priority::Critical => 0,
            Priority::High => 1,
            Priority::Normal => 2,
            Priority::Low => 3,
        }
    }

    pub fn from_rank(rank: i16) -> Option<Priority> {
        Priority::ALL.into_iter().find(|priority| priority.rank() == rank)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Low => "LOW",
            Priority::Normal => "NORMAL",
            Priority::High => "HIGH",
            Priority::Critical => "CRITICAL",
        }
    }
}

impl ClaimOrder {
    /// Returns the score of a job that became ready at `ready_at`.
    pub fn score(self, priority: Priority, ready_at: Timestamp) -> i64 {
        ready_at.as_ms() + self.offset(priority)
    }

    fn offset(self, priority: Priority) -> i64 {
        let step = match self {
            ClaimOrder::Aging => AGING_STEP_MS,
            ClaimOrder::Strict => STRICT_STEP,
        };
        i64::from(priority.rank()) * step
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Priority {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Priority::ALL.into_iter().find(|priority| priority.as_str() == text).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_priority_step_adds_a_thousand_seconds() {
        let at = Timestamp::from_ms(5_000_000_000);
        let offset = |p| ClaimOrder::Aging.score(p, at) - at.as_ms();
        assert_eq!(Priority::ALL.map(offset), [3_000_000, 2_000_000, 1_000_000, 0]);
    }

    #[test]
    fn a_job_that_waits_a_thousand_seconds_overtakes_the_next_priority() {
        let early = ClaimOrder::Aging.score(Priority::Normal, Timestamp::from_ms(0));
        assert!(early > ClaimOrder::Aging.score(Priority::High, Timestamp::from_ms(999_999)));
        assert!(early < ClaimOrder::Aging.score(Priority::High, Timestamp::from_ms(1_000_001)));
    }

    proptest! {
        #[test]
        fn strict_order_never_lets_a_lower_priority_overtake(a in 0i64..253_402_207_200_000, b in 0i64..253_402_207_200_000) {
            for (higher, lower) in [(Priority::Critical, Priority::High), (Priority::High, Priority::Normal), (Priority::Normal, Priority::Low)] {
                prop_assert!(ClaimOrder::Strict.score(higher, Timestamp::from_ms(a)) < ClaimOrder::Strict.score(lower, Timestamp::from_ms(b)));
            }
        }
    }
}
