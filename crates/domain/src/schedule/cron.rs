//! Cron expressions: reading them, saying exactly what is wrong with them, and finding the wall-clock times they match.
//!
//! Nothing here knows of time zones: a wall-clock time is counted in seconds from 1970 as if it were in UTC. croner judges which
//! days match (`L`, `#`, `W`, day of month or day of week); the fields reach it checked and in plain numbers, because it takes
//! `1,,2`, `MON` as a minute and `7L` without complaint, and then never fires or at another time.

use croner::{CronPattern, Weekday, parser::CronParser};
use jiff::{Timestamp as Instant, civil::Date, tz::Offset};

pub(super) const DAY_SECONDS: i64 = 86_400;
/// After 400 years the calendar repeats itself, weekdays included: what did not match until then never does.
const CALENDAR_YEARS: i16 = 400;

/// One of the fields, and what may stand in it.
struct Kind {
    name: &'static str,
    least: u16,
    most: u16,
    names: &'static [&'static str],
    /// The number of the first name.
    first: u16,
    allowed: &'static str,
}

const fn numbers(name: &'static str, most: u16, allowed: &'static str) -> Kind {
    Kind { name, least: 0, most, names: &[], first: 0, allowed }
}

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
const DAY_OF_MONTH: &str = "day of month";
const DAY_OF_WEEK: &str = "day of week";

const KINDS: [Kind; 6] = [
    numbers("second", 59, "0-59"),
    numbers("minute", 59, "0-59"),
    numbers("hour", 23, "0-23"),
    Kind {
        name: DAY_OF_MONTH,
        least: 1,
        most: 31,
        names: &[],
        first: 0,
        allowed: "1-31, L (last day), 15W (nearest working day), LW (last working day)",
    },
    Kind { name: "month", least: 1, most: 12, names: &MONTHS, first: 1, allowed: "1-12 or JAN-DEC" },
    Kind {
        name: DAY_OF_WEEK,
        least: 0,
        most: 7,
        names: &WEEKDAYS,
        first: 0,
        allowed: "0-7 or SUN-SAT (0 and 7 are Sunday), 5L (last Friday), 1#2 (second Monday)",
    },
];

const NICKNAMES: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// How fine an expression may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// Five fields only.
    Minutes,
    /// Five fields, or six with the second first, or a name like `@daily`.
    Seconds,
}

#[derive(Clone, Debug)]
pub(super) struct Cron {
    /// The fields in plain numbers.
    plain: String,
    seconds: u64,
    minutes: u64,
    hours: u64,
    months: u64,
    days: CronPattern,
}

impl Cron {
    /// `Err`: what is wrong, and where, for people.
    pub(super) fn parse(text: &str, precision: Precision) -> Result<Cron, String> {
        let name = text.trim();
        if precision == Precision::Seconds && name.starts_with('@') {
            let known = NICKNAMES.iter().find(|(nickname, _)| nickname.eq_ignore_ascii_case(name));
            return known.map_or_else(|| Err(unknown_name(text)), |(_, plain)| Cron::read(plain));
        }
        let words = words(text);
        let kinds = match (words.len(), precision) {
            (5, _) => &KINDS[1..],
            (6, Precision::Seconds) => &KINDS[..],
            _ => return Err(wrong_count(&words, precision)),
        };
        let refusal = |number: usize, flaw: Flaw| refusal(kinds, &words, number, flaw);
        let mut plain = Vec::with_capacity(words.len());
        for (number, (kind, (_, word))) in kinds.iter().zip(&words).enumerate() {
            plain.push(kind.read(word).map_err(|flaw| refusal(number, flaw))?);
        }
        Cron::read(&plain.join(" ")).map_err(|what| {
            // Not known to happen: croner refuses what was found good. The field to blame is the one it refuses alone.
            let number = (0..plain.len()).find(|number| refused_alone(&plain, *number)).unwrap_or_default();
            refusal(number, Flaw { offset: 0, what })
        })
    }

