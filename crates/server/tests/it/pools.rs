//! `[[pool]]`: worker processes that the server starts, supervises and ends.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, events, eventually, run},
    load::assert_completed_once,
    program::python,
};

/// A worker in plain Python. Its payload decides how it behaves.
const WORKER: &str = r#"
import json, os, signal, subprocess, sys, time, urllib.request

url, me = os.environ["FAENA_URL"] + "/api/v1/workers", os.environ["FAENA_WORKER_ID"]
stopping = False


def call(path, body=None, method="POST"):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-session-token": os.environ["FAENA_SESSION_TOKEN"]}
    request = urllib.request.Request(url + path, data, headers, method=method)
    return json.load(urllib.request.urlopen(request, timeout=30))


def stop(*_):
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)
time.sleep(float(os.environ.get("SLOW_START", "0")))
call("/register", {"workerId": me, "version": "3.1", "sessionToken": os.environ["FAENA_SESSION_TOKEN"],
                   "capabilities": os.environ["FAENA_CAPABILITIES"].split(",")})
while not stopping:
    answer = call(f"/{me}/claim", {"max": 1, "waitMs": 300})
    for job in answer["jobs"]:
        payload, result = job["payload"], {"pid": os.getpid()}
        if payload.get("crash"):
            os._exit(3)
        if payload.get("child"):
            result["child"] = subprocess.Popen(["sleep", "1000"]).pid
        time.sleep(payload.get("ms", 0) / 1000)
        call(f"/{me}/jobs/{job['id']}/complete", {"run": job["run"], "result": result})
        stopping = stopping or os.environ.get("FAENA_EPHEMERAL") == "1"
    stopping = stopping or answer["drain"]
call(f"/{me}", method="DELETE")
"#;

/// A server with a pool of that worker.
struct PoolServer {
    faena: Faena,
    folder: TempDir,
}

impl PoolServer {
    /// Starts a server. Appends `settings` to the section of the pool.
    async fn start(settings: &str) -> PoolServer {
        PoolServer::with_command(&format!(
            "command = [{:?}, \"worker.py\"]
{settings}",
            python()
        ))
        .await
    }

    async fn with_command(section: &str) -> PoolServer {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("worker.py"), WORKER).unwrap();
        let text = format!("[[pool]]\nname = \"workers\"\ncapabilities = [\"work\"]\n{section}\n");
        fs::write(folder.path().join("faena.toml"), text).unwrap();
        let environment = [("FAENA_ORPHAN_DELAY", "0ms"), ("FAENA_DRAIN_GRACE", "5s")];
        PoolServer { faena: Faena::start(folder.path(), &environment).await, folder }
    }

    async fn workers(&self, states: &str) -> Vec<Value> {
        let (_, list) = self.faena.get(&format!("/api/v1/workers?limit=1000&state={states}")).await;
        list["workers"].as_array().unwrap().iter().filter(|worker| worker["pool"] == "workers").cloned().collect()
    }

    async fn wait_for_workers(&self, states: &str, count: usize) {
        eventually(&format!("{count} workers are {states}"), async || {
            (self.workers(states).await.len() == count).then_some(())
        })
        .await;
    }

    async fn submit(&self, payload: Value) -> String {
        self.faena.submit(json!({"name": "work", "payload": payload, "retryDelay": 100})).await
    }

    /// Waits until the job completes and returns its result.
    async fn result(&self, id: &str) -> Value {
        let done = self.faena.wait_for_state(id, "COMPLETED").await;
        assert_completed_once(&done);
        done["result"].clone()
    }
}

const ALIVE_STATES: &str = "Creating,Connecting,Ready,Busy,Draining,Terminating";

/// Returns whether this process runs. A zombie does not.
fn is_running(pid: u64) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
    !matches!(state, Some('Z' | 'X'))
}

