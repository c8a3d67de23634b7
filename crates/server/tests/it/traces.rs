//! An OpenTelemetry collector receives the spans of a job.

mod collector;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex},
};

use axum::{Router, extract::State, http::HeaderMap};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};

use self::collector::{Collector, Span};
use crate::{
    faena::{Faena, eventually},
    ports,
    postgres::Database,
    workers::{SdkWorker, TestWorker, WorkerOptions, failure},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const SETTINGS: [(&str, &str); 3] =
    [("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_NODE_LEASE", "300ms"), ("FAENA_ORPHAN_DELAY", "50ms")];

/// Starts a server that exports to `collector`.
async fn start(folder: &Path, collector: &Collector, environment: &[(&str, &str)]) -> Faena {
    let endpoint = [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str())];
    Faena::start(folder, &[&SETTINGS, &endpoint[..], environment].concat()).await
}

/// Submits a job in the trace of a caller and returns its id.
async fn submit_traced(faena: &Faena, traceparent: &str, body: Value) -> String {
    let request = faena.http.post(format!("{}/api/v1/jobs", faena.url)).header("traceparent", traceparent);
    let answer: Value = request.json(&body).send().await.unwrap().json().await.unwrap();
    answer["id"].as_str().unwrap().to_owned()
}

type Traceparents = Arc<Mutex<Vec<String>>>;

/// Starts a webhook receiver. Returns its URL, and the trace contexts that it receives.
async fn receiver() -> (String, Traceparents) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook/s3cret-path", listener.local_addr().unwrap());
    let received = Traceparents::default();
    let receive = |State(received): State<Traceparents>, headers: HeaderMap| async move {
        received.lock().unwrap().push(headers["traceparent"].to_str().unwrap().to_owned());
    };
    let router = Router::new().fallback(receive).with_state(received.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, received)
}

async fn assert_a_trace_spans_request_queue_run_steps_and_webhook(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let (url, hooks) = receiver().await;
    let mut faena = start(folder.path(), &collector, environment).await;
    let body = json!({"name": "report", "queue": "reports", "webhookUrl": url, "correlationId": "order-7"});
    let id = submit_traced(&faena, &format!("00-{TRACE}-{CALLER}-01"), body).await;
    let request = collector.span("POST /api/v1/jobs").await;
    faena.kill();
    let faena = start(folder.path(), &collector, environment).await;
    let mut worker = SdkWorker::connect(&faena, WorkerOptions::new("ada", &["report"])).await;
    let job = worker.next_job().await;
    worker.step(&job, "collect", json!(1), None).await.unwrap();
    worker.step(&job, "render", json!(2), None).await.unwrap();
    worker.complete(&job, json!("done")).await.unwrap();

    let run = collector.span("run report").await;
    let queued = collector.span("queued").await;
    let steps = [collector.span("step collect").await, collector.span("step render").await];
    let webhook = collector.span("POST webhook").await;
    assert!(collector.spans().iter().all(|span| span.trace_id == TRACE), "{:#?}", collector.spans());
    assert_eq!((request.parent.as_str(), request.kind), (CALLER, SpanKind::Server));
    assert_eq!(request.attribute("http.route"), "/api/v1/jobs");
    assert_eq!(request.attribute("http.response.status_code"), "201");
    for (span, kind) in [(&queued, SpanKind::Internal), (&run, SpanKind::Consumer), (&webhook, SpanKind::Client)] {
        assert_eq!((&span.parent, span.kind), (&request.id, kind), "{span:#?}");
        assert_eq!(span.attribute("messaging.message.id"), id, "{span:#?}");
        assert_eq!(span.attribute("messaging.message.conversation_id"), "order-7");
    }
    for step in &steps {
        assert_eq!(step.parent, run.id);
        assert!(run.start <= step.start && step.end <= run.end, "{step:#?} {run:#?}");
    }
    assert!(steps[0].end <= steps[1].start, "one step after the other");
    assert!(queued.end <= run.start);
    let about_run = ["messaging.system", "messaging.destination.name", "faena.job.type", "faena.job.attempt"];
    assert_eq!(about_run.map(|key| run.attribute(key)), ["faena", "reports", "report", "1"]);
    assert_eq!((run.attribute("faena.job.state"), run.attribute("faena.worker.id")), ("COMPLETED", worker.id()));
    assert_eq!(run.error, None);
    assert_eq!(job.traceparent, Some(run.traceparent()), "spans of the worker are below the run");
    assert_eq!(hooks.lock().unwrap().as_slice(), [webhook.traceparent()]);
    assert_eq!(webhook.attribute("http.response.status_code"), "200");
    assert!(!format!("{webhook:?}").contains("s3cret"), "the path of a webhook may be a secret");
    assert_ids_are_unique(&collector);
    worker.leave().await;
}

