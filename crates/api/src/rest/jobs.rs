//! One job: create, show, delete, cancel, retry.

use std::time::Duration;

use axum::{
    Json,
    body::{Body, Bytes, to_bytes},
    extract::{FromRequestParts, Path, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use faena_domain::{FieldError, JobId, JobState, JobView, NewJob, Timestamp, Why};
use faena_engine::CancelResult;
use faena_store::StoreError;
use faena_wire::{Changed, Created, CreatedBatch, Success};
use sha2::{Digest, Sha256};

use super::submit::{read_batch, read_single};
use crate::{
    Api, ApiError,
    fields::body_object,
    frame::{self, Correlation},
};

pub type Answer<T> = Result<T, ApiError>;

pub async fn create(State(api): State<Api>, headers: HeaderMap, body: Body) -> Answer<Response> {
    let body = read_body(&api, body).await?;
    let (created, existed) = submit_one(&api, &headers, &body).await?;
    let status = if existed { StatusCode::OK } else { StatusCode::CREATED };
    let location = [(header::LOCATION, format!("/api/v1/jobs/{}", created.id))];
    Ok((status, location, Json(created)).into_response())
}

/// Stores the one job of a body. `true`: it was there already.
pub async fn submit_one(api: &Api, headers: &HeaderMap, body: &Bytes) -> Answer<(Created, bool)> {
    let correlation = frame::correlation();
    // A request that came without a correlation id starts something of its own: its job's id is its correlation id.
    let id = match &correlation {
        Correlation::Made(id) => JobId(*id),
        Correlation::Given(_) => JobId::new(),
    };
    let mut faults = Vec::new();
    let mut job =
        read_single(body_object(body, api.body_bytes)?, id, &api.limits, &api.engine.webhooks.rule, &mut faults);
    from_headers(headers, &mut job, body, &mut faults);
    if !faults.is_empty() {
        return Err(ApiError::invalid(faults));
    }
    let mut correlation_id = correlate(&mut job, &correlation);
    let stored = api.engine.submit(vec![job], Timestamp::now()).await?;
    let stored = stored.into_iter().next().ok_or(StoreError::Broken("a job was not stored".into()))?;
    api.engine.bus.changed(stored.id, stored.status, None, stored.created_at);
    if stored.existed
        && let Some(first) = api.engine.store.job_get(stored.id).await?
    {
        correlation_id = first.correlation_id;
    }
    let created = Created { id: stored.id, status: stored.status, created_at: stored.created_at, correlation_id };
    Ok((created, stored.existed))
}

pub async fn create_batch(State(api): State<Api>, headers: HeaderMap, body: Body) -> Answer<Response> {
    if headers.contains_key("idempotency-key") {
        let message = "is for single jobs; give each job of a batch an idempotencyKey of its own";
        return Err(ApiError::invalid(vec![FieldError::new("Idempotency-Key", message)]));
    }
    let body = read_bytes(body, api.batch_bytes).await?;
    let ids = submit_batch(&api, &body).await?;
    Ok((StatusCode::CREATED, Json(CreatedBatch { ids })).into_response())
}

/// Stores all jobs of a body, or none.
pub async fn submit_batch(api: &Api, body: &Bytes) -> Answer<Vec<JobId>> {
    let mut jobs = read_batch(body_object(body, api.batch_bytes)?, &api.limits, &api.engine.webhooks.rule)?;
    let correlation = Correlation::Given(frame::correlation().text());
    for job in &mut jobs {
        if job.options.idempotency_key.is_some() {
            job.fingerprint = Some(fingerprint_of(job));
        }
        correlate(job, &correlation);
    }
    let stored = api.engine.submit(jobs, Timestamp::now()).await?;
    Ok(stored.into_iter().map(|job| job.id).collect())
}

/// The idempotency key and the trace of the request hold for its job.
fn from_headers(headers: &HeaderMap, job: &mut NewJob, body: &Bytes, faults: &mut Vec<FieldError>) {
    if let Some(value) = headers.get("idempotency-key") {
        match value.to_str() {
            Ok(key) if job.options.idempotency_key.as_ref().is_some_and(|known| known != key) => {
                faults.push(FieldError::new(
                    "idempotencyKey",
                    "differs from the header Idempotency-Key; give one of them",
                ));
            }
            Ok(key) if !key.is_empty() && key.len() <= 255 => job.options.idempotency_key = Some(key.to_owned()),
            _ => faults.push(FieldError::new("Idempotency-Key", "must have 1 to 255 visible characters")),
        }
    }
    if job.options.idempotency_key.is_some() {
        job.fingerprint = Some(Sha256::digest(body).into());
    }
    if let Some(trace) =
        headers.get("traceparent").and_then(|value| value.to_str().ok()).filter(|text| text.len() <= 100)
    {
        job.options.traceparent = Some(trace.to_owned());
    }
}

/// Of a job inside a batch there is no body of its own; what counts is what it asks for. The ids that its refs have become
/// are new with every request, so the refs themselves stand for them.
fn fingerprint_of(job: &NewJob) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut options = job.options.clone();
    options.depends_on.truncate(options.depends_on.len().saturating_sub(job.depends_on_refs.len()));
    let options = serde_json::to_string(&options).unwrap_or_default();
    let refs = serde_json::to_string(&job.depends_on_refs).unwrap_or_default();
    for part in [&job.kind, &job.queue, job.priority.as_str(), &job.payload, &options, &refs] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// What the body says goes before the header; without both, the job stands for itself.
fn correlate(job: &mut NewJob, correlation: &Correlation) -> String {
    if job.correlation_id.is_none()
        && let Correlation::Given(text) = correlation
    {
        job.correlation_id = Some(text.clone());
    }
    job.correlation_id.clone().unwrap_or_else(|| job.id.to_string())
}

pub async fn read_body(api: &Api, body: Body) -> Answer<Bytes> {
    read_bytes(body, api.body_bytes).await
}

/// How long a caller may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

async fn read_bytes(body: Body, limit: usize) -> Answer<Bytes> {
    match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.to_string().contains("length limit") => Err(ApiError::too_large(limit)),
        Ok(Err(_)) => Err(ApiError::invalid(vec![FieldError::new("body", "ended early")])),
        Err(_) => Err(ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            code: "REQUEST_TIMEOUT",
            message: format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs()),
            details: Vec::new(),
        }),
    }
}

