//! `faena move` moves a whole installation from SQLite to PostgreSQL, even if it is killed in between, and the server
//! continues on the new database.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
};

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::{
    faena::{Faena, command, eventually, run},
    postgres::{Database, connect},
    shell::output_parts,
};

const FILE: &str = "sqlite:faena-data/faena.db";
const SINK: &str =
    "[[sink]]\nname = \"log\"\nkind = \"file\"\npath = \"events.log\"\ntypes = [\"job.failed\", \"task.*\"]\n";
/// Workers may be silent for as long as the moves of the test take.
const SETTINGS: [(&str, &str); 3] =
    [("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_RECONNECT_GRACE", "1h"), ("FAENA_WORKER_SILENCE", "1h")];
const PRIORITIES: [&str; 4] = ["LOW", "NORMAL", "HIGH", "CRITICAL"];
const MACHINE: &str = "
machine: payment
version: 1
events: {ship: {}}
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx.amount, self: true, expires: {after: 2d, to: LATE}}
    on: {approval.granted: CHARGING, approval.denied: LATE}
  CHARGING:
    deadline: {total: 1h, to: LATE}
    entry: [{job: noop, name: charge}]
    on: {job.charge.completed: DONE, job.charge.failed: LATE}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

/// Runs `faena move` to its end. Returns the exit code, stdout and stderr.
fn move_to(folder: &Path, database: &Database, flags: &[&str]) -> (i32, String, String) {
    let arguments = [&["move", "--from", FILE, "--to", &database.url], flags].concat();
    output_parts(&run(folder, &[], &arguments))
}

fn spawn_move(folder: &Path, database: &Database) -> Child {
    command(folder)
        .args(["move", "--from", FILE])
        .env("DATABASE_URL", &database.url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

async fn command_line(faena: &Faena, folder: &Path, words: &[&str]) -> String {
    let (code, stdout, stderr) = output_parts(&run(folder, &[("FAENA_URL", &faena.url)], words));
    assert_eq!(code, 0, "{words:?}: {stderr}");
    stdout
}

/// A worker on plain HTTP that reports what the test says.
struct Worker<'a> {
    faena: &'a Faena,
    token: String,
}

impl Worker<'_> {
    async fn register(faena: &Faena) -> Worker<'_> {
        let register = json!({"workerId": "w", "capabilities": ["mail.send"], "concurrency": 10});
        let (status, answer) = faena.post("/api/v1/workers/register", register).await;
        assert_eq!(status, StatusCode::CREATED, "{answer}");
        Worker { faena, token: faena.session_token("w").unwrap() }
    }

    async fn send(&self, path: &str, body: Value) -> Value {
        let url = format!("{}/api/v1/workers/w/{path}", self.faena.url);
        let answer = self.faena.http.post(url).header("x-session-token", &self.token).json(&body).send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    /// Claims `count` jobs, and returns their ids and runs.
    async fn claim(&self, count: usize) -> Vec<(String, i64)> {
        let mut jobs = Vec::new();
        while jobs.len() < count {
            let answer = self.send("claim", json!({"waitMs": 1_000})).await;
            for job in answer["jobs"].as_array().unwrap() {
                jobs.push((job["id"].as_str().unwrap().to_owned(), job["run"].as_i64().unwrap()));
            }
        }
        jobs
    }

    async fn report(&self, job: &(String, i64), what: &str, mut body: Value) {
        body["run"] = job.1.into();
        self.send(&format!("jobs/{}/{what}", job.0), body).await;
    }
}

const CREATE_TASK: [&str; 7] =
    ["tasks", "create", "payment", "{\"amount\": 7}", "--idempotency-key", "payment-7", "--json"];

/// What the test needs to know about the source.
struct Content {
    in_flight: (String, i64),
    token: String,
    task: String,
    key: String,
}

