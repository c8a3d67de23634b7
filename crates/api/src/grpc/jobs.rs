//! `faena.v1.JobService`. A request becomes a body or query of the HTTP API, so that one set of rules applies to both.

use std::pin::Pin;

use axum::http::HeaderMap;
use bytes::Bytes;
use faena_domain::{JobState, LogDetails, Timestamp};
use faena_engine::CancelResult;
use faena_wire::v1::{
    BatchCreateJobsRequest, BatchCreateJobsResponse, CancelJobRequest, CancelJobResponse, CreateJobRequest,
    CreateJobResponse, DeleteJobRequest, DeleteJobResponse, GetJobLogRequest, GetJobLogResponse, GetJobRequest,
    GetJobResponse, JobSpec, ListJobsRequest, ListJobsResponse, RetryJobRequest, RetryJobResponse, WatchJobRequest,
    WatchJobResponse, job_service_server::JobService,
};
use futures_util::Stream;
use serde_json::Value;
use tonic::{Request, Response, Status};

use super::{
    GrpcResult,
    convert::{self, JsonBody, query_text},
    query,
};
use crate::{
    Api, ApiError, access,
    context::actor,
    job_watch::JobWatches,
    request::parse_job_id,
    rest::{
        job_log,
        jobs::{submit_batch, submit_one},
        list::find,
    },
};

pub struct Jobs(pub Api);

#[tonic::async_trait]
impl JobService for Jobs {
    async fn create_job(&self, request: Request<CreateJobRequest>) -> GrpcResult<CreateJobResponse> {
        let (metadata, _, message) = request.into_parts();
        let body = Bytes::from(json(message.job.unwrap_or_default()));
        let headers: HeaderMap = metadata.into_headers();
        let (created, existed) = submit_one(&self.0, &headers, &body).await?;
        Ok(Response::new(CreateJobResponse {
            id: created.id.to_string(),
            state: convert::job_state(created.status),
            created_at: Some(convert::timestamp(created.created_at)),
            correlation_id: created.correlation_id,
            existed,
        }))
    }

    async fn batch_create_jobs(&self, request: Request<BatchCreateJobsRequest>) -> GrpcResult<BatchCreateJobsResponse> {
        let jobs: Vec<String> = request.into_inner().jobs.into_iter().map(json).collect();
        let body = Bytes::from(format!("{{\"jobs\":[{}]}}", jobs.join(",")));
        let ids = submit_batch(&self.0, &body).await?;
        Ok(Response::new(BatchCreateJobsResponse { ids: ids.into_iter().map(|id| id.to_string()).collect() }))
    }

