//! The database goes away under load and comes back: requests are told so meanwhile, and everything resumes by itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use reqwest::StatusCode;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

use crate::{
    faena::{Faena, eventually},
    load::{Load, assert_all_completed_once},
    postgres::{Database, Server, connect},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_postgres_costs_time_and_no_job() {
    let folder = tempfile::tempdir().unwrap();
    let database = Server::start();
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("FAENA_NODE_LEASE", "3s"),
        ("WORKER_CONCURRENCY", "20"),
    ];
    let mut faena = Faena::start(folder.path(), &environment).await;
    let mut load = Load::start(7, 4, Duration::from_millis(5));
    load.aim_at(&faena);
    for _ in 0..3 {
        let before = load.count();
        eventually("work is taken in", async || (load.count() > before + 200).then_some(())).await;
        tokio::task::block_in_place(|| database.restart_at_once());
    }
    let before = load.count();
    eventually("work is taken in again", async || (load.count() > before + 200).then_some(())).await;
    let acknowledged = load.stop().await;
    assert!(faena.has_ended().is_none(), "the server stayed");
    assert_all_completed_once(&faena, &acknowledged).await;
    load.assert_refused_properly();
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::OK, &json!("healthy")), "{health:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_away_requests_get_503_with_retry_after_and_running_jobs_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let database = Server::start();
    let environment = [("DATABASE_URL", database.url.as_str())];
    let faena = Faena::start(folder.path(), &environment).await;
    let running = faena.submit(json!({"name": "sleep", "payload": {"ms": 1_500}})).await;
    faena.job_is(&running, "PROCESSING").await;
    let waiting = faena.submit(json!({"name": "unknown.type"})).await;
    tokio::task::block_in_place(|| database.stop_at_once());

    let jobs = format!("{}/api/v1/jobs", faena.url);
    let one = format!("{jobs}/{waiting}");
    for request in [
        faena.http.post(&jobs).json(&json!({"name": "noop"})),
        faena.http.post(format!("{jobs}/batch")).json(&json!({"jobs": [{"name": "noop"}]})),
        faena.http.get(&jobs),
        faena.http.get(&one),
        faena.http.get(format!("{one}/events")),
        faena.http.patch(&one).json(&json!({"priority": "HIGH"})),
        faena.http.post(format!("{one}/cancel")),
        faena.http.post(format!("{one}/retry")),
        faena.http.delete(&one),
        faena.http.post(format!("{jobs}/bulk/cancel")).json(&json!({"all": true})),
    ] {
        let (client, request) = request.build_split();
        let request = request.unwrap();
        let what = format!("{} {}", request.method(), request.url());
        let answer = client.execute(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{what}");
        assert!(answer.headers().contains_key("retry-after"), "{what}");
        let body: serde_json::Value = answer.json().await.unwrap();
        assert_eq!(body["error"]["code"], "UNAVAILABLE", "{what}: {body}");
    }
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy")), "{health:#}");
    let (status, health) = faena.get("/health/live").await;
    assert_eq!((status, health), (StatusCode::OK, json!({"status": "ok"})));

    tokio::task::block_in_place(|| database.start_again());
    // Its end came while there was nobody to tell; it is told now, and it was its first run.
    let job = faena.job_is(&running, "COMPLETED").await;
    assert_eq!(crate::faena::events(&job), ["created", "queued", "assigned", "started", "completed"]);
    let fresh = faena.submit(json!({"name": "noop"})).await;
    faena.job_is(&fresh, "COMPLETED").await;
    assert_eq!(faena.job(&waiting).await["status"], "QUEUED");
    eventually("every loop is well again", async || {
        let (status, health) = faena.get("/health/ready").await;
        (status == StatusCode::OK && health["status"] == "healthy").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_is_away_for_longer_than_the_lease_takes_no_job_from_its_node() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let database = Server::start();
    let environment =
        [("DATABASE_URL", database.url.as_str()), ("FAENA_NODE_LEASE", "1s"), ("WORKER_CONCURRENCY", "1")];
    let nodes =
        [Faena::start(folders[0].path(), &environment).await, Faena::start(folders[1].path(), &environment).await];
    let mut running = Vec::new();
    for _ in &nodes {
        let id = nodes[0].submit(json!({"name": "sleep", "payload": {"ms": 5_000}})).await;
        nodes[0].job_is(&id, "PROCESSING").await;
        running.push(id);
    }
    tokio::task::block_in_place(|| database.stop_at_once());
    // The length of the outage: more than two leases.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    tokio::task::block_in_place(|| database.start_again());
    for id in &running {
        let job = nodes[1].job_is(id, "COMPLETED").await;
        assert_eq!(crate::faena::events(&job), ["created", "queued", "assigned", "started", "completed"], "{job:#}");
    }
}

/// Stands between a server and its PostgreSQL. When it is told so, it loses PostgreSQL's answer to the next claim: the claim
/// arrives and is committed, its connection falls silent.
struct Proxy {
    url: String,
    armed: Arc<AtomicBool>,
    cut: Arc<Notify>,
}

impl Proxy {
    async fn start(database: &str) -> Proxy {
        let (front, name) = database.rsplit_once('/').unwrap();
        let (user, far) = front.rsplit_once('@').unwrap();
        let far = far.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{user}@{}/{name}", listener.local_addr().unwrap());
        let proxy = Proxy { url, armed: Arc::default(), cut: Arc::default() };
        let (armed, cut) = (proxy.armed.clone(), proxy.cut.clone());
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&far).await.unwrap();
                tokio::spawn(carry(near, far, armed.clone(), cut.clone()));
            }
        });
        proxy
    }
}

