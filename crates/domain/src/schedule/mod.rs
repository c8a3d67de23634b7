//! Schedules: when something is due.

mod cron;
mod except;
mod timing;
mod walk;
mod zone;

#[cfg(test)]
mod dst_tests;
#[cfg(test)]
mod timing_tests;

pub use timing::{Backlog, Beat, DstGap, DstOverlap, Older, Tick, Timing};
pub use walk::DstNote;