    fn read(plain: &str) -> Result<Cron, String> {
        let mut days = CronParser::new().parse(plain).map_err(|error| error.to_string())?.pattern;
        // One byte for each year until 5000, which nobody asks for.
        days.years = Default::default();
        let mask = |values: Vec<u16>| values.into_iter().fold(0u64, |mask, value| mask | 1 << value);
        Ok(Cron {
            plain: plain.to_owned(),
            seconds: mask(days.seconds.values()),
            minutes: mask(days.minutes.values()),
            hours: mask(days.hours.values()),
            months: mask(days.months.values()),
            days,
        })
    }

    /// The first matching wall-clock time at `from` or later.
    pub(super) fn next(&self, from: i64) -> Option<i64> {
        let today = date(from)?;
        if self.day_matches(today)
            && let Some(time) = self.time_from(from.rem_euclid(DAY_SECONDS))
        {
            return Some(from - from.rem_euclid(DAY_SECONDS) + time);
        }
        let day = self.day_from(today.tomorrow().ok()?)?;
        let midnight = Offset::UTC.to_timestamp(day.at(0, 0, 0, 0)).ok()?.as_second();
        Some(midnight + self.time_from(0)?)
    }

    /// Whether the minute of this wall-clock time matches.
    pub(super) fn matches_minute(&self, at: i64) -> bool {
        let second = at.rem_euclid(DAY_SECONDS);
        self.minutes >> (second / 60 % 60) & 1 == 1
            && self.hours >> (second / 3600) & 1 == 1
            && date(at).is_some_and(|day| self.day_matches(day))
    }

    pub(super) fn every_minute(&self) -> bool {
        self.minutes == (1 << 60) - 1
    }

    pub(super) fn every_hour(&self) -> bool {
        self.hours == (1 << 24) - 1
    }

    /// In words: `At 02:30, on Monday`.
    pub(super) fn describe(&self) -> String {
        let described = CronParser::new().parse(&self.plain).map(|cron| cron.describe());
        described.map_or_else(|_| self.plain.clone(), |words| words.trim_end_matches('.').to_owned())
    }

    fn day_matches(&self, day: Date) -> bool {
        let weekday = Weekday::from_days_from_sunday(u32::from(day.weekday().to_sunday_zero_offset().unsigned_abs()));
        self.months >> day.month() & 1 == 1
            && self
                .days
                .day_match(
                    day.year().into(),
                    day.month().unsigned_abs().into(),
                    day.day().unsigned_abs().into(),
                    weekday,
                )
                .unwrap_or(false)
    }

    fn day_from(&self, first: Date) -> Option<Date> {
        let mut day = first;
        while day.year() <= first.year().saturating_add(CALENDAR_YEARS) {
            if self.months >> day.month() & 1 == 0 {
                day = day.last_of_month();
            } else if self.day_matches(day) {
                return Some(day);
            }
            day = day.tomorrow().ok()?;
        }
        None
    }

    /// The first matching second of a day at `from` or later.
    fn time_from(&self, from: i64) -> Option<i64> {
        let (hour, minute, second) = (from / 3600, from / 60 % 60, from % 60);
        if bit_from(self.hours, hour) == Some(hour) {
            if bit_from(self.minutes, minute) == Some(minute)
                && let Some(second) = bit_from(self.seconds, second)
            {
                return Some(hour * 3600 + minute * 60 + second);
            }
            if let Some(minute) = bit_from(self.minutes, minute + 1) {
                return Some(hour * 3600 + minute * 60 + bit_from(self.seconds, 0)?);
            }
        }
        let hour = bit_from(self.hours, hour + 1)?;
        Some(hour * 3600 + bit_from(self.minutes, 0)? * 60 + bit_from(self.seconds, 0)?)
    }
}

fn bit_from(mask: u64, from: i64) -> Option<i64> {
    let rest = mask.checked_shr(u32::try_from(from).ok()?)?;
    (rest != 0).then(|| from + i64::from(rest.trailing_zeros()))
}

fn date(at: i64) -> Option<Date> {
    Some(Offset::UTC.to_datetime(Instant::from_second(at).ok()?).date())
}

/// What is wrong with a field, and at which of its characters, from 0.
struct Flaw {
    offset: usize,
    what: String,
}

fn flaw<T>(offset: usize, what: String) -> Result<T, Flaw> {
    Err(Flaw { offset, what })
}

