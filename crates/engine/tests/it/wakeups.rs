//! A change wakes the loops at once. On SQLite the next poll would come after 30 seconds.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use faena_domain::{EventKind, JobState, NewJob, Timestamp};

use crate::fixture::Fixture;

const WELL_BELOW_THE_POLL: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_wakes_the_dispatcher_and_every_job_is_announced() {
    let fixture = Fixture::new().await;
    let mut changes = fixture.engine.bus.subscribe();
    let started = Instant::now();
    let batch = vec![NewJob::new("noop"), NewJob::new("noop"), NewJob::new("noop")];
    let submitted = fixture.engine.submit(batch, "test", Timestamp::now()).await.unwrap();
    for job in &submitted {
        fixture.wait_for_state(job.id, JobState::Completed).await;
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
    let fixture = Fixture::new().await;
    let started = Instant::now();
    let delayed = || {
        let mut job = NewJob::new("noop");
        job.options.scheduled_at = Some(Timestamp::now().plus_ms(300));
        job
    };
    let submitted = fixture.engine.submit(vec![delayed(), delayed()], "test", Timestamp::now()).await.unwrap();
    assert!(submitted.iter().all(|job| job.status == JobState::Pending));
    for job in &submitted {
        fixture.wait_for_state(job.id, JobState::Completed).await;
    }
    assert!(started.elapsed() < WELL_BELOW_THE_POLL, "{:?}", started.elapsed());
}
