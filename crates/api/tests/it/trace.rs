//! Tests of `GET /trace/:correlationId`.

use serde_json::Value;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_is_one_timeline_of_a_correlation_id() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop", "correlationId": "order/7 ñ"}"#).await;
    app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&id, "COMPLETED").await;
    let trace = app.get("/api/v1/trace/order%2F7%20%C3%B1").await.json();
    assert_eq!(trace["correlationId"], "order/7 ñ");
    assert_eq!(trace["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(trace["jobs"][0]["runs"][0]["status"], "COMPLETED");
    let what: Vec<&Value> = trace["timeline"].as_array().unwrap().iter().map(|entry| &entry["what"]).collect();
    assert_eq!(what, ["created", "queued", "assigned", "started", "completed"]);
    assert!(trace.get("omitted").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_contains_the_schedule_that_created_a_job() {
    let app = App::start().await;
    let body = r#"{"name": "yearly", "cronExpression": "0 0 1 1 *", "jobName": "noop"}"#;
    let schedule = app.post("/api/v1/schedules", body).await.json()["id"].as_str().unwrap().to_owned();
    let triggered = app.post(&format!("/api/v1/schedules/{schedule}/trigger"), "").await.json();
    let id = triggered["jobId"].as_str().unwrap_or_else(|| panic!("{triggered}")).to_owned();
    app.wait_for_state(&id, "COMPLETED").await;
    let correlation = app.job(&id).await["correlationId"].as_str().unwrap().to_owned();
    let trace = app.get(&format!("/api/v1/trace/{correlation}")).await.json();
    let ticks: Vec<&Value> =
        trace["timeline"].as_array().unwrap().iter().filter(|entry| entry["kind"] == "schedule").collect();
    assert_eq!(ticks.len(), 1, "{trace:#}");
    assert_eq!((&ticks[0]["what"], &ticks[0]["jobId"]), (&Value::from("triggered"), &Value::from(id.as_str())));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_correlation_id_is_not_found_and_that_of_a_job_is_suggested() {
    let app = App::start().await;
    insta::assert_snapshot!(app.get("/api/v1/trace/unknown").await.error_snapshot(), @"404 NOT_FOUND: no task, job or event has the correlation id \"unknown\"; it may have expired");
    let id = app.create(r#"{"name": "noop", "correlationId": "order-7"}"#).await;
    insta::assert_snapshot!(app.get(&format!("/api/v1/trace/{id}")).await.error_snapshot(), @"404 NOT_FOUND: job <id 1> has the correlation id \"order-7\"");
    insta::assert_snapshot!(app.get("/api/v1/trace/%01").await.error_snapshot(), @r"
    400 VALIDATION_ERROR: correlationId: must have 1 to 255 bytes and no control characters
    correlationId: must have 1 to 255 bytes and no control characters
    ");
}
