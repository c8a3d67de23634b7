//! `/tasks`: creates, lists and shows tasks, sends them events, and approves, rejects, cancels, pauses and resumes
//! them.

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{HeaderMap, StatusCode, header},
};
use faena_domain::{
    ErrorCode, FieldError, TaskId, Timestamp,
    parse::{Fields, fingerprint},
};
use faena_machine::{Event, Input, Outcome, Record, Status, create as first_step};
use faena_store::{
    EventQuery, NewTask, StoredEvent, TaskAnswer, TaskFilter, TaskInput, TaskKey, TaskView as StoredTask,
};
use faena_wire::PageInfo;
use serde_json::Value;

use super::{
    machines,
    paging::{ListResponse, Paging, respond},
    task_views::{HistoryView, TaskEvents, TaskList, TaskView, TaskWhy},
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    payloads,
    request::{
        Segment, UNKNOWN_PARAMETER, check, idempotency_key, optional_fields, parse_number, read_body, read_query,
    },
};

pub type Created = (StatusCode, [(header::HeaderName, String); 1], Json<TaskView>);

pub async fn create(State(api): State<Api>, headers: HeaderMap, body: Body) -> ApiResult<Created> {
    let body = read_body(&api, body).await?;
    let (task, existed) = create_from(&api, &headers, &body).await?;
    let location = [(header::LOCATION, format!("/api/v1/tasks/{}", task.id))];
    Ok((if existed { StatusCode::OK } else { StatusCode::CREATED }, location, Json(task)))
}

/// Creates the task of a request. The flag is `true` if a task with its idempotency key already existed.
pub async fn create_from(api: &Api, headers: &HeaderMap, body: &[u8]) -> ApiResult<(TaskView, bool)> {
    let mut fields = api.parser().fields(body)?;
    let machine = fields.text("machine");
    let version = fields.number("version").map(|version| u32::try_from(version).unwrap_or(u32::MAX));
    let title = fields.text("title");
    let correlation = fields.text("correlationId");
    let tags: Vec<String> = fields.list("tags", "a list of strings");
    let key = fields.text("idempotencyKey");
    let data: Option<Value> = fields.take("data", "an object");
    let mut errors = fields.finish();
    let key = idempotency_key(headers, key, &mut errors);
    let machine = machine.unwrap_or_else(|| {
        errors.push(FieldError::new("machine", "is required"));
        String::new()
    });
    for (path, text, max) in
        [("title", &title, 200), ("correlationId", &correlation, 200), ("idempotencyKey", &key, 255)]
    {
        if text.as_ref().is_some_and(|text| text.is_empty() || text.chars().count() > max) {
            errors.push(FieldError::new(path, format!("must have 1 to {max} characters")));
        }
    }
    check_tags(&mut errors, &tags);
    check(errors)?;
    let machine = machines::load(api, &machine, version).await?;
    let id = TaskId::new();
    let now = Timestamp::now();
    let data = data.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    let first = first_step(&machine.definition, id.to_string(), access::task_caller()?, data, now)
        .map_err(|error| ApiError::invalid_field("data", error))?;
    let correlation = correlation.unwrap_or_else(|| id.to_string());
    let new = NewTask { id, definition: machine.definition, title, correlation, tags, first, audit: None };
    let existing = match key {
        Some(key) => create_once(api, TaskKey { key, fingerprint: fingerprint(body) }, new, now).await?,
        None => {
            api.engine.store.task_create(new, now).await?;
            None
        }
    };
    Ok((read_view(api, &existing.unwrap_or(id).to_string()).await?, existing.is_some()))
}

/// Creates a task, unless one was created with the same key. Returns the id of the existing task, if there is one.
async fn create_once(api: &Api, key: TaskKey, new: NewTask, now: Timestamp) -> ApiResult<Option<TaskId>> {
    match api.engine.store.task_create_once(key, new, now).await? {
        Some(existing) if !existing.is_same_request => {
            let message = format!("the idempotency key was used with another body: task {}", existing.id);
            let details = vec![FieldError::new("id", existing.id.to_string())];
            Err(ApiError { details, ..ApiError::new(ErrorCode::Conflict, message) })
        }
        existing => Ok(existing.map(|existing| existing.id)),
    }
}

/// Returns the response to a request that has created a task.
pub async fn created_response(api: &Api, id: TaskId) -> ApiResult<Created> {
    let location = [(header::LOCATION, format!("/api/v1/tasks/{id}"))];
    Ok((StatusCode::CREATED, location, Json(read_view(api, &id.to_string()).await?)))
}

const MAX_TAGS: usize = 32;

