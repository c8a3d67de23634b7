//! `GET /audit`: every action of a caller is recorded.

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, StatusCode},
};
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::App;

/// Returns `actor action count` of every entry, oldest first.
async fn actions(app: &App) -> Vec<String> {
    let response = app.get("/api/v1/audit").await.json();
    let entries = response["entries"].as_array().unwrap().iter().rev();
    entries
        .map(|e| format!("{} {} {}", e["actor"].as_str().unwrap(), e["action"].as_str().unwrap(), e["count"]))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_action_is_recorded_and_a_rejected_one_is_not() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let job = format!("/api/v1/jobs/{id}");
    app.call("PATCH", &job, r#"{"priority": "HIGH"}"#).await;
    app.post(&format!("{job}/retry"), "").await;
    app.post(&format!("{job}/cancel"), "").await;
    app.post(&format!("{job}/cancel"), "").await;
    app.post(&format!("{job}/retry"), "").await;
    app.wait_for_state(&id, "QUEUED").await;
    app.post("/api/v1/jobs/bulk/cancel", r#"{"filter": {"queue": "default"}, "dryRun": true}"#).await;
    app.post("/api/v1/jobs/bulk/cancel", r#"{"filter": {"queue": "default"}}"#).await;
    app.call("DELETE", &job, "").await;
    app.call("PATCH", "/api/v1/queues/mail", r#"{"concurrency": 3}"#).await;
    app.post("/api/v1/queues/mail/pause", "").await;
    app.post("/api/v1/queues/mail/pause", "").await;
    app.post("/api/v1/queues/mail/resume", "").await;
    app.call("PATCH", "/api/v1/limits", r#"{"scope": "type", "name": "x", "concurrency": 1}"#).await;
    assert_eq!(
        actions(&app).await,
        [
            "loopback job.patch 1",
            "loopback job.cancel 1",
            "loopback job.retry 1",
            "loopback bulk.cancel 1",
            "loopback job.delete 1",
            "loopback queue.set 1",
            "loopback queue.pause 1",
            "loopback queue.resume 1",
            "loopback limit.set 1",
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_has_actor_action_and_time() {
    let app = App::start().await;
    app.post("/api/v1/queues/mail/pause", r#"{"reason": "the SMTP server is down"}"#).await;
    assert_snapshot!(app.get("/api/v1/audit").await.snapshot(), @r#"
    200 OK
    {
      "entries": [
        {
          "action": "queue.pause",
          "actor": "loopback",
          "at": "<time>",
          "count": 1,
          "details": {
            "reason": "the SMTP server is down"
          },
          "sequence": 1,
          "target": "mail"
        }
      ],
      "limit": 20,
      "page": 1,
      "total": 1,
      "totalPages": 1
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_caller_is_recorded_by_its_address() {
    let app = App::start_without_auth().await;
    let peer: std::net::SocketAddr = "10.1.2.3:4567".parse().unwrap();
    let request = Request::post("/api/v1/queues/mail/pause")
        .header("x-actor", "the boss")
        .header("host", "faena.example")
        .extension(ConnectInfo(peer))
        .body(Body::empty())
        .unwrap();
    assert_eq!(app.send(request).await.status, StatusCode::OK);
    assert_eq!(actions(&app).await, ["ip 10.1.2.3 queue.pause 1"]);
    assert_eq!(app.get("/api/v1/queues/mail").await.json()["paused"]["by"], "ip 10.1.2.3");
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_can_be_filtered_and_paged() {
    let app = App::start().await;
    for name in ["a", "b", "c"] {
        app.post(&format!("/api/v1/queues/{name}/pause"), "").await;
    }
    app.post("/api/v1/queues/a/resume", "").await;
    let find = async |query: &str| {
        let response = app.get(&format!("/api/v1/audit?{query}")).await.json();
        let targets: Vec<Value> = response["entries"].as_array().unwrap().iter().map(|e| e["target"].clone()).collect();
        (json!(targets), response["nextCursor"].clone())
    };
    assert_eq!(find("action=queue.pause").await.0, json!(["c", "b", "a"]));
    assert_eq!(find("target=a").await.0, json!(["a", "a"]));
    assert_eq!(find("actor=unknown").await.0, json!([]));
    let (first, next) = find("limit=3").await;
    assert_eq!(first, json!(["a", "c", "b"]));
    let next = next.as_str().unwrap();
    assert_eq!(find(&format!("limit=3&cursor={next}")).await, (json!(["a"]), Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_parameters_are_reported() {
    let app = App::start().await;
    let response = app.get("/api/v1/audit?limit=0&cursor=x&colour=red&actor=a%00b").await;
    assert_snapshot!(response.error_snapshot(), @r"
    400 VALIDATION_ERROR: 4 fields are not valid
    limit: must be a number from 1 to 100
    cursor: must be the nextCursor of the previous page, or empty for the first page
    colour: unknown parameter
    actor: must not contain control characters
    ");
}
