//! Requests that no correct client sends: each gets a status of 4xx with the error body, and changes nothing.

use axum::{
    body::Body,
    http::{HeaderValue, Request},
};

use crate::app::App;

/// Sends a request and returns `STATUS CODE`.
async fn answer(app: &App, request: Request<Body>) -> String {
    let response = app.send(request).await;
    if !response.status.is_client_error() {
        return format!("{} {}", response.status, response.text);
    }
    let line = response.error_snapshot();
    assert!(!response.text.contains('\u{1b}'), "{}", response.text);
    line.split(':').next().unwrap().to_owned()
}

async fn post(app: &App, headers: &[(&str, &[u8])], body: impl Into<Body>) -> String {
    let request = Request::builder().method("POST").uri("/api/v1/jobs");
    let request = headers
        .iter()
        .fold(request, |request, (name, value)| request.header(*name, HeaderValue::from_bytes(value).unwrap()));
    answer(app, request.body(body.into()).unwrap()).await
}

#[tokio::test]
async fn paths_that_try_to_leave_the_api_are_rejected() {
    let app = App::start().await;
    for (path, expected) in [
        ("//", "404 NOT_FOUND"),
        ("//api/v1/jobs", "404 NOT_FOUND"),
        ("/api//v1/jobs", "404 NOT_FOUND"),
        ("/api/v1/../v1/jobs", "404 NOT_FOUND"),
        ("/api/v1/jobs/..", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%2e%2e", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%2fetc%2fpasswd", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%00", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/a%0d%0ab", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%1b%5b31m", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%ff", "400 VALIDATION_ERROR"),
        ("/api/v1/jobs/%zz", "400 VALIDATION_ERROR"),
        ("/api%2fv1%2fjobs", "404 NOT_FOUND"),
        ("/API/V1/JOBS", "404 NOT_FOUND"),
        ("/api/v1/queues/%00", "404 NOT_FOUND"),
        ("/api/v1/queues/%ff", "400 VALIDATION_ERROR"),
        ("/api/v1/queues/a%2fb", "404 NOT_FOUND"),
        ("/api/v1/workers/%0d%0a", "404 NOT_FOUND"),
        ("/api/v1/trace/%00", "400 VALIDATION_ERROR"),
        ("/api/v1/schedules/%2e%2e", "404 NOT_FOUND"),
        ("/health/..%2f", "404 NOT_FOUND"),
        ("*", "404 NOT_FOUND"),
    ] {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        assert_eq!(answer(&app, request).await, expected, "{path}");
    }
}

#[tokio::test]
async fn queries_that_are_not_text_are_rejected() {
    let app = App::start().await;
    for query in
        ["queue=%00", "queue=a%0d%0ab", "type=%1b%5b31m", "unknown=1", "limit=%ff", "cursor=%ff%fe", "limit=-1"]
    {
        let request = Request::builder().uri(format!("/api/v1/jobs?{query}")).body(Body::empty()).unwrap();
        assert_eq!(answer(&app, request).await, "400 VALIDATION_ERROR", "{query}");
    }
    let long = format!("/api/v1/jobs?queue={}", "a".repeat(60_000));
    let response = app.get(&long).await;
    assert!(response.status.is_client_error() || response.json()["total"] == 0, "{}", response.text);
}

