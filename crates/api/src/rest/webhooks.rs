//! Webhooks as people see them: list, one whole, sent again.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{FieldError, Timestamp, WebhookId, WebhookState, WebhookView};
use faena_store::WebhookFilter;
use faena_wire::WebhookList;

use super::list::form_pairs;
use crate::{Api, ApiError, ApiResult, request::Segment};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<WebhookList>> {
    let Query { filter, after, limit } = read_query(query.as_deref().unwrap_or(""))?;
    let webhooks = api.engine.store.webhook_list(filter, after, limit).await?;
    let next_cursor = if webhooks.len() == limit { webhooks.last().map(|webhook| webhook.id) } else { None };
    Ok(Json(WebhookList { webhooks, limit: limit as u64, next_cursor }))
}

struct Query {
    filter: WebhookFilter,
    after: Option<WebhookId>,
    limit: usize,
}

fn read_query(query: &str) -> ApiResult<Query> {
    let mut ask = Query { filter: WebhookFilter::default(), after: None, limit: 20 };
    let mut errors = Vec::new();
    for (name, value) in form_pairs(query) {
        if let Err(message) = ask.set(&name, value) {
            errors.push(FieldError::new(name, message));
        }
    }
    if errors.is_empty() { Ok(ask) } else { Err(ApiError::invalid(errors)) }
}

impl Query {
    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        if value.contains(char::is_control) {
            return Err("must not contain control characters".into());
        }
        match name {
            "state" => {
                let known = WebhookState::ALL.into_iter().find(|state| state.as_str().eq_ignore_ascii_case(&value));
                let names = || format!("must be one of {}", WebhookState::ALL.map(WebhookState::as_str).join(", "));
                self.filter.state = Some(known.ok_or_else(names)?);
            }
            "jobId" => self.filter.job = Some(value.parse().map_err(|_| "must be the id of a job")?),
            "host" => self.filter.host = Some(value.to_lowercase()),
            "limit" => {
                let limit = value.parse().ok().filter(|n| (1..=100).contains(n));
                self.limit = limit.ok_or("must be a number from 1 to 100")?;
            }
            "cursor" if value.is_empty() => self.after = None,
            "cursor" => {
                let id = value.parse().map_err(|_| "must be the nextCursor of another answer, or empty to begin")?;
                self.after = Some(id);
            }
            _ => return Err("is not a known parameter".into()),
        }
        Ok(())
    }
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<WebhookView>> {
    let webhook = api.engine.store.webhook_get(webhook_id(&id)?).await?;
    let mut webhook = webhook.ok_or_else(|| unknown(&id))?;
    if webhook.state == WebhookState::Waiting {
        webhook.held_back = api.engine.webhooks.held_back(&webhook.url, Timestamp::now());
    }
    Ok(Json(webhook))
}

pub async fn redeliver(State(api): State<Api>, Segment(text): Segment) -> ApiResult<Json<WebhookView>> {
    let id = webhook_id(&text)?;
    let store = &api.engine.store;
    store.webhook_redeliver(id, &crate::frame::actor(), Timestamp::now()).await?.ok_or_else(|| unknown(&text))?;
    Ok(Json(store.webhook_get(id).await?.ok_or_else(|| unknown(&text))?))
}

fn webhook_id(text: &str) -> ApiResult<WebhookId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("there is no webhook {id}; those of old jobs go with them"))
}
