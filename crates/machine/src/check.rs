//! Checks that a machine cannot get stuck, cannot run for ever, and that its expressions fit its data.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Expression, Finding, Template,
    definition::{Action, Definition, State, StateIndex, Transition},
    node::Place,
    types::Scope,
};

/// Returns every fault of a definition that could be read.
pub(crate) fn check(definition: &Definition) -> Vec<Finding> {
    let mut check = Check { definition, findings: Vec::new() };
    check.events();
    check.reachability();
    check.counters();
    for index in 0..definition.states.len() {
        check.state(index);
    }
    check.cycles();
    check.expressions();
    check.findings
}

struct Check<'a> {
    definition: &'a Definition,
    findings: Vec<Finding>,
}

impl<'a> Check<'a> {
    fn add(&mut self, place: Place, path: impl Into<String>, message: impl Into<String>) {
        self.findings.push(Finding::new(place, path, message));
    }

    fn state_path(&self, index: StateIndex) -> String {
        format!("states.{}", self.definition.path(index))
    }

    fn events(&mut self) {
        let definition = self.definition;
        let own = own_events(definition);
        for (index, state) in definition.states.iter().enumerate() {
            let path = self.state_path(index);
            for (event, transitions) in &state.on {
                if !definition.events.contains_key(event) && !own.contains(event) {
                    let place = transitions.first().map_or(state.place, |transition| transition.place);
                    let message = format!("\"{event}\" is not declared under \"events\"");
                    self.add(place, format!("{path}.on"), message);
                }
            }
            for event in emitted(state) {
                if !definition.events.contains_key(event) {
                    self.add(state.place, &path, format!("emits \"{event}\", which is not declared under \"events\""));
                }
            }
            for event in state.unexpected_events.keys().filter(|event| !definition.events.contains_key(*event)) {
                let message = format!("\"{event}\" is not declared under \"events\"");
                self.add(state.place, format!("{path}.unexpected"), message);
            }
        }
        if let Some(start) = definition.start.as_ref().filter(|start| !definition.events.contains_key(*start)) {
            self.add(Place::default(), "start", format!("\"{start}\" is not declared under \"events\""));
        }
    }

    /// Every state can be reached from the first one.
    fn reachability(&mut self) {
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
                self.add(state.place, self.state_path(index), "no transition leads to this state");
            }
        }
    }

    fn counters(&mut self) {
        let definition = self.definition;
        let mut used = BTreeSet::new();
        for (index, state) in definition.states.iter().enumerate() {
            let path = self.state_path(index);
            for transition in state.on.iter().flat_map(|(_, transitions)| transitions) {
                for name in transition.reset.iter().filter(|name| !definition.counters.contains_key(*name)) {
                    self.add(transition.place, &path, format!("resets \"{name}\", which is not under \"counters\""));
                }
                let Some(name) = &transition.counter else { continue };
                used.insert(name.as_str());
                match definition.counters.get(name) {
                    None => {
                        let message = format!("counts \"{name}\", which is not declared under \"counters\"");
                        self.add(transition.place, &path, message);
                    }
                    Some(counter) if counter.exceeded.is_none() && transition.exceeded.is_none() => {
                        let message =
                            format!("\"exceeded\" is missing: say which state follows when \"{name}\" is used up");
                        self.add(transition.place, &path, message);
                    }
                    Some(_) => {}
                }
            }
        }
        for name in definition.counters.keys().filter(|name| !used.contains(name.as_str())) {
            self.add(Place::default(), format!("counters.{name}"), "no transition has this counter as its \"loop\"");
        }
    }

    fn state(&mut self, index: StateIndex) {
        let definition = self.definition;
        let state = &definition.states[index];
        let path = self.state_path(index);
        let around: Vec<&State> = definition.ancestors(index).map(|index| &definition.states[index]).collect();
        if state.ends.is_some() {
            let does_something = !state.on.is_empty() || state.deadline.is_some() || state.approval.is_some();
            if does_something || state.poll.is_some() || !state.timers.is_empty() || state.initial.is_some() {
                self.add(state.place, &path, "a final state has no transitions, deadlines, timers or inner states");
            }
            if state.parent.is_some() {
                self.add(state.place, &path, "a final state must not be inside another state");
            }
            return;
        }
        if state.initial.is_none() {
            if around.iter().all(|state| state.targets().is_empty()) {
                self.add(
                    state.place,
                    &path,
                    "a task could never leave this state: add a transition or \"final: true\"",
                );
            }
            let is_limited = around.iter().any(|state| {
                let expires = state.approval.as_ref().is_some_and(|approval| approval.expires.is_some());
                state.forever || state.deadline.is_some() || expires
            });
            if !is_limited {
                let message =
                    "a task could wait here for ever: add a \"deadline\", or \"forever: true\" if that is meant";
                self.add(state.place, &path, message);
            }
        }
        if let Some(poll) = &state.poll {
            let silence =
                around.iter().find_map(|state| state.deadline.as_ref().and_then(|deadline| deadline.silence_ms));
            if silence.is_some_and(|silence| silence < 2 * poll.every_ms) {
                let message = "\"silence\" must be at least twice \"poll.every\", or one lost answer ends the task";
                self.add(state.place, &path, message);
            }
        }
        self.approval(index, &around);
    }

    fn approval(&mut self, index: StateIndex, around: &[&State]) {
        let state = &self.definition.states[index];
        let path = self.state_path(index);
        if state.approval.is_some() {
            for event in ["approval.granted", "approval.denied"] {
                if around.iter().all(|state| state.transitions(event).is_empty()) {
                    self.add(state.place, &path, format!("has an approval, but no transition for \"{event}\""));
                }
            }
        }
        let decides = state.on.iter().flat_map(|(_, transitions)| transitions).find(|one| one.decision.is_some());
        if let Some(transition) = decides
            && around.iter().all(|state| state.approval.is_none())
        {
            self.add(transition.place, &path, "\"approve\" decides about an approval, and this state has none");
        }
    }

    /// Every cycle has a counter, an approval or a deadline.
    fn cycles(&mut self) {
        let definition = self.definition;
        let edges = uncounted_edges(definition);
        for start in edges.keys() {
            let mut reached = BTreeSet::new();
            let mut next: Vec<StateIndex> = edges[start].iter().copied().collect();
            while let Some(index) = next.pop() {
                if reached.insert(index) {
                    next.extend(edges.get(&index).into_iter().flatten());
                }
            }
            if reached.contains(start) && reached.iter().all(|index| index >= start || !edges.contains_key(index)) {
                let state = &definition.states[*start];
                let message = "a task could come back to this state for ever: count one of the transitions with \"loop\", \
                               or give a state on the way a deadline or an approval";
                self.add(state.place, self.state_path(*start), message);
            }
        }
    }

    fn expressions(&mut self) {
        let definition = self.definition;
        let set = keys_set(definition);
        let input = definition.input.as_ref().map(|schema| &schema.source);
        let scope = Scope { input, set: &set, event: None };
        for (name, event) in &definition.events {
            if let Some(progress) = &event.progress {
                let scope = Scope { event: event.schema.as_ref().map(|schema| &schema.source), ..scope };
                self.typed(progress, &scope, false, Place::default(), &format!("events.{name}.progress"));
            }
        }
        for (index, state) in definition.states.iter().enumerate() {
            let path = self.state_path(index);
            for (event, transitions) in &state.on {
                let schema = definition.events.get(event).and_then(|event| event.schema.as_ref());
                let scope = Scope { event: schema.map(|schema| &schema.source), ..scope };
                for transition in transitions {
                    self.transition_types(transition, &scope, &format!("{path}.on.{event}"));
                }
            }
            let subject = state.approval.as_ref().map(|approval| &approval.subject);
            let polled = state.poll.as_ref().map(|poll| &poll.data);
            let actions = state.entry.iter().chain(&state.exit).flat_map(templates);
            for template in actions.chain(subject).chain(polled) {
                template.expressions(&mut |expression| self.typed(expression, &scope, false, state.place, &path));
            }
        }
    }

    fn transition_types(&mut self, transition: &'a Transition, scope: &Scope<'_>, path: &str) {
        if let Some(guard) = &transition.guard {
            self.typed(guard, scope, true, transition.place, path);
        }
        for template in transition.actions.iter().flat_map(templates) {
            template.expressions(&mut |expression| self.typed(expression, scope, false, transition.place, path));
        }
    }

    fn typed(&mut self, expression: &Expression, scope: &Scope<'_>, guard: bool, place: Place, path: &str) {
        for error in expression.type_errors(scope, guard) {
            self.add(place, path, error);
        }
    }
}