impl Kind {
    /// The field in plain numbers.
    fn read(&self, field: &str) -> Result<String, Flaw> {
        let mut items = Vec::new();
        let mut offset = 0;
        for item in field.split(',') {
            let read = self.item(item).map_err(|flaw| Flaw { offset: offset + flaw.offset, ..flaw })?;
            offset += item.chars().count() + 1;
            items.push(read);
        }
        // croner takes `*` only alone.
        Ok(if items.iter().any(|item| item == "*") { "*".to_owned() } else { items.join(",") })
    }

    fn item(&self, item: &str) -> Result<String, Flaw> {
        let item = item.to_uppercase();
        let of_days = [DAY_OF_MONTH, DAY_OF_WEEK].contains(&self.name);
        match item.as_str() {
            "" => return flaw(0, "a value is missing next to the comma".to_owned()),
            "*" => return Ok(item),
            "?" if of_days => return Ok("*".to_owned()),
            _ => {}
        }
        if let Some((base, step)) = item.split_once('/') {
            return self.stepped(base, step);
        }
        match self.name {
            DAY_OF_MONTH => self.special_day(&item),
            DAY_OF_WEEK => self.special_weekday(&item),
            _ => self.range(&item),
        }
    }

    fn stepped(&self, base: &str, step: &str) -> Result<String, Flaw> {
        let plain = match base {
            "*" => base.to_owned(),
            _ if base.contains('-') => self.range(base)?,
            "" => return flaw(0, format!("the step /{step} has nothing to step through: write */{step}")),
            _ => {
                let from = self.value(base, 0)?;
                let what = format!("a step needs a range: write {from}-{}/{step} instead of {base}/{step}", self.most);
                return flaw(0, what);
            }
        };
        match step.parse::<u16>() {
            Ok(number) if (1..=self.most).contains(&number) => Ok(format!("{plain}/{number}")),
            _ => flaw(base.chars().count() + 1, format!("the step {step:?} is not a number from 1 to {}", self.most)),
        }
    }

    fn special_day(&self, item: &str) -> Result<String, Flaw> {
        match item.strip_suffix('W') {
            _ if item == "L" || item == "LW" => Ok(item.to_owned()),
            Some(day) => Ok(format!("{}W", self.value(day, 0)?)),
            None => self.range(item),
        }
    }

    fn special_weekday(&self, item: &str) -> Result<String, Flaw> {
        if item == "L" {
            return flaw(0, "L alone does not say which weekday: write 5L for the last Friday".to_owned());
        }
        // croner would never find a seventh weekday that is the last or the second one.
        if let Some(day) = item.strip_suffix("#L").or(item.strip_suffix('L')) {
            return Ok(format!("{}L", self.value(day, 0)? % 7));
        }
        let Some((day, nth)) = item.split_once('#') else { return self.range(item) };
        let day_number = self.value(day, 0)? % 7;
        match nth.parse::<u8>() {
            Ok(nth) if (1..=5).contains(&nth) => Ok(format!("{day_number}#{nth}")),
            _ => flaw(day.chars().count() + 1, format!("{nth:?} after # is not a number from 1 to 5")),
        }
    }

    fn range(&self, item: &str) -> Result<String, Flaw> {
        let Some((from, to)) = item.split_once('-') else { return Ok(self.value(item, 0)?.to_string()) };
        let first = self.value(from, 0)?;
        let mut last = self.value(to, from.chars().count() + 1)?;
        if self.name == DAY_OF_WEEK && last == 0 && first > 0 {
            last = 7;
        }
        if first > last {
            let what = format!("the range {item} runs backwards: write {first}-{},{}-{last}", self.most, self.least);
            return flaw(0, what);
        }
        Ok(format!("{first}-{last}"))
    }

    fn value(&self, text: &str, offset: usize) -> Result<u16, Flaw> {
        if let Some(nth) = self.names.iter().position(|name| *name == text) {
            return Ok(self.first + u16::try_from(nth).unwrap_or_default());
        }
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u16>() {
            Ok(value) if (self.least..=self.most).contains(&value) && digits => Ok(value),
            _ if digits => flaw(offset, format!("{text} is not from {} to {}", self.least, self.most)),
            _ if text.is_empty() => flaw(offset, "a number is missing".to_owned()),
            _ => match self.names.first() {
                Some(name) => flaw(offset, format!("{text:?} is neither a number nor a name like {name}")),
                None => flaw(offset, format!("{text:?} is not a number")),
            },
        }
    }
}

