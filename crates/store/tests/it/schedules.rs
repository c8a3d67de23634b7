//! Schedules: each due time once, whichever node fires and whichever dies; every outcome is recorded.

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

pub async fn make(world: &World, spec: ScheduleSpec) -> ScheduleId {
    let schedule = Schedule::new(spec, &JobLimits::default(), world.start).unwrap().schedule;
    let id = schedule.id;
    world.store.schedule_create(schedule, "ana", world.start).await.unwrap();
    id
}

async fn fire(world: &World, ms: i64) -> Fired {
    world.store.schedule_fire(1_000, world.at(ms)).await.unwrap()
}

async fn get(world: &World, id: ScheduleId) -> Schedule {
    world.store.schedule_get(id).await.unwrap().expect("the schedule is there")
}

async fn ticks(world: &World, id: ScheduleId) -> Vec<TickRow> {
    world.store.schedule_ticks(id, None, 100_000).await.unwrap()
}

fn job_of(fired: &Fired) -> JobId {
    let fired: Vec<JobId> = fired.ticks.iter().filter_map(|tick| tick.job_id).collect();
    assert_eq!(fired.len(), 1, "one job was made");
    fired[0]
}

fn change(action: &'static str, patch: impl Fn(&Schedule) -> SchedulePatch + Send + Sync + 'static) -> ScheduleChange {
    ScheduleChange { edit: Box::new(move |schedule| Ok(patch(schedule))), limits: JobLimits::default(), action }
}

fn switched(is_active: bool) -> ScheduleChange {
    let action = if is_active { "schedule.enable" } else { "schedule.disable" };
    change(action, move |_| SchedulePatch { spec: None, is_active: Some(is_active) })
}

async fn names(world: &World, filter: ScheduleFilter) -> Vec<String> {
    let (found, total) = world.store.schedule_list(filter, SchedulePage { offset: 0, limit: 100 }).await.unwrap();
    assert_eq!(total, found.len() as u64);
    found.into_iter().map(|schedule| schedule.spec.name).collect()
}

pub async fn a_schedule_is_stored_as_it_was_written(world: &World) {
    let spec = ScheduleSpec { description: Some("ñ \"x\"".into()), max_runs: Some(7), ..every(MINUTE, "nightly") };
    let schedule = Schedule::new(spec, &JobLimits::default(), world.start).unwrap().schedule;
    let mut signals = world.store.signals();
    world.store.schedule_create(schedule.clone(), "ana", world.start).await.unwrap();
    assert_eq!(get(world, schedule.id).await, schedule);
    assert_eq!(signals.recv().await.unwrap(), Signal::Schedule, "whoever sleeps until the next due time hears of it");
    assert!(world.store.schedule_get(ScheduleId::new()).await.unwrap().is_none());
    let counts = world.store.schedule_counts().await.unwrap();
    assert_eq!((counts.active, counts.inactive, counts.runs), (1, 0, 0));
}

pub async fn a_due_time_becomes_a_job_once(world: &World) {
    let mut spec = every(MINUTE, "minutely");
    spec.job.payload = r#"{"due":"{{due}}"}"#.into();
    spec.job.queue = "slow".into();
    let id = make(world, spec).await;
    let early = fire(world, MINUTE - 1).await;
    assert_eq!((early.schedules, early.next_at), (0, Some(world.at(MINUTE))));

    let fired = fire(world, MINUTE + 3).await;
    let job = world.get(job_of(&fired)).await;
    assert_eq!((fired.schedules, fired.next_at), (1, Some(world.at(2 * MINUTE))));
    assert_eq!((job.status, job.queue.as_str(), job.kind.as_str()), (JobState::Queued, "slow", "tick"));
    assert_eq!((job.schedule_id, job.schedule_due), (Some(id.to_string()), Some(world.at(MINUTE))));
    assert_eq!(job.payload.get(), format!(r#"{{"due":"{}"}}"#, world.at(MINUTE)));

    assert_eq!(fire(world, MINUTE + 4).await.schedules, 0, "it is dealt with");
    assert_eq!(fire(world, 3).await.schedules, 0, "a clock that went back changes nothing");
    let rows = ticks(world, id).await;
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].outcome, rows[0].due_at, rows[0].at),
        (TickOutcome::Fired, world.at(MINUTE), world.at(MINUTE + 3))
    );
    let schedule = get(world, id).await;
    assert_eq!((schedule.runs, schedule.last_job), (1, rows[0].job_id));
    assert_eq!((schedule.last_due_at, schedule.last_run_at), (Some(world.at(MINUTE)), Some(world.at(MINUTE + 3))));
    let filter = Filter { schedule_id: Some(id.to_string()), ..Filter::default() };
    assert_eq!(world.list(filter).await, [job.id]);
}

