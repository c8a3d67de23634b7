//! The timeline of all tasks and jobs with one correlation id: `GET /api/v1/trace/:correlationId`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Attempt, JobId, JobState, Run, TaskId, Timestamp};

/// Tasks and jobs with one correlation id, and what happened to them.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    pub correlation_id: String,
    /// Oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TraceTask>,
    /// Oldest first.
    pub jobs: Vec<TraceJob>,
    /// Ordered by time; entries of the same millisecond, in the order in which they were recorded.
    pub timeline: Vec<TraceEntry>,
    /// One sentence per limit that the trace exceeded, saying what was left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub omitted: Vec<String>,
}

/// A task of a trace.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TraceTask {
    pub id: TaskId,
    pub machine: String,
    pub version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// `queued`, `running`, `paused`, `completed`, `failed` or `cancelled`.
    pub status: String,
    /// The active states, the outermost first, joined by dots.
    pub state: String,
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Timestamp>,
}

/// A job of a trace.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TraceJob {
    pub id: JobId,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: JobState,
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<JobId>,
    /// Jobs of this trace that depend on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependents: Vec<JobId>,
    /// Runs that have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Attempt>,
}

/// Source of a timeline entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum TraceKind {
    /// A due time of the schedule that created a job.
    Schedule,
    /// A record of a task's history.
    Task,
    /// An entry of a job's execution log.
    Job,
    /// An attempt to deliver a webhook.
    Webhook,
    /// An event, as sinks and streams receive it.
    Event,
    /// An action of a user or an API key.
    Audit,
}

impl TraceKind {
    pub fn as_str(self) -> &'static str {
        match self {
            TraceKind::Schedule => "schedule",
            TraceKind::Task => "task",
            TraceKind::Job => "job",
            TraceKind::Webhook => "webhook",
            TraceKind::Event => "event",
            TraceKind::Audit => "audit",
        }
    }
}

/// One line of the timeline.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TraceEntry {
    pub at: Timestamp,
    pub kind: TraceKind,
    /// `started`, `delivered`, `job.completed`, `job.cancel` …
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// User, API key or worker that caused it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl TraceEntry {
    pub fn new(at: Timestamp, kind: TraceKind, what: impl Into<String>) -> TraceEntry {
        let what = what.into();
        TraceEntry {
            at,
            kind,
            what,
            task_id: None,
            job_id: None,
            run: None,
            worker_id: None,
            actor: None,
            details: String::new(),
        }
    }
}
