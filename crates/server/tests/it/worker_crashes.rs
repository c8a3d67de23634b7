//! Servers, connections and workers fail under load: every job completes once, and lost workers are detected in time.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use ::faena::{Context, JobError, Worker};
use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    faena::{Faena, command, eventually},
    load::{Random, assert_all_completed_once},
    ports::free_port,
    program::{Program, python},
    proxy::Proxy,
    workers::{Interruption, StreamWorker, TestWorker, WebSocket, WorkerOptions},
};

/// Submits `count` jobs of random duration and returns their ids.
async fn submit_sleepers(faena: &Faena, count: u64, random: &mut Random, (min_ms, max_ms): (u64, u64)) -> Vec<String> {
    let jobs: Vec<Value> = (0..count)
        .map(|_| {
            let ms = min_ms + random.below(max_ms - min_ms);
            json!({"name": "nap", "payload": {"ms": ms}, "maxRetries": 10, "retryDelay": 100})
        })
        .collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

/// Number of starts by job, and number of completed runs.
#[derive(Clone, Default)]
struct RunCounts(Arc<Mutex<(HashMap<String, u32>, usize)>>);

impl RunCounts {
    fn finished(&self) -> usize {
        self.0.lock().unwrap().1
    }

    fn started_twice(&self) -> usize {
        self.0.lock().unwrap().0.values().filter(|count| **count > 1).count()
    }
}

/// SDK workers in the process of the test.
struct SdkWorkers {
    counts: RunCounts,
    stop: CancellationToken,
    work: Vec<tokio::task::JoinHandle<Result<(), ::faena::Error>>>,
}

impl SdkWorkers {
    fn start(url: &str, count: usize) -> SdkWorkers {
        let (counts, stop) = (RunCounts::default(), CancellationToken::new());
        let work = (0..count)
            .map(|number| {
                let counts = counts.clone();
                let worker = Worker::new()
                    .url(url)
                    .name(format!("sdk-{number}"))
                    .concurrency(2)
                    .handle("nap", move |job: Context, payload: Value| nap(counts.clone(), job, payload));
                tokio::spawn(worker.run_until(stop.clone().cancelled_owned()))
            })
            .collect();
        SdkWorkers { counts, stop, work }
    }

    /// Stops all workers and checks that none has failed.
    async fn stop(self) {
        self.stop.cancel();
        for worker in self.work {
            worker.await.unwrap().unwrap();
        }
    }
}

async fn nap(counts: RunCounts, job: Context, payload: Value) -> Result<Value, JobError> {
    *counts.0.lock().unwrap().0.entry(job.id().to_string()).or_default() += 1;
    tokio::select! {
        () = tokio::time::sleep(Duration::from_millis(payload["ms"].as_u64().unwrap())) => {}
        () = job.cancelled() => return Err(JobError::cancelled()),
    }
    counts.0.lock().unwrap().1 += 1;
    Ok(json!({"run": job.run()}))
}

async fn remote_workers(faena: &Faena, states: &str) -> Vec<Value> {
    let (status, list) = faena.get(&format!("/api/v1/workers?limit=1000&state={states}")).await;
    assert_eq!(status, StatusCode::OK, "{list}");
    list["workers"].as_array().unwrap().iter().filter(|worker| worker["kind"] == "remote").cloned().collect()
}

async fn wait_for_workers(faena: &Faena, count: usize) {
    eventually(&format!("{count} workers are connected"), async || {
        let workers = remote_workers(faena, "Ready,Busy").await;
        let connected = workers.iter().filter(|worker| worker["deadline"].is_null()).count();
        (connected == count).then_some(())
    })
    .await;
}

/// Starts a server on a fixed port, so that it has the same address after each restart.
async fn start_at(port: u16, folder: &Path, environment: &[(&str, &str)]) -> Faena {
    let mut shell = Command::new("sh");
    let binary = command(folder).get_program().to_owned();
    // `spawn_with` appends `serve --port 0`; the script ignores its arguments.
    shell.arg("-c").arg(format!("exec {} serve --port {port}", binary.display()));
    shell.current_dir(folder).env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", folder);
    let mut faena = Faena::spawn_with(shell, folder, environment, &[]);
    faena.wait_until_listening().await;
    faena
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_workers_run_each_job_once_although_the_server_is_killed_five_times() {
    const JOBS: u64 = 1_000;
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let environment = [("FAENA_NODE_LEASE", "1s"), ("FAENA_RECONNECT_GRACE", "20s")];
    let mut faena = start_at(port, folder.path(), &environment).await;
    let workers = SdkWorkers::start(&faena.url, 50);
    wait_for_workers(&faena, 50).await;
    let ids = submit_sleepers(&faena, JOBS, &mut Random(7), (20, 300)).await;
    let mut running_at_a_kill = 0;
    for kill in 1..=5 {
        eventually("a part of the jobs is completed", async || (workers.counts.finished() >= kill * 150).then_some(()))
            .await;
        faena.kill();
        let started: u32 = workers.counts.0.lock().unwrap().0.values().sum();
        running_at_a_kill += started as usize - workers.counts.finished();
        faena = start_at(port, folder.path(), &environment).await;
    }
    let jobs = assert_all_completed_once(&faena, &ids.into_iter().collect()).await;
    let retried = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    let twice = workers.counts.started_twice();
    println!(
        "about {running_at_a_kill} jobs ran while the server was killed; {twice} started twice, {retried} retried"
    );
    assert!(running_at_a_kill > 0, "no job was running when a process was killed");
    assert_eq!(twice, 0, "the workers never stopped");
    assert_eq!(retried, 0);
    wait_for_workers(&faena, 50).await;
    workers.stop().await;
    assert!(!faena.log().contains("panicked"));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_behind_a_proxy_that_drops_all_data_are_declared_lost_and_reconnect() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "1500ms"),
        ("FAENA_RECONNECT_GRACE", "300ms"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let proxy = Proxy::start(&faena.url).await;
    let workers = SdkWorkers::start(&proxy.url, 20);
    wait_for_workers(&faena, 20).await;
    let ids = submit_sleepers(&faena, 200, &mut Random(11), (50, 400)).await;
    eventually("a part of the jobs is completed", async || (workers.counts.finished() >= 40).then_some(())).await;
    proxy.drop_all();
    eventually("all workers are declared lost", async || {
        remote_workers(&faena, "Ready,Busy,Draining").await.is_empty().then_some(())
    })
    .await;
    let lost = remote_workers(&faena, "Terminated").await;
    assert_eq!(lost.len(), 20);
    for worker in &lost {
        assert!(worker["reason"].as_str().is_some_and(|reason| reason.contains("no heartbeat for")), "{worker:#}");
    }
    proxy.forward();
    proxy.disconnect_all();
    let jobs = assert_all_completed_once(&faena, &ids.into_iter().collect()).await;
    let orphaned = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    println!("{orphaned} of 200 jobs were orphaned, {} started twice", workers.counts.started_twice());
    assert!(orphaned > 0, "no job was running when the proxy dropped the data");
    wait_for_workers(&faena, 20).await;
    workers.stop().await;
    assert!(!faena.log().contains("panicked"));
}

fn start_python(script: &Path, url: &str) -> Program {
    let mut command = Command::new(python());
    command.arg(script).env("FAENA_URL", url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Program(command.spawn().unwrap())
}

/// Writes a slower copy of the Python worker in examples/.
fn write_slow_worker(folder: &Path) -> PathBuf {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python-http/worker.py");
    let text = fs::read_to_string(example).unwrap();
    let greet = "def greet(job: Job, payload: Json) -> Json:\n";
    assert!(text.contains(greet), "the example has a handler to slow down");
    let slow = text.replace(greet, &format!("{greet}    time.sleep(0.25)\n"));
    let path = folder.join("worker.py");
    fs::write(&path, slow).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_completes_once_although_worker_processes_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "1500ms"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let script = write_slow_worker(folder.path());
    let mut workers: Vec<Program> = (0..5).map(|_| start_python(&script, &faena.url)).collect();
    let jobs: Vec<Value> =
        (0..100).map(|n| json!({"name": "greet", "payload": {"name": n.to_string()}, "maxRetries": 10})).collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let ids = answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    let mut random = Random(3);
    for kill in 1..=8 {
        eventually("a part of the jobs is completed", async || {
            (faena.count("status=COMPLETED").await >= kill * 8).then_some(())
        })
        .await;
        let victim = random.below(5) as usize;
        workers[victim] = start_python(&script, &faena.url);
    }
    let jobs = assert_all_completed_once(&faena, &ids).await;
    for job in &jobs {
        let name = job["payload"]["name"].as_str().unwrap();
        assert_eq!(job["result"], json!({"greeting": format!("Hello, {name}")}), "{job:#}");
    }
    let orphaned = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    println!("8 workers killed, {orphaned} of 100 jobs were in flight when their worker was killed");
    assert!(orphaned > 0, "no job was running when a process was killed");
    assert!(!faena.log().contains("panicked"));
}

/// Returns the time of the last log entry with this event.
fn time_of(job: &Value, event: &str) -> Option<jiff::Timestamp> {
    let log = job["executionLog"].as_array().unwrap();
    let entry = log.iter().rev().find(|entry| entry["event"] == event)?;
    entry["timestamp"].as_str().unwrap().parse().ok()
}

/// Lets a worker receive a job and crash. Returns the job and the time of the crash.
async fn crash_with_a_job(faena: &Faena, number: usize, is_silent: bool) -> (String, jiff::Timestamp) {
    let kind = format!("crash.{number}");
    let mut worker =
        StreamWorker::<WebSocket>::connect(faena, WorkerOptions::new(&format!("crashing-{number}"), &[&kind])).await;
    let id = faena.submit(json!({"name": kind, "maxRetries": 3})).await;
    let job = worker.next_job().await;
    assert_eq!(job.id, id);
    worker.log(&job, "before the crash").await.unwrap();
    let crashed_at = jiff::Timestamp::now();
    if is_silent {
        worker.interrupt(Interruption::Silent).await;
        // Keeps the connection open until the worker is declared lost.
        std::mem::forget(worker);
    } else {
        worker.crash().await;
    }
    (id, crashed_at)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_a_hundred_dead_workers_is_detected_within_its_limit_plus_one_interval() {
    const GRACE_MS: i64 = 300;
    const SILENCE_MS: i64 = 1_500;
    const INTERVAL_MS: i64 = 500;
    /// Allowance for a machine that is busy with other tests.
    const SLACK_MS: i64 = 500;
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("FAENA_WORKER_HEARTBEAT", "400ms"),
        ("FAENA_WORKER_SILENCE", "1500ms"),
        ("FAENA_RECONNECT_GRACE", "300ms"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "500ms"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let mut crashes = Vec::new();
    for group in 0..5 {
        let crashing = (group * 20..group * 20 + 20).map(|number| crash_with_a_job(&faena, number, number % 5 == 0));
        crashes.extend(join_all(crashing).await);
    }
    let mut successor = StreamWorker::<WebSocket>::connect(
        &faena,
        WorkerOptions { concurrency: 200, ..WorkerOptions::new("successor", &["crash.*"]) },
    )
    .await;
    for _ in 0..100 {
        let job = successor.next_job().await;
        assert_eq!(job.retry_count, 1);
        successor.complete(&job, json!(null)).await.unwrap();
    }
    faena.wait_until_all_jobs_end().await;
    let (mut closed, mut silent) = (Vec::new(), Vec::new());
    for (number, (id, crashed_at)) in crashes.iter().enumerate() {
        let job = faena.job(id).await;
        assert_eq!(job["status"], "COMPLETED", "{job:#}");
        let detected = time_of(&job, "orphaned").unwrap_or_else(|| panic!("not orphaned: {job:#}"));
        let detected_ms = detected.duration_since(*crashed_at).as_millis() as i64;
        let (limit_ms, list) = if number % 5 == 0 { (SILENCE_MS, &mut silent) } else { (GRACE_MS, &mut closed) };
        assert!(
            detected_ms <= limit_ms + INTERVAL_MS + SLACK_MS,
            "crash {number} was detected after {detected_ms} ms: {job:#}"
        );
        let reassigned = time_of(&job, "assigned").unwrap().duration_since(detected).as_millis();
        list.push((detected_ms, reassigned));
    }
    for (name, mut list) in [("closed, limit 300 ms", closed), ("silent, limit 1500 ms", silent)] {
        list.sort_unstable();
        let part = |p: usize| list[(list.len() - 1) * p / 100].0;
        println!(
            "{name}: {} crashes, time to detect in ms: median {}, p95 {}, max {}",
            list.len(),
            part(50),
            part(95),
            part(100)
        );
    }
    assert!(!faena.log().contains("panicked"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_blocks_the_only_thread_does_not_stop_the_heartbeats() {
    let folder = tempfile::tempdir().unwrap();
    let short_timeouts =
        [("FAENA_WORKER_HEARTBEAT", "200ms"), ("FAENA_WORKER_SILENCE", "1s"), ("FAENA_RECONNECT_GRACE", "100ms")];
    let faena = Faena::start(folder.path(), &short_timeouts).await;
    let id = faena.submit(json!({"name": "block", "maxRetries": 0})).await;
    let url = faena.url.clone();
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone().cancelled_owned();
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let block = |_: faena::Context, _: Value| async {
            // Longer than the server waits for a heartbeat.
            std::thread::sleep(Duration::from_millis(2_500));
            Ok::<_, faena::JobError>("done")
        };
        runtime.block_on(faena::Worker::new().url(url).handle("block", block).run_until(stopped)).unwrap();
    });
    let done = faena.wait_for_state(&id, "COMPLETED").await;
    assert_eq!((&done["result"], &done["retryCount"]), (&json!("done"), &json!(0)));
    stop.cancel();
    worker.join().unwrap();
}
