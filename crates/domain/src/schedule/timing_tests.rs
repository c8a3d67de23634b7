//! Tests of validation, intervals, blackouts, and the due times of an outage.

use proptest::prelude::*;

use super::{CompiledTiming, DstGap, DstOverlap, EarlierTicks, Timing};
use crate::{FieldError, Timestamp};

const ANCHOR: &str = "2026-01-01T00:00:00Z";

fn at(text: &str) -> Timestamp {
    Timestamp::parse(text).unwrap_or_else(|| panic!("{text}"))
}

fn cron(text: &str) -> Timing {
    Timing { cron_expression: Some(text.into()), ..Timing::default() }
}

fn every(ms: u64) -> Timing {
    Timing { interval_ms: Some(ms), ..Timing::default() }
}

fn compile(timing: &Timing) -> CompiledTiming {
    timing.compile(at(ANCHOR)).unwrap()
}

fn due(compiled: &CompiledTiming, after: &str, count: usize) -> Vec<String> {
    let first = compiled.next_including_blackouts(at(after));
    let ticks = std::iter::successors(first, |tick| compiled.next_including_blackouts(tick.due));
    ticks.take(count).map(|tick| compiled.local(tick.due)).collect()
}

type InvalidTiming = (Timing, Vec<(&'static str, &'static str)>);

fn with(mut timing: Timing, change: fn(&mut Timing)) -> Timing {
    change(&mut timing);
    timing
}

fn assert_rejected(cases: Vec<InvalidTiming>) {
    for (timing, expected) in cases {
        let errors = timing.compile(at(ANCHOR)).unwrap_err();
        let expected: Vec<_> = expected.into_iter().map(|(path, message)| FieldError::new(path, message)).collect();
        assert_eq!(errors, expected, "{timing:?}");
    }
}

#[test]
fn an_invalid_timing_is_rejected_with_field_and_reason() {
    assert_rejected(vec![
        (Timing::default(), vec![("cronExpression", "is missing; set cronExpression or intervalMs")]),
        (
            with(cron("* * * * *"), |t| t.interval_ms = Some(5_000)),
            vec![(
                "cronExpression",
                "cannot be combined with intervalMs; set one of them (to switch, set the other to null)",
            )],
        ),
        (every(999), vec![("intervalMs", "must be between 1000 (1 s) and 315360000000 (10 years), got 999")]),
        (
            every(u64::MAX),
            vec![("intervalMs", "must be between 1000 (1 s) and 315360000000 (10 years), got 18446744073709551615")],
        ),
        (
            with(cron("* * * * *"), |t| t.timezone = "Madrid".into()),
            vec![("timezone", "unknown time zone \"Madrid\"; did you mean \"Europe/Madrid\"?")],
        ),
        (
            with(cron("* * * * *"), |t| {
                t.start_at = Some(at("2026-05-01T00:00:00Z"));
                t.end_at = Some(at("2026-05-01T00:00:00Z"));
            }),
            vec![("endAt", "must be later than startAt (2026-05-01T00:00:00.000Z), is 2026-05-01T00:00:00.000Z")],
        ),
        (
            cron("0 0 30 2 *"),
            vec![("cronExpression", "never fires: no date matches; read as: At 00:00, on day 30, in February")],
        ),
        (
            cron("0 0 31 2,4 *"),
            vec![(
                "cronExpression",
                "never fires: no date matches; read as: At 00:00, on day 31, in February and April",
            )],
        ),
        (
            with(cron("0 12 * * MON"), |t| {
                t.start_at = Some(at("2026-05-05T00:00:00Z"));
                t.end_at = Some(at("2026-05-10T00:00:00Z"));
            }),
            vec![("endAt", "never fires: the first due time, 2026-05-11T12:00:00+00:00, is later than endAt")],
        ),
        (
            with(every(3_600_000), |t| t.end_at = Some(at("2026-01-01T00:30:00Z"))),
            vec![("endAt", "never fires: the first due time, 2026-01-01T01:00:00+00:00, is later than endAt")],
        ),
    ]);
}

