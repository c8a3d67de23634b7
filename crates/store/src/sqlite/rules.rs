//! Settings of queues, and limits.

use std::sync::Arc;

use async_trait::async_trait;
use faena_domain::{Limit, QueueRule, Rules, Scope, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use super::{Sqlite, audit, writer::Tx};
use crate::{
    ConfiguredRules, QueuePatch, Result, RuleStore, Signal, StoredLimit,
    rules::{
        self, API, CONFIG, LimitRow, QueueRow, columns, configured_by, fairness_code, limit_audit, queue_audit,
        reset_audit,
    },
};

#[async_trait]
impl RuleStore for Sqlite {
    fn rules(&self) -> Arc<Rules> {
        self.shared.rules.current()
    }

    async fn rules_load(&self) -> Result<Arc<Rules>> {
        // SQLite: no other process changes them.
        Ok(self.shared.rules.current())
    }

    async fn rules_configure(&self, configured: ConfiguredRules, now: Timestamp) -> Result<()> {
        self.change_rules(move |tx| configure(tx, &configured, now)).await
    }

    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()> {
        let (name, by) = (name.to_owned(), by.to_owned());
        self.change_rules(move |tx| set_queue(tx, &name, &patch, &by, now)).await
    }

    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.change_rules(move |tx| set_limit(tx, &scope, &limit, &by, now)).await
    }

    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.change_rules(move |tx| reset_limit(tx, &scope, configured, &by, now)).await
    }

    async fn limits(&self) -> Result<Vec<StoredLimit>> {
        self.read(|connection, _| limits(connection)).await
    }
}

pub fn load(connection: &Connection) -> Result<Rules> {
    Ok(rules::rules(limits(connection)?, queues(connection)?))
}

pub fn limits(connection: &Connection) -> Result<Vec<StoredLimit>> {
    let mut statement = connection.prepare_cached(
        "SELECT scope, name, concurrency, rate_count, rate_period_ms, tokens, tokens_at, origin, changed_at, changed_by, reached_at
         FROM limit_rule ORDER BY scope, name",
    )?;
    let rows = statement.query_map([], |row| {
        Ok(LimitRow {
            scope: row.get(0)?,
            name: row.get(1)?,
            concurrency: row.get(2)?,
            rate: row.get::<_, Option<i64>>(3)?.zip(row.get(4)?),
            bucket: row.get::<_, Option<f64>>(5)?.zip(row.get(6)?),
            origin: row.get(7)?,
            changed_at: row.get(8)?,
            changed_by: row.get(9)?,
            reached_at: row.get(10)?,
        })
    })?;
    let rows: Vec<LimitRow> = rows.collect::<rusqlite::Result<_>>()?;
    Ok(rows.into_iter().filter_map(LimitRow::stored).collect())
}

