//! PostgreSQL stops under load and starts again: requests get an error meanwhile, and the server resumes by itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
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
async fn restarts_of_postgres_under_load_lose_no_job() {
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
        eventually("jobs are accepted", async || (load.count() > before + 200).then_some(())).await;
        tokio::task::block_in_place(|| database.restart_immediately());
    }
    let before = load.count();
    eventually("jobs are accepted again", async || (load.count() > before + 200).then_some(())).await;
    let acknowledged = load.stop().await;
    assert!(faena.exit_status().is_none(), "the server has exited");
    assert_all_completed_once(&faena, &acknowledged).await;
    load.assert_rejections_are_503();
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::OK, &json!("healthy")), "{health:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_down_requests_get_503_with_retry_after_and_running_jobs_continue() {
    let folder = tempfile::tempdir().unwrap();
    let database = Server::start();
    let environment = [("DATABASE_URL", database.url.as_str())];
    let faena = Faena::start(folder.path(), &environment).await;
    let running = faena.submit(json!({"name": "sleep", "payload": {"ms": 1_500}})).await;
    faena.wait_for_state(&running, "PROCESSING").await;
    let waiting = faena.submit(json!({"name": "unknown.type"})).await;
    tokio::task::block_in_place(|| database.stop_immediately());

    let jobs = format!("{}/api/v1/jobs", faena.url);
    let job = format!("{jobs}/{waiting}");
    for request in [
        faena.http.post(&jobs).json(&json!({"name": "noop"})),
        faena.http.post(format!("{jobs}/batch")).json(&json!({"jobs": [{"name": "noop"}]})),
        faena.http.get(&jobs),
        faena.http.get(&job),
        faena.http.get(format!("{job}/events")),
        faena.http.patch(&job).json(&json!({"priority": "HIGH"})),
        faena.http.post(format!("{job}/cancel")),
        faena.http.post(format!("{job}/retry")),
        faena.http.delete(&job),
        faena.http.post(format!("{jobs}/bulk/cancel")).json(&json!({"all": true})),
    ] {
        let (client, request) = request.build_split();
        let request = request.unwrap();
        let label = format!("{} {}", request.method(), request.url());
        let answer = client.execute(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{label}");
        assert!(answer.headers().contains_key("retry-after"), "{label}");
        let body: serde_json::Value = answer.json().await.unwrap();
        assert_eq!(body["error"]["code"], "UNAVAILABLE", "{label}: {body}");
    }
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy")), "{health:#}");
    let (status, health) = faena.get("/health/live").await;
    assert_eq!((status, health), (StatusCode::OK, json!({"status": "ok"})));

    tokio::task::block_in_place(|| database.start_again());
    // The run ended during the outage. The server reports it now, without a second run.
    let job = faena.wait_for_state(&running, "COMPLETED").await;
    assert_eq!(crate::faena::events(&job), ["created", "queued", "assigned", "started", "completed"]);
    let fresh = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&fresh, "COMPLETED").await;
    assert_eq!(faena.job(&waiting).await["status"], "QUEUED");
    eventually("every loop is healthy again", async || {
        let (status, health) = faena.get("/health/ready").await;
        (status == StatusCode::OK && health["status"] == "healthy").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_outage_longer_than_the_lease_orphans_no_job() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let database = Server::start();
    let environment =
        [("DATABASE_URL", database.url.as_str()), ("FAENA_NODE_LEASE", "1s"), ("WORKER_CONCURRENCY", "1")];
    let nodes =
        [Faena::start(folders[0].path(), &environment).await, Faena::start(folders[1].path(), &environment).await];
    let mut running = Vec::new();
    for _ in &nodes {
        let id = nodes[0].submit(json!({"name": "sleep", "payload": {"ms": 5_000}})).await;
        nodes[0].wait_for_state(&id, "PROCESSING").await;
        running.push(id);
    }
    tokio::task::block_in_place(|| database.stop_immediately());
    // The outage lasts more than two leases.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    tokio::task::block_in_place(|| database.start_again());
    for id in &running {
        let job = nodes[1].wait_for_state(id, "COMPLETED").await;
        assert_eq!(crate::faena::events(&job), ["created", "queued", "assigned", "started", "completed"], "{job:#}");
    }
}

/// A proxy in front of PostgreSQL that drops the answer to the next claim once it is armed: the claim is committed, and its
/// connection falls silent.
struct ClaimProxy {
    url: String,
    is_armed: Arc<AtomicBool>,
    disconnect: Arc<Notify>,
}

impl ClaimProxy {
    async fn start(database: &str) -> ClaimProxy {
        let (front, name) = database.rsplit_once('/').unwrap();
        let (user, address) = front.rsplit_once('@').unwrap();
        let address = address.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{user}@{}/{name}", listener.local_addr().unwrap());
        let proxy = ClaimProxy { url, is_armed: Arc::default(), disconnect: Arc::default() };
        let (is_armed, disconnect) = (proxy.is_armed.clone(), proxy.disconnect.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&address).await.unwrap();
                tokio::spawn(forward(client, server, is_armed.clone(), disconnect.clone()));
            }
        });
        proxy
    }
}

