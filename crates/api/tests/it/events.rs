//! `GET /events`: streams events as server-sent events and resumes after a broken connection.

use std::time::Duration;

use axum::{
    body::{Body, BodyDataStream},
    http::{Request, StatusCode},
};
use faena_domain::Timestamp;
use faena_engine::event_reader::MAX_SUBSCRIBERS;
use futures_util::StreamExt;
use serde_json::Value;
use tower::ServiceExt;

use crate::app::App;

pub const PATH: &str = "/api/v1/events";

/// A client that reads the stream like a browser.
struct Watcher {
    body: BodyDataStream,
    text: String,
    /// The last event id that it received.
    id: Option<String>,
}

#[derive(Debug)]
struct Message {
    event: String,
    data: Value,
}

impl Watcher {
    async fn begin(app: &App, query: &str, last_event_id: Option<&str>) -> Watcher {
        let mut request = Request::get(format!("{PATH}{query}"));
        if let Some(id) = last_event_id {
            request = request.header("Last-Event-ID", id);
        }
        let response = app.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (StatusCode::OK, &"text/event-stream".parse().unwrap())
        );
        let mut watcher = Watcher { body: response.into_body().into_data_stream(), text: String::new(), id: None };
        let greeting = watcher.block().await.unwrap();
        assert!(greeting.contains("id: ") && !greeting.contains("data:"), "{greeting}");
        watcher
    }

    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let block: String = self.text.drain(..end + 2).collect();
                if let Some(id) = field(&block, "id:") {
                    self.id = Some(id);
                }
                return Some(block);
            }
            let part = tokio::time::timeout(Duration::from_secs(60), self.body.next()).await.expect("an event in time");
            self.text.push_str(std::str::from_utf8(&part?.unwrap()).unwrap());
        }
    }

    async fn next(&mut self) -> Message {
        loop {
            let block = self.block().await.expect("the stream stays open");
            if let Some(data) = field(&block, "data:") {
                return Message { event: field(&block, "event:").unwrap(), data: serde_json::from_str(&data).unwrap() };
            }
        }
    }

    async fn until(&mut self, event: &str) -> Vec<Message> {
        let mut all = Vec::new();
        while all.last().is_none_or(|last: &Message| last.event != event) {
            all.push(self.next().await);
        }
        all
    }
}

