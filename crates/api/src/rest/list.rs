//! `GET /jobs`: filters, pages, cursors.

use std::collections::HashSet;

use axum::{
    Json,
    extract::{RawQuery, State},
    http::{HeaderMap, HeaderValue},
};
use faena_domain::{FieldError, JobId, JobState, Priority, Timestamp};
use faena_store::{Filter, JobPage, Page};
use faena_wire::JobList;

use crate::{Api, ApiError, ApiResult};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<(HeaderMap, Json<JobList>)> {
    let (ask, found) = find(&api, query.as_deref().unwrap_or("")).await?;
    let headers = page_headers(&ask, &found);
    let (page, limit) = (ask.page_number(), ask.limit as u64);
    Ok((headers, Json(JobList { jobs: found.jobs, total: found.total, page, limit, next_cursor: found.next })))
}

/// What the headers of a list tell.
pub fn page_headers(ask: &Query, found: &JobPage) -> HeaderMap {
    let limit = ask.limit as u64;
    let mut headers = HeaderMap::new();
    let mut put = |name: &'static str, number: u64| headers.insert(name, HeaderValue::from(number));
    put("x-total-count", found.total);
    put("x-limit", limit);
    put("x-total-pages", found.total.div_ceil(limit));
    if let Some(page) = ask.page_number() {
        put("x-page", page);
    }
    if !found.total_is_exact {
        headers.insert("x-total-is-exact", HeaderValue::from_static("false"));
    }
    headers
}

/// The jobs that a query asks for.
pub async fn find(api: &Api, query: &str) -> ApiResult<(Query, JobPage)> {
    let ask = read_query_as(query, set_filter)?;
    let found = find_as(api, &ask).await?;
    Ok((ask, found))
}

pub async fn find_as(api: &Api, ask: &Query) -> ApiResult<JobPage> {
    let page = match (ask.cursor, ask.page) {
        (Some(id), _) => Page::After { id, limit: ask.limit },
        (None, page) => Page::Offset { offset: (page.unwrap_or(1) - 1).saturating_mul(ask.limit), limit: ask.limit },
    };
    let mut found = api.engine.store.job_list(&ask.filter, page).await?;
    found.jobs = found.jobs.into_iter().map(|job| api.shown(job)).collect();
    Ok(found)
}

pub struct Query {
    pub filter: Filter,
    page: Option<usize>,
    pub limit: usize,
    /// `Some(None)`: from the newest on.
    cursor: Option<Option<JobId>>,
}

type SetFilter = fn(&mut Filter, &str, String) -> Result<(), String>;

pub fn read_query_as(query: &str, set: SetFilter) -> Result<Query, ApiError> {
    let mut ask = Query { filter: Filter::default(), page: None, limit: 20, cursor: None };
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for (name, value) in form_pairs(query) {
        if !seen.insert(name.clone()) && name != "status" {
            errors.push(FieldError::new(name, "is given twice"));
        } else if let Err(message) = ask.set(&name, value, set) {
            errors.push(FieldError::new(name, message));
        }
    }
    if ask.page.is_some() && ask.cursor.is_some() {
        errors.push(FieldError::new("page", "does not go with cursor"));
    }
    if errors.is_empty() { Ok(ask) } else { Err(ApiError::invalid(errors)) }
}

impl Query {
    /// `None`: it goes by a cursor.
    pub fn page_number(&self) -> Option<u64> {
        if self.cursor.is_some() { None } else { Some(self.page.unwrap_or(1) as u64) }
    }

    fn set(&mut self, name: &str, value: String, set: SetFilter) -> Result<(), String> {
        let number = |value: &str, max: usize| {
            value
                .parse::<usize>()
                .ok()
                .filter(|n| (1..=max).contains(n))
                .ok_or(format!("must be a number from 1 to {max}"))
        };
        match name {
            "page" => self.page = Some(number(&value, 1_000_000)?),
            "limit" => self.limit = number(&value, 100)?,
            "cursor" if value.is_empty() => self.cursor = Some(None),
            "cursor" => {
                let id = value.parse().map_err(|_| "must be the nextCursor of another answer, or empty to begin")?;
                self.cursor = Some(Some(id));
            }
            _ => set(&mut self.filter, name, value)?,
        }
        Ok(())
    }
}

/// Also the way bulk actions read their filter.
pub fn set_filter(filter: &mut Filter, name: &str, value: String) -> Result<(), String> {
    if value.chars().any(char::is_control) {
        return Err("must not contain control characters".into());
    }
    let time = |value: &str| Timestamp::parse(value).ok_or("must be a time like 2026-11-15T20:00:00Z".to_owned());
    // No name, tag or key has any, and PostgreSQL cannot even be asked for some.
    if value.contains(char::is_control) {
        return Err("must not contain control characters".into());
    }
    match name {
        "status" => {
            for part in value.split(',') {
                let state: JobState = part
                    .parse()
                    .map_err(|()| format!("must be one of {}", JobState::ALL.map(JobState::as_str).join(", ")))?;
                filter.states.push(state);
            }
        }
        "priority" => {
            let priority: Priority = value.parse().map_err(|()| "must be LOW, NORMAL, HIGH or CRITICAL")?;
            filter.priority = Some(priority);
        }
        "type" => filter.kind = Some(value),
        "queue" => filter.queue = Some(value),
        "tag" => filter.tag = Some(value),
        "correlationId" => filter.correlation_id = Some(value),
        "scheduleId" => filter.schedule_id = Some(value),
        "createdAfter" => filter.created_after = Some(time(&value)?),
        "createdBefore" => filter.created_before = Some(time(&value)?),
        "q" if value.trim().is_empty() => return Err("must not be empty".into()),
        "q" => filter.q = Some(value.trim().to_owned()),
        _ => return Err("is not a known parameter".into()),
    }
    Ok(())
}

pub fn form_pairs(query: &str) -> Vec<(String, String)> {
    url::form_urlencoded::parse(query.as_bytes()).into_owned().collect()
}
