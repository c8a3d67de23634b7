//! Finds the transition for an event, and decides about events that no state handles.

use super::{Answer, MAX_DEFERRED, Run, check_schema, states::Stay};
use crate::{
    definition::{StateIndex, Transition, Unexpected},
    task::{Event, Outcome, Status},
};

impl<'a> Run<'a> {
    /// Checks the type and the payload of an event from outside.
    pub(super) fn check_event(&self, event: &Event) -> Result<(), String> {
        let Some(kind) = self.definition.events.get(&event.kind) else {
            let machine = &self.definition.machine;
            return Err(format!("the machine {machine} has no event \"{}\"", event.kind));
        };
        match &kind.schema {
            Some(schema) => check_schema(&schema.validator, &event.payload, "payload"),
            None => Ok(()),
        }
    }

    /// Records that the sender is alive, and whether it made progress.
    pub(super) fn record_activity(&mut self, event: &Event) {
        self.task.last_seen = self.task.last_seen.max(self.now);
        let progress = self.definition.events.get(&event.kind).and_then(|kind| kind.progress.as_ref());
        let value = progress.and_then(|progress| progress.evaluate(&self.variables(event)).ok());
        if let Some(value) = value
            && value != self.task.progress
        {
            self.task.progress = value;
            self.task.progress_at = self.task.progress_at.max(self.now);
        }
    }

    /// Offers an event to the active states, the innermost first.
    pub(super) fn offer(&mut self, event: &Event) -> Result<Answer, String> {
        let mut rejections = Vec::new();
        let found = self.find(event, &mut rejections);
        if let Some(approve) = found.and_then(|(_, transition)| transition.decision) {
            let (outcome, reason) = self.decide_by_event(event, approve)?;
            if outcome == Outcome::Ignored {
                self.record(event, outcome, None, Vec::new(), reason.clone());
            }
            if outcome != Outcome::Applied {
                return Ok((outcome, reason));
            }
        }
        if self.task.status == Status::Paused {
            return Ok(self.defer(event, "the task is paused"));
        }
        if let Some((owner, transition)) = found {
            self.take(event, owner, transition)?;
            return Ok((Outcome::Applied, None));
        }
        let kind = self.definition.events.get(&event.kind);
        if rejections.is_empty() && kind.is_some_and(|kind| kind.heartbeat) {
            return Ok((Outcome::Applied, None));
        }
        let reason = match rejections.is_empty() {
            true => format!("{} does not handle it", self.task.state()),
            false => rejections.join("; "),
        };
        Ok(self.unexpected(event, reason))
    }

    /// Returns why no state handles a deferred event now.
    pub(super) fn rejections(&self, event: &Event) -> Vec<String> {
        let mut rejections = Vec::new();
        let found = self.find(event, &mut rejections);
        if found.is_some_and(|(_, transition)| transition.decision.is_some()) {
            rejections.push("an event that was deferred cannot decide about an approval; send it again".to_owned());
        }
        if rejections.is_empty() {
            rejections.push(format!("{} does not handle it", self.task.state()));
        }
        rejections
    }

    fn find(&self, event: &Event, rejections: &mut Vec<String>) -> Option<(StateIndex, &'a Transition)> {
        let variables = self.variables(event);
        for active in self.task.active.iter().rev() {
            let owner = self.definition.state(&active.state)?;
            for transition in self.definition.states[owner].transitions(&event.kind) {
                match transition.guard.as_ref().map(|guard| (guard, guard.is_true(&variables))) {
                    None | Some((_, Ok(true))) => return Some((owner, transition)),
                    Some((guard, Ok(false))) => {
                        rejections.push(format!("the condition \"{}\" is false", guard.source()))
                    }
                    Some((_, Err(error))) => rejections.push(error),
                }
            }
        }
        None
    }

