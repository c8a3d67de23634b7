//! `PATCH /jobs/:id`: changes a job that has not started.

use axum::{Json, body::Body, extract::State};
use faena_domain::{FieldError, JobId, JobView, NewJob, Priority, Timestamp};
use faena_store::{JobPatch, StoreError};

use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, check, parse_job_id, read_body},
};

pub async fn patch(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<JobView>> {
    let id = parse_job_id(&id)?;
    let body = read_body(&api, body).await?;
    let patch = parse_patch(&api, &body)?;
    check_times(&api, id, &patch).await?;
    api.engine.store.job_patch(id, patch, Some(&actor()), Timestamp::now()).await?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    Ok(Json(api.shown(job)))
}

/// Fails if the job would expire before its scheduled time, whichever of the two changes.
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

fn parse_patch(api: &Api, body: &[u8]) -> ApiResult<JobPatch> {
    let mut fields = api.parser().fields(body)?;
    // `null` removes a time; an absent field keeps it.
    let (has_start, has_expiry) = (fields.is_present("scheduledAt"), fields.is_present("expiresAt"));
    let (scheduled_at, expires_at) = (fields.time("scheduledAt"), fields.time("expiresAt"));
    let patch = JobPatch {
        priority: fields.take::<Priority>("priority", "LOW, NORMAL, HIGH or CRITICAL"),
        payload: fields.object("payload"),
        scheduled_at: has_start.then_some(scheduled_at),
        expires_at: has_expiry.then_some(expires_at),
        max_retries: fields.number("maxRetries").map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
        retry_delay_ms: fields.number("retryDelay"),
        timeout_ms: fields.number("timeoutMs"),
    };
    let mut errors = fields.finish();
    // The rules of a new job apply, with the same messages.
    let mut changed = NewJob::new("patched");
    patch.apply_to(&mut changed.options);
    let checked = changed.check(&api.parser().limits).into_iter();
    let checked: Vec<FieldError> =
        checked.filter(|error| !errors.iter().any(|known| known.path == error.path)).collect();
    errors.extend(checked);
    if patch.describe().is_empty() && errors.is_empty() {
        errors.push(FieldError::new(
            "body",
            "nothing to change; set priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay or timeoutMs",
        ));
    }
    check(errors)?;
    Ok(patch)
}
