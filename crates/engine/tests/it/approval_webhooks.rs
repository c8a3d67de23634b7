//! Webhooks about approvals reach their receivers, signed like those of jobs, and are in the trace.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, StatusCode},
};
use faena_domain::{TaskId, Timestamp, TraceEntry, TraceKind};
use faena_engine::{EngineConfig, WebhookConfig, trace::trace};
use faena_machine::{Definition, Input, create};
use faena_store::{NewMachine, NewTask, TaskInput};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fixture::{Fixture, eventually, serve};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

const REVIEW: &str = "
machine: review
version: 1
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx.text, self: true, expires: {after: 1d, to: LATE}, webhook: ctx.receiver}
    on: {approval.granted: DONE, approval.denied: LATE}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

#[tokio::test(flavor = "multi_thread")]
async fn the_receivers_of_an_approval_get_signed_webhooks_and_a_failed_one_is_sent_again() {
    let calls: Arc<Mutex<Vec<(HeaderMap, Bytes)>>> = Arc::default();
    let received = calls.clone();
    let answer = move |headers: HeaderMap, body: Bytes| {
        let mut calls = received.lock();
        calls.push((headers, body));
        let status = if calls.len() == 1 { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK };
        async move { status }
    };
    let receiver = serve(Router::new().fallback(answer)).await + "/approvals";
    let secrets = vec![SECRET.parse().unwrap()];
    let webhooks = WebhookConfig { base_delay: Duration::from_millis(5), secrets, ..WebhookConfig::default() };
    let allowed_networks = vec!["127.0.0.0/8".parse().unwrap()];
    let fixture = Fixture::with(EngineConfig { allowed_networks, webhooks, ..EngineConfig::default() }).await;
    let (store, now) = (&fixture.store, Timestamp::now());
    let definition = Arc::new(Definition::parse(REVIEW).unwrap());
    store.machine_register(NewMachine { definition: definition.clone() }, "ops", now).await.unwrap();
    let id = TaskId::new();
    let data = json!({"text": "a", "receiver": receiver});
    let first = create(&definition, id.to_string(), "ana".into(), data, now).unwrap();
    let correlation = "order 7".to_owned();
    let new = NewTask { id, definition, title: None, correlation, tags: Vec::new(), first, audit: None };
    store.task_create(new, now).await.unwrap();
    eventually("the request is delivered", async || (calls.lock().len() == 2).then_some(())).await;
    let input = Input::Decision { caller: "ana".into(), approve: true, hash: None, comment: None };
    store.task_apply(vec![TaskInput { task: id, input }], Timestamp::now()).await.unwrap();
    let entries = eventually("the decision is delivered", async || {
        let found = trace(&**store, "order 7").await.unwrap()?;
        let webhooks_sent: Vec<TraceEntry> =
            found.timeline.into_iter().filter(|entry| entry.kind == TraceKind::Webhook).collect();
        (webhooks_sent.iter().filter(|entry| entry.what == "delivered").count() == 2).then_some(webhooks_sent)
    })
    .await;

    assert!(entries.iter().all(|entry| entry.task_id == Some(id) && entry.job_id.is_none()));
    let created: Vec<&str> =
        entries.iter().filter(|entry| entry.what == "created").map(|entry| entry.details.as_str()).collect();
    assert!(created[0].starts_with("task.approval.requested, delivered to http://127.0.0.1"), "{created:?}");
    assert!(created[1].starts_with("task.approval.granted, delivered to"), "{created:?}");
    assert_eq!(entries.iter().filter(|entry| entry.what == "not delivered").count(), 1);
    let calls = calls.lock().clone();
    let header = |call: usize, name: &str| calls[call].0[name].to_str().unwrap().to_owned();
    assert_eq!(header(0, "webhook-id"), header(1, "webhook-id"), "the same webhook again");
    assert_eq!(
        (header(1, "x-webhook-event"), header(2, "x-webhook-event")),
        ("task.approval.requested".into(), "task.approval.granted".into())
    );
    assert_eq!((header(2, "x-task-id"), header(2, "x-correlation-id")), (id.to_string(), "order 7".into()));
    assert!(calls[2].0.get("x-job-id").is_none());
    let verifier = standardwebhooks::Webhook::new(SECRET).unwrap();
    for (headers, body) in &calls {
        verifier.verify(body, headers).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(body).unwrap()["taskId"], json!(id));
    }
}
