//! Who may act on tasks: groups of keys and people, no self-approval, and services with the scope `worker`.

use std::net::{Ipv4Addr, SocketAddr};

use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, StatusCode},
};
use faena_api::Traffic;
use faena_auth::Policy;
use faena_domain::{ApiKeyText, KeyScope, NewApiKey, Timestamp};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::{
    access::{call, key, store},
    app::App,
};

const REVIEW: &str = "
machine: review
version: 1
events: {vote: {unexpected: reject}, note: {}}
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx, quorum: 2, groups: [reviewers], expires: {after: 7d, to: REJECTED}}
    on: {vote: {approve: true}, note: {set: {noted: true}}, approval.granted: DONE, approval.denied: REJECTED}
  DONE: {final: true}
  REJECTED: {final: true, ends: failure}
";

/// Stores a key of some groups and returns its text.
async fn member(app: &App, scope: KeyScope, groups: &[&str]) -> ApiKeyText {
    let groups = groups.iter().map(ToString::to_string).collect();
    let new = NewApiKey {
        name: "twin".into(),
        scopes: vec![scope],
        queues: None,
        groups,
        without_payloads: false,
        expires_at: None,
    };
    store(app, new, Timestamp::now()).await.0
}

/// Creates a task with this key and returns its path.
async fn review(app: &App, creator: &ApiKeyText) -> String {
    let machine = json!({ "definition": REVIEW });
    let (status, registered) = call(app, creator, "POST", "/api/v1/machines", machine).await;
    assert!(status < 300, "{registered}");
    let (status, task) = call(app, creator, "POST", "/api/v1/tasks", json!({"machine": "review"})).await;
    assert_eq!(status, 201, "{task}");
    format!("/api/v1/tasks/{}", task["id"].as_str().unwrap())
}

#[tokio::test]
async fn only_keys_of_the_groups_decide_and_each_key_counts_once() {
    let app = App::start().await;
    let creator = member(&app, KeyScope::Write, &["reviewers"]).await;
    let path = review(&app, &creator).await;
    let approve = async |key: &ApiKeyText| call(&app, key, "POST", &format!("{path}/approve"), json!({})).await;

    let outsider = member(&app, KeyScope::Admin, &["managers"]).await;
    let (status, answer) = approve(&outsider).await;
    assert_eq!((status, &answer["error"]["code"]), (403, &json!("FORBIDDEN")), "{answer}");
    assert_eq!(answer["error"]["message"], "only reviewers may decide");
    let (status, answer) = approve(&creator).await;
    assert_eq!(status, 403, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().starts_with("the creator of a task cannot"), "{answer}");

    // All keys of this test have the same name.
    let first = member(&app, KeyScope::Write, &["managers", "reviewers"]).await;
    assert_eq!(approve(&first).await.0, 200);
    let (status, again) = approve(&first).await;
    assert_eq!((status, &again["outcome"]), (200, &json!("ignored")), "{again}");
    let (status, answer) = call(&app, &first, "POST", &format!("{path}/reject"), json!({})).await;
    assert_eq!(status, 409, "it has decided differently: {answer}");
    let second = member(&app, KeyScope::Write, &["reviewers"]).await;
    let (status, answer) = approve(&second).await;
    assert_eq!((status, &answer["state"]), (200, &json!("DONE")), "{answer}");
}

