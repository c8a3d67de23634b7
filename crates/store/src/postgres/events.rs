//! Subscriptions and events. The triggers of the schema create the events.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::Timestamp;
use tokio_postgres::Row;

use super::{Postgres, Shared, end::storable};
use crate::{
    EventPosition, EventQuery, EventRange, EventStore, EventSubscription, PARTITIONS, Result, StoredEvent,
    events::{COLUMNS, INBOX_KEPT_MS, SubscriptionMode},
};

#[async_trait]
impl EventStore for Postgres {
    async fn event_subscribe(&self, subscriptions: Vec<EventSubscription>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| subscribe(&self.shared, &subscriptions, now)).await
    }

    fn has_event_subscriptions(&self) -> bool {
        self.shared.events_on.load(Ordering::Relaxed)
    }

    async fn event_prune(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| prune(&self.shared, before, limit, now)).await
    }

    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
        self.shared.retrying(|| list(&self.shared, &query, limit)).await
    }

    async fn event_last_position(&self) -> Result<EventPosition> {
        self.shared.retrying(|| last_position(&self.shared)).await
    }

    async fn event_range(&self, name: &str) -> Result<Option<EventRange>> {
        self.shared.retrying(|| range(&self.shared, name)).await
    }
}

pub async fn subscribe(shared: &Shared, subscriptions: &[EventSubscription], now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = subscribe_in(&client, subscriptions, now).await;
    let has_subscriptions = client.end(result).await?;
    shared.events_on.store(has_subscriptions, Ordering::Relaxed);
    Ok(())
}

async fn subscribe_in(client: &Object, subscriptions: &[EventSubscription], now: Timestamp) -> Result<bool> {
    lock_subscriptions(client).await?;
    for subscription in subscriptions {
        let row = client
            .query_one(
                "INSERT INTO faena.subscription AS s (name, queued, park, until) VALUES ($1, $2, $3, $4)
                 ON CONFLICT (name) DO UPDATE SET queued = excluded.queued, park = excluded.park,
                     until = greatest(s.until, excluded.until)
                 RETURNING id",
                &[
                    &storable(&subscription.name),
                    &subscription.mode.is_queued(),
                    &subscription.mode.parks(),
                    &subscription.until.as_ms(),
                ],
            )
            .await?;
        let id: i16 = row.get(0);
        // Uses up a position, so that positions before and after this moment differ.
        client
            .execute(
                "UPDATE faena.subscription SET since = nextval('faena.event_position_seq') WHERE id = $1 AND since = 0",
                &[&id],
            )
            .await?;
        let patterns: Vec<String> = subscription.types.iter().map(|kind| like(kind)).collect();
        // The types of a sink replace its earlier ones. A subscription of readers keeps its earlier types, because
        // several readers share it.
        if let SubscriptionMode::Queue(_) = subscription.mode {
            client
                .execute(
                    "DELETE FROM faena.subscription_pattern WHERE subscription = $1 AND NOT pattern = ANY($2)",
                    &[&id, &patterns],
                )
                .await?;
            client
                .execute(
                    "INSERT INTO faena.outbox_lease (sink, partition) SELECT $1, generate_series(0, $2::int4 - 1)
                     ON CONFLICT DO NOTHING",
                    &[&id, &i32::from(PARTITIONS)],
                )
                .await?;
        }
        client
            .execute(
                "INSERT INTO faena.subscription_pattern (subscription, pattern) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING",
                &[&id, &patterns],
            )
            .await?;
    }
    switch(client, now).await
}

/// Reads whether events are switched on.
pub async fn refresh(shared: &Shared) -> Result<()> {
    let client = shared.client().await?;
    let on = client
        .query_one(
            "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'faena.job'::regclass AND tgname = 'event_job_deleted')",
            &[],
        )
        .await
        .map_err(crate::StoreError::from);
    shared.events_on.store(client.return_to_pool(on)?.get(0), Ordering::Relaxed);
    Ok(())
}

