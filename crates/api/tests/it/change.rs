//! Patch, delete, cancel and retry: which action each state of a job allows.

use axum::http::StatusCode;
use faena_engine::EngineConfig;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::{App, redacted};

fn path(id: &str) -> String {
    format!("/api/v1/jobs/{id}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_has_not_started_can_be_changed() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "elsewhere.kind", "payload": {"n": 1}}"#).await;
    let patch = r#"{"priority": "CRITICAL", "payload": {"n":  2}, "maxRetries": 7, "retryDelay": 500, "timeoutMs": 9,
        "expiresAt": "2032-01-01T00:00:00Z", "scheduledAt": "2031-01-01T00:00:00Z"}"#;
    let response = app.call("PATCH", &path(&id), patch).await;
    assert!(response.text.contains(r#""payload":{"n":  2}"#), "{}", response.text);
    assert_snapshot!(response.shown(), @r#"
    200 OK
    {
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
          "details": "priority CRITICAL, payload, scheduledAt <time>, expiresAt <time>, maxRetries 7, retryDelay 500, timeoutMs 9",
          "event": "patched",
          "timestamp": "<time>"
        }
      ],
      "expiresAt": "<time>",
      "id": "<id 1>",
      "idempotencyKey": null,
      "jitter": 0.0,
      "maxDelay": 60000,
      "maxRetries": 7,
      "name": "elsewhere.kind",
      "payload": {
        "n": 2
      },
      "priority": "CRITICAL",
      "progress": null,
      "queue": "default",
      "queuedAt": null,
      "result": null,
      "retryCount": 0,
      "retryDelay": 500,
      "retryOn": "all",
      "run": null,
      "scheduleId": null,
      "scheduledAt": "<time>",
      "startedAt": null,
      "status": "PENDING",
      "tags": [],
      "timeoutMs": 9,
      "type": "elsewhere.kind",
      "uniqueKey": null,
      "updatedAt": "<time>",
      "webhookUrl": null,
      "workerId": null
    }
    "#);
    let back = app.call("PATCH", &path(&id), r#"{"scheduledAt": null, "expiresAt": null}"#).await;
    assert_eq!(back.json()["status"], "QUEUED");
    assert_eq!((&back.json()["scheduledAt"], &back.json()["expiresAt"]), (&Value::Null, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_changes_are_rejected_with_every_error() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "elsewhere.kind"}"#).await;
    let mut output = String::new();
    for body in [
        "{}",
        r#"{"name": "other", "status": "COMPLETED", "priority": "HIGH"}"#,
        r#"{"priority": 1, "payload": [], "maxRetries": 11, "retryDelay": 1, "timeoutMs": 0, "scheduledAt": "soon", "expiresAt": 1}"#,
        r#"{"timeoutMs": 99999999999999}"#,
        r#"{"scheduledAt": "2031-01-02T00:00:00Z", "expiresAt": "2031-01-01T00:00:00Z"}"#,
        r#"{"priority": null}"#,
        "[]",
    ] {
        output.push_str(&format!("{}\n", app.call("PATCH", &path(&id), body).await.errors()));
    }
    assert_snapshot!(output, @"
    400 VALIDATION_ERROR: body: nothing to change; set priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay or timeoutMs
    body: nothing to change; set priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay or timeoutMs
    400 VALIDATION_ERROR: 2 fields are not valid
    name: unknown field
    status: unknown field
    400 VALIDATION_ERROR: 7 fields are not valid
    scheduledAt: must be a time like 2026-11-15T20:00:00Z
    expiresAt: must be a time like 2026-11-15T20:00:00Z
    priority: must be LOW, NORMAL, HIGH or CRITICAL
    payload: must be a JSON object
    maxRetries: must be from 0 to 10, is 11
    retryDelay: must be from 100 to 3600000, is 1
    timeoutMs: must be from 1 to 2592000000, is 0
    400 VALIDATION_ERROR: timeoutMs: must be from 1 to 2592000000, is 99999999999999
    timeoutMs: must be from 1 to 2592000000, is 99999999999999
    400 VALIDATION_ERROR: expiresAt: must be later than scheduledAt
    expiresAt: must be later than scheduledAt
    400 VALIDATION_ERROR: body: nothing to change; set priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay or timeoutMs
    body: nothing to change; set priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay or timeoutMs
    400 VALIDATION_ERROR: body: must be a JSON object
    body: must be a JSON object
    ");
    let planned = app
        .create(r#"{"name": "noop", "scheduledAt": "2031-01-02T00:00:00Z", "expiresAt": "2031-01-03T00:00:00Z"}"#)
        .await;
    for patch in [r#"{"scheduledAt": "2031-01-03T00:00:00Z"}"#, r#"{"expiresAt": "2031-01-02T00:00:00Z"}"#] {
        let response = app.call("PATCH", &path(&planned), patch).await;
        assert_eq!(response.json()["error"]["details"][0]["path"], "expiresAt", "{}", response.text);
    }
    let done = app.create(r#"{"name": "noop"}"#).await;
    app.job_is(&done, "COMPLETED").await;
    let late = app.call("PATCH", &path(&done), r#"{"priority": "HIGH"}"#).await;
    assert_snapshot!(late.errors(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be changed");
    let running = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.job_is(&running, "PROCESSING").await;
    let late = app.call("PATCH", &path(&running), r#"{"priority": "HIGH"}"#).await;
    assert_eq!((late.status, &late.json()["error"]["code"]), (StatusCode::CONFLICT, &json!("INVALID_TRANSITION")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_deleted_with_its_data_unless_it_runs() {
    let app = App::start().await;
    let running = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.job_is(&running, "PROCESSING").await;
    assert_snapshot!(app.call("DELETE", &path(&running), "").await.errors(), @"409 INVALID_TRANSITION: a job that is PROCESSING cannot be deleted; cancel it first");
    let done = app.create(r#"{"name": "noop"}"#).await;
    app.job_is(&done, "COMPLETED").await;
    let waiting = app.create(r#"{"name": "noop", "scheduledAt": "2031-01-01T00:00:00Z", "tags": ["t"]}"#).await;
    let queued = app.create(r#"{"name": "elsewhere.kind", "uniqueKey": "u", "idempotencyKey": "i"}"#).await;
    for id in [&done, &waiting, &queued] {
        let deleted = app.call("DELETE", &path(id), "").await;
        assert_eq!((deleted.status, deleted.json()), (StatusCode::OK, json!({"success": true})));
        assert_eq!(app.get(&path(id)).await.status, StatusCode::NOT_FOUND);
        assert_eq!(app.call("DELETE", &path(id), "").await.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(app.total().await, 1);
    assert_eq!(app.get("/api/v1/jobs?tag=t").await.json()["total"], 0);
    // Its keys are free again.
    app.create(r#"{"name": "elsewhere.kind", "uniqueKey": "u", "idempotencyKey": "i"}"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_does_not_wait_for_a_deleted_parent() {
    let app = App::start().await;
    let parent = app.create(r#"{"name": "elsewhere.kind"}"#).await;
    let child = app.create(&format!(r#"{{"name": "noop", "dependsOn": ["{parent}"]}}"#)).await;
    let deleted = app.call("DELETE", &path(&parent), "").await;
    if deleted.status == StatusCode::OK {
        app.job_is(&child, "CANCELLED").await;
    } else {
        assert_eq!(deleted.status, StatusCode::CONFLICT, "{}", deleted.text);
        assert_eq!(app.job(&parent).await["status"], "QUEUED");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_job_is_cancelled_at_once() {
    let app = App::start().await;
    for body in [r#"{"name": "elsewhere.kind"}"#, r#"{"name": "noop", "scheduledAt": "2031-01-01T00:00:00Z"}"#] {
        let id = app.create(body).await;
        let response = app.post(&format!("{}/cancel", path(&id)), "").await;
        assert_eq!((response.status, response.json()), (StatusCode::OK, json!({"id": id, "status": "CANCELLED"})));
        let job = app.job(&id).await;
        assert_eq!((&job["status"], &job["errorReason"]), (&json!("CANCELLED"), &json!("cancelled")), "{job:#}");
        assert!(job["completedAt"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_is_stopped_and_frees_its_slot() {
    let app = App::start_with(EngineConfig { concurrency: 1, ..EngineConfig::default() }).await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.job_is(&id, "PROCESSING").await;
    let behind = app.create(r#"{"name": "sleep", "payload": {"ms": 0}}"#).await;
    let response = app.post(&format!("{}/cancel", path(&id)), "").await;
    assert_eq!((response.status, &response.json()["status"]), (StatusCode::OK, &json!("CANCELLED")));
    let job = app.job(&id).await;
    assert_eq!(
        (&job["status"], &job["errorReason"], &job["retryCount"]),
        (&json!("CANCELLED"), &json!("cancelled"), &json!(0))
    );
    app.job_is(&behind, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_job_cannot_be_cancelled() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    let before = app.job_is(&id, "COMPLETED").await;
    assert_snapshot!(app.post(&format!("{}/cancel", path(&id)), "").await.errors(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be cancelled");
    assert_eq!(app.job(&id).await, before, "nothing has changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_job_keeps_its_id_and_gets_a_greater_run_number() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#).await;
    let first = app.job_is(&id, "FAILED").await;
    assert_snapshot!(app.post(&format!("{}/retry", path(&id)), "").await.shown(), @r#"
    200 OK
    {
      "id": "<id 1>",
      "retryCount": 0,
      "status": "PENDING"
    }
    "#);
    let second = loop {
        let job = app.job_is(&id, "FAILED").await;
        if job["run"] != first["run"] {
            break job;
        }
    };
    assert!(second["run"].as_i64() > first["run"].as_i64());
    let log: Vec<String> =
        second["executionLog"].as_array().unwrap().iter().map(|e| e["event"].as_str().unwrap().to_owned()).collect();
    assert_eq!(log.iter().filter(|event| *event == "failed").count(), 2, "the history is kept: {log:?}");
    assert!(log.contains(&"retried".to_owned()), "{log:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_can_be_retried_and_a_completed_or_waiting_one_cannot() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "elsewhere.kind"}"#).await;
    let waiting = app.post(&format!("{}/retry", path(&id)), "").await;
    assert_snapshot!(waiting.errors(), @"409 INVALID_TRANSITION: a job that is QUEUED cannot be retried");
    app.post(&format!("{}/cancel", path(&id)), "").await;
    assert_eq!(app.post(&format!("{}/retry", path(&id)), "").await.status, StatusCode::OK);
    let job = app.job_is(&id, "QUEUED").await;
    assert_eq!((&job["error"], &job["errorReason"]), (&Value::Null, &Value::Null), "{job:#}");
    let done = app.create(r#"{"name": "noop"}"#).await;
    app.job_is(&done, "COMPLETED").await;
    assert_snapshot!(app.post(&format!("{}/retry", path(&done)), "").await.errors(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be retried");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_job_is_not_cancelled_by_its_earlier_cancel_request() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 300}}"#).await;
    app.job_is(&id, "PROCESSING").await;
    assert_eq!(app.post(&format!("{}/cancel", path(&id)), "").await.status, StatusCode::OK);
    assert_eq!(app.post(&format!("{}/retry", path(&id)), "").await.status, StatusCode::OK);
    app.job_is(&id, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_job_shows_why_it_finished() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": "long"}}"#).await;
    let job = app.job_is(&id, "FAILED").await;
    let shown = json!({"error": job["error"], "errorReason": job["errorReason"], "retryCount": job["retryCount"], "result": job["result"]});
    assert_snapshot!(redacted(&shown), @r#"
    {
      "error": "the payload is not valid: invalid type: string \"long\", expected u64 at line 1 column 13",
      "errorReason": "error",
      "result": null,
      "retryCount": 0
    }
    "#);
}