pub async fn a_job_with_jitter_waits_for_its_delay(world: &World) {
    make(world, ScheduleSpec { jitter_ms: 30_000, ..every(MINUTE, "spread") }).await;
    let job = world.get(job_of(&fire(world, MINUTE).await)).await;
    let wait = job.scheduled_at.unwrap().ms_since(world.at(MINUTE));
    assert!((0..=30_000).contains(&wait));
    world.promote(MINUTE + wait).await;
    assert_eq!(world.claim_one(MINUTE + wait).await.id, job.id);
}

pub async fn concurrent_schedulers_fire_each_due_time_once(world: &World) {
    let ids = join_all((0..40).map(|n| make(world, every(MINUTE, &format!("s{n}"))))).await;
    for minute in 1..=5 {
        let rounds = join_all((0..8).map(|_| world.store.schedule_fire(7, world.at(minute * MINUTE)))).await;
        let mut dealt: usize = rounds.iter().map(|round| round.as_ref().unwrap().schedules).sum();
        loop {
            let more = fire(world, minute * MINUTE).await.schedules;
            dealt += more;
            if more == 0 {
                break;
            }
        }
        assert_eq!(dealt, 40, "minute {minute}");
    }
    for id in ids {
        let dues: Vec<i64> = ticks(world, id).await.iter().map(|tick| tick.due_at.ms_since(world.start)).collect();
        assert_eq!(dues, [5, 4, 3, 2, 1].map(|n| n * MINUTE));
    }
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, 200);
}

pub async fn a_round_is_bounded_and_starts_with_the_longest_due(world: &World) {
    let late = make(world, every(MINUTE, "late")).await;
    let later = make(world, every(2 * MINUTE, "later")).await;
    let now = world.at(2 * MINUTE);
    let first = world.store.schedule_fire(1, now).await.unwrap();
    assert_eq!((first.schedules, first.ticks[0].schedule_id), (1, late));
    assert_eq!(first.next_at, Some(now), "another is due already");
    assert_eq!(world.store.schedule_fire(1, now).await.unwrap().ticks[0].schedule_id, later);
}

pub async fn one_round_bounds_the_jobs_of_long_backlogs(world: &World) {
    let backlog = |name: &str| ScheduleSpec { misfire: Misfire::CatchUp, catch_up_limit: 10_000, ..every(1_000, name) };
    for name in ["a", "b", "c"] {
        make(world, backlog(name)).await;
    }
    let first = fire(world, 10_000_000).await;
    assert_eq!(first.schedules, 1, "ten thousand jobs and their records are enough for a transaction");
    assert_eq!(fire(world, 10_000_000).await.schedules + fire(world, 10_000_000).await.schedules, 2);
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, 30_000);
}

