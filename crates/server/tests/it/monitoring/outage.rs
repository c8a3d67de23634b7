//! A real Prometheus scrapes real servers in an outage: every alert fires, and every query of the dashboards has an answer.
//!
//! The rules are those of the repository, without the time for which a condition must hold, and with lower limits where the
//! real ones would take minutes.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use axum::{Router, http::StatusCode, routing::post};
use reqwest::Client;
use serde_json::{Value, json};

use super::{RULES, dashboard_queries, name, rules};
use crate::{
    certificate::write_certificate,
    deployment::root,
    faena::{Faena, TIMEOUT, eventually, http, run},
    ports::free_port,
    postgres::{Database, connect},
    shell::output_parts,
};

/// Limits that take minutes to reach, and what replaces them here.
const LOWER: [(&str, &str); 8] = [
    ("faena_queue_oldest_seconds) > 900", "faena_queue_oldest_seconds) > 1"),
    ("faena_outbox_oldest_seconds) > 300", "faena_outbox_oldest_seconds) > 1"),
    ("faena_schedule_overdue_seconds) > 60", "faena_schedule_overdue_seconds) > 1"),
    ("faena_task_overdue_seconds) > 60", "faena_task_overdue_seconds) > 1"),
    ("faena_task_approval_oldest_seconds) > 86400", "faena_task_approval_oldest_seconds) > 1"),
    ("faena_lanes_max) > 0.8", "faena_lanes_max) > 0"),
    // The test cannot slow the database down, so any answer counts as slow.
    ("faena_database_ping_seconds > 0.25", "faena_database_ping_seconds > 0"),
    ("jobs_in_state{state=\"ASSIGNED\"})\n            > 60 *", "jobs_in_state{state=\"ASSIGNED\"})\n            > 1 *"),
];

struct Prometheus {
    child: Child,
    url: String,
    http: Client,
}

