//! A task: one execution of a machine, with everything that the next step needs to know.

use std::collections::BTreeMap;

use faena_domain::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::definition::{Definition, Ending};

/// The stored state of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    pub id: String,
    pub created_at: Timestamp,
    pub created_by: String,
    /// Identifies the creator, so that it cannot approve its own task under another name.
    #[serde(default)]
    pub creator: String,
    /// The point in another task's history that this task started from.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub forked_from: Option<Origin>,
    pub status: Status,
    /// Why Faena ended the task, if no state of its machine did.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub fault: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub paused_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ended_at: Option<Timestamp>,
    /// The task's data, always an object.
    pub data: Value,
    /// When a queued task started.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub started_at: Option<Timestamp>,
    /// The state that a queued task starts in, if it is not the first one of its machine.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub start_state: Option<String>,
    /// The active states, the outermost first.
    pub active: Vec<Active>,
    /// Number of states entered so far.
    pub epoch: u64,
    /// Number of transitions so far.
    pub transitions: u32,
    /// Number of the last record of the history.
    pub sequence: u64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub counters: BTreeMap<String, u32>,
    pub timers: Vec<Timer>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub approval: Option<Approval>,
    /// When the last message about this task arrived.
    pub last_seen: Timestamp,
    /// When progress last changed.
    pub progress_at: Timestamp,
    #[serde(skip_serializing_if = "Value::is_null", default)]
    pub progress: Value,
    /// Events that no state has handled yet, in the order of their arrival.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub deferred: Vec<Event>,
}

/// A point in the history of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    pub task_id: String,
    /// Number of the record.
    pub record: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It has not started: its machine has reached its limit of running tasks.
    Queued,
    Running,
    Paused,
    Completed,
    Failed,
    Cancelled,
}

impl Status {
    pub const ALL: [Status; 6] =
        [Status::Queued, Status::Running, Status::Paused, Status::Completed, Status::Failed, Status::Cancelled];

    /// Returns the name that the API and the database use.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Queued => "queued",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::Cancelled => "cancelled",
        }
    }

    pub fn has_ended(self) -> bool {
        matches!(self, Status::Completed | Status::Failed | Status::Cancelled)
    }
}

impl From<Ending> for Status {
    fn from(ending: Ending) -> Status {
        match ending {
            Ending::Success => Status::Completed,
            Ending::Failure => Status::Failed,
            Ending::Cancelled => Status::Cancelled,
        }
    }
}

/// A state that the task is in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Active {
    pub state: String,
    /// The task's epoch when this state was entered. It identifies this stay in the state.
    pub epoch: u64,
    pub since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Timer {
    pub kind: TimerKind,
    /// The state that the timer belongs to. A timer of the whole task has none.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub state: String,
    pub due: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum TimerKind {
    Silence,
    NoProgress,
    Total,
    Lifetime,
    Poll,
    /// A timer of the definition.
    Named(String),
    Remind,
    Escalate,
    Expire,
}

/// An open approval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Approval {
    pub state: String,
    pub epoch: u64,
    pub since: Timestamp,
    /// SHA-256 of the subject, in hexadecimal.
    pub hash: String,
    pub subject: Value,
    pub quorum: u32,
    /// Groups that may decide. Empty: everyone with write access.
    pub groups: Vec<String>,
    pub decisions: Vec<Decision>,
    /// URLs that receive webhooks about the approval. Empty after its decision.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub webhooks: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    pub actor: String,
    /// Identifies who decided: `key:` and the id of an API key, or the name of a caller without a key.
    #[serde(default)]
    pub caller: String,
    pub approve: bool,
    pub at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub comment: Option<String>,
}

/// Something that happened and that a task receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Identifies the event, so that it is applied once. Events that Faena creates have none.
    pub id: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub payload: Value,
    /// Who sent it.
    pub actor: String,
    /// The sender, if it may decide about approvals. It is not stored: an event can decide only at the moment it
    /// arrives.
    #[serde(skip)]
    pub decider: Option<Caller>,
    pub at: Timestamp,
}

/// A person or service that acts on a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Display name.
    pub actor: String,
    /// Identifies the caller. Unlike the name, it is unique.
    pub identity: String,
    /// The groups that the caller belongs to.
    pub groups: Vec<String>,
}

