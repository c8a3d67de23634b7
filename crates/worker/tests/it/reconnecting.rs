//! A lost connection loses no job and no report.

use std::sync::Arc;

use faena::{Context, Worker};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::fake_server::{FakeServer, new_id, start_gated};

#[tokio::test]
async fn a_report_is_sent_again_until_it_is_acknowledged() {
    let server = FakeServer::new().await;
    let worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_new().await;
    let first_id = peer.registration["workerId"].clone();
    let id = new_id();
    peer.assign(id, "noop").await;
    peer.expect("complete").await;
    peer.wait_until_read().await;
    peer.disconnect();

    let mut peer = server.accept_resumed().await;
    assert_eq!(peer.registration["workerId"], first_id, "the same worker reconnects");
    assert_eq!(peer.registration["sessionToken"], "fst_fake", "and proves it");
    assert_eq!(peer.registration["inFlight"], json!([{"jobId": id, "run": 1}]), "the job is still in flight");
    peer.expect("complete").await;
    peer.wait_until_read().await;
    peer.disconnect();

    let mut peer = server.accept_resumed().await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    peer.wait_until_read().await;
    peer.disconnect();

    let mut peer = server.accept_resumed().await;
    assert_eq!(peer.registration["inFlight"], json!([]));
    peer.wait_until_read().await;
    worker.stop();
    peer.expect("drain").await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_rejected_report_is_not_sent_again() {
    let server = FakeServer::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_new().await;
    let id = new_id();
    peer.assign(id, "noop").await;
    peer.expect("complete").await;
    let error = json!({"code": "STALE_RUN", "message": "too late"});
    peer.send(json!({"type": "ack", "jobId": id, "of": "complete", "ok": false, "error": error})).await;
    peer.wait_until_read().await;
    peer.disconnect();
    assert_eq!(server.accept().await.registration["inFlight"], json!([]));
}

#[tokio::test]
async fn a_job_continues_across_a_lost_connection() {
    let (server, gate, _worker, mut peer) = start_gated().await;
    let id = new_id();
    peer.assign(id, "work").await;
    peer.send(json!({"type": "heartbeat"})).await;
    peer.wait_until_read().await;
    peer.disconnect();
    let mut peer = server.accept_resumed().await;
    assert_eq!(peer.registration["inFlight"], json!([{"jobId": id, "run": 1}]));
    gate.notify_one();
    assert_eq!(peer.expect("complete").await["result"], json!({"cancelled": false}));
}

#[tokio::test]
async fn a_job_that_finishes_while_disconnected_is_reported_after_the_reconnect() {
    let (server, gate, _worker, mut peer) = start_gated().await;
    let id = new_id();
    peer.assign(id, "work").await;
    peer.wait_until_read().await;
    peer.disconnect();
    gate.notify_one();
    let mut peer = server.accept().await;
    assert_eq!(peer.registration["inFlight"], json!([{"jobId": id, "run": 1}]));
    peer.send(json!({"type": "registered", "heartbeatIntervalMs": 30_000, "resumed": true})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn the_jobs_of_an_expired_session_are_cancelled() {
    let server = FakeServer::new().await;
    let stopped = Arc::new(Notify::new());
    let cancelled = stopped.clone();
    let worker = Worker::new().concurrency(1).handle("wait", move |job: Context, payload: Value| {
        let cancelled = cancelled.clone();
        async move {
            if payload["quick"] == true {
                return Ok(());
            }
            job.cancelled().await;
            cancelled.notify_one();
            Err(faena::JobError::cancelled())
        }
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    peer.assign(new_id(), "wait").await;
    peer.wait_until_read().await;
    peer.disconnect();
    let mut peer = server.accept_new().await;
    stopped.notified().await;
    // Its failure is not reported, and its slot is free for a job of the new session.
    let next = new_id();
    peer.assign_with(next, "wait", json!({"payload": {"quick": true}})).await;
    assert_eq!(peer.expect("complete").await["jobId"], json!(next));
}

#[tokio::test]
async fn a_step_waits_for_its_acknowledgement_across_a_lost_connection() {
    let server = FakeServer::new().await;
    let worker = Worker::new().handle("work", |job: Context, _: Value| async move {
        let one = job.step("E1", || async { Ok(1) }).await?;
        job.step("E2", || async { Ok(one + 1) }).await
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    peer.assign(new_id(), "work").await;
    assert_eq!(peer.expect("step").await["name"], "E1");
    peer.wait_until_read().await;
    peer.disconnect();
    let mut peer = server.accept_resumed().await;
    let step = peer.expect("step").await;
    assert_eq!(step["name"], "E1");
    peer.ack(&step).await;
    let step = peer.expect("step").await;
    assert_eq!(step["name"], "E2");
    peer.ack(&step).await;
    assert_eq!(peer.expect("complete").await["result"], 2);
}

#[tokio::test]
async fn the_worker_reconnects_after_three_silent_intervals() {
    let server = FakeServer::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut silent = server.accept().await;
    let started = std::time::Instant::now();
    silent.send(json!({"type": "registered", "heartbeatIntervalMs": 50, "resumed": false})).await;
    server.accept().await;
    assert!(started.elapsed().as_millis() >= 150);
}

#[tokio::test]
async fn a_first_registration_at_a_stopping_server_is_retried() {
    let server = FakeServer::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept().await;
    let error = json!({"code": "UNAVAILABLE", "message": "the server is stopping"});
    peer.send(json!({"type": "error", "error": error})).await;
    let first = peer.registration["workerId"].clone();
    let mut peer = server.accept_new().await;
    assert_eq!(peer.registration["workerId"], first);
    let id = new_id();
    peer.assign(id, "noop").await;
    assert_eq!(peer.expect("complete").await["jobId"], json!(id));
}

#[tokio::test]
async fn a_rejected_first_registration_is_an_error_and_a_later_one_is_retried() {
    let server = FakeServer::new().await;
    let error = json!({"type": "error", "error": {"code": "UNAUTHORIZED", "message": "no such key"}});
    let worker = || Worker::new().token("fna_x").handle("noop", |_, _: Value| async { Ok(()) });
    let rejected = server.start(worker());
    let mut peer = server.accept().await;
    assert_eq!(peer.registration["token"], "fna_x");
    peer.send(error.clone()).await;
    let problem = rejected.wait().await.expect_err("rejected");
    assert_eq!(problem.to_string(), "no such key (UNAUTHORIZED)");

    let _accepted = server.start(worker());
    server.accept_new().await.disconnect();
    server.accept().await.send(error).await;
    server.accept().await;
}
