//! The system clock is set forward and back by an hour while servers run. Nothing but the log lines of the server may show it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, eventually},
    load::assert_completed_once,
    postgres::Database,
    workers::{Failure, StreamWorker, TestWorker, WebSocket, WorkerOptions},
};

/// The system clock of one server, faked with libfaketime. Elapsed time is real.
struct SystemClock {
    library: PathBuf,
    offset: PathBuf,
}

impl SystemClock {
    fn new(folder: &Path) -> SystemClock {
        let folders = fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
        let library = folders.map(|folder| folder.join("faketime/libfaketime.so.1")).find(|path| path.exists());
        let library = library.expect("libfaketime is installed (Debian: apt-get install faketime)");
        let clock = SystemClock { library, offset: folder.join("clock") };
        clock.set("+0");
        clock
    }

    /// Sets the clock to the real time plus this many seconds.
    fn set(&self, seconds: &str) {
        // Replaces the file atomically: a server that reads an empty file would see no offset.
        let new = self.offset.with_extension("new");
        fs::write(&new, seconds).unwrap();
        fs::rename(&new, &self.offset).unwrap();
    }

    async fn start(&self, folder: &Path, environment: &[(&str, &str)]) -> Faena {
        let mut environment = environment.to_vec();
        environment.extend([
            ("LD_PRELOAD", self.library.to_str().unwrap()),
            ("FAKETIME_TIMESTAMP_FILE", self.offset.to_str().unwrap()),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("FAENA_NODE_LEASE", "3s"),
            ("FAENA_ORPHAN_DELAY", "50ms"),
            ("FAENA_WORKER_HEARTBEAT", "500ms"),
            ("FAENA_WORKER_SILENCE", "20s"),
            ("FAENA_RECONNECT_GRACE", "10s"),
            ("FAENA_GUARDIAN_INTERVAL", "500ms"),
        ]);
        Faena::start(folder, &environment).await
    }
}

const STEPS: [&str; 5] = ["+3600", "+0", "-3600", "+3600", "+0"];

/// Checks that the times of a job's log never go back.
fn assert_log_in_order(job: &Value) {
    let times: Vec<&str> =
        job["executionLog"].as_array().unwrap().iter().map(|entry| entry["timestamp"].as_str().unwrap()).collect();
    assert!(times.is_sorted(), "{job:#}");
}

/// Lets jobs run, fail and be retried after 100 ms, and checks that the server is ready.
async fn assert_works(faena: &Faena, worker: &mut StreamWorker<WebSocket>, step: &str) {
    let noops = vec![json!({"name": "noop"}); 200];
    let (status, batch) = faena.post("/api/v1/jobs/batch", json!({ "jobs": noops })).await;
    assert!(status.is_success(), "{batch}");
    let id = faena.submit(json!({"name": "flaky", "retryDelay": 100})).await;
    let job = worker.next_job().await;
    let failure = Failure { error: "not yet", retryable: None, retry_after_ms: Some(100) };
    assert_eq!(worker.fail(&job, failure).await, Ok(()));
    // If the due time and the clock disagreed, the retry would come an hour later, after this test has timed out.
    let again = worker.next_job().await;
    assert_eq!((&again.id, again.retry_count), (&id, 1), "after {step}");
    assert_eq!(worker.complete(&again, Value::Null).await, Ok(()));
    let done = faena.wait_for_state(&id, "COMPLETED").await;
    assert_log_in_order(&done);
    for id in batch["ids"].as_array().unwrap() {
        let done = faena.wait_for_state(id.as_str().unwrap(), "COMPLETED").await;
        assert_completed_once(&done);
        assert_log_in_order(&done);
    }
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status.as_u16(), health["status"].as_str()), (200, Some("healthy")), "after {step}: {health}");
}

fn assert_nothing_lost(faena: &Faena) {
    for text in ["worker lost", "was declared dead", "jobs of dead nodes recovered", "job timed out"] {
        assert!(!faena.log().contains(text), "{text}: {}", faena.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_of_the_clock_by_an_hour_disturb_nothing() {
    let folder = TempDir::new().unwrap();
    let clock = SystemClock::new(folder.path());
    let faena = clock.start(folder.path(), &[]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&faena, WorkerOptions::new("steady", &["flaky", "long"])).await;
    let long = faena.submit(json!({"name": "long", "timeoutMs": 600_000})).await;
    let long_job = worker.next_job().await;
    for step in STEPS {
        clock.set(step);
        assert_works(&faena, &mut worker, step).await;
    }
    assert_eq!(worker.complete(&long_job, Value::Null).await, Ok(()));
    let done = faena.wait_for_state(&long, "COMPLETED").await;
    assert_completed_once(&done);
    assert_log_in_order(&done);
    assert_nothing_lost(&faena);
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_of_the_clocks_of_two_postgres_nodes_disturb_nothing_and_delay_no_recovery() {
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let database = Database::create().await;
    let clocks = [SystemClock::new(folders[0].path()), SystemClock::new(folders[1].path())];
    let environment = [("DATABASE_URL", database.url.as_str())];
    let mut first = clocks[0].start(folders[0].path(), &environment).await;
    // The second node starts with a clock that is an hour ahead.
    clocks[1].set("+3600");
    let second = clocks[1].start(folders[1].path(), &environment).await;
    let options = WorkerOptions::new("steady", &["flaky", "long"]);
    let mut worker = StreamWorker::<WebSocket>::connect(&second, options).await;
    let long = first.submit(json!({"name": "long", "timeoutMs": 600_000})).await;
    let long_job = worker.next_job().await;
    for (step, both) in STEPS.into_iter().zip([false, true, false, true, true]) {
        clocks[0].set(step);
        if both {
            clocks[1].set(step);
        }
        assert_works(&first, &mut worker, step).await;
        assert_works(&second, &mut worker, step).await;
    }
    assert_eq!(worker.complete(&long_job, Value::Null).await, Ok(()));
    assert_log_in_order(&second.wait_for_state(&long, "COMPLETED").await);
    assert_nothing_lost(&first);
    assert_nothing_lost(&second);
    // The clock of the survivor steps back, then the other node dies: its jobs do not wait for an hour.
    let sleep = json!({"name": "sleep", "payload": {"ms": 3_000}});
    let (_, batch) = first.post("/api/v1/jobs/batch", json!({"jobs": vec![sleep; 30]})).await;
    eventually("a job runs on the first node", async || (first.count("status=PROCESSING").await > 0).then_some(()))
        .await;
    clocks[1].set("-3600");
    first.kill();
    for id in batch["ids"].as_array().unwrap() {
        assert_completed_once(&second.wait_for_state(id.as_str().unwrap(), "COMPLETED").await);
    }
}
