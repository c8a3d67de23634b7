//! Tests of what `faena.v1.TaskService` does with many tasks, versions and histories, and of `faena.v1.BulkService`.

use faena_domain::KeyScope;
use faena_wire::v1::{
    BulkCancelTasksRequest, BulkPauseTasksRequest, BulkResumeTasksRequest, BulkSendTaskEventRequest,
    CancelBulkActionRequest, CheckMachineRequest, CreateTaskRequest, DiagramFormat, ForkTaskRequest,
    GetBulkActionRequest, GetMachineDiagramRequest, GetMachineSchemaRequest, GetTaskRequest, ListBulkActionsRequest,
    ListTaskEventsRequest, ListTaskHistoryRequest, ListTasksRequest, MigrateTasksRequest, MigrationEntry,
    RegisterMachineRequest, SendTaskEventRequest, StateMapping, Task, TaskBulkOptions, TaskFilter, TaskStatus,
    bulk_service_client::BulkServiceClient, task_service_client::TaskServiceClient,
};
use serde_json::{Value, json};
use tonic::{Code, Request, Status};

use crate::{access::key, app::App};

const ORDER: &str = "
machine: order
version: 1
events: {pay: {}, ship: {}, beat: {heartbeat: true}}
initial: NEW
states:
  NEW: {forever: true, on: {pay: {to: PAID, set: {amount: event.amount}}}}
  PAID: {initial: PACKING, forever: true, on: {ship: DONE}, states: {PACKING: {}}}
  DONE: {final: true}
";

type Client = TaskServiceClient<axum::Router>;

const ORIGIN: &str = "http://127.0.0.1:3000";

fn client(app: &App) -> Client {
    TaskServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static(ORIGIN))
}

fn bulk_client(app: &App) -> BulkServiceClient<axum::Router> {
    BulkServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static(ORIGIN))
}

async fn started(app: &App) -> Client {
    let mut client = client(app);
    client.register_machine(RegisterMachineRequest { definition: ORDER.into() }).await.unwrap();
    client
}

async fn create(client: &mut Client, tags: &[&str]) -> String {
    let tags = tags.iter().map(|tag| (*tag).to_owned()).collect();
    let request = CreateTaskRequest { machine: "order".into(), version: Some(1), tags, ..Default::default() };
    client.create_task(request).await.unwrap().into_inner().task.unwrap().id
}

