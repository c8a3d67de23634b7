//! Bulk actions: the store methods, how they are stored, and their entries in the audit log.
//!
//! An action processes jobs or tasks in the order of their ids, parents before children. Each step records its progress in its own
//! transaction. The progress keeps two nodes from making the same step, and shows another node where to continue after a crash.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use faena_domain::{BulkId, JobState, TaskId, Timestamp};
use faena_machine::{Definition, Event, Input, Migration, Outcome};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{AuditEntry, Filter, Result, StoreError, TaskAnswer, TaskFilter, TaskInput};

/// Bulk actions.
#[async_trait]
pub trait BulkStore: Send + Sync + 'static {
    /// Stores a bulk action whose first step is due at `due_at`, with its entry in the audit log if it has a rate.
    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()>;

    /// Returns the bulk action that is due first, even if that is later than now.
    async fn bulk_due(&self) -> Result<Option<Bulk>>;

    /// Processes the next jobs or tasks of a bulk action that still match, and records the progress in the same transaction.
    ///
    /// Nothing is processed twice, even if a node dies. The last step adds an entry to the audit log. Returns `false`, and does nothing,
    /// if the action has progressed since it was read or is finished.
    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool>;

    /// Stops a bulk action early. Returns `false` if it is finished or does not exist.
    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool>;

    /// Returns a bulk action.
    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>>;

    /// Lists bulk actions, newest first.
    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>>;

    /// Returns how many bulk actions there are, counted up to [`crate::COUNT_LIMIT`].
    async fn bulk_total(&self) -> Result<u64>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BulkAction {
    Cancel,
    Retry,
    Delete,
}

impl BulkAction {
    pub const ALL: [BulkAction; 3] = [BulkAction::Cancel, BulkAction::Retry, BulkAction::Delete];

    pub fn as_str(self) -> &'static str {
        match self {
            BulkAction::Cancel => "cancel",
            BulkAction::Retry => "retry",
            BulkAction::Delete => "delete",
        }
    }

    pub fn parse(text: &str) -> Option<BulkAction> {
        BulkAction::ALL.into_iter().find(|action| action.as_str() == text)
    }

    /// Returns whether the action applies to a job in this state.
    pub fn applies_to(self, state: JobState) -> bool {
        match self {
            BulkAction::Cancel => !state.is_terminal(),
            BulkAction::Retry => state.can_transition_to(JobState::Pending),
            BulkAction::Delete => !state.is_in_flight(),
        }
    }
}

/// What a bulk action does, and to what.
#[derive(Clone, PartialEq, Debug)]
pub enum BulkWork {
    Jobs {
        action: BulkAction,
        /// Includes the states to which the action applies.
        filter: Filter,
    },
    Tasks(TaskBulk),
}

impl BulkWork {
    /// Returns the name under which the action is stored and shown: `cancel`, `tasks.send`.
    pub fn name(&self) -> String {
        match self {
            BulkWork::Jobs { action, .. } => action.as_str().to_owned(),
            BulkWork::Tasks(bulk) => format!("tasks.{}", bulk.action.as_str()),
        }
    }

    /// Returns the filter as the API writes it, without absent fields; for tasks with the parameters of the action.
    pub fn to_api_json(&self) -> Value {
        match self {
            BulkWork::Jobs { filter, .. } => filter.to_api_json(),
            BulkWork::Tasks(bulk) => {
                let mut filter = serde_json::to_value(&bulk.filter).unwrap_or_default();
                if let Value::Object(fields) = &mut filter {
                    fields.retain(|_, value| !value.is_null() && *value != Value::Bool(false));
                }
                json!({"filter": filter, "action": bulk.action})
            }
        }
    }

    fn parse(name: &str, text: &str) -> Option<BulkWork> {
        if name.starts_with("tasks.") {
            return Some(BulkWork::Tasks(serde_json::from_str(text).ok()?));
        }
        Some(BulkWork::Jobs { action: BulkAction::parse(name)?, filter: serde_json::from_str(text).ok()? })
    }
}

/// An action on every task that matches a filter.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskBulk {
    pub action: TaskAction,
    pub filter: TaskFilter,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "name")]
