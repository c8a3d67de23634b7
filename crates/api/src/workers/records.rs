//! `/workers`: lists, shows and drains workers.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{Timestamp, WorkerState, WorkerView};
use faena_wire::{Success, WorkerList};

use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, parse_number, read_query},
};

const MAX_LIMIT: usize = 1_000;

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<WorkerList>> {
    let (mut states, mut limit) = (Vec::new(), 100);
    read_query(query.as_deref(), &[], |name, value| {
        match name {
            "state" => {
                for name in value.split(',').filter(|name| !name.is_empty()) {
                    states.push(parse_state(name)?);
                }
            }
            "limit" => limit = parse_number(&value, MAX_LIMIT)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let mut workers = api.engine.store.worker_list(states, limit).await?;
    for worker in &mut workers {
        refresh(&api, worker);
    }
    let total = workers.len() as u64;
    Ok(Json(WorkerList { workers, total }))
}

fn parse_state(name: &str) -> Result<WorkerState, String> {
    let state = WorkerState::ALL.into_iter().find(|state| state.as_str().eq_ignore_ascii_case(name));
    state.ok_or_else(|| format!("must be one or more of {}", WorkerState::ALL.map(WorkerState::as_str).join(", ")))
}

pub async fn show(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<WorkerView>> {
    let worker = api.engine.store.worker_get(&key).await?;
    let mut worker = worker.ok_or_else(|| unknown(&key))?;
    refresh(&api, &mut worker);
    Ok(Json(worker))
}

/// Updates the view of a worker that is connected to this node: the stored values change in batches and may be older.
fn refresh(api: &Api, worker: &mut WorkerView) {
    let Some(connected) = worker.registration_id.parse().ok().and_then(|id| api.engine.workers.find(id)) else {
        return;
    };
    worker.state = connected.state();
    worker.category = worker.state.category().as_str().into();
    worker.last_seen_at = connected.seen_at();
    worker.breaker = connected.breaker_state(Timestamp::now()).as_str().into();
}

pub async fn drain(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    set_drain(&api, &key, true).await
}

pub async fn resume(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    set_drain(&api, &key, false).await
}

async fn set_drain(api: &Api, key: &str, drain: bool) -> ApiResult<Json<Success>> {
    if !api.engine.set_worker_drain(key, drain, Some(&actor()), Timestamp::now()).await? {
        return Err(unknown(key));
    }
    Ok(Json(Success { success: true }))
}

pub fn unknown(key: &str) -> ApiError {
    ApiError::not_found(format!("no active worker \"{key}\"; a worker that was declared lost must register again"))
}
