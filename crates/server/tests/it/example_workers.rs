//! Runs the workers in examples/ with the commands of their headers.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::json;

use crate::{
    faena::{Faena, events, eventually},
    load::assert_completed_once,
    program::{Program, python},
};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").canonicalize().unwrap()
}

async fn assert_completes_fails_and_stops(program: &str, script: &str, transport: &str) {
    let folder = tempfile::tempdir().unwrap();
    let faena =
        Faena::start(folder.path(), &[("FAENA_WORKER_HEARTBEAT", "500ms"), ("FAENA_WORKER_SILENCE", "3s")]).await;
    let log = folder.path().join("worker.log");
    let out = std::fs::File::create(&log).unwrap();
    let mut command = Command::new(program);
    command.arg(examples().join(script)).env("FAENA_URL", &faena.url).env_remove("FAENA_TOKEN");
    command.stdin(Stdio::null()).stderr(out.try_clone().unwrap()).stdout(out);
    let child = command.spawn().unwrap_or_else(|error| panic!("this test needs {program}: {error}"));
    let mut worker = Program(child);
    let worker_log = || std::fs::read_to_string(&log).unwrap_or_default();

    let good = faena.submit(json!({"name": "greet", "payload": {"name": "Ada \"ñ\" 日本"}})).await;
    let registered = eventually("the worker registers", async || {
        assert!(worker.0.try_wait().unwrap().is_none(), "the worker exited: {}", worker_log());
        let (_, list) = faena.get("/api/v1/workers?state=Ready,Busy").await;
        list["workers"].as_array().unwrap().iter().find(|worker| worker["kind"] == "remote").cloned()
    })
    .await;
    assert_eq!(
        (registered["transport"].as_str(), &registered["capabilities"]),
        (Some(transport), &json!(["greet"])),
        "{registered:#}"
    );
    let done = faena.wait_for_state(&good, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["result"], json!({"greeting": "Hello, Ada \"ñ\" 日本"}));
    assert_eq!(done["workerId"], registered["id"]);
    assert!(events(&done).contains(&"step_completed"), "{done:#}");

    let bad = faena.submit(json!({"name": "greet", "payload": {"name": ""}})).await;
    let failed = faena.wait_for_state(&bad, "FAILED").await;
    assert_eq!(
        (&failed["error"], &failed["errorReason"], &failed["retryCount"]),
        (&json!("the name is empty"), &json!("error"), &json!(0)),
        "{failed:#}"
    );

    let pid = worker.0.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
    let status = eventually("the worker exits", async || worker.0.try_wait().unwrap()).await;
    assert_eq!(status.code(), Some(0), "{}", worker_log());
    let ended = eventually("the worker is terminated", async || {
        let (_, worker) = faena.get(&format!("/api/v1/workers/{}", registered["id"].as_str().unwrap())).await;
        (worker["state"] == "Terminated").then_some(worker)
    })
    .await;
    let reason = ended["reason"].as_str().unwrap_or_default();
    assert!(
        !reason.contains("no heartbeat") && !reason.contains("did not reconnect"),
        "the worker was lost instead of leaving: {ended:#}"
    );
    assert!(!faena.log().contains("panick"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_http_worker_completes_a_job_fails_a_job_and_stops() {
    assert_completes_fails_and_stops(&python(), "python-http/worker.py", "http").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_websocket_worker_completes_a_job_fails_a_job_and_stops() {
    let module = Command::new(python()).args(["-c", "import websockets"]).stderr(Stdio::null()).status();
    assert!(
        module.is_ok_and(|status| status.success()),
        "missing: the Python package websockets; set FAENA_TEST_PYTHON to a Python that has it"
    );
    assert_completes_fails_and_stops(&python(), "python-websockets/worker.py", "websocket").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_worker_completes_a_job_fails_a_job_and_stops() {
    let has_websocket = Command::new("node").args(["-p", "typeof WebSocket"]).output().expect("this test needs node");
    let transport = if has_websocket.stdout.starts_with(b"function") { "websocket" } else { "http" };
    assert_completes_fails_and_stops("node", "node/worker.mjs", transport).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_worker_completes_a_job_fails_a_job_and_stops() {
    assert_completes_fails_and_stops("bash", "shell/worker.sh", "http").await;
}

/// Returns the command of an SDK example. The tests of crates/worker build it.
fn sdk_example(name: &str, faena: &Faena) -> Command {
    let path = Path::new(env!("CARGO_BIN_EXE_faena")).with_file_name("examples").join(name);
    assert!(path.exists(), "missing: {}; build the tests of crates/worker", path.display());
    let mut command = Command::new(path);
    command.env_clear().env("FAENA_URL", &faena.url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdk_email_example_sends_mail_and_rejects_a_bad_address() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let _worker = Program(sdk_example("email", &faena).spawn().unwrap());
    for (to, expected) in [("ada@example.org", "sent as <"), ("nobody", "FAILED: to: not a valid address: \"nobody\"")]
    {
        let output = sdk_example("email", &faena).args(["submit", to]).stdout(Stdio::piped()).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && stdout.contains(expected), "{stdout}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdk_pipeline_example_resumes_at_the_step_where_it_crashed() {
    let folder = tempfile::tempdir().unwrap();
    let short_timeouts = [("FAENA_RECONNECT_GRACE", "200ms"), ("FAENA_ORPHAN_DELAY", "50ms")];
    let faena = Faena::start(folder.path(), &short_timeouts).await;
    let id = faena.submit(json!({"name": "pipeline"})).await;
    let mut crashing =
        Program(sdk_example("pipeline", &faena).env("CRASH_AT", "E5").env("STEP_MS", "5").spawn().unwrap());
    eventually("the worker crashes", async || crashing.0.try_wait().unwrap()).await;
    let orphan = eventually("its job is orphaned", async || {
        let job = faena.job(&id).await;
        (job["retryCount"] == 1).then_some(job)
    })
    .await;
    assert_eq!(
        (&orphan["progress"]["completedSteps"], &orphan["progress"]["totalSteps"], &orphan["errorReason"]),
        (&json!(4), &json!(9), &json!("orphaned")),
        "{orphan:#}"
    );
    let _other = Program(sdk_example("pipeline", &faena).env("STEP_MS", "5").spawn().unwrap());
    let done = faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["result"], json!({"sum": 45, "doneInLastRun": ["E5", "E6", "E7", "E8", "E9"], "retryCount": 1}));
    assert_eq!(done["progress"]["percentage"], json!(100.0));
}
