//! Tests that no answer to a key with `withoutPayloads` shows payloads, results, data, logs or errors of jobs and
//! tasks.

mod seed;

use std::{collections::BTreeSet, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{Request, StatusCode},
};
use faena_domain::{ApiKeyText, KeyScope, NewApiKey, Timestamp};
use faena_wire::v1::DESCRIPTOR;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use prost::Message;
use prost_types::FileDescriptorSet;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::{access::store, app::App, conformance::DOCUMENT};
use seed::{MARKER, Seed, seed};

/// Operations that show the marker to an ordinary key. There may be more.
const OPERATIONS_WITH_PAYLOADS: &[&str] = &[
    "explainJob",
    "getDeadLetter",
    "getJob",
    "getJobLog",
    "getRejectedEvent",
    "getSchedule",
    "getTask",
    "getTaskHistory",
    "getTrace",
    "getWebhook",
    "listDeadLetters",
    "listJobs",
    "listRejectedEvents",
    "listSchedules",
    "listTasks",
    "watchEvents",
    "watchJob",
];

/// gRPC calls that show the marker to an ordinary key. There may be more.
const CALLS_WITH_PAYLOADS: &[&str] = &[
    "faena.v1.EventService/Subscribe",
    "faena.v1.JobService/GetJob",
    "faena.v1.JobService/GetJobLog",
    "faena.v1.JobService/ListJobs",
    "faena.v1.JobService/WatchJob",
    "faena.v1.ScheduleService/GetSchedule",
    "faena.v1.ScheduleService/ListSchedules",
    "faena.v1.TaskService/GetTask",
    "faena.v1.TaskService/ListTaskHistory",
    "faena.v1.TaskService/ListTasks",
];

/// Stores a key that sees everything, and one without payloads.
async fn keys(app: &App) -> [ApiKeyText; 2] {
    let key = async |scope, without_payloads| {
        let new = NewApiKey {
            name: "viewer".into(),
            scopes: vec![scope],
            queues: None,
            groups: vec![],
            without_payloads,
            expires_at: None,
        };
        store(app, new, Timestamp::now()).await.0
    };
    [key(KeyScope::Admin, false).await, key(KeyScope::Read, true).await]
}

/// How much of a stream is read.
enum Until<'a> {
    FirstEvent,
    Text(&'a str),
}

impl Until<'_> {
    fn is_reached(&self, text: &str) -> bool {
        match self {
            Until::FirstEvent => text.contains("data:") && text.ends_with("\n\n"),
            Until::Text(part) => text.contains(part),
        }
    }
}

/// Returns the status and the text of an answer.
async fn get(app: &App, key: &ApiKeyText, path: &str, until: Option<Until<'_>>) -> (StatusCode, String) {
    let request = Request::get(path).header("x-api-key", key.reveal()).body(Body::empty()).unwrap();
    let Some(until) = until else {
        let answer = app.send(request).await;
        return (answer.status, answer.text);
    };
    let response = app.router.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let mut body = response.into_body().into_data_stream();
    let mut text = String::new();
    while !until.is_reached(&text) {
        let part = tokio::time::timeout(Duration::from_secs(60), body.next()).await.expect("an event in time");
        let Some(part) = part else { break };
        text.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
    }
    (status, text)
}

/// Returns the paths of a `GET` operation, one for every id or name.
fn paths(template: &str, seed: &Seed) -> Vec<String> {
    if template.contains("{name}") {
        return ["order", "mail"].map(|name| template.replace("{name}", name)).to_vec();
    }
    match template {
        _ if template.contains("{id}") => seed.ids.iter().map(|id| template.replace("{id}", id)).collect(),
        "/api/v1/events" => vec![format!("{template}?lastEventId=0")],
        _ => vec![template.to_owned()],
    }
}

