//! Blackouts: times in which a schedule does not fire, though it is due.
//!
//! They are compared with the local time at which something would run, so that a day is a day, however many hours it has.

use jiff::{
    Timestamp as Instant,
    civil::{Date, DateTime},
    tz::{Offset, TimeZone},
};

use super::{
    cron::{Cron, DAY_SECONDS},
    fields::{MAX_BYTES, Precision},
};

pub(super) const MAX_EXCEPTIONS: usize = 100;

#[derive(Clone, Debug)]
pub(super) struct Blackout {
    pub(super) text: String,
    window: Window,
}

#[derive(Clone, Debug)]
enum Window {
    /// Local seconds from (inclusive) and to (exclusive).
    Span { from: i64, to: i64 },
    /// Every whole minute that matches.
    Minutes(Box<Cron>),
}

impl Blackout {
    pub(super) fn parse(text: &str) -> Result<Blackout, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("is longer than {MAX_BYTES} characters"));
        }
        let trimmed = text.trim();
        let window = if trimmed.contains(char::is_whitespace) {
            Window::Minutes(Box::new(Cron::parse(trimmed, Precision::Minutes)?))
        } else {
            span(trimmed)?
        };
        Ok(Blackout { text: text.to_owned(), window })
    }

    pub(super) fn covers(&self, local: i64) -> bool {
        match &self.window {
            Window::Span { from, to } => (*from..*to).contains(&local),
            Window::Minutes(cron) => cron.matches_minute(local),
        }
    }

    /// When `local` is covered: a second before which everything that follows `local` is covered too.
    pub(super) fn covered_until(&self, local: i64, zone: &TimeZone, second: i64) -> i64 {
        let until = match &self.window {
            Window::Span { to, .. } => *to,
            Window::Minutes(cron) => {
                let unit = match (cron.every_minute(), cron.every_hour()) {
                    (true, true) => DAY_SECONDS,
                    (true, false) => 3_600,
                    _ => 60,
                };
                local - local.rem_euclid(unit) + unit
            }
        };
        let Ok(until) = Instant::from_second(until) else { return second + 1 };
        // The earlier of two: the clocks may go back into the covered time, or forwards over its end.
        let first = zone.to_ambiguous_timestamp(Offset::UTC.to_datetime(until)).earlier();
        first.map_or(second + 1, |at| at.as_second().max(second + 1))
    }
}

fn span(text: &str) -> Result<Window, String> {
    let (first, last) = text.split_once('/').unwrap_or((text, text));
    let (Some(from), Some(to)) = (moment(first, 0), moment(last, DAY_SECONDS)) else { return Err(unreadable(text)) };
    if !text.contains('/') && text.contains('T') {
        return Err(format!("{text} is a moment; give its end too, like {text}/{}", &text[..10]));
    }
    if to <= from {
        return Err(format!("{text} ends before it begins"));
    }
    Ok(Window::Span { from, to })
}

/// A day, put off by `day_adds`, or a time of day.
fn moment(text: &str, day_adds: i64) -> Option<i64> {
    // jiff would take many other spellings.
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let (at, adds) = match shape.as_str() {
        "0000-00-00" => (text.parse::<Date>().ok()?.at(0, 0, 0, 0), day_adds),
        "0000-00-00T00:00" | "0000-00-00T00:00:00" => (text.parse::<DateTime>().ok()?, 0),
        _ => return None,
    };
    Some(Offset::UTC.to_timestamp(at).ok()?.as_second() + adds)
}

fn unreadable(text: &str) -> String {
    format!(
        "{text:?} is neither a day (2026-12-25), nor days (2026-12-24/2026-12-26), nor times (2026-12-24T18:00/2026-12-26T08:00), nor a cron expression of 5 fields (* 22-23 * * *)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(except: &str, local: &str) -> bool {
        let at = Offset::UTC.to_timestamp(local.parse().unwrap()).unwrap().as_second();
        Blackout::parse(except).unwrap().covers(at)
    }

    #[test]
    fn each_spelling_covers_what_it_says() {
        for (except, before, first, last, behind) in [
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
            let covered = [before, first, last, behind].map(|local| covers(except, local));
            assert_eq!(covered, [false, true, true, false], "{except}");
        }
    }

    #[test]
    fn what_is_no_blackout_is_refused() {
        for text in ["", "christmas", "2026-12-32", "20261225", "2026-12-25T25:00/2026-12-26", "@daily", "2026-12-25Z"]
        {
            assert_eq!(Blackout::parse(text).unwrap_err(), unreadable(text));
        }
        let message = |text: &str| Blackout::parse(text).unwrap_err();
        assert_eq!(message("2026-12-26/2026-12-24"), "2026-12-26/2026-12-24 ends before it begins");
        assert_eq!(
            message("2026-12-26T08:00/2026-12-26T08:00"),
            "2026-12-26T08:00/2026-12-26T08:00 ends before it begins"
        );
        assert_eq!(
            message("2026-12-26T08:00"),
            "2026-12-26T08:00 is a moment; give its end too, like 2026-12-26T08:00/2026-12-26"
        );
        assert!(message("* 24 * * *").starts_with("24 is not from 0 to 23, in the hour field"));
        assert!(message("0 * 22 * * *").starts_with("has 6 fields but needs 5"));
    }
}
