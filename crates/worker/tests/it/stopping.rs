//! A worker ends without losing a job and without costing one a try.

use std::{sync::Arc, time::Duration};

use faena::{Context, JobError, JobId, Worker};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::far_end::FarEnd;

fn gated(gate: Arc<Notify>) -> Worker {
    Worker::new().handle("work", move |_, _: Value| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok(())
        }
    })
}

#[tokio::test]
async fn running_jobs_finish_and_new_ones_go_back() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    let (running, late) = (JobId::new(), JobId::new());
    peer.give(running, "work").await;
    peer.settled().await;
    worker.stop();
    peer.expect("drain").await;
    peer.give(late, "work").await;
    let released = peer.expect("release").await;
    assert_eq!(released["jobId"], json!(late));
    peer.ack(&released).await;
    gate.notify_one();
    let report = peer.expect("complete").await;
    assert_eq!(report["jobId"], json!(running));
    peer.ack(&report).await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn what_does_not_finish_in_time_is_stopped_and_given_back() {
    let server = FarEnd::new().await;
    let worker = Worker::new()
        .grace(Duration::from_millis(50))
        .handle("obedient", |job: Context, _: Value| async move {
            job.cancelled().await;
            Err::<(), _>(JobError::cancelled())
        })
        .handle("stubborn", |_, _: Value| async {
            std::future::pending::<()>().await;
            Ok(())
        });
    let worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    let (obedient, stubborn) = (JobId::new(), JobId::new());
    peer.give(obedient, "obedient").await;
    peer.give(stubborn, "stubborn").await;
    peer.settled().await;
    worker.stop();
    peer.expect("drain").await;
    for id in [obedient, stubborn] {
        let report = peer.expect("release").await;
        assert_eq!(report["jobId"], json!(id));
        peer.ack(&report).await;
    }
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn a_stop_waits_for_acknowledgements_over_a_lost_connection() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "work").await;
    peer.settled().await;
    worker.stop();
    peer.expect("drain").await;
    gate.notify_one();
    peer.expect("complete").await;
    peer.settled().await;
    peer.cut();
    let mut peer = server.accept_as(true).await;
    peer.expect("drain").await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn a_worker_that_the_server_drains_finishes_and_ends_by_itself() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "work").await;
    peer.say(json!({"type": "drain"})).await;
    gate.notify_one();
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn a_drain_that_is_taken_back_ends_nothing() {
    let server = FarEnd::new().await;
    let gate = Arc::new(Notify::new());
    let _worker = server.start(gated(gate.clone()));
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "work").await;
    peer.say(json!({"type": "drain"})).await;
    peer.say(json!({"type": "resume"})).await;
    peer.give(JobId::new(), "work").await;
    for _ in 0..2 {
        gate.notify_one();
        let report = peer.expect("complete").await;
        peer.ack(&report).await;
    }
}

#[tokio::test]
async fn an_ephemeral_worker_does_one_job_and_ends_when_that_is_acknowledged() {
    let server = FarEnd::new().await;
    let worker =
        server.start(gated(Arc::new(Notify::new())).ephemeral().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_as(false).await;
    assert_eq!(peer.registration["concurrency"], 1);
    peer.give(JobId::new(), "noop").await;
    // Said first, so that the server gives it no second job when it hears of the end.
    peer.expect("drain").await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn a_worker_that_has_never_reached_a_server_stops_at_once() {
    let worker = Worker::new().url("http://127.0.0.1:1").handle("noop", |_, _: Value| async { Ok(()) });
    worker.run_until(async {}).await.expect("a good end");
}

#[tokio::test]
async fn a_worker_without_handlers_is_a_mistake() {
    assert!(matches!(Worker::new().run_until(async {}).await, Err(faena::Error::Invalid(_))));
}
