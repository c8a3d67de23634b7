//! Every error in a request is reported with its path.

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use insta::assert_snapshot;

use crate::app::{App, BODY_BYTES};

#[tokio::test(flavor = "multi_thread")]
async fn every_field_of_a_wrong_type_is_reported() {
    let app = App::start().await;
    let body = r#"{
        "name": 1, "type": [], "queue": {}, "payload": "text", "priority": "URGENT", "maxRetries": -1, "retryDelay": "1s",
        "backoffMultiplier": "two", "maxDelay": 1.5, "retryDelays": [1, "x"], "jitter": "much", "retryOn": 7, "timeoutMs": true,
        "scheduledAt": "tomorrow", "expiresAt": 7, "webhookUrl": 1, "correlationId": 1, "idempotencyKey": 1, "uniqueKey": 1,
        "concurrencyKey": 1, "dependsOn": "x", "onParentFailure": "panic", "tags": "x", "ref": 1
    }"#;
    assert_snapshot!(app.post("/api/v1/jobs", body).await.error_snapshot(), @r#"
    400 VALIDATION_ERROR: 24 fields are not valid
    name: must be a string
    type: must be a string
    queue: must be a string
    payload: must be a JSON object
    priority: must be LOW, NORMAL, HIGH or CRITICAL
    correlationId: must be a string
    ref: must be a string
    maxRetries: must be a non-negative integer
    retryDelay: must be a non-negative integer
    backoffMultiplier: must be a number
    maxDelay: must be a non-negative integer
    retryDelays: must be a list of milliseconds
    retryOn: must be "all", "transient" or a list of patterns
    jitter: must be true, false or a number from 0 to 1
    timeoutMs: must be a non-negative integer
    scheduledAt: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    expiresAt: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    webhookUrl: must be a string
    idempotencyKey: must be a string
    uniqueKey: must be a string
    concurrencyKey: must be a string
    tags: must be a list of strings
    onParentFailure: must be "cancel" or "run"
    dependsOn: must be a list of job ids or refs
    "#);
    assert_eq!(app.total().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_out_of_range_is_reported() {
    let app = App::start().await;
    let long = "x".repeat(256);
    let many: Vec<String> = (0..33).map(|n| format!("\"t{n}\"")).collect();
    let body = format!(
        r#"{{
        "name": "{long}", "type": "", "queue": "two\nlines", "maxRetries": 11, "retryDelay": 99, "backoffMultiplier": 0.5,
        "maxDelay": 1, "retryDelays": [604800001], "jitter": 1.5, "retryOn": [], "timeoutMs": 0,
        "scheduledAt": "2031-01-02T00:00:00Z", "expiresAt": "2031-01-01T00:00:00Z", "webhookUrl": "ftp://example.org",
        "correlationId": "", "idempotencyKey": "{long}", "uniqueKey": "", "concurrencyKey": "a\u0000b", "tags": [{}]
    }}"#,
        many.join(",")
    );
    assert_snapshot!(app.post("/api/v1/jobs", body).await.error_snapshot(), @r#"
    400 VALIDATION_ERROR: 18 fields are not valid
    name: must have 1 to 255 characters, has 256
    type: must have 1 to 100 characters, has 0
    queue: must not contain control characters
    correlationId: must have 1 to 255 characters, has 0
    idempotencyKey: must have 1 to 255 characters, has 256
    uniqueKey: must have 1 to 255 characters, has 0
    concurrencyKey: must not contain control characters
    webhookUrl: must start with http:// or https://
    maxRetries: must be between 0 and 10, got 11
    retryDelay: must be between 100 and 3600000, got 99
    maxDelay: must be between 100 and 604800000, got 1
    retryDelays[0]: must be between 0 and 604800000, got 604800001
    backoffMultiplier: must be between 1 and 100
    jitter: must be true, false or a number from 0 to 1
    retryOn: must be "all", "transient" or 1 to 50 patterns of 1 to 200 bytes
    timeoutMs: must be between 1 and 2592000000, got 0
    tags: must have at most 32 entries, has 33
    expiresAt: must be later than scheduledAt
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_rejected() {
    let app = App::start().await;
    let body = r#"{"name": "noop", "prioritty": "HIGH", "id": "x", "status": "COMPLETED"}"#;
    assert_snapshot!(app.post("/api/v1/jobs", body).await.error_snapshot(), @"
    400 VALIDATION_ERROR: 3 fields are not valid
    id: unknown field
    prioritty: unknown field
    status: unknown field
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_required_and_null_counts_as_absent() {
    let app = App::start().await;
    assert_snapshot!(app.post("/api/v1/jobs", "{}").await.error_snapshot(), @"
    400 VALIDATION_ERROR: name: is required unless type is set
    name: is required unless type is set
    ");
    assert_snapshot!(app.post("/api/v1/jobs", r#"{"name": null, "payload": null}"#).await.error_snapshot(), @"
    400 VALIDATION_ERROR: name: is required unless type is set
    name: is required unless type is set
    ");
    app.create(r#"{"name": "noop", "payload": null, "priority": null, "tags": null, "scheduledAt": null}"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_a_json_object_is_rejected() {
    let app = App::start().await;
    let mut output = String::new();
    let bodies: [&[u8]; 9] = [
        b"",
        b"null",
        b"[]",
        b"7",
        b"\"text\"",
        b"{\"name\": ",
        b"{\"name\": \"noop\"} x",
        b"{'name': 'noop'}",
        b"{\"name\": \"\xff\"}",
    ];
    for body in bodies {
        let response = app.post("/api/v1/jobs", body.to_vec()).await;
        output.push_str(&format!("{}\n", response.error_snapshot()));
    }
    assert_snapshot!(output, @"
    400 VALIDATION_ERROR: body: is not valid JSON: EOF while parsing a value at line 1 column 0
    body: is not valid JSON: EOF while parsing a value at line 1 column 0
    400 VALIDATION_ERROR: body: must be a JSON object
    body: must be a JSON object
    400 VALIDATION_ERROR: body: must be a JSON object
    body: must be a JSON object
    400 VALIDATION_ERROR: body: must be a JSON object
    body: must be a JSON object
    400 VALIDATION_ERROR: body: must be a JSON object
    body: must be a JSON object
    400 VALIDATION_ERROR: body: is not valid JSON: EOF while parsing a value at line 1 column 9
    body: is not valid JSON: EOF while parsing a value at line 1 column 9
    400 VALIDATION_ERROR: body: is not valid JSON: trailing characters at line 1 column 18
    body: is not valid JSON: trailing characters at line 1 column 18
    400 VALIDATION_ERROR: body: is not valid JSON: key must be a string at line 1 column 2
    body: is not valid JSON: key must be a string at line 1 column 2
    400 VALIDATION_ERROR: body: must be UTF-8
    body: must be UTF-8
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_rejected_and_one_at_the_limit_is_accepted() {
    let app = App::start().await;
    let body = |size: usize| {
        let frame = r#"{"name": "unhandled.type", "payload": {"text": ""}}"#;
        frame.replace("\"\"", &format!("\"{}\"", "x".repeat(size - frame.len())))
    };
    assert_eq!(app.post("/api/v1/jobs", body(BODY_BYTES)).await.status, StatusCode::CREATED);
    assert_snapshot!(app.post("/api/v1/jobs", body(BODY_BYTES + 1)).await.error_snapshot(), @"413 PAYLOAD_TOO_LARGE: the body is larger than 65536 bytes");
    let patch = app.call("PATCH", "/api/v1/jobs/018f0000-0000-7000-8000-000000000000", body(BODY_BYTES + 1)).await;
    assert_eq!(patch.status, StatusCode::PAYLOAD_TOO_LARGE);
    // The same without a Content-Length.
    let chunks = futures_util::stream::iter((0..70).map(|_| Ok::<_, std::io::Error>("x".repeat(1 << 10))));
    let request = Request::post("/api/v1/jobs").body(Body::from_stream(chunks)).unwrap();
    assert_eq!(app.send(request).await.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_are_not_found_and_other_methods_are_not_allowed() {
    let app = App::start().await;
    let none = "/api/v1/jobs/018f0000-0000-7000-8000-000000000000";
    let mut output = String::new();
    for (method, path) in [
        ("GET", "/api/v1/nothing"),
        ("GET", none),
        ("DELETE", none),
        ("POST", "/api/v1/jobs/018f0000-0000-7000-8000-000000000000/cancel"),
        ("POST", "/api/v1/jobs/018f0000-0000-7000-8000-000000000000/retry"),
        ("GET", "/api/v1/jobs/018f0000-0000-7000-8000-000000000000/events"),
        ("POST", "/api/v1/jobs/bulk/explode"),
        ("PUT", "/api/v1/jobs"),
        ("POST", none),
        ("GET", "/api/v1/jobs/batch/x"),
        ("DELETE", "/health/live"),
        ("GET", "/api/v1/jobs/not-an-id"),
        ("POST", "/api/v1/jobs/not-an-id/cancel"),
        ("PATCH", "/api/v1/jobs/%FF"),
        ("DELETE", "/api/v1/jobs/018f0000-0000-7000-8000-00000000000g"),
    ] {
        output.push_str(&format!("{method} {path}: {}\n", app.call(method, path, "{}").await.error_snapshot()));
    }
    assert_snapshot!(output, @r#"
    GET /api/v1/nothing: 404 NOT_FOUND: no resource at "/api/v1/nothing"
    GET /api/v1/jobs/018f0000-0000-7000-8000-000000000000: 404 NOT_FOUND: there is no job <id 1>
    DELETE /api/v1/jobs/018f0000-0000-7000-8000-000000000000: 404 NOT_FOUND: there is no job <id 1>
    POST /api/v1/jobs/018f0000-0000-7000-8000-000000000000/cancel: 404 NOT_FOUND: there is no job <id 1>
    POST /api/v1/jobs/018f0000-0000-7000-8000-000000000000/retry: 404 NOT_FOUND: there is no job <id 1>
    GET /api/v1/jobs/018f0000-0000-7000-8000-000000000000/events: 404 NOT_FOUND: there is no job <id 1>
    POST /api/v1/jobs/bulk/explode: 404 NOT_FOUND: no bulk action "explode"; use cancel, retry or delete
    PUT /api/v1/jobs: 405 METHOD_NOT_ALLOWED: this resource does not accept this method
    POST /api/v1/jobs/018f0000-0000-7000-8000-000000000000: 405 METHOD_NOT_ALLOWED: this resource does not accept this method
    GET /api/v1/jobs/batch/x: 404 NOT_FOUND: no resource at "/api/v1/jobs/batch/x"
    DELETE /health/live: 405 METHOD_NOT_ALLOWED: this resource does not accept this method
    GET /api/v1/jobs/not-an-id: 400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    POST /api/v1/jobs/not-an-id/cancel: 400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    PATCH /api/v1/jobs/%FF: 400 VALIDATION_ERROR: path: must be UTF-8
    path: must be UTF-8
    DELETE /api/v1/jobs/018f0000-0000-7000-8000-00000000000g: 400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    "#);
    let patch = app.call("PATCH", none, r#"{"priority": "LOW"}"#).await;
    assert_eq!(patch.status, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotency_key_that_is_not_text_is_rejected() {
    let app = App::start().await;
    for key in [&b""[..], &b"\xff"[..], &[b'x'; 256][..]] {
        let request = Request::post("/api/v1/jobs").header("idempotency-key", key).body(r#"{"name": "noop"}"#.into());
        let response = app.send(request.unwrap()).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{}", response.text);
        assert_eq!(response.json()["error"]["details"][0]["path"], "Idempotency-Key");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_texts_are_rejected_or_stored_unchanged() {
    submit_unusual_texts(App::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_texts_are_rejected_or_stored_unchanged_on_postgres() {
    submit_unusual_texts(App::start_on_postgres().await).await;
}

async fn submit_unusual_texts(app: App) {
    let deep = format!("{}{}", "[".repeat(99), "]".repeat(99));
    for (body, status) in [
        (r#"{"name": "\u0000"}"#.to_owned(), 400),
        (r#"{"name": "\ud800"}"#.to_owned(), 400),
        (r#"{"name": "elsewhere 🦀 ñ"}"#.to_owned(), 201),
        (r#"{"name": "elsewhere", "payload": {"a": "\u0000 \\ud800 \ud83e\udd80"}}"#.to_owned(), 201),
        (r#"{"name": "elsewhere", "payload": {"a": "\ud800"}}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "payload": {"\uDFFF": 1}}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "payload": {"a": 1, "a": 2}}"#.to_owned(), 201),
        (r#"{"name": "elsewhere", "payload": {"a": 1e999}}"#.to_owned(), 201),
        (format!(r#"{{"name": "elsewhere", "payload": {{"a": {deep}}}}}"#), 201),
        (r#"{"name": "elsewhere", "queue": "'; DROP TABLE job; --"}"#.to_owned(), 201),
        (r#"{"name": "elsewhere", "backoffMultiplier": 1e999}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "maxRetries": 18446744073709551616}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "maxRetries": 4294967299}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "scheduledAt": "9999-12-31T23:59:59Z"}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "scheduledAt": "1969-12-31T23:59:59Z"}"#.to_owned(), 400),
        (r#"{"name": "elsewhere", "name": "again"}"#.to_owned(), 201),
    ] {
        let response = app.post("/api/v1/jobs", body.clone()).await;
        assert_eq!(response.status.as_u16(), status, "{body}: {}", response.text);
        if status == 201 {
            let id = response.json()["id"].as_str().unwrap().to_owned();
            assert_eq!(app.get(&format!("/api/v1/jobs/{id}")).await.status, StatusCode::OK, "{body}");
        }
    }
    assert_eq!(app.get("/api/v1/jobs").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn json_that_other_programs_cannot_read_is_rejected() {
    let app = App::start().await;
    let nested = |levels: usize| {
        format!(r#"{{"name": "noop", "payload": {{"a": {}{}}}}}"#, "[".repeat(levels), "]".repeat(levels))
    };
    assert_eq!(app.post("/api/v1/jobs", nested(99)).await.status, StatusCode::CREATED);
    let response = app.post("/api/v1/jobs", nested(100)).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST);
    assert!(response.text.contains("payload: must not be nested deeper than 100"), "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_origin_and_another_host_are_rejected() {
    let app = App::start().await;
    for (name, value) in [("origin", "http://evil.example"), ("origin", "null"), ("host", "evil.example")] {
        let request = Request::post("/api/v1/jobs").header(name, value).body(r#"{"name": "noop"}"#.into()).unwrap();
        let response = app.send(request).await;
        assert_eq!(response.status, StatusCode::FORBIDDEN, "{name}: {value}");
        assert!(response.text.contains("FORBIDDEN"), "{}", response.text);
    }
    let request =
        Request::post("/api/v1/jobs").header("host", "localhost:3000").body(r#"{"name": "noop"}"#.into()).unwrap();
    assert_eq!(app.send(request).await.status, StatusCode::CREATED);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotency_key_for_a_whole_batch_is_rejected() {
    let app = App::start().await;
    let request = Request::post("/api/v1/jobs/batch")
        .header("idempotency-key", "k")
        .body(r#"{"jobs": [{"name": "noop"}]}"#.into())
        .unwrap();
    assert_eq!(app.send(request).await.status, StatusCode::BAD_REQUEST);
}
