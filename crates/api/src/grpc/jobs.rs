//! `faena.v1.JobService`. A request is put into the words of REST, so that one set of rules holds for both.

use std::pin::Pin;

use axum::http::HeaderMap;
use bytes::Bytes;
use faena_domain::{JobState, JobView, Timestamp};
use faena_engine::CancelResult;
use faena_store::StoreError;
use faena_wire::v1::{
    ChangedResponse, CreateJobRequest, CreateJobResponse, CreateJobsRequest, CreateJobsResponse, DeleteJobResponse,
    Job, JobRequest, JobSpec, ListJobsRequest, ListJobsResponse, LogEntry, Progress, Step,
    job_service_server::JobService,
};
use futures_util::Stream;
use serde_json::{Map, Value, value::RawValue};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use crate::{
    Api, ApiError,
    frame::actor,
    request::parse_job_id,
    rest::{
        events::follow,
        jobs::{submit_batch, submit_one},
        list::find,
    },
};

pub struct Jobs(pub Api);

type GrpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl JobService for Jobs {
    async fn create(&self, request: Request<CreateJobRequest>) -> GrpcResult<CreateJobResponse> {
        let (metadata, _, message) = request.into_parts();
        let body = Bytes::from(json(message.job.unwrap_or_default()));
        let headers: HeaderMap = metadata.into_headers();
        let (created, existed) = submit_one(&self.0, &headers, &body).await?;
        Ok(Response::new(CreateJobResponse {
            id: created.id.to_string(),
            status: created.status.to_string(),
            created_at_ms: created.created_at.as_ms(),
            correlation_id: created.correlation_id,
            existed,
        }))
    }

    async fn create_batch(&self, request: Request<CreateJobsRequest>) -> GrpcResult<CreateJobsResponse> {
        let jobs: Vec<String> = request.into_inner().jobs.into_iter().map(json).collect();
        let body = Bytes::from(format!("{{\"jobs\":[{}]}}", jobs.join(",")));
        let ids = submit_batch(&self.0, &body).await?;
        Ok(Response::new(CreateJobsResponse { ids: ids.into_iter().map(|id| id.to_string()).collect() }))
    }

    async fn get(&self, request: Request<JobRequest>) -> GrpcResult<Job> {
        let id = parse_job_id(&request.into_inner().id)?;
        let job = self.0.engine.store.job_get(id).await.map_err(ApiError::from)?;
        let job = job.ok_or_else(|| ApiError::from(StoreError::NotFound(id)))?;
        Ok(Response::new(message(self.0.shown(job))))
    }

    async fn list(&self, request: Request<ListJobsRequest>) -> GrpcResult<ListJobsResponse> {
        let query = query(request.into_inner());
        let (_, found) = find(&self.0, &query).await?;
        Ok(Response::new(ListJobsResponse {
            jobs: found.jobs.into_iter().map(message).collect(),
            total: found.total,
            next_cursor: found.next.map(|id| id.to_string()),
        }))
    }

    async fn cancel(&self, request: Request<JobRequest>) -> GrpcResult<ChangedResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        let answer = self
            .0
            .engine
            .cancel(id, "cancelled by request", &actor(), Timestamp::now())
            .await
            .map_err(ApiError::from)?;
        let (state, cancel_requested) = match answer {
            CancelResult::Cancelled => (JobState::Cancelled, false),
            CancelResult::Asked { state } => (state, true),
        };
        Ok(Response::new(ChangedResponse { id: id.to_string(), status: state.to_string(), cancel_requested }))
    }

    async fn retry(&self, request: Request<JobRequest>) -> GrpcResult<ChangedResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        let now = Timestamp::now();
        self.0.engine.store.job_retry(id, Some(&actor()), now).await.map_err(ApiError::from)?;
        self.0.engine.bus.changed(id, JobState::Pending, None, now);
        let status = JobState::Pending.to_string();
        Ok(Response::new(ChangedResponse { id: id.to_string(), status, cancel_requested: false }))
    }

    async fn delete(&self, request: Request<JobRequest>) -> GrpcResult<DeleteJobResponse> {
        let id = parse_job_id(&request.into_inner().id)?;
        self.0.engine.store.job_delete(id, Some(&actor()), Timestamp::now()).await.map_err(ApiError::from)?;
        Ok(Response::new(DeleteJobResponse {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Job, Status>> + Send>>;

    async fn watch(&self, request: Request<JobRequest>) -> GrpcResult<Self::WatchStream> {
        let id = parse_job_id(&request.into_inner().id)?;
        let api = self.0.clone();
        let changes = api.engine.bus.subscribe();
        let first = api.engine.store.job_get(id).await.map_err(ApiError::from)?;
        let first = first.ok_or_else(|| ApiError::from(StoreError::NotFound(id)))?;
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(follow(api, id, first, changes, sender));
        let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
            let (_, job) = receiver.recv().await?;
            Some((Ok(message(job)), receiver))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// The query that says the same to `GET /api/v1/jobs`.
fn query(ask: ListJobsRequest) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    if !ask.status.is_empty() {
        query.append_pair("status", &ask.status.join(","));
    }
    let limit = ask.limit.map(|limit| limit.to_string());
    let cursor = Some(ask.cursor.unwrap_or_default());
    for (name, value) in [
        ("type", &ask.r#type),
        ("queue", &ask.queue),
        ("tag", &ask.tag),
        ("correlationId", &ask.correlation_id),
        ("limit", &limit),
        ("cursor", &cursor),
    ] {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    query.finish()
}

/// The body that says the same to `POST /api/v1/jobs`. The payload goes in to the letter.
fn json(spec: JobSpec) -> String {
    let mut fields: Map<String, Value> = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    let list = |list: Vec<String>| (!list.is_empty()).then(|| Value::from(list));
    let time = |ms: Option<i64>| ms.map(|ms| Value::from(Timestamp::from_ms(ms).to_string()));
    put("name", (!spec.name.is_empty()).then(|| spec.name.into()));
    put("type", spec.r#type.map(Into::into));
    put("queue", spec.queue.map(Into::into));
    put("priority", spec.priority.map(Into::into));
    put("maxRetries", spec.max_retries.map(Into::into));
    put("retryDelay", spec.retry_delay_ms.map(Into::into));
    put("backoffMultiplier", spec.backoff_multiplier.map(Into::into));
    put("maxDelay", spec.max_delay_ms.map(Into::into));
    put("retryDelays", (!spec.retry_delays_ms.is_empty()).then(|| spec.retry_delays_ms.into()));
    put("jitter", spec.jitter.map(Into::into));
    put("retryOn", retry_on(spec.retry_on));
    put("timeoutMs", spec.timeout_ms.map(Into::into));
    put("scheduledAt", time(spec.scheduled_at_ms));
    put("expiresAt", time(spec.expires_at_ms));
    put("webhookUrl", spec.webhook_url.map(Into::into));
    put("correlationId", spec.correlation_id.map(Into::into));
    put("idempotencyKey", spec.idempotency_key.map(Into::into));
    put("uniqueKey", spec.unique_key.map(Into::into));
    put("concurrencyKey", spec.concurrency_key.map(Into::into));
    put("dependsOn", list(spec.depends_on));
    put("onParentFailure", spec.on_parent_failure.map(Into::into));
    put("tags", list(spec.tags));
    put("ref", spec.r#ref.map(Into::into));
    let mut text = Value::from(fields).to_string();
    if !spec.payload_json.is_empty() {
        text.pop();
        let comma = if text.len() > 1 { "," } else { "" };
        // What is no JSON is put in as a text, which is refused as a payload by its name.
        let payload = match serde_json::from_str::<&RawValue>(&spec.payload_json) {
            Ok(raw) => raw.get().to_owned(),
            Err(_) => Value::from(spec.payload_json).to_string(),
        };
        text.push_str(&format!("{comma}\"payload\":{payload}}}"));
    }
    text
}

/// One of the names, or patterns.
pub fn retry_on(said: Vec<String>) -> Option<Value> {
    match said.as_slice() {
        [] => None,
        [one] if one == "all" || one == "transient" => Some(one.clone().into()),
        _ => Some(said.into()),
    }
}

pub fn message(job: JobView) -> Job {
    Job {
        id: job.id.to_string(),
        name: job.name,
        r#type: job.kind,
        queue: job.queue,
        status: job.status.to_string(),
        priority: job.priority.as_str().into(),
        payload_json: job.payload.get().into(),
        result_json: job.result.map(|result| result.get().into()),
        error: job.error,
        error_reason: job.error_reason.map(|reason| reason.as_str().into()),
        retry_count: job.retry_count,
        max_retries: job.max_retries,
        run: job.run,
        worker_id: job.worker_id,
        correlation_id: job.correlation_id,
        created_at_ms: job.created_at.as_ms(),
        started_at_ms: job.started_at.map(Timestamp::as_ms),
        completed_at_ms: job.completed_at.map(Timestamp::as_ms),
        progress: job.progress.map(|progress| Progress {
            phase: progress.phase,
            current_step: progress.current_step,
            completed_steps: progress.completed_steps,
            total_steps: progress.total_steps,
            percentage: progress.percentage,
            message: progress.message,
        }),
        steps: job
            .steps
            .into_iter()
            .map(|step| Step { name: step.name, result_json: step.result.get().into() })
            .collect(),
        execution_log: job
            .execution_log
            .into_iter()
            .map(|entry| LogEntry {
                timestamp_ms: entry.timestamp.as_ms(),
                event: entry.event.as_str().into(),
                details: entry.details,
                run: entry.run,
            })
            .collect(),
        tags: job.tags,
        schedule_id: job.schedule_id,
        schedule_due_ms: job.schedule_due.map(Timestamp::as_ms),
    }
}
