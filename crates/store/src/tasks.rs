//! Tasks and machines: the store methods, and what one batch of inputs changes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use async_trait::async_trait;
use faena_domain::{FieldError, JobId, NewJob, TaskId, Timestamp};
use faena_machine::{
    Definition, Effect, Input, JobRequest, ORIGINATOR, Outcome, Record, Status, Step, Task, queue, step,
};
use parking_lot::RwLock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

pub use crate::task_rows::{COLUMNS, TaskColumns, TaskRow, tags_text, to_text};
use crate::{
    AuditEntry, Result, StoreError, TaskFigures, TaskFilter, TaskMeasures, TaskPosition, approval_webhooks,
    task_limits::Admission,
    task_rows::{Metadata, Published, StateChanged},
    webhooks::NewWebhook,
};

/// Machines and tasks.
#[async_trait]
pub trait TaskStore: Send + Sync + 'static {
    /// Stores a version of a machine, with its entry in the audit log. The same definition again changes nothing.
    async fn machine_register(&self, machine: NewMachine, by: &str, now: Timestamp) -> Result<Registered>;

    /// Returns every version of every machine, with the number of its tasks by status.
    async fn machine_list(&self) -> Result<Vec<MachineStatus>>;

    /// Returns a version of a machine, the newest if `version` is `None`.
    async fn machine_get(&self, name: &str, version: Option<u32>) -> Result<Option<StoredMachine>>;

    /// Stores a new task, with its history, events and jobs.
    async fn task_create(&self, task: NewTask, now: Timestamp) -> Result<()>;

    /// Stores a new task, unless a task was created with the same key before: then returns that one.
    ///
    /// The key exists as long as its task.
    async fn task_create_once(&self, key: TaskKey, task: NewTask, now: Timestamp) -> Result<Option<KeyedTask>>;

    /// Applies inputs in their order. Each input is stored in one transaction with everything that follows from it; several inputs may
    /// share one. The answer to an input for an unknown task is `None`.
    async fn task_apply(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Vec<Option<TaskAnswer>>>;

    /// Notifies tasks about up to `limit` ended jobs, fires the timers of up to `limit` due tasks, and starts queued
    /// tasks up to the limits of their machines, at most `limit` of each machine.
    ///
    /// The transaction that ends a job marks the job as ended, so jobs that have not ended cost nothing here.
    async fn task_fire(&self, limit: usize, now: Timestamp) -> Result<TasksFired>;

    /// Returns a task.
    async fn task_get(&self, id: TaskId) -> Result<Option<TaskView>>;

    /// Returns matching tasks, the newest first, and how many match, counted up to [`crate::COUNT_LIMIT`].
    async fn task_list(&self, filter: TaskFilter, before: Option<TaskId>, limit: usize)
    -> Result<(Vec<TaskView>, u64)>;

    /// Returns up to `limit` matching tasks after `after` and up to `up_to`, in the order of their ids.
    async fn task_find(
        &self,
        filter: &TaskFilter,
        after: Option<TaskId>,
        up_to: TaskId,
        limit: usize,
    ) -> Result<Vec<TaskId>>;

    /// Returns how many tasks of a version are in each state, without those that have ended.
    async fn task_states(&self, machine: &str, version: u32) -> Result<Vec<StateCount>>;

    /// Returns the number of tasks by status, counted up to [`crate::COUNT_LIMIT`] of each status and version of a machine.
    async fn task_counts(&self) -> Result<BTreeMap<String, u64>>;

    /// Returns the numbers of tasks that have not ended, and what they wait for.
    async fn task_figures(&self) -> Result<TaskFigures>;

    /// Returns what this process has done to tasks since its start.
    fn task_measures(&self) -> TaskMeasures;

    /// Returns the position of a queued task of a machine.
    async fn task_position(&self, machine: &str, id: TaskId) -> Result<TaskPosition>;

    /// Returns the history of a task after a record.
    async fn task_history(&self, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>>;

    /// Deletes up to `limit` tasks that ended before `before`, with their history. Returns how many.
    async fn task_prune(&self, before: Timestamp, limit: usize) -> Result<usize>;
}

/// A version of a machine to store.
#[derive(Clone, Debug)]
pub struct NewMachine {
    pub definition: Arc<Definition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registered {
    New,
    /// The same definition was registered before.
    Known,
}

#[derive(Clone, Debug)]
pub struct StoredMachine {
    pub definition: Arc<Definition>,
    pub created_at: Timestamp,
    pub created_by: String,
}

/// A version of a machine and its tasks.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    pub name: String,
    pub version: u32,
    pub hash: String,
    pub created_at: Timestamp,
    pub created_by: String,
    /// Number of tasks by status.
    pub tasks: BTreeMap<String, u64>,
}

/// A task to store, as [`faena_machine::create`] returned it.
#[derive(Clone, Debug)]
pub struct NewTask {
    pub id: TaskId,
    pub definition: Arc<Definition>,
    pub title: Option<String>,
    pub correlation: String,
    pub tags: Vec<String>,
    pub first: Step,
    /// Entry in the audit log, for a fork of another task.
    pub audit: Option<AuditEntry>,
}

/// An idempotency key of a new task.
#[derive(Clone, Debug)]
pub struct TaskKey {
    pub key: String,
    /// SHA-256 of the request.
    pub fingerprint: [u8; 32],
}

/// The task that was created with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyedTask {
    pub id: TaskId,
    /// Whether it was created by the same request.
    pub is_same_request: bool,
}

