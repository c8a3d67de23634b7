//! Webhooks about approvals: stored with the change of the task, sent like those of jobs, deleted with the task.

use std::sync::Arc;

use faena_domain::{NodeId, TaskId, WebhookState, WebhookSubject};
use faena_machine::{Caller, Definition, Input, Outcome};
use faena_store::{Delivery, Signal, WebhookFilter, WebhookNext, WebhookResult, WebhookTakeRequest};
use serde_json::{Value, json};

use crate::{
    support::Fixture,
    tasks::{apply, fire, new_task, register, send},
};

const HOUR_MS: i64 = 3_600_000;

const REVIEW: &str = "
machine: review
version: 3
events: {skip: {}, submit: {}}
initial: DRAFT
states:
  DRAFT: {forever: true, on: {submit: {to: REVIEW}}}
  REVIEW:
    approval:
      subject: ctx.text
      quorum: 2
      groups: [reviewers]
      remind: [1h]
      escalate: {after: 2h, groups: [managers]}
      expires: {after: 3h, to: REJECTED}
      webhook: ctx.receivers
    on: {approval.granted: PUBLISHED, approval.denied: REJECTED, skip: PUBLISHED}
  PUBLISHED: {final: true}
  REJECTED: {final: true, ends: failure}
";

const FIRST: &str = "https://a.example/approvals?token=s3cret";

async fn review(fixture: &Fixture, receivers: Value) -> TaskId {
    let definition = Arc::new(Definition::parse(REVIEW).unwrap());
    register(fixture, &definition).await;
    new_task(fixture, &definition, json!({"text": "a text", "receivers": receivers}), 0).await
}

fn decision(actor: &str, approve: bool) -> Input {
    let caller = Caller { groups: vec!["reviewers".into()], ..Caller::from(actor) };
    Input::Decision { caller, approve, hash: None, comment: Some("well done".into()) }
}

async fn take(fixture: &Fixture, ms: i64) -> Vec<Delivery> {
    let request = WebhookTakeRequest {
        node: NodeId::new(),
        limit: 100,
        per_host: 100,
        host_capacities: Vec::new(),
        allowed: 3,
        lease_ms: 30_000,
    };
    fixture.store.webhook_take(request, fixture.at(ms)).await.unwrap().deliveries
}

async fn settle(fixture: &Fixture, deliveries: &[Delivery], ms: i64) {
    let results = deliveries.iter().map(|delivery| WebhookResult {
        id: delivery.id,
        number: delivery.number,
        attempt: delivery.attempt,
        allowed: 3,
        at: fixture.at(ms),
        took_ms: 5,
        status: Some(200),
        error: None,
        answer: None,
        next: WebhookNext::Delivered,
    });
    let settled = fixture.store.webhook_settle(results.collect(), fixture.at(ms)).await.unwrap();
    assert!(settled.into_iter().all(|settled| settled));
}

async fn events(fixture: &Fixture, task: TaskId) -> Vec<String> {
    let filter = WebhookFilter { task: Some(task), ..WebhookFilter::default() };
    let mut found = fixture.store.webhook_list(filter, None, 100).await.unwrap();
    found.reverse();
    found.into_iter().map(|webhook| webhook.event.strip_prefix("task.approval.").unwrap().to_owned()).collect()
}

pub async fn a_webhook_is_stored_with_the_change_of_an_approval(fixture: &Fixture) {
    let task = review(fixture, json!(FIRST)).await;
    assert_eq!(take(fixture, 1).await.len(), 0, "no approval is open");
    let mut signals = fixture.store.signals();
    send(fixture, task, "e1", "submit", 10).await;
    let mut found = Vec::new();
    while let Ok(signal) = signals.try_recv() {
        found.push(signal);
    }
    assert!(found.contains(&Signal::Webhook), "{found:?}");
    let taken = take(fixture, 10).await;
    assert_eq!(taken.len(), 1);
    let delivery = &taken[0];
    assert_eq!((delivery.subject, delivery.event.as_str()), (WebhookSubject::Task(task), "task.approval.requested"));
    assert_eq!((delivery.url.as_str(), delivery.host.as_str()), (FIRST, "a.example:443"));
    assert_eq!(delivery.correlation_id, format!("c-{task}"));
    let body: Value = serde_json::from_str(&delivery.body).unwrap();
    let hash = fixture.store.task_get(task).await.unwrap().unwrap().task.approval.unwrap().hash;
    let expected = json!({
        "event": "task.approval.requested", "at": fixture.at(10), "taskId": task, "machine": "review", "version": 3,
        "title": "a task", "state": "REVIEW", "correlationId": format!("c-{task}"), "createdBy": "ana",
        "approval": {
            "hash": hash, "subject": "a text", "quorum": 2, "approvals": 0, "groups": ["reviewers"],
            "creatorMayDecide": false, "since": fixture.at(10), "expiresAt": fixture.at(10 + 3 * HOUR_MS), "decisions": [],
        },
        "decide": {
            "approve": format!("POST /api/v1/tasks/{task}/approve"), "reject": format!("POST /api/v1/tasks/{task}/reject"),
            "body": {"hash": hash, "comment": ""}, "command": format!("faena tasks approve {task} --hash {hash}"),
        },
    });
    assert_eq!(body, expected);
    settle(fixture, &taken, 20).await;
    let webhook = fixture.store.webhook_get(delivery.id).await.unwrap().unwrap();
    assert_eq!((webhook.state, webhook.task_id, webhook.job_id), (WebhookState::Delivered, Some(task), None));
    assert_eq!(webhook.history.len(), 1);
}

