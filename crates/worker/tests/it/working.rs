//! Jobs come, are done, and are reported.

use std::time::Duration;

use faena::{Context, JobError, JobId, Progress, Worker};
use serde_json::{Value, json};

use crate::far_end::FarEnd;

fn greeter() -> Worker {
    Worker::new().name("greeter").concurrency(2).queues(["mail"]).handle("greet", |_, payload: Value| async move {
        let name = payload["name"].as_str().ok_or_else(|| JobError::fail("no name"))?.to_owned();
        Ok(json!({ "greeting": format!("Hello, {name}") }))
    })
}

/// Waits until it is told to stop.
fn patient() -> Worker {
    Worker::new().handle("wait", |job: Context, _: Value| async move {
        job.cancelled().await;
        Err::<(), _>(JobError::cancelled())
    })
}

#[tokio::test]
async fn a_job_is_done_and_reported_under_its_run() {
    let server = FarEnd::new().await;
    let worker = server.start(greeter());
    let mut peer = server.accept_as(false).await;
    let registration = &peer.registration;
    assert_eq!(registration["capabilities"], json!(["greet"]));
    assert_eq!((&registration["name"], &registration["queues"]), (&json!("greeter"), &json!(["mail"])));
    assert_eq!((&registration["concurrency"], &registration["holds"]), (&json!(2), &json!([])));
    assert!(registration["tellsStarts"].is_null());

    let id = JobId::new();
    peer.give_with(id, "greet", json!({"payload": {"name": "Ada"}, "run": 7})).await;
    let report = peer.expect("complete").await;
    assert_eq!(report, json!({"type": "complete", "jobId": id, "run": 7, "result": {"greeting": "Hello, Ada"}}));
    peer.ack(&report).await;
    peer.settled().await;
    worker.stop();
    peer.expect("drain").await;
    peer.expect("leave").await;
    worker.end().await.expect("a good end");
}

#[tokio::test]
async fn failures_say_whether_another_try_makes_sense() {
    let server = FarEnd::new().await;
    let worker = greeter()
        .handle("busy", |_, _: Value| async { Err::<(), _>(JobError::retry("busy").after(Duration::from_secs(9))) })
        .handle("number", |_, _: u32| async { Ok(()) });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "greet").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["error"], &report["retryable"]), (&json!("no name"), &json!(false)));
    peer.give(JobId::new(), "busy").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["retryable"], &report["retryAfterMs"]), (&json!(true), &json!(9_000)));
    peer.give(JobId::new(), "number").await;
    let report = peer.expect("fail").await;
    assert_eq!(report["retryable"], false, "a payload that does not fit never will: {report}");
}

#[tokio::test]
async fn a_panic_costs_one_job_a_try_and_the_worker_nothing() {
    let server = FarEnd::new().await;
    let worker = greeter().handle("boom", |_, _: Value| async {
        if true {
            panic!("boom");
        }
        Ok(())
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    peer.give(JobId::new(), "boom").await;
    let report = peer.expect("fail").await;
    assert_eq!((&report["error"], &report["retryable"]), (&json!("the handler panicked: boom"), &json!(true)));
    peer.give_with(JobId::new(), "greet", json!({"payload": {"name": "Ada"}})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn progress_log_and_steps_are_told_in_order() {
    let server = FarEnd::new().await;
    let worker = Worker::new().handle("work", |job: Context, _: Value| async move {
        job.steps_total(2);
        job.log("begins");
        let first: u32 = job.step("E1", || async { panic!("was finished before") }).await?;
        let second = job.step("E2", || async { Ok(first + 1) }).await?;
        job.progress(Progress { percentage: Some(100.0), ..Progress::default() });
        Ok(second)
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    peer.give_with(JobId::new(), "work", json!({"steps": [{"name": "E1", "result": 41}]})).await;
    assert_eq!(peer.expect("log").await["message"], "begins");
    let step = peer.expect("step").await;
    assert_eq!((&step["name"], &step["result"], &step["totalSteps"]), (&json!("E2"), &json!(42), &json!(2)));
    peer.ack(&step).await;
    assert_eq!(peer.expect("progress").await["progress"], json!({"percentage": 100.0}));
    assert_eq!(peer.expect("complete").await["result"], 42);
}

#[tokio::test]
async fn a_refused_step_ends_its_handler_and_the_failure_is_not_told() {
    let server = FarEnd::new().await;
    let worker = greeter().handle("work", |job: Context, _: Value| async move {
        job.step("E1", || async { Ok(1) }).await?;
        job.step("E2", || async { Ok(2) }).await
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    let id = JobId::new();
    peer.give(id, "work").await;
    peer.expect("step").await;
    let error = json!({"code": "STALE_RUN", "message": "another worker has it"});
    peer.say(json!({"type": "ack", "jobId": id, "run": 1, "of": "step", "ok": false, "error": error})).await;
    // The failure would be refused as well; the next thing that is heard is about the next job.
    peer.give_with(JobId::new(), "greet", json!({"payload": {"name": "Ada"}})).await;
    peer.expect("complete").await;
}

#[tokio::test]
async fn a_job_that_is_cancelled_or_late_is_told_to_stop() {
    let server = FarEnd::new().await;
    let _worker = server.start(patient());
    let mut peer = server.accept_as(false).await;
    let id = JobId::new();
    peer.give(id, "wait").await;
    peer.say(json!({"type": "cancel", "jobId": id, "reason": "cancelled by request"})).await;
    assert_eq!(peer.expect("fail").await["jobId"], json!(id));
    let soon = faena::Timestamp::now().plus_ms(100);
    peer.give_with(JobId::new(), "wait", json!({"deadline": soon})).await;
    peer.expect("fail").await;
}

#[tokio::test]
async fn what_it_has_already_is_not_started_twice_and_what_is_too_much_goes_back() {
    let server = FarEnd::new().await;
    let _worker = server.start(patient().concurrency(1));
    let mut peer = server.accept_as(false).await;
    let (id, other) = (JobId::new(), JobId::new());
    peer.give(id, "wait").await;
    peer.give(id, "wait").await;
    peer.give(other, "wait").await;
    assert_eq!(peer.expect("release").await["jobId"], json!(other));
}

#[tokio::test]
async fn heartbeats_are_sent_and_answered_without_end_and_without_a_storm() {
    let server = FarEnd::new().await;
    let _worker = server.start(greeter());
    let mut peer = server.accept().await;
    peer.say(json!({"type": "registered", "heartbeatIntervalMs": 200, "resumed": false})).await;
    let begin = std::time::Instant::now();
    for _ in 0..4 {
        peer.expect("heartbeat").await;
        // One that answers every heartbeat, as this worker does.
        peer.say(json!({"type": "heartbeat"})).await;
    }
    assert!(begin.elapsed() >= Duration::from_millis(150), "heartbeats chase each other");
}

#[tokio::test]
async fn thousands_of_jobs_that_wait_or_do_not_are_all_reported_once() {
    let server = FarEnd::new().await;
    let worker = Worker::new().concurrency(5_000).handle("mixed", |_, number: u64| async move {
        if number.is_multiple_of(3) {
            tokio::time::sleep(Duration::from_millis(number % 7)).await;
        }
        Ok(number)
    });
    let _worker = server.start(worker);
    let mut peer = server.accept_as(false).await;
    for number in 0..5_000 {
        peer.give_with(JobId::new(), "mixed", json!({"payload": number})).await;
    }
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5_000 {
        let report = peer.expect("complete").await;
        assert!(seen.insert(report["result"].as_u64()), "told twice: {report}");
        peer.ack(&report).await;
    }
}