#[derive(Clone, Debug)]
pub struct TaskInput {
    pub task: TaskId,
    pub input: Input,
}

/// What an input did to a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskAnswer {
    pub outcome: Outcome,
    pub state: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// The event had arrived before; this is the answer to its first delivery.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub duplicate: bool,
}

/// What one round of [`TaskStore::task_fire`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TasksFired {
    /// Due tasks whose timers fired.
    pub tasks: usize,
    /// Ended jobs that tasks were notified about.
    pub jobs: usize,
    /// Queued tasks that were started.
    pub started: usize,
    /// Deadlines that tasks missed.
    pub deadlines_missed: usize,
    /// When the next timer is due.
    pub next_at: Option<Timestamp>,
}

/// A task with what the store knows about it.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskView {
    pub machine: String,
    pub version: u32,
    pub title: Option<String>,
    pub correlation: String,
    pub tags: Vec<String>,
    pub updated_at: Timestamp,
    /// Number of events that it has published. The next event gets the next number.
    pub events: u64,
    pub task: Task,
}

/// Tasks of one version in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCount {
    /// The active states, the outermost first, joined by dots.
    pub state: String,
    pub tasks: u64,
}

/// The definitions that this process has read. They never change.
#[derive(Default)]
pub struct MachineCache(RwLock<HashMap<(String, u32), Arc<Definition>>>);

impl MachineCache {
    pub fn get(&self, name: &str, version: u32) -> Option<Arc<Definition>> {
        self.0.read().get(&(name.to_owned(), version)).cloned()
    }

    pub fn put(&self, definition: Arc<Definition>) -> Arc<Definition> {
        let key = (definition.machine.clone(), definition.version);
        self.0.write().entry(key).or_insert(definition).clone()
    }

    /// Parses a stored definition.
    pub fn parse(&self, text: &str) -> Result<Arc<Definition>> {
        let definition = Definition::parse(text).map_err(|findings| {
            let first = findings.first().map(ToString::to_string).unwrap_or_default();
            StoreError::Internal(format!("a stored machine is not readable: {first}").into())
        })?;
        Ok(self.put(Arc::new(definition)))
    }
}

/// A task that a batch may change.
pub struct ChangedTask {
    pub view: TaskView,
    pub definition: Arc<Definition>,
    /// The indexed columns before the batch. `None`: it is new.
    before: Option<TaskColumns>,
    /// Size of the stored body.
    pub body_bytes: usize,
    is_changed: bool,
}

impl ChangedTask {
    fn new(view: TaskView, definition: Arc<Definition>, before: Option<TaskColumns>) -> ChangedTask {
        let is_changed = before.is_none();
        ChangedTask { view, definition, before, body_bytes: 0, is_changed }
    }

    /// Returns whether the batch changes an indexed column. If not, only the body and its time change.
    pub fn changes_indexed_columns(&self) -> bool {
        self.before.as_ref() != Some(&TaskColumns::of(&self.view))
    }

    /// Returns whether the batch ends the task.
    pub fn ends(&self) -> bool {
        let was_open = self.before.as_ref().is_none_or(|before| before.ended_at.is_none());
        was_open && self.view.task.status.has_ended()
    }

