//! Jobs are assigned, run and reported.

use std::time::Duration;

use faena::{Context, JobError, Progress, Worker};
use serde_json::{Value, json};

use crate::fake_server::{FakeServer, new_id};

fn greeter() -> Worker {
    Worker::new().name("greeter").concurrency(2).queues(["mail"]).handle("greet", |_, payload: Value| async move {
        let name = payload["name"].as_str().ok_or_else(|| JobError::fail("no name"))?.to_owned();
        Ok(json!({ "greeting": format!("Hello, {name}") }))
    })
}

/// Runs until it is cancelled.
fn waiter() -> Worker {
    Worker::new().handle("wait", |job: Context, _: Value| async move {
        job.cancelled().await;
        Err::<(), _>(JobError::cancelled())
    })
}

#[tokio::test]
async fn a_job_is_run_and_reported_under_its_run_number() {
    let server = FakeServer::new().await;
    let worker = server.start(greeter());
    let mut peer = server.accept_new().await;
    let registration = &peer.registration;
    assert_eq!(registration["capabilities"], json!(["greet"]));
    assert_eq!((&registration["name"], &registration["queues"]), (&json!("greeter"), &json!(["mail"])));
    assert_eq!((&registration["concurrency"], &registration["inFlight"]), (&json!(2), &json!([])));
    assert!(registration["reportsStarts"].is_null() && registration.get("version").is_none());

    let id = new_id();
    peer.assign_with(id, "greet", json!({"payload": {"name": "Ada"}, "run": 7})).await;
    let report = peer.expect("complete").await;
    assert_eq!(report, json!({"type": "complete", "jobId": id, "run": 7, "result": {"greeting": "Hello, Ada"}}));
    peer.ack(&report).await;
    peer.wait_until_read().await;
    worker.stop();
    peer.expect("drain").await;
    worker.leave(&mut peer).await;
}

#[tokio::test]
async fn a_worker_says_its_version_each_time_it_registers() {
    let server = FakeServer::new().await;
    let _worker = server.start(greeter().version("1.4.2"));
    let peer = server.accept_new().await;
    assert_eq!(peer.registration["version"], "1.4.2");
    drop(peer);
    assert_eq!(server.accept_new().await.registration["version"], "1.4.2");
}

#[tokio::test]
async fn failures_say_whether_they_are_retryable() {
    let server = FakeServer::new().await;
    let worker = greeter()
        .handle("busy", |_, _: Value| async { Err::<(), _>(JobError::retry("busy").after(Duration::from_secs(9))) })
        .handle("number", |_, _: u32| async { Ok(()) });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    peer.assign(new_id(), "greet").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["error"], &report["retryable"]), (&json!("no name"), &json!(false)));
    peer.assign(new_id(), "busy").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["retryable"], &report["retryAfterMs"]), (&json!(true), &json!(9_000)));
    peer.assign(new_id(), "number").await;
    let report = peer.expect("fail").await;
    assert_eq!(report["retryable"], false, "a payload that does not match never will: {report}");
}

