//! Computes when a schedule is due: by a cron expression in a time zone, or at a fixed interval.
//!
//! Due times depend only on the definition of the schedule, never on its last run: they are the same on every node, after
//! every restart and after every change of the system clock.

use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    blackout::{Blackout, MAX_BLACKOUTS},
    cron::Cron,
    cron_fields::Precision,
    cron_spanish,
    cron_times::{CronTimes, DstNote},
    zone,
};
use crate::{FieldError, Timestamp};

const MIN_INTERVAL_MS: u64 = 1_000;
const MAX_INTERVAL_MS: u64 = 3_650 * 86_400_000;
/// Maximum number of due times in blackouts that are skipped in the search for the next one outside.
const MAX_SKIPPED: usize = 200_000;
/// Maximum number of earlier due times of a cron expression that are counted.
const MAX_COUNTED: usize = 5_000;

/// Definition of when a schedule is due. [`Timing::compile`] validates it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timing {
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    /// Default: `next`, or `skip` if the expression matches every hour of the day.
    pub dst_gap: Option<DstGap>,
    /// Default: `first`, or `both` if the expression matches every hour of the day.
    pub dst_overlap: Option<DstOverlap>,
    /// Earliest due time. Intervals are counted from it.
    pub start_at: Option<Timestamp>,
    /// Latest due time.
    pub end_at: Option<Timestamp>,
    /// Blackouts: days, ranges and cron expressions, in local time, in which nothing fires.
    pub except: Vec<String>,
}

/// What happens to local times that the clocks skip.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DstGap {
    /// They are due once, together, right after the gap.
    Next,
    Skip,
}

/// What happens to local times that occur twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
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
    /// Validates the timing. Intervals without `startAt` are counted from `anchor`, the creation time of the schedule.
    ///
    /// Returns every invalid field, or that the schedule would never fire.
    pub fn compile(&self, anchor: Timestamp) -> Result<CompiledTiming, Vec<FieldError>> {
        let mut errors = Vec::new();
        let recurrence = self.recurrence(anchor, &mut errors);
        let zone = zone::find(&self.timezone).map_err(|message| errors.push(FieldError::new("timezone", message))).ok();
        if let (Some(start), Some(end)) = (self.start_at, self.end_at)
            && end <= start
        {
            errors.push(FieldError::new("endAt", format!("must be later than startAt ({start}), is {end}")));
        }
        let blackouts = self.blackouts(&mut errors);
        let (Some(recurrence), Some(zone), true) = (recurrence, zone, errors.is_empty()) else { return Err(errors) };
        let by_elapsed_time = match &recurrence {
            Recurrence::Cron(cron) => cron.matches_every_hour(),
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
            blackouts,
        };
        match compiled.never_fires_error(anchor) {
            Some(error) => Err(vec![error]),
            None => Ok(compiled),
        }
    }

    fn recurrence(&self, anchor: Timestamp, errors: &mut Vec<FieldError>) -> Option<Recurrence> {
        let error = match (&self.cron_expression, self.interval_ms) {
            (Some(text), None) => match Cron::parse(text, Precision::Seconds) {
                Ok(cron) => return Some(Recurrence::Cron(Box::new(cron))),
                Err(message) => FieldError::new("cronExpression", message),
            },
            (None, Some(ms)) if !(MIN_INTERVAL_MS..=MAX_INTERVAL_MS).contains(&ms) => {
                let range =
                    format!("must be between {MIN_INTERVAL_MS} (1 s) and {MAX_INTERVAL_MS} (10 years), got {ms}");
                FieldError::new("intervalMs", range)
            }
            (None, Some(ms)) => {
                let interval_ms = i64::try_from(ms).unwrap_or(i64::MAX);
                let first = self.start_at.unwrap_or_else(|| anchor.plus_ms(interval_ms));
                return Some(Recurrence::Interval { first, interval_ms });
            }
            (None, None) => FieldError::new("cronExpression", "is missing; set cronExpression or intervalMs"),
            (Some(_), Some(_)) => FieldError::new(
                "cronExpression",
                "cannot be combined with intervalMs; set one of them (to switch, set the other to null)",
            ),
        };
        errors.push(error);
        None
    }

    fn blackouts(&self, errors: &mut Vec<FieldError>) -> Vec<Blackout> {
        if self.except.len() > MAX_BLACKOUTS {
            let count = self.except.len();
            errors.push(FieldError::new("except", format!("must have at most {MAX_BLACKOUTS} entries, has {count}")));
            return Vec::new();
        }
        let mut blackouts = Vec::with_capacity(self.except.len());
        for (index, text) in self.except.iter().enumerate() {
            match Blackout::parse(text) {
                Ok(blackout) => blackouts.push(blackout),
                Err(message) => errors.push(FieldError::new(format!("except[{index}]"), message)),
            }
        }
        blackouts
    }
}