fn assert_ids_are_unique(collector: &Collector) {
    let spans = collector.spans();
    let ids: HashSet<(String, String)> = spans.iter().map(|span| (span.trace_id.clone(), span.id.clone())).collect();
    assert_eq!(ids.len(), spans.len(), "{spans:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_spans_request_queue_run_steps_and_webhook_although_the_server_is_killed_on_sqlite() {
    assert_a_trace_spans_request_queue_run_steps_and_webhook(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_spans_request_queue_run_steps_and_webhook_although_the_server_is_killed_on_postgres() {
    let database = Database::create().await;
    assert_a_trace_spans_request_queue_run_steps_and_webhook(&[("DATABASE_URL", database.url.as_str())]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_run_of_a_retried_job_has_a_span() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let faena = start(folder.path(), &collector, &[]).await;
    let mut worker = SdkWorker::connect(&faena, WorkerOptions::new("ada", &["mail"])).await;
    let id = faena.submit(json!({"name": "mail", "maxRetries": 1, "retryDelay": 100})).await;
    for _ in 0..2 {
        let job = worker.next_job().await;
        worker.fail(&job, failure("the mailbox is full")).await.unwrap();
    }
    let runs = collector.some_spans("run mail", 2).await;
    let request = collector.span("POST /api/v1/jobs").await;
    for (run, (attempt, state)) in runs.iter().zip([("1", "RETRYING"), ("2", "FAILED")]) {
        assert_eq!(run.parent, request.id);
        assert_eq!((run.attribute("faena.job.attempt"), run.attribute("faena.job.state")), (attempt, state));
        assert_eq!((run.error.as_deref(), run.attribute("error.type")), (Some("the mailbox is full"), "error"));
    }
    assert_eq!(collector.some_spans("queued", 2).await.len(), 2);
    // A trace that begins in Faena has the id of the job.
    assert_eq!(request.trace_id, id.replace('-', ""));
    assert_eq!(request.parent, "");
    assert_ids_are_unique(&collector);
    worker.leave().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_was_lost_with_its_server_has_a_span() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let mut faena = start(folder.path(), &collector, &[]).await;
    let id = faena.submit(json!({"name": "sleep", "payload": {"ms": 2_000}, "maxRetries": 3})).await;
    let request = collector.span("POST /api/v1/jobs").await;
    eventually("its start is stored", async || (faena.job(&id).await["status"] == "PROCESSING").then_some(())).await;
    faena.kill();
    let faena = start(folder.path(), &collector, &[]).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let [lost, completed]: [Span; 2] = collector.some_spans("run sleep", 2).await.try_into().unwrap();
    assert_eq!((lost.attribute("error.type"), completed.attribute("error.type")), ("orphaned", ""));
    assert_eq!((lost.attribute("faena.job.attempt"), completed.attribute("faena.job.attempt")), ("1", "2"));
    assert_eq!((&lost.parent, &completed.parent), (&request.id, &request.id));
    assert!(lost.end <= completed.start);
    assert_ids_are_unique(&collector);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_trace_context_is_ignored_and_a_new_trace_begins() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let faena = start(folder.path(), &collector, &[]).await;
    for (count, invalid) in ["00-00000000000000000000000000000000-00f067aa0ba902b7-01", "hello"].iter().enumerate() {
        let id = submit_traced(&faena, invalid, json!({"name": "noop"})).await;
        let runs = collector.some_spans("run noop", count + 1).await;
        let run = runs.iter().find(|run| run.attribute("messaging.message.id") == id).unwrap();
        assert_eq!(run.trace_id, id.replace('-', ""));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_caller_decides_whether_a_trace_is_recorded_and_otherwise_the_sample_ratio() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let (url, hooks) = receiver().await;
    let faena = start(folder.path(), &collector, &[("OTEL_TRACES_SAMPLER", "always_off")]).await;
    let own = faena.submit(json!({"name": "noop", "webhookUrl": url})).await;
    let unsampled = format!("00-{TRACE}-{CALLER}-00");
    let unsampled = submit_traced(&faena, &unsampled, json!({"name": "noop", "webhookUrl": url})).await;
    for id in [&own, &unsampled] {
        faena.wait_for_state(id, "COMPLETED").await;
    }
    eventually("both webhooks arrive", async || (hooks.lock().unwrap().len() == 2).then_some(())).await;
    // The decision not to record is passed on to the receivers.
    assert!(hooks.lock().unwrap().iter().all(|trace| trace.ends_with("-00")), "{hooks:?}");
    assert!(hooks.lock().unwrap().iter().any(|trace| trace.contains(TRACE)), "{hooks:?}");
    // Spans are exported in order, so spans of the jobs above would arrive before those of this job.
    submit_traced(&faena, &format!("00-{TRACE}-{CALLER}-01"), json!({"name": "sleep", "payload": {"ms": 1}})).await;
    collector.span("run sleep").await;
    assert_eq!(collector.named("run noop").len(), 0);
    assert_eq!(collector.named("POST webhook").len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_batch_are_below_its_request_and_those_of_a_schedule_begin_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let faena = start(folder.path(), &collector, &[("OTEL_SERVICE_NAME", "orders")]).await;
    faena.post("/api/v1/jobs/batch", json!({"jobs": [{"name": "noop"}, {"name": "noop"}]})).await;
    let request = collector.span("POST /api/v1/jobs/batch").await;
    let runs = collector.some_spans("run noop", 2).await;
    assert!(runs.iter().all(|run| run.parent == request.id && run.trace_id == request.trace_id), "{runs:#?}");
    let schedule = json!({"name": "tick", "intervalMs": 3_600_000, "jobName": "sleep", "jobPayload": {"ms": 1}});
    let (_, schedule) = faena.post("/api/v1/schedules", schedule).await;
    let path = format!("/api/v1/schedules/{}/trigger", schedule["id"].as_str().unwrap());
    faena.post(&path, json!({})).await;
    let created = collector.span("create sleep").await;
    let run = collector.span("run sleep").await;
    assert_eq!((created.parent.as_str(), created.kind, &run.parent), ("", SpanKind::Producer, &created.id));
    assert_eq!(run.trace_id, run.attribute("messaging.message.id").replace('-', ""));
    assert_eq!(run.resource["service.name"], "orders");
    assert!(!run.resource["service.instance.id"].is_empty() && !run.resource["service.version"].is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_run_while_the_collector_is_down_and_their_spans_arrive_later() {
    let folder = tempfile::tempdir().unwrap();
    let listener = ports::listen();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let port = url.rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret");
    let faena = Faena::start(folder.path(), &[("FAENA_TRACES_ENDPOINT", &url), headers]).await;
    for _ in 0..3 {
        let id = faena.submit(json!({"name": "noop"})).await;
        faena.wait_for_state(&id, "COMPLETED").await;
    }
    eventually("the outage is logged", async || faena.log().contains("span export failed").then_some(())).await;
    let collector = Collector::start_on(std::net::TcpListener::bind(("127.0.0.1", port)).unwrap());
    collector.some_spans("run noop", 3).await;
    assert!(collector.headers().iter().all(|headers| headers["authorization"] == "Bearer s3cret"));
    eventually("the recovery is logged", async || faena.log().contains("span export recovered").then_some(())).await;
    let log = faena.log();
    assert_eq!(log.matches("span export failed").count(), 1, "{log}");
    assert!(!log.contains("s3cret"), "{log}");
    let metrics = faena.http.get(format!("{}/metrics", faena.url)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("faena_trace_spans_exported_total 9"), "{metrics}");
    assert!(metrics.contains("faena_trace_spans_dropped_total 0"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_spans_are_exported_when_the_server_stops() {
    let folder = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let mut faena = start(folder.path(), &collector, &[]).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    faena.signal("TERM");
    faena.wait_for_exit().await;
    assert_eq!(collector.named("run noop").len(), 1, "{:#?}", collector.spans());
}
