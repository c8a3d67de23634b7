//! Schedules: each due time fires once, even if nodes compete or die, and every outcome is recorded.

use faena_domain::{
    JobId, JobLimits, JobState, ScheduleId,
    schedule::{JobTemplate, Misfire, Overlap, Schedule, SchedulePatch, ScheduleSpec, TickOutcome, TickRow, Timing},
};
use faena_store::{
    AuditFilter, Filter, Fired, Retention, ScheduleChange, ScheduleFilter, SchedulePage, Signal, StoreError,
    StoreOptions,
};
use futures_util::future::join_all;

use crate::support::*;

const MINUTE: i64 = 60_000;
const DAY: i64 = 24 * 60 * MINUTE;

pub fn every(interval_ms: i64, name: &str) -> ScheduleSpec {
    let timing = Timing { interval_ms: Some(interval_ms.unsigned_abs()), ..Timing::default() };
    let job = JobTemplate { kind: "tick".into(), ..JobTemplate::default() };
    ScheduleSpec { name: name.into(), timing, job, ..ScheduleSpec::default() }
}

pub async fn create(fixture: &Fixture, spec: ScheduleSpec) -> ScheduleId {
    let schedule = Schedule::new(spec, &JobLimits::default(), fixture.start).unwrap().schedule;
    let id = schedule.id;
    fixture.store.schedule_create(schedule, "ana", fixture.start).await.unwrap();
    id
}

async fn fire(fixture: &Fixture, ms: i64) -> Fired {
    fixture.store.schedule_fire(1_000, fixture.at(ms)).await.unwrap()
}

async fn get(fixture: &Fixture, id: ScheduleId) -> Schedule {
    fixture.store.schedule_get(id).await.unwrap().expect("the schedule exists")
}

async fn ticks(fixture: &Fixture, id: ScheduleId) -> Vec<TickRow> {
    fixture.store.schedule_ticks(id, None, 100_000).await.unwrap()
}

fn job_of(fired: &Fired) -> JobId {
    let fired: Vec<JobId> = fired.ticks.iter().filter_map(|tick| tick.job_id).collect();
    assert_eq!(fired.len(), 1, "one job was created");
    fired[0]
}

fn change(action: &'static str, patch: impl Fn(&Schedule) -> SchedulePatch + Send + Sync + 'static) -> ScheduleChange {
    ScheduleChange { edit: Box::new(move |schedule| Ok(patch(schedule))), limits: JobLimits::default(), action }
}

fn set_active(is_active: bool) -> ScheduleChange {
    let action = if is_active { "schedule.enable" } else { "schedule.disable" };
    change(action, move |_| SchedulePatch { spec: None, is_active: Some(is_active) })
}

async fn names(fixture: &Fixture, filter: ScheduleFilter) -> Vec<String> {
    let (found, total) = fixture.store.schedule_list(filter, SchedulePage { offset: 0, limit: 100 }).await.unwrap();
    assert_eq!(total, found.len() as u64);
    found.into_iter().map(|schedule| schedule.spec.name).collect()
}

pub async fn a_schedule_is_stored_as_it_was_written(fixture: &Fixture) {
    let spec = ScheduleSpec { description: Some("ñ \"x\"".into()), max_runs: Some(7), ..every(MINUTE, "nightly") };
    let schedule = Schedule::new(spec, &JobLimits::default(), fixture.start).unwrap().schedule;
    let mut signals = fixture.store.signals();
    fixture.store.schedule_create(schedule.clone(), "ana", fixture.start).await.unwrap();
    assert_eq!(get(fixture, schedule.id).await, schedule);
    assert_eq!(signals.recv().await.unwrap(), Signal::Schedule, "wakes a scheduler that waits for the next due time");
    assert!(fixture.store.schedule_get(ScheduleId::new()).await.unwrap().is_none());
    let counts = fixture.store.schedule_counts().await.unwrap();
    assert_eq!((counts.active, counts.inactive, counts.runs), (1, 0, 0));
}

