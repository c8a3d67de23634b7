//! Tasks as the API shows them.

use std::collections::BTreeMap;

use faena_domain::Timestamp;
use faena_machine::{Active, Approval, Definition, Event, Origin, Record, Status, Task, Timer, WaitReason, why};
use faena_store::{TaskPosition, TaskView as StoredTask};
use faena_wire::PageInfo;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::Value;

use crate::openapi::operations::events::cloud_event;

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskView {
    pub id: String,
    pub machine: String,
    pub version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    pub correlation_id: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The point in another task's history that this task started from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<Origin>,
    pub status: Status,
    /// The active states, the outermost first, joined by dots.
    pub state: String,
    /// The active states, the outermost first. The epoch identifies this stay in the state.
    pub active: Vec<Active>,
    /// Why Faena ended the task, if no state of its machine did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    pub data: Value,
    pub counters: BTreeMap<String, u32>,
    /// The last progress that a service reported.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub progress: Value,
    pub timers: Vec<Timer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// Events that no state has handled yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deferred: Vec<Event>,
    /// Number of states entered so far.
    pub epoch: u64,
    pub transitions: u32,
    pub created_at: Timestamp,
    pub created_by: String,
    pub updated_at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
    /// When the next timer fires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
}

impl TaskView {
    pub fn of(stored: StoredTask) -> TaskView {
        let (state, due_at) = (stored.task.state(), stored.task.due());
        let task = stored.task;
        TaskView {
            id: task.id,
            machine: stored.machine,
            version: stored.version,
            title: stored.title,
            correlation_id: stored.correlation,
            tags: stored.tags,
            forked_from: task.forked_from,
            status: task.status,
            state,
            active: task.active,
            fault: task.fault,
            data: task.data,
            counters: task.counters,
            progress: task.progress,
            timers: task.timers,
            approval: task.approval,
            deferred: task.deferred,
            epoch: task.epoch,
            transitions: task.transitions,
            created_at: task.created_at,
            created_by: task.created_by,
            updated_at: stored.updated_at,
            ended_at: task.ended_at,
            due_at,
        }
    }
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskList {
    pub tasks: Vec<TaskView>,
    #[serde(flatten)]
    pub page: PageInfo,
}

impl TaskList {
    pub fn new(tasks: Vec<TaskView>, page: PageInfo) -> TaskList {
        TaskList { tasks, page }
    }
}

#[derive(Serialize, JsonSchema)]
pub struct HistoryView {
    pub history: Vec<Record>,
}

/// Events about a task, as sinks and streams receive them.
#[derive(Serialize, JsonSchema)]
pub struct TaskEvents {
    /// CloudEvents, oldest first. `sequence` counts them.
    #[schemars(schema_with = "cloud_events")]
    pub events: Vec<Value>,
}

fn cloud_events(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "items": cloud_event(generator)})
}

/// What a task waits for.
#[derive(Serialize, JsonSchema)]
pub struct TaskWhy {
    pub state: String,
    pub status: Status,
    pub summary: String,
    pub reasons: Vec<WaitReason>,
}

impl TaskWhy {
    pub fn of(definition: &Definition, task: &Task, now: Timestamp) -> TaskWhy {
        let reasons = why(definition, task, now);
        let first = reasons.first().map(|reason| reason.message.clone()).unwrap_or_default();
        let state = task.state();
        let summary = if state.is_empty() { first } else { format!("{state}: {first}") };
        TaskWhy { state, status: task.status, summary, reasons }
    }

    /// Adds the position of a queued task to the reasons.
    pub fn add_position(&mut self, machine: &str, position: TaskPosition) {
        let TaskPosition { running, limit, ahead } = position;
        let message = match limit {
            Some(limit) => format!(
                "it is queued: {running} of at most {limit} tasks of {machine} run, and {ahead} start before it; raise the limit \
                 with \"faena limits set --machine {machine} --concurrency N\""
            ),
            None => format!("it is queued, and {machine} no longer has a limit, so it starts soon"),
        };
        if let Some(reason) = self.reasons.first_mut() {
            reason.message.clone_from(&message);
        }
        self.summary = message;
    }
}
