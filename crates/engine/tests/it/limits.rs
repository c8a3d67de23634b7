//! Limits: never more concurrent jobs than allowed, and no job waits for a poll when a slot is free again.

use std::time::{Duration, Instant};

use faena_domain::{JobState, JobView, Limit, LogEvent, NewJob, Rate, Scope, Timestamp};
use faena_engine::EngineConfig;

use crate::fixture::{Fixture, job, open_postgres, open_sqlite};

/// Far below the poll period of SQLite, far above the duration of the work.
const SOON: Duration = Duration::from_secs(20);

fn most(concurrency: u32) -> Limit {
    Limit { concurrency: Some(concurrency), rate: None }
}

fn of_key(n: usize, payload: &str) -> NewJob {
    let mut job = job("sleep", payload);
    job.options.concurrency_key = Some(format!("tenant-{n}"));
    job
}

async fn set_limit(fixture: &Fixture, scope: Scope, limit: Limit) {
    fixture.store.limit_set(scope, limit, "test", Timestamp::now()).await.unwrap();
}

async fn all_done(fixture: &Fixture, jobs: Vec<NewJob>) -> Vec<JobView> {
    let began = Instant::now();
    let mut done = Vec::new();
    for stored in fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap() {
        done.push(fixture.wait_for_state(stored.id, JobState::Completed).await);
    }
    assert!(began.elapsed() < SOON, "a job waited for a poll: {:?}", began.elapsed());
    done
}

/// Returns how many of these jobs ran concurrently at most, according to their records.
fn max_concurrent<'a>(jobs: impl Iterator<Item = &'a JobView>) -> i32 {
    let mut changes: Vec<(Timestamp, i32)> =
        jobs.flat_map(|job| [(job.started_at.unwrap(), 1), (job.completed_at.unwrap(), -1)]).collect();
    // A job that ends in the millisecond in which another starts does not overlap with it.
    changes.sort();
    changes
        .iter()
        .scan(0, |running, (_, change)| {
            *running += change;
            Some(*running)
        })
        .max()
        .unwrap()
}

async fn limit_of_two(fixture: Fixture) {
    set_limit(&fixture, Scope::System, most(2)).await;
    let done = all_done(&fixture, (0..60).map(|_| job("sleep", r#"{"ms": 4}"#)).collect()).await;
    assert_eq!(max_concurrent(done.iter()), 2);
    assert!(done.iter().map(|job| job.started_at.unwrap()).is_sorted(), "first come, first served");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_two_runs_two_jobs_concurrently_on_sqlite() {
    limit_of_two(Fixture::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_two_runs_two_jobs_concurrently_on_postgres() {
    limit_of_two(Fixture::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn one_of_each_key(fixture: Fixture) {
    set_limit(&fixture, Scope::Key("tenant-*".into()), most(1)).await;
    let done = all_done(&fixture, (0..80).map(|n| of_key(n % 4, r#"{"ms": 3}"#)).collect()).await;
    for n in 0..4 {
        let key = Some(format!("tenant-{n}"));
        assert_eq!(max_concurrent(done.iter().filter(|job| job.concurrency_key == key)), 1);
    }
    assert!(max_concurrent(done.iter()) > 1, "jobs of different keys run concurrently");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_key_run_one_after_another_on_sqlite() {
    one_of_each_key(Fixture::over(open_sqlite().await, EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_key_run_one_after_another_on_postgres() {
    one_of_each_key(Fixture::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn a_backlog(fixture: Fixture) {
    set_limit(&fixture, Scope::System, most(20)).await;
    set_limit(&fixture, Scope::Key("*".into()), most(3)).await;
    let jobs = (0..500).map(|n| if n % 2 == 0 { job("noop", "{}") } else { of_key(n % 7, r#"{"ms": 0}"#) });
    all_done(&fixture, jobs.collect()).await;
    assert_eq!(fixture.engine.load().0, 0, "no job is in flight");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_under_limits_is_processed_on_sqlite() {
    a_backlog(Fixture::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_under_limits_is_processed_on_postgres() {
    a_backlog(Fixture::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn by_rate(fixture: Fixture) {
    let rate = Rate { count: 5, period_ms: 250 };
    for scope in [Scope::Type("noop".into()), Scope::Key("tenant-1".into())] {
        set_limit(&fixture, scope, Limit { concurrency: None, rate: Some(rate) }).await;
    }
    let jobs = (0..30).map(|n| if n % 2 == 0 { job("noop", "{}") } else { of_key(1, r#"{"ms": 0}"#) });
    let done = all_done(&fixture, jobs.collect()).await;
    for kind in ["noop", "sleep"] {
        let log = |job: &JobView| job.execution_log.clone();
        let of_kind = done.iter().filter(|job| job.kind == kind).flat_map(log);
        let mut claims: Vec<Timestamp> =
            of_kind.filter(|entry| entry.event == LogEvent::Assigned).map(|entry| entry.timestamp).collect();
        claims.sort();
        // Five claims immediately, the other ten one per 50 ms. The rate counts claims; jobs start some time later.
        assert!(claims.len() == 15 && claims[14].ms_since(claims[0]) >= 450, "{kind}: {claims:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_start_at_the_configured_rate_on_sqlite() {
    by_rate(Fixture::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_start_at_the_configured_rate_on_postgres() {
    by_rate(Fixture::over(open_postgres().await, EngineConfig::default()).await).await;
}

/// Blocks jobs of one key, changes the limit, and checks that they continue.
async fn continues_after(limit: Limit, scope: Scope) {
    let fixture = Fixture::over(open_sqlite().await, EngineConfig::default()).await;
    set_limit(&fixture, Scope::Key("*".into()), most(1)).await;
    let jobs = (0..3).map(|_| of_key(7, r#"{"ms": 60000}"#)).collect();
    let ids: Vec<_> =
        fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap().iter().map(|job| job.id).collect();
    fixture.wait_for_state(ids[0], JobState::Processing).await;
    assert_eq!(fixture.job(ids[2]).await.status, JobState::Queued);
    let began = Instant::now();
    set_limit(&fixture, scope, limit).await;
    for id in ids {
        fixture.wait_for_state(id, JobState::Processing).await;
    }
    assert!(began.elapsed() < SOON, "a job waited for a poll: {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_limit_of_keys_starts_their_jobs_immediately() {
    continues_after(most(3), Scope::Key("*".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_one_key_takes_precedence_immediately() {
    continues_after(most(3), Scope::Key("tenant-7".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_limit_is_not_limited() {
    continues_after(Limit::default(), Scope::Key("tenant-7".into())).await;
}
