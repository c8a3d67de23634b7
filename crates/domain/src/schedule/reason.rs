//! Why a due time has created no job, and why a schedule has ended.
//!
//! The reasons are stored as English text. This module is the only place that writes them, and it parses them again, so
//! that the dashboard can show them in another language. A test parses every kind of reason.

use std::fmt;

use super::Misfire;
use crate::Timestamp;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScheduleReason<'a> {
    /// The due time was in a blackout.
    Blackout { except: &'a str },
    /// No server was running in time.
    Missed(Misfire),
    /// A job of an earlier due time had not finished.
    Unfinished { job: &'a str },
    /// A job of an earlier due time was waiting.
    Waiting { job: &'a str },
    /// The job of a later due time was created instead.
    Replaced { by: Timestamp },
    /// The schedule has ended: it has created as many jobs as it may.
    MaxRuns { max: u64 },
    /// The schedule has ended: it has no further due times.
    NoneLeft,
}

const NO_SERVER: &str = "no server was running in time; ";
const ONE_JOB: &str = "misfire \"run_once\" creates one job for the latest due time";
const NO_JOB: &str = "misfire \"skip\" creates no job";
const OVER_LIMIT: &str = "more due times were missed than catchUpLimit allows";
const NONE_LEFT: &str = "no due time is left";

impl fmt::Display for ScheduleReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ScheduleReason::Blackout { except } => write!(f, "in a blackout: {except}"),
            ScheduleReason::Missed(Misfire::RunOnce) => write!(f, "{NO_SERVER}{ONE_JOB}"),
            ScheduleReason::Missed(Misfire::Skip) => write!(f, "{NO_SERVER}{NO_JOB}"),
            ScheduleReason::Missed(Misfire::CatchUp) => write!(f, "{NO_SERVER}{OVER_LIMIT}"),
            ScheduleReason::Unfinished { job } => write!(f, "job {job} of an earlier due time has not finished"),
            ScheduleReason::Waiting { job } => write!(f, "job {job} is already waiting"),
            ScheduleReason::Replaced { by } => write!(f, "replaced by the job of {by}, which is also due"),
            ScheduleReason::MaxRuns { max } => write!(f, "maxRuns reached: {max} of {max} runs"),
            ScheduleReason::NoneLeft => f.write_str(NONE_LEFT),
        }
    }
}

impl<'a> ScheduleReason<'a> {
    /// Parses a reason. Returns `None` for any other text, such as a database error.
    pub fn read(text: &'a str) -> Option<ScheduleReason<'a>> {
        if let Some(except) = text.strip_prefix("in a blackout: ") {
            return Some(ScheduleReason::Blackout { except });
        }
        if let Some(missed) = text.strip_prefix(NO_SERVER) {
            let misfires = [(ONE_JOB, Misfire::RunOnce), (NO_JOB, Misfire::Skip), (OVER_LIMIT, Misfire::CatchUp)];
            let misfire = misfires.into_iter().find(|(text, _)| *text == missed)?.1;
            return Some(ScheduleReason::Missed(misfire));
        }
        if let Some(job) = text.strip_prefix("job ") {
            let unfinished = job.strip_suffix(" of an earlier due time has not finished");
            let waiting = || job.strip_suffix(" is already waiting").map(|job| ScheduleReason::Waiting { job });
            return unfinished.map(|job| ScheduleReason::Unfinished { job }).or_else(waiting);
        }
        if let Some(by) = text.strip_prefix("replaced by the job of ") {
            return Some(ScheduleReason::Replaced { by: Timestamp::parse(by.strip_suffix(", which is also due")?)? });
        }
        if let Some(runs) = text.strip_prefix("maxRuns reached: ") {
            return Some(ScheduleReason::MaxRuns { max: runs.split_once(" of ")?.0.parse().ok()? });
        }
        (text == NONE_LEFT).then_some(ScheduleReason::NoneLeft)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_read_as_they_were_written() {
        for reason in [
            ScheduleReason::Blackout { except: "2026-06-01" },
            ScheduleReason::Missed(Misfire::RunOnce),
            ScheduleReason::Missed(Misfire::Skip),
            ScheduleReason::Missed(Misfire::CatchUp),
            ScheduleReason::Unfinished { job: "j1" },
            ScheduleReason::Waiting { job: "j1" },
            ScheduleReason::Replaced { by: Timestamp::from_ms(1_790_000_000_123) },
            ScheduleReason::MaxRuns { max: 7 },
            ScheduleReason::NoneLeft,
        ] {
            assert_eq!(ScheduleReason::read(&reason.to_string()), Some(reason), "{reason}");
        }
        for text in
            ["", "job x", "the database is full", "no server was running in time; why", "replaced by the job of x"]
        {
            assert_eq!(ScheduleReason::read(text), None, "{text}");
        }
    }
}