async fn send(client: &mut Client, id: &str, kind: &str, payload: Value) {
    let (id, payload_json) = (id.to_owned(), payload.to_string());
    let request = SendTaskEventRequest { id, r#type: kind.into(), payload_json, trace_id: None };
    client.send_task_event(request).await.unwrap();
}

async fn get(client: &mut Client, id: &str) -> Task {
    client.get_task(GetTaskRequest { id: id.into() }).await.unwrap().into_inner().task.unwrap()
}

fn error_code(error: &Status) -> String {
    error.metadata().get("x-error-code").unwrap().to_str().unwrap().to_owned()
}

fn options(filter: TaskFilter) -> Option<TaskBulkOptions> {
    Some(TaskBulkOptions { filter: Some(filter), ..Default::default() })
}

fn of_order() -> TaskFilter {
    TaskFilter { machine: Some("order".into()), ..Default::default() }
}

#[tokio::test]
async fn a_task_has_the_same_values_as_over_http() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let id = create(&mut client, &["spring", "vip"]).await;
    create(&mut client, &[]).await;
    send(&mut client, &id, "pay", json!({"amount": 5})).await;
    send(&mut client, &id, "beat", json!({"percent": 7})).await;
    let task = get(&mut client, &id).await;
    let shown = app.get(&format!("/api/v1/tasks/{id}")).await.json();
    assert_eq!(json!(task.tags), shown["tags"]);
    assert_eq!(task.state, "PAID.PACKING");
    let active: Vec<Value> = task.active.iter().map(|one| json!([one.state, one.epoch])).collect();
    let expected: Vec<Value> =
        shown["active"].as_array().unwrap().iter().map(|one| json!([one["state"], one["epoch"]])).collect();
    assert_eq!(active, expected);
    assert!(task.active.iter().all(|one| one.since.is_some()) && task.forked_from.is_none());
    let progress: Option<Value> = task.progress_json.map(|text| serde_json::from_str(&text).unwrap());
    assert_eq!(progress.unwrap_or_default(), shown["progress"]);

    let listed = ListTasksRequest { tag: Some("vip".into()), ..Default::default() };
    let listed = client.list_tasks(listed).await.unwrap().into_inner();
    assert_eq!((listed.total_size, listed.total_is_exact, listed.tasks[0].id.as_str()), (1, true, id.as_str()));
    let history = ListTaskHistoryRequest { id: id.clone(), after: 0, page_size: None };
    let records = client.list_task_history(history).await.unwrap().into_inner().records;
    let shown = app.get(&format!("/api/v1/tasks/{id}/history")).await.json();
    for (record, shown) in records.iter().zip(shown["history"].as_array().unwrap()) {
        let set: Value = serde_json::from_str(&record.set_json).unwrap_or_default();
        assert_eq!((set, json!(record.version)), (shown["set"].clone(), shown["version"].clone()), "{record:?}");
    }
    assert_eq!((records[0].version, records[1].set_json.as_str()), (Some(1), r#"{"amount":5}"#));

    let events = |after| ListTaskEventsRequest { id: id.clone(), after, page_size: None };
    let all = client.list_task_events(events(0)).await.unwrap().into_inner().events;
    let types: Vec<&str> = all.iter().map(|event| event.r#type.as_str()).collect();
    assert_eq!(types, ["task.created", "task.state.changed"]);
    assert_eq!(client.list_task_events(events(1)).await.unwrap().into_inner().events, all[1..]);
    let error = client.list_task_events(events(-1)).await.unwrap_err();
    assert_eq!(error_code(&error), "VALIDATION_ERROR");
}

#[tokio::test]
async fn a_task_is_forked_over_grpc() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let id = create(&mut client, &["vip"]).await;
    send(&mut client, &id, "pay", json!({"amount": 5})).await;
    send(&mut client, &id, "ship", json!({})).await;
    let fork = |at, data: &str| ForkTaskRequest { id: id.clone(), at, data_json: data.into() };
    let copy = client.fork_task(fork(None, r#"{"amount": 6}"#)).await.unwrap().into_inner().task.unwrap();
    assert_eq!((copy.status(), copy.state.as_str()), (TaskStatus::Running, "PAID.PACKING"));
    let origin = copy.forked_from.unwrap();
    assert_eq!((origin.task_id, origin.record, copy.data_json.as_str()), (id.clone(), 2, r#"{"amount":6}"#));
    assert_eq!(copy.tags, ["vip"]);
    let first = client.fork_task(fork(Some(1), "")).await.unwrap().into_inner().task.unwrap();
    assert_eq!((first.state.as_str(), first.data_json.as_str()), ("NEW", "{}"));
    for (at, data) in [(Some(3), ""), (Some(9), ""), (Some(0), ""), (None, "7"), (None, "no json")] {
        let error = client.fork_task(fork(at, data)).await.unwrap_err();
        assert_eq!(
            (error.code(), error_code(&error)),
            (Code::InvalidArgument, "VALIDATION_ERROR".into()),
            "{at:?} {data}"
        );
    }
    let unknown = ForkTaskRequest { id: "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10".into(), ..Default::default() };
    assert_eq!(client.fork_task(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn actions_on_many_tasks_have_a_dry_run_a_rate_and_progress_over_grpc() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let vip = create(&mut client, &["vip"]).await;
    for _ in 0..2 {
        create(&mut client, &["other"]).await;
    }
    let filter = TaskFilter { state: Some("NEW".into()), tag: Some("other".into()), ..of_order() };
    let pay = |dry_run| BulkSendTaskEventRequest {
        options: Some(TaskBulkOptions { filter: Some(filter.clone()), dry_run, ..Default::default() }),
        r#type: "pay".into(),
        payload_json: r#"{"amount": 5}"#.into(),
    };
    let plan = client.bulk_send_task_event(pay(true)).await.unwrap().into_inner().result.unwrap();
    assert_eq!((plan.dry_run, plan.matched, plan.matched_is_exact, plan.done, plan.id), (true, 2, true, 0, None));
    assert_eq!((plan.sample.len(), plan.sample[0].state.as_str()), (2, "NEW"));
    assert_eq!(plan.sample[0].status(), TaskStatus::Running);
    let sent = client.bulk_send_task_event(pay(false)).await.unwrap().into_inner().result.unwrap();
    assert_eq!((sent.done, sent.skipped, sent.in_background), (2, 0, false));
    assert_eq!(get(&mut client, &vip).await.state, "NEW");

    let mut bulk = bulk_client(&app);
    let get_action = |id: &str| GetBulkActionRequest { id: id.into() };
    let action =
        bulk.get_bulk_action(get_action(sent.id.as_deref().unwrap())).await.unwrap().into_inner().action.unwrap();
    assert_eq!((action.action.as_str(), action.matched, action.done), ("tasks.send", 2, 2));
    assert!(action.finished_at.is_some() && action.created_at.is_some() && action.filter_json.contains("other"));

    let pause = BulkPauseTasksRequest { options: options(of_order()) };
    assert_eq!(client.bulk_pause_tasks(pause).await.unwrap().into_inner().result.unwrap().done, 3);
    let paused = TaskFilter { status: TaskStatus::Paused.into(), tag: Some("vip".into()), ..Default::default() };
    let resume = BulkResumeTasksRequest { options: options(paused) };
    assert_eq!(client.bulk_resume_tasks(resume).await.unwrap().into_inner().result.unwrap().done, 1);

    let slow = TaskBulkOptions { filter: Some(of_order()), per_second: Some(1), ..Default::default() };
    let cancel = BulkCancelTasksRequest { options: Some(slow), reason: Some("over".into()) };
    let begun = client.bulk_cancel_tasks(cancel).await.unwrap().into_inner().result.unwrap();
    assert_eq!((begun.in_background, begun.per_second, begun.matched), (true, Some(1), 3));
    let id = begun.id.unwrap();
    let stop = CancelBulkActionRequest { id: id.clone() };
    let stopped = bulk.cancel_bulk_action(stop.clone()).await.unwrap().into_inner().action.unwrap();
    assert!(stopped.finished_at.is_some(), "{stopped:?}");
    let error = bulk.cancel_bulk_action(stop).await.unwrap_err();
    assert_eq!((error.code(), error_code(&error)), (Code::FailedPrecondition, "INVALID_TRANSITION".into()));
    let list = |page_token: &str| ListBulkActionsRequest { page_size: Some(2), page_token: page_token.into() };
    let page = bulk.list_bulk_actions(list("")).await.unwrap().into_inner();
    assert_eq!((page.total_size, page.actions.len(), page.actions[0].id.as_str()), (4, 2, id.as_str()));
    let rest = bulk.list_bulk_actions(list(&page.next_page_token)).await.unwrap().into_inner();
    assert_eq!(rest.actions.last().unwrap().action, "tasks.send");
    assert_eq!(bulk.get_bulk_action(get_action("no-uuid")).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_invalid_action_on_many_tasks_is_refused_over_grpc() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let id = create(&mut client, &[]).await;
    let everything = BulkCancelTasksRequest::default();
    let error = client.bulk_cancel_tasks(everything).await.unwrap_err();
    assert!(error.message().contains("matches every task"), "{}", error.message());
    let unknown = TaskFilter { status: 99, ..of_order() };
    let rate = TaskBulkOptions { filter: Some(of_order()), per_second: Some(0), ..Default::default() };
    for options in [options(unknown), Some(rate)] {
        let error = client.bulk_pause_tasks(BulkPauseTasksRequest { options }).await.unwrap_err();
        assert_eq!(error_code(&error), "VALIDATION_ERROR");
    }
    let send = |kind: &str, payload: &str, filter| BulkSendTaskEventRequest {
        options: options(filter),
        r#type: kind.into(),
        payload_json: payload.into(),
    };
    let other = TaskFilter { tag: Some("x".into()), ..Default::default() };
    for request in [
        send("", "", of_order()),
        send("buy", "", of_order()),
        send("pay", "7", of_order()),
        send("pay", "no json", of_order()),
        send("pay", "", other),
    ] {
        let error = client.bulk_send_task_event(request.clone()).await.unwrap_err();
        assert_eq!(error_code(&error), "VALIDATION_ERROR", "{request:?}");
    }
    assert_eq!(get(&mut client, &id).await.status(), TaskStatus::Running);
}

#[tokio::test]
async fn tasks_are_migrated_over_grpc_after_a_dry_run() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let (new, paid) = (create(&mut client, &[]).await, create(&mut client, &[]).await);
    send(&mut client, &paid, "pay", json!({"amount": 5})).await;
    let text = ORDER.replace("version: 1", "version: 2").replace("NEW", "OPEN").replace("PAID", "SETTLED");
    let text = text.replace("PACKING", "BOXING");
    client.register_machine(RegisterMachineRequest { definition: text }).await.unwrap();
    let mapping = |from: &str, to: &str| StateMapping { from: from.into(), to: to.into() };
    let request = |states: Vec<StateMapping>, dry_run| MigrateTasksRequest {
        machine: "order".into(),
        from_version: 1,
        to_version: 2,
        states,
        entry: MigrationEntry::Skip.into(),
        dry_run,
        per_second: None,
    };
    let open = || vec![mapping("NEW", "OPEN")];
    let plan = client.migrate_tasks(request(open(), true)).await.unwrap().into_inner();
    assert_eq!((plan.dry_run, plan.matched, plan.tried, plan.refused, plan.done), (true, 2, 2, 1, 0));
    assert_eq!((plan.from_version, plan.to_version), (1, 2));
    assert_eq!((plan.states[0].state.as_str(), plan.states[0].to.as_deref()), ("NEW", Some("OPEN")));
    assert!(plan.states[1].to.is_none() && plan.states[1].reason.is_some(), "{:?}", plan.states);
    assert_eq!(plan.refusals[0].id, paid);
    assert_eq!(get(&mut client, &new).await.version, 1, "a dry run changes nothing");
    let done = client.migrate_tasks(request(open(), false)).await.unwrap().into_inner();
    assert_eq!((done.done, done.skipped, done.in_background), (1, 1, false));
    let moved = get(&mut client, &new).await;
    assert_eq!((moved.version, moved.state.as_str()), (2, "OPEN"));
    let twice = vec![mapping("NEW", "OPEN"), mapping("NEW", "DONE")];
    let broken = MigrateTasksRequest { entry: 9, ..request(open(), false) };
    let missing = MigrateTasksRequest { to_version: 0, ..request(open(), false) };
    for request in [request(twice, false), request(vec![mapping("NEW", "NOWHERE")], false), broken, missing] {
        let error = client.migrate_tasks(request.clone()).await.unwrap_err();
        assert_eq!(error_code(&error), "VALIDATION_ERROR", "{request:?}");
    }
}

#[tokio::test]
async fn a_definition_is_checked_drawn_and_described_over_grpc() {
    let app = App::start().await;
    let mut client = started(&app).await;
    let check = |definition: String| CheckMachineRequest { definition };
    let valid = client.check_machine(check(ORDER.into())).await.unwrap().into_inner();
    assert_eq!((valid.findings.len(), valid.name.as_str(), valid.version), (0, "order", 1));
    assert_eq!(valid.hash.len(), 64);
    let broken = ORDER.replace("ship: DONE", "ship: NOWHERE").replace("to: PAID", "to: ELSEWHERE");
    let broken = client.check_machine(check(broken)).await.unwrap().into_inner();
    let lines: Vec<u32> = broken.findings.iter().map(|finding| finding.line).collect();
    assert!(lines.contains(&7) && lines.contains(&8), "every error with its line: {:?}", broken.findings);
    assert!(broken.findings.iter().all(|finding| finding.column > 0 && !finding.message.is_empty()));
    let draw = |format: i32| GetMachineDiagramRequest { name: "order".into(), version: Some(1), format };
    let svg = client.get_machine_diagram(draw(0)).await.unwrap().into_inner().diagram;
    assert!(svg.starts_with("<svg"), "{svg}");
    let mermaid = client.get_machine_diagram(draw(DiagramFormat::Mermaid.into())).await.unwrap().into_inner().diagram;
    assert!(mermaid.starts_with("stateDiagram-v2"), "{mermaid}");
    assert_eq!(client.get_machine_diagram(draw(9)).await.unwrap_err().code(), Code::InvalidArgument);
    let schema = client.get_machine_schema(GetMachineSchemaRequest {}).await.unwrap().into_inner().schema_json;
    assert_eq!(serde_json::from_str::<Value>(&schema).unwrap(), app.get("/machine.schema.json").await.json());
}

#[tokio::test]
async fn actions_on_many_tasks_need_a_key_of_all_queues_with_the_scope_write() {
    let app = App::start().await;
    started(&app).await;
    let read = key(&app, &[KeyScope::Read], None).await;
    let worker = key(&app, &[KeyScope::Worker], None).await;
    let restricted = key(&app, &[KeyScope::Write], Some(&["mail"])).await;
    for (key, may_look) in [(read, true), (worker, false), (restricted, false)] {
        fn with<T>(key: &str, message: T) -> Request<T> {
            let mut request = Request::new(message);
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            request
        }
        let key = key.reveal();
        let mut tasks = client(&app);
        let refused = [
            tasks.bulk_cancel_tasks(with(key, BulkCancelTasksRequest::default())).await.unwrap_err(),
            tasks.bulk_send_task_event(with(key, BulkSendTaskEventRequest::default())).await.unwrap_err(),
            tasks.bulk_pause_tasks(with(key, BulkPauseTasksRequest::default())).await.unwrap_err(),
            tasks.bulk_resume_tasks(with(key, BulkResumeTasksRequest::default())).await.unwrap_err(),
            tasks.migrate_tasks(with(key, MigrateTasksRequest::default())).await.unwrap_err(),
            tasks.fork_task(with(key, ForkTaskRequest::default())).await.unwrap_err(),
            bulk_client(&app).cancel_bulk_action(with(key, CancelBulkActionRequest::default())).await.unwrap_err(),
        ];
        assert!(refused.iter().all(|error| error.code() == Code::PermissionDenied), "{refused:?}");
        let looked = bulk_client(&app).list_bulk_actions(with(key, ListBulkActionsRequest::default())).await;
        assert_eq!(looked.is_ok(), may_look);
    }
}