/// Fills a server with jobs in every state and of every kind, and with everything else that has a table.
async fn fill(faena: &Faena, folder: &Path) -> Content {
    let batch = |jobs: Vec<Value>| async move {
        let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
        assert_eq!(status, StatusCode::CREATED, "{answer}");
    };
    for round in 0..4 {
        batch(
            (0..1_000)
                .map(|n| json!({"name": "noop", "tags": ["many"], "correlationId": format!("{round}-{n}")}))
                .collect(),
        )
        .await;
        batch(
            (0..1_000)
                .map(|n| json!({"name": "not.handled", "priority": PRIORITIES[n % 4], "payload": {"text": "é\t\\N"}}))
                .collect(),
        )
        .await;
    }
    batch((0..500).map(|n| json!({"name": "not.handled.keyed", "concurrencyKey": format!("k{}", n % 50)})).collect())
        .await;
    batch(
        (0..200)
            .map(|n| json!({"name": "noop", "scheduledAt": "2099-01-01T00:00:00Z", "uniqueKey": format!("u{n}")}))
            .collect(),
    )
    .await;
    batch(vec![
        json!({"ref": "parent", "name": "not.handled"}),
        json!({"name": "noop", "dependsOn": ["parent"], "idempotencyKey": "once"}),
    ])
    .await;
    let cancelled = faena.submit(json!({"name": "not.handled"})).await;
    faena.post(&format!("/api/v1/jobs/{cancelled}/cancel"), json!({"reason": "not wanted"})).await;
    let hook = "http://127.0.0.1:1/hook";
    let notified = faena.submit(json!({"name": "noop", "webhookUrl": hook})).await;
    faena.wait_for_state(&notified, "COMPLETED").await;

    batch((0..3).map(|_| json!({"name": "mail.send", "maxRetries": 3, "retryDelay": 3_600_000})).collect()).await;
    let worker = Worker::register(faena).await;
    let jobs = worker.claim(3).await;
    for job in &jobs {
        worker.report(job, "started", json!({})).await;
        worker.report(job, "progress", json!({"progress": {"percentage": 40}})).await;
        worker.report(job, "log", json!({"message": "half way"})).await;
        worker.report(job, "step", json!({"name": "draft", "result": {"n": 1}})).await;
    }
    worker.report(&jobs[0], "fail", json!({"error": "no such host", "retryable": false})).await;
    worker.report(&jobs[1], "fail", json!({"error": "busy"})).await;

    command_line(faena, folder, &["schedules", "create", "--name", "pulse", "--every", "1s", "--job", "noop"]).await;
    eventually("the schedule fires", async || (faena.count("name=noop").await > 4_203).then_some(())).await;
    command_line(faena, folder, &["schedules", "disable", "pulse"]).await;
    command_line(faena, folder, &["limits", "set", "--type", "not.handled", "--concurrency", "5"]).await;
    command_line(faena, folder, &["queues", "pause", "reports", "--reason", "maintenance"]).await;
    let key = command_line(faena, folder, &["keys", "create", "ops", "--scopes", "admin", "--json"]).await;
    let key: Value = serde_json::from_str(&key).unwrap();
    fs::write(folder.join("payment.yaml"), MACHINE).unwrap();
    let token = key["key"].as_str().unwrap().to_owned();
    let as_ops = [("FAENA_URL", faena.url.as_str()), ("FAENA_TOKEN", &token)];
    let ops = |words: &[&str]| {
        let (code, stdout, stderr) = output_parts(&run(folder, &as_ops, words));
        assert_eq!(code, 0, "{words:?}: {stderr}");
        stdout
    };
    ops(&["machines", "register", "payment.yaml"]);
    let task = ops(&CREATE_TASK);
    let task: Value = serde_json::from_str(&task).unwrap();
    Content {
        in_flight: jobs[2].clone(),
        token: worker.token.clone(),
        task: task["id"].as_str().unwrap().to_owned(),
        key: token,
    }
}

/// Kills a move with SIGKILL while it waits for a lock of PostgreSQL that the test has taken with `sql`.
async fn kill_while_blocked(folder: &Path, database: &Database, observer: &Client, sql: &str) {
    let blocker = connect(&database.url).await;
    blocker.batch_execute(&format!("BEGIN; {sql}")).await.unwrap();
    let mut child = spawn_move(folder, database);
    let sessions = "FROM pg_stat_activity a WHERE a.datname = current_database() AND a.application_name = 'faena'";
    let blocked = format!("SELECT count(*) {sessions} AND cardinality(pg_blocking_pids(a.pid)) > 0");
    eventually(&format!("the move is blocked by {sql}"), async || {
        assert_eq!(child.try_wait().unwrap(), None, "the move ended before {sql} blocked it");
        let count: i64 = observer.query_one(&blocked, &[]).await.unwrap().get(0);
        (count > 0).then_some(())
    })
    .await;
    child.kill().unwrap();
    child.wait().unwrap();
    blocker.batch_execute("ROLLBACK").await.unwrap();
    eventually("PostgreSQL notices the end of the killed process", async || {
        let count: i64 = observer.query_one(&format!("SELECT count(*) {sessions}"), &[]).await.unwrap().get(0);
        (count == 0).then_some(())
    })
    .await;
}

/// Compares the number of rows of every moved table, with queries that do not use the code of the move.
async fn assert_counts_are_equal(file: &Path, observer: &Client, tables: &[Value]) {
    let source = rusqlite::Connection::open(file).unwrap();
    let mut filled = 0;
    for table in tables {
        let name = table["name"].as_str().unwrap();
        let sql = format!("SELECT count(*) FROM {name}");
        let expected: i64 = source.query_row(&sql, [], |row| row.get(0)).unwrap();
        let found: i64 = observer.query_one(&format!("SELECT count(*) FROM faena.{name}"), &[]).await.unwrap().get(0);
        assert_eq!((found, &table["rows"]), (expected, &json!(expected)), "{name}");
        filled += u32::from(found > 0);
    }
    assert!(filled >= 30, "only {filled} tables have rows");
}

