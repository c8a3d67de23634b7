//! Time zones: lookup by name, and the segments of time in which a zone keeps one offset from UTC.

use jiff::{
    Timestamp as Instant,
    tz::{TimeZone, db},
};

use super::cron_fields::MAX_TEXT_BYTES;
use crate::Timestamp;

/// Range of times that are examined, in seconds: the years 1 to 9999.
pub(super) const FIRST_SECOND: i64 = -62_135_596_800;
pub(super) const LAST_SECOND: i64 = Timestamp::MAX.as_ms() / 1_000;

/// Segment of time with one offset from UTC: seconds from `start` (inclusive) to `end` (exclusive).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    pub(super) start: i64,
    pub(super) end: i64,
    pub(super) offset: i64,
    /// Offset before `start`.
    pub(super) before: i64,
    /// Offset from `end` on.
    pub(super) after: i64,
}

impl Segment {
    /// Returns the segment that contains `second`.
    pub(super) fn at(zone: &TimeZone, second: i64) -> Segment {
        let offset = offset_at(zone, second);
        // A transition may change only the zone's abbreviation; it does not end the segment.
        let start = zone
            .preceding(instant(second + 1))
            .map(|change| (change.timestamp().as_second(), i64::from(change.offset().seconds())))
            .map(|(at, offset)| (at, offset, offset_at(zone, at - 1)))
            .find(|(_, offset, before)| offset != before);
        let end = zone
            .following(instant(second))
            .map(|change| (change.timestamp().as_second(), i64::from(change.offset().seconds())))
            .find(|(_, after)| *after != offset);
        Segment {
            start: start.map_or(FIRST_SECOND, |(at, ..)| at),
            end: end.map_or(LAST_SECOND + 1, |(at, _)| at),
            offset,
            before: start.map_or(offset, |(.., before)| before),
            after: end.map_or(offset, |(_, after)| after),
        }
    }
}

pub(super) fn offset_at(zone: &TimeZone, second: i64) -> i64 {
    zone.to_offset(instant(second)).seconds().into()
}

pub(super) fn instant(second: i64) -> Instant {
    Instant::from_second(second.clamp(FIRST_SECOND, LAST_SECOND)).unwrap_or(Instant::UNIX_EPOCH)
}

/// Finds a zone by its IANA name. The error names the most similar zone, if there is one.
pub(super) fn find(name: &str) -> Result<TimeZone, String> {
    if name.len() > MAX_TEXT_BYTES {
        return Err(format!("must have at most {MAX_TEXT_BYTES} bytes"));
    }
    // jiff ignores case, but other readers of the stored name do not.
    let found = TimeZone::get(name).ok().filter(|zone| zone.iana_name() == Some(name) && !zone.is_unknown());
    found.ok_or_else(|| match similar(name) {
        Some(similar) => format!("unknown time zone {name:?}; did you mean {similar:?}?"),
        None => format!("unknown time zone {name:?}; use an IANA name such as \"Europe/Madrid\" or \"UTC\""),
    })
}

/// Returns the known zone whose name is closest to `name`, if any is close enough.
fn similar(name: &str) -> Option<String> {
    let wanted = name.trim().to_lowercase().replace(' ', "_");
    if wanted.len() < 3 || wanted.len() > 64 {
        return None;
    }
    let mut known: Vec<String> = db().available().map(|name| name.as_str().to_owned()).collect();
    known.sort();
    let rank = |known: &str| {
        let whole = known.to_lowercase();
        let city = whole.rsplit('/').next().unwrap_or(&whole);
        if whole == wanted {
            return Some(0);
        }
        if city == wanted {
            return Some(1);
        }
        if wanted.contains('/') && whole.starts_with(&wanted) || wanted.len() > 3 && city.starts_with(&wanted) {
            return Some(2);
        }
        let distance = edit_distance(&whole, &wanted).min(edit_distance(city, &wanted));
        (distance <= 2.min(wanted.len() / 4)).then_some(2 + distance)
    };
    let close = known.into_iter().filter_map(|name| rank(&name).map(|rank| (rank, name)));
    close.min().map(|(_, name)| name)
}

/// Returns the Levenshtein distance of two words.
fn edit_distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, same) in other.iter().map(|c| *c == letter).enumerate() {
            let changed = diagonal + usize::from(!same);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_zone_is_rejected_with_a_suggestion() {
        for (name, suggestion) in [
            ("europe/madrid", "Europe/Madrid"),
            ("Madrid", "Europe/Madrid"),
            ("New York", "America/New_York"),
            ("Europe/Madird", "Europe/Madrid"),
            ("Kathmand", "Asia/Kathmandu"),
            ("America/Argentina/Buenos", "America/Argentina/Buenos_Aires"),
        ] {
            let expected = format!("unknown time zone {name:?}; did you mean {suggestion:?}?");
            assert_eq!(find(name).unwrap_err(), expected);
        }
        for name in ["", "Atlantis/Poseidonis", "+02:00", "Etc/Unknown"] {
            let expected = format!("unknown time zone {name:?}; use an IANA name such as \"Europe/Madrid\" or \"UTC\"");
            assert_eq!(find(name).unwrap_err(), expected);
        }
        assert!(find("UTC").is_ok());
        assert!(find("America/Argentina/Buenos_Aires").is_ok());
    }

    /// `CronTimes` relies on this: a gap or an overlap ends before the next clock change.
    #[test]
    fn since_1970_no_zone_changes_its_clocks_within_a_gap_or_an_overlap() {
        let close: Vec<String> = db()
            .available()
            .filter_map(|name| TimeZone::get(name.as_str()).ok().map(|zone| (name.to_string(), zone)))
            .flat_map(|(name, zone)| {
                let mut second = 0;
                let mut close = Vec::new();
                while second < 2_240_000_000 {
                    let segment = Segment::at(&zone, second);
                    let moved = (segment.offset - segment.before).abs().max((segment.after - segment.offset).abs());
                    if segment.end - segment.start < moved {
                        close.push(format!("{name}: {segment:?}"));
                    }
                    second = segment.end;
                }
                close
            })
            .collect();
        assert_eq!(close, Vec::<String>::new());
    }
}
