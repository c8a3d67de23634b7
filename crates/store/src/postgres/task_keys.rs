//! Creates a task once per idempotency key.

use deadpool_postgres::Object;
use faena_domain::{TaskId, Timestamp};

use super::{Shared, end::storable, task_creates::create_in, tasks::AfterCommit};
use crate::{KeyedTask, NewTask, Result, TaskKey};

pub async fn create_once(shared: &Shared, key: &TaskKey, task: &NewTask, now: Timestamp) -> Result<Option<KeyedTask>> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = create_once_in(shared, &client, key, task, &mut after_commit, now).await;
    let existing = client.end(result).await?;
    after_commit.send(shared);
    Ok(existing)
}

async fn create_once_in(
    shared: &Shared,
    client: &Object,
    key: &TaskKey,
    task: &NewTask,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<Option<KeyedTask>> {
    let (name, fingerprint) = (storable(&key.key), &key.fingerprint[..]);
    // If another transaction is using the same key, PostgreSQL waits for its end. If that transaction rolls back, the
    // key is free.
    let sql = "INSERT INTO faena.task_key (key, task, fingerprint) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
    if client.execute(sql, &[&&*name, &task.id.0, &fingerprint]).await? > 0 {
        create_in(shared, client, task, after_commit, now).await?;
        return Ok(None);
    }
    let sql = "SELECT task, fingerprint = $2 FROM faena.task_key WHERE key = $1";
    let row = client.query_one(sql, &[&&*name, &fingerprint]).await?;
    Ok(Some(KeyedTask { id: TaskId(row.get(0)), is_same_request: row.get(1) }))
}
