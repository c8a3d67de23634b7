//! Writes, lists and prunes the audit log.

use async_trait::async_trait;
use faena_domain::{AuditRow, JobId, Timestamp};
use rusqlite::Connection;

use super::{Sqlite, events, writer::Tx};
use crate::{AuditEntry, AuditFilter, AuditStore, COUNT_LIMIT, Result};

#[async_trait]
impl AuditStore for Sqlite {
    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| add(tx, &entry, now)).await
    }

    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
        self.read(move |connection, _| list(connection, &filter, limit)).await
    }

    async fn audit_total(&self, filter: AuditFilter) -> Result<u64> {
        self.read(move |connection, _| total(connection, &filter)).await
    }
}

pub fn add(tx: &Tx, entry: &AuditEntry, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached("INSERT INTO audit (at, actor, action, target, details, count) VALUES (?, ?, ?, ?, ?, ?)")?
        .execute((
            now.as_ms(),
            &entry.actor,
            &entry.action,
            &entry.target,
            entry.details.to_string(),
            i64::try_from(entry.count).unwrap_or(i64::MAX),
        ))?;
    Ok(())
}

/// Runs `work` in the name of the entry's actor, and adds the entry to the audit log if `work` succeeds.
pub fn run_audited<T>(
    tx: &Tx,
    entry: Option<AuditEntry>,
    now: Timestamp,
    work: impl FnOnce(&Tx) -> Result<T>,
) -> Result<T> {
    let Some(entry) = &entry else { return work(tx) };
    events::with_actor(tx, &entry.actor, |tx| {
        let done = work(tx)?;
        add(tx, entry, now)?;
        Ok(done)
    })
}

/// Maximum number of entries that one round checks, oldest first.
const PRUNE: i64 = 1_000;

/// Deletes entries from before `cutoff`, and bulk actions that finished before it.
pub fn prune(tx: &Tx, cutoff: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "DELETE FROM audit WHERE at < ?1 AND sequence IN (SELECT sequence FROM audit ORDER BY sequence LIMIT ?2)",
        )?
        .execute((cutoff.as_ms(), PRUNE))?;
    tx.connection
        .prepare_cached("DELETE FROM bulk WHERE id < ?1 AND finished_at < ?2")?
        .execute((JobId::first_at_ms(cutoff.as_ms()).0, cutoff.as_ms()))?;
    Ok(())
}

const MATCHES: &str = "(?1 IS NULL OR sequence < ?1) AND (?2 IS NULL OR actor = ?2) AND (?3 IS NULL OR action = ?3)
    AND (?4 IS NULL OR target = ?4)";

fn total(connection: &Connection, filter: &AuditFilter) -> Result<u64> {
    let total: i64 = connection
        .prepare_cached(&format!("SELECT count(*) FROM (SELECT 1 FROM audit WHERE {MATCHES} LIMIT {COUNT_LIMIT})"))?
        .query_row((filter.before, &filter.actor, &filter.action, &filter.target), |row| row.get(0))?;
    Ok(total.unsigned_abs())
}

pub fn list(connection: &Connection, filter: &AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
    let mut statement = connection.prepare_cached(
        &format!("SELECT sequence, at, actor, action, target, details, count FROM audit WHERE {MATCHES} ORDER BY sequence DESC LIMIT ?5"),
    )?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = statement.query_map((filter.before, &filter.actor, &filter.action, &filter.target, limit), |row| {
        Ok(AuditRow {
            sequence: row.get(0)?,
            at: Timestamp::from_ms(row.get(1)?),
            actor: row.get(2)?,
            action: row.get(3)?,
            target: row.get(4)?,
            details: serde_json::from_str(&row.get::<_, String>(5)?).unwrap_or_default(),
            count: u64::try_from(row.get::<_, i64>(6)?).unwrap_or(0),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
