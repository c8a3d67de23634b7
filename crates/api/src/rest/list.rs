//! `GET /jobs`: filters, pages and cursors.

use axum::extract::{RawQuery, State};
use faena_domain::{ErrorReason, FieldError, JobState, Priority, Timestamp};
use faena_store::{Cursor, Filter, JobPage, Order, Page, Sort, SortBy, Start};
use faena_wire::{JobList, PageInfo};
use serde_json::{Map, Value};

use super::paging::{ListResponse, Paging, respond};
use crate::{
    Api, ApiResult, access,
    request::{CONTROL_CHARACTERS, UNKNOWN_PARAMETER, read_query},
};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<JobList> {
    let (query, found) = find(&api, query.as_deref()).await?;
    let page_info = query.page_info(&found);
    respond(page_info, |page_info| JobList::new(found.jobs, page_info))
}

/// Finds the jobs that match a query string.
pub async fn find(api: &Api, query: Option<&str>) -> ApiResult<(Query, JobPage)> {
    let query = parse_query(query, set_filter)?;
    let found = find_page(api, &query).await?;
    Ok((query, found))
}

pub async fn find_page(api: &Api, query: &Query) -> ApiResult<JobPage> {
    let start = match query.paging.cursor() {
        Some(cursor) => Start::After(cursor),
        None => Start::Offset(query.paging.offset()?),
    };
    let page = Page { start, limit: query.paging.limit, sort: query.sort };
    let mut filter = query.filter.clone();
    access::restrict(&mut filter)?;
    let mut found = api.engine.store.job_list(&filter, page).await?;
    found.jobs = found.jobs.into_iter().map(|job| api.with_default_timeout(job)).collect();
    Ok(found)
}

/// Filter, order and page of a list of jobs.
pub struct Query {
    pub filter: Filter,
    paging: Paging<Cursor>,
    sort: Sort,
}

/// Sets one parameter of a filter, or returns why it is rejected.
pub type SetFilter = fn(&mut Filter, &str, String) -> Result<(), String>;

/// Parameters of a filter that may have several values.
pub const REPEATABLE: [&str; 2] = ["status", "priority"];

pub fn parse_query(query: Option<&str>, set_filter: SetFilter) -> ApiResult<Query> {
    let mut parsed = Query { filter: Filter::default(), paging: Paging::new(), sort: Sort::default() };
    read_query(query, &REPEATABLE, |name, value| parsed.set(name, value, set_filter))?;
    Ok(parsed)
}

impl Query {
    pub fn page_info(&self, found: &JobPage) -> PageInfo {
        PageInfo {
            is_partial: found.is_partial,
            sort_is_exact: found.sort_is_exact,
            ..self.paging.page_info(found.total, found.total_is_exact, found.next)
        }
    }

    fn set(&mut self, name: &str, value: String, set_filter: SetFilter) -> Result<(), String> {
        if self.paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "sort" => self.sort.by = parse_sort(&value)?,
            "order" => self.sort.order = parse_order(&value)?,
            _ => set_filter(&mut self.filter, name, value)?,
        }
        Ok(())
    }
}

fn parse_sort(value: &str) -> Result<SortBy, String> {
    Ok(match value {
        "created" | "createdAt" => SortBy::Created,
        "updated" | "updatedAt" => SortBy::Updated,
        "scheduled" | "scheduledAt" => SortBy::Scheduled,
        "priority" => SortBy::Priority,
        _ => return Err("must be created, updated, scheduled or priority".into()),
    })
}

fn parse_order(value: &str) -> Result<Order, String> {
    match value.to_ascii_lowercase().as_str() {
        "asc" => Ok(Order::Asc),
        "desc" => Ok(Order::Desc),
        _ => Err("must be asc or desc".into()),
    }
}

pub fn parse_time(value: &str) -> Result<Timestamp, String> {
    Timestamp::parse(value).ok_or_else(|| format!("must be {}", Timestamp::EXPECTED))
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
            for part in value.split(',') {
                let priority: Priority = part.parse().map_err(|()| "must be LOW, NORMAL, HIGH or CRITICAL")?;
                filter.priorities.push(priority);
            }
        }
        "type" => filter.kind = Some(value),
        "name" => filter.name = Some(value),
        "workerId" => filter.worker_id = Some(value),
        "queue" => filter.queue = Some(value),
        "tag" => filter.tag = Some(value),
        "correlationId" => filter.correlation_id = Some(value),
        "scheduleId" => filter.schedule_id = Some(value),
        "createdAfter" => filter.created_after = Some(parse_time(&value)?),
        "createdBefore" => filter.created_before = Some(parse_time(&value)?),
        "q" if value.trim().is_empty() => return Err("must not be empty".into()),
        "q" => filter.q = Some(value.trim().to_owned()),
        "error" if value.trim().is_empty() => return Err("must not be empty".into()),
        "error" => filter.error = Some(value),
        "payload" if value.trim().is_empty() => return Err("must not be empty".into()),
        "payload" => filter.payload = Some(value),
        "reason" => {
            let names = ErrorReason::ALL.map(ErrorReason::as_str).join(", ");
            filter.reason = Some(ErrorReason::parse(&value).ok_or(format!("must be one of {names}"))?);
        }
        _ => return Err(UNKNOWN_PARAMETER.into()),
    }
    Ok(())
}

/// Sets the parameters of a filter from a body. A value is a string, a time in milliseconds, or a list of strings if it can be repeated.
pub fn set_from_body(
    fields: Map<String, Value>,
    errors: &mut Vec<FieldError>,
    mut set: impl FnMut(&str, String) -> Result<(), String>,
) {
    for (name, value) in fields {
        let result = match value {
            Value::Array(values) if REPEATABLE.contains(&name.as_str()) => {
                values.into_iter().try_for_each(|value| set_value(&name, value, &mut set))
            }
            value => set_value(&name, value, &mut set),
        };
        if let Err(message) = result {
            errors.push(FieldError::new(format!("filter.{name}"), message));
        }
    }
}

fn set_value(name: &str, value: Value, set: &mut impl FnMut(&str, String) -> Result<(), String>) -> Result<(), String> {
    match value {
        Value::String(text) if text.contains(char::is_control) => Err(CONTROL_CHARACTERS.into()),
        Value::String(text) => set(name, text),
        Value::Number(ms) if name.starts_with("created") || name.starts_with("moved") => set(name, ms.to_string()),
        _ => Err("must be a string".into()),
    }
}
