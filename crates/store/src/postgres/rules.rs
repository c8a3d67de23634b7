//! Settings of queues, and limits.

use std::sync::Arc;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{Limit, QueueRule, Rules, Scope, Timestamp};
use tokio_postgres::Row;

use super::{Postgres, Shared, audit, end::storable};
use crate::{
    ConfiguredRules, QueuePatch, Result, RuleStore, Signal, StoredLimit,
    rules::{
        self, API, CONFIG, LimitRow, QueueRow, columns, configured_by, fairness_code, limit_audit, queue_audit,
        reset_audit,
    },
};

#[async_trait]
impl RuleStore for Postgres {
    fn rules(&self) -> Arc<Rules> {
        self.shared.rules.current()
    }

    async fn rules_load(&self) -> Result<Arc<Rules>> {
        self.shared.retrying(|| load(&self.shared)).await
    }

    async fn rules_configure(&self, configured: ConfiguredRules, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| configure(&self.shared, &configured, now)).await
    }

    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| set_queue(&self.shared, name, &patch, by, now)).await
    }

    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| set_limit(&self.shared, &scope, &limit, by, now)).await
    }

    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| reset_limit(&self.shared, &scope, configured, by, now)).await
    }

    async fn limits(&self) -> Result<Vec<StoredLimit>> {
        self.shared.retrying(|| limits(&self.shared)).await
    }
}

/// Reads the settings into the cache.
pub async fn load(shared: &Shared) -> Result<Arc<Rules>> {
    let client = shared.client().await?;
    let rules = load_in(&client).await;
    Ok(shared.rules.set(client.return_to_pool(rules)?))
}

async fn load_in(client: &Object) -> Result<Rules> {
    Ok(rules::rules(limits_in(client).await?, queues_in(client).await?))
}

pub async fn limits(shared: &Shared) -> Result<Vec<StoredLimit>> {
    let client = shared.client().await?;
    let limits = limits_in(&client).await;
    client.return_to_pool(limits)
}

pub async fn limits_in(client: &Object) -> Result<Vec<StoredLimit>> {
    let statement = client
        .prepare_cached(
            "SELECT scope, name, concurrency, rate_count, rate_period_ms, tokens, tokens_at, origin, changed_at, changed_by, reached_at
             FROM faena.limit_rule ORDER BY scope, name",
        )
        .await?;
    let rows = client.query(&statement, &[]).await?;
    Ok(rows.iter().filter_map(stored).collect())
}

/// Reads a row of `limit_rule` with all its columns, in this order.
pub fn stored(row: &Row) -> Option<StoredLimit> {
    LimitRow {
        scope: row.get(0),
        name: row.get(1),
        concurrency: row.get(2),
        rate: row.get::<_, Option<i64>>(3).zip(row.get(4)),
        bucket: row.get::<_, Option<f64>>(5).zip(row.get(6)),
        origin: row.get(7),
        changed_at: row.get(8),
        changed_by: row.get(9),
        reached_at: row.get(10),
    }
    .stored()
}

async fn queues_in(client: &Object) -> Result<Vec<QueueRow>> {
    let statement = client
        .prepare_cached(
            "SELECT name, strict, fairness, paused_at, paused_by, pause_reason FROM faena.queue ORDER BY name",
        )
        .await?;
    let rows = client.query(&statement, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| QueueRow {
            name: row.get(0),
            strict: row.get(1),
            fairness: row.get(2),
            paused_at: row.get(3),
            paused_by: row.get(4),
            pause_reason: row.get(5),
        })
        .collect())
}

/// Applies the configured settings wherever nothing was set through the API.
pub async fn configure(shared: &Shared, configured: &ConfiguredRules, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = configure_in(&client, configured, now).await;
    client.end(result).await?;
    reload_and_signal(shared).await
}

