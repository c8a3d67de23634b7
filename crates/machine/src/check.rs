//! Checks that a machine can neither get stuck nor run forever, and that its expressions fit its data.

use std::collections::BTreeSet;

use crate::{
    Expression, Finding, Template, cycles,
    definition::{Action, Definition, State, StateIndex, Transition},
    node::Position,
    types::Scope,
};

/// Parts of a definition that could not be read, so that their absence is not reported as well.
#[derive(Default)]
pub(crate) struct Gaps {
    /// Whether anything is missing.
    pub any: bool,
    /// Whether a target is unknown.
    pub targets: bool,
    /// States with an error inside.
    pub states: BTreeSet<StateIndex>,
}

/// Returns every error of a definition that could be read.
pub(crate) fn check(definition: &Definition, gaps: &Gaps) -> Vec<Finding> {
    let mut check = Check { definition, findings: Vec::new() };
    if !gaps.targets {
        check.check_reachability();
    }
    check.check_counters(gaps);
    for index in (0..definition.states.len()).filter(|index| !gaps.states.contains(index)) {
        check.check_state(index);
    }
    check.check_cycles(gaps);
    check.check_expressions();
    check.findings
}

struct Check<'a> {
    definition: &'a Definition,
    findings: Vec<Finding>,
}

impl<'a> Check<'a> {
    fn add(&mut self, position: Position, path: impl Into<String>, message: impl Into<String>) {
        self.findings.push(Finding::new(position, path, message));
    }

    fn state_path(&self, index: StateIndex) -> String {
        let mut names: Vec<&str> =
            self.definition.ancestors(index).map(|index| self.definition.states[index].name.as_str()).collect();
        names.reverse();
        format!("states.{}", names.join(".states."))
    }

    /// Checks that every state can be reached from the first one.
    fn check_reachability(&mut self) {
        let definition = self.definition;
        let mut reached = BTreeSet::new();
        let counters = definition.counters.values().filter_map(|counter| counter.exceeded);
        let mut next: Vec<StateIndex> = [definition.initial]
            .into_iter()
            .chain(definition.cancel)
            .chain(definition.limits.to)
            .chain(counters)
            .collect();
        while let Some(index) = next.pop() {
            for index in definition.ancestors(definition.innermost_initial(index)).chain([index]) {
                if reached.insert(index) {
                    next.extend(definition.states[index].targets().into_iter().map(|(to, _)| to));
                }
            }
        }
        for (index, state) in definition.states.iter().enumerate() {
            if !reached.contains(&index) {
                self.add(state.position, self.state_path(index), "no transition leads to this state");
            }
        }
    }

    fn check_counters(&mut self, gaps: &Gaps) {
        let definition = self.definition;
        let mut used = BTreeSet::new();
        for (index, state) in definition.states.iter().enumerate() {
            let path = self.state_path(index);
            for transition in state.on.iter().flat_map(|(_, transitions)| transitions) {
                for name in transition.reset.iter().filter(|name| !definition.counters.contains_key(*name)) {
                    self.add(transition.position, &path, format!("resets \"{name}\", which is not under \"counters\""));
                }
                let Some(name) = &transition.counter else { continue };
                used.insert(name.as_str());
                match definition.counters.get(name) {
                    None => {
                        let message = format!("counts \"{name}\", which is not declared under \"counters\"");
                        self.add(transition.position, &path, message);
                    }
                    Some(counter) if counter.exceeded.is_none() && transition.exceeded.is_none() => {
                        let message = format!(
                            "\"exceeded\" is missing: name the state to enter when \"{name}\" exceeds its maximum"
                        );
                        self.add(transition.position, &path, message);
                    }
                    Some(_) => {}
                }
            }
        }
        let unused = definition.counters.iter().filter(|(name, _)| !gaps.any && !used.contains(name.as_str()));
        for (name, counter) in unused {
            self.add(counter.position, format!("counters.{name}"), "no transition has this counter as its \"loop\"");
        }
    }

    fn check_state(&mut self, index: StateIndex) {
        let definition = self.definition;
        let state = &definition.states[index];
        let path = self.state_path(index);
        let ancestors: Vec<&State> = definition.ancestors(index).map(|index| &definition.states[index]).collect();
        if state.ends.is_some() {
            let does_something = !state.on.is_empty() || state.deadline.is_some() || state.approval.is_some();
            if does_something || state.poll.is_some() || !state.timers.is_empty() || state.initial.is_some() {
                self.add(state.position, &path, "a final state has no transitions, deadlines, timers or inner states");
            }
            if state.parent.is_some() {
                self.add(state.position, &path, "a final state must not be inside another state");
            }
            return;
        }
        if state.initial.is_none() {
            if ancestors.iter().all(|state| state.targets().is_empty()) {
                self.add(
                    state.position,
                    &path,
                    "a task could never leave this state: add a transition or \"final: true\"",
                );
            }
            let is_limited = ancestors.iter().any(|state| {
                let expires = state.approval.as_ref().is_some_and(|approval| approval.expires.is_some());
                state.forever || state.deadline.is_some() || expires
            });
            if !is_limited {
                let message =
                    "a task could wait here forever: add a \"deadline\", or \"forever: true\" if that is intended";
                self.add(state.position, &path, message);
            }
        }
        if let Some(poll) = &state.poll {
            let silence =
                ancestors.iter().find_map(|state| state.deadline.as_ref().and_then(|deadline| deadline.silence_ms));
            if silence.is_some_and(|silence| silence < 2 * poll.every_ms) {
                let message = "\"silence\" must be at least twice \"poll.every\", or one lost answer ends the task";
                self.add(poll.position, format!("{path}.poll"), message);
            }
        }
        self.check_approval(index, &ancestors);
    }

