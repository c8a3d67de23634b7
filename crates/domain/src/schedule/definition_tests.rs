//! Tests of edits and validation.

use super::*;
use crate::{FieldError, JobId, JobLimits, JobOptions, Timestamp};

const MINUTE: i64 = 60_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::parse("2026-06-01T00:00:00Z").expect("a time").plus_ms(ms)
}

fn spec(interval_ms: u64) -> ScheduleSpec {
    let timing = Timing { interval_ms: Some(interval_ms), ..Timing::default() };
    let job = JobTemplate { kind: "tick".into(), ..JobTemplate::default() };
    ScheduleSpec { name: "every now and then".into(), timing, job, ..ScheduleSpec::default() }
}

fn create(spec: ScheduleSpec) -> Schedule {
    Schedule::new(spec, &JobLimits::default(), at(0)).expect("a schedule").schedule
}

fn patched(schedule: &Schedule, patch: SchedulePatch, now: Timestamp) -> Result<Schedule, Vec<FieldError>> {
    schedule.clone().patched(patch, &JobLimits::default(), now).map(|compiled| compiled.schedule)
}

fn to(spec: ScheduleSpec) -> SchedulePatch {
    SchedulePatch { spec: Some(spec), is_active: None }
}

const ON: SchedulePatch = SchedulePatch { spec: None, is_active: Some(true) };
const OFF: SchedulePatch = SchedulePatch { spec: None, is_active: Some(false) };

fn paths(errors: Vec<FieldError>) -> Vec<String> {
    errors.into_iter().map(|error| error.path).collect()
}

#[test]
fn an_edit_that_keeps_the_timing_keeps_the_due_times() {
    let schedule = create(spec(60_000));
    let renamed = patched(&schedule, to(ScheduleSpec { name: "other".into(), ..spec(60_000) }), at(3 * MINUTE + 1));
    let renamed = renamed.expect("an edit");
    assert_eq!(renamed.cursor_at, at(0), "due times that have passed are still to be processed");
    assert_eq!((renamed.anchor_at, renamed.next_at), (at(0), Some(at(MINUTE))));
    let again = patched(&renamed, ON, at(3 * MINUTE + 2)).expect("it is on already");
    assert_eq!(again.next_at, Some(at(MINUTE)));
}

#[test]
fn a_changed_interval_counts_from_the_edit() {
    let edited = patched(&create(spec(60_000)), to(spec(90_000)), at(10 * MINUTE + 7)).expect("an edit");
    assert_eq!(edited.anchor_at, at(10 * MINUTE + 7));
    assert_eq!(edited.next_at, Some(at(10 * MINUTE + 7 + 90_000)));
}

#[test]
fn a_changed_end_or_blackout_keeps_the_anchor() {
    let mut ends = spec(60_000);
    ends.timing.end_at = Some(at(60 * MINUTE));
    let edited = patched(&create(spec(60_000)), to(ends), at(10 * MINUTE + 7)).expect("an edit");
    assert_eq!((edited.anchor_at, edited.next_at), (at(0), Some(at(11 * MINUTE))));
}

#[test]
fn due_times_while_it_was_disabled_are_not_caught_up() {
    let off = patched(&create(spec(60_000)), OFF, at(10)).expect("off");
    assert_eq!((off.is_active, off.next_at), (false, None));
    let on = patched(&off, ON, at(30 * MINUTE + 1)).expect("on");
    assert_eq!((on.cursor_at, on.next_at), (at(30 * MINUTE + 1), Some(at(31 * MINUTE))));
}

#[test]
fn disabling_and_enabling_after_the_clock_went_back_processes_no_due_time_twice() {
    let mut schedule = create(spec(60_000));
    schedule.cursor_at = at(10 * MINUTE);
    let off = patched(&schedule, OFF, at(5 * MINUTE)).expect("off");
    let on = patched(&off, ON, at(5 * MINUTE)).expect("on");
    assert_eq!(on.next_at, Some(at(11 * MINUTE)));
}

