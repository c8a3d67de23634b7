//! A worker shuts down without losing a job or using one of its attempts.

use std::time::Duration;

use faena::{Context, JobError, Worker};
use serde_json::{Value, json};

use crate::fake_server::{FakeServer, new_id, start_gated};

#[tokio::test]
async fn running_jobs_finish_and_new_ones_are_released() {
    let (_server, gate, worker, mut peer) = start_gated().await;
    let (running, late) = (new_id(), new_id());
    peer.assign(running, "work").await;
    peer.wait_until_read().await;
    worker.stop();
    peer.expect("drain").await;
    peer.assign(late, "work").await;
    let released = peer.expect("release").await;
    assert_eq!(released["jobId"], json!(late));
    peer.ack(&released).await;
    gate.notify_one();
    let report = peer.expect("complete").await;
    assert_eq!(report["jobId"], json!(running));
    peer.ack(&report).await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_job_that_does_not_finish_in_time_is_cancelled_and_released() {
    let server = FakeServer::new().await;
    let worker = Worker::new()
        .grace_period(Duration::from_millis(50))
        .handle("cooperative", |job: Context, _: Value| async move {
            job.cancelled().await;
            Err::<(), _>(JobError::cancelled())
        })
        .handle("unresponsive", |_, _: Value| async {
            std::future::pending::<()>().await;
            Ok(())
        });
    let worker = server.start(worker);
    let mut peer = server.accept_new().await;
    let (cooperative, unresponsive) = (new_id(), new_id());
    peer.assign(cooperative, "cooperative").await;
    peer.assign(unresponsive, "unresponsive").await;
    peer.wait_until_read().await;
    worker.stop();
    peer.expect("drain").await;
    for id in [cooperative, unresponsive] {
        let report = peer.expect("release").await;
        assert_eq!(report["jobId"], json!(id));
        peer.ack(&report).await;
    }
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_shutdown_reconnects_and_waits_for_outstanding_acknowledgements() {
    let (server, gate, worker, mut peer) = start_gated().await;
    peer.assign(new_id(), "work").await;
    peer.wait_until_read().await;
    worker.stop();
    peer.expect("drain").await;
    gate.notify_one();
    peer.expect("complete").await;
    peer.wait_until_read().await;
    peer.disconnect();
    let mut peer = server.accept_resumed().await;
    peer.expect("drain").await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_worker_that_the_server_drains_finishes_its_jobs_and_ends() {
    let (_server, gate, worker, mut peer) = start_gated().await;
    peer.assign(new_id(), "work").await;
    peer.send(json!({"type": "drain"})).await;
    gate.notify_one();
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_cancelled_drain_lets_the_worker_continue() {
    let (_server, gate, _worker, mut peer) = start_gated().await;
    peer.assign(new_id(), "work").await;
    peer.send(json!({"type": "drain"})).await;
    peer.send(json!({"type": "resume"})).await;
    peer.assign(new_id(), "work").await;
    for _ in 0..2 {
        gate.notify_one();
        let report = peer.expect("complete").await;
        peer.ack(&report).await;
    }
}

#[tokio::test]
async fn an_ephemeral_worker_runs_one_job_and_ends_once_it_is_acknowledged() {
    let server = FakeServer::new().await;
    let worker = server.start(Worker::new().ephemeral().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_new().await;
    assert_eq!(peer.registration["concurrency"], 1);
    peer.assign(new_id(), "noop").await;
    // The worker drains before it reports, so that the server assigns no second job.
    peer.expect("drain").await;
    let report = peer.expect("complete").await;
    peer.ack(&report).await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_worker_that_never_reached_a_server_stops_immediately() {
    let worker = Worker::new().url("http://127.0.0.1:1").handle("noop", |_, _: Value| async { Ok(()) });
    worker.run_until(async {}).await.expect("a clean shutdown");
}

#[tokio::test]
async fn a_worker_without_handlers_is_an_error() {
    assert!(matches!(Worker::new().run_until(async {}).await, Err(faena::Error::Invalid(_))));
}
