//! Tests of `/queues` and `/limits`.

use axum::http::StatusCode;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_shows_its_jobs_and_settings() {
    let app = App::start().await;
    app.create(r#"{"name": "unhandled.type", "queue": "mail", "priority": "HIGH"}"#).await;
    app.create(r#"{"name": "unhandled.type", "queue": "mail"}"#).await;
    app.create(r#"{"name": "unhandled.type", "queue": "mail", "scheduledAt": "2100-01-01T00:00:00Z"}"#).await;
    let body = r#"{"concurrency": 2, "rate": "100/1m", "strict": true, "fairness": "key"}"#;
    assert_eq!(app.call("PATCH", "/api/v1/queues/mail", body).await.status, StatusCode::OK);
    app.post("/api/v1/queues/mail/pause", r#"{"reason": "the SMTP server is down"}"#).await;
    let mut queue = app.get("/api/v1/queues/mail").await;
    let mut shown = queue.json();
    assert!(shown["waitingMs"].as_u64().unwrap() < 60_000);
    shown["waitingMs"] = json!(0);
    shown["ratePerMinute"] = Value::Null;
    queue.text = shown.to_string();
    assert_snapshot!(queue.snapshot(), @r#"
    200 OK
    {
      "concurrency": 2,
      "depth": {
        "CRITICAL": 0,
        "HIGH": 1,
        "LOW": 0,
        "NORMAL": 1,
        "total": 2
      },
      "fairness": "key",
      "name": "mail",
      "oldest": "<time>",
      "paused": {
        "at": "<time>",
        "by": "loopback",
        "reason": "the SMTP server is down"
      },
      "pending": 1,
      "rate": {
        "count": 100,
        "periodMs": 60000
      },
      "ratePerMinute": null,
      "retrying": 0,
      "running": 0,
      "strict": true,
      "waitingMs": 0
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_was_set_can_be_reset() {
    let app = App::start().await;
    app.call("PATCH", "/api/v1/limits", r#"{"scope": "key", "name": "a", "concurrency": 3}"#).await;
    let reset = app.post("/api/v1/limits/reset", r#"{"scope": "key", "name": "a"}"#).await;
    assert_eq!((reset.status, &reset.json()["limits"]), (StatusCode::OK, &json!([])));
    let unknown = app.post("/api/v1/limits/reset", r#"{"scope": "queue", "name": "nope"}"#).await;
    insta::assert_snapshot!(unknown.error_snapshot(), @r#"404 NOT_FOUND: there is no limit for queue nope; list them with GET /api/v1/limits"#);
    let unknown = app.post("/api/v1/queues/nope/resume", "").await;
    insta::assert_snapshot!(unknown.error_snapshot(), @r#"404 NOT_FOUND: no queue "nope"; a queue exists as soon as a job or a setting names it"#);
    let bad = app.post("/api/v1/limits/reset", r#"{"scope": "moon", "concurrency": 1}"#).await;
    assert_snapshot!(bad.error_snapshot(), @r#"
    400 VALIDATION_ERROR: 2 fields are not valid
    scope: must be system, queue, type, key or machine
    concurrency: unknown field
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_queue_that_a_job_or_setting_names_is_listed() {
    let app = App::start().await;
    assert_eq!(app.get("/api/v1/queues").await.json()["queues"], json!([]));
    app.create(r#"{"name": "unhandled.type", "queue": "of a job"}"#).await;
    app.call("PATCH", "/api/v1/queues/of a setting".replace(' ', "%20").as_str(), r#"{"strict": true}"#).await;
    app.call("PATCH", "/api/v1/limits", r#"{"scope": "queue", "name": "of a limit", "concurrency": 1}"#).await;
    let queues = app.get("/api/v1/queues").await.json();
    let names: Vec<&str> = queues["queues"].as_array().unwrap().iter().map(|q| q["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["of a job", "of a limit", "of a setting"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_changed_and_removed() {
    let app = App::start().await;
    let patch = async |body: &str| app.call("PATCH", "/api/v1/queues/mail", body.to_owned()).await.json();
    let first = patch(r#"{"concurrency": 2, "rate": {"count": 5, "periodMs": 1000}}"#).await;
    assert_eq!((&first["concurrency"], &first["rate"]["count"]), (&json!(2), &json!(5)));
    let second = patch(r#"{"concurrency": null}"#).await;
    assert_eq!((&second["concurrency"], &second["rate"]["count"]), (&Value::Null, &json!(5)), "absent fields stay");
    assert_eq!(patch(r#"{"rate": null, "strict": true}"#).await["rate"], Value::Null);
    assert_eq!(patch(r#"{"fairness": "key"}"#).await["strict"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_stays_paused_until_it_is_resumed() {
    let app = App::start().await;
    let first = app.post("/api/v1/queues/mail/pause", r#"{"reason": "first"}"#).await.json();
    let second = app.post("/api/v1/queues/mail/pause", r#"{"reason": "second"}"#).await.json();
    assert_eq!(first["paused"], second["paused"], "the first pause stays");
    assert_eq!(app.post("/api/v1/queues/mail/resume", "").await.json()["paused"], Value::Null);
    let again = app.post("/api/v1/queues/mail/resume", "").await;
    assert_eq!((again.status, &again.json()["paused"]), (StatusCode::OK, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_set_for_the_system_types_and_keys() {
    let app = App::start().await;
    for body in [
        r#"{"scope": "system", "concurrency": 10}"#,
        r#"{"scope": "type", "name": "mail", "rate": "5/1s"}"#,
        r#"{"scope": "key", "name": "tenant-*", "concurrency": 2, "rate": "1000/1h"}"#,
        r#"{"scope": "key", "name": "tenant-*", "rate": null}"#,
    ] {
        let response = app.call("PATCH", "/api/v1/limits", body).await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    }
    assert_snapshot!(app.get("/api/v1/limits").await.snapshot(), @r#"
    200 OK
    {
      "limit": 100,
      "limits": [
        {
          "changedAt": "<time>",
          "changedBy": "loopback",
          "concurrency": 10,
          "inFlight": 0,
          "name": null,
          "origin": "api",
          "rate": null,
          "reachedAt": null,
          "scope": "system"
        },
        {
          "changedAt": "<time>",
          "changedBy": "loopback",
          "concurrency": null,
          "name": "mail",
          "origin": "api",
          "rate": {
            "count": 5,
            "periodMs": 1000
          },
          "reachedAt": null,
          "scope": "type",
          "tokens": 5
        },
        {
          "changedAt": "<time>",
          "changedBy": "loopback",
          "concurrency": 2,
          "name": "tenant-*",
          "origin": "api",
          "rate": null,
          "reachedAt": null,
          "scope": "key"
        }
      ],
      "page": 1,
      "total": 3,
      "totalPages": 1
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_queue_setting_is_reported() {
    let app = App::start().await;
    let mut output = String::new();
    for body in [
        "{}",
        "",
        r#"{"concurrency": 0}"#,
        r#"{"concurrency": -1}"#,
        r#"{"concurrency": 99999999999}"#,
        r#"{"rate": "fast"}"#,
        r#"{"rate": 5}"#,
        r#"{"rate": {"count": 0, "periodMs": 0}}"#,
        r#"{"rate": {"count": 1, "period": 1}}"#,
        r#"{"rate": "5/32d"}"#,
        r#"{"strict": "yes", "fairness": "all", "speed": 1}"#,
    ] {
        output.push_str(&format!("{}\n", app.call("PATCH", "/api/v1/queues/mail", body).await.error_snapshot()));
    }
    assert_snapshot!(output, @r#"
    400 VALIDATION_ERROR: body: nothing to change; set concurrency, rate, strict or fairness
    body: nothing to change; set concurrency, rate, strict or fairness
    400 VALIDATION_ERROR: body: is not valid JSON: EOF while parsing a value at line 1 column 0
    body: is not valid JSON: EOF while parsing a value at line 1 column 0
    400 VALIDATION_ERROR: concurrency: must be between 1 and 1000000, got 0; to stop a queue, pause it
    concurrency: must be between 1 and 1000000, got 0; to stop a queue, pause it
    400 VALIDATION_ERROR: concurrency: must be a non-negative integer
    concurrency: must be a non-negative integer
    400 VALIDATION_ERROR: concurrency: must be between 1 and 1000000, got 4294967295
    concurrency: must be between 1 and 1000000, got 4294967295
    400 VALIDATION_ERROR: rate: must be like "100/1m" or {"count": 100, "periodMs": 60000}
    rate: must be like "100/1m" or {"count": 100, "periodMs": 60000}
    400 VALIDATION_ERROR: rate: must be like "100/1m" or {"count": 100, "periodMs": 60000}
    rate: must be like "100/1m" or {"count": 100, "periodMs": 60000}
    400 VALIDATION_ERROR: 2 fields are not valid
    rate.count: must be between 1 and 10000000, got 0
    rate.periodMs: must be between 1 and 2678400000, got 0
    400 VALIDATION_ERROR: 2 fields are not valid
    rate.period: unknown field
    rate.periodMs: is required
    400 VALIDATION_ERROR: rate.periodMs: must be between 1 and 2678400000, got 2764800000
    rate.periodMs: must be between 1 and 2678400000, got 2764800000
    400 VALIDATION_ERROR: 3 fields are not valid
    strict: must be true or false
    fairness: must be none or key
    speed: unknown field
    "#);
    let long = "x".repeat(101);
    let names = [
        app.call("PATCH", &format!("/api/v1/queues/{long}"), r#"{"strict": true}"#).await.error_snapshot(),
        app.post("/api/v1/queues/a%00b/pause", "").await.error_snapshot(),
        app.post("/api/v1/queues/mail/pause", r#"{"why": "x", "reason": ""}"#).await.error_snapshot(),
        app.get("/api/v1/queues/nowhere").await.error_snapshot(),
    ];
    assert_snapshot!(names.join("\n"), @r#"
    400 VALIDATION_ERROR: name: must have 1 to 100 characters, has 101
    name: must have 1 to 100 characters, has 101
    400 VALIDATION_ERROR: name: must not contain control characters
    name: must not contain control characters
    400 VALIDATION_ERROR: 2 fields are not valid
    reason: must have 1 to 255 characters and no control characters
    why: unknown field
    404 NOT_FOUND: no queue "nowhere"; a queue exists as soon as a job or a setting names it
    "#);
    assert_eq!(app.get("/api/v1/queues").await.json()["queues"], json!([]), "nothing was set");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_limit_is_reported() {
    let app = App::start().await;
    let mut output = String::new();
    for body in [
        r#"{"concurrency": 1}"#,
        r#"{"scope": "planet", "concurrency": 1}"#,
        r#"{"scope": "system", "name": "x", "concurrency": 1}"#,
        r#"{"scope": "system", "rate": "1/1s"}"#,
        r#"{"scope": "queue", "concurrency": 1}"#,
        r#"{"scope": "key", "name": "", "concurrency": 1}"#,
        r#"{"scope": "type", "name": "x"}"#,
        r#"{"scope": "type", "name": "x", "concurrency": 0, "speed": 1}"#,
        r#"{"scope": "machine", "name": "x", "rate": "1/1s"}"#,
        r#"{"scope": "machine", "name": "x", "concurrency": 10001}"#,
    ] {
        output.push_str(&format!("{}\n", app.call("PATCH", "/api/v1/limits", body).await.error_snapshot()));
    }
    assert_snapshot!(output, @r"
    400 VALIDATION_ERROR: scope: must be system, queue, type, key or machine
    scope: must be system, queue, type, key or machine
    400 VALIDATION_ERROR: scope: must be system, queue, type, key or machine
    scope: must be system, queue, type, key or machine
    400 VALIDATION_ERROR: name: must be absent: the scope system has no name
    name: must be absent: the scope system has no name
    400 VALIDATION_ERROR: rate: works only for queues, types and keys
    rate: works only for queues, types and keys
    400 VALIDATION_ERROR: name: is required
    name: is required
    400 VALIDATION_ERROR: name: must have 1 to 255 characters and no control characters
    name: must have 1 to 255 characters and no control characters
    400 VALIDATION_ERROR: body: nothing to change; set concurrency or rate
    body: nothing to change; set concurrency or rate
    400 VALIDATION_ERROR: 2 fields are not valid
    speed: unknown field
    concurrency: must be between 1 and 1000000, got 0; to stop a queue, pause it
    400 VALIDATION_ERROR: rate: works only for queues, types and keys
    rate: works only for queues, types and keys
    400 VALIDATION_ERROR: concurrency: must be between 1 and 10000 for a machine
    concurrency: must be between 1 and 10000 for a machine
    ");
    assert_eq!(app.get("/api/v1/limits").await.json()["limits"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_show_queues_and_dead_letters() {
    let app = App::start().await;
    app.create(r#"{"name": "unhandled.type", "queue": "mail", "priority": "HIGH"}"#).await;
    app.post("/api/v1/queues/mail/pause", "").await;
    let failed = app.create(r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#).await;
    app.wait_for_state(&failed, "FAILED").await;
    let text = app.get("/metrics").await.text;
    for line in [
        "faena_dead_jobs 1",
        "dlq_size 0",
        r#"faena_queue_depth{queue="mail",priority="HIGH"} 1"#,
        r#"faena_queue_paused{queue="mail"} 1"#,
        r#"faena_queue_paused{queue="default"} 0"#,
    ] {
        assert!(text.lines().any(|known| known == line), "{line}: {text}");
    }
}