fn queues(connection: &Connection) -> Result<Vec<QueueRow>> {
    let mut statement = connection
        .prepare_cached("SELECT name, strict, fairness, paused_at, paused_by, pause_reason FROM queue ORDER BY name")?;
    let rows = statement.query_map([], |row| {
        Ok(QueueRow {
            name: row.get(0)?,
            strict: row.get(1)?,
            fairness: row.get(2)?,
            paused_at: row.get(3)?,
            paused_by: row.get(4)?,
            pause_reason: row.get(5)?,
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Applies the configured settings wherever nothing was set through the API.
pub fn configure(tx: &Tx, configured: &ConfiguredRules, now: Timestamp) -> Result<()> {
    for stored in limits(tx.connection)?.into_iter().filter(|stored| stored.origin == CONFIG) {
        if !configured.limits.iter().any(|(scope, _)| *scope == stored.scope) {
            tx.connection.execute("DELETE FROM limit_rule WHERE scope = ? AND name = ?", stored.scope.parts())?;
        }
    }
    // Existing rows are updated, not replaced, so that a rate limit keeps its tokens.
    for (scope, limit) in &configured.limits {
        let (number, name) = scope.parts();
        let (concurrency, count, period_ms) = columns(limit);
        tx.connection.execute(
            "INSERT INTO limit_rule (scope, name, concurrency, rate_count, rate_period_ms, origin, changed_at, changed_by)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 'the configuration')
             ON CONFLICT DO UPDATE SET concurrency = ?3, changed_at = ?7,
                 tokens = CASE WHEN rate_count IS ?4 AND rate_period_ms IS ?5 THEN tokens END,
                 tokens_at = CASE WHEN rate_count IS ?4 AND rate_period_ms IS ?5 THEN tokens_at END,
                 rate_count = ?4, rate_period_ms = ?5
             WHERE origin = ?6",
            (number, name, concurrency, count, period_ms, CONFIG, now.as_ms()),
        )?;
    }
    // Only users pause queues, never the configuration, so a pause is kept.
    tx.connection.execute("UPDATE queue SET strict = NULL, fairness = NULL WHERE origin = ?", [CONFIG])?;
    tx.connection.execute("DELETE FROM queue WHERE origin = ? AND paused_at IS NULL", [CONFIG])?;
    for (name, QueueRule { strict, fairness, .. }) in &configured.queues {
        tx.connection.execute(
            "INSERT INTO queue (name, strict, fairness, origin) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT DO UPDATE SET strict = ?2, fairness = ?3 WHERE origin = ?4",
            (name, strict, fairness.map(fairness_code), CONFIG),
        )?;
    }
    reload_and_signal(tx)
}

pub fn set_queue(tx: &Tx, name: &str, patch: &QueuePatch, by: &str, now: Timestamp) -> Result<()> {
    tx.connection.execute("INSERT OR IGNORE INTO queue (name, origin) VALUES (?, ?)", (name, CONFIG))?;
    if patch.strict.is_some() || patch.fairness.is_some() {
        tx.connection.execute(
            "UPDATE queue SET strict = coalesce(?, strict), fairness = coalesce(?, fairness), origin = ? WHERE name = ?",
            (patch.strict, patch.fairness.map(fairness_code), API, name),
        )?;
    }
    if let Some(pause) = &patch.paused {
        let (at, who, reason) = match pause {
            Some(pause) => (Some(pause.at.as_ms()), Some(&pause.by), pause.reason.as_ref()),
            None => (None, None, None),
        };
        tx.connection.execute(
            "UPDATE queue SET paused_at = ?, paused_by = ?, pause_reason = ? WHERE name = ?",
            (at, who, reason, name),
        )?;
    }
    if patch.concurrency.is_some() || patch.rate.is_some() {
        let scope = Scope::Queue(name.to_owned());
        let before = limit_of(tx, &scope)?;
        let limit = Limit {
            concurrency: patch.concurrency.unwrap_or(before.concurrency),
            rate: patch.rate.unwrap_or(before.rate),
        };
        put_limit(tx, &scope, &limit, by, now)?;
    }
    audit::add(tx, &queue_audit(name, patch, by), now)?;
    reload_and_signal(tx)
}

fn limit_of(tx: &Tx, scope: &Scope) -> Result<Limit> {
    Ok(limits(tx.connection)?.into_iter().find(|stored| stored.scope == *scope).map(|s| s.limit).unwrap_or_default())
}

pub fn set_limit(tx: &Tx, scope: &Scope, limit: &Limit, by: &str, now: Timestamp) -> Result<()> {
    put_limit(tx, scope, limit, by, now)?;
    audit::add(tx, &limit_audit(scope, limit, by), now)?;
    reload_and_signal(tx)
}

pub fn reset_limit(tx: &Tx, scope: &Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()> {
    let (number, name) = scope.parts();
    match configured {
        Some(limit) => {
            let (concurrency, count, period_ms) = columns(&limit);
            let (origin, by_whom) = configured_by(scope);
            tx.connection.execute(
                "UPDATE limit_rule SET concurrency = ?, rate_count = ?, rate_period_ms = ?, tokens = NULL, tokens_at = NULL,
                     origin = ?, changed_at = ?, changed_by = ? WHERE scope = ? AND name = ?",
                (concurrency, count, period_ms, origin, now.as_ms(), by_whom, number, name),
            )?;
        }
        None => {
            tx.connection.execute("DELETE FROM limit_rule WHERE scope = ? AND name = ?", (number, name))?;
        }
    }
    audit::add(tx, &reset_audit(scope, configured, by), now)?;
    reload_and_signal(tx)
}

/// Writes a limit. A rate that changes starts with a full bucket.
fn put_limit(tx: &Tx, scope: &Scope, limit: &Limit, by: &str, now: Timestamp) -> Result<()> {
    let (number, name) = scope.parts();
    let (concurrency, count, period_ms) = columns(limit);
    tx.connection.execute(
        "INSERT INTO limit_rule (scope, name, concurrency, rate_count, rate_period_ms, origin, changed_at, changed_by)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
         ON CONFLICT DO UPDATE SET concurrency = ?3, origin = ?6, changed_at = ?7, changed_by = ?8,
             tokens = CASE WHEN rate_count IS ?4 AND rate_period_ms IS ?5 THEN tokens END,
             tokens_at = CASE WHEN rate_count IS ?4 AND rate_period_ms IS ?5 THEN tokens_at END,
             rate_count = ?4, rate_period_ms = ?5",
        (number, name, concurrency, count, period_ms, API, now.as_ms(), by),
    )?;
    Ok(())
}

/// Opens every key queue, because the new settings may allow more jobs, and reloads the cached settings, which the writer
/// uses from this commit on.
pub fn reload_and_signal(tx: &Tx) -> Result<()> {
    let closed: Option<i64> =
        tx.connection.query_row("SELECT 1 FROM key_queue WHERE open = 0 LIMIT 1", [], |row| row.get(0)).optional()?;
    if closed.is_some() {
        tx.connection.execute("UPDATE key_queue SET open = 1, opens_at = NULL WHERE open = 0", [])?;
    }
    tx.shared.rules.set(load(tx.connection)?);
    tx.signal(Signal::Rules);
    Ok(())
}