async fn configure_in(client: &Object, configured: &ConfiguredRules, now: Timestamp) -> Result<()> {
    lock(client).await?;
    let (numbers, names): (Vec<i16>, Vec<&str>) = configured.limits.iter().map(|(scope, _)| scope.parts()).unzip();
    // Existing rows are updated, not replaced: a claim that waits for the lock on a row must find it, and a rate limit keeps its tokens.
    client
        .execute(
            "DELETE FROM faena.limit_rule WHERE origin = $1
                 AND (scope, name) NOT IN (SELECT * FROM unnest($2::int2[], $3::text[]))",
            &[&CONFIG, &numbers, &names],
        )
        .await?;
    for (scope, limit) in &configured.limits {
        let (number, name) = scope.parts();
        let (concurrency, count, period_ms) = columns(limit);
        client
            .execute(
                "INSERT INTO faena.limit_rule AS l
                     (scope, name, concurrency, rate_count, rate_period_ms, origin, changed_at, changed_by)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, 'the configuration')
                 ON CONFLICT (scope, name) DO UPDATE SET concurrency = $3, changed_at = $7,
                     tokens = CASE WHEN l.rate_count IS NOT DISTINCT FROM $4
                         AND l.rate_period_ms IS NOT DISTINCT FROM $5 THEN l.tokens END,
                     tokens_at = CASE WHEN l.rate_count IS NOT DISTINCT FROM $4
                         AND l.rate_period_ms IS NOT DISTINCT FROM $5 THEN l.tokens_at END,
                     rate_count = $4, rate_period_ms = $5
                 WHERE l.origin = $6",
                &[&number, &name, &concurrency, &count, &period_ms, &CONFIG, &now.as_ms()],
            )
            .await?;
    }
    // Only users pause queues, never the configuration, so a pause is kept.
    client.execute("UPDATE faena.queue SET strict = NULL, fairness = NULL WHERE origin = $1", &[&CONFIG]).await?;
    client.execute("DELETE FROM faena.queue WHERE origin = $1 AND paused_at IS NULL", &[&CONFIG]).await?;
    for (name, QueueRule { strict, fairness, .. }) in &configured.queues {
        client
            .execute(
                "INSERT INTO faena.queue AS q (name, strict, fairness, origin) VALUES ($1, $2, $3, $4)
                 ON CONFLICT (name) DO UPDATE SET strict = $2, fairness = $3 WHERE q.origin = $4",
                &[&name, &strict, &fairness.map(fairness_code), &CONFIG],
            )
            .await?;
    }
    open_all_key_queues(client).await
}

/// Serialises changes of settings.
pub async fn lock(client: &Object) -> Result<()> {
    client.batch_execute("LOCK TABLE faena.queue IN SHARE ROW EXCLUSIVE MODE").await?;
    Ok(())
}

pub async fn set_queue(shared: &Shared, name: &str, patch: &QueuePatch, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = set_queue_in(&client, name, patch, by, now).await;
    client.end(result).await?;
    reload_and_signal(shared).await
}