/// Returns the LIKE pattern of a type: `*` matches anything, other characters match themselves.
pub fn like(kind: &str) -> String {
    storable(kind).replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_").replace('*', "%")
}

/// Returns the type of a LIKE pattern.
pub fn from_like(pattern: &str) -> String {
    let mut kind = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        match character {
            '%' => kind.push('*'),
            '\\' => kind.extend(characters.next()),
            other => kind.push(other),
        }
    }
    kind
}

/// Takes the lock under which one node at a time changes subscriptions and switches events on or off.
///
/// It does not lock the table: nodes that prune events write to it as well, and would deadlock.
async fn lock_subscriptions(client: &Object) -> Result<()> {
    Ok(client
        .batch_execute("SET LOCAL lock_timeout = '500ms'; SELECT pg_advisory_xact_lock(x'73696e6b73'::bigint)")
        .await?)
}

/// Switches events on or off, depending on whether a subscription exists.
///
/// PostgreSQL: the triggers affect all sessions, so switching waits for running writers. It waits for less time than PostgreSQL
/// waits before it looks for deadlocks, so a deadlock aborts this transaction, which is repeated, and never that of a job.
pub async fn switch(client: &Object, now: Timestamp) -> Result<bool> {
    let row = client
        .query_one(
            "SELECT EXISTS (SELECT FROM faena.subscription WHERE until > $1),
                    EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'faena.job'::regclass AND tgname = 'event_job_deleted')",
            &[&now.as_ms()],
        )
        .await?;
    let (has_subscriptions, on): (bool, bool) = (row.get(0), row.get(1));
    if has_subscriptions && !on {
        client.batch_execute("SELECT faena.events_on()").await?;
    } else if !has_subscriptions && on {
        client.batch_execute("SELECT faena.events_off()").await?;
    }
    Ok(has_subscriptions)
}

/// Sets the actor of the events of this transaction.
pub async fn set_actor(client: &Object, actor: &str) -> Result<()> {
    let statement = client.prepare_cached("SELECT set_config('faena.actor', $1, true)").await?;
    client.query(&statement, &[&storable(actor)]).await?;
    Ok(())
}

/// Deletes expired subscriptions, events from before `before` that no sink waits for, and inbox rows that are too old.
/// Switches events off if no subscription is left. Returns the number of deleted events.
pub async fn prune(shared: &Shared, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
    let client = shared.begin().await?;
    let result = prune_in(&client, before, limit, now).await;
    let (removed, has_subscriptions) = client.end(result).await?;
    shared.events_on.store(has_subscriptions, Ordering::Relaxed);
    Ok(removed)
}

async fn prune_in(client: &Object, before: Timestamp, limit: usize, now: Timestamp) -> Result<(usize, bool)> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut expired = expired_subscriptions(client, now).await?;
    // Switches only after a subscription has expired, which is rare, because switching takes locks.
    let has_subscriptions = if expired.is_empty() {
        let row = client.query_one("SELECT EXISTS (SELECT FROM faena.subscription)", &[]).await?;
        row.get(0)
    } else {
        lock_subscriptions(client).await?;
        // A subscription may have been renewed meanwhile.
        expired = expired_subscriptions(client, now).await?;
        for table in ["outbox_lease", "outbox_node", "outbox"] {
            client.execute(&format!("DELETE FROM faena.{table} WHERE sink = ANY($1)"), &[&expired]).await?;
        }
        client.execute("DELETE FROM faena.subscription_pattern WHERE subscription = ANY($1)", &[&expired]).await?;
        client.execute("DELETE FROM faena.subscription WHERE id = ANY($1)", &[&expired]).await?;
        switch(client, now).await?
    };
    let removed = client
        .query_one(
            "WITH deleted AS (DELETE FROM faena.event WHERE position = ANY (ARRAY(
                 SELECT position FROM faena.event e WHERE at < $1
                     AND NOT EXISTS (SELECT FROM faena.outbox o WHERE o.position = e.position)
                     AND NOT EXISTS (SELECT FROM faena.outbox_dlq d WHERE d.position = e.position AND d.resolved_at IS NULL)
                 ORDER BY at LIMIT $2)) RETURNING position)
             SELECT count(*), max(position) FROM deleted",
            &[&before.as_ms(), &limit],
        )
        .await?;
    let (removed, last): (i64, Option<EventPosition>) = (removed.get(0), removed.get(1));
    if let Some(last) = last {
        client.execute("UPDATE faena.subscription SET since = greatest(since, $1)", &[&last]).await?;
    }
    client
        .execute(
            "DELETE FROM faena.inbox WHERE ctid = ANY (ARRAY(SELECT ctid FROM faena.inbox WHERE at < $1 ORDER BY at LIMIT $2))",
            &[&now.plus_ms(-INBOX_KEPT_MS).as_ms(), &limit],
        )
        .await?;
    Ok((usize::try_from(removed).unwrap_or(0), has_subscriptions))
}

