//! Actions on many tasks: `POST /tasks/bulk/…` and `POST /machines/:name/migrate`.
//!
//! They are bulk actions like those on jobs (`bulk.rs`): counted first, run in small transactions that store their progress, at a
//! rate if one is given, and continued by another node after a crash.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    body::Body,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{BulkId, FieldError, Timestamp, parse::Fields};
use faena_machine::{Definition, Input, Migration, Outcome, Status, step};
use faena_store::{BulkWork, COUNT_LIMIT, NewBulk, TaskAction, TaskBulk, TaskFilter, TaskView as StoredTask};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use super::{
    bulk::{MAX_PER_SECOND, launch, parse_per_second},
    machines, tasks,
};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{CONTROL_CHARACTERS, Segment, check, read_body},
};

/// Number of matching tasks that the response shows.
const SAMPLE: usize = 10;
/// Number of tasks that a dry run of a migration tries.
const TRIED: usize = 1_000;
/// Maximum number of refusals that the response shows.
const REFUSED: usize = 20;

/// Response to a bulk action on tasks.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskBulkResponse {
    /// Id under `/api/v1/bulk`; absent if there was nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<BulkId>,
    pub dry_run: bool,
    /// Tasks that match and have not ended.
    pub matched: u64,
    /// Whether `matched` is exact; otherwise there are more.
    pub matched_is_exact: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
    pub done: u64,
    /// Tasks that changed meanwhile, or refused the action.
    pub skipped: u64,
    /// The newest matching tasks.
    pub sample: Vec<TaskExample>,
}

/// A task that a bulk action matches.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskExample {
    pub id: String,
    pub machine: String,
    pub version: u32,
    pub state: String,
    pub status: Status,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

/// Response to a migration.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigrationResponse {
    /// Id under `/api/v1/bulk`; absent if there was nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<BulkId>,
    pub dry_run: bool,
    pub from: u32,
    pub to: u32,
    /// Tasks of the old version that have not ended.
    pub matched: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
    /// The states of the matched tasks before the migration.
    pub states: Vec<MigratedState>,
    /// Matched tasks, newest first, on which the migration was tried without changing them.
    pub tried: u64,
    /// Tried tasks that cannot move.
    pub refused: u64,
    /// Some of the tasks that cannot move, with the reason.
    pub refusals: Vec<Refusal>,
    pub done: u64,
    /// Tasks that keep their version: they ended or changed meanwhile, or cannot move.
    pub skipped: u64,
}

/// The tasks in one state.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct MigratedState {
    pub state: String,
    pub tasks: u64,
    /// The state that they move to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Why they keep their version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A task that cannot move.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    pub id: String,
    pub state: String,
    pub reason: String,
}

/// Sends an event to every task that matches a filter, or cancels, pauses or resumes them.
pub async fn act(State(api): State<Api>, Segment(action): Segment, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    Ok(respond(act_from(&api, &action, &body).await?))
}

/// Performs the action of a request.
pub async fn act_from(api: &Api, action: &str, body: &[u8]) -> ApiResult<Started<TaskBulkResponse>> {
    let mut fields = api.parser().fields(body)?;
    let action = match action {
        "send" => TaskAction::Send {
            event: required_text(&mut fields, "type"),
            payload: Value::Object(fields.take("payload", "an object").unwrap_or_default()),
        },
        "cancel" => TaskAction::Cancel { reason: fields.text("reason") },
        "pause" => TaskAction::Pause,
        "resume" => TaskAction::Resume,
        _ => {
            let message = format!("no bulk action \"{action}\" on tasks; use send, cancel, pause or resume");
            return Err(ApiError::not_found(message));
        }
    };
    let (filter, request) = parse_request(fields)?;
    if let TaskAction::Send { event, .. } = &action {
        check_event(api, &filter, event).await?;
    }
    if filter == (TaskFilter { open: true, ..TaskFilter::default() }) && !request.all {
        return Err(ApiError::invalid_field("filter", "matches every task; set \"all\": true to confirm"));
    }
    let (sample, matched) = api.engine.store.task_list(filter.clone(), None, SAMPLE).await?;
    let mut response = TaskBulkResponse {
        dry_run: request.dry_run,
        matched,
        matched_is_exact: matched < COUNT_LIMIT as u64,
        per_second: request.per_second,
        sample: sample.iter().map(example).collect(),
        ..TaskBulkResponse::default()
    };
    let Some(newest) = newest(&sample).filter(|_| !request.dry_run) else {
        return Ok(Started { response, in_background: None });
    };
    let work = BulkWork::Tasks(TaskBulk { action, filter });
    let progress = start(api.clone(), work, &request, newest, matched).await?;
    (response.id, response.done, response.skipped) = (Some(progress.id), progress.done, progress.skipped);
    Ok(Started { response, in_background: progress.in_background() })
}

