//! The server's log: what an operator reads about jobs, queues, keys, workers and a stop.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    workers::{Transport, WebSocket},
};

async fn wait_for_line(faena: &Faena, parts: &[&str]) -> String {
    eventually(&format!("a line of the log has {parts:?}"), async || {
        faena.log().lines().find(|line| parts.iter().all(|part| line.contains(part))).map(str::to_owned)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_logged_one_by_one_and_many_together() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let broken = json!({"name": "sleep", "payload": {"ms": "soon"}, "maxRetries": 0});
    let first = faena.submit(broken.clone()).await;
    wait_for_line(
        &faena,
        &["WARN", "job dead-lettered", &format!("job={first}"), "job_type=\"", "reason=\"error\"", "error=\""],
    )
    .await;
    let (status, _) = faena.post("/api/v1/jobs/batch", json!({"jobs": vec![broken; 40]})).await;
    assert!(status.is_success());
    let line = wait_for_line(&faena, &["more jobs dead-lettered"]).await;
    assert!(line.contains("jobs=31"), "{line}");
    assert_eq!(faena.log().matches("job dead-lettered").count(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_that_failed_permanently_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_WEBHOOK_ATTEMPTS", "1")];
    let faena = Faena::start(folder.path(), &environment).await;
    let id = faena.submit(json!({"name": "noop", "webhookUrl": "http://127.0.0.1:9/hook"})).await;
    let job = format!("subject=\"job {id}\"");
    wait_for_line(&faena, &["WARN", "webhook failed", &job, "host=\"127.0.0.1:9\"", "attempts=1", "error="]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_and_the_first_key_are_logged() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    faena.post("/api/v1/queues/mail/pause", json!({"reason": "maintenance"})).await;
    wait_for_line(&faena, &["INFO", "queue paused", "queue=\"mail\"", "by=\"loopback\"", "reason=\"maintenance\""])
        .await;
    faena.post("/api/v1/queues/mail/resume", json!({})).await;
    faena.post("/api/v1/queues/mail/resume", json!({})).await;
    wait_for_line(&faena, &["INFO", "queue resumed", "queue=\"mail\""]).await;
    assert_eq!(faena.log().matches("queue resumed").count(), 1, "it was resumed once");
    let (status, _) = faena.post("/api/v1/api-keys", json!({"name": "ops", "scopes": ["admin"]})).await;
    assert_eq!(status, StatusCode::CREATED);
    let line = wait_for_line(&faena, &["INFO", "API keys are now required"]).await;
    assert!(line.contains("key=\"ops\"") && !line.contains("fna_"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_types_without_a_worker_are_logged_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_GUARDIAN_INTERVAL", "200ms")]).await;
    let jobs: Vec<Value> = (0..200).map(|n| json!({"name": format!("unknown.{n:03}")})).collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let line = wait_for_line(&faena, &["WARN", "no worker can run these job types"]).await;
    assert!(line.contains("types=200 jobs=200 examples=\"unknown.000,unknown.001,unknown.002\""), "{line}");
    faena.submit(json!({"name": "another"})).await;
    wait_for_line(&faena, &["WARN", "no worker can run this job type", "job_type=\"another\""]).await;
    assert_eq!(faena.log().matches("no worker can run").count(), 2, "{}", faena.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_after_a_timeout_logs_no_warning() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("LOG_LEVEL", "debug")]).await;
    let worker = json!({"workerId": "slow", "capabilities": ["block"]});
    assert_eq!(faena.post("/api/v1/workers/register", worker).await.0, StatusCode::CREATED);
    let id = faena.submit(json!({"name": "block", "timeoutMs": 100, "maxRetries": 0})).await;
    let (_, claim) = faena.post("/api/v1/workers/slow/claim", json!({"waitMs": 5_000})).await;
    let run = claim["jobs"][0]["run"].clone();
    let path = format!("/api/v1/workers/slow/jobs/{id}");
    assert_eq!(faena.post(&format!("{path}/started"), json!({"run": run})).await.0, StatusCode::OK);
    faena.wait_for_state(&id, "FAILED").await;
    wait_for_line(&faena, &["WARN", "job timed out", "took longer than its limit of 100ms"]).await;
    let (status, _) = faena.post(&format!("{path}/complete"), json!({"run": run})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    wait_for_line(&faena, &["DEBUG", "report rejected", &format!("job={id}")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_report_its_own_disconnects() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let mut connection = WebSocket::open(&faena.url).await;
    connection.sender.send(json!({"type": "register", "workerId": "w", "capabilities": ["greet"]})).unwrap();
    let registered: Value = connection.received.recv().await.unwrap();
    assert_eq!(registered["type"], "registered");
    wait_for_line(&faena, &["INFO", "worker connected", "types=\"greet\""]).await;
    let id = faena.submit(json!({"name": "greet"})).await;
    faena.wait_for_state(&id, "ASSIGNED").await;
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success());
    let log = faena.log();
    assert!(log.contains("jobs=0 grace=30s"), "the worker keeps its job: {log}");
    assert!(!log.contains("worker disconnected"), "{log}");
    // A worker that disconnects by itself is reported, with the number of its jobs.
    let faena = Faena::start(folder.path(), &[]).await;
    let connection = WebSocket::open(&faena.url).await;
    let in_flight = json!([{"jobId": id, "run": 1}]);
    let register = json!({
        "type": "register", "workerId": "w", "capabilities": ["greet"], "inFlight": in_flight,
        "sessionToken": registered["sessionToken"],
    });
    connection.sender.send(register).unwrap();
    wait_for_line(&faena, &["worker connected"]).await;
    drop(connection);
    wait_for_line(&faena, &["INFO", "worker disconnected", "worker=\"w\"", "grace=10s"]).await;
}
