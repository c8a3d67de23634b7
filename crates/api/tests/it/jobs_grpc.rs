//! Tests of `faena.v1.JobService`.

use faena_wire::v1::{
    BatchCreateJobsRequest, CancelJobRequest, CreateJobRequest, DeleteJobRequest, GetJobRequest, Job, JobSpec,
    JobState, ListJobsRequest, Priority, RetryJobRequest, RetryPolicy, WatchJobRequest,
    job_service_client::JobServiceClient,
};
use serde_json::json;
use tonic::Code;

use crate::app::App;

fn client(app: &App) -> JobServiceClient<axum::Router> {
    JobServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static("http://127.0.0.1:3000"))
}

/// A job that does not start in this century.
fn far_future_job(name: &str) -> JobSpec {
    JobSpec {
        name: name.into(),
        scheduled_at: Some(prost_types::Timestamp { seconds: 4_102_444_800, nanos: 250_000_000 }),
        ..JobSpec::default()
    }
}

async fn get(client: &mut JobServiceClient<axum::Router>, id: &str) -> Job {
    client.get_job(GetJobRequest { id: id.into() }).await.unwrap().into_inner().job.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_of_a_job_is_the_same_as_over_http() {
    let app = App::start().await;
    let mut client = client(&app);
    let spec = JobSpec {
        payload_json: r#"{"big": 12345678901234567890123}"#.into(),
        priority: Priority::High.into(),
        retry_policy: Some(RetryPolicy {
            max_retries: Some(2),
            delay: Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }),
            error_patterns: vec!["deadlock".into()],
            ..RetryPolicy::default()
        }),
        timeout: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
        tags: vec!["a".into()],
        ..far_future_job("noop")
    };
    let created = client.create_job(CreateJobRequest { job: Some(spec) }).await.unwrap().into_inner();
    assert_eq!((created.state(), created.existed), (JobState::Pending, false));
    let shown = app.job(&created.id).await;
    assert_eq!((&shown["retryDelay"], &shown["timeoutMs"]), (&json!(1_500), &json!(90_000)));
    assert_eq!((&shown["retryOn"], &shown["priority"]), (&json!(["deadlock"]), &json!("HIGH")));
    assert_eq!(shown["scheduledAt"], "2100-01-01T00:00:00.250Z");
    let job = get(&mut client, &created.id).await;
    assert_eq!((job.state(), job.priority()), (JobState::Pending, Priority::High));
    assert_eq!(job.payload_json, r#"{"big": 12345678901234567890123}"#, "byte for byte");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_cancelled_retried_watched_and_deleted() {
    let app = App::start().await;
    let mut client = client(&app);
    let batch =
        BatchCreateJobsRequest { jobs: vec![far_future_job("noop"), far_future_job("noop"), far_future_job("other")] };
    let ids = client.batch_create_jobs(batch).await.unwrap().into_inner().ids;
    let first = ListJobsRequest {
        states: vec![JobState::Pending.into()],
        r#type: Some("noop".into()),
        page_size: Some(1),
        ..ListJobsRequest::default()
    };
    let page = client.list_jobs(first.clone()).await.unwrap().into_inner();
    assert_eq!((page.total_size, page.jobs[0].id.as_str()), (2, ids[1].as_str()));
    let second = ListJobsRequest { page_token: page.next_page_token, ..first };
    let page = client.list_jobs(second).await.unwrap().into_inner();
    assert_eq!(page.jobs[0].id, ids[0]);

    let id = ids[0].clone();
    let cancelled = client.cancel_job(CancelJobRequest { id: id.clone() }).await.unwrap().into_inner();
    assert_eq!((cancelled.state(), cancelled.cancel_requested), (JobState::Cancelled, false));
    let retried = client.retry_job(RetryJobRequest { id: id.clone() }).await.unwrap().into_inner();
    assert_eq!(retried.state(), JobState::Pending);
    app.wait_for_state(&id, "COMPLETED").await;
    let mut stream = client.watch_job(WatchJobRequest { id: id.clone() }).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().job.unwrap().state(), JobState::Completed);
    assert!(stream.message().await.unwrap().is_none(), "the stream ends with the job");
    client.delete_job(DeleteJobRequest { id: id.clone() }).await.unwrap();
    assert_eq!(client.get_job(GetJobRequest { id }).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_fields_are_reported_as_over_http() {
    let app = App::start().await;
    let mut client = client(&app);
    let spec = JobSpec {
        priority: 99,
        timeout: Some(prost_types::Duration { seconds: -1, nanos: 0 }),
        payload_json: "no json".into(),
        ..far_future_job("noop")
    };
    let rejected = client.create_job(CreateJobRequest { job: Some(spec) }).await.unwrap_err();
    assert_eq!(rejected.code(), Code::InvalidArgument);
    assert_eq!(
        rejected.message(),
        "3 fields are not valid; payload: must be a JSON object; priority: must be LOW, NORMAL, HIGH or CRITICAL; \
         timeoutMs: must be a non-negative integer"
    );
    assert_eq!(rejected.metadata().get("x-error-code").unwrap(), "VALIDATION_ERROR");
}
