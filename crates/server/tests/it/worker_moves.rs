//! A worker belongs to no server: on several nodes over one PostgreSQL it may come back at another one, or call any of them.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    hands::{Frames, Grpc, Hand, WebSocket, who},
    load::assert_completed_once,
    postgres::Database,
};

async fn two_nodes(database: &Database, folders: [&Path; 2]) -> [Faena; 2] {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "2s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("FAENA_WORKER_HEARTBEAT", "300ms"),
        ("FAENA_WORKER_SILENCE", "3s"),
        ("FAENA_RECONNECT_GRACE", "3s"),
        ("FAENA_GUARDIAN_INTERVAL", "500ms"),
    ];
    let mut nodes = folders.map(|folder| Faena::spawn(folder, &environment));
    for node in &mut nodes {
        node.listening().await;
    }
    nodes
}

/// How the first connection ends.
#[derive(Clone, Copy)]
enum End {
    Cut,
    /// It stays open, and the worker connects a second time.
    StaysOpen,
    ServerKilled,
}

async fn keeps_its_job_at_another_node<H: Hand>(end: End) {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [mut first, second] = two_nodes(&database, [one.path(), two.path()]).await;
    let mut hand = H::connect(&first, who("wanderer", &["walk"])).await;
    let id = first.submit(json!({"name": "walk"})).await;
    let job = hand.next_job().await;
    let mut old = Some(hand);
    match end {
        End::Cut => old.take().unwrap().cut().await,
        End::StaysOpen => {}
        End::ServerKilled => first.kill(),
    }
    let mut hand = H::connect(&second, who("wanderer", &["walk"])).await;
    // The first server, or whoever stands in for it, has had the time to give the worker up, had it been lost.
    let lost = eventually("the grace time and the lease are over", async || {
        let (_, worker) = second.get("/api/v1/workers/wanderer").await;
        let history = worker["history"].as_array().unwrap().clone();
        let marker = second.submit(json!({"name": "sleep", "payload": {"ms": 900}})).await;
        second.job_is(&marker, "COMPLETED").await;
        (now_ms() - job_created_ms(&id) > 4_500).then_some((worker["endedAt"].clone(), history))
    })
    .await;
    assert!(lost.0.is_null(), "{lost:?}");
    assert_eq!(hand.complete(&job, json!("arrived")).await, Ok(()));
    let done = second.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["run"], &done["retryCount"]), (&json!(job.run), &json!(0)), "{done:#}");
    // And it gets jobs here.
    let next = second.submit(json!({"name": "walk"})).await;
    let job = hand.next_job().await;
    assert_eq!(job.id, next);
    assert_eq!(hand.complete(&job, Value::Null).await, Ok(()));
    second.job_is(&next, "COMPLETED").await;
    drop(old);
}

fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

/// The creation time is part of the id.
fn job_created_ms(id: &str) -> i64 {
    let digits: String = id.chars().filter(|c| *c != '-').take(12).collect();
    i64::from_str_radix(&digits, 16).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_worker_on_postgres_that_comes_back_at_another_node_keeps_its_jobs() {
    keeps_its_job_at_another_node::<Frames<WebSocket>>(End::Cut).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_postgres_whose_old_connection_still_seems_open_is_heard_on_the_new_one() {
    keeps_its_job_at_another_node::<Frames<WebSocket>>(End::StaysOpen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_worker_on_postgres_whose_server_was_killed_keeps_its_jobs_at_another_node() {
    keeps_its_job_at_another_node::<Frames<Grpc>>(End::ServerKilled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_postgres_that_calls_may_call_any_node() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let nodes = two_nodes(&database, [one.path(), two.path()]).await;
    let mut turn = 0;
    let mut node = || {
        turn += 1;
        &nodes[turn % 2]
    };
    let base = "/api/v1/workers";
    let body = json!({"workerId": "caller", "capabilities": ["call"]});
    let (status, answer) = node().post(&format!("{base}/register"), body).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    for n in 0..15 {
        let id = node().submit(json!({"name": "call"})).await;
        let job = eventually("a job comes", async || {
            let (status, answer) = node().post(&format!("{base}/caller/claim"), json!({"waitMs": 500})).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            answer["jobs"].get(0).cloned()
        })
        .await;
        assert_eq!(job["id"], json!(id));
        let path = format!("{base}/caller/jobs/{id}");
        for (report, mut body) in [
            ("step", json!({"name": "one", "result": n})),
            ("log", json!({"message": "half of it"})),
            ("complete", json!({"result": n})),
            ("complete", json!({"result": n})),
        ] {
            body["run"] = job["run"].clone();
            let (status, answer) = node().post(&format!("{path}/{report}"), body).await;
            assert_eq!(status, StatusCode::OK, "{report} of job {n}: {answer}");
        }
        let done = node().job_is(&id, "COMPLETED").await;
        assert_completed_once(&done);
        assert_eq!((&done["run"], &done["retryCount"]), (&job["run"], &json!(0)));
    }
    let (_, worker) = node().get(&format!("{base}/caller")).await;
    assert!(worker["endedAt"].is_null(), "{worker:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_postgres_is_drained_through_another_node_and_the_drain_called_off() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [near, far] = two_nodes(&database, [one.path(), two.path()]).await;
    let mut hand = Frames::<WebSocket>::connect(&near, who("tired", &["walk"])).await;
    let (status, _) = far.post("/api/v1/workers/tired/drain", json!({})).await;
    assert_eq!(status, StatusCode::OK);
    eventually("its node has heard of it", async || {
        let (_, worker) = near.get("/api/v1/workers/tired").await;
        (worker["state"] == "Draining").then_some(())
    })
    .await;
    let id = near.submit(json!({"name": "walk"})).await;
    let marker = near.submit(json!({"name": "noop"})).await;
    near.job_is(&marker, "COMPLETED").await;
    assert_eq!(near.job(&id).await["status"], "QUEUED");
    let answer = far.http.delete(format!("{}/api/v1/workers/tired/drain", far.url)).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let job = hand.next_job().await;
    assert_eq!(job.id, id);
    assert_eq!(hand.complete(&job, Value::Null).await, Ok(()));
    near.job_is(&id, "COMPLETED").await;
}
