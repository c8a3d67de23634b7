//! `/dead-letter`: lists, shows, retries and deletes dead-lettered jobs.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{RawQuery, State},
    http::StatusCode,
};
use faena_domain::{JobId, JobState, Timestamp};
use faena_engine::EngineError;
use faena_store::{Filter, StoreError, Tally};
use faena_wire::{Changed, DeadLetterList, DeadLetterStats, DeadLetterView, QueueCount, ReasonCount, TypeCount};

use super::{
    list::{find_page, parse_query, set_filter},
    paging::{ListResponse, respond},
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, parse_job_id},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<DeadLetterList> {
    let mut query = parse_query(query.as_deref(), set_dead_letter_filter)?;
    query.filter.states = vec![JobState::Failed];
    let found = find_page(&api, &query).await?;
    let page_info = query.page_info(&found);
    let data = found.jobs.into_iter().map(DeadLetterView::new).collect();
    respond(page_info, |page_info| DeadLetterList::new(data, page_info))
}

/// Applies one query parameter to a filter.
///
/// Accepts the parameters of the job list except `status`, and `jobType` as another name for `type`.
pub fn set_dead_letter_filter(filter: &mut Filter, name: &str, value: String) -> Result<(), String> {
    match name {
        "status" => Err(UNKNOWN_PARAMETER.into()),
        "type" | "jobType" if filter.kind.as_ref().is_some_and(|known| *known != value) => {
            Err("type and jobType differ; set only one of them".into())
        }
        "jobType" => set_filter(filter, "type", value),
        _ => set_filter(filter, name, value),
    }
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<DeadLetterView>> {
    let id = parse_job_id(&id)?;
    let store = &api.engine.store;
    let mut job = store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    if job.status != JobState::Failed {
        return Err(not_dead_lettered(id, job.status));
    }
    job.attempts = store.job_attempts(id).await?;
    Ok(Json(DeadLetterView::new(api.with_default_timeout(job))))
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
    let (mut by_type, mut by_queue): (BTreeMap<String, u64>, BTreeMap<String, u64>) = Default::default();
    let mut total = 0;
    for lane in lanes.into_iter().filter(|lane| access::includes_queue(&lane.queue)) {
        let failed = counts.by_lane.get(&(lane.id, Tally::Failed)).map_or(0, |n| u64::try_from(*n).unwrap_or(0));
        if failed > 0 {
            total += failed;
            *by_type.entry(lane.kind).or_default() += failed;
            *by_queue.entry(lane.queue).or_default() += failed;
        }
    }
    Ok(Json(DeadLetterStats {
        total,
        by_type: by_type.into_iter().map(|(job_type, count)| TypeCount { job_type, count }).collect(),
        by_queue: by_queue.into_iter().map(|(queue, count)| QueueCount { queue, count }).collect(),
        by_reason: stats.by_reason.into_iter().map(|(reason, count)| ReasonCount { reason, count }).collect(),
        reason_sample_size: stats.reason_sample_size,
        oldest: stats.oldest.map(|id| id.created_at()),
        newest: stats.newest.map(|id| id.created_at()),
    }))
}
