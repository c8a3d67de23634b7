//! Webhooks are delivered although the server is killed while it sends them.

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

type Requests = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

/// Starts a slow receiver, so that there are always requests in flight. Returns its URL and the requests it gets.
async fn receiver() -> (String, Requests) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let requests = Requests::default();
    let receive = |State(requests): State<Requests>, headers: HeaderMap, body: Bytes| async move {
        requests.lock().unwrap().push((headers, body));
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let router = Router::new().fallback(receive).with_state(requests.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, requests)
}

async fn assert_every_webhook_is_delivered_despite_kills(folder: &Path, environment: &[(&str, &str)]) {
    let (url, requests) = receiver().await;
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
        eventually("some webhooks are delivered", async || (requests.lock().unwrap().len() >= part).then_some(()))
            .await;
        faena.kill();
        faena = Faena::start(folder, &environment).await;
    }
    eventually("every webhook is delivered", async || {
        let (_, list) = faena.get("/api/v1/webhooks?state=delivered&limit=100").await;
        (list["webhooks"].as_array()?.len() == JOBS).then_some(())
    })
    .await;
    let mut deliveries: HashMap<String, usize> = HashMap::new();
    let verifier = standardwebhooks::Webhook::new(SECRET).unwrap();
    for (headers, body) in requests.lock().unwrap().iter() {
        verifier.verify(body, headers).unwrap();
        let body: Value = serde_json::from_slice(body).unwrap();
        *deliveries.entry(body["jobId"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    assert_eq!(deliveries.keys().cloned().collect::<HashSet<_>>(), ids, "each job at least once");
    assert!(deliveries.values().any(|times| *times > 1), "no request was in flight at a kill");
    assert!(deliveries.values().all(|times| *times <= 3), "{deliveries:?}");
    let log = faena.log();
    assert!(!log.contains("MfKQ"), "the log has a secret: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_webhook_is_delivered_although_the_server_is_killed_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    assert_every_webhook_is_delivered_despite_kills(folder.path(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_webhook_is_delivered_although_the_server_is_killed_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    assert_every_webhook_is_delivered_despite_kills(folder.path(), &environment).await;
}
