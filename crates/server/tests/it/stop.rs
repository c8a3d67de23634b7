//! SIGTERM drains the server: running jobs may finish, and the others are released without using an attempt.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, events, eventually},
    workers::{Grpc, Transport, WebSocket},
};

#[tokio::test(flavor = "multi_thread")]
async fn on_a_stop_signal_running_jobs_finish_and_queued_jobs_stay_queued() {
    let folder = tempfile::tempdir().unwrap();
    for signal in ["TERM", "INT"] {
        let mut faena = Faena::start(folder.path(), &[("WORKER_CONCURRENCY", "1")]).await;
        let running = faena.submit(json!({"name": "sleep", "payload": {"ms": 700}})).await;
        faena.wait_for_state(&running, "PROCESSING").await;
        let waiting = faena.submit(json!({"name": "sleep", "payload": {"ms": 1}})).await;
        faena.signal(signal);
        let status = faena.wait_for_exit().await;
        assert!(status.success(), "{status}: {}", faena.log());

        let faena = Faena::start(folder.path(), &[]).await;
        let job = faena.job(&running).await;
        assert_eq!(events(&job), ["created", "queued", "assigned", "started", "completed"], "{job:#}");
        let job = faena.wait_for_state(&waiting, "COMPLETED").await;
        assert_eq!(job["retryCount"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_outlasts_the_drain_is_released_and_runs_again_without_using_an_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_DRAIN_GRACE", "300ms")];
    let mut faena = Faena::start(folder.path(), &environment).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_000}, "maxRetries": 0})).await;
    let first = faena.wait_for_state(&long, "PROCESSING").await;
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success(), "{}", faena.log());
    let log = faena.log();
    assert!(log.contains("draining, a second signal stops immediately jobs=1 grace=300ms"), "{log}");
    assert!(log.contains("WARN grace period is over, jobs released jobs=1"), "{log}");

    let faena = Faena::start(folder.path(), &environment).await;
    let job = faena.wait_for_state(&long, "COMPLETED").await;
    assert_eq!(job["retryCount"], 0, "{job:#}");
    assert!(job["run"].as_i64() > first["run"].as_i64());
    assert_eq!(events(&job).iter().filter(|event| **event == "released").count(), 1, "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_the_server_immediately_and_its_jobs_are_still_released() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_DRAIN_GRACE", "1h")]).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_600_000}, "maxRetries": 0})).await;
    faena.wait_for_state(&long, "PROCESSING").await;
    faena.signal("TERM");
    eventually("the first signal is logged", async || faena.log().contains("draining").then_some(())).await;
    assert!(faena.exit_status().is_none());
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success(), "{}", faena.log());
    assert!(faena.log().contains("WARN forced stop, jobs released jobs=1"), "{}", faena.log());

    let faena = Faena::start(folder.path(), &[]).await;
    let job = faena.wait_for_state(&long, "PROCESSING").await;
    assert_eq!(job["retryCount"], 0);
    assert!(events(&job).contains(&"released"), "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_started_by_a_job_does_not_outlive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_WORKER_SHELL", "true"), ("FAENA_DRAIN_GRACE", "1ms")]).await;
    let script = "sleep 3600 & echo $! >pid.tmp; mv pid.tmp pid; wait";
    let payload = json!({"argv": ["sh", "-c", script], "cwd": folder.path()});
    faena.submit(json!({"name": "shell.run", "payload": payload})).await;
    let pid = folder.path().join("pid");
    let pid = eventually("the program runs", async || std::fs::read_to_string(&pid).ok()).await;
    let grandchild = std::path::PathBuf::from(format!("/proc/{}", pid.trim()));
    assert!(grandchild.exists());
    faena.signal("TERM");
    faena.wait_for_exit().await;
    eventually("its child has ended", async || has_ended(&grandchild).then_some(())).await;
}

/// Returns whether a process has ended. A zombie has.
pub fn has_ended(process: &std::path::Path) -> bool {
    match std::fs::read_to_string(process.join("stat")) {
        Ok(stat) => stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'),
        Err(_) => true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_event_stream_does_not_delay_the_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let waiting = faena.submit(json!({"name": "unknown.type"})).await;
    let mut stream = faena.http.get(format!("{}/api/v1/jobs/{waiting}/events", faena.url)).send().await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success());
    while let Ok(Some(_)) = stream.chunk().await {}
}

/// Sends a registration and returns the next two frames.
async fn registration_frames<T: Transport>(faena: &Faena) -> [Option<Value>; 2] {
    let mut connection = T::open(&faena.url).await;
    connection.sender.send(json!({"type": "register", "workerId": "late", "capabilities": ["greet"]})).unwrap();
    [connection.received.recv().await, connection.received.recv().await]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_refuses_new_workers_with_a_hint_to_try_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_DRAIN_GRACE", "1h")]).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_600_000}})).await;
    faena.wait_for_state(&long, "PROCESSING").await;
    let known = json!({"workerId": "known", "capabilities": ["greet"]});
    assert_eq!(faena.post("/api/v1/workers/register", known.clone()).await.0, StatusCode::CREATED);
    faena.signal("TERM");
    let url = format!("{}/api/v1/workers/register", faena.url);
    // Each attempt is another worker: one that registered before the server began to stop may register again.
    let mut attempts = 0..;
    let refused = eventually("a registration is refused", async || {
        let late = json!({"workerId": format!("late-{}", attempts.next()?), "capabilities": ["greet"]});
        let answer = faena.http.post(&url).json(&late).send().await.unwrap();
        (answer.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
    })
    .await;
    assert_eq!(refused.headers()["retry-after"], "1");
    let body: Value = refused.json().await.unwrap();
    let message = "the server is stopping; connect again in a moment, or to another server";
    assert_eq!((&body["error"]["code"], &body["error"]["message"]), (&json!("UNAVAILABLE"), &json!(message)));
    let [error, closed] = registration_frames::<WebSocket>(&faena).await;
    assert_eq!(error.unwrap()["error"], json!({"code": "UNAVAILABLE", "message": message}));
    assert_eq!(closed.unwrap()["reason"], message);
    let [closed, end] = registration_frames::<Grpc>(&faena).await;
    assert_eq!((closed.unwrap()["reason"].as_str(), end), (Some(message), None));
    // A worker of this server may still report its jobs, but gets no new ones.
    assert_eq!(faena.post("/api/v1/workers/register", known).await.0, StatusCode::CREATED);
    assert_eq!(faena.post("/api/v1/workers/known/heartbeat", json!({})).await.0, StatusCode::OK);
    let (status, claim) = faena.post("/api/v1/workers/known/claim", json!({})).await;
    assert_eq!((status, &claim["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("UNAVAILABLE")), "{claim}");
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success(), "{}", faena.log());
}