pub async fn an_unreadable_schedule_is_stopped_with_the_reason(world: &World) {
    let broken = make(world, every(MINUTE, "broken")).await;
    let strange = make(world, every(MINUTE, "strange")).await;
    let good = make(world, every(MINUTE, "good")).await;
    let literal = |id: ScheduleId| world.ledger.literal(JobId(id.0));
    world.ledger.run(&format!("UPDATE schedule SET spec = '{{' WHERE id = {}", literal(broken))).await;
    let sql = "UPDATE schedule SET spec = replace(spec, '\"UTC\"', '\"Europe/Atlantis\"') WHERE id = ";
    world.ledger.run(&format!("{sql}{}", literal(strange))).await;

    let fired = fire(world, MINUTE).await;
    assert_eq!((fired.schedules, fired.ticks.len()), (3, 1));
    assert_eq!(fired.ticks[0].schedule_id, good);
    assert_eq!(fired.next_at, Some(world.at(2 * MINUTE)));
    let reasons = world.ledger.rows("SELECT finished FROM schedule WHERE finished IS NOT NULL").await;
    assert_eq!(reasons.len(), 2);
    assert!(reasons.iter().any(|row| row[0].contains("is not readable")), "{reasons:?}");
    assert!(reasons.iter().any(|row| row[0].contains("timezone")), "{reasons:?}");
    let page = SchedulePage { offset: 0, limit: 10 };
    let (listed, _) = world.store.schedule_list(ScheduleFilter::default(), page).await.unwrap();
    assert_eq!(listed.len(), 2, "the others can still be listed");
    assert!(matches!(world.store.schedule_get(broken).await, Err(StoreError::Broken(_))));
    assert!(world.store.schedule_delete(broken, "ana", world.start).await.unwrap(), "it can be got rid of");
}

pub async fn a_job_that_cannot_be_stored_is_missed_and_others_fire(world: &World) {
    let mut spec = every(MINUTE, "known lane");
    spec.job.kind = "a".into();
    let good = make(world, spec).await;
    let refused = make(world, every(MINUTE, "one lane too many")).await;
    world.submit(world.job("a", 0)).await;
    world
        .ledger
        .run(
            "INSERT INTO lane (queue, type, priority, keyed) WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 19999)
             SELECT 'q' || n, 'a', 1, FALSE FROM n",
        )
        .await;
    let world = world.reopen(StoreOptions::default()).await;
    let fired = fire(&world, MINUTE).await;
    assert_eq!(fired.schedules, 2);
    assert_eq!(ticks(&world, good).await[0].outcome, TickOutcome::Fired);
    let missed = ticks(&world, refused).await.remove(0);
    assert_eq!((missed.outcome, missed.job_id), (TickOutcome::Missed, None));
    assert!(missed.reason.is_some_and(|reason| reason.contains("queue")), "the reason is recorded");
    let schedule = get(&world, refused).await;
    assert_eq!((schedule.runs, schedule.next_at), (0, Some(world.at(2 * MINUTE))));
    world.store.close().await;
}

pub async fn skip_waits_for_the_running_job(world: &World) {
    let id = make(world, ScheduleSpec { overlap: Overlap::Skip, ..every(MINUTE, "one at a time") }).await;
    fire(world, MINUTE).await;
    let job = world.claim_one(MINUTE).await;
    world.begin(&job, MINUTE).await;
    let skipped = fire(world, 2 * MINUTE).await.ticks.remove(0);
    assert_eq!((skipped.outcome, skipped.job_id), (TickOutcome::Skipped, None));
    assert!(skipped.reason.unwrap().contains(&job.id.to_string()));
    world.store.schedule_trigger(id, "ana", world.at(2 * MINUTE + 1)).await.unwrap();
    let by_hand = world.claim_one(2 * MINUTE + 1).await;
    world.complete(&by_hand, 2 * MINUTE + 2).await;
    assert_eq!(fire(world, 3 * MINUTE).await.ticks[0].outcome, TickOutcome::Skipped, "the first one is still going");
    world.complete(&job, 3 * MINUTE + 1).await;
    assert_eq!(fire(world, 4 * MINUTE).await.ticks[0].outcome, TickOutcome::Fired);
}

