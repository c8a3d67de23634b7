//! Tests which callers may make which gRPC calls: every call of the protocol with every kind of key.

use axum::{
    body::Body,
    http::{HeaderMap, Request},
};
use faena_auth::new_key_text;
use faena_domain::{ApiKeyText, KeyScope, NewApiKey, Timestamp};
use faena_wire::v1::DESCRIPTOR;
use http_body_util::BodyExt;
use prost::Message;
use prost_types::FileDescriptorSet;
use serde_json::json;
use tonic::Code;
use tower::ServiceExt;

use crate::{
    access::{TwoQueues, key, store},
    app::App,
};

const UNKNOWN: &str = "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10";

/// A call of the protocol.
struct Call {
    /// `faena.v1.JobService/GetJob`.
    path: String,
    /// Whether the first field of its message is the id of a job or schedule.
    has_id: bool,
}

/// Returns all calls except `WorkerService.Connect`, whose key may be in its first message.
fn calls() -> Vec<Call> {
    let files = FileDescriptorSet::decode(DESCRIPTOR).unwrap();
    let files: Vec<_> = files.file.iter().filter(|file| file.package() == "faena.v1").collect();
    let messages: Vec<_> = files.iter().flat_map(|file| &file.message_type).collect();
    let has_id = |input: &str| {
        let message = messages.iter().find(|message| input == format!(".faena.v1.{}", message.name())).unwrap();
        message.field.iter().any(|field| field.number() == 1 && field.name() == "id")
    };
    let mut calls = Vec::new();
    for service in files.iter().flat_map(|file| &file.service) {
        for method in service.method.iter().filter(|method| method.name() != "Connect") {
            let path = format!("faena.v1.{}/{}", service.name(), method.name());
            calls.push(Call { path, has_id: has_id(method.input_type()) });
        }
    }
    assert!(calls.len() >= 19 && calls.iter().filter(|call| call.has_id).count() >= 12, "the list is complete");
    calls
}

/// Makes a call whose message has only an id, or nothing, and returns its status: `Ok` for a stream that was opened.
async fn call(app: &App, path: &str, id: Option<&str>, key: Option<&str>) -> Code {
    let mut message = Vec::new();
    if let Some(id) = id {
        message.extend([0x0a, u8::try_from(id.len()).unwrap()]);
        message.extend(id.as_bytes());
    }
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend(message);
    let mut request =
        Request::post(format!("/{path}")).header("content-type", "application/grpc").header("te", "trailers");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let response = app.router.clone().oneshot(request.body(Body::from(frame)).unwrap()).await.unwrap();
    assert_eq!(response.status(), 200, "{path}: gRPC reports errors in its own status");
    let status = |headers: &HeaderMap| headers.get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    if let Some(code) = status(response.headers()) {
        return code;
    }
    if path.ends_with("/WatchJob") || path.ends_with("/Subscribe") {
        return Code::Ok;
    }
    let trailers = response.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
    status(&trailers).unwrap_or(Code::Ok)
}

/// Returns whether a scope permits a call, from its name and not from the table under test.
fn permits(scope: KeyScope, call: &str) -> bool {
    let (_, method) = call.split_once('/').unwrap();
    let reads = ["Get", "List", "Watch", "Preview", "Validate", "Check", "Subscribe", "Explain"];
    let for_workers = ["Subscribe", "GetTask", "ListTasks", "SendTaskEvent"];
    let needed = if reads.iter().any(|verb| method.starts_with(verb)) { KeyScope::Read } else { KeyScope::Write };
    scope.includes(needed) || (scope == KeyScope::Worker && for_workers.contains(&method))
}