#[tokio::test]
async fn a_rotated_key_is_the_same_caller() {
    let app = App::start().await;
    let admin = key(&app, &[KeyScope::Admin], None).await;
    let body = json!({"name": "carol", "scopes": ["write"], "groups": ["reviewers", "managers", "reviewers"]});
    let (status, created) = call(&app, &admin, "POST", "/api/v1/api-keys", body).await;
    assert_eq!((status, &created["groups"]), (201, &json!(["managers", "reviewers"])), "{created}");
    let text = |shown: &Value| ApiKeyText::parse(shown["key"].as_str().unwrap()).unwrap();
    let carol = text(&created);
    let listed = call(&app, &admin, "GET", "/api/v1/api-keys", Value::Null).await.1;
    let groups: Vec<&Value> = listed["apiKeys"].as_array().unwrap().iter().map(|key| &key["groups"]).collect();
    assert_eq!(groups, [&json!(["managers", "reviewers"]), &json!([])]);

    let path = review(&app, &carol).await;
    let rotate = format!("/api/v1/api-keys/{}/rotate", created["id"].as_str().unwrap());
    let (status, rotated) = call(&app, &admin, "POST", &rotate, Value::Null).await;
    assert_eq!((status, &rotated["groups"]), (200, &created["groups"]), "{rotated}");
    let (status, answer) = call(&app, &text(&rotated), "POST", &format!("{path}/approve"), json!({})).await;
    assert_eq!(status, 403, "a new secret does not make another creator: {answer}");
}

#[tokio::test]
async fn invalid_groups_of_a_key_are_rejected() {
    let app = App::start().await;
    for (groups, path) in [
        (json!("reviewers"), "groups"),
        (json!(["ok", "a,b"]), "groups[0]"),
        (json!([""]), "groups[0]"),
        (json!([" blank"]), "groups[0]"),
        (json!((0..51).map(|n| n.to_string()).collect::<Vec<_>>()), "groups"),
    ] {
        let body = json!({"name": "ops", "scopes": ["admin"], "groups": groups});
        let answer = app.post("/api/v1/api-keys", body.to_string()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{groups}");
        assert_eq!(answer.json()["error"]["details"][0]["path"], path, "{}", answer.text);
    }
    assert!(app.engine.store.api_keys().is_empty());
}

/// An app behind a reverse proxy in 10.0.0.0/24 that names people and their groups.
async fn start_behind_proxy() -> App {
    let policy = Policy {
        trusted_header: Some("x-user".into()),
        trusted_groups_header: Some("x-groups".into()),
        trusted_proxies: vec!["10.0.0.0/24".parse().unwrap()],
        ..Policy::default()
    };
    App::start_with_policy(policy, Traffic::default()).await
}

#[tokio::test]
async fn people_behind_a_proxy_decide_with_the_groups_it_names() {
    let app = start_behind_proxy().await;
    let creator = member(&app, KeyScope::Write, &[]).await;
    let path = review(&app, &creator).await;
    let approve = async |peer: [u8; 4], person: &str, groups: &str| {
        let mut request = Request::post(format!("{path}/approve"))
            .header("host", "faena.example")
            .header("x-user", person)
            .header("x-groups", groups)
            .body(Body::from("{}"))
            .unwrap();
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from((Ipv4Addr::from(peer), 4_000))));
        app.send(request).await.status.as_u16()
    };
    assert_eq!(approve([10, 0, 1, 7], "ana", "reviewers").await, 401, "not a trusted proxy");
    assert_eq!(approve([10, 0, 0, 7], "ana", "").await, 403);
    assert_eq!(approve([10, 0, 0, 7], "ana", "managers").await, 403);
    assert_eq!(approve([10, 0, 0, 7], "ana", "managers, reviewers").await, 200);
    let shown = call(&app, &creator, "GET", &path, Value::Null).await.1;
    assert_eq!(shown["approval"]["decisions"][0]["caller"], "user ana", "{shown}");
    assert_eq!(approve([10, 0, 0, 7], "eva", "reviewers").await, 200);
    assert_eq!(call(&app, &creator, "GET", &path, Value::Null).await.1["state"], "DONE");
}

