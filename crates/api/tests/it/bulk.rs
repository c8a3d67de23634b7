//! Tests of `POST /jobs/bulk/{cancel,retry,delete}`.

use insta::assert_snapshot;
use serde_json::json;

use crate::app::App;

async fn app_with_jobs() -> App {
    let app = App::start().await;
    for _ in 0..3 {
        app.create(r#"{"name": "unhandled.type", "queue": "old"}"#).await;
    }
    for _ in 0..2 {
        app.create(r#"{"name": "unhandled.type", "queue": "new"}"#).await;
    }
    let done = app.create(r#"{"name": "noop", "queue": "old"}"#).await;
    app.wait_for_state(&done, "COMPLETED").await;
    app
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_shows_the_jobs_and_changes_nothing() {
    let app = app_with_jobs().await;
    let response = app.post("/api/v1/jobs/bulk/cancel", r#"{"filter": {"queue": "old"}, "dryRun": true}"#).await;
    assert_snapshot!(response.snapshot(), @r#"
    200 OK
    {
      "done": 0,
      "dryRun": true,
      "examples": [
        {
          "id": "<id 1>",
          "queue": "old",
          "status": "QUEUED",
          "type": "unhandled.type"
        },
        {
          "id": "<id 2>",
          "queue": "old",
          "status": "QUEUED",
          "type": "unhandled.type"
        },
        {
          "id": "<id 3>",
          "queue": "old",
          "status": "QUEUED",
          "type": "unhandled.type"
        }
      ],
      "matched": 3,
      "matchedIsExact": true,
      "sample": [
        "<id 1>",
        "<id 2>",
        "<id 3>"
      ],
      "skipped": 0
    }
    "#);
    assert_eq!(app.get("/api/v1/jobs?status=QUEUED").await.json()["total"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_cancelled_retried_and_deleted_by_filter() {
    let app = app_with_jobs().await;
    let count = async |query: &str| app.get(&format!("/api/v1/jobs?{query}")).await.json()["total"].clone();
    let numbers = async |action: &str, body: &str| {
        let response = app.post(&format!("/api/v1/jobs/bulk/{action}"), body.to_owned()).await.json();
        json!([response["matched"], response["done"], response["skipped"]])
    };
    assert_eq!(numbers("cancel", r#"{"filter": {"queue": "old"}}"#).await, json!([3, 3, 0]));
    assert_eq!((count("status=CANCELLED").await, count("status=QUEUED").await), (json!(3), json!(2)));
    assert_eq!(numbers("retry", r#"{"filter": {"status": "CANCELLED"}}"#).await, json!([3, 3, 0]));
    assert_eq!(count("status=CANCELLED").await, 0);
    assert_eq!(
        numbers("retry", r#"{"filter": {"status": "COMPLETED"}}"#).await,
        json!([0, 0, 0]),
        "nothing to retry there"
    );
    assert_eq!(numbers("delete", r#"{"filter": {"queue": "new"}}"#).await, json!([2, 2, 0]));
    assert_eq!(numbers("delete", r#"{"all": true}"#).await, json!([4, 4, 0]));
    assert_eq!(count("").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_action_reaches_more_jobs_than_fit_on_a_page() {
    let app = App::start().await;
    let jobs: Vec<_> = (0..250).map(|_| json!({"name": "unhandled.type"})).collect();
    app.post("/api/v1/jobs/batch", json!({ "jobs": jobs }).to_string()).await;
    for action in ["cancel", "retry", "cancel", "delete"] {
        let response = app.post(&format!("/api/v1/jobs/bulk/{action}"), r#"{"all": true}"#).await.json();
        assert_eq!((&response["matched"], &response["done"]), (&json!(250), &json!(250)), "{action}: {response}");
    }
    assert_eq!(app.total().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_cancel_stops_running_jobs() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "sleep", "payload": {"ms": 600000}}"#).await;
    app.wait_for_state(&id, "PROCESSING").await;
    app.post("/api/v1/jobs/bulk/cancel", r#"{"filter": {"type": "sleep"}}"#).await;
    app.wait_for_state(&id, "CANCELLED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_matches_every_job_must_be_confirmed() {
    let app = app_with_jobs().await;
    let mut output = String::new();
    for body in [
        "{}",
        r#"{"filter": {"createdAfter": "1970-01-01T00:00:00Z", "createdBefore": "2999-01-01T00:00:00Z"}}"#,
        r#"{"filter": {"colour": "red", "status": "ASLEEP"}}"#,
        r#"{"filter": "all"}"#,
        r#"{"filter": {"queue": "old"}, "dryrun": true}"#,
        r#"{"filter": {"queue": "old"}, "dryRun": "yes"}"#,
        "",
    ] {
        output.push_str(&format!("{}\n", app.post("/api/v1/jobs/bulk/delete", body).await.error_snapshot()));
    }
    assert_snapshot!(output, @r#"
    400 VALIDATION_ERROR: filter: matches every job; set "all": true to confirm
    filter: matches every job; set "all": true to confirm
    400 VALIDATION_ERROR: filter: matches every job; set "all": true to confirm
    filter: matches every job; set "all": true to confirm
    400 VALIDATION_ERROR: 2 fields are not valid
    filter.colour: unknown parameter
    filter.status: must be one of PENDING, QUEUED, SCHEDULED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED, CANCELLED
    400 VALIDATION_ERROR: filter: must be an object
    filter: must be an object
    400 VALIDATION_ERROR: dryrun: unknown field
    dryrun: unknown field
    400 VALIDATION_ERROR: dryRun: must be true or false
    dryRun: must be true or false
    400 VALIDATION_ERROR: body: is not valid JSON: EOF while parsing a value at line 1 column 0
    body: is not valid JSON: EOF while parsing a value at line 1 column 0
    "#);
    assert_eq!(app.total().await, 6);
}