pub async fn a_due_time_becomes_a_job_once(fixture: &Fixture) {
    let mut spec = every(MINUTE, "minutely");
    spec.job.payload = r#"{"due":"{{due}}"}"#.into();
    spec.job.queue = "slow".into();
    let id = create(fixture, spec).await;
    let early = fire(fixture, MINUTE - 1).await;
    assert_eq!((early.schedules, early.next_at), (0, Some(fixture.at(MINUTE))));

    let fired = fire(fixture, MINUTE + 3).await;
    let job = fixture.get(job_of(&fired)).await;
    assert_eq!((fired.schedules, fired.next_at), (1, Some(fixture.at(2 * MINUTE))));
    assert_eq!((job.status, job.queue.as_str(), job.kind.as_str()), (JobState::Queued, "slow", "tick"));
    assert_eq!((job.schedule_id, job.schedule_due), (Some(id.to_string()), Some(fixture.at(MINUTE))));
    assert_eq!(job.payload.get(), format!(r#"{{"due":"{}"}}"#, fixture.at(MINUTE)));

    assert_eq!(fire(fixture, MINUTE + 4).await.schedules, 0, "the due time is already processed");
    assert_eq!(fire(fixture, 3).await.schedules, 0, "a clock that went back changes nothing");
    let rows = ticks(fixture, id).await;
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].outcome, rows[0].due_at, rows[0].at),
        (TickOutcome::Fired, fixture.at(MINUTE), fixture.at(MINUTE + 3))
    );
    let schedule = get(fixture, id).await;
    assert_eq!((schedule.runs, schedule.last_job), (1, rows[0].job_id));
    assert_eq!((schedule.last_due_at, schedule.last_run_at), (Some(fixture.at(MINUTE)), Some(fixture.at(MINUTE + 3))));
    let filter = Filter { schedule_id: Some(id.to_string()), ..Filter::default() };
    assert_eq!(fixture.list(filter).await, [job.id]);
}

pub async fn a_job_with_jitter_waits_for_its_delay(fixture: &Fixture) {
    create(fixture, ScheduleSpec { jitter_ms: 30_000, ..every(MINUTE, "spread") }).await;
    let job = fixture.get(job_of(&fire(fixture, MINUTE).await)).await;
    let wait = job.scheduled_at.unwrap().ms_since(fixture.at(MINUTE));
    assert!((0..=30_000).contains(&wait));
    fixture.promote(MINUTE + wait).await;
    assert_eq!(fixture.claim_one(MINUTE + wait).await.id, job.id);
}

pub async fn concurrent_schedulers_fire_each_due_time_once(fixture: &Fixture) {
    let ids = join_all((0..40).map(|n| create(fixture, every(MINUTE, &format!("s{n}"))))).await;
    for minute in 1..=5 {
        let rounds = join_all((0..8).map(|_| fixture.store.schedule_fire(7, fixture.at(minute * MINUTE)))).await;
        let mut fired: usize = rounds.iter().map(|round| round.as_ref().unwrap().schedules).sum();
        loop {
            let more = fire(fixture, minute * MINUTE).await.schedules;
            fired += more;
            if more == 0 {
                break;
            }
        }
        assert_eq!(fired, 40, "minute {minute}");
    }
    for id in ids {
        let dues: Vec<i64> = ticks(fixture, id).await.iter().map(|tick| tick.due_at.ms_since(fixture.start)).collect();
        assert_eq!(dues, [5, 4, 3, 2, 1].map(|n| n * MINUTE));
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 200);
}

pub async fn a_round_is_bounded_and_starts_with_the_longest_due(fixture: &Fixture) {
    let late = create(fixture, every(MINUTE, "late")).await;
    let later = create(fixture, every(2 * MINUTE, "later")).await;
    let now = fixture.at(2 * MINUTE);
    let first = fixture.store.schedule_fire(1, now).await.unwrap();
    assert_eq!((first.schedules, first.ticks[0].schedule_id), (1, late));
    assert_eq!(first.next_at, Some(now), "another is due already");
    assert_eq!(fixture.store.schedule_fire(1, now).await.unwrap().ticks[0].schedule_id, later);
}

