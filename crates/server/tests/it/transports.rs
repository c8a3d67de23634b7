//! Workers behave the same on every transport: each test runs on all of them.
//!
//! Two differences remain. The SDK does not return the server's answers, and a worker on plain HTTP has no connection that the
//! server could see closing.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, events, eventually},
    load::assert_completed_once,
    postgres::Database,
    workers::{
        Failure, Grpc, HttpWorker, Interruption, SdkWorker, StreamWorker, TestWorker, WebSocket, WorkerOptions, failure,
    },
};

#[derive(Clone, Copy)]
enum DatabaseKind {
    Sqlite,
    Postgres,
}

/// A server with a database of its own.
struct TestServer {
    faena: Faena,
    _folder: TempDir,
    _database: Option<Database>,
}

/// Short enough for a quick test, long enough for a busy machine.
const SHORT_TIMEOUTS: [(&str, &str); 5] = [
    ("FAENA_WORKER_HEARTBEAT", "300ms"),
    ("FAENA_WORKER_SILENCE", "2s"),
    ("FAENA_RECONNECT_GRACE", "400ms"),
    ("FAENA_ORPHAN_DELAY", "100ms"),
    ("FAENA_GUARDIAN_INTERVAL", "500ms"),
];

impl TestServer {
    async fn start(kind: DatabaseKind, environment: &[(&str, &str)]) -> TestServer {
        let folder = tempfile::tempdir().unwrap();
        let database = match kind {
            DatabaseKind::Sqlite => None,
            DatabaseKind::Postgres => Some(Database::create().await),
        };
        let mut environment = environment.to_vec();
        if let Some(database) = &database {
            environment.push(("DATABASE_URL", &database.url));
        }
        let faena = Faena::start(folder.path(), &environment).await;
        TestServer { faena, _folder: folder, _database: database }
    }

    async fn submit(&self, kind: &str) -> String {
        self.faena.submit(json!({"name": kind, "retryDelay": 100})).await
    }

    /// Waits until a job meets a condition.
    async fn wait_for_job(&self, id: &str, what: &str, is_met: impl Fn(&Value) -> bool) -> Value {
        eventually(what, async || Some(self.faena.job(id).await).filter(&is_met)).await
    }

    async fn wait_for_worker(&self, id: &str, what: &str, is_met: impl Fn(&Value) -> bool) -> Value {
        eventually(what, async || {
            let (_, worker) = self.faena.get(&format!("/api/v1/workers/{id}")).await;
            is_met(&worker).then_some(worker)
        })
        .await
    }

    /// Runs another job to its end. By then, every earlier job that can be assigned has been assigned.
    async fn wait_for_another_job(&self) {
        let id = self.faena.submit(json!({"name": "noop"})).await;
        self.faena.wait_for_state(&id, "COMPLETED").await;
    }

    fn assert_no_panic(&self) {
        assert!(!self.faena.log().contains("panicked"), "{}", self.faena.log());
    }
}

fn details<'a>(job: &'a Value, event: &str) -> Vec<&'a str> {
    let log = job["executionLog"].as_array().unwrap();
    log.iter().filter(|entry| entry["event"] == event).map(|entry| entry["details"].as_str().unwrap_or("")).collect()
}

