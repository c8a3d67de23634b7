//! `/dead-letter`: lists, shows, retries and deletes dead-lettered jobs.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{RawQuery, State},
    http::{HeaderMap, StatusCode},
};
use faena_domain::{ErrorReason, JobId, JobState, JobView, Timestamp};
use faena_engine::EngineError;
use faena_store::{Filter, StoreError, Tally};
use faena_wire::{Changed, DeadLetterList, DeadLetterStats};

use super::list::{find_page, page_headers, parse_query, set_filter};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, parse_job_id},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<(HeaderMap, Json<DeadLetterList>)> {
    let mut query = parse_query(query.as_deref(), set_dead_letter_filter)?;
    query.filter.states = vec![JobState::Failed];
    let found = find_page(&api, &query).await?;
    let headers = page_headers(&query, &found);
    let list = DeadLetterList {
        total: found.total,
        page: query.page_number(),
        limit: query.limit as u64,
        total_pages: found.total.div_ceil(query.limit as u64),
        next_cursor: found.next,
        data: found.jobs,
    };
    Ok((headers, Json(list)))
}

/// Sets one parameter of a filter: those of a list of jobs without the state, and those about errors.
pub fn set_dead_letter_filter(filter: &mut Filter, name: &str, value: String) -> Result<(), String> {
    match name {
        "status" => return Err(UNKNOWN_PARAMETER.into()),
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
        return Err(not_dead_lettered(id, job.status));
    }
    job.attempts = store.job_attempts(id).await?;
    Ok(Json(api.shown(job)))
}

pub async fn delete(State(api): State<Api>, Segment(id): Segment) -> ApiResult<StatusCode> {
    let id = parse_job_id(&id)?;
    let deleted = api.engine.store.dead_letter_delete(id, &actor(), Timestamp::now()).await;
    deleted.map_err(|error| dead_letter_error(id, error))?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn retry(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Changed>> {
    let id = parse_job_id(&id)?;
    let now = Timestamp::now();
    let retried = api.engine.retry_dead_letter(id, &actor(), now).await;
    let status = retried.map_err(|error| dead_letter_error(id, error))?;
    Ok(Json(Changed { id, status, retry_count: None, cancel_requested: false }))
}

fn dead_letter_error(id: JobId, error: impl Into<EngineError>) -> ApiError {
    match error.into() {
        EngineError::Store(StoreError::InvalidTransition { from, .. }) => not_dead_lettered(id, from),
        other => other.into(),
    }
}

fn not_dead_lettered(id: JobId, state: JobState) -> ApiError {
    ApiError::not_found(format!("job {id} is not dead-lettered ({state})"))
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
