//! What is told to the outside about a job: one event per change, named as SPEC 9 names them.

use serde::Serialize;

use crate::{JobId, JobState, Progress, Run, Timestamp};

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

    /// The kind that says best what entering `state` means. A failed job stands in the dead-letter queue, so both are true of
    /// it; subscribers that care for failures look for `job.failed`.
    pub fn of_state(state: JobState) -> EventKind {
        match state {
            JobState::Completed => EventKind::JobCompleted,
            JobState::Failed => EventKind::JobFailed,
            _ => EventKind::JobStatusChanged,
        }
    }
}

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
