//! `GET /trace/:correlationId`: everything with one correlation id, as a timeline.

use axum::{Json, extract::State};
use faena_domain::{JobId, TaskId, Trace};

use crate::{Api, ApiError, ApiResult, access, request::Segment};

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Trace>> {
    if id.is_empty() || id.len() > 255 || id.contains(char::is_control) {
        let message = "must have 1 to 255 bytes and no control characters";
        return Err(ApiError::invalid_field("correlationId", message));
    }
    match faena_engine::trace::trace(&*api.engine.store, &id).await?.and_then(access::restrict_trace) {
        Some(trace) => Ok(Json(trace)),
        None => Err(unknown(&api, &id).await?),
    }
}

/// Points out the right correlation id if the caller has used the id of a job or task that has another one.
async fn unknown(api: &Api, id: &str) -> ApiResult<ApiError> {
    let job = match id.parse::<JobId>() {
        Ok(job) => api.engine.store.job_get(job).await?.filter(|job| access::includes_queue(&job.queue)),
        Err(_) => None,
    };
    if let Ok(task) = id.parse::<TaskId>()
        && access::is_unrestricted()
        && let Some(task) = api.engine.store.task_get(task).await?
    {
        return Ok(ApiError::not_found(format!("task {id} has the correlation id \"{}\"", task.correlation)));
    }
    Ok(ApiError::not_found(match job {
        Some(job) => format!("job {id} has the correlation id \"{}\"", job.correlation_id),
        None => format!("no task, job or event has the correlation id \"{id}\"; it may have expired"),
    }))
}
