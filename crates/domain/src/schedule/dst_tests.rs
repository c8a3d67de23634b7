//! Tests of due times around clock changes: a table of real ones, and a comparison with an independent computation.

use std::collections::HashSet;

use jiff::{SignedDuration, civil::DateTime, tz::TimeZone};

use super::{
    CompiledTiming,
    DstGap::{self, Next, Skip},
    DstOverlap::{self, Both, First},
    Timing,
};
use crate::Timestamp;

fn at(text: &str) -> Timestamp {
    Timestamp::parse(text).unwrap_or_else(|| panic!("{text}"))
}

fn compile(zone: &str, cron: &str, gap: Option<DstGap>, overlap: Option<DstOverlap>) -> CompiledTiming {
    let timing = Timing {
        cron_expression: Some(cron.into()),
        timezone: zone.into(),
        dst_gap: gap,
        dst_overlap: overlap,
        ..Timing::default()
    };
    timing.compile(Timestamp::from_ms(0)).unwrap()
}

/// Returns the due times from `from` to `to` (both inclusive), as local times without the year.
fn due(compiled: &CompiledTiming, from: &str, to: &str) -> Vec<String> {
    let mut after = at(from).plus_ms(-1);
    let mut due = Vec::new();
    while let Some(tick) = compiled.next_including_blackouts(after).filter(|tick| tick.due <= at(to)) {
        due.push(compiled.local(tick.due)[5..].replace(":00+", "+").replace(":00-", "-").replace('T', " "));
        after = tick.due;
    }
    due
}

/// A clock change: zone, expression, from, to, and the due times for both choices: (`next`, `skip`) or (`first`, `both`).
type Change =
    (&'static str, &'static str, &'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const GAPS: [Change; 16] = [
    // 29 March, 02:00 becomes 03:00.
    (
        "Europe/Madrid",
        "30 2 * * *",
        "2026-03-28T00:00:00Z",
        "2026-03-30T12:00:00Z",
        &["03-28 02:30+01:00", "03-29 03:00+02:00", "03-30 02:30+02:00"],
        &["03-28 02:30+01:00", "03-30 02:30+02:00"],
    ),
    ("Europe/Madrid", "0 2 * * *", "2026-03-29T00:00:00Z", "2026-03-29T12:00:00Z", &["03-29 03:00+02:00"], &[]),
    // Several skipped times and one that is due anyway: one tick.
    (
        "Europe/Madrid",
        "*/20 1-3 * * *",
        "2026-03-29T00:30:00Z",
        "2026-03-29T01:30:00Z",
        &["03-29 01:40+01:00", "03-29 03:00+02:00", "03-29 03:20+02:00"],
        &["03-29 01:40+01:00", "03-29 03:00+02:00", "03-29 03:20+02:00"],
    ),
    ("Europe/Madrid", "*/20 2 * * *", "2026-03-29T00:30:00Z", "2026-03-29T05:30:00Z", &["03-29 03:00+02:00"], &[]),
    (
        "Europe/Madrid",
        "30 3 * * *",
        "2026-03-29T00:00:00Z",
        "2026-03-29T12:00:00Z",
        &["03-29 03:30+02:00"],
        &["03-29 03:30+02:00"],
    ),
    // 8 March, 02:00 becomes 03:00.
    (
        "America/New_York",
        "15 2 * * *",
        "2026-03-07T12:00:00Z",
        "2026-03-09T12:00:00Z",
        &["03-08 03:00-04:00", "03-09 02:15-04:00"],
        &["03-09 02:15-04:00"],
    ),
    // 4 October, 02:00 becomes 02:30.
    (
        "Australia/Lord_Howe",
        "15 2 * * *",
        "2026-10-02T20:00:00Z",
        "2026-10-04T20:00:00Z",
        &["10-04 02:30+11:00", "10-05 02:15+11:00"],
        &["10-05 02:15+11:00"],
    ),
    (
        "Australia/Lord_Howe",
        "30 2 * * *",
        "2026-10-02T20:00:00Z",
        "2026-10-03T20:00:00Z",
        &["10-04 02:30+11:00"],
        &["10-04 02:30+11:00"],
    ),
    // 4 November 2018, midnight becomes 01:00.
    (
        "America/Sao_Paulo",
        "0 0 * * *",
        "2018-11-03T00:00:00Z",
        "2018-11-05T12:00:00Z",
        &["11-03 00:00-03:00", "11-04 01:00-02:00", "11-05 00:00-02:00"],
        &["11-03 00:00-03:00", "11-05 00:00-02:00"],
    ),
    // 30 December 2011 does not exist.
    (
        "Pacific/Apia",
        "0 12 * * *",
        "2011-12-29T00:00:00Z",
        "2012-01-01T00:00:00Z",
        &["12-29 12:00-10:00", "12-31 00:00+14:00", "12-31 12:00+14:00", "01-01 12:00+14:00"],
        &["12-29 12:00-10:00", "12-31 12:00+14:00", "01-01 12:00+14:00"],
    ),
    ("Pacific/Apia", "0 */6 30 12 *", "2011-12-20T00:00:00Z", "2012-12-01T00:00:00Z", &["12-31 00:00+14:00"], &[]),
    (
        "Pacific/Apia",
        "0 0 * * *",
        "2011-12-29T12:00:00Z",
        "2011-12-31T00:00:00Z",
        &["12-31 00:00+14:00"],
        &["12-31 00:00+14:00"],
    ),
    // 1 January 1986, midnight becomes 00:15.
    (
        "Asia/Kathmandu",
        "5 0 * * *",
        "1985-12-30T20:00:00Z",
        "1986-01-01T20:00:00Z",
        &["01-01 00:15+05:45", "01-02 00:05+05:45"],
        &["01-02 00:05+05:45"],
    ),
    (
        "Asia/Kathmandu",
        "30 2 * * *",
        "2026-03-28T00:00:00Z",
        "2026-03-29T23:00:00Z",
        &["03-29 02:30+05:45", "03-30 02:30+05:45"],
        &["03-29 02:30+05:45", "03-30 02:30+05:45"],
    ),
    // 28 April 2023, midnight becomes 01:00.
    (
        "Africa/Cairo",
        "30 0 * * *",
        "2023-04-26T00:00:00Z",
        "2023-04-29T00:00:00Z",
        &["04-27 00:30+02:00", "04-28 01:00+03:00", "04-29 00:30+03:00"],
        &["04-27 00:30+02:00", "04-29 00:30+03:00"],
    ),
    (
        "UTC",
        "30 2 * * *",
        "2026-03-28T00:00:00Z",
        "2026-03-29T12:00:00Z",
        &["03-28 02:30+00:00", "03-29 02:30+00:00"],
        &["03-28 02:30+00:00", "03-29 02:30+00:00"],
    ),
];

