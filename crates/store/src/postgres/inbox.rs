//! Messages from brokers, once per consumer and message.

use std::sync::atomic::Ordering;

use deadpool_postgres::Object;
use faena_domain::{NewJob, Timestamp};

use super::{
    Shared,
    end::storable,
    events,
    submit::{self, lanes_of},
};
use crate::{LaneId, Result, Submitted};

pub async fn submit(
    shared: &Shared,
    consumer: &str,
    message: &str,
    jobs: &[NewJob],
    now: Timestamp,
) -> Result<Option<Vec<Submitted>>> {
    let lanes = lanes_of(shared, jobs).await?;
    let mut submission = submit::NestedSubmission::default();
    let client = shared.begin().await?;
    let row = (&*storable(consumer), &*storable(message));
    let result = submit_in(shared, &client, row, jobs, lanes, &mut submission, now).await;
    let submitted = client.end(result).await?;
    submission.signal(shared);
    Ok(submitted)
}

async fn submit_in(
    shared: &Shared,
    client: &Object,
    (consumer, message): (&str, &str),
    jobs: &[NewJob],
    lanes: Vec<LaneId>,
    submission: &mut submit::NestedSubmission,
    now: Timestamp,
) -> Result<Option<Vec<Submitted>>> {
    // PostgreSQL: waits for another transaction with the same message, which counts only if it commits.
    let new = client
        .execute(
            "INSERT INTO faena.inbox (consumer, id, at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
            &[&consumer, &message, &now.as_ms()],
        )
        .await?;
    if new == 0 {
        return Ok(None);
    }
    if shared.events_on.load(Ordering::Relaxed) {
        events::set_actor(client, consumer).await?;
    }
    submission.jobs(client, shared.own_shard(), jobs.to_vec(), lanes, now).await.map(Some)
}
