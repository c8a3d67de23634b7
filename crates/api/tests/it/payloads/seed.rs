//! Creates jobs, tasks, schedules, webhooks and events with a marker in every payload, result, log line and error.

use axum::{Router, http::StatusCode};
use faena_domain::{NodeId, Timestamp};
use faena_engine::{EngineConfig, WebhookConfig};
use faena_store::{EventSubscription, MAX_ATTEMPTS, OnRejected, OutboxResult, OutboxTakeRequest, SubscriptionMode};
use serde_json::{Value, json};

use crate::app::App;

/// A text that every payload, result, log line and error contains.
pub const MARKER: &str = "s3cr3t-m4rk3r";

const ORDER: &str = "
machine: order
version: 1
events: {pay: {schema: {type: object, properties: {note: {type: string}}}}, ship: {}}
initial: NEW
states:
  NEW: {deadline: {total: 1h, to: LATE}, on: {pay: {to: REVIEW, set: {paid: event.note}}}}
  REVIEW:
    approval: {subject: ctx, quorum: 1, self: true, expires: {after: 1d, to: LATE}}
    on: {approval.granted: PAID, approval.denied: LATE}
  PAID: {forever: true, on: {ship: DONE}}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

pub struct Seed {
    /// Ids of everything that was created, and its correlation id.
    pub ids: Vec<String>,
    pub completed: String,
    pub failed: String,
    /// The job whose events are the last ones.
    pub last: String,
}

pub fn config() -> EngineConfig {
    let webhooks = WebhookConfig { attempts: 1, ..WebhookConfig::default() };
    EngineConfig { allowed_networks: vec!["127.0.0.0/8".parse().unwrap()], webhooks, ..EngineConfig::default() }
}

/// Starts a receiver of webhooks whose answer contains the marker, and returns its address.
async fn receiver() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let router = Router::new().fallback(|| async { (StatusCode::BAD_REQUEST, format!("no: {MARKER}")) });
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

async fn post(app: &App, path: &str, body: Value) -> Value {
    let answer = app.post(path, body.to_string()).await;
    assert!(answer.status.is_success(), "{path}: {}", answer.text);
    answer.json()
}

/// A worker that claims jobs and reports about them over plain HTTP.
struct Worker<'a> {
    app: &'a App,
    token: String,
}

impl Worker<'_> {
    async fn report(&self, job: &str, run: i64, kind: &str, mut body: Value) {
        body["run"] = json!(run);
        let path = format!("/api/v1/workers/w/jobs/{job}/{kind}");
        let answer = self.app.call_as(&self.token, "POST", &path, body.to_string()).await;
        assert!(answer.status.is_success(), "{kind}: {}", answer.text);
    }

    /// Submits a job, starts it, and reports progress, a log line and a step.
    async fn begin(&self, url: &str, retries: u32) -> (String, i64) {
        let job = json!({
            "name": "mail.send", "queue": "mail", "payload": {"card": MARKER}, "tags": ["vip"], "webhookUrl": url,
            "maxRetries": retries, "retryDelay": 3_600_000, "maxDelay": 3_600_000, "correlationId": "order-7",
        });
        let id = self.app.create(&job.to_string()).await;
        let run = self.app.claim(&self.token, "w").await;
        self.report(&id, run, "started", json!({})).await;
        let progress = json!({"percentage": 10.0, "phase": MARKER, "currentStep": MARKER, "message": MARKER});
        self.report(&id, run, "progress", json!({"progress": progress})).await;
        self.report(&id, run, "log", json!({"message": format!("charged {MARKER}")})).await;
        self.report(&id, run, "step", json!({"name": "charge", "result": {"receipt": MARKER}})).await;
        (id, run)
    }
}

/// Creates a task that waits for the approval of a subject with the marker, and has a deferred event.
async fn task(app: &App) -> String {
    post(app, "/api/v1/machines", json!({"definition": ORDER})).await;
    let new = json!({"machine": "order", "data": {"note": MARKER}, "title": "Order 7", "correlationId": "order-7"});
    let id = post(app, "/api/v1/tasks", new).await["id"].as_str().unwrap().to_owned();
    for kind in ["pay", "ship"] {
        let event = json!({"type": kind, "payload": {"note": MARKER}});
        post(app, &format!("/api/v1/tasks/{id}/events"), event).await;
    }
    id
}

