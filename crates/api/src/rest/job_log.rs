//! `GET /jobs/:id/log`: the log of a job, page by page.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{JobId, LogEntry};
use faena_store::{LogCursor, LogPage, StoreError};
use faena_wire::JobLog;

use crate::{
    Api, ApiResult,
    request::{Segment, UNKNOWN_PARAMETER, parse_job_id, parse_number, read_query},
};

const DEFAULT_ENTRIES: usize = 100;
const MAX_ENTRIES: usize = 1_000;

pub async fn log(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<JobLog<LogEntry>>> {
    Ok(Json(read(&api, parse_job_id(&id)?, query.as_deref()).await?))
}

/// Reads a page of the log, for REST and gRPC alike.
pub async fn read(api: &Api, id: JobId, query: Option<&str>) -> ApiResult<JobLog<LogEntry>> {
    let (mut limit, mut after) = (DEFAULT_ENTRIES, None);
    read_query(query, &[], |name, value| {
        match name {
            "limit" => limit = parse_number(&value, MAX_ENTRIES)?,
            "cursor" => after = Some(LogCursor::parse(&value).ok_or("is not a cursor of this list")?),
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let page = api.engine.store.job_log(id, after, limit).await?;
    let LogPage { entries, next } = page.ok_or(StoreError::NotFound(id))?;
    Ok(JobLog { entries, next_cursor: next.map(|cursor| cursor.to_string()) })
}