pub async fn queue_one_lets_one_job_wait_for_the_running_one(world: &World) {
    make(world, ScheduleSpec { overlap: Overlap::QueueOne, ..every(MINUTE, "one waits") }).await;
    fire(world, MINUTE).await;
    let first = world.claim_one(MINUTE).await;
    world.begin(&first, MINUTE).await;
    let second = job_of(&fire(world, 2 * MINUTE).await);
    assert_eq!(world.state(second).await, JobState::Pending);
    let third = fire(world, 3 * MINUTE).await.ticks.remove(0);
    assert_eq!((third.outcome, third.job_id), (TickOutcome::Skipped, None));
    assert!(world.claim(10, 3 * MINUTE).await.is_empty());

    world.fail(&first, 3 * MINUTE + 1).await;
    world.promote(3 * MINUTE + 2).await;
    let running = world.claim_one(3 * MINUTE + 2).await;
    assert_eq!(running.id, second, "it runs, however the first one ended");
    let fourth = job_of(&fire(world, 4 * MINUTE).await);
    assert_eq!(world.get(fourth).await.depends_on, [second]);
    world.complete(&running, 4 * MINUTE + 1).await;
    world.promote(4 * MINUTE + 2).await;
    assert_eq!(world.claim_one(4 * MINUTE + 2).await.id, fourth);
}

pub async fn cancel_previous_starts_when_the_previous_job_has_stopped(world: &World) {
    make(world, ScheduleSpec { overlap: Overlap::CancelPrevious, ..every(MINUTE, "the newest counts") }).await;
    fire(world, MINUTE).await;
    let first = world.claim_one(MINUTE).await;
    world.begin(&first, MINUTE).await;
    let second = job_of(&fire(world, 2 * MINUTE).await);
    let asked = world.store.poll(world.node, world.at(2 * MINUTE)).await.unwrap().cancels;
    assert!(asked.iter().any(|mode| mode.0 == first.id), "the one that runs is asked to stop: {asked:?}");
    assert_eq!(world.state(second).await, JobState::Pending);

    // The first one does not react. The second is cancelled before it starts, and the third may not start yet.
    let third = job_of(&fire(world, 3 * MINUTE).await);
    world.promote(3 * MINUTE + 1).await;
    assert_eq!(world.states([second, third]).await, [JobState::Cancelled, JobState::Pending]);
    assert!(world.claim(10, 3 * MINUTE + 1).await.is_empty(), "nothing overlaps with the one that is stopping");
    let fourth = job_of(&fire(world, 4 * MINUTE).await);
    world.promote(4 * MINUTE + 1).await;
    assert!(world.claim(10, 4 * MINUTE + 1).await.is_empty(), "nor does the next");

    assert!(world.end(&first, cancelled(), 4 * MINUTE + 2).await);
    world.promote(4 * MINUTE + 3).await;
    assert_eq!(world.claim_one(4 * MINUTE + 3).await.id, fourth);
    assert_eq!(world.state(third).await, JobState::Cancelled);
}

pub async fn a_manual_run_does_not_change_due_times(world: &World) {
    let id = make(world, ScheduleSpec { max_runs: Some(5), ..every(MINUTE, "by hand") }).await;
    let first = world.store.schedule_trigger(id, "ana", world.at(10)).await.unwrap().unwrap();
    let second = world.store.schedule_trigger(id, "ben", world.at(10)).await.unwrap().unwrap();
    assert_ne!(first, second);
    let rows = ticks(world, id).await;
    let jobs: Vec<_> = rows.iter().map(|row| (row.outcome, row.job_id)).collect();
    let wanted = [second, first].map(|job| (TickOutcome::Triggered, Some(job)));
    assert_eq!(jobs, wanted, "two in one moment have a record each");
    assert_eq!(world.state(first).await, JobState::Queued);
    assert_eq!(world.get(first).await.schedule_id, Some(id.to_string()));
    let schedule = get(world, id).await;
    assert_eq!((schedule.runs, schedule.next_at), (0, Some(world.at(MINUTE))));
    world.store.schedule_patch(id, switched(false), "ana", world.at(20)).await.unwrap();
    assert!(world.store.schedule_trigger(id, "ana", world.at(30)).await.unwrap().is_some(), "also while it is off");
    assert!(world.store.schedule_trigger(ScheduleId::new(), "ana", world.at(30)).await.unwrap().is_none());
}

