//! Tests of what happens at due times.

use super::*;
use crate::{JobId, JobLimits, JobState, Timestamp};

const SECOND: i64 = 1_000;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;
const WEEK: i64 = 7 * 24 * HOUR;

fn start() -> Timestamp {
    Timestamp::parse("2026-06-01T00:00:00Z").expect("a time")
}

fn at(ms: i64) -> Timestamp {
    start().plus_ms(ms)
}

fn spec(interval_ms: i64) -> ScheduleSpec {
    let timing = Timing { interval_ms: Some(interval_ms.unsigned_abs()), ..Timing::default() };
    let job = JobTemplate { kind: "tick".into(), ..JobTemplate::default() };
    ScheduleSpec { name: "every now and then".into(), timing, job, ..ScheduleSpec::default() }
}

fn create(spec: ScheduleSpec) -> CompiledSchedule {
    Schedule::new(spec, &JobLimits::default(), start()).expect("a schedule")
}

fn states<const N: usize>(known: [(JobId, Option<JobState>); N]) -> JobStates {
    known.into_iter().filter_map(|(id, state)| Some((id, state?))).collect()
}

/// Decides and fires once, while no job is known.
fn round(compiled: &mut CompiledSchedule, now: Timestamp) -> Firing {
    let decision = decide(compiled, now);
    fire(compiled, decision, &JobStates::new(), now)
}

fn due_times(firing: &Firing) -> Vec<i64> {
    firing.jobs.iter().map(|job| job.options.schedule_due.expect("a due time").ms_since(start())).collect()
}

fn outcomes(firing: &Firing, outcome: TickOutcome) -> u64 {
    firing.ticks.iter().filter(|tick| tick.outcome == outcome).map(|tick| tick.count.expect("counted")).sum()
}

#[test]
fn after_an_outage_of_two_weeks_the_policy_bounds_the_number_of_jobs() {
    let outage = 2 * WEEK;
    for every in [SECOND, MINUTE, HOUR] {
        let due = (outage / every).unsigned_abs();
        for (misfire, limit, fired) in [
            (Misfire::RunOnce, 100, 1),
            // The latest due time is now, which is not late.
            (Misfire::Skip, 100, 1),
            (Misfire::CatchUp, 1, 1),
            (Misfire::CatchUp, 100, 100),
            (Misfire::CatchUp, 10_000, due.min(10_000)),
        ] {
            let case = format!("{misfire:?} {limit} every {every} ms");
            let mut compiled = create(ScheduleSpec { misfire, catch_up_limit: limit, ..spec(every) });
            let firing = round(&mut compiled, at(outage));

            let latest: Vec<i64> = (0..fired.cast_signed()).rev().map(|n| outage - n * every).collect();
            assert_eq!(due_times(&firing), latest, "{case}");
            assert_eq!(outcomes(&firing, TickOutcome::Fired), fired, "{case}");
            assert_eq!(outcomes(&firing, TickOutcome::Missed), due - fired, "{case}: every due time is recorded");
            assert!(firing.ticks.len() as u64 <= fired + 101, "{case}: {} records", firing.ticks.len());
            assert_eq!(compiled.schedule.cursor_at, at(outage), "{case}");
            assert_eq!(compiled.schedule.next_at, Some(at(outage + every)), "{case}");
        }
    }
}

#[test]
fn after_an_outage_skip_creates_a_job_only_for_a_due_time_that_is_not_late() {
    let hourly = || create(ScheduleSpec { misfire: Misfire::Skip, ..spec(HOUR) });
    for (late, fired) in [(0, 1), (MINUTE, 1), (MINUTE + 1, 0)] {
        let firing = round(&mut hourly(), at(10 * HOUR + late));
        assert_eq!(firing.jobs.len(), fired, "{late} ms late");
        assert_eq!(outcomes(&firing, TickOutcome::Missed), 10 - fired as u64);
    }
}

#[test]
fn a_due_time_that_is_late_within_the_grace_period_is_not_missed() {
    for misfire in [Misfire::RunOnce, Misfire::Skip, Misfire::CatchUp] {
        let every_second = |limit| create(ScheduleSpec { misfire, catch_up_limit: limit, ..spec(SECOND) });
        let within = round(&mut every_second(1), at(61 * SECOND));
        assert_eq!(within.jobs.len(), 61, "{misfire:?}");
        assert_eq!(within.ticks.len(), 61);

        let beyond = round(&mut every_second(1), at(61 * SECOND + 1));
        assert_eq!(beyond.jobs.len(), 1, "{misfire:?}");
    }
}

