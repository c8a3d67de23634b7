//! A change wakes the loops at once. On SQLite the next poll would come after 30 seconds.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use faena_domain::{EventKind, JobState, NewJob, Timestamp};

use crate::world::World;

const WELL_BELOW_THE_POLL: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_wakes_the_dispatcher_and_every_job_is_announced() {
    let world = World::new().await;
    let mut changes = world.engine.bus.subscribe();
    let started = Instant::now();
    let batch = vec![NewJob::new("noop"), NewJob::new("noop"), NewJob::new("noop")];
    let submitted = world.engine.submit(batch, Timestamp::now()).await.unwrap();
    for job in &submitted {
        world.job_is(job.id, JobState::Completed).await;
    }
    assert!(started.elapsed() < WELL_BELOW_THE_POLL, "{:?}", started.elapsed());
    let mut announced = HashSet::new();
    while let Ok(change) = changes.try_recv() {
        if change.kind == EventKind::of_state(JobState::Queued) {
            announced.insert(change.job_id);
        }
    }
    assert_eq!(announced, submitted.iter().map(|job| job.id).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_delayed_jobs_wakes_the_promoter() {
    let world = World::new().await;
    let started = Instant::now();
    let delayed = || {
        let mut job = NewJob::new("noop");
        job.options.scheduled_at = Some(Timestamp::now().plus_ms(300));
        job
    };
    let submitted = world.engine.submit(vec![delayed(), delayed()], Timestamp::now()).await.unwrap();
    assert!(submitted.iter().all(|job| job.status == JobState::Pending));
    for job in &submitted {
        world.job_is(job.id, JobState::Completed).await;
    }
    assert!(started.elapsed() < WELL_BELOW_THE_POLL, "{:?}", started.elapsed());
}
