//! Stopping: what runs may finish, the rest goes back without costing a try.

use std::{sync::Arc, time::Duration};

use faena_domain::{JobState, LogEvent};
use faena_engine::EngineConfig;
use faena_store::Store;
use tokio_util::sync::CancellationToken;

use crate::world::{Place, World, count, events, job, once, open_postgres, open_sqlite};

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_what_runs() {
    let world = World::new().await;
    let id = world.submit(once("sleep", r#"{"ms": 400}"#)).await;
    world.job_is(id, JobState::Processing).await;
    world.stop().await;
    let job = world.job(id).await;
    assert_eq!(job.status, JobState::Completed, "{:?}", events(&job));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_outlasts_the_grace_time_goes_back_and_costs_no_try_on_sqlite() {
    hands_back(open_sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_outlasts_the_grace_time_goes_back_and_costs_no_try_on_postgres() {
    hands_back(open_postgres().await).await;
}

async fn hands_back(place: (Arc<dyn Store>, Place)) {
    let config = EngineConfig { drain_grace: Duration::from_millis(50), concurrency: 1, ..EngineConfig::default() };
    let world = World::over(place, config).await;
    let running = world.submit(once("sleep", r#"{"ms": 600000}"#)).await;
    world.job_is(running, JobState::Processing).await;
    let waiting = world.submit(once("sleep", r#"{"ms": 1}"#)).await;
    world.stop().await;
    for id in [running, waiting] {
        let job = world.job(id).await;
        assert_eq!((job.status, job.retry_count), (JobState::Queued, 0), "{:?}", events(&job));
    }
    let job = world.job(running).await;
    assert_eq!((count(&job, LogEvent::HandedBack), count(&job, LogEvent::Started)), (1, 1), "{:?}", events(&job));
    let first = job.run;
    let world = world.restarted(EngineConfig::default()).await;
    world.job_is(waiting, JobState::Completed).await;
    let job = world.job_is(running, JobState::Processing).await;
    assert!(job.run > first && job.retry_count == 0, "{job:?}");
    let hurry = CancellationToken::new();
    hurry.cancel();
    world.engine.stop(hurry).await;
    assert_eq!(world.job(running).await.status, JobState::Queued, "whoever is in a hurry hands back at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_that_was_claimed_ahead_goes_back_whole() {
    let config = EngineConfig { concurrency: 2, drain_grace: Duration::from_millis(1), ..EngineConfig::default() };
    let world = World::with(config).await;
    // Short ones first, so that the engine learns to claim many at a time; long ones behind them.
    let mut jobs: Vec<_> = (0..2_000).map(|_| once("noop", "{}")).collect();
    jobs.extend((0..200).map(|_| once("sleep", r#"{"ms": 600000}"#)));
    let stored = world.store.job_submit(jobs, faena_domain::Timestamp::now()).await.unwrap();
    for job in &stored[..2_000] {
        world.job_is(job.id, JobState::Completed).await;
    }
    world.stop().await;
    for job in &stored[2_000..] {
        let job = world.job(job.id).await;
        assert_eq!((job.status, job.retry_count), (JobState::Queued, 0), "{:?}", events(&job));
    }
    assert_eq!(world.engine.load().0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_engine_takes_no_new_jobs_and_its_loops_are_seen_as_stopped() {
    let world = World::new().await;
    world.stop().await;
    let id = world.submit(job("noop", "{}")).await;
    assert!(world.engine.loops.health.all().values().all(|beat| beat.stopped));
    assert_eq!(world.job(id).await.status, JobState::Queued);
}