pub async fn a_schedule_is_edited_disabled_and_enabled(world: &World) {
    let id = make(world, every(MINUTE, "old")).await;
    let renamed = change("schedule.edit", |schedule| {
        let spec = ScheduleSpec { name: "new".into(), ..schedule.spec.clone() };
        SchedulePatch { spec: Some(spec), is_active: None }
    });
    let edited = world.store.schedule_patch(id, renamed, "ana", world.at(MINUTE + 1)).await.unwrap().unwrap();
    assert_eq!((edited.spec.name.as_str(), edited.next_at), ("new", Some(world.at(2 * MINUTE))));
    assert_eq!(edited.runs, 1, "what was due by then was due by what was said before");
    assert_eq!(get(world, id).await, edited);

    world.store.schedule_patch(id, switched(false), "ana", world.at(MINUTE + 2)).await.unwrap();
    assert_eq!(fire(world, 10 * MINUTE).await.schedules, 0);
    world.store.schedule_patch(id, switched(true), "ana", world.at(10 * MINUTE + 1)).await.unwrap();
    assert_eq!(fire(world, 11 * MINUTE).await.ticks.len(), 1, "nothing is made up for");

    let refused = ScheduleChange {
        edit: Box::new(|_| Err(vec![faena_domain::FieldError::new("name", "no")])),
        limits: JobLimits::default(),
        action: "schedule.edit",
    };
    let error = world.store.schedule_patch(id, refused, "ana", world.at(12 * MINUTE)).await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid(faults) if faults[0].path == "name"));
    assert!(world.store.schedule_patch(ScheduleId::new(), switched(true), "ana", world.start).await.unwrap().is_none());
}

pub async fn a_deleted_schedule_does_not_fire_and_its_jobs_stay(world: &World) {
    let id = make(world, every(MINUTE, "gone")).await;
    let job = job_of(&fire(world, MINUTE).await);
    assert!(world.store.schedule_delete(id, "ana", world.at(2 * MINUTE)).await.unwrap());
    assert_eq!(fire(world, 3 * MINUTE).await.schedules, 0);
    assert!(!world.store.schedule_delete(id, "ana", world.at(2 * MINUTE)).await.unwrap());
    assert_eq!((ticks(world, id).await.len(), world.state(job).await), (0, JobState::Queued));

    // At the moment in which it is due: it fires once or not at all, and leaves nothing behind.
    for n in 0..10 {
        let id = make(world, every(MINUTE, "contested")).await;
        let now = world.at((n + 4) * MINUTE);
        let (fired, deleted) =
            tokio::join!(world.store.schedule_fire(10, now), world.store.schedule_delete(id, "ana", now));
        assert!(fired.is_ok() && deleted.unwrap());
        assert_eq!(ticks(world, id).await.len(), 0);
    }
}

pub async fn every_action_on_a_schedule_has_an_audit_entry(world: &World) {
    let id = make(world, every(MINUTE, "audited")).await;
    world.store.schedule_patch(id, switched(false), "ben", world.at(1)).await.unwrap();
    world.store.schedule_trigger(id, "eva", world.at(2)).await.unwrap();
    world.store.schedule_delete(id, "ana", world.at(3)).await.unwrap();
    let filter = AuditFilter { target: Some(id.to_string()), ..AuditFilter::default() };
    let rows = world.store.audit_list(filter, 10).await.unwrap();
    let acts: Vec<_> = rows.iter().rev().map(|row| (row.action.as_str(), row.actor.as_str())).collect();
    let wanted = [("create", "ana"), ("disable", "ben"), ("trigger", "eva"), ("delete", "ana")];
    assert_eq!(
        acts,
        wanted.map(|(action, by)| (format!("schedule.{action}"), by)).each_ref().map(|(a, b)| (a.as_str(), *b))
    );
    assert!(rows.iter().all(|row| row.details["name"] == "audited"));
}

pub async fn old_ticks_are_deleted(world: &World) {
    let id = make(world, every(10 * DAY, "rare")).await;
    for n in 1..=5 {
        fire(world, n * 10 * DAY).await;
    }
    world.store.job_prune(&Retention::default(), 1_000, world.at(51 * DAY)).await.unwrap();
    let kept: Vec<i64> = ticks(world, id).await.iter().map(|tick| tick.due_at.ms_since(world.start) / DAY).collect();
    assert_eq!(kept, [50, 40, 30], "as long as a finished job may be kept");
}