#[tokio::test]
async fn every_call_accepts_the_scope_it_needs_and_rejects_every_other_caller() {
    let app = App::start().await;
    let mut keys = Vec::new();
    for scope in KeyScope::ALL {
        keys.push((scope, key(&app, &[scope], None).await));
    }
    let now = Timestamp::now();
    let admin = |name: &str, expires_at| NewApiKey {
        name: name.into(),
        scopes: vec![KeyScope::Admin],
        queues: None,
        groups: vec![],
        without_payloads: false,
        expires_at,
    };
    let (expired, _) = store(&app, admin("expired", Some(now.plus_ms(-1))), now.plus_ms(-10)).await;
    let (revoked, stored) = store(&app, admin("revoked", None), now).await;
    app.engine.store.api_key_revoke(stored.key.id, "test", now).await.unwrap();
    let bogus = new_key_text();
    for Call { path, has_id } in calls() {
        let id = has_id.then_some(UNKNOWN);
        assert_eq!(call(&app, &path, id, None).await, Code::Unauthenticated, "{path} without a key");
        for wrong in [&bogus, &expired, &revoked] {
            let found = call(&app, &path, id, Some(wrong.reveal())).await;
            assert_eq!(found, Code::Unauthenticated, "{path} {wrong:?}");
        }
        for (scope, key) in &keys {
            let found = call(&app, &path, id, Some(key.reveal())).await;
            let is_allowed = permits(*scope, &path);
            assert_eq!(found != Code::PermissionDenied, is_allowed, "{path} with a {scope} key: {found:?}");
            assert!(!matches!(found, Code::Internal | Code::Unknown | Code::Unauthenticated), "{path}: {found:?}");
        }
    }
}

#[tokio::test]
async fn a_restricted_key_reaches_jobs_and_schedules_of_its_queues_only() {
    let queues = TwoQueues::start().await;
    let schedule = async |queue: &str| {
        let body = json!({"name": queue, "cronExpression": "0 0 1 1 *", "jobType": "a", "queue": queue});
        let (status, created) = queues.call(&queues.admin, "POST", "/api/v1/schedules", body).await;
        assert_eq!(status, 201, "{created}");
        created["id"].as_str().unwrap().to_owned()
    };
    let found =
        async |key: &ApiKeyText, path: &str, id: &str| call(&queues.app, path, Some(id), Some(key.reveal())).await;
    for Call { path, .. } in calls().into_iter().filter(|call| call.path.starts_with("faena.v1.TaskService/")) {
        let answer = call(&queues.app, &path, None, Some(queues.mail.reveal())).await;
        assert_eq!(answer, Code::PermissionDenied, "{path}: tasks belong to no queue");
    }
    // Lists and submissions over gRPC use the code of REST, whose tests cover them.
    for Call { path, .. } in calls().into_iter().filter(|call| call.has_id) {
        let (service, _) = path.split_once('/').unwrap();
        if service.ends_with("TaskService") || service.ends_with("BulkService") {
            let answer = found(&queues.mail, &path, UNKNOWN).await;
            assert_eq!(answer, Code::PermissionDenied, "{path}: tasks and bulk actions belong to no queue");
            continue;
        }
        let (mine, other) = if service.ends_with("JobService") {
            (queues.job("mail").await, queues.job("other").await)
        } else {
            (schedule("mail").await, schedule("other").await)
        };
        assert_eq!(found(&queues.mail, &path, &other).await, Code::NotFound, "{path} of another queue");
        let own = found(&queues.mail, &path, &mine).await;
        assert!(!matches!(own, Code::NotFound | Code::PermissionDenied | Code::Unauthenticated), "{path}: {own:?}");
        if service.ends_with("ScheduleService") {
            for id in [&mine, &other] {
                queues.call(&queues.admin, "DELETE", &format!("/api/v1/schedules/{id}"), json!(null)).await;
            }
        }
    }
}

#[tokio::test]
async fn health_needs_no_key_and_reflection_needs_one_that_reads() {
    let app = App::start().await;
    let (read, worker) = (key(&app, &[KeyScope::Read], None).await, key(&app, &[KeyScope::Worker], None).await);
    assert_eq!(call(&app, "grpc.health.v1.Health/Check", None, None).await, Code::Ok);
    let reflection = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    assert_eq!(call(&app, reflection, None, None).await, Code::Unauthenticated);
    assert_eq!(call(&app, reflection, None, Some(worker.reveal())).await, Code::PermissionDenied);
    assert_ne!(call(&app, reflection, None, Some(read.reveal())).await, Code::PermissionDenied);
}
