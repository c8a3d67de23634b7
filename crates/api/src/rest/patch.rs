//! `PATCH /jobs/:id`: changes a job that has not started.

use axum::{Json, body::Body, extract::State};
use faena_domain::{FieldError, JobId, JobView, NewJob, Priority, Timestamp};
use faena_store::{JobPatch, StoreError};

use crate::{
    Api, ApiError, ApiResult,
    frame::actor,
    request::{Segment, parse_job_id, read_body},
};

pub async fn patch(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<JobView>> {
    let id = parse_job_id(&id)?;
    let body = read_body(&api, body).await?;
    let patch = read_patch(&api, &body)?;
    check_times(&api, id, &patch).await?;
    api.engine.store.job_patch(id, patch, Some(&actor()), Timestamp::now()).await?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    Ok(Json(api.shown(job)))
}

/// A job must not expire before its time has come, whichever of the two is changed.
async fn check_times(api: &Api, id: JobId, patch: &JobPatch) -> ApiResult<()> {
    if patch.scheduled_at.is_none() && patch.expires_at.is_none() {
        return Ok(());
    }
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    let scheduled_at = patch.scheduled_at.unwrap_or(job.scheduled_at);
    let expires_at = patch.expires_at.unwrap_or(job.expires_at);
    match (scheduled_at, expires_at) {
        (Some(start), Some(end)) if end <= start => {
            Err(ApiError::invalid_field("expiresAt", "must be later than scheduledAt"))
        }
        _ => Ok(()),
    }
}

fn read_patch(api: &Api, body: &[u8]) -> ApiResult<JobPatch> {
    let mut fields = api.parser().fields(body)?;
    let clears = |fields: &faena_domain::parse::Fields, name: &str| fields.is_present(name);
    let (schedule_named, expiry_named) = (clears(&fields, "scheduledAt"), clears(&fields, "expiresAt"));
    let scheduled_at = fields.time("scheduledAt");
    let expires_at = fields.time("expiresAt");
    let patch = JobPatch {
        priority: fields.take::<Priority>("priority", "LOW, NORMAL, HIGH or CRITICAL"),
        payload: fields.object("payload"),
        // `null` takes a time away.
        scheduled_at: schedule_named.then_some(scheduled_at),
        expires_at: expiry_named.then_some(expires_at),
        max_retries: fields.number("maxRetries").map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        retry_delay_ms: fields.number("retryDelay"),
        timeout_ms: fields.number("timeoutMs"),
    };
    let mut errors = fields.finish();
    // What would be refused of a new job is refused here, and said in the same words.
    let mut changed = NewJob::new("patched");
    patch.apply_to(&mut changed.options);
    let checked = changed
        .check(&api.parser().limits)
        .into_iter()
        .filter(|fault| !errors.iter().any(|known| known.path == fault.path));
    let checked: Vec<FieldError> = checked.collect();
    errors.extend(checked);
    if patch.describe().is_empty() && errors.is_empty() {
        errors.push(FieldError::new(
            "body",
            "names nothing to change; priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay and timeoutMs can be",
        ));
    }
    if errors.is_empty() { Ok(patch) } else { Err(ApiError::invalid(errors)) }
}
