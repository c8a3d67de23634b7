//! Starts a task: immediately, or after it was queued because its machine has reached its limit of running tasks.
//!
//! A queued task is in no state. It has its data, keeps the events that arrive, and no time limit applies to it.

use std::sync::Arc;

use faena_domain::Timestamp;

use super::{Answer, Run, Step};
use crate::{
    definition::Definition,
    task::{Effect, Event, Outcome, Status, Task, TimerKind},
};

/// Starts a new task.
pub(super) fn first_step(definition: &Definition, task: Task, now: Timestamp) -> Result<Step, String> {
    let mut run = Run::new(definition, &task, now);
    run.begin_task()?;
    Ok(Step { unstarted: Some(Arc::new(task)), ..run.finish(Outcome::Applied, None) })
}

/// Queues a new task, which [`Step::unstarted`] contains, instead of starting it.
pub fn queue(definition: &Definition, task: &Task, now: Timestamp) -> Step {
    let mut run = Run::new(definition, task, now);
    run.task.status = Status::Queued;
    let (event, reason) = (run.faena_event("task.queued", &task.created_by), "its machine is at its limit".to_owned());
    run.record(&event, Outcome::Applied, None, Vec::new(), Some(reason));
    let data = serde_json::json!({"status": Status::Queued});
    run.effects.push(Effect::Notice { event: "task.queued", data });
    run.finish(Outcome::Applied, None)
}

impl Run<'_> {
    /// Keeps an event for the start of a queued task. A heartbeat has no effect.
    pub(super) fn keep_for_start(&mut self, event: &Event) -> Answer {
        let reason = "the task is queued";
        match self.definition.events.get(&event.kind) {
            Some(kind) if kind.heartbeat => (Outcome::Ignored, Some(reason.to_owned())),
            _ => self.defer(event, reason),
        }
    }

    /// Enters the first state, or the one that a fork begins in, and gives a new task its start event.
    fn begin_task(&mut self) -> Result<(), String> {
        let origin = self.task.forked_from.as_ref();
        let reason = origin.map(|origin| format!("from record {} of task {}", origin.record, origin.task_id));
        let kind = if origin.is_some() { "task.forked" } else { "task.created" };
        let created = Event {
            id: String::new(),
            kind: kind.into(),
            payload: self.task.data.clone(),
            actor: self.task.created_by.clone(),
            decider: None,
            at: self.now,
        };
        let initial = match self.task.start_state.take() {
            Some(name) => self.state_index(&name)?,
            None => self.definition.initial,
        };
        self.begin(&created, initial, reason)?;
        if let Some(start) = self.definition.start.as_ref().filter(|_| self.task.forked_from.is_none()) {
            let event = Event { kind: start.clone(), ..created };
            self.check_event(&event)?;
            let (outcome, reason) = self.offer(&event)?;
            if outcome == Outcome::Rejected {
                return Err(reason.unwrap_or_default());
            }
        }
        self.settle()
    }

    /// Starts a queued task. The time in the queue does not count towards any limit.
    pub(super) fn start_queued(&mut self) -> Result<Answer, String> {
        if self.task.status != Status::Queued {
            return Ok((Outcome::Ignored, Some("the task has started".into())));
        }
        self.task.status = Status::Running;
        self.task.started_at = Some(self.now);
        self.task.last_seen = self.task.last_seen.max(self.now);
        self.task.progress_at = self.task.progress_at.max(self.now);
        for timer in self.task.timers.iter_mut().filter(|timer| timer.kind == TimerKind::Lifetime) {
            timer.due = self.now.plus_ms(self.definition.limits.lifetime_ms);
        }
        self.begin_task()?;
        self.has_changed = true;
        Ok((Outcome::Applied, None))
    }
}