    fn check_approval(&mut self, index: StateIndex, ancestors: &[&State]) {
        let state = &self.definition.states[index];
        let path = self.state_path(index);
        if let Some(approval) = &state.approval {
            for event in ["approval.granted", "approval.denied"] {
                if ancestors.iter().all(|state| state.transitions(event).is_empty()) {
                    self.add(approval.position, &path, format!("has an approval, but no transition for \"{event}\""));
                }
            }
        }
        let decides = state.on.iter().flat_map(|(_, transitions)| transitions).find(|one| one.decision.is_some());
        if let Some(transition) = decides
            && ancestors.iter().all(|state| state.approval.is_none())
        {
            self.add(transition.position, &path, "\"approve\" decides about an approval, and this state has none");
        }
        for (event, transitions) in state.on.iter().filter(|(event, _)| !self.definition.events.contains_key(event)) {
            if let Some(transition) = transitions.iter().find(|transition| transition.decision.is_some()) {
                let message = format!("\"approve\" is the decision of a caller, and no caller sends \"{event}\"");
                self.add(transition.position, &path, message);
            }
        }
    }

    /// Checks that every cycle has a counter, an approval or a deadline.
    fn check_cycles(&mut self, gaps: &Gaps) {
        for states in cycles::unlimited(self.definition, &gaps.states) {
            let Some(first) = states.first() else { continue };
            let state = &self.definition.states[*first];
            let names: Vec<&str> = states.iter().map(|index| self.definition.states[*index].name.as_str()).collect();
            let message = format!(
                "a task could come back to this state forever, through {}: count one of the transitions with \"loop\" \
                 (and do not reset that counter on the way), or give a state on the way a deadline or an approval",
                names.join(", ")
            );
            self.add(state.position, self.state_path(*first), message);
        }
    }

    fn check_expressions(&mut self) {
        let definition = self.definition;
        let set = keys_set(definition);
        let input = definition.input.as_ref().map(|schema| &schema.source);
        let scope = Scope { input, set: &set, event: None };
        for (name, event) in &definition.events {
            if let Some(progress) = &event.progress {
                let scope = Scope { event: event.schema.as_ref().map(|schema| &schema.source), ..scope };
                self.check_types(progress, &scope, false, &format!("events.{name}.progress"));
            }
        }
        for (index, state) in definition.states.iter().enumerate() {
            let path = self.state_path(index);
            for (event, transitions) in &state.on {
                let schema = definition.events.get(event).and_then(|event| event.schema.as_ref());
                let scope = Scope { event: schema.map(|schema| &schema.source), ..scope };
                for transition in transitions {
                    self.check_transition_types(transition, &scope, &format!("{path}.on.{event}"));
                }
            }
            let subject = state.approval.as_ref().map(|approval| &approval.subject);
            let receivers = state.approval.iter().flat_map(|approval| &approval.webhooks);
            let polled = state.poll.as_ref().map(|poll| &poll.data);
            let actions = state.entry.iter().chain(&state.exit).flat_map(templates);
            for template in actions.chain(subject).chain(receivers).chain(polled) {
                template.for_each_expression(&mut |expression| self.check_types(expression, &scope, false, &path));
            }
        }
    }

    fn check_transition_types(&mut self, transition: &'a Transition, scope: &Scope<'_>, path: &str) {
        if let Some(guard) = &transition.guard {
            self.check_types(guard, scope, true, path);
        }
        for template in transition.actions.iter().flat_map(templates) {
            template.for_each_expression(&mut |expression| self.check_types(expression, scope, false, path));
        }
    }

    fn check_types(&mut self, expression: &Expression, scope: &Scope<'_>, guard: bool, path: &str) {
        for error in expression.type_errors(scope, guard) {
            self.add(expression.position(), path, error);
        }
    }
}

/// Returns the keys of the context that actions set.
fn keys_set(definition: &Definition) -> Vec<&str> {
    let actions = definition.states.iter().flat_map(State::actions);
    let keys = actions.flat_map(|action| match action {
        Action::Set(values) => values.iter().map(|(key, _)| key.as_str()).collect(),
        _ => Vec::new(),
    });
    keys.collect()
}

fn templates(action: &Action) -> Vec<&Template> {
    match action {
        Action::Set(values) => values.iter().map(|(_, value)| value).collect(),
        Action::Emit { data, .. } => vec![data],
        Action::Job(job) => vec![&job.payload],
    }
}