#[test]
fn an_invalid_blackout_is_rejected_with_field_and_reason() {
    let in_blackout = "never fires: every due time from 2026-01-01T00:01:00+00:00 on is in a blackout";
    assert_rejected(vec![
        (with(cron("* * * * *"), |t| t.except = vec!["* * * * *".into()]), vec![("except", in_blackout)]),
        (with(every(60_000), |t| t.except = vec!["* * * * *".into()]), vec![("except", in_blackout)]),
        (
            with(cron("* * * * *"), |t| {
                t.except = vec!["2026-01-01/2026-12-31".into()];
                t.end_at = Some(at("2026-06-01T00:00:00Z"));
            }),
            vec![("except", in_blackout)],
        ),
        (
            with(cron("* * * * *"), |t| t.except = vec!["2026-12-25".into(); 101]),
            vec![("except", "must have at most 100 entries, has 101")],
        ),
        (
            with(cron(&"1,".repeat(200)), |t| {
                t.timezone = "x".repeat(400);
                t.except = vec!["x".repeat(400)];
            }),
            vec![
                ("cronExpression", "must have at most 300 bytes"),
                ("timezone", "must have at most 300 bytes"),
                ("except[0]", "must have at most 300 bytes"),
            ],
        ),
        (
            with(cron("* * * *"), |t| {
                t.timezone = "Mars".into();
                t.except = vec!["2026-12-25".into(), "2026-12-24".into(), "2026-12-25/2026-12-24".into()];
            }),
            vec![
                (
                    "cronExpression",
                    "has 4 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first; read as: every minute, every hour, every day of month, every month",
                ),
                ("timezone", "unknown time zone \"Mars\"; use an IANA name such as \"Europe/Madrid\" or \"UTC\""),
                ("except[2]", "\"2026-12-25/2026-12-24\" ends before it begins"),
            ],
        ),
    ]);
}

#[test]
fn an_interval_without_start_counts_from_its_anchor() {
    let compiled = compile(&every(90_000));
    let expected = ["2026-01-01T00:01:30+00:00", "2026-01-01T00:03:00+00:00", "2026-01-01T00:04:30+00:00"];
    assert_eq!(due(&compiled, ANCHOR, 3), expected);
    assert_eq!(due(&compiled, "2020-01-01T00:00:00Z", 1), expected[..1], "nothing is due before the first one");
    assert_eq!(
        due(&compiled, "2026-01-01T00:03:00Z", 1),
        expected[2..],
        "the next due time is later than the given time"
    );
    let years = due(&compiled, "2036-01-01T00:00:00.001Z", 1);
    assert_eq!(years, ["2036-01-01T00:01:30+00:00"], "no drift in ten years");
}

#[test]
fn an_interval_with_a_start_is_first_due_at_it() {
    let timing = Timing {
        start_at: Some(at("2026-03-29T00:30:00.250Z")),
        end_at: Some(at("2026-03-29T02:30:00.250Z")),
        timezone: "Europe/Madrid".into(),
        ..every(3_600_000)
    };
    let expected = ["2026-03-29T01:30:00.250+01:00", "2026-03-29T03:30:00.250+02:00", "2026-03-29T04:30:00.250+02:00"];
    assert_eq!(
        due(&compile(&timing), ANCHOR, 9),
        expected,
        "intervals count elapsed time, also over a clock change, and the end is inclusive"
    );
}

#[test]
fn a_cron_expression_is_due_from_its_start_to_its_end_inclusive() {
    let timing = Timing {
        start_at: Some(at("2026-02-01T12:00:00Z")),
        end_at: Some(at("2026-02-03T12:00:00Z")),
        ..cron("0 12 * * *")
    };
    let expected = ["2026-02-01T12:00:00+00:00", "2026-02-02T12:00:00+00:00", "2026-02-03T12:00:00+00:00"];
    assert_eq!(due(&compile(&timing), ANCHOR, 9), expected);
    let late = Timing { start_at: Some(at("2026-02-01T12:00:00.001Z")), ..timing };
    assert_eq!(due(&compile(&late), ANCHOR, 9), expected[1..]);
}

#[test]
fn due_times_in_a_blackout_do_not_fire_but_are_listed() {
    let except = vec!["* 22-23 * * *".to_owned(), "2026-01-02/2026-01-04".to_owned()];
    let compiled = compile(&Timing { timezone: "Europe/Madrid".into(), except, ..cron("*/30 * * * *") });
    let raw = compiled.next_including_blackouts(at("2026-01-01T20:59:00Z")).unwrap();
    assert_eq!(
        (compiled.local(raw.due), raw.blackout),
        ("2026-01-01T22:00:00+01:00".into(), Some("* 22-23 * * *".into()))
    );
    let next = compiled.next(at("2026-01-01T20:59:00Z")).unwrap();
    assert_eq!((compiled.local(next.due), next.blackout), ("2026-01-05T00:00:00+01:00".into(), None));
    let marks: Vec<_> = compiled.backlog(at("2026-01-01T22:00:00Z"), at("2026-01-01T23:30:00Z"), 9).latest;
    let marks: Vec<_> = marks.into_iter().map(|tick| tick.blackout.unwrap_or_default()).collect();
    assert_eq!(marks, ["* 22-23 * * *", "2026-01-02/2026-01-04", "2026-01-02/2026-01-04"]);
}

