//! `/webhooks`: lists, shows and redelivers webhooks.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{Timestamp, WebhookId, WebhookState, WebhookView};
use faena_store::WebhookFilter;
use faena_wire::WebhookList;

use super::paging::{ListResponse, Paging, respond};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, read_query},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<WebhookList> {
    let (mut filter, mut paging) = (WebhookFilter::default(), Paging::<WebhookId>::new());
    read_query(query.as_deref(), &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "state" => filter.state = Some(parse_state(&value)?),
            "jobId" => filter.job = Some(value.parse().map_err(|_| "must be a UUID")?),
            "taskId" => filter.task = Some(value.parse().map_err(|_| "must be a UUID")?),
            "host" => filter.host = Some(value.to_lowercase()),
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let store = &api.engine.store;
    let total = store.webhook_total(filter.clone()).await?;
    let read = store.webhook_list(filter, paging.after(), paging.wanted()?).await?;
    let (webhooks, page_info) = paging.page_of_read(read, total, |webhook| webhook.id)?;
    respond(page_info, |page_info| WebhookList::new(webhooks, page_info))
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
        webhook.delay_reason = api.engine.events.webhooks.delay_reason(&webhook.url, Timestamp::now());
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
    ApiError::not_found(format!("no webhook {id}; a webhook is deleted together with its job or task"))
}
