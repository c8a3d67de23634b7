//! Workers as people see them: list, one whole, drain.

use axum::{
    Json,
    extract::{Query, State},
};
use faena_domain::{Timestamp, WorkerState, WorkerView};
use faena_wire::{Success, WorkerList};
use serde::Deserialize;

use crate::{Api, ApiError, ApiResult, frame::actor, request::Segment};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    state: Option<String>,
    limit: Option<String>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
) -> ApiResult<Json<WorkerList>> {
    let Query(query) = query.map_err(|_| ApiError::invalid_field("query", "only state and limit are known here"))?;
    let mut states = Vec::new();
    for name in query.state.as_deref().unwrap_or("").split(',').filter(|name| !name.is_empty()) {
        let known = WorkerState::ALL.into_iter().find(|state| state.as_str().eq_ignore_ascii_case(name));
        states.push(known.ok_or_else(|| {
            let names = WorkerState::ALL.map(WorkerState::as_str).join(", ");
            ApiError::invalid_field("state", format!("must be some of {names}"))
        })?);
    }
    let limit = match query.limit.as_deref().map(str::parse::<usize>) {
        None => 100,
        Some(Ok(limit @ 1..=1_000)) => limit,
        Some(_) => return Err(ApiError::invalid_field("limit", "must be from 1 to 1000")),
    };
    let mut workers = api.engine.store.worker_list(states, limit).await?;
    for worker in &mut workers {
        freshen(&api, worker);
    }
    let total = workers.len() as u64;
    Ok(Json(WorkerList { workers, total }))
}

pub async fn show(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<WorkerView>> {
    let worker = api.engine.store.worker_get(&key).await?;
    let mut worker = worker.ok_or_else(|| unknown(&key))?;
    freshen(&api, &mut worker);
    Ok(Json(worker))
}

/// What this process knows better than the store does.
fn freshen(api: &Api, worker: &mut WorkerView) {
    let Some(here) = worker.registration_id.parse().ok().and_then(|life| api.engine.workers.find(life)) else { return };
    let now = Timestamp::now();
    worker.state = here.state();
    worker.category = worker.state.category().as_str().into();
    worker.last_seen_at = here.seen_at();
    worker.breaker = here.breaker_state(now).as_str().into();
}

pub async fn drain(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    set_drain(&api, &key, true).await
}

pub async fn resume(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    set_drain(&api, &key, false).await
}

async fn set_drain(api: &Api, key: &str, drain: bool) -> ApiResult<Json<Success>> {
    if !api.engine.worker_drain(key, drain, Some(&actor()), Timestamp::now()).await? {
        return Err(unknown(key));
    }
    Ok(Json(Success { success: true }))
}

pub fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!(
        "there is no living worker {key}; it may have been given up for lost, then it registers again"
    ))
}
