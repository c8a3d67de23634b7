//! `GET /metrics` agrees with the table of metrics, and each metric moves when what it counts happens.

use std::time::Duration;

use axum::http::Request;
use faena_api::METRICS;
use faena_domain::Timestamp;
use faena_engine::{EngineConfig, OutboxConfig, SinkBody, SinkConfig, Target};
use faena_store::OnRejected;
use serde_json::json;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_in_the_table_with_its_type_and_help() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&id, "COMPLETED").await;
    let text = app.get("/metrics").await.text;
    let mut shown = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let metric = METRICS.iter().find(|metric| metric.exposed_name() == name);
        let metric = metric.unwrap_or_else(|| panic!("{name} is not listed"));
        assert_eq!(kind, metric.kind.as_str(), "{name}");
        assert!(text.contains(&format!("# HELP {name} {}", metric.help)), "{name}");
        shown += 1;
    }
    assert!(shown >= METRICS.iter().filter(|metric| metric.labels.is_empty()).count(), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_asks_for_openmetrics_gets_it_and_others_get_the_text_format() {
    let app = App::start().await;
    let plain = app.get("/metrics").await;
    assert_eq!(plain.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    assert!(
        plain.text.contains("\n# TYPE faena_stale_reports_total counter\nfaena_stale_reports_total 0\n"),
        "{}",
        plain.text
    );
    assert!(!plain.text.contains("# EOF"));
    let accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2";
    let request = Request::get("/metrics").header("accept", accept);
    let open = app.send(request.body("".into()).unwrap()).await;
    assert_eq!(open.header("content-type"), "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(open.text.contains("\n# TYPE faena_stale_reports counter\nfaena_stale_reports_total 0\n"), "{}", open.text);
    assert!(open.text.ends_with("# EOF\n"));
}

#[test]
fn names_and_labels_follow_the_conventions() {
    for metric in METRICS {
        let is_snake_case =
            |text: &str| text.chars().all(|character| character.is_ascii_lowercase() || character == '_');
        assert!(is_snake_case(metric.name) && metric.labels.iter().all(|label| is_snake_case(label)), "{metric:?}");
        assert!(!metric.name.ends_with("_total"), "{} gets its suffix on encoding", metric.name);
        assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{metric:?}");
        assert_eq!(METRICS.iter().filter(|other| other.name == metric.name).count(), 1, "{}", metric.name);
    }
}

/// Returns the value of a sample, or `None` if the metric has no such sample. `name` includes its labels.
fn sample(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|(known, _)| known == name))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Waits until each of these samples has its value.
async fn wait_for(app: &App, expected: &[(&str, f64)]) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let text = app.get("/metrics").await.text;
        let wrong: Vec<_> = expected
            .iter()
            .map(|(name, value)| (*name, *value, sample(&text, name)))
            .filter(|(_, value, found)| *found != Some(*value))
            .collect();
        if wrong.is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "sample, expected, found: {wrong:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A job that fails: its address is not allowed.
fn unreachable() -> String {
    r#"{"name": "http.request", "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0}"#.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_of_jobs_move_with_their_jobs() {
    let app = App::start().await;
    wait_for(&app, &[("jobs_created_total", 0.0), ("jobs_completed_total", 0.0), ("jobs_failed_total", 0.0)]).await;
    let completed = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&completed, "COMPLETED").await;
    wait_for(
        &app,
        &[
            ("jobs_created_total", 1.0),
            ("jobs_completed_total", 1.0),
            (r#"jobs_in_state{state="COMPLETED"}"#, 1.0),
            (r#"job_state_duration_count{state="QUEUED"}"#, 1.0),
            (r#"job_state_duration_count{state="ASSIGNED"}"#, 1.0),
            (r#"job_state_duration_count{state="PROCESSING"}"#, 1.0),
            (r#"job_state_duration_bucket{le="+Inf",state="PROCESSING"}"#, 1.0),
            (r#"faena_job_wait_seconds_count{queue="default"}"#, 1.0),
            (r#"faena_job_run_seconds_count{queue="default"}"#, 1.0),
            (r#"faena_job_runs_total{outcome="completed"}"#, 1.0),
            (r#"faena_queue_jobs_total{queue="default",event="completed"}"#, 1.0),
        ],
    )
    .await;
    let failed = app.create(&unreachable()).await;
    app.wait_for_state(&failed, "FAILED").await;
    let slow = app.create(r#"{"name": "sleep", "payload": {"ms": 60000}, "timeoutMs": 50, "maxRetries": 0}"#).await;
    app.wait_for_state(&slow, "FAILED").await;
    app.create(r#"{"name": "noop", "scheduledAt": "2999-01-01T00:00:00Z"}"#).await;
    app.create(r#"{"name": "unhandled.type", "priority": "CRITICAL"}"#).await;
    let cancelled = app.create(r#"{"name": "unhandled.type"}"#).await;
    app.post(&format!("/api/v1/jobs/{cancelled}/cancel"), "").await;
    wait_for(
        &app,
        &[
            ("jobs_created_total", 6.0),
            ("jobs_failed_total", 2.0),
            ("jobs_timed_out_total", 1.0),
            ("faena_dead_jobs", 2.0),
            ("dlq_size", 0.0),
            (r#"jobs_in_state{state="PENDING"}"#, 1.0),
            (r#"jobs_in_state{state="QUEUED"}"#, 1.0),
            (r#"jobs_in_state{state="FAILED"}"#, 2.0),
            (r#"jobs_in_state{state="CANCELLED"}"#, 1.0),
            (r#"faena_job_runs_total{outcome="failed"}"#, 2.0),
            (r#"faena_queue_depth{queue="default",priority="CRITICAL"}"#, 1.0),
            (r#"faena_queue_jobs_total{queue="default",event="cancelled"}"#, 1.0),
            (r#"faena_queue_jobs_total{queue="default",event="run_failed"}"#, 2.0),
        ],
    )
    .await;
    // The timed-out run took at least 50 ms.
    let text = app.get("/metrics").await.text;
    assert!(sample(&text, r#"job_state_duration_sum{state="PROCESSING"}"#).unwrap() >= 0.05, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_in_flight_are_shown_in_their_states() {
    let app = App::start().await;
    let worker = json!({"workerId": "w", "capabilities": ["greet"], "concurrency": 5, "reportsStarts": true});
    let token = app.register(worker).await;
    let id = app.create(r#"{"name": "greet"}"#).await;
    let run = json!({"run": app.claim(&token, "w").await}).to_string();
    wait_for(
        &app,
        &[
            (r#"jobs_in_state{state="ASSIGNED"}"#, 1.0),
            (r#"jobs_in_state{state="PROCESSING"}"#, 0.0),
            (r#"faena_worker_jobs_in_flight{worker_id="w"}"#, 1.0),
            (r#"circuit_breaker_state{worker_id="w"}"#, 0.0),
            (r#"workers_in_state{state="Busy"}"#, 1.0),
            (r#"workers_in_state{state="Ready"}"#, 1.0),
            ("workers_created_total", 2.0),
            ("faena_worker_slots", 10.0),
            ("faena_worker_slots_busy", 1.0),
            ("faena_worker_utilization_ratio", 0.1),
        ],
    )
    .await;
    let started = app.call_as(&token, "POST", &format!("/api/v1/workers/w/jobs/{id}/started"), run.clone()).await;
    assert_eq!(started.status, 200, "{}", started.text);
    wait_for(&app, &[(r#"jobs_in_state{state="ASSIGNED"}"#, 0.0), (r#"jobs_in_state{state="PROCESSING"}"#, 1.0)]).await;
    app.call_as(&token, "POST", &format!("/api/v1/workers/w/jobs/{id}/complete"), run).await;
    assert_eq!(app.call_as(&token, "DELETE", "/api/v1/workers/w", "").await.status, 200);
    wait_for(
        &app,
        &[
            ("workers_terminated_total", 1.0),
            (r#"workers_in_state{state="Terminated"}"#, 1.0),
            (r#"worker_state_duration_count{state="Creating"}"#, 2.0),
            (r#"worker_state_duration_count{state="Busy"}"#, 1.0),
            (r#"worker_state_duration_count{state="Ready"}"#, 2.0),
            (r#"worker_state_duration_count{state="Terminating"}"#, 1.0),
        ],
    )
    .await;
    let text = app.get("/metrics").await.text;
    assert!(!text.contains(r#"worker_id="w""#), "a worker that has left has no samples: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_of_events_move_with_their_sinks() {
    let folder = tempfile::tempdir().unwrap();
    let sink = |name: &str, path: std::path::PathBuf| SinkConfig {
        name: name.into(),
        types: vec!["job.created".into()],
        on_rejected: OnRejected::Skip,
        body: SinkBody::CloudEvent,
        target: Target::File(faena_brokers::file::FileSinkOptions::new(path)),
    };
    // A folder is not a file, so the second sink is down.
    let sinks = vec![sink("log", folder.path().join("events.log")), sink("broken", folder.path().into())];
    let outbox = OutboxConfig { sinks, ..OutboxConfig::default() };
    let app = App::start_with(EngineConfig { outbox, ..EngineConfig::default() }).await;
    app.create(r#"{"name": "unhandled.type"}"#).await;
    wait_for(
        &app,
        &[
            ("events_published_total", 1.0),
            ("outbox_queue_size", 1.0),
            (r#"faena_outbox_pending{sink="broken"}"#, 1.0),
            (r#"faena_outbox_sent_total{sink="log"}"#, 1.0),
            (r#"faena_outbox_sink_up{sink="broken"}"#, 0.0),
        ],
    )
    .await;
    let text = app.get("/metrics").await.text;
    assert!(sample(&text, "events_failed_total").unwrap() >= 1.0, "{text}");
    assert!(sample(&text, "event_publish_duration_count").unwrap() >= 2.0, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn throughput_and_error_ratio_come_from_the_last_minute() {
    let app = App::start().await;
    let (now, throughput) = (Timestamp::now(), &app.engine.throughput);
    // The poller takes the first sample.
    while throughput.is_older(now, i64::MAX) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let completed = app.create(r#"{"name": "noop"}"#).await;
    app.wait_for_state(&completed, "COMPLETED").await;
    let failed = app.create(&unreachable()).await;
    app.wait_for_state(&failed, "FAILED").await;
    throughput.add(&app.engine.store.counts().await.unwrap(), now.plus_ms(20_000));
    let text = app.get("/metrics").await.text;
    assert_eq!(sample(&text, "faena_error_ratio"), Some(0.5), "{text}");
    let per_second = sample(&text, "faena_throughput_jobs_per_second").unwrap();
    assert!((0.05..0.2).contains(&per_second), "two in about 20 s: {per_second}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_loop_has_a_heartbeat_and_the_node_describes_itself() {
    let app = App::start().await;
    let text = app.get("/metrics").await.text;
    for name in [r#"faena_loop_late{loop="dispatcher"}"#, r#"faena_loop_failures_total{loop="history"}"#] {
        assert_eq!(sample(&text, name), Some(0.0), "{name}: {text}");
    }
    assert!(sample(&text, r#"faena_loop_last_beat_seconds{loop="lease"}"#).is_some(), "{text}");
    let build = format!(r#"faena_build_info{{version="{}",database="sqlite"}}"#, env!("CARGO_PKG_VERSION"));
    for (name, value) in [(build.as_str(), 1.0), ("faena_cluster_exporter", 1.0), ("faena_database_up", 1.0)] {
        assert_eq!(sample(&text, name), Some(value), "{name}: {text}");
    }
    assert!(sample(&text, "faena_database_ping_seconds").unwrap() > 0.0, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_database_leaves_the_metrics_of_the_node_with_services() {
    let app = App::start_on_postgres().await;
    assert_eq!(sample(&app.get("/metrics").await.text, "faena_database_up"), Some(1.0));
    app.drop_database().await;
    let response = app.get("/metrics").await;
    assert_eq!(response.status, 200);
    assert_eq!(sample(&response.text, "faena_database_up"), Some(0.0), "{}", response.text);
    assert_eq!(sample(&response.text, "faena_cluster_exporter"), Some(0.0));
    assert!(sample(&response.text, "faena_worker_slots").is_some() && !response.text.contains("jobs_in_state{"));
}

#[tokio::test(flavor = "multi_thread")]
async fn histograms_have_exemplars_in_openmetrics_only() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop", "correlationId": "order \"42\""}"#).await;
    app.wait_for_state(&id, "COMPLETED").await;
    wait_for(&app, &[(r#"faena_job_run_seconds_count{queue="default"}"#, 1.0)]).await;
    let open = async || {
        let request = Request::get("/metrics").header("accept", "application/openmetrics-text");
        app.send(request.body("".into()).unwrap()).await.text
    };
    let exemplar = |text: &str| {
        let lines = text.lines().filter(|line| line.starts_with("faena_job_run_seconds_bucket{"));
        lines.filter_map(|line| line.split_once(" # ")).map(|(_, exemplar)| exemplar.to_owned()).collect::<Vec<_>>()
    };
    let found = exemplar(&open().await);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with(r#"{correlation_id="order \"42\""} 0."#), "{found:?}");
    assert!(!app.get("/metrics").await.text.contains(" # {"), "the text format has none");
    let traced = r#"{"name": "noop", "queue": "traced"}"#;
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let request = Request::post("/api/v1/jobs").header("traceparent", traceparent).body(traced.into()).unwrap();
    let id = app.send(request).await.json()["id"].as_str().unwrap().to_owned();
    app.wait_for_state(&id, "COMPLETED").await;
    wait_for(&app, &[(r#"faena_job_run_seconds_count{queue="traced"}"#, 1.0)]).await;
    let text = open().await;
    assert!(text.contains(r#"# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"} 0."#), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_beyond_the_first_hundred_share_a_label() {
    let app = App::start().await;
    for first in [0, 60] {
        let jobs: Vec<_> =
            (first..first + 60).map(|n| json!({"name": "unhandled.type", "queue": format!("q{n}")})).collect();
        assert_eq!(app.post("/api/v1/jobs/batch", json!({ "jobs": jobs }).to_string()).await.status, 201);
    }
    let text = app.get("/metrics").await.text;
    let depths = text.lines().filter(|line| line.starts_with("faena_queue_depth{"));
    assert_eq!(depths.count(), 101);
    assert_eq!(sample(&text, r#"faena_queue_depth{queue="other",priority="NORMAL"}"#), Some(20.0));
    assert_eq!(sample(&text, "jobs_created_total"), Some(120.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_nodes_exports_the_figures_of_the_database_with_services() {
    let app = App::start_on_postgres().await;
    let other = app.another_node().await;
    app.create(r#"{"name": "unhandled.type"}"#).await;
    let texts = [app.get("/metrics").await.text, other.get("/metrics").await.text, app.get("/metrics").await.text];
    let shown = |name: &str| texts.each_ref().map(|text| sample(text, name));
    assert_eq!(shown("faena_cluster_exporter"), [Some(1.0), Some(0.0), Some(1.0)]);
    assert_eq!(shown("jobs_created_total"), [Some(1.0), None, Some(1.0)]);
    assert_eq!(shown(r#"workers_in_state{state="Ready"}"#), [Some(2.0), None, Some(2.0)]);
    app.engine.stop(tokio_util::sync::CancellationToken::new()).await;
    let after = other.get("/metrics").await.text;
    assert_eq!(sample(&after, "jobs_created_total"), Some(1.0), "the other node takes over: {after}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_workers_and_actions_of_the_guardian_are_counted() {
    let app = App::start().await;
    let worker = json!({"workerId": "w", "capabilities": ["greet"]});
    let token = app.register(worker).await;
    let id = app.create(r#"{"name": "greet"}"#).await;
    let run = json!({"run": app.claim(&token, "w").await}).to_string();
    let complete = app.call_as(&token, "POST", &format!("/api/v1/workers/w/jobs/{id}/complete"), run.clone()).await;
    assert_eq!(complete.status, 200, "{}", complete.text);
    let stale = app.call_as(&token, "POST", &format!("/api/v1/workers/w/jobs/{id}/fail"), run).await;
    assert_eq!(stale.status, 409, "{}", stale.text);
    let connected = app.engine.workers.find_by_key("w").unwrap();
    for _ in 0..5 {
        app.engine.workers.record_dispatch_failure(&connected, Timestamp::now());
    }
    let expires_at = Timestamp::now().plus_ms(50);
    let expiring = app.create(&format!(r#"{{"name": "unhandled.type", "expiresAt": "{expires_at}"}}"#)).await;
    app.wait_for_state(&expiring, "FAILED").await;
    wait_for(
        &app,
        &[
            ("faena_stale_reports_total", 1.0),
            ("dispatch_failures_total", 5.0),
            (r#"circuit_breaker_state{worker_id="w"}"#, 1.0),
            (r#"faena_guardian_actions_total{check="expired"}"#, 1.0),
            ("jobs_timed_out_total", 1.0),
        ],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_due_time_that_no_node_processes_is_overdue() {
    // Without the role `engine` this node processes no schedules.
    let roles = faena_engine::Roles { engine: false, ..EngineConfig::default().roles };
    let app = App::start_with(EngineConfig { roles, ..EngineConfig::default() }).await;
    let schedule = json!({"name": "often", "intervalMs": 1000, "jobName": "noop"});
    assert_eq!(app.post("/api/v1/schedules", schedule.to_string()).await.status, 201);
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while sample(&app.get("/metrics").await.text, "faena_schedule_overdue_seconds").unwrap() == 0.0 {
        assert!(std::time::Instant::now() < deadline, "the due time is never overdue");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const WATCHED: &str = "
machine: watched
version: 1
events: {ask: {}, hurry: {}, early: {}, odd: {unexpected: ignore}, never: {unexpected: reject}}
initial: NEW
states:
  NEW: {forever: true, on: {ask: ASKED, hurry: HURRIED}}
  ASKED:
    approval: {subject: \"'x'\", self: true, expires: {after: 1d, to: LATE}}
    on: {approval.granted: DONE, approval.denied: LATE}
  HURRIED: {deadline: {total: 1s, to: LATE}, on: {early: DONE}}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

async fn watched_task(app: &App) -> String {
    app.post("/api/v1/machines", json!({"definition": WATCHED}).to_string()).await;
    let created = app.post("/api/v1/tasks", json!({"machine": "watched"}).to_string()).await;
    assert_eq!(created.status, 201, "{}", created.text);
    created.json()["id"].as_str().unwrap().to_owned()
}

async fn send_event(app: &App, task: &str, kind: &str, trace: &str) {
    let event = json!({"type": kind, "metadata": {"traceId": trace}});
    app.post(&format!("/api/v1/tasks/{task}/events"), event.to_string()).await;
}

/// Waits until a sample is greater than 0.
async fn wait_until_positive(app: &App, name: &str) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while sample(&app.get("/metrics").await.text, name).is_none_or(|value| value <= 0.0) {
        assert!(std::time::Instant::now() < deadline, "{name} does not move");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_of_tasks_move_with_their_tasks() {
    let app = App::start().await;
    wait_for(&app, &[("faena_task_approvals_waiting", 0.0), ("faena_task_deadlines_missed_total", 0.0)]).await;
    let task = watched_task(&app).await;
    wait_for(&app, &[(r#"faena_tasks{machine="watched",state="NEW"}"#, 1.0)]).await;
    for (kind, trace) in [("early", "a"), ("early", "a"), ("odd", "b"), ("never", "c"), ("unheard", "d")] {
        send_event(&app, &task, kind, trace).await;
    }
    send_event(&app, &faena_domain::TaskId::new().to_string(), "ask", "e").await;
    send_event(&app, &task, "ask", "f").await;
    let outcome = |name: &str| format!(r#"faena_task_events_total{{outcome="{name}"}}"#);
    let names = ["applied", "deferred", "ignored", "rejected", "invalid", "duplicate", "unknown_task"].map(outcome);
    let mut expected: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
    expected.extend([
        (r#"faena_task_events_total{outcome="stale"}"#, 0.0),
        ("faena_task_commit_seconds_count", 7.0),
        (r#"faena_tasks{machine="watched",state="ASKED"}"#, 1.0),
        ("faena_task_approvals_waiting", 1.0),
        ("faena_task_overdue_seconds", 0.0),
    ]);
    wait_for(&app, &expected).await;
    assert_eq!(sample(&app.get("/metrics").await.text, r#"faena_tasks{machine="watched",state="NEW"}"#), None);
    wait_until_positive(&app, "faena_task_approval_oldest_seconds").await;
    wait_until_positive(&app, r#"faena_task_oldest_seconds{machine="watched",state="ASKED"}"#).await;
    let late = watched_task(&app).await;
    send_event(&app, &late, "hurry", "g").await;
    wait_for(&app, &[("faena_task_deadlines_missed_total", 1.0)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timer_that_no_node_fires_is_overdue() {
    // Without the role `engine` this node fires no timers.
    let roles = faena_engine::Roles { engine: false, ..EngineConfig::default().roles };
    let app = App::start_with(EngineConfig { roles, ..EngineConfig::default() }).await;
    let task = watched_task(&app).await;
    send_event(&app, &task, "hurry", "a").await;
    wait_until_positive(&app, "faena_task_overdue_seconds").await;
}
