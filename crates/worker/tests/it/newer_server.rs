//! A server that is newer than the SDK: values and fields that this version does not know.

use std::time::Duration;

use axum::{Router, extract::Path, routing::get};
use faena::{Error, ErrorReason, JobId, JobState, LogEvent, OnParentFailure, Priority, RetryOn, Worker};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    client::{job, serve},
    fake_server::{FakeServer, new_id},
};

const LIMIT: Duration = Duration::from_secs(10);

/// A job in which every enum has a value, and every object a field, that this version does not know.
fn future_job(id: JobId, status: &str) -> Value {
    let at = "2026-01-01T00:00:00Z";
    let mut job = job(id, status, json!({"ok": true}));
    job["priority"] = json!("URGENT");
    job["errorReason"] = json!("evicted");
    job["retryOn"] = json!({"status": [503]});
    job["onParentFailure"] = json!("ask");
    job["completedAt"] = json!(at);
    job["progress"] = json!({"percentage": 50.0, "eta": "soon"});
    job["steps"] = json!([{"name": "E1", "result": 1, "at": at, "run": 3, "node": "n"}]);
    job["attempts"] = json!([{"run": 3, "status": "SUSPENDED", "finishedAt": at, "errorReason": "evicted", "cost": 1}]);
    job["executionLog"] = json!([{"timestamp": at, "event": "teleported", "details": "d", "run": 3, "node": "n"}]);
    job["carbonGrams"] = json!(0.1);
    job
}

fn job_router(status: &'static str) -> Router {
    let events = move |Path(id): Path<JobId>| async move { format!("data: {}\n\n", future_job(id, status)) };
    let show = move |Path(id): Path<JobId>| async move { future_job(id, status).to_string() };
    Router::new().route("/api/v1/jobs/{id}/events", get(events)).route("/api/v1/jobs/{id}", get(show))
}

#[tokio::test]
async fn unknown_enum_values_are_kept_and_unknown_fields_are_ignored() {
    let client = serve(job_router("SUSPENDED")).await;
    let job = client.job(new_id()).await.expect("a job");
    assert_eq!(job.status, JobState::Unknown("SUSPENDED".into()));
    assert_eq!(job.priority, Priority::Unknown("URGENT".into()));
    assert_eq!(job.error_reason, Some(ErrorReason::Unknown("evicted".into())));
    assert_eq!(job.retry_on, RetryOn::Unknown(json!({"status": [503]})));
    assert_eq!(job.on_parent_failure, Some(OnParentFailure::Unknown("ask".into())));
    assert_eq!(job.execution_log[0].event, LogEvent::Unknown("teleported".into()));
    assert_eq!(job.attempts[0].status, JobState::Unknown("SUSPENDED".into()));
    assert_eq!(job.steps[0].run, 3.into());
}

#[tokio::test]
async fn waiting_ends_on_a_job_with_unknown_log_events() {
    let client = serve(job_router("COMPLETED")).await;
    let result = timeout(LIMIT, client.wait_for_result::<Value>(new_id())).await.expect("it ends");
    assert_eq!(result.expect("a result"), json!({"ok": true}));
}

#[tokio::test]
async fn waiting_ends_on_an_unknown_final_state() {
    let client = serve(job_router("SKIPPED")).await;
    let error =
        timeout(LIMIT, client.wait_for_result::<Value>(new_id())).await.expect("it ends").expect_err("not completed");
    assert!(matches!(error, Error::NotCompleted { status: JobState::Unknown(name), .. } if name == "SKIPPED"));
}

#[tokio::test]
async fn waiting_ends_with_an_error_on_an_unreadable_job() {
    let router = Router::new()
        .route("/api/v1/jobs/{id}/events", get(|| async { "data: {\"state\": 7}\n\n" }))
        .route("/api/v1/jobs/{id}", get(|| async { "{\"state\": 7}" }));
    let client = serve(router).await;
    let error = timeout(LIMIT, client.wait(new_id())).await.expect("it ends").expect_err("not a job");
    assert!(matches!(error, Error::Decode { .. }), "{error:?}");
}

#[tokio::test]
async fn a_worker_ignores_unknown_frames_and_fields() {
    let server = FakeServer::new().await;
    let _worker = server.start(Worker::new().handle("noop", |_, _: Value| async { Ok(()) }));
    let mut peer = server.accept_new().await;
    peer.send(json!({"type": "rebalance", "shard": 7})).await;
    peer.send(json!({"type": "ack", "jobId": new_id(), "of": "checkpoint", "ok": true})).await;
    peer.send(json!({"type": "error", "error": {"code": "TOO_EARLY", "message": "wait", "ms": 5}})).await;
    peer.assign_with(new_id(), "noop", json!({"region": "eu"})).await;
    peer.expect("complete").await;
}
