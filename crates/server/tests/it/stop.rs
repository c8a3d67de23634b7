//! SIGTERM drains: what runs may finish, the rest goes back without costing a try.

use serde_json::json;

use crate::faena::{Faena, events, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_when_the_server_is_told_to_stop_may_finish_and_what_waits_stays() {
    let folder = tempfile::tempdir().unwrap();
    for signal in ["TERM", "INT"] {
        let mut faena = Faena::start(folder.path(), &[("WORKER_CONCURRENCY", "1")]).await;
        let running = faena.submit(json!({"name": "sleep", "payload": {"ms": 700}})).await;
        faena.job_is(&running, "PROCESSING").await;
        let waiting = faena.submit(json!({"name": "sleep", "payload": {"ms": 1}})).await;
        faena.signal(signal);
        let status = faena.ended().await;
        assert!(status.success(), "{status}: {}", faena.log());

        let faena = Faena::start(folder.path(), &[]).await;
        let job = faena.job(&running).await;
        assert_eq!(events(&job), ["created", "queued", "assigned", "started", "completed"], "{job:#}");
        let job = faena.job_is(&waiting, "COMPLETED").await;
        assert_eq!(job["retryCount"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_outlasts_the_grace_time_is_handed_back_and_runs_again_without_having_cost_a_try() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_DRAIN_GRACE", "300ms")];
    let mut faena = Faena::start(folder.path(), &environment).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_000}, "maxRetries": 0})).await;
    let first = faena.job_is(&long, "PROCESSING").await;
    faena.signal("TERM");
    assert!(faena.ended().await.success(), "{}", faena.log());

    let faena = Faena::start(folder.path(), &environment).await;
    let job = faena.job_is(&long, "COMPLETED").await;
    assert_eq!(job["retryCount"], 0, "{job:#}");
    assert!(job["run"].as_i64() > first["run"].as_i64());
    assert_eq!(events(&job).iter().filter(|event| **event == "handed_back").count(), 1, "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_it_at_once_and_still_hands_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_DRAIN_GRACE", "1h")]).await;
    let long = faena.submit(json!({"name": "sleep", "payload": {"ms": 3_600_000}, "maxRetries": 0})).await;
    faena.job_is(&long, "PROCESSING").await;
    faena.signal("TERM");
    eventually("it has heard the first", async || faena.log().contains("stopping").then_some(())).await;
    assert!(faena.has_ended().is_none());
    faena.signal("TERM");
    assert!(faena.ended().await.success(), "{}", faena.log());

    let faena = Faena::start(folder.path(), &[]).await;
    let job = faena.job_is(&long, "PROCESSING").await;
    assert_eq!(job["retryCount"], 0);
    assert!(events(&job).contains(&"handed_back"), "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_a_job_has_started_does_not_outlive_a_stopped_server() {
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
    faena.ended().await;
    eventually("its child is gone", async || is_gone(&grandchild).then_some(())).await;
}

/// Dead and not yet reaped counts.
pub fn is_gone(process: &std::path::Path) -> bool {
    match std::fs::read_to_string(process.join("stat")) {
        Ok(stat) => stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'),
        Err(_) => true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_somebody_follows_does_not_hold_up_the_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let waiting = faena.submit(json!({"name": "somebody.elses"})).await;
    let mut stream = faena.http.get(format!("{}/api/v1/jobs/{waiting}/events", faena.url)).send().await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());
    faena.signal("TERM");
    assert!(faena.ended().await.success());
    while let Ok(Some(_)) = stream.chunk().await {}
}
