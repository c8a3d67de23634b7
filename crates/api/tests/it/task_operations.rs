//! Tags, events, forks, bulk actions and migrations of tasks over REST.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::app::App;

const ORDER: &str = "
machine: order
version: 1
events: {pay: {}, ship: {}}
initial: NEW
states:
  NEW: {forever: true, on: {pay: {to: PAID, set: {amount: event.amount}}}}
  PAID: {forever: true, on: {ship: DONE}}
  DONE: {final: true}
";

async fn post(app: &App, path: &str, body: Value) -> (StatusCode, Value) {
    let answer = app.post(path, body.to_string()).await;
    (answer.status, answer.json())
}

async fn register(app: &App, text: &str) {
    let (status, answer) = post(app, "/api/v1/machines", json!({"definition": text})).await;
    assert!(status.is_success(), "{answer}");
}

async fn create(app: &App, body: Value) -> String {
    let (status, task) = post(app, "/api/v1/tasks", body).await;
    assert_eq!(status, StatusCode::CREATED, "{task}");
    task["id"].as_str().unwrap().to_owned()
}

async fn send(app: &App, id: &str, event: &str, payload: Value) {
    let body = json!({"type": event, "payload": payload});
    let (status, answer) = post(app, &format!("/api/v1/tasks/{id}/events"), body).await;
    assert_eq!((status, &answer["outcome"]), (StatusCode::OK, &json!("applied")), "{answer}");
}

async fn task(app: &App, id: &str) -> Value {
    app.get(&format!("/api/v1/tasks/{id}")).await.json()
}

#[tokio::test]
async fn tasks_are_listed_by_tag() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let tagged = create(&app, json!({"machine": "order", "tags": ["spring", "vip"]})).await;
    create(&app, json!({"machine": "order"})).await;
    assert_eq!(task(&app, &tagged).await["tags"], json!(["spring", "vip"]));
    let found = app.get("/api/v1/tasks?tag=vip").await.json();
    assert_eq!((&found["total"], &found["tasks"][0]["id"]), (&json!(1), &json!(tagged)));
    let many: Vec<String> = (0..33).map(|n| n.to_string()).collect();
    for tags in [json!([""]), json!("vip"), json!([7]), json!(many), json!(["a\u{1}"])] {
        let (status, answer) = post(&app, "/api/v1/tasks", json!({"machine": "order", "tags": tags})).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{tags}: {answer}");
    }
}

