//! A webhook: a notification about the end of a job, sent to the URL that the job named, or about an approval, sent to
//! the receivers that the machine named.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use uuid::Uuid;

use crate::{JobId, TaskId, Timestamp, WebhookId};

/// The event of a webhook about the end of a job.
pub const JOB_STATUS: &str = "job.status";

/// What a webhook is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WebhookSubject {
    Job(JobId),
    Task(TaskId),
}

impl WebhookSubject {
    /// Returns the subject of a webhook with this event.
    pub fn of(event: &str, id: Uuid) -> WebhookSubject {
        if event == JOB_STATUS { WebhookSubject::Job(JobId(id)) } else { WebhookSubject::Task(TaskId(id)) }
    }

    pub fn id(self) -> Uuid {
        match self {
            WebhookSubject::Job(id) => id.0,
            WebhookSubject::Task(id) => id.0,
        }
    }

    pub fn job(self) -> Option<JobId> {
        if let WebhookSubject::Job(id) = self { Some(id) } else { None }
    }

    pub fn task(self) -> Option<TaskId> {
        if let WebhookSubject::Task(id) = self { Some(id) } else { None }
    }
}

/// Writes `job ID` or `task ID`.
impl fmt::Display for WebhookSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WebhookSubject::Job(id) => write!(f, "job {id}"),
            WebhookSubject::Task(id) => write!(f, "task {id}"),
        }
    }
}

/// State of a webhook.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum WebhookState {
    /// The next attempt is due at a known time.
    Waiting,
    /// A node is sending it, and must record the result before its due time.
    Sending,
    /// The receiver accepted it.
    Delivered,
    /// Every allowed attempt failed. A user can send it again.
    Failed,
}

impl WebhookState {
    pub const ALL: [WebhookState; 4] =
        [WebhookState::Waiting, WebhookState::Sending, WebhookState::Delivered, WebhookState::Failed];

    pub fn is_terminal(self) -> bool {
        matches!(self, WebhookState::Delivered | WebhookState::Failed)
    }

    /// Returns whether a webhook in this state may enter `next`. Only a user restarts a delivered or failed webhook.
    pub fn can_transition_to(self, next: WebhookState) -> bool {
        use WebhookState::*;
        match self {
            Waiting => next == Sending,
            Sending => matches!(next, Waiting | Delivered | Failed),
            Delivered | Failed => next == Waiting,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            WebhookState::Waiting => "WAITING",
            WebhookState::Sending => "SENDING",
            WebhookState::Delivered => "DELIVERED",
            WebhookState::Failed => "FAILED",
        }
    }

    /// Returns the number that is stored.
    pub fn code(self) -> i16 {
        self as i16
    }

    pub fn from_code(code: i16) -> Option<WebhookState> {
        WebhookState::ALL.into_iter().find(|state| state.code() == code)
    }
}

/// Result of one attempt to deliver.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookAttempt {
    pub number: u32,
    pub at: Timestamp,
    pub took_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// First KiB of the response body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// Body of the request about a job.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookBody<'a> {
    pub job_id: JobId,
    pub job_type: &'a str,
    /// `completed`, `failed` or `cancelled`.
    pub status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    pub completed_at: Timestamp,
}

/// A webhook as `GET /api/v1/webhooks/:id` shows it; lists omit `body` and `history`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookView {
    pub id: WebhookId,
    /// Event type: `job.status`, or `task.approval.` followed by the change of the approval.
    pub event: String,
    /// The job that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    /// The task that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    pub correlation_id: String,
    pub url: String,
    pub state: WebhookState,
    pub created_at: Timestamp,
    /// Time of the next attempt, or the deadline for the result of the current one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled_at: Option<Timestamp>,
    /// Reason why it is not sent although it is due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_reason: Option<String>,
    /// Attempts started so far, including those without a recorded result.
    pub attempts: u32,
    /// Exact text that is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<WebhookAttempt>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_these_transitions_are_legal() {
        use WebhookState::*;
        let legal = [
            (Waiting, Sending),
            (Sending, Waiting),
            (Sending, Delivered),
            (Sending, Failed),
            (Delivered, Waiting),
            (Failed, Waiting),
        ];
        for from in WebhookState::ALL {
            for to in WebhookState::ALL {
                assert_eq!(from.can_transition_to(to), legal.contains(&(from, to)), "{from:?} to {to:?}");
            }
        }
    }
}
