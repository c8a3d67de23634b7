//! `GET /jobs`: filters, pages, cursors.

use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::App;

/// Starts the API with jobs named `a` to `f`, oldest first, each different.
async fn app_with_jobs() -> (App, Vec<String>) {
    submit_jobs(App::start().await).await
}

async fn submit_jobs(app: App) -> (App, Vec<String>) {
    let mut ids = Vec::new();
    for body in [
        r#"{"name": "a", "type": "email.send", "queue": "mail", "priority": "HIGH", "tags": ["red"]}"#,
        r#"{"name": "b", "type": "email.send", "queue": "mail", "tags": ["red", "blue"], "correlationId": "order-7", "uniqueKey": "unique b"}"#,
        r#"{"name": "c", "type": "pdf.render", "queue": "slow", "priority": "LOW", "scheduledAt": "2031-01-01T00:00:00Z"}"#,
        r#"{"name": "d", "type": "noop", "correlationId": "order-7", "idempotencyKey": "once d"}"#,
        r#"{"name": "e", "type": "pdf.render", "queue": "slow"}"#,
        r#"{"name": "f", "type": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#,
    ] {
        // An id contains its time of creation: each job is created in a different millisecond.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        ids.push(app.create(body).await);
    }
    app.wait_for_state(&ids[3], "COMPLETED").await;
    app.wait_for_state(&ids[5], "FAILED").await;
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
    let (app, ids) = submit_jobs(app).await;
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
        ("priority=LOW,HIGH", "ca of 2"),
        ("priority=LOW&priority=HIGH", "ca of 2"),
        ("name=c", "c of 1"),
        ("name=noop", " of 0"),
        ("workerId=unknown", " of 0"),
        ("error=PRIVATE", "f of 1"),
        ("error=private&status=COMPLETED", " of 0"),
        ("reason=error", "f of 1"),
        ("payload=no-such-text", " of 0"),
        ("q=f", "fedc of 4"),
        ("sort=created&order=asc", "abcdef of 6"),
        ("sort=priority", "afedbc of 6"),
        ("sort=priority&order=asc&status=QUEUED,PENDING", "cba of 3"),
        ("sort=scheduledAt&limit=1", "c of 6"),
        ("sort=updatedAt&order=ASC&status=QUEUED", "ab of 2"),
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
    let (app, _) = app_with_jobs().await;
    let response = app.get("/api/v1/jobs?limit=4&page=2").await;
    let headers = ["x-total-count", "x-page", "x-limit", "x-total-pages"].map(|name| response.header(name));
    assert_eq!(headers, ["6", "2", "4", "2"]);
    assert_eq!(names(&response.json()), "ba of 6");
    let response = app.get("/api/v1/jobs?limit=5&page=2").await;
    assert_snapshot!(response.snapshot(), @r#"
    200 OK
    {
      "jobs": [
        {
          "attempt": 0,
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
      "total": 6,
      "totalPages": 2
    }
    "#);
    let response = app.get("/api/v1/jobs").await;
    assert_eq!((response.header("x-page"), response.header("x-limit")), ("1", "20"));
    assert_eq!(names(&app.get("/api/v1/jobs?page=3&limit=4").await.json()), " of 6");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_reaches_every_job_while_new_jobs_arrive() {
    let (app, _) = app_with_jobs().await;
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
    let query = "page=0&limit=101&status=ASLEEP&priority=huge&createdAfter=now&createdBefore=&q=%20&cursor=x&colour=red&sort=colour&order=up&error=&payload=%20";
    assert_snapshot!(app.get(&format!("/api/v1/jobs?{query}")).await.error_snapshot(), @"
    400 VALIDATION_ERROR: 13 fields are not valid
    page: must be a number from 1 to 1000000
    limit: must be a number from 1 to 100
    status: must be one of PENDING, QUEUED, SCHEDULED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED, CANCELLED
    priority: must be LOW, NORMAL, HIGH or CRITICAL
    createdAfter: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    createdBefore: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    q: must not be empty
    cursor: must be the nextCursor of the previous page, or empty for the first page
    colour: unknown parameter
    sort: must be created, updated, scheduled or priority
    order: must be asc or desc
    error: must not be empty
    payload: must not be empty
    ");
    assert_snapshot!(app.get("/api/v1/jobs?limit=-1&page=1e3").await.error_snapshot(), @"
    400 VALIDATION_ERROR: 2 fields are not valid
    limit: must be a number from 1 to 100
    page: must be a number from 1 to 1000000
    ");
    assert_snapshot!(app.get("/api/v1/jobs?page=1000000&limit=100").await.error_snapshot(), @"
    400 VALIDATION_ERROR: page: pages end at entry 10000; to read on, pass the nextCursor of the last page as cursor
    page: pages end at entry 10000; to read on, pass the nextCursor of the last page as cursor
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
    let (app, _) = submit_jobs(app).await;
    for name in ["type", "name", "queue", "tag", "workerId", "correlationId", "scheduleId", "q", "payload"] {
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

#[tokio::test(flavor = "multi_thread")]
async fn every_sort_can_be_continued_with_its_cursor() {
    let (app, _) = app_with_jobs().await;
    for (sort, expected) in [("created", "abcdef"), ("priority", "cbdefa"), ("scheduled", "abdefc")] {
        let (mut seen, mut cursor) = (String::new(), String::new());
        loop {
            let query = format!("limit=2&sort={sort}&order=asc&cursor={cursor}");
            let response = app.get(&format!("/api/v1/jobs?{query}")).await;
            let list = response.json();
            for job in list["jobs"].as_array().unwrap() {
                seen.push_str(job["name"].as_str().unwrap());
            }
            match list["nextCursor"].as_str() {
                Some(next) => {
                    assert_eq!(response.header("x-next-cursor"), next);
                    cursor = next.to_owned();
                }
                None => break,
            }
        }
        assert_eq!(seen, expected, "{sort}");
    }
    let other = app.get("/api/v1/jobs?limit=1&sort=priority").await.json()["nextCursor"].as_str().unwrap().to_owned();
    assert_snapshot!(app.get(&format!("/api/v1/jobs?cursor={other}")).await.error_snapshot(), @"
    400 VALIDATION_ERROR: cursor: belongs to a list with another sort; begin with an empty cursor
    cursor: belongs to a list with another sort; begin with an empty cursor
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn total_pages_counts_only_pages_that_can_be_read() {
    let app = App::start().await;
    for _ in 0..2 {
        let jobs = vec![r#"{"name": "a", "queue": "q"}"#; 5_001].join(",");
        assert_eq!(app.post("/api/v1/jobs/batch", format!(r#"{{"jobs": [{jobs}]}}"#)).await.status, 201);
    }
    for (query, total, pages) in
        [("limit=100", 10_002, 100), ("limit=30", 10_002, 333), ("createdAfter=2020-01-01", 10_000, 500)]
    {
        let path = format!("/api/v1/jobs?{query}");
        let first = app.get(&path).await;
        assert_eq!((&first.json()["total"], &first.json()["totalPages"]), (&json!(total), &json!(pages)), "{query}");
        assert_eq!(first.header("x-total-pages"), pages.to_string());
        let last = app.get(&format!("{path}&page={pages}")).await;
        assert!(!last.json()["jobs"].as_array().unwrap().is_empty(), "{query}");
        let cursor = last.json()["nextCursor"].as_str().unwrap().to_owned();
        let beyond = app.get(&format!("{path}&page={}", pages + 1)).await;
        assert!(beyond.status == 400 && beyond.text.contains("cursor"), "{}", beyond.text);
        let rest = app.get(&format!("{path}&cursor={cursor}")).await.json();
        assert!(!rest["jobs"].as_array().unwrap().is_empty(), "{query}: the cursor continues the list");
    }
    let bounded = app.get("/api/v1/jobs?createdAfter=2020-01-01").await;
    assert_eq!((bounded.header("x-total-is-exact"), &bounded.json()["totalIsExact"]), ("false", &json!(false)));
    let sorted = app.get("/api/v1/jobs?sort=updated").await;
    assert_eq!((sorted.header("x-sort-is-exact"), &sorted.json()["sortIsExact"]), ("false", &json!(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn bulk_actions_take_the_filters_of_lists() {
    let (app, ids) = app_with_jobs().await;
    for (filter, expected) in [
        (r#"{"priority": ["LOW", "HIGH"]}"#, vec![&ids[2], &ids[0]]),
        (r#"{"priority": "LOW,HIGH", "name": "a"}"#, vec![&ids[0]]),
        (r#"{"error": "private"}"#, vec![&ids[5]]),
        (r#"{"createdAfter": 4102444800000}"#, vec![]),
    ] {
        let body = format!(r#"{{"filter": {filter}, "dryRun": true}}"#);
        let dry = app.post("/api/v1/jobs/bulk/delete", body).await.json();
        assert_eq!(dry["sample"], json!(expected), "{filter}");
    }
    let done = app.post("/api/v1/jobs/bulk/delete", r#"{"filter": {"error": "private"}}"#).await.json();
    assert_eq!((&done["matched"], &done["done"]), (&json!(1), &json!(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_action_reaches_jobs_beyond_the_search_limit() {
    let app = App::start().await;
    let old = app.create(r#"{"type": "http.request", "payload": {"url": "http://127.0.0.1/"}}"#).await;
    app.wait_for_state(&old, "FAILED").await;
    for _ in 0..2 {
        let jobs = vec![r#"{"name": "a"}"#; 5_001].join(",");
        assert_eq!(app.post("/api/v1/jobs/batch", format!(r#"{{"jobs": [{jobs}]}}"#)).await.status, 201);
    }
    let list = app.get("/api/v1/jobs?error=private").await;
    assert_eq!((list.header("x-is-partial"), &list.json()["isPartial"]), ("true", &json!(true)));
    assert_eq!(list.json()["jobs"], json!([]));
    let done = app.post("/api/v1/jobs/bulk/delete", r#"{"filter": {"error": "private"}}"#).await.json();
    assert_eq!((&done["matchedIsExact"], &done["done"]), (&json!(false), &json!(1)), "{done}");
    assert_eq!(app.get(&format!("/api/v1/jobs/{old}")).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_list_has_the_same_envelope_parameters_and_headers() {
    let (app, _) = app_with_jobs().await;
    app.post("/api/v1/queues/mail/pause", "").await;
    app.call("PATCH", "/api/v1/limits", r#"{"scope": "queue", "name": "mail", "concurrency": 1}"#).await;
    let body = r#"{"name": "s", "intervalMs": 60000, "jobName": "noop", "jobPayload": {}, "isActive": false}"#;
    let schedule = app.post("/api/v1/schedules", body).await.json()["id"].as_str().unwrap().to_owned();
    for (path, entries) in [
        ("jobs", "jobs"),
        ("dead-letter", "data"),
        ("schedules", "schedules"),
        (&format!("schedules/{schedule}/ticks"), "ticks"),
        ("queues", "queues"),
        ("limits", "limits"),
        ("workers", "workers"),
        ("webhooks", "webhooks"),
        ("audit", "entries"),
        ("bulk", "actions"),
        ("outbox", "sinks"),
        ("outbox/dead-letter", "data"),
    ] {
        let response = app.get(&format!("/api/v1/{path}?limit=1&page=1")).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        let list = response.json();
        assert_eq!((&list["page"], &list["limit"]), (&json!(1), &json!(1)), "{path}");
        assert_eq!(list["totalPages"], list["total"], "{path}");
        assert_eq!(list[entries].as_array().unwrap().len() as u64, list["total"].as_u64().unwrap().min(1), "{path}");
        let headers =
            ["x-total-count", "x-page", "x-limit", "x-total-pages"].map(|name| response.header(name).to_owned());
        assert_eq!(
            headers,
            [&list["total"], &json!(1), &json!(1), &list["totalPages"]].map(Value::to_string),
            "{path}"
        );
        let (mut seen, mut cursor) = (0, String::new());
        loop {
            let page = app.get(&format!("/api/v1/{path}?limit=1&cursor={cursor}")).await.json();
            assert!(page.get("page").is_none(), "{path}");
            seen += page[entries].as_array().unwrap().len();
            match page["nextCursor"].as_str() {
                Some(next) => cursor = next.to_owned(),
                None => break,
            }
        }
        assert_eq!(json!(seen), list["total"], "{path}: the cursor reaches every entry");
        let wrong = app.get(&format!("/api/v1/{path}?page=0&colour=red")).await.error_snapshot();
        assert!(wrong.contains("page: must be") && wrong.contains("colour: unknown parameter"), "{path}: {wrong}");
    }
}
