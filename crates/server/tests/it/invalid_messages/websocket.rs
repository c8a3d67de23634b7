//! Invalid frames on a WebSocket.

use futures_util::SinkExt;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use super::{Fixture, RawSocket, UNKNOWN_JOB, code};
use crate::{
    faena::eventually,
    load::assert_completed_once,
    workers::{StreamWorker, TestWorker, WebSocket, WorkerOptions},
};

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_registration_is_rejected_and_the_worker_may_register_again() {
    let fixture = Fixture::start(&[]).await;
    let mut socket = RawSocket::connect(&fixture.faena).await;
    for frame in [
        "nonsense".to_owned(),
        "[]".into(),
        "{}".into(),
        json!({"type": "heartbeat"}).to_string(),
        json!({"type": "complete", "jobId": fixture.job.id}).to_string(),
        json!({"type": "register"}).to_string(),
        json!({"type": "register", "capabilities": []}).to_string(),
        json!({"type": "register", "capabilities": [""]}).to_string(),
        json!({"type": "register", "capabilities": "mail"}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "concurrency": 0}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "concurrency": -1}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "workerId": ""}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "workerId": "a\u{0}b"}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "version": "a\u{7f}"}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "version": "1".repeat(101)}).to_string(),
        json!({"type": "register", "capabilities": ["mail"], "colour": "red"}).to_string(),
    ] {
        let answer = socket.call(frame.clone()).await;
        assert_eq!((answer["type"].as_str(), code(&answer)), (Some("error"), "VALIDATION_ERROR"), "{frame}: {answer}");
    }
    let answer = socket.call(json!({"type": "register", "capabilities": ["mail"]}).to_string()).await;
    assert_eq!(answer["type"], "registered", "{answer}");
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_invalid_frame_is_answered_with_its_code_and_the_connection_stays_open() {
    let fixture = Fixture::start(&[]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&fixture.faena, WorkerOptions::new("bad", &["bad"])).await;
    let old = fixture.complete_in_second_run(&mut worker, "bad").await;
    worker.leave().await;
    let mut socket = RawSocket::register(&fixture.faena, "bad", "bad").await;
    let running = fixture.faena.submit(json!({"name": "bad"})).await;
    let assigned = socket.receive().await;
    assert_eq!(assigned["job"]["id"], running.as_str(), "{assigned}");
    let (other, other_run) = (fixture.job.id.as_str(), fixture.job.run);
    let cases = [
        (json!("a text"), "VALIDATION_ERROR"),
        (json!({"type": "dance"}), "VALIDATION_ERROR"),
        (json!({"type": 7}), "VALIDATION_ERROR"),
        (json!({"kind": "complete"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "colour": "red"}), "VALIDATION_ERROR"),
        (json!({"type": "complete"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": "x"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "run": "1"}), "VALIDATION_ERROR"),
        (json!({"type": "complete", "jobId": running, "run": 99}), "CONFLICT|VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running}), "VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running, "progress": {"percentage": 101}}), "VALIDATION_ERROR"),
        (json!({"type": "progress", "jobId": running, "progress": {"percent": 1}}), "VALIDATION_ERROR"),
        (json!({"type": "step", "jobId": running, "result": 1}), "VALIDATION_ERROR"),
        (json!({"type": "step", "jobId": running, "name": "", "result": 1}), "VALIDATION_ERROR"),
        (json!({"type": "log", "jobId": running}), "VALIDATION_ERROR"),
        (json!({"type": "log", "jobId": running, "message": "x", "event": "started"}), "VALIDATION_ERROR"),
        (json!({"type": "log", "jobId": running, "message": "x", "event": "Two words"}), "VALIDATION_ERROR"),
        (json!({"type": "register", "capabilities": ["bad"]}), "CONFLICT"),
        // The job of another worker, with and without its run number.
        (json!({"type": "complete", "jobId": other, "result": "stolen"}), "CONFLICT"),
        (json!({"type": "complete", "jobId": other, "run": other_run, "result": "stolen"}), "CONFLICT"),
        (json!({"type": "fail", "jobId": other, "run": other_run, "error": "stolen"}), "CONFLICT"),
        (json!({"type": "progress", "jobId": other, "run": other_run, "progress": {"percentage": 1}}), "CONFLICT"),
        (json!({"type": "step", "jobId": other, "run": other_run, "name": "E1", "result": 1}), "CONFLICT"),
        (json!({"type": "log", "jobId": other, "run": other_run, "message": "stolen"}), "CONFLICT"),
        (json!({"type": "release", "jobId": other, "run": other_run}), "CONFLICT"),
        (json!({"type": "complete", "jobId": UNKNOWN_JOB}), "NOT_FOUND"),
        // A job that has ended.
        (json!({"type": "fail", "jobId": old.id, "run": old.run, "error": "after all"}), "STALE_RUN"),
        (json!({"type": "log", "jobId": old.id, "run": old.run, "message": "after all"}), "STALE_RUN"),
        (json!({"type": "release", "jobId": old.id, "run": old.run}), "STALE_RUN"),
        (json!({"type": "complete", "jobId": old.id, "run": old.run - 1}), "STALE_RUN"),
        (json!({"type": "step", "jobId": old.id, "run": old.run - 1, "name": "E1", "result": 1}), "STALE_RUN"),
        (json!({"type": "complete", "jobId": old.id, "run": old.run + 1}), "VALIDATION_ERROR"),
    ];
    for (frame, expected) in cases {
        let answer = socket.call(frame.to_string()).await;
        assert!(expected.split('|').any(|expected| expected == code(&answer)), "{frame}: {answer}");
    }
    let bytes: &[u8] = b"{\"type\":\"heartbeat\"}";
    assert_eq!(code(&socket.call(Message::binary(bytes.to_vec())).await), "VALIDATION_ERROR");
    let half = format!(r#"{{"type":"complete","jobId":"{running}","result":"\ud800"}}"#);
    assert_eq!(code(&socket.call(half).await), "VALIDATION_ERROR");
    let deep =
        format!(r#"{{"type":"complete","jobId":"{running}","result":{}1{}}}"#, "[".repeat(50_000), "]".repeat(50_000));
    assert_eq!(code(&socket.call(deep).await), "VALIDATION_ERROR");
    let large = json!({"type": "complete", "jobId": running, "result": "x".repeat(2 << 20)});
    assert_eq!(code(&socket.call(large.to_string()).await), "PAYLOAD_TOO_LARGE");
    // The worker still has its job.
    let job = fixture.faena.wait_for_state(&running, "PROCESSING").await;
    assert_eq!((&job["run"], &job["retryCount"]), (&assigned["job"]["run"], &json!(0)), "{job:#}");
    let answer = socket.call(json!({"type": "complete", "jobId": running, "result": "well"}).to_string()).await;
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(fixture.faena.wait_for_state(&running, "COMPLETED").await["result"], "well");
    let old_now = fixture.faena.job(&old.id).await;
    assert_completed_once(&old_now);
    let log = old_now["executionLog"].as_array().unwrap();
    let stale: Vec<&Value> = log.iter().filter(|entry| entry["event"] == "stale_report").collect();
    assert!(stale.len() == 1 && stale[0]["details"].as_str().unwrap().starts_with("5 reports"), "{old_now:#}");
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_floods_the_websocket_is_disconnected_with_a_reason() {
    let fixture = Fixture::start(&[]).await;
    let other = json!({"type": "log", "jobId": fixture.job.id, "message": "hello"}).to_string();
    for (id, text, reason) in [
        ("nonsense", "nonsense", "too many messages"),
        ("beats", r#"{"type":"heartbeat"}"#, "too many messages"),
        ("others", other.as_str(), "too many messages"),
        ("registers", r#"{"type":"register","capabilities":["bad"]}"#, "too many messages"),
        ("drains", r#"{"type":"drain"}"#, "too many messages"),
    ] {
        let mut socket = RawSocket::register(&fixture.faena, id, "bad").await;
        let closed = socket.flood(text).await;
        // A server that closes with unread bytes sends a reset, which may overtake the reason.
        assert_eq!(closed["type"], "closed", "{id}: {closed}");
        assert!([json!(reason), json!(null)].contains(&closed["reason"]), "{id}: {closed}");
    }
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oversized_frame_closes_the_connection_and_the_worker_may_resume_its_job() {
    let fixture = Fixture::start(&[]).await;
    let (mut socket, token) = RawSocket::resume(&fixture.faena, "bad", "bad", Value::Null).await;
    let id = fixture.faena.submit(json!({"name": "bad"})).await;
    let assigned = socket.receive().await;
    assert_eq!(assigned["job"]["id"], id.as_str());
    let run = &assigned["job"]["run"];
    let huge = json!({"type": "complete", "jobId": id, "result": "x".repeat(17 << 20)}).to_string();
    // The server may close the connection before the whole frame is sent.
    let _ = socket.0.send(Message::text(huge)).await;
    assert_eq!(socket.wait_until_closed().await["type"], "closed");
    let (mut socket, _) = RawSocket::resume(&fixture.faena, "bad", "bad", token).await;
    let complete = json!({"type": "complete", "jobId": id, "run": run, "result": "short"});
    let answer = socket.call(complete.to_string()).await;
    assert_eq!(answer["ok"], true, "{answer}");
    let done = fixture.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["retryCount"], 0);
    fixture.assert_undisturbed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_jobs_of_a_worker_that_never_reads_are_completed_by_another_worker() {
    let settings = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        // Long enough to submit and assign eighteen megabytes on a busy machine.
        ("FAENA_WORKER_SILENCE", "8s"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let fixture = Fixture::start(&settings).await;
    let mut unread = RawSocket::connect(&fixture.faena).await;
    unread
        .send(
            json!({"type": "register", "workerId": "never-reads", "capabilities": ["big"], "concurrency": 100})
                .to_string(),
        )
        .await;
    // More than the buffers between server and worker hold.
    let mut ids = Vec::new();
    for _ in 0..20 {
        ids.push(fixture.faena.submit(json!({"name": "big", "payload": {"text": "x".repeat(900_000)}})).await);
    }
    eventually("all are assigned to it", async || {
        (fixture.faena.count("type=big&status=QUEUED").await == 0).then_some(())
    })
    .await;
    let mut other = StreamWorker::<WebSocket>::connect(
        &fixture.faena,
        WorkerOptions { concurrency: 100, ..WorkerOptions::new("other", &["big"]) },
    )
    .await;
    for _ in &ids {
        let job = other.next_job().await;
        assert_eq!(job.retry_count, 1);
        other.complete(&job, json!(null)).await.unwrap();
    }
    for id in &ids {
        assert_completed_once(&fixture.faena.wait_for_state(id, "COMPLETED").await);
    }
    let (_, worker) = fixture.faena.get("/api/v1/workers/never-reads").await;
    assert_eq!(worker["state"], "Terminated", "{worker:#}");
    drop(unread);
    fixture.assert_undisturbed().await;
}
