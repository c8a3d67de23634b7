//! Webhooks are delivered even if the server is killed while it sends them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::Path,
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use axum::{Router, body::Bytes, extract::State, http::HeaderMap};
use reqwest::Client;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, TIMEOUT, eventually, http},
    postgres::Database,
};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const JOBS: usize = 60;
const SETTINGS: [(&str, &str); 4] = [
    ("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"),
    ("FAENA_WEBHOOK_SECRETS", SECRET),
    ("FAENA_WEBHOOK_PER_HOST", "5"),
    ("FAENA_NODE_LEASE", "300ms"),
];

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
    let environment = [&SETTINGS, environment].concat();
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
    assert!(deliveries.values().any(|times| *times > 1), "no request was in flight when the server was killed");
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

const RELEASE: &str = "
machine: release
version: 1
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx.number, self: true, webhook: ctx.receiver, expires: {after: 1h, to: DENIED}}
    on: {approval.granted: GRANTED, approval.denied: DENIED}
  GRANTED: {final: true}
  DENIED: {final: true, ends: failure}
";
const TASKS: usize = 40;

/// Decides on a task. Repeats the request until a server has stored the decision, because servers are killed meanwhile.
async fn decide(url: Arc<RwLock<String>>, task: String, action: &'static str) {
    let (http, started_at) = (http(), Instant::now());
    while started_at.elapsed() < TIMEOUT {
        let path = format!("{}/api/v1/tasks/{task}", url.read().unwrap());
        if let Some(found) = read(&http, &path).await {
            if found["endedAt"].is_string() {
                return;
            }
            let body = json!({"hash": found["approval"]["hash"]});
            let _ = http.post(format!("{path}/{action}")).json(&body).send().await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("task {task} has not ended within {TIMEOUT:?}");
}

async fn read(http: &Client, path: &str) -> Option<Value> {
    http.get(path).send().await.ok()?.json().await.ok()
}

/// Returns the ids of the webhooks of each task and event, and how often the receiver got one of them again.
fn received(requests: &Requests) -> (BTreeMap<(String, String), BTreeSet<String>>, usize) {
    let verifier = standardwebhooks::Webhook::new(SECRET).unwrap();
    let (mut ids, mut count): (BTreeMap<(String, String), BTreeSet<String>>, usize) = Default::default();
    for (headers, body) in requests.lock().unwrap().iter() {
        verifier.verify(body, headers).unwrap();
        let body: Value = serde_json::from_slice(body).unwrap();
        let text = |name: &str| body[name].as_str().unwrap().to_owned();
        let id = headers["webhook-id"].to_str().unwrap().to_owned();
        ids.entry((text("taskId"), text("event"))).or_default().insert(id);
        count += 1;
    }
    let repeated = count - ids.values().map(BTreeSet::len).sum::<usize>();
    (ids, repeated)
}

/// Kills the server while webhooks are sent: first those about new approvals, then those about decisions that are being made.
async fn assert_every_receiver_is_notified_despite_kills(folder: &Path, environment: &[(&str, &str)]) {
    let (receiver, requests) = receiver().await;
    let environment = [&SETTINGS, environment].concat();
    let mut faena = Faena::start(folder, &environment).await;
    faena.post("/api/v1/machines", json!({"definition": RELEASE})).await;
    let (mut tasks, mut expected) = (Vec::new(), BTreeSet::new());
    for number in 0..TASKS {
        let data = json!({"number": number, "receiver": receiver});
        let (_, task) = faena.post("/api/v1/tasks", json!({"machine": "release", "data": data})).await;
        let id = task["id"].as_str().unwrap().to_owned();
        let (action, ends_as) = if number % 2 == 0 { ("approve", "granted") } else { ("reject", "denied") };
        expected.insert((id.clone(), "task.approval.requested".to_owned()));
        expected.insert((id.clone(), format!("task.approval.{ends_as}")));
        tasks.push((id, action));
    }
    let url = Arc::new(RwLock::new(faena.url.clone()));
    let mut deciding = Vec::new();
    for part in [TASKS / 4, TASKS / 2, TASKS + TASKS / 8, TASKS + TASKS / 3] {
        if part > TASKS && deciding.is_empty() {
            let decisions = tasks.drain(..).map(|(task, action)| tokio::spawn(decide(url.clone(), task, action)));
            deciding = decisions.collect();
        }
        eventually("some webhooks are sent", async || (received(&requests).0.len() >= part).then_some(())).await;
        faena.kill();
        faena = Faena::start(folder, &environment).await;
        url.write().unwrap().clone_from(&faena.url);
    }
    for decision in deciding {
        decision.await.unwrap();
    }
    eventually("every webhook is delivered", async || {
        let (_, list) = faena.get("/api/v1/webhooks?state=delivered&limit=100").await;
        (list["webhooks"].as_array()?.len() == 2 * TASKS).then_some(())
    })
    .await;
    let (found, repeated) = received(&requests);
    assert_eq!(found.keys().cloned().collect::<BTreeSet<_>>(), expected, "each event at least once, and no other");
    assert!(found.values().all(|ids| ids.len() == 1), "one webhook for each event: {found:?}");
    assert!(repeated > 0, "no request was in flight when the server was killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_webhook_about_an_approval_is_delivered_although_the_server_is_killed_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    assert_every_receiver_is_notified_despite_kills(folder.path(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_webhook_about_an_approval_is_delivered_although_the_server_is_killed_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    assert_every_receiver_is_notified_despite_kills(folder.path(), &environment).await;
}
