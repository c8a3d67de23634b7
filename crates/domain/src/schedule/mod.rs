//! What a schedule is: when it is due, what becomes of each due time, and the job that comes of it.

#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where"))]

mod cron;
mod definition;
mod except;
mod fields;
mod outcome;
mod template;
mod timing;
mod walk;
mod zone;

#[cfg(test)]
mod definition_tests;
#[cfg(test)]
mod dst_tests;
#[cfg(test)]
mod outcome_tests;
#[cfg(test)]
mod timing_tests;

pub use definition::{
    JobTemplate, Misfire, Overlap, Schedule, SchedulePatch, ScheduleSpec, ScheduleView, Timed, not_understood,
};
pub use outcome::{Decision, Followed, JobStates, ScheduledRun, TickOutcome, TickRow, decide, follow, preview};
pub use timing::{Backlog, Beat, DstGap, DstOverlap, Older, Tick, Timing};
pub use walk::DstNote;
