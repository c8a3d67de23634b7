//! Usage of paid services.

use async_trait::async_trait;
use faena_domain::{JobId, TaskId, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{Sqlite, machines::definition, writer::Tx};
use crate::{
    Result, TaskTokens, UsageStore,
    usage::{KEEP_DAYS, day, stored},
};

#[async_trait]
impl UsageStore for Sqlite {
    async fn tokens_reserve(&self, tokens: u64, limit: u64, now: Timestamp) -> Result<bool> {
        self.writer.call(move |tx| reserve(tx, stored(tokens), stored(limit), day(now))).await
    }

    async fn tokens_settle(&self, reserved: u64, used: u64, reserved_at: Timestamp) -> Result<()> {
        self.writer.call(move |tx| settle(tx, stored(used) - stored(reserved), day(reserved_at))).await
    }

    async fn task_tokens_reserve(&self, job: JobId, tokens: u64) -> Result<TaskTokens> {
        self.writer.call(move |tx| reserve_for_task(tx, job, stored(tokens))).await
    }

    async fn task_tokens_settle(&self, task: TaskId, reserved: u64, used: u64) -> Result<()> {
        let difference = stored(used) - stored(reserved);
        self.writer
            .call(move |tx| {
                let sql = "UPDATE task_usage SET tokens = max(0, tokens + ?1) WHERE task = ?2";
                tx.connection.prepare_cached(sql)?.execute((difference, task.0))?;
                Ok(())
            })
            .await
    }

    async fn tokens_used(&self, now: Timestamp) -> Result<u64> {
        self.read(move |connection, _| {
            let mut statement = connection.prepare_cached("SELECT tokens FROM token_usage WHERE day = ?")?;
            let tokens: Option<i64> = statement.query_row([day(now)], |row| row.get(0)).optional()?;
            Ok(u64::try_from(tokens.unwrap_or(0)).unwrap_or(0))
        })
        .await
    }
}

fn reserve(tx: &Tx, tokens: i64, limit: i64, day: i64) -> Result<bool> {
    tx.connection.prepare_cached("DELETE FROM token_usage WHERE day < ?")?.execute([day - KEEP_DAYS])?;
    let reserved = tx
        .connection
        .prepare_cached(
            "INSERT INTO token_usage (day, tokens) SELECT ?1, ?2 WHERE ?2 <= ?3
             ON CONFLICT (day) DO UPDATE SET tokens = tokens + excluded.tokens WHERE tokens + excluded.tokens <= ?3",
        )?
        .execute((day, tokens, limit))?;
    Ok(reserved == 1)
}

fn reserve_for_task(tx: &Tx, job: JobId, tokens: i64) -> Result<TaskTokens> {
    let sql = "SELECT t.id, t.machine, t.version FROM task_job j JOIN task t ON t.id = j.task WHERE j.job = ?";
    let found: Option<(Uuid, String, u32)> = tx
        .connection
        .prepare_cached(sql)?
        .query_row([job.0], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((task, machine, version)) = found else { return Ok(TaskTokens::Unlimited) };
    let limit = definition(tx, &machine, version)?.limits.llm_tokens.map(i64::from);
    let Some(limit) = limit else { return Ok(TaskTokens::Unlimited) };
    let reserved = tx
        .connection
        .prepare_cached(
            "INSERT INTO task_usage (task, tokens) SELECT ?1, ?2 WHERE ?2 <= ?3
             ON CONFLICT (task) DO UPDATE SET tokens = tokens + excluded.tokens WHERE tokens + excluded.tokens <= ?3",
        )?
        .execute((task, tokens, limit))?;
    if reserved == 1 {
        return Ok(TaskTokens::Reserved(TaskId(task)));
    }
    let used: Option<i64> = tx
        .connection
        .prepare_cached("SELECT tokens FROM task_usage WHERE task = ?")?
        .query_row([task], |row| row.get(0))
        .optional()?;
    let (limit, used) = (limit.unsigned_abs(), used.unwrap_or(0).unsigned_abs());
    Ok(TaskTokens::Exceeded { task: TaskId(task), limit, used })
}

fn settle(tx: &Tx, difference: i64, day: i64) -> Result<()> {
    tx.connection
        .prepare_cached("UPDATE token_usage SET tokens = max(0, tokens + ?1) WHERE day = ?2")?
        .execute((difference, day))?;
    Ok(())
}