async fn assert_continues(faena: &Faena, folder: &Path, content: &Content) {
    let environment = [("FAENA_URL", faena.url.as_str()), ("FAENA_TOKEN", &content.key)];
    let ops = |words: &[&str]| {
        let (code, stdout, stderr) = output_parts(&run(folder, &environment, words));
        assert_eq!(code, 0, "{words:?}: {stderr}");
        stdout
    };
    let show = |words: &[&str]| serde_json::from_str::<Value>(&ops(words)).unwrap();
    // The worker that claimed a job before the move completes it with its old session.
    let (id, run) = &content.in_flight;
    let url = format!("{}/api/v1/workers/w/jobs/{id}/complete", faena.url);
    let report = faena.http.post(url).bearer_auth(&content.key).header("x-session-token", &content.token);
    let answer = report.json(&json!({"run": run, "result": {"sent": true}})).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK, "{}", answer.text().await.unwrap());
    let job = show(&["jobs", "show", id, "--json"]);
    assert_eq!((&job["status"], &job["progress"]["percentage"]), (&json!("COMPLETED"), &json!(40)), "{job:#}");
    assert_eq!(show(&CREATE_TASK)["id"], content.task, "the idempotency key counts in the new database");
    ops(&["tasks", "approve", &content.task]);
    eventually("the task ends", async || {
        let task = show(&["tasks", "show", &content.task, "--json"]);
        (task["state"] == "DONE").then_some(())
    })
    .await;
    eventually("the sink receives the end of the task", async || {
        fs::read_to_string(folder.join("events.log")).unwrap().contains("task.ended").then_some(())
    })
    .await;
    ops(&["schedules", "enable", "pulse"]);
    let finished = ops(&["enqueue", "noop", "--watch"]);
    assert!(finished.contains("COMPLETED"), "{finished}");
    let runs = || show(&["schedules", "show", "pulse", "--json"])["runCount"].as_u64().unwrap();
    let before = runs();
    eventually("the schedule fires", async || (runs() > before).then_some(())).await;
    let queue = show(&["queues", "list", "--json"]);
    assert!(queue.to_string().contains("maintenance"), "the paused queue is still paused: {queue}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_survives_kills_and_the_server_continues_on_postgres() {
    let (folder, database) = (tempfile::tempdir().unwrap(), Database::create().await);
    let folder = folder.path();
    let file = folder.join("faena-data/faena.db");
    fs::write(folder.join("faena.toml"), SINK).unwrap();
    let mut faena = Faena::start(folder, &SETTINGS).await;
    let content = fill(&faena, folder).await;
    let (code, _, stderr) = move_to(folder, &database, &[]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains(&format!("in use by process {}; stop it first", faena.process_id())), "{stderr}");
    faena.signal("TERM");
    assert!(faena.wait_for_exit().await.success());
    let original = fs::read(&file).unwrap();

    let observer = connect(&database.url).await;
    let (code, stdout, stderr) = move_to(folder, &database, &["--dry-run", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let survey: Value = serde_json::from_str(&stdout).unwrap();
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'faena'";
    assert_eq!(observer.query_one(schemas, &[]).await.unwrap().get::<_, i64>(0), 0, "a dry run changes nothing");

    let migrated = run(folder, &[("DATABASE_URL", &database.url)], &["migrate"]);
    assert_eq!(output_parts(&migrated).0, 0);
    let middle: String = rusqlite::Connection::open_with_flags(&file, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)
        .unwrap()
        .query_row("SELECT lower(hex(id)) FROM job ORDER BY id LIMIT 1 OFFSET 6000", [], |row| row.get(0))
        .unwrap();
    for sql in [
        &format!("INSERT INTO faena.job (id, lane, payload) VALUES ('{middle}', 1, '')"),
        "LOCK TABLE faena.label IN SHARE MODE",
        "LOCK TABLE faena.worker_change IN SHARE MODE",
        // This table is copied by now, so the lock blocks the verification.
        "LOCK TABLE faena.attempt IN ACCESS EXCLUSIVE MODE",
    ] {
        kill_while_blocked(folder, &database, &observer, sql).await;
        let (code, _, stderr) =
            output_parts(&run(folder, &[("DATABASE_URL", &database.url)], &["serve", "--port", "0"]));
        assert_eq!(code, 2, "a server must not start on an incomplete copy: {stderr}");
        assert!(stderr.contains("is not complete; run the same \"faena move\" again"), "{stderr}");
    }
    let (code, stdout, stderr) = move_to(folder, &database, &["--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&report["rows"], &report["resumedRows"]), (&survey["rows"], &survey["rows"]), "{report:#}");
    assert_eq!(report["addedErrors"], json!([]), "{report:#}");
    assert_counts_are_equal(&file, &observer, report["tables"].as_array().unwrap()).await;
    assert!(original == fs::read(&file).unwrap(), "the source has changed");
    let (code, stdout, _) = output_parts(&run(folder, &[("DATABASE_URL", &database.url)], &["doctor", "--json"]));
    assert_eq!(code, 0, "{stdout}");
    let (code, stdout, _) = move_to(folder, &database, &[]);
    assert!(code == 0 && stdout.contains("there is nothing to do"), "{stdout}");

    let environment = [&SETTINGS[..], &[("DATABASE_URL", database.url.as_str())]].concat();
    let faena = Faena::start(folder, &environment).await;
    assert_continues(&faena, folder, &content).await;
}
