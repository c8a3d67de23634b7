//! Usage of paid services.

use async_trait::async_trait;
use faena_domain::Timestamp;

use super::{Postgres, Shared};
use crate::{
    Result, StoreError, UsageStore,
    usage::{KEEP_DAYS, day, stored},
};

#[async_trait]
impl UsageStore for Postgres {
    async fn tokens_reserve(&self, tokens: u64, limit: u64, now: Timestamp) -> Result<bool> {
        // PostgreSQL: not repeated after a lost connection, because the first attempt may have been committed.
        reserve(&self.shared, stored(tokens), stored(limit), day(now)).await
    }

    async fn tokens_settle(&self, reserved: u64, used: u64, reserved_at: Timestamp) -> Result<()> {
        settle(&self.shared, stored(used) - stored(reserved), day(reserved_at)).await
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

async fn settle(shared: &Shared, difference: i64, day: i64) -> Result<()> {
    let client = shared.client().await?;
    let settled = client
        .execute("UPDATE faena.token_usage SET tokens = greatest(0, tokens + $1) WHERE day = $2", &[&difference, &day])
        .await;
    client.return_to_pool(settled.map_err(StoreError::from))?;
    Ok(())
}
