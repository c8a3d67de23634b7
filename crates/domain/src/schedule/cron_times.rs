//! Iterates over the times at which a cron expression is due in a time zone.
//!
//! Time is divided into segments, each with one offset from UTC. Within a segment only the expression decides. At the start of
//! a segment the clocks changed: forwards (a gap: some local times do not exist) or backwards (an overlap: some local times
//! occur twice), and the schedule's `dstGap` and `dstOverlap` decide.

use std::fmt;

use jiff::{
    Timestamp as Instant,
    civil::DateTime,
    tz::{Offset, TimeZone},
};

use super::{
    cron::Cron,
    timing::{DstGap, DstOverlap},
    zone::{FIRST_SECOND, LAST_SECOND, Segment},
};

/// Largest offset from UTC that jiff supports.
const LARGEST_OFFSET: i64 = 26 * 3_600;

/// Effect of a clock change on a due time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DstNote {
    /// The clocks skipped the local time `from`; it is due right after the gap, at `to`.
    Moved { from: String, to: String },
    /// The local time occurs twice, and this is the first time.
    First,
    /// The local time occurs twice, and this is the second time.
    Second,
}

impl fmt::Display for DstNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DstNote::Moved { from, to } if from.len() > 8 => write!(f, "{from} does not exist; runs at {to}"),
            DstNote::Moved { from, to } => write!(f, "{from} does not exist on this day; runs at {to}"),
            DstNote::First => f.write_str("this local time occurs twice on this day; this is the first"),
            DstNote::Second => f.write_str("this local time occurs twice on this day; this is the second"),
        }
    }
}

/// Iterator over the due times of a cron expression, in seconds since 1970.
pub(super) struct CronTimes<'a> {
    cron: &'a Cron,
    zone: &'a TimeZone,
    gap: DstGap,
    overlap: DstOverlap,
    /// First second that has not been examined yet.
    from: i64,
    segment: Segment,
}

impl<'a> CronTimes<'a> {
    pub(super) fn new(
        cron: &'a Cron,
        zone: &'a TimeZone,
        gap: DstGap,
        overlap: DstOverlap,
        from: i64,
    ) -> CronTimes<'a> {
        let from = from.clamp(FIRST_SECOND, LAST_SECOND + 1);
        CronTimes { cron, zone, gap, overlap, from, segment: Segment::at(zone, from) }
    }

    /// Skips all due times before `second`.
    pub(super) fn skip_to(&mut self, second: i64) {
        self.from = self.from.max(second);
    }

    /// Returns the local time that the clocks skipped at the start of the segment, if it is due there instead.
    fn moved(&self) -> Option<DstNote> {
        let Segment { start, offset, before, .. } = self.segment;
        if self.gap == DstGap::Skip || self.from != start || before >= offset {
            return None;
        }
        let skipped = self.cron.next(start + before).filter(|local| *local < start + offset)?;
        let (from, to) = (local_time(skipped), local_time(start + offset));
        let text = |at: DateTime| {
            let time = if at.second() == 0 { "%H:%M" } else { "%H:%M:%S" };
            let day = if from.date() == to.date() { "" } else { "%F " };
            at.strftime(&format!("{day}{time}")).to_string()
        };
        Some(DstNote::Moved { from: text(from), to: text(to) })
    }

    /// Returns whether `local` is the first or second occurrence of a local time that occurs twice.
    fn repeated(&self, local: i64) -> Option<DstNote> {
        let Segment { start, end, before, after, .. } = self.segment;
        if local < start + before {
            Some(DstNote::Second)
        } else if local >= end + after {
            Some(DstNote::First)
        } else {
            None
        }
    }
}

impl Iterator for CronTimes<'_> {
    /// The due second, and the effect of a clock change on it.
    type Item = (i64, Option<DstNote>);

    fn next(&mut self) -> Option<Self::Item> {
        while self.from <= LAST_SECOND {
            if self.from >= self.segment.end {
                self.segment = Segment::at(self.zone, self.from);
            }
            let Segment { start, end, offset, before, after } = self.segment;
            if let Some(note) = self.moved() {
                self.from = start + 1;
                return Some((start, Some(note)));
            }
            let mut local = self.from + offset;
            if self.overlap == DstOverlap::First {
                local = local.max(start + before.max(offset));
            }
            let due = self.cron.next(local)?;
            if due < end + offset {
                self.from = due - offset + 1;
                return Some((due - offset, self.repeated(due)));
            }
            // Nothing matches before `due`, so the clock changes in between can be skipped, unless the clocks go back at the
            // end of this segment to times before `local`.
            self.from = if after < offset { end } else { end.max(due - LARGEST_OFFSET) };
        }
        None
    }
}

fn local_time(second: i64) -> DateTime {
    Offset::UTC.to_datetime(Instant::from_second(second).unwrap_or(Instant::UNIX_EPOCH))
}