/// Returns the expired subscriptions.
async fn expired_subscriptions(client: &Object, now: Timestamp) -> Result<Vec<i16>> {
    let rows = client.query("SELECT id FROM faena.subscription WHERE until <= $1", &[&now.as_ms()]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

pub async fn list(shared: &Shared, query: &EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
    let client = shared.client().await?;
    let found = list_in(&client, query, limit).await;
    client.return_to_pool(found)
}

async fn list_in(client: &Object, query: &EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = match query {
        EventQuery::After(position) => {
            // The settled position is read first, so that everything up to it is read afterwards.
            let end = settled(client).await?;
            let statement = client
                .prepare_cached(&format!(
                    "SELECT {COLUMNS} FROM faena.event WHERE position > $1 AND position <= $2 ORDER BY position LIMIT $3"
                ))
                .await?;
            client.query(&statement, &[position, &end, &limit]).await?
        }
        EventQuery::Correlation(id) => {
            let sql = format!("SELECT {COLUMNS} FROM faena.event WHERE correlation = $1 ORDER BY position LIMIT $2");
            client.query(&sql, &[id, &limit]).await?
        }
        EventQuery::Subject { id, after } => {
            let sql = format!(
                "SELECT {COLUMNS} FROM faena.event WHERE subject = $1 AND sequence > $2 ORDER BY sequence LIMIT $3"
            );
            client.query(&sql, &[id, after, &limit]).await?
        }
    };
    Ok(rows.iter().map(row).collect())
}

/// Returns the position up to which every event is committed or will never exist.
async fn settled(client: &Object) -> Result<EventPosition> {
    let statement = client.prepare_cached("SELECT faena.settled_events()").await?;
    Ok(client.query_one(&statement, &[]).await?.get(0))
}

pub async fn last_position(shared: &Shared) -> Result<EventPosition> {
    let client = shared.client().await?;
    let end = settled(&client).await;
    client.return_to_pool(end)
}

pub async fn range(shared: &Shared, name: &str) -> Result<Option<EventRange>> {
    let client = shared.client().await?;
    // A subscription to all types has kept everything since it began.
    let sql = "SELECT least(since, (SELECT min(o.since) FROM faena.subscription o JOIN faena.subscription_pattern p ON p.subscription = o.id
                                    WHERE p.pattern = '%' AND o.since > 0)),
                      (SELECT last_value FROM faena.event_position_seq)
               FROM faena.subscription WHERE name = $1";
    let row = client.query_opt(sql, &[&storable(name)]).await;
    let row = client.return_to_pool(row.map_err(crate::StoreError::from))?;
    Ok(row.map(|row| EventRange { after: row.get(0), last: row.get(1) }))
}

pub fn row(row: &Row) -> StoredEvent {
    StoredEvent {
        position: row.get(0),
        id: row.get(1),
        kind: row.get(2),
        subject: row.get(3),
        sequence: row.get(4),
        at: Timestamp::from_ms(row.get(5)),
        correlation_id: row.get(6),
        actor: row.get(7),
        traceparent: row.get(8),
        data: row.get(9),
    }
}