async fn a_job_is_assigned_and_its_result_is_stored<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.faena.submit(json!({"name": "mail", "payload": {"to": "grace", "n": 12_345_678_901_u64}})).await;
    let job = worker.next_job().await;
    assert_eq!((&job.id, job.kind.as_str(), job.queue.as_str(), job.retry_count), (&id, "mail", "default", 0));
    assert_eq!(job.payload, json!({"to": "grace", "n": 12_345_678_901_u64}));
    worker.started(&job).await.unwrap();
    worker.log(&job, "half way").await.unwrap();
    if W::RETURNS_ANSWERS {
        let answer = worker.log_event(&job, "completed", "not yet").await;
        assert_eq!(answer, Err("VALIDATION_ERROR".into()), "the name of a built-in event");
    }
    worker.log_event(&job, "mail.queued", "at the relay").await.unwrap();
    worker.complete(&job, json!({"sent": [1, 2]})).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(
        (&done["result"], &done["workerId"], &done["run"]),
        (&json!({"sent": [1, 2]}), &json!(worker.id()), &json!(job.run))
    );
    assert_eq!(events(&done), ["created", "queued", "assigned", "started", "message", "mail.queued", "completed"]);
    assert_eq!((details(&done, "message"), details(&done, "mail.queued")), (vec!["half way"], vec!["at the relay"]));
    assert_eq!((job.attempt, &done["attempt"]), (1, &json!(1)));
    let id = worker.id().to_owned();
    server.wait_for_worker(&id, "one job done", |worker| worker["completed"] == 1 && worker["state"] == "Ready").await;
    worker.leave().await;
    let terminated = server.wait_for_worker(&id, "it has left", |worker| worker["state"] == "Terminated").await;
    assert!(!terminated["endedAt"].is_null(), "{terminated:#}");
    assert_ne!(terminated["reason"], "lost", "{terminated:#}");
    server.assert_no_panic();
}

async fn a_failed_job_is_retried_unless_it_is_not_retryable<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.submit("mail").await;
    let first = worker.next_job().await;
    worker.fail(&first, failure("the mail server is busy")).await.unwrap();
    let second = worker.next_job().await;
    assert_eq!((&second.id, second.retry_count, second.attempt), (&id, 1, 2));
    assert!(second.run > first.run);
    worker.complete(&second, json!(null)).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["retryCount"], &done["attempt"]), (&json!(1), &json!(2)));

    let id = server.submit("mail").await;
    let job = worker.next_job().await;
    worker.fail(&job, Failure { retryable: Some(false), ..failure("no such address") }).await.unwrap();
    let failed = server.faena.wait_for_state(&id, "FAILED").await;
    assert_eq!(
        (&failed["error"], &failed["errorReason"], &failed["retryCount"]),
        (&json!("no such address"), &json!("error"), &json!(0))
    );
    server.assert_no_panic();
}

async fn the_retry_delay_that_a_worker_requests_is_respected<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.faena.submit(json!({"name": "mail", "retryDelay": 3_600_000})).await;
    let first = worker.next_job().await;
    worker.fail(&first, Failure { retry_after_ms: Some(700), ..failure("429") }).await.unwrap();
    let second = worker.next_job().await;
    assert_eq!(second.id, id);
    worker.complete(&second, json!(1)).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    let at = |event: &str, number: usize| -> jiff::Timestamp {
        let log = done["executionLog"].as_array().unwrap();
        let entry = log.iter().filter(|entry| entry["event"] == event).nth(number).unwrap();
        entry["timestamp"].as_str().unwrap().parse().unwrap()
    };
    let waited = at("assigned", 1).duration_since(at("failed", 0));
    assert!(waited.as_millis() >= 700, "assigned again after {waited}: {done:#}");
}

async fn the_job_of_a_dead_worker_is_completed_by_another_worker<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut crashing = W::connect(&server.faena, WorkerOptions::new("crashing", &["mail"])).await;
    let id = server.submit("mail").await;
    let first = crashing.next_job().await;
    crashing.started(&first).await.unwrap();
    server.faena.wait_for_state(&id, "PROCESSING").await;
    let name = crashing.id().to_owned();
    crashing.crash().await;
    let orphan = server.wait_for_job(&id, "it is orphaned", |job| job["retryCount"] == 1).await;
    assert_eq!(orphan["errorReason"], "orphaned", "{orphan:#}");
    assert!(["RETRYING", "QUEUED"].contains(&orphan["status"].as_str().unwrap()), "{orphan:#}");
    let lost = server.wait_for_worker(&name, "it is lost", |worker| worker["state"] == "Terminated").await;
    assert!(!lost["reason"].is_null(), "{lost:#}");
    let mut other = W::connect(&server.faena, WorkerOptions::new("other", &["mail"])).await;
    let second = other.next_job().await;
    assert!(second.id == id && second.run > first.run && second.retry_count == 1, "{second:?}");
    other.complete(&second, json!("by the other")).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["workerId"], other.id());
    assert!(events(&done).contains(&"orphaned"), "{done:#}");
    server.assert_no_panic();
}

