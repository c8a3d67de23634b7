//! Writes, lists and prunes the audit log.

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{AuditRow, JobId, Timestamp};

use super::{Postgres, Shared, end::storable, events};
use crate::{AuditEntry, AuditFilter, AuditStore, COUNT_LIMIT, Result};

#[async_trait]
impl AuditStore for Postgres {
    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| add_alone(&self.shared, &entry, now)).await
    }

    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
        self.shared.retrying(|| list(&self.shared, &filter, limit)).await
    }

    async fn audit_total(&self, filter: AuditFilter) -> Result<u64> {
        self.shared.retrying(|| total(&self.shared, &filter)).await
    }
}

pub async fn add(client: &Object, entry: &AuditEntry, now: Timestamp) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.audit (at, actor, action, target, details, count) VALUES ($1, $2, $3, $4, $5, $6)",
            &[
                &now.as_ms(),
                &storable(&entry.actor),
                &entry.action,
                &storable(&entry.target),
                &entry.details.to_string(),
                &i64::try_from(entry.count).unwrap_or(i64::MAX),
            ],
        )
        .await?;
    Ok(())
}

/// Runs `work` in the name of the entry's actor, and adds the entry to the audit log if `work` succeeds.
pub async fn run_audited<T>(
    client: &Object,
    entry: Option<AuditEntry>,
    now: Timestamp,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    if let Some(entry) = &entry {
        events::set_actor(client, &entry.actor).await?;
    }
    let done = work.await?;
    if let Some(entry) = &entry {
        add(client, entry, now).await?;
    }
    Ok(done)
}

/// Adds an entry outside of a transaction.
pub async fn add_alone(shared: &Shared, entry: &AuditEntry, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let result = add(&client, entry, now).await;
    client.return_to_pool(result)
}

/// Maximum number of entries that one round checks, oldest first.
const PRUNE: i64 = 1_000;

/// Deletes entries from before `cutoff`, and bulk actions that finished before it.
pub async fn prune(client: &Object, cutoff: Timestamp) -> Result<()> {
    client
        .execute(
            "DELETE FROM faena.audit WHERE at < $1 AND sequence = ANY (ARRAY(
                 SELECT sequence FROM faena.audit ORDER BY sequence LIMIT $2))",
            &[&cutoff.as_ms(), &PRUNE],
        )
        .await?;
    client
        .execute(
            "DELETE FROM faena.bulk WHERE id < $1 AND finished_at < $2",
            &[&JobId::first_at_ms(cutoff.as_ms()).0, &cutoff.as_ms()],
        )
        .await?;
    Ok(())
}

const MATCHES: &str = "($1::int8 IS NULL OR sequence < $1) AND ($2::text IS NULL OR actor = $2)
    AND ($3::text IS NULL OR action = $3) AND ($4::text IS NULL OR target = $4)";

async fn total(shared: &Shared, filter: &AuditFilter) -> Result<u64> {
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM faena.audit WHERE {MATCHES} LIMIT {COUNT_LIMIT}) x");
    let client = shared.client().await?;
    let row = client.query_one(&sql, &[&filter.before, &filter.actor, &filter.action, &filter.target]).await;
    Ok(client.return_to_pool(row.map_err(Into::into))?.get::<_, i64>(0).unsigned_abs())
}

pub async fn list(shared: &Shared, filter: &AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
    let client = shared.client().await?;
    let rows = list_in(&client, filter, limit).await;
    client.return_to_pool(rows)
}

async fn list_in(client: &Object, filter: &AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = client
        .query(
            &format!("SELECT sequence, at, actor, action, target, details, count FROM faena.audit WHERE {MATCHES} ORDER BY sequence DESC LIMIT $5"),
            &[&filter.before, &filter.actor, &filter.action, &filter.target, &limit],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| AuditRow {
            sequence: row.get(0),
            at: Timestamp::from_ms(row.get(1)),
            actor: row.get(2),
            action: row.get(3),
            target: row.get(4),
            details: serde_json::from_str(row.get(5)).unwrap_or_default(),
            count: u64::try_from(row.get::<_, i64>(6)).unwrap_or(0),
        })
        .collect())
}
