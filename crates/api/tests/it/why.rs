//! Tests of `GET /jobs/:id/why`.

use axum::http::StatusCode;
use insta::assert_snapshot;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_explains_why_it_is_not_running() {
    let app = App::start().await;
    app.post("/api/v1/queues/mail/pause", r#"{"reason": "the SMTP server is down"}"#).await;
    let id = app.create(r#"{"name": "unhandled.type", "queue": "mail"}"#).await;
    let mut why = app.get(&format!("/api/v1/jobs/{id}/why")).await;
    let mut shown = why.json();
    // The message lists the types of the built-in worker, which another test checks.
    let reasons = shown["reasons"].as_array_mut().unwrap();
    assert!(reasons[1]["message"].as_str().unwrap().starts_with("no worker can run type \"unhandled.type\""));
    reasons[1]["message"] = "…".into();
    shown["summary"] = "…".into();
    why.text = shown.to_string();
    assert_snapshot!(why.snapshot(), @r#"
    200 OK
    {
      "jobId": "<id 1>",
      "reasons": [
        {
          "by": "loopback",
          "code": "queue_paused",
          "message": "queue \"mail\" was paused by loopback at <time> (the SMTP server is down)",
          "queue": "mail",
          "reason": "the SMTP server is down",
          "since": "<time>"
        },
        {
          "code": "no_worker",
          "message": "…",
          "queue": "mail",
          "type": "unhandled.type"
        }
      ],
      "status": "QUEUED",
      "summary": "…"
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn why_rejects_an_unknown_job_with_404_and_an_invalid_id_with_400() {
    let app = App::start().await;
    let unknown = app.get("/api/v1/jobs/01900000-0000-7000-8000-000000000000/why").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(app.get("/api/v1/jobs/nothing/why").await.status, StatusCode::BAD_REQUEST);
}