async fn a_job_that_kills_each_of_its_workers_fails_as_orphaned<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let id = server.faena.submit(json!({"name": "poison", "maxRetries": 2})).await;
    let mut last_run = 0;
    for name in ["first", "second", "third"] {
        let mut worker = W::connect(&server.faena, WorkerOptions::new(name, &["poison"])).await;
        let job = worker.next_job().await;
        assert!(job.run > last_run);
        last_run = job.run;
        worker.crash().await;
    }
    let failed = server.faena.wait_for_state(&id, "FAILED").await;
    assert_eq!((&failed["errorReason"], &failed["run"]), (&json!("orphaned"), &json!(last_run)), "{failed:#}");
    assert_eq!(events(&failed).iter().filter(|event| **event == "orphaned").count(), 3, "{failed:#}");
}

async fn a_worker_that_reconnects_in_time_keeps_its_jobs<W: TestWorker>(database: DatabaseKind) {
    let server =
        TestServer::start(database, &[("FAENA_WORKER_HEARTBEAT", "300ms"), ("FAENA_WORKER_SILENCE", "20s")]).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.submit("mail").await;
    let job = worker.next_job().await;
    worker.log(&job, "before").await.unwrap();
    server.wait_for_job(&id, "the log message is stored", |job| events(job).contains(&"message")).await;
    let registration =
        server.wait_for_worker(worker.id(), "it is busy", |worker| worker["state"] == "Busy").await["registrationId"]
            .clone();
    worker.interrupt(Interruption::Closed).await;
    if W::HAS_CONNECTION {
        server
            .wait_for_worker(worker.id(), "its connection is known to be closed", |worker| {
                !worker["deadline"].is_null()
            })
            .await;
    }
    assert_ne!(worker.reconnect().await, Some(false));
    worker.log(&job, "after").await.unwrap();
    worker.complete(&job, json!("the same run")).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["run"], &done["retryCount"]), (&json!(job.run), &json!(0)));
    assert_eq!(details(&done, "message"), ["before", "after"]);
    assert_eq!(events(&done).iter().filter(|event| **event == "assigned").count(), 1, "{done:#}");
    let shown = server.wait_for_worker(worker.id(), "it is ready", |worker| worker["state"] == "Ready").await;
    assert_eq!(shown["registrationId"], registration, "it keeps its registration");
    // The worker still gets jobs.
    let id = server.submit("mail").await;
    let next = worker.next_job().await;
    assert_eq!(next.id, id);
    worker.complete(&next, json!(null)).await.unwrap();
    server.faena.wait_for_state(&id, "COMPLETED").await;
    server.assert_no_panic();
}

async fn a_worker_shows_its_version_and_after_a_resume_the_new_one<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &[]).await;
    let silent = W::connect(&server.faena, WorkerOptions::new("silent", &["mail"])).await;
    let options = WorkerOptions { version: Some("1.4.2"), ..WorkerOptions::new("ada", &["mail"]) };
    let worker = W::connect(&server.faena, options.clone()).await;
    let version = async |id: &str| server.wait_for_worker(id, "it is shown", |_| true).await["version"].clone();
    assert_eq!((version(silent.id()).await, version(worker.id()).await), (Value::Null, json!("1.4.2")));
    if let Some(session_token) = worker.session_token() {
        let options = WorkerOptions { version: Some("1.5.0"), session_token: Some(session_token), ..options };
        let _resumed = W::connect(&server.faena, options).await;
        assert_eq!(version(worker.id()).await, "1.5.0");
    }
    let (_, list) = server.faena.get("/api/v1/workers?state=Ready").await;
    let built_in = list["workers"].as_array().unwrap().iter().find(|worker| worker["kind"] == "built_in").unwrap();
    assert_eq!(built_in["version"], env!("CARGO_PKG_VERSION"));
}

