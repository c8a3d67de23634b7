//! `GET /jobs`: filters, pages, cursors.

use insta::assert_snapshot;
use serde_json::Value;

use crate::app::App;

/// Jobs named `a` to `f`, oldest first, each different.
async fn stocked() -> (App, Vec<String>) {
    fill(App::start().await).await
}

async fn fill(app: App) -> (App, Vec<String>) {
    let mut ids = Vec::new();
    for body in [
        r#"{"name": "a", "type": "email.send", "queue": "mail", "priority": "HIGH", "tags": ["red"]}"#,
        r#"{"name": "b", "type": "email.send", "queue": "mail", "tags": ["red", "blue"], "correlationId": "order-7", "uniqueKey": "unique b"}"#,
        r#"{"name": "c", "type": "pdf.render", "queue": "slow", "priority": "LOW", "scheduledAt": "2031-01-01T00:00:00Z"}"#,
        r#"{"name": "d", "type": "noop", "correlationId": "order-7", "idempotencyKey": "once d"}"#,
        r#"{"name": "e", "type": "pdf.render", "queue": "slow"}"#,
        r#"{"name": "f", "type": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#,
    ] {
        // Ids carry their millisecond: each job gets its own.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        ids.push(app.create(body).await);
    }
    app.job_is(&ids[3], "COMPLETED").await;
    app.job_is(&ids[5], "FAILED").await;
    app.post(&format!("/api/v1/jobs/{}/cancel", ids[4]), "").await;
    (app, ids)
}

fn names(list: &Value) -> String {
    let names: Vec<&str> = list["jobs"].as_array().unwrap().iter().map(|job| job["name"].as_str().unwrap()).collect();
    format!("{} of {}", names.concat(), list["total"])
}