#[tokio::test]
async fn a_panic_fails_one_attempt_and_does_not_harm_the_worker() {
    let server = FakeServer::new().await;
    let worker = greeter().handle("boom", |_, _: Value| async {
        if true {
            panic!("boom");
        }
        Ok(())
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    peer.assign(new_id(), "boom").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["error"], &report["retryable"]), (&json!("the handler panicked: boom"), &json!(true)));
    peer.assign_with(new_id(), "greet", json!({"payload": {"name": "Ada"}})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn progress_log_and_steps_are_reported_in_order() {
    let server = FakeServer::new().await;
    let worker = Worker::new().handle("work", |job: Context, _: Value| async move {
        job.set_total_steps(2);
        job.log("starting");
        let first: u32 = job.step("E1", || async { panic!("was completed before") }).await?;
        let second = job.step("E2", || async { Ok(first + 1) }).await?;
        job.progress(Progress::new().percentage(100.0));
        Ok(second)
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    peer.assign_with(new_id(), "work", json!({"steps": [{"name": "E1", "result": 41}]})).await;
    assert_eq!(peer.expect("log").await["message"], "starting");
    let step = peer.expect("step").await;
    assert_eq!((&step["name"], &step["result"], &step["totalSteps"]), (&json!("E2"), &json!(42), &json!(2)));
    peer.ack(&step).await;
    assert_eq!(peer.expect("progress").await["progress"], json!({"percentage": 100.0}));
    assert_eq!(peer.expect("complete").await["result"], 42);
}

#[tokio::test]
async fn a_rejected_step_ends_its_handler_and_the_failure_is_not_reported() {
    let server = FakeServer::new().await;
    let worker = greeter().handle("work", |job: Context, _: Value| async move {
        job.step("E1", || async { Ok(1) }).await?;
        job.step("E2", || async { Ok(2) }).await
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    let id = new_id();
    peer.assign(id, "work").await;
    peer.expect("step").await;
    let error = json!({"code": "STALE_RUN", "message": "assigned to another worker"});
    peer.send(json!({"type": "ack", "jobId": id, "run": 1, "of": "step", "ok": false, "error": error})).await;
    // The failure would be rejected as well; the next report is about the next job.
    peer.assign_with(new_id(), "greet", json!({"payload": {"name": "Ada"}})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn a_run_is_cancelled_with_its_job_and_at_its_deadline() {
    let server = FakeServer::new().await;
    let _worker = server.start(waiter());
    let mut peer = server.accept_new().await;
    let id = new_id();
    peer.assign(id, "wait").await;
    peer.send(json!({"type": "cancel", "jobId": id, "reason": "cancelled by request"})).await;
    assert_eq!(peer.expect("fail").await["jobId"], json!(id));
    let soon = faena::Timestamp::now() + Duration::from_millis(100);
    peer.assign_with(new_id(), "wait", json!({"deadline": soon})).await;
    peer.expect("fail").await;
}

#[tokio::test]
async fn a_job_is_not_started_twice_and_an_excess_job_is_released() {
    let server = FakeServer::new().await;
    let _worker = server.start(waiter().concurrency(1));
    let mut peer = server.accept_new().await;
    let (id, other) = (new_id(), new_id());
    peer.assign(id, "wait").await;
    peer.assign(id, "wait").await;
    peer.assign(other, "wait").await;
    assert_eq!(peer.expect("release").await["jobId"], json!(other));
}

#[tokio::test]
async fn heartbeats_are_sent_and_answered_without_a_storm() {
    let server = FakeServer::new().await;
    let _worker = server.start(greeter());
    let mut peer = server.accept().await;
    peer.send(json!({"type": "registered", "heartbeatIntervalMs": 200, "resumed": false})).await;
    let started = std::time::Instant::now();
    for _ in 0..4 {
        peer.expect("heartbeat").await;
        // A server that answers every heartbeat, as this worker does.
        peer.send(json!({"type": "heartbeat"})).await;
    }
    assert!(started.elapsed() >= Duration::from_millis(150), "heartbeats answer each other too fast");
}

#[tokio::test]
async fn thousands_of_short_and_waiting_jobs_are_each_reported_once() {
    let server = FakeServer::new().await;
    let worker = Worker::new().concurrency(5_000).handle("mixed", |_, number: u64| async move {
        if number.is_multiple_of(3) {
            tokio::time::sleep(Duration::from_millis(number % 7)).await;
        }
        Ok(number)
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_new().await;
    for number in 0..5_000 {
        peer.assign_with(new_id(), "mixed", json!({"payload": number})).await;
    }
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5_000 {
        let report = peer.expect("complete").await;
        assert!(seen.insert(report["result"].as_u64()), "reported twice: {report}");
        peer.ack(&report).await;
    }
}