pub enum TaskAction {
    Send {
        event: String,
        payload: Value,
    },
    Cancel {
        #[serde(skip_serializing_if = "Option::is_none", default)]
        reason: Option<String>,
    },
    Pause,
    Resume,
    /// The filter names the machine and the version that tasks move from.
    Migrate {
        to: u32,
        map: BTreeMap<String, String>,
        runs_entry: bool,
    },
}

impl TaskAction {
    pub fn as_str(&self) -> &'static str {
        match self {
            TaskAction::Send { .. } => "send",
            TaskAction::Cancel { .. } => "cancel",
            TaskAction::Pause => "pause",
            TaskAction::Resume => "resume",
            TaskAction::Migrate { .. } => "migrate",
        }
    }
}

impl TaskBulk {
    /// Returns the machine and the version whose definition [`TaskBulk::inputs`] needs.
    pub fn target(&self) -> Option<(&str, u32)> {
        match &self.action {
            TaskAction::Migrate { to, .. } => Some((self.filter.machine.as_deref().unwrap_or_default(), *to)),
            _ => None,
        }
    }

    /// Returns the inputs of one step. The id of an event is that of the action, so no task gets it twice.
    pub fn inputs(&self, bulk: &Bulk, ids: &[Uuid], target: Option<Arc<Definition>>, now: Timestamp) -> Vec<TaskInput> {
        let actor = bulk.actor.clone();
        let input = match (&self.action, target) {
            (TaskAction::Send { event, payload }, _) => Input::Event(Event {
                id: format!("bulk:{}", bulk.id),
                kind: event.clone(),
                payload: payload.clone(),
                actor,
                decider: None,
                at: now,
            }),
            (TaskAction::Cancel { reason }, _) => Input::Cancel { actor, reason: reason.clone() },
            (TaskAction::Pause, _) => Input::Pause { actor },
            (TaskAction::Resume, _) => Input::Resume { actor },
            (TaskAction::Migrate { map, runs_entry, .. }, Some(definition)) => Input::Migrate(Arc::new(Migration {
                from: self.filter.version.unwrap_or_default(),
                definition,
                states: map.clone(),
                runs_entry: *runs_entry,
                actor,
            })),
            (TaskAction::Migrate { .. }, None) => return Vec::new(),
        };
        ids.iter().map(|id| TaskInput { task: TaskId(*id), input: input.clone() }).collect()
    }
}

/// A new action on every job or task that matches a filter.
#[derive(Clone, PartialEq, Debug)]
pub struct NewBulk {
    pub id: BulkId,
    pub work: BulkWork,
    pub actor: String,
    /// `None`: as fast as possible.
    pub per_second: Option<u32>,
    /// The newest job or task to process.
    pub up_to: Uuid,
    pub matched: u64,
}

/// A bulk action and its progress.
#[derive(Clone, PartialEq, Debug)]
pub struct Bulk {
    pub id: BulkId,
    pub work: BulkWork,
    pub actor: String,
    pub per_second: Option<u32>,
    pub created_at: Timestamp,
    pub up_to: Uuid,
    /// Every job or task up to this one was processed.
    pub last: Option<Uuid>,
    pub matched: u64,
    pub done: u64,
    /// Jobs and tasks that changed before they were processed, or whose state does not allow the action.
    pub skipped: u64,
    /// When the next step is due.
    pub due_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub error: Option<String>,
}

/// The next jobs or tasks of a bulk action; all are processed or none.
#[derive(Clone, PartialEq, Debug)]
pub struct BulkStep {
    /// The action as it was read. If it has progressed since, the step does nothing.
    pub bulk: Bulk,
    pub ids: Vec<Uuid>,
    pub last: Option<Uuid>,
    /// `None`: this is the last step.
    pub due_at: Option<Timestamp>,
}

pub const CANCEL_REASON: &str = "cancelled by request";

/// How many jobs or tasks one step has processed and skipped.
#[derive(Default)]
pub struct BulkStepCounts {
    pub done: i64,
    pub skipped: i64,
}

impl BulkStepCounts {
    /// Counts the answers of tasks.
    pub fn of(answers: Vec<Option<TaskAnswer>>) -> BulkStepCounts {
        let is_done = |answer: &Option<TaskAnswer>| {
            answer.as_ref().is_some_and(|answer| matches!(answer.outcome, Outcome::Applied | Outcome::Deferred))
        };
        let done = answers.iter().filter(|answer| is_done(answer)).count() as i64;
        BulkStepCounts { done, skipped: answers.len() as i64 - done }
    }

