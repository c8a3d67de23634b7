//! Applies one input to a task: a pure function of the definition, the task, the input and the time.

mod approval;
mod dispatch;
mod fork;
mod migrate;
mod start;
mod states;
mod timers;
mod why;

use std::{collections::BTreeSet, io, sync::Arc};

use faena_domain::Timestamp;
pub use fork::{HistoryPoint, fork};
pub use migrate::Migration;
use serde_json::{Map, Value, json};
pub use start::queue;
pub use why::{WaitReason, why};

use crate::{
    definition::{Definition, StateIndex},
    expression::Variables,
    task::{Caller, Effect, Event, Outcome, Record, Status, Task},
};

/// An input that a task reacts to.
#[derive(Clone, Debug)]
pub enum Input {
    /// An event from outside.
    Event(Event),
    /// The end of a job, with the stay in a state that submitted it. It has no effect after that stay.
    JobEnded {
        state: String,
        epoch: u64,
        event: Event,
    },
    /// A caller decides about the open approval.
    Decision {
        caller: Caller,
        approve: bool,
        hash: Option<String>,
        comment: Option<String>,
    },
    /// A timer is due.
    Timers,
    Cancel {
        actor: String,
        reason: Option<String>,
    },
    Pause {
        actor: String,
    },
    Resume {
        actor: String,
    },
    /// Moves the task to another version of its machine.
    Migrate(Arc<Migration>),
    /// Starts a queued task.
    Start,
}

/// Result of an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub task: Task,
    pub outcome: Outcome,
    /// Why the outcome is not [`Outcome::Applied`], or why the task ended with a fault.
    pub reason: Option<String>,
    pub records: Vec<Record>,
    pub effects: Vec<Effect>,
    /// For a new task: the task before it entered its first state, for [`queue`].
    pub unstarted: Option<Arc<Task>>,
}

/// Maximum number of states that one input may lead through. A machine that needs more has a loop in its own events.
const MAX_MOVES: u32 = 100;

/// Maximum number of events that may wait for a state that handles them.
const MAX_DEFERRED: usize = 100;

/// Creates a task in the first state of its machine, and gives it the start event.
pub fn create(
    definition: &Definition,
    id: String,
    creator: Caller,
    data: Value,
    now: Timestamp,
) -> Result<Step, String> {
    if !data.is_object() {
        return Err("the data of a task must be an object".to_owned());
    }
    if let Some(schema) = &definition.input {
        check_schema(&schema.validator, &data, "data")?;
    }
    check_size(definition, &data)?;
    let task = Task::new(id, &creator, data, definition, now);
    start::first_step(definition, task, now)
}

/// Applies an input to a task. The result contains the task as it is afterwards.
pub fn step(definition: &Definition, task: &Task, input: Input, now: Timestamp) -> Step {
    if let Input::Migrate(migration) = &input {
        return migration.apply(definition, task, now);
    }
    let mut run = Run::new(definition, task, now);
    if let Input::Event(event) = &input
        && let Err(error) = run.check_event(event)
    {
        return unchanged(task, Outcome::Invalid, Some(error));
    }
    let (name, actor, is_internal) = match &input {
        Input::Event(event) => (event.kind.clone(), event.actor.clone(), false),
        Input::JobEnded { event, .. } => (event.kind.clone(), event.actor.clone(), true),
        Input::Timers => ("timer".into(), "system:tasks".into(), true),
        Input::Decision { caller, .. } => ("approval.decided".into(), caller.actor.clone(), false),
        Input::Cancel { actor, .. } => ("task.cancelled".into(), actor.clone(), true),
        Input::Pause { actor } | Input::Resume { actor } => ("task.paused".into(), actor.clone(), false),
        Input::Migrate(migration) => ("task.migrated".into(), migration.actor.clone(), false),
        Input::Start => ("task.created".into(), "system:tasks".into(), true),
    };
    match run.apply(input) {
        Ok((outcome @ (Outcome::Rejected | Outcome::Forbidden), reason)) => unchanged(task, outcome, reason),
        Ok((outcome, reason)) => run.finish(outcome, reason),
        // The sender can correct an event. Faena's own inputs and cancellations must not be lost, so the task ends where it is.
        Err(error) if !is_internal => unchanged(task, Outcome::Rejected, Some(error)),
        Err(error) => {
            let mut run = Run::new(definition, task, now);
            run.end_with_fault(&name, &actor, error.clone());
            run.finish(Outcome::Applied, Some(error))
        }
    }
}

fn unchanged(task: &Task, outcome: Outcome, reason: Option<String>) -> Step {
    Step { task: task.clone(), outcome, reason, records: Vec::new(), effects: Vec::new(), unstarted: None }
}

type Answer = (Outcome, Option<String>);

