//! `http.request` against a real server on loopback.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use faena_domain::{ErrorReason, JobState, JobView, LogEvent, NewJob};
use faena_engine::EngineConfig;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fixture::{Fixture, count, events, job, once, open_postgres, open_sqlite, result, serve};

/// A server that records its requests and answers according to the path.
struct Receiver {
    url: String,
    calls: Arc<Mutex<Vec<Value>>>,
}

impl Receiver {
    async fn start() -> Receiver {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let url = serve(Router::new().fallback(answer).with_state(calls.clone())).await;
        Receiver { url, calls }
    }

    fn calls(&self) -> Vec<Value> {
        self.calls.lock().clone()
    }
}

async fn answer(State(calls): State<Arc<Mutex<Vec<Value>>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let headers: serde_json::Map<String, Value> =
        parts.headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().into())).collect();
    let count = {
        let mut calls = calls.lock();
        calls.push(json!({
            "method": parts.method.as_str(), "path": parts.uri.to_string(), "headers": headers,
            "body": String::from_utf8_lossy(&body),
        }));
        calls.len()
    };
    match parts.uri.path() {
        "/json" => ([("x-far", "yes"), ("set-cookie", "secret=1")], axum::Json(json!({"answer": 42}))).into_response(),
        "/text" => "plain".into_response(),
        "/second-time-lucky" if count == 1 => (StatusCode::INTERNAL_SERVER_ERROR, "not yet").into_response(),
        "/second-time-lucky" => "now".into_response(),
        "/busy" => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "7")], "come later").into_response(),
        "/too-many" => (StatusCode::TOO_MANY_REQUESTS, "slow down").into_response(),
        "/gone" => (StatusCode::GONE, "never again").into_response(),
        "/elsewhere" => (StatusCode::FOUND, [("location", "/json")]).into_response(),
        "/large" => "x".repeat(1 << 20).into_response(),
        "/endless" => {
            let parts =
                futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 1024])));
            Body::from_stream(parts).into_response()
        }
        "/silent" => std::future::pending().await,
        "/nul" => (StatusCode::INTERNAL_SERVER_ERROR, Bytes::from_static(b"a\0b\xff")).into_response(),
        "/nul-fine" => Bytes::from_static(b"a\0b\xff").into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn allowed() -> EngineConfig {
    EngineConfig { allowed_networks: vec!["127.0.0.0/8".parse().unwrap()], ..EngineConfig::default() }
}

fn request(payload: Value) -> NewJob {
    once("http.request", payload.to_string())
}

