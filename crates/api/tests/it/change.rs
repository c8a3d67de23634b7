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
    let id = app.create(r#"{"name": "unhandled.type", "payload": {"n": 1}}"#).await;
    let patch = r#"{"priority": "CRITICAL", "payload": {"n":  2}, "maxRetries": 7, "retryDelay": 500, "timeoutMs": 9,
        "expiresAt": "2032-01-01T00:00:00Z", "scheduledAt": "2031-01-01T00:00:00Z"}"#;
    let response = app.call("PATCH", &path(&id), patch).await;
    assert!(response.text.contains(r#""payload":{"n":  2}"#), "{}", response.text);
    assert_snapshot!(response.snapshot(), @r#"
    200 OK
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
      "name": "unhandled.type",
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
      "type": "unhandled.type",
      "uniqueKey": null,
      "updatedAt": "<time>",
      "webhookUrl": null,
      "workerId": null
    }
    "#);
    let cleared = app.call("PATCH", &path(&id), r#"{"scheduledAt": null, "expiresAt": null}"#).await;
    assert_eq!(cleared.json()["status"], "QUEUED");
    assert_eq!((&cleared.json()["scheduledAt"], &cleared.json()["expiresAt"]), (&Value::Null, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn name_tags_and_webhook_can_be_changed_and_cleared() {
    let app = App::start().await;
    let id = app.create(r#"{"type": "unhandled.type", "tags": ["red"]}"#).await;
    let body = r#"{"name": "Other", "tags": ["blue"], "webhookUrl": "https://example.org/hook"}"#;
    let changed = app.call("PATCH", &path(&id), body).await.json();
    assert_eq!((&changed["name"], &changed["tags"]), (&json!("Other"), &json!(["blue"])), "{changed}");
    assert_eq!(changed["webhookUrl"], "https://example.org/hook");
    for (query, total) in [("tag=blue", 1), ("tag=red", 0), ("name=Other", 1), ("q=oth", 1), ("name=unhandled.type", 0)]
    {
        assert_eq!(app.get(&format!("/api/v1/jobs?{query}")).await.json()["total"], total, "{query}");
    }
    let cleared = app.call("PATCH", &path(&id), r#"{"name": null, "tags": null, "webhookUrl": null}"#).await.json();
    assert_eq!((&cleared["name"], &cleared["tags"]), (&json!("unhandled.type"), &json!([])));
    assert_eq!(cleared["webhookUrl"], Value::Null);
    assert_eq!(app.get("/api/v1/jobs?tag=blue").await.json()["total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn times_may_be_dates_offsets_or_milliseconds() {
    let app = App::start().await;
    for (text, expected) in [
        (r#""2031-01-02T01:00:00+01:00""#, "2031-01-02T00:00:00.000Z"),
        (r#""2031-01-02""#, "2031-01-02T00:00:00.000Z"),
        ("1925078400000", "2031-01-02T00:00:00.000Z"),
    ] {
        let id = app.create(&format!(r#"{{"name": "noop", "scheduledAt": {text}}}"#)).await;
        assert_eq!(app.job(&id).await["scheduledAt"], expected, "{text}");
        let patched = app.call("PATCH", &path(&id), format!(r#"{{"expiresAt": {text}, "scheduledAt": null}}"#)).await;
        assert!(patched.status.is_success(), "{}", patched.text);
    }
    for query in ["createdAfter=2020-01-01", "createdAfter=1577836800000", "createdBefore=2100-01-01"] {
        assert_eq!(app.get(&format!("/api/v1/jobs?{query}")).await.json()["total"], 3, "{query}");
    }
    let seconds = app.post("/api/v1/jobs", r#"{"name": "noop", "scheduledAt": 1925078400}"#).await;
    assert_eq!(seconds.status, StatusCode::BAD_REQUEST, "seconds are not taken for milliseconds");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_a_retrying_job_starts_its_next_attempt_now() {
    let app = App::start().await;
    let body = r#"{"type": "sleep", "payload": {"ms": 600000}, "timeoutMs": 20, "retryDelay": 3600000, "maxDelay": 3600000, "maxRetries": 1}"#;
    let id = app.create(body).await;
    let job = app.wait_for_state(&id, "RETRYING").await;
    assert!(job["nextAttemptAt"].is_string() && job.get("nextRetryAt").is_none(), "{job}");
    let listed = app.get("/api/v1/jobs?status=RETRYING").await.json();
    for name in ["error", "errorReason", "run", "nextAttemptAt"] {
        assert_eq!(listed["jobs"][0][name], job[name], "{name}");
    }
    let response = app.post(&format!("{}/retry", path(&id)), "").await;
    assert_eq!(response.json(), json!({"id": id, "status": "RETRYING", "retryCount": 1}));
    let failed = app.wait_for_state(&id, "FAILED").await;
    assert_eq!(failed["retryCount"], 1, "the attempts continue from there");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_changes_are_rejected_with_every_error() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let mut output = String::new();
    for body in [
        "{}",
        r#"{"type": "other", "status": "COMPLETED", "priority": "HIGH"}"#,
        r#"{"name": "", "tags": "red", "webhookUrl": "ftp://example.org"}"#,
        r#"{"priority": 1, "payload": [], "maxRetries": 11, "retryDelay": 1, "timeoutMs": 0, "scheduledAt": "soon", "expiresAt": 1}"#,
        r#"{"timeoutMs": 99999999999999}"#,
        r#"{"scheduledAt": "2031-01-02T00:00:00Z", "expiresAt": "2031-01-01T00:00:00Z"}"#,
        r#"{"priority": null}"#,
        "[]",
    ] {
        output.push_str(&format!("{}\n", app.call("PATCH", &path(&id), body).await.error_snapshot()));
    }
    assert_snapshot!(output, @"
    400 VALIDATION_ERROR: body: nothing to change; set name, priority, payload, tags, scheduledAt, expiresAt, maxRetries, retryDelay, timeoutMs or webhookUrl
    body: nothing to change; set name, priority, payload, tags, scheduledAt, expiresAt, maxRetries, retryDelay, timeoutMs or webhookUrl
    400 VALIDATION_ERROR: 2 fields are not valid
    status: unknown field
    type: unknown field
    400 VALIDATION_ERROR: 3 fields are not valid
    tags: must be a list of strings
    name: must have 1 to 255 characters, has 0
    webhookUrl: must start with http:// or https://
    400 VALIDATION_ERROR: 7 fields are not valid
    scheduledAt: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    expiresAt: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    priority: must be LOW, NORMAL, HIGH or CRITICAL
    payload: must be a JSON object
    maxRetries: must be between 0 and 10, got 11
    retryDelay: must be between 100 and 3600000, got 1
    timeoutMs: must be between 1 and 2592000000, got 0
    400 VALIDATION_ERROR: timeoutMs: must be between 1 and 2592000000, got 99999999999999
    timeoutMs: must be between 1 and 2592000000, got 99999999999999
    400 VALIDATION_ERROR: expiresAt: must be later than scheduledAt
    expiresAt: must be later than scheduledAt
    400 VALIDATION_ERROR: body: nothing to change; set name, priority, payload, tags, scheduledAt, expiresAt, maxRetries, retryDelay, timeoutMs or webhookUrl
    body: nothing to change; set name, priority, payload, tags, scheduledAt, expiresAt, maxRetries, retryDelay, timeoutMs or webhookUrl
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
    app.wait_for_state(&done, "COMPLETED").await;
    let late = app.call("PATCH", &path(&done), r#"{"priority": "HIGH"}"#).await;
    assert_snapshot!(late.error_snapshot(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be changed");
    let running = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.wait_for_state(&running, "PROCESSING").await;
    let late = app.call("PATCH", &path(&running), r#"{"priority": "HIGH"}"#).await;
    assert_eq!((late.status, &late.json()["error"]["code"]), (StatusCode::CONFLICT, &json!("INVALID_TRANSITION")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_deleted_with_its_data_unless_it_runs() {
    let app = App::start().await;
    let running = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.wait_for_state(&running, "PROCESSING").await;
    assert_snapshot!(app.call("DELETE", &path(&running), "").await.error_snapshot(), @"409 INVALID_TRANSITION: a job that is PROCESSING cannot be deleted; cancel it first");
    let done = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&done, "COMPLETED").await;
    let waiting = app.create(r#"{"name": "noop", "scheduledAt": "2031-01-01T00:00:00Z", "tags": ["t"]}"#).await;
    let queued = app.create(r#"{"name": "unhandled.type", "uniqueKey": "u", "idempotencyKey": "i"}"#).await;
    for id in [&done, &waiting, &queued] {
        let deleted = app.call("DELETE", &path(id), "").await;
        assert_eq!((deleted.status, deleted.json()), (StatusCode::OK, json!({"success": true})));
        assert_eq!(app.get(&path(id)).await.status, StatusCode::NOT_FOUND);
        assert_eq!(app.call("DELETE", &path(id), "").await.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(app.total().await, 1);
    assert_eq!(app.get("/api/v1/jobs?tag=t").await.json()["total"], 0);
    // Its keys are free again.
    app.create(r#"{"name": "unhandled.type", "uniqueKey": "u", "idempotencyKey": "i"}"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_does_not_wait_for_a_deleted_parent() {
    let app = App::start().await;
    let parent = app.create(r#"{"name": "unhandled.type"}"#).await;
    let child = app.create(&format!(r#"{{"name": "noop", "dependsOn": ["{parent}"]}}"#)).await;
    let deleted = app.call("DELETE", &path(&parent), "").await;
    if deleted.status == StatusCode::OK {
        app.wait_for_state(&child, "CANCELLED").await;
    } else {
        assert_eq!(deleted.status, StatusCode::CONFLICT, "{}", deleted.text);
        assert_eq!(app.job(&parent).await["status"], "QUEUED");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_job_is_cancelled_immediately() {
    let app = App::start().await;
    for body in [r#"{"name": "unhandled.type"}"#, r#"{"name": "noop", "scheduledAt": "2031-01-01T00:00:00Z"}"#] {
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
    app.wait_for_state(&id, "PROCESSING").await;
    let behind = app.create(r#"{"name": "sleep", "payload": {"ms": 0}}"#).await;
    let response = app.post(&format!("{}/cancel", path(&id)), "").await;
    assert_eq!((response.status, &response.json()["status"]), (StatusCode::OK, &json!("CANCELLED")));
    let job = app.job(&id).await;
    assert_eq!(
        (&job["status"], &job["errorReason"], &job["retryCount"]),
        (&json!("CANCELLED"), &json!("cancelled"), &json!(0))
    );
    app.wait_for_state(&behind, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_job_cannot_be_cancelled() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    let before = app.wait_for_state(&id, "COMPLETED").await;
    assert_snapshot!(app.post(&format!("{}/cancel", path(&id)), "").await.error_snapshot(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be cancelled");
    assert_eq!(app.job(&id).await, before, "nothing has changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_job_keeps_its_id_and_gets_a_greater_run_number() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#).await;
    let first = app.wait_for_state(&id, "FAILED").await;
    assert_snapshot!(app.post(&format!("{}/retry", path(&id)), "").await.snapshot(), @r#"
    200 OK
    {
      "id": "<id 1>",
      "retryCount": 0,
      "status": "PENDING"
    }
    "#);
    let second = loop {
        let job = app.wait_for_state(&id, "FAILED").await;
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
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let waiting = app.post(&format!("{}/retry", path(&id)), "").await;
    assert_snapshot!(waiting.error_snapshot(), @"409 INVALID_TRANSITION: a job that is QUEUED cannot be retried");
    app.post(&format!("{}/cancel", path(&id)), "").await;
    assert_eq!(app.post(&format!("{}/retry", path(&id)), "").await.status, StatusCode::OK);
    let job = app.wait_for_state(&id, "QUEUED").await;
    assert_eq!((&job["error"], &job["errorReason"]), (&Value::Null, &Value::Null), "{job:#}");
    let done = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&done, "COMPLETED").await;
    assert_snapshot!(app.post(&format!("{}/retry", path(&done)), "").await.error_snapshot(), @"409 INVALID_TRANSITION: a job that is COMPLETED cannot be retried");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_job_is_not_cancelled_by_its_earlier_cancel_request() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 300}}"#).await;
    app.wait_for_state(&id, "PROCESSING").await;
    assert_eq!(app.post(&format!("{}/cancel", path(&id)), "").await.status, StatusCode::OK);
    assert_eq!(app.post(&format!("{}/retry", path(&id)), "").await.status, StatusCode::OK);
    app.wait_for_state(&id, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_job_shows_why_it_finished() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": "long"}}"#).await;
    let job = app.wait_for_state(&id, "FAILED").await;
    let shown = json!({"error": job["error"], "errorReason": job["errorReason"], "retryCount": job["retryCount"], "result": job["result"]});
    assert_snapshot!(redacted(&shown), @r#"
    {
      "error": "the payload is not valid at line 1, column 13; write it like {\"ms\": 500, \"steps\": 5}",
      "errorReason": "error",
      "result": null,
      "retryCount": 0
    }
    "#);
}
