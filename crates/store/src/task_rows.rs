//! The rows and texts in which tasks and their events are stored.

use faena_domain::{TaskId, Timestamp};
use faena_machine::Task;
use serde::Serialize;
use uuid::Uuid;

use crate::{Result, StoreError, TaskView};

pub const COLUMNS: &str = "id, machine, version, title, correlation, tags, updated_at, body, events";

/// A row of `task`, before its body is parsed.
pub struct TaskRow {
    pub id: Uuid,
    pub machine: String,
    pub version: u32,
    pub title: Option<String>,
    pub correlation: String,
    /// JSON text. `None`: the task has no tags.
    pub tags: Option<String>,
    pub updated_at: i64,
    pub body: String,
    pub events: i64,
}

impl TaskRow {
    pub fn view(self) -> Result<TaskView> {
        let task = serde_json::from_str(&self.body)
            .map_err(|error| StoreError::Internal(format!("task {} is not readable: {error}", self.id).into()))?;
        let tags = self.tags.and_then(|tags| serde_json::from_str(&tags).ok()).unwrap_or_default();
        let Self { machine, version, title, correlation, .. } = self;
        Ok(TaskView {
            machine,
            version,
            title,
            correlation,
            tags,
            updated_at: Timestamp::from_ms(self.updated_at),
            events: u64::try_from(self.events).unwrap_or_default(),
            task,
        })
    }
}

/// The columns of a task that are derived from its body, so that indexes can contain them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskColumns {
    pub status: &'static str,
    pub state: String,
    pub ended_at: Option<i64>,
    pub due_at: Option<i64>,
    pub is_approval: bool,
    pub version: u32,
    pub entered_at: i64,
}

impl TaskColumns {
    pub fn of(view: &TaskView) -> TaskColumns {
        let task = &view.task;
        TaskColumns {
            status: task.status.as_str(),
            state: task.state(),
            ended_at: task.ended_at.map(Timestamp::as_ms),
            due_at: task.due().map(Timestamp::as_ms),
            is_approval: task.approval.is_some(),
            version: view.version,
            entered_at: entered_at(task).as_ms(),
        }
    }
}

/// Returns when a task entered its innermost state.
pub fn entered_at(task: &Task) -> Timestamp {
    task.active.last().map_or(task.created_at, |active| active.since)
}

/// Returns the stored form of tags. `None`: there are no tags.
pub fn tags_text(tags: &[String]) -> Result<Option<String>> {
    if tags.is_empty() { Ok(None) } else { to_text(&tags).map(Some) }
}

/// Writes a value as JSON.
pub fn to_text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| StoreError::Internal(error.to_string().into()))
}

/// The data of an event. Its fields are in alphabetical order, like those of all events.
#[derive(Serialize)]
pub struct Published<'a, P> {
    pub metadata: Metadata,
    pub payload: &'a P,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    pub originator: &'static str,
    pub task_id: TaskId,
    pub timestamp: Timestamp,
    pub trace_id: Uuid,
}

/// The payload of `task.created` and `task.state.changed`.
#[derive(Serialize)]
pub struct StateChanged<'a> {
    pub event: &'a str,
    pub from: &'a str,
    pub machine: &'a str,
    pub reason: Option<&'a str>,
    pub to: &'a str,
    pub version: u32,
}