pub async fn one_round_bounds_the_jobs_of_long_backlogs(fixture: &Fixture) {
    let backlog = |name: &str| ScheduleSpec { misfire: Misfire::CatchUp, catch_up_limit: 10_000, ..every(1_000, name) };
    for name in ["a", "b", "c"] {
        create(fixture, backlog(name)).await;
    }
    let first = fire(fixture, 10_000_000).await;
    assert_eq!(first.schedules, 1, "one transaction creates at most ten thousand jobs");
    assert_eq!(fire(fixture, 10_000_000).await.schedules + fire(fixture, 10_000_000).await.schedules, 2);
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 30_000);
}

pub async fn an_unreadable_schedule_is_stopped_with_the_reason(fixture: &Fixture) {
    let broken = create(fixture, every(MINUTE, "broken")).await;
    let unknown_zone = create(fixture, every(MINUTE, "unknown zone")).await;
    let good = create(fixture, every(MINUTE, "good")).await;
    let literal = |id: ScheduleId| fixture.database.literal(JobId(id.0));
    fixture.database.run(&format!("UPDATE schedule SET spec = '{{' WHERE id = {}", literal(broken))).await;
    let sql = "UPDATE schedule SET spec = replace(spec, '\"UTC\"', '\"Europe/Atlantis\"') WHERE id = ";
    fixture.database.run(&format!("{sql}{}", literal(unknown_zone))).await;

    let fired = fire(fixture, MINUTE).await;
    assert_eq!((fired.schedules, fired.ticks.len()), (3, 1));
    assert_eq!(fired.ticks[0].schedule_id, good);
    assert_eq!(fired.next_at, Some(fixture.at(2 * MINUTE)));
    let reasons = fixture.database.rows("SELECT finished FROM schedule WHERE finished IS NOT NULL").await;
    assert_eq!(reasons.len(), 2);
    assert!(reasons.iter().any(|row| row[0].contains("is not readable")), "{reasons:?}");
    assert!(reasons.iter().any(|row| row[0].contains("timezone")), "{reasons:?}");
    let page = SchedulePage { offset: 0, limit: 10 };
    let (listed, _) = fixture.store.schedule_list(ScheduleFilter::default(), page).await.unwrap();
    assert_eq!(listed.len(), 2, "the others can still be listed");
    assert!(matches!(fixture.store.schedule_get(broken).await, Err(StoreError::Internal(_))));
    assert!(fixture.store.schedule_delete(broken, "ana", fixture.start).await.unwrap(), "it can be deleted");
}

pub async fn a_job_that_cannot_be_stored_is_missed_and_others_fire(fixture: &Fixture) {
    let mut spec = every(MINUTE, "known lane");
    spec.job.kind = "a".into();
    let good = create(fixture, spec).await;
    let rejected = create(fixture, every(MINUTE, "one lane too many")).await;
    fixture.submit(fixture.job("a", 0)).await;
    fixture
        .database
        .run(
            "INSERT INTO lane (queue, type, priority, keyed) WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 19999)
             SELECT 'q' || n, 'a', 1, FALSE FROM n",
        )
        .await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    let fired = fire(&fixture, MINUTE).await;
    assert_eq!(fired.schedules, 2);
    assert_eq!(ticks(&fixture, good).await[0].outcome, TickOutcome::Fired);
    let missed = ticks(&fixture, rejected).await.remove(0);
    assert_eq!((missed.outcome, missed.job_id), (TickOutcome::Missed, None));
    assert!(missed.reason.is_some_and(|reason| reason.contains("queue")), "the reason is recorded");
    let schedule = get(&fixture, rejected).await;
    assert_eq!((schedule.runs, schedule.next_at), (0, Some(fixture.at(2 * MINUTE))));
    fixture.store.close().await;
}

