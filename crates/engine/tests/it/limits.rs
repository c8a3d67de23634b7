//! Work under limits: never more at once than allowed, and nobody waits for a poll when there is room again.

use std::time::{Duration, Instant};

use faena_domain::{JobState, JobView, Limit, NewJob, Rate, Scope, Timestamp};
use faena_engine::EngineConfig;

use crate::world::{World, job, open_postgres, open_sqlite};

/// Far below the poll of SQLite, far above what the work takes.
const SOON: Duration = Duration::from_secs(20);

fn most(concurrency: u32) -> Limit {
    Limit { concurrency: Some(concurrency), rate: None }
}

fn of_key(n: usize, payload: &str) -> NewJob {
    let mut job = job("sleep", payload);
    job.options.concurrency_key = Some(format!("tenant-{n}"));
    job
}

async fn limited(world: &World, scope: Scope, limit: Limit) {
    world.store.limit_set(scope, limit, "test", Timestamp::now()).await.unwrap();
}

async fn all_done(world: &World, jobs: Vec<NewJob>) -> Vec<JobView> {
    let began = Instant::now();
    let mut done = Vec::new();
    for stored in world.store.job_submit(jobs, Timestamp::now()).await.unwrap() {
        done.push(world.job_is(stored.id, JobState::Completed).await);
    }
    assert!(began.elapsed() < SOON, "somebody waited for a poll: {:?}", began.elapsed());
    done
}

/// How many of these ran at once at the most, from their own records.
fn at_once<'a>(jobs: impl Iterator<Item = &'a JobView>) -> i32 {
    let mut changes: Vec<(Timestamp, i32)> =
        jobs.flat_map(|job| [(job.started_at.unwrap(), 1), (job.completed_at.unwrap(), -1)]).collect();
    // Who ends in the same millisecond as another begins makes room for it.
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

async fn two_at_a_time(world: World) {
    limited(&world, Scope::System, most(2)).await;
    let done = all_done(&world, (0..60).map(|_| job("sleep", r#"{"ms": 4}"#)).collect()).await;
    assert_eq!(at_once(done.iter()), 2);
    assert!(done.iter().map(|job| job.started_at.unwrap()).is_sorted(), "first come, first served");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_a_time_run_two_at_a_time_on_sqlite() {
    two_at_a_time(World::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_a_time_run_two_at_a_time_on_postgres() {
    two_at_a_time(World::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn one_of_each_key(world: World) {
    limited(&world, Scope::Key("tenant-*".into()), most(1)).await;
    let done = all_done(&world, (0..80).map(|n| of_key(n % 4, r#"{"ms": 3}"#)).collect()).await;
    for n in 0..4 {
        let key = Some(format!("tenant-{n}"));
        assert_eq!(at_once(done.iter().filter(|job| job.concurrency_key == key)), 1);
    }
    assert!(at_once(done.iter()) > 1, "different keys run beside each other");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_key_run_one_after_the_other_on_sqlite() {
    one_of_each_key(World::over(open_sqlite().await, EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_key_run_one_after_the_other_on_postgres() {
    one_of_each_key(World::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn a_backlog(world: World) {
    limited(&world, Scope::System, most(20)).await;
    limited(&world, Scope::Key("*".into()), most(3)).await;
    let jobs = (0..500).map(|n| if n % 2 == 0 { job("noop", "{}") } else { of_key(n % 7, r#"{"ms": 0}"#) });
    all_done(&world, jobs.collect()).await;
    assert_eq!(world.engine.load().0, 0, "nothing is left in its hands");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_under_limits_flows_on_sqlite() {
    a_backlog(World::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_under_limits_flows_on_postgres() {
    a_backlog(World::over(open_postgres().await, EngineConfig::default()).await).await;
}

async fn by_rate(world: World) {
    let rate = Rate { count: 5, period_ms: 250 };
    for scope in [Scope::Type("noop".into()), Scope::Key("tenant-1".into())] {
        limited(&world, scope, Limit { concurrency: None, rate: Some(rate) }).await;
    }
    let jobs = (0..30).map(|n| if n % 2 == 0 { job("noop", "{}") } else { of_key(1, r#"{"ms": 0}"#) });
    let done = all_done(&world, jobs.collect()).await;
    for kind in ["noop", "sleep"] {
        let mut starts: Vec<Timestamp> =
            done.iter().filter(|job| job.kind == kind).map(|job| job.started_at.unwrap()).collect();
        starts.sort();
        // Five at once, the other ten one per 50 ms.
        assert!(starts[14].ms_since(starts[0]) >= 450, "{kind}: {starts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_start_at_the_rate_that_was_set_on_sqlite() {
    by_rate(World::with(EngineConfig::default()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_start_at_the_rate_that_was_set_on_postgres() {
    by_rate(World::over(open_postgres().await, EngineConfig::default()).await).await;
}

/// Jobs of one key that wait, and what lets them go.
async fn goes_on_when(limit: Limit, scope: Scope) {
    let world = World::over(open_sqlite().await, EngineConfig::default()).await;
    limited(&world, Scope::Key("*".into()), most(1)).await;
    let jobs = (0..3).map(|_| of_key(7, r#"{"ms": 60000}"#)).collect();
    let ids: Vec<_> = world.store.job_submit(jobs, Timestamp::now()).await.unwrap().iter().map(|job| job.id).collect();
    world.job_is(ids[0], JobState::Processing).await;
    assert_eq!(world.job(ids[2]).await.status, JobState::Queued);
    let began = Instant::now();
    limited(&world, scope, limit).await;
    for id in ids {
        world.job_is(id, JobState::Processing).await;
    }
    assert!(began.elapsed() < SOON, "somebody waited for a poll: {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_limit_of_keys_lets_their_jobs_go_at_once() {
    goes_on_when(most(3), Scope::Key("*".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_for_one_key_goes_before_that_of_all_at_once() {
    goes_on_when(most(3), Scope::Key("tenant-7".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_limit_for_a_key_means_no_limit() {
    goes_on_when(Limit::default(), Scope::Key("tenant-7".into())).await;
}
