//! `/api/v1/metrics`: metrics as JSON, and the history.

use faena_domain::Timestamp;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::App;

const REVIEW: &str = "
machine: review
version: 1
limits: {running: 1}
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx, expires: {after: 1d, to: DONE}}
    on: {approval.granted: DONE, approval.denied: DONE}
  DONE: {final: true}
";

/// Starts an app with a completed, a failed, a delayed and a waiting job, all in the history, a schedule, and two
/// tasks, of which one waits for a decision and one is queued.
async fn app_with_jobs() -> App {
    let app = App::start().await;
    let completed = app.create(r#"{"name": "noop", "queue": "mail", "priority": "HIGH"}"#).await;
    app.wait_for_state(&completed, "COMPLETED").await;
    let failed =
        app.create(r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0}"#).await;
    app.wait_for_state(&failed, "FAILED").await;
    app.create(r#"{"name": "noop", "scheduledAt": "2999-01-01T00:00:00Z"}"#).await;
    app.create(r#"{"name": "unhandled.type", "queue": "mail"}"#).await;
    let schedule = json!({"name": "rare", "cronExpression": "0 0 1 1 *", "jobName": "unhandled.type"});
    let schedule = app.post("/api/v1/schedules", schedule.to_string()).await.json();
    app.post(&format!("/api/v1/schedules/{}/disable", schedule["id"].as_str().unwrap()), "").await;
    app.post("/api/v1/machines", json!({"definition": REVIEW}).to_string()).await;
    for _ in 0..2 {
        app.post("/api/v1/tasks", json!({"machine": "review"}).to_string()).await;
    }
    app.engine.run_loop("history", Timestamp::now()).await.unwrap();
    app
}

async fn get(app: &App, path: &str) -> Value {
    let response = app.get(&format!("/api/v1/metrics/{path}")).await;
    assert_eq!(response.status, 200, "{path}: {}", response.text);
    response.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overview_contains_all_metrics() {
    let app = app_with_jobs().await;
    let mut overview = get(&app, "overview").await;
    assert!(overview["uptime"].is_u64(), "{overview}");
    overview["uptime"] = json!(0);
    for name in ["nextTimerAt", "oldestApprovalAt", "oldestInStateAt", "oldestQueuedAt"] {
        assert!(overview["tasks"][name].is_string(), "{name}: {overview}");
        overview["tasks"][name] = json!("<time>");
    }
    for part in ["queues", "workers", "jobs", "schedules"] {
        assert_eq!(overview[part], get(&app, part).await, "{part}");
    }
    assert_snapshot!(serde_json::to_string_pretty(&overview).unwrap(), @r#"
    {
      "jobs": {
        "byStatus": {
          "ASSIGNED": 0,
          "CANCELLED": 0,
          "COMPLETED": 1,
          "FAILED": 1,
          "PENDING": 1,
          "PROCESSING": 0,
          "QUEUED": 1,
          "RETRYING": 0,
          "SCHEDULED": 0
        },
        "last24h": {
          "completed": 1,
          "created": 4,
          "failed": 1
        },
        "total": 4,
        "withoutWorker": [
          {
            "jobs": 1,
            "queue": "mail",
            "type": "unhandled.type"
          }
        ]
      },
      "queues": {
        "delayed": 1,
        "dlq": 1,
        "priority": 1,
        "processing": 0
      },
      "schedules": {
        "disabled": 1,
        "enabled": 0,
        "total": 1,
        "totalRuns": 0
      },
      "tasks": {
        "approvalsWaiting": 1,
        "byStatus": {
          "cancelled": 0,
          "completed": 0,
          "failed": 0,
          "paused": 0,
          "queued": 1,
          "running": 1
        },
        "deadlinesMissed": 0,
        "nextTimerAt": "<time>",
        "oldestApprovalAt": "<time>",
        "oldestInStateAt": "<time>",
        "oldestQueuedAt": "<time>",
        "total": 2
      },
      "uptime": 0,
      "workers": {
        "active": 0,
        "idle": 1,
        "stopped": 0,
        "total": 1,
        "totalFailed": 1,
        "totalProcessed": 1
      }
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_shows_what_happened_per_minute_hour_and_day() {
    let app = app_with_jobs().await;
    let hours = get(&app, "history").await;
    assert_eq!(hours["history"].as_array().unwrap().len(), 30, "{hours}");
    let days = get(&app, "history?period=day").await;
    let mut today = days["history"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(today["totalCreated"], hours["history"][29]["totalCreated"]);
    for name in ["avgProcessingTime", "avgWaitTime"] {
        assert!(today[name].is_number(), "{today}");
        today[name] = json!("measured");
    }
    for name in ["processingTime", "waitTime"] {
        assert!(today[name]["p50"].is_number() && today[name]["p99"].is_number(), "{today}");
        today[name] = json!("measured");
    }
    today["date"] = json!("today");
    assert_snapshot!(serde_json::to_string_pretty(&today).unwrap(), @r#"
    {
      "avgProcessingTime": "measured",
      "avgWaitTime": "measured",
      "completedByPriority": {
        "HIGH": 1
      },
      "date": "today",
      "failedRuns": 1,
      "processingTime": "measured",
      "totalCancelled": 0,
      "totalCompleted": 1,
      "totalCreated": 4,
      "totalFailed": 1,
      "totalTimedOut": 0,
      "waitTime": "measured"
    }
    "#);
    let minutes = get(&app, "history?period=minute").await;
    let minutes = minutes["history"].as_array().unwrap();
    assert_eq!(minutes.len(), 60);
    let sum = |name: &str| minutes.iter().map(|minute| minute[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("totalCreated"), sum("totalCompleted"), sum("totalFailed")), (4, 1, 1));
    assert!(minutes.iter().all(|minute| minute["avgWaitTime"].is_null()), "minutes have no measured times");
    let empty = &days["history"][0];
    assert_eq!((&empty["totalCreated"], &empty["avgWaitTime"]), (&json!(0), &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_can_be_split_and_filtered_by_queue() {
    let app = app_with_jobs().await;
    let split = get(&app, "history?period=day&byQueue=true").await["history"].clone();
    let shown: Vec<_> =
        split.as_array().unwrap().iter().map(|entry| (&entry["queue"], &entry["totalCreated"])).collect();
    assert_eq!(shown, [(&json!("default"), &json!(2)), (&json!("mail"), &json!(2))]);
    let mail = get(&app, "history?period=day&queue=mail").await["history"].clone();
    let last = mail.as_array().unwrap().last().unwrap();
    assert_eq!((&last["totalCreated"], &last["totalFailed"]), (&json!(2), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_outlives_a_retention_that_deletes_the_jobs() {
    let app = app_with_jobs().await;
    let retention = faena_store::Retention { completed_ms: 0, failed_ms: 0, ..faena_store::Retention::default() };
    app.engine.store.job_prune(&retention, 100, Timestamp::now().plus_ms(60_000)).await.unwrap();
    app.engine.run_loop("history", Timestamp::now()).await.unwrap();
    let jobs = get(&app, "jobs").await;
    assert_eq!((&jobs["total"], &jobs["last24h"]), (&json!(2), &json!({"created": 4, "completed": 1, "failed": 1})));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_parameters_are_rejected() {
    let app = App::start().await;
    for (query, error) in [
        ("overview?x=1", "x: unknown parameter"),
        ("history?period=week", "period: must be minute, hour or day"),
        ("history?byQueue=maybe", "byQueue: must be true or false"),
        ("history?from=yesterday", "from: must be"),
        ("history?from=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", "from: must be before until"),
        (
            "history?from=2020-01-01T00:00:00Z&until=2026-01-01T00:00:00Z",
            "from: must be at most 1000 periods before until, is 52608; use a later time or a longer period",
        ),
        (
            "history?from=2026-01-01T00:00:00Z&until=2026-02-01T00:00:00Z&byQueue=true",
            "from: must be at most 60 periods",
        ),
        ("history?from=-290308-12-21T19:59:06Z", "from: must be"),
        ("history?until=+290308-12-21T19:59:06Z", "until: must be"),
        ("history?queue=a%00b", "queue: must not contain control characters"),
    ] {
        let response = app.get(&format!("/api/v1/metrics/{query}")).await;
        assert_eq!(response.status, 400, "{query}: {}", response.text);
        let shown = response.error_snapshot();
        assert!(shown.contains(error), "{query}: {shown}");
    }
}