pub async fn overlap_skip_skips_due_times_while_a_job_runs(fixture: &Fixture) {
    let id = create(fixture, ScheduleSpec { overlap: Overlap::Skip, ..every(MINUTE, "one at a time") }).await;
    fire(fixture, MINUTE).await;
    let job = fixture.claim_one(MINUTE).await;
    fixture.report_start(&job, MINUTE).await;
    let skipped = fire(fixture, 2 * MINUTE).await.ticks.remove(0);
    assert_eq!((skipped.outcome, skipped.job_id), (TickOutcome::Skipped, None));
    assert!(skipped.reason.unwrap().contains(&job.id.to_string()));
    fixture.store.schedule_trigger(id, "ana", fixture.at(2 * MINUTE + 1)).await.unwrap();
    let triggered = fixture.claim_one(2 * MINUTE + 1).await;
    fixture.complete(&triggered, 2 * MINUTE + 2).await;
    assert_eq!(fire(fixture, 3 * MINUTE).await.ticks[0].outcome, TickOutcome::Skipped, "the first job still runs");
    fixture.complete(&job, 3 * MINUTE + 1).await;
    assert_eq!(fire(fixture, 4 * MINUTE).await.ticks[0].outcome, TickOutcome::Fired);
}

pub async fn queue_one_lets_one_job_wait_for_the_running_one(fixture: &Fixture) {
    create(fixture, ScheduleSpec { overlap: Overlap::QueueOne, ..every(MINUTE, "one waits") }).await;
    fire(fixture, MINUTE).await;
    let first = fixture.claim_one(MINUTE).await;
    fixture.report_start(&first, MINUTE).await;
    let second = job_of(&fire(fixture, 2 * MINUTE).await);
    assert_eq!(fixture.state(second).await, JobState::Pending);
    let third = fire(fixture, 3 * MINUTE).await.ticks.remove(0);
    assert_eq!((third.outcome, third.job_id), (TickOutcome::Skipped, None));
    assert!(fixture.claim(10, 3 * MINUTE).await.is_empty());

    fixture.fail(&first, 3 * MINUTE + 1).await;
    fixture.promote(3 * MINUTE + 2).await;
    let running = fixture.claim_one(3 * MINUTE + 2).await;
    assert_eq!(running.id, second, "it runs, however the first one ended");
    let fourth = job_of(&fire(fixture, 4 * MINUTE).await);
    assert_eq!(fixture.get(fourth).await.depends_on, [second]);
    fixture.complete(&running, 4 * MINUTE + 1).await;
    fixture.promote(4 * MINUTE + 2).await;
    assert_eq!(fixture.claim_one(4 * MINUTE + 2).await.id, fourth);
}

pub async fn cancel_previous_starts_when_the_previous_job_has_stopped(fixture: &Fixture) {
    create(fixture, ScheduleSpec { overlap: Overlap::CancelPrevious, ..every(MINUTE, "newest only") }).await;
    fire(fixture, MINUTE).await;
    let first = fixture.claim_one(MINUTE).await;
    fixture.report_start(&first, MINUTE).await;
    let second = job_of(&fire(fixture, 2 * MINUTE).await);
    let cancel_requests = fixture.store.poll(fixture.node, fixture.at(2 * MINUTE)).await.unwrap().cancel_requests;
    assert!(
        cancel_requests.iter().any(|(id, _)| *id == first.id),
        "the running job is asked to stop: {cancel_requests:?}"
    );
    assert_eq!(fixture.state(second).await, JobState::Pending);

    // The first one does not react. The second is cancelled before it starts, and the third may not start yet.
    let third = job_of(&fire(fixture, 3 * MINUTE).await);
    fixture.promote(3 * MINUTE + 1).await;
    assert_eq!(fixture.states([second, third]).await, [JobState::Cancelled, JobState::Pending]);
    assert!(fixture.claim(10, 3 * MINUTE + 1).await.is_empty(), "no job overlaps with the one that is stopping");
    let fourth = job_of(&fire(fixture, 4 * MINUTE).await);
    fixture.promote(4 * MINUTE + 1).await;
    assert!(fixture.claim(10, 4 * MINUTE + 1).await.is_empty(), "neither does the next job");

    assert!(fixture.end(&first, cancelled(), 4 * MINUTE + 2).await);
    fixture.promote(4 * MINUTE + 3).await;
    assert_eq!(fixture.claim_one(4 * MINUTE + 3).await.id, fourth);
    assert_eq!(fixture.state(third).await, JobState::Cancelled);
}

