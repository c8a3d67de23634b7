//! The client against a server that answers as the test wants.

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
use faena::{Client, Error, ErrorCode, JobId, JobRequest, JobState};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::fake_server::new_id;

/// A job as the server shows it.
pub fn job(id: JobId, status: &str, result: Value) -> Value {
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

pub async fn serve(router: Router) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Client::builder().url(url).token("fna_key").timeout(Duration::from_secs(5)).build().expect("a client")
}

#[tokio::test]
async fn a_job_is_submitted_with_the_api_key_and_its_trace() {
    let router = Router::new().route(
        "/api/v1/jobs",
        post(|headers: HeaderMap, body: String| async move {
            assert_eq!(headers["authorization"], "Bearer fna_key");
            assert_eq!(headers["traceparent"], "00-t");
            assert_eq!(body, r#"{"type":"noop","payload":{"a":1}}"#);
            let at = "2026-01-01T00:00:00Z";
            let created = json!({"id": new_id(), "status": "QUEUED", "createdAt": at, "correlationId": "c"});
            (StatusCode::CREATED, created.to_string())
        }),
    );
    let client = serve(router).await;
    let submitted = client.submit(&JobRequest::new("noop").payload(&json!({"a": 1})).traceparent("00-t")).await;
    assert_eq!(submitted.expect("submitted").status, JobState::Queued);
}

#[tokio::test]
async fn a_refusal_and_an_outage_can_be_distinguished() {
    let body = json!({"error": {"code": "NOT_FOUND", "message": "no such job", "requestId": "r"}}).to_string();
    let client = serve(Router::new().fallback(|| async move { (StatusCode::NOT_FOUND, body) })).await;
    for result in [client.job(new_id()).await.map(drop), client.wait(new_id()).await.map(drop)] {
        assert!(matches!(result, Err(Error::Response { status: 404, code: ErrorCode::NotFound, .. })));
    }
    assert!(matches!(
        Client::new("http://127.0.0.1:1").expect("a client").job(new_id()).await,
        Err(Error::Unreachable { .. })
    ));
}

#[tokio::test]
async fn waiting_continues_after_interrupted_streams() {
    let opened = Arc::new(AtomicU32::new(0));
    let router = Router::new()
        .route(
            "/api/v1/jobs/{id}/events",
            get(|State(opened): State<Arc<AtomicU32>>, Path(id): Path<JobId>| async move {
                let status = if opened.fetch_add(1, Ordering::SeqCst) < 2 { "PROCESSING" } else { "COMPLETED" };
                let event = format!(": hello\n\nevent: job\ndata: {}\n\n", job(id, status, json!([1, 2])));
                ([(CONTENT_TYPE, "text/event-stream")], event).into_response()
            }),
        )
        .route(
            "/api/v1/jobs/{id}",
            get(|Path(id): Path<JobId>| async move { job(id, "PROCESSING", Value::Null).to_string() }),
        )
        .with_state(opened.clone());
    let client = serve(router).await;
    assert_eq!(client.wait_for_result::<Vec<u32>>(new_id()).await.expect("a result"), [1, 2]);
    assert_eq!(opened.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn without_a_stream_waiting_polls_the_job() {
    let router = Router::new().route("/api/v1/jobs/{id}/events", get(|| async { StatusCode::BAD_GATEWAY })).route(
        "/api/v1/jobs/{id}",
        get(|Path(id): Path<JobId>| async move { job(id, "FAILED", Value::Null).to_string() }),
    );
    let client = serve(router).await;
    let error = client.wait_for_result::<()>(new_id()).await.expect_err("the job failed");
    assert!(
        matches!(error, Error::NotCompleted { status: JobState::Failed, error: Some(text), .. } if text == "it broke")
    );
}

#[tokio::test]
async fn waiting_ends_at_its_time_limit() {
    let router = Router::new().fallback(|| async { StatusCode::BAD_GATEWAY });
    let client = serve(router).await;
    let error = client.wait_timeout(new_id(), Duration::from_millis(50)).await.expect_err("not finished");
    assert!(matches!(error, Error::StillRunning { .. }));
}

#[tokio::test]
async fn any_endpoint_can_be_called_and_streamed() {
    let router = Router::new()
        .route("/api/v1/echo", post(|uri: axum::http::Uri, body: String| async move { format!("{uri} {body}") }))
        .route("/api/v1/events", get(|| async { "id: 1\n\nid: 2\nevent: a\ndata: b\n\n" }));
    let client = serve(router).await;
    let request = client.request(faena::Method::POST, "/api/v1/echo");
    let request = request.query("a", 1).query_opt("b", None::<&str>).query_opt("c", Some("x y"));
    let answer = request.json_text("{\"n\":1.10}".into()).text().await.expect("an answer");
    assert_eq!(answer, "/api/v1/echo?a=1&c=x+y {\"n\":1.10}");
    let mut stream = client.request(faena::Method::GET, "/api/v1/events").stream().await.expect("a stream");
    assert_eq!(stream.next().await.expect("a message").id.as_deref(), Some("1"));
    let event = stream.next().await.expect("a message");
    assert_eq!((event.event.as_deref(), event.data.as_str()), (Some("a"), "b"));
    assert!(stream.next().await.is_none());
}
