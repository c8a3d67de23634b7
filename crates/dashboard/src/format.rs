//! Formats numbers, times and durations for display.

use askama::Template;
use faena_domain::Timestamp;

use crate::{markup::Markup, texts::Language};

const SECOND: i64 = 1_000;
const MINUTE: i64 = 60 * SECOND;
const TEN_MINUTES: i64 = 10 * MINUTE;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;
const TEN_DAYS: i64 = 10 * DAY;

/// Formatting rules of one viewer.
#[derive(Clone, Copy)]
pub struct Formats {
    pub language: Language,
    pub now: Timestamp,
    /// Whether the script fills in ages, so that a page whose content has not changed is rendered the same again.
    pub is_live: bool,
}

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<time datetime="{{ iso }}" title="{{ exact }}" data-as="{{ kind }}">{{ text }}</time>"#
)]
struct TimeTag<'a> {
    iso: String,
    exact: String,
    kind: &'a str,
    text: String,
}

impl Formats {
    /// Writes a number with separators: `18,204` or `18.204`.
    pub fn count(&self, number: u64) -> String {
        let separator = if self.language == Language::Spanish { '.' } else { ',' };
        let digits = number.to_string();
        let mut text = String::new();
        for (index, digit) in digits.chars().enumerate() {
            let is_group = index > 0 && (digits.len() - index).is_multiple_of(3);
            // Spanish groups only numbers of five digits and more.
            if is_group && (digits.len() > 4 || self.language == Language::English) {
                text.push(separator);
            }
            text.push(digit);
        }
        text
    }

    /// Writes a number with at most one decimal.
    pub fn decimal(&self, number: f64) -> String {
        if number >= 10.0 || number.fract() == 0.0 {
            return self.count(number.round().max(0.0) as u64);
        }
        let text = format!("{number:.1}").trim_end_matches(".0").to_owned();
        if self.language == Language::Spanish { text.replace('.', ",") } else { text }
    }

    /// Writes a duration with one or two units: `840 ms`, `1.9 s`, `42 s`, `2 min 50 s`, `54 min`, `1 h 20 min`, `2 d 4 h`.
    pub fn duration(&self, ms: i64) -> String {
        let ms = ms.max(0);
        match ms {
            0..1_000 => format!("{ms} ms"),
            1_000..10_000 => format!("{} s", self.decimal(ms as f64 / 1_000.0)),
            10_000..MINUTE => format!("{} s", ms / SECOND),
            MINUTE..TEN_MINUTES => two_units(ms, (MINUTE, "min"), (SECOND, "s")),
            TEN_MINUTES..HOUR => format!("{} min", ms / MINUTE),
            HOUR..DAY => two_units(ms, (HOUR, "h"), (MINUTE, "min")),
            DAY..TEN_DAYS => two_units(ms, (DAY, "d"), (HOUR, "h")),
            _ => format!("{} d", ms / DAY),
        }
    }

    /// Returns how long ago a time was, with the exact time on hover.
    pub fn age(&self, at: Timestamp) -> Markup {
        let text = if self.is_live { String::new() } else { self.duration(self.now.ms_since(at)) };
        self.tag(at, "age", text)
    }

    /// Returns how far away a time is, in the past or in the future, with words.
    pub fn relative(&self, at: Timestamp) -> Markup {
        let text = if self.is_live { String::new() } else { self.relative_text(at) };
        self.tag(at, "relative", text)
    }

    /// Returns the time until `at`, for places whose label says that it is in the future.
    pub fn until(&self, at: Timestamp) -> Markup {
        let text = if self.is_live { String::new() } else { self.until_text(at.ms_since(self.now)) };
        self.tag(at, "until", text)
    }

    fn until_text(&self, ms: i64) -> String {
        match (self.language, ms) {
            (Language::English, ..SECOND) => "now".to_owned(),
            (Language::Spanish, ..SECOND) => "ahora".to_owned(),
            _ => self.duration(ms),
        }
    }

    fn relative_text(&self, at: Timestamp) -> String {
        let ms = at.ms_since(self.now);
        if ms.abs() < SECOND {
            return self.until_text(0);
        }
        let duration = self.duration(ms.abs());
        match (self.language, ms >= 0) {
            (Language::English, true) => format!("in {duration}"),
            (Language::English, false) => format!("{duration} ago"),
            (Language::Spanish, true) => format!("dentro de {duration}"),
            (Language::Spanish, false) => format!("hace {duration}"),
        }
    }

    /// Returns a time of the day, for logs. The script shows it in the viewer's zone.
    pub fn clock(&self, at: Timestamp) -> Markup {
        let text = iso(at).get(11..23).unwrap_or_default().to_owned();
        self.tag(at, "clock", text)
    }

    /// Returns a time within a sentence: with its day unless that is today. The script shows it in the viewer's zone.
    pub fn instant(&self, at: Timestamp) -> Markup {
        let (text, today) = (iso(at), iso(self.now));
        let is_today = text.get(..10) == today.get(..10);
        let text = text.get(if is_today { 11 } else { 0 }..19).unwrap_or_default().replace('T', " ");
        self.tag(at, "instant", text)
    }

