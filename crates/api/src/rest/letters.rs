//! `/dead-letter`: failed jobs, as people look at them, retry them and put them away.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{RawQuery, State},
    http::{HeaderMap, StatusCode},
};
use faena_domain::{ErrorReason, JobId, JobState, JobView, Timestamp};
use faena_store::{Filter, StoreError, Tally};
use faena_wire::{Changed, DeadLetterList, DeadLetterStats};

use super::list::{Query, find_as, page_headers, read_query_as, set_filter};
use crate::{
    Api, ApiError, ApiResult,
    frame::actor,
    request::{Segment, parse_job_id},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<(HeaderMap, Json<DeadLetterList>)> {
    let mut ask: Query = read_query_as(query.as_deref().unwrap_or(""), set_letter_filter)?;
    ask.filter.states = vec![JobState::Failed];
    let found = find_as(&api, &ask).await?;
    let headers = page_headers(&ask, &found);
    let list = DeadLetterList {
        total: found.total,
        page: ask.page_number(),
        limit: ask.limit as u64,
        total_pages: found.total.div_ceil(ask.limit as u64),
        next_cursor: found.next,
        data: found.jobs,
    };
    Ok((headers, Json(list)))
}

/// The filter of a list of jobs, without the state, with what a failed job says.
pub fn set_letter_filter(filter: &mut Filter, name: &str, value: String) -> Result<(), String> {
    if value.contains(char::is_control) {
        return Err("must not contain control characters".into());
    }
    match name {
        "status" => return Err("is not a known parameter".into()),
        "error" if value.trim().is_empty() => return Err("must not be empty".into()),
        "error" => filter.error = Some(value),
        "reason" => {
            let names = ErrorReason::ALL.map(ErrorReason::as_str).join(", ");
            filter.reason = Some(ErrorReason::parse(&value).ok_or(format!("must be one of {names}"))?);
        }
        _ => set_filter(filter, name, value)?,
    }
    Ok(())
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<JobView>> {
    let id = parse_job_id(&id)?;
    let store = &api.engine.store;
    let mut job = store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    if job.status != JobState::Failed {
        return Err(no_letter(id, job.status));
    }
    job.attempts = store.job_attempts(id).await?;
    Ok(Json(api.shown(job)))
}

pub async fn delete(State(api): State<Api>, Segment(id): Segment) -> ApiResult<StatusCode> {
    let id = parse_job_id(&id)?;
    let deleted = api.engine.store.dead_letter_delete(id, &actor(), Timestamp::now()).await;
    deleted.map_err(|error| letter_error(id, error))?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn retry(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Changed>> {
    let id = parse_job_id(&id)?;
    let now = Timestamp::now();
    let store = &api.engine.store;
    store.dead_letter_retry(id, &actor(), now).await.map_err(|error| letter_error(id, error))?;
    // It is ready at once, unless it waits for a parent that was retried before it.
    let mut status = JobState::Queued;
    for parent in store.job_get(id).await?.map(|job| job.depends_on).unwrap_or_default() {
        if store.job_get(parent).await?.is_some_and(|parent| !parent.status.is_terminal()) {
            status = JobState::Pending;
        }
    }
    api.engine.bus.changed(id, status, None, now);
    Ok(Json(Changed { id, status, retry_count: None, cancel_requested: false }))
}

fn letter_error(id: JobId, error: StoreError) -> ApiError {
    match error {
        StoreError::InvalidTransition { from, .. } => no_letter(id, from),
        other => other.into(),
    }
}

fn no_letter(id: JobId, state: JobState) -> ApiError {
    ApiError::not_found(format!("job {id} is no dead letter: it is {state}, not FAILED"))
}

pub async fn stats(State(api): State<Api>) -> ApiResult<Json<DeadLetterStats>> {
    let store = &api.engine.store;
    let (lanes, counts, stats) = (store.lanes().await?, store.counts().await?, store.dead_letter_stats().await?);
    let (mut by_type, mut by_queue) = (BTreeMap::new(), BTreeMap::new());
    let mut total = 0;
    for lane in lanes {
        let failed = counts.by_lane.get(&(lane.id, Tally::Failed)).map_or(0, |n| u64::try_from(*n).unwrap_or(0));
        if failed > 0 {
            total += failed;
            *by_type.entry(lane.kind).or_default() += failed;
            *by_queue.entry(lane.queue).or_default() += failed;
        }
    }
    Ok(Json(DeadLetterStats {
        total,
        by_type,
        by_queue,
        by_reason: stats.by_reason,
        reasons_of: stats.looked_at,
        oldest: stats.oldest.map(|id| id.created_at()),
        newest: stats.newest.map(|id| id.created_at()),
    }))
}