async fn carry(near: TcpStream, far: TcpStream, armed: Arc<AtomicBool>, cut: Arc<Notify>) {
    let (mut near_in, mut near_out) = near.into_split();
    let (mut far_in, mut far_out) = far.into_split();
    let deaf = AtomicBool::new(false);
    let there = async {
        let mut buffer = vec![0; 64 << 10];
        let mut claiming = false;
        loop {
            let count = near_in.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            // These words stand in the wire protocol as they are: a claim begins by telling the planner what to leave.
            let says = |text: &str| buffer[..count].windows(text.len()).any(|part| part == text.as_bytes());
            claiming |= says("enable_seqscan = off");
            if claiming && says("COMMIT") {
                claiming = false;
                if armed.swap(false, Ordering::SeqCst) {
                    deaf.store(true, Ordering::SeqCst);
                }
            }
            far_out.write_all(&buffer[..count]).await?;
        }
    };
    let back = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = far_in.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            if !deaf.load(Ordering::SeqCst) {
                near_out.write_all(&buffer[..count]).await?;
            }
        }
    };
    let _: std::io::Result<()> = tokio::select! {
        ended = there => ended,
        ended = back => ended,
        () = cut.notified() => Ok(()),
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_whose_handing_out_was_committed_in_postgres_and_never_heard_of_are_not_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let proxy = Proxy::start(&database.url).await;
    let environment = [("DATABASE_URL", proxy.url.as_str()), ("WORKER_CONCURRENCY", "1"), ("FAENA_NODE_LEASE", "3s")];
    let faena = Faena::start(folder.path(), &environment).await;
    let first = faena.submit(json!({"name": "sleep", "payload": {"ms": 1_000}})).await;
    faena.job_is(&first, "PROCESSING").await;
    let second = faena.submit(json!({"name": "sleep", "payload": {"ms": 1}})).await;
    // When the first ends, the second is asked for. PostgreSQL hands it out, and its answer is lost on the way.
    proxy.armed.store(true, Ordering::SeqCst);
    let direct = connect(&database.url).await;
    eventually("PostgreSQL has handed the second job out", async || {
        let ready: i64 = direct.query_one("SELECT count(*) FROM faena.ready", &[]).await.unwrap().get(0);
        (ready == 0).then_some(())
    })
    .await;
    proxy.cut.notify_waiters();
    assert!(!proxy.armed.load(Ordering::SeqCst), "the answer was lost");
    faena.job_is(&first, "COMPLETED").await;
    let job = faena.job_is(&second, "COMPLETED").await;
    crate::load::assert_completed_once(&job);
    assert_eq!(job["retryCount"], 0, "it had never begun: {job:#}");
}
