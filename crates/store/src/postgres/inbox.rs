//! Processes messages from brokers, each once per consumer.

use std::sync::atomic::Ordering;

use deadpool_postgres::Object;
use faena_domain::{NewJob, Timestamp};

use super::{Shared, end::storable, events, lanes::lanes_of, submit, task_creates::create_in, tasks::AfterCommit};
use crate::{LaneId, NewTask, Result, Submitted};

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
    if !record_message(client, consumer, message, now).await? {
        return Ok(None);
    }
    if shared.events_on.load(Ordering::Relaxed) {
        events::set_actor(client, consumer).await?;
    }
    submission.store(client, shared.own_shard(), jobs.to_vec(), lanes, now).await.map(Some)
}

pub async fn create_task(
    shared: &Shared,
    consumer: &str,
    message: &str,
    task: &NewTask,
    now: Timestamp,
) -> Result<bool> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = async {
        let is_new = record_message(&client, &storable(consumer), &storable(message), now).await?;
        if is_new {
            create_in(shared, &client, task, &mut after_commit, now).await?;
        }
        Ok(is_new)
    };
    let result = result.await;
    let is_new = client.end(result).await?;
    after_commit.send(shared);
    Ok(is_new)
}

/// Records a message. Returns whether it is the first with its id.
///
/// If another transaction is recording the same message, PostgreSQL waits for its end. If that transaction rolls back,
/// this message is the first.
async fn record_message(client: &Object, consumer: &str, message: &str, now: Timestamp) -> Result<bool> {
    let sql = "INSERT INTO faena.inbox (consumer, id, at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
    Ok(client.execute(sql, &[&consumer, &message, &now.as_ms()]).await? > 0)
}
