//! `PATCH /jobs/:id`: changes a job that has not started.

use axum::{
    Json,
    body::Body,
    extract::{Path, State},
};
use faena_domain::{Fault, JobView, Priority, RetryPolicy, Timestamp};
use faena_store::{JobPatch, StoreError};

use super::jobs::{Answer, parse_id, read_body};
use crate::{Api, ApiError, fields::body_object};

pub async fn patch(State(api): State<Api>, Path(id): Path<String>, body: Body) -> Answer<Json<JobView>> {
    let id = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let patch = read_patch(&api, &body)?;
    api.engine.store.job_patch(id, patch, Timestamp::now()).await?;
    let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    Ok(Json(job))
}

fn read_patch(api: &Api, body: &[u8]) -> Answer<JobPatch> {
    let mut fields = body_object(body, api.body_bytes)?;
    let clears = |fields: &crate::fields::Fields, name: &str| fields.is_present(name);
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
    let mut faults = fields.finish();
    let mut retry = RetryPolicy::default();
    retry.max_retries = patch.max_retries.unwrap_or(retry.max_retries);
    retry.retry_delay_ms = patch.retry_delay_ms.unwrap_or(retry.retry_delay_ms);
    retry.check(&api.limits, &mut faults);
    if patch.timeout_ms == Some(0) {
        faults.push(Fault::new("timeoutMs", "must be at least 1"));
    }
    if patch.describe().is_empty() && faults.is_empty() {
        faults.push(Fault::new(
            "body",
            "names nothing to change; priority, payload, scheduledAt, expiresAt, maxRetries, retryDelay and timeoutMs can be",
        ));
    }
    if faults.is_empty() { Ok(patch) } else { Err(ApiError::invalid(faults)) }
}
