//! Tests of `/dead-letter`.

use axum::http::StatusCode;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::{App, TestResponse};

/// Submits a job that fails immediately, because its URL is not valid or not allowed.
async fn failed(app: &App, queue: &str, payload: &str) -> String {
    let id = app.create(&format!(r#"{{"name": "http.request", "queue": "{queue}", "payload": {payload}}}"#)).await;
    app.wait_for_state(&id, "FAILED").await;
    id
}

const PRIVATE_URL: &str = r#"{"url": "http://127.0.0.1/"}"#;

async fn app_with_dead_letters() -> (App, [String; 3]) {
    let app = App::start().await;
    let first = failed(&app, "a", PRIVATE_URL).await;
    let second = failed(&app, "b", r#"{"url": "no address"}"#).await;
    let third = failed(&app, "a", PRIVATE_URL).await;
    app.create(r#"{"name": "unhandled.type"}"#).await;
    (app, [first, second, third])
}

fn ids(response: &TestResponse) -> Vec<Value> {
    response.json()["data"].as_array().unwrap().iter().map(|job| job["id"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_newest_first_and_can_be_filtered() {
    let (app, [first, second, third]) = app_with_dead_letters().await;
    let find = async |query: &str| ids(&app.get(&format!("/api/v1/dead-letter?{query}")).await);
    assert_eq!(find("").await, [third.as_str(), &second, &first]);
    assert_eq!(find("queue=b").await, [second.as_str()]);
    assert_eq!(find("type=http.request").await.len(), 3);
    assert_eq!(find("type=other").await.len(), 0);
    assert_eq!(find("jobType=http.request").await.len(), 3);
    assert_eq!(find("jobType=other").await.len(), 0);
    assert_eq!(app.get("/api/v1/dead-letter?type=a&jobType=b").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(find("error=PRIVATE").await, [third.as_str(), &first]);
    assert_eq!(find("error=private&queue=b").await.len(), 0);
    assert_eq!(find("reason=error&q=http").await.len(), 3);
    assert_eq!(find("reason=timeout").await.len(), 0);
    assert_eq!(find("createdAfter=2100-01-01T00:00:00Z").await.len(), 0);

    let page = app.get("/api/v1/dead-letter?limit=2&page=2").await;
    assert_eq!(ids(&page), [first.as_str()]);
    let mut body = page.json();
    body.as_object_mut().unwrap().remove("data");
    assert_eq!(body, json!({ "total": 3, "page": 2, "limit": 2, "totalPages": 2 }));
    assert_eq!((page.header("x-total-count"), page.header("x-total-pages")), ("3", "2"));
    let by_cursor = app.get("/api/v1/dead-letter?limit=2&cursor=&error=url").await.json();
    let next = by_cursor["nextCursor"].as_str().unwrap();
    assert_eq!(find(&format!("limit=2&error=url&cursor={next}")).await, [first.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_shows_its_payload_and_the_errors_of_all_runs() {
    let (app, [first, ..]) = app_with_dead_letters().await;
    let dead_letter = app.get(&format!("/api/v1/dead-letter/{first}")).await.json();
    assert_eq!(dead_letter["payload"], json!({ "url": "http://127.0.0.1/" }));
    assert_eq!(dead_letter["attempts"].as_array().unwrap().len(), 1);
    let attempt = &dead_letter["attempts"][0];
    assert_eq!((&attempt["status"], &attempt["errorReason"]), (&json!("FAILED"), &json!("error")));
    assert_eq!(attempt["error"], dead_letter["error"]);
    assert!(
        attempt["run"].is_i64() && attempt["workerId"].is_string() && attempt["finishedAt"].is_string(),
        "{attempt}"
    );
    assert!(dead_letter["executionLog"].as_array().unwrap().len() >= 3);
    app.post(&format!("/api/v1/dead-letter/{first}/retry"), "").await;
    let again = app.wait_for_state(&first, "FAILED").await;
    assert!(again.get("attempts").is_none(), "only a dead letter shows its attempts");
    let dead_letter = app.get(&format!("/api/v1/dead-letter/{first}")).await.json();
    assert_eq!(dead_letter["attempts"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_has_the_names_of_the_task_scheduler_api_too() {
    let app = App::start().await;
    let id = app
        .create(&format!(
            r#"{{"name": "Fetch it", "type": "http.request", "priority": "HIGH", "payload": {PRIVATE_URL}}}"#
        ))
        .await;
    let job = app.wait_for_state(&id, "FAILED").await;
    let list = app.get("/api/v1/dead-letter").await.json();
    let single = app.get(&format!("/api/v1/dead-letter/{id}")).await.json();
    for entry in [&list["data"][0], &single] {
        for (name, expected) in [
            ("id", &job["id"]),
            ("originalJobId", &job["id"]),
            ("jobName", &json!("Fetch it")),
            ("jobType", &json!("http.request")),
            ("jobPayload", &job["payload"]),
            ("jobPriority", &json!("HIGH")),
            ("failureReason", &job["error"]),
            ("failureCount", &json!(1)),
            ("lastError", &job["error"]),
            ("failedAt", &job["completedAt"]),
            ("originalCreatedAt", &job["createdAt"]),
        ] {
            assert_eq!(&entry[name], expected, "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_retried_under_its_own_id() {
    let app = App::start().await;
    let id = failed(&app, "a", PRIVATE_URL).await;
    let response = app.post(&format!("/api/v1/dead-letter/{id}/retry"), "").await;
    assert_eq!((response.status, response.json()), (StatusCode::OK, json!({ "id": id, "status": "QUEUED" })));
    let job = app.wait_for_state(&id, "FAILED").await;
    let entry = job["executionLog"].as_array().unwrap().iter().find(|entry| entry["event"] == "retried").unwrap();
    assert_eq!(entry["details"], "by loopback");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_deleted() {
    let (app, [first, ..]) = app_with_dead_letters().await;
    let response = app.call("DELETE", &format!("/api/v1/dead-letter/{first}"), "").await;
    assert_eq!((response.status, response.text.as_str()), (StatusCode::NO_CONTENT, ""));
    assert_eq!(app.get(&format!("/api/v1/jobs/{first}")).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_counted() {
    let (app, _) = app_with_dead_letters().await;
    assert_snapshot!(app.get("/api/v1/dead-letter/stats").await.snapshot(), @r#"
    200 OK
    {
      "byQueue": [
        {
          "count": 2,
          "queue": "a"
        },
        {
          "count": 1,
          "queue": "b"
        }
      ],
      "byReason": [
        {
          "count": 3,
          "reason": "error"
        }
      ],
      "byType": [
        {
          "count": 3,
          "jobType": "http.request"
        }
      ],
      "newest": "<time>",
      "oldest": "<time>",
      "reasonSampleSize": 3,
      "total": 3
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_retried_and_deleted_by_filter_after_a_dry_run() {
    let (app, [first, second, third]) = app_with_dead_letters().await;
    let dry = app.post("/api/v1/dead-letter/bulk/delete", r#"{"filter": {"error": "private"}, "dryRun": true}"#).await;
    let dry = dry.json();
    assert_eq!((&dry["matched"], &dry["done"], &dry["sample"]), (&json!(2), &json!(0), &json!([third, first])));
    assert_eq!(dry["examples"][0]["type"], "http.request");
    assert_eq!(dry["examples"][0]["queue"], "a");
    assert!(dry["examples"][0]["error"].as_str().unwrap().contains("private"), "{dry}");
    assert!(dry.get("id").is_none());
    let done = app.post("/api/v1/dead-letter/bulk/delete", r#"{"filter": {"error": "private"}}"#).await.json();
    assert_eq!((&done["matched"], &done["done"], &done["skipped"]), (&json!(2), &json!(2), &json!(0)));
    assert_eq!(ids(&app.get("/api/v1/dead-letter").await), [second.as_str()]);
    let all = app.post("/api/v1/dead-letter/bulk/retry", r#"{"all": true}"#).await.json();
    assert_eq!(all["done"], 1);
    let log = app.wait_for_state(&second, "FAILED").await["executionLog"].to_string();
    assert!(log.contains("by a bulk action"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_action_is_accepted_shown_and_finished() {
    let (app, _) = app_with_dead_letters().await;
    let response = app.post("/api/v1/dead-letter/bulk/delete", r#"{"all": true, "perSecond": 100}"#).await;
    assert_eq!(response.status, StatusCode::ACCEPTED, "{}", response.text);
    let body = response.json();
    let id = body["id"].as_str().unwrap().to_owned();
    assert_eq!((&body["matched"], &body["done"], &body["perSecond"]), (&json!(3), &json!(0), &json!(100)));
    let path = format!("/api/v1/bulk/{id}");
    assert_eq!(response.header("location"), path);
    let finished = loop {
        let shown = app.get(&path).await;
        if !shown.json()["finishedAt"].is_null() {
            break shown;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    };
    assert_snapshot!(finished.snapshot(), @r#"
    200 OK
    {
      "action": "delete",
      "actor": "loopback",
      "createdAt": "<time>",
      "done": 3,
      "dueAt": null,
      "filter": {
        "status": [
          "FAILED"
        ]
      },
      "finishedAt": "<time>",
      "id": "<id 1>",
      "matched": 3,
      "perSecond": 100,
      "skipped": 0
    }
    "#);
    assert_eq!(app.get("/api/v1/bulk").await.json()["actions"][0]["id"], id);
    let late = app.post(&format!("{path}/cancel"), "").await;
    assert_eq!(late.status, StatusCode::CONFLICT);
    assert_eq!(late.json()["error"]["code"], "INVALID_TRANSITION");
    let audit = app.get(&format!("/api/v1/audit?target={id}")).await.json();
    let entries: Vec<Value> =
        audit["entries"].as_array().unwrap().iter().map(|e| json!([e["action"], e["count"]])).collect();
    assert_eq!(entries, [json!(["bulk.delete.end", 3]), json!(["bulk.delete", 3])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_action_can_be_cancelled() {
    let app = App::start().await;
    let jobs: Vec<Value> = (0..50).map(|_| json!({ "name": "unhandled.type" })).collect();
    app.post("/api/v1/jobs/batch", json!({ "jobs": jobs }).to_string()).await;
    let body = app.post("/api/v1/jobs/bulk/cancel", r#"{"all": true, "perSecond": 1}"#).await.json();
    let stopped = app.post(&format!("/api/v1/bulk/{}/cancel", body["id"].as_str().unwrap()), "").await.json();
    assert_eq!((&stopped["error"], &stopped["dueAt"]), (&json!("stopped by loopback"), &Value::Null));
    assert!(stopped["done"].as_u64().unwrap() < 50 && !stopped["finishedAt"].is_null(), "{stopped}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_not_dead_lettered_is_not_found() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let unknown = "018f0000-0000-7000-8000-000000000000";
    let mut output = String::new();
    for (method, path) in [
        ("GET", format!("/{id}")),
        ("DELETE", format!("/{id}")),
        ("POST", format!("/{id}/retry")),
        ("GET", format!("/{unknown}")),
        ("POST", format!("/{unknown}/retry")),
        ("DELETE", "/nonsense".into()),
        ("POST", "/bulk/cancel".into()),
    ] {
        output.push_str(&format!(
            "{}\n",
            app.call(method, &format!("/api/v1/dead-letter{path}"), "{}").await.error_snapshot()
        ));
    }
    let bulk = app.get(&format!("/api/v1/bulk/{unknown}")).await.error_snapshot();
    assert_snapshot!(format!("{output}{bulk}\n{}", app.post("/api/v1/bulk/x/cancel", "").await.error_snapshot()), @r#"
    404 NOT_FOUND: job <id 1> is not dead-lettered (QUEUED)
    404 NOT_FOUND: job <id 1> is not dead-lettered (QUEUED)
    404 NOT_FOUND: job <id 1> is not dead-lettered (QUEUED)
    404 NOT_FOUND: there is no job <id 1>
    404 NOT_FOUND: there is no job <id 1>
    400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    404 NOT_FOUND: no bulk action "cancel" for dead letters; use retry or delete
    404 NOT_FOUND: no bulk action <id 1>
    400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_filters_are_reported() {
    let (app, _) = app_with_dead_letters().await;
    let mut output =
        format!("{}\n", app.get("/api/v1/dead-letter?status=FAILED&reason=bad&error=&limit=0").await.error_snapshot());
    for body in [
        "{}",
        r#"{"filter": {}}"#,
        r#"{"filter": {"status": "FAILED"}}"#,
        r#"{"filter": {"error": 5}, "persecond": 1}"#,
        r#"{"filter": {"error": "x"}, "perSecond": 0}"#,
        r#"{"filter": {"error": "x"}, "perSecond": 20000}"#,
        r#"{"filter": {"error": "x"}, "perSecond": -1}"#,
    ] {
        output.push_str(&format!("{}\n", app.post("/api/v1/dead-letter/bulk/delete", body).await.error_snapshot()));
    }
    let every = r#"{"filter": {"status": "PENDING,QUEUED,SCHEDULED,ASSIGNED,PROCESSING,RETRYING"}}"#;
    output.push_str(&app.post("/api/v1/jobs/bulk/cancel", every).await.error_snapshot());
    assert_snapshot!(output, @r#"
    400 VALIDATION_ERROR: 4 fields are not valid
    status: unknown parameter
    reason: must be one of error, timeout, orphaned, cancelled, expired, no_handler
    error: must not be empty
    limit: must be a number from 1 to 100
    400 VALIDATION_ERROR: filter: matches every job; set "all": true to confirm
    filter: matches every job; set "all": true to confirm
    400 VALIDATION_ERROR: filter: matches every job; set "all": true to confirm
    filter: matches every job; set "all": true to confirm
    400 VALIDATION_ERROR: filter.status: unknown parameter
    filter.status: unknown parameter
    400 VALIDATION_ERROR: 2 fields are not valid
    persecond: unknown field
    filter.error: must be a string
    400 VALIDATION_ERROR: perSecond: must be between 1 and 10000, got 0
    perSecond: must be between 1 and 10000, got 0
    400 VALIDATION_ERROR: perSecond: must be between 1 and 10000, got 20000
    perSecond: must be between 1 and 10000, got 20000
    400 VALIDATION_ERROR: perSecond: must be a non-negative integer
    perSecond: must be a non-negative integer
    400 VALIDATION_ERROR: filter: matches every job; set "all": true to confirm
    filter: matches every job; set "all": true to confirm
    "#);
    assert_eq!(ids(&app.get("/api/v1/dead-letter").await).len(), 3);
}