fn check_tags(errors: &mut Vec<FieldError>, tags: &[String]) {
    if tags.len() > MAX_TAGS {
        errors.push(FieldError::new("tags", format!("must have at most {MAX_TAGS} entries")));
    }
    for (index, tag) in tags.iter().enumerate() {
        if tag.is_empty() || tag.chars().count() > 100 || tag.contains(char::is_control) {
            let message = "must have 1 to 100 characters and no control characters";
            errors.push(FieldError::new(format!("tags[{index}]"), message));
        }
    }
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<TaskList> {
    let (tasks, page) = find(&api, query.as_deref()).await?;
    respond(page, |page| TaskList::new(tasks, page))
}

/// Returns the page of tasks that a query asks for.
pub async fn find(api: &Api, query: Option<&str>) -> ApiResult<(Vec<TaskView>, PageInfo)> {
    let (mut filter, mut paging) = (TaskFilter::default(), Paging::<TaskId>::new());
    read_query(query, &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        set_filter(&mut filter, name, value)
    })?;
    let (read, total) = api.engine.store.task_list(filter, paging.after(), paging.wanted()?).await?;
    let cursor = |task: &StoredTask| task.task.id.parse().unwrap_or_default();
    let (tasks, page) = paging.page_of_read(read, total, cursor)?;
    Ok((tasks.into_iter().map(TaskView::of).collect(), page))
}

