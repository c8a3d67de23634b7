//! Leaves and enters states, and performs their actions.

use serde_json::{Value, json};

use super::{MAX_MOVES, Run, check_size};
use crate::{
    definition::{Action, Ending, StateIndex},
    task::{Active, Effect, Event, JobRequest, Outcome, Status, TimerKind},
};

/// One stay in a state. Each job of a task belongs to a stay.
pub(super) struct Stay {
    pub state: String,
    pub epoch: u64,
}

impl<'a> Run<'a> {
    /// Enters the first state of a new task. Its first record has all of its data.
    pub(super) fn begin(&mut self, event: &Event, initial: StateIndex, reason: Option<String>) -> Result<(), String> {
        self.changed.extend(self.task.data.as_object().into_iter().flatten().map(|(key, _)| key.clone()));
        self.has_counted = !self.task.counters.is_empty();
        self.new_version = Some(self.definition.version);
        let mut done = Vec::new();
        let ends = self.enter(event, None, initial, &mut done)?;
        let to = Some(self.task.state());
        self.record_from(String::new(), event, Outcome::Applied, to, done, reason);
        self.end_if(ends);
        Ok(())
    }

    /// Moves the task to another state: leaves the inner states first, performs the actions of the transition, and enters
    /// the outer states first. `owner` is the state that the transition belongs to; without one, every state is left.
    pub(super) fn go_to(
        &mut self,
        event: &Event,
        owner: Option<StateIndex>,
        target: StateIndex,
        actions: Vec<&'a Action>,
        reason: Option<String>,
    ) -> Result<(), String> {
        self.moves += 1;
        if self.moves > MAX_MOVES {
            return Err(format!("one event led through more than {MAX_MOVES} states"));
        }
        self.task.transitions += 1;
        if self.task.transitions > self.definition.limits.transitions && self.definition.states[target].ends.is_none() {
            return self.limit_exceeded(event, format!("{} transitions", self.definition.limits.transitions));
        }
        let from = self.task.state();
        let common = owner.and_then(|owner| self.common_ancestor(owner, target));
        let mut done = Vec::new();
        while let Some(active) = self.task.active.last() {
            let index = self.state_index(&active.state)?;
            if Some(index) == common {
                break;
            }
            let exit: Vec<&Action> = self.definition.states[index].exit.iter().collect();
            let stay = Stay { state: active.state.clone(), epoch: active.epoch };
            done.extend(self.perform(event, &exit, &stay)?);
            self.leave();
        }
        // Jobs of the transition belong to the stay in its target, which begins below.
        let outer = self.definition.ancestors(target).take_while(|index| Some(*index) != common).count() as u64;
        let stay = Stay { state: self.definition.states[target].name.clone(), epoch: self.task.epoch + outer };
        done.extend(self.perform(event, &actions, &stay)?);
        let ends = self.enter(event, common, target, &mut done)?;
        let to = Some(self.task.state());
        self.record_from(from, event, Outcome::Applied, to, done, reason);
        self.end_if(ends);
        Ok(())
    }

    /// Moves a task that exceeded a limit of its machine to the final state that the machine names for this case, or
    /// ends it.
    pub(super) fn limit_exceeded(&mut self, event: &Event, limit: String) -> Result<(), String> {
        let reason = format!("the task exceeded its limit of {limit}");
        match self.definition.limits.to {
            Some(target) if self.definition.states[target].ends.is_some() => {
                self.go_to(event, None, target, Vec::new(), Some(reason))
            }
            _ => {
                self.end_with_fault(&event.kind, &event.actor, reason);
                Ok(())
            }
        }
    }

    /// Returns the innermost state that contains both `owner` and `target` and stays active. A transition always leaves
    /// its `owner`.
    fn common_ancestor(&self, owner: StateIndex, target: StateIndex) -> Option<StateIndex> {
        let around_target: Vec<StateIndex> = self.definition.ancestors(target).skip(1).collect();
        self.definition.ancestors(owner).skip(1).find(|index| around_target.contains(index))
    }

    fn leave(&mut self) {
        let Some(left) = self.task.active.last().cloned() else { return };
        if self.task.approval.as_ref().is_some_and(|approval| approval.epoch == left.epoch) {
            self.close_approval();
        }
        self.task.active.pop();
        self.task.timers.retain(|timer| timer.state != left.state || timer.kind == TimerKind::Lifetime);
    }

    /// Enters the states inside `around` down to `target`, and then the initial states inside `target`.
    pub(super) fn enter(
        &mut self,
        event: &Event,
        around: Option<StateIndex>,
        target: StateIndex,
        done: &mut Vec<String>,
    ) -> Result<Option<Ending>, String> {
        let innermost = self.definition.innermost_initial(target);
        let mut path: Vec<StateIndex> =
            self.definition.ancestors(innermost).take_while(|index| Some(*index) != around).collect();
        path.reverse();
        for index in path {
            let state = &self.definition.states[index];
            self.task.epoch += 1;
            let active = Active { state: state.name.clone(), epoch: self.task.epoch, since: self.now };
            self.task.active.push(active);
            let entry: Vec<&Action> = state.entry.iter().filter(|_| !self.skips_entry).collect();
            let stay = Stay { state: state.name.clone(), epoch: self.task.epoch };
            done.extend(self.perform(event, &entry, &stay)?);
            self.start_timers(index);
            self.open_approval(event, index)?;
        }
        self.has_changed = true;
        self.task.progress_at = self.task.progress_at.max(self.now);
        self.task.last_seen = self.task.last_seen.max(self.now);
        Ok(self.definition.states[innermost].ends)
    }

    pub(super) fn end_if(&mut self, ends: Option<Ending>) {
        if let Some(ending) = ends {
            self.end(Status::from(ending));
        }
    }

    /// Performs actions in their order and returns a description of each.
    pub(super) fn perform(&mut self, event: &Event, actions: &[&Action], stay: &Stay) -> Result<Vec<String>, String> {
        if actions.is_empty() {
            return Ok(Vec::new());
        }
        let mut done = Vec::new();
        for action in actions {
            match action {
                Action::Set(values) => {
                    let variables = self.variables(event);
                    let computed = values
                        .iter()
                        .map(|(key, template)| Ok((key.clone(), template.evaluate(&variables)?)))
                        .collect::<Result<Vec<(String, Value)>, String>>()?;
                    drop(variables);
                    for (key, value) in computed {
                        done.push(format!("set {key}"));
                        self.changed.insert(key.clone());
                        self.task.data[key] = value;
                    }
                    check_size(self.definition, &self.task.data)?;
                }
                Action::Emit { event: name, data } => {
                    done.push(format!("emit {name}"));
                    let payload = data.evaluate(&self.variables(event))?;
                    self.effects.push(Effect::Emit { event: name.clone(), payload });
                }
                Action::Job(job) => {
                    done.push(format!("job {}", job.name));
                    let payload = job.payload.evaluate(&self.variables(event))?;
                    self.effects.push(Effect::Job(JobRequest {
                        name: job.name.clone(),
                        state: stay.state.clone(),
                        epoch: stay.epoch,
                        job_type: job.job_type.clone(),
                        payload,
                        options: job.options.clone(),
                    }));
                }
            }
        }
        Ok(done)
    }

    /// Publishes one of Faena's own events about this task.
    pub(super) fn notice(&mut self, event: &'static str, mut data: Value) {
        data["state"] = json!(self.task.state());
        self.effects.push(Effect::Notice { event, data });
    }
}
