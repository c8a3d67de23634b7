//! `GET /audit`: who did what.

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::FieldError;
use faena_store::AuditFilter;
use faena_wire::AuditList;

use super::list::form_pairs;
use crate::{Api, ApiError, ApiResult};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<AuditList>> {
    let (filter, limit) = read_query(query.as_deref().unwrap_or(""))?;
    let entries = api.engine.store.audit_list(filter, limit).await?;
    let next = if entries.len() == limit { entries.last().map(|entry| entry.sequence) } else { None };
    Ok(Json(AuditList { entries, next }))
}

fn read_query(query: &str) -> ApiResult<(AuditFilter, usize)> {
    let mut filter = AuditFilter::default();
    let mut limit = 100;
    let mut errors = Vec::new();
    for (name, value) in form_pairs(query) {
        if value.contains(char::is_control) {
            errors.push(FieldError::new(name, "must not contain control characters"));
            continue;
        }
        match name.as_str() {
            "actor" => filter.actor = Some(value),
            "action" => filter.action = Some(value),
            "target" => filter.target = Some(value),
            "before" => match value.parse() {
                Ok(sequence) => filter.before = Some(sequence),
                Err(_) => errors.push(FieldError::new(name, "must be the next of another answer")),
            },
            "limit" => match value.parse() {
                Ok(number @ 1..=1_000) => limit = number,
                _ => errors.push(FieldError::new(name, "must be a number from 1 to 1000")),
            },
            _ => errors.push(FieldError::new(name, "is not a known parameter")),
        }
    }
    if errors.is_empty() { Ok((filter, limit)) } else { Err(ApiError::invalid(errors)) }
}