/// The variable part of a path. One that is no text is answered like every other mistake.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Answer<Segment> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Segment(text)),
            Err(_) => Err(ApiError::invalid(vec![FieldError::new("path", "must be UTF-8")])),
        }
    }
}

pub fn parse_id(text: &str) -> Answer<JobId> {
    text.parse().map_err(|_| ApiError::invalid(vec![FieldError::new("id", "must be a UUID")]))
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> Answer<Json<JobView>> {
    let id = parse_id(&id)?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    Ok(Json(api.shown(job)))
}

pub async fn why(State(api): State<Api>, Segment(id): Segment) -> Answer<Json<Why>> {
    let id = parse_id(&id)?;
    Ok(Json(api.engine.why(id, Timestamp::now()).await?.ok_or(StoreError::NotFound(id))?))
}

pub async fn delete(State(api): State<Api>, Segment(id): Segment) -> Answer<Json<Success>> {
    api.engine.store.job_delete(parse_id(&id)?, Some(&frame::actor()), Timestamp::now()).await?;
    Ok(Json(Success { success: true }))
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment) -> Answer<Response> {
    let id = parse_id(&id)?;
    let answer = api.engine.cancel(id, "cancelled by request", &frame::actor(), Timestamp::now()).await?;
    Ok(match answer {
        CancelResult::Cancelled => {
            Json(Changed { id, status: JobState::Cancelled, retry_count: None, cancel_requested: false })
                .into_response()
        }
        CancelResult::Asked { state } => {
            let body = Changed { id, status: state, retry_count: None, cancel_requested: true };
            (StatusCode::ACCEPTED, Json(body)).into_response()
        }
    })
}

pub async fn retry(State(api): State<Api>, Segment(id): Segment) -> Answer<Json<Changed>> {
    let id = parse_id(&id)?;
    let now = Timestamp::now();
    api.engine.store.job_retry(id, Some(&frame::actor()), now).await?;
    api.engine.bus.changed(id, JobState::Pending, None, now);
    Ok(Json(Changed { id, status: JobState::Pending, retry_count: Some(0), cancel_requested: false }))
}