pub async fn a_manual_run_does_not_change_due_times(fixture: &Fixture) {
    let id = create(fixture, ScheduleSpec { max_runs: Some(5), ..every(MINUTE, "by hand") }).await;
    let first = fixture.store.schedule_trigger(id, "ana", fixture.at(10)).await.unwrap().unwrap();
    let second = fixture.store.schedule_trigger(id, "ben", fixture.at(10)).await.unwrap().unwrap();
    assert_ne!(first, second);
    let rows = ticks(fixture, id).await;
    let jobs: Vec<_> = rows.iter().map(|row| (row.outcome, row.job_id)).collect();
    let wanted = [second, first].map(|job| (TickOutcome::Triggered, Some(job)));
    assert_eq!(jobs, wanted, "two triggers at the same time have a tick each");
    assert_eq!(fixture.state(first).await, JobState::Queued);
    assert_eq!(fixture.get(first).await.schedule_id, Some(id.to_string()));
    let schedule = get(fixture, id).await;
    assert_eq!((schedule.runs, schedule.next_at), (0, Some(fixture.at(MINUTE))));
    fixture.store.schedule_patch(id, set_active(false), "ana", fixture.at(20)).await.unwrap();
    assert!(
        fixture.store.schedule_trigger(id, "ana", fixture.at(30)).await.unwrap().is_some(),
        "also while it is disabled"
    );
    assert!(fixture.store.schedule_trigger(ScheduleId::new(), "ana", fixture.at(30)).await.unwrap().is_none());
}

pub async fn a_schedule_is_edited_disabled_and_enabled(fixture: &Fixture) {
    let id = create(fixture, every(MINUTE, "old")).await;
    let renamed = change("schedule.edit", |schedule| {
        let spec = ScheduleSpec { name: "new".into(), ..schedule.spec.clone() };
        SchedulePatch { spec: Some(spec), is_active: None }
    });
    let edited = fixture.store.schedule_patch(id, renamed, "ana", fixture.at(MINUTE + 1)).await.unwrap().unwrap();
    assert_eq!((edited.spec.name.as_str(), edited.next_at), ("new", Some(fixture.at(2 * MINUTE))));
    assert_eq!(edited.runs, 1, "the earlier due time fires before the edit");
    assert_eq!(get(fixture, id).await, edited);

    fixture.store.schedule_patch(id, set_active(false), "ana", fixture.at(MINUTE + 2)).await.unwrap();
    assert_eq!(fire(fixture, 10 * MINUTE).await.schedules, 0);
    fixture.store.schedule_patch(id, set_active(true), "ana", fixture.at(10 * MINUTE + 1)).await.unwrap();
    assert_eq!(fire(fixture, 11 * MINUTE).await.ticks.len(), 1, "due times while it was disabled are not caught up");

    let rejected = ScheduleChange {
        edit: Box::new(|_| Err(vec![faena_domain::FieldError::new("name", "no")])),
        limits: JobLimits::default(),
        action: "schedule.edit",
    };
    let error = fixture.store.schedule_patch(id, rejected, "ana", fixture.at(12 * MINUTE)).await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid(errors) if errors[0].path == "name"));
    assert!(
        fixture
            .store
            .schedule_patch(ScheduleId::new(), set_active(true), "ana", fixture.start)
            .await
            .unwrap()
            .is_none()
    );
}

