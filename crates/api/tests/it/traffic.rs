//! Rate limits, origins, and compression.

use std::{net::SocketAddr, num::NonZeroU32, time::Duration};

use async_compression::tokio::bufread::{GzipDecoder, GzipEncoder};
use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{HeaderMap, HeaderValue, Request, Response},
};
use faena_api::{Cors, RequestRate, TrafficConfig};
use faena_domain::KeyScope;
use faena_wire::v1::{ListJobsRequest, job_service_client::JobServiceClient};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tonic::Code;
use tower::ServiceExt;

use crate::{
    access::key,
    app::{App, BODY_BYTES, TestResponse},
};

fn rate(per_second: u32, burst: u32) -> Option<RequestRate> {
    let number = |number| NonZeroU32::new(number).unwrap();
    Some(RequestRate { per_second: number(per_second), burst: number(burst) })
}

fn request(peer: &str, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = Request::builder().uri(path);
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let mut request = request.body(Body::empty()).unwrap();
    request.headers_mut().entry("host").or_insert(HeaderValue::from_static("localhost:3000"));
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(peer.parse().unwrap(), 5_000)));
    request
}

async fn get(app: &App, peer: &str, path: &str, headers: &[(&str, &str)]) -> TestResponse {
    app.send(request(peer, path, headers)).await
}

/// Allows one request per second from an address, with a burst of three.
fn one_per_address() -> TrafficConfig {
    TrafficConfig { per_address: rate(1, 3), ..TrafficConfig::default() }
}

const JOBS: &str = "/api/v1/jobs";

#[tokio::test]
async fn requests_above_the_limit_of_an_address_are_rejected() {
    let app = App::start_with_traffic(one_per_address()).await;
    key(&app, &[KeyScope::Read], None).await;
    let first = get(&app, "203.0.113.9", JOBS, &[]).await;
    assert_eq!(first.status, 401, "a request without a key counts too");
    assert_eq!(first.header("ratelimit-policy"), "\"address\";q=3;w=3");
    assert_eq!(first.header("ratelimit"), "\"address\";r=2;t=1");
    let mut rejected = get(&app, "203.0.113.9", JOBS, &[]).await;
    for _ in 0..10 {
        rejected = get(&app, "203.0.113.9", JOBS, &[]).await;
    }
    assert_eq!(rejected.error_snapshot(), "429 RATE_LIMITED: too many requests from this address; try again in 1 s");
    assert_eq!((rejected.header("retry-after"), rejected.header("ratelimit")), ("1", "\"address\";r=0;t=3"));
    assert_eq!(get(&app, "203.0.113.10", JOBS, &[]).await.status, 401, "another address is not affected");
    for path in ["/health", "/health/live", "/health/ready"] {
        assert_eq!(get(&app, "203.0.113.9", path, &[]).await.status, 200, "{path} is not limited");
    }
    let admin = key(&app, &[KeyScope::Admin], None).await;
    let metrics = get(&app, "203.0.113.9", "/metrics", &[("x-api-key", admin.reveal())]).await;
    assert_eq!(metrics.status, 200, "metrics are not limited");
    let counted = |reason: &str, text: &str| {
        let line = format!("faena_requests_rejected_total{{reason=\"{reason}\"}} ");
        text.lines().find_map(|found| found.strip_prefix(&line)?.parse::<u64>().ok()).unwrap()
    };
    assert!(counted("address_rate", &metrics.text) >= 1 && counted("key_rate", &metrics.text) == 0);
}

#[tokio::test]
async fn a_rejection_is_delayed_and_other_callers_are_not() {
    let config = TrafficConfig { rejection_delay: Duration::from_secs(3_600), ..one_per_address() };
    let app = App::start_with_traffic(config).await;
    for _ in 0..3 {
        assert_ne!(get(&app, "203.0.113.9", JOBS, &[]).await.status, 429);
    }
    tokio::select! {
        biased;
        _ = get(&app, "203.0.113.9", JOBS, &[]) => panic!("answered immediately"),
        other = get(&app, "203.0.113.10", JOBS, &[]) => assert_ne!(other.status, 429),
    }
}

#[tokio::test]
async fn wrong_keys_count_against_the_address_also_where_no_key_is_needed() {
    let app = App::start_with_traffic(one_per_address()).await;
    let mut statuses = Vec::new();
    for _ in 0..5 {
        let response = get(&app, "203.0.113.9", "/health/live", &[("authorization", "Bearer fna_wrong")]).await;
        statuses.push(response.status.as_u16());
    }
    assert_eq!(statuses, [401, 401, 401, 429, 429]);
}

