//! Limits on what one caller or worker can make the store keep, and what happens beyond them.

use faena_domain::{JobState, LogEntry, LogEvent};
use faena_store::{
    JobTotal, RunEnd, RunOutcome, RunUpdate, RunUpdateKind, StoreError, StoreOptions, StoredJobLimits, UpdateResult,
};

use crate::support::*;

// ---- lanes

fn few_lanes(max_lanes: usize) -> StoreOptions {
    StoreOptions { max_lanes, ..StoreOptions::default() }
}

/// Reclaims lanes until at least `wanted` of them are deleted.
///
/// PostgreSQL: a lane is retired first, and deleted two calls later, or when transactions of other tests have ended.
pub async fn reclaim(fixture: &Fixture, wanted: usize) -> usize {
    let mut deleted = 0;
    for calls in 1.. {
        deleted += fixture.store.lane_reclaim(100).await.unwrap();
        if calls >= 3 && deleted >= wanted {
            break;
        }
    }
    deleted
}

async fn used_lanes(fixture: &Fixture) -> usize {
    fixture.store.lane_usage().await.unwrap().used
}

pub async fn a_lane_without_jobs_is_reclaimed_and_its_totals_are_kept(fixture: &Fixture) {
    let done = fixture.submit_and_claim(fixture.job("gone", 0).queue("other")).await;
    let keep = fixture.submit(fixture.job("keep", 1)).await;
    fixture.complete(&done, 2).await;
    assert_eq!((reclaim(fixture, 0).await, used_lanes(fixture).await), (0, 2), "both lanes have a job");
    fixture.store.job_delete(done.id, None, fixture.at(3)).await.unwrap();
    assert_eq!((reclaim(fixture, 1).await, used_lanes(fixture).await), (1, 1));
    let counts = fixture.store.counts().await.unwrap();
    let total = |total| counts.lanes().map(|lane| counts.so_far(lane, total)).sum::<i64>();
    assert_eq!((total(JobTotal::Created), total(JobTotal::Completed)), (2, 1));

    let again = fixture.submit(fixture.job("gone", 4).queue("other")).await;
    assert_eq!(fixture.states([keep, again]).await, [JobState::Queued; 2]);
    assert_eq!(fixture.claim(10, 5).await.len(), 2);
}

