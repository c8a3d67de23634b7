//! `POST /jobs/batch`: submits all jobs or none.

use axum::http::StatusCode;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::{App, BATCH_BYTES};

const BATCH: &str = "/api/v1/jobs/batch";

fn batch(jobs: impl IntoIterator<Item = Value>) -> String {
    json!({ "jobs": jobs.into_iter().collect::<Vec<_>>() }).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_dependent_jobs_runs_in_order() {
    let app = App::start().await;
    let response = app
        .post(
            BATCH,
            batch([
                json!({"name": "noop", "ref": "report", "dependsOn": ["part 1", "part 2"]}),
                json!({"name": "noop", "ref": "part 1", "dependsOn": ["import"]}),
                json!({"name": "noop", "ref": "part 2", "dependsOn": ["import"]}),
                json!({"name": "sleep", "ref": "import", "payload": {"ms": 30}}),
            ]),
        )
        .await;
    assert_snapshot!(response.snapshot(), @r#"
    201 Created
    {
      "ids": [
        "<id 1>",
        "<id 2>",
        "<id 3>",
        "<id 4>"
      ]
    }
    "#);
    let ids: Vec<String> = serde_json::from_value(response.json()["ids"].clone()).unwrap();
    let report = app.wait_for_state(&ids[0], "COMPLETED").await;
    assert_eq!(report["dependsOn"], json!([ids[1], ids[2]]));
    let time = |job: &Value, what: &str| job[what].as_str().unwrap().to_owned();
    let import = app.job(&ids[3]).await;
    for part in [app.job(&ids[1]).await, app.job(&ids[2]).await] {
        assert!(time(&import, "completedAt") <= time(&part, "startedAt"));
        assert!(time(&part, "completedAt") <= time(&report, "startedAt"));
    }
    assert_eq!(report["correlationId"], import["correlationId"], "one request, one correlation id");
    assert_eq!(report["correlationId"], response.header("x-correlation-id"));
}

#[tokio::test(flavor = "multi_thread")]
async fn cycles_and_unknown_or_repeated_refs_are_rejected() {
    let app = App::start().await;
    let mut output = String::new();
    for jobs in [
        json!([{"name": "noop", "ref": "a", "dependsOn": ["b"]}, {"name": "noop", "ref": "b", "dependsOn": ["a"]}]),
        json!([{"name": "noop", "ref": "a", "dependsOn": ["a"]}]),
        json!([{"name": "noop", "ref": "a"}, {"name": "noop", "ref": "a"}]),
        json!([{"name": "noop"}, {"name": "noop", "dependsOn": ["unknown"]}]),
        json!([{"name": "noop", "dependsOn": ["018f0000-0000-7000-8000-000000000000"]}]),
    ] {
        output.push_str(&format!("{}\n", app.post(BATCH, json!({ "jobs": jobs }).to_string()).await.error_snapshot()));
    }
    assert_snapshot!(output, @r#"
    400 VALIDATION_ERROR: jobs[0].dependsOn: depends on itself, directly or through other jobs
    jobs[0].dependsOn: depends on itself, directly or through other jobs
    400 VALIDATION_ERROR: jobs[0].dependsOn: depends on itself, directly or through other jobs
    jobs[0].dependsOn: depends on itself, directly or through other jobs
    400 VALIDATION_ERROR: jobs[1].ref: "a" is already the ref of another job
    jobs[1].ref: "a" is already the ref of another job
    400 VALIDATION_ERROR: jobs[1].dependsOn: "unknown" is neither a job id nor a ref in this batch
    jobs[1].dependsOn: "unknown" is neither a job id nor a ref in this batch
    400 VALIDATION_ERROR: dependsOn: there is no job <id 1>
    dependsOn: there is no job <id 1>
    "#);
    assert_eq!(app.total().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_invalid_job_rejects_the_batch_with_every_error() {
    let app = App::start().await;
    let jobs =
        json!([{"name": "noop"}, {"name": ""}, 7, {"name": "noop", "nmae": 1, "maxRetries": 99}, {"payload": []}]);
    assert_snapshot!(app.post(BATCH, json!({ "jobs": jobs }).to_string()).await.error_snapshot(), @"
    400 VALIDATION_ERROR: 6 fields are not valid
    jobs[1].name: must have 1 to 100 characters, has 0
    jobs[2]: must be a JSON object
    jobs[3].nmae: unknown field
    jobs[3].maxRetries: must be between 0 and 10, got 99
    jobs[4].name: is required unless type is set
    jobs[4].payload: must be a JSON object
    ");
    assert_eq!(app.total().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_in_one_job_rejects_the_batch() {
    let app = App::start().await;
    app.create(r#"{"name": "unhandled.type", "uniqueKey": "taken"}"#).await;
    let jobs = [json!({"name": "noop"}), json!({"name": "noop", "uniqueKey": "taken"}), json!({"name": "noop"})];
    let response = app.post(BATCH, batch(jobs)).await;
    assert_snapshot!(response.error_snapshot(), @"
    409 CONFLICT: a job with this uniqueKey has not finished: job <id 1>
    id: <id 1>
    ");
    let twice =
        [json!({"name": "unhandled.type", "uniqueKey": "k"}), json!({"name": "unhandled.type", "uniqueKey": "k"})];
    assert_eq!(app.post(BATCH, batch(twice)).await.status, StatusCode::CONFLICT);
    assert_eq!(app.total().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_batch_with_idempotency_keys_creates_nothing() {
    let app = App::start().await;
    let body = batch((0..3).map(|n| json!({"name": "noop", "idempotencyKey": format!("k{n}"), "payload": {"n": n}})));
    let first = app.post(BATCH, body.clone()).await;
    let second = app.post(BATCH, body).await;
    assert_eq!(first.json()["ids"], second.json()["ids"]);
    assert_eq!(app.total().await, 3);
    let other = batch([json!({"name": "noop", "idempotencyKey": "k1", "payload": {"n": 7}})]);
    assert_eq!(app.post(BATCH, other).await.status, StatusCode::CONFLICT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_batch_of_dependent_jobs_creates_nothing() {
    let app = App::start().await;
    let body = batch([
        json!({"name": "unhandled.type", "idempotencyKey": "a", "ref": "a"}),
        json!({"name": "unhandled.type", "idempotencyKey": "b", "dependsOn": ["a"]}),
    ]);
    let first = app.post(BATCH, body.clone()).await;
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.text);
    let second = app.post(BATCH, body).await;
    assert_eq!(second.json(), first.json(), "the same bodies under the same keys are the same jobs");
    assert_eq!(app.total().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_job_may_depend_on_a_job_of_its_batch_that_already_exists() {
    let app = App::start().await;
    let parent = json!({"name": "sleep", "payload": {"ms": 1}, "idempotencyKey": "a", "ref": "a"});
    let first = app.post(BATCH, batch([parent.clone()])).await;
    let second = app.post(BATCH, batch([parent, json!({"name": "noop", "dependsOn": ["a"]})])).await;
    assert_eq!(second.status, StatusCode::CREATED, "{}", second.text);
    assert_eq!(second.json()["ids"][0], first.json()["ids"][0]);
    let child = app.wait_for_state(second.json()["ids"][1].as_str().unwrap(), "COMPLETED").await;
    assert_eq!(child["dependsOn"], json!([first.json()["ids"][0]]), "it depends on the existing job");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_ten_thousand_jobs_is_accepted_and_a_larger_one_is_rejected() {
    let app = App::start().await;
    let jobs = |count: usize| batch((0..count).map(|_| json!({"name": "unhandled.type"})));
    assert_snapshot!(app.post(BATCH, jobs(10_001)).await.error_snapshot(), @"
    400 VALIDATION_ERROR: jobs: must have at most 10000 jobs, has 10001
    jobs: must have at most 10000 jobs, has 10001
    ");
    assert_eq!(app.total().await, 0);
    let accepted = app.post(BATCH, jobs(10_000)).await;
    assert_eq!((accepted.status, accepted.json()["ids"].as_array().unwrap().len()), (StatusCode::CREATED, 10_000));
    assert_eq!(app.total().await, 10_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_jobs_is_rejected() {
    let app = App::start().await;
    let mut output = String::new();
    for body in [
        "{}",
        r#"{"jobs": []}"#,
        r#"{"jobs": {}}"#,
        r#"{"jobs": null}"#,
        r#"{"jobs": [{"name": "noop"}], "more": 1}"#,
        "",
    ] {
        output.push_str(&format!("{}\n", app.post(BATCH, body).await.error_snapshot()));
    }
    assert_snapshot!(output, @"
    400 VALIDATION_ERROR: jobs: must be a list of jobs
    jobs: must be a list of jobs
    400 VALIDATION_ERROR: jobs: must not be empty
    jobs: must not be empty
    400 VALIDATION_ERROR: jobs: must be a list of jobs
    jobs: must be a list of jobs
    400 VALIDATION_ERROR: jobs: must be a list of jobs
    jobs: must be a list of jobs
    400 VALIDATION_ERROR: more: unknown field
    more: unknown field
    400 VALIDATION_ERROR: body: is not valid JSON: EOF while parsing a value at line 1 column 0
    body: is not valid JSON: EOF while parsing a value at line 1 column 0
    ");
    assert_eq!(app.post(BATCH, " ".repeat(BATCH_BYTES + 1)).await.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_errors_of_a_batch_is_bounded() {
    let app = App::start().await;
    let response = app.post(BATCH, batch((0..5_000).map(|_| json!({"name": ""})))).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST);
    assert_eq!(response.json()["error"]["details"].as_array().unwrap().len(), 100);
}
