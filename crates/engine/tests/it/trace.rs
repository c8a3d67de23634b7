//! Traces: everything with one correlation id in one timeline.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{Router, http::StatusCode};
use faena_domain::{JobState, NewJob, TaskId, Timestamp, TraceEntry, TraceKind};
use faena_engine::{EngineConfig, WebhookConfig, event_reader::EventFilter, trace::trace};
use faena_machine::{Definition, Event, Input, create};
use faena_store::{NewMachine, NewTask, TaskInput};

use crate::fixture::{Fixture, eventually, job, once, serve};

#[tokio::test(flavor = "multi_thread")]
async fn a_timeline_contains_parents_children_runs_events_and_actions_in_order() {
    let fixture = Fixture::new().await;
    let _watcher =
        fixture.engine.events.reader.subscribe(None, EventFilter::default(), Timestamp::now()).await.unwrap();
    let correlated = |mut job: NewJob| {
        job.correlation_id = Some("order 7".into());
        job
    };
    let parent = fixture.run_to(correlated(job("noop", "{}")), JobState::Completed).await;
    let mut child = correlated(once("http.request", r#"{"url": "http://127.0.0.1/"}"#));
    child.options.depends_on = vec![parent.id];
    let child = fixture.run_to(child, JobState::Failed).await;
    fixture.store.job_retry(child.id, Some("key:ops"), Timestamp::now()).await.unwrap();
    fixture.wait_for_state(child.id, JobState::Failed).await;
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;

    let found = trace(&*fixture.store, "order 7").await.unwrap().unwrap();
    assert!(found.timeline.is_sorted_by_key(|entry| entry.at));
    assert!(found.omitted.is_empty());
    let ids: Vec<_> = found.jobs.iter().map(|job| job.id).collect();
    assert_eq!(ids, [parent.id, child.id], "the third job has another correlation id");
    assert_eq!((&found.jobs[1].depends_on, &found.jobs[0].dependents), (&vec![parent.id], &vec![child.id]));
    let runs: Vec<_> = found.jobs.iter().map(|job| job.runs.len()).collect();
    assert_eq!(runs, [1, 2], "{:#?}", found.jobs);
    assert!(found.jobs[1].runs.iter().all(|run| run.error.is_some() && run.worker_id.is_some()));

    let of = |kind: TraceKind, id| {
        let entries = found.timeline.iter().filter(move |entry| entry.kind == kind && entry.job_id == Some(id));
        entries.collect::<Vec<_>>()
    };
    let log: Vec<&str> = of(TraceKind::Job, parent.id).iter().map(|entry| entry.what.as_str()).collect();
    assert_eq!(log, ["created", "queued", "assigned", "started", "completed"]);
    let started = of(TraceKind::Job, parent.id).into_iter().find(|entry| entry.what == "started").unwrap();
    assert_eq!((started.run, &started.worker_id), (parent.run, &parent.worker_id));
    let ends = of(TraceKind::Event, child.id).iter().filter(|entry| entry.what == "job.failed").count();
    assert_eq!(ends, 2, "{:#?}", found.timeline);
    let actions = of(TraceKind::Audit, child.id);
    assert_eq!(actions.len(), 1);
    assert_eq!((actions[0].what.as_str(), actions[0].actor.as_deref()), ("job.retry", Some("key:ops")));
}

const REVIEW: &str = "
machine: review
version: 1
events: {pay: {}}
initial: NEW
states:
  NEW: {deadline: {total: 1h, to: LATE}, on: {pay: REVIEW}}
  REVIEW:
    approval: {subject: ctx, self: true, expires: {after: 1d, to: LATE}}
    on: {approval.granted: CHARGING, approval.denied: LATE}
  CHARGING:
    deadline: {total: 1h, to: LATE}
    entry: [{job: noop, name: charge}]
    on: {job.charge.completed: DONE, job.charge.failed: LATE}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

#[tokio::test(flavor = "multi_thread")]
async fn a_task_its_events_approvals_and_jobs_are_one_timeline() {
    let fixture = Fixture::new().await;
    let (store, now) = (&fixture.store, Timestamp::now());
    let definition = Arc::new(Definition::parse(REVIEW).unwrap());
    let machine = NewMachine { definition: definition.clone() };
    store.machine_register(machine, "key:ops", now).await.unwrap();
    let id = TaskId::new();
    let first = create(&definition, id.to_string(), "key:ana".into(), serde_json::json!({}), now).unwrap();
    let (title, correlation) = (Some("Order 7".to_owned()), "order 7".to_owned());
    let new = NewTask { id, definition, title, correlation, tags: Vec::new(), first, audit: None };
    store.task_create(new, now).await.unwrap();
    let (kind, actor, payload) = ("pay".to_owned(), "key:shop".to_owned(), serde_json::json!({}));
    let pay = Input::Event(Event { id: "e1".into(), kind, payload, actor, decider: None, at: now });
    let decision = Input::Decision { caller: "key:ana".into(), approve: true, hash: None, comment: None };
    for input in [pay, decision] {
        store.task_apply(vec![TaskInput { task: id, input }], Timestamp::now()).await.unwrap();
    }
    eventually("the task has ended", async || {
        let task = store.task_get(id).await.unwrap()?.task;
        task.status.has_ended().then_some(())
    })
    .await;

    let found = trace(&**store, "order 7").await.unwrap().unwrap();
    assert!(found.timeline.is_sorted_by_key(|entry| entry.at));
    assert_eq!(found.tasks.len(), 1);
    assert_eq!((found.tasks[0].state.as_str(), found.tasks[0].status.as_str()), ("DONE", "completed"));
    assert_eq!(found.jobs.len(), 1, "the job of the task");
    let of = |kind: TraceKind| found.timeline.iter().filter(move |entry| entry.kind == kind);
    let records: Vec<(&str, &str)> =
        of(TraceKind::Task).map(|entry| (entry.what.as_str(), entry.details.as_str())).collect();
    let expected = [
        ("task.created", "NEW"),
        ("pay", "NEW to REVIEW"),
        ("approval.decided", "approved: 1 of 1"),
        ("approval.granted", "REVIEW to CHARGING; job charge"),
        ("job.charge.completed", "CHARGING to DONE"),
    ];
    assert_eq!(records, expected);
    assert!(of(TraceKind::Task).all(|entry| entry.task_id == Some(id)));
    let events: Vec<&str> =
        of(TraceKind::Event).filter(|entry| entry.task_id == Some(id)).map(|entry| entry.what.as_str()).collect();
    for event in ["task.created", "task.approval.requested", "task.ended"] {
        assert!(events.contains(&event), "{event}: {events:?}");
    }
    assert!(of(TraceKind::Job).any(|entry| entry.what == "completed" && entry.job_id == Some(found.jobs[0].id)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_correlation_id_is_found_by_its_own_id() {
    let fixture = Fixture::new().await;
    let own = fixture.run_to(job("noop", "{}"), JobState::Completed).await;
    let found = trace(&*fixture.store, &own.id.to_string()).await.unwrap().unwrap();
    assert_eq!(found.jobs.len(), 1);
    assert!(found.timeline.iter().all(|entry| entry.kind == TraceKind::Job), "no events were kept");
    let mut given = job("noop", "{}");
    given.correlation_id = Some("x".into());
    let given = fixture.run_to(given, JobState::Completed).await;
    assert!(trace(&*fixture.store, &given.id.to_string()).await.unwrap().is_none());
    assert!(trace(&*fixture.store, "nothing").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_jobs_the_latest_are_shown_and_the_omission_is_reported() {
    let fixture = Fixture::new().await;
    let many = |count: usize| {
        let one = || NewJob { correlation_id: Some("flood".into()), ..NewJob::new("unserved") };
        std::iter::repeat_with(one).take(count).collect::<Vec<_>>()
    };
    fixture.store.job_submit(many(1_050), None, Timestamp::now()).await.unwrap();
    let found = trace(&*fixture.store, "flood").await.unwrap().unwrap();
    assert_eq!((found.jobs.len(), found.omitted.len()), (1_000, 1), "{:?}", found.omitted);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_attempt_of_a_webhook_is_in_the_timeline() {
    // Fails first, then succeeds.
    let calls = Arc::new(AtomicU32::new(0));
    let answer = move || {
        let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
        async move { if first { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK } }
    };
    let url = serve(Router::new().fallback(answer)).await + "/";
    let webhooks = WebhookConfig { base_delay: Duration::from_millis(5), ..WebhookConfig::default() };
    let allowed_networks = vec!["127.0.0.0/8".parse().unwrap()];
    let fixture = Fixture::with(EngineConfig { allowed_networks, webhooks, ..EngineConfig::default() }).await;
    let mut hooked = job("noop", "{}");
    hooked.options.webhook_url = Some(url);
    let id = fixture.run_to(hooked, JobState::Completed).await.id.to_string();
    let delivered = eventually("it is delivered", async || {
        let found = trace(&*fixture.store, &id).await.unwrap().unwrap();
        let webhook = found.timeline.into_iter().filter(|entry| entry.kind == TraceKind::Webhook);
        let delivered: Vec<TraceEntry> = webhook.collect();
        (delivered.last().is_some_and(|last| last.what == "delivered")).then_some(delivered)
    })
    .await;
    let what: Vec<&str> = delivered.iter().map(|entry| entry.what.as_str()).collect();
    assert_eq!(what, ["created", "not delivered", "delivered"]);
    assert!(delivered[1].details.starts_with("attempt 1: answered 500 after"), "{delivered:?}");
    assert!(delivered[2].details.starts_with("attempt 2: answered 200 after"), "{delivered:?}");
}