#[test]
fn a_clock_that_jumps_neither_repeats_nor_loses_a_due_time() {
    let mut compiled = create(ScheduleSpec { misfire: Misfire::CatchUp, ..spec(MINUTE) });
    let mut seen = Vec::new();
    for now in [0, 59, 60, 30, 61, 60, 0, 200, 120, 180, 230, 241, 100, 1_000] {
        seen.extend(due_times(&round(&mut compiled, at(now * SECOND))));
    }
    let expected: Vec<i64> = (1..=16).map(|n| n * MINUTE).collect();
    assert_eq!(seen, expected);
    assert_eq!(compiled.schedule.runs, 16);
}

#[test]
fn the_same_schedule_and_time_give_the_same_decision() {
    let compiled = create(ScheduleSpec { jitter_ms: 10_000, ..spec(MINUTE) });
    assert_eq!(decide(&compiled, at(3 * HOUR)), decide(&compiled, at(3 * HOUR)));
}

#[test]
fn a_schedule_finishes_after_max_runs() {
    let mut compiled = create(ScheduleSpec { max_runs: Some(3), misfire: Misfire::CatchUp, ..spec(MINUTE) });
    assert_eq!(round(&mut compiled, at(2 * MINUTE)).jobs.len(), 2);
    let last = round(&mut compiled, at(5 * MINUTE));
    assert_eq!(due_times(&last), [3 * MINUTE]);
    assert_eq!((compiled.schedule.is_active, compiled.schedule.next_at), (false, None));
    assert_eq!(compiled.schedule.finished.as_deref(), Some("maxRuns reached: 3 of 3 runs"));
}

#[test]
fn max_runs_counts_jobs_and_not_skipped_due_times() {
    let overlapping = |overlap| ScheduleSpec { max_runs: Some(2), misfire: Misfire::CatchUp, overlap, ..spec(MINUTE) };
    let mut compiled = create(overlapping(Overlap::Skip));
    let firing = round(&mut compiled, at(4 * MINUTE));
    assert_eq!(due_times(&firing), [MINUTE]);
    assert_eq!(outcomes(&firing, TickOutcome::Skipped), 3, "each due time has its record");
    assert!(compiled.schedule.is_active, "one run is left");

    let mut compiled = create(ScheduleSpec { max_runs: Some(1), ..overlapping(Overlap::CancelPrevious) });
    assert_eq!(
        due_times(&round(&mut compiled, at(4 * MINUTE))),
        [4 * MINUTE],
        "the latest due time replaces the others"
    );
    assert!(!compiled.schedule.is_active);
}

#[test]
fn a_schedule_finishes_at_its_end() {
    let mut spec = ScheduleSpec { misfire: Misfire::CatchUp, ..spec(MINUTE) };
    spec.timing.end_at = Some(at(3 * MINUTE));
    let mut compiled = create(spec);
    assert_eq!(due_times(&round(&mut compiled, at(10 * MINUTE))), [MINUTE, 2 * MINUTE, 3 * MINUTE]);
    assert!(!compiled.schedule.is_active && compiled.schedule.finished.is_some());
    let nothing = round(&mut compiled, at(20 * MINUTE));
    assert!(nothing.jobs.is_empty() && nothing.ticks.is_empty());
}

#[test]
fn due_times_in_a_blackout_are_recorded_as_skipped() {
    let mut spec = spec(HOUR);
    spec.timing.except = vec!["2026-06-01".into()];
    let mut compiled = create(spec);
    assert_eq!(compiled.schedule.next_at, Some(at(24 * HOUR)), "nothing is due in the blackout");
    let firing = round(&mut compiled, at(24 * HOUR));
    assert_eq!(due_times(&firing), [24 * HOUR]);
    assert_eq!(outcomes(&firing, TickOutcome::Skipped), 23);
    assert!(firing.ticks[0].reason.as_deref().is_some_and(|reason| reason == "in a blackout: 2026-06-01"));
}