#[tokio::test]
async fn bodies_that_are_not_json_text_are_rejected() {
    let app = App::start().await;
    let deep = |open: &str, close: &str| {
        format!(r#"{{"name": "noop", "payload": {{"a": {}1{}}}}}"#, open.repeat(10_000), close.repeat(10_000))
    };
    for (name, body) in [
        ("not UTF-8", b"{\"name\": \"\xff\xfe\"}".to_vec()),
        ("UTF-16", "{\"name\": \"noop\"}".encode_utf16().flat_map(u16::to_le_bytes).collect()),
        ("a byte order mark alone", b"\xef\xbb\xbf".to_vec()),
        ("a lone surrogate", br#"{"name": "\ud800"}"#.to_vec()),
        ("deep lists", deep("[", "]").into_bytes()),
        ("deep objects", deep("{\"a\":", "}").into_bytes()),
        ("unclosed lists", b"[".repeat(60_000)),
        ("a null byte", b"{\"name\": \"a\\u0000b\"}".to_vec()),
        ("line breaks in a name", br#"{"name": "a\r\nb"}"#.to_vec()),
        ("an escape sequence in a name", br#"{"name": "\u001b[31mred"}"#.to_vec()),
        ("line breaks in a correlation id", br#"{"name": "noop", "correlationId": "a\r\nSet-Cookie: b"}"#.to_vec()),
        ("a huge number", br#"{"name": "noop", "maxRetries": 1e999}"#.to_vec()),
    ] {
        assert_eq!(post(&app, &[], body).await, "400 VALIDATION_ERROR", "{name}");
    }
    assert_eq!(app.total().await, 0);
}

#[tokio::test]
async fn bodies_of_another_type_or_encoding_are_rejected_and_the_accepted_ones_named() {
    let app = App::start().await;
    let job = r#"{"name": "elsewhere"}"#;
    for kind in [
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/grpc-web",
        "json",
        "",
        "\u{e9}",
    ] {
        let found = post(&app, &[("content-type", kind.as_bytes())], job).await;
        assert_eq!(found, "415 UNSUPPORTED_MEDIA_TYPE", "{kind:?}");
    }
    for encoding in ["br", "deflate", "zstd", "gzip, gzip", "compress", "\u{1}x"] {
        let Ok(value) = HeaderValue::from_bytes(encoding.as_bytes()) else { continue };
        let found = post(&app, &[("content-encoding", value.as_bytes())], job).await;
        assert_eq!(found, "415 UNSUPPORTED_MEDIA_TYPE", "{encoding:?}");
    }
    let request = Request::builder().method("POST").uri("/api/v1/jobs").header("content-encoding", "br");
    let response = app.send(request.body(job.into()).unwrap()).await;
    assert_eq!((response.header("accept"), response.header("accept-encoding")), ("application/json", "gzip"));
    assert_eq!(app.total().await, 0);

    for kind in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/merge-patch+json",
        "application/x-www-form-urlencoded",
    ] {
        let request = Request::builder().method("POST").uri("/api/v1/jobs").header("content-type", kind);
        let created = app.send(request.body(job.into()).unwrap()).await;
        assert_eq!(created.status, 201, "{kind}: {}", created.text);
    }
}

#[tokio::test]
async fn ids_with_control_characters_never_reach_a_header_or_the_database() {
    let app = App::start().await;
    for header in ["x-request-id", "x-correlation-id"] {
        for value in [&b"a\tb"[..], b"\xc3\xa9", b"\xff", b"a\x80b"] {
            let request = Request::builder()
                .method("POST")
                .uri("/api/v1/jobs")
                .header(header, HeaderValue::from_bytes(value).unwrap())
                .body(Body::from(r#"{"name": "elsewhere"}"#));
            let created = app.send(request.unwrap()).await;
            assert_eq!(created.status, 201, "{}", created.text);
            assert!(created.header(header).parse::<uuid::Uuid>().is_ok(), "{header}: {value:?} is replaced");
        }
    }
    assert_eq!(post(&app, &[("idempotency-key", b"a\tb")], r#"{"name": "noop"}"#).await, "400 VALIDATION_ERROR");
    assert_eq!(post(&app, &[("idempotency-key", b"\xff")], r#"{"name": "noop"}"#).await, "400 VALIDATION_ERROR");
}

#[tokio::test]
async fn other_methods_are_rejected() {
    let app = App::start().await;
    for method in ["PUT", "TRACE", "CONNECT", "OPTIONS", "FOO"] {
        let request = Request::builder().method(method).uri("/api/v1/jobs").body(Body::empty()).unwrap();
        assert_eq!(answer(&app, request).await, "405 METHOD_NOT_ALLOWED", "{method}");
    }
}
