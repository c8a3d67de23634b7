//! `PATCH /jobs/:id`: changes a waiting job, which is `PENDING`, `QUEUED` or `RETRYING`.

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
    Ok(Json(api.with_default_timeout(job)))
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
    // `null` removes a value; an absent field keeps it.
    let (has_start, has_expiry) = (fields.is_present("scheduledAt"), fields.is_present("expiresAt"));
    let (scheduled_at, expires_at) = (fields.time("scheduledAt"), fields.time("expiresAt"));
    let (has_name, has_webhook, has_tags) =
        (fields.is_present("name"), fields.is_present("webhookUrl"), fields.is_present("tags"));
    let webhook_url = fields.text("webhookUrl");
    api.parser().check_webhook_url(&mut fields, webhook_url.as_deref());
    let patch = JobPatch {
        priority: fields.take::<Priority>("priority", "LOW, NORMAL, HIGH or CRITICAL"),
        payload: fields.object("payload"),
        scheduled_at: has_start.then_some(scheduled_at),
        expires_at: has_expiry.then_some(expires_at),
        max_retries: fields.number("maxRetries").map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
        retry_delay_ms: fields.number("retryDelay"),
        timeout_ms: fields.number("timeoutMs"),
        name: Some(fields.text("name")).filter(|_| has_name),
        webhook_url: Some(webhook_url).filter(|_| has_webhook),
        tags: Some(fields.list("tags", "a list of strings")).filter(|_| has_tags),
    };
    let mut errors = fields.finish();
    // Checks the patched fields with the rules, and the messages, for a new job.
    let mut patched = NewJob::new("patched");
    patch.apply_to(&mut patched.options);
    let rule_errors = patched.check(&api.parser().limits).into_iter();
    let rule_errors: Vec<FieldError> =
        rule_errors.filter(|error| !errors.iter().any(|known| known.path == error.path)).collect();
    errors.extend(rule_errors);
    if patch.describe().is_empty() && errors.is_empty() {
        errors.push(FieldError::new(
            "body",
            "nothing to change; set name, priority, payload, tags, scheduledAt, expiresAt, maxRetries, retryDelay, timeoutMs or webhookUrl",
        ));
    }
    check(errors)?;
    Ok(patch)
}
