//! When a schedule is due: by a cron expression in a time zone, or every so many milliseconds.
//!
//! All times follow from what is written in the schedule, never from when it last ran: a tick is the same on every node, after
//! every restart and however the clock was moved.

use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

use super::{
    blackout::{Blackout, MAX_EXCEPTIONS},
    cron::Cron,
    cron_times::{CronTimes, DstNote},
    fields::Precision,
    zone,
};
use crate::{FieldError, Timestamp};

const MIN_INTERVAL_MS: u64 = 1_000;
const MAX_INTERVAL_MS: u64 = 3_650 * 86_400_000;
/// How many blacked-out due times are passed over in the search for one that is not.
const MAX_PASSED_OVER: usize = 200_000;
const MAX_COUNTED: usize = 5_000;

/// When a schedule is due. What people wrote, checked by `compile`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timing {
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    /// Not given: `next`, or `skip` if the expression matches every hour of the day.
    pub dst_gap: Option<DstGap>,
    /// Not given: `first`, or `both` if the expression matches every hour of the day.
    pub dst_overlap: Option<DstOverlap>,
    /// Nothing is due before it. Intervals count from it.
    pub start_at: Option<Timestamp>,
    /// Nothing is due after it.
    pub end_at: Option<Timestamp>,
    /// Days, spans and cron expressions, in local time, in which nothing fires.
    pub except: Vec<String>,
}

/// What becomes of local times that the clocks skip.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DstGap {
    /// They are due, once for all of them, when the clocks go on.
    Next,
    Skip,
}

/// What becomes of local times that come twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DstOverlap {
    First,
    Both,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            cron_expression: None,
            interval_ms: None,
            timezone: "UTC".to_owned(),
            dst_gap: None,
            dst_overlap: None,
            start_at: None,
            end_at: None,
            except: Vec::new(),
        }
    }
}

impl Timing {
    /// `anchor`: when the schedule was made; intervals without `startAt` count from it.
    pub fn compile(&self, anchor: Timestamp) -> Result<CompiledTiming, Vec<FieldError>> {
        let mut faults = Vec::new();
        let recurrence = self.recurrence(anchor, &mut faults);
        let zone = zone::find(&self.timezone).map_err(|what| faults.push(FieldError::new("timezone", what))).ok();
        if let (Some(start), Some(end)) = (self.start_at, self.end_at)
            && end <= start
        {
            faults.push(FieldError::new("endAt", format!("must be later than startAt, {start}, but is {end}")));
        }
        let except = self.exceptions(&mut faults);
        let (Some(recurrence), Some(zone), true) = (recurrence, zone, faults.is_empty()) else { return Err(faults) };
        let by_elapsed_time = match &recurrence {
            Recurrence::Cron(cron) => cron.every_hour(),
            Recurrence::Interval { .. } => true,
        };
        let (gap, overlap) = match by_elapsed_time {
            true => (DstGap::Skip, DstOverlap::Both),
            false => (DstGap::Next, DstOverlap::First),
        };
        let compiled = CompiledTiming {
            recurrence,
            zone,
            dst_gap: self.dst_gap.unwrap_or(gap),
            dst_overlap: self.dst_overlap.unwrap_or(overlap),
            start: self.start_at,
            end: self.end_at,
            except,
        };
        match compiled.never_fires(anchor) {
            Some(fault) => Err(vec![fault]),
            None => Ok(compiled),
        }
    }

