//! `GET /audit`: the audit log.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_store::AuditFilter;
use faena_wire::AuditList;

use crate::{
    Api, ApiResult,
    request::{UNKNOWN_PARAMETER, parse_number, read_query},
};

/// Lists entries, newest first. The `next` of a full page is the `before` of the following page.
pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<AuditList>> {
    let mut filter = AuditFilter::default();
    let mut limit = 100;
    read_query(query.as_deref(), &[], |name, value| {
        match name {
            "actor" => filter.actor = Some(value),
            "action" => filter.action = Some(value),
            "target" => filter.target = Some(value),
            "before" => filter.before = Some(value.parse().map_err(|_| "must be the next of the previous page")?),
            "limit" => limit = parse_number(&value, 1_000)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let entries = api.engine.store.audit_list(filter, limit).await?;
    let next = if entries.len() == limit { entries.last().map(|entry| entry.sequence) } else { None };
    Ok(Json(AuditList { entries, next }))
}
