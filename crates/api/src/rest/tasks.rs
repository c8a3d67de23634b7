//! `/tasks`: creates, lists and shows tasks, sends them events, and decides about them.

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
};
use faena_domain::{ErrorCode, FieldError, TaskId, Timestamp, parse::Fields};
use faena_machine::{Event, Input, Outcome, Status, create as first_step};
use faena_store::{NewTask, TaskAnswer, TaskFilter, TaskInput, TaskView as StoredTask};
use serde_json::Value;

use super::{
    machines,
    paging::{ListResponse, Paging, respond},
    task_views::{HistoryView, TaskList, TaskView, TaskWhy},
};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, check, optional_fields, parse_number, read_body, read_query},
};

pub async fn create(
    State(api): State<Api>,
    body: Body,
) -> ApiResult<(StatusCode, [(header::HeaderName, String); 1], Json<TaskView>)> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let machine = fields.text("machine");
    let version = fields.number("version").map(|version| u32::try_from(version).unwrap_or(u32::MAX));
    let title = fields.text("title");
    let correlation = fields.text("correlationId");
    let data: Option<Value> = fields.take("data", "an object");
    let mut errors = fields.finish();
    let machine = machine.unwrap_or_else(|| {
        errors.push(FieldError::new("machine", "is required"));
        String::new()
    });
    for (path, text, max) in [("title", &title, 200), ("correlationId", &correlation, 200)] {
        if text.as_ref().is_some_and(|text| text.is_empty() || text.chars().count() > max) {
            errors.push(FieldError::new(path, format!("must have 1 to {max} characters")));
        }
    }
    check(errors)?;
    let machine = machines::stored(&api, &machine, version).await?;
    let id = TaskId::new();
    let now = Timestamp::now();
    let data = data.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    let first = first_step(&machine.definition, id.to_string(), actor(), data, now)
        .map_err(|error| ApiError::invalid_field("data", error))?;
    let correlation = correlation.unwrap_or_else(|| id.to_string());
    let new = NewTask { id, definition: machine.definition, title, correlation, first };
    api.engine.store.task_create(new, now).await?;
    let location = [(header::LOCATION, format!("/api/v1/tasks/{id}"))];
    Ok((StatusCode::CREATED, location, Json(TaskView::of(stored(&api, &id.to_string()).await?))))
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<TaskList> {
    let (mut filter, mut paging) = (TaskFilter::default(), Paging::<TaskId>::new());
    read_query(query.as_deref(), &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "machine" => filter.machine = Some(value),
            "version" => filter.version = Some(parse_number(&value, i32::MAX as usize)? as u32),
            "state" => filter.state = Some(value),
            "correlationId" => filter.correlation = Some(value),
            "approval" => filter.approval = value.parse().map_err(|_| "must be true or false")?,
            "status" => {
                let status = serde_json::from_value::<Status>(Value::String(value));
                filter.status = Some(status.map_err(|_| "must be running, paused, completed, failed or cancelled")?);
            }
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let (read, total) = api.engine.store.task_list(filter, paging.after(), paging.wanted()?).await?;
    let cursor = |task: &StoredTask| task.task.id.parse().unwrap_or_default();
    let (tasks, figures) = paging.page_of_read(read, total, cursor)?;
    respond(figures, |figures| TaskList::new(tasks.into_iter().map(TaskView::of).collect(), figures))
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskView>> {
    Ok(Json(TaskView::of(stored(&api, &id).await?)))
}

pub async fn history(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<HistoryView>> {
    let (mut after, mut limit) = (0, 100);
    read_query(query.as_deref(), &[], |name, value| {
        match name {
            "after" => after = value.parse().map_err(|_| "must be the number of a record")?,
            "limit" => limit = parse_number(&value, 1_000)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    stored(&api, &id).await?;
    let history = api.engine.store.task_history(parse_id(&id)?, after, limit).await?;
    Ok(Json(HistoryView { history }))
}

pub async fn why(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskWhy>> {
    let task = stored(&api, &id).await?;
    let machine = machines::stored(&api, &task.machine, Some(task.version)).await?;
    Ok(Json(TaskWhy::of(&machine.definition, &task.task, Timestamp::now())))
}

/// Sends an event: `{type, payload, metadata: {traceId, …}}`. The trace id is the id of the event.
pub async fn send(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let task = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let event = parse_event(api.parser().fields(&body)?, task)?;
    let answer = apply(&api, task, Input::Event(event)).await?;
    answered(answer)
}

fn parse_event(mut fields: Fields<'_>, task: TaskId) -> ApiResult<Event> {
    let kind = fields.text("type");
    let payload: Option<Value> = fields.take("payload", "an object");
    let metadata: Option<Value> = fields.take("metadata", "an object");
    let mut errors = fields.finish();
    let metadata = metadata.unwrap_or_default();
    if !metadata.is_null() && !metadata.is_object() {
        errors.push(FieldError::new("metadata", "must be an object"));
    }
    let known = ["taskId", "traceId", "timestamp", "originator"];
    for name in metadata.as_object().into_iter().flatten().map(|(name, _)| name) {
        if !known.contains(&name.as_str()) {
            errors.push(FieldError::new(format!("metadata.{name}"), "is not known"));
        }
    }
    if metadata.get("taskId").is_some_and(|id| id.as_str() != Some(&task.to_string())) {
        errors.push(FieldError::new("metadata.taskId", "is not the task in the path"));
    }
    let trace_id = match metadata.get("traceId") {
        None => uuid::Uuid::now_v7().to_string(),
        Some(Value::String(text)) if (1..=200).contains(&text.len()) && !text.contains(char::is_control) => {
            text.clone()
        }
        Some(_) => {
            errors.push(FieldError::new("metadata.traceId", "must be a text of 1 to 200 characters"));
            String::new()
        }
    };
    if kind.is_none() && !errors.iter().any(|error| error.path == "type") {
        errors.push(FieldError::new("type", "is required"));
    }
    check(errors)?;
    Ok(Event {
        id: trace_id,
        kind: kind.unwrap_or_default(),
        payload: payload.unwrap_or_else(|| Value::Object(serde_json::Map::new())),
        actor: actor(),
        groups: Vec::new(),
        at: Timestamp::now(),
    })
}

pub async fn approve(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    decide(&api, &id, body, true).await
}

pub async fn reject(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    decide(&api, &id, body, false).await
}

async fn decide(api: &Api, id: &str, body: Body, approve: bool) -> ApiResult<Json<TaskAnswer>> {
    let task = parse_id(id)?;
    let body = read_body(api, body).await?;
    let mut fields = optional_fields(api, &body)?;
    let (hash, comment) = (fields.text("hash"), fields.text("comment"));
    let mut errors = fields.finish();
    if comment.as_ref().is_some_and(|comment| comment.chars().count() > 2_000) {
        errors.push(FieldError::new("comment", "must have at most 2000 characters"));
    }
    check(errors)?;
    let input = Input::Decision { actor: actor(), groups: Vec::new(), approve, hash, comment };
    answered(apply(api, task, input).await?)
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let task = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let reason = fields.text("reason");
    check(fields.finish())?;
    answered(apply(&api, task, Input::Cancel { actor: actor(), reason }).await?)
}

pub async fn pause(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskAnswer>> {
    answered(apply(&api, parse_id(&id)?, Input::Pause { actor: actor() }).await?)
}

pub async fn resume(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskAnswer>> {
    answered(apply(&api, parse_id(&id)?, Input::Resume { actor: actor() }).await?)
}

async fn apply(api: &Api, task: TaskId, input: Input) -> ApiResult<TaskAnswer> {
    let answers = api.engine.store.task_apply(vec![TaskInput { task, input }], Timestamp::now()).await?;
    answers.into_iter().next().flatten().ok_or_else(|| unknown(&task.to_string()))
}

fn answered(answer: TaskAnswer) -> ApiResult<Json<TaskAnswer>> {
    let reason = answer.reason.clone().unwrap_or_default();
    match answer.outcome {
        Outcome::Rejected => Err(ApiError::new(ErrorCode::Conflict, reason)),
        Outcome::Invalid => Err(ApiError::invalid_field("event", reason)),
        _ => Ok(Json(answer)),
    }
}

fn parse_id(text: &str) -> ApiResult<TaskId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

async fn stored(api: &Api, id: &str) -> ApiResult<StoredTask> {
    let task = api.engine.store.task_get(parse_id(id)?).await?;
    task.ok_or_else(|| unknown(id))
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("no task {id}"))
}