    fn recurrence(&self, anchor: Timestamp, faults: &mut Vec<FieldError>) -> Option<Recurrence> {
        let fault = match (&self.cron_expression, self.interval_ms) {
            (Some(text), None) => match Cron::parse(text, Precision::Seconds) {
                Ok(cron) => return Some(Recurrence::Cron(Box::new(cron))),
                Err(what) => FieldError::new("cronExpression", what),
            },
            (None, Some(ms)) if !(MIN_INTERVAL_MS..=MAX_INTERVAL_MS).contains(&ms) => {
                let range = format!("must be from {MIN_INTERVAL_MS} (1 s) to {MAX_INTERVAL_MS} (10 years), is {ms}");
                FieldError::new("intervalMs", range)
            }
            (None, Some(ms)) => {
                let interval_ms = i64::try_from(ms).unwrap_or(i64::MAX);
                let first = self.start_at.unwrap_or_else(|| anchor.plus_ms(interval_ms));
                return Some(Recurrence::Interval { first, interval_ms });
            }
            (None, None) => FieldError::new("cronExpression", "is missing: give cronExpression or intervalMs"),
            (Some(_), Some(_)) => FieldError::new(
                "cronExpression",
                "stands next to intervalMs: give one of them, not both (to change from one to the other, set the other to null)",
            ),
        };
        faults.push(fault);
        None
    }

    fn exceptions(&self, faults: &mut Vec<FieldError>) -> Vec<Blackout> {
        if self.except.len() > MAX_EXCEPTIONS {
            let count = self.except.len();
            faults.push(FieldError::new("except", format!("must have at most {MAX_EXCEPTIONS} entries, has {count}")));
            return Vec::new();
        }
        let mut except = Vec::with_capacity(self.except.len());
        for (nth, text) in self.except.iter().enumerate() {
            match Blackout::parse(text) {
                Ok(entry) => except.push(entry),
                Err(what) => faults.push(FieldError::new(format!("except[{nth}]"), what)),
            }
        }
        except
    }
}

/// A compiled timing.
#[derive(Clone, Debug)]
pub struct CompiledTiming {
    recurrence: Recurrence,
    zone: TimeZone,
    dst_gap: DstGap,
    dst_overlap: DstOverlap,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
    except: Vec<Blackout>,
}

#[derive(Clone, Debug)]
enum Recurrence {
    Cron(Box<Cron>),
    Interval { first: Timestamp, interval_ms: i64 },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tick {
    pub due: Timestamp,
    pub note: Option<DstNote>,
    /// The entry of `except` for which it does not fire.
    pub blackout: Option<String>,
}

/// What fell due in a span of time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backlog {
    /// The latest ones, in order.
    pub latest: Vec<Tick>,
    /// What lies before those.
    pub earlier: Option<EarlierTicks>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EarlierTicks {
    pub first: Timestamp,
    pub last: Timestamp,
    /// `None`: more than 5 000, not counted.
    pub count: Option<u64>,
}

impl CompiledTiming {
    /// The first due time after `after` (exclusive), within start and end, blackout or not.
    pub fn next_including_blackouts(&self, after: Timestamp) -> Option<Tick> {
        self.due_times(after).next().map(|(due, note)| self.tick(due, note))
    }

    /// The first due time after `after` at which something fires: not blacked out. `None` too when 200 000 blacked-out due times
    /// were passed over in vain.
    pub fn next(&self, after: Timestamp) -> Option<Tick> {
        let mut due_times = self.due_times(after);
        for _ in 0..MAX_PASSED_OVER {
            let (due, note) = due_times.next()?;
            let (second, local) = self.second_and_local(due);
            match self.except.iter().find(|except| except.covers(local)) {
                None => return Some(Tick { due, note, blackout: None }),
                Some(except) => due_times.skip_to(except.covered_until(local, &self.zone, second)),
            }
        }
        None
    }

