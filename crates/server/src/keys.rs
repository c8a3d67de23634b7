//! `faena keys create --offline`: creates an API key in the database, without a server.

use faena_auth::new_key_text;
use faena_cli::keys::{Create, created};
use faena_domain::{FieldError, NewApiKey, StoredApiKey, Timestamp, parse::Fields};
use faena_store::Store;
use faena_wire::ShownApiKey;

use crate::{config::Config, serve::CannotStart};

/// Actor of the audit entry: without a server, the caller is only known to be able to write to the database.
const ACTOR: &str = "faena keys --offline";

pub async fn create_offline(config: &Config, create: &Create) -> anyhow::Result<String> {
    let body = create.key.body().to_string();
    let now = Timestamp::now();
    let invalid = |errors: Vec<FieldError>| CannotStart::new(FieldError::join(&errors));
    let fields = Fields::parse(body.as_bytes(), body.len()).expect("the body was written as a JSON object");
    let new = NewApiKey::parse(fields, now).map_err(invalid)?;
    let store = faena_store::open(config.text("database.url"), config.store(true)).await?;
    let shown = store_key(&*store, new, now).await;
    store.close().await;
    let shown = shown?;
    Ok(if create.connection.json { serde_json::to_string(&shown)? } else { created(&shown) })
}

async fn store_key(store: &dyn Store, new: NewApiKey, now: Timestamp) -> anyhow::Result<ShownApiKey> {
    new.check_first(store.api_keys().is_empty()).map_err(|error| CannotStart::new(error.to_string()))?;
    let text = new_key_text();
    let stored = StoredApiKey::new(new, &text, ACTOR, now);
    let shown = ShownApiKey { key: text.reveal().to_owned(), details: stored.key.clone() };
    store.api_key_create(stored, ACTOR, now).await?;
    Ok(shown)
}