/// Sets one parameter of a task filter, for lists and bulk actions.
pub fn set_filter(filter: &mut TaskFilter, name: &str, value: String) -> Result<(), String> {
    match name {
        "machine" => filter.machine = Some(value),
        "version" => filter.version = Some(parse_number(&value, i32::MAX as usize)? as u32),
        "state" => filter.state = Some(value),
        "tag" => filter.tag = Some(value),
        "correlationId" => filter.correlation = Some(value),
        "approval" => filter.approval = value.parse().map_err(|_| "must be true or false")?,
        "status" => {
            let status = serde_json::from_value::<Status>(Value::String(value));
            filter.status =
                Some(status.map_err(|_| "must be queued, running, paused, completed, failed or cancelled")?);
        }
        _ => return Err(UNKNOWN_PARAMETER.into()),
    }
    Ok(())
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskView>> {
    Ok(Json(read_view(&api, &id).await?))
}

/// Returns a task as the API shows it.
pub async fn read_view(api: &Api, id: &str) -> ApiResult<TaskView> {
    Ok(TaskView::of(load(api, id).await?))
}

pub async fn history(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<HistoryView>> {
    Ok(Json(HistoryView { history: history_of(&api, &id, query.as_deref()).await? }))
}

/// Returns the records of a task that a query asks for.
pub async fn history_of(api: &Api, id: &str, query: Option<&str>) -> ApiResult<Vec<Record>> {
    let (mut after, mut limit) = (0, 100);
    read_query(query, &[], |name, value| {
        match name {
            "after" => after = value.parse().map_err(|_| "must be the number of a record")?,
            "limit" => limit = parse_number(&value, 1_000)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    load(api, id).await?;
    Ok(api.engine.store.task_history(parse_id(id)?, after, limit).await?)
}

pub async fn why(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskWhy>> {
    Ok(Json(explain(&api, &id).await?))
}

/// Returns what a task waits for.
pub async fn explain(api: &Api, id: &str) -> ApiResult<TaskWhy> {
    let mut task = load(api, id).await?;
    task.task.fault = payloads::shown_text(task.task.fault);
    if !payloads::are_visible() {
        // Why an event is deferred depends on its payload, and the hash of the subject of an approval would confirm a
        // guess of that subject. The explanation then says "approve it".
        task.task.deferred.clear();
        task.task.approval.iter_mut().for_each(|approval| approval.hash = "it".into());
    }
    let machine = machines::load(api, &task.machine, Some(task.version)).await?;
    let mut why = TaskWhy::of(&machine.definition, &task.task, Timestamp::now());
    if task.task.status == Status::Queued {
        let position = api.engine.store.task_position(&task.machine, parse_id(id)?).await?;
        why.add_position(&task.machine, position);
    }
    Ok(why)
}

/// Lists the stored events about a task. `GET /events?taskId=` streams them.
pub async fn events(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<TaskEvents>> {
    let found = events_of(&api, &id, query.as_deref()).await?;
    let source = &api.engine.config.outbox.source;
    let events =
        found.iter().map(|event| serde_json::from_str(&event.cloud_event(source).to_json()).unwrap_or_default());
    Ok(Json(TaskEvents { events: events.collect() }))
}

/// Returns the stored events about a task that a query asks for.
pub async fn events_of(api: &Api, id: &str, query: Option<&str>) -> ApiResult<Vec<StoredEvent>> {
    let (mut after, mut limit) = (0, 100);
    read_query(query, &[], |name, value| {
        match name {
            "after" => {
                let number = value.parse().ok().filter(|number| (0..=i64::MAX).contains(number));
                after = number.ok_or("must be the sequence number of an event")?;
            }
            "limit" => limit = parse_number(&value, 1_000)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    load(api, id).await?;
    let query = EventQuery::Subject { id: parse_id(id)?.0, after };
    Ok(api.engine.store.event_list(query, limit).await?)
}

/// Sends an event: `{type, payload, metadata: {traceId, …}}`. The trace id is the id of the event.
pub async fn send(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let body = read_body(&api, body).await?;
    Ok(Json(send_from(&api, &id, &body).await?))
}

/// Sends the event of a request to a task.
pub async fn send_from(api: &Api, id: &str, body: &[u8]) -> ApiResult<TaskAnswer> {
    let task = parse_id(id)?;
    let event = parse_event(api.parser().fields(body)?, task)?;
    apply(api, task, Input::Event(event)).await
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
            errors.push(FieldError::new(format!("metadata.{name}"), "unknown field"));
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
            errors.push(FieldError::new("metadata.traceId", "must be a string of 1 to 200 characters"));
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
        decider: access::task_decider()?,
        at: Timestamp::now(),
    })
}

pub async fn approve(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let body = read_body(&api, body).await?;
    Ok(Json(decide_from(&api, &id, &body, true).await?))
}

pub async fn reject(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let body = read_body(&api, body).await?;
    Ok(Json(decide_from(&api, &id, &body, false).await?))
}

/// Approves or rejects what a task waits for, as the caller of the request, with the hash and comment of the request.
pub async fn decide_from(api: &Api, id: &str, body: &[u8], approve: bool) -> ApiResult<TaskAnswer> {
    let task = parse_id(id)?;
    let mut fields = optional_fields(api, body)?;
    let (hash, comment) = (fields.text("hash"), fields.text("comment"));
    let mut errors = fields.finish();
    if comment.as_ref().is_some_and(|comment| comment.chars().count() > 2_000) {
        errors.push(FieldError::new("comment", "must have at most 2000 characters"));
    }
    check(errors)?;
    let input = Input::Decision { caller: access::task_caller()?, approve, hash, comment };
    apply(api, task, input).await
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<TaskAnswer>> {
    let body = read_body(&api, body).await?;
    Ok(Json(cancel_from(&api, &id, &body).await?))
}

/// Cancels a task for the reason in a request.
pub async fn cancel_from(api: &Api, id: &str, body: &[u8]) -> ApiResult<TaskAnswer> {
    let task = parse_id(id)?;
    let mut fields = optional_fields(api, body)?;
    let reason = fields.text("reason");
    check(fields.finish())?;
    apply(api, task, Input::Cancel { actor: actor(), reason }).await
}

pub async fn pause(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskAnswer>> {
    Ok(Json(pause_by_id(&api, &id).await?))
}

pub async fn pause_by_id(api: &Api, id: &str) -> ApiResult<TaskAnswer> {
    apply(api, parse_id(id)?, Input::Pause { actor: actor() }).await
}

pub async fn resume(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<TaskAnswer>> {
    Ok(Json(resume_by_id(&api, &id).await?))
}

pub async fn resume_by_id(api: &Api, id: &str) -> ApiResult<TaskAnswer> {
    apply(api, parse_id(id)?, Input::Resume { actor: actor() }).await
}

/// Applies an input. Fails if the task rejects it.
async fn apply(api: &Api, task: TaskId, input: Input) -> ApiResult<TaskAnswer> {
    let answers = api.engine.store.task_apply(vec![TaskInput { task, input }], Timestamp::now()).await?;
    into_result(answers.into_iter().next().flatten().ok_or_else(|| unknown(&task.to_string()))?)
}

fn into_result(answer: TaskAnswer) -> ApiResult<TaskAnswer> {
    let reason = answer.reason.clone().unwrap_or_default();
    match answer.outcome {
        Outcome::Rejected => Err(ApiError::new(ErrorCode::Conflict, reason)),
        Outcome::Forbidden => Err(ApiError::new(ErrorCode::Forbidden, reason)),
        Outcome::Invalid => Err(ApiError::invalid_field("event", reason)),
        _ => Ok(answer),
    }
}

pub fn parse_id(text: &str) -> ApiResult<TaskId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

pub async fn load(api: &Api, id: &str) -> ApiResult<StoredTask> {
    let task = api.engine.store.task_get(parse_id(id)?).await?;
    task.ok_or_else(|| unknown(id))
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("no task {id}"))
}
