//! `[[pool]]`: processes that the server starts, watches, and takes with it when it goes.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, events, eventually, run},
    load::assert_completed_once,
};

/// A worker of the Python standard library that does what the payload says.
const WORKER: &str = r#"
import json, os, signal, subprocess, sys, time, urllib.request

url, me = os.environ["FAENA_URL"] + "/api/v1/workers", os.environ["FAENA_WORKER_ID"]
stopping = False


def call(path, body=None, method="POST"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    return json.load(urllib.request.urlopen(request, timeout=30))


def stop(*_):
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)
time.sleep(float(os.environ.get("SLOW_START", "0")))
call("/register", {"workerId": me, "capabilities": os.environ["FAENA_CAPABILITIES"].split(",")})
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

/// A server with one pool of that worker; `more` goes into its section.
struct Stage {
    faena: Faena,
    folder: TempDir,
}

impl Stage {
    async fn open(more: &str) -> Stage {
        let python = std::env::var("FAENA_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        Stage::with_command(&format!("command = [{python:?}, \"worker.py\"]\n{more}")).await
    }

    async fn with_command(section: &str) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("worker.py"), WORKER).unwrap();
        let text = format!("[[pool]]\nname = \"crew\"\ncapabilities = [\"work\"]\n{section}\n");
        fs::write(folder.path().join("faena.toml"), text).unwrap();
        let environment = [("FAENA_ORPHAN_DELAY", "0ms"), ("FAENA_DRAIN_GRACE", "5s")];
        Stage { faena: Faena::start(folder.path(), &environment).await, folder }
    }

    async fn members(&self, states: &str) -> Vec<Value> {
        let (_, list) = self.faena.get(&format!("/api/v1/workers?limit=1000&state={states}")).await;
        list["workers"].as_array().unwrap().iter().filter(|worker| worker["pool"] == "crew").cloned().collect()
    }

    async fn has_members(&self, states: &str, count: usize) {
        eventually(&format!("{count} are {states}"), async || {
            (self.members(states).await.len() == count).then_some(())
        })
        .await;
    }

    async fn work(&self, payload: Value) -> String {
        self.faena.submit(json!({"name": "work", "payload": payload, "retryDelay": 100})).await
    }

    /// Waits for the job and answers with what its worker told.
    async fn result(&self, id: &str) -> Value {
        let done = self.faena.job_is(id, "COMPLETED").await;
        assert_completed_once(&done);
        done["result"].clone()
    }
}

const ALIVE: &str = "Creating,Connecting,Ready,Busy,Draining,Terminating";

/// Whether this process runs. One that is dead and not buried does not.
fn runs(pid: u64) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
    !matches!(state, Some('Z' | 'X'))
}