fn refusal(kinds: &[Kind], words: &[(usize, &str)], number: usize, flaw: Flaw) -> String {
    let (kind, (at, _)) = (&kinds[number], words[number]);
    format!(
        "{}, in the {} field (number {} of {}, position {}); allowed there: {}, *, lists 1,3, ranges 1-5 and steps */2. {}",
        flaw.what,
        kind.name,
        number + 1,
        kinds.len(),
        at + flaw.offset,
        kind.allowed,
        meaning(kinds, words),
    )
}

/// Whether croner refuses this field when all others are `*`.
fn refused_alone(plain: &[String], number: usize) -> bool {
    let fields = plain.iter().enumerate().map(|(other, field)| if other == number { field.as_str() } else { "*" });
    CronParser::new().parse(&fields.collect::<Vec<_>>().join(" ")).is_err()
}

/// The words of a text, each with its position in characters, from 1.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut rest = text;
    let mut position = 1;
    while let Some(start) = rest.find(|c: char| !c.is_whitespace()) {
        position += rest[..start].chars().count();
        rest = &rest[start..];
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        words.push((position, &rest[..end]));
        position += rest[..end].chars().count();
        rest = &rest[end..];
    }
    words
}

fn meaning(kinds: &[Kind], words: &[(usize, &str)]) -> String {
    let each = kinds.iter().zip(words).map(|(kind, (_, word))| match *word {
        "*" | "?" => format!("every {}", kind.name),
        _ => format!("{} {word}", kind.name),
    });
    format!("It reads: {}", each.collect::<Vec<_>>().join(", "))
}

fn wrong_count(words: &[(usize, &str)], precision: Precision) -> String {
    let count = match words.len() {
        0 => "is empty".to_owned(),
        1 => "has 1 field".to_owned(),
        n => format!("has {n} fields"),
    };
    let more = match (precision, words.len()) {
        (Precision::Minutes, _) => "",
        (Precision::Seconds, 7..) => ", or 6 with the second first; there is no year field",
        (Precision::Seconds, _) => ", or 6 with the second first",
    };
    let needed = "needs 5: minute, hour, day of month, month, day of week";
    match words.len() {
        1..=4 => format!("{count} but {needed}{more}. {}", meaning(&KINDS[1..], words)),
        _ => format!("{count} but {needed}{more}"),
    }
}

