//! Moves a task to another version of its machine.
//!
//! The task leaves its states without their exit actions and enters the mapped state of the other version. Its epoch grows, so that
//! earlier timers, approvals and jobs are stale. Data, history and age do not change.

use std::{collections::BTreeMap, sync::Arc};

use faena_domain::Timestamp;

use super::{Run, Step, check_size, unchanged};
use crate::{
    definition::{Definition, StateIndex},
    task::{Event, Outcome, Status, Task, TimerKind},
};

/// How tasks of one version move to another.
#[derive(Clone, Debug)]
pub struct Migration {
    pub from: u32,
    /// The version that tasks move to.
    pub definition: Arc<Definition>,
    /// The new state for each old state. A state that is not listed keeps its name.
    pub states: BTreeMap<String, String>,
    /// Whether the entry actions of the new state run.
    pub runs_entry: bool,
    pub actor: String,
}

impl Migration {
    /// Returns the errors in the map: the name of the old state, and what is wrong.
    pub fn check(&self, from: &Definition) -> Vec<(String, String)> {
        let mut errors = Vec::new();
        for (old, new) in &self.states {
            if from.state(last(old)).is_none() {
                errors.push((old.clone(), format!("version {} has no state \"{old}\"", from.version)));
            }
            if self.definition.state(last(new)).is_none() {
                errors.push((old.clone(), format!("version {} has no state \"{new}\"", self.definition.version)));
            }
        }
        errors
    }

    /// Returns the state that a task in `state` moves to. The mapping of an inner state takes precedence over that of its parent.
    pub fn target(&self, state: &str) -> Result<StateIndex, String> {
        let mut names: Vec<&str> = state.split('.').collect();
        names.reverse();
        let named = |name: &str| self.states.iter().find(|(old, _)| last(old) == name).map(|(_, new)| last(new));
        let target = names.iter().find_map(|name| named(name)).unwrap_or_else(|| last(state));
        self.definition
            .state(target)
            .ok_or_else(|| format!("version {} has no state {target}; add {state} to the map", self.definition.version))
    }

    /// Moves a task, or returns why it cannot move.
    pub(super) fn apply(&self, from: &Definition, task: &Task, now: Timestamp) -> Step {
        let reject = |reason: String| unchanged(task, Outcome::Rejected, Some(reason));
        if task.status.has_ended() {
            return reject("the task has ended".to_owned());
        }
        if from.version != self.from || from.machine != self.definition.machine {
            return reject(format!("the task has version {} of {}", from.version, from.machine));
        }
        if task.status == Status::Queued {
            return self.apply_to_queued(task, now).unwrap_or_else(reject);
        }
        let target = match self.target(&task.state()) {
            Ok(target) => target,
            Err(reason) => return reject(reason),
        };
        let mut run = Run::new(&self.definition, task, now);
        match run.migrate(self, from, target) {
            Ok(()) => run.finish(Outcome::Applied, None),
            Err(reason) => reject(reason),
        }
    }
}

impl Migration {
    /// Moves a queued task to the other version, in which it starts later.
    fn apply_to_queued(&self, task: &Task, now: Timestamp) -> Result<Step, String> {
        let mut run = Run::new(&self.definition, task, now);
        check_size(run.definition, &run.task.data)?;
        if let Some(state) = &task.start_state {
            run.task.start_state = Some(self.definition.states[self.target(state)?].name.clone());
        }
        run.task.counters.retain(|name, _| self.definition.counters.contains_key(name));
        let unknown = run.drop_unknown_events();
        run.new_version = Some(self.definition.version);
        let (event, reason) = (run.faena_event("task.migrated", &self.actor), self.reason());
        run.record(&event, Outcome::Applied, None, Vec::new(), Some(reason));
        run.record_dropped(unknown);
        Ok(run.finish(Outcome::Applied, None))
    }

    fn reason(&self) -> String {
        format!("from version {} to {}", self.from, self.definition.version)
    }
}

/// Returns the last state of a path of nested states.
fn last(state: &str) -> &str {
    state.rsplit('.').next().unwrap_or(state)
}

impl Run<'_> {
    fn migrate(&mut self, migration: &Migration, from: &Definition, target: StateIndex) -> Result<(), String> {
        check_size(self.definition, &self.task.data)?;
        let event = self.faena_event("task.migrated", &migration.actor);
        let (state, version) = (self.task.state(), self.definition.version);
        self.close_approval();
        self.task.active.clear();
        self.move_lifetime(from);
        let counters = self.task.counters.len();
        self.task.counters.retain(|name, _| self.definition.counters.contains_key(name));
        self.has_counted = self.task.counters.len() != counters;
        let unknown = self.drop_unknown_events();
        self.skips_entry = !migration.runs_entry;
        let mut done = Vec::new();
        let ends = self.enter(&event, None, target, &mut done)?;
        self.skips_entry = false;
        self.new_version = Some(version);
        let to = Some(self.task.state());
        self.record_from(state, &event, Outcome::Applied, to, done, Some(migration.reason()));
        self.record_dropped(unknown);
        self.end_if(ends);
        self.settle()
    }

    /// Removes the deferred events that this version does not accept, and returns them.
    fn drop_unknown_events(&mut self) -> Vec<Event> {
        let deferred = std::mem::take(&mut self.task.deferred);
        let (kept, unknown): (Vec<Event>, Vec<Event>) =
            deferred.into_iter().partition(|event| self.check_event(event).is_ok());
        self.task.deferred = kept;
        unknown
    }

    fn record_dropped(&mut self, events: Vec<Event>) {
        for event in events {
            let reason = format!("version {} does not accept it", self.definition.version);
            self.record(&event, Outcome::Ignored, None, Vec::new(), Some(reason));
        }
    }

    /// Removes the timers of states. The lifetime of the task continues, with the limit of the new version.
    fn move_lifetime(&mut self, from: &Definition) {
        let longer_ms = self.definition.limits.lifetime_ms - from.limits.lifetime_ms;
        // The pause so far extends the lifetime. The timers of the new state start now, so the pause does not extend
        // them.
        let paused_ms = match (self.task.status, &mut self.task.paused_at) {
            (Status::Paused, Some(paused_at)) => self.now.ms_since(std::mem::replace(paused_at, self.now)).max(0),
            _ => 0,
        };
        self.task.timers.retain(|timer| timer.kind == TimerKind::Lifetime);
        for timer in &mut self.task.timers {
            timer.due = timer.due.plus_ms(longer_ms.saturating_add(paused_ms));
        }
    }
}