#[test]
fn a_blackout_that_ends_at_a_clock_change_covers_nothing_after_it() {
    let next = |except: &str, after: &str| {
        let timing = Timing { timezone: "Europe/Madrid".into(), except: vec![except.into()], ..cron("* * * * *") };
        let compiled = timing.compile(at(ANCHOR)).unwrap();
        compiled.local(compiled.next(at(after)).unwrap().due)
    };
    let (spring, autumn) = ("2026-03-28T23:00:00Z", "2026-10-25T00:20:00Z");
    assert_eq!(next("2026-03-28T00:00/2026-03-29T02:30", spring), "2026-03-29T03:00:00+02:00");
    assert_eq!(next("2026-10-25T02:00/2026-10-25T02:30", autumn), "2026-10-25T02:30:00+02:00");
    assert_eq!(next("2026-10-25T02:00/2026-10-25T02:30", "2026-10-25T00:59:00Z"), "2026-10-25T02:30:00+01:00");
    assert_eq!(next("* 2 * * *", autumn), "2026-10-25T03:00:00+01:00", "both times");
    assert_eq!(next("0-29 2 * * *", "2026-10-25T00:59:00Z"), "2026-10-25T02:30:00+01:00");
}

#[test]
fn long_blackouts_of_frequent_schedules_are_skipped_quickly() {
    let timing = Timing { except: vec!["* * * 1-11 *".into()], ..cron("* * * * * *") };
    assert_eq!(compile(&timing).next(at(ANCHOR)).unwrap().due, at("2026-12-01T00:00:00Z"));
    let timing = Timing { except: vec!["2026-01-01/2099-12-31".into()], ..every(1_000) };
    assert_eq!(compile(&timing).next(at(ANCHOR)).unwrap().due, at("2100-01-01T00:00:00Z"));
}

#[test]
fn an_outage_of_two_weeks_is_summarised() {
    let (after, up_to) = (at("2026-03-20T00:00:00Z"), at("2026-04-03T00:00:00Z"));
    for (timing, count) in [(cron("* * * * * *"), None), (every(1_000), Some(1_209_600 - 100))] {
        let backlog = compile(&timing).backlog(after, up_to, 100);
        assert_eq!(backlog.latest.len(), 100);
        assert_eq!(backlog.latest[99].due, up_to);
        let earlier = EarlierTicks { first: after.plus_ms(1_000), last: up_to.plus_ms(-100_000), count };
        assert_eq!(backlog.earlier, Some(earlier));
    }
    let hourly = compile(&cron("0 * * * *")).backlog(after, up_to, 0);
    let earlier = EarlierTicks { first: at("2026-03-20T01:00:00Z"), last: up_to, count: Some(336) };
    assert_eq!((hourly.latest, hourly.earlier), (vec![], Some(earlier)));
    assert_eq!(compile(&cron("0 * * * *")).backlog(up_to, after, 5), Default::default(), "a clock that went back");
}

#[test]
fn a_timing_is_explained_in_words() {
    let madrid = |timing: Timing| Timing { timezone: "Europe/Madrid".into(), ..timing };
    let explain = |timing: Timing| compile(&madrid(timing)).explain();
    assert_eq!(explain(cron("30 2 * * MON")), "At 02:30, on Monday (Europe/Madrid)");
    assert_eq!(explain(cron("@hourly")), "At minute 0 past every hour (Europe/Madrid)");
    assert_eq!(explain(cron("*/40 * * * *")), "At minute 0 and 40 past every hour (Europe/Madrid)");
    assert_eq!(explain(cron("0 0 1 JAN-MAR/2 *")), "At 00:00, on day 1, in January and March (Europe/Madrid)");
    assert_eq!(
        explain(cron("0 0 LW 1 *")),
        "At 00:00, on the last working day of the month, in January (Europe/Madrid)"
    );
    let dark = Timing { except: vec!["2026-12-25".into()], ..cron("30 2 * * *") };
    assert_eq!(explain(dark), "At 02:30, except 2026-12-25 (Europe/Madrid)");
    assert_eq!(explain(cron("*/15 * * * *")), "Every 15 minutes (Europe/Madrid)");
    assert_eq!(explain(cron("* * * * *")), "Every minute (Europe/Madrid)");
    let spanish = |timing: Timing| compile(&madrid(timing)).explain_in_spanish();
    assert_eq!(spanish(cron("30 2 * * MON")), "A las 02:30, los lunes (Europe/Madrid)");
    assert_eq!(spanish(every(90_000)), "Cada 90 segundos desde 2026-01-01T01:01:30+01:00 (Europe/Madrid)");
    let dark = Timing { except: vec!["2026-12-25".into()], ..cron("30 2 * * *") };
    assert_eq!(spanish(dark), "A las 02:30, excepto 2026-12-25 (Europe/Madrid)");
    assert_eq!(explain(every(90_000)), "Every 90 seconds from 2026-01-01T01:01:30+01:00 (Europe/Madrid)");
    assert_eq!(explain(every(3_600_000)), "Every hour from 2026-01-01T02:00:00+01:00 (Europe/Madrid)");
}

