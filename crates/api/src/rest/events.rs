//! `GET /events`: the events of all nodes as server-sent events. `Last-Event-ID` resumes an earlier stream.

use std::convert::Infallible;

use axum::{
    extract::{RawQuery, State},
    http::HeaderMap,
    response::sse::{Event as SseEvent, Sse},
};
use faena_domain::FieldError;
use faena_engine::event_reader::{Gap, StreamItem};
use faena_store::{EventPosition, StoredEvent};
use futures_util::Stream;
use serde_json::json;

use crate::{
    Api, ApiResult,
    request::{UNKNOWN_PARAMETER, check, query_pairs},
    watch::{EventStream, Item, WatchRequest},
};

pub async fn stream_events(
    State(api): State<Api>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> ApiResult<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>> {
    let mut request = parse_query(query.as_deref())?;
    // A browser that reconnects repeats the URL of its first connection, so the header has the newer position.
    if let Some(id) = headers.get("last-event-id") {
        request.after = Some(("Last-Event-ID", id.to_str().unwrap_or("?").to_owned()));
    }
    let events = EventStream::open(&api, request).await?;
    let stream = futures_util::stream::unfold(events, |mut events| async move {
        let (item, position) = events.next().await?;
        Some((Ok(sse_event(item, position, events.source())), events))
    });
    Ok(Sse::new(stream))
}

/// Parses the query parameters. `EventStream::open` checks their values and reports all errors together.
fn parse_query(query: Option<&str>) -> ApiResult<WatchRequest> {
    let mut request = WatchRequest::default();
    let mut errors = Vec::new();
    for (name, value) in query_pairs(query) {
        match name.as_str() {
            "types" => request.types.extend(value.split(',').map(|kind| kind.trim().to_owned())),
            "queue" => request.queue = Some(value),
            "correlationId" => request.correlation_id = Some(value),
            "jobId" => request.job_id = Some(value),
            "taskId" => request.task_id = Some(value),
            "lastEventId" => request.after = Some(("lastEventId", value)),
            _ => errors.push(FieldError::new(name, UNKNOWN_PARAMETER)),
        }
    }
    check(errors)?;
    Ok(request)
}

fn sse_event(item: Item, position: EventPosition, source: &str) -> SseEvent {
    let message = SseEvent::default().id(position.to_string());
    match item {
        // A client does not dispatch an event without data, but stores its id as the position from which to resume.
        Item::Heartbeat => message.comment("heartbeat"),
        Item::Event(StreamItem::Event(event)) => {
            message.event(event_name(&event)).data(event.cloud_event(source).to_json())
        }
        Item::Event(StreamItem::Gap(gap)) => message.event("gap").data(gap_json(gap)),
    }
}

/// Returns the type of an event without control characters: a line break would end the field.
fn event_name(event: &StoredEvent) -> String {
    event.kind.replace(char::is_control, " ")
}

fn gap_json(gap: Gap) -> String {
    let message = "events in this range were deleted or never stored; read the jobs to see their current state";
    json!({ "after": gap.after, "first": gap.first, "message": message }).to_string()
}