/// A caller without groups that is identified by its name.
impl From<&str> for Caller {
    fn from(actor: &str) -> Caller {
        Caller { actor: actor.to_owned(), identity: actor.to_owned(), groups: Vec::new() }
    }
}

/// A record of a task's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    pub sequence: u64,
    pub at: Timestamp,
    pub event: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub event_id: String,
    pub actor: String,
    pub outcome: Outcome,
    pub from: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub actions: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// The fields of the task's data that changed, with their new values. The first record has all of them.
    #[serde(skip_serializing_if = "Map::is_empty", default)]
    pub set: Map<String, Value>,
    /// All counters, if one of them changed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub counters: Option<BTreeMap<String, u32>>,
    /// Version of the machine, in the first record and after a migration.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub version: Option<u32>,
}

/// What an event did to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Applied,
    /// Kept until a state handles it.
    Deferred,
    Ignored,
    /// It belongs to an earlier stay in a state.
    Stale,
    /// Not allowed in this state: it changed nothing.
    Rejected,
    /// The sender may not do this: it changed nothing.
    Forbidden,
    /// Not an event of the machine, or a payload that does not fit: it changed nothing.
    Invalid,
}

impl Outcome {
    /// Returns the name that the API uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Applied => "applied",
            Outcome::Deferred => "deferred",
            Outcome::Ignored => "ignored",
            Outcome::Stale => "stale",
            Outcome::Rejected => "rejected",
            Outcome::Forbidden => "forbidden",
            Outcome::Invalid => "invalid",
        }
    }
}

/// Something to do outside of the task, in the same transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Publishes an event of the machine.
    Emit { event: String, payload: Value },
    /// Submits a job. Its end is an event for this stay in the state.
    Job(JobRequest),
    /// Publishes one of Faena's own events about the task.
    Notice { event: &'static str, data: Value },
    /// Sends a notice to the webhooks of an approval.
    Webhook(ApprovalNotice),
}

/// Notice to the receivers of an approval.
#[derive(Clone, Debug, PartialEq)]
pub struct ApprovalNotice {
    /// `task.approval.` and what has happened: `requested`, `reminder`, `escalated`, `granted`, `denied`, `expired` or
    /// `withdrawn`.
    pub event: &'static str,
    /// The approval as it was then, with its receivers.
    pub approval: Approval,
    /// The active states, the outermost first, joined by dots.
    pub state: String,
    /// Whether the creator of the task may decide.
    pub allows_creator: bool,
    pub expires_at: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct JobRequest {
    pub name: String,
    pub state: String,
    pub epoch: u64,
    pub job_type: String,
    pub payload: Value,
    pub options: serde_json::Map<String, Value>,
}

impl Task {
    /// Returns the path of the active states, joined by dots.
    pub fn state(&self) -> String {
        self.active.iter().map(|active| active.state.as_str()).collect::<Vec<_>>().join(".")
    }

    /// Returns when this task needs a step without an event.
    pub fn due(&self) -> Option<Timestamp> {
        if self.status != Status::Running {
            return None;
        }
        self.timers.iter().map(|timer| timer.due).min()
    }

    pub(crate) fn is_active(&self, state: &str, epoch: u64) -> bool {
        self.active.iter().any(|active| active.state == state && active.epoch == epoch)
    }

    /// Creates a task that has not entered a state yet.
    pub(crate) fn new(id: String, creator: &Caller, data: Value, definition: &Definition, now: Timestamp) -> Task {
        let lifetime =
            Timer { kind: TimerKind::Lifetime, state: String::new(), due: now.plus_ms(definition.limits.lifetime_ms) };
        Task {
            id,
            created_at: now,
            created_by: creator.actor.clone(),
            creator: creator.identity.clone(),
            forked_from: None,
            status: Status::Running,
            fault: None,
            paused_at: None,
            ended_at: None,
            data,
            started_at: None,
            start_state: None,
            active: Vec::new(),
            epoch: 0,
            transitions: 0,
            sequence: 0,
            counters: BTreeMap::new(),
            timers: vec![lifetime],
            approval: None,
            last_seen: now,
            progress_at: now,
            progress: Value::Null,
            deferred: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_those_of_the_api() {
        for status in Status::ALL {
            assert_eq!(json!(status), status.as_str());
        }
        use Outcome::*;
        for outcome in [Applied, Deferred, Ignored, Stale, Rejected, Forbidden, Invalid] {
            assert_eq!(json!(outcome), outcome.as_str());
        }
    }
}