pub async fn a_full_database_accepts_new_lanes_again_when_others_are_empty(fixture: &Fixture) {
    let fixture = &fixture.reopen(few_lanes(3)).await;
    let ids = fixture.submit_all(["a", "b"].map(|kind| fixture.job(kind, 0)).to_vec()).await;
    let batch = ["c", "d"].map(|kind| fixture.job(kind, 1)).to_vec();
    match fixture.try_submit(batch.clone(), 1).await {
        Err(StoreError::Invalid(errors)) => {
            assert_eq!(errors[0].path, "type");
            assert!(errors[0].message.contains("has 3 combinations"), "{}", errors[0].message);
            assert!(errors[0].message.contains("put ids into the payload"), "{}", errors[0].message);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(used_lanes(fixture).await, 2, "a rejected batch creates no lane");
    fixture.store.job_delete(ids[0], None, fixture.at(2)).await.unwrap();
    assert_eq!(reclaim(fixture, 1).await, 1);
    fixture.try_submit(batch, 3).await.unwrap();
    assert_eq!(used_lanes(fixture).await, 3);
}

// ---- logs, steps, reports

fn small_limits() -> StoreOptions {
    let job_limits = StoredJobLimits { log_entries: 20, log_bytes: 10_000, steps: 2, step_bytes: 100 };
    StoreOptions { job_limits, ..StoreOptions::default() }
}

async fn whole_log(fixture: &Fixture, id: faena_domain::JobId, limit: usize) -> Vec<LogEntry> {
    let (mut log, mut after) = (Vec::new(), None);
    loop {
        let page = fixture.store.job_log(id, after, limit).await.unwrap().unwrap();
        assert!(page.entries.len() <= limit);
        log.extend(page.entries);
        after = page.next;
        if after.is_none() {
            return log;
        }
    }
}

fn texts(log: &[LogEntry], event: LogEvent) -> Vec<&str> {
    log.iter().filter(|entry| entry.event == event).map(|entry| entry.details.as_str()).collect()
}

pub async fn a_long_log_keeps_its_first_and_its_newest_entries(fixture: &Fixture) {
    let fixture = &fixture.reopen(small_limits()).await;
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    for n in 0..50 {
        assert!(fixture.report_update(&job, message(&format!("line {n}")), 10 + n).await);
    }
    let log = whole_log(fixture, job.id, 7).await;
    let lines = texts(&log, LogEvent::Message);
    assert_eq!((lines[..2].to_vec(), lines.last().copied()), (vec!["line 0", "line 1"], Some("line 49")));
    assert!(lines.len() <= 20);
    let dropped = texts(&log, LogEvent::Dropped);
    let expected = format!("{} entries were dropped here", 50 - lines.len());
    assert!(dropped.len() == 1 && dropped[0].starts_with(&expected), "{dropped:?}, expected {expected}");
    let marker = log.iter().position(|entry| entry.event == LogEvent::Dropped).unwrap();
    assert_eq!(log[marker - 1].details, "line 1");
    // By size: two entries fit, and the newest always stays.
    for n in 0..3 {
        assert!(fixture.report_update(&job, message(&n.to_string().repeat(4_000)), 100 + n).await);
    }
    let bytes = fixture.database.number("SELECT sum(bytes) FROM job_log").await;
    assert!(bytes <= 10_000, "{bytes}");
    assert!(whole_log(fixture, job.id, 100).await.iter().any(|entry| entry.details.starts_with("222")));
}

pub async fn the_view_of_a_job_has_its_newest_log_entries_and_pages_have_all(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    for n in 0..300 {
        assert!(fixture.report_update(&job, message(&n.to_string()), 10).await);
    }
    let view = fixture.get(job.id).await;
    assert_eq!(view.execution_log.len(), 200);
    assert_eq!(view.execution_log.last().map(|entry| entry.details.as_str()), Some("299"));
    let log = whole_log(fixture, job.id, 64).await;
    let expected: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    assert_eq!(texts(&log, LogEvent::Message), expected);
    assert_eq!(view.execution_log_omitted as usize, log.len() - 200);
    assert!(fixture.store.job_log(faena_domain::JobId::new(), None, 10).await.unwrap().is_none());
}

pub async fn steps_beyond_their_limit_are_rejected(fixture: &Fixture) {
    let fixture = &fixture.reopen(small_limits()).await;
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let rejection = async |kind, ms| match fixture.try_update(&job, kind, ms).await {
        UpdateResult::Rejected(reason) => reason,
        other => panic!("{other:?}"),
    };
    assert!(fixture.report_update(&job, step("one", "1"), 1).await);
    let large = format!("\"{}\"", "x".repeat(100));
    assert!(rejection(step("large", &large), 2).await.contains("at most 100 are kept"));
    assert!(fixture.report_update(&job, step("two", "2"), 3).await);
    assert!(rejection(step("three", "3"), 4).await.contains("the job has 2 steps"));
    assert!(fixture.report_update(&job, step("two", "2"), 5).await, "a repeated step does not count again");
    let names: Vec<String> = fixture.get(job.id).await.steps.into_iter().map(|step| step.name).collect();
    assert_eq!(names, ["one", "two"]);
    fixture.complete(&job, 6).await;
}

pub async fn rejected_reports_are_counted_in_one_entry(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let stale = |n: i64| RunUpdate::stale(id, n, format!("report {n}"), fixture.at(n));
    for n in 1..=500 {
        let results = fixture.store.run_update(vec![stale(n)], fixture.at(n)).await.unwrap();
        assert_eq!(results, [UpdateResult::Accepted]);
    }
    let view = fixture.get(id).await;
    let entries = texts(&view.execution_log, LogEvent::StaleReport);
    assert_eq!(entries, ["500 reports were rejected, the last one: report 500"]);
    assert_eq!(fixture.database.number("SELECT count(*) FROM job_log").await, 0);
    fixture.store.job_delete(id, None, fixture.at(1_000)).await.unwrap();
    assert_eq!(fixture.database.number("SELECT count(*) FROM stale_report").await, 0);
}

pub async fn a_job_that_is_released_again_and_again_keeps_its_newest_attempts(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    for n in 1..=105 {
        let job = fixture.claim_one(n).await;
        let end = fixture.run_end(&job, RunOutcome::Released, n);
        assert!(fixture.report_end(RunEnd { closes_claim: true, ..end }).await);
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM attempt").await, 100);
    assert_eq!(fixture.state(id).await, JobState::Queued);
}

// ---- large graphs

/// Runs the promoter until nothing is left, and returns the number of its rounds.
async fn promote_all(fixture: &Fixture, ms: i64) -> usize {
    let mut rounds = 1;
    while fixture.promote(ms).await.more {
        rounds += 1;
        assert!(rounds < 100, "each round moves some dependents");
    }
    rounds
}

const CANCELLED: &str = "SELECT count(*) FROM ended";
const UNRELEASED: &str = "SELECT count(*) FROM unreleased";

pub async fn a_long_chain_is_cancelled_in_slices_that_survive_a_restart(fixture: &Fixture) {
    let mut jobs = vec![fixture.job("a", 0)];
    for _ in 1..2_500 {
        let parent = jobs.last().unwrap().id;
        jobs.push(fixture.job("a", 0).after(&[parent]));
    }
    let ids = fixture.submit_all(jobs).await;
    fixture.cancel(ids[0], 1).await;
    let first = fixture.database.number(CANCELLED).await;
    assert!((2..2_000).contains(&first), "one transaction cancelled {first} jobs");
    assert_eq!(fixture.database.number(UNRELEASED).await, 1);

    let next = &fixture.reopen(StoreOptions::default()).await;
    let other = next.submit(next.job("b", 2)).await;
    assert!(next.promote(3).await.more);
    let second = next.database.number(CANCELLED).await;
    assert!(first < second && second < 2_500, "{second} jobs after the second slice");
    // Another write commits between two slices.
    next.cancel(other, 3).await;
    assert_eq!(next.database.number(CANCELLED).await, second + 1);
    assert!(promote_all(next, 4).await >= 1);
    assert_eq!(next.database.number(CANCELLED).await, 2_501);
    assert_eq!(next.database.number(UNRELEASED).await, 0);
    assert_eq!(next.database.number("SELECT count(*) FROM dependency").await, 0);
}

pub async fn many_dependents_of_one_job_are_released_in_slices(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let children = (0..2_500).map(|_| fixture.job("child", 1).after(&[parent.id])).collect();
    fixture.submit_all(children).await;
    fixture.complete(&parent, 2).await;
    let released = fixture.database.number("SELECT count(*) FROM ready").await;
    assert!((1..2_000).contains(&released), "one transaction released {released} jobs");
    assert!(promote_all(fixture, 3).await >= 2);
    assert_eq!(fixture.database.number("SELECT count(*) FROM ready").await, 2_500);
    assert_eq!(fixture.database.number(UNRELEASED).await, 0);
}

pub async fn dependents_of_a_parent_that_is_retried_between_two_slices_wait_for_it(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0)).await;
    let children = (0..1_500).map(|_| fixture.job("child", 1).after(&[parent])).collect();
    fixture.submit_all(children).await;
    fixture.cancel(parent, 2).await;
    let cancelled = fixture.database.number(CANCELLED).await - 1;
    fixture.retry_manually(parent, 3).await;
    promote_all(fixture, 4).await;
    assert_eq!(fixture.database.number(CANCELLED).await, cancelled, "the others wait for the parent again");
    assert_eq!(
        fixture.database.number("SELECT count(*) FROM waiting WHERE blocked = (1 = 1)").await,
        1_500 - cancelled
    );
}

pub async fn the_log_limit_applies_to_each_job_separately(fixture: &Fixture) {
    let fixture = &fixture.reopen(small_limits()).await;
    fixture.submit_all(vec![fixture.job("a", 0), fixture.job("a", 0)]).await;
    let jobs = fixture.claim(2, 1).await;
    for n in 0..18 {
        for job in &jobs {
            let kind = RunUpdateKind::Message { event: LogEvent::Message, text: n.to_string() };
            assert!(fixture.report_update(job, kind, 2).await);
        }
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM job_log WHERE dropped > 0").await, 0);
    assert_eq!(fixture.database.number("SELECT count(*) FROM job_log").await, 36);
}