async fn a_result_that_is_reported_twice_counts_once_and_is_acknowledged_twice<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &[]).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.submit("mail").await;
    let job = worker.next_job().await;
    assert_eq!(worker.complete_twice(&job, json!({"n": 1})).await, [Ok(()), Ok(())]);
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    // After another job, any effect of the repeated report would be visible.
    let id = server.submit("mail").await;
    let next = worker.next_job().await;
    assert_eq!(next.id, id, "the first is not assigned again");
    worker.complete(&next, json!(null)).await.unwrap();
    server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_eq!(server.faena.job(&job.id).await, done);
    // The SDK's connection was closed while it had no job in flight: its new registration counts from zero.
    let counted = if W::RETURNS_ANSWERS { 2 } else { 1 };
    server.wait_for_worker(worker.id(), "each job is counted once", |worker| worker["completed"] == counted).await;
    server.assert_no_panic();
}

async fn a_late_report_of_a_lost_run_is_rejected<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut late = W::connect(&server.faena, WorkerOptions::new("late", &["mail"])).await;
    let id = server.submit("mail").await;
    let first = late.next_job().await;
    late.interrupt(Interruption::Silent).await;
    server.wait_for_job(&id, "its worker is declared lost", |job| job["retryCount"] == 1).await;
    let mut other = W::connect(&server.faena, WorkerOptions::new("other", &["mail"])).await;
    let second = other.next_job().await;
    assert_eq!(second.id, id);
    server.faena.wait_for_state(&id, "PROCESSING").await;
    assert_ne!(late.reconnect().await, Some(true), "that registration has ended");
    let answer = late.complete(&first, json!("too late")).await;
    if W::RETURNS_ANSWERS {
        assert_eq!(answer, Err("STALE_RUN".into()));
    }
    let rejected =
        server.wait_for_job(&id, "the rejection is in the log", |job| events(job).contains(&"stale_report")).await;
    assert_eq!((&rejected["status"], &rejected["run"]), (&json!("PROCESSING"), &json!(second.run)), "{rejected:#}");
    other.complete(&second, json!("in time")).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["result"], &done["workerId"]), (&json!("in time"), &json!(other.id())));
    server.assert_no_panic();
}

async fn a_late_report_about_a_finished_job_is_rejected_and_logged<W: TestWorker>(database: DatabaseKind) {
    // A handler of the SDK cannot report anything after its end.
    if !W::RETURNS_ANSWERS {
        return;
    }
    let server = TestServer::start(database, &[]).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.submit("mail").await;
    let first = worker.next_job().await;
    worker.fail(&first, failure("busy")).await.unwrap();
    let second = worker.next_job().await;
    worker.complete(&second, json!({"n": 1})).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_eq!(worker.complete(&second, json!({"n": 1})).await, Ok(()), "repeated after a lost answer");
    for job in [&first, &second] {
        let answers = [
            worker.complete(job, json!({"n": 2})).await,
            worker.fail(job, failure("after all")).await,
            worker.progress(job, json!({"percentage": 99})).await,
            worker.step(job, "E9", json!(9), None).await.map(drop),
        ];
        assert_eq!(answers, [(); 4].map(|()| Err("STALE_RUN".to_owned())), "run {}", job.run);
    }
    let late = server.faena.job(&id).await;
    let stale = details(&late, "stale_report");
    assert!(stale.len() == 1 && stale[0].starts_with("8 reports"), "they are counted in one entry: {late:#}");
    for field in ["status", "result", "run", "progress", "error", "steps"] {
        assert_eq!(late[field], done[field], "{field}");
    }
    server.assert_no_panic();
}

