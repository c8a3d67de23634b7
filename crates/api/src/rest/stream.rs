//! `GET /events`: what happens, on all nodes, as server-sent events. `Last-Event-ID` goes on where another connection ended.

use std::convert::Infallible;

use axum::{
    extract::{RawQuery, State},
    http::HeaderMap,
    response::sse::{Event as SseEvent, Sse},
};
use faena_domain::FieldError;
use faena_engine::live::{Gap, Told};
use faena_store::{EventPosition, StoredEvent};
use futures_util::Stream;
use serde_json::json;

use super::list::form_pairs;
use crate::{
    Api, ApiError, ApiResult,
    watch::{Ask, Item, Watch},
};

pub async fn events(
    State(api): State<Api>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> ApiResult<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>> {
    let mut ask = read_query(query.as_deref().unwrap_or(""))?;
    // A browser that connects again says in the header how far it has come; the address is still that of the first time.
    if let Some(id) = headers.get("last-event-id") {
        ask.from = Some(("Last-Event-ID", id.to_str().unwrap_or("?").to_owned()));
    }
    let watch = Watch::begin(&api, ask).await?;
    let stream = futures_util::stream::unfold(watch, |mut watch| async move {
        let (item, place) = watch.next().await?;
        Some((Ok(message(item, place, watch.source())), watch))
    });
    Ok(Sse::new(stream))
}

fn read_query(query: &str) -> ApiResult<Ask> {
    let mut ask = Ask::default();
    let mut errors = Vec::new();
    for (name, value) in form_pairs(query) {
        match name.as_str() {
            "types" => ask.types.extend(value.split(',').map(|kind| kind.trim().to_owned())),
            "queue" => ask.queue = Some(value),
            "correlationId" => ask.correlation_id = Some(value),
            "jobId" => ask.job_id = Some(value),
            "lastEventId" => ask.from = Some(("lastEventId", value)),
            _ => errors.push(FieldError::new(name, "is not a known parameter")),
        }
    }
    if errors.is_empty() { Ok(ask) } else { Err(ApiError::invalid(errors)) }
}

fn message(item: Item, place: EventPosition, source: &str) -> SseEvent {
    let message = SseEvent::default().id(place.to_string());
    match item {
        // Without data it is no message to anybody, but it moves the place from which a client goes on.
        Item::Heartbeat => message.comment("heartbeat"),
        Item::Told(Told::Event(event)) => message.event(name(&event)).data(event.cloud_event(source).to_json()),
        Item::Told(Told::Lost(gap)) => message.event("gap").data(lost(gap)),
    }
}

/// Nothing that would end the line.
fn name(event: &StoredEvent) -> String {
    event.kind.replace(char::is_control, " ")
}

fn lost(gap: Gap) -> String {
    let message = "what happened in between is not kept any more, or was not kept; look at the jobs themselves";
    json!({ "after": gap.after, "first": gap.first, "message": message }).to_string()
}
