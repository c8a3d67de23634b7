//! Whoever watches misses nothing, whichever server dies.

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
    faena::{Faena, PATIENCE, command, run},
    line::Line,
    postgres::Database,
};

/// A client of the stream that knows only what a browser knows.
struct Watcher {
    answer: reqwest::Response,
    text: String,
    last_event_id: Option<String>,
}

impl Watcher {
    async fn begin(faena: &Faena, last_event_id: Option<&str>) -> Watcher {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut request = client.get(format!("{}/api/v1/events?types=job.completed", faena.url));
        if let Some(id) = last_event_id {
            request = request.header("Last-Event-ID", id);
        }
        let answer = request.send().await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
        Watcher { answer, text: String::new(), last_event_id: last_event_id.map(str::to_owned) }
    }

    /// What comes next: the type and what it says. `None`: the connection is broken.
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
            let part = tokio::time::timeout(PATIENCE, self.answer.chunk()).await.expect("something comes").ok()??;
            self.text.push_str(std::str::from_utf8(&part).unwrap());
        }
    }

    async fn completed(&mut self) -> Option<String> {
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
    let mut nodes = folders.map(|folder| Faena::spawn(folder, &environment));
    for node in &mut nodes {
        node.listening().await;
    }
    nodes
}

#[tokio::test(flavor = "multi_thread")]
async fn who_watches_one_node_sees_both_and_misses_nothing_when_it_is_killed() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [mut doomed, survivor] = two_nodes(&database, [one.path(), two.path()]).await;
    let mut watcher = Watcher::begin(&doomed, None).await;
    let mut made: BTreeSet<String> = BTreeSet::new();
    for _ in 0..5 {
        made.extend(submit(&survivor, 100).await);
        made.extend(submit(&doomed, 100).await);
    }
    let mut seen = Vec::new();
    for _ in 0..200 {
        seen.push(watcher.completed().await.unwrap());
    }
    doomed.kill();
    // What had been sent arrives, and then nothing.
    while let Some(id) = watcher.completed().await {
        seen.push(id);
    }
    made.extend(submit(&survivor, 100).await);
    let mut watcher = Watcher::begin(&survivor, watcher.last_event_id.as_deref()).await;
    while seen.len() < made.len() {
        seen.push(watcher.completed().await.unwrap());
    }
    let once: BTreeSet<String> = seen.iter().cloned().collect();
    assert_eq!((once.len(), once == made), (seen.len(), true), "each once, and all of them");
    let mut workers = BTreeSet::new();
    for page in 1..=made.len().div_ceil(100) {
        let (_, by) = survivor.get(&format!("/api/v1/jobs?limit=100&page={page}&status=COMPLETED")).await;
        workers.extend(
            by["jobs"].as_array().unwrap().iter().filter_map(|job| job["workerId"].as_str().map(str::to_owned)),
        );
    }
    assert_eq!(workers.len(), 2, "both nodes had worked");
}

/// `faena events`, line by line.
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
        self.lines.recv_timeout(PATIENCE).expect("a line")
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faena_events_goes_on_through_cut_connections_and_a_killed_server() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let line = Line::to(&faena.url).await;
    // From the first that is kept: it may begin to follow after the first job.
    let events = Events::follow(folder.path(), &line.url, &["--json", "--types", "job.completed", "--from", "0"]);
    crate::faena::eventually("it follows", async || {
        let id = faena.submit(json!({"name": "noop"})).await;
        faena.job_is(&id, "COMPLETED").await;
        let trace = faena.get(&format!("/api/v1/trace/{id}")).await.1;
        trace["timeline"].as_array()?.iter().any(|entry| entry["what"] == "job.completed").then_some(())
    })
    .await;
    let subject = |line: &str| serde_json::from_str::<Value>(line).unwrap()["subject"].as_str().unwrap().to_owned();
    let first = subject(&events.next());
    let mut made = Vec::new();
    for round in 0..3 {
        if round == 1 {
            line.cut();
        }
        if round == 2 {
            faena.kill();
            faena = Faena::start(folder.path(), &[]).await;
            line.turn_to(&faena.url);
            line.cut();
        }
        for _ in 0..20 {
            let id = faena.submit(json!({"name": "noop"})).await;
            faena.job_is(&id, "COMPLETED").await;
            made.push(id);
        }
    }
    let mut seen = vec![first];
    while seen.last() != made.last() {
        seen.push(subject(&events.next()));
    }
    let tail = &seen[seen.len() - made.len()..];
    assert_eq!(tail, made, "each once, in their order");
    let once: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(once.len(), seen.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn faena_events_and_trace_speak_to_people() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let watcher = Watcher::begin(&faena, None).await;
    let id = faena.submit(json!({"name": "noop", "correlationId": "order/7"})).await;
    faena.job_is(&id, "COMPLETED").await;
    drop(watcher);
    let events = Events::follow(folder.path(), &faena.url, &["--from", "0", "--correlation", "order/7"]);
    let first = events.next();
    assert!(first.contains("job.created") && first.contains(&id) && first.contains("PENDING"), "{first}");
    let url = [("FAENA_URL", faena.url.as_str())];
    let told = run(folder.path(), &url, &["trace", "order/7"]);
    let text = String::from_utf8(told.stdout).unwrap();
    for part in ["#1", "+0.", "job      started", "event    job.completed", "run "] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let json = run(folder.path(), &url, &["trace", "order/7", "--json"]);
    assert_eq!(serde_json::from_slice::<Value>(&json.stdout).unwrap()["jobs"][0]["id"], Value::from(id));
    let unknown = run(folder.path(), &url, &["trace", "nothing"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8(unknown.stderr).unwrap().contains("nothing has the correlation id nothing"));
    let wrong = run(folder.path(), &url, &["events", "--from=-3"]);
    assert_eq!(wrong.status.code(), Some(1), "{}", String::from_utf8_lossy(&wrong.stderr));
    let nobody = run(folder.path(), &[("FAENA_URL", "http://127.0.0.1:9")], &["events"]);
    assert_eq!(nobody.status.code(), Some(3), "{}", String::from_utf8_lossy(&nobody.stderr));
}

/// Nothing at all for a while is not what a broken line looks like.
#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_stream_says_that_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let mut watcher = Watcher::begin(&faena, None).await;
    let mut beats = 0;
    let heard = async {
        while beats < 2 {
            let part = watcher.answer.chunk().await.unwrap().unwrap();
            beats += String::from_utf8(part.to_vec()).unwrap().matches(": heartbeat").count();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), heard).await.expect("one at once and one after 15 s");
}
