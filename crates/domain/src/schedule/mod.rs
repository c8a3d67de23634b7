//! Schedules: when something is due.

#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where"))]

mod cron;
mod except;
mod fields;
mod timing;
mod walk;
mod zone;

#[cfg(test)]
mod dst_tests;
#[cfg(test)]
mod timing_tests;

pub use timing::{Backlog, Beat, DstGap, DstOverlap, Older, Tick, Timing};
pub use walk::DstNote;
