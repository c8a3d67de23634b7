//! Schedules: when they are due, what happens at each due time, and the jobs they create.

#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a panic shows the line of the failed step"))]

mod cron;
mod definition;
mod blackout;

mod outcome;
mod reason;
mod template;
mod timing;
mod cron_fields;
mod cron_spanish;
mod cron_times;
mod zone;

#[cfg(test)]
mod definition_tests;
#[cfg(test)]
mod dst_tests;
#[cfg(test)]
mod outcome_tests;
#[cfg(test)]
mod timing_tests;

pub use cron_times::DstNote;
pub use definition::{
    CompiledSchedule, JobTemplate, Misfire, Overlap, Schedule, SchedulePatch, ScheduleSpec, ScheduleView,
    invalid_timing_reason,
};
pub use outcome::{Decision, Firing, JobStates, RunNote, ScheduledRun, TickOutcome, TickRow, decide, fire, preview};
pub use reason::ScheduleReason;
pub use timing::{Backlog, CompiledTiming, DstGap, DstOverlap, EarlierTicks, Tick, Timing};
