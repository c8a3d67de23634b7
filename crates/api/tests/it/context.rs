//! Headers of every response, and the health of the process.

use axum::http::{Request, StatusCode};
use faena_engine::{EngineConfig, Roles};
use insta::assert_snapshot;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn ids_of_the_caller_are_returned_and_missing_ones_are_generated() {
    let app = App::start().await;
    for path in ["/health/live", "/api/v1/jobs", "/api/v1/nothing", "/api/v1/jobs/x"] {
        let request = Request::get(path).header("x-request-id", "mine").header("x-correlation-id", "ours");
        let response = app.send(request.body("".into()).unwrap()).await;
        assert_eq!((response.header("x-request-id"), response.header("x-correlation-id")), ("mine", "ours"), "{path}");
        let time = response.header("x-response-time");
        assert!(time.strip_suffix("ms").is_some_and(|ms| ms.parse::<f64>().is_ok()), "{time}");
        let generated = app.get(path).await;
        for name in ["x-request-id", "x-correlation-id"] {
            assert!(generated.header(name).parse::<uuid::Uuid>().is_ok(), "{path}: {:?}", generated.headers);
        }
        assert_ne!(
            app.get(path).await.header("x-request-id"),
            generated.header("x-request-id"),
            "each request has its own"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_that_cannot_be_logged_are_replaced() {
    let app = App::start().await;
    for bad in [&b""[..], &b"\xff"[..], &[b'x'; 256][..], &b"a\tb"[..]] {
        let request = Request::get("/health/live").header("x-request-id", bad).header("x-correlation-id", bad);
        let response = app.send(request.body("".into()).unwrap()).await;
        for name in ["x-request-id", "x-correlation-id"] {
            assert!(response.header(name).parse::<uuid::Uuid>().is_ok(), "{name}: {:?}", response.headers);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_gets_the_correlation_id_of_its_request() {
    let app = App::start().await;
    let create = async |header: Option<&str>, body: &'static str| {
        let mut request = Request::post("/api/v1/jobs");
        if let Some(text) = header {
            request = request.header("x-correlation-id", text);
        }
        let response = app.send(request.body(body.into()).unwrap()).await;
        let job = app.job(response.json()["id"].as_str().unwrap()).await;
        assert_eq!(job["correlationId"], response.json()["correlationId"]);
        (job["correlationId"].as_str().unwrap().to_owned(), response)
    };
    let (found, _) = create(Some("from the header"), r#"{"name": "elsewhere"}"#).await;
    assert_eq!(found, "from the header");
    let (found, _) =
        create(Some("from the header"), r#"{"name": "elsewhere", "correlationId": "from the body"}"#).await;
    assert_eq!(found, "from the body");
    let (found, response) = create(None, r#"{"name": "elsewhere"}"#).await;
    assert_eq!((found.as_str(), json!(found)), (response.header("x-correlation-id"), response.json()["id"].clone()));
    let list = app.get("/api/v1/jobs?correlationId=from%20the%20header").await.json();
    assert_eq!(list["total"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_process_is_live() {
    let app = App::start().await;
    assert_snapshot!(app.get("/health/live").await.snapshot(), @r#"
    200 OK
    {
      "status": "ok"
    }
    "#);
}

const LOOPS: [&str; 18] = [
    "bulk",
    "dispatcher",
    "event-reader",
    "guardian",
    "handlers",
    "history",
    "key-usage",
    "lease",
    "poller",
    "promoter",
    "reconciler",
    "recorder",
    "reporter",
    "retention",
    "scheduler",
    "tasks",
    "webhooks",
    "worker-status",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_ready_process_shows_its_database_its_worker_and_every_loop() {
    let app = App::start().await;
    let response = app.get("/health/ready").await;
    assert_eq!(response.status, StatusCode::OK);
    let mut body = response.json();
    assert!(body["checks"]["database"]["latencyMs"].take().is_number());
    let loops = body["checks"]["loops"].take();
    for check in loops.as_array().unwrap() {
        assert!(check["handled"].is_number() && check["lastBeatAt"].is_string(), "{check}");
        assert_eq!(check["status"], "healthy", "{check}");
    }
    let names: Vec<&str> = loops.as_array().unwrap().iter().filter_map(|check| check["name"].as_str()).collect();
    assert_eq!(names, LOOPS);
    assert_snapshot!(crate::app::redacted(&body), @r#"
    {
      "checks": {
        "database": {
          "engine": "sqlite",
          "latencyMs": null,
          "status": "healthy"
        },
        "loops": null,
        "workers": {
          "activeCount": 1,
          "status": "healthy"
        }
      },
      "status": "healthy"
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_without_a_worker_is_degraded_and_one_whose_loops_have_stopped_is_not_ready() {
    let roles = Roles { worker: false, ..Roles::ALL };
    let app = App::start_with(EngineConfig { roles, ..EngineConfig::default() }).await;
    let response = app.get("/health/ready").await;
    assert_eq!((response.status, &response.json()["status"]), (StatusCode::OK, &json!("degraded")));
    app.engine.stop(CancellationToken::new()).await;
    let response = app.get("/health/ready").await;
    assert_eq!((response.status, &response.json()["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy")));
    let loops = response.json()["checks"]["loops"].clone();
    assert!(loops.as_array().unwrap().iter().all(|check: &Value| check["status"] == "unhealthy"), "{loops:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slash_at_the_end_of_a_path_is_ignored() {
    let app = App::start().await;
    let created = app.post("/api/v1/jobs/", r#"{"name": "noop"}"#).await;
    assert_eq!(created.status, StatusCode::CREATED, "{}", created.text);
    let id = created.json()["id"].as_str().unwrap().to_owned();
    app.wait_for_state(&id, "COMPLETED").await;
    for path in [
        &format!("/api/v1/jobs/{id}/"),
        "/api/v1/jobs/?limit=1&q=noop",
        "/api/v1/dead-letter/stats/",
        "/api/v1/limits/",
        "/health/",
        "/health/live/",
        "/metrics//",
    ] {
        let response = app.get(path).await;
        assert_eq!(response.status, StatusCode::OK, "{path}: {}", response.text);
        assert!(!response.header("x-request-id").is_empty());
    }
    assert_eq!(app.get("/api/v1/jobs/?limit=1&q=noop").await.json()["total"], 1, "the query is kept");
    assert_eq!(app.get("/api/v1/nothing/").await.json()["error"]["code"], "NOT_FOUND");
    assert_eq!(app.call("PUT", "/api/v1/jobs/", "").await.json()["error"]["code"], "METHOD_NOT_ALLOWED");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_answers_as_readiness_does() {
    let app = App::start().await;
    let response = app.get("/health").await;
    assert_eq!((response.status, &response.json()["status"]), (StatusCode::OK, &serde_json::json!("healthy")));
    assert_eq!(response.json()["checks"]["database"]["status"], "healthy");
}