const OVERLAPS: [Change; 11] = [
    // 25 October, 03:00 becomes 02:00.
    (
        "Europe/Madrid",
        "30 2 * * *",
        "2026-10-24T12:00:00Z",
        "2026-10-26T12:00:00Z",
        &["10-25 02:30+02:00", "10-26 02:30+01:00"],
        &["10-25 02:30+02:00", "10-25 02:30+01:00", "10-26 02:30+01:00"],
    ),
    (
        "Europe/Madrid",
        "0 2,3 * * *",
        "2026-10-24T12:00:00Z",
        "2026-10-25T12:00:00Z",
        &["10-25 02:00+02:00", "10-25 03:00+01:00"],
        &["10-25 02:00+02:00", "10-25 02:00+01:00", "10-25 03:00+01:00"],
    ),
    // The next match is a year away; the second occurrence must still be found.
    (
        "Europe/Madrid",
        "30 2 25 10 *",
        "2026-10-24T12:00:00Z",
        "2027-10-26T12:00:00Z",
        &["10-25 02:30+02:00", "10-25 02:30+02:00"],
        &["10-25 02:30+02:00", "10-25 02:30+01:00", "10-25 02:30+02:00"],
    ),
    // 1 November, 02:00 becomes 01:00.
    (
        "America/New_York",
        "59 1 * * *",
        "2026-10-31T12:00:00Z",
        "2026-11-02T12:00:00Z",
        &["11-01 01:59-04:00", "11-02 01:59-05:00"],
        &["11-01 01:59-04:00", "11-01 01:59-05:00", "11-02 01:59-05:00"],
    ),
    // 5 April, 02:00 becomes 01:30.
    (
        "Australia/Lord_Howe",
        "15,45 1 * * *",
        "2026-04-04T00:00:00Z",
        "2026-04-04T20:00:00Z",
        &["04-05 01:15+11:00", "04-05 01:45+11:00"],
        &["04-05 01:15+11:00", "04-05 01:45+11:00", "04-05 01:45+10:30"],
    ),
    // 18 February 2018, midnight becomes 23:00 of the day before.
    (
        "America/Sao_Paulo",
        "30 23 * * *",
        "2018-02-17T12:00:00Z",
        "2018-02-19T12:00:00Z",
        &["02-17 23:30-02:00", "02-18 23:30-03:00"],
        &["02-17 23:30-02:00", "02-17 23:30-03:00", "02-18 23:30-03:00"],
    ),
    (
        "America/Sao_Paulo",
        "0 0 * * *",
        "2018-02-17T12:00:00Z",
        "2018-02-18T12:00:00Z",
        &["02-18 00:00-03:00"],
        &["02-18 00:00-03:00"],
    ),
    // 1 April 2012, 04:00 becomes 03:00.
    (
        "Pacific/Apia",
        "0 3,4 * * *",
        "2012-03-31T00:00:00Z",
        "2012-03-31T20:00:00Z",
        &["04-01 03:00+14:00", "04-01 04:00+13:00"],
        &["04-01 03:00+14:00", "04-01 03:00+13:00", "04-01 04:00+13:00"],
    ),
    (
        "Asia/Kathmandu",
        "30 2 * * *",
        "2026-10-24T00:00:00Z",
        "2026-10-25T12:00:00Z",
        &["10-25 02:30+05:45"],
        &["10-25 02:30+05:45"],
    ),
    // 27 October 2023, midnight becomes 23:00 of the day before.
    (
        "Africa/Cairo",
        "15 23 * * *",
        "2023-10-26T00:00:00Z",
        "2023-10-27T22:00:00Z",
        &["10-26 23:15+03:00", "10-27 23:15+02:00"],
        &["10-26 23:15+03:00", "10-26 23:15+02:00", "10-27 23:15+02:00"],
    ),
    (
        "UTC",
        "30 2 * * *",
        "2026-10-24T12:00:00Z",
        "2026-10-25T12:00:00Z",
        &["10-25 02:30+00:00"],
        &["10-25 02:30+00:00"],
    ),
];