impl Prometheus {
    /// Starts Prometheus with these jobs and targets.
    fn start(folder: &Path, jobs: &[(&str, &str)]) -> Prometheus {
        let mut rules = fs::read_to_string(root().join(RULES)).unwrap();
        for (limit, lower) in LOWER {
            assert!(rules.contains(limit), "{limit} is not in the rules");
            rules = rules.replace(limit, lower);
        }
        let rules: Vec<&str> = rules.lines().filter(|line| !line.trim_start().starts_with("for: ")).collect();
        fs::write(folder.join("rules.yml"), rules.join("\n")).unwrap();
        let jobs = jobs.iter().map(|(job, target)| json!({"job_name": job, "static_configs": [{"targets": [target]}]}));
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs.collect::<Vec<_>>(),
        });
        fs::write(folder.join("prometheus.yml"), config.to_string()).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let child = Command::new("prometheus")
            .current_dir(folder)
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"])
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("prometheus.log")).unwrap())
            .spawn()
            .expect("this test needs prometheus (Debian: apt-get install prometheus)");
        Prometheus { child, url: format!("http://{address}"), http: http() }
    }

    async fn get(&self, path: &str, query: &[(&str, &str)]) -> Option<Value> {
        let answer = self.http.get(format!("{}{path}", self.url)).query(query).send().await.ok()?;
        let answer: Value = answer.json().await.ok()?;
        assert_eq!(answer["status"], "success", "{query:?}: {answer}");
        Some(answer["data"].clone())
    }

    async fn firing(&self) -> BTreeSet<String> {
        let data = self.get("/api/v1/alerts", &[]).await.unwrap_or_default();
        let alerts = data["alerts"].as_array().cloned().unwrap_or_default();
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| alert["labels"]["alertname"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns whether the query has a result with a value.
    async fn has_answer(&self, query: &str) -> bool {
        let data = self.get("/api/v1/query", &[("query", query)]).await.unwrap_or_default();
        !data["result"].as_array().cloned().unwrap_or_default().is_empty()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a receiver that rejects every event with 400. Returns its port.
async fn start_rejecting_receiver() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let router = Router::new().route("/", post(|| async { StatusCode::BAD_REQUEST }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    port
}

/// Returns a configuration with sinks and sources of which some work and some do not, and an inbox that does not work.
async fn configuration(application: &Database) -> String {
    let receiver = start_rejecting_receiver().await;
    let stopped = "127.0.0.1:1";
    format!(
        "[webhook]\nallow = \"127.0.0.0/8\"\nbase_delay = \"100ms\"\n\
         [tls]\ncertificate = \"certificate.pem\"\nkey = \"key.pem\"\n\
         [health]\nmode = \"always\"\nport = 0\n\
         [[sink]]\nname = \"log\"\nkind = \"file\"\npath = \"events.log\"\n\
         [[sink]]\nname = \"bus\"\nkind = \"nats\"\nurl = \"nats://{stopped}\"\nstream = \"S\"\n\
         [[sink]]\nname = \"hook\"\nkind = \"webhook\"\nurl = \"http://127.0.0.1:{receiver}/\"\ntypes = [\"job.failed\"]\n\
         [[inbox]]\nname = \"orders\"\nkind = \"nats\"\nurl = \"nats://{stopped}\"\nstream = \"S\"\nsubject = \"s\"\njob_type = \"noop\"\n\
         [[outbox.source]]\nname = \"gone\"\nurl = \"postgres://{stopped}/none\"\n\
         [[outbox.source]]\nname = \"shop\"\nurl = \"{}\"\n",
        application.url
    )
}

/// Lets jobs complete, fail, wait for a worker that does not exist, and hang in a worker that does not start them.
async fn submit_jobs(faena: &Faena) {
    let register = json!({"workerId": "w", "capabilities": ["hang"], "concurrency": 100, "reportsStarts": true});
    faena.post("/api/v1/workers/register", register).await;
    let jobs = |count: usize, job: Value| json!({"jobs": vec![job; count]});
    for batch in [
        jobs(300, json!({"name": "noop"})),
        jobs(60, json!({"name": "http.request", "payload": {"url": "http://127.0.0.1:1/"}, "maxRetries": 0})),
        jobs(8, json!({"name": "noop", "webhookUrl": "http://127.0.0.1:1/"})),
        jobs(100, json!({"name": "hang"})),
        jobs(1, json!({"name": "unknown", "queue": "slow"})),
    ] {
        let (status, answer) = faena.post("/api/v1/jobs/batch", batch).await;
        assert!(status.is_success(), "{answer}");
    }
    faena.post("/api/v1/workers/w/claim", json!({"max": 100})).await;
    let schedule = json!({"name": "often", "intervalMs": 1_000, "jobType": "noop"});
    let (status, answer) = faena.post("/api/v1/schedules", schedule).await;
    assert!(status.is_success(), "{answer}");
}

/// A machine whose tasks wait for a service that does not answer, or for a decision, with a timer every second.
const WATCHED: &str = "
machine: watched
version: 1
events: {ask: {}}
initial: NEW
states:
  NEW: {deadline: {total: 3s, to: LATE}, on: {ask: ASKED}}
  ASKED:
    approval: {subject: \"'x'\", self: true, expires: {after: 1d, to: LATE}}
    timers: {tick: {every: 1s}}
    on: {approval.granted: DONE, approval.denied: LATE, timer.tick: {set: {seen: 'true'}}}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

async fn create_tasks(faena: &Faena) {
    let (status, answer) = faena.post("/api/v1/machines", json!({"definition": WATCHED})).await;
    assert!(status.is_success(), "{answer}");
    for number in 0..20 {
        let (status, task) = faena.post("/api/v1/tasks", json!({"machine": "watched"})).await;
        assert!(status.is_success(), "{task}");
        if number == 0 {
            let path = format!("/api/v1/tasks/{}/events", task["id"].as_str().unwrap());
            let (status, answer) = faena.post(&path, json!({"type": "ask"})).await;
            assert!(status.is_success(), "{answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_alert_fires_in_an_outage_and_every_panel_has_data_with_services() {
    let (folder, idle_folder, application) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Database::create().await);
    let (_, tables, _) = output_parts(&run(folder.path(), &[], &["outbox", "init-sql"]));
    connect(&application.url).await.batch_execute(&tables).await.unwrap();
    write_certificate(folder.path(), 5);
    fs::write(folder.path().join("faena.toml"), configuration(&application).await).unwrap();
    let mut faena = Faena::spawn(folder.path(), &[]);
    faena.http = Client::builder().no_proxy().tls_danger_accept_invalid_certs(true).build().unwrap();
    faena.wait_until_listening().await;
    let health = faena.announced("health").await;
    let database = Database::create().await;
    let idle = [("FAENA_SERVER_ROLES", "api,engine"), ("DATABASE_URL", database.url.as_str())];
    let idle = Faena::start(idle_folder.path(), &idle).await;
    let target = |url: &str| url.trim_start_matches("http://").to_owned();
    let jobs =
        [("faena", target(&health)), ("faena-idle", target(&idle.url)), ("faena-gone", "127.0.0.1:1".to_owned())];
    let jobs: Vec<(&str, &str)> = jobs.iter().map(|(job, target)| (*job, target.as_str())).collect();
    let prometheus_folder = tempfile::tempdir().unwrap();
    let prometheus = Prometheus::start(prometheus_folder.path(), &jobs);
    // A counter that grows before its first scrape has no rate.
    eventually("the first scrape", async || prometheus.has_answer("up{job=\"faena\"} == 1").await.then_some(())).await;
    submit_jobs(&faena).await;
    create_tasks(&faena).await;

    wait_until_none_is_left("queries without an answer", dashboard_queries(), async |query| {
        prometheus.has_answer(query).await
    })
    .await;

    let needs_outage = ["DatabaseDown", "LoopWithoutHeartbeat", "SchedulesLate", "TasksLate"];
    let all: Vec<String> = rules().iter().map(|rule| name(rule).to_owned()).collect();
    let (late, early): (Vec<String>, Vec<String>) = all.into_iter().partition(|alert| needs_outage.contains(&&**alert));
    let is_firing = async |alert: &str| prometheus.firing().await.contains(alert);
    wait_until_none_is_left("alerts that do not fire", early, is_firing).await;
    // One database accepts no more writes, so that loops fail and schedules and timers become late. The other accepts
    // no connections.
    let file = rusqlite::Connection::open(folder.path().join("faena-data/faena.db")).unwrap();
    file.execute_batch("BEGIN IMMEDIATE").unwrap();
    database.refuse_connections().await;
    wait_until_none_is_left("alerts that do not fire", late, is_firing).await;
}

/// Waits until `is_done` has been true for each entry of `left`.
async fn wait_until_none_is_left(what: &str, mut left: Vec<String>, is_done: impl AsyncFn(&str) -> bool) {
    let started_at = Instant::now();
    while !left.is_empty() {
        assert!(started_at.elapsed() < TIMEOUT, "{what}: {left:#?}");
        let mut next = Vec::new();
        for item in left {
            if !is_done(&item).await {
                next.push(item);
            }
        }
        left = next;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