fn unknown_name(text: &str) -> String {
    let at = words(text).first().map_or(1, |(at, _)| *at);
    let known: Vec<_> = NICKNAMES.iter().map(|(name, _)| *name).collect();
    let name = text.trim();
    let why = match name.split_whitespace().next().unwrap_or_default().to_lowercase().as_str() {
        "@every" => "for a fixed distance between runs give intervalMs instead of cronExpression",
        "@reboot" => "a schedule does not know of restarts; for a fixed distance between runs give intervalMs",
        _ => "for a fixed distance between runs give intervalMs",
    };
    format!("{name} (position {at}) is not known; known are {}; {why}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(text: &str) -> i64 {
        Offset::UTC.to_timestamp(text.parse().unwrap()).unwrap().as_second()
    }

    fn next(cron: &str, from: &str, count: usize) -> Vec<String> {
        let cron = Cron::parse(cron, Precision::Seconds).unwrap();
        let mut from = second(from);
        (0..count)
            .map(|_| {
                let at = cron.next(from).unwrap();
                from = at + 1;
                Offset::UTC.to_datetime(Instant::from_second(at).unwrap()).strftime("%F %T").to_string()
            })
            .collect()
    }

    #[test]
    fn every_kind_of_expression_matches_the_times_it_means() {
        let cases: [(&str, [&str; 3]); 18] = [
            ("30 2 * * *", ["2026-01-01 02:30:00", "2026-01-02 02:30:00", "2026-01-03 02:30:00"]),
            ("*/20 * * * * *", ["2026-01-01 00:00:00", "2026-01-01 00:00:20", "2026-01-01 00:00:40"]),
            ("0 22-23 * * *", ["2026-01-01 22:00:00", "2026-01-01 23:00:00", "2026-01-02 22:00:00"]),
            ("5 4 L * *", ["2026-01-31 04:05:00", "2026-02-28 04:05:00", "2026-03-31 04:05:00"]),
            ("0 0 LW * ?", ["2026-01-30 00:00:00", "2026-02-27 00:00:00", "2026-03-31 00:00:00"]),
            ("0 0 15W * *", ["2026-01-15 00:00:00", "2026-02-16 00:00:00", "2026-03-16 00:00:00"]),
            ("0 0 1W * *", ["2026-01-01 00:00:00", "2026-02-02 00:00:00", "2026-03-02 00:00:00"]),
            ("0 9 * * mon#1", ["2026-01-05 09:00:00", "2026-02-02 09:00:00", "2026-03-02 09:00:00"]),
            ("0 9 * * FRIL", ["2026-01-30 09:00:00", "2026-02-27 09:00:00", "2026-03-27 09:00:00"]),
            ("0 9 * * 7L", ["2026-01-25 09:00:00", "2026-02-22 09:00:00", "2026-03-29 09:00:00"]),
            ("0 9 * * 7#1", ["2026-01-04 09:00:00", "2026-02-01 09:00:00", "2026-03-01 09:00:00"]),
            ("0 0 * * FRI-SUN", ["2026-01-02 00:00:00", "2026-01-03 00:00:00", "2026-01-04 00:00:00"]),
            ("0 0 13 * FRI", ["2026-01-02 00:00:00", "2026-01-09 00:00:00", "2026-01-13 00:00:00"]),
            ("0 0 29 2 *", ["2028-02-29 00:00:00", "2032-02-29 00:00:00", "2036-02-29 00:00:00"]),
            ("0 0 * feb FRI#5", ["2036-02-29 00:00:00", "2064-02-29 00:00:00", "2092-02-29 00:00:00"]),
            ("@weekly", ["2026-01-04 00:00:00", "2026-01-11 00:00:00", "2026-01-18 00:00:00"]),
            ("@Midnight", ["2026-01-01 00:00:00", "2026-01-02 00:00:00", "2026-01-03 00:00:00"]),
            (" 0  12 1,15 JAN-DEC/6 * ", ["2026-01-01 12:00:00", "2026-01-15 12:00:00", "2026-07-01 12:00:00"]),
        ];
        for (cron, expected) in cases {
            assert_eq!(next(cron, "2026-01-01T00:00", 3), expected, "{cron}");
        }
    }

    #[test]
    fn a_date_that_does_not_exist_never_matches() {
        for cron in ["0 0 30 2 *", "0 0 31 2,4 *", "0 0 31 6,9,11 *"] {
            let cron = Cron::parse(cron, Precision::Seconds).unwrap();
            assert_eq!(cron.next(second("2026-01-01T00:00")), None);
        }
    }

    #[test]
    fn every_second_of_a_year_is_found_as_croner_finds_it() {
        for text in ["7-59/13 3,17 */5 * 2", "0,30 * 1-7 3-5 MON", "15 10 4 L * *", "*/7 */9 */5 3W * *"] {
            let ours = Cron::parse(text, Precision::Seconds).unwrap();
            let theirs = CronParser::new().parse(text).unwrap();
            let mut at: jiff::civil::DateTime = "2026-01-01T00:00".parse().unwrap();
            for _ in 0..300 {
                let found = theirs.find_next_occurrence(&at, false).unwrap();
                let expected = Offset::UTC.to_timestamp(found).unwrap().as_second();
                let from = Offset::UTC.to_timestamp(at).unwrap().as_second() + 1;
                assert_eq!(ours.next(from), Some(expected), "{text} after {at}");
                at = found;
            }
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_field_and_position() {
        let reads = "It reads: minute 61, hour 2, every day of month, every month, day of week MON";
        let cases = [
            (
                "61 2 * * MON",
                format!(
                    "61 is not from 0 to 59, in the minute field (number 1 of 5, position 1); allowed there: 0-59, *, lists 1,3, ranges 1-5 and steps */2. {reads}"
                ),
            ),
            (
                "0 1,24 * * *",
                "24 is not from 0 to 23, in the hour field (number 2 of 5, position 5); allowed there: 0-23, *, lists 1,3, ranges 1-5 and steps */2. It reads: minute 0, hour 1,24, every day of month, every month, every day of week".into(),
            ),
        ];
        for (cron, message) in cases {
            assert_eq!(Cron::parse(cron, Precision::Seconds).unwrap_err(), message);
        }
        let short = [
            (
                "5/5 * * * *",
                "a step needs a range: write 5-59/5 instead of 5/5, in the minute field (number 1 of 5, position 1)",
            ),
            (
                "/5 * * * *",
                "the step /5 has nothing to step through: write */5, in the minute field (number 1 of 5, position 1)",
            ),
            (
                "*/0 * * * *",
                "the step \"0\" is not a number from 1 to 59, in the minute field (number 1 of 5, position 3)",
            ),
            (
                "*/x * * * *",
                "the step \"X\" is not a number from 1 to 59, in the minute field (number 1 of 5, position 3)",
            ),
            (
                "0 22-2 * * *",
                "the range 22-2 runs backwards: write 22-23,0-2, in the hour field (number 2 of 5, position 3)",
            ),
            ("0 0 * * 5-", "a number is missing, in the day of week field (number 5 of 5, position 11)"),
            (
                "0 0 1,,2 * *",
                "a value is missing next to the comma, in the day of month field (number 3 of 5, position 7)",
            ),
            (
                "0 0 * FOO *",
                "\"FOO\" is neither a number nor a name like JAN, in the month field (number 4 of 5, position 7)",
            ),
            ("MON 0 * * *", "\"MON\" is not a number, in the minute field (number 1 of 5, position 1)"),
            (
                "0 0 * * L",
                "L alone does not say which weekday: write 5L for the last Friday, in the day of week field (number 5 of 5, position 9)",
            ),
            (
                "0 0 * * MON#6",
                "\"6\" after # is not a number from 1 to 5, in the day of week field (number 5 of 5, position 13)",
            ),
            ("0 0 * * 8", "8 is not from 0 to 7, in the day of week field (number 5 of 5, position 9)"),
            ("0 0 0 * *", "0 is not from 1 to 31, in the day of month field (number 3 of 5, position 5)"),
            ("0 0 L-3 * *", "\"L\" is not a number, in the day of month field (number 3 of 5, position 5)"),
            ("ñ é 0 * * *", "\"Ñ\" is not a number, in the second field (number 1 of 6, position 1)"),
            ("0 60 0 * * *", "60 is not from 0 to 59, in the minute field (number 2 of 6, position 3)"),
            (
                "0 0 * * +5",
                "\"+5\" is neither a number nor a name like SUN, in the day of week field (number 5 of 5, position 9)",
            ),
        ];
        for (cron, begin) in short {
            let message = Cron::parse(cron, Precision::Seconds).unwrap_err();
            assert_eq!(message.split("; allowed there: ").next().unwrap(), begin, "{cron}");
        }
    }

    #[test]
    fn a_wrong_number_of_fields_and_unknown_names_are_refused() {
        let names = "known are @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly";
        let cases = [
            ("", "is empty but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first".to_owned()),
            ("5 4 *", "has 3 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first. It reads: minute 5, hour 4, every day of month".into()),
            ("0 0 0 1 1 * 2027", "has 7 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first; there is no year field".into()),
            ("@reboot", format!("@reboot (position 1) is not known; {names}; a schedule does not know of restarts; for a fixed distance between runs give intervalMs")),
            (" @every 5m", format!("@every 5m (position 2) is not known; {names}; for a fixed distance between runs give intervalMs instead of cronExpression")),
            ("@noon", format!("@noon (position 1) is not known; {names}; for a fixed distance between runs give intervalMs")),
        ];
        for (cron, message) in cases {
            assert_eq!(Cron::parse(cron, Precision::Seconds).unwrap_err(), message);
        }
        assert_eq!(
            Cron::parse("0 0 0 * * *", Precision::Minutes).unwrap_err(),
            "has 6 fields but needs 5: minute, hour, day of month, month, day of week"
        );
    }
}
