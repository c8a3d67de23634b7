//! `promtool` accepts what `/metrics` returns, Prometheus reads it, and the history outlives a killed server.

use std::{
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually, http},
    ports::free_port,
};

#[tokio::test(flavor = "multi_thread")]
async fn promtool_finds_no_fault_in_the_metrics_with_services() {
    let folder = tempfile::tempdir().unwrap();
    let sink = "[[sink]]\nname = \"log\"\nkind = \"file\"\npath = \"events.log\"\n";
    let inbox = "[[inbox]]\nname = \"in\"\nkind = \"nats\"\nurl = \"nats://127.0.0.1:1\"\nstream = \"S\"\nsubject = \"s\"\njob_type = \"noop\"\n";
    let source = "[[outbox.source]]\nname = \"app\"\nurl = \"postgres://127.0.0.1:1/none\"\n";
    std::fs::write(folder.path().join("faena.toml"), format!("{sink}{inbox}{source}")).unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    // A worker, a schedule, a finished and a failed job, so that every metric has a sample.
    faena.post("/api/v1/workers/register", json!({"workerId": "w", "capabilities": ["greet"]})).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let text = faena.http.get(format!("{}/metrics", faena.url)).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("faena_source_up{source=\"app\"}") && text.contains("circuit_breaker_state{"), "{text}");

    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this test needs promtool (Debian: apt-get install prometheus)");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && printed.is_empty(), "{printed}\n{text}");
}

/// A Prometheus server that scrapes one address every second. Dropping it kills the process.
struct Prometheus {
    child: Child,
    url: String,
}

impl Prometheus {
    async fn start(folder: &Path, target: &str) -> Prometheus {
        let target = target.strip_prefix("http://").unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs: [{{job_name: faena, static_configs: [{{targets: [\"{target}\"]}}]}}]\n"
        );
        std::fs::write(folder.join("prometheus.yml"), config).unwrap();
        let port = free_port();
        let child = Command::new("prometheus")
            .current_dir(folder)
            .args([
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=prometheus",
                "--enable-feature=exemplar-storage",
            ])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("prometheus.log")).unwrap())
            .spawn()
            .expect("this test needs prometheus (Debian: apt-get install prometheus)");
        Prometheus { child, url: format!("http://127.0.0.1:{port}/api/v1") }
    }

    /// Waits until a query returns a value that `is_expected`.
    async fn wait_for(&self, query: &str, is_expected: impl Fn(f64) -> bool) {
        eventually(query, async || {
            let url = reqwest::Url::parse_with_params(&format!("{}/query", self.url), [("query", query)]).unwrap();
            let answer: Value = http_get(url).await?;
            let value = answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()?;
            is_expected(value).then_some(())
        })
        .await;
    }
}

/// Returns the JSON of a page, or `None` while the server does not answer.
async fn http_get(url: reqwest::Url) -> Option<Value> {
    reqwest::Client::builder().no_proxy().build().unwrap().get(url).send().await.ok()?.json().await.ok()
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_the_metrics_with_services() {
    let _ = http();
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let prometheus = Prometheus::start(folder.path(), &faena.url).await;
    let id = faena.submit(json!({"name": "sleep", "payload": {"ms": 30}, "correlationId": "order-42"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    for (query, value) in [
        ("sum(jobs_created_total)", 1.0),
        ("sum(jobs_completed_total)", 1.0),
        ("sum(jobs_in_state{state=\"COMPLETED\"})", 1.0),
        ("sum(workers_in_state{state=\"Ready\"})", 1.0),
        ("sum(faena_job_run_seconds_bucket{le=\"+Inf\"})", 1.0),
        ("count(count by (loop) (faena_loop_late))", 18.0),
    ] {
        prometheus.wait_for(query, |found| found == value).await;
    }
    let median = "histogram_quantile(0.5, sum by (le) (faena_job_run_seconds_bucket))";
    prometheus.wait_for(median, |seconds| (0.01..=10.0).contains(&seconds)).await;
    let exemplars = "query_exemplars?query=faena_job_run_seconds_bucket&start=0&end=9999999999";
    eventually("Prometheus stores the exemplar", async || {
        let url = reqwest::Url::parse(&format!("{}/{exemplars}", prometheus.url)).unwrap();
        let answer = http_get(url).await?;
        (answer["data"][0]["exemplars"][0]["labels"]["correlation_id"] == "order-42").then_some(())
    })
    .await;
}

/// Returns the sum of the field `name` over all days of the history.
async fn in_history(faena: &Faena, name: &str) -> u64 {
    let (_, history) = faena.get("/api/v1/metrics/history?period=day").await;
    history["history"].as_array().unwrap().iter().map(|day| day[name].as_u64().unwrap()).sum()
}

async fn the_history_survives_a_killed_server(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), environment).await;
    for _ in 0..3 {
        let id = faena.submit(json!({"name": "noop"})).await;
        faena.wait_for_state(&id, "COMPLETED").await;
    }
    // Killed immediately, so that the next server has to record what was not recorded yet.
    faena.kill();
    let mut faena = Faena::start(folder.path(), environment).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    faena.signal("TERM");
    faena.wait_for_exit().await;
    let faena = Faena::start(folder.path(), environment).await;
    eventually("the history is complete", async || {
        let found = (in_history(&faena, "totalCreated").await, in_history(&faena, "totalCompleted").await);
        assert!(found.0 <= 4 && found.1 <= 4, "counted twice: {found:?}");
        (found == (4, 4)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_survives_a_killed_server_on_sqlite() {
    the_history_survives_a_killed_server(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_survives_a_killed_server_on_postgres() {
    let database = crate::postgres::Database::create().await;
    the_history_survives_a_killed_server(&[("DATABASE_URL", &database.url)]).await;
}
