//! The client against a server that answers what the test wants.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::{get, post},
};
use faena::{Client, Error, JobId, JobRequest, JobState};
use serde_json::{Value, json};
use tokio::net::TcpListener;

fn job(id: JobId, status: &str, result: Value) -> Value {
    let at = "2026-01-01T00:00:00Z";
    json!({
        "id": id, "name": "noop", "type": "noop", "queue": "default", "status": status, "priority": "NORMAL", "payload": {},
        "maxRetries": 3, "retryCount": 0, "retryDelay": 1000, "backoffMultiplier": 2.0, "maxDelay": 60000, "jitter": 0.0,
        "retryOn": "all", "timeoutMs": null, "createdAt": at, "updatedAt": at, "scheduledAt": null, "expiresAt": null,
        "queuedAt": null, "startedAt": null, "completedAt": null, "result": result, "error": "it broke", "errorReason": null,
        "progress": null, "scheduleId": null, "workerId": null, "run": null, "webhookUrl": null, "correlationId": "c",
        "idempotencyKey": null, "uniqueKey": null, "concurrencyKey": null, "tags": [],
    })
}

async fn serve(router: Router) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Client::builder().url(url).token("fna_key").timeout(Duration::from_secs(5)).build().expect("a client")
}

#[tokio::test]
async fn a_job_is_handed_in_with_its_key_and_its_trace() {
    let router = Router::new().route(
        "/api/v1/jobs",
        post(|headers: HeaderMap, body: String| async move {
            assert_eq!(headers["authorization"], "Bearer fna_key");
            assert_eq!(headers["traceparent"], "00-t");
            assert_eq!(body, r#"{"type":"noop","payload":{"a":1}}"#);
            let at = "2026-01-01T00:00:00Z";
            let created = json!({"id": JobId::new(), "status": "QUEUED", "createdAt": at, "correlationId": "c"});
            (StatusCode::CREATED, created.to_string())
        }),
    );
    let client = serve(router).await;
    let created = client.submit(&JobRequest::new("noop").payload(&json!({"a": 1})).traceparent("00-t")).await;
    assert_eq!(created.expect("created").status, JobState::Queued);
}

#[tokio::test]
async fn a_refusal_can_be_branched_on() {
    let body = json!({"error": {"code": "NOT_FOUND", "message": "no such job", "requestId": "r"}}).to_string();
    let client = serve(Router::new().fallback(|| async move { (StatusCode::NOT_FOUND, body) })).await;
    for result in [client.get(JobId::new()).await.map(drop), client.wait(JobId::new()).await.map(drop)] {
        assert!(matches!(result, Err(Error::Refused { status: 404, code, .. }) if code == "NOT_FOUND"));
    }
    assert!(matches!(
        Client::new("http://127.0.0.1:1").expect("a client").get(JobId::new()).await,
        Err(Error::Unreachable { .. })
    ));
}

#[tokio::test]
async fn waiting_survives_streams_that_end_too_early() {
    let opened = Arc::new(AtomicU32::new(0));
    let router = Router::new()
        .route(
            "/api/v1/jobs/{id}/events",
            get(|State(opened): State<Arc<AtomicU32>>, Path(id): Path<JobId>| async move {
                let status = if opened.fetch_add(1, Ordering::SeqCst) < 2 { "PROCESSING" } else { "COMPLETED" };
                let event = format!("event: job\ndata: {}\n\n", job(id, status, json!([1, 2])));
                ([(CONTENT_TYPE, "text/event-stream")], event).into_response()
            }),
        )
        .route(
            "/api/v1/jobs/{id}",
            get(|Path(id): Path<JobId>| async move { job(id, "PROCESSING", Value::Null).to_string() }),
        )
        .with_state(opened.clone());
    let client = serve(router).await;
    assert_eq!(client.wait_for::<Vec<u32>>(JobId::new()).await.expect("a result"), [1, 2]);
    assert_eq!(opened.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn without_a_stream_waiting_looks_again() {
    let router = Router::new().route("/api/v1/jobs/{id}/events", get(|| async { StatusCode::BAD_GATEWAY })).route(
        "/api/v1/jobs/{id}",
        get(|Path(id): Path<JobId>| async move { job(id, "FAILED", Value::Null).to_string() }),
    );
    let client = serve(router).await;
    let problem = client.wait_for::<()>(JobId::new()).await.expect_err("it failed");
    assert!(
        matches!(problem, Error::NotCompleted { status: JobState::Failed, error: Some(why), .. } if why == "it broke")
    );
}

#[tokio::test]
async fn waiting_for_so_long_at_most_says_so() {
    let router = Router::new().fallback(|| async { StatusCode::BAD_GATEWAY });
    let client = serve(router).await;
    let problem = client.wait_at_most(JobId::new(), Duration::from_millis(50)).await.expect_err("too long");
    assert!(matches!(problem, Error::StillRunning { .. }));
}
