//! `faena.v1.EventService`: streams the same events as `GET /api/v1/events`.

use std::pin::Pin;

use faena_engine::event_reader::StreamItem;
use faena_store::{EventPosition, StoredEvent};
use faena_wire::v1::{
    Event, EventGap, PositionReached, SubscribeRequest, SubscribeResponse, event_service_server::EventService,
    subscribe_response::Message,
};
use futures_util::Stream;
use tonic::{Request, Response, Status};

use super::{GrpcResult, convert};
use crate::{
    Api, ApiError, access, context,
    watch::{EventStream, Item, WatchRequest},
};

pub struct Events(pub Api);

#[tonic::async_trait]
impl EventService for Events {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<SubscribeResponse, Status>> + Send>>;

    async fn subscribe(&self, request: Request<SubscribeRequest>) -> GrpcResult<Self::SubscribeStream> {
        access::require_events(&context::access().map_err(ApiError::from)?)?;
        let request = request.into_inner();
        let request = WatchRequest {
            types: request.types,
            queue: request.queue,
            correlation_id: request.correlation_id,
            job_id: request.job_id,
            task_id: request.task_id,
            after: request.after.map(|position| ("after", position.to_string())),
        };
        let events = EventStream::open(&self.0, request).await?;
        let stream = futures_util::stream::unfold(events, |mut events| async move {
            let (item, position) = events.next().await?;
            Some((Ok(response(item, position, events.source())), events))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

fn response(item: Item, position: EventPosition, source: &str) -> SubscribeResponse {
    let message = match item {
        Item::Heartbeat => Message::Reached(PositionReached { position }),
        Item::Event(StreamItem::Event(stored)) => Message::Event(event(&stored, source)),
        Item::Event(StreamItem::Gap(gap)) => Message::Gap(EventGap { after: gap.after, first: gap.first }),
    };
    SubscribeResponse { message: Some(message) }
}

pub fn event(event: &StoredEvent, source: &str) -> Event {
    Event {
        position: event.position,
        id: event.id.to_string(),
        r#type: event.kind.clone(),
        subject: event.subject.to_string(),
        time: Some(convert::timestamp(event.at)),
        correlation_id: event.correlation_id.clone(),
        sequence: event.sequence,
        actor: event.actor.clone(),
        traceparent: event.traceparent.clone(),
        data_json: event.data.clone(),
        cloud_event_json: event.cloud_event(source).to_json(),
    }
}