fn example(task: &StoredTask) -> TaskExample {
    TaskExample {
        id: task.task.id.clone(),
        machine: task.machine.clone(),
        version: task.version,
        state: task.task.state(),
        status: task.task.status,
        title: task.title.clone(),
    }
}

fn newest(tasks: &[StoredTask]) -> Option<Uuid> {
    tasks.first().and_then(|task| task.task.id.parse().ok())
}

fn required_text(fields: &mut Fields, name: &str) -> String {
    let is_present = fields.is_present(name);
    let text = fields.text(name);
    if !is_present {
        fields.reject(name, "is required");
    }
    text.unwrap_or_default()
}

/// Fails if the machine has no such event, so that a wrong name does not reach thousands of tasks.
async fn check_event(api: &Api, filter: &TaskFilter, event: &str) -> ApiResult<()> {
    let Some(machine) = &filter.machine else {
        return Err(ApiError::invalid_field("filter.machine", "is required, because an event belongs to a machine"));
    };
    let definition = machines::load(api, machine, filter.version).await?.definition;
    if !definition.events.contains_key(event) {
        let message = format!("version {} of {machine} has no event \"{event}\"", definition.version);
        return Err(ApiError::invalid_field("type", message));
    }
    Ok(())
}

/// What every action on many tasks accepts.
struct BulkRequest {
    /// Confirms a filter that matches every task.
    all: bool,
    dry_run: bool,
    per_second: Option<u32>,
}

fn parse_request(mut fields: Fields) -> ApiResult<(TaskFilter, BulkRequest)> {
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let parameters: Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let dry_run = fields.take::<bool>("dryRun", "true or false").unwrap_or(false);
    let per_second = parse_per_second(&mut fields, MAX_PER_SECOND);
    let mut errors = fields.finish();
    let mut filter = TaskFilter { open: true, ..TaskFilter::default() };
    for (name, value) in parameters {
        let text = match value {
            Value::String(text) if text.contains(char::is_control) => Err(CONTROL_CHARACTERS.to_owned()),
            Value::String(text) => Ok(text),
            Value::Number(number) if name == "version" => Ok(number.to_string()),
            Value::Bool(flag) if name == "approval" => Ok(flag.to_string()),
            _ => Err("must be a string".to_owned()),
        };
        if let Err(message) = text.and_then(|text| tasks::set_filter(&mut filter, &name, text)) {
            errors.push(FieldError::new(format!("filter.{name}"), message));
        }
    }
    check(errors)?;
    Ok((filter, BulkRequest { all, dry_run, per_second }))
}

/// How far an action got before the response.
struct Progress {
    id: BulkId,
    done: u64,
    skipped: u64,
    has_finished: bool,
}

impl Progress {
    fn in_background(&self) -> Option<BulkId> {
        (!self.has_finished).then_some(self.id)
    }
}

/// The response to an action that has finished or continues in the background.
pub struct Started<T> {
    pub response: T,
    /// The action, if it continues.
    pub in_background: Option<BulkId>,
}

fn respond(started: Started<impl Serialize>) -> Response {
    let Some(id) = started.in_background else { return Json(started.response).into_response() };
    let location = [(header::LOCATION, format!("/api/v1/bulk/{id}"))];
    (StatusCode::ACCEPTED, location, Json(started.response)).into_response()
}

async fn start(api: Api, work: BulkWork, request: &BulkRequest, up_to: Uuid, matched: u64) -> ApiResult<Progress> {
    let (id, now) = (BulkId::new(), Timestamp::now());
    let new = NewBulk { id, work, actor: actor(), per_second: request.per_second, up_to, matched };
    let bulk = launch(api, new, now).await?;
    Ok(match bulk {
        Some(bulk) => Progress { id, done: bulk.done, skipped: bulk.skipped, has_finished: bulk.finished_at.is_some() },
        None => Progress { id, done: 0, skipped: 0, has_finished: false },
    })
}

