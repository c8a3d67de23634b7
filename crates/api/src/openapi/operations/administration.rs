//! Operations below `/api-keys` and `/audit`.

use faena_domain::{
    ApiKey,
    parse::schema::{self, uuid},
};
use faena_wire::{ApiKeyList, AuditList, ShownApiKey};
use serde_json::json;

use crate::openapi::{
    operation::{Operation, Tag},
    requests::{self, filter_text},
};

pub fn audit() -> Operation {
    Operation::new(Tag::Audit, "listAuditEntries", "List changes by callers, newest first")
        .query("actor", filter_text(), "Exactly this actor.")
        .query("action", filter_text(), "Exactly this action, such as `job.cancel`.")
        .query("target", filter_text(), "Exactly this target.")
        .list::<AuditList>("A page of entries.")
}

pub fn keys() -> Operation {
    Operation::new(Tag::ApiKeys, "listApiKeys", "List API keys, newest first")
        .about("Includes revoked and expired keys. Secrets are not shown.")
        .short_list::<ApiKeyList>("A page of keys.")
}

pub fn create_key() -> Operation {
    Operation::new(Tag::ApiKeys, "createApiKey", "Create an API key")
        .about("The response contains the secret, which is not shown again.")
        .body("NewApiKey", schema::api_key, json!({"name": "mailer", "scopes": ["worker"], "queues": ["mail"]}))
        .json::<ShownApiKey>(201, "The key with its secret.")
        .with_header("Cache-Control")
        .link("rotateApiKey", "id", "/id")
        .link("revokeApiKey", "id", "/id")
}

fn on_key(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::ApiKeys, id, summary).path("id", uuid(), "Id of the key.")
}

pub fn rotate_key() -> Operation {
    on_key("rotateApiKey", "Rotate the secret of an API key")
        .about("The response contains the secret, which is not shown again.")
        .optional_body("Rotation", requests::rotation, json!({"overlap": "1h"}))
        .ok::<ShownApiKey>("The key with its new secret.")
        .with_header("Cache-Control")
        .conflict("The key is revoked or expired.")
}

pub fn revoke_key() -> Operation {
    on_key("revokeApiKey", "Revoke an API key")
        .about("Revoking it again changes nothing.")
        .ok::<ApiKey>("The revoked key.")
}
