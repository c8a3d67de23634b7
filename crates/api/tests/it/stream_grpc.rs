//! The same by `faena.v1.EventService`.

use std::time::Duration;

use faena_domain::Timestamp;
use faena_wire::v1::{
    Event, EventMessage, SubscribeRequest, event_message::Message, event_service_client::EventServiceClient,
};
use tonic::{Code, Streaming};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use crate::app::App;

fn origin() -> axum::http::Uri {
    axum::http::Uri::from_static("http://127.0.0.1:3000")
}

fn client(app: &App) -> EventServiceClient<axum::Router> {
    EventServiceClient::with_origin(app.router.clone(), origin())
}

async fn next(stream: &mut Streaming<EventMessage>) -> Message {
    let message = tokio::time::timeout(Duration::from_secs(60), stream.message()).await.expect("something comes");
    message.unwrap().expect("the stream goes on").message.expect("one of them")
}

async fn event(stream: &mut Streaming<EventMessage>) -> Event {
    loop {
        match next(stream).await {
            Message::Event(event) => return event,
            Message::Reached(_) => {}
            Message::Gap(gap) => panic!("{gap:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_followed_over_grpc_and_gone_on_with() {
    let app = App::start().await;
    let mut client = client(&app);
    let ask = SubscribeRequest { types: vec!["job.c*".into()], queue: Some("mail".into()), ..Default::default() };
    let mut stream = client.subscribe(ask.clone()).await.unwrap().into_inner();
    assert!(matches!(next(&mut stream).await, Message::Reached(_)), "it tells first from where on nothing is missed");
    app.create(r#"{"name": "noop"}"#).await;
    let id = app.create(r#"{"name": "noop", "queue": "mail", "correlationId": "c"}"#).await;
    let made = event(&mut stream).await;
    assert_eq!((made.r#type.as_str(), made.subject.as_str()), ("job.created", id.as_str()));
    assert_eq!((made.correlation_id.as_str(), made.sequence), ("c", 1));
    let whole: serde_json::Value = serde_json::from_str(&made.cloud_event_json).unwrap();
    assert_eq!(whole["data"], serde_json::from_str::<serde_json::Value>(&made.data_json).unwrap());
    drop(stream);
    let mut stream = client.subscribe(SubscribeRequest { after: Some(made.place), ..ask }).await.unwrap().into_inner();
    assert_eq!(event(&mut stream).await.r#type, "job.completed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_and_a_bad_place_are_told_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    let mut stream = client.subscribe(SubscribeRequest::default()).await.unwrap().into_inner();
    let Message::Reached(begin) = next(&mut stream).await else { panic!("it begins with its place") };
    let id = app.create(r#"{"name": "noop"}"#).await;
    app.job_is(&id, "COMPLETED").await;
    let ahead = Timestamp::now().plus_ms(60_000);
    app.engine.store.event_settle(ahead, 10_000, Timestamp::now()).await.unwrap();
    let again = SubscribeRequest { after: Some(begin.place), ..Default::default() };
    let mut stream = client.subscribe(again).await.unwrap().into_inner();
    next(&mut stream).await;
    let Message::Gap(gap) = next(&mut stream).await else { panic!("a gap") };
    assert_eq!(gap.after, begin.place);
    let refused = client.subscribe(SubscribeRequest { after: Some(-1), ..Default::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("say 0 for all that is kept"), "{}", refused.message());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_is_found_by_reflection() {
    let app = App::start().await;
    let mut client = ServerReflectionClient::with_origin(app.router.clone(), origin());
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = client.server_reflection_info(futures_util::stream::iter([ask])).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else { panic!("a list: {answer:?}") };
    assert!(list.service.iter().any(|service| service.name == "faena.v1.EventService"), "{list:?}");
}