fn field(block: &str, name: &str) -> Option<String> {
    block.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_a_cloud_event_with_its_type_and_position() {
    let app = App::start().await;
    let mut watcher = Watcher::begin(&app, "?types=job.*", None).await;
    let id = app.create(r#"{"name": "noop", "correlationId": "order-7"}"#).await;
    let events = watcher.until("job.completed").await;
    let first = &events[0];
    assert_eq!(first.event, "job.created");
    assert_eq!(first.data["specversion"], "1.0");
    assert_eq!(first.data["source"], "/faena");
    assert_eq!(first.data["type"], "job.created");
    assert_eq!(first.data["subject"], Value::from(id.as_str()));
    assert_eq!(first.data["correlationid"], "order-7");
    assert_eq!(first.data["actor"], "loopback", "the caller");
    assert_eq!(first.data["datacontenttype"], "application/json");
    assert_eq!(first.data["data"]["jobId"], Value::from(id.as_str()));
    let sequences: Vec<u64> =
        events.iter().map(|event| event.data["sequence"].as_str().unwrap().parse().unwrap()).collect();
    assert_eq!(sequences, (1..=events.len() as u64).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconnecting_client_resumes_after_its_last_event() {
    let app = App::start().await;
    let mut watcher = Watcher::begin(&app, "?types=job.completed", None).await;
    let mut seen = Vec::new();
    let mut created = Vec::new();
    for _ in 0..5 {
        for _ in 0..3 {
            created.push(app.create(r#"{"name": "noop"}"#).await);
        }
        // Disconnects after an event, whatever else was sent.
        seen.push(watcher.next().await.data["subject"].as_str().unwrap().to_owned());
        let id = watcher.id.clone().unwrap();
        drop(watcher);
        created.push(app.create(r#"{"name": "noop"}"#).await);
        // The header overrides the URL: a reconnecting browser sends the URL of its first connection.
        watcher = Watcher::begin(&app, "?types=job.completed&lastEventId=0", Some(&id)).await;
    }
    while seen.len() < created.len() {
        seen.push(watcher.next().await.data["subject"].as_str().unwrap().to_owned());
    }
    seen.sort();
    created.sort();
    assert_eq!(seen, created, "each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_can_start_at_the_oldest_event() {
    let app = App::start().await;
    let first = Watcher::begin(&app, "", None).await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&id, "COMPLETED").await;
    drop(first);
    let mut replay = Watcher::begin(&app, &format!("?lastEventId=0&jobId={id}"), None).await;
    assert_eq!(replay.until("job.completed").await[0].event, "job.created");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_was_away_too_long_receives_a_gap() {
    let app = App::start().await;
    let mut watcher = Watcher::begin(&app, "?types=job.completed", None).await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    watcher.next().await;
    let old = watcher.id.clone().unwrap();
    drop(watcher);
    let other = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&other, "COMPLETED").await;
    app.wait_for_state(&id, "COMPLETED").await;
    let ahead = Timestamp::now().plus_ms(60_000);
    app.engine.store.event_prune(ahead, 10_000, Timestamp::now()).await.unwrap();
    let mut late = Watcher::begin(&app, "", Some(&old)).await;
    let gap = late.next().await;
    assert_eq!((gap.event.as_str(), gap.data["after"].to_string()), ("gap", old.clone()));
    let position = late.id.clone().unwrap();
    assert!(gap.data["first"].as_i64().unwrap() == position.parse::<i64>().unwrap() + 1, "{gap:?} {position}");
    // The gap is reported once, then the stream continues.
    let mut later = Watcher::begin(&app, "?types=job.created", Some(&position)).await;
    let new_job = app.create(r#"{"name": "noop"}"#).await;
    assert_eq!(later.next().await.data["subject"], Value::from(new_job));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_must_match_every_filter() {
    let app = App::start().await;
    let mut watcher =
        Watcher::begin(&app, "?types=job.created,job.completed&queue=mail&correlationId=a%20b", None).await;
    app.create(r#"{"name": "noop", "queue": "mail"}"#).await;
    app.create(r#"{"name": "noop", "correlationId": "a b"}"#).await;
    let id = app.create(r#"{"name": "noop", "queue": "mail", "correlationId": "a b"}"#).await;
    let events = watcher.until("job.completed").await;
    assert_eq!(events.len(), 2);
    assert!(events.iter().all(|event| event.data["subject"] == id.as_str()), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected_with_advice() {
    let app = App::start().await;
    let request = Request::get(PATH).header("Last-Event-ID", "yesterday").body(Body::empty()).unwrap();
    insta::assert_snapshot!(app.send(request).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: Last-Event-ID: must be the id of an event of this stream, or 0 for the oldest; omit it to start now
    Last-Event-ID: must be the id of an event of this stream, or 0 for the oldest; omit it to start now
    ");
    insta::assert_snapshot!(app.get(&format!("{PATH}?lastEventId=-1&jobId=x&queue=&types=%01")).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: 4 fields are not valid
    types: must have 1 to 255 bytes and no control characters
    queue: must have 1 to 255 bytes and no control characters
    jobId: must be a UUID
    lastEventId: must be the id of an event of this stream, or 0 for the oldest; omit it to start now
    ");
    insta::assert_snapshot!(app.get(&format!("{PATH}?type=job")).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: type: unknown parameter
    type: unknown parameter
    ");
    assert_eq!(app.engine.events.reader.subscribers(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_subscribers_is_limited() {
    let app = App::start().await;
    let mut watchers = Vec::new();
    for _ in 0..MAX_SUBSCRIBERS {
        watchers.push(Watcher::begin(&app, "", None).await);
    }
    let response = app.get(PATH).await;
    assert_eq!((response.status, response.header("retry-after")), (StatusCode::SERVICE_UNAVAILABLE, "1"));
    watchers.pop();
    Watcher::begin(&app, "", None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_ends_its_event_streams() {
    let app = App::start().await;
    let mut watcher = Watcher::begin(&app, "", None).await;
    app.closing.cancel();
    while watcher.block().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_streamed_on_postgres_too() {
    let app = App::start_on_postgres().await;
    let mut watcher = Watcher::begin(&app, "?types=job.*", None).await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    let events = watcher.until("job.completed").await;
    assert!(events.iter().all(|event| event.data["subject"] == id.as_str()), "{events:?}");
    app.engine.stop(Default::default()).await;
    app.engine.store.close().await;
}
