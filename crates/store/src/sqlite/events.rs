//! Subscriptions and events. The triggers of `events_on.sql` create the events.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use faena_domain::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row};

use super::{Shared, Sqlite, writer::Tx};
use crate::{
    EventPosition, EventQuery, EventRange, EventStore, EventSubscription, PARTITIONS, Result, StoredEvent,
    events::{COLUMNS, SYSTEM, SubscriptionMode},
    sql::sql,
};

#[async_trait]
impl EventStore for Sqlite {
    async fn event_subscribe(&self, subscriptions: Vec<EventSubscription>, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| subscribe(tx, &subscriptions, now)).await
    }

    fn has_event_subscriptions(&self) -> bool {
        self.shared.events_on.load(Ordering::Relaxed)
    }

    async fn event_prune(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
        self.writer.call(move |tx| prune(tx, before, limit, now)).await
    }

    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
        self.read(move |connection, _| list(connection, &query, limit)).await
    }

    async fn event_last_position(&self) -> Result<EventPosition> {
        self.read(|connection, _| last_position(connection)).await
    }

    async fn event_range(&self, name: &str) -> Result<Option<EventRange>> {
        let name = name.to_owned();
        self.read(move |connection, _| range(connection, &name)).await
    }
}

pub fn subscribe(tx: &Tx, subscriptions: &[EventSubscription], now: Timestamp) -> Result<()> {
    for subscription in subscriptions {
        let EventSubscription { name, types, mode, until } = subscription;
        let (id, since): (i64, i64) = tx
            .connection
            .prepare_cached(
                "INSERT INTO subscription (name, queued, park, until) VALUES (?, ?, ?, ?)
                 ON CONFLICT (name) DO UPDATE SET queued = excluded.queued, park = excluded.park, until = max(until, excluded.until)
                 RETURNING id, since",
            )?
            .query_row((name, mode.is_queued(), mode.parks(), until.as_ms()), |row| Ok((row.get(0)?, row.get(1)?)))?;
        if since == 0 {
            let begun = skip_position(tx.connection)?;
            tx.connection.prepare_cached("UPDATE subscription SET since = ? WHERE id = ?")?.execute((begun, id))?;
        }
        // The types of a sink replace its earlier ones. A subscription of readers keeps its earlier types, because
        // several readers share it.
        if let SubscriptionMode::Queue(_) = mode {
            tx.connection.prepare_cached("DELETE FROM subscription_pattern WHERE subscription = ?")?.execute([id])?;
            for partition in 0..PARTITIONS {
                tx.connection
                    .prepare_cached("INSERT OR IGNORE INTO outbox_lease (sink, partition) VALUES (?, ?)")?
                    .execute((id, partition))?;
            }
        }
        for kind in types {
            tx.connection
                .prepare_cached("INSERT OR IGNORE INTO subscription_pattern (subscription, pattern) VALUES (?, ?)")?
                .execute((id, glob(kind)))?;
        }
    }
    switch(tx.connection, tx.shared, now)
}

/// Uses up a position, so that positions before and after this moment differ.
fn skip_position(connection: &Connection) -> Result<EventPosition> {
    let skipped = last_position(connection)? + 1;
    let updated =
        connection.prepare_cached("UPDATE sqlite_sequence SET seq = ? WHERE name = 'event'")?.execute([skipped])?;
    if updated == 0 {
        connection.prepare_cached("INSERT INTO sqlite_sequence (name, seq) VALUES ('event', ?)")?.execute([skipped])?;
    }
    Ok(skipped)
}

/// Returns the GLOB pattern of a type: `*` matches anything, other characters match themselves.
pub fn glob(kind: &str) -> String {
    kind.replace('[', "[[]").replace('?', "[?]")
}

/// Returns the type of a GLOB pattern.
pub fn from_glob(pattern: &str) -> String {
    pattern.replace("[?]", "?").replace("[[]", "[")
}

pub const EVENTS_ON: &str = sql!(include_str!("events_on.sql"));
const EVENTS_OFF: &str = include_str!("events_off.sql");

/// Switches events on or off, depending on whether a subscription exists.
pub fn switch(connection: &Connection, shared: &Shared, now: Timestamp) -> Result<()> {
    let has_subscriptions =
        connection.prepare_cached("SELECT 1 FROM subscription WHERE until > ? LIMIT 1")?.exists([now.as_ms()])?;
    let on = connection
        .prepare_cached("SELECT 1 FROM sqlite_temp_master WHERE type = 'trigger' AND name = 'event_job'")?
        .exists([])?;
    if has_subscriptions && !on {
        connection.execute_batch(EVENTS_ON)?;
    } else if !has_subscriptions && on {
        connection.execute_batch(EVENTS_OFF)?;
    }
    shared.events_on.store(has_subscriptions, std::sync::atomic::Ordering::Relaxed);
    Ok(())
}