    /// Returns whether the batch queues the task.
    pub fn is_queued(&self) -> bool {
        self.before.is_none() && self.view.task.status == Status::Queued
    }
}

/// What one batch of inputs changes.
#[derive(Default)]
pub struct Plan {
    pub answers: Vec<Option<TaskAnswer>>,
    pub records: Vec<(TaskId, Record)>,
    /// Answers to events, by their ids.
    pub inbox: Vec<(TaskId, String, TaskAnswer)>,
    pub events: Vec<TaskEvent>,
    pub jobs: Vec<NewJob>,
    /// The links of `jobs`, in the same order.
    pub links: Vec<TaskJob>,
    pub webhooks: Vec<NewWebhook>,
    /// Jobs that are not valid, each with the reason.
    rejected: Vec<(TaskJob, String)>,
}

/// An event of a task to publish.
pub struct TaskEvent {
    pub id: Uuid,
    pub kind: String,
    pub task: TaskId,
    /// Its number among the events of the task.
    pub sequence: u64,
    pub correlation: String,
    pub actor: String,
    pub data: String,
}

/// A job whose end a task waits for.
#[derive(Clone, Debug)]
pub struct TaskJob {
    pub job: JobId,
    pub task: TaskId,
    pub name: String,
    pub state: String,
    pub epoch: u64,
}

/// The tasks and the answers that a batch needs.
#[derive(Default)]
pub struct Batch {
    pub tasks: HashMap<TaskId, ChangedTask>,
    /// Answers to events that the tasks have received before, by the ids of the events.
    pub known: HashMap<(TaskId, String), TaskAnswer>,
    /// Tasks that do not match are not changed.
    pub only: Option<TaskFilter>,
}

impl Batch {
    /// Adds a stored task. `body_bytes`: the size of its stored body.
    pub fn add(&mut self, id: TaskId, view: TaskView, definition: Arc<Definition>, body_bytes: usize) {
        let before = TaskColumns::of(&view);
        let task = ChangedTask { body_bytes, ..ChangedTask::new(view, definition, Some(before)) };
        self.tasks.insert(id, task);
    }

    /// Applies the inputs to the tasks in memory, and adds to `plan` what has to be written.
    pub fn plan(&mut self, plan: &mut Plan, inputs: Vec<TaskInput>, now: Timestamp) {
        for TaskInput { task: id, input } in inputs {
            let answer = self.apply(plan, id, input, now);
            plan.answers.push(answer);
            self.fail_jobs(plan, now);
        }
    }

    /// Adds to `plan` what has to be written for a new task.
    pub fn plan_new(&mut self, plan: &mut Plan, new: &NewTask, admission: Admission, now: Timestamp) {
        let first = match (admission, &new.first.unstarted) {
            (Admission::Queue, Some(task)) => queue(&new.definition, task, now),
            _ => new.first.clone(),
        };
        let view = TaskView {
            machine: new.definition.machine.clone(),
            version: new.definition.version,
            title: new.title.clone(),
            correlation: new.correlation.clone(),
            tags: new.tags.clone(),
            updated_at: now,
            events: 0,
            task: first.task.clone(),
        };
        let mut changed = ChangedTask::new(view, new.definition.clone(), None);
        plan.add_step(new.id, &mut changed, first, &new.first.task.created_by, now);
        self.tasks.insert(new.id, changed);
        self.fail_jobs(plan, now);
    }

    /// Rejects a planned job that cannot be submitted. Its task gets the failure immediately, so that it does not wait for the job and
    /// the other tasks of the batch are stored.
    pub fn reject(&mut self, plan: &mut Plan, job: usize, reason: String, now: Timestamp) {
        plan.jobs.remove(job);
        let link = plan.links.remove(job);
        plan.rejected.push((link, reason));
        self.fail_jobs(plan, now);
    }

    /// Notifies tasks about jobs that cannot be submitted.
    fn fail_jobs(&mut self, plan: &mut Plan, now: Timestamp) {
        while let Some((link, error)) = plan.rejected.pop() {
            let end = JobEnd::Failed { error: Some(error), reason: Some("invalid".into()) };
            let TaskInput { task, input } = job_end(&link, end, now);
            self.apply(plan, task, input, now);
        }
    }

