//! Stores when API keys were last used, in batches. A request only records the time in memory.

use std::collections::HashMap;

use faena_domain::{ApiKeyId, Timestamp};
use faena_store::{Store, StoreError};
use parking_lot::Mutex;

use crate::Round;

/// Last uses of keys that are not stored yet. Bounded by the number of keys.
#[derive(Default)]
pub struct KeyUsage(Mutex<HashMap<ApiKeyId, Timestamp>>);

impl KeyUsage {
    pub fn record(&self, id: ApiKeyId, now: Timestamp) {
        self.0.lock().insert(id, now);
    }

    pub async fn run_once(&self, store: &dyn Store) -> Result<Round, StoreError> {
        let used: Vec<_> = std::mem::take(&mut *self.0.lock()).into_iter().collect();
        if used.is_empty() {
            return Ok(Round::default());
        }
        let handled = used.len();
        if let Err(error) = store.api_keys_used(used.clone()).await {
            let mut unsaved = self.0.lock();
            for (id, at) in used {
                unsaved.entry(id).or_insert(at);
            }
            return Err(error);
        }
        Ok(Round::done(handled))
    }
}
