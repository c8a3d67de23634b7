//! API keys.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{ApiKey, ApiKeyId, StoredApiKey, Timestamp};
use tokio::sync::watch;
use tokio_postgres::Row;
use uuid::Uuid;

use super::{Postgres, Shared, audit};
use crate::{
    ApiKeyStore, KeyRotation, Result, Signal, StoreError,
    api_keys::{ApiKeyRow, COLUMNS, cannot_rotate, groups_text, key_audit, queues_text, scopes_text},
};

#[async_trait]
impl ApiKeyStore for Postgres {
    fn api_keys(&self) -> Arc<HashMap<String, StoredApiKey>> {
        self.shared.api_keys.current()
    }

    fn api_keys_watch(&self) -> watch::Receiver<Arc<HashMap<String, StoredApiKey>>> {
        self.shared.api_keys.watch()
    }

    async fn api_keys_load(&self) -> Result<Arc<HashMap<String, StoredApiKey>>> {
        self.shared.retrying(|| load(&self.shared)).await
    }

    async fn api_key_create(&self, key: StoredApiKey, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| create(&self.shared, &key, by, now)).await
    }

    async fn api_key_rotate(
        &self,
        id: ApiKeyId,
        rotation: KeyRotation,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<ApiKey>> {
        self.shared.retrying(|| rotate(&self.shared, id, &rotation, by, now)).await
    }

    async fn api_key_revoke(&self, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
        self.shared.retrying(|| revoke(&self.shared, id, by, now)).await
    }

    async fn api_keys_used(&self, used: Vec<(ApiKeyId, Timestamp)>) -> Result<()> {
        self.shared.retrying(|| set_used(&self.shared, &used)).await
    }
}

/// Reads the keys into the cache.
pub async fn load(shared: &Shared) -> Result<Arc<HashMap<String, StoredApiKey>>> {
    let _loading = shared.api_keys.begin_load().await;
    let client = shared.client().await?;
    let keys = list(&client).await;
    Ok(shared.api_keys.set(client.return_to_pool(keys)?))
}

async fn list(client: &Object) -> Result<Vec<StoredApiKey>> {
    let rows = client.query(&format!("SELECT {COLUMNS} FROM faena.api_key ORDER BY id"), &[]).await?;
    rows.iter().map(|row| read_row(row).stored()).collect()
}

fn read_row(row: &Row) -> ApiKeyRow {
    ApiKeyRow {
        id: row.get(0),
        lookup: row.get(1),
        name: row.get(2),
        scopes: row.get(3),
        queues: row.get(4),
        groups: row.get(5),
        without_payloads: row.get(6),
        hash: row.get(7),
        previous_hash: row.get(8),
        previous_valid_until: row.get(9),
        created_at: row.get(10),
        created_by: row.get(11),
        expires_at: row.get(12),
        rotated_at: row.get(13),
        revoked_at: row.get(14),
        last_used_at: row.get(15),
    }
}

/// Returns a key and locks it until the end of the transaction.
async fn get_for_update(client: &Object, id: ApiKeyId) -> Result<Option<ApiKey>> {
    let sql = format!("SELECT {COLUMNS} FROM faena.api_key WHERE id = $1 FOR UPDATE");
    let row = client.query_opt(&sql, &[&id.0]).await?;
    row.map(|row| Ok(read_row(&row).stored()?.key)).transpose()
}

async fn create(shared: &Shared, stored: &StoredApiKey, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let created = create_in(&client, stored, by, now).await;
    client.end(created).await?;
    reload_and_signal(shared).await
}

async fn create_in(client: &Object, stored: &StoredApiKey, by: &str, now: Timestamp) -> Result<()> {
    let key = &stored.key;
    client
        .execute(
            "INSERT INTO faena.api_key (id, lookup, name, scopes, queues, groups, without_payloads, hash, created_at,
              created_by, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            &[
                &key.id.0,
                &key.lookup,
                &key.name,
                &scopes_text(key),
                &queues_text(key),
                &groups_text(key),
                &key.without_payloads,
                &stored.hash.0.as_slice(),
                &now.as_ms(),
                &by,
                &key.expires_at.map(Timestamp::as_ms),
            ],
        )
        .await?;
    audit::add(client, &key_audit("key.create", key, by), now).await
}

async fn rotate(
    shared: &Shared,
    id: ApiKeyId,
    rotation: &KeyRotation,
    by: &str,
    now: Timestamp,
) -> Result<Option<ApiKey>> {
    let client = shared.begin().await?;
    let rotated = rotate_in(&client, id, rotation, by, now).await;
    let key = client.end(rotated).await?;
    reload_and_signal(shared).await?;
    Ok(key)
}

async fn rotate_in(
    client: &Object,
    id: ApiKeyId,
    rotation: &KeyRotation,
    by: &str,
    now: Timestamp,
) -> Result<Option<ApiKey>> {
    let Some(before) = get_for_update(client, id).await? else { return Ok(None) };
    if let Some(reason) = before.rejection(now) {
        return Err(cannot_rotate(reason));
    }
    client
        .execute(
            "UPDATE faena.api_key SET previous_hash = hash, previous_valid_until = $1, hash = $2, rotated_at = $3
             WHERE id = $4",
            &[&rotation.previous_valid_until.as_ms(), &rotation.hash.0.as_slice(), &now.as_ms(), &id.0],
        )
        .await?;
    audit::add(client, &key_audit("key.rotate", &before, by), now).await?;
    get_for_update(client, id).await
}

async fn revoke(shared: &Shared, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
    let client = shared.begin().await?;
    let revoked = revoke_in(&client, id, by, now).await;
    let key = client.end(revoked).await?;
    reload_and_signal(shared).await?;
    Ok(key)
}

async fn revoke_in(client: &Object, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>> {
    let found = get_for_update(client, id).await?;
    let Some(key) = found.clone().filter(|key| key.revoked_at.is_none()) else { return Ok(found) };
    client.execute("UPDATE faena.api_key SET revoked_at = $1 WHERE id = $2", &[&now.as_ms(), &id.0]).await?;
    audit::add(client, &key_audit("key.revoke", &key, by), now).await?;
    get_for_update(client, id).await
}

async fn set_used(shared: &Shared, used: &[(ApiKeyId, Timestamp)]) -> Result<()> {
    let (ids, times): (Vec<Uuid>, Vec<i64>) = used.iter().map(|(id, at)| (id.0, at.as_ms())).unzip();
    let client = shared.client().await?;
    let updated = client
        .execute(
            "UPDATE faena.api_key AS k SET last_used_at = greatest(coalesce(k.last_used_at, 0), u.at)
             FROM unnest($1::uuid[], $2::int8[]) AS u (id, at) WHERE k.id = u.id",
            &[&ids, &times],
        )
        .await;
    client.return_to_pool(updated.map_err(StoreError::from))?;
    load(shared).await?;
    Ok(())
}

/// Reads the keys again and notifies the other nodes.
async fn reload_and_signal(shared: &Shared) -> Result<()> {
    load(shared).await?;
    shared.signal([Signal::ApiKeys]);
    Ok(())
}