async fn a_drained_worker_gets_no_jobs_until_the_drain_is_cancelled<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let running = server.submit("mail").await;
    let first = worker.next_job().await;
    let drain = format!("/api/v1/workers/{}/drain", worker.id());
    let (status, answer) = server.faena.post(&drain, json!({})).await;
    assert!(status.is_success(), "{answer}");
    server.wait_for_worker(worker.id(), "it drains", |worker| worker["state"] == "Draining").await;
    let waiting = server.submit("mail").await;
    server.wait_for_another_job().await;
    assert_eq!(server.faena.job(&waiting).await["status"], "QUEUED");
    worker.log(&first, "still running").await.unwrap();
    let answer = server.faena.http.delete(format!("{}{drain}", server.faena.url)).send().await.unwrap();
    assert!(answer.status().is_success());
    let second = worker.next_job().await;
    assert_eq!(second.id, waiting);
    worker.complete(&first, json!(null)).await.unwrap();
    server.faena.wait_for_state(&running, "COMPLETED").await;
    // Drain again, and complete the running job.
    server.faena.post(&drain, json!({})).await;
    server.wait_for_worker(worker.id(), "it drains", |worker| worker["state"] == "Draining").await;
    worker.complete(&second, json!(null)).await.unwrap();
    assert_completed_once(&server.faena.wait_for_state(&waiting, "COMPLETED").await);
    let left = server.submit("mail").await;
    server.wait_for_another_job().await;
    assert_eq!(server.faena.job(&left).await["status"], "QUEUED");
    server.assert_no_panic();
}

async fn the_worker_of_a_cancelled_job_is_asked_to_stop<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = server.submit("mail").await;
    let job = worker.next_job().await;
    let (status, answer) = server.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    assert!(status.is_success(), "{answer}");
    assert_eq!(answer["cancelRequested"], true, "{answer}");
    assert_eq!(worker.next_cancel().await, (id.clone(), job.run));
    worker.fail(&job, failure("stopped by the cancel")).await.unwrap();
    let cancelled = server.faena.wait_for_state(&id, "CANCELLED").await;
    assert_eq!(
        (&cancelled["errorReason"], &cancelled["retryCount"]),
        (&json!("cancelled"), &json!(0)),
        "{cancelled:#}"
    );
    assert!(events(&cancelled).contains(&"cancelled"), "{cancelled:#}");
}

async fn a_job_that_exceeds_its_timeout_is_stopped_and_retried<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["slow"])).await;
    let id = server.faena.submit(json!({"name": "slow", "timeoutMs": 700, "retryDelay": 100})).await;
    let first = worker.next_job().await;
    assert_eq!(worker.next_cancel().await, (id.clone(), first.run));
    let second = worker.next_job().await;
    assert!(second.id == id && second.run > first.run && second.retry_count == 1, "{second:?}");
    let answer = worker.complete(&first, json!("too late")).await;
    if W::RETURNS_ANSWERS {
        assert_eq!(answer, Err("STALE_RUN".into()));
    }
    worker.complete(&second, json!("quick")).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["result"], "quick");
    assert!(events(&done).contains(&"timeout"), "{done:#}");
}

async fn progress_is_visible_while_the_job_runs_and_afterwards<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["film"])).await;
    let id = server.submit("film").await;
    let job = worker.next_job().await;
    for (percentage, phase) in [(25.0, "reading"), (75.5, "writing")] {
        let progress = json!({"phase": phase, "percentage": percentage, "message": "on it"});
        worker.progress(&job, progress).await.unwrap();
        let seen = server.wait_for_job(&id, "its progress", |job| job["progress"]["phase"] == phase).await;
        assert_eq!(seen["status"], "PROCESSING");
        assert_eq!(seen["progress"]["percentage"].as_f64(), Some(percentage));
        assert_eq!(seen["progress"]["message"], "on it");
    }
    worker.complete(&job, json!(null)).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_eq!(done["progress"], json!({"phase": "writing", "percentage": 75.5, "message": "on it"}), "kept");
}

