//! Points in time, in milliseconds since 1970, written as RFC 3339; and durations such as `42m30s`.

use std::{borrow::Cow, fmt, time::Duration};

use crate::clock;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A point in time, in milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// Latest time that is accepted from a caller: 30 December 9999, 22:00 UTC. The library jiff supports no later ones.
    pub const MAX: Timestamp = Timestamp(253_402_207_200_000);

    pub const fn from_ms(ms: i64) -> Self {
        Timestamp(ms)
    }

    pub const fn as_ms(self) -> i64 {
        self.0
    }

    /// Reads the clock of this process, which never goes back. Called where a request or a round of a loop begins; the
    /// code below receives the time as a parameter, so that tests can choose it.
    pub fn now() -> Self {
        clock::now()
    }

    pub fn plus_ms(self, ms: i64) -> Self {
        Timestamp(self.0.saturating_add(ms))
    }

    /// Returns the milliseconds from `earlier` to `self`; negative if `earlier` is later.
    pub fn ms_since(self, earlier: Timestamp) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Smallest number that is read as milliseconds since 1970 (March 1973). A smaller one is probably in seconds.
    pub(crate) const FIRST_MS: i64 = 100_000_000_000;

    /// What [`Timestamp::parse`] accepts, to complete the error "must be …".
    pub const EXPECTED: &str = "a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970";

    /// Parses RFC 3339 (`2026-11-15T20:00:00Z`, with any offset), a date (midnight in UTC) or milliseconds since 1970.
    ///
    /// Returns `None` if the text is invalid, earlier than 1970 or later than [`Timestamp::MAX`].
    pub fn parse(text: &str) -> Option<Self> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Timestamp::from_number(text.parse().ok()?);
        }
        let at = match text.parse::<jiff::Timestamp>() {
            Ok(at) => at.as_millisecond(),
            Err(_) => midnight(text)?.as_millisecond(),
        };
        (0..=Self::MAX.0).contains(&at).then_some(Timestamp(at))
    }

    /// Reads a number that a caller wrote for a time, in milliseconds since 1970.
    fn from_number(ms: u64) -> Option<Self> {
        let ms = i64::try_from(ms).ok()?;
        (Self::FIRST_MS..=Self::MAX.0).contains(&ms).then_some(Timestamp(ms))
    }
}

/// Returns the start of a date like `2026-11-15` in UTC.
fn midnight(text: &str) -> Option<jiff::Timestamp> {
    // The parser of dates also accepts a time after the date, without an offset. That would be a guess.
    if text.len() != "2026-11-15".len() {
        return None;
    }
    let date = text.parse::<jiff::civil::Date>().ok()?;
    Some(date.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(at) => write!(f, "{at:.3}"),
            Err(_) => write!(f, "{}ms", self.0),
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Describes a time as answers write it.
impl JsonSchema for Timestamp {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Timestamp".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "date-time"})
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TimeVisitor)
    }
}

struct TimeVisitor;

impl de::Visitor<'_> for TimeVisitor {
    type Value = Timestamp;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Timestamp::EXPECTED)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
        Timestamp::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Timestamp, E> {
        Timestamp::from_number(number).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
    }
}

/// Parses `500ms`, `30s`, `5m`, `12h`, `7d`, and sums such as `42m30s`.
///
/// Returns `None` if any part of the text is invalid, or if the duration exceeds ten years.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut total = Duration::ZERO;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let ms = match &rest[..end] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        rest = &rest[end..];
        total = total.checked_add(Duration::from_millis(number.checked_mul(ms)?))?;
    }
    (total <= Duration::from_secs(3_650 * 86_400)).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_and_read_as_rfc_3339() {
        let at = Timestamp::from_ms(1_763_236_800_123);
        assert_eq!(at.to_string(), "2025-11-15T20:00:00.123Z");
        assert_eq!(Timestamp::parse(&at.to_string()), Some(at));
        assert_eq!(Timestamp::parse("2025-11-15T21:00:00.123+01:00"), Some(at), "any offset is accepted");
    }

    #[test]
    fn an_invalid_time_is_rejected() {
        for text in
            ["", "yesterday", "2025-13-01T00:00:00Z", "2025-11-32", "2025-11-15T10:00", "-000001-01-01T00:00:00Z"]
        {
            assert_eq!(Timestamp::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_date_is_midnight_in_utc_and_a_number_is_milliseconds() {
        let midnight = Timestamp::from_ms(1_763_164_800_000);
        let read = |json: &str| serde_json::from_str::<Timestamp>(json).ok();
        assert_eq!(Timestamp::parse("2025-11-15"), Some(midnight));
        assert_eq!(Timestamp::parse("1763164800000"), Some(midnight), "in a query string");
        assert_eq!(read("1763164800000"), Some(midnight));
        assert_eq!(read("\"2025-11-15T02:00:00+02:00\""), Some(midnight));
        for seconds in ["1763164800", "-1", "1763164800000.5", "true"] {
            assert_eq!(read(seconds), None, "{seconds}");
        }
    }

    #[test]
    fn a_duration_with_any_invalid_part_is_rejected() {
        assert_eq!(parse_duration("42m30s"), Some(Duration::from_secs(42 * 60 + 30)));
        assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse_duration("7d"), Some(Duration::from_secs(7 * 86_400)));
        for text in ["", "5", "s", "5 s", "1.5s", "-1s", "5x", "99999999999999999999s", "9999999999999999d"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }
}