#[tokio::test]
async fn the_events_of_a_task_are_listed() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let id = create(&app, json!({"machine": "order"})).await;
    send(&app, &id, "pay", json!({"amount": 5})).await;
    let events = format!("/api/v1/tasks/{id}/events");
    let list = app.get(&events).await.json();
    let types: Vec<&str> = list["events"].as_array().unwrap().iter().map(|one| one["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["task.created", "task.state.changed"]);
    assert_eq!(list["events"][1]["data"]["payload"]["to"], "PAID");
    assert_eq!(app.get(&format!("{events}?after=1")).await.json()["events"].as_array().unwrap().len(), 1);
    for query in ["?after=-1", "?after=x", "?limit=0", "?other=1"] {
        assert_eq!(app.get(&format!("{events}{query}")).await.status, StatusCode::BAD_REQUEST, "{query}");
    }
    assert_eq!(app.get("/api/v1/events?taskId=7").await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_fork_is_a_new_task_from_a_point_in_a_history() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let body = json!({"machine": "order", "title": "Order 7", "tags": ["vip"], "correlationId": "o7", "data": {"customer": 1}});
    let id = create(&app, body).await;
    send(&app, &id, "pay", json!({"amount": 5})).await;
    send(&app, &id, "ship", json!({})).await;
    let fork = format!("/api/v1/tasks/{id}/fork");
    let (status, copy) = post(&app, &fork, json!({"data": {"amount": 6}})).await;
    assert_eq!(status, StatusCode::CREATED, "{copy}");
    assert_eq!((&copy["state"], &copy["status"]), (&json!("PAID"), &json!("running")), "before its end");
    assert_eq!(copy["data"], json!({"customer": 1, "amount": 6}));
    assert_eq!(copy["forkedFrom"], json!({"taskId": id, "record": 2}));
    assert_eq!(
        (&copy["title"], &copy["tags"], &copy["correlationId"]),
        (&json!("Order 7"), &json!(["vip"]), &json!("o7"))
    );
    let (_, first) = post(&app, &fork, json!({"at": 1})).await;
    assert_eq!((&first["state"], &first["data"]), (&json!("NEW"), &json!({"customer": 1})));
    for (body, message) in [
        (json!({"at": 3}), "final state"),
        (json!({"at": 4}), "from 1 to 3"),
        (json!({"at": 0}), "from 1 to 3"),
        (json!({"at": "x"}), "integer"),
        (json!({"data": 7}), "object"),
        (json!({"other": 7}), "unknown"),
    ] {
        let (status, answer) = post(&app, &fork, body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {answer}");
        let text = answer["error"]["details"].to_string().to_lowercase();
        assert!(text.contains(message), "{body}: {text}");
    }
    assert_eq!(app.get("/api/v1/tasks").await.json()["total"], 3, "nothing else was created");
    let trace = app.get("/api/v1/trace/o7").await.json();
    assert_eq!(trace["tasks"].as_array().unwrap().len(), 3, "one timeline with all three");
    let audit = app.get("/api/v1/audit?action=task.fork").await.json();
    assert_eq!((&audit["total"], &audit["entries"][0]["target"]), (&json!(2), &json!(id)));
}

#[tokio::test]
async fn an_event_is_sent_to_every_matching_task() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(create(&app, json!({"machine": "order", "tags": [if n == 0 { "vip" } else { "other" }]})).await);
    }
    let path = "/api/v1/tasks/bulk/send";
    let mut body = json!({"type": "pay", "payload": {"amount": 5}, "filter": {"machine": "order", "state": "NEW", "tag": "other"}, "dryRun": true});
    let (status, answer) = post(&app, path, body.clone()).await;
    assert_eq!((status, &answer["matched"], &answer["done"]), (StatusCode::OK, &json!(2), &json!(0)), "{answer}");
    assert_eq!(answer["sample"][0]["id"], json!(ids[2]), "the newest first");
    assert_eq!(task(&app, &ids[2]).await["state"], "NEW", "a dry run changes nothing");
    body["dryRun"] = json!(false);
    let (_, answer) = post(&app, path, body.clone()).await;
    assert_eq!((&answer["done"], &answer["skipped"]), (&json!(2), &json!(0)), "{answer}");
    assert_eq!(task(&app, &ids[0]).await["state"], "NEW");
    assert_eq!(
        (&task(&app, &ids[1]).await["state"], &task(&app, &ids[2]).await["data"]["amount"]),
        (&json!("PAID"), &json!(5))
    );
    let shown = app.get(&format!("/api/v1/bulk/{}", answer["id"].as_str().unwrap())).await.json();
    assert_eq!((&shown["action"], &shown["done"]), (&json!("tasks.send"), &json!(2)));
    let (_, answer) = post(&app, path, body).await;
    assert_eq!((&answer["matched"], answer.get("id")), (&json!(0), None), "nothing is left");

    let (status, answer) = post(&app, "/api/v1/tasks/bulk/pause", json!({"filter": {"machine": "order"}})).await;
    assert_eq!((status, &answer["done"]), (StatusCode::OK, &json!(3)), "{answer}");
    let (_, answer) = post(&app, "/api/v1/tasks/bulk/resume", json!({"filter": {"tag": "vip"}})).await;
    assert_eq!(answer["done"], 1);
    let (_, answer) = post(&app, "/api/v1/tasks/bulk/cancel", json!({"all": true, "reason": "over"})).await;
    assert_eq!(answer["done"], 3);
    assert_eq!(app.get("/api/v1/tasks?status=cancelled").await.json()["total"], 3);
}

#[tokio::test]
async fn an_invalid_bulk_action_on_tasks_is_refused() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let id = create(&app, json!({"machine": "order"})).await;
    for (action, body, status) in [
        ("send", json!({"filter": {"machine": "order"}}), StatusCode::BAD_REQUEST),
        ("send", json!({"type": "pay", "all": true}), StatusCode::BAD_REQUEST),
        ("send", json!({"type": "buy", "filter": {"machine": "order"}}), StatusCode::BAD_REQUEST),
        ("send", json!({"type": "pay", "filter": {"machine": "nothing"}}), StatusCode::NOT_FOUND),
        ("send", json!({"type": "pay", "payload": 7, "filter": {"machine": "order"}}), StatusCode::BAD_REQUEST),
        ("cancel", json!({}), StatusCode::BAD_REQUEST),
        ("cancel", json!({"filter": {"queue": "mail"}}), StatusCode::BAD_REQUEST),
        ("cancel", json!({"filter": {"version": "x"}}), StatusCode::BAD_REQUEST),
        ("pause", json!({"all": true, "perSecond": 0}), StatusCode::BAD_REQUEST),
        ("delete", json!({"all": true}), StatusCode::NOT_FOUND),
    ] {
        let (found, answer) = post(&app, &format!("/api/v1/tasks/bulk/{action}"), body.clone()).await;
        assert_eq!(found, status, "{action} {body}: {answer}");
    }
    assert_eq!(task(&app, &id).await["status"], "running");
}