#[test]
fn a_timing_is_written_in_camel_case_and_read_with_its_defaults() {
    let timing: Timing =
        serde_json::from_str(r#"{"cronExpression":"0 0 * * *","dstGap":"skip","dstOverlap":"both"}"#).unwrap();
    let expected = Timing { dst_gap: Some(DstGap::Skip), dst_overlap: Some(DstOverlap::Both), ..cron("0 0 * * *") };
    assert_eq!(timing, expected);
    assert_eq!(timing.timezone, "UTC");
    let json = serde_json::to_string(&timing).unwrap();
    assert_eq!(serde_json::from_str::<Timing>(&json).unwrap(), timing);
}

#[test]
fn times_beyond_the_calendar_do_not_panic() {
    let (first, last) = (Timestamp::from_ms(i64::MIN), Timestamp::from_ms(i64::MAX));
    for timing in [cron("* * * * * *"), cron("30 2 29 2 *"), every(1_000)] {
        for timezone in ["UTC", "Europe/Madrid", "Pacific/Apia"] {
            let compiled = compile(&Timing { timezone: timezone.into(), ..timing.clone() });
            assert!(compiled.next_including_blackouts(first).is_some());
            assert_eq!(compiled.next_including_blackouts(last), None);
            assert_eq!(compiled.next(Timestamp::MAX), None);
            let backlog = compiled.backlog(first, last, 3);
            assert_eq!(backlog.latest.len(), 3);
            assert!(backlog.latest.iter().all(|tick| tick.due <= Timestamp::MAX));
            assert!(!compiled.local(first).is_empty() && !compiled.local(last).is_empty());
        }
    }
}

fn timings() -> impl Strategy<Value = Timing> {
    let crons = [
        "* * * * *",
        "*/30 * 2 * * *",
        "30 2 * * *",
        "*/15 1-3 * * *",
        "0 0 * * *",
        "0 0 1 * *",
        "15 23 L * FRI#2",
        "7 0-22/2 * * 1-5",
    ];
    let zones = [
        "UTC",
        "Europe/Madrid",
        "America/New_York",
        "Australia/Lord_Howe",
        "Africa/Cairo",
        "Asia/Kathmandu",
        "America/Santiago",
    ];
    let excepts = ["* 2 * * SUN", "2026-03-29", "0 0 * * MON"];
    (
        prop_oneof![
            4 => prop::sample::select(crons.to_vec()).prop_map(cron),
            1 => (1_000u64..100_000_000).prop_map(every),
        ],
        prop::sample::select(zones.to_vec()).prop_map(str::to_owned),
        prop::option::of(prop_oneof![Just(DstGap::Next), Just(DstGap::Skip)]),
        prop::option::of(prop_oneof![Just(DstOverlap::First), Just(DstOverlap::Both)]),
        prop::option::of((0i64..20_000_000_000).prop_map(|ms| at(ANCHOR).plus_ms(ms))),
        prop::sample::subsequence(excepts.to_vec(), 0..=3),
    )
        .prop_map(|(timing, timezone, dst_gap, dst_overlap, start_at, except)| {
            let except = except.into_iter().map(str::to_owned).collect();
            Timing { timezone, dst_gap, dst_overlap, start_at, except, ..timing }
        })
}

proptest! {
    #[test]
    fn the_backlog_contains_every_due_time_in_order(
        timing in timings(), begin in 0i64..31_536_000_000, span in 0i64..200_000_000, keep in 0usize..40,
    ) {
        let compiled = compile(&timing);
        let after = at(ANCHOR).plus_ms(begin);
        let up_to = after.plus_ms(span);
        let mut ticks = Vec::new();
        let mut last = after;
        while let Some(tick) = compiled.next_including_blackouts(last) {
            prop_assert!(tick.due > last);
            prop_assert!(timing.start_at.is_none_or(|start| tick.due >= start));
            last = tick.due;
            if tick.due > up_to {
                break;
            }
            ticks.push(tick);
        }
        let firing = ticks.iter().find(|tick| tick.blackout.is_none());
        let next = compiled.next(after);
        match firing {
            Some(tick) => prop_assert_eq!(next.as_ref(), Some(tick)),
            None => prop_assert!(next.is_none_or(|tick| tick.due > up_to)),
        }
        let backlog = compiled.backlog(after, up_to, keep);
        let kept = ticks.split_off(ticks.len().saturating_sub(keep));
        prop_assert_eq!(backlog.latest, kept);
        let earlier = ticks.first().zip(ticks.last()).map(|(first, last)| EarlierTicks {
            first: first.due, last: last.due, count: Some(ticks.len() as u64),
        });
        prop_assert_eq!(backlog.earlier, earlier);
    }
}
