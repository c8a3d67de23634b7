//! `faena.v1.EventService`: what happens, as `GET /api/v1/events` tells it.

use std::pin::Pin;

use faena_engine::live::Told;
use faena_store::{EventPosition, StoredEvent};
use faena_wire::v1::{
    Event, EventGap, EventMessage, EventPlaceReached, SubscribeRequest, event_message::Message,
    event_service_server::EventService,
};
use futures_util::Stream;
use tonic::{Request, Response, Status};

use crate::{
    Api,
    watch::{Ask, Item, Watch},
};

pub struct Events(pub Api);

#[tonic::async_trait]
impl EventService for Events {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<EventMessage, Status>> + Send>>;

    async fn subscribe(&self, request: Request<SubscribeRequest>) -> Result<Response<Self::SubscribeStream>, Status> {
        let request = request.into_inner();
        let ask = Ask {
            types: request.types,
            queue: request.queue,
            correlation_id: request.correlation_id,
            job_id: request.job_id,
            from: request.after.map(|place| ("after", place.to_string())),
        };
        let watch = Watch::begin(&self.0, ask).await?;
        let stream = futures_util::stream::unfold(watch, |mut watch| async move {
            let (item, place) = watch.next().await?;
            Some((Ok(message(item, place, watch.source())), watch))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

fn message(item: Item, place: EventPosition, source: &str) -> EventMessage {
    let message = match item {
        Item::Heartbeat => Message::Reached(EventPlaceReached { place }),
        Item::Told(Told::Event(event)) => Message::Event(told(&event, source)),
        Item::Told(Told::Lost(gap)) => Message::Gap(EventGap { after: gap.after, first: gap.first }),
    };
    EventMessage { message: Some(message) }
}

fn told(event: &StoredEvent, source: &str) -> Event {
    Event {
        place: event.position,
        id: event.id.to_string(),
        r#type: event.kind.clone(),
        subject: event.subject.to_string(),
        time_ms: event.at.as_ms(),
        correlation_id: event.correlation_id.clone(),
        sequence: event.sequence,
        actor: event.actor.clone(),
        traceparent: event.traceparent.clone(),
        data_json: event.data.clone(),
        cloud_event_json: event.cloud_event(source).to_json(),
    }
}