    /// Returns day and time to the second, for histories. The script shows it in the viewer's zone.
    pub fn moment(&self, at: Timestamp) -> Markup {
        let text = iso(at).get(..19).unwrap_or_default().replace('T', " ");
        self.tag(at, "moment", text)
    }

    /// Returns a time of the day to the minute, in UTC.
    pub fn hour_and_minute(&self, at: Timestamp) -> String {
        iso(at).get(11..16).unwrap_or_default().to_owned()
    }

    /// Returns the short name of the day of a time, in UTC.
    pub fn weekday(&self, at: Timestamp) -> &'static str {
        // The first day of the epoch was a Thursday.
        let day = (at.as_ms().div_euclid(DAY) + 3).rem_euclid(7) as usize;
        match self.language {
            Language::English => ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"][day],
            Language::Spanish => ["lun", "mar", "mié", "jue", "vie", "sáb", "dom"][day],
        }
    }

    fn tag(&self, at: Timestamp, kind: &str, text: String) -> Markup {
        let iso = iso(at);
        let exact = format!("{} UTC", iso.trim_end_matches('Z').replace('T', " "));
        Markup::of(&TimeTag { iso, exact, kind, text })
    }
}

/// Writes a duration with a unit and the next smaller one, which is left out if it is zero.
fn two_units(ms: i64, (large, large_name): (i64, &str), (small, small_name): (i64, &str)) -> String {
    match ms % large / small {
        0 => format!("{} {large_name}", ms / large),
        rest => format!("{} {large_name} {rest} {small_name}", ms / large),
    }
}

/// Returns a time as ISO 8601 with milliseconds.
pub fn iso(at: Timestamp) -> String {
    at.to_string()
}

/// Returns the first and the last characters of an id. The first ones are its time, which jobs of one batch share.
pub fn short_id(id: &str) -> String {
    match (id.get(..8), id.len().checked_sub(6).and_then(|from| id.get(from..))) {
        (Some(first), Some(last)) if id.len() > 16 => format!("{first}…{last}"),
        _ => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formats(language: Language) -> Formats {
        Formats { language, now: Timestamp::from_ms(1_000_000_000), is_live: false }
    }

    #[test]
    fn short_ids_of_jobs_created_together_differ() {
        assert_eq!(short_id("01a1ec00-cc4b-7000-8000-00000000ec5e"), "01a1ec00…00ec5e");
        assert_eq!([short_id("press-1"), short_id("")], ["press-1", ""]);
        assert_eq!(short_id(&"ñ".repeat(20)), "ññññ…ñññ");
    }

    #[test]
    fn numbers_have_the_separators_of_the_language() {
        let (english, spanish) = (formats(Language::English), formats(Language::Spanish));
        assert_eq!(
            [0, 999, 1_204, 18_204, 1_000_000].map(|n| english.count(n)),
            ["0", "999", "1,204", "18,204", "1,000,000"]
        );
        assert_eq!([999, 1_204, 18_204].map(|n| spanish.count(n)), ["999", "1204", "18.204"]);
        assert_eq!(
            (english.decimal(1.94), spanish.decimal(1.94), english.decimal(1.97), english.decimal(40.2)),
            ("1.9".into(), "1,9".into(), "2".into(), "40".into())
        );
    }

    #[test]
    fn a_duration_has_one_or_two_units() {
        let formats = formats(Language::English);
        let text = |ms| formats.duration(ms);
        assert_eq!([0, 840, 1_900, 42_000, 59_999].map(text), ["0 ms", "840 ms", "1.9 s", "42 s", "59 s"]);
        assert_eq!([60_000, 119_000, 170_000, 599_999].map(text), ["1 min", "1 min 59 s", "2 min 50 s", "9 min 59 s"]);
        assert_eq!([600_000, 3_599_000, HOUR, 4_800_000].map(text), ["10 min", "59 min", "1 h", "1 h 20 min"]);
        assert_eq!([2 * DAY, 2 * DAY + 4 * HOUR, TEN_DAYS + HOUR].map(text), ["2 d", "2 d 4 h", "10 d"]);
        assert_eq!(text(-5), "0 ms");
    }

    #[test]
    fn a_time_has_its_exact_value_on_hover() {
        let formats = formats(Language::English);
        let html = formats.relative(Timestamp::from_ms(1_000_060_000)).to_string();
        assert!(html.contains("in 1 min") && html.contains("1970-01-12 13:47:40.000 UTC"), "{html}");
        assert!(formats.age(Timestamp::from_ms(999_000_000)).to_string().contains(">16 min<"));
        assert!(formats.relative(formats.now.plus_ms(-400)).to_string().contains(">now<"));
        assert!(formats.until(formats.now.plus_ms(90_000)).to_string().contains(">1 min 30 s<"));
        assert!(formats.moment(formats.now).to_string().contains(">1970-01-12 13:46:40<"));
        assert_eq!((formats.weekday(formats.now), formats.hour_and_minute(formats.now).as_str()), ("Mon", "13:46"));
    }
}