    /// Applies the policy for an event that no state handles. Faena's own events have no policy and are ignored.
    fn unexpected(&mut self, event: &Event, reason: String) -> Answer {
        let Some(kind) = self.definition.events.get(&event.kind) else {
            self.record(event, Outcome::Ignored, None, Vec::new(), Some(reason.clone()));
            return (Outcome::Ignored, Some(reason));
        };
        let of_states = self.task.active.iter().rev().find_map(|active| {
            let state = &self.definition.states[self.definition.state(&active.state)?];
            state.unexpected_events.get(&event.kind).copied().or(state.unexpected)
        });
        match of_states.or(kind.unexpected).unwrap_or(self.definition.unexpected) {
            Unexpected::Defer => self.defer(event, &reason),
            Unexpected::Ignore => {
                self.record(event, Outcome::Ignored, None, Vec::new(), Some(reason.clone()));
                (Outcome::Ignored, Some(reason))
            }
            Unexpected::Reject => (Outcome::Rejected, Some(reason)),
        }
    }

    pub(super) fn defer(&mut self, event: &Event, reason: &str) -> Answer {
        if self.task.deferred.len() >= MAX_DEFERRED {
            return (Outcome::Rejected, Some(format!("{MAX_DEFERRED} events wait already")));
        }
        self.record(event, Outcome::Deferred, None, Vec::new(), Some(reason.to_owned()));
        self.task.deferred.push(Event { decider: None, ..event.clone() });
        (Outcome::Deferred, Some(reason.to_owned()))
    }

    /// Applies the first deferred event that a state handles now.
    pub(super) fn offer_deferred(&mut self) -> Result<(), String> {
        for position in 0..self.task.deferred.len() {
            let event = self.task.deferred[position].clone();
            let found = self.find(&event, &mut Vec::new());
            // The sender of a deferred event cannot have seen what the open approval is about.
            let found = found.filter(|(_, transition)| transition.decision.is_none());
            if let Some((owner, transition)) = found {
                self.task.deferred.remove(position);
                self.take(&event, owner, transition)?;
                // The remaining events are offered again, to the task in its new state. Each time one fewer is left, so
                // this ends.
                self.has_changed = true;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Counts an event as the decision of its sender.
    fn decide_by_event(&mut self, event: &Event, approve: bool) -> Result<Answer, String> {
        match &event.decider {
            Some(caller) => self.decide(caller, approve, None, None),
            None => {
                let reason = "the event decides about an approval, which its sender may not do";
                Ok((Outcome::Forbidden, Some(reason.to_owned())))
            }
        }
    }

    /// Takes a transition of the state `owner`.
    fn take(&mut self, event: &Event, owner: StateIndex, transition: &'a Transition) -> Result<(), String> {
        if let Some(name) = &transition.counter {
            let max = self.definition.counters.get(name).map_or(0, |counter| counter.max);
            let count = self.task.counters.get(name).copied().unwrap_or(0);
            if count >= max {
                let exceeded = transition.exceeded.or(self.definition.counters.get(name).and_then(|one| one.exceeded));
                let target = exceeded.ok_or_else(|| format!("the counter {name} is used up"))?;
                let reason = format!("the counter {name} is used up: {count} of {max}");
                return self.go_to(event, Some(owner), target, Vec::new(), Some(reason));
            }
            self.task.counters.insert(name.clone(), count + 1);
            self.has_counted = true;
        }
        for name in &transition.reset {
            self.has_counted |= self.task.counters.remove(name).is_some();
        }
        self.task.progress_at = self.task.progress_at.max(self.now);
        match transition.to {
            Some(target) => self.go_to(event, Some(owner), target, transition.actions.iter().collect(), None),
            None => {
                let state = &self.definition.states[owner].name;
                let epoch = self.task.active.iter().find(|active| active.state == *state).map_or(0, |one| one.epoch);
                let stay = Stay { state: state.clone(), epoch };
                let done = self.perform(event, &transition.actions.iter().collect::<Vec<_>>(), &stay)?;
                self.record(event, Outcome::Applied, None, done, None);
                self.has_changed = true;
                Ok(())
            }
        }
    }
}