async fn set_queue_in(client: &Object, name: &str, patch: &QueuePatch, by: &str, now: Timestamp) -> Result<()> {
    lock(client).await?;
    client
        .execute("INSERT INTO faena.queue (name, origin) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&name, &CONFIG])
        .await?;
    if patch.strict.is_some() || patch.fairness.is_some() {
        client
            .execute(
                "UPDATE faena.queue SET strict = coalesce($1, strict), fairness = coalesce($2, fairness), origin = $3
                 WHERE name = $4",
                &[&patch.strict, &patch.fairness.map(fairness_code), &API, &name],
            )
            .await?;
    }
    if let Some(pause) = &patch.paused {
        let (at, who, reason) = match pause {
            Some(pause) => (Some(pause.at.as_ms()), Some(storable(&pause.by)), pause.reason.as_deref().map(storable)),
            None => (None, None, None),
        };
        client
            .execute(
                "UPDATE faena.queue SET paused_at = $1, paused_by = $2, pause_reason = $3 WHERE name = $4",
                &[&at, &who, &reason, &name],
            )
            .await?;
    }
    if patch.concurrency.is_some() || patch.rate.is_some() {
        let scope = Scope::Queue(name.to_owned());
        let before = limits_in(client).await?.into_iter().find(|stored| stored.scope == scope);
        let before = before.map(|stored| stored.limit).unwrap_or_default();
        let limit = Limit {
            concurrency: patch.concurrency.unwrap_or(before.concurrency),
            rate: patch.rate.unwrap_or(before.rate),
        };
        put_limit(client, &scope, &limit, by, now).await?;
    }
    audit::add(client, &queue_audit(name, patch, by), now).await?;
    open_all_key_queues(client).await
}

pub async fn set_limit(shared: &Shared, scope: &Scope, limit: &Limit, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = set_limit_in(&client, scope, limit, by, now).await;
    client.end(result).await?;
    reload_and_signal(shared).await
}

async fn set_limit_in(client: &Object, scope: &Scope, limit: &Limit, by: &str, now: Timestamp) -> Result<()> {
    lock(client).await?;
    put_limit(client, scope, limit, by, now).await?;
    audit::add(client, &limit_audit(scope, limit, by), now).await?;
    open_all_key_queues(client).await
}

pub async fn reset_limit(
    shared: &Shared,
    scope: &Scope,
    configured: Option<Limit>,
    by: &str,
    now: Timestamp,
) -> Result<()> {
    let client = shared.begin().await?;
    let result = reset_limit_in(&client, scope, configured, by, now).await;
    client.end(result).await?;
    reload_and_signal(shared).await
}

async fn reset_limit_in(
    client: &Object,
    scope: &Scope,
    configured: Option<Limit>,
    by: &str,
    now: Timestamp,
) -> Result<()> {
    lock(client).await?;
    let (number, name) = scope.parts();
    match configured {
        Some(limit) => {
            let (concurrency, count, period_ms) = columns(&limit);
            let (origin, by_whom) = configured_by(scope);
            client
                .execute(
                    "UPDATE faena.limit_rule SET concurrency = $1, rate_count = $2, rate_period_ms = $3, tokens = NULL,
                         tokens_at = NULL, origin = $4, changed_at = $5, changed_by = $8
                     WHERE scope = $6 AND name = $7",
                    &[&concurrency, &count, &period_ms, &origin, &now.as_ms(), &number, &name, &by_whom],
                )
                .await?;
        }
        None => {
            client.execute("DELETE FROM faena.limit_rule WHERE scope = $1 AND name = $2", &[&number, &name]).await?;
        }
    }
    audit::add(client, &reset_audit(scope, configured, by), now).await?;
    open_all_key_queues(client).await
}

/// Writes a limit. A rate that changes starts with a full bucket.
async fn put_limit(client: &Object, scope: &Scope, limit: &Limit, by: &str, now: Timestamp) -> Result<()> {
    let (number, name) = scope.parts();
    let (concurrency, count, period_ms) = columns(limit);
    client
        .execute(
            "INSERT INTO faena.limit_rule AS l
                 (scope, name, concurrency, rate_count, rate_period_ms, origin, changed_at, changed_by)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
             ON CONFLICT (scope, name) DO UPDATE SET concurrency = $3, origin = $6, changed_at = $7, changed_by = $8,
                 tokens = CASE WHEN l.rate_count IS NOT DISTINCT FROM $4 AND l.rate_period_ms IS NOT DISTINCT FROM $5
                     THEN l.tokens END,
                 tokens_at = CASE WHEN l.rate_count IS NOT DISTINCT FROM $4 AND l.rate_period_ms IS NOT DISTINCT FROM $5
                     THEN l.tokens_at END,
                 rate_count = $4, rate_period_ms = $5",
            &[&number, &name, &concurrency, &count, &period_ms, &API, &now.as_ms(), &by],
        )
        .await?;
    Ok(())
}

/// Opens every key queue, because the new settings may allow more jobs.
async fn open_all_key_queues(client: &Object) -> Result<()> {
    client
        .execute(
            "WITH closed AS (SELECT lane, key FROM faena.key_queue WHERE NOT open ORDER BY lane, key FOR NO KEY UPDATE)
             UPDATE faena.key_queue l SET open = true, opens_at = NULL FROM closed c WHERE l.lane = c.lane AND l.key = c.key",
            &[],
        )
        .await?;
    Ok(())
}

/// Reloads the cached settings, and signals on every node that they have changed.
pub async fn reload_and_signal(shared: &Shared) -> Result<()> {
    load(shared).await?;
    shared.signal([Signal::Rules]);
    Ok(())
}