#[tokio::test]
async fn the_address_is_that_of_the_client_behind_a_trusted_proxy() {
    let app = App::start_with_traffic(one_per_address()).await;
    key(&app, &[KeyScope::Read], None).await;
    let statuses = async |peer: &str, forwarded: &[&str]| {
        let mut statuses = Vec::new();
        for forwarded in forwarded {
            statuses.push(get(&app, peer, JOBS, &[("x-forwarded-for", forwarded)]).await.status.as_u16());
        }
        statuses
    };
    let many: Vec<String> = (1..=5).map(|n| format!("198.51.100.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(statuses("10.0.0.7", &many).await, [401; 5], "each client has its own limit");
    assert_eq!(statuses("10.0.0.8", &["198.51.100.77"; 4]).await, [401, 401, 401, 429], "one client through a proxy");
    assert_eq!(statuses("203.0.113.9", &many).await, [401, 401, 401, 429, 429], "any client can send the header");
    let network = ["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8::4"];
    assert_eq!(statuses("10.0.0.7", &network).await, [401, 401, 401, 429], "one IPv6 client has a whole /64");
}

#[tokio::test]
async fn each_key_has_its_own_limit() {
    let app = App::start_with_traffic(TrafficConfig { per_key: rate(1, 2), ..TrafficConfig::default() }).await;
    let (first, second) = (key(&app, &[KeyScope::Read], None).await, key(&app, &[KeyScope::Read], None).await);
    let mut statuses = Vec::new();
    for peer in ["203.0.113.1", "203.0.113.2", "203.0.113.3"] {
        let response = get(&app, peer, JOBS, &[("x-api-key", first.reveal())]).await;
        assert_eq!(response.header("ratelimit-policy"), "\"key\";q=2;w=2");
        statuses.push(response.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 429], "from any address");
    assert_eq!(get(&app, "203.0.113.1", JOBS, &[("x-api-key", second.reveal())]).await.status, 200);
    let without = get(&app, "203.0.113.1", JOBS, &[]).await;
    assert!(without.status == 401 && !without.headers.contains_key("ratelimit"), "addresses have no limit");
}

#[tokio::test]
async fn an_upgrade_to_a_websocket_is_limited() {
    let app = App::start_with_traffic(one_per_address()).await;
    let upgrade = [
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let mut response = get(&app, "203.0.113.9", "/api/v1/workers/connect", &upgrade).await;
    for _ in 0..4 {
        response = get(&app, "203.0.113.9", "/api/v1/workers/connect", &upgrade).await;
    }
    assert_eq!((response.status.as_u16(), response.header("retry-after")), (429, "1"));
}

#[tokio::test]
async fn a_grpc_call_above_the_limit_ends_with_resource_exhausted() {
    let app = App::start_with_traffic(TrafficConfig { per_key: rate(1, 1), ..TrafficConfig::default() }).await;
    let key = key(&app, &[KeyScope::Read], None).await;
    let mut client = JobServiceClient::with_interceptor(app.router.clone(), |mut request: tonic::Request<()>| {
        request.metadata_mut().insert("x-api-key", key.reveal().parse().unwrap());
        Ok(request)
    });
    let accepted = client.list_jobs(ListJobsRequest::default()).await.unwrap();
    assert_eq!(accepted.metadata().get("ratelimit").unwrap(), "\"key\";r=0;t=1");
    let rejected = client.list_jobs(ListJobsRequest::default()).await.unwrap_err();
    assert_eq!(rejected.code(), Code::ResourceExhausted, "{rejected:?}");
    for (name, value) in [("x-error-code", "RATE_LIMITED"), ("retry-after", "1"), ("grpc-retry-pushback-ms", "1000")] {
        assert_eq!(rejected.metadata().get(name).unwrap(), value, "{name}");
    }
}

fn cors(origins: &[&str], credentials: bool) -> TrafficConfig {
    let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
    TrafficConfig { cors: Cors { origins, credentials }, ..TrafficConfig::default() }
}

fn preflight(origin: &str) -> Request<Body> {
    Request::builder()
        .method("OPTIONS")
        .uri(JOBS)
        .header("host", "faena.example")
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type")
        .body(Body::empty())
        .unwrap()
}

#[tokio::test]
async fn a_listed_origin_may_call_and_a_preflight_needs_no_key() {
    let app = App::start_with_traffic(cors(&["https://app.example", "https://other.example"], true)).await;
    let key = key(&app, &[KeyScope::Read], None).await;
    let answer = app.send(preflight("https://app.example")).await;
    assert_eq!((answer.status.as_u16(), answer.text.as_str()), (204, ""));
    assert_eq!(answer.header("access-control-allow-origin"), "https://app.example");
    assert_eq!(answer.header("access-control-allow-methods"), "GET, POST, PATCH, DELETE");
    assert!(answer.header("access-control-allow-headers").to_lowercase().contains("authorization"));
    assert_eq!((answer.header("access-control-allow-credentials"), answer.header("vary")), ("true", "origin"));

    let headers = [("origin", "https://app.example"), ("host", "faena.example"), ("x-api-key", key.reveal())];
    let response = get(&app, "203.0.113.9", JOBS, &headers).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(response.header("access-control-allow-origin"), "https://app.example");
    assert!(response.header("access-control-expose-headers").contains("RateLimit"));
    let rejected = get(&app, "203.0.113.9", JOBS, &headers[..2]).await;
    assert_eq!(rejected.status, 401);
    assert_eq!(rejected.header("access-control-allow-origin"), "https://app.example", "a page can read the error");

    let other = app.send(preflight("https://evil.example")).await;
    assert_eq!(other.status, 403);
    assert!(!other.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn every_origin_means_every_origin_with_a_key() {
    let app = App::start_with_traffic(cors(&["*"], false)).await;
    let page = [("origin", "https://any.example"), ("host", "localhost:3000")];
    let local = get(&app, "127.0.0.1", JOBS, &page).await;
    assert_eq!(local.status, 403, "a page must not use the access of the machine that its browser runs on");
    let key = key(&app, &[KeyScope::Read], None).await;
    assert_eq!(get(&app, "127.0.0.1", JOBS, &page).await.status, 401);
    let with_key = get(&app, "127.0.0.1", JOBS, &[page[0], page[1], ("x-api-key", key.reveal())]).await;
    assert_eq!(with_key.status, 200);
    assert!(!with_key.headers.contains_key("access-control-allow-credentials"));
    assert_eq!(app.send(preflight("https://any.example")).await.status, 204);
}

#[tokio::test]
async fn without_origins_there_are_no_headers_and_pages_are_rejected() {
    let app = App::start().await;
    let response = app.send(preflight("https://app.example")).await;
    assert_eq!(response.status, 403);
    let plain = app.get(JOBS).await;
    assert!(!plain.headers.contains_key("vary") || plain.header("vary") == "accept-encoding", "{:?}", plain.headers);
}

async fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = Vec::new();
    GzipEncoder::new(bytes).read_to_end(&mut compressed).await.unwrap();
    compressed
}

async fn raw(app: &App, path: &str, accept: &str) -> (HeaderMap, Vec<u8>) {
    let request = Request::builder().uri(path).header("accept-encoding", accept).body(Body::empty()).unwrap();
    let response: Response<Body> = app.router.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    (parts.headers, axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec())
}

#[tokio::test]
async fn large_responses_are_compressed_for_callers_that_accept_it() {
    let app = App::start().await;
    for _ in 0..10 {
        app.create(&json!({"name": "elsewhere", "payload": {"text": "x".repeat(500)}}).to_string()).await;
    }
    let (_, plain) = raw(&app, JOBS, "identity").await;
    let (headers, body) = raw(&app, JOBS, "gzip").await;
    assert_eq!(headers["content-encoding"], "gzip");
    assert!(body.len() < plain.len() / 2, "{} of {}", body.len(), plain.len());
    let mut text = String::new();
    GzipDecoder::new(&body[..]).read_to_string(&mut text).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["total"], 10);
    let (headers, _) = raw(&app, JOBS, "zstd, gzip;q=0.5").await;
    assert_eq!(headers["content-encoding"], "gzip", "the only encoding that Faena supports");
    let (headers, _) = raw(&app, "/health/live", "gzip").await;
    assert!(!headers.contains_key("content-encoding"), "a small response is not compressed");
    let stream = Request::builder().uri("/api/v1/events").header("accept-encoding", "gzip").body(Body::empty());
    let stream = app.router.clone().oneshot(stream.unwrap()).await.unwrap();
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    assert!(!stream.headers().contains_key("content-encoding"), "events must not wait in a compressor");
}

async fn post_gzip(app: &App, body: Vec<u8>) -> TestResponse {
    let request = Request::builder().method("POST").uri(JOBS).header("content-encoding", "gzip");
    app.send(request.header("content-type", "application/json").body(body.into()).unwrap()).await
}

#[tokio::test]
async fn a_compressed_body_is_read_and_its_limit_counts_decompressed_bytes() {
    let app = App::start().await;
    let job = |bytes: usize| json!({"name": "elsewhere", "payload": {"text": "x".repeat(bytes)}}).to_string();
    let created = post_gzip(&app, gzip(job(1_000).as_bytes()).await).await;
    assert_eq!(created.status, 201, "{}", created.text);
    let large = gzip(job(BODY_BYTES).as_bytes()).await;
    assert!(large.len() < 1_000);
    let response = post_gzip(&app, large).await;
    let expected = format!("413 PAYLOAD_TOO_LARGE: the body is larger than {BODY_BYTES} bytes");
    assert_eq!(response.error_snapshot(), expected);
    // A body of two gzip members that decompress to 64 MiB each: the limit applies while the body is decompressed.
    let mut bomb = gzip(&vec![b' '; 64 << 20]).await;
    bomb.extend(bomb.clone());
    assert_eq!(post_gzip(&app, bomb).await.error_snapshot(), expected);
    let mut cut = gzip(job(1_000).as_bytes()).await;
    cut.truncate(cut.len() / 2);
    assert_eq!(post_gzip(&app, cut).await.status, 400);
    let response = post_gzip(&app, b"{\"name\": \"elsewhere\"}".to_vec()).await;
    assert!(
        response.error_snapshot().starts_with("400 VALIDATION_ERROR: body: is not valid gzip"),
        "{}",
        response.text
    );
}

/// A body that begins with `bytes` and never ends.
fn unfinished(bytes: usize) -> Body {
    let start = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b' '; bytes])]);
    Body::from_stream(futures_util::StreamExt::chain(start, futures_util::stream::pending()))
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_share_a_budget_and_small_ones_are_never_rejected() {
    let app =
        App::start_with_traffic(TrafficConfig { in_flight_bytes: Some(1 << 20), ..TrafficConfig::default() }).await;
    let key = key(&app, &[KeyScope::Write, KeyScope::Read], None).await;
    let post = |path: &str, body: Body| {
        let request = Request::builder().method("POST").uri(path).header("x-api-key", key.reveal());
        request.body(body).unwrap()
    };
    let batch = format!(r#"{{"jobs": [{{"name": "elsewhere", "payload": {{"text": "{}"}}}}]}}"#, "x".repeat(60_000));
    let large = |spaces: usize| Body::from(format!("{}{batch}", " ".repeat(spaces)));
    let unfinished_request = app.router.clone().oneshot(post("/api/v1/jobs/batch", unfinished(1 << 20)));
    let others = async {
        let rejected = loop {
            let response = app.send(post("/api/v1/jobs/batch", large(1 << 19))).await;
            // Repeats until the server has read what the unfinished request sends.
            if response.status != 201 {
                break response;
            }
        };
        assert_eq!((rejected.status.as_u16(), rejected.header("retry-after")), (503, "1"), "{}", rejected.text);
        let small = app.send(post(JOBS, Body::from(r#"{"name": "elsewhere"}"#))).await;
        assert_eq!(small.status, 201, "{}", small.text);
    };
    tokio::select! {
        biased;
        answer = unfinished_request => panic!("the body does not end: {answer:?}"),
        () = others => {}
    }
    // The request was dropped, and its share of the budget is free again.
    let accepted = app.send(post("/api/v1/jobs/batch", large(1 << 19))).await;
    assert_eq!(accepted.status, 201, "{}", accepted.text);
}

#[tokio::test]
async fn streams_are_limited_per_caller_and_in_total() {
    let config = TrafficConfig { max_streams: Some(3), max_streams_per_caller: Some(2), ..TrafficConfig::default() };
    let app = App::start_with_traffic(config).await;
    let (first, second) = (key(&app, &[KeyScope::Read], None).await, key(&app, &[KeyScope::Read], None).await);
    let (first, second) = (first.reveal(), second.reveal());
    let open = async |path: &str, key: &str| {
        let request = Request::builder().uri(path).header("x-api-key", key).body(Body::empty()).unwrap();
        app.router.clone().oneshot(request).await.unwrap()
    };
    let a = open("/api/v1/events", first).await;
    let b = open("/api/v1/events?taskId=01a1e1b6-d8d7-7007-820a-3ff640398a18", first).await;
    assert_eq!((a.status().as_u16(), b.status().as_u16()), (200, 200));
    let rejected = open("/api/v1/events", first).await;
    assert_eq!((rejected.status().as_u16(), &rejected.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    let c = open("/api/v1/events", second).await;
    assert_eq!(c.status(), 200);
    assert_eq!(open("/api/v1/events", second).await.status(), 503, "the node is full");
    drop(a);
    assert_eq!(open("/api/v1/events", second).await.status(), 200, "a closed stream frees its slot");
}
