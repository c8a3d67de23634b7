//! Machines and tasks over REST.

use axum::http::{Request, StatusCode};
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::app::App;

const ORDER: &str = "
machine: order
version: 1
events: {pay: {schema: {type: object, required: [amount], properties: {amount: {type: integer}}}}, ship: {}, stop: {unexpected: reject}}
initial: NEW
states:
  NEW: {deadline: {total: 1h, to: LATE}, on: {pay: REVIEW}}
  REVIEW:
    approval: {subject: ctx, quorum: 1, self: true, expires: {after: 1d, to: LATE}}
    on: {approval.granted: PAID, approval.denied: LATE}
  PAID: {forever: true, on: {ship: DONE}}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

async fn register(app: &App, definition: Value) -> (StatusCode, Value) {
    let answer = app.post("/api/v1/machines", json!({ "definition": definition }).to_string()).await;
    (answer.status, answer.json())
}

async fn post(app: &App, path: &str, body: Value) -> (StatusCode, Value) {
    let answer = app.post(path, body.to_string()).await;
    (answer.status, answer.json())
}

async fn order(app: &App) -> String {
    register(app, json!(ORDER)).await;
    let (status, task) = post(app, "/api/v1/tasks", json!({"machine": "order", "title": "Order 7"})).await;
    assert_eq!(status, StatusCode::CREATED, "{task}");
    task["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_machine_is_registered_once_and_shown() {
    let app = App::start().await;
    let (status, first) = register(&app, json!(ORDER)).await;
    assert_eq!((status, &first["name"], &first["version"]), (StatusCode::CREATED, &json!("order"), &json!(1)));
    let shown = app.get("/api/v1/machines/order").await.json();
    assert_eq!((&shown["hash"], &shown["versions"]), (&first["hash"], &json!([1])));
    let (status, again) = register(&app, shown["definition"].clone()).await;
    assert_eq!((status, &again["hash"]), (StatusCode::OK, &first["hash"]), "as an object too");
    let (status, conflict) = register(&app, json!(ORDER.replace("total: 1h", "total: 2h"))).await;
    assert_eq!((status, &conflict["error"]["code"]), (StatusCode::CONFLICT, &json!("CONFLICT")));
    let list = app.get("/api/v1/machines").await.json();
    let names: Vec<&str> =
        list["machines"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["coding-task", "order"], "with the built-in machine");
    let drawing = app.get("/api/v1/machines/order/diagram").await;
    assert!(drawing.text.starts_with("<svg") && drawing.text.contains(">REVIEW<"));
    for path in ["/api/v1/machines/nothing", "/api/v1/machines/order?version=9"] {
        assert_eq!(app.get(path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn every_error_of_a_definition_is_reported_with_its_line() {
    let app = App::start().await;
    let broken = ORDER.replace("pay: REVIEW", "pay: NOWHERE").replace("ship: DONE", "shop: DONE");
    let (status, answer) = register(&app, json!(broken)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let details = answer["error"]["details"].as_array().unwrap();
    let messages: Vec<&str> = details.iter().map(|one| one["message"].as_str().unwrap()).collect();
    for expected in ["line 7: there is no state \"NOWHERE\"", "\"shop\""] {
        let found = messages.iter().find(|message| message.contains(expected));
        assert!(found.is_some_and(|message| message.starts_with("line ")), "{expected}: {messages:?}");
    }
    for body in
        [json!({}), json!({"definition": 7}), json!({"definition": "x", "more": 1}), json!({"definition": "a: [1"})]
    {
        let (status, answer) = post(&app, "/api/v1/machines", body).await;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("VALIDATION_ERROR")));
    }
}

#[tokio::test]
async fn a_task_runs_from_its_creation_to_its_end() {
    let app = App::start().await;
    let id = order(&app).await;
    let events = format!("/api/v1/tasks/{id}/events");
    let pay = json!({"type": "pay", "payload": {"amount": 5}, "metadata": {"traceId": "e1", "taskId": id}});
    let (status, first) = post(&app, &events, pay.clone()).await;
    assert_eq!((status, &first["outcome"], &first["state"]), (StatusCode::OK, &json!("applied"), &json!("REVIEW")));
    let (_, again) = post(&app, &events, pay).await;
    assert_eq!((&again["duplicate"], &again["state"]), (&json!(true), &json!("REVIEW")));
    let (_, early) = post(&app, &events, json!({"type": "ship"})).await;
    assert_eq!(early["outcome"], "deferred");

    let why = app.get(&format!("/api/v1/tasks/{id}/why")).await.json();
    let codes: Vec<&str> = why["reasons"].as_array().unwrap().iter().map(|one| one["code"].as_str().unwrap()).collect();
    assert_eq!(codes, ["approval", "event", "timer", "timer", "deferred"], "{why:#}");
    let waiting = app.get("/api/v1/tasks?approval=true").await.json();
    assert_eq!((&waiting["total"], &waiting["tasks"][0]["id"]), (&json!(1), &json!(id)));

    let hash = waiting["tasks"][0]["approval"]["hash"].as_str().unwrap().to_owned();
    let approve = format!("/api/v1/tasks/{id}/approve");
    let (status, answer) = post(&app, &approve, json!({"hash": "0000"})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::CONFLICT, &json!("CONFLICT")), "another subject");
    let (status, _) = post(&app, &approve, json!({"hash": hash, "comment": "fine"})).await;
    assert_eq!(status, StatusCode::OK);
    let task = app.get(&format!("/api/v1/tasks/{id}")).await.json();
    assert_eq!((&task["state"], &task["status"]), (&json!("DONE"), &json!("completed")), "the deferred event followed");

    let history = app.get(&format!("/api/v1/tasks/{id}/history")).await.json();
    let events: Vec<&str> =
        history["history"].as_array().unwrap().iter().map(|one| one["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["task.created", "pay", "ship", "approval.decided", "approval.granted", "ship"]);
    let (status, _) = post(&app, &approve, json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT, "the task has ended");
}

#[tokio::test]
async fn a_wrong_event_changes_nothing() {
    let app = App::start().await;
    let id = order(&app).await;
    let before = app.get(&format!("/api/v1/tasks/{id}")).await.json();
    let events = format!("/api/v1/tasks/{id}/events");
    for (body, status) in [
        (json!({"type": "pay", "payload": {"amount": "five"}}), StatusCode::BAD_REQUEST),
        (json!({"type": "pay"}), StatusCode::BAD_REQUEST),
        (json!({"type": "unknown"}), StatusCode::BAD_REQUEST),
        (json!({"payload": {}}), StatusCode::BAD_REQUEST),
        (json!({"type": "pay", "extra": 1}), StatusCode::BAD_REQUEST),
        (json!({"type": "ship", "metadata": {"traceId": 7}}), StatusCode::BAD_REQUEST),
        (json!({"type": "ship", "metadata": {"other": 7}}), StatusCode::BAD_REQUEST),
        (json!({"type": "ship", "metadata": {"taskId": "another"}}), StatusCode::BAD_REQUEST),
        (json!({"type": "stop"}), StatusCode::CONFLICT),
    ] {
        let (found, answer) = post(&app, &events, body.clone()).await;
        assert_eq!(found, status, "{body}: {answer}");
    }
    let large = json!({"type": "ship", "payload": {"text": "x".repeat(1 << 20)}});
    let (status, answer) = post(&app, &events, large).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (413, &json!("PAYLOAD_TOO_LARGE")));
    assert_eq!(app.get(&format!("/api/v1/tasks/{id}")).await.json(), before);
    let unknown = "/api/v1/tasks/018f0000-0000-7000-8000-000000000000";
    assert_eq!(app.get(unknown).await.status, StatusCode::NOT_FOUND);
    assert_eq!(post(&app, &format!("{unknown}/events"), json!({"type": "pay"})).await.0, StatusCode::NOT_FOUND);
    assert_eq!(app.get("/api/v1/tasks/abc").await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_plan_is_not_approved_with_the_hash_of_another_plan() {
    let app = App::start().await;
    let data = json!({"prompt": "p", "repositorioOrigen": "/r"});
    let (_, task) = post(&app, "/api/v1/tasks", json!({"machine": "coding-task", "data": data})).await;
    let path = format!("/api/v1/tasks/{}", task["id"].as_str().unwrap());
    let mut hashes = Vec::new();
    for plan in ["p1", "p2"] {
        let made = json!({"type": "resultado.plan_generado", "payload": {"planId": plan, "plan": "do it"}});
        let (status, answer) = post(&app, &format!("{path}/events"), made).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        hashes.push(app.get(&path).await.json()["approval"]["hash"].clone());
        if plan == "p1" {
            post(&app, &format!("{path}/reject"), json!({"hash": hashes[0], "comment": "again"})).await;
        }
    }
    let (status, answer) = post(&app, &format!("{path}/approve"), json!({"hash": hashes[0]})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::CONFLICT, &json!("CONFLICT")), "{answer}");
    assert_eq!(app.get(&path).await.json()["state"], "ESPERANDO_APROBACION_PLAN", "nothing was approved");
    let (status, answer) = post(&app, &format!("{path}/approve"), json!({"hash": hashes[1]})).await;
    assert_eq!((status, &answer["state"]), (StatusCode::OK, &json!("EJECUTANDO_CODIGO.INICIANDO")), "{answer}");
}

#[tokio::test]
async fn invalid_tasks_are_rejected() {
    let app = App::start().await;
    for (body, status) in [
        (json!({}), StatusCode::BAD_REQUEST),
        (json!({"machine": "nothing"}), StatusCode::NOT_FOUND),
        (json!({"machine": "coding-task", "data": {"prompt": "x"}}), StatusCode::BAD_REQUEST),
        (json!({"machine": "coding-task", "data": 7}), StatusCode::BAD_REQUEST),
        (json!({"machine": "coding-task", "title": ""}), StatusCode::BAD_REQUEST),
        (
            json!({"machine": "coding-task", "data": {"prompt": "x".repeat(300 << 10), "repositorioOrigen": "/r"}}),
            StatusCode::PAYLOAD_TOO_LARGE,
        ),
    ] {
        let (found, answer) = post(&app, "/api/v1/tasks", body.clone()).await;
        assert_eq!(found, status, "{body}: {answer}");
    }
}

#[tokio::test]
async fn a_task_is_paused_resumed_and_cancelled() {
    let app = App::start().await;
    let id = order(&app).await;
    let act = async |action: &str| post(&app, &format!("/api/v1/tasks/{id}/{action}"), json!({})).await.0;
    assert_eq!((act("pause").await, act("pause").await), (StatusCode::OK, StatusCode::CONFLICT));
    assert_eq!(app.get(&format!("/api/v1/tasks/{id}")).await.json()["status"], "paused");
    assert_eq!((act("resume").await, act("resume").await), (StatusCode::OK, StatusCode::CONFLICT));
    assert_eq!((act("cancel").await, act("cancel").await), (StatusCode::OK, StatusCode::CONFLICT));
    assert_eq!(app.get("/api/v1/tasks?status=cancelled").await.json()["total"], 1);
}

#[tokio::test]
async fn tasks_are_listed_in_pages() {
    let app = App::start().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(order(&app).await);
    }
    let first = app.get("/api/v1/tasks?limit=2&machine=order").await.json();
    assert_eq!((&first["total"], first["tasks"].as_array().unwrap().len()), (&json!(3), 2));
    let cursor = first["nextCursor"].as_str().unwrap();
    let rest = app.get(&format!("/api/v1/tasks?limit=2&cursor={cursor}")).await.json();
    assert_eq!(rest["tasks"][0]["id"], json!(ids[0]));
    let second = app.get("/api/v1/tasks?limit=2&page=2").await.json();
    assert_eq!(second["tasks"][0]["id"], json!(ids[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_and_body_create_one_task() {
    let app = App::start().await;
    register(&app, json!(ORDER)).await;
    let body = json!({"machine": "order", "data": {"amount": 5}, "idempotencyKey": "order 7"}).to_string();
    let first = app.post("/api/v1/tasks", body.clone()).await;
    let again = app.post("/api/v1/tasks", body).await;
    assert_eq!((first.status.as_u16(), again.status.as_u16()), (201, 200));
    assert_eq!(first.json()["id"], again.json()["id"]);
    assert_eq!(first.header("location"), again.header("location"));
    let other = json!({"machine": "order", "data": {"amount": 6}, "idempotencyKey": "order 7"}).to_string();
    let refused = app.post("/api/v1/tasks", other).await;
    assert_snapshot!(refused.error_snapshot(), @"
    409 CONFLICT: the idempotency key was used with another body: task <id 1>
    id: <id 1>
    ");
    assert_eq!(refused.json()["error"]["details"][0]["message"], first.json()["id"]);
    let empty = json!({"machine": "order", "data": {"amount": 5}, "idempotencyKey": ""}).to_string();
    assert!(app.post("/api/v1/tasks", empty).await.text.contains("must have 1 to 255 characters"));
    assert_eq!(app.get("/api/v1/tasks").await.json()["total"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_idempotency_key_of_a_task_may_be_a_header() {
    let app = App::start().await;
    register(&app, json!(ORDER)).await;
    let create = async |key: &[u8], body: &str| {
        let request = Request::post("/api/v1/tasks").header("idempotency-key", key);
        app.send(request.body(body.to_owned().into()).unwrap()).await
    };
    let body = r#"{"machine": "order", "data": {"amount": 5}}"#;
    let (first, again) = (create(b"7", body).await, create(b"7", body).await);
    assert_eq!((first.status.as_u16(), again.status.as_u16()), (201, 200));
    assert_eq!(first.json()["id"], again.json()["id"]);
    for (key, body) in [
        (&b""[..], body),
        (b"\xff", body),
        (b"7", r#"{"machine": "order", "data": {"amount": 5}, "idempotencyKey": "8"}"#),
    ] {
        let refused = create(key, body).await;
        assert_eq!(refused.status.as_u16(), 400, "{}", refused.text);
    }
    assert_eq!(app.get("/api/v1/tasks").await.json()["total"], 1);
}
