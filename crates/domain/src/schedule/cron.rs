//! Cron expressions: finds the local times that they match.
//!
//! Time zones play no role here: a local time is counted in seconds since 1970 as if it were UTC. The crate croner decides which
//! days match (`L`, `#`, `W`, day of month or day of week); the times of a day are found in bit masks of the other fields.

use croner::{CronPattern, Weekday, parser::CronParser};
use jiff::{Timestamp as Instant, civil::Date, tz::Offset};

use super::cron_fields::{self, Precision};

pub(super) const DAY_SECONDS: i64 = 86_400;
/// After 400 years the calendar repeats, weekdays included: a date that did not match until then never matches.
const CALENDAR_YEARS: i16 = 400;

/// The plain values of a day field, and its items with `L`, `W` or `#`.
pub(super) type DayField<'a> = (Vec<u16>, Vec<&'a str>);

/// A parsed cron expression.
#[derive(Clone, Debug)]
pub(super) struct Cron {
    /// The expression with numbers instead of names.
    normalised: String,
    seconds: u64,
    minutes: u64,
    hours: u64,
    months: u64,
    days: CronPattern,
}

impl Cron {
    /// Parses an expression. The error says what is wrong and at which position.
    pub(super) fn parse(text: &str, precision: Precision) -> Result<Cron, String> {
        let normalised = cron_fields::normalise(text, precision)?;
        Cron::from_normalised(&normalised)
            .map_err(|message| cron_fields::locate_parser_error(text, &normalised, message))
    }

    fn from_normalised(normalised: &str) -> Result<Cron, String> {
        let mut days = CronParser::new().parse(normalised).map_err(|error| error.to_string())?.pattern;
        // Saves memory: croner keeps one byte for each year up to 5000, although there is no year field.
        days.years = Default::default();
        let mask = |values: Vec<u16>| values.into_iter().fold(0u64, |mask, value| mask | 1 << value);
        Ok(Cron {
            normalised: normalised.to_owned(),
            seconds: mask(days.seconds.values()),
            minutes: mask(days.minutes.values()),
            hours: mask(days.hours.values()),
            months: mask(days.months.values()),
            days,
        })
    }

    /// Returns the first matching local time at `from` or later.
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

    /// Returns whether the minute of a local time matches.
    pub(super) fn matches_minute(&self, at: i64) -> bool {
        let second = at.rem_euclid(DAY_SECONDS);
        self.minutes >> (second / 60 % 60) & 1 == 1
            && self.hours >> (second / 3600) & 1 == 1
            && date(at).is_some_and(|day| self.day_matches(day))
    }

    pub(super) fn matches_every_minute(&self) -> bool {
        self.minutes == (1 << 60) - 1
    }

    pub(super) fn matches_every_hour(&self) -> bool {
        self.hours == (1 << 24) - 1
    }

    /// Describes the expression for people: `At 02:30, on Monday`, `Every 15 minutes`.
    pub(super) fn describe(&self) -> String {
        let described = CronParser::new().parse(&self.with_listed_steps()).map(|cron| cron.describe());
        let words = described.map_or_else(|_| self.normalised.clone(), |words| words.trim_end_matches('.').to_owned());
        let words = match words.strip_prefix("At every ") {
            Some(rest) => format!("Every {rest}"),
            None => words,
        };
        // croner describes `LW` like `L`.
        if self.normalised.contains("LW") { words.replace("the last day of", "the last working day of") } else { words }
    }

    /// Returns the seconds, minutes and hours that match, as bit masks.
    pub(super) fn time_masks(&self) -> (u64, u64, u64) {
        (self.seconds, self.minutes, self.hours)
    }

    /// Returns the months that match; January is 1.
    pub(super) fn months(&self) -> Vec<usize> {
        (1..=12).filter(|month| self.months >> month & 1 == 1).collect()
    }

    /// Returns the days of the month and of the week that match: the plain values, and the items with `L`, `W` or `#`.
    /// `None`: any day.
    pub(super) fn day_fields(&self) -> (Option<DayField<'_>>, Option<DayField<'_>>) {
        let fields: Vec<&str> = self.normalised.split_ascii_whitespace().collect();
        let [.., day, _, weekday] = fields[..] else { return (None, None) };
        (
            (!self.days.is_dom_wildcard()).then(|| (self.days.days.values(), special_days(day))),
            (!self.days.is_dow_wildcard()).then(|| (self.days.days_of_week.values(), special_days(weekday))),
        )
    }

    /// Returns the expression with lists of values instead of steps that croner would describe wrongly.
    fn with_listed_steps(&self) -> String {
        let fields: Vec<&str> = self.normalised.split_ascii_whitespace().collect();
        let [.., minute, hour, day, month, weekday] = fields[..] else { return self.normalised.clone() };
        let seconds = if fields.len() > 5 { Some(list_uneven_steps(fields[0], self.seconds, 60)) } else { None };
        let rest = [
            list_uneven_steps(minute, self.minutes, 60),
            list_uneven_steps(hour, self.hours, 24),
            day.to_owned(),
            list_uneven_steps(month, self.months, 13),
            weekday.to_owned(),
        ];
        seconds.into_iter().chain(rest).collect::<Vec<String>>().join(" ")
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

    /// Returns the first matching day at `first` or later.
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

    /// Returns the first matching second of a day at `from` or later.
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

/// Returns the items of a day field that contain `L`, `W` or `#`.
fn special_days(field: &str) -> Vec<&str> {
    field.split(',').filter(|item| item.contains(['L', 'W', '#'])).collect()
}

/// Returns the first bit of `mask` that is set, at `from` or later.
fn bit_from(mask: u64, from: i64) -> Option<i64> {
    let rest = mask.checked_shr(u32::try_from(from).ok()?)?;
    (rest != 0).then(|| from + i64::from(rest.trailing_zeros()))
}

fn date(at: i64) -> Option<Date> {
    Some(Offset::UTC.to_datetime(Instant::from_second(at).ok()?).date())
}

/// Replaces uneven steps by the list of values: "every 40 minutes" would be wrong for minutes 0 and 40.
fn list_uneven_steps(field: &str, values: u64, end: usize) -> String {
    let step = field.strip_prefix("*/").and_then(|step| step.parse::<usize>().ok());
    let even = step.is_some_and(|step| step > 0 && end.is_multiple_of(step));
    if !field.contains('/') || even {
        return field.to_owned();
    }
    let numbers: Vec<String> = (0..end).filter(|n| values >> n & 1 == 1).map(|n| n.to_string()).collect();
    numbers.join(",")
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
    fn every_kind_of_expression_matches_the_expected_times() {
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
    fn the_due_times_are_the_same_as_those_of_croner() {
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
}