    /// Counts one job. An error that does not concern this job alone ends the step.
    pub fn add(&mut self, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => self.done += 1,
            Err(StoreError::NotFound(_) | StoreError::InvalidTransition { .. } | StoreError::Conflict { .. }) => {
                self.skipped += 1;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

pub struct BulkRow {
    pub id: Uuid,
    pub action: String,
    pub filter: String,
    pub actor: String,
    pub per_second: i64,
    pub created_at: i64,
    pub up_to: Uuid,
    pub last: Option<Uuid>,
    pub matched: i64,
    pub done: i64,
    pub skipped: i64,
    pub due_at: Option<i64>,
    pub finished_at: Option<i64>,
    pub error: Option<String>,
}

pub const COLUMNS: &str = "id, action, filter, actor, per_second, created_at, up_to, last, matched, done, skipped, due_at, \
     finished_at, error";

impl BulkRow {
    pub fn bulk(self) -> Result<Bulk> {
        let broken =
            |what: &str| StoreError::Internal(format!("the {what} of bulk action {} is not readable", self.id).into());
        Ok(Bulk {
            id: BulkId(self.id),
            work: BulkWork::parse(&self.action, &self.filter).ok_or_else(|| broken("kind or filter"))?,
            actor: self.actor,
            per_second: u32::try_from(self.per_second).ok().filter(|n| *n > 0),
            created_at: Timestamp::from_ms(self.created_at),
            up_to: self.up_to,
            last: self.last,
            matched: self.matched.unsigned_abs(),
            done: self.done.unsigned_abs(),
            skipped: self.skipped.unsigned_abs(),
            due_at: self.due_at.map(Timestamp::from_ms),
            finished_at: self.finished_at.map(Timestamp::from_ms),
            error: self.error,
        })
    }
}

/// Maximum number of rows that are read to find one that this version understands.
pub const MAX_CANDIDATES: usize = 50;

/// Returns the first action that this version understands. Others, for example of a newer version, are skipped.
pub fn first_readable(rows: Vec<BulkRow>) -> Option<Bulk> {
    rows.into_iter().find_map(|row| match row.bulk() {
        Ok(bulk) => Some(bulk),
        Err(error) => {
            tracing::warn!(%error, "cannot read a bulk action, skipping it");
            None
        }
    })
}

impl Filter {
    /// Returns the filter as the API writes it, without absent fields.
    pub fn to_api_json(&self) -> Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Value::Object(fields) = &mut value {
            fields.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()));
        }
        value
    }
}

/// Returns the audit entry for the start. An action without a rate only has an entry for its end.
pub fn begin_audit(bulk: &NewBulk) -> Option<AuditEntry> {
    bulk.per_second.map(|per_second| AuditEntry {
        actor: bulk.actor.clone(),
        action: format!("bulk.{}", bulk.work.name()),
        target: bulk.id.to_string(),
        details: json!({ "filter": bulk.work.to_api_json(), "perSecond": per_second }),
        count: bulk.matched,
    })
}

pub fn end_audit(bulk: &Bulk, done: u64, skipped: u64) -> AuditEntry {
    let action = bulk.work.name();
    AuditEntry {
        actor: bulk.actor.clone(),
        action: if bulk.per_second.is_some() { format!("bulk.{action}.end") } else { format!("bulk.{action}") },
        target: bulk.id.to_string(),
        details: json!({ "filter": bulk.work.to_api_json(), "matched": bulk.matched, "skipped": skipped }),
        count: done,
    }
}

pub fn stop_audit(bulk: &Bulk, by: &str) -> AuditEntry {
    AuditEntry {
        actor: by.into(),
        action: "bulk.stop".into(),
        target: bulk.id.to_string(),
        details: json!({ "action": bulk.work.name(), "matched": bulk.matched, "skipped": bulk.skipped }),
        count: bulk.done,
    }
}

/// Returns whether the stored progress is still where the step starts.
pub fn is_unchanged(step: &BulkStep, last: Option<Uuid>, due_at: Option<i64>) -> bool {
    due_at.is_some() && due_at == step.bulk.due_at.map(Timestamp::as_ms) && last == step.bulk.last
}