pub async fn a_deleted_schedule_does_not_fire_and_its_jobs_stay(fixture: &Fixture) {
    let id = create(fixture, every(MINUTE, "gone")).await;
    let job = job_of(&fire(fixture, MINUTE).await);
    assert!(fixture.store.schedule_delete(id, "ana", fixture.at(2 * MINUTE)).await.unwrap());
    assert_eq!(fire(fixture, 3 * MINUTE).await.schedules, 0);
    assert!(!fixture.store.schedule_delete(id, "ana", fixture.at(2 * MINUTE)).await.unwrap());
    assert_eq!((ticks(fixture, id).await.len(), fixture.state(job).await), (0, JobState::Queued));

    // Deletes a schedule while it fires: it fires once or not at all, and leaves no tick.
    for n in 0..10 {
        let id = create(fixture, every(MINUTE, "contested")).await;
        let now = fixture.at((n + 4) * MINUTE);
        let (fired, deleted) =
            tokio::join!(fixture.store.schedule_fire(10, now), fixture.store.schedule_delete(id, "ana", now));
        assert!(fired.is_ok() && deleted.unwrap());
        assert_eq!(ticks(fixture, id).await.len(), 0);
    }
}

pub async fn every_action_on_a_schedule_has_an_audit_entry(fixture: &Fixture) {
    let id = create(fixture, every(MINUTE, "audited")).await;
    fixture.store.schedule_patch(id, set_active(false), "ben", fixture.at(1)).await.unwrap();
    fixture.store.schedule_trigger(id, "eva", fixture.at(2)).await.unwrap();
    fixture.store.schedule_delete(id, "ana", fixture.at(3)).await.unwrap();
    let filter = AuditFilter { target: Some(id.to_string()), ..AuditFilter::default() };
    let rows = fixture.store.audit_list(filter, 10).await.unwrap();
    let actions: Vec<_> = rows.iter().rev().map(|row| (row.action.as_str(), row.actor.as_str())).collect();
    let wanted = [("create", "ana"), ("disable", "ben"), ("trigger", "eva"), ("delete", "ana")];
    assert_eq!(
        actions,
        wanted.map(|(action, by)| (format!("schedule.{action}"), by)).each_ref().map(|(a, b)| (a.as_str(), *b))
    );
    assert!(rows.iter().all(|row| row.details["name"] == "audited"));
}

pub async fn old_ticks_are_deleted(fixture: &Fixture) {
    let id = create(fixture, every(10 * DAY, "rare")).await;
    for n in 1..=5 {
        fire(fixture, n * 10 * DAY).await;
    }
    fixture.store.job_prune(&Retention::default(), 1_000, fixture.at(51 * DAY)).await.unwrap();
    let kept: Vec<i64> =
        ticks(fixture, id).await.iter().map(|tick| tick.due_at.ms_since(fixture.start) / DAY).collect();
    assert_eq!(kept, [50, 40, 30], "as long as a finished job may be kept");
}

pub async fn ticks_are_listed_in_pages(fixture: &Fixture) {
    let id = create(fixture, ScheduleSpec { misfire: Misfire::CatchUp, ..every(MINUTE, "paged") }).await;
    fire(fixture, 25 * MINUTE).await;
    let mut seen = Vec::new();
    let mut before = None;
    loop {
        let page = fixture.store.schedule_ticks(id, before, 10).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some(last.due_at);
        seen.extend(page.iter().map(|tick| tick.due_at.ms_since(fixture.start) / MINUTE));
    }
    assert_eq!(seen, (1..=25).rev().collect::<Vec<i64>>());
}

