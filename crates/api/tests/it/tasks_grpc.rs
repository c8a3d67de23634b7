//! Tests of `faena.v1.TaskService`.

use faena_domain::KeyScope;
use faena_wire::v1::{
    ApproveTaskRequest, CancelTaskRequest, CreateTaskRequest, ExplainTaskRequest, GetMachineRequest, GetTaskRequest,
    ListMachinesRequest, ListTaskHistoryRequest, ListTasksRequest, PauseTaskRequest, RegisterMachineRequest,
    RejectTaskRequest, ResumeTaskRequest, SendTaskEventRequest, TaskAnswer, TaskOutcome, TaskStatus, TaskTimerKind,
    task_service_client::TaskServiceClient,
};
use serde_json::{Value, json};
use tonic::{Code, Request, Status};

use crate::{access::key, app::App};

const ORDER: &str = "
machine: order
version: 1
events: {pay: {schema: {type: object, required: [amount], properties: {amount: {type: integer}}}}, ship: {}, vote: {unexpected: reject}}
initial: NEW
counters: {reviews: {max: 2, exceeded: LATE}}
states:
  NEW: {deadline: {total: 1h, to: LATE}, on: {pay: {to: REVIEW, set: {amount: event.amount}}}}
  REVIEW:
    approval: {subject: ctx.amount, self: true, remind: [1h], expires: {after: 1d, to: LATE}}
    on: {vote: {approve: true}, approval.granted: PAID, approval.denied: {to: REVIEW, loop: reviews}}
  PAID: {forever: true, on: {ship: DONE}}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

type Client = TaskServiceClient<axum::Router>;

fn client(app: &App) -> Client {
    TaskServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static("http://127.0.0.1:3000"))
}

/// Returns the status and the error code of an error.
fn code(error: Status) -> (Code, String) {
    let header = error.metadata().get("x-error-code").unwrap().to_str().unwrap().to_owned();
    (error.code(), header)
}

async fn register(client: &mut Client) -> Result<(bool, String), Status> {
    let request = RegisterMachineRequest { definition: ORDER.into() };
    let registered = client.register_machine(request).await?.into_inner();
    Ok((registered.existed, registered.hash))
}

async fn create(client: &mut Client) -> String {
    let request = CreateTaskRequest {
        machine: "order".into(),
        data_json: r#"{"customer": "ana"}"#.into(),
        title: Some("Order 7".into()),
        ..Default::default()
    };
    client.create_task(request).await.unwrap().into_inner().task.unwrap().id
}

async fn send(client: &mut Client, id: &str, kind: &str, payload: Value) -> Result<TaskAnswer, Status> {
    let request = SendTaskEventRequest {
        id: id.into(),
        r#type: kind.into(),
        payload_json: payload.to_string(),
        trace_id: Some(format!("e-{kind}-{payload}")),
    };
    Ok(client.send_task_event(request).await?.into_inner().answer.unwrap())
}

#[tokio::test]
async fn a_machine_is_registered_listed_and_shown_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    let (existed, hash) = register(&mut client).await.unwrap();
    assert!(!existed);
    assert_eq!(register(&mut client).await.unwrap(), (true, hash.clone()));
    create(&mut client).await;
    let listed = client.list_machines(ListMachinesRequest {}).await.unwrap().into_inner().machines;
    let order = listed.iter().find(|one| one.machine.as_ref().unwrap().name == "order").unwrap();
    assert_eq!((order.tasks[0].status(), order.tasks[0].count), (TaskStatus::Running, 1));
    let get = |version| GetMachineRequest { name: "order".into(), version };
    let shown = client.get_machine(get(None)).await.unwrap().into_inner();
    let machine = shown.machine.unwrap();
    assert_eq!((machine.hash, machine.version, shown.versions), (hash, 1, vec![1]));
    let definition: Value = serde_json::from_str(&shown.definition_json).unwrap();
    assert_eq!(definition["initial"], "NEW");
    assert_eq!(client.get_machine(get(Some(9))).await.unwrap_err().code(), Code::NotFound);
    let broken = RegisterMachineRequest { definition: ORDER.replace("pay: {to: REVIEW", "pay: {to: NOWHERE") };
    let error = client.register_machine(broken).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("line 8: there is no state \"NOWHERE\""), "{}", error.message());
    let changed = RegisterMachineRequest { definition: ORDER.replace("total: 1h", "total: 2h") };
    let error = client.register_machine(changed).await.unwrap_err();
    assert_eq!(error.metadata().get("x-error-code").unwrap(), "CONFLICT");
}

