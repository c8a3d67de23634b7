//! API keys.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use faena_domain::{ApiKey, ApiKeyId, StoredApiKey, Timestamp};
use rusqlite::{Connection, Row};
use tokio::sync::watch;

use super::{Sqlite, audit, writer::Tx};
use crate::{
    ApiKeyStore, KeyRotation, Result, Signal,
    api_keys::{ApiKeyRow, COLUMNS, cannot_rotate, groups_text, key_audit, queues_text, scopes_text},
};

#[async_trait]
impl ApiKeyStore for Sqlite {
    fn api_keys(&self) -> Arc<HashMap<String, StoredApiKey>> {
        self.shared.api_keys.current()
    }

    fn api_keys_watch(&self) -> watch::Receiver<Arc<HashMap<String, StoredApiKey>>> {
        self.shared.api_keys.watch()
    }

    async fn api_keys_load(&self) -> Result<Arc<HashMap<String, StoredApiKey>>> {
        let _loading = self.shared.api_keys.begin_load().await;
        let keys = self.read(|connection, _| list(connection)).await?;
        Ok(self.shared.api_keys.set(keys))
    }

    async fn api_key_create(&self, key: StoredApiKey, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.change_api_keys(move |tx| create(tx, &key, &by, now)).await
    }

    async fn api_key_rotate(
        &self,
        id: ApiKeyId,
        rotation: KeyRotation,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<ApiKey>> {
        let by = by.to_owned();
        self.change_api_keys(move |tx| rotate(tx, id, &rotation, &by, now)).await
    }

    async fn api_key_revoke(&self, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
        let by = by.to_owned();
        self.change_api_keys(move |tx| revoke(tx, id, &by, now)).await
    }

    async fn api_keys_used(&self, used: Vec<(ApiKeyId, Timestamp)>) -> Result<()> {
        self.change_api_keys(move |tx| set_used(tx, &used)).await
    }
}

impl Sqlite {
    /// Changes keys, then reads them again. SQLite: no other server uses the file, so the cache is current from here on.
    async fn change_api_keys<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let changed = self.writer.call(change).await?;
        self.api_keys_load().await?;
        Ok(changed)
    }
}

pub fn list(connection: &Connection) -> Result<Vec<StoredApiKey>> {
    let mut statement = connection.prepare_cached(&format!("SELECT {COLUMNS} FROM api_key ORDER BY id"))?;
    let rows = statement.query_map([], read_row)?;
    rows.map(|row| row?.stored()).collect()
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<ApiKeyRow> {
    Ok(ApiKeyRow {
        id: row.get(0)?,
        lookup: row.get(1)?,
        name: row.get(2)?,
        scopes: row.get(3)?,
        queues: row.get(4)?,
        groups: row.get(5)?,
        without_payloads: row.get(6)?,
        hash: row.get(7)?,
        previous_hash: row.get(8)?,
        previous_valid_until: row.get(9)?,
        created_at: row.get(10)?,
        created_by: row.get(11)?,
        expires_at: row.get(12)?,
        rotated_at: row.get(13)?,
        revoked_at: row.get(14)?,
        last_used_at: row.get(15)?,
    })
}

fn get(tx: &Tx, id: ApiKeyId) -> Result<Option<ApiKey>> {
    Ok(list(tx.connection)?.into_iter().map(|stored| stored.key).find(|key| key.id == id))
}

fn create(tx: &Tx, stored: &StoredApiKey, by: &str, now: Timestamp) -> Result<()> {
    let key = &stored.key;
    let expires_at = key.expires_at.map(Timestamp::as_ms);
    tx.connection.execute(
        "INSERT INTO api_key (id, lookup, name, scopes, queues, groups, without_payloads, hash, created_at, created_by,
              expires_at)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key.id.0,
            &key.lookup,
            &key.name,
            scopes_text(key),
            queues_text(key),
            groups_text(key),
            key.without_payloads,
            stored.hash.0,
            now.as_ms(),
            by,
            expires_at,
        ),
    )?;
    audit::add(tx, &key_audit("key.create", key, by), now)?;
    tx.signal(Signal::ApiKeys);
    Ok(())
}

fn rotate(tx: &Tx, id: ApiKeyId, rotation: &KeyRotation, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
    let Some(before) = get(tx, id)? else { return Ok(None) };
    if let Some(reason) = before.rejection(now) {
        return Err(cannot_rotate(reason));
    }
    tx.connection.execute(
        "UPDATE api_key SET previous_hash = hash, previous_valid_until = ?, hash = ?, rotated_at = ? WHERE id = ?",
        (rotation.previous_valid_until.as_ms(), rotation.hash.0, now.as_ms(), id.0),
    )?;
    audit::add(tx, &key_audit("key.rotate", &before, by), now)?;
    tx.signal(Signal::ApiKeys);
    get(tx, id)
}

fn revoke(tx: &Tx, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
    let Some(key) = get(tx, id)?.filter(|key| key.revoked_at.is_none()) else { return get(tx, id) };
    tx.connection.execute("UPDATE api_key SET revoked_at = ? WHERE id = ?", (now.as_ms(), id.0))?;
    audit::add(tx, &key_audit("key.revoke", &key, by), now)?;
    tx.signal(Signal::ApiKeys);
    get(tx, id)
}

fn set_used(tx: &Tx, used: &[(ApiKeyId, Timestamp)]) -> Result<()> {
    let mut statement = tx
        .connection
        .prepare_cached("UPDATE api_key SET last_used_at = max(coalesce(last_used_at, 0), ?) WHERE id = ?")?;
    for (id, at) in used {
        statement.execute((at.as_ms(), id.0))?;
    }
    Ok(())
}