pub async fn schedules_are_found_by_name_and_state_whatever_the_name_contains(fixture: &Fixture) {
    for name in ["100% sure", "100 sure", "a_b", "axb", "back\\slash", "UPPER", "it's", "ñandú", "Zoë \"q\""] {
        create(fixture, every(MINUTE, name)).await;
    }
    let off = create(fixture, every(MINUTE, "off")).await;
    fixture.store.schedule_patch(off, set_active(false), "ana", fixture.start).await.unwrap();
    let q = |part: &str| ScheduleFilter { q: Some(part.into()), ..ScheduleFilter::default() };
    for (part, found) in [
        ("%", vec!["100% sure"]),
        ("a_b", vec!["a_b"]),
        ("\\", vec!["back\\slash"]),
        ("upp", vec!["UPPER"]),
        ("'", vec!["it's"]),
        ("\"", vec!["Zoë \"q\""]),
        ("ñan", vec!["ñandú"]),
        ("100", vec!["100 sure", "100% sure"]),
        ("\0", vec![]),
    ] {
        assert_eq!(names(fixture, q(part)).await, found, "{part:?}");
    }
    let exactly = |name: &str| ScheduleFilter { name: Some(name.into()), ..ScheduleFilter::default() };
    assert_eq!(names(fixture, exactly("a_b")).await, ["a_b"]);
    assert!(names(fixture, exactly("a%")).await.is_empty());
    let inactive = ScheduleFilter { is_active: Some(false), ..ScheduleFilter::default() };
    assert_eq!(names(fixture, inactive).await, ["off"]);
    let (page, total) =
        fixture.store.schedule_list(ScheduleFilter::default(), SchedulePage { offset: 8, limit: 5 }).await.unwrap();
    assert_eq!((page.len(), total), (2, 10));
}

pub async fn after_two_weeks_of_downtime_each_misfire_policy_applies_and_jobs_stay_bounded(fixture: &Fixture) {
    let policy = |name: &str, misfire| ScheduleSpec { misfire, ..every(1_000, name) };
    let once = create(fixture, policy("once", Misfire::RunOnce)).await;
    let skip = create(fixture, policy("skip", Misfire::Skip)).await;
    let catch_up = create(fixture, policy("catch up", Misfire::CatchUp)).await;
    let outage = 14 * DAY;
    let fired = fire(fixture, outage).await;
    assert_eq!(fired.schedules, 3);
    for (id, jobs) in [(once, 1), (skip, 1), (catch_up, 100)] {
        let rows = ticks(fixture, id).await;
        let fired: Vec<i64> =
            rows.iter().filter(|row| row.job_id.is_some()).map(|row| row.due_at.ms_since(fixture.start)).collect();
        assert_eq!(fired, (0..jobs).map(|n| outage - n * 1_000).collect::<Vec<i64>>());
        let reported: u64 = rows.iter().map(|row| row.count.unwrap()).sum();
        assert_eq!(reported, (outage / 1_000).unsigned_abs(), "each due time is recorded");
        assert!(rows.len() <= 201, "{} records", rows.len());
        assert_eq!(get(fixture, id).await.next_at, Some(fixture.at(outage + 1_000)));
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 102);
    assert_eq!(fire(fixture, outage + 999).await.schedules, 0);
}

pub async fn ten_thousand_schedules_fire_in_ten_rounds(fixture: &Fixture) {
    let id = create(fixture, every(MINUTE, "s")).await;
    // Copies of a row, because ten thousand creations one by one take longer than the test itself.
    let copy = if fixture.store.database_kind() == "sqlite" { "randomblob(16)" } else { "gen_random_uuid()" };
    fixture
        .database
        .run(&format!(
            "INSERT INTO schedule (id, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at)
             WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 9999)
             SELECT {copy}, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at FROM schedule, n"
        ))
        .await;
    for round in 1..=10 {
        let fired = fire(fixture, MINUTE).await;
        assert_eq!((fired.schedules, fired.ticks.len()), (1_000, 1_000), "round {round}");
    }
    assert_eq!(fire(fixture, MINUTE).await.schedules, 0);
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 10_000);
    assert_eq!(get(fixture, id).await.runs, 1);
}