#[test]
fn an_outage_that_ends_in_a_long_blackout_is_caught_up() {
    for (misfire, fired) in [(Misfire::RunOnce, 1), (Misfire::Skip, 0), (Misfire::CatchUp, 50)] {
        let mut spec = ScheduleSpec { misfire, catch_up_limit: 50, ..spec(MINUTE) };
        spec.timing.except = vec!["2026-06-02".into()];
        let mut compiled = create(spec);
        // No server ran on the day before, and the day of the blackout is nearly over: 1 381 due times in the blackout.
        let firing = round(&mut compiled, at(47 * HOUR));
        let latest: Vec<i64> = (1..=fired).rev().map(|n| 24 * HOUR - n * MINUTE).collect();
        assert_eq!(due_times(&firing), latest, "{misfire:?}");
        assert_eq!(outcomes(&firing, TickOutcome::Skipped), 23 * 60 + 1, "{misfire:?}");
        assert_eq!(outcomes(&firing, TickOutcome::Missed), (24 * 60 - 1 - fired).unsigned_abs(), "{misfire:?}");
        assert!(firing.ticks.len() <= 50 + 101 + 101, "{} records", firing.ticks.len());
        assert_eq!(compiled.schedule.next_at, Some(at(48 * HOUR)));
    }
}

/// Returns every state, and `None` for a job that no longer exists.
fn every_state() -> Vec<Option<JobState>> {
    std::iter::once(None).chain(JobState::ALL.into_iter().map(Some)).collect()
}

#[test]
fn overlap_depends_on_the_state_of_earlier_jobs() {
    let (first, second) = (JobId::at(at(1)), JobId::at(at(2)));
    for overlap in [Overlap::Allow, Overlap::Skip, Overlap::QueueOne, Overlap::CancelPrevious] {
        for one in every_state() {
            for other in every_state() {
                let case = format!("{overlap:?}, one job {one:?}, the one that waited for it {other:?}");
                let mut compiled = create(ScheduleSpec { overlap, ..spec(MINUTE) });
                compiled.schedule.recent = vec![first, second];
                compiled.schedule.queued = Some(second);
                let decision = decide(&compiled, at(MINUTE));
                let firing = fire(&mut compiled, decision, &states([(first, one), (second, other)]), at(MINUTE));

                let is_unfinished = |state: Option<JobState>| state.is_some_and(|state| !state.is_terminal());
                let both = [(first, one), (second, other)].into_iter();
                let unfinished: Vec<JobId> =
                    both.filter(|(_, state)| is_unfinished(*state)).map(|(id, _)| id).collect();
                let skipped = match overlap {
                    Overlap::Allow | Overlap::CancelPrevious => false,
                    Overlap::Skip => !unfinished.is_empty(),
                    Overlap::QueueOne => other == Some(JobState::Pending),
                };
                assert_eq!(firing.jobs.is_empty(), skipped, "{case}");
                assert_eq!(firing.ticks.len(), 1, "{case}");
                assert_eq!(firing.ticks[0].reason.is_some(), skipped, "{case}");
                let waits = matches!(overlap, Overlap::QueueOne | Overlap::CancelPrevious) && !skipped;
                let parents = if waits { unfinished.clone() } else { Vec::new() };
                let job = firing.jobs.first();
                assert_eq!(job.map_or(Vec::new(), |job| job.options.depends_on.clone()), parents, "{case}");
                let cancelled = if overlap == Overlap::CancelPrevious { unfinished.clone() } else { Vec::new() };
                assert_eq!(firing.cancels, cancelled, "{case}");
                if overlap != Overlap::Allow {
                    let expected: Vec<JobId> = unfinished.into_iter().chain(job.map(|job| job.id)).collect();
                    assert_eq!(compiled.schedule.recent, expected, "{case}");
                }
            }
        }
    }
}

#[test]
fn each_overlap_treats_due_times_processed_together_as_documented() {
    for (overlap, expected) in [
        (Overlap::Allow, vec![MINUTE, 2 * MINUTE, 3 * MINUTE]),
        (Overlap::Skip, vec![MINUTE]),
        (Overlap::QueueOne, vec![MINUTE, 2 * MINUTE]),
        (Overlap::CancelPrevious, vec![3 * MINUTE]),
    ] {
        let mut compiled = create(ScheduleSpec { overlap, misfire: Misfire::CatchUp, ..spec(MINUTE) });
        let firing = round(&mut compiled, at(3 * MINUTE));
        assert_eq!(due_times(&firing), expected, "{overlap:?}");
        assert_eq!(firing.ticks.len(), 3, "{overlap:?}");
    }
}