#[tokio::test]
async fn a_worker_key_sees_a_task_and_sends_events_but_never_decides() {
    let app = App::start().await;
    let creator = key(&app, &[KeyScope::Write], None).await;
    let worker = member(&app, KeyScope::Worker, &["reviewers"]).await;
    let path = review(&app, &creator).await;
    assert_eq!(call(&app, &worker, "GET", &path, Value::Null).await.0, 200);
    let event = |kind: &str| json!({"type": kind, "payload": {}});
    let (status, answer) = call(&app, &worker, "POST", &format!("{path}/events"), event("note")).await;
    assert_eq!((status, &answer["outcome"]), (200, &json!("applied")), "{answer}");
    let (status, answer) = call(&app, &worker, "POST", &format!("{path}/events"), event("vote")).await;
    assert_eq!((status, &answer["error"]["code"]), (403, &json!("FORBIDDEN")), "{answer}");
    for action in ["approve", "reject", "cancel", "pause", "resume"] {
        assert_eq!(call(&app, &worker, "POST", &format!("{path}/{action}"), json!({})).await.0, 403, "{action}");
    }
    for read in ["/history", "/why"] {
        assert_eq!(call(&app, &worker, "GET", &format!("{path}{read}"), Value::Null).await.0, 403, "{read}");
    }
    let shown = call(&app, &creator, "GET", &path, Value::Null).await.1;
    assert_eq!((&shown["state"], &shown["approval"]["decisions"]), (&json!("REVIEW"), &json!([])), "{shown}");
    let restricted = key(&app, &[KeyScope::Worker], Some(&["mail"])).await;
    assert_eq!(call(&app, &restricted, "GET", &path, Value::Null).await.0, 403, "tasks belong to no queue");
    assert_eq!(call(&app, &restricted, "POST", &format!("{path}/events"), event("note")).await.0, 403);
    assert_eq!(call(&app, &restricted, "GET", "/api/v1/events", Value::Null).await.0, 403);
}

#[tokio::test]
async fn the_approval_of_a_coding_task_needs_a_key_that_writes() {
    let app = App::start().await;
    let (writer, worker) = (key(&app, &[KeyScope::Write], None).await, key(&app, &[KeyScope::Worker], None).await);
    let task =
        json!({"machine": "coding-task", "data": {"prompt": "add a test", "repositorioOrigen": "/srv/demo.git"}});
    let (status, task) = call(&app, &writer, "POST", "/api/v1/tasks", task).await;
    assert_eq!(status, 201, "{task}");
    let path = format!("/api/v1/tasks/{}/events", task["id"].as_str().unwrap());
    let send = async |key: &ApiKeyText, kind: &str, payload: Value| {
        call(&app, key, "POST", &path, json!({"type": kind, "payload": payload})).await
    };
    let plan = json!({"planId": "p1", "plan": "one test"});
    let (_, answer) = send(&worker, "resultado.plan_generado", plan).await;
    assert_eq!(answer["state"], "ESPERANDO_APROBACION_PLAN", "{answer}");
    let (status, answer) = send(&worker, "tarea.aprobar_plan", json!({"planId": "p1"})).await;
    assert_eq!(status, 403, "{answer}");
    let (status, answer) = send(&writer, "tarea.aprobar_plan", json!({"planId": "p1"})).await;
    assert_eq!((status, &answer["outcome"]), (200, &json!("applied")), "{answer}");
    let (_, answer) = send(&worker, "resultado.estado_actualizado", json!({"sessionId": "s", "estado": "a"})).await;
    assert_eq!(answer["state"], "EJECUTANDO_CODIGO.MONITOREANDO_EJECUCION", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_key_sees_the_events_of_tasks_only() {
    let app = App::start().await;
    let (writer, worker) = (key(&app, &[KeyScope::Write], None).await, key(&app, &[KeyScope::Worker], None).await);
    let request = Request::get("/api/v1/events").header("x-api-key", worker.reveal()).body(Body::empty()).unwrap();
    let response = app.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body().into_data_stream();
    let job = json!({"type": "unhandled.type", "payload": {"secret": "of a job"}});
    assert_eq!(call(&app, &writer, "POST", "/api/v1/jobs", job).await.0, 201);
    review(&app, &writer).await;
    let mut text = String::new();
    while !text.contains("event: task.approval.requested") {
        let part = tokio::time::timeout(std::time::Duration::from_secs(60), body.next()).await;
        text.push_str(std::str::from_utf8(&part.expect("an event in time").unwrap().unwrap()).unwrap());
    }
    assert!(text.contains("event: task.created"), "{text}");
    assert!(!text.contains("job."), "the job came first, and is not shown: {text}");
}