async fn forward(client: TcpStream, server: TcpStream, is_armed: Arc<AtomicBool>, disconnect: Arc<Notify>) {
    let (mut client_in, mut client_out) = client.into_split();
    let (mut server_in, mut server_out) = server.into_split();
    let drops_answers = AtomicBool::new(false);
    let to_server = async {
        let mut buffer = vec![0; 64 << 10];
        let mut is_claim = false;
        loop {
            let count = client_in.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            // SQL is plain text in the wire protocol. A claim begins with a setting for the planner.
            let contains = |text: &str| buffer[..count].windows(text.len()).any(|part| part == text.as_bytes());
            is_claim |= contains("enable_seqscan = off");
            if is_claim && contains("COMMIT") {
                is_claim = false;
                if is_armed.swap(false, Ordering::SeqCst) {
                    drops_answers.store(true, Ordering::SeqCst);
                }
            }
            server_out.write_all(&buffer[..count]).await?;
        }
    };
    let to_client = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = server_in.read(&mut buffer).await?;
            if count == 0 {
                return Ok(());
            }
            if !drops_answers.load(Ordering::SeqCst) {
                client_out.write_all(&buffer[..count]).await?;
            }
        }
    };
    let _: std::io::Result<()> = tokio::select! {
        ended = to_server => ended,
        ended = to_client => ended,
        () = disconnect.notified() => Ok(()),
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_claim_whose_commit_reply_from_postgres_was_lost_are_not_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let proxy = ClaimProxy::start(&database.url).await;
    let environment = [("DATABASE_URL", proxy.url.as_str()), ("WORKER_CONCURRENCY", "1"), ("FAENA_NODE_LEASE", "3s")];
    let faena = Faena::start(folder.path(), &environment).await;
    let first = faena.submit(json!({"name": "sleep", "payload": {"ms": 1_000}})).await;
    faena.wait_for_state(&first, "PROCESSING").await;
    let second = faena.submit(json!({"name": "sleep", "payload": {"ms": 1}})).await;
    // When the first job ends, the server claims the second. PostgreSQL commits the claim, and the proxy drops its answer.
    proxy.is_armed.store(true, Ordering::SeqCst);
    let direct = connect(&database.url).await;
    eventually("the claim of the second job is committed", async || {
        let ready: i64 = direct.query_one("SELECT count(*) FROM faena.ready", &[]).await.unwrap().get(0);
        (ready == 0).then_some(())
    })
    .await;
    let lost_at = Instant::now();
    proxy.disconnect.notify_waiters();
    assert!(!proxy.is_armed.load(Ordering::SeqCst), "the proxy dropped no answer");
    faena.wait_for_state(&first, "COMPLETED").await;
    let job = faena.wait_for_state(&second, "COMPLETED").await;
    crate::load::assert_completed_once(&job);
    assert_eq!(job["retryCount"], 0, "the lost claim used an attempt: {job:#}");
    assert!(lost_at.elapsed() < Duration::from_secs(15), "the job was stranded for {:?}", lost_at.elapsed());
}
