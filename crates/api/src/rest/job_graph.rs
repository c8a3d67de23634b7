//! `GET /jobs/:id/dependencies`: the jobs that a job depends on, and those that depend on it.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::JobGraph;
use faena_store::StoreError;

use crate::{
    Api, ApiResult, access,
    request::{Segment, UNKNOWN_PARAMETER, parse_job_id, parse_number, read_query},
};

const DEFAULT_JOBS: usize = 60;
const MAX_JOBS: usize = 200;

pub async fn show(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<JobGraph>> {
    let (id, mut limit) = (parse_job_id(&id)?, DEFAULT_JOBS);
    read_query(query.as_deref(), &[], |name, value| {
        match name {
            "limit" => limit = parse_number(&value, MAX_JOBS)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let graph = api.engine.store.job_graph(id, access::queues()?, limit).await?;
    Ok(Json(graph.ok_or(StoreError::NotFound(id))?))
}