async fn no_answer_shows_a_payload(app: App) {
    let seed = seed(&app).await;
    let [ordinary, viewer] = keys(&app).await;
    let mut shown = BTreeSet::new();
    let operations =
        DOCUMENT["paths"].as_object().unwrap().iter().filter(|(path, _)| *path != "/api/v1/workers/connect");
    for (template, operation) in operations.filter_map(|(path, methods)| Some((path, methods.get("get")?))) {
        let name = operation["operationId"].as_str().unwrap();
        let is_stream = operation["responses"]["200"]["content"].get("text/event-stream").is_some();
        let has_id = template.contains("{id}");
        let until = || is_stream.then(|| if has_id { Until::FirstEvent } else { Until::Text(&seed.last) });
        let needs_admin = operation["description"].as_str().unwrap().contains("Needs the scope `admin`");
        for path in paths(template, &seed) {
            let (status, text) = get(&app, &ordinary, &path, until()).await;
            if text.contains(MARKER) {
                shown.insert(name);
            }
            let (hidden_status, hidden_text) = get(&app, &viewer, &path, until()).await;
            assert!(!hidden_text.contains(MARKER), "{path}: {hidden_text}");
            let expected = if needs_admin && status.is_success() { StatusCode::FORBIDDEN } else { status };
            assert!(hidden_status == expected || needs_admin, "{path}: {hidden_status}, expected {expected}");
        }
    }
    let missing: Vec<&&str> = OPERATIONS_WITH_PAYLOADS.iter().filter(|name| !shown.contains(**name)).collect();
    assert!(missing.is_empty(), "these do not show the marker to an ordinary key, so nothing was tested: {missing:?}");
    app.engine.stop(Default::default()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_of_http_shows_a_payload() {
    no_answer_shows_a_payload(App::start_with(seed::config()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_of_http_shows_a_payload_on_postgres() {
    no_answer_shows_a_payload(App::start_on_postgres_with(seed::config()).await).await;
}

/// Returns the names of all calls that read.
fn reading_calls() -> Vec<String> {
    let files = FileDescriptorSet::decode(DESCRIPTOR).unwrap();
    let mut calls = Vec::new();
    for service in files.file.iter().filter(|file| file.package() == "faena.v1").flat_map(|file| &file.service) {
        let reads = ["Get", "List", "Watch", "Preview", "Subscribe", "Explain"];
        let methods = service.method.iter().filter(|call| reads.iter().any(|verb| call.name().starts_with(verb)));
        calls.extend(methods.map(|call| format!("faena.v1.{}/{}", service.name(), call.name())));
    }
    assert!(calls.len() > 15, "{calls:?}");
    calls
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

/// Makes a call with an encoded message, and returns the bytes of its answer. The stream of events is read until
/// `last`.
async fn call(app: &App, key: &ApiKeyText, name: &str, message: &[u8], last: &str) -> Vec<u8> {
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend(message);
    let request = Request::post(format!("/{name}")).header("content-type", "application/grpc");
    let request = request.header("te", "trailers").header("x-api-key", key.reveal());
    let response = app.router.clone().oneshot(request.body(Body::from(frame)).unwrap()).await.unwrap();
    let (mut bytes, mut body) = (Vec::new(), response.into_body());
    let is_complete = |bytes: &[u8]| match name {
        "faena.v1.EventService/Subscribe" => contains(bytes, last),
        "faena.v1.JobService/WatchJob" => !bytes.is_empty(),
        _ => false,
    };
    while !is_complete(&bytes) {
        let part = tokio::time::timeout(Duration::from_secs(60), body.frame()).await.expect("a message in time");
        let Some(part) = part else { break };
        let data: Bytes = part.unwrap().into_data().unwrap_or_default();
        bytes.extend(data);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_of_grpc_shows_a_payload() {
    let app = App::start_with(seed::config()).await;
    let seed = seed(&app).await;
    let [ordinary, viewer] = keys(&app).await;
    let mut shown = BTreeSet::new();
    let names = ["order", ""].map(str::to_owned);
    for name in reading_calls() {
        for id in seed.ids.iter().chain(&names) {
            let mut message = vec![0x0a, u8::try_from(id.len()).unwrap()];
            message.extend(id.as_bytes());
            if name.ends_with("/Subscribe") {
                // `after` is 0.
                message = vec![0x28, 0];
            } else if name.contains("/List") && id.is_empty() {
                message.clear();
            }
            let answer = call(&app, &ordinary, &name, &message, &seed.last).await;
            let hidden = call(&app, &viewer, &name, &message, &seed.last).await;
            assert!(!contains(&hidden, MARKER), "{name} {id}: {}", String::from_utf8_lossy(&hidden));
            assert_eq!(answer.is_empty(), hidden.is_empty(), "{name} {id}");
            if contains(&answer, MARKER) {
                shown.insert(name.clone());
            }
        }
    }
    let missing: Vec<&&str> = CALLS_WITH_PAYLOADS.iter().filter(|name| !shown.contains(**name)).collect();
    assert!(missing.is_empty(), "these do not show the marker to an ordinary key, so nothing was tested: {missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hidden_value_is_empty_and_named() {
    let app = App::start_with(seed::config()).await;
    let seed = seed(&app).await;
    let [ordinary, viewer] = keys(&app).await;
    let job = async |key: &ApiKeyText, id: &str| -> Value {
        serde_json::from_str(&get(&app, key, &format!("/api/v1/jobs/{id}"), None).await.1).unwrap()
    };
    let (shown, hidden) = (job(&ordinary, &seed.completed).await, job(&viewer, &seed.completed).await);
    assert_eq!((&hidden["payload"], &hidden["result"]), (&json!({}), &Value::Null));
    assert_eq!(hidden["hidden"], json!(["payload", "result"]));
    assert_eq!(hidden["steps"][0]["hidden"], json!(["result"]));
    assert_eq!((&hidden["steps"][0]["name"], &hidden["tags"]), (&json!("charge"), &json!(["vip"])));
    assert_eq!(hidden["executionLog"].as_array().unwrap().len(), shown["executionLog"].as_array().unwrap().len());
    assert_eq!((&hidden["createdAt"], &hidden["attempt"]), (&shown["createdAt"], &shown["attempt"]));
    assert_eq!(shown.get("hidden"), None, "an ordinary key sees everything");
    let failed = job(&viewer, &seed.failed).await;
    assert_eq!((&failed["error"], &failed["errorReason"]), (&Value::Null, &json!("error")));
    let why = get(&app, &viewer, &format!("/api/v1/jobs/{}/why", seed.failed), None).await.1;
    assert!(why.contains(": hidden"), "the rest of the explanation is shown: {why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_in_errors_and_payloads_is_refused_because_it_would_confirm_a_guess() {
    let app = App::start_with(seed::config()).await;
    seed(&app).await;
    let [ordinary, viewer] = keys(&app).await;
    for (list, field) in [("jobs", "error"), ("dead-letter", "error"), ("jobs", "payload"), ("dead-letter", "payload")]
    {
        let path = format!("/api/v1/{list}?{field}={MARKER}");
        let (status, found) = get(&app, &ordinary, &path, None).await;
        let found: Value = serde_json::from_str(&found).unwrap();
        assert!(status.is_success() && found["total"].as_u64().unwrap() > 0, "{found}");
        let (status, refused) = get(&app, &viewer, &path, None).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{refused}");
        assert!(refused.contains(&format!("{field}: this API key may not see payloads")), "{refused}");
        let (status, _) = get(&app, &viewer, &format!("/api/v1/{list}?reason=error&q=mail"), None).await;
        assert_eq!(status, StatusCode::OK, "other filters work");
    }
    let mut message = vec![0x7a, u8::try_from(MARKER.len()).unwrap()];
    message.extend(MARKER.as_bytes());
    assert!(!call(&app, &ordinary, "faena.v1.JobService/ListJobs", &message, "").await.is_empty());
    assert!(call(&app, &viewer, "faena.v1.JobService/ListJobs", &message, "").await.is_empty(), "no answer, a status");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_payloads_is_created_with_the_scope_read_alone() {
    let app = App::start().await;
    let create = async |scopes: Value, without_payloads: Value| {
        let body = json!({"name": "support", "scopes": scopes, "withoutPayloads": without_payloads});
        app.post("/api/v1/api-keys", body.to_string()).await
    };
    for scopes in [json!(["admin"]), json!(["read", "worker"])] {
        let refused = create(scopes, json!(true)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.text.contains("withoutPayloads: only a key with the scope read alone"), "{}", refused.text);
    }
    assert_eq!(create(json!(["admin"]), json!("yes")).await.status, StatusCode::BAD_REQUEST);
    let [admin, _] = keys(&app).await;
    let body = json!({"name": "support", "scopes": ["read"], "withoutPayloads": true}).to_string();
    let request = Request::post("/api/v1/api-keys").header("x-api-key", admin.reveal()).body(Body::from(body)).unwrap();
    let created = app.send(request).await;
    assert_eq!((created.status, &created.json()["withoutPayloads"]), (StatusCode::CREATED, &json!(true)));
    let (_, listed) = get(&app, &admin, "/api/v1/api-keys", None).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let flags: Vec<&Value> = listed["apiKeys"].as_array().unwrap().iter().map(|key| &key["withoutPayloads"]).collect();
    assert_eq!(flags, [&json!(true), &json!(true), &json!(false)]);
}
