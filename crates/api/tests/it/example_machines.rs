//! Tests the machines in `examples/machines` through the API, and definitions that try to break the server.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::app::App;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/machines");

async fn post(app: &App, path: &str, body: Value) -> (StatusCode, Value) {
    let answer = app.post(path, body.to_string()).await;
    (answer.status, answer.json())
}

/// Registers an example, and returns a new task.
async fn task(app: &App, name: &str, data: Value) -> Value {
    let definition = std::fs::read_to_string(format!("{FOLDER}/{name}.yaml")).unwrap();
    let (status, answer) = post(app, "/api/v1/machines", json!({ "definition": definition })).await;
    assert_eq!((status, &answer["name"]), (StatusCode::CREATED, &json!(name)), "{answer}");
    let drawing = app.get(&format!("/api/v1/machines/{name}/diagram")).await;
    assert!(drawing.text.starts_with("<svg"), "{}", drawing.text);
    let (status, task) = post(app, "/api/v1/tasks", json!({"machine": name, "data": data})).await;
    assert_eq!(status, StatusCode::CREATED, "{task}");
    task
}

#[tokio::test]
async fn an_order_submits_its_first_job_and_compensates_when_it_is_cancelled() {
    let app = App::start().await;
    let order = task(&app, "order-saga", json!({"orderId": "o-7", "amount": 5})).await;
    assert_eq!(order["state"], "FULFILLING.RESERVING");
    let jobs = app.get("/api/v1/jobs").await.json();
    assert_eq!(jobs["jobs"][0]["type"], "stock.reserve", "{jobs:#}");
    assert_eq!(jobs["jobs"][0]["payload"], json!({"orderId": "o-7"}));
    let (status, _) = post(&app, &format!("/api/v1/tasks/{}/cancel", order["id"].as_str().unwrap()), json!({})).await;
    assert_eq!(status, StatusCode::OK);
    let undone = app.get(&format!("/api/v1/tasks/{}", order["id"].as_str().unwrap())).await.json();
    assert_eq!((&undone["state"], &undone["status"]), (&json!("COMPENSATING.RECALLING"), &json!("running")));
}

#[tokio::test]
async fn an_onboarding_follows_its_events() {
    let app = App::start().await;
    let customer = task(&app, "onboarding", json!({"email": "ada@example.com"})).await;
    let events = format!("/api/v1/tasks/{}/events", customer["id"].as_str().unwrap());
    for (event, state) in [
        ("account.activated", "JOURNEY.SETTING_UP.PROFILE"),
        ("profile.completed", "JOURNEY.SETTING_UP.PROJECT"),
        ("project.created", "JOURNEY.TRIAL"),
    ] {
        let (status, answer) = post(&app, &events, json!({"type": event})).await;
        assert_eq!((status, &answer["state"]), (StatusCode::OK, &json!(state)), "{answer}");
    }
    let (status, _) = post(&app, &events, json!({"type": "plan.subscribed", "payload": {"plan": "gold"}})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_author_of_a_text_cannot_approve_it() {
    let app = App::start().await;
    let text = task(&app, "content-review", json!({"title": "News", "text": "first"})).await;
    let path = format!("/api/v1/tasks/{}", text["id"].as_str().unwrap());
    let (status, answer) = post(&app, &format!("{path}/approve"), json!({})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::FORBIDDEN, &json!("FORBIDDEN")), "{answer}");
    let why = app.get(&format!("{path}/why")).await.json();
    assert!(why["reasons"][0]["message"].as_str().unwrap().contains("reviewers"), "{why}");
    let (_, answer) = post(&app, &format!("{path}/events"), json!({"type": "text.withdrawn"})).await;
    assert_eq!(answer["state"], "WITHDRAWN");
}

#[tokio::test]
async fn the_schema_of_definitions_is_served() {
    let app = App::start().await;
    let schema = app.get("/machine.schema.json").await;
    assert_eq!(schema.status, StatusCode::OK);
    assert_eq!(schema.json(), faena_machine::schema());
}

#[tokio::test]
async fn a_hostile_definition_is_refused_and_changes_nothing() {
    let app = App::start().await;
    // Nested aliases that expand to billions of values, known as "billion laughs".
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        laughs.push_str(&format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(", ")));
    }
    let deep = "[".repeat(50_000);
    let circle = "machine: m\nversion: 1\ninput: {$ref: '#'}\ninitial: A\nstates: {A: {final: true}}\n".to_owned();
    for text in [laughs, deep, circle, String::new(), "\u{0}".to_owned()] {
        let (status, answer) = post(&app, "/api/v1/machines", json!({ "definition": text })).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (StatusCode::BAD_REQUEST, &json!("VALIDATION_ERROR")),
            "{answer}"
        );
        assert!(answer["error"]["details"].as_array().is_some_and(|details| !details.is_empty()), "{answer}");
    }
    let list = app.get("/api/v1/machines").await.json();
    assert_eq!(list["machines"].as_array().unwrap().len(), 1, "only the built-in one");
}
