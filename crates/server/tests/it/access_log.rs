//! The access log of the real binary.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use crate::faena::{Faena, eventually};

/// Waits for the log line of a request, and returns it.
async fn line_with(faena: &Faena, text: &str) -> String {
    let find =
        || faena.log().lines().find(|line| line.contains("request handled") && line.contains(text)).map(str::to_owned);
    eventually(&format!("a line with {text}"), async || find()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_logged_as_json_with_its_caller_and_ids() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_LOG_ACCESS", "true"), ("FAENA_LOG_FORMAT", "json")]).await;
    let (_, created) = faena.post("/api/v1/api-keys", json!({"name": "ops", "scopes": ["admin"]})).await;
    let key = created["key"].as_str().unwrap();
    let body = json!({"name": "noop"}).to_string();
    let request = faena.http.post(format!("{}/api/v1/jobs?note=private", faena.url)).bearer_auth(key).body(body);
    let answer = request.header("x-correlation-id", "order-7").send().await.unwrap();
    let request_id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
    let bytes = answer.bytes().await.unwrap().len();
    let line: Value = serde_json::from_str(&line_with(&faena, "order-7").await).unwrap();
    let fields = &line["fields"];
    assert_eq!(line["level"], "INFO");
    assert_eq!((&fields["method"], &fields["status"]), (&json!("POST"), &json!(201)), "{line}");
    assert_eq!((&fields["route"], &fields["path"]), (&json!("/api/v1/jobs"), &json!("/api/v1/jobs")));
    assert_eq!((&fields["bytes"], &fields["client"]), (&json!(bytes), &json!("127.0.0.1")));
    assert_eq!((&fields["request_id"], &fields["correlation_id"]), (&json!(request_id), &json!("order-7")));
    assert!(fields["caller"].as_str().unwrap().starts_with("key ops ("), "{line}");
    assert!(fields["duration_ms"].is_number(), "{line}");

    let get = |path: &str| faena.http.get(format!("{}{path}", faena.url)).bearer_auth(key).send();
    for path in ["/health/live", "/health", "/metrics"] {
        get(path).await.unwrap();
    }
    get("/api/v1/jobs/no-uuid").await.unwrap();
    let line: Value = serde_json::from_str(&line_with(&faena, "/no-uuid").await).unwrap();
    assert_eq!(line["fields"]["route"], "/api/v1/jobs/{id}", "{line}");
    let log = faena.log();
    assert!(!log.contains("\"path\":\"/health") && !log.contains("\"path\":\"/metrics"), "{log}");
    assert!(!log.contains(key) && !log.contains("private"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pretty_line_contains_no_control_characters_and_no_forged_fields() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_LOG_ACCESS", "true")]).await;
    let forged = "x\" status=200 caller=\"key root";
    let url = format!("{}/api/v1/jobs", faena.url);
    faena.http.get(&url).header("x-correlation-id", forged).send().await.unwrap();
    let line = line_with(&faena, "key root").await;
    assert!(line.contains(r#"correlation_id="x\" status=200 caller=\"key root""#), "{line}");

    // The control character U+009B as UTF-8: terminals understand it as the start of an escape sequence.
    let mut stream = TcpStream::connect(faena.url.trim_start_matches("http://")).unwrap();
    stream.write_all(b"GET /forged-\xc2\x9b31m HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    faena.http.get(format!("{url}/last")).send().await.unwrap();
    line_with(&faena, "/last").await;
    let log = faena.log();
    assert!(!log.contains(|character: char| character.is_control() && character != '\n'), "{log:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_logged_with_its_bytes_when_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_LOG_ACCESS", "true"), ("FAENA_LOG_FORMAT", "json")]).await;
    let mut stream = faena.http.get(format!("{}/api/v1/events", faena.url)).send().await.unwrap();
    faena.submit(json!({"name": "noop"})).await;
    let received = stream.chunk().await.unwrap().unwrap().len();
    assert!(!faena.log().contains("/api/v1/events"), "the stream has not ended");
    drop(stream);
    let line: Value = serde_json::from_str(&line_with(&faena, "/api/v1/events").await).unwrap();
    assert!(line["fields"]["bytes"].as_u64().unwrap() >= received as u64, "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_access_log_a_request_is_logged_at_debug_only() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    faena.get("/api/v1/jobs").await;
    assert!(!faena.log().contains("request handled"), "{}", faena.log());
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("LOG_LEVEL", "debug")]).await;
    faena.get("/health/live").await;
    let line = line_with(&faena, "/health/live").await;
    assert!(line.contains("DEBUG") && line.contains("caller=\"loopback\""), "{line}");
}