/// One step in progress.
struct Run<'a> {
    definition: &'a Definition,
    task: Task,
    now: Timestamp,
    records: Vec<Record>,
    effects: Vec<Effect>,
    /// Events that the step itself created.
    created: Vec<Event>,
    moves: u32,
    /// Whether a transition was taken since the deferred events were last offered.
    has_changed: bool,
    /// Fields of the data that changed since the last record.
    changed: BTreeSet<String>,
    /// Whether a counter changed since the last record.
    has_counted: bool,
    /// The version to record, if the task has just got it.
    new_version: Option<u32>,
    /// Whether states are entered without their entry actions.
    skips_entry: bool,
}

impl<'a> Run<'a> {
    fn new(definition: &'a Definition, task: &Task, now: Timestamp) -> Run<'a> {
        let task = task.clone();
        Run {
            definition,
            task,
            now,
            records: Vec::new(),
            effects: Vec::new(),
            created: Vec::new(),
            moves: 0,
            has_changed: false,
            changed: BTreeSet::new(),
            has_counted: false,
            new_version: None,
            skips_entry: false,
        }
    }

    fn finish(self, outcome: Outcome, reason: Option<String>) -> Step {
        Step { task: self.task, outcome, reason, records: self.records, effects: self.effects, unstarted: None }
    }

    fn apply(&mut self, input: Input) -> Result<Answer, String> {
        if self.task.status.has_ended() {
            return Ok(self.apply_after_end(input));
        }
        let answer = match input {
            Input::Event(event) if self.task.status == Status::Queued => self.keep_for_start(&event),
            Input::Event(event) => {
                self.record_activity(&event);
                self.offer(&event)?
            }
            Input::JobEnded { state, epoch, event } => {
                if !self.task.is_active(&state, epoch) {
                    let reason = format!("the job belongs to an earlier stay in {state}");
                    self.record(&event, Outcome::Stale, None, Vec::new(), Some(reason.clone()));
                    return Ok((Outcome::Stale, Some(reason)));
                }
                self.task.last_seen = self.task.last_seen.max(self.now);
                self.offer(&event)?
            }
            Input::Decision { caller, approve, hash, comment } => {
                self.decide(&caller, approve, hash.as_deref(), comment)?
            }
            Input::Timers => {
                self.fire_timers()?;
                (Outcome::Applied, None)
            }
            Input::Cancel { actor, reason } => {
                self.cancel(&actor, reason)?;
                (Outcome::Applied, None)
            }
            Input::Pause { actor } => self.pause(&actor),
            Input::Resume { actor } => self.resume(&actor),
            Input::Start => self.start_queued()?,
            // It needs the other definition, so `step` has handled it.
            Input::Migrate(_) => return Ok((Outcome::Rejected, Some("a migration is a step of its own".into()))),
        };
        self.settle()?;
        Ok(answer)
    }

    fn apply_after_end(&mut self, input: Input) -> Answer {
        let reason = "the task has ended".to_owned();
        match input {
            Input::Event(event) | Input::JobEnded { event, .. } => {
                self.record(&event, Outcome::Ignored, None, Vec::new(), Some(reason.clone()));
                (Outcome::Ignored, Some(reason))
            }
            Input::Timers | Input::Start => (Outcome::Ignored, Some(reason)),
            _ => (Outcome::Rejected, Some(reason)),
        }
    }

    /// Handles the events that the step created, and offers deferred events until none of them is handled.
    fn settle(&mut self) -> Result<(), String> {
        loop {
            if self.task.status != Status::Running {
                return Ok(());
            }
            if !self.created.is_empty() {
                let event = self.created.remove(0);
                self.offer(&event)?;
            } else if self.has_changed {
                self.has_changed = false;
                self.offer_deferred()?;
            } else {
                return Ok(());
            }
        }
    }

    fn pause(&mut self, actor: &str) -> Answer {
        match self.task.status {
            Status::Paused => return (Outcome::Rejected, Some("the task is paused already".into())),
            Status::Queued => return (Outcome::Rejected, Some("the task is queued; it has not started".into())),
            _ => {}
        }
        self.task.status = Status::Paused;
        self.task.paused_at = Some(self.now);
        self.record(&self.faena_event("task.paused", actor), Outcome::Applied, None, Vec::new(), None);
        (Outcome::Applied, None)
    }

    /// Continues a paused task. The time of the pause does not count towards any limit.
    fn resume(&mut self, actor: &str) -> Answer {
        let Some(paused_at) = self.task.paused_at.take() else {
            return (Outcome::Rejected, Some("the task is not paused".into()));
        };
        let pause = self.now.ms_since(paused_at).max(0);
        for timer in &mut self.task.timers {
            timer.due = timer.due.plus_ms(pause);
        }
        self.task.last_seen = self.task.last_seen.plus_ms(pause);
        self.task.progress_at = self.task.progress_at.plus_ms(pause);
        self.task.status = Status::Running;
        self.record(&self.faena_event("task.resumed", actor), Outcome::Applied, None, Vec::new(), None);
        self.has_changed = true;
        (Outcome::Applied, None)
    }

    fn cancel(&mut self, actor: &str, reason: Option<String>) -> Result<(), String> {
        self.task.paused_at = None;
        self.task.status = Status::Running;
        let event = self.faena_event("task.cancelled", actor);
        match self.definition.cancel {
            Some(target) => self.go_to(&event, None, target, Vec::new(), reason),
            None => {
                self.record(&event, Outcome::Applied, None, Vec::new(), reason);
                self.end(Status::Cancelled);
                Ok(())
            }
        }
    }

    /// Ends a task that cannot continue, without another state.
    fn end_with_fault(&mut self, event: &str, actor: &str, fault: String) {
        let event = self.faena_event(event, actor);
        self.record(&event, Outcome::Applied, None, Vec::new(), Some(fault.clone()));
        self.task.fault = Some(fault);
        self.end(Status::Failed);
    }

    /// Ends the task in its current state.
    fn end(&mut self, status: Status) {
        self.task.status = status;
        self.task.ended_at = Some(self.now);
        self.task.paused_at = None;
        self.close_approval();
        self.task.timers.clear();
        for event in std::mem::take(&mut self.task.deferred) {
            self.record(
                &event,
                Outcome::Ignored,
                None,
                Vec::new(),
                Some("the task ended before a state handled it".into()),
            );
        }
        let data = json!({"state": self.task.state(), "status": self.task.status, "fault": self.task.fault});
        self.effects.push(Effect::Notice { event: "task.ended", data });
    }

    fn faena_event(&self, kind: &str, actor: &str) -> Event {
        let (id, payload) = (String::new(), json!({}));
        Event { id, kind: kind.into(), payload, actor: actor.into(), decider: None, at: self.now }
    }

    fn record(
        &mut self,
        event: &Event,
        outcome: Outcome,
        to: Option<String>,
        actions: Vec<String>,
        reason: Option<String>,
    ) {
        let from = self.task.state();
        self.record_from(from, event, outcome, to, actions, reason);
    }

    fn record_from(
        &mut self,
        from: String,
        event: &Event,
        outcome: Outcome,
        to: Option<String>,
        actions: Vec<String>,
        reason: Option<String>,
    ) {
        let changed = std::mem::take(&mut self.changed);
        let set: Map<String, Value> =
            changed.into_iter().filter_map(|key| Some((key.clone(), self.task.data.get(&key)?.clone()))).collect();
        let counters = std::mem::take(&mut self.has_counted).then(|| self.task.counters.clone());
        self.task.sequence += 1;
        self.records.push(Record {
            sequence: self.task.sequence,
            at: self.now,
            event: event.kind.clone(),
            event_id: event.id.clone(),
            actor: event.actor.clone(),
            outcome,
            from,
            to,
            actions,
            reason,
            set,
            counters,
            version: self.new_version.take(),
        });
    }

    fn variables<'s>(&'s self, event: &'s Event) -> Variables<'s> {
        let meta = || json!({"id": event.id, "type": event.kind, "at": event.at.as_ms(), "actor": event.actor});
        Variables::new(&self.task.data, &event.payload, meta, || self.task_variable(), self.now.as_ms())
    }

    /// Returns what expressions see as `task`. Contains every counter, even if it is 0.
    fn task_variable(&self) -> Value {
        let counters = self.definition.counters.keys();
        let counters: serde_json::Map<String, Value> =
            counters.map(|name| (name.clone(), self.task.counters.get(name).copied().unwrap_or(0).into())).collect();
        json!({
            "id": self.task.id,
            "machine": self.definition.machine,
            "version": self.definition.version,
            "state": self.task.state(),
            "createdBy": self.task.created_by,
            "createdAt": self.task.created_at.as_ms(),
            "counters": counters,
        })
    }

    fn state_index(&self, name: &str) -> Result<StateIndex, String> {
        self.definition.state(name).ok_or_else(|| format!("the machine has no state \"{name}\""))
    }
}

fn check_schema(validator: &jsonschema::Validator, value: &Value, what: &str) -> Result<(), String> {
    let errors: Vec<String> = validator
        .iter_errors(value)
        .take(10)
        .map(|error| match error.instance_path().to_string() {
            path if path.is_empty() => format!("{what}: {error}"),
            path => format!("{what}{}: {error}", path.replace('/', ".")),
        })
        .collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
}

fn check_size(definition: &Definition, data: &Value) -> Result<(), String> {
    let mut bytes = ByteCount(0);
    serde_json::to_writer(&mut bytes, data).map_err(|error| error.to_string())?;
    let ByteCount(bytes) = bytes;
    if bytes > definition.limits.context {
        return Err(format!("the task's data would have {bytes} bytes; the limit is {}", definition.limits.context));
    }
    Ok(())
}

/// Counts what is written to it.
struct ByteCount(usize);

impl io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
