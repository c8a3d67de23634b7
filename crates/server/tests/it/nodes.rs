//! Several servers on one PostgreSQL share the jobs and take over from each other.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
    path::Path,
    time::Duration,
};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    load::assert_all_completed_once,
    postgres::Database,
};

const BATCH: usize = 5_000;

async fn two_nodes(database: &Database, folders: [&Path; 2]) -> [Faena; 2] {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "2s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("FAENA_WORKER_SHELL", "true"),
        ("WORKER_CONCURRENCY", "8"),
    ];
    // Both migrate the empty database.
    Faena::start_two(folders, &environment).await
}

async fn submit_noops(faena: &Faena, count: usize) {
    let jobs: Vec<Value> = (0..count).map(|n| json!({"name": "noop", "payload": {"n": n}, "maxRetries": 10})).collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    assert_eq!(answer["ids"].as_array().unwrap().len(), count);
}

/// Returns all jobs, page by page.
async fn all_jobs(faena: &Faena) -> Vec<Value> {
    let mut jobs = Vec::new();
    let mut cursor = String::new();
    loop {
        let (status, mut list) = faena.get(&format!("/api/v1/jobs?limit=100&cursor={cursor}")).await;
        assert_eq!(status, StatusCode::OK, "{list}");
        jobs.append(list["jobs"].as_array_mut().unwrap());
        match list["nextCursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return jobs,
        }
    }
}