    fn apply(&mut self, plan: &mut Plan, id: TaskId, input: Input, now: Timestamp) -> Option<TaskAnswer> {
        let changed = self.tasks.get_mut(&id)?;
        let event_id = event_id(&input);
        if let Some(known) = event_id.as_ref().and_then(|event| self.known.get(&(id, event.clone()))) {
            return Some(TaskAnswer { duplicate: true, ..known.clone() });
        }
        if self.only.as_ref().is_some_and(|only| !only.matches(&changed.view)) {
            return Some(TaskAnswer {
                outcome: Outcome::Rejected,
                state: changed.view.task.state(),
                reason: Some("the task no longer matches the filter".to_owned()),
                duplicate: false,
            });
        }
        let actor = actor(&input);
        let migration = if let Input::Migrate(migration) = &input { Some(migration.clone()) } else { None };
        let applied = step(&changed.definition, &changed.view.task, input, now);
        let answer = TaskAnswer {
            outcome: applied.outcome,
            state: applied.task.state(),
            reason: applied.reason.clone(),
            duplicate: false,
        };
        // A heartbeat is not recorded, and a rejected event may be sent again.
        if let Some(event_id) = event_id.filter(|_| !applied.records.is_empty()) {
            self.known.insert((id, event_id.clone()), answer.clone());
            plan.inbox.push((id, event_id, answer.clone()));
        }
        if let Some(migration) = migration.filter(|_| applied.outcome == Outcome::Applied) {
            changed.view.version = migration.definition.version;
            changed.definition = migration.definition.clone();
        }
        if applied.task != changed.view.task {
            changed.is_changed = true;
            changed.view.updated_at = now;
        }
        let events = changed.view.events;
        plan.add_step(id, changed, applied, &actor, now);
        changed.is_changed |= changed.view.events != events;
        Some(answer)
    }

    /// Returns the earliest due time among the tasks that the batch makes due earlier than before.
    pub fn new_due(&self) -> Option<Timestamp> {
        let due = self.tasks.values().filter(|task| task.is_changed).filter_map(|task| {
            let due = task.view.task.due()?;
            let before = task.before.as_ref().and_then(|before| before.due_at);
            before.is_none_or(|before| due.as_ms() < before).then_some(due)
        });
        due.min()
    }

    /// Returns the tasks that the batch has changed.
    pub fn changed(&mut self) -> impl Iterator<Item = (TaskId, &mut ChangedTask)> {
        self.tasks.iter_mut().filter(|(_, task)| task.is_changed).map(|(id, task)| (*id, task))
    }
}

impl Plan {
    /// Returns how many deadlines the tasks of the batch missed.
    pub fn deadlines_missed(&self) -> usize {
        self.events.iter().filter(|event| event.kind == "task.deadline_missed").count()
    }

    fn add_step(&mut self, id: TaskId, changed: &mut ChangedTask, step: Step, actor: &str, now: Timestamp) {
        let view = &mut changed.view;
        for record in &step.records {
            if let Some(to) = &record.to {
                // A task that is cancelled while it is queued was never in a state.
                let is_first = record.from.is_empty() && record.event != "task.cancelled";
                let kind = if is_first { "task.created" } else { "task.state.changed" };
                let (machine, version) = (view.machine.clone(), view.version);
                let payload = StateChanged {
                    event: &record.event,
                    from: &record.from,
                    machine: &machine,
                    reason: record.reason.as_deref(),
                    to,
                    version,
                };
                self.add_event(id, view, kind, &payload, actor, now);
            }
        }
        for effect in step.effects {
            match effect {
                Effect::Emit { event: kind, payload } => self.add_event(id, view, &kind, &payload, actor, now),
                Effect::Notice { event: kind, data } if kind.starts_with("task.") => {
                    self.add_event(id, view, kind, &data, actor, now);
                }
                Effect::Notice { event: kind, data } => {
                    self.add_event(id, view, &format!("task.{kind}"), &data, actor, now);
                }
                Effect::Job(request) => self.add_job(id, &view.correlation, request),
                Effect::Webhook(notice) => self.webhooks.extend(approval_webhooks::webhooks(id, view, &notice, now)),
            }
        }
        self.records.extend(step.records.into_iter().map(|record| (id, record)));
        changed.view.task = step.task;
    }

