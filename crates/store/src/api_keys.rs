//! API keys. All keys are cached in memory and read again when one changes, so that checking a request needs no
//! database.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use faena_domain::{ApiKey, ApiKeyId, KeyHash, KeyScope, StoredApiKey, Timestamp};
use serde_json::json;
use tokio::sync::watch;

use crate::{AuditEntry, Result, StoreError};

/// API keys.
#[async_trait]
pub trait ApiKeyStore: Send + Sync + 'static {
    /// Returns the keys as this process last read them, by the public part of their text.
    fn api_keys(&self) -> Arc<HashMap<String, StoredApiKey>>;

    /// Returns a receiver that sees every later change of [`ApiKeyStore::api_keys`].
    fn api_keys_watch(&self) -> watch::Receiver<Arc<HashMap<String, StoredApiKey>>>;

    /// Reads the keys again, because another node or `faena keys` may have changed them.
    async fn api_keys_load(&self) -> Result<Arc<HashMap<String, StoredApiKey>>>;

    /// Stores a new key, with its entry in the audit log.
    async fn api_key_create(&self, key: StoredApiKey, by: &str, now: Timestamp) -> Result<()>;

    /// Replaces the secret of a key that is neither revoked nor expired, with its entry in the audit log.
    ///
    /// The previous secret is accepted until `rotation.previous_valid_until`, or until the next rotation. Returns `None` if no key has
    /// this id.
    async fn api_key_rotate(
        &self,
        id: ApiKeyId,
        rotation: KeyRotation,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<ApiKey>>;

    /// Revokes a key permanently, with its entry in the audit log. Revoking it again changes nothing.
    async fn api_key_revoke(&self, id: ApiKeyId, by: &str, now: Timestamp) -> Result<Option<ApiKey>>;

    /// Records when keys were last used, in one batch. A time before the stored one changes nothing.
    async fn api_keys_used(&self, used: Vec<(ApiKeyId, Timestamp)>) -> Result<()>;
}

/// A new secret for a key: its hash, and until when the previous secret is accepted.
#[derive(Clone, Debug)]
pub struct KeyRotation {
    pub hash: KeyHash,
    pub previous_valid_until: Timestamp,
}

/// The keys as this process last read them.
#[derive(Default)]
pub struct ApiKeyCache {
    keys: watch::Sender<Arc<HashMap<String, StoredApiKey>>>,
    /// Held while the keys are read and set, so that an older read never replaces a newer one.
    loading: tokio::sync::Mutex<()>,
}

impl ApiKeyCache {
    /// Waits until no other call reads the keys.
    pub async fn begin_load(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.loading.lock().await
    }

    pub fn current(&self) -> Arc<HashMap<String, StoredApiKey>> {
        self.keys.borrow().clone()
    }

    pub fn watch(&self) -> watch::Receiver<Arc<HashMap<String, StoredApiKey>>> {
        self.keys.subscribe()
    }

    pub fn set(&self, keys: Vec<StoredApiKey>) -> Arc<HashMap<String, StoredApiKey>> {
        let keys: HashMap<_, _> = keys.into_iter().map(|key| (key.key.lookup.clone(), key)).collect();
        let keys = Arc::new(keys);
        self.keys.send_replace(keys.clone());
        keys
    }
}

/// Columns of the table `api_key`, in the order of [`COLUMNS`].
pub struct ApiKeyRow {
    pub id: uuid::Uuid,
    pub lookup: String,
    pub name: String,
    pub scopes: String,
    pub queues: Option<String>,
    pub groups: String,
    pub without_payloads: bool,
    pub hash: Vec<u8>,
    pub previous_hash: Option<Vec<u8>>,
    pub previous_valid_until: Option<i64>,
    pub created_at: i64,
    pub created_by: String,
    pub expires_at: Option<i64>,
    pub rotated_at: Option<i64>,
    pub revoked_at: Option<i64>,
    pub last_used_at: Option<i64>,
}

pub const COLUMNS: &str = "id, lookup, name, scopes, queues, groups, without_payloads, hash, previous_hash, previous_valid_until, \
     created_at, created_by, expires_at, rotated_at, revoked_at, last_used_at";

impl ApiKeyRow {
    pub fn stored(self) -> Result<StoredApiKey> {
        let unreadable = |part: &str| StoreError::Internal(format!("the {part} of an API key cannot be read").into());
        let hash = |bytes: Vec<u8>| bytes.try_into().map(KeyHash).map_err(|_| unreadable("hash"));
        let time = |ms: Option<i64>| ms.map(Timestamp::from_ms);
        let queues = self.queues.map(|text| serde_json::from_str(&text)).transpose();
        let groups = serde_json::from_str(&self.groups);
        Ok(StoredApiKey {
            hash: hash(self.hash)?,
            previous_hash: self.previous_hash.map(hash).transpose()?,
            key: ApiKey {
                id: ApiKeyId(self.id),
                lookup: self.lookup,
                name: self.name,
                scopes: self.scopes.split(' ').filter_map(KeyScope::parse).collect(),
                queues: queues.map_err(|_| unreadable("queues"))?,
                groups: groups.map_err(|_| unreadable("groups"))?,
                without_payloads: self.without_payloads,
                created_at: Timestamp::from_ms(self.created_at),
                created_by: self.created_by,
                expires_at: time(self.expires_at),
                rotated_at: time(self.rotated_at),
                previous_valid_until: time(self.previous_valid_until),
                revoked_at: time(self.revoked_at),
                last_used_at: time(self.last_used_at),
            },
        })
    }
}

pub fn scopes_text(key: &ApiKey) -> String {
    key.scopes.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(" ")
}

pub fn queues_text(key: &ApiKey) -> Option<String> {
    key.queues.as_ref().map(|queues| json!(queues).to_string())
}

pub fn groups_text(key: &ApiKey) -> String {
    json!(key.groups).to_string()
}

/// Returns the audit entry of a change. It names the key, never its secret or hash.
pub fn key_audit(action: &str, key: &ApiKey, by: &str) -> AuditEntry {
    AuditEntry {
        actor: by.into(),
        action: action.into(),
        target: key.id.to_string(),
        details: json!({
            "name": key.name, "scopes": key.scopes, "queues": key.queues, "groups": key.groups,
            "withoutPayloads": key.without_payloads, "expiresAt": key.expires_at,
        }),
        count: 1,
    }
}

pub fn cannot_rotate(reason: &str) -> StoreError {
    StoreError::Conflict { message: format!("{reason}; create a new one"), existing_job: None }
}
