//! Watchers of events miss nothing when a server is killed.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    sync::mpsc,
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    faena::{Faena, TIMEOUT, command, run},
    postgres::Database,
    proxy::Proxy,
};

/// An event-stream client that behaves like a browser's `EventSource`.
struct Watcher {
    response: reqwest::Response,
    text: String,
    last_event_id: Option<String>,
}

impl Watcher {
    async fn connect(faena: &Faena, last_event_id: Option<&str>) -> Watcher {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut request = client.get(format!("{}/api/v1/events?types=job.completed", faena.url));
        if let Some(id) = last_event_id {
            request = request.header("Last-Event-ID", id);
        }
        let response = request.send().await.unwrap();
        assert!(response.status().is_success(), "{}", response.text().await.unwrap());
        Watcher { response, text: String::new(), last_event_id: last_event_id.map(str::to_owned) }
    }

    /// Returns the type and the data of the next event, or `None` if the connection is broken.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            while let Some(end) = self.text.find("\n\n") {
                let block: String = self.text.drain(..end + 2).collect();
                let field =
                    |name: &str| block.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
                self.last_event_id = field("id:").or(self.last_event_id.take());
                if let Some(data) = field("data:") {
                    return Some((field("event:").unwrap(), serde_json::from_str(&data).unwrap()));
                }
            }
            let part = tokio::time::timeout(TIMEOUT, self.response.chunk()).await.expect("no data").ok()??;
            self.text.push_str(std::str::from_utf8(&part).unwrap());
        }
    }

    /// Returns the job of the next `job.completed`.
    async fn next_completed(&mut self) -> Option<String> {
        let (kind, event) = self.next().await?;
        assert_eq!(kind, "job.completed", "{event}");
        Some(event["subject"].as_str().unwrap().to_owned())
    }
}

async fn submit(faena: &Faena, count: usize) -> Vec<String> {
    let jobs: Vec<Value> =
        (0..count).map(|n| json!({"name": "sleep", "payload": {"ms": n % 20}, "maxRetries": 10})).collect();
    let (status, answer) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    assert!(status.is_success(), "{answer}");
    answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

async fn two_nodes(database: &Database, folders: [&Path; 2]) -> [Faena; 2] {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_NODE_LEASE", "2s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("WORKER_CONCURRENCY", "8"),
    ];
    Faena::start_two(folders, &environment).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_sees_the_events_of_both_nodes_and_misses_none_when_its_node_is_killed() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [mut victim, survivor] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let mut watcher = Watcher::connect(&victim, None).await;
    let mut submitted: BTreeSet<String> = BTreeSet::new();
    for _ in 0..5 {
        submitted.extend(submit(&survivor, 100).await);
        submitted.extend(submit(&victim, 100).await);
    }
    let mut seen = Vec::new();
    for _ in 0..200 {
        seen.push(watcher.next_completed().await.unwrap());
    }
    victim.kill();
    // Events that were sent before the kill still arrive.
    while let Some(id) = watcher.next_completed().await {
        seen.push(id);
    }
    submitted.extend(submit(&survivor, 100).await);
    let mut watcher = Watcher::connect(&survivor, watcher.last_event_id.as_deref()).await;
    while seen.len() < submitted.len() {
        seen.push(watcher.next_completed().await.unwrap());
    }
    let once: BTreeSet<String> = seen.iter().cloned().collect();
    assert_eq!((once.len(), once == submitted), (seen.len(), true), "each job once, and all jobs");
    let mut workers = BTreeSet::new();
    for page in 1..=submitted.len().div_ceil(100) {
        let (_, list) = survivor.get(&format!("/api/v1/jobs?limit=100&page={page}&status=COMPLETED")).await;
        workers.extend(
            list["jobs"].as_array().unwrap().iter().filter_map(|job| job["workerId"].as_str().map(str::to_owned)),
        );
    }
    assert_eq!(workers.len(), 2, "both nodes ran jobs");
}