/// Returns the events that Faena creates for this machine.
fn own_events(definition: &Definition) -> BTreeSet<String> {
    let mut own = BTreeSet::from(["approval.granted".to_owned(), "approval.denied".to_owned()]);
    for state in &definition.states {
        own.extend(state.timers.iter().map(|timer| format!("timer.{}", timer.name)));
        for action in all_actions(state) {
            if let Action::Job(job) = action {
                own.extend(["completed", "failed"].map(|end| format!("job.{}.{end}", job.name)));
            }
        }
    }
    own
}

fn all_actions(state: &State) -> impl Iterator<Item = &Action> {
    let transitions = state.on.iter().flat_map(|(_, transitions)| transitions);
    state.entry.iter().chain(&state.exit).chain(transitions.flat_map(|transition| &transition.actions))
}

fn emitted(state: &State) -> Vec<&str> {
    let actions = all_actions(state).filter_map(|action| match action {
        Action::Emit { event, .. } => Some(event.as_str()),
        _ => None,
    });
    actions.chain(state.poll.as_ref().map(|poll| poll.event.as_str())).collect()
}

fn keys_set(definition: &Definition) -> Vec<&str> {
    let actions = definition.states.iter().flat_map(all_actions);
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

/// Returns the transitions without a counter between states without a deadline or an approval.
fn uncounted_edges(definition: &Definition) -> BTreeMap<StateIndex, BTreeSet<StateIndex>> {
    let is_limited = |index: StateIndex| {
        definition.ancestors(index).any(|index| {
            let state = &definition.states[index];
            state.deadline.is_some() || state.approval.is_some()
        })
    };
    let mut edges: BTreeMap<StateIndex, BTreeSet<StateIndex>> = BTreeMap::new();
    for leaf in (0..definition.states.len()).filter(|&index| definition.states[index].initial.is_none()) {
        if is_limited(leaf) {
            continue;
        }
        for owner in definition.ancestors(leaf) {
            let transitions = definition.states[owner].on.iter().flat_map(|(_, transitions)| transitions);
            for to in transitions.filter(|transition| transition.counter.is_none()).filter_map(|one| one.to) {
                let to = definition.innermost_initial(to);
                if !is_limited(to) {
                    edges.entry(leaf).or_default().insert(to);
                }
            }
        }
    }
    edges
}