    async fn get_job(&self, request: Request<GetJobRequest>) -> GrpcResult<GetJobResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        let job = access::job(&self.0, id).await?;
        Ok(Response::new(GetJobResponse { job: Some(convert::job(self.0.with_default_timeout(job))) }))
    }

    async fn list_jobs(&self, request: Request<ListJobsRequest>) -> GrpcResult<ListJobsResponse> {
        let (_, found) = find(&self.0, Some(&list_query(request.into_inner()))).await?;
        Ok(Response::new(ListJobsResponse {
            jobs: found.jobs.into_iter().map(convert::job).collect(),
            total_size: found.total,
            next_page_token: found.next.map(|id| id.to_string()).unwrap_or_default(),
            total_is_exact: found.total_is_exact,
            is_partial: found.is_partial,
            sort_is_exact: found.sort_is_exact,
        }))
    }

    async fn cancel_job(&self, request: Request<CancelJobRequest>) -> GrpcResult<CancelJobResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        access::require_job(&self.0, id).await?;
        let cancelled =
            self.0.engine.cancel(id, &LogDetails::CancelledByRequest.to_string(), &actor(), Timestamp::now()).await;
        let (state, cancel_requested) = match cancelled.map_err(ApiError::from)? {
            CancelResult::Cancelled => (JobState::Cancelled, false),
            CancelResult::Requested { state } => (state, true),
        };
        Ok(Response::new(CancelJobResponse { state: convert::job_state(state), cancel_requested }))
    }

    async fn retry_job(&self, request: Request<RetryJobRequest>) -> GrpcResult<RetryJobResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        access::require_job(&self.0, id).await?;
        let now = Timestamp::now();
        let retried = self.0.engine.retry(id, &actor(), now).await.map_err(ApiError::from)?;
        Ok(Response::new(RetryJobResponse { state: convert::job_state(retried.state) }))
    }

    async fn delete_job(&self, request: Request<DeleteJobRequest>) -> GrpcResult<DeleteJobResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        access::require_job(&self.0, id).await?;
        self.0.engine.store.job_delete(id, Some(&actor()), Timestamp::now()).await.map_err(ApiError::from)?;
        Ok(Response::new(DeleteJobResponse {}))
    }

    async fn get_job_log(&self, request: Request<GetJobLogRequest>) -> GrpcResult<GetJobLogResponse> {
        let request = request.into_inner();
        let id = parse_job_id(&request.id)?;
        access::require_job(&self.0, id).await?;
        let size = request.page_size.map(|size| size.to_string());
        let cursor = (!request.page_token.is_empty()).then_some(request.page_token);
        let page = job_log::read(&self.0, id, Some(&query([("limit", size), ("cursor", cursor)]))).await?;
        Ok(Response::new(GetJobLogResponse {
            entries: page.entries.into_iter().map(convert::log_entry).collect(),
            next_page_token: page.next_cursor.unwrap_or_default(),
        }))
    }

    type WatchJobStream = Pin<Box<dyn Stream<Item = Result<WatchJobResponse, Status>> + Send>>;

    async fn watch_job(&self, request: Request<WatchJobRequest>) -> GrpcResult<Self::WatchJobStream> {
        let id = parse_job_id(&request.into_inner().id)?;
        access::require_job(&self.0, id).await?;
        let watcher = JobWatches::open(&self.0, id).await?;
        let stream = futures_util::stream::unfold(watcher, |mut watcher| async move {
            let change = watcher.next().await?;
            Some((Ok(WatchJobResponse { job: Some(convert::job(change.snapshot.job.clone())) }), watcher))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Returns the query of `GET /api/v1/jobs` for the same list.
fn list_query(request: ListJobsRequest) -> String {
    let joined = |numbers: Vec<i32>, name: fn(i32) -> Option<Value>| {
        let names: Vec<String> = numbers.into_iter().filter_map(name).map(query_text).collect();
        (!names.is_empty()).then(|| names.join(","))
    };
    let time = |at: prost_types::Timestamp| query_text(convert::time_json(at));
    query([
        ("status", joined(request.states, convert::job_state_name)),
        ("priority", joined(request.priorities, convert::priority_name)),
        ("type", request.r#type),
        ("name", request.name),
        ("queue", request.queue),
        ("tag", request.tag),
        ("correlationId", request.correlation_id),
        ("workerId", request.worker_id),
        ("scheduleId", request.schedule_id),
        ("createdAfter", request.created_after.map(time)),
        ("createdBefore", request.created_before.map(time)),
        ("q", request.search),
        ("error", request.error),
        ("payload", request.payload),
        ("reason", convert::error_reason_name(request.error_reason).map(query_text)),
        ("sort", convert::job_sort_name(request.sort).map(query_text)),
        ("order", convert::sort_order_name(request.order).map(query_text)),
        ("limit", request.page_size.map(|size| size.to_string())),
        ("cursor", Some(request.page_token)),
    ])
}

/// Returns the body of `POST /api/v1/jobs` for the same job. The payload is stored unchanged.
fn json(spec: JobSpec) -> String {
    let mut body = JsonBody::default();
    body.put("name", (!spec.name.is_empty()).then_some(spec.name));
    body.put("type", spec.r#type);
    body.put("queue", spec.queue);
    body.put("priority", convert::priority_name(spec.priority));
    body.put_retry_policy(spec.retry_policy);
    body.put_duration("timeoutMs", spec.timeout);
    body.put_time("scheduledAt", spec.scheduled_at);
    body.put_time("expiresAt", spec.expires_at);
    body.put("webhookUrl", spec.webhook_url);
    body.put("correlationId", spec.correlation_id);
    body.put("idempotencyKey", spec.idempotency_key);
    body.put("uniqueKey", spec.unique_key);
    body.put("concurrencyKey", spec.concurrency_key);
    body.put_list("dependsOn", spec.depends_on);
    body.put("onParentFailure", convert::on_parent_failure_name(spec.on_parent_failure));
    body.put_list("tags", spec.tags);
    body.put("ref", spec.r#ref);
    body.into_text("payload", &spec.payload_json)
}