#[tokio::test]
async fn a_task_runs_over_grpc_from_its_creation_to_its_end() {
    let app = App::start().await;
    let mut client = client(&app);
    register(&mut client).await.unwrap();
    let id = create(&mut client).await;
    let paid = send(&mut client, &id, "pay", json!({"amount": 5})).await.unwrap();
    assert_eq!((paid.outcome(), paid.state.as_str(), paid.duplicate), (TaskOutcome::Applied, "REVIEW", false));
    assert!(send(&mut client, &id, "pay", json!({"amount": 5})).await.unwrap().duplicate);
    let early = send(&mut client, &id, "ship", json!({})).await.unwrap();
    assert_eq!(early.outcome(), TaskOutcome::Deferred);

    let get = GetTaskRequest { id: id.clone() };
    let task = client.get_task(get.clone()).await.unwrap().into_inner().task.unwrap();
    assert_eq!((task.status(), task.title.as_deref(), task.epoch), (TaskStatus::Running, Some("Order 7"), 2));
    let data: Value = serde_json::from_str(&task.data_json).unwrap();
    assert_eq!(data, json!({"customer": "ana", "amount": 5}));
    let mut kinds: Vec<TaskTimerKind> = task.timers.iter().map(|timer| timer.kind()).collect();
    kinds.sort();
    assert_eq!(kinds, [TaskTimerKind::Lifetime, TaskTimerKind::Remind, TaskTimerKind::Expire]);
    assert_eq!(task.deferred[0].r#type, "ship");
    let approval = task.approval.unwrap();
    assert_eq!((approval.subject_json.as_str(), approval.quorum), ("5", 1));

    let why = client.explain_task(ExplainTaskRequest { id: id.clone() }).await.unwrap().into_inner();
    assert!(why.reasons.iter().any(|reason| reason.code == "approval"), "{why:?}");
    let waiting = ListTasksRequest { approval: true, status: TaskStatus::Running.into(), ..Default::default() };
    let waiting = client.list_tasks(waiting).await.unwrap().into_inner();
    assert_eq!((waiting.total_size, waiting.tasks[0].id.as_str()), (1, id.as_str()));

    let pause = client.pause_task(PauseTaskRequest { id: id.clone() }).await.unwrap().into_inner();
    assert_eq!(pause.answer.unwrap().outcome(), TaskOutcome::Applied);
    let approve = |hash: &str| ApproveTaskRequest { id: id.clone(), hash: Some(hash.into()), comment: None };
    let error = client.approve_task(approve(&approval.hash)).await.unwrap_err();
    assert!(error.message().contains("paused"), "{}", error.message());
    client.resume_task(ResumeTaskRequest { id: id.clone() }).await.unwrap();
    let reject = RejectTaskRequest { id: id.clone(), hash: None, comment: Some("again".into()) };
    assert_eq!(client.reject_task(reject).await.unwrap().into_inner().answer.unwrap().state, "REVIEW");
    let error = client.approve_task(approve("0000")).await.unwrap_err();
    assert_eq!(error.metadata().get("x-error-code").unwrap(), "CONFLICT", "another subject");
    let approved = client.approve_task(approve(&approval.hash)).await.unwrap().into_inner().answer.unwrap();
    assert_eq!(approved.state, "DONE", "the deferred event was applied");

    let history = ListTaskHistoryRequest { id: id.clone(), after: 1, page_size: Some(1_000) };
    let records = client.list_task_history(history).await.unwrap().into_inner().records;
    let sequences: Vec<u64> = records.iter().map(|record| record.sequence).collect();
    assert_eq!(sequences, (2..2 + records.len() as u64).collect::<Vec<_>>());
    assert!(records.iter().any(|record| record.to.as_deref() == Some("DONE")));
    let shown = client.get_task(get).await.unwrap().into_inner().task.unwrap();
    assert_eq!((shown.status(), shown.counters[0].name.as_str()), (TaskStatus::Completed, "reviews"));
    assert!(shown.ended_at.is_some());
    let error = client.cancel_task(CancelTaskRequest { id, reason: None }).await.unwrap_err();
    assert_eq!(error.message(), "the task has ended");
}

#[tokio::test]
async fn bad_input_over_grpc_has_the_errors_of_http() {
    let app = App::start().await;
    let mut client = client(&app);
    register(&mut client).await.unwrap();
    let id = create(&mut client).await;
    let invalid = (Code::InvalidArgument, "VALIDATION_ERROR".to_owned());
    for (id, kind, payload) in [
        ("no-uuid", "pay", "{}"),
        (id.as_str(), "pay", r#"{"amount": "five"}"#),
        (&id, "unknown", "{}"),
        (&id, "", "{}"),
        (&id, "pay", "no json"),
    ] {
        let request =
            SendTaskEventRequest { id: id.into(), r#type: kind.into(), payload_json: payload.into(), trace_id: None };
        let error = client.send_task_event(request).await.unwrap_err();
        assert_eq!(code(error), invalid, "{kind} {payload}");
    }
    for (machine, data) in [("", "{}"), ("order", "[1]"), ("order", "no json")] {
        let request = CreateTaskRequest { machine: machine.into(), data_json: data.into(), ..Default::default() };
        let error = client.create_task(request).await.unwrap_err();
        assert!(matches!(error.code(), Code::InvalidArgument | Code::NotFound), "{machine} {data}: {error:?}");
    }
    let unknown = GetTaskRequest { id: "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10".into() };
    assert_eq!(code(client.get_task(unknown).await.unwrap_err()), (Code::NotFound, "NOT_FOUND".to_owned()));
    let status = ListTasksRequest { status: 99, ..Default::default() };
    assert_eq!(code(client.list_tasks(status).await.unwrap_err()), invalid);
    let listed = client.list_tasks(ListTasksRequest::default()).await.unwrap().into_inner();
    assert_eq!((listed.total_size, listed.tasks[0].state.as_str()), (1, "NEW"), "nothing changed");
}

#[tokio::test]
async fn an_idempotency_key_creates_one_task_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    register(&mut client).await.unwrap();
    let request = |data: &str| CreateTaskRequest {
        machine: "order".into(),
        data_json: data.into(),
        idempotency_key: Some("order 7".into()),
        ..Default::default()
    };
    let first = client.create_task(request(r#"{"customer": "ana"}"#)).await.unwrap().into_inner();
    let again = client.create_task(request(r#"{"customer": "ana"}"#)).await.unwrap().into_inner();
    assert_eq!((first.existed, again.existed), (false, true));
    assert_eq!(first.task.unwrap().id, again.task.unwrap().id);
    let refused = client.create_task(request(r#"{"customer": "bob"}"#)).await.unwrap_err();
    assert_eq!(code(refused), (Code::AlreadyExists, "CONFLICT".to_owned()));
}

#[tokio::test]
async fn a_worker_key_can_send_events_over_grpc_but_cannot_approve() {
    let app = App::start().await;
    let mut without_key = client(&app);
    register(&mut without_key).await.unwrap();
    let id = create(&mut without_key).await;
    let worker = key(&app, &[KeyScope::Worker], None).await;
    let mut client = client(&app);
    let with_key = |kind: &str, payload: &str| {
        let message =
            SendTaskEventRequest { id: id.clone(), r#type: kind.into(), payload_json: payload.into(), trace_id: None };
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {}", worker.reveal()).parse().unwrap());
        request
    };
    let paid = client.send_task_event(with_key("pay", r#"{"amount": 5}"#)).await.unwrap().into_inner();
    assert_eq!(paid.answer.unwrap().state, "REVIEW");
    let error = client.send_task_event(with_key("vote", "{}")).await.unwrap_err();
    assert_eq!(
        (error.code(), error.metadata().get("x-error-code").unwrap()),
        (Code::PermissionDenied, &"FORBIDDEN".parse().unwrap())
    );
}