/// A validated timing that computes due times.
#[derive(Clone, Debug)]
pub struct CompiledTiming {
    recurrence: Recurrence,
    zone: TimeZone,
    dst_gap: DstGap,
    dst_overlap: DstOverlap,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
    blackouts: Vec<Blackout>,
}

#[derive(Clone, Debug)]
enum Recurrence {
    Cron(Box<Cron>),
    Interval { first: Timestamp, interval_ms: i64 },
}

/// A due time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tick {
    pub due: Timestamp,
    pub note: Option<DstNote>,
    /// Entry of `except` that covers it, so that it does not fire.
    pub blackout: Option<String>,
}

/// Due times of a period.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Backlog {
    /// The latest due times, in order.
    pub latest: Vec<Tick>,
    /// Summary of the due times before those.
    pub earlier: Option<EarlierTicks>,
}

/// Summary of consecutive due times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EarlierTicks {
    pub first: Timestamp,
    pub last: Timestamp,
    /// `None`: a cron expression has more than 5 000, which are not counted.
    pub count: Option<u64>,
}

impl CompiledTiming {
    /// Returns the first due time after `after`, even if it is in a blackout.
    pub fn next_including_blackouts(&self, after: Timestamp) -> Option<Tick> {
        self.due_times(after).next().map(|(due, note)| self.tick(due, note))
    }

    /// Returns the first due time after `after` outside blackouts.
    ///
    /// Returns `None` if there is none, or if the next 200 000 due times are all in blackouts.
    pub fn next(&self, after: Timestamp) -> Option<Tick> {
        let mut due_times = self.due_times(after);
        for _ in 0..MAX_SKIPPED {
            let (due, note) = due_times.next()?;
            let (second, local) = self.second_and_local(due);
            match self.blackout_at(local) {
                None => return Some(Tick { due, note, blackout: None }),
                Some(blackout) => due_times.skip_to(blackout.covered_until(local, &self.zone, second)),
            }
        }
        None
    }

