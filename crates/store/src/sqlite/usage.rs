//! Usage of paid services.

use async_trait::async_trait;
use faena_domain::Timestamp;
use rusqlite::OptionalExtension;

use super::{Sqlite, writer::Tx};
use crate::{
    Result, UsageStore,
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

fn settle(tx: &Tx, difference: i64, day: i64) -> Result<()> {
    tx.connection
        .prepare_cached("UPDATE token_usage SET tokens = max(0, tokens + ?1) WHERE day = ?2")?
        .execute((difference, day))?;
    Ok(())
}
