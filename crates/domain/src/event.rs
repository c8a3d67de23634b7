//! The types of all events, and the event of a job: one per change of its state or progress.

use serde::Serialize;

use crate::{JobId, JobState, Progress, Run, Timestamp};

/// Type of a job's event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum EventKind {
    #[serde(rename = "job.created")]
    JobCreated,
    #[serde(rename = "job.status.changed")]
    JobStatusChanged,
    #[serde(rename = "job.progress")]
    JobProgress,
    #[serde(rename = "job.completed")]
    JobCompleted,
    #[serde(rename = "job.failed")]
    JobFailed,
    #[serde(rename = "job.dead_lettered")]
    JobDeadLettered,
}

/// The types of all events about jobs, workers and schedules that the store records and publishes.
pub const EVENT_TYPES: [&str; 9] = [
    "job.created",
    "job.status.changed",
    "job.completed",
    "job.failed",
    "job.dead_lettered",
    "worker.status.changed",
    "worker.terminated",
    "schedule.fired",
    "schedule.missed",
];

/// The types of the events about tasks. Machines can also publish events of their own.
pub const TASK_EVENT_TYPES: [&str; 9] = [
    "task.created",
    "task.queued",
    "task.state.changed",
    "task.ended",
    "task.deadline_missed",
    "task.approval.requested",
    "task.approval.reminder",
    "task.approval.escalated",
    "task.approval.expired",
];

impl EventKind {
    pub fn as_str(self) -> &'static str {
        match self {
            EventKind::JobCreated => "job.created",
            EventKind::JobStatusChanged => "job.status.changed",
            EventKind::JobProgress => "job.progress",
            EventKind::JobCompleted => "job.completed",
            EventKind::JobFailed => "job.failed",
            EventKind::JobDeadLettered => "job.dead_lettered",
        }
    }

    /// Returns the most specific kind for a job that enters `state`.
    ///
    /// A failed job is dead-lettered at the same time; its kind is `job.failed`, which subscribers look for.
    pub fn of_state(state: JobState) -> EventKind {
        match state {
            JobState::Completed => EventKind::JobCompleted,
            JobState::Failed => EventKind::JobFailed,
            _ => EventKind::JobStatusChanged,
        }
    }
}

/// A change of a job, as the subscribers of this node receive it.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    #[serde(rename = "type")]
    pub kind: EventKind,
    pub job_id: JobId,
    pub at: Timestamp,
    pub status: JobState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}
