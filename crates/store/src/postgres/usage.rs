//! Usage of paid services.

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{JobId, TaskId, Timestamp};
use uuid::Uuid;

use super::{
    Postgres, Shared,
    machines::{definition, from_version_number},
};
use crate::{
    Result, StoreError, TaskTokens, UsageStore,
    usage::{KEEP_DAYS, day, stored},
};

#[async_trait]
impl UsageStore for Postgres {
    async fn tokens_reserve(&self, tokens: u64, limit: u64, now: Timestamp) -> Result<bool> {
        // PostgreSQL: this is not repeated after a lost connection, because the first attempt may have been committed.
        reserve(&self.shared, stored(tokens), stored(limit), day(now)).await
    }

    async fn tokens_settle(&self, reserved: u64, used: u64, reserved_at: Timestamp) -> Result<()> {
        settle(&self.shared, stored(used) - stored(reserved), day(reserved_at)).await
    }

    async fn task_tokens_reserve(&self, job: JobId, tokens: u64) -> Result<TaskTokens> {
        // PostgreSQL: this is not repeated after a lost connection, because the first attempt may have been committed.
        let client = self.shared.begin().await?;
        let result = reserve_for_task(&self.shared, &client, job, stored(tokens)).await;
        client.end(result).await
    }

    async fn task_tokens_settle(&self, task: TaskId, reserved: u64, used: u64) -> Result<()> {
        let client = self.shared.client().await?;
        let difference = stored(used) - stored(reserved);
        let sql = "UPDATE faena.task_usage SET tokens = greatest(0, tokens + $1) WHERE task = $2";
        let settled = client.execute(sql, &[&difference, &task.0]).await;
        client.return_to_pool(settled.map_err(StoreError::from))?;
        Ok(())
    }

    async fn tokens_used(&self, now: Timestamp) -> Result<u64> {
        let client = self.shared.client().await?;
        let row = client.query_opt("SELECT tokens FROM faena.token_usage WHERE day = $1", &[&day(now)]).await;
        let row = client.return_to_pool(row.map_err(StoreError::from))?;
        Ok(row.map_or(0, |row| u64::try_from(row.get::<_, i64>(0)).unwrap_or(0)))
    }
}

async fn reserve(shared: &Shared, tokens: i64, limit: i64, day: i64) -> Result<bool> {
    let client = shared.client().await?;
    let reserved = client
        .execute(
            "WITH old AS (DELETE FROM faena.token_usage WHERE day < $4)
             INSERT INTO faena.token_usage AS u (day, tokens) SELECT $1::int8, $2::int8 WHERE $2::int8 <= $3::int8
             ON CONFLICT (day) DO UPDATE SET tokens = u.tokens + excluded.tokens
             WHERE u.tokens + excluded.tokens <= $3::int8",
            &[&day, &tokens, &limit, &(day - KEEP_DAYS)],
        )
        .await;
    Ok(client.return_to_pool(reserved.map_err(StoreError::from))? == 1)
}

async fn reserve_for_task(shared: &Shared, client: &Object, job: JobId, tokens: i64) -> Result<TaskTokens> {
    let sql =
        "SELECT t.id, t.machine, t.version FROM faena.task_job j JOIN faena.task t ON t.id = j.task WHERE j.job = $1";
    let Some(row) = client.query_opt(sql, &[&job.0]).await? else { return Ok(TaskTokens::Unlimited) };
    let (task, machine): (Uuid, String) = (row.get(0), row.get(1));
    let definition = definition(client, shared, &machine, from_version_number(row.get(2))).await?;
    let Some(limit) = definition.limits.llm_tokens.map(i64::from) else { return Ok(TaskTokens::Unlimited) };
    let reserved = client
        .execute(
            "INSERT INTO faena.task_usage AS u (task, tokens) SELECT $1::uuid, $2::int8 WHERE $2::int8 <= $3::int8
             ON CONFLICT (task) DO UPDATE SET tokens = u.tokens + excluded.tokens
             WHERE u.tokens + excluded.tokens <= $3::int8",
            &[&task, &tokens, &limit],
        )
        .await?;
    if reserved == 1 {
        return Ok(TaskTokens::Reserved(TaskId(task)));
    }
    let row = client.query_opt("SELECT tokens FROM faena.task_usage WHERE task = $1", &[&task]).await?;
    let used = row.map_or(0, |row| row.get::<_, i64>(0));
    Ok(TaskTokens::Exceeded { task: TaskId(task), limit: limit.unsigned_abs(), used: used.unsigned_abs() })
}

async fn settle(shared: &Shared, difference: i64, day: i64) -> Result<()> {
    let client = shared.client().await?;
    let settled = client
        .execute("UPDATE faena.token_usage SET tokens = greatest(0, tokens + $1) WHERE day = $2", &[&difference, &day])
        .await;
    client.return_to_pool(settled.map_err(StoreError::from))?;
    Ok(())
}
