//! `shell.run`: programs, when the operator allows them.

use std::path::{Path, PathBuf};

use faena_domain::{ErrorReason, JobState, NewJob, Timestamp};
use faena_engine::EngineConfig;
use serde_json::{Value, json};

use crate::fixture::{Fixture, eventually, job, once, open_postgres, result};

fn allowed() -> EngineConfig {
    EngineConfig { is_shell_allowed: true, ..EngineConfig::default() }
}

fn script(text: &str) -> NewJob {
    once("shell.run", json!({"argv": ["sh", "-c", text]}).to_string())
}

/// Returns a job whose child process sleeps for an hour; the child's process id is written to `folder`.
fn with_child(folder: &Path) -> NewJob {
    let text = "sleep 3600 & echo $! >pid.tmp; mv pid.tmp pid; wait";
    once("shell.run", json!({"argv": ["sh", "-c", text], "cwd": folder}).to_string())
}

async fn child(folder: &Path) -> PathBuf {
    let pid = eventually("the child runs", async || std::fs::read_to_string(folder.join("pid")).ok()).await;
    let process = PathBuf::from(format!("/proc/{}", pid.trim()));
    assert!(!has_ended(&process));
    process
}

/// Returns whether a process has ended, reaped or not.
fn has_ended(process: &Path) -> bool {
    match std::fs::read_to_string(process.join("stat")) {
        Ok(stat) => stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'),
        Err(_) => true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_not_offered_unless_they_are_allowed() {
    let fixture = Fixture::new().await;
    let folder = tempfile::tempdir().unwrap();
    let payload = json!({"argv": ["touch", folder.path().join("made")]});
    let id = fixture.submit(job("shell.run", payload.to_string())).await;
    // A job that was submitted later runs, so this one had its turn.
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;
    assert_eq!(fixture.job(id).await.status, JobState::Queued);
    let why = fixture.engine.why(&fixture.job(id).await, Timestamp::now()).await.unwrap().unwrap();
    assert_eq!(why.reasons[0].code, "no_worker");
    let message = &why.reasons[0].message;
    assert!(message.contains("workers can run http.request, llm.chat, noop, sleep)"), "{message}");
    assert!(message.ends_with("if the operator sets worker.shell = true (FAENA_WORKER_SHELL=true)"), "{message}");
    assert!(!folder.path().join("made").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn output_and_exit_code_are_the_result() {
    let fixture = Fixture::with(allowed()).await;
    let job = fixture.run_to(script("echo out; echo err >&2"), JobState::Completed).await;
    assert_eq!(result(&job), json!({"exitCode": 0, "stdout": "out\n", "stderr": "err\n"}));
    let job = fixture.run_to(script("echo why >&2; exit 7"), JobState::Failed).await;
    assert_eq!(job.error.as_deref(), Some("sh ended with exit code 7: why"));
    let job = fixture.run_to(script("kill -9 $$"), JobState::Failed).await;
    assert_eq!(job.error.as_deref(), Some("sh was killed by signal 9"));
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_are_not_interpreted_by_a_shell() {
    let fixture = Fixture::with(allowed()).await;
    let payload = json!({"argv": ["echo", "$HOME; ls", "*"]});
    let job = fixture.run_to(once("shell.run", payload.to_string()), JobState::Completed).await;
    assert_eq!(result(&job)["stdout"], "$HOME; ls *\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_output_is_truncated_and_the_program_is_not_blocked() {
    let fixture = Fixture::with(EngineConfig { shell_output_bytes: 10, ..allowed() }).await;
    let job = fixture.run_to(script("head -c 1000000 /dev/zero | tr '\\0' x; echo end >&2"), JobState::Completed).await;
    assert_eq!(result(&job), json!({"exitCode": 0, "stdout": "xxxxxxxxxx", "stderr": "end\n", "truncated": true}));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_private_environment_is_not_passed_on() {
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "there is something to leak");
    let fixture = Fixture::with(allowed()).await;
    let payload = json!({"argv": ["env"], "env": {"OWN": "mine"}});
    let job = fixture.run_to(once("shell.run", payload.to_string()), JobState::Completed).await;
    let shown = result(&job)["stdout"].as_str().unwrap().to_owned();
    let mut names: Vec<&str> = shown.lines().map(|line| line.split('=').next().unwrap()).collect();
    names.retain(|name| !["PATH", "HOME", "LANG", "TZ", "TMPDIR"].contains(name));
    names.sort_unstable();
    assert_eq!(names, ["FAENA_CORRELATION_ID", "FAENA_JOB_ID", "FAENA_RUN", "OWN"]);
    assert!(shown.contains(&format!("FAENA_JOB_ID={}\n", job.id)), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_receives_the_trace_context_of_its_job() {
    let fixture = Fixture::with(allowed()).await;
    let mut job = script("printf %s \"$TRACEPARENT\"");
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    job.options.traceparent = Some(trace.into());
    let job = fixture.run_to(job, JobState::Completed).await;
    assert_eq!(result(&job)["stdout"], trace);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_cannot_be_started_is_not_retried() {
    let fixture = Fixture::with(allowed()).await;
    for payload in [
        json!({"argv": []}),
        json!({"argv": "ls"}),
        json!({}),
        json!({"argv": ["no-such-program-anywhere"]}),
        json!({"argv": ["true"], "cwd": "/no/such/folder"}),
        json!({"argv": ["true"], "shell": true}),
        json!({"argv": ["true\u{0}"]}),
    ] {
        let job = fixture.run_to(job("shell.run", payload.to_string()), JobState::Failed).await;
        assert_eq!(job.retry_count, 0, "{payload}: {:?}", job.error);
    }
    fixture.run_to(script("true"), JobState::Completed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_times_out_is_killed_with_its_children() {
    let fixture = Fixture::with(allowed()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut slow = with_child(folder.path());
    slow.options.timeout_ms = Some(1_000);
    let id = fixture.submit(slow).await;
    let process = child(folder.path()).await;
    let job = fixture.wait_for_state(id, JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::Timeout));
    eventually("the child has ended", async || has_ended(&process).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_cancelled_is_killed_with_its_children() {
    let fixture = Fixture::with(allowed()).await;
    let folder = tempfile::tempdir().unwrap();
    let id = fixture.submit(with_child(folder.path())).await;
    let process = child(folder.path()).await;
    fixture.engine.cancel(id, "enough", "test", Timestamp::now()).await.unwrap();
    fixture.wait_for_state(id, JobState::Cancelled).await;
    eventually("the child has ended", async || has_ended(&process).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_leaves_a_child_behind_ends_when_it_exits() {
    let fixture = Fixture::with(allowed()).await;
    let folder = tempfile::tempdir().unwrap();
    // Both children keep the outputs open; one of them has left the process group.
    let text = "sleep 3600 & echo $! >pid; setsid sleep 20 & echo done";
    let payload = json!({"argv": ["sh", "-c", text], "cwd": folder.path()});
    let job = fixture.run_to(once("shell.run", payload.to_string()), JobState::Completed).await;
    assert_eq!(result(&job)["stdout"], "done\n");
    let pid = std::fs::read_to_string(folder.path().join("pid")).unwrap();
    let process = PathBuf::from(format!("/proc/{}", pid.trim()));
    eventually("the child has ended", async || has_ended(&process).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_not_text_is_stored_on_postgres() {
    let fixture = Fixture::over(open_postgres().await, allowed()).await;
    let job = fixture.run_to(script(r"printf 'a\000b\377' >&2; exit 1"), JobState::Failed).await;
    assert!(job.error.as_deref().unwrap().starts_with("sh ended with exit code 1: a"), "{:?}", job.error);
    let job = fixture.run_to(script(r"printf 'a\000b\377'"), JobState::Completed).await;
    assert_eq!(result(&job)["stdout"], Value::from("a\0b\u{fffd}"));
}
