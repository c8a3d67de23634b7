//! A point in time, as the server writes it.

use std::{
    fmt,
    ops::Add,
    str::FromStr,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A point in time with millisecond precision, written as RFC 3339 in UTC.
///
/// ```
/// # use std::time::Duration;
/// let at: faena::Timestamp = "2026-01-31T13:00:00+01:00".parse()?;
/// assert_eq!((at + Duration::from_secs(60)).to_string(), "2026-01-31T12:01:00.000Z");
/// # Ok::<(), faena::InvalidTimestamp>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Timestamp {
    /// Milliseconds since 1970.
    ms: i64,
}

impl Timestamp {
    /// Reads the clock of this machine.
    pub fn now() -> Timestamp {
        SystemTime::now().into()
    }

    /// Creates a timestamp from milliseconds since 1970-01-01T00:00:00Z.
    pub const fn from_millis(ms: i64) -> Timestamp {
        Timestamp { ms }
    }

    /// Returns the milliseconds since 1970-01-01T00:00:00Z.
    pub const fn as_millis(self) -> i64 {
        self.ms
    }

    /// Returns the time from `earlier` to `self`, or zero if `earlier` is later.
    pub fn saturating_duration_since(self, earlier: Timestamp) -> Duration {
        Duration::from_millis(u64::try_from(self.ms.saturating_sub(earlier.ms)).unwrap_or(0))
    }
}

/// Adds a duration. Stops at the largest representable time instead of overflowing.
impl Add<Duration> for Timestamp {
    type Output = Timestamp;

    fn add(self, duration: Duration) -> Timestamp {
        let ms = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Timestamp { ms: self.ms.saturating_add(ms) }
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        let ms = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => Timestamp { ms: ms(after) },
            Err(before) => Timestamp { ms: -ms(before.duration()) },
        }
    }
}

/// The text is not a time in RFC 3339 format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a valid time; write it like 2026-11-15T20:00:00Z")]
pub struct InvalidTimestamp;

impl FromStr for Timestamp {
    type Err = InvalidTimestamp;

    fn from_str(text: &str) -> Result<Timestamp, InvalidTimestamp> {
        let at: jiff::Timestamp = text.parse().map_err(|_| InvalidTimestamp)?;
        Ok(Timestamp { ms: at.as_millisecond() })
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.ms) {
            Ok(at) => write!(f, "{at:.3}"),
            // Outside the years that RFC 3339 can express.
            Err(_) => write!(f, "{}ms", self.ms),
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_and_read_as_rfc_3339() {
        let at = Timestamp::from_millis(1_763_236_800_123);
        assert_eq!(at.to_string(), "2025-11-15T20:00:00.123Z");
        assert_eq!(at.to_string().parse(), Ok(at));
        assert_eq!("2025-11-15T21:00:00.123+01:00".parse(), Ok(at), "an offset is understood");
        for text in ["", "yesterday", "2025-13-01T00:00:00Z", "2025-11-15"] {
            assert_eq!(text.parse::<Timestamp>(), Err(InvalidTimestamp), "{text}");
        }
    }

    #[test]
    fn differences_and_sums_never_overflow() {
        let (early, late) = (Timestamp::from_millis(1_000), Timestamp::from_millis(3_000));
        assert_eq!(late.saturating_duration_since(early), Duration::from_secs(2));
        assert_eq!(early.saturating_duration_since(late), Duration::ZERO);
        assert_eq!((early + Duration::MAX).as_millis(), i64::MAX);
        assert_eq!(Timestamp::from(SystemTime::UNIX_EPOCH - Duration::from_secs(1)).as_millis(), -1_000);
    }
}