/// Moves the tasks of one version of a machine to another: `{from, to, map, entry, dryRun, perSecond}`.
pub async fn migrate(State(api): State<Api>, Segment(name): Segment, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    Ok(respond(migrate_from(&api, &name, &body).await?))
}

/// Performs the migration of a request.
pub async fn migrate_from(api: &Api, name: &str, body: &[u8]) -> ApiResult<Started<MigrationResponse>> {
    let mut fields = api.parser().fields(body)?;
    let (from, to) = (version(&mut fields, "from"), version(&mut fields, "to"));
    let map: BTreeMap<String, String> = fields.take("map", "an object of old and new states").unwrap_or_default();
    let entry = fields.text("entry").unwrap_or_else(|| "run".to_owned());
    if entry != "run" && entry != "skip" {
        fields.reject("entry", "must be run or skip");
    }
    let dry_run = fields.take::<bool>("dryRun", "true or false").unwrap_or(false);
    let per_second = parse_per_second(&mut fields, MAX_PER_SECOND);
    let mut errors = fields.finish();
    if errors.is_empty() && from == to {
        errors.push(FieldError::new("to", "must be another version"));
    }
    check(errors)?;
    let old = machines::load(api, name, Some(from)).await?.definition;
    let new = machines::load(api, name, Some(to)).await?.definition;
    let migration =
        Migration { from, definition: new, states: map.clone(), runs_entry: entry == "run", actor: actor() };
    let errors = migration.check(&old).into_iter();
    check(errors.map(|(state, message)| FieldError::new(format!("map.{state}"), message)).collect())?;
    let filter =
        TaskFilter { machine: Some(name.to_owned()), version: Some(from), open: true, ..TaskFilter::default() };
    let (first, mut response) = plan(api, &old, &migration, &filter).await?;
    (response.dry_run, response.per_second) = (dry_run, per_second);
    let movable = response.states.iter().any(|state| state.to.is_some());
    let Some(newest) = first.filter(|_| !dry_run && movable) else {
        return Ok(Started { response, in_background: None });
    };
    let action = TaskAction::Migrate { to, map, runs_entry: migration.runs_entry };
    let request = BulkRequest { all: true, dry_run, per_second };
    let work = BulkWork::Tasks(TaskBulk { action, filter });
    let progress = start(api.clone(), work, &request, newest, response.matched).await?;
    (response.id, response.done, response.skipped) = (Some(progress.id), progress.done, progress.skipped);
    Ok(Started { response, in_background: progress.in_background() })
}

fn version(fields: &mut Fields, name: &str) -> u32 {
    let is_present = fields.is_present(name);
    match fields.number(name) {
        Some(number) if (1..=i32::MAX as u64).contains(&number) => return number as u32,
        Some(_) => fields.reject(name, "must be a version of the machine"),
        None if !is_present => fields.reject(name, "is required"),
        None => {}
    }
    0
}

/// Returns what a migration would do, after trying it on some tasks without changing them, and the newest task.
async fn plan(
    api: &Api,
    old: &Arc<Definition>,
    migration: &Migration,
    filter: &TaskFilter,
) -> ApiResult<(Option<Uuid>, MigrationResponse)> {
    let machine = filter.machine.as_deref().unwrap_or_default();
    let counts = api.engine.store.task_states(machine, migration.from).await?;
    let (tried, _) = api.engine.store.task_list(filter.clone(), None, TRIED).await?;
    let mut response = MigrationResponse {
        from: migration.from,
        to: migration.definition.version,
        matched: counts.iter().map(|count| count.tasks).sum(),
        tried: tried.len() as u64,
        ..MigrationResponse::default()
    };
    for count in counts {
        let (to, reason) = match migration.target(&count.state) {
            Ok(target) => {
                let innermost = migration.definition.innermost_initial(target);
                (Some(migration.definition.path(innermost)), None)
            }
            Err(reason) => (None, Some(reason)),
        };
        response.states.push(MigratedState { state: count.state, tasks: count.tasks, to, reason });
    }
    let input = Input::Migrate(Arc::new(migration.clone()));
    for task in &tried {
        let answer = step(old, &task.task, input.clone(), Timestamp::now());
        if answer.outcome != Outcome::Applied {
            response.refused += 1;
            if response.refusals.len() < REFUSED {
                let (id, state) = (task.task.id.clone(), task.task.state());
                response.refusals.push(Refusal { id, state, reason: answer.reason.unwrap_or_default() });
            }
        }
    }
    Ok((newest(&tried), response))
}
