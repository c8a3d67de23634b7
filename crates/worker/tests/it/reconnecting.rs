//! Connections are lost; jobs and reports are not.

use std::sync::Arc;

use faena::{Context, JobId, Worker};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::far_end::FarEnd;

/// Finishes when the test says so.
fn gated(gate: Arc<Notify>) -> Worker {
    Worker::new().handle("work", move |job: Context, _: Value| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok(json!({ "cancelled": job.is_cancelled() }))
        }
    })
}

#[tokio::test]
async fn a_report_that_was_not_acknowledged_is_sent_again_until_it_is() {
    let server = FarEnd::new().await;
    let worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_as(false).await;
    let first_id = peer.registration["workerId"].clone();
    let id = JobId::new();
    peer.give(id, "noop").await;
    peer.expect("complete").await;
    peer.settled().await;
    peer.cut();

    let mut peer = server.accept_as(true).await;
    assert_eq!(peer.registration["workerId"], first_id, "the same worker comes back");
    assert_eq!(peer.registration["holds"], json!([{"jobId": id, "run": 1}]), "the job is still in its hands");
    peer.expect("complete").await;
    peer.settled().await;
    peer.cut();

    let mut peer = server.accept_as(true).await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    peer.settled().await;
    peer.cut();

    let mut peer = server.accept_as(true).await;
    assert_eq!(peer.registration["holds"], json!([]));
    peer.settled().await;
    worker.stop();
    peer.expect("drain").await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn a_refusal_settles_a_report_as_well() {
    let server = FarEnd::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_as(false).await;
    let id = JobId::new();
    peer.give(id, "noop").await;
    peer.expect("complete").await;
    let error = json!({"code": "STALE_RUN", "message": "too late"});
    peer.say(json!({"type": "ack", "jobId": id, "of": "complete", "ok": false, "error": error})).await;
    peer.settled().await;
    peer.cut();
    assert_eq!(server.accept().await.registration["holds"], json!([]));
}

#[tokio::test]
async fn a_job_goes_on_over_a_lost_connection() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let _worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    let id = JobId::new();
    peer.give(id, "work").await;
    peer.say(json!({"type": "heartbeat"})).await;
    peer.settled().await;
    peer.cut();
    let mut peer = server.accept_as(true).await;
    assert_eq!(peer.registration["holds"], json!([{"jobId": id, "run": 1}]));
    gate.notify_one();
    assert_eq!(peer.expect("complete").await["result"], json!({"cancelled": false}));
}

#[tokio::test]
async fn a_job_that_ends_while_there_is_no_connection_is_reported_on_the_next() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let _worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    let id = JobId::new();
    peer.give(id, "work").await;
    peer.settled().await;
    peer.cut();
    gate.notify_one();
    let mut peer = server.accept().await;
    assert_eq!(peer.registration["holds"], json!([{"jobId": id, "run": 1}]));
    peer.say(json!({"type": "registered", "heartbeatIntervalMs": 30_000, "resumed": true})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn jobs_of_a_life_that_is_over_are_told_to_stop() {
    let server = FarEnd::new().await;
    let stopped = Arc::new(Notify::new());
    let told = stopped.clone();
    let worker = Worker::new().concurrency(1).handle("wait", move |job: Context, payload: Value| {
        let told = told.clone();
        async move {
            if payload["quick"] == true {
                return Ok(());
            }
            job.cancelled().await;
            told.notify_one();
            Err(faena::JobError::cancelled())
        }
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "wait").await;
    peer.settled().await;
    peer.cut();
    let mut peer = server.accept_as(false).await;
    stopped.notified().await;
    // Its failure is nobody's business, and its place is free for a job of the new life.
    let next = JobId::new();
    peer.give_with(next, "wait", json!({"payload": {"quick": true}})).await;
    assert_eq!(peer.expect("complete").await["jobId"], json!(next));
}

#[tokio::test]
async fn a_step_waits_for_its_acknowledgement_over_a_lost_connection() {
    let server = FarEnd::new().await;
    let worker = Worker::new().handle("work", |job: Context, _: Value| async move {
        let one = job.step("E1", || async { Ok(1) }).await?;
        job.step("E2", || async { Ok(one + 1) }).await
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "work").await;
    assert_eq!(peer.expect("step").await["name"], "E1");
    peer.settled().await;
    peer.cut();
    let mut peer = server.accept_as(true).await;
    let step = peer.expect("step").await;
    assert_eq!(step["name"], "E1");
    peer.ack(&step).await;
    let step = peer.expect("step").await;
    assert_eq!(step["name"], "E2");
    peer.ack(&step).await;
    assert_eq!(peer.expect("complete").await["result"], 2);
}

#[tokio::test]
async fn a_server_that_is_silent_for_three_intervals_is_left() {
    let server = FarEnd::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut silent = server.accept().await;
    let begin = std::time::Instant::now();
    silent.say(json!({"type": "registered", "heartbeatIntervalMs": 50, "resumed": false})).await;
    server.accept().await;
    assert!(begin.elapsed().as_millis() >= 150);
}

#[tokio::test]
async fn a_server_that_never_wants_it_is_an_error_and_one_that_did_before_is_not() {
    let server = FarEnd::new().await;
    let error = json!({"type": "error", "error": {"code": "UNAUTHORIZED", "message": "no such key"}});
    let worker = || Worker::new().token("fna_x").handle("noop", |_, _: Value| async { Ok(()) });
    let refused = server.start(worker());
    let mut peer = server.accept().await;
    assert_eq!(peer.registration["token"], "fna_x");
    peer.say(error.clone()).await;
    let problem = refused.end().await.expect_err("refused");
    assert_eq!(problem.to_string(), "no such key (UNAUTHORIZED)");

    let _taken = server.start(worker());
    server.accept_as(false).await.cut();
    server.accept().await.say(error).await;
    server.accept().await;
}