async fn all_gone(pids: &[u64]) {
    eventually(&format!("{pids:?} are gone"), async || (!pids.iter().any(|pid| runs(*pid))).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_grows_while_jobs_wait_and_shrinks_when_they_are_done() {
    let stage = Stage::open("min = 1\nmax = 3\nidle = \"1s\"").await;
    stage.has_members("Ready", 1).await;
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(stage.work(json!({"ms": 700})).await);
    }
    stage.has_members("Busy", 3).await;
    assert_eq!(stage.members(ALIVE).await.len(), 3, "never more than max");
    let mut pids = BTreeSet::new();
    for id in &ids {
        pids.insert(stage.result(id).await["pid"].as_u64().unwrap());
    }
    assert_eq!(pids.len(), 3, "three processes have shared the work");
    stage.has_members(ALIVE, 1).await;
    eventually("one process is left", async || (pids.iter().filter(|pid| runs(**pid)).count() == 1).then_some(()))
        .await;
    for worker in stage.members("Terminated").await {
        assert_ne!(worker["reason"], "lost", "{worker:#}");
    }
    // What was let go costs nothing: there is still somebody to work.
    let id = stage.work(json!({})).await;
    stage.result(&id).await;
    assert!(!stage.faena.log().contains("panick"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_crashes_costs_its_job_a_try_and_is_replaced() {
    let stage = Stage::open("").await;
    let first = stage.work(json!({})).await;
    let first = stage.result(&first).await["pid"].as_u64().unwrap();
    let doomed = stage
        .faena
        .submit(json!({"name": "work", "payload": {"crash": true}, "maxRetries": 1, "retryDelay": 100}))
        .await;
    let failed = stage.faena.job_is(&doomed, "FAILED").await;
    assert_eq!((&failed["errorReason"], &failed["retryCount"]), (&json!("orphaned"), &json!(1)), "{failed:#}");
    assert_eq!(events(&failed).iter().filter(|event| **event == "orphaned").count(), 2, "{failed:#}");
    assert!(failed["error"].as_str().unwrap().contains("its process ended"), "{failed:#}");
    let next = stage.work(json!({})).await;
    let next = stage.result(&next).await["pid"].as_u64().unwrap();
    assert_ne!(first, next);
    stage.has_members(ALIVE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_crashes_at_its_start_is_started_again_later_and_later() {
    let stage = Stage::with_command(r#"command = ["sh", "-c", "echo start >>starts; exit 7"]"#).await;
    let told = |log: &str| log.lines().filter(|line| line.contains("a process ended at its start")).count();
    eventually("it is said three times", async || (told(&stage.faena.log()) >= 3).then_some(())).await;
    let log = stage.faena.log();
    let delays: Vec<u64> = log
        .lines()
        .filter(|line| line.contains("a process ended at its start"))
        .map(|line| line.split("started in ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(delays.is_sorted_by(|a, b| a < b), "{delays:?}");
    assert!(log.contains("7"), "how it ended is said: {log}");
    let starts = fs::read_to_string(stage.folder.path().join("starts")).unwrap().lines().count();
    assert!(starts <= delays.len() + 1, "{starts} starts, {delays:?}");
    // The server is none the worse for it.
    let id = stage.faena.submit(json!({"name": "noop"})).await;
    stage.faena.job_is(&id, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_does_not_exist_is_named_in_the_log() {
    let stage = Stage::with_command(r#"command = ["/no/such/program"]"#).await;
    eventually("it is said", async || stage.faena.log().contains("cannot start /no/such/program").then_some(())).await;
    eventually("it is counted", async || stage.faena.log().contains("a process ended at its start").then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_pool_starts_a_process_for_each_job_which_is_scheduled_meanwhile() {
    let stage = Stage::open("ephemeral = true\nmax = 4\nenv = { SLOW_START = \"1\" }").await;
    let ids = [stage.work(json!({})).await, stage.work(json!({})).await];
    for id in &ids {
        stage.faena.job_is(id, "SCHEDULED").await;
    }
    let mut pids = BTreeSet::new();
    for id in &ids {
        pids.insert(stage.result(id).await["pid"].as_u64().unwrap());
        let job = stage.faena.job(id).await;
        assert_eq!(job["retryCount"], 0, "{job:#}");
        assert!(events(&job).contains(&"assigned"), "{job:#}");
        let worker = job["workerId"].as_str().unwrap();
        let ended = eventually("its worker has ended", async || {
            let (_, worker) = stage.faena.get(&format!("/api/v1/workers/{worker}")).await;
            (worker["state"] == "Terminated").then_some(worker)
        })
        .await;
        let states: Vec<&str> =
            ended["history"].as_array().unwrap().iter().map(|change| change["state"].as_str().unwrap()).collect();
        assert_eq!(states[..4], ["Creating", "Connecting", "Ready", "Busy"], "{ended:#}");
        assert_eq!(states.iter().filter(|state| **state == "Busy").count(), 1, "one job only: {ended:#}");
        assert_eq!(ended["completed"], 1, "{ended:#}");
    }
    assert_eq!(pids.len(), 2, "one process per job");
    assert!(!stage.faena.log().contains("a worker is back"), "each has come once: {}", stage.faena.log());
    all_gone(&Vec::from_iter(pids)).await;
}

/// Two processes at work, one of them with a child of its own. Answers with the pids of all.
async fn busy_family(stage: &Stage) -> Vec<u64> {
    stage.has_members("Ready", 2).await;
    let id = stage.work(json!({"child": true})).await;
    let result = stage.result(&id).await;
    let mut pids = vec![result["pid"].as_u64().unwrap(), result["child"].as_u64().unwrap()];
    // Everybody who was started under this server's address.
    let mark = format!("FAENA_URL={}", stage.faena.url);
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u64>() else { continue };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    pids.dedup();
    assert!(pids.len() >= 3, "two processes and a child: {pids:?}");
    assert!(pids.iter().all(|pid| runs(*pid)));
    pids
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_server_is_killed_its_processes_and_their_children_are_gone_too() {
    let mut stage = Stage::open("min = 2\nmax = 2").await;
    let pids = busy_family(&stage).await;
    stage.faena.kill();
    let began = std::time::Instant::now();
    all_gone(&pids).await;
    assert!(began.elapsed().as_secs() < 5, "it took {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_server_is_told_to_stop_its_processes_finish_their_jobs_and_end() {
    let mut stage = Stage::open("min = 2\nmax = 2").await;
    let pids = busy_family(&stage).await;
    let id = stage.work(json!({"ms": 500})).await;
    stage.faena.job_is(&id, "PROCESSING").await;
    stage.faena.signal("TERM");
    assert_eq!(stage.faena.ended().await.code(), Some(0));
    all_gone(&pids).await;
    fs::remove_file(stage.folder.path().join("faena.toml")).unwrap();
    let again = Faena::start(stage.folder.path(), &[]).await;
    let job = again.job(&id).await;
    assert_eq!((&job["status"], &job["retryCount"]), (&json!("COMPLETED"), &json!(0)), "{job:#}");
}

#[test]
fn a_section_that_makes_no_sense_is_refused_in_one_line() {
    let good = "name = \"crew\"\ncommand = [\"true\"]\ncapabilities = [\"work\"]\n";
    for (text, part) in [
        (format!("[pool]\n{good}"), "[[pool]]"),
        ("[[pool]]\nname = \"crew\"\n".to_owned(), "command"),
        (format!("[[pool]]\n{good}colour = \"red\"\n"), "colour"),
        (format!("[[pool]]\n{good}min = 3\nmax = 2\n"), "min"),
        (format!("[[pool]]\n{good}max = 0\n"), "max"),
        (format!("[[pool]]\n{good}idle = \"soon\"\n"), "idle"),
        (format!("[[pool]]\n{good}concurrency = 0\n"), "concurrency"),
        (format!("[[pool]]\n{good}ephemeral = true\nmin = 1\n"), "min"),
        (format!("[[pool]]\n{good}[[pool]]\n{good}"), "another pool"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("faena.toml"), &text).unwrap();
        let output = run(folder.path(), &[], &["serve", "--port", "0"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}: {said}");
        assert!(said.lines().count() == 1 && said.contains(part) && said.contains("faena.toml"), "{text}: {said}");
        assert!(!Path::new(&folder.path().join("faena-data")).exists(), "nothing was touched");
    }
}