pub async fn every_receiver_is_notified_of_each_change_of_an_approval(fixture: &Fixture) {
    let task = review(fixture, json!([FIRST, "https://b.example/"])).await;
    send(fixture, task, "e1", "submit", 0).await;
    for hour in 1..=3 {
        fire(fixture, hour * HOUR_MS).await;
    }
    let twice = |name: &str| [name.to_owned(), name.to_owned()];
    assert_eq!(events(fixture, task).await, ["requested", "reminder", "escalated", "expired"].map(twice).concat());
    let ended: Value = serde_json::from_str(&take(fixture, 4 * HOUR_MS).await.last().unwrap().body).unwrap();
    assert_eq!((&ended["event"], ended.get("decide")), (&json!("task.approval.expired"), None), "nothing to decide");
    assert_eq!(ended["approval"]["groups"], json!(["reviewers", "managers"]));
}

pub async fn the_webhook_about_a_decision_names_those_who_decided(fixture: &Fixture) {
    let task = review(fixture, json!(FIRST)).await;
    send(fixture, task, "e1", "submit", 0).await;
    assert_eq!(apply(fixture, task, decision("ana", true), 1).await.outcome, Outcome::Forbidden, "the creator");
    apply(fixture, task, decision("bob", true), 2).await;
    assert_eq!(events(fixture, task).await, ["requested"]);
    apply(fixture, task, decision("carol", true), 3).await;
    assert_eq!(events(fixture, task).await, ["requested", "granted"]);
    let body: Value = serde_json::from_str(&take(fixture, 3).await[1].body).unwrap();
    let decided = json!([
        {"actor": "bob", "approve": true, "at": fixture.at(2), "comment": "well done"},
        {"actor": "carol", "approve": true, "at": fixture.at(3), "comment": "well done"},
    ]);
    assert_eq!((&body["approval"]["decisions"], &body["approval"]["approvals"]), (&decided, &json!(2)));
}

pub async fn a_large_subject_is_named_by_its_hash_only(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(REVIEW).unwrap());
    register(fixture, &definition).await;
    let data = json!({"text": "x".repeat(20_000), "receivers": FIRST});
    let task = new_task(fixture, &definition, data, 0).await;
    send(fixture, task, "e1", "submit", 0).await;
    let body: Value = serde_json::from_str(&take(fixture, 0).await[0].body).unwrap();
    let approval = &body["approval"];
    assert_eq!((approval.get("subject"), &approval["subjectBytes"]), (None, &json!(20_002)));
    assert_eq!(approval["hash"].as_str().map(str::len), Some(64));
}

pub async fn webhooks_of_an_approval_are_deleted_with_their_task(fixture: &Fixture) {
    let (first_task, other_task) =
        (review(fixture, json!(FIRST)).await, review(fixture, json!("https://b.example/")).await);
    for task in [first_task, other_task] {
        send(fixture, task, "e1", "submit", 0).await;
        send(fixture, task, "e2", "skip", 1).await;
        assert_eq!(events(fixture, task).await, ["requested", "withdrawn"]);
    }
    let taken: Vec<Delivery> = take(fixture, 1)
        .await
        .into_iter()
        .filter(|delivery| delivery.subject == WebhookSubject::Task(first_task))
        .collect();
    settle(fixture, &taken, 2).await;
    let retention = faena_store::Retention { completed_ms: 1, cancelled_ms: 1, failed_ms: 1, ..Default::default() };
    fixture.store.job_prune(&retention, 100, fixture.at(1_000)).await.unwrap();
    assert_eq!(events(fixture, first_task).await.len(), 2, "they stay as long as their task");
    assert_eq!(fixture.store.task_prune(fixture.at(10), 10).await.unwrap(), 2);
    assert_eq!(events(fixture, first_task).await.len(), 0);
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook_attempt").await, 0);
    assert_eq!(events(fixture, other_task).await.len(), 2, "webhooks that are not delivered yet are kept");
}
