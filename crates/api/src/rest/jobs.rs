//! `/jobs`: submits one job or a batch; shows, explains, cancels, retries and deletes a job.

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{
    Explanation, FieldError, JobId, JobState, JobView, LogDetails, NewJob, Timestamp,
    parse::{batch_fingerprint, fingerprint},
};
use faena_engine::CancelResult;
use faena_store::{Retried, StoreError};
use faena_wire::{Changed, Created, CreatedBatch, Success};

use crate::{
    Api, ApiError, ApiResult, access,
    context::{self, Correlation},
    payloads,
    request::{Segment, idempotency_key, parse_job_id, read_body, read_bytes},
};

pub async fn create(State(api): State<Api>, headers: HeaderMap, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let (created, existed) = submit_one(&api, &headers, &body).await?;
    let status = if existed { StatusCode::OK } else { StatusCode::CREATED };
    let location = [(header::LOCATION, format!("/api/v1/jobs/{}", created.id))];
    Ok((status, location, Json(created)).into_response())
}

/// Submits the job in a body. The flag is `true` if a job with its idempotency key already existed.
pub async fn submit_one(api: &Api, headers: &HeaderMap, body: &Bytes) -> ApiResult<(Created, bool)> {
    let correlation = context::correlation();
    // If the caller sends no correlation id, the job's own id is its correlation id.
    let id = match &correlation {
        Correlation::Generated(id) => JobId(*id),
        Correlation::Given(_) => JobId::new(),
    };
    let mut errors = Vec::new();
    let mut job = api.parser().parse_single(api.parser().fields(body)?, id, &mut errors);
    apply_headers(headers, &mut job, body, &mut errors);
    if !errors.is_empty() {
        return Err(ApiError::invalid(errors));
    }
    let mut correlation_id = correlate(&mut job, &correlation);
    access::require_submittable(api, std::slice::from_ref(&job)).await?;
    let stored = api.engine.submit(vec![job], &context::actor(), Timestamp::now()).await;
    let stored = match stored {
        Ok(stored) => stored,
        Err(error) => return Err(access::submission_error(api, error).await),
    };
    let stored = stored.into_iter().next().ok_or(StoreError::Internal("a job was not stored".into()))?;
    if stored.existed
        && let Some(first) = api.engine.store.job_get(stored.id).await?
    {
        correlation_id = first.correlation_id;
    }
    let created = Created { id: stored.id, status: stored.status, created_at: stored.created_at, correlation_id };
    Ok((created, stored.existed))
}

pub async fn create_batch(State(api): State<Api>, headers: HeaderMap, body: Body) -> ApiResult<Response> {
    if headers.contains_key("idempotency-key") {
        let message = "works only for a single job; set idempotencyKey on each job of the batch";
        return Err(ApiError::invalid_field("Idempotency-Key", message));
    }
    let body = read_bytes(&api, body, api.parser().limits.max_batch_bytes).await?;
    let ids = submit_batch(&api, &body).await?;
    Ok((StatusCode::CREATED, Json(CreatedBatch { ids })).into_response())
}

/// Submits all jobs in a body, or none.
pub async fn submit_batch(api: &Api, body: &Bytes) -> ApiResult<Vec<JobId>> {
    let mut jobs = api.parser().parse_batch(body)?;
    // All jobs of a batch share the id of the request, even a generated one.
    let correlation = Correlation::Given(context::correlation().text());
    for job in &mut jobs {
        if job.options.idempotency_key.is_some() {
            job.fingerprint = Some(batch_fingerprint(job));
        }
        correlate(job, &correlation);
        job.options.traceparent = context::traceparent_of(job.id);
    }
    access::require_submittable(api, &jobs).await?;
    match api.engine.submit(jobs, &context::actor(), Timestamp::now()).await {
        Ok(stored) => Ok(stored.into_iter().map(|job| job.id).collect()),
        Err(error) => Err(access::submission_error(api, error).await),
    }
}

/// Applies the idempotency key and the trace context of the request to its job.
fn apply_headers(headers: &HeaderMap, job: &mut NewJob, body: &Bytes, errors: &mut Vec<FieldError>) {
    job.options.idempotency_key = idempotency_key(headers, job.options.idempotency_key.take(), errors);
    if job.options.idempotency_key.is_some() {
        job.fingerprint = Some(fingerprint(body));
    }
    job.options.traceparent = context::traceparent_of(job.id);
}

/// Sets the correlation id of the request if the body has none.
///
/// Returns the job's correlation id: that of the body, else that of the request, else the job's own id.
fn correlate(job: &mut NewJob, correlation: &Correlation) -> String {
    if job.correlation_id.is_none()
        && let Correlation::Given(text) = correlation
    {
        job.correlation_id = Some(text.clone());
    }
    job.correlation_id.clone().unwrap_or_else(|| job.id.to_string())
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<JobView>> {
    let id = parse_job_id(&id)?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    Ok(Json(api.with_default_timeout(job)))
}

/// Explains why a job is in its state.
pub async fn why(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Explanation>> {
    let id = parse_job_id(&id)?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    let mut job = JobView { error: payloads::shown_text(job.error), ..job };
    if let Some(progress) = job.progress.as_mut().filter(|_| !payloads::are_visible()) {
        // The worker may have put anything into these texts.
        (progress.phase, progress.current_step, progress.message) = (None, None, None);
    }
    Ok(Json(api.engine.why(&job, Timestamp::now()).await?.ok_or(StoreError::NotFound(id))?))
}

pub async fn delete(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Success>> {
    api.engine.store.job_delete(parse_job_id(&id)?, Some(&context::actor()), Timestamp::now()).await?;
    Ok(Json(Success { success: true }))
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Response> {
    let id = parse_job_id(&id)?;
    let cancelled =
        api.engine.cancel(id, &LogDetails::CancelledByRequest.to_string(), &context::actor(), Timestamp::now()).await?;
    Ok(match cancelled {
        CancelResult::Cancelled => {
            Json(Changed { id, status: JobState::Cancelled, retry_count: None, cancel_requested: false })
                .into_response()
        }
        CancelResult::Requested { state } => {
            let body = Changed { id, status: state, retry_count: None, cancel_requested: true };
            (StatusCode::ACCEPTED, Json(body)).into_response()
        }
    })
}

pub async fn retry(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Changed>> {
    let id = parse_job_id(&id)?;
    let now = Timestamp::now();
    let Retried { state, retry_count } = api.engine.retry(id, &context::actor(), now).await?;
    Ok(Json(Changed { id, status: state, retry_count: Some(retry_count), cancel_requested: false }))
}