async fn wait_until_ended(pids: &[u64]) {
    eventually(&format!("{pids:?} have ended"), async || (!pids.iter().any(|pid| is_running(*pid))).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_grows_while_jobs_wait_and_shrinks_when_they_are_done() {
    let server = PoolServer::start("min = 1\nmax = 3\nidle = \"1s\"").await;
    server.wait_for_workers("Ready", 1).await;
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(server.submit(json!({"ms": 700})).await);
    }
    server.wait_for_workers("Busy", 3).await;
    let workers = server.workers(ALIVE_STATES).await;
    assert_eq!(workers.len(), 3, "more than max");
    assert!(workers.iter().all(|worker| worker["version"] == "3.1"), "{workers:?}");
    let mut pids = BTreeSet::new();
    for id in &ids {
        pids.insert(server.result(id).await["pid"].as_u64().unwrap());
    }
    assert_eq!(pids.len(), 3, "three processes share the jobs");
    server.wait_for_workers(ALIVE_STATES, 1).await;
    eventually("one process is left", async || {
        (pids.iter().filter(|pid| is_running(**pid)).count() == 1).then_some(())
    })
    .await;
    for worker in server.workers("Terminated").await {
        assert_ne!(worker["reason"], "lost", "{worker:#}");
    }
    // The remaining process still runs jobs.
    let id = server.submit(json!({})).await;
    server.result(&id).await;
    assert!(!server.faena.log().contains("panicked"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_process_uses_an_attempt_of_its_job_and_is_replaced() {
    let server = PoolServer::start("").await;
    let first = server.submit(json!({})).await;
    let first = server.result(&first).await["pid"].as_u64().unwrap();
    let crashing = server
        .faena
        .submit(json!({"name": "work", "payload": {"crash": true}, "maxRetries": 1, "retryDelay": 100}))
        .await;
    let failed = server.faena.wait_for_state(&crashing, "FAILED").await;
    assert_eq!((&failed["errorReason"], &failed["retryCount"]), (&json!("orphaned"), &json!(1)), "{failed:#}");
    assert_eq!(events(&failed).iter().filter(|event| **event == "orphaned").count(), 2, "{failed:#}");
    assert!(failed["error"].as_str().unwrap().contains("process ended with exit code 3"), "{failed:#}");
    let next = server.submit(json!({})).await;
    let next = server.result(&next).await["pid"].as_u64().unwrap();
    assert_ne!(first, next);
    server.wait_for_workers(ALIVE_STATES, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_fails_at_startup_is_restarted_with_growing_delays() {
    assert_restarted_with_growing_delays(7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_ends_at_once_without_an_error_is_restarted_with_growing_delays() {
    assert_restarted_with_growing_delays(0).await;
}

async fn assert_restarted_with_growing_delays(code: u8) {
    let command = format!(r#"command = ["sh", "-c", "echo start >>starts; exit {code}"]"#);
    let server = PoolServer::with_command(&command).await;
    let log = eventually("five failures are logged, and the pool keeps failing", async || {
        Some(server.faena.log()).filter(|log| log.contains("ERROR pool processes keep failing"))
    })
    .await;
    let failures: Vec<&str> = log.lines().filter(|line| line.contains("pool process failed to start")).collect();
    let delays: Vec<u64> = failures
        .iter()
        .map(|line| line.split("retry_in=").nth(1).unwrap().trim_end_matches('s').parse().unwrap())
        .collect();
    assert_eq!(delays, [1, 2, 4, 8, 16]);
    let exit_code = format!("exit_code={code}");
    assert!(failures.iter().all(|line| line.contains("WARN") && line.contains(&exit_code)), "{log}");
    let reasons: Vec<Value> =
        server.workers("Terminated").await.iter().map(|worker| worker["reason"].clone()).collect();
    let reason =
        reasons.iter().find(|reason| reason.as_str().is_some_and(|text| text.contains("next one starts in 16s")));
    assert!(reason.is_some(), "{reasons:?}");
    assert!(!log.contains("worker lost"), "one line per failure: {log}");
    let starts = fs::read_to_string(server.folder.path().join("starts")).unwrap().lines().count();
    assert!(starts <= delays.len() + 1, "{starts} starts, {delays:?}");
    // The server still runs jobs.
    let id = server.faena.submit(json!({"name": "noop"})).await;
    server.faena.wait_for_state(&id, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_output_of_a_process_becomes_events_of_the_log() {
    let script = r"printf 'one\n\033[31mred\r\n'; printf 'no newline' >&2; exit 3";
    let folder = tempfile::tempdir().unwrap();
    let command = json!(["sh", "-c", script]);
    let text = format!("[[pool]]\nname = \"talkers\"\ncapabilities = [\"work\"]\ncommand = {command}\n");
    fs::write(folder.path().join("faena.toml"), text).unwrap();
    let mut faena = Faena::spawn(folder.path(), &[("FAENA_LOG_FORMAT", "json"), ("FAENA_DRAIN_GRACE", "1ms")]);
    eventually("the lines are logged", async || faena.log().contains("failed to start").then_some(())).await;
    faena.signal("TERM");
    faena.wait_for_exit().await;
    let events: Vec<Value> = faena.log().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let output =
        events.iter().map(|event| &event["fields"]).filter(|fields| fields["message"] == "pool process output");
    let mut lines: Vec<(&str, &str)> = output
        .map(|fields| {
            assert!(fields["pool"] == "talkers" && fields["worker"].is_string(), "{fields}");
            (fields["stream"].as_str().unwrap(), fields["line"].as_str().unwrap())
        })
        .collect();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines, [("stderr", "no newline"), ("stdout", "\\u{1b}[31mred"), ("stdout", "one")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_does_not_exist_is_named_in_the_log() {
    let server = PoolServer::with_command(r#"command = ["/no/such/program"]"#).await;
    eventually("the failed start is logged", async || {
        server.faena.log().contains("error=\"/no/such/program: No such file").then_some(())
    })
    .await;
    eventually("the failed start is counted", async || {
        server.faena.log().contains("pool process failed to start").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_pool_starts_one_process_per_job_and_shows_the_job_as_scheduled_meanwhile() {
    let server = PoolServer::start("ephemeral = true\nmax = 4\nenv = { SLOW_START = \"1\" }").await;
    let ids = [server.submit(json!({})).await, server.submit(json!({})).await];
    for id in &ids {
        server.faena.wait_for_state(id, "SCHEDULED").await;
    }
    let mut pids = BTreeSet::new();
    for id in &ids {
        pids.insert(server.result(id).await["pid"].as_u64().unwrap());
        let job = server.faena.job(id).await;
        assert_eq!(job["retryCount"], 0, "{job:#}");
        assert!(events(&job).contains(&"assigned"), "{job:#}");
        let worker = job["workerId"].as_str().unwrap();
        let ended = eventually("its worker has ended", async || {
            let (_, worker) = server.faena.get(&format!("/api/v1/workers/{worker}")).await;
            (worker["state"] == "Terminated").then_some(worker)
        })
        .await;
        let states: Vec<&str> =
            ended["history"].as_array().unwrap().iter().map(|change| change["state"].as_str().unwrap()).collect();
        assert_eq!(states[..4], ["Creating", "Connecting", "Ready", "Busy"], "{ended:#}");
        assert_eq!(states.iter().filter(|state| **state == "Busy").count(), 1, "more than one job: {ended:#}");
        assert_eq!(ended["completed"], 1, "{ended:#}");
    }
    assert_eq!(pids.len(), 2, "one process per job");
    assert!(!server.faena.log().contains("resumed=true"), "a worker reconnected: {}", server.faena.log());
    wait_until_ended(&Vec::from_iter(pids)).await;
}

/// Waits for two processes and lets one start a child. Returns the pids of all three.
async fn start_busy_processes(server: &PoolServer) -> Vec<u64> {
    server.wait_for_workers("Ready", 2).await;
    let id = server.submit(json!({"child": true})).await;
    let result = server.result(&id).await;
    let mut pids = vec![result["pid"].as_u64().unwrap(), result["child"].as_u64().unwrap()];
    // All processes that were started with the address of this server.
    let variable_of_server = format!("FAENA_URL={}", server.faena.url);
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u64>() else { continue };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|variable| variable == variable_of_server.as_bytes()) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    pids.dedup();
    assert!(pids.len() >= 3, "two processes and a child: {pids:?}");
    assert!(pids.iter().all(|pid| is_running(*pid)));
    pids
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_server_is_killed_its_processes_and_their_children_end_too() {
    let mut server = PoolServer::start("min = 2\nmax = 2").await;
    let pids = start_busy_processes(&server).await;
    server.faena.kill();
    let killed_at = std::time::Instant::now();
    wait_until_ended(&pids).await;
    assert!(killed_at.elapsed().as_secs() < 5, "it took {:?}", killed_at.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_server_receives_sigterm_its_processes_finish_their_jobs_and_end() {
    let mut server = PoolServer::start("min = 2\nmax = 2").await;
    let pids = start_busy_processes(&server).await;
    let id = server.submit(json!({"ms": 500})).await;
    server.faena.wait_for_state(&id, "PROCESSING").await;
    server.faena.signal("TERM");
    assert_eq!(server.faena.wait_for_exit().await.code(), Some(0));
    wait_until_ended(&pids).await;
    fs::remove_file(server.folder.path().join("faena.toml")).unwrap();
    let restarted = Faena::start(server.folder.path(), &[]).await;
    let job = restarted.job(&id).await;
    assert_eq!((&job["status"], &job["retryCount"]), (&json!("COMPLETED"), &json!(0)), "{job:#}");
}

#[test]
fn an_invalid_pool_section_is_rejected_with_one_line() {
    let valid = "name = \"workers\"\ncommand = [\"true\"]\ncapabilities = [\"work\"]\n";
    for (text, part) in [
        (format!("[pool]\n{valid}"), "[[pool]]"),
        ("[[pool]]\nname = \"workers\"\n".to_owned(), "command"),
        (format!("[[pool]]\n{valid}colour = \"red\"\n"), "colour"),
        (format!("[[pool]]\n{valid}min = 3\nmax = 2\n"), "min"),
        (format!("[[pool]]\n{valid}max = 0\n"), "max"),
        (format!("[[pool]]\n{valid}idle = \"soon\"\n"), "idle"),
        (format!("[[pool]]\n{valid}concurrency = 0\n"), "concurrency"),
        (format!("[[pool]]\n{valid}ephemeral = true\nmin = 1\n"), "min"),
        (format!("[[pool]]\n{valid}[[pool]]\n{valid}"), "duplicate pool name"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("faena.toml"), &text).unwrap();
        let output = run(folder.path(), &[], &["serve", "--port", "0"]);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}: {stderr}");
        assert!(
            stderr.lines().count() == 1 && stderr.contains(part) && stderr.contains("faena.toml"),
            "{text}: {stderr}"
        );
        assert!(!Path::new(&folder.path().join("faena-data")).exists(), "a folder was created");
    }
}
