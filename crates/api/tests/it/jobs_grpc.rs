//! Tests of `faena.v1.JobService`.

use faena_wire::v1::{
    BatchCreateJobsRequest, CancelJobRequest, CreateJobRequest, DeleteJobRequest, ErrorReason, GetJobLogRequest,
    GetJobRequest, Job, JobSort, JobSpec, JobState, ListJobsRequest, OnParentFailure, Priority, RetryJobRequest,
    RetryPolicy, SortOrder, WatchJobRequest, job_service_client::JobServiceClient,
};
use serde_json::json;
use tonic::Code;

use crate::app::App;

fn client(app: &App) -> JobServiceClient<axum::Router> {
    JobServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static("http://127.0.0.1:3000"))
}

/// Returns a job that is scheduled for the year 2100.
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
    let parent = CreateJobRequest { job: Some(far_future_job("noop")) };
    let parent = client.create_job(parent).await.unwrap().into_inner().id;
    let spec = JobSpec {
        payload_json: r#"{"big": 12345678901234567890123}"#.into(),
        priority: Priority::High.into(),
        retry_policy: Some(RetryPolicy {
            max_retries: Some(2),
            delay: Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }),
            backoff_multiplier: Some(3.0),
            max_delay: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            delays: vec![prost_types::Duration { seconds: 5, nanos: 0 }],
            jitter: Some(0.25),
            error_patterns: vec!["deadlock".into()],
            ..RetryPolicy::default()
        }),
        timeout: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
        expires_at: Some(prost_types::Timestamp { seconds: 4_102_448_400, nanos: 0 }),
        webhook_url: Some("https://example.org/hook".into()),
        idempotency_key: Some("i-1".into()),
        unique_key: Some("u-1".into()),
        concurrency_key: Some("c-1".into()),
        depends_on: vec![parent.clone()],
        on_parent_failure: OnParentFailure::Run.into(),
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
    let retry = job.retry_policy.clone().unwrap();
    assert_eq!((retry.max_retries, retry.backoff_multiplier, retry.jitter), (Some(2), Some(3.0), Some(0.25)));
    let ms = |duration: prost_types::Duration| duration.seconds * 1_000 + i64::from(duration.nanos) / 1_000_000;
    let delays: Vec<i64> = retry.delays.into_iter().map(ms).collect();
    let times = [retry.delay, retry.max_delay, job.timeout].map(|duration| ms(duration.unwrap()));
    assert_eq!((times, delays), ([1_500, 60_000, 90_000], vec![5_000]));
    assert_eq!(retry.error_patterns, ["deadlock"]);
    let seconds = |at: Option<prost_types::Timestamp>| at.map(|at| at.seconds);
    assert_eq!((seconds(job.scheduled_at), seconds(job.expires_at)), (Some(4_102_444_800), Some(4_102_448_400)));
    assert_eq!((job.updated_at, job.queued_at), (job.created_at, None));
    let keys = [job.webhook_url.as_deref(), job.idempotency_key.as_deref(), job.unique_key.as_deref()];
    assert_eq!(keys, [Some("https://example.org/hook"), Some("i-1"), Some("u-1")]);
    assert_eq!((job.concurrency_key.as_deref(), job.on_parent_failure()), (Some("c-1"), OnParentFailure::Run));
    assert_eq!(job.depends_on, [parent]);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_by_every_filter_of_http() {
    let app = App::start().await;
    let mut client = client(&app);
    let high = JobSpec { priority: Priority::High.into(), ..far_future_job("noop") };
    let batch = BatchCreateJobsRequest { jobs: vec![high, far_future_job("other")] };
    let ids = client.batch_create_jobs(batch).await.unwrap().into_inner().ids;
    let all = ListJobsRequest::default;
    let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    let sorted = |order: SortOrder| ListJobsRequest {
        sort: JobSort::Priority.into(),
        order: order.into(),
        states: vec![JobState::Pending.into()],
        ..all()
    };
    for (request, found) in [
        (ListJobsRequest { priorities: vec![Priority::High.into()], ..all() }, vec![0]),
        (ListJobsRequest { name: Some("other".into()), ..all() }, vec![1]),
        (ListJobsRequest { search: Some("othe".into()), ..all() }, vec![1]),
        (ListJobsRequest { worker_id: Some("nobody".into()), ..all() }, vec![]),
        (ListJobsRequest { schedule_id: Some("none".into()), ..all() }, vec![]),
        (ListJobsRequest { error: Some("broken".into()), ..all() }, vec![]),
        (ListJobsRequest { error_reason: ErrorReason::Timeout.into(), ..all() }, vec![]),
        (ListJobsRequest { created_after: at(1_600_000_000), ..all() }, vec![1, 0]),
        (ListJobsRequest { created_before: at(1_600_000_000), ..all() }, vec![]),
        (sorted(SortOrder::Desc), vec![0, 1]),
        (sorted(SortOrder::Asc), vec![1, 0]),
    ] {
        let page = client.list_jobs(request.clone()).await.unwrap().into_inner();
        let listed: Vec<&str> = page.jobs.iter().map(|job| job.id.as_str()).collect();
        let expected: Vec<&str> = found.iter().map(|index: &usize| ids[*index].as_str()).collect();
        assert_eq!(listed, expected, "{request:?}");
        assert!(page.total_is_exact && page.sort_is_exact && !page.is_partial);
    }
    for request in [
        ListJobsRequest { priorities: vec![99], ..all() },
        ListJobsRequest { sort: 99, ..all() },
        ListJobsRequest { order: 99, ..all() },
        ListJobsRequest { error_reason: 99, ..all() },
        ListJobsRequest { search: Some(" ".into()), ..all() },
    ] {
        let error = client.list_jobs(request.clone()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{request:?}");
    }
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
    let whole: Vec<String> = get(&mut client, &id).await.execution_log.into_iter().map(|entry| entry.event).collect();
    let (mut paged, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = GetJobLogRequest { id: id.clone(), page_size: Some(1), page_token };
        let page = client.get_job_log(request).await.unwrap().into_inner();
        paged.extend(page.entries.into_iter().map(|entry| entry.event));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(paged, whole);
    let invalid = GetJobLogRequest { id: id.clone(), page_size: Some(0), page_token: "x".into() };
    assert_eq!(client.get_job_log(invalid).await.unwrap_err().code(), Code::InvalidArgument);
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
