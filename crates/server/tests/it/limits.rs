//! Several servers together never exceed a limit while some are killed. The start and end of every run prove it.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use faena_domain::Timestamp;
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    postgres::{Database, connect},
};

const JOBS: usize = 20_000;
const KEYS: usize = 40;
const KEY_LIMIT: usize = 3;
const QUEUE_LIMIT: usize = 100;
const JOB_MS: i64 = 60;

const RULES: &str = "
[[queues]]
name = \"narrow\"
concurrency = 100

[[limit]]
key = \"tenant-*\"
concurrency = 3
";

async fn node(folder: &Path, database: &Database) -> Faena {
    fs::write(folder.join("faena.toml"), RULES).unwrap();
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "1500ms"),
        ("FAENA_ORPHAN_DELAY", "20ms"),
        ("WORKER_CONCURRENCY", "60"),
    ];
    Faena::start(folder, &environment).await
}

async fn submit(faena: &Faena, from: usize, count: usize) {
    let jobs: Vec<Value> = (from..from + count)
        .map(|n| {
            let key = format!("tenant-{}", (n * 7) % KEYS);
            json!({
                "name": "sleep", "payload": {"ms": JOB_MS}, "queue": "narrow", "concurrencyKey": key, "maxRetries": 10,
                "retryDelays": [10],
            })
        })
        .collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
}

/// The start and the end of a run, as stored with the job.
struct RunRecord {
    key: String,
    start: i64,
    end: i64,
}

fn ms(text: &Value) -> Option<i64> {
    text.as_str().and_then(Timestamp::parse).map(Timestamp::as_ms)
}

/// Returns all runs that started. A list shows enough about jobs that ran once; the others are fetched one by one.
async fn records(faena: &Faena) -> Vec<RunRecord> {
    let mut records = Vec::new();
    let mut cursor = String::new();
    loop {
        let (status, list) = faena.get(&format!("/api/v1/jobs?limit=100&cursor={cursor}")).await;
        assert_eq!(status, StatusCode::OK, "{list}");
        for job in list["jobs"].as_array().unwrap() {
            assert_eq!(job["status"], "COMPLETED", "{job:#}");
            let key = job["concurrencyKey"].as_str().unwrap().to_owned();
            if job["retryCount"] == 0 {
                let (start, end) = (ms(&job["startedAt"]).unwrap(), ms(&job["completedAt"]).unwrap());
                records.push(RunRecord { key, start, end });
            } else {
                records.extend(all_runs(&faena.job(job["id"].as_str().unwrap()).await, &key));
            }
        }
        match list["nextCursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return records,
        }
    }
}

fn all_runs(job: &Value, key: &str) -> Vec<RunRecord> {
    let mut started: BTreeMap<i64, i64> = BTreeMap::new();
    let mut records = Vec::new();
    for entry in job["executionLog"].as_array().unwrap() {
        let (Some(run), at) = (entry["run"].as_i64(), ms(&entry["timestamp"]).unwrap()) else { continue };
        match entry["event"].as_str().unwrap() {
            "started" => {
                started.insert(run, at);
            }
            "completed" | "failed" | "orphaned" | "timeout" | "released" | "recovered" => {
                if let Some(start) = started.remove(&run) {
                    records.push(RunRecord { key: key.to_owned(), start, end: at });
                }
            }
            _ => {}
        }
    }
    records
}

/// Returns the highest number of concurrent runs. Runs that end and start in the same millisecond do not overlap: the second
/// takes the slot of the first.
fn highest_concurrency<'a>(records: impl Iterator<Item = &'a RunRecord>) -> i64 {
    let mut moments: Vec<(i64, i64)> = records.flat_map(|run| [(run.start, 1), (run.end, -1)]).collect();
    moments.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, change) in moments {
        now += change;
        most = most.max(now);
    }
    most
}

/// Returns the share of the limit that was in use while enough jobs were ready. Ignores the time after each kill, when the slots
/// of the killed server are not free yet.
fn limit_utilisation(records: &[RunRecord], kills: &[i64]) -> f64 {
    let begin = records.iter().map(|run| run.start).min().unwrap() + 500;
    let mut starts: Vec<i64> = records.iter().map(|run| run.start).collect();
    starts.sort_unstable();
    // Leaves out the last tenth, when some keys have no jobs left.
    let end = starts[starts.len() * 9 / 10];
    let is_after_kill = |at: i64| kills.iter().any(|kill| (*kill..*kill + 5_000).contains(&at));
    let (mut used, mut samples) = (0, 0);
    for at in (begin..end).step_by(10).filter(|at| !is_after_kill(*at)) {
        samples += 1;
        used += records.iter().filter(|run| run.start <= at && at < run.end).count();
    }
    used as f64 / (samples.max(1) * QUEUE_LIMIT) as f64
}

#[tokio::test(flavor = "multi_thread")]
async fn three_servers_on_postgres_that_are_killed_at_random_never_exceed_a_limit() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let database = Database::create().await;
    let mut nodes = Vec::new();
    for folder in &folders {
        nodes.push(node(folder.path(), &database).await);
    }
    for part in 0..4 {
        submit(&nodes[part % 3], part * JOBS / 4, JOBS / 4).await;
    }
    let mut kills = Vec::new();
    for round in 1..=3_u64 {
        let done = JOBS as u64 * round / 5;
        let (counting_node, victim) = (round as usize % 3, (round as usize + 1) % 3);
        eventually("a part of the jobs is completed", async || {
            (nodes[counting_node].count("status=COMPLETED").await >= done).then_some(())
        })
        .await;
        nodes[victim].kill();
        kills.push(Timestamp::now().as_ms());
        nodes[victim] = node(folders[victim].path(), &database).await;
    }
    nodes[0].wait_until_all_jobs_end().await;
    let records = records(&nodes[0]).await;
    assert!(records.len() >= JOBS, "only {} runs are recorded", records.len());
    assert!(
        highest_concurrency(records.iter()) <= QUEUE_LIMIT as i64,
        "the queue's limit of {QUEUE_LIMIT} was exceeded"
    );
    for key in 0..KEYS {
        let key = format!("tenant-{key}");
        let most = highest_concurrency(records.iter().filter(|run| run.key == key));
        assert!(most <= KEY_LIMIT as i64, "{most} concurrent runs of {key}");
    }
    let used = limit_utilisation(&records, &kills);
    println!("{} runs, {:.0} % of the limit in use", records.len(), used * 100.0);
    // The share depends on the machine (15 % while compilers use both cores), but a limit must not leave its slots empty.
    assert!(used > 0.05, "only {:.0} % of the limit was in use", used * 100.0);
    // No slot is left occupied.
    let client = connect(&database.url).await;
    let in_flight: i64 = client.query_one("SELECT count(*) FROM faena.key_in_flight", &[]).await.unwrap().get(0);
    assert_eq!(in_flight, 0);
    tokio::time::timeout(Duration::from_secs(60), nodes[1].wait_until_all_jobs_end()).await.unwrap();
}
