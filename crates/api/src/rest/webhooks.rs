//! `/webhooks`: lists, shows and redelivers webhooks.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{Timestamp, WebhookId, WebhookState, WebhookView};
use faena_store::WebhookFilter;
use faena_wire::WebhookList;

use super::list::parse_cursor;
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, parse_number, read_query},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<WebhookList>> {
    let (mut filter, mut after, mut limit) = (WebhookFilter::default(), None, 20);
    read_query(query.as_deref(), &[], |name, value| {
        match name {
            "state" => filter.state = Some(parse_state(&value)?),
            "jobId" => filter.job = Some(value.parse().map_err(|_| "must be a UUID")?),
            "host" => filter.host = Some(value.to_lowercase()),
            "limit" => limit = parse_number(&value, 100)?,
            "cursor" => after = parse_cursor(&value)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let webhooks = api.engine.store.webhook_list(filter, after, limit).await?;
    let next_cursor = if webhooks.len() == limit { webhooks.last().map(|webhook| webhook.id) } else { None };
    Ok(Json(WebhookList { webhooks, limit: limit as u64, next_cursor }))
}

fn parse_state(name: &str) -> Result<WebhookState, String> {
    let state = WebhookState::ALL.into_iter().find(|state| state.as_str().eq_ignore_ascii_case(name));
    state.ok_or_else(|| format!("must be one of {}", WebhookState::ALL.map(WebhookState::as_str).join(", ")))
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<WebhookView>> {
    let webhook = api.engine.store.webhook_get(parse_id(&id)?).await?;
    let mut webhook = webhook.ok_or_else(|| unknown(&id))?;
    if webhook.state == WebhookState::Waiting {
        // Each node has its own circuit breakers; the store does not know them.
        webhook.held_back = api.engine.events.webhooks.held_back(&webhook.url, Timestamp::now());
    }
    Ok(Json(webhook))
}

pub async fn redeliver(State(api): State<Api>, Segment(text): Segment) -> ApiResult<Json<WebhookView>> {
    let id = parse_id(&text)?;
    let store = &api.engine.store;
    store.webhook_redeliver(id, &actor(), Timestamp::now()).await?.ok_or_else(|| unknown(&text))?;
    Ok(Json(store.webhook_get(id).await?.ok_or_else(|| unknown(&text))?))
}

fn parse_id(text: &str) -> ApiResult<WebhookId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("no webhook {id}; a webhook is deleted together with its job"))
}