pub async fn ticks_are_listed_in_pages(world: &World) {
    let id = make(world, ScheduleSpec { misfire: Misfire::CatchUp, ..every(MINUTE, "paged") }).await;
    fire(world, 25 * MINUTE).await;
    let mut seen = Vec::new();
    let mut before = None;
    loop {
        let page = world.store.schedule_ticks(id, before, 10).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some(last.due_at);
        seen.extend(page.iter().map(|tick| tick.due_at.ms_since(world.start) / MINUTE));
    }
    assert_eq!(seen, (1..=25).rev().collect::<Vec<i64>>());
}

pub async fn schedules_are_found_by_name_and_state_whatever_the_name_contains(world: &World) {
    for name in ["100% sure", "100 sure", "a_b", "axb", "back\\slash", "UPPER", "it's", "ñandú", "Zoë \"q\""] {
        make(world, every(MINUTE, name)).await;
    }
    let off = make(world, every(MINUTE, "off")).await;
    world.store.schedule_patch(off, switched(false), "ana", world.start).await.unwrap();
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
        assert_eq!(names(world, q(part)).await, found, "{part:?}");
    }
    let exactly = |name: &str| ScheduleFilter { name: Some(name.into()), ..ScheduleFilter::default() };
    assert_eq!(names(world, exactly("a_b")).await, ["a_b"]);
    assert!(names(world, exactly("a%")).await.is_empty());
    let inactive = ScheduleFilter { is_active: Some(false), ..ScheduleFilter::default() };
    assert_eq!(names(world, inactive).await, ["off"]);
    let (page, total) =
        world.store.schedule_list(ScheduleFilter::default(), SchedulePage { offset: 8, limit: 5 }).await.unwrap();
    assert_eq!((page.len(), total), (2, 10));
}

pub async fn after_two_weeks_each_policy_does_what_it_says_and_there_is_no_flood(world: &World) {
    let policy = |name: &str, misfire| ScheduleSpec { misfire, ..every(1_000, name) };
    let once = make(world, policy("once", Misfire::RunOnce)).await;
    let skip = make(world, policy("skip", Misfire::Skip)).await;
    let catch_up = make(world, policy("catch up", Misfire::CatchUp)).await;
    let outage = 14 * DAY;
    let fired = fire(world, outage).await;
    assert_eq!(fired.schedules, 3);
    for (id, jobs) in [(once, 1), (skip, 1), (catch_up, 100)] {
        let rows = ticks(world, id).await;
        let fired: Vec<i64> =
            rows.iter().filter(|row| row.job_id.is_some()).map(|row| row.due_at.ms_since(world.start)).collect();
        assert_eq!(fired, (0..jobs).map(|n| outage - n * 1_000).collect::<Vec<i64>>());
        let reported: u64 = rows.iter().map(|row| row.count.unwrap()).sum();
        assert_eq!(reported, (outage / 1_000).unsigned_abs(), "each due time is on record");
        assert!(rows.len() <= 201, "{} records", rows.len());
        assert_eq!(get(world, id).await.next_at, Some(world.at(outage + 1_000)));
    }
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, 102);
    assert_eq!(fire(world, outage + 999).await.schedules, 0);
}

pub async fn ten_thousand_schedules_fire_in_ten_rounds(world: &World) {
    let id = make(world, every(MINUTE, "s")).await;
    // Copies of a row, because ten thousand creations one by one take longer than the test itself.
    let copy = if world.store.engine() == "sqlite" { "randomblob(16)" } else { "gen_random_uuid()" };
    world
        .ledger
        .run(&format!(
            "INSERT INTO schedule (id, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at)
             WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 9999)
             SELECT {copy}, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at FROM schedule, n"
        ))
        .await;
    for round in 1..=10 {
        let fired = fire(world, MINUTE).await;
        assert_eq!((fired.schedules, fired.ticks.len()), (1_000, 1_000), "round {round}");
    }
    assert_eq!(fire(world, MINUTE).await.schedules, 0);
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, 10_000);
    assert_eq!(get(world, id).await.runs, 1);
}
