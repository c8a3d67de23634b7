//! Tests of `POST /jobs` and `GET /jobs/:id`.

use axum::http::{Request, StatusCode};
use insta::assert_snapshot;
use serde_json::json;

use crate::app::{App, redacted};

#[tokio::test(flavor = "multi_thread")]
async fn a_job_needs_only_a_name() {
    let app = App::start().await;
    let response = app.post("/api/v1/jobs", r#"{"name": "unhandled.type"}"#).await;
    assert_snapshot!(response.snapshot(), @r#"
    201 Created
    {
      "correlationId": "<id 1>",
      "createdAt": "<time>",
      "id": "<id 1>",
      "status": "QUEUED"
    }
    "#);
    let id = response.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(response.header("location"), format!("/api/v1/jobs/{id}"));
    assert_snapshot!(redacted(&app.job(&id).await), @r#"
    {
      "attempt": 0,
      "backoffMultiplier": 2.0,
      "completedAt": null,
      "concurrencyKey": null,
      "correlationId": "<id 1>",
      "createdAt": "<time>",
      "error": null,
      "errorReason": null,
      "executionLog": [
        {
          "event": "created",
          "timestamp": "<time>"
        },
        {
          "event": "queued",
          "timestamp": "<time>"
        }
      ],
      "expiresAt": null,
      "id": "<id 1>",
      "idempotencyKey": null,
      "jitter": 0.0,
      "maxDelay": 60000,
      "maxRetries": 3,
      "name": "unhandled.type",
      "payload": {},
      "priority": "NORMAL",
      "progress": null,
      "queue": "default",
      "queuedAt": "<time>",
      "result": null,
      "retryCount": 0,
      "retryDelay": 1000,
      "retryOn": "all",
      "run": null,
      "scheduleId": null,
      "scheduledAt": null,
      "startedAt": null,
      "status": "QUEUED",
      "tags": [],
      "timeoutMs": 1800000,
      "type": "unhandled.type",
      "uniqueKey": null,
      "updatedAt": "<time>",
      "webhookUrl": null,
      "workerId": null
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_is_stored() {
    let app = App::start().await;
    let parent = app.create(r#"{"name": "unhandled.type"}"#).await;
    let id = app
        .create(&format!(
            r#"{{
                "name": "Say hello", "type": "email.send", "queue": "mail", "payload": {{"to": "ñ", "n": 12345678901234567890123}},
                "priority": "HIGH", "maxRetries": 5, "retryDelay": 200, "backoffMultiplier": 1.5, "maxDelay": 5000,
                "retryDelays": [10000, 30000], "jitter": true, "retryOn": ["deadlock", "code * of 7"], "timeoutMs": 1234,
                "scheduledAt": "2031-01-01T00:00:00Z", "expiresAt": "2031-01-02T01:00:00+01:00",
                "webhookUrl": "https://example.org/hook", "correlationId": "order-7", "idempotencyKey": "once",
                "uniqueKey": "mail-7", "concurrencyKey": "customer-7", "dependsOn": ["{parent}"],
                "onParentFailure": "run", "tags": ["a", "b"]
            }}"#
        ))
        .await;
    let response = app.get(&format!("/api/v1/jobs/{id}")).await;
    let job = response.json();
    assert_eq!(
        (&job["scheduledAt"], &job["expiresAt"]),
        (&json!("2031-01-01T00:00:00.000Z"), &json!("2031-01-02T00:00:00.000Z"))
    );
    assert!(response.text.contains(r#""payload":{"to": "ñ", "n": 12345678901234567890123}"#), "{}", response.text);
    assert_snapshot!(response.snapshot(), @r#"
    200 OK
    {
      "attempt": 0,
      "backoffMultiplier": 1.5,
      "completedAt": null,
      "concurrencyKey": "customer-7",
      "correlationId": "order-7",
      "createdAt": "<time>",
      "dependsOn": [
        "<id 1>"
      ],
      "error": null,
      "errorReason": null,
      "executionLog": [
        {
          "event": "created",
          "timestamp": "<time>"
        }
      ],
      "expiresAt": "<time>",
      "id": "<id 2>",
      "idempotencyKey": "once",
      "jitter": 0.2,
      "maxDelay": 5000,
      "maxRetries": 5,
      "name": "Say hello",
      "onParentFailure": "run",
      "payload": {
        "n": 1.2345678901234568e+22,
        "to": "ñ"
      },
      "priority": "HIGH",
      "progress": null,
      "queue": "mail",
      "queuedAt": null,
      "result": null,
      "retryCount": 0,
      "retryDelay": 200,
      "retryDelays": [
        10000,
        30000
      ],
      "retryOn": [
        "deadlock",
        "code * of 7"
      ],
      "run": null,
      "scheduleId": null,
      "scheduledAt": "<time>",
      "startedAt": null,
      "status": "PENDING",
      "tags": [
        "a",
        "b"
      ],
      "timeoutMs": 1234,
      "type": "email.send",
      "uniqueKey": "mail-7",
      "updatedAt": "<time>",
      "webhookUrl": "https://example.org/hook",
      "workerId": null
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completed_job_shows_its_log() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    let job = app.wait_for_state(&id, "COMPLETED").await;
    let events: Vec<_> = job["executionLog"].as_array().unwrap().iter().map(|entry| entry["event"].clone()).collect();
    assert_eq!(json!(events), json!(["created", "queued", "assigned", "started", "completed"]));
    assert_eq!(job["correlationId"], id, "its own id is its correlation id");
    assert_eq!(job["workerId"], app.engine.worker_id().to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotency_key_returns_the_same_job_and_rejects_another_body() {
    let app = App::start().await;
    let keyed = |body: &'static str| {
        let request = Request::post("/api/v1/jobs").header("idempotency-key", "once");
        app.send(request.body(body.into()).unwrap())
    };
    let first = keyed(r#"{"name": "noop"}"#).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let id = first.json()["id"].as_str().unwrap().to_owned();
    let second = keyed(r#"{"name": "noop"}"#).await;
    assert_eq!((second.status, &second.json()["id"]), (StatusCode::OK, &json!(id)));
    let other = keyed(r#"{"name": "noop", "priority": "HIGH"}"#).await;
    assert_snapshot!(other.error_snapshot(), @"
    409 CONFLICT: this idempotency key was used for another request: job <id 1>
    id: <id 1>
    ");
    assert_eq!(other.json()["error"]["details"][0]["message"], id, "the id of the job that has the key");
    // The key stays after the job has finished.
    app.wait_for_state(&id, "COMPLETED").await;
    let third = keyed(r#"{"name": "noop"}"#).await;
    assert_eq!((third.status, &third.json()["id"]), (StatusCode::OK, &json!(id)));
    assert_eq!(third.json()["status"], "COMPLETED", "the response has its current state");
    assert_eq!(app.total().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_with_one_idempotency_key_create_one_job() {
    let app = App::start().await;
    let responses = futures_util::future::join_all((0..50).map(|_| {
        let request = Request::post("/api/v1/jobs").header("idempotency-key", "concurrent");
        app.send(request.body(r#"{"name": "noop"}"#.into()).unwrap())
    }))
    .await;
    let ids: std::collections::HashSet<String> = responses.iter().map(|a| a.json()["id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(responses.iter().filter(|response| response.status == StatusCode::CREATED).count(), 1);
    assert_eq!(app.total().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unique_key_is_free_after_its_job_has_finished() {
    let app = App::start().await;
    let body = r#"{"name": "unhandled.type", "uniqueKey": "only one"}"#;
    let id = app.create(body).await;
    let rejected = app.post("/api/v1/jobs", body).await;
    assert_snapshot!(rejected.error_snapshot(), @"
    409 CONFLICT: a job with this uniqueKey has not finished: job <id 1>
    id: <id 1>
    ");
    assert_eq!(rejected.json()["error"]["details"][0]["message"], id);
    app.post(&format!("/api/v1/jobs/{id}/cancel"), "").await;
    let again = app.create(body).await;
    assert_ne!(again, id);
    // A job cannot be retried while another job has its key.
    let retried = app.post(&format!("/api/v1/jobs/{id}/retry"), "").await;
    assert_snapshot!(retried.error_snapshot(), @"
    409 CONFLICT: a job with this uniqueKey has not finished: job <id 1>
    id: <id 1>
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dependent_of_a_failed_job_is_cancelled_or_runs_as_set() {
    let app = App::start().await;
    let parent = app.create(r#"{"name": "unhandled.type"}"#).await;
    let child = app.create(&format!(r#"{{"name": "noop", "dependsOn": ["{parent}"]}}"#)).await;
    let run_anyway =
        app.create(&format!(r#"{{"name": "noop", "dependsOn": ["{parent}"], "onParentFailure": "run"}}"#)).await;
    assert_eq!(app.job(&child).await["status"], "PENDING");
    app.post(&format!("/api/v1/jobs/{parent}/cancel"), "").await;
    let child = app.wait_for_state(&child, "CANCELLED").await;
    assert!(child["error"].as_str().unwrap().contains(&parent), "{child:#}");
    app.wait_for_state(&run_anyway, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_parent_is_rejected() {
    let app = App::start().await;
    let body = r#"{"name": "noop", "dependsOn": ["018f0000-0000-7000-8000-000000000000"]}"#;
    assert_snapshot!(app.post("/api/v1/jobs", body).await.error_snapshot(), @"
    400 VALIDATION_ERROR: dependsOn: there is no job <id 1>
    dependsOn: there is no job <id 1>
    ");
    assert_eq!(app.total().await, 0);
}
