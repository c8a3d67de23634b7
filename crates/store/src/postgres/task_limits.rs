//! Limits the number of running tasks of each machine.

use std::collections::BTreeSet;

use deadpool_postgres::Object;
use faena_domain::{TaskId, Timestamp};
use faena_machine::{Definition, Input};
use uuid::Uuid;

use super::{
    Shared,
    machines::version_number,
    rules,
    tasks::{AfterCommit, apply_to},
};
use crate::{
    COUNT_LIMIT, Result, TaskInput,
    sql::sql,
    task_limits::{MACHINE, TaskCapacity, TaskPosition},
};

/// Returns how many tasks of the given machines may start.
///
/// PostgreSQL: the rows of the limits stay locked until the commit, so that no other transaction starts tasks meanwhile.
pub async fn locked_capacity(client: &Object, machines: &BTreeSet<&str>) -> Result<TaskCapacity> {
    let mut capacity = TaskCapacity::default();
    for machine in machines {
        let Some(max) = locked_limit(client, machine).await? else { continue };
        let statement = client
            .prepare_cached("SELECT EXISTS (SELECT FROM faena.task WHERE status = 'queued' AND machine = $1)")
            .await?;
        let has_queue: bool = client.query_one(&statement, &[machine]).await?.get(0);
        capacity.set(machine, max - running(client, machine, max).await?, has_queue);
    }
    Ok(capacity)
}

async fn locked_limit(client: &Object, machine: &str) -> Result<Option<i64>> {
    let statement = client
        .prepare_cached(sql!(
            "SELECT concurrency FROM faena.limit_rule WHERE scope = {SCOPE_MACHINE} AND name = $1 FOR UPDATE"
        ))
        .await?;
    Ok(client.query_opt(&statement, &[&machine]).await?.and_then(|row| row.get(0)))
}

/// Counts the running tasks of a machine up to `max`. The join reads no tasks that have ended.
async fn running(client: &Object, machine: &str, max: i64) -> Result<i64> {
    let statement = client
        .prepare_cached(
            "SELECT count(*) FROM (SELECT FROM faena.machine m JOIN faena.task t
                 ON t.machine = m.name AND t.version = m.version AND t.status IN ('running', 'paused')
             WHERE m.name = $1 LIMIT $2) AS counted",
        )
        .await?;
    Ok(client.query_one(&statement, &[&machine, &max]).await?.get(0))
}

/// Starts up to `limit` queued tasks of each machine that has capacity. Returns how many.
///
/// Each machine is a transaction of its own, so that no node waits for two limits.
pub async fn start_queued(shared: &Shared, limit: i64, now: Timestamp) -> Result<usize> {
    let client = shared.client().await?;
    // Reads one queued task of each machine, however many there are.
    let sql = "SELECT m.name FROM (SELECT DISTINCT name FROM faena.machine) AS m
               WHERE EXISTS (SELECT FROM faena.task t WHERE t.status = 'queued' AND t.machine = m.name) ORDER BY m.name";
    let rows = client.query(sql, &[]).await.map_err(Into::into);
    let machines: Vec<String> = client.return_to_pool(rows)?.iter().map(|row| row.get(0)).collect();
    let mut started = 0;
    for machine in machines {
        let client = shared.begin().await?;
        let mut after_commit = AfterCommit::default();
        let result = start_in(shared, &client, &machine, limit, &mut after_commit, now).await;
        started += client.end(result).await?;
        after_commit.send(shared);
    }
    Ok(started)
}

async fn start_in(
    shared: &Shared,
    client: &Object,
    machine: &str,
    limit: i64,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<usize> {
    let capacity = match locked_limit(client, machine).await? {
        Some(max) => max - running(client, machine, max).await?,
        None => i64::MAX,
    };
    let capacity = capacity.min(limit);
    if capacity <= 0 {
        return Ok(0);
    }
    let statement = client
        .prepare_cached(
            "SELECT id FROM faena.task WHERE status = 'queued' AND machine = $1 ORDER BY id LIMIT $2 FOR UPDATE",
        )
        .await?;
    let rows = client.query(&statement, &[&machine, &capacity]).await?;
    let ids = rows.iter().map(|row| TaskId(row.get::<_, Uuid>(0)));
    let inputs: Vec<TaskInput> = ids.map(|task| TaskInput { task, input: Input::Start }).collect();
    let started = inputs.len();
    if started > 0 {
        apply_to(shared, client, &[(inputs, now)], None, after_commit).await?;
    }
    Ok(started)
}

pub async fn position(shared: &Shared, machine: &str, id: TaskId) -> Result<TaskPosition> {
    let client = shared.client().await?;
    let position = position_in(&client, machine, id).await;
    client.return_to_pool(position)
}

async fn position_in(client: &Object, machine: &str, id: TaskId) -> Result<TaskPosition> {
    let sql = sql!("SELECT concurrency FROM faena.limit_rule WHERE scope = {SCOPE_MACHINE} AND name = $1");
    let limit: Option<i64> = client.query_opt(sql, &[&machine]).await?.and_then(|row| row.get(0));
    let max = i64::try_from(COUNT_LIMIT).unwrap_or(i64::MAX);
    let sql = "SELECT count(*) FROM (
         SELECT FROM faena.task WHERE status = 'queued' AND machine = $1 AND id < $2 LIMIT $3) AS counted";
    let ahead: i64 = client.query_one(sql, &[&machine, &id.0, &max]).await?.get(0);
    let running = running(client, machine, limit.unwrap_or(max)).await?;
    Ok(TaskPosition {
        running: running.unsigned_abs(),
        limit: limit.map(i64::unsigned_abs),
        ahead: ahead.unsigned_abs(),
    })
}

/// Applies the limit in the newest version of a machine, unless an operator set another one. Returns whether it changed.
pub async fn apply_definition(client: &Object, definition: &Definition, by: &str, now: Timestamp) -> Result<bool> {
    let name = &definition.machine;
    // Two versions that are registered at the same time must not both be the newest.
    rules::lock(client).await?;
    let sql = "SELECT max(version) FROM faena.machine WHERE name = $1";
    let newest: i32 = client.query_one(sql, &[name]).await?.get(0);
    if newest != version_number(definition.version) {
        return Ok(false);
    }
    let changed = match definition.limits.running {
        Some(running) => {
            let sql = sql!(
                "INSERT INTO faena.limit_rule AS l (scope, name, concurrency, origin, changed_at, changed_by)
                 VALUES ({SCOPE_MACHINE}, $1, $2, $3, $4, $5)
                 ON CONFLICT (scope, name) DO UPDATE SET concurrency = $2, changed_at = $4, changed_by = $5
                 WHERE l.origin = $3"
            );
            client.execute(sql, &[name, &i64::from(running), &MACHINE, &now.as_ms(), &by]).await?
        }
        None => {
            let sql = sql!("DELETE FROM faena.limit_rule WHERE scope = {SCOPE_MACHINE} AND name = $1 AND origin = $2");
            client.execute(sql, &[name, &MACHINE]).await?
        }
    };
    Ok(changed > 0)
}