    /// The due times in (`after`, `upto`]: the latest `keep` of them, blackouts marked, and a summary of what lies before those.
    ///
    /// An outage of two weeks holds a million seconds, of which few matter: where the latest ones begin is found by halving, and
    /// no step looks at more than `keep` + 1 due times.
    pub fn backlog(&self, after: Timestamp, upto: Timestamp, keep: usize) -> Backlog {
        let upto = upto.min(self.end.unwrap_or(Timestamp::MAX)).min(Timestamp::MAX);
        if let Recurrence::Interval { first, interval_ms } = self.recurrence {
            return self.interval_backlog(first, interval_ms, (after, upto), keep);
        }
        let due_times = |from: Timestamp| self.due_times(from).take_while(|(due, _)| *due <= upto);
        let ticks = |from: Timestamp| due_times(from).map(|(due, note)| self.tick(due, note));
        let more_than_kept = |from: Timestamp| due_times(from).nth(keep).is_some();
        if !more_than_kept(after) {
            return Backlog { latest: ticks(after).collect(), earlier: None };
        }
        let (mut begin, mut beyond) = (after, upto);
        while beyond.ms_since(begin) > 1 {
            let middle = begin.plus_ms(beyond.ms_since(begin) / 2);
            if more_than_kept(middle) { begin = middle } else { beyond = middle }
        }
        let mut latest = ticks(begin);
        let earlier = latest.next().and_then(|tick| self.earlier(after, tick.due));
        Backlog { latest: latest.collect(), earlier }
    }

    fn earlier(&self, after: Timestamp, last: Timestamp) -> Option<EarlierTicks> {
        let (first, _) = self.due_times(after).next()?;
        let counted = self.due_times(after).take_while(|(due, _)| *due <= last).take(MAX_COUNTED + 1).count();
        let count = (counted <= MAX_COUNTED).then(|| u64::try_from(counted).unwrap_or_default());
        Some(EarlierTicks { first, last, count })
    }

    fn interval_backlog(
        &self,
        first: Timestamp,
        interval_ms: i64,
        (after, upto): (Timestamp, Timestamp),
        keep: usize,
    ) -> Backlog {
        let Some(begin) = next_of_interval(first, interval_ms, after).filter(|due| *due <= upto) else {
            return Backlog::default();
        };
        let count = upto.ms_since(begin) / interval_ms + 1;
        let kept = count.min(i64::try_from(keep).unwrap_or(i64::MAX));
        let nth = |n: i64| begin.plus_ms(n * interval_ms);
        let last = nth(count - kept - 1);
        Backlog {
            latest: (count - kept..count).map(|n| self.tick(nth(n), None)).collect(),
            earlier: (count > kept).then(|| EarlierTicks {
                first: begin,
                last,
                count: u64::try_from(count - kept).ok(),
            }),
        }
    }

    pub fn dst_gap(&self) -> DstGap {
        self.dst_gap
    }

    pub fn dst_overlap(&self) -> DstOverlap {
        self.dst_overlap
    }

    /// In words: `At 02:30, on Monday (Europe/Madrid)`.
    pub fn explain(&self) -> String {
        let zone = self.zone.iana_name().unwrap_or("UTC");
        let when = match &self.recurrence {
            Recurrence::Cron(cron) => cron.describe(),
            Recurrence::Interval { first, interval_ms } => {
                format!("every {} from {}", interval_words(*interval_ms), self.local(*first))
            }
        };
        let dark: Vec<&str> = self.except.iter().map(|except| except.text.as_str()).collect();
        let except = if dark.is_empty() { String::new() } else { format!(", except in {}", dark.join(", ")) };
        format!("{when}{except} ({zone})")
    }

    /// RFC 3339 with the zone's offset at that time: `2026-03-29T03:00:00+02:00`.
    pub fn local(&self, at: Timestamp) -> String {
        let Ok(instant) = jiff::Timestamp::from_millisecond(at.as_ms()) else { return at.to_string() };
        let fraction = if at.as_ms() % 1_000 == 0 { "" } else { "%.3f" };
        instant.to_zoned(self.zone.clone()).strftime(&format!("%FT%T{fraction}%:z")).to_string()
    }

    fn tick(&self, due: Timestamp, note: Option<DstNote>) -> Tick {
        let blackout = if self.except.is_empty() {
            None
        } else {
            let (_, local) = self.second_and_local(due);
            self.except.iter().find(|except| except.covers(local)).map(|except| except.text.clone())
        };
        Tick { due, note, blackout }
    }

