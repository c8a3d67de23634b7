//! `GET /jobs/:id/events`: streams the changes of a job until it finishes.

use std::time::Duration;

use axum::{
    body::Body,
    http::{Request, Response},
};
use futures_util::StreamExt;
use serde_json::Value;
use tower::ServiceExt;

use crate::app::App;

async fn follow(app: &App, id: &str) -> Vec<(String, Value)> {
    read(open(app, id).await).await
}

async fn open(app: &App, id: &str) -> Response<Body> {
    let request = Request::get(format!("/api/v1/jobs/{id}/events")).body(Body::empty()).unwrap();
    let response = app.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    response
}

/// Returns the name and the data of every event until the stream ends.
async fn read(response: Response<Body>) -> Vec<(String, Value)> {
    let mut text = String::new();
    let mut body = response.into_body().into_data_stream();
    let read_all = async {
        while let Some(part) = body.next().await {
            text.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read_all).await.expect("the stream ends with its job");
    let field =
        |event: &str, name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(|v| v.trim().to_owned()));
    text.split("\n\n")
        .filter_map(|event| Some((field(event, "event:")?, serde_json::from_str(&field(event, "data:")?).unwrap())))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_shows_the_progress_and_the_end_of_a_job() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 600, "steps": 3}}"#).await;
    let events = follow(&app, &id).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.last(), Some(&"job.completed"), "{names:?}");
    assert!(names.contains(&"job.progress"), "{names:?}");
    let seen: Vec<u64> = events.iter().filter_map(|(_, job)| job["progress"]["completedSteps"].as_u64()).collect();
    assert!(seen.is_sorted(), "{seen:?}");
    assert!(!seen.is_empty());
    let (_, last) = events.last().unwrap();
    assert_eq!((&last["id"], &last["status"]), (&Value::from(id.as_str()), &Value::from("COMPLETED")));
    let mut merged = serde_json::Map::new();
    for (_, change) in &events {
        apply(&mut merged, change);
    }
    let mut stored = app.job(&id).await.as_object().unwrap().clone();
    stored.retain(|_, value| !value.is_null());
    assert_eq!(merged, stored, "the first event and all changes make the whole job");
    assert!(last.get("payload").is_none() && last.get("name").is_none(), "what has not changed is not sent: {last}");
}

/// Applies a change as the reference describes it.
fn apply(job: &mut serde_json::Map<String, Value>, change: &Value) {
    for (name, value) in change.as_object().unwrap() {
        match (job.get_mut(name), value) {
            (Some(Value::Array(known)), Value::Array(new))
                if ["executionLog", "steps", "attempts"].contains(&name.as_str()) =>
            {
                known.extend(new.iter().cloned());
            }
            (_, Value::Null) => {
                job.remove(name);
            }
            _ => {
                job.insert(name.clone(), value.clone());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_watchers_of_one_job_all_see_its_end() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 300, "steps": 3}}"#).await;
    let all = futures_util::future::join_all((0..50).map(|_| follow(&app, &id))).await;
    for events in all {
        assert_eq!(events.last().unwrap().0, "job.completed");
        let entries = events.iter().filter_map(|(_, change)| change["executionLog"].as_array());
        let entries: Vec<String> = entries.flatten().map(Value::to_string).collect();
        let stored = app.job(&id).await;
        let stored: Vec<String> = stored["executionLog"].as_array().unwrap().iter().map(Value::to_string).collect();
        assert_eq!(entries, stored, "every entry is sent once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_a_finished_job_has_one_event() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#).await;
    app.wait_for_state(&id, "FAILED").await;
    let events = follow(&app, &id).await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].0, "job.failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_cancelled_or_deleted_ends_its_stream() {
    let app = App::start().await;
    for (method, action) in [("POST", "/cancel"), ("DELETE", "")] {
        let id = app.create(r#"{"name": "unhandled.type"}"#).await;
        let path = format!("/api/v1/jobs/{id}{action}");
        // Opened first: a deleted job has no stream.
        let stream = open(&app, &id).await;
        let (events, response) = tokio::join!(read(stream), app.call(method, &path, ""));
        assert!(response.status.is_success());
        let first = &events[0].1["status"];
        assert!(first == "QUEUED" || first == "CANCELLED", "{events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_ends_its_streams() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let closing = app.closing.clone();
    let (events, ()) = tokio::join!(follow(&app, &id), async move { closing.cancel() });
    assert_eq!(events.len(), 1);
}