    fn add_event(
        &mut self,
        id: TaskId,
        view: &mut TaskView,
        kind: &str,
        payload: &impl Serialize,
        actor: &str,
        now: Timestamp,
    ) {
        let event_id = Uuid::now_v7();
        let metadata = Metadata { originator: ORIGINATOR, task_id: id, timestamp: now, trace_id: event_id };
        view.events += 1;
        self.events.push(TaskEvent {
            id: event_id,
            kind: kind.to_owned(),
            task: id,
            sequence: view.events,
            correlation: view.correlation.clone(),
            actor: actor.to_owned(),
            data: serde_json::to_string(&Published { metadata, payload }).expect("events are JSON"),
        });
    }

    fn add_job(&mut self, id: TaskId, correlation: &str, request: JobRequest) {
        let job = request.job(correlation);
        let JobRequest { name, state, epoch, .. } = request;
        let link = |job| TaskJob { job, task: id, name, state, epoch };
        match job {
            Ok(mut job) => {
                job.options.task_id = Some(id);
                self.links.push(link(job.id));
                self.jobs.push(job);
            }
            Err(errors) => self.rejected.push((link(JobId::new()), FieldError::join(&errors))),
        }
    }
}

/// Returns the ids of the tasks that inputs are for, in a fixed order, so that two batches lock them in the same order.
pub fn task_ids(inputs: &[&TaskInput]) -> Vec<TaskId> {
    let ids: HashSet<TaskId> = inputs.iter().map(|input| input.task).collect();
    let mut ids: Vec<TaskId> = ids.into_iter().collect();
    ids.sort_unstable();
    ids
}

/// Returns the tasks and ids of the events among inputs.
pub fn event_ids(inputs: &[&TaskInput]) -> Vec<(TaskId, String)> {
    inputs.iter().filter_map(|input| Some((input.task, event_id(&input.input)?))).collect()
}

fn event_id(input: &Input) -> Option<String> {
    match input {
        Input::Event(event) if !event.id.is_empty() => Some(event.id.clone()),
        _ => None,
    }
}

fn actor(input: &Input) -> String {
    match input {
        Input::Event(event) | Input::JobEnded { event, .. } => event.actor.clone(),
        Input::Decision { caller, .. } => caller.actor.clone(),
        Input::Cancel { actor, .. } | Input::Pause { actor } | Input::Resume { actor } => actor.clone(),
        Input::Migrate(migration) => migration.actor.clone(),
        Input::Timers | Input::Start => TASKS.to_owned(),
    }
}

/// Actor of the changes that Faena itself makes to a task.
pub const TASKS: &str = "system:tasks";

/// Returns the event that notifies a task of the end of a job.
pub fn job_end(link: &TaskJob, end: JobEnd, now: Timestamp) -> TaskInput {
    let (name, payload) = match end {
        JobEnd::Completed { result } => {
            let result = result.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null);
            ("completed", json!({"jobId": link.job, "result": result}))
        }
        JobEnd::Failed { error, reason } => {
            ("failed", json!({"jobId": link.job, "error": {"message": error, "reason": reason}}))
        }
    };
    let event = faena_machine::Event {
        id: String::new(),
        kind: format!("job.{}.{name}", link.name),
        payload,
        actor: TASKS.to_owned(),
        decider: None,
        at: now,
    };
    TaskInput { task: link.task, input: Input::JobEnded { state: link.state.clone(), epoch: link.epoch, event } }
}

/// How a job ended.
pub enum JobEnd {
    Completed {
        result: Option<String>,
    },
    /// It failed, was cancelled, or was deleted before it ended.
    Failed {
        error: Option<String>,
        reason: Option<String>,
    },
}

/// Returns the error for a machine whose version exists with another content.
pub fn version_conflict(definition: &Definition) -> StoreError {
    let message = format!(
        "machine {} has a version {} with another definition; give the new one another version",
        definition.machine, definition.version
    );
    StoreError::Conflict { message, existing_job: None }
}

/// Returns the audit entry of a new version.
pub fn machine_audit(definition: &Definition, by: &str) -> AuditEntry {
    AuditEntry {
        actor: by.into(),
        action: "machine.register".into(),
        target: format!("{}:{}", definition.machine, definition.version),
        details: json!({"hash": definition.hash}),
        count: 1,
    }
}