async fn steps_that_a_dead_worker_completed_are_not_repeated<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let id = server.faena.submit(json!({"name": "pipeline"})).await;
    let mut crashing = W::connect(&server.faena, WorkerOptions::new("crashing", &["pipeline"])).await;
    let job = crashing.next_job().await;
    for n in 1..=4 {
        let result = crashing.step(&job, &format!("E{n}"), json!({"by": "crashing", "n": n}), Some(9)).await.unwrap();
        assert_eq!(result["n"], n);
    }
    let seen = server.wait_for_job(&id, "four steps", |job| job["progress"]["completedSteps"] == 4).await;
    assert_eq!(
        (&seen["progress"]["totalSteps"], &seen["progress"]["currentStep"]),
        (&json!(9), &json!("E4")),
        "{seen:#}"
    );
    crashing.crash().await;
    let mut other = W::connect(&server.faena, WorkerOptions::new("other", &["pipeline"])).await;
    let job = other.next_job().await;
    assert_eq!((&job.id, job.retry_count), (&id, 1));
    let mut by = Vec::new();
    for n in 1..=9 {
        let result = other.step(&job, &format!("E{n}"), json!({"by": "other", "n": n}), Some(9)).await.unwrap();
        assert_eq!(result["n"], n);
        by.push(result["by"].as_str().unwrap().to_owned());
    }
    assert_eq!(by[..4], ["crashing"; 4]);
    assert_eq!(by[4..], ["other"; 5]);
    other.complete(&job, json!(by)).await.unwrap();
    let done = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(events(&done).iter().filter(|event| **event == "step_completed").count(), 9, "{done:#}");
    assert_eq!(done["progress"]["completedSteps"], 9, "{done:#}");
}

async fn jobs_go_to_workers_with_a_matching_capability_and_queue<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut fast = W::connect(&server.faena, WorkerOptions::new("fast", &["image.*"])).await;
    fast.leave().await;
    fast = W::connect(
        &server.faena,
        WorkerOptions { queues: vec!["fast"], ..WorkerOptions::new("fast-again", &["image.*"]) },
    )
    .await;
    let mut plain = W::connect(&server.faena, WorkerOptions::new("plain", &["mail"])).await;
    let image = server.faena.submit(json!({"name": "image.crop", "queue": "fast"})).await;
    let mail = server.faena.submit(json!({"name": "mail", "queue": "any"})).await;
    let slow = server.faena.submit(json!({"name": "image.crop", "queue": "slow"})).await;
    let unmatched = server.faena.submit(json!({"name": "mailing"})).await;
    let job = fast.next_job().await;
    assert_eq!((&job.id, job.kind.as_str(), job.queue.as_str()), (&image, "image.crop", "fast"));
    fast.complete(&job, json!(null)).await.unwrap();
    let job = plain.next_job().await;
    assert_eq!((&job.id, job.queue.as_str()), (&mail, "any"));
    plain.complete(&job, json!(null)).await.unwrap();
    server.faena.wait_for_state(&image, "COMPLETED").await;
    server.faena.wait_for_state(&mail, "COMPLETED").await;
    for id in [&slow, &unmatched] {
        assert_eq!(server.faena.job(id).await["status"], "QUEUED");
    }
    let mut all = W::connect(&server.faena, WorkerOptions::new("all", &["image.*", "mailing"])).await;
    let mut got = vec![all.next_job().await.id, all.next_job().await.id];
    let mut left = vec![slow, unmatched];
    got.sort();
    left.sort();
    assert_eq!(got, left);
}

async fn a_job_carries_its_correlation_id_and_trace_context<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let answer = server
        .faena
        .http
        .post(format!("{}/api/v1/jobs", server.faena.url))
        .header("x-correlation-id", "order-4711")
        .header("traceparent", trace)
        .json(&json!({"name": "mail"}))
        .send()
        .await
        .unwrap();
    assert!(answer.status().is_success());
    let job = worker.next_job().await;
    assert_eq!((job.correlation_id.as_str(), job.traceparent.as_deref()), ("order-4711", Some(trace)));
    worker.complete(&job, json!(null)).await.unwrap();
    assert_eq!(server.faena.wait_for_state(&job.id, "COMPLETED").await["correlationId"], "order-4711");
}

