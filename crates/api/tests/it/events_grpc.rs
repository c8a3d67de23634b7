//! Tests of `faena.v1.EventService` and of server reflection.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_wire::v1::{
    Event, SubscribeRequest, SubscribeResponse, event_service_client::EventServiceClient, subscribe_response::Message,
};
use tonic::{Code, Streaming};

use crate::app::App;

fn origin() -> axum::http::Uri {
    axum::http::Uri::from_static("http://127.0.0.1:3000")
}

fn client(app: &App) -> EventServiceClient<axum::Router> {
    EventServiceClient::with_origin(app.router.clone(), origin())
}

async fn next(stream: &mut Streaming<SubscribeResponse>) -> Message {
    let message = tokio::time::timeout(Duration::from_secs(60), stream.message()).await.expect("a message in time");
    message.unwrap().expect("the stream stays open").message.expect("a content")
}

async fn event(stream: &mut Streaming<SubscribeResponse>) -> Event {
    loop {
        match next(stream).await {
            Message::Event(event) => return event,
            Message::Reached(_) => {}
            Message::Gap(gap) => panic!("{gap:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_streamed_over_grpc_and_a_stream_can_be_resumed() {
    let app = App::start().await;
    let mut client = client(&app);
    let request = SubscribeRequest { types: vec!["job.c*".into()], queue: Some("mail".into()), ..Default::default() };
    let mut stream = client.subscribe(request.clone()).await.unwrap().into_inner();
    assert!(
        matches!(next(&mut stream).await, Message::Reached(_)),
        "the first message has the position from which no event is missed"
    );
    app.create(r#"{"name": "noop"}"#).await;
    let id = app.create(r#"{"name": "noop", "queue": "mail", "correlationId": "c"}"#).await;
    let created = event(&mut stream).await;
    assert_eq!((created.r#type.as_str(), created.subject.as_str()), ("job.created", id.as_str()));
    assert_eq!((created.correlation_id.as_str(), created.sequence), ("c", 1));
    let cloud_event: serde_json::Value = serde_json::from_str(&created.cloud_event_json).unwrap();
    assert_eq!(cloud_event["data"], serde_json::from_str::<serde_json::Value>(&created.data_json).unwrap());
    drop(stream);
    let mut stream =
        client.subscribe(SubscribeRequest { after: Some(created.position), ..request }).await.unwrap().into_inner();
    assert_eq!(event(&mut stream).await.r#type, "job.completed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_and_an_invalid_position_are_reported_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    let mut stream = client.subscribe(SubscribeRequest::default()).await.unwrap().into_inner();
    let Message::Reached(begin) = next(&mut stream).await else { panic!("a position first") };
    let id = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&id, "COMPLETED").await;
    let ahead = Timestamp::now().plus_ms(60_000);
    app.engine.store.event_prune(ahead, 10_000, Timestamp::now()).await.unwrap();
    let again = SubscribeRequest { after: Some(begin.position), ..Default::default() };
    let mut stream = client.subscribe(again).await.unwrap().into_inner();
    next(&mut stream).await;
    let Message::Gap(gap) = next(&mut stream).await else { panic!("a gap") };
    assert_eq!(gap.after, begin.position);
    let rejected = client.subscribe(SubscribeRequest { after: Some(-1), ..Default::default() }).await.unwrap_err();
    assert_eq!(rejected.code(), Code::InvalidArgument);
    assert!(rejected.message().contains("or 0 for the oldest"), "{}", rejected.message());
}

/// Lists the services with one version of the reflection protocol; the two differ only in their package.
macro_rules! reflected_services {
    ($app:expr, $version:ident) => {{
        use tonic_reflection::pb::$version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let mut client = ServerReflectionClient::with_origin($app.router.clone(), origin());
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let responses = client.server_reflection_info(futures_util::stream::iter([request])).await.unwrap();
        let response = responses.into_inner().message().await.unwrap().unwrap().message_response.unwrap();
        let MessageResponse::ListServicesResponse(list) = response else { panic!("not a list: {response:?}") };
        list.service.into_iter().map(|service| service.name).collect::<Vec<String>>()
    }};
}

#[tokio::test(flavor = "multi_thread")]
async fn the_services_are_listed_by_both_versions_of_reflection() {
    let app = App::start().await;
    for services in [reflected_services!(app, v1), reflected_services!(app, v1alpha)] {
        for name in ["EventService", "JobService", "ScheduleService", "WorkerService"] {
            assert!(services.contains(&format!("faena.v1.{name}")), "{services:?}");
        }
    }
}