#[test]
fn a_triggered_job_counts_as_an_unfinished_job() {
    let mut compiled = create(ScheduleSpec { overlap: Overlap::CancelPrevious, ..spec(MINUTE) });
    let unfinished = round(&mut compiled, at(MINUTE)).jobs[0].id;
    let (triggered, tick) = compiled.trigger(at(MINUTE + 5));
    assert_eq!((tick.outcome, tick.job_id), (TickOutcome::Triggered, Some(triggered.id)));
    assert_eq!(
        (compiled.schedule.runs, compiled.schedule.next_at),
        (1, Some(at(2 * MINUTE))),
        "the next due time stays"
    );

    let running = Some(JobState::Processing);
    let decision = decide(&compiled, at(2 * MINUTE));
    let firing =
        fire(&mut compiled, decision, &states([(unfinished, running), (triggered.id, running)]), at(2 * MINUTE));
    assert_eq!(firing.cancels, [unfinished, triggered.id]);
    assert_eq!(firing.jobs[0].options.depends_on, [unfinished, triggered.id]);
}

#[test]
fn only_the_latest_jobs_are_remembered() {
    let mut compiled = create(spec(MINUTE));
    for n in 0..200 {
        compiled.trigger(at(n));
    }
    assert_eq!(compiled.schedule.recent.len(), 50);
    assert_eq!(compiled.schedule.recent.last().copied(), compiled.schedule.last_job);
}

#[test]
fn a_preview_notes_runs_that_daylight_saving_skips() {
    let mut spec = spec(MINUTE);
    spec.timing = Timing {
        cron_expression: Some("30 2 * * *".into()),
        timezone: "Europe/Madrid".into(),
        dst_gap: Some(crate::schedule::DstGap::Skip),
        ..Timing::default()
    };
    let runs = preview(&create(spec), Timestamp::parse("2027-03-27T00:00:00Z").expect("a time"), 3);
    let shown: Vec<(&str, Option<&str>)> = runs.iter().map(|run| (run.local.as_str(), run.note.as_deref())).collect();
    assert_eq!(
        shown,
        [
            ("2027-03-27T02:30:00+01:00", None),
            ("2027-03-29T02:30:00+02:00", Some("the run before it is skipped: 02:30 does not exist on 2027-03-28")),
            ("2027-03-30T02:30:00+02:00", None),
        ]
    );
}

#[test]
fn the_jitter_of_a_due_time_is_constant_and_within_its_bound() {
    let times = |id: crate::ScheduleId, jitter_ms: u64| -> Vec<i64> {
        let mut compiled = create(ScheduleSpec { jitter_ms, misfire: Misfire::CatchUp, ..spec(MINUTE) });
        compiled.schedule.id = id;
        let firing = round(&mut compiled, at(100 * MINUTE));
        let shift = |job: &crate::NewJob| {
            let options = &job.options;
            options.scheduled_at.expect("a time").ms_since(options.schedule_due.expect("a due time"))
        };
        firing.jobs.iter().map(shift).collect()
    };
    let (one, other) = (crate::ScheduleId::new(), crate::ScheduleId::new());
    assert_eq!(times(one, 0), vec![0; 100]);
    let spread = times(one, 10_000);
    assert_eq!(spread, times(one, 10_000));
    assert_ne!(spread, times(other, 10_000));
    assert!(spread.iter().all(|ms| (0..=10_000).contains(ms)));
    assert!(spread.iter().any(|ms| *ms < 2_500) && spread.iter().any(|ms| *ms > 7_500), "it is spread: {spread:?}");
}

#[test]
fn a_job_has_the_fields_of_its_template_and_its_due_time() {
    let mut spec = spec(MINUTE);
    spec.job = JobTemplate {
        kind: "report".into(),
        queue: "slow".into(),
        priority: crate::Priority::High,
        payload: r#"{"n":"{{run}}","before":"{{previous.unix}}"}"#.into(),
        options: crate::JobOptions { webhook_url: Some("https://x.example/".into()), ..Default::default() },
    };
    let mut compiled = create(ScheduleSpec { misfire: Misfire::CatchUp, ..spec });
    let jobs = round(&mut compiled, at(2 * MINUTE)).jobs;
    let before = at(MINUTE).as_ms() / 1_000;
    assert_eq!(jobs[0].payload, r#"{"n":1,"before":null}"#);
    assert_eq!(jobs[1].payload, format!(r#"{{"n":2,"before":{before}}}"#));
    assert_eq!((jobs[1].kind.as_str(), jobs[1].queue.as_str()), ("report", "slow"));
    assert_eq!(jobs[1].priority, crate::Priority::High);
    assert_eq!(jobs[1].options.webhook_url.as_deref(), Some("https://x.example/"));
    assert_eq!(jobs[1].options.schedule_id, Some(compiled.schedule.id.to_string()));
    assert_eq!(jobs[1].options.schedule_due, Some(at(2 * MINUTE)));
}
