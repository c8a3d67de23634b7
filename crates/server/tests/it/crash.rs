//! The server is killed with SIGKILL at random moments: no acknowledged job is lost, runs twice or gets stuck.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    load::{Load, Random, assert_all_completed_once},
    postgres::Database,
};

/// FAENA_TEST_KILLS overrides the number of kills, FAENA_TEST_SEED the seed of the random moments.
const KILLS: u64 = 50;
const SEED: u64 = 20_261_115;

async fn assert_no_job_is_lost_by_kills(folder: &Path, environment: &[(&str, &str)], longest_uptime_ms: u64) {
    let kills = std::env::var("FAENA_TEST_KILLS").ok().map_or(KILLS, |text| text.parse().unwrap());
    let seed = std::env::var("FAENA_TEST_SEED").ok().map_or(SEED, |text| text.parse().unwrap());
    let mut random = Random(seed);
    let mut load = Load::start(seed, 3, Duration::from_millis(8));
    for _ in 0..kills {
        let mut faena = Faena::spawn(folder, environment);
        // One in five is killed before it listens: while it opens, migrates, joins or recovers.
        if random.below(5) == 0 {
            tokio::time::sleep(Duration::from_millis(random.below(150))).await;
        } else {
            faena.wait_until_listening().await;
            load.aim_at(&faena);
            tokio::time::sleep(Duration::from_millis(random.below(longest_uptime_ms))).await;
        }
        faena.kill();
    }
    let faena = Faena::start(folder, environment).await;
    load.aim_at(&faena);
    let acknowledged = load.stop().await;
    assert!(acknowledged.len() as u64 > kills * 5, "too few jobs were submitted: {}", acknowledged.len());
    let jobs = assert_all_completed_once(&faena, &acknowledged).await;
    load.assert_rejections_are_503();
    let recovered = jobs.iter().filter(|job| crate::faena::events(job).contains(&"recovered")).count();
    let orphaned = jobs.iter().filter(|job| job["retryCount"] != 0).count();
    println!("{kills} kills, {} jobs acknowledged, {recovered} recovered, {orphaned} orphaned", jobs.len());
    assert!(recovered + orphaned > 0, "no job was running when the server was killed");
}

const SETTINGS: [(&str, &str); 3] =
    [("FAENA_ORPHAN_DELAY", "50ms"), ("FAENA_NODE_LEASE", "300ms"), ("WORKER_CONCURRENCY", "20")];

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_job_completes_once_although_the_server_is_killed_repeatedly_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    assert_no_job_is_lost_by_kills(folder.path(), &SETTINGS, 600).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_job_completes_once_although_the_server_is_killed_repeatedly_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [&SETTINGS[..], &[("DATABASE_URL", database.url.as_str())]].concat();
    // Longer than the lease, so that some servers run long enough to take over jobs of killed ones.
    assert_no_job_is_lost_by_kills(folder.path(), &environment, 1_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_action_continues_after_a_kill_and_changes_no_job_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let jobs: Vec<Value> = (0..40).map(|_| json!({ "name": "unhandled.type" })).collect();
    let (_, batch) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    faena.post("/api/v1/jobs/bulk/cancel", json!({ "all": true })).await;
    let request = json!({ "filter": { "status": "CANCELLED" }, "perSecond": 20 });
    let (status, answer) = faena.post("/api/v1/jobs/bulk/retry", request).await;
    assert_eq!(status, reqwest::StatusCode::ACCEPTED, "{answer}");
    let path = format!("/api/v1/bulk/{}", answer["id"].as_str().unwrap());
    eventually("a part of the jobs is retried", async || {
        let done = faena.get(&path).await.1["done"].as_u64().unwrap();
        (done >= 5).then_some(())
    })
    .await;
    faena.kill();
    let faena = Faena::start(folder.path(), &[]).await;
    let (_, before) = faena.get(&path).await;
    assert_eq!(before["finishedAt"], Value::Null, "the kill came after the end: {before}");
    let finished = eventually("the bulk action finishes", async || {
        let (_, bulk) = faena.get(&path).await;
        (!bulk["finishedAt"].is_null()).then_some(bulk)
    })
    .await;
    assert_eq!((&finished["done"], &finished["skipped"]), (&json!(40), &json!(0)), "{finished}");
    for id in batch["ids"].as_array().unwrap() {
        let job = faena.job(id.as_str().unwrap()).await;
        assert_eq!(crate::faena::events(&job).iter().filter(|event| **event == "retried").count(), 1, "{job:#}");
    }
}