    /// Returns the latest `keep` due times in (`after`, `up_to`], including blackouts, and a summary of the earlier ones.
    ///
    /// An outage of two weeks contains a million seconds, few of which matter: a binary search finds where the latest
    /// due times begin, and none of its steps examines more than `keep` + 1 due times.
    pub fn backlog(&self, after: Timestamp, up_to: Timestamp, keep: usize) -> Backlog {
        let up_to = up_to.min(self.end.unwrap_or(Timestamp::MAX)).min(Timestamp::MAX);
        if let Recurrence::Interval { first, interval_ms } = self.recurrence {
            return self.interval_backlog(first, interval_ms, (after, up_to), keep);
        }
        let due_times = |from: Timestamp| self.due_times(from).take_while(|(due, _)| *due <= up_to);
        let ticks = |from: Timestamp| due_times(from).map(|(due, note)| self.tick(due, note));
        let more_than_kept = |from: Timestamp| due_times(from).nth(keep).is_some();
        if !more_than_kept(after) {
            return Backlog { latest: ticks(after).collect(), earlier: None };
        }
        let (mut begin, mut beyond) = (after, up_to);
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
        (after, up_to): (Timestamp, Timestamp),
        keep: usize,
    ) -> Backlog {
        let Some(begin) = next_of_interval(first, interval_ms, after).filter(|due| *due <= up_to) else {
            return Backlog::default();
        };
        let count = up_to.ms_since(begin) / interval_ms + 1;
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

    /// Describes the timing for people: `At 02:30, on Monday (Europe/Madrid)`.
    pub fn explain(&self) -> String {
        let zone = self.zone.iana_name().unwrap_or("UTC");
        let when = match &self.recurrence {
            Recurrence::Cron(cron) => cron.describe(),
            Recurrence::Interval { first, interval_ms } => {
                format!("Every {} from {}", interval_words(*interval_ms), self.local(*first))
            }
        };
        let blackouts: Vec<&str> = self.blackouts.iter().map(|blackout| blackout.text.as_str()).collect();
        let except = if blackouts.is_empty() { String::new() } else { format!(", except {}", blackouts.join(", ")) };
        format!("{when}{except} ({zone})")
    }

    /// Describes the timing for people who read Spanish: `A las 02:30, los lunes (Europe/Madrid)`.
    pub fn explain_in_spanish(&self) -> String {
        let zone = self.zone.iana_name().unwrap_or("UTC");
        let when = match &self.recurrence {
            Recurrence::Cron(cron) => cron_spanish::describe(cron),
            Recurrence::Interval { first, interval_ms } => {
                format!("Cada {} desde {}", interval_in_spanish(*interval_ms), self.local(*first))
            }
        };
        let blackouts: Vec<&str> = self.blackouts.iter().map(|blackout| blackout.text.as_str()).collect();
        let except = if blackouts.is_empty() { String::new() } else { format!(", excepto {}", blackouts.join(", ")) };
        format!("{when}{except} ({zone})")
    }

    /// Formats a time as RFC 3339 with the zone's offset at that time: `2026-03-29T03:00:00+02:00`.
    pub fn local(&self, at: Timestamp) -> String {
        let Ok(instant) = jiff::Timestamp::from_millisecond(at.as_ms()) else { return at.to_string() };
        let fraction = if at.as_ms() % 1_000 == 0 { "" } else { "%.3f" };
        instant.to_zoned(self.zone.clone()).strftime(&format!("%FT%T{fraction}%:z")).to_string()
    }

    fn tick(&self, due: Timestamp, note: Option<DstNote>) -> Tick {
        let blackout = if self.blackouts.is_empty() {
            None
        } else {
            let (_, local) = self.second_and_local(due);
            self.blackout_at(local).map(|blackout| blackout.text.clone())
        };
        Tick { due, note, blackout }
    }

    fn blackout_at(&self, local: i64) -> Option<&Blackout> {
        self.blackouts.iter().find(|blackout| blackout.covers(local))
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

    /// Returns an error if no due time follows `anchor`.
    fn never_fires_error(&self, anchor: Timestamp) -> Option<FieldError> {
        let after = self.start.map_or(anchor, |start| start.plus_ms(-1).max(anchor));
        if self.next(after).is_some() {
            return None;
        }
        if let Some(tick) = self.next_including_blackouts(after) {
            let first = self.local(tick.due);
            return Some(FieldError::new(
                "except",
                format!("never fires: every due time from {first} on is in a blackout"),
            ));
        }
        let endless = CompiledTiming { end: None, ..self.clone() };
        Some(match (endless.next_including_blackouts(after), &self.recurrence) {
            (Some(tick), _) => {
                let first = self.local(tick.due);
                FieldError::new("endAt", format!("never fires: the first due time, {first}, is later than endAt"))
            }
            (None, Recurrence::Cron(cron)) => {
                FieldError::new("cronExpression", format!("never fires: no date matches; read as: {}", cron.describe()))
            }
            (None, Recurrence::Interval { .. }) => {
                FieldError::new("intervalMs", "never fires: the first due time is after the year 9999")
            }
        })
    }
}

/// Iterator over due times.
struct DueTimes<'a> {
    source: Source<'a>,
    end: Timestamp,
}

enum Source<'a> {
    Cron(CronTimes<'a>),
    Interval { first: Timestamp, interval_ms: i64, after: Timestamp },
}

impl DueTimes<'_> {
    /// Skips all due times before `second`.
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
    interval_in(ms, ["day", "hour", "minute", "second", "millisecond"])
}

fn interval_in_spanish(ms: i64) -> String {
    interval_in(ms, ["día", "hora", "minuto", "segundo", "milisegundo"])
}

/// Writes an interval in the largest unit that divides it. Both languages form these plurals with "s".
fn interval_in(ms: i64, names: [&str; 5]) -> String {
    let sizes = [86_400_000, 3_600_000, 60_000, 1_000, 1];
    let (size, name) = sizes.into_iter().zip(names).find(|(size, _)| ms % size == 0).unwrap_or((1, names[4]));
    match ms / size {
        1 => name.to_owned(),
        count => format!("{count} {name}s"),
    }
}