/// A `faena events` process, read line by line.
struct Events {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Events {
    fn follow(folder: &Path, url: &str, flags: &[&str]) -> Events {
        let mut child = command(folder)
            .args(["events", "--url", url])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = child.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Events { child, lines }
    }

    fn next(&self) -> String {
        self.lines.recv_timeout(TIMEOUT).expect("no line")
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faena_events_continues_after_lost_connections_and_a_killed_server() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let proxy = Proxy::start(&faena.url).await;
    // The stream starts at the first stored event, because the process may connect after the first job.
    let events = Events::follow(folder.path(), &proxy.url, &["--json", "--types", "job.completed", "--from", "0"]);
    crate::faena::eventually("the server records events, so `faena events` is subscribed", async || {
        let id = faena.submit(json!({"name": "noop"})).await;
        faena.wait_for_state(&id, "COMPLETED").await;
        let trace = faena.get(&format!("/api/v1/trace/{id}")).await.1;
        trace["timeline"].as_array()?.iter().any(|entry| entry["what"] == "job.completed").then_some(())
    })
    .await;
    let subject = |line: &str| serde_json::from_str::<Value>(line).unwrap()["subject"].as_str().unwrap().to_owned();
    let first = subject(&events.next());
    let mut submitted = Vec::new();
    for round in 0..3 {
        if round == 1 {
            proxy.disconnect_all();
        }
        if round == 2 {
            faena.kill();
            faena = Faena::start(folder.path(), &[]).await;
            proxy.retarget(&faena.url);
            proxy.disconnect_all();
        }
        for _ in 0..20 {
            let id = faena.submit(json!({"name": "noop"})).await;
            faena.wait_for_state(&id, "COMPLETED").await;
            submitted.push(id);
        }
    }
    let mut seen = vec![first];
    while seen.last() != submitted.last() {
        seen.push(subject(&events.next()));
    }
    let tail = &seen[seen.len() - submitted.len()..];
    assert_eq!(tail, submitted, "each job once, in order");
    let once: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(once.len(), seen.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn faena_events_and_faena_trace_print_readable_lines() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let watcher = Watcher::connect(&faena, None).await;
    let id = faena.submit(json!({"name": "noop", "correlationId": "order/7"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    drop(watcher);
    let events = Events::follow(folder.path(), &faena.url, &["--from", "0", "--correlation-id", "order/7"]);
    let first = events.next();
    assert!(first.contains("job.created") && first.contains(&id) && first.contains("PENDING"), "{first}");
    let url = [("FAENA_URL", faena.url.as_str())];
    let output = run(folder.path(), &url, &["trace", "order/7"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["#1", "+0.", "job      started", "event    job.completed", "run "] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let json = run(folder.path(), &url, &["trace", "order/7", "--json"]);
    assert_eq!(serde_json::from_slice::<Value>(&json.stdout).unwrap()["jobs"][0]["id"], Value::from(id));
    let unknown = run(folder.path(), &url, &["trace", "unknown"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        String::from_utf8(unknown.stderr).unwrap().contains("no task, job or event has the correlation id \"unknown\"")
    );
    let wrong = run(folder.path(), &url, &["events", "--from=-3"]);
    assert_eq!(wrong.status.code(), Some(1), "{}", String::from_utf8_lossy(&wrong.stderr));
    let unreachable = run(folder.path(), &[("FAENA_URL", "http://127.0.0.1:9")], &["events"]);
    assert_eq!(unreachable.status.code(), Some(3), "{}", String::from_utf8_lossy(&unreachable.stderr));
}

/// Heartbeats let a client tell an idle stream from a broken connection.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_event_stream_sends_heartbeats() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let mut watcher = Watcher::connect(&faena, None).await;
    let mut heartbeats = 0;
    let receive = async {
        while heartbeats < 2 {
            let part = watcher.response.chunk().await.unwrap().unwrap();
            heartbeats += String::from_utf8(part.to_vec()).unwrap().matches(": heartbeat").count();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), receive).await.expect("one heartbeat immediately and one after 15 s");
}
