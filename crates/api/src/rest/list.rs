//! `GET /jobs`: filters, pages and cursors.

use axum::{
    Json,
    extract::{RawQuery, State},
    http::{HeaderMap, HeaderValue},
};
use faena_domain::{FieldError, JobId, JobState, Priority, Timestamp};
use faena_store::{Filter, JobPage, Page};
use faena_wire::JobList;

use crate::{
    Api, ApiResult,
    request::{CONTROL_CHARACTERS, UNKNOWN_PARAMETER, parse_number, read_query},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<(HeaderMap, Json<JobList>)> {
    let (query, found) = find(&api, query.as_deref()).await?;
    let headers = page_headers(&query, &found);
    let (page, limit) = (query.page_number(), query.limit as u64);
    Ok((headers, Json(JobList { jobs: found.jobs, total: found.total, page, limit, next_cursor: found.next })))
}

/// Returns the headers that describe a page of a list.
pub fn page_headers(query: &Query, found: &JobPage) -> HeaderMap {
    let limit = query.limit as u64;
    let mut headers = HeaderMap::new();
    let mut insert = |name: &'static str, number: u64| headers.insert(name, HeaderValue::from(number));
    insert("x-total-count", found.total);
    insert("x-limit", limit);
    insert("x-total-pages", found.total.div_ceil(limit));
    if let Some(page) = query.page_number() {
        insert("x-page", page);
    }
    if !found.total_is_exact {
        headers.insert("x-total-is-exact", HeaderValue::from_static("false"));
    }
    headers
}

/// Finds the jobs that match a query string.
pub async fn find(api: &Api, query: Option<&str>) -> ApiResult<(Query, JobPage)> {
    let query = parse_query(query, set_filter)?;
    let found = find_page(api, &query).await?;
    Ok((query, found))
}

pub async fn find_page(api: &Api, query: &Query) -> ApiResult<JobPage> {
    let limit = query.limit;
    let page = match (query.cursor, query.page) {
        (Some(id), _) => Page::After { id, limit },
        (None, page) => Page::Offset { offset: (page.unwrap_or(1) - 1).saturating_mul(limit), limit },
    };
    let mut found = api.engine.store.job_list(&query.filter, page).await?;
    found.jobs = found.jobs.into_iter().map(|job| api.shown(job)).collect();
    Ok(found)
}

/// Filter and page of a list of jobs.
pub struct Query {
    pub filter: Filter,
    page: Option<usize>,
    pub limit: usize,
    /// `Some(None)`: from the newest job on.
    cursor: Option<Option<JobId>>,
}

/// Sets one parameter of a filter, or returns why it is rejected.
pub type SetFilter = fn(&mut Filter, &str, String) -> Result<(), String>;

pub fn parse_query(query: Option<&str>, set_filter: SetFilter) -> ApiResult<Query> {
    let mut parsed = Query { filter: Filter::default(), page: None, limit: 20, cursor: None };
    read_query(query, &["status"], |name, value| parsed.set(name, value, set_filter))?;
    Ok(parsed)
}

impl Query {
    /// Returns the number of the page; `None` if the list continues from a cursor.
    pub fn page_number(&self) -> Option<u64> {
        if self.cursor.is_some() { None } else { Some(self.page.unwrap_or(1) as u64) }
    }

    fn set(&mut self, name: &str, value: String, set_filter: SetFilter) -> Result<(), String> {
        match name {
            "page" if self.cursor.is_some() => return Err("cannot be combined with cursor".into()),
            "cursor" if self.page.is_some() => return Err("cannot be combined with page".into()),
            "page" => self.page = Some(parse_number(&value, 1_000_000)?),
            "limit" => self.limit = parse_number(&value, 100)?,
            "cursor" => self.cursor = Some(parse_cursor(&value)?),
            _ => set_filter(&mut self.filter, name, value)?,
        }
        Ok(())
    }
}

/// Parses a cursor; an empty one starts at the first entry.
pub fn parse_cursor<T: std::str::FromStr>(value: &str) -> Result<Option<T>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    value
        .parse()
        .map(Some)
        .map_err(|_| "must be the nextCursor of the previous page, or empty for the first page".into())
}

pub fn parse_time(value: &str) -> Result<Timestamp, String> {
    Timestamp::parse(value).ok_or_else(|| "must be a time like 2026-11-15T20:00:00Z".into())
}

/// Sets one parameter of a job filter, for lists and bulk actions.
pub fn set_filter(filter: &mut Filter, name: &str, value: String) -> Result<(), String> {
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
        "createdAfter" => filter.created_after = Some(parse_time(&value)?),
        "createdBefore" => filter.created_before = Some(parse_time(&value)?),
        "q" if value.trim().is_empty() => return Err("must not be empty".into()),
        "q" => filter.q = Some(value.trim().to_owned()),
        _ => return Err(UNKNOWN_PARAMETER.into()),
    }
    Ok(())
}

/// Sets the parameters of a filter from a body, in which each value must be a string.
pub fn set_from_body(
    fields: serde_json::Map<String, serde_json::Value>,
    errors: &mut Vec<FieldError>,
    mut set: impl FnMut(&str, String) -> Result<(), String>,
) {
    for (name, value) in fields {
        let result = match value {
            serde_json::Value::String(text) if text.contains(char::is_control) => Err(CONTROL_CHARACTERS.into()),
            serde_json::Value::String(text) => set(&name, text),
            _ => Err("must be a string".into()),
        };
        if let Err(message) = result {
            errors.push(FieldError::new(format!("filter.{name}"), message));
        }
    }
}
