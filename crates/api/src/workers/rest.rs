//! `/workers`: lists, shows and drains workers.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{Timestamp, WorkerId, WorkerState, WorkerView};
use faena_wire::{Success, WorkerList};

use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, read_query},
    rest::paging::{ListResponse, Paging, respond},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<WorkerList> {
    let (mut states, mut paging) = (Vec::new(), Paging::of_short_list());
    read_query(query.as_deref(), &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "state" => {
                for name in value.split(',').filter(|name| !name.is_empty()) {
                    states.push(parse_state(name)?);
                }
            }
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let store = &api.engine.store;
    let total = store.worker_total(states.clone()).await?;
    let read = store.worker_list(states, paging.wanted_by_position()?).await?;
    let (mut workers, page_info) = paging.page_by_position(read, total)?;
    complete(&api, &mut workers).await?;
    respond(page_info, |page_info| WorkerList::new(workers, page_info))
}

fn parse_state(name: &str) -> Result<WorkerState, String> {
    let state = WorkerState::ALL.into_iter().find(|state| state.as_str().eq_ignore_ascii_case(name));
    state.ok_or_else(|| format!("must be one or more of {}", WorkerState::ALL.map(WorkerState::as_str).join(", ")))
}

pub async fn show(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<WorkerView>> {
    let worker = api.engine.store.worker_get(&key).await?;
    let mut worker = worker.ok_or_else(|| unknown(&key))?;
    complete(&api, std::slice::from_mut(&mut worker)).await?;
    Ok(Json(worker))
}

/// Adds what this node knows better than the database, and the number of jobs in flight: one query for all workers.
async fn complete(api: &Api, workers: &mut [WorkerView]) -> ApiResult<()> {
    let live = workers.iter().filter(|worker| worker.ended_at.is_none());
    let ids = live.filter_map(|worker| worker.registration_id.parse().ok()).collect();
    let in_flight = api.engine.store.worker_in_flight_counts(ids).await?;
    for worker in workers {
        let id: Option<WorkerId> = worker.registration_id.parse().ok();
        worker.in_flight = Some(id.and_then(|id| in_flight.get(&id).copied()).unwrap_or(0));
        api.engine.refresh_worker(worker, Timestamp::now());
    }
    Ok(())
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