/// Takes the events that wait for the sink and rejects them until they are dead letters.
async fn reject_events(app: &App) {
    let store = &app.engine.store;
    for _ in 0..MAX_ATTEMPTS {
        let now = Timestamp::now();
        let node = NodeId(uuid::Uuid::nil());
        let request = OutboxTakeRequest { sink: "broker".into(), node, lease_ms: 60_000, limit: 1_000 };
        let taken = store.outbox_take(request, now).await.unwrap();
        let results = taken.events.iter().map(|event| OutboxResult {
            partition: event.partition,
            position: event.event.position,
            rejected: Some(format!("no: {MARKER}")),
            retry_at: now,
        });
        store.outbox_settle("broker", taken.partitions.clone(), results.collect(), now).await.unwrap();
    }
}

/// Waits until `count` webhooks have failed. Returns their ids.
async fn failed_webhooks(app: &App, count: usize) -> Vec<String> {
    loop {
        let found = app.get("/api/v1/webhooks?state=failed").await.json();
        let webhooks = found["webhooks"].as_array().unwrap();
        if webhooks.len() == count {
            return webhooks.iter().map(|webhook| webhook["id"].as_str().unwrap().to_owned()).collect();
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

pub async fn seed(app: &App) -> Seed {
    let subscription = EventSubscription {
        name: "broker".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Queue(OnRejected::Park),
        until: Timestamp::MAX,
    };
    app.engine.store.event_subscribe(vec![subscription], Timestamp::now()).await.unwrap();
    let url = receiver().await;
    let registration = json!({"workerId": "w", "capabilities": ["mail.send"], "concurrency": 10});
    let worker = Worker { app, token: app.register(registration).await };
    let (completed, run) = worker.begin(&url, 0).await;
    worker.report(&completed, run, "complete", json!({"result": {"receipt": MARKER}})).await;
    let (failed, run) = worker.begin(&url, 0).await;
    worker.report(&failed, run, "fail", json!({"error": format!("card {MARKER} was refused")})).await;
    let (retrying, run) = worker.begin(&url, 3).await;
    worker.report(&retrying, run, "fail", json!({"error": format!("card {MARKER} was refused")})).await;
    let (running, _) = worker.begin(&url, 0).await;
    for (id, state) in [(&completed, "COMPLETED"), (&failed, "FAILED"), (&retrying, "RETRYING")] {
        app.wait_for_state(id, state).await;
    }
    let waiting = app.create(&json!({"name": "unhandled.type", "payload": {"card": MARKER}}).to_string()).await;
    let schedule = json!({
        "name": "nightly", "cronExpression": "0 3 * * *", "jobName": "mail.send", "queue": "mail", "jobPayload": {"card": MARKER},
    });
    let schedule = post(app, "/api/v1/schedules", schedule).await["id"].as_str().unwrap().to_owned();
    let triggered = post(app, &format!("/api/v1/schedules/{schedule}/trigger"), json!({})).await;
    let triggered = triggered["jobId"].as_str().unwrap().to_owned();
    let task = task(app).await;
    let bulk = json!({"filter": {"error": MARKER, "status": "CANCELLED"}, "perSecond": 1});
    post(app, "/api/v1/jobs/bulk/retry", bulk).await;
    let mut ids = vec![completed.clone(), failed.clone(), retrying, running, waiting, schedule, triggered, task];
    ids.extend(failed_webhooks(app, 2).await);
    reject_events(app).await;
    for list in ["/api/v1/outbox/dead-letter", "/api/v1/bulk"] {
        let found = app.get(list).await.json();
        let entries = found.get("data").or(found.get("actions")).unwrap().as_array().unwrap();
        ids.extend(entries.iter().take(2).map(|entry| entry["id"].as_str().unwrap().to_owned()));
    }
    ids.extend(["w".to_owned(), "order-7".to_owned()]);
    let last = app.create(&json!({"name": "unhandled.type", "payload": {"card": MARKER}}).to_string()).await;
    Seed { ids, completed, failed, last }
}
