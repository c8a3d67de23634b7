//! Blackouts: periods in which a schedule does not fire although it is due.
//!
//! They are compared with the local due time, so that a day is a whole day, however many hours it has.

use jiff::{
    Timestamp as Instant,
    civil::{Date, DateTime},
    tz::{Offset, TimeZone},
};

use super::{
    cron::{Cron, DAY_SECONDS},
    cron_fields::{MAX_TEXT_BYTES, Precision},
};

pub(super) const MAX_BLACKOUTS: usize = 100;

/// An entry of a schedule's `except`.
#[derive(Clone, Debug)]
pub(super) struct Blackout {
    pub(super) text: String,
    window: Window,
}

#[derive(Clone, Debug)]
enum Window {
    /// Local seconds, `from` inclusive, `to` exclusive.
    Range { from: i64, to: i64 },
    /// Every minute that matches the expression, with all its seconds.
    Minutes(Box<Cron>),
}

impl Blackout {
    pub(super) fn parse(text: &str) -> Result<Blackout, String> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(format!("must have at most {MAX_TEXT_BYTES} bytes"));
        }
        let trimmed = text.trim();
        let window = if trimmed.contains(char::is_whitespace) {
            Window::Minutes(Box::new(Cron::parse(trimmed, Precision::Minutes)?))
        } else {
            parse_range(trimmed)?
        };
        Ok(Blackout { text: text.to_owned(), window })
    }

    pub(super) fn covers(&self, local: i64) -> bool {
        match &self.window {
            Window::Range { from, to } => (*from..*to).contains(&local),
            Window::Minutes(cron) => cron.matches_minute(local),
        }
    }

    /// Returns a Unix time in seconds, after `second`. Every due time between `second` and that time is covered too.
    ///
    /// `local` is the local time at `second`, and must be covered.
    pub(super) fn covered_until(&self, local: i64, zone: &TimeZone, second: i64) -> i64 {
        let until = match &self.window {
            Window::Range { to, .. } => *to,
            Window::Minutes(cron) => {
                let unit = match (cron.matches_every_minute(), cron.matches_every_hour()) {
                    (true, true) => DAY_SECONDS,
                    (true, false) => 3_600,
                    _ => 60,
                };
                local - local.rem_euclid(unit) + unit
            }
        };
        let Ok(until) = Instant::from_second(until) else { return second + 1 };
        // The earlier of two candidates: the clocks may go back into the covered time, or forwards past its end.
        let first = zone.to_ambiguous_timestamp(Offset::UTC.to_datetime(until)).earlier();
        first.map_or(second + 1, |at| at.as_second().max(second + 1))
    }
}

/// Parses a day, or a start and an end separated by `/`.
fn parse_range(text: &str) -> Result<Window, String> {
    let (first, last) = text.split_once('/').unwrap_or((text, text));
    let (Some(from), Some(to)) = (parse_bound(first, 0), parse_bound(last, DAY_SECONDS)) else {
        return Err(invalid(text));
    };
    if !text.contains('/') && text.contains('T') {
        return Err(format!("{text:?} has no end; add one, as in \"{text}/{}\"", &text[..10]));
    }
    if to <= from {
        return Err(format!("{text:?} ends before it begins"));
    }
    Ok(Window::Range { from, to })
}

/// Parses a date, to which `offset_of_dates` is added, or a date with a time.
fn parse_bound(text: &str, offset_of_dates: i64) -> Option<i64> {
    // jiff would accept many other formats.
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let (at, offset) = match shape.as_str() {
        "0000-00-00" => (text.parse::<Date>().ok()?.at(0, 0, 0, 0), offset_of_dates),
        "0000-00-00T00:00" | "0000-00-00T00:00:00" => (text.parse::<DateTime>().ok()?, 0),
        _ => return None,
    };
    Some(Offset::UTC.to_timestamp(at).ok()?.as_second() + offset)
}

fn invalid(text: &str) -> String {
    format!(
        "{text:?} is not a blackout; use a day (2026-12-25), days (2026-12-24/2026-12-26), times (2026-12-24T18:00/2026-12-26T08:00) or a cron expression with 5 fields (* 22-23 * * *)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(blackout: &str, local: &str) -> bool {
        let at = Offset::UTC.to_timestamp(local.parse().unwrap()).unwrap().as_second();
        Blackout::parse(blackout).unwrap().covers(at)
    }

    #[test]
    fn each_format_covers_exactly_its_period() {
        for (blackout, before, first, last, after) in [
            ("2026-12-25", "2026-12-24T23:59:59", "2026-12-25T00:00", "2026-12-25T23:59:59", "2026-12-26T00:00"),
            (
                "2026-12-24/2026-12-26",
                "2026-12-23T23:59:59",
                "2026-12-24T00:00",
                "2026-12-26T23:59:59",
                "2026-12-27T00:00",
            ),
            (
                "2026-12-24T18:00/2026-12-26T08:00",
                "2026-12-24T17:59:59",
                "2026-12-24T18:00",
                "2026-12-26T07:59:59",
                "2026-12-26T08:00",
            ),
            (
                "2026-12-24T18:00:30/2026-12-26",
                "2026-12-24T18:00:29",
                "2026-12-24T18:00:30",
                "2026-12-26T23:59:59",
                "2026-12-27T00:00",
            ),
            ("* 22-23 * * *", "2026-12-24T21:59:59", "2026-12-24T22:00", "2026-12-24T23:59:59", "2026-12-25T00:00"),
            ("30 12 * * FRI", "2026-12-25T12:29:59", "2026-12-25T12:30", "2026-12-25T12:30:59", "2026-12-25T12:31"),
        ] {
            let covered = [before, first, last, after].map(|local| covers(blackout, local));
            assert_eq!(covered, [false, true, true, false], "{blackout}");
        }
    }

    #[test]
    fn an_invalid_blackout_is_rejected() {
        for text in ["", "christmas", "2026-12-32", "20261225", "2026-12-25T25:00/2026-12-26", "@daily", "2026-12-25Z"]
        {
            assert_eq!(Blackout::parse(text).unwrap_err(), invalid(text));
        }
        let message = |text: &str| Blackout::parse(text).unwrap_err();
        assert_eq!(message("2026-12-26/2026-12-24"), "\"2026-12-26/2026-12-24\" ends before it begins");
        assert_eq!(
            message("2026-12-26T08:00/2026-12-26T08:00"),
            "\"2026-12-26T08:00/2026-12-26T08:00\" ends before it begins"
        );
        assert_eq!(
            message("2026-12-26T08:00"),
            "\"2026-12-26T08:00\" has no end; add one, as in \"2026-12-26T08:00/2026-12-26\""
        );
        assert!(
            message("* 24 * * *")
                .starts_with("invalid hour field (2 of 5, position 3): \"24\" is not between 0 and 23")
        );
        assert!(message("0 * 22 * * *").starts_with("has 6 fields but needs 5"));
    }
}
