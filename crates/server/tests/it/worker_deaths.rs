//! Servers, lines and workers that die under load: every job is done, counts once, and is found again in time.

use std::{
    collections::HashMap,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
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
    hands::{Away, Frames, Hand, WebSocket, Who, who},
    line::Line,
    load::{Random, assert_all_completed_once},
};

/// InFlight in `count` jobs that take a random time, and answers with their ids.
async fn submit_sleepers(
    faena: &Faena,
    count: u64,
    random: &mut Random,
    (least_ms, most_ms): (u64, u64),
) -> Vec<String> {
    let jobs: Vec<Value> = (0..count)
        .map(|_| {
            let ms = least_ms + random.below(most_ms - least_ms);
            json!({"name": "doze", "payload": {"ms": ms}, "maxRetries": 10, "retryDelay": 100})
        })
        .collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

/// How often each job was begun, and how many have been finished.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<(HashMap<String, u32>, usize)>>);

impl Diary {
    fn finished(&self) -> usize {
        self.0.lock().unwrap().1
    }

    fn begun_twice(&self) -> usize {
        self.0.lock().unwrap().0.values().filter(|count| **count > 1).count()
    }
}

/// Workers of the SDK in this process.
struct Crew {
    diary: Diary,
    stop: CancellationToken,
    work: Vec<tokio::task::JoinHandle<Result<(), ::faena::Error>>>,
}

impl Crew {
    fn start(url: &str, count: usize) -> Crew {
        let (diary, stop) = (Diary::default(), CancellationToken::new());
        let work = (0..count)
            .map(|number| {
                let diary = diary.clone();
                let worker = Worker::new()
                    .url(url)
                    .name(format!("crew-{number}"))
                    .concurrency(2)
                    .handle("doze", move |job: Context, payload: Value| doze(diary.clone(), job, payload));
                tokio::spawn(worker.run_until(stop.clone().cancelled_owned()))
            })
            .collect();
        Crew { diary, stop, work }
    }

    /// They say goodbye, and none of them had given up.
    async fn dismiss(self) {
        self.stop.cancel();
        for worker in self.work {
            worker.await.unwrap().unwrap();
        }
    }
}

async fn doze(diary: Diary, job: Context, payload: Value) -> Result<Value, JobError> {
    *diary.0.lock().unwrap().0.entry(job.id().to_string()).or_default() += 1;
    tokio::select! {
        () = tokio::time::sleep(Duration::from_millis(payload["ms"].as_u64().unwrap())) => {}
        () = job.cancelled() => return Err(JobError::cancelled()),
    }
    diary.0.lock().unwrap().1 += 1;
    Ok(json!({"run": job.run()}))
}

async fn remote_workers(faena: &Faena, states: &str) -> Vec<Value> {
    let (status, list) = faena.get(&format!("/api/v1/workers?limit=1000&state={states}")).await;
    assert_eq!(status, StatusCode::OK, "{list}");
    list["workers"].as_array().unwrap().iter().filter(|worker| worker["kind"] == "remote").cloned().collect()
}

async fn workers_are_there(faena: &Faena, count: usize) {
    eventually(&format!("{count} workers are connected"), async || {
        let workers = remote_workers(faena, "Ready,Busy").await;
        let there = workers.iter().filter(|worker| worker["deadline"].is_null()).count();
        (there == count).then_some(())
    })
    .await;
}

/// A server that is found under the same address after each restart.
async fn start_at(port: u16, folder: &Path, environment: &[(&str, &str)]) -> Faena {
    let mut shell = Command::new("sh");
    let binary = command(folder).get_program().to_owned();
    // What is added behind (`serve --port 0`) are the arguments of the script, which does not look at them.
    shell.arg("-c").arg(format!("exec {} serve --port {port}", binary.display()));
    shell.current_dir(folder).env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", folder);
    let mut faena = Faena::spawn_with(shell, folder, environment, &[]);
    faena.listening().await;
    faena
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_busy_workers_outlive_a_server_that_is_killed_five_times_and_do_each_job_once() {
    const JOBS: u64 = 1_000;
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let environment = [("FAENA_NODE_LEASE", "1s"), ("FAENA_RECONNECT_GRACE", "20s")];
    let mut faena = start_at(port, folder.path(), &environment).await;
    let crew = Crew::start(&faena.url, 50);
    workers_are_there(&faena, 50).await;
    let ids = submit_sleepers(&faena, JOBS, &mut Random(7), (20, 300)).await;
    let mut running_at_a_kill = 0;
    for kill in 1..=5 {
        eventually("a part is done", async || (crew.diary.finished() >= kill * 150).then_some(())).await;
        faena.kill();
        let begun: u32 = crew.diary.0.lock().unwrap().0.values().sum();
        running_at_a_kill += begun as usize - crew.diary.finished();
        faena = start_at(port, folder.path(), &environment).await;
    }
    let jobs = assert_all_completed_once(&faena, &ids.into_iter().collect()).await;
    let retried = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    let twice = crew.diary.begun_twice();
    println!(
        "about {running_at_a_kill} jobs ran while the server was killed; {twice} begun twice, {retried} cost a try"
    );
    assert!(running_at_a_kill > 0, "no kill has met a job");
    assert_eq!(twice, 0, "their workers were alive all the time");
    assert_eq!(retried, 0);
    workers_are_there(&faena, 50).await;
    crew.dismiss().await;
    assert!(!faena.log().contains("panick"));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_behind_a_line_that_swallows_everything_are_found_lost_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "1500ms"),
        ("FAENA_RECONNECT_GRACE", "300ms"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let line = Line::to(&faena.url).await;
    let crew = Crew::start(&line.url, 20);
    workers_are_there(&faena, 20).await;
    let ids = submit_sleepers(&faena, 200, &mut Random(11), (50, 400)).await;
    eventually("a part is done", async || (crew.diary.finished() >= 40).then_some(())).await;
    line.swallow();
    eventually("all are taken for lost", async || {
        remote_workers(&faena, "Ready,Busy,Draining").await.is_empty().then_some(())
    })
    .await;
    let lost = remote_workers(&faena, "Terminated").await;
    assert_eq!(lost.len(), 20);
    for worker in &lost {
        assert!(worker["reason"].as_str().is_some_and(|reason| reason.contains("nothing was heard")), "{worker:#}");
    }
    line.open();
    line.cut();
    let jobs = assert_all_completed_once(&faena, &ids.into_iter().collect()).await;
    let orphaned = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    println!("{orphaned} of 200 jobs were orphaned, {} begun twice", crew.diary.begun_twice());
    assert!(orphaned > 0, "nothing ran when the line went dead");
    workers_are_there(&faena, 20).await;
    crew.dismiss().await;
    assert!(!faena.log().contains("panick"));
}

/// A process that is killed when the test is over.
struct Program(Child);

impl Program {
    fn python(script: &Path, url: &str) -> Program {
        let python = std::env::var("FAENA_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let mut command = Command::new(python);
        command.arg(script).env("FAENA_URL", url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Program(command.spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The worker of examples/, with a greeting that takes its time.
fn slow_greeter(folder: &Path) -> PathBuf {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python-http/worker.py");
    let text = fs::read_to_string(example).unwrap();
    let slow = text.replace("def greet(job, payload):\n", "def greet(job, payload):\n    time.sleep(0.25)\n");
    assert_ne!(text, slow);
    let path = folder.join("worker.py");
    fs::write(&path, slow).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_processes_are_killed_under_load_and_every_job_is_done_once() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "1500ms"),
        ("FAENA_ORPHAN_DELAY", "0ms"),
        ("FAENA_GUARDIAN_INTERVAL", "300ms"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let script = slow_greeter(folder.path());
    let mut crew: Vec<Program> = (0..5).map(|_| Program::python(&script, &faena.url)).collect();
    let jobs: Vec<Value> =
        (0..100).map(|n| json!({"name": "greet", "payload": {"name": n.to_string()}, "maxRetries": 10})).collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let ids = answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    let mut random = Random(3);
    for kill in 1..=8 {
        eventually("a part is done", async || (faena.count("status=COMPLETED").await >= kill * 8).then_some(())).await;
        let victim = random.below(5) as usize;
        crew[victim] = Program::python(&script, &faena.url);
    }
    let jobs = assert_all_completed_once(&faena, &ids).await;
    for job in &jobs {
        let name = job["payload"]["name"].as_str().unwrap();
        assert_eq!(job["result"], json!({"greeting": format!("Hello, {name}")}), "{job:#}");
    }
    let orphaned = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    println!("8 workers killed, {orphaned} of 100 jobs were in their hands");
    assert!(orphaned > 0, "no kill has met a job");
    assert!(!faena.log().contains("panick"));
}

fn at(job: &Value, event: &str) -> Option<jiff::Timestamp> {
    let log = job["executionLog"].as_array().unwrap();
    let entry = log.iter().rev().find(|entry| entry["event"] == event)?;
    entry["timestamp"].as_str().unwrap().parse().ok()
}

/// One worker that takes its job and dies. Answers with the job, and when it died.
async fn takes_a_job_and_dies(faena: &Faena, number: usize, silently: bool) -> (String, jiff::Timestamp) {
    let kind = format!("death.{number}");
    let mut hand = Frames::<WebSocket>::connect(faena, who(&format!("doomed-{number}"), &[&kind])).await;
    let id = faena.submit(json!({"name": kind, "maxRetries": 3})).await;
    let job = hand.next_job().await;
    assert_eq!(job.id, id);
    hand.log(&job, "before the end").await.unwrap();
    let died_at = jiff::Timestamp::now();
    if silently {
        hand.away(Away::Silent).await;
        // Its connection stays open until it is taken for lost.
        std::mem::forget(hand);
    } else {
        hand.cut().await;
    }
    (id, died_at)
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_deaths_each_is_found_within_its_limit_and_one_interval() {
    const GRACE_MS: i64 = 300;
    const SILENCE_MS: i64 = 1_500;
    const INTERVAL_MS: i64 = 500;
    /// For a machine that is busy with other tests.
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
    let mut deaths = Vec::new();
    for group in 0..5 {
        let dying = (group * 20..group * 20 + 20).map(|number| takes_a_job_and_dies(&faena, number, number % 5 == 0));
        deaths.extend(join_all(dying).await);
    }
    let mut catcher =
        Frames::<WebSocket>::connect(&faena, Who { concurrency: 200, ..who("catcher", &["death.*"]) }).await;
    for _ in 0..100 {
        let job = catcher.next_job().await;
        assert_eq!(job.retry_count, 1);
        catcher.complete(&job, json!(null)).await.unwrap();
    }
    faena.everything_ended().await;
    let (mut closed, mut silent) = (Vec::new(), Vec::new());
    for (number, (id, died_at)) in deaths.iter().enumerate() {
        let job = faena.job(id).await;
        assert_eq!(job["status"], "COMPLETED", "{job:#}");
        let found = at(&job, "orphaned").unwrap_or_else(|| panic!("not orphaned: {job:#}"));
        let found_ms = found.duration_since(*died_at).as_millis() as i64;
        let (limit_ms, list) = if number % 5 == 0 { (SILENCE_MS, &mut silent) } else { (GRACE_MS, &mut closed) };
        assert!(found_ms <= limit_ms + INTERVAL_MS + SLACK_MS, "death {number} was found after {found_ms} ms: {job:#}");
        let elsewhere = at(&job, "assigned").unwrap().duration_since(found).as_millis();
        list.push((found_ms, elsewhere));
    }
    for (name, mut list) in [("closed, limit 300 ms", closed), ("silent, limit 1500 ms", silent)] {
        list.sort_unstable();
        let part = |p: usize| list[(list.len() - 1) * p / 100].0;
        println!(
            "{name}: {} deaths found after ms: median {}, 95 % {}, last {}",
            list.len(),
            part(50),
            part(95),
            part(100)
        );
    }
    assert!(!faena.log().contains("panick"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_blocks_its_only_thread_does_not_silence_its_worker() {
    let folder = tempfile::tempdir().unwrap();
    let quick =
        [("FAENA_WORKER_HEARTBEAT", "200ms"), ("FAENA_WORKER_SILENCE", "1s"), ("FAENA_RECONNECT_GRACE", "100ms")];
    let faena = Faena::start(folder.path(), &quick).await;
    let id = faena.submit(json!({"name": "block", "maxRetries": 0})).await;
    let url = faena.url.clone();
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone().cancelled_owned();
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let block = |_: faena::Context, _: Value| async {
            // Longer than the server waits for a sign of life.
            std::thread::sleep(Duration::from_millis(2_500));
            Ok::<_, faena::JobError>("done")
        };
        runtime.block_on(faena::Worker::new().url(url).handle("block", block).run_until(stopped)).unwrap();
    });
    let done = faena.job_is(&id, "COMPLETED").await;
    assert_eq!((&done["result"], &done["retryCount"]), (&json!("done"), &json!(0)));
    stop.cancel();
    worker.join().unwrap();
}