/// Runs `work` with `actor` as the actor of its events.
pub fn with_actor<T>(tx: &Tx, actor: &str, work: impl FnOnce(&Tx) -> Result<T>) -> Result<T> {
    set_actor(tx, actor)?;
    let done = work(tx);
    // Resets it even after an error, because other calls share the transaction.
    let reset = set_actor(tx, SYSTEM);
    done.and_then(|done| reset.map(|()| done))
}

/// Sets the actor of the following events of the transaction.
pub fn set_actor(tx: &Tx, actor: &str) -> Result<()> {
    if tx.shared.events_on.load(std::sync::atomic::Ordering::Relaxed) {
        tx.connection.prepare_cached("UPDATE event_actor SET actor = ?")?.execute([actor])?;
    }
    Ok(())
}

/// Deletes expired subscriptions, events from before `before` that no sink waits for, and inbox rows that are too old.
/// Switches events off if no subscription is left. Returns the number of deleted events.
pub fn prune(tx: &Tx, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let expired: Vec<i64> = tx
        .connection
        .prepare_cached("SELECT id FROM subscription WHERE until <= ?")?
        .query_map([now.as_ms()], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    for subscription in expired {
        for sql in [
            "DELETE FROM subscription_pattern WHERE subscription = ?",
            "DELETE FROM outbox_lease WHERE sink = ?",
            "DELETE FROM outbox_node WHERE sink = ?",
            "DELETE FROM outbox WHERE sink = ?",
            "DELETE FROM subscription WHERE id = ?",
        ] {
            tx.connection.prepare_cached(sql)?.execute([subscription])?;
        }
    }
    switch(tx.connection, tx.shared, now)?;
    let removed: Vec<EventPosition> = tx
        .connection
        .prepare_cached(
            "DELETE FROM event WHERE position IN (
                 SELECT position FROM event e WHERE at < ?1
                     AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.position = e.position)
                     AND NOT EXISTS (SELECT 1 FROM outbox_dlq d WHERE d.position = e.position AND d.resolved_at IS NULL)
                 ORDER BY at LIMIT ?2)
             RETURNING position",
        )?
        .query_map((before.as_ms(), limit), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    if let Some(last) = removed.iter().max() {
        tx.connection.prepare_cached("UPDATE subscription SET since = max(since, ?)")?.execute([last])?;
    }
    tx.connection
        .prepare_cached("DELETE FROM inbox WHERE (consumer, id) IN (SELECT consumer, id FROM inbox WHERE at < ?1 ORDER BY at LIMIT ?2)")?
        .execute((now.plus_ms(-crate::events::INBOX_KEPT_MS).as_ms(), limit))?;
    Ok(removed.len())
}

pub fn list(connection: &Connection, query: &EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows: rusqlite::Result<Vec<StoredEvent>> = match query {
        EventQuery::After(position) => connection
            .prepare_cached(&format!("SELECT {COLUMNS} FROM event WHERE position > ? ORDER BY position LIMIT ?"))?
            .query_map((position, limit), row)?
            .collect(),
        EventQuery::Correlation(id) => connection
            .prepare_cached(&format!("SELECT {COLUMNS} FROM event WHERE correlation = ? ORDER BY position LIMIT ?"))?
            .query_map((id, limit), row)?
            .collect(),
        EventQuery::Subject { id, after } => connection
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM event WHERE subject = ? AND sequence > ? ORDER BY sequence LIMIT ?"
            ))?
            .query_map((id, after, limit), row)?
            .collect(),
    };
    Ok(rows?)
}

pub fn last_position(connection: &Connection) -> Result<EventPosition> {
    // The counter of positions also counts deleted events.
    let last: Option<i64> = connection
        .prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'event'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    Ok(last.unwrap_or(0))
}

pub fn range(connection: &Connection, name: &str) -> Result<Option<EventRange>> {
    let after = connection
        .prepare_cached(
            // A subscription to all types has kept everything since it began.
            "SELECT min(since, coalesce((SELECT min(o.since) FROM subscription o JOIN subscription_pattern p ON p.subscription = o.id
                                         WHERE p.pattern = '*' AND o.since > 0), since))
             FROM subscription WHERE name = ?",
        )?
        .query_row([name], |row| row.get(0))
        .optional()?;
    let last = last_position(connection)?;
    Ok(after.map(|after| EventRange { after, last }))
}

pub fn row(row: &Row) -> rusqlite::Result<StoredEvent> {
    Ok(StoredEvent {
        position: row.get(0)?,
        id: row.get(1)?,
        kind: row.get(2)?,
        subject: row.get(3)?,
        sequence: row.get(4)?,
        at: Timestamp::from_ms(row.get(5)?),
        correlation_id: row.get(6)?,
        actor: row.get(7)?,
        traceparent: row.get(8)?,
        data: row.get(9)?,
    })
}