#[test]
fn local_times_that_do_not_exist_are_due_after_the_gap_or_not_at_all() {
    for (zone, cron, from, to, next, skip) in GAPS {
        for overlap in [First, Both] {
            assert_eq!(due(&compile(zone, cron, Some(Next), Some(overlap)), from, to), next, "{zone} {cron} next");
            assert_eq!(due(&compile(zone, cron, Some(Skip), Some(overlap)), from, to), skip, "{zone} {cron} skip");
        }
    }
}

#[test]
fn local_times_that_occur_twice_are_due_once_or_twice() {
    for (zone, cron, from, to, first, both) in OVERLAPS {
        for gap in [Next, Skip] {
            assert_eq!(due(&compile(zone, cron, Some(gap), Some(First)), from, to), first, "{zone} {cron} first");
            assert_eq!(due(&compile(zone, cron, Some(gap), Some(Both)), from, to), both, "{zone} {cron} both");
        }
    }
}

#[test]
fn by_default_expressions_of_every_hour_follow_elapsed_time_and_others_the_clock() {
    for cron in ["* * * * *", "0 * * * *", "*/5 0-23 * * MON", "0 0 */1 * * *", "0 0-11,12-23 * * *", "@hourly"] {
        let compiled = compile("Europe/Madrid", cron, None, None);
        assert_eq!((compiled.dst_gap(), compiled.dst_overlap()), (Skip, Both), "{cron}");
    }
    for cron in ["30 2 * * *", "* 1-23 * * *", "0 */2 * * *", "@daily"] {
        let compiled = compile("Europe/Madrid", cron, None, None);
        assert_eq!((compiled.dst_gap(), compiled.dst_overlap()), (Next, First), "{cron}");
    }
    let mixed = compile("Europe/Madrid", "* * * * *", None, Some(First));
    assert_eq!((mixed.dst_gap(), mixed.dst_overlap()), (Skip, First));
    let hourly = compile("Europe/Madrid", "0 * * * *", None, None);
    let autumn = due(&hourly, "2026-10-24T23:00:00Z", "2026-10-25T02:00:00Z");
    assert_eq!(autumn, ["10-25 01:00+02:00", "10-25 02:00+02:00", "10-25 02:00+01:00", "10-25 03:00+01:00"]);
}

#[test]
fn a_tick_notes_the_effect_of_a_clock_change() {
    let note = |zone: &str, cron: &str, after: &str| {
        let tick = compile(zone, cron, Some(Next), Some(Both)).next_including_blackouts(at(after)).unwrap();
        tick.note.map(|note| note.to_string())
    };
    let cases = [
        (
            "Europe/Madrid",
            "30 2 * * *",
            "2026-03-29T00:00:00Z",
            Some("02:30 does not exist on this day; runs at 03:00"),
        ),
        (
            "Europe/Madrid",
            "5 30 2 * * *",
            "2026-03-29T00:00:00Z",
            Some("02:30:05 does not exist on this day; runs at 03:00"),
        ),
        ("Africa/Cairo", "0 0 * * *", "2023-04-27T12:00:00Z", Some("00:00 does not exist on this day; runs at 01:00")),
        (
            "Pacific/Apia",
            "0 9 * * *",
            "2011-12-30T00:00:00Z",
            Some("2011-12-30 09:00 does not exist; runs at 2011-12-31 00:00"),
        ),
        (
            "Europe/Madrid",
            "30 2 * * *",
            "2026-10-25T00:00:00Z",
            Some("this local time occurs twice on this day; this is the first"),
        ),
        (
            "Europe/Madrid",
            "30 2 * * *",
            "2026-10-25T00:30:00Z",
            Some("this local time occurs twice on this day; this is the second"),
        ),
        ("Europe/Madrid", "0 3 * * *", "2026-10-25T00:30:00Z", None),
        ("Europe/Madrid", "59 1 * * *", "2026-10-24T12:00:00Z", None),
        ("Europe/Madrid", "0 3 * * *", "2026-03-29T00:00:00Z", None),
    ];
    for (zone, cron, after, expected) in cases {
        assert_eq!(note(zone, cron, after).as_deref(), expected, "{zone} {cron} {after}");
    }
}