#[test]
fn a_finished_schedule_is_enabled_only_if_a_due_time_is_left() {
    let mut schedule = create(ScheduleSpec { max_runs: Some(2), ..spec(60_000) });
    (schedule.runs, schedule.is_active, schedule.next_at) = (2, false, None);
    schedule.finished = Some("maxRuns reached: 2 of 2 runs".into());
    assert_eq!(paths(patched(&schedule, ON, at(MINUTE)).expect_err("it has run")), ["maxRuns"]);
    let more = SchedulePatch { spec: Some(ScheduleSpec { max_runs: Some(3), ..spec(60_000) }), is_active: Some(true) };
    let on = patched(&schedule, more, at(5 * MINUTE)).expect("one more");
    assert_eq!((on.is_active, on.finished, on.next_at), (true, None, Some(at(6 * MINUTE))));

    let mut ended = spec(60_000);
    ended.timing.end_at = Some(at(2 * MINUTE));
    let mut schedule = create(ended);
    (schedule.is_active, schedule.next_at) = (false, None);
    assert_eq!(paths(patched(&schedule, ON, at(2 * MINUTE)).expect_err("it has ended")), ["endAt"]);
}

#[test]
fn a_maximum_below_the_number_of_runs_so_far_is_rejected() {
    let mut schedule = create(spec(60_000));
    schedule.runs = 5;
    let errors =
        patched(&schedule, to(ScheduleSpec { max_runs: Some(3), ..spec(60_000) }), at(1)).expect_err("too few");
    assert_eq!(errors, [FieldError::new("maxRuns", "must be greater than 5, the number of runs so far")]);
}

#[test]
fn every_invalid_field_is_reported() {
    let mut no_timing = spec(60_000);
    no_timing.timing.interval_ms = None;
    let mut single_job = spec(60_000);
    single_job.job.options = JobOptions {
        unique_key: Some("u".into()),
        idempotency_key: Some("i".into()),
        scheduled_at: Some(at(1)),
        expires_at: Some(at(2)),
        depends_on: vec![JobId::at(at(0))],
        ..JobOptions::default()
    };
    let mut bad_payload = spec(60_000);
    bad_payload.job.payload = r#"{"a":"{{due.dat}}"}"#.into();
    let mut no_kind = spec(60_000);
    no_kind.job.kind = String::new();
    for (spec, expected) in [
        (ScheduleSpec { name: String::new(), ..spec(60_000) }, vec!["name"]),
        (ScheduleSpec { name: "a\nb".into(), ..spec(60_000) }, vec!["name"]),
        (ScheduleSpec { description: Some("two\nlines".into()), ..spec(60_000) }, vec![]),
        (ScheduleSpec { misfire_grace_ms: 999, ..spec(60_000) }, vec!["misfireGraceMs"]),
        (ScheduleSpec { catch_up_limit: 0, ..spec(60_000) }, vec!["catchUpLimit"]),
        (ScheduleSpec { catch_up_limit: 10_001, ..spec(60_000) }, vec!["catchUpLimit"]),
        (ScheduleSpec { jitter_ms: 86_400_001, ..spec(60_000) }, vec!["jitterMs"]),
        (ScheduleSpec { max_runs: Some(0), ..spec(60_000) }, vec!["maxRuns"]),
        (spec(999), vec!["intervalMs"]),
        (no_timing, vec!["cronExpression"]),
        (single_job, vec!["idempotencyKey", "uniqueKey", "scheduledAt", "expiresAt", "dependsOn"]),
        (bad_payload, vec!["jobPayload"]),
        (no_kind, vec!["jobName"]),
    ] {
        let found = spec.check(&JobLimits::default(), at(0)).err().map(paths).unwrap_or_default();
        assert_eq!(found, expected, "{spec:#?}");
    }
}

#[test]
fn a_schedule_is_restored_from_its_json() {
    let spec = ScheduleSpec { description: Some("d".into()), max_runs: Some(4), jitter_ms: 5, ..spec(60_000) };
    let text = serde_json::to_string(&spec).expect("JSON");
    assert_eq!(serde_json::from_str::<ScheduleSpec>(&text).expect("a schedule"), spec);
}