fn error(job: &JobView) -> &str {
    job.error.as_deref().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_request_of_the_payload_is_sent_and_the_response_is_the_result() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let mut call = request(json!({
        "method": "put", "url": format!("{}/json?a=b", server.url), "body": {"big": 1},
        "headers": {"X-Own": "mine", "Content-Type": "text/odd"},
    }));
    call.correlation_id = Some("order-7".into());
    call.options.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    let job = fixture.run_to(call, JobState::Completed).await;
    let answer = result(&job);
    assert_eq!((&answer["status"], &answer["body"]), (&json!(200), &json!({"answer": 42})));
    assert_eq!(answer["headers"]["x-far"], "yes");
    assert_eq!(answer["headers"]["set-cookie"], Value::Null, "cookies are not kept");
    let call = &server.calls()[0];
    assert_eq!(
        (&call["method"], &call["path"], &call["body"]),
        (&json!("PUT"), &json!("/json?a=b"), &json!("{\"big\":1}"))
    );
    let headers = &call["headers"];
    assert_eq!((&headers["x-own"], &headers["content-type"]), (&json!("mine"), &json!("text/odd")));
    assert_eq!(headers["x-job-id"], job.id.to_string());
    assert_eq!(headers["x-job-run"], job.run.unwrap().to_string());
    assert_eq!(headers["x-correlation-id"], "order-7");
    assert_eq!(headers["traceparent"], "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_body_is_sent_unchanged_and_json_as_written() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let url = format!("{}/text", server.url);
    let text =
        fixture.run_to(request(json!({"url": url, "method": "POST", "body": "a \"text\""})), JobState::Completed).await;
    assert_eq!(result(&text)["body"], "plain");
    let written = format!(r#"{{"url": "{url}", "method": "POST", "body": [1.0, 12345678901234567890123]}}"#);
    fixture.run_to(once("http.request", written), JobState::Completed).await;
    let calls = server.calls();
    assert_eq!((&calls[0]["body"], &calls[0]["headers"]["content-type"]), (&json!("a \"text\""), &Value::Null));
    assert_eq!(calls[1]["body"], "[1.0, 12345678901234567890123]");
    assert_eq!(calls[1]["headers"]["content-type"], "application/json");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_expected_status_decides_whether_a_call_succeeds() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let call =
        |path: &str, status: Value| request(json!({"url": format!("{}{path}", server.url), "expectStatus": status}));
    let job = fixture.run_to(call("/gone", json!(410)), JobState::Completed).await;
    assert_eq!(result(&job)["status"], 410);
    fixture.run_to(call("/gone", json!([200, 410])), JobState::Completed).await;
    fixture.run_to(call("/elsewhere", json!(302)), JobState::Completed).await;
    let job = fixture.run_to(call("/text", json!(201)), JobState::Failed).await;
    assert_eq!(error(&job), "HTTP 200 OK: plain");
}

#[tokio::test(flavor = "multi_thread")]
async fn temporary_errors_are_retried_and_permanent_errors_are_not() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let call = |path: &str| {
        let mut call = job("http.request", json!({"url": format!("{}{path}", server.url)}).to_string());
        call.options.retry.retry_delays_ms = vec![1];
        call
    };
    let lucky = fixture.run_to(call("/second-time-lucky"), JobState::Completed).await;
    assert_eq!((lucky.retry_count, count(&lucky, LogEvent::RetrySuccess)), (1, 1), "{:?}", events(&lucky));
    for (path, retries) in [("/too-many", 3), ("/gone", 0), ("/nothing", 0), ("/elsewhere", 3)] {
        let job = fixture.run_to(call(path), JobState::Failed).await;
        assert_eq!(job.retry_count, retries, "{path}: {:?}", job.error);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_after_header_delays_the_retry() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let id = fixture.submit(job("http.request", json!({"url": format!("{}/busy", server.url)}).to_string())).await;
    let job = fixture.wait_for_state(id, JobState::Retrying).await;
    let failed = job.execution_log.iter().find(|entry| entry.event == LogEvent::Failed).unwrap();
    assert_eq!(job.next_attempt_at.unwrap().ms_since(failed.timestamp), 7_000);
    assert_eq!(error(&job), "HTTP 503 Service Unavailable: come later");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_response_is_truncated() {
    let fixture = Fixture::with(EngineConfig { http_response_bytes: 10, ..allowed() }).await;
    let server = Receiver::start().await;
    for path in ["/large", "/endless"] {
        let job = fixture.run_to(request(json!({"url": format!("{}{path}", server.url)})), JobState::Completed).await;
        assert_eq!((&result(&job)["body"], &result(&job)["truncated"]), (&json!("xxxxxxxxxx"), &json!(true)), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_an_answer_times_out() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let url = format!("{}/silent", server.url);
    let job = fixture.run_to(request(json!({"url": url, "timeoutMs": 30})), JobState::Failed).await;
    assert!(error(&job).contains("timed out"), "{}", error(&job));
    let mut limited = request(json!({"url": url}));
    limited.options.timeout_ms = Some(30);
    let job = fixture.run_to(limited, JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::Timeout));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_not_followed() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let job = fixture.run_to(request(json!({"url": format!("{}/elsewhere", server.url)})), JobState::Failed).await;
    assert!(error(&job).starts_with("HTTP 302"), "{}", error(&job));
    assert_eq!(server.calls().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn loopback_is_not_called_unless_it_is_allowed() {
    let (fixture, server) = (Fixture::new().await, Receiver::start().await);
    let port = server.url.rsplit(':').next().unwrap();
    for host in ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433", "0.0.0.0", "127.1"] {
        let job = fixture.run_to(request(json!({"url": format!("http://{host}:{port}/json")})), JobState::Failed).await;
        assert!(error(&job).contains("private or reserved address"), "{host}: {}", error(&job));
    }
    assert_eq!(server.calls(), Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_name_of_an_allowed_network_is_called() {
    let (fixture, server) = (Fixture::with(allowed()).await, Receiver::start().await);
    let url = server.url.replace("127.0.0.1", "localhost");
    fixture.run_to(request(json!({"url": format!("{url}/json")})), JobState::Completed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_is_not_a_request_is_not_retried() {
    let fixture = Fixture::with(allowed()).await;
    for payload in [
        json!({}),
        json!({"url": "nonsense"}),
        json!({"url": "ftp://example.org/"}),
        json!({"url": "http://user:s3cret@127.0.0.1/"}),
        json!({"url": "http://127.0.0.1/", "method": "NO WAY"}),
        json!({"url": "http://127.0.0.1/", "headers": {"bad name": "x"}}),
        json!({"url": "http://127.0.0.1/", "headers": {"x": "a\nb"}}),
        json!({"url": "http://127.0.0.1/", "colour": "red"}),
    ] {
        let job = fixture.run_to(job("http.request", payload.to_string()), JobState::Failed).await;
        assert!(error(&job).starts_with("the payload is not valid"), "{payload}: {}", error(&job));
        assert!(!error(&job).contains("s3cret"));
        assert_eq!(job.retry_count, 0, "{payload}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_does_not_contain_the_secrets_of_its_url() {
    let fixture = Fixture::with(allowed()).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let job = fixture.run_to(request(json!({"url": format!("http://{free}/?token=s3cret")})), JobState::Failed).await;
    assert!(error(&job).contains("connection refused"), "{}", error(&job));
    assert!(!error(&job).contains("s3cret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_is_not_text_is_stored_on_sqlite() {
    assert_binary_response_is_stored(Fixture::over(open_sqlite().await, allowed()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_is_not_text_is_stored_on_postgres() {
    assert_binary_response_is_stored(Fixture::over(open_postgres().await, allowed()).await).await;
}

async fn assert_binary_response_is_stored(fixture: Fixture) {
    let server = Receiver::start().await;
    let failed = fixture.run_to(request(json!({"url": format!("{}/nul", server.url)})), JobState::Failed).await;
    assert!(error(&failed).starts_with("HTTP 500 Internal Server Error: a"), "{}", error(&failed));
    let fine = fixture.run_to(request(json!({"url": format!("{}/nul-fine", server.url)})), JobState::Completed).await;
    assert_eq!(result(&fine)["body"], "a\0b\u{fffd}");
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;
}