/// An expression, and an independent function that returns whether a local time matches it.
type Plain = (&'static str, fn(DateTime) -> bool);

const PLAIN: [Plain; 4] = [
    ("* * * * *", |_| true),
    ("30 2 * * *", |local| (local.hour(), local.minute()) == (2, 30)),
    ("*/15 1-3 * * *", |local| local.minute() % 15 == 0 && (1..=3).contains(&local.hour())),
    ("0 */2 * * *", |local| local.minute() == 0 && local.hour() % 2 == 0),
];

/// A minute of UTC: its local time, whether that occurs for the first time, and the local times skipped just before it.
struct Minute {
    at: Timestamp,
    local: DateTime,
    new: bool,
    skipped: Vec<DateTime>,
}

/// Lists every minute of a month in UTC, and which local times were skipped or repeated.
fn month_by_hand(zone: &str, from: &str, to: &str) -> Vec<Minute> {
    let zone = TimeZone::get(zone).unwrap();
    let minute = SignedDuration::from_mins(1);
    let (mut now, to): (jiff::Timestamp, jiff::Timestamp) = (from.parse().unwrap(), to.parse().unwrap());
    let mut seen = HashSet::new();
    let mut expected = zone.to_datetime(now);
    let mut minutes = Vec::new();
    while now <= to {
        let local = zone.to_datetime(now);
        let mut skipped = Vec::new();
        while expected < local {
            skipped.push(expected);
            expected += minute;
        }
        minutes.push(Minute { at: Timestamp::from_ms(now.as_millisecond()), local, new: seen.insert(local), skipped });
        expected = local + minute;
        now += minute;
    }
    minutes
}

fn due_by_hand(minutes: &[Minute], gap: DstGap, overlap: DstOverlap, matches: fn(DateTime) -> bool) -> Vec<Timestamp> {
    let fires = |minute: &&Minute| {
        let itself = matches(minute.local) && (minute.new || overlap == Both);
        itself || gap == Next && minute.skipped.iter().copied().any(matches)
    };
    minutes.iter().filter(fires).map(|minute| minute.at).collect()
}

#[test]
fn a_month_around_a_clock_change_matches_the_minute_by_minute_computation() {
    for (zone, from, to) in [
        ("Europe/Madrid", "2026-03-15T00:00:00Z", "2026-04-15T00:00:00Z"),
        ("Europe/Madrid", "2026-10-10T00:00:00Z", "2026-11-10T00:00:00Z"),
        ("Australia/Lord_Howe", "2026-03-20T00:00:00Z", "2026-04-20T00:00:00Z"),
        ("Australia/Lord_Howe", "2026-09-20T00:00:00Z", "2026-10-20T00:00:00Z"),
        ("America/Sao_Paulo", "2018-02-05T00:00:00Z", "2018-03-05T00:00:00Z"),
        ("Africa/Cairo", "2023-04-15T00:00:00Z", "2023-05-15T00:00:00Z"),
        ("Pacific/Apia", "2011-12-15T00:00:00Z", "2012-01-15T00:00:00Z"),
    ] {
        let minutes = month_by_hand(zone, from, to);
        let changes = minutes.iter().filter(|minute| !minute.new || !minute.skipped.is_empty()).count();
        assert!(changes > 0, "{zone} from {from}: the clocks do change");
        for (cron, matches) in PLAIN {
            for (gap, overlap) in [(Next, First), (Next, Both), (Skip, First), (Skip, Both)] {
                let expected = due_by_hand(&minutes, gap, overlap, matches);
                let compiled = compile(zone, cron, Some(gap), Some(overlap));
                let backlog = compiled.backlog(at(from).plus_ms(-1), at(to), usize::MAX);
                let due: Vec<_> = backlog.latest.iter().map(|tick| tick.due).collect();
                assert!(due == expected, "{zone} from {from}: {cron} {gap:?} {overlap:?}");
            }
        }
    }
}