async fn a_job_names_the_schedule_that_created_it<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker = W::connect(&server.faena, WorkerOptions::new("ada", &["mail"])).await;
    let (_, schedule) = server
        .faena
        .post("/api/v1/schedules", json!({"name": "nightly", "intervalMs": 86_400_000, "jobName": "mail"}))
        .await;
    let id = schedule["id"].as_str().unwrap();
    let (_, answer) = server.faena.post(&format!("/api/v1/schedules/{id}/trigger"), json!({})).await;
    let job = worker.next_job().await;
    let stored = server.faena.job(answer["jobId"].as_str().unwrap()).await;
    let due = stored["scheduleDue"].as_str().unwrap().to_owned();
    assert_eq!((job.id.as_str(), job.schedule.clone()), (stored["id"].as_str().unwrap(), Some((id.to_owned(), due))));
    worker.complete(&job, json!(null)).await.unwrap();
}

async fn a_worker_gets_no_more_jobs_than_its_concurrency<W: TestWorker>(database: DatabaseKind) {
    let server = TestServer::start(database, &SHORT_TIMEOUTS).await;
    let mut worker =
        W::connect(&server.faena, WorkerOptions { concurrency: 3, ..WorkerOptions::new("ada", &["mail"]) }).await;
    for _ in 0..5 {
        server.submit("mail").await;
    }
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(worker.next_job().await);
    }
    server.wait_for_another_job().await;
    assert_eq!(server.faena.count("status=QUEUED").await, 2);
    for _ in 0..2 {
        let done = jobs.remove(0);
        worker.complete(&done, json!(null)).await.unwrap();
        jobs.push(worker.next_job().await);
    }
    for job in &jobs {
        worker.complete(job, json!(null)).await.unwrap();
    }
    server.faena.wait_until_all_jobs_end().await;
    assert_eq!(server.faena.count("status=COMPLETED&type=mail").await, 5);
}

macro_rules! tests {
    ($($test:ident)*) => {
        tests!(@on websocket StreamWorker<WebSocket>, Sqlite: $($test)*);
        tests!(@on grpc StreamWorker<Grpc>, Sqlite: $($test)*);
        tests!(@on http HttpWorker, Sqlite: $($test)*);
        tests!(@on sdk SdkWorker, Sqlite: $($test)*);
        tests!(@on websocket_postgres StreamWorker<WebSocket>, Postgres: $($test)*);
    };
    (@on $transport:ident $worker:ty, $database:ident: $($test:ident)*) => {
        mod $transport {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::$test::<$worker>(DatabaseKind::$database).await;
                }
            )*
        }
    };
}

tests! {
    a_job_is_assigned_and_its_result_is_stored
    a_job_names_the_schedule_that_created_it
    a_failed_job_is_retried_unless_it_is_not_retryable
    the_retry_delay_that_a_worker_requests_is_respected
    the_job_of_a_dead_worker_is_completed_by_another_worker
    a_job_that_kills_each_of_its_workers_fails_as_orphaned
    a_worker_that_reconnects_in_time_keeps_its_jobs
    a_worker_shows_its_version_and_after_a_resume_the_new_one
    a_result_that_is_reported_twice_counts_once_and_is_acknowledged_twice
    a_late_report_of_a_lost_run_is_rejected
    a_late_report_about_a_finished_job_is_rejected_and_logged
    a_drained_worker_gets_no_jobs_until_the_drain_is_cancelled
    the_worker_of_a_cancelled_job_is_asked_to_stop
    a_job_that_exceeds_its_timeout_is_stopped_and_retried
    progress_is_visible_while_the_job_runs_and_afterwards
    steps_that_a_dead_worker_completed_are_not_repeated
    jobs_go_to_workers_with_a_matching_capability_and_queue
    a_job_carries_its_correlation_id_and_trace_context
    a_worker_gets_no_more_jobs_than_its_concurrency
}