#[tokio::test]
async fn tasks_are_migrated_after_a_dry_run() {
    let app = App::start().await;
    register(&app, ORDER).await;
    let (new, paid) = (
        create(&app, json!({"machine": "order", "version": 1})).await,
        create(&app, json!({"machine": "order"})).await,
    );
    send(&app, &paid, "pay", json!({"amount": 5})).await;
    let text = ORDER.replace("version: 1", "version: 2").replace("NEW", "OPEN").replace("PAID", "SETTLED");
    register(&app, &text).await;
    let path = "/api/v1/machines/order/migrate";
    let (status, plan) = post(&app, path, json!({"from": 1, "to": 2, "map": {"NEW": "OPEN"}, "dryRun": true})).await;
    assert_eq!((status, &plan["matched"], &plan["refused"]), (StatusCode::OK, &json!(2), &json!(1)), "{plan:#}");
    let reason = "version 2 has no state PAID; add PAID to the map";
    let states = json!([{"state": "NEW", "tasks": 1, "to": "OPEN"}, {"state": "PAID", "tasks": 1, "reason": reason}]);
    assert_eq!(plan["states"], states);
    assert_eq!((&plan["refusals"][0]["id"], &plan["refusals"][0]["reason"]), (&json!(paid), &json!(reason)));
    assert_eq!((&task(&app, &new).await["version"], &task(&app, &new).await["state"]), (&json!(1), &json!("NEW")));

    let (_, done) = post(&app, path, json!({"from": 1, "to": 2, "map": {"NEW": "OPEN"}})).await;
    assert_eq!((&done["done"], &done["skipped"]), (&json!(1), &json!(1)), "{done:#}");
    assert_eq!((&task(&app, &new).await["version"], &task(&app, &new).await["state"]), (&json!(2), &json!("OPEN")));
    assert_eq!(task(&app, &paid).await["version"], 1, "it cannot move");
    let (_, done) = post(&app, path, json!({"from": 1, "to": 2, "map": {"PAID": "SETTLED"}})).await;
    assert_eq!((&done["matched"], &done["done"]), (&json!(1), &json!(1)), "the rest: {done:#}");
    let history = app.get(&format!("/api/v1/tasks/{paid}/history")).await.json();
    assert_eq!(history["history"][2]["event"], "task.migrated");
    let audit = app.get("/api/v1/audit?action=bulk.tasks.migrate").await.json();
    assert_eq!(audit["total"], 2);
    for (body, status) in [
        (json!({"from": 1, "to": 1}), StatusCode::BAD_REQUEST),
        (json!({"from": 1}), StatusCode::BAD_REQUEST),
        (json!({"from": 1, "to": 9}), StatusCode::NOT_FOUND),
        (json!({"from": 1, "to": 2, "map": {"NOTHING": "OPEN"}}), StatusCode::BAD_REQUEST),
        (json!({"from": 1, "to": 2, "map": {"NEW": "NOWHERE"}}), StatusCode::BAD_REQUEST),
        (json!({"from": 1, "to": 2, "map": 7}), StatusCode::BAD_REQUEST),
        (json!({"from": 1, "to": 2, "entry": "maybe"}), StatusCode::BAD_REQUEST),
    ] {
        let (found, answer) = post(&app, path, body.clone()).await;
        assert_eq!(found, status, "{body}: {answer}");
    }
}
