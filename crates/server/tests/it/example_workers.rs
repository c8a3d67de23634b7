//! Runs the workers in examples/ with the commands in the comments at their beginning.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::json;

use crate::{
    faena::{Faena, events, eventually},
    load::assert_completed_once,
    program::{Program, python},
    proxy::Proxy,
};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").canonicalize().unwrap()
}

/// Starts an example worker. Returns its process and the path of its log.
fn start_worker(command: &[&str], url: &str, folder: &Path) -> (Program, PathBuf) {
    let log = folder.join("worker.log");
    let out = std::fs::File::create(&log).unwrap();
    let [program, arguments @ .., script] = command else { panic!("no program") };
    let mut command = Command::new(program);
    command.args(arguments).arg(examples().join(script)).env("FAENA_URL", url).env_remove("FAENA_TOKEN");
    command.stdin(Stdio::null()).stderr(out.try_clone().unwrap()).stdout(out);
    let child = command.spawn().unwrap_or_else(|error| panic!("this test needs {program}: {error}"));
    (Program(child), log)
}

async fn assert_completes_fails_and_stops(command: &[&str], transport: &str) {
    let folder = tempfile::tempdir().unwrap();
    let faena =
        Faena::start(folder.path(), &[("FAENA_WORKER_HEARTBEAT", "500ms"), ("FAENA_WORKER_SILENCE", "3s")]).await;
    let (mut worker, log) = start_worker(command, &faena.url, folder.path());
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
    assert!(!faena.log().contains("panicked"));
}

/// Restarts the server while the worker runs a job. The worker must keep its id and its job, and report the result once.
async fn assert_survives_restarts(command: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_DRAIN_GRACE", "1ms"), ("FAENA_WORKER_HEARTBEAT", "500ms")];
    let mut faena = Faena::start(folder.path(), &environment).await;
    // The server gets another port at each start; the worker reaches it under one address.
    let proxy = Proxy::start(&faena.url).await;
    let (mut worker, log) = start_worker(command, &proxy.url, folder.path());
    let mut worker_ids = Vec::new();
    for signal in ["TERM", "KILL"] {
        let id =
            faena.submit(json!({"name": "greet", "payload": {"name": "Ada", "seconds": 2}, "maxRetries": 0})).await;
        let first = faena.wait_for_state(&id, "PROCESSING").await;
        faena.signal(signal);
        faena.wait_for_exit().await;
        proxy.disconnect_all();
        faena = Faena::start(folder.path(), &environment).await;
        proxy.retarget(&faena.url);
        let done = faena.wait_for_state(&id, "COMPLETED").await;
        assert_completed_once(&done);
        assert_eq!((&done["run"], &done["workerId"]), (&first["run"], &first["workerId"]), "{done:#}");
        assert_eq!((&done["retryCount"], &done["result"]["greeting"]), (&json!(0), &json!("Hello, Ada")), "{done:#}");
        worker_ids.push(done["workerId"].clone());
    }
    assert_eq!(worker_ids[0], worker_ids[1]);
    // The worker still takes jobs.
    let id = faena.submit(json!({"name": "greet", "payload": {"name": "Ada"}})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(worker.0.try_wait().unwrap().is_none(), "the worker exited: {log}");
}

/// Returns the command of the Node worker with each transport that this version of Node has.
fn node_commands() -> Vec<(Vec<&'static str>, &'static str)> {
    let script = "node/worker.mjs";
    let has_websocket = |flags: &[&str]| {
        let output = Command::new("node").args(flags).args(["-p", "typeof WebSocket"]).output();
        output.expect("this test needs node").stdout.starts_with(b"function")
    };
    if has_websocket(&[]) {
        return vec![(vec!["node", script], "websocket")];
    }
    let mut commands = vec![(vec!["node", script], "http")];
    // Node 20 and 21 have WebSocket behind a flag.
    if has_websocket(&["--experimental-websocket"]) {
        commands.push((vec!["node", "--experimental-websocket", script], "websocket"));
    }
    commands
}

const PYTHON_HTTP: &str = "python-http/worker.py";
const PYTHON_WEBSOCKETS: &str = "python-websockets/worker.py";
const SHELL: &str = "shell/worker.sh";

#[tokio::test(flavor = "multi_thread")]
async fn the_python_http_worker_completes_a_job_fails_a_job_and_stops() {
    assert_completes_fails_and_stops(&[&python(), PYTHON_HTTP], "http").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_websocket_worker_completes_a_job_fails_a_job_and_stops() {
    assert_python_has("websockets");
    assert_completes_fails_and_stops(&[&python(), PYTHON_WEBSOCKETS], "websocket").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_worker_completes_a_job_fails_a_job_and_stops() {
    for (command, transport) in node_commands() {
        assert_completes_fails_and_stops(&command, transport).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_worker_completes_a_job_fails_a_job_and_stops() {
    assert_completes_fails_and_stops(&["bash", SHELL], "http").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_http_worker_keeps_its_job_when_the_server_restarts() {
    assert_survives_restarts(&[&python(), PYTHON_HTTP]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_websocket_worker_keeps_its_job_when_the_server_restarts() {
    assert_survives_restarts(&[&python(), PYTHON_WEBSOCKETS]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_worker_keeps_its_job_when_the_server_restarts() {
    for (command, _) in node_commands() {
        assert_survives_restarts(&command).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_worker_keeps_its_job_when_the_server_restarts() {
    assert_survives_restarts(&["bash", SHELL]).await;
}

fn assert_python_has(module: &str) {
    let found = Command::new(python()).args(["-c", &format!("import {module}")]).stderr(Stdio::null()).status();
    assert!(
        found.is_ok_and(|status| status.success()),
        "missing: the Python package {module}; set FAENA_TEST_PYTHON to a Python that has it"
    );
}

fn assert_passes(check: &mut Command) {
    let output = check.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("this test needs {check:?}: {error}"));
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}");
}

#[test]
fn the_python_workers_pass_the_strict_type_check() {
    assert_python_has("mypy");
    let cache = tempfile::tempdir().unwrap();
    for script in [PYTHON_HTTP, PYTHON_WEBSOCKETS] {
        let mut mypy = Command::new(python());
        mypy.args(["-m", "mypy", "--strict", "--cache-dir"]).arg(cache.path()).arg(examples().join(script));
        assert_passes(&mut mypy);
    }
}

#[test]
fn the_node_worker_passes_the_strict_type_check() {
    let folder =
        std::env::var("FAENA_TEST_TYPESCRIPT").expect("FAENA_TEST_TYPESCRIPT is not set: run this test with ./test");
    let modules = Path::new(&folder).join("node_modules");
    let mut tsc = Command::new("node");
    tsc.arg(modules.join("typescript/bin/tsc")).args([
        "--noEmit",
        "--allowJs",
        "--checkJs",
        "--strict",
        "--target",
        "es2022",
        "--module",
        "nodenext",
    ]);
    tsc.args(["--types", "node", "--typeRoots"]).arg(modules.join("@types"));
    assert_passes(tsc.arg(examples().join("node/worker.mjs")));
}

#[test]
fn the_shell_worker_passes_shellcheck() {
    assert_passes(Command::new("shellcheck").arg("--severity=warning").arg(examples().join(SHELL)));
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
    assert_eq!(done["progress"]["percentage"], json!(100));
}
