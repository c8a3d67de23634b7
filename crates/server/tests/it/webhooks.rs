//! Webhooks of real servers that are killed while they send.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, http::HeaderMap};
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    postgres::Database,
};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const JOBS: usize = 60;

type Heard = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

/// The far end: takes its time, so that there is always something under way.
async fn receiver() -> (String, Heard) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let heard = Heard::default();
    let hear = |State(heard): State<Heard>, headers: HeaderMap, body: Bytes| async move {
        heard.lock().unwrap().push((headers, body));
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let router = Router::new().fallback(hear).with_state(heard.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, heard)
}

async fn everybody_is_told_although_the_server_is_killed(folder: &Path, environment: &[(&str, &str)]) {
    let (url, heard) = receiver().await;
    let settings = [
        ("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"),
        ("FAENA_WEBHOOK_SECRETS", SECRET),
        ("FAENA_WEBHOOK_PER_HOST", "5"),
        ("FAENA_NODE_LEASE", "300ms"),
    ];
    let environment = [&settings, environment].concat();
    let mut faena = Faena::start(folder, &environment).await;
    let jobs: Vec<Value> = (0..JOBS).map(|_| json!({"name": "noop", "webhookUrl": url})).collect();
    let (_, created) = faena.post("/api/v1/jobs/batch", json!({"jobs": jobs})).await;
    let ids: HashSet<String> =
        created["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    for part in [JOBS / 4, JOBS / 2] {
        eventually("some were told", async || (heard.lock().unwrap().len() >= part).then_some(())).await;
        faena.kill();
        faena = Faena::start(folder, &environment).await;
    }
    eventually("everything is delivered", async || {
        let (_, list) = faena.get("/api/v1/webhooks?state=delivered&limit=100").await;
        (list["webhooks"].as_array()?.len() == JOBS).then_some(())
    })
    .await;
    let mut told: HashMap<String, usize> = HashMap::new();
    let verifier = standardwebhooks::Webhook::new(SECRET).unwrap();
    for (headers, body) in heard.lock().unwrap().iter() {
        verifier.verify(body, headers).unwrap();
        let body: Value = serde_json::from_slice(body).unwrap();
        *told.entry(body["jobId"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    assert_eq!(told.keys().cloned().collect::<HashSet<_>>(), ids, "each at least once");
    assert!(told.values().any(|times| *times > 1), "no kill has met a sender");
    assert!(told.values().all(|times| *times <= 3), "{told:?}");
    let log = faena.log();
    assert!(!log.contains("MfKQ"), "a secret in the log: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_is_told_although_the_server_is_killed_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    everybody_is_told_although_the_server_is_killed(folder.path(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_is_told_although_the_server_is_killed_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    everybody_is_told_although_the_server_is_killed(folder.path(), &environment).await;
}
