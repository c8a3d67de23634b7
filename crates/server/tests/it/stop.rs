//! SIGTERM drains the server: running jobs may finish, and the others are handed back without using an attempt.

use serde_json::json;

use crate::faena::{Faena, events, eventually};

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
async fn a_job_that_outlasts_the_drain_is_handed_back_and_runs_again_without_using_an_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_DRAIN_GRACE", "300ms")];
    let mut faena = Faena::start(folder.path(), &environment).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_000}, "maxRetries": 0})).await;
    let first = faena.wait_for_state(&long, "PROCESSING").await;
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success(), "{}", faena.log());

    let faena = Faena::start(folder.path(), &environment).await;
    let job = faena.wait_for_state(&long, "COMPLETED").await;
    assert_eq!(job["retryCount"], 0, "{job:#}");
    assert!(job["run"].as_i64() > first["run"].as_i64());
    assert_eq!(events(&job).iter().filter(|event| **event == "handed_back").count(), 1, "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_the_server_at_once_and_its_jobs_are_still_handed_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_DRAIN_GRACE", "1h")]).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_600_000}, "maxRetries": 0})).await;
    faena.wait_for_state(&long, "PROCESSING").await;
    faena.signal("TERM");
    eventually("the first signal is logged", async || faena.log().contains("draining").then_some(())).await;
    assert!(faena.exit_status().is_none());
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success(), "{}", faena.log());

    let faena = Faena::start(folder.path(), &[]).await;
    let job = faena.wait_for_state(&long, "PROCESSING").await;
    assert_eq!(job["retryCount"], 0);
    assert!(events(&job).contains(&"handed_back"), "{job:#}");
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
