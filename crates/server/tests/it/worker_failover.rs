//! A worker belongs to no server: with several nodes on one PostgreSQL it may reconnect to another node or call any of them.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    load::assert_completed_once,
    postgres::Database,
    workers::{Grpc, StreamWorker, TestWorker, WebSocket, WorkerOptions},
};

pub async fn two_nodes(database: &Database, folders: [&Path; 2]) -> [Faena; 2] {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "2s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "3s"),
        ("FAENA_RECONNECT_GRACE", "3s"),
        ("FAENA_GUARDIAN_INTERVAL", "500ms"),
    ];
    Faena::start_two(folders, &environment).await
}

/// What happens to the first connection.
#[derive(Clone, Copy)]
enum FirstConnection {
    Closed,
    /// It stays open, and the worker opens a second one.
    StaysOpen,
    ServerKilled,
}

async fn assert_keeps_its_job_on_another_node<W: TestWorker>(first_connection: FirstConnection) {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [mut first, second] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let mut worker = W::connect(&first, WorkerOptions::new("roaming", &["walk"])).await;
    let id = first.submit(json!({"name": "walk"})).await;
    let job = worker.next_job().await;
    let options = WorkerOptions { session_token: worker.session_token(), ..WorkerOptions::new("roaming", &["walk"]) };
    let mut old = Some(worker);
    match first_connection {
        FirstConnection::Closed => old.take().unwrap().crash().await,
        FirstConnection::StaysOpen => {}
        FirstConnection::ServerKilled => first.kill(),
    }
    let mut worker = W::connect(&second, options).await;
    // Waits so long that the first server, or the one that takes over its workers, would have declared the worker lost.
    let lost = eventually("the grace period and the lease have expired", async || {
        let (_, worker) = second.get("/api/v1/workers/roaming").await;
        let history = worker["history"].as_array().unwrap().clone();
        let marker = second.submit(json!({"name": "sleep", "payload": {"ms": 900}})).await;
        second.wait_for_state(&marker, "COMPLETED").await;
        (now_ms() - job_created_ms(&id) > 4_500).then_some((worker["endedAt"].clone(), history))
    })
    .await;
    assert!(lost.0.is_null(), "{lost:?}");
    assert_eq!(worker.complete(&job, json!("arrived")).await, Ok(()));
    let done = second.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["run"], &done["retryCount"]), (&json!(job.run), &json!(0)), "{done:#}");
    // The worker gets jobs from this node.
    let next = second.submit(json!({"name": "walk"})).await;
    let job = worker.next_job().await;
    assert_eq!(job.id, next);
    assert_eq!(worker.complete(&job, Value::Null).await, Ok(()));
    second.wait_for_state(&next, "COMPLETED").await;
    drop(old);
}

fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// Returns the creation time, which is part of the id.
fn job_created_ms(id: &str) -> i64 {
    let digits: String = id.chars().filter(|c| *c != '-').take(12).collect();
    i64::from_str_radix(&digits, 16).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_worker_on_postgres_that_reconnects_to_another_node_keeps_its_jobs() {
    assert_keeps_its_job_on_another_node::<StreamWorker<WebSocket>>(FirstConnection::Closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_postgres_with_a_half_open_connection_is_served_on_its_new_one() {
    assert_keeps_its_job_on_another_node::<StreamWorker<WebSocket>>(FirstConnection::StaysOpen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_worker_on_postgres_whose_server_was_killed_keeps_its_jobs_on_another_node() {
    assert_keeps_its_job_on_another_node::<StreamWorker<Grpc>>(FirstConnection::ServerKilled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_worker_on_postgres_may_call_any_node() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let nodes = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let mut calls = 0;
    let mut node = || {
        calls += 1;
        &nodes[calls % 2]
    };
    let base = "/api/v1/workers";
    let body = json!({"workerId": "caller", "version": "1.4.2", "capabilities": ["call"]});
    let (status, answer) = node().post(&format!("{base}/register"), body).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    for n in 0..15 {
        let id = node().submit(json!({"name": "call"})).await;
        let job = eventually("a job is claimed", async || {
            let (status, answer) = node().post(&format!("{base}/caller/claim"), json!({"waitMs": 500})).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            answer["jobs"].get(0).cloned()
        })
        .await;
        assert_eq!(job["id"], json!(id));
        let (_, worker) = node().get(&format!("{base}/caller")).await;
        assert_eq!(worker["inFlight"], 1, "every node knows: {worker:#}");
        let path = format!("{base}/caller/jobs/{id}");
        for (report, mut body) in [
            ("step", json!({"name": "one", "result": n})),
            ("log", json!({"message": "half way"})),
            ("complete", json!({"result": n})),
            ("complete", json!({"result": n})),
        ] {
            body["run"] = job["run"].clone();
            let (status, answer) = node().post(&format!("{path}/{report}"), body).await;
            assert_eq!(status, StatusCode::OK, "{report} of job {n}: {answer}");
        }
        let done = node().wait_for_state(&id, "COMPLETED").await;
        assert_completed_once(&done);
        assert_eq!((&done["run"], &done["retryCount"]), (&job["run"], &json!(0)));
    }
    let (_, worker) = node().get(&format!("{base}/caller")).await;
    assert!(worker["endedAt"].is_null(), "{worker:#}");
    assert_eq!((&worker["version"], &worker["inFlight"]), (&json!("1.4.2"), &json!(0)), "{worker:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_on_postgres_is_requested_and_cancelled_through_another_node() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [first, second] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&first, WorkerOptions::new("drained", &["walk"])).await;
    let (status, _) = second.post("/api/v1/workers/drained/drain", json!({})).await;
    assert_eq!(status, StatusCode::OK);
    eventually("its node knows of the drain", async || {
        let (_, worker) = first.get("/api/v1/workers/drained").await;
        (worker["state"] == "Draining").then_some(())
    })
    .await;
    let id = first.submit(json!({"name": "walk"})).await;
    let marker = first.submit(json!({"name": "noop"})).await;
    first.wait_for_state(&marker, "COMPLETED").await;
    assert_eq!(first.job(&id).await["status"], "QUEUED");
    let answer = second.http.delete(format!("{}/api/v1/workers/drained/drain", second.url)).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let job = worker.next_job().await;
    assert_eq!(job.id, id);
    assert_eq!(worker.complete(&job, Value::Null).await, Ok(()));
    first.wait_for_state(&id, "COMPLETED").await;
}
