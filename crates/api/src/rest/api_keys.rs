//! `/api-keys`: creates, lists, rotates and revokes API keys. A secret is shown once, in the answer that creates it.

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_auth::{new_key_text, rotated_key_text};
use faena_domain::{ApiKey, ApiKeyId, ApiKeyText, NewApiKey, StoredApiKey, Timestamp, parse_duration};
use faena_store::KeyRotation;
use faena_wire::{ApiKeyList, ShownApiKey};

use super::paging::{ListResponse, Paging, parse_paging, respond};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, finish, optional_fields, read_body},
};

/// How long the previous secret is accepted after a rotation, if the caller does not say.
const DEFAULT_OVERLAP: Duration = Duration::from_secs(24 * 3_600);
const MAX_OVERLAP: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Lists all keys, newest first, without their secrets.
pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<ApiKeyList> {
    let paging = parse_paging(query.as_deref(), Paging::of_short_list())?;
    let keys = api.engine.store.api_keys_load().await?;
    let mut api_keys: Vec<ApiKey> = keys.values().map(|stored| stored.key.clone()).collect();
    api_keys.sort_by_key(|key| std::cmp::Reverse(key.id));
    let (api_keys, page_info) = paging.page_of_all(api_keys);
    respond(page_info, |page_info| ApiKeyList::new(api_keys, page_info))
}

pub async fn create(State(api): State<Api>, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let now = Timestamp::now();
    let new = NewApiKey::parse(api.parser().fields(&body)?, now).map_err(ApiError::invalid)?;
    let is_first = api.engine.store.api_keys_load().await?.is_empty();
    new.check_first(is_first).map_err(|error| ApiError::invalid(vec![error]))?;
    let text = new_key_text();
    let stored = StoredApiKey::new(new, &text, &actor(), now);
    let key = stored.key.clone();
    api.engine.store.api_key_create(stored, &actor(), now).await?;
    if is_first {
        tracing::info!(by = actor(), key = key.name, "API keys are now required");
    }
    Ok(shown_once(StatusCode::CREATED, key, &text))
}

/// Gives a key a new secret. The previous one is accepted for `overlap`.
pub async fn rotate(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Response> {
    let id = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let overlap = match fields.text("overlap").map(|text| parse_duration(&text)) {
        None => DEFAULT_OVERLAP,
        Some(Some(overlap)) if overlap <= MAX_OVERLAP => overlap,
        Some(_) => {
            fields.reject("overlap", "must be a duration such as 24h, at most 30d");
            DEFAULT_OVERLAP
        }
    };
    finish(fields)?;
    let keys = api.engine.store.api_keys_load().await?;
    let lookup = keys.values().find(|stored| stored.key.id == id).map(|stored| stored.key.lookup.clone());
    let text = rotated_key_text(&lookup.ok_or_else(|| not_found(id))?);
    let now = Timestamp::now();
    let overlap_ms = i64::try_from(overlap.as_millis()).unwrap_or(i64::MAX);
    let rotation = KeyRotation { hash: text.hash(), previous_valid_until: now.plus_ms(overlap_ms) };
    let rotated = api.engine.store.api_key_rotate(id, rotation, &actor(), now).await?;
    Ok(shown_once(StatusCode::OK, rotated.ok_or_else(|| not_found(id))?, &text))
}

pub async fn revoke(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<ApiKey>> {
    let id = parse_id(&id)?;
    let revoked = api.engine.store.api_key_revoke(id, &actor(), Timestamp::now()).await?;
    Ok(Json(revoked.ok_or_else(|| not_found(id))?))
}

/// Answers with a key and its secret, which no cache may keep.
fn shown_once(status: StatusCode, key: ApiKey, text: &ApiKeyText) -> Response {
    let mut response = (status, Json(ShownApiKey { key: text.reveal().to_owned(), details: key })).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn parse_id(text: &str) -> ApiResult<ApiKeyId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

fn not_found(id: ApiKeyId) -> ApiError {
    ApiError::not_found(format!("there is no API key {id}"))
}