fn workers(jobs: &[Value]) -> HashSet<&str> {
    jobs.iter().filter_map(|job| job["workerId"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_on_one_postgres_share_fifty_thousand_jobs_and_run_none_twice() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let nodes = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    join_all((0..10).map(|n| submit_noops(&nodes[n % 2], BATCH))).await;
    nodes[0].wait_until_all_jobs_end().await;
    let jobs = all_jobs(&nodes[1]).await;
    assert_eq!(jobs.len(), 10 * BATCH);
    let ids: HashSet<&str> = jobs.iter().map(|job| job["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), jobs.len(), "a job was listed twice");
    for job in &jobs {
        assert_eq!((&job["status"], &job["retryCount"]), (&json!("COMPLETED"), &json!(0)), "{job:#}");
    }
    assert_eq!(workers(&jobs).len(), 2, "both nodes ran jobs");
    // Checks the logs of a sample.
    let sample: BTreeSet<String> = jobs.iter().step_by(50).map(|job| job["id"].as_str().unwrap().to_owned()).collect();
    let shown = assert_all_completed_once(&nodes[0], &sample).await;
    for job in shown {
        assert_eq!(crate::faena::events(&job), ["created", "queued", "assigned", "started", "completed"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_of_two_nodes_on_postgres_is_killed_the_other_completes_all_jobs_without_overlapping_runs() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [mut victim, survivor] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let journal = second_folder.path().join("journal");
    // Each job appends a line at its start and at its end; the append is atomic.
    let script = format!(
        "echo start $FAENA_JOB_ID $FAENA_RUN >>{0}; sleep 0.02; echo end $FAENA_JOB_ID $FAENA_RUN >>{0}",
        journal.display()
    );
    let mut acknowledged = BTreeSet::new();
    for part in 0..4 {
        let mut jobs: Vec<Value> = (0..100)
            .map(|_| json!({"name": "shell.run", "payload": {"argv": ["sh", "-c", script]}, "maxRetries": 10}))
            .collect();
        jobs.extend((0..500).map(|_| json!({"name": "noop", "maxRetries": 10})));
        jobs.extend((0..50).map(|n| json!({"name": "sleep", "payload": {"ms": n}, "maxRetries": 10})));
        let node = if part % 2 == 0 { &victim } else { &survivor };
        let (status, answer) = node.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
        assert_eq!(status, StatusCode::CREATED, "{answer}");
        acknowledged.extend(answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()));
    }
    eventually("a part of the jobs is completed", async || {
        let lines = fs::read_to_string(&journal).unwrap_or_default().lines().count();
        (lines > 200).then_some(())
    })
    .await;
    victim.kill();
    let jobs = assert_all_completed_once(&survivor, &acknowledged).await;
    assert_eq!(workers(&jobs).len(), 2, "both nodes ran jobs");
    assert!(
        jobs.iter().any(|job| job["retryCount"] != 0 || crate::faena::events(job).contains(&"recovered")),
        "the killed node had no job in flight"
    );
    assert_no_overlap(&fs::read_to_string(&journal).unwrap(), 400);
}

/// Checks that a job starts again only after its earlier run, and with a greater run number. A program that was killed
/// together with its server has a start and no end.
fn assert_no_overlap(journal: &str, jobs: usize) {
    let mut open: HashMap<&str, i64> = HashMap::new();
    let mut ended: HashSet<&str> = HashSet::new();
    for line in journal.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [event, id, run] = fields[..] else { panic!("malformed line: {line}") };
        let run: i64 = run.parse().unwrap();
        if event == "start" {
            let before = open.insert(id, run);
            assert!(
                before.is_none_or(|before| before < run),
                "{id} started again with an older run number:\n{journal}"
            );
        } else {
            assert_eq!(open.remove(id), Some(run), "the start and the end of {id} have different run numbers");
            ended.insert(id);
        }
    }
    assert!(open.is_empty(), "started and never ended: {open:?}");
    assert_eq!(ended.len(), jobs);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_runs_on_one_postgres_node_can_be_cancelled_through_another() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    let mut api_environment = Vec::from(environment);
    api_environment.push(("FAENA_SERVER_ROLES", "api,engine"));
    let worker_node = Faena::start(first_folder.path(), &environment).await;
    let api_node = Faena::start(second_folder.path(), &api_environment).await;
    let id = api_node.submit(json!({"name": "sleep", "payload": {"ms": 600_000}})).await;
    api_node.wait_for_state(&id, "PROCESSING").await;
    let (status, answer) = api_node.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    assert!(status.is_success(), "{answer}");
    let job = api_node.wait_for_state(&id, "CANCELLED").await;
    assert_eq!(job["errorReason"], "cancelled");
    // Its slot is free again: five jobs can run concurrently.
    let ids = join_all((0..5).map(|_| worker_node.submit(json!({"name": "sleep", "payload": {"ms": 600_000}})))).await;
    for id in &ids {
        worker_node.wait_for_state(id, "PROCESSING").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_on_postgres_wait_until_a_node_with_the_worker_role_starts() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let roles = |roles: &'static str| [("DATABASE_URL", database.url.as_str()), ("FAENA_SERVER_ROLES", roles)];
    let api_node = Faena::start(first_folder.path(), &roles("api,engine")).await;
    let (status, health) = api_node.get("/health/ready").await;
    assert_eq!((status, health["status"].as_str()), (StatusCode::OK, Some("degraded")), "{health}");
    let id = api_node.submit(json!({"name": "noop"})).await;
    let later = time_after(Duration::from_millis(1_500));
    let delayed = api_node.submit(json!({"name": "noop", "scheduledAt": later})).await;
    api_node.wait_for_state(&delayed, "QUEUED").await;
    assert_eq!(api_node.job(&id).await["status"], "QUEUED");
    let _worker = Faena::spawn(second_folder.path(), &roles("worker"));
    api_node.wait_for_state(&id, "COMPLETED").await;
    api_node.wait_for_state(&delayed, "COMPLETED").await;
    let (_, health) = api_node.get("/health/ready").await;
    assert_eq!(health["checks"]["workers"], json!({"status": "healthy", "activeCount": 1}), "{health}");
    assert_eq!(health["status"], "healthy", "the worker of the other node counts: {health}");
}

/// Returns the time after this delay, in the format of the API.
fn time_after(delay: Duration) -> String {
    (jiff::Timestamp::now() + delay).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_postgres_node_loses_its_jobs_changes_nothing_on_waking_and_then_works_again() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "1s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("WORKER_CONCURRENCY", "1"),
    ];
    let suspended = Faena::start(first_folder.path(), &environment).await;
    let id = suspended.submit(json!({"name": "sleep", "payload": {"ms": 2_000}})).await;
    let first = suspended.wait_for_state(&id, "PROCESSING").await;
    suspended.signal("STOP");
    let mut other = Faena::start(second_folder.path(), &environment).await;
    let second = eventually("the other node runs it", async || {
        let job = other.job(&id).await;
        (job["status"] == "PROCESSING" && job["run"] != first["run"]).then_some(job)
    })
    .await;
    assert!(second["run"].as_i64() > first["run"].as_i64());
    assert_eq!((&second["retryCount"], &second["errorReason"]), (&json!(1), &json!("orphaned")), "{second:#}");
    suspended.signal("CONT");
    // The resumed node reports the end of its own run, and the report is rejected.
    let done = other.wait_for_state(&id, "COMPLETED").await;
    crate::load::assert_completed_once(&done);
    assert_eq!((&done["run"], &done["workerId"]), (&second["run"], &second["workerId"]), "{done:#}");
    other.kill();
    let next = suspended.submit(json!({"name": "sleep", "payload": {"ms": 1}})).await;
    let next = suspended.wait_for_state(&next, "COMPLETED").await;
    assert!(next["workerId"] != first["workerId"], "its lost worker has a new registration");
    assert_eq!(suspended.job(&id).await, done, "the late report changed the job");
}

/// A node that was suspended for longer than its lease has claimed jobs that wait for a slot. The other node has started them
/// meanwhile, so the suspended node must not start them when it wakes up.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_postgres_node_starts_no_job_on_waking_that_it_no_longer_owns() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [first, second] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let starts = first_folder.path().join("starts");
    // Each run writes its number when it starts. Run numbers of a job only grow, so a smaller number after a larger one
    // means that a run started although a later run had replaced it. A run takes 0.2 s, so the eight slots of a node start
    // at most 140 jobs while the other node is frozen, and jobs are left after the third time even on a fast machine.
    let script = format!("echo $FAENA_JOB_ID $FAENA_RUN >> {}; sleep 0.2", starts.display());
    let job = json!({"name": "shell.run", "payload": {"argv": ["sh", "-c", script]}, "maxRetries": 10});
    let (status, answer) = first.post("/api/v1/jobs/batch", json!({"jobs": vec![job; 600]})).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let started = || fs::read_to_string(&starts).unwrap_or_default().lines().count();
    for frozen in [&first, &second, &first] {
        let before = started();
        eventually("both nodes work", async || (started() >= before + 20).then_some(())).await;
        frozen.signal("STOP");
        // Its lease of 2 s has ended, and the other node has recovered its jobs and started some of them.
        let frozen_at = std::time::Instant::now();
        eventually("the lease has ended", async || (frozen_at.elapsed() > Duration::from_millis(3_500)).then_some(()))
            .await;
        frozen.signal("CONT");
    }
    first.wait_until_all_jobs_end().await;
    let mut runs: HashMap<String, i64> = HashMap::new();
    for line in fs::read_to_string(&starts).unwrap().lines() {
        let (id, run) = line.split_once(' ').unwrap();
        let run: i64 = run.parse().unwrap();
        let last = runs.insert(id.to_owned(), run).unwrap_or(0);
        assert!(run > last, "job {id}: run {run} started after run {last}");
    }
    assert_eq!(runs.len(), 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_paused_on_one_postgres_node_is_paused_on_the_other_and_after_a_restart() {
    let database = Database::create().await;
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = two_nodes(&database, [folders[0].path(), folders[1].path()]).await;
    let (status, paused) =
        first.post("/api/v1/queues/mail/pause", json!({ "reason": "the SMTP server is down" })).await;
    assert_eq!(status, StatusCode::OK, "{paused}");
    let (_, seen) = second.get("/api/v1/queues/mail").await;
    assert_eq!(seen["paused"], paused["paused"]);
    drop((first, second));
    let [first, second] = two_nodes(&database, [folders[0].path(), folders[1].path()]).await;
    let (_, seen) = second.get("/api/v1/queues/mail").await;
    assert_eq!(seen["paused"], paused["paused"], "the pause is lost");
    second.post("/api/v1/queues/mail/resume", json!({})).await;
    let (_, seen) = first.get("/api/v1/queues/mail").await;
    assert_eq!(seen["paused"], Value::Null);
}
