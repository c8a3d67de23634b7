//! Invalid requests from workers over plain HTTP.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{Fixture, UNKNOWN_JOB};
use crate::{
    load::assert_completed_once,
    workers::{StreamWorker, TestWorker, WebSocket, WorkerOptions},
};

#[tokio::test(flavor = "multi_thread")]
async fn each_invalid_request_is_answered_with_its_status_and_code() {
    let fixture = Fixture::start(&[]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&fixture.faena, WorkerOptions::new("other", &["bad"])).await;
    let old = fixture.complete_in_second_run(&mut worker, "bad").await;
    worker.leave().await;
    let (status, _) =
        fixture.faena.post("/api/v1/workers/register", json!({"workerId": "bad", "capabilities": ["bad"]})).await;
    assert_eq!(status, StatusCode::CREATED);
    let running = fixture.faena.submit(json!({"name": "bad"})).await;
    let (_, claimed) = fixture.faena.post("/api/v1/workers/bad/claim", json!({})).await;
    assert_eq!(claimed["jobs"][0]["id"], running.as_str(), "{claimed}");
    let own = format!("/bad/jobs/{running}");
    let token = fixture.faena.session_token("bad").unwrap();
    let other = format!("/bad/jobs/{}", fixture.job.id);
    let completed = format!("/bad/jobs/{}", old.id);
    let large = json!({"result": "x".repeat(2 << 20)}).to_string();
    let (run, stale) = (json!({"run": fixture.job.run}).to_string(), json!({"run": old.run - 1}).to_string());
    let cases = [
        ("/register".to_owned(), "nonsense", 400, "VALIDATION_ERROR"),
        ("/register".into(), "{}", 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "colour": "red"}"#, 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "concurrency": 0}"#, 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "version": ""}"#, 400, "VALIDATION_ERROR"),
        ("/register".into(), r#"{"capabilities": ["bad"], "version": "1\n2"}"#, 400, "VALIDATION_ERROR"),
        ("/unknown/claim".into(), "{}", 404, "NOT_FOUND"),
        ("/unknown/heartbeat".into(), "", 404, "NOT_FOUND"),
        ("/bad/claim".into(), r#"{"max": 0}"#, 400, "VALIDATION_ERROR"),
        ("/bad/claim".into(), r#"{"waitMs": 3600000}"#, 400, "VALIDATION_ERROR"),
        ("/bad/claim".into(), r#"{"waitMs": -1}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/dance"), "{}", 404, "NOT_FOUND"),
        (format!("{own}/complete"), "{nonsense", 400, "VALIDATION_ERROR"),
        (format!("{own}/complete"), r#"{"colour": "red"}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/complete"), r#"{"run": "one"}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/complete"), "{}", 400, "VALIDATION_ERROR"),
        (format!("{own}/complete"), r#"{"run": 1, "result": "\ud800"}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/complete"), &large, 413, "PAYLOAD_TOO_LARGE"),
        (format!("{own}/progress"), r#"{"run": 1, "progress": {"percentage": 101}}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/progress"), "{}", 400, "VALIDATION_ERROR"),
        (format!("{own}/step"), r#"{"run": 1, "result": 1}"#, 400, "VALIDATION_ERROR"),
        (format!("{own}/log"), "{}", 400, "VALIDATION_ERROR"),
        (format!("{own}/log"), r#"{"run": 1, "message": "x", "event": "completed"}"#, 400, "VALIDATION_ERROR"),
        (format!("{other}/complete"), &run, 409, "CONFLICT"),
        (format!("{other}/release"), &run, 409, "CONFLICT"),
        (format!("/healthy/jobs/{}/complete", fixture.job.id), &run, 404, "NOT_FOUND"),
        (format!("/bad/jobs/{UNKNOWN_JOB}/complete"), r#"{"run": 1}"#, 404, "NOT_FOUND"),
        (format!("{completed}/complete"), &stale, 409, "STALE_RUN"),
    ];
    for (path, body, status, code) in cases {
        let url = format!("{}/api/v1/workers{path}", fixture.faena.url);
        // The server does not read a rejected body to its end, so the connection cannot be reused.
        let request = fixture.faena.http.post(url).header("connection", "close").header("x-session-token", &token);
        let request = request.body(body.to_owned());
        let answer = request.send().await.unwrap();
        let (found, answer) = (answer.status().as_u16(), answer.json::<Value>().await.unwrap());
        let short: String = body.chars().take(80).collect();
        assert_eq!((found, answer["error"]["code"].as_str()), (status, Some(code)), "{path} {short}: {answer}");
    }
    let (status, answer) = fixture
        .faena
        .post(&format!("/api/v1/workers{own}/complete"), json!({"run": claimed["jobs"][0]["run"], "result": 1}))
        .await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_completed_once(&fixture.faena.wait_for_state(&running, "COMPLETED").await);
    fixture.assert_undisturbed().await;
}
