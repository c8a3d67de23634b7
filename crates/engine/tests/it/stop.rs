//! Shutdown: running jobs may finish within the grace period, unfinished jobs are released without using an attempt.

use std::{sync::Arc, time::Duration};

use faena_domain::{JobState, LogEvent};
use faena_engine::EngineConfig;
use faena_store::Store;
use tokio_util::sync::CancellationToken;

use crate::fixture::{Fixture, TestDatabase, count, events, job, once, open_postgres, open_sqlite};

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_running_jobs() {
    let fixture = Fixture::new().await;
    let id = fixture.submit(once("sleep", r#"{"ms": 400}"#)).await;
    fixture.wait_for_state(id, JobState::Processing).await;
    fixture.stop().await;
    let job = fixture.job(id).await;
    assert_eq!(job.status, JobState::Completed, "{:?}", events(&job));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_outlasts_the_grace_period_is_released_without_using_an_attempt_on_sqlite() {
    releases_jobs(open_sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_outlasts_the_grace_period_is_released_without_using_an_attempt_on_postgres() {
    releases_jobs(open_postgres().await).await;
}

async fn releases_jobs(database: (Arc<dyn Store>, TestDatabase)) {
    let config = EngineConfig { drain_grace: Duration::from_millis(50), concurrency: 1, ..EngineConfig::default() };
    let fixture = Fixture::over(database, config).await;
    let running = fixture.submit(once("sleep", r#"{"ms": 600000}"#)).await;
    fixture.wait_for_state(running, JobState::Processing).await;
    let waiting = fixture.submit(once("sleep", r#"{"ms": 1}"#)).await;
    fixture.stop().await;
    for id in [running, waiting] {
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.retry_count), (JobState::Queued, 0), "{:?}", events(&job));
    }
    let job = fixture.job(running).await;
    assert_eq!((count(&job, LogEvent::Released), count(&job, LogEvent::Started)), (1, 1), "{:?}", events(&job));
    let first = job.run;
    let fixture = fixture.restarted(EngineConfig::default()).await;
    fixture.wait_for_state(waiting, JobState::Completed).await;
    let job = fixture.wait_for_state(running, JobState::Processing).await;
    assert!(job.run > first && job.retry_count == 0, "{job:?}");
    let force = CancellationToken::new();
    force.cancel();
    fixture.engine.stop(force).await;
    assert_eq!(fixture.job(running).await.status, JobState::Queued, "a forced stop releases jobs immediately");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_that_was_claimed_ahead_is_released_completely() {
    let config = EngineConfig { concurrency: 2, drain_grace: Duration::from_millis(1), ..EngineConfig::default() };
    let fixture = Fixture::with(config).await;
    // Short jobs first, so that the engine claims many at a time; long jobs behind them.
    let mut jobs: Vec<_> = (0..2_000).map(|_| once("noop", "{}")).collect();
    jobs.extend((0..200).map(|_| once("sleep", r#"{"ms": 600000}"#)));
    let stored = fixture.store.job_submit(jobs, None, faena_domain::Timestamp::now()).await.unwrap();
    for job in &stored[..2_000] {
        fixture.wait_for_state(job.id, JobState::Completed).await;
    }
    fixture.stop().await;
    for job in &stored[2_000..] {
        let job = fixture.job(job.id).await;
        assert_eq!((job.status, job.retry_count), (JobState::Queued, 0), "{:?}", events(&job));
    }
    assert_eq!(fixture.engine.load().0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_engine_starts_no_jobs_and_its_loops_are_reported_as_stopped() {
    let fixture = Fixture::new().await;
    fixture.stop().await;
    let id = fixture.submit(job("noop", "{}")).await;
    assert!(fixture.engine.loops.health.all().values().all(|status| status.stopped));
    assert_eq!(fixture.job(id).await.status, JobState::Queued);
}