#[tokio::test(flavor = "multi_thread")]
async fn every_filter_finds_matching_jobs_newest_first() {
    find_by_every_filter(App::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_filter_finds_matching_jobs_newest_first_on_postgres() {
    find_by_every_filter(App::start_on_postgres().await).await;
}

async fn find_by_every_filter(app: App) {
    let (app, ids) = fill(app).await;
    let created: Vec<String> = {
        let mut created = Vec::new();
        for id in &ids {
            created.push(app.job(id).await["createdAt"].as_str().unwrap().to_owned());
        }
        created
    };
    for (query, expected) in [
        ("", "fedcba of 6"),
        ("status=QUEUED", "ba of 2"),
        ("status=PENDING", "c of 1"),
        ("status=COMPLETED,FAILED", "fd of 2"),
        ("status=CANCELLED&status=FAILED", "fe of 2"),
        ("status=PROCESSING", " of 0"),
        ("priority=HIGH", "a of 1"),
        ("priority=LOW", "c of 1"),
        ("type=email.send", "ba of 2"),
        ("type=email", " of 0"),
        ("queue=slow", "ec of 2"),
        ("tag=red", "ba of 2"),
        ("tag=blue", "b of 1"),
        ("tag=green", " of 0"),
        ("tag=red&status=COMPLETED", " of 0"),
        ("correlationId=order-7", "db of 2"),
        ("correlationId=order-7&queue=mail", "b of 1"),
        ("scheduleId=none", " of 0"),
        ("q=EMAIL", "ba of 2"),
        ("q=slow", "ec of 2"),
        ("q=order-7", "db of 2"),
        ("q=unique%20b", "b of 1"),
        ("q=once+d", "d of 1"),
        (&format!("q={}", ids[2]), "c of 1"),
        (&format!("createdAfter={}", created[3]), "fed of 3"),
        (&format!("createdBefore={}", created[3]), "cba of 3"),
        (&format!("createdAfter={}&createdBefore={}&queue=slow", created[1], created[4]), "c of 1"),
        ("queue=nowhere", " of 0"),
    ] {
        let response = app.get(&format!("/api/v1/jobs?{query}")).await;
        assert_eq!(response.status, 200, "{query}: {}", response.text);
        assert_eq!(names(&response.json()), expected, "{query}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_its_totals_in_body_and_headers_and_omits_the_logs() {
    let (app, _) = stocked().await;
    let response = app.get("/api/v1/jobs?limit=4&page=2").await;
    let headers = ["x-total-count", "x-page", "x-limit", "x-total-pages"].map(|name| response.header(name));
    assert_eq!(headers, ["6", "2", "4", "2"]);
    assert_eq!(names(&response.json()), "ba of 6");
    let response = app.get("/api/v1/jobs?limit=5&page=2").await;
    assert_snapshot!(response.shown(), @r#"
    200 OK
    {
      "jobs": [
        {
          "backoffMultiplier": 2.0,
          "completedAt": null,
          "concurrencyKey": null,
          "correlationId": "<id 1>",
          "createdAt": "<time>",
          "error": null,
          "errorReason": null,
          "expiresAt": null,
          "id": "<id 1>",
          "idempotencyKey": null,
          "jitter": 0.0,
          "maxDelay": 60000,
          "maxRetries": 3,
          "name": "a",
          "payload": {},
          "priority": "HIGH",
          "progress": null,
          "queue": "mail",
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
          "tags": [
            "red"
          ],
          "timeoutMs": 1800000,
          "type": "email.send",
          "uniqueKey": null,
          "updatedAt": "<time>",
          "webhookUrl": null,
          "workerId": null
        }
      ],
      "limit": 5,
      "page": 2,
      "total": 6
    }
    "#);
    let response = app.get("/api/v1/jobs").await;
    assert_eq!((response.header("x-page"), response.header("x-limit")), ("1", "20"));
    assert_eq!(names(&app.get("/api/v1/jobs?page=3&limit=4").await.json()), " of 6");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_reaches_every_job_while_new_jobs_arrive() {
    let (app, _) = stocked().await;
    let (mut seen, mut cursor) = (String::new(), String::new());
    loop {
        let list = app.get(&format!("/api/v1/jobs?limit=2&cursor={cursor}")).await.json();
        for job in list["jobs"].as_array().unwrap() {
            seen.push_str(job["name"].as_str().unwrap());
        }
        app.create(r#"{"name": "x"}"#).await;
        match list["nextCursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(seen, "fedcba");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_parameter_is_reported() {
    let app = App::start().await;
    let query =
        "page=0&limit=101&status=ASLEEP&priority=huge&createdAfter=now&createdBefore=&q=%20&cursor=x&colour=red";
    assert_snapshot!(app.get(&format!("/api/v1/jobs?{query}")).await.errors(), @"
    400 VALIDATION_ERROR: 9 fields are not valid
    page: must be a number from 1 to 1000000
    limit: must be a number from 1 to 100
    status: must be one of PENDING, QUEUED, SCHEDULED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED, CANCELLED
    priority: must be LOW, NORMAL, HIGH or CRITICAL
    createdAfter: must be a time like 2026-11-15T20:00:00Z
    createdBefore: must be a time like 2026-11-15T20:00:00Z
    q: must not be empty
    cursor: must be the nextCursor of the previous page, or empty for the first page
    colour: unknown parameter
    ");
    assert_snapshot!(app.get("/api/v1/jobs?limit=-1&page=1e3").await.errors(), @"
    400 VALIDATION_ERROR: 2 fields are not valid
    limit: must be a number from 1 to 100
    page: must be a number from 1 to 1000000
    ");
    assert_snapshot!(app.get("/api/v1/jobs?page=1000000&limit=100").await.errors(), @"
    400 VALIDATION_ERROR: page: pages end at job 10000; go on with cursor
    page: pages end at job 10000; go on with cursor
    ");
    for query in ["status=", "limit=0", "limit=", "page=99999999999999999999"] {
        assert_eq!(app.get(&format!("/api/v1/jobs?{query}")).await.status, 400, "{query}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_texts_in_filters_find_nothing() {
    find_unusual_texts(App::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_texts_in_filters_find_nothing_on_postgres() {
    find_unusual_texts(App::start_on_postgres().await).await;
}

async fn find_unusual_texts(app: App) {
    let (app, _) = fill(app).await;
    for name in ["type", "queue", "tag", "correlationId", "scheduleId", "q"] {
        for text in ["%00", "a%00b", "two%0Alines"] {
            let response = app.get(&format!("/api/v1/jobs?{name}={text}")).await;
            assert_eq!(response.status, 400, "{name}={text}: {}", response.text);
        }
        for text in ["%FF", "%F0%9F%A6%80", "'", "%25", "_", "%5C"] {
            let response = app.get(&format!("/api/v1/jobs?{name}={text}")).await;
            assert_eq!(response.status, 200, "{name}={text}: {}", response.text);
            assert_eq!(names(&response.json()), " of 0", "{name}={text}");
        }
    }
}