    fn second_and_local(&self, due: Timestamp) -> (i64, i64) {
        let second = due.as_ms().div_euclid(1_000);
        (second, second + zone::offset_at(&self.zone, second))
    }

    fn due_times(&self, after: Timestamp) -> DueTimes<'_> {
        let source = match &self.recurrence {
            Recurrence::Cron(cron) => {
                let start = self.start.map_or(i64::MIN, |start| start.as_ms().saturating_add(999).div_euclid(1_000));
                let from = (after.as_ms().div_euclid(1_000) + 1).max(start);
                Source::Cron(CronTimes::new(cron, &self.zone, self.dst_gap, self.dst_overlap, from))
            }
            Recurrence::Interval { first, interval_ms } => {
                Source::Interval { first: *first, interval_ms: *interval_ms, after }
            }
        };
        DueTimes { source, end: self.end.unwrap_or(Timestamp::MAX) }
    }

    /// Why it never fires.
    fn never_fires(&self, anchor: Timestamp) -> Option<FieldError> {
        let after = self.start.map_or(anchor, |start| start.plus_ms(-1).max(anchor));
        if self.next(after).is_some() {
            return None;
        }
        if let Some(tick) = self.next_including_blackouts(after) {
            let first = self.local(tick.due);
            return Some(FieldError::new(
                "except",
                format!("never fires: every due time from {first} on is blacked out"),
            ));
        }
        let endless = CompiledTiming { end: None, ..self.clone() };
        Some(match (endless.next_including_blackouts(after), &self.recurrence) {
            (Some(tick), _) => {
                let first = self.local(tick.due);
                FieldError::new("endAt", format!("never fires: the first due time, {first}, is after the end"))
            }
            (None, Recurrence::Cron(cron)) => FieldError::new(
                "cronExpression",
                format!("never fires: no date matches it. It reads: {}", cron.describe()),
            ),
            (None, Recurrence::Interval { .. }) => {
                FieldError::new("intervalMs", "never fires: the first due time is too far away")
            }
        })
    }
}

/// The due times one after the other.
struct DueTimes<'a> {
    source: Source<'a>,
    end: Timestamp,
}

enum Source<'a> {
    Cron(CronTimes<'a>),
    Interval { first: Timestamp, interval_ms: i64, after: Timestamp },
}

impl DueTimes<'_> {
    fn skip_to(&mut self, second: i64) {
        match &mut self.source {
            Source::Cron(cron_times) => cron_times.skip_to(second),
            Source::Interval { after, .. } => *after = Timestamp::from_ms(second * 1_000 - 1).max(*after),
        }
    }
}

impl Iterator for DueTimes<'_> {
    type Item = (Timestamp, Option<DstNote>);

    fn next(&mut self) -> Option<Self::Item> {
        let (due, note) = match &mut self.source {
            Source::Cron(cron_times) => {
                cron_times.next().map(|(second, note)| (Timestamp::from_ms(second * 1_000), note))?
            }
            Source::Interval { first, interval_ms, after } => {
                let due = next_of_interval(*first, *interval_ms, *after)?;
                *after = due;
                (due, None)
            }
        };
        (due <= self.end).then_some((due, note))
    }
}

fn next_of_interval(first: Timestamp, interval_ms: i64, after: Timestamp) -> Option<Timestamp> {
    if after < first {
        return (first <= Timestamp::MAX).then_some(first);
    }
    let passed = after.ms_since(first) / interval_ms + 1;
    let due = first.plus_ms(passed.saturating_mul(interval_ms));
    (due <= Timestamp::MAX).then_some(due)
}

fn interval_words(ms: i64) -> String {
    let units = [(86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"), (1, "millisecond")];
    let (size, name) = units.into_iter().find(|(size, _)| ms % size == 0).unwrap_or((1, "millisecond"));
    match ms / size {
        1 => name.to_owned(),
        count => format!("{count} {name}s"),
    }
}
