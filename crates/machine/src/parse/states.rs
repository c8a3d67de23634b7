//! Reads the states of a definition.

use std::collections::BTreeMap;

use super::{
    NamedState, Names, parts, policy,
    reader::{Fields, Findings, Mention, join},
};
use crate::{
    definition::{Ending, State, StateIndex, Transition, Unexpected},
    format,
    node::{Node, NodeValue},
};

/// Maximum number of states of one machine. The checks and drawings examine each pair of states.
const MAX_STATES: usize = 500;

/// Collects the names of all states, so that a target may be declared further down in the text.
///
/// Returns `None` if there are too many, so that they are not processed.
pub(super) fn collect<'a>(findings: &mut Findings, node: &'a Node, path: &str) -> Option<Names<'a>> {
    let mut names = Names::default();
    collect_into(&mut names, findings, node, path, None);
    if names.0.is_empty() {
        findings.add(node.position, path, "a machine needs at least one state");
    }
    if names.0.len() > MAX_STATES {
        findings.add(node.position, path, format!("a machine may have at most {MAX_STATES} states"));
        return None;
    }
    Some(names)
}

fn collect_into<'a>(
    names: &mut Names<'a>,
    findings: &mut Findings,
    node: &'a Node,
    path: &str,
    parent: Option<StateIndex>,
) {
    for entry in findings.entries(node, path) {
        if names.0.len() > MAX_STATES {
            return;
        }
        let path = join(path, &entry.key);
        if entry.key.contains('.') {
            findings.add(entry.position, &path, "the name of a state must not contain a dot");
        }
        // A state with an invalid name still exists, so that its uses are not reported as well.
        let name = entry.key.clone();
        findings.name(&name, entry.position, &path);
        if names.0.iter().any(|state| state.name == name) {
            findings.add(
                entry.position,
                &path,
                format!("there is another state \"{name}\"; names are unique in a machine"),
            );
        }
        let index = names.0.len();
        names.0.push(NamedState { name, position: entry.position, path: path.clone(), parent, node: &entry.value });
        if let NodeValue::Map(fields) = &entry.value.value
            && let Some(inner) = fields.iter().find(|field| field.key == "states")
        {
            collect_into(names, findings, &inner.value, &join(&path, "states"), Some(index));
        }
    }
}

impl Names<'_> {
    /// Reads the contents of all states.
    pub(super) fn read(&self, findings: &mut Findings) -> Vec<State> {
        (0..self.0.len()).map(|index| self.state(findings, index)).collect()
    }

    fn state(&self, findings: &mut Findings, index: StateIndex) -> State {
        let NamedState { name, position, path, parent, node } = &self.0[index];
        let fields = findings.fields(node, path, &format::STATE);
        let (unexpected, unexpected_events) = self.unexpected(findings, &fields);
        let mut state = State {
            name: name.clone(),
            position: *position,
            title: fields.read("title", |node, path| findings.text(node, path)),
            description: fields.read("description", |node, path| findings.text(node, path)),
            parent: *parent,
            initial: self.target(findings, &fields, "initial"),
            ends: ending(findings, &fields),
            forever: fields.read("forever", |node, path| findings.flag(node, path)).unwrap_or_default(),
            entry: parts::action_list(findings, &fields, "entry"),
            exit: parts::action_list(findings, &fields, "exit"),
            on: self.transitions(findings, &fields),
            deadline: parts::deadline(self, findings, &fields),
            poll: parts::poll(findings, &fields),
            approval: parts::approval(self, findings, &fields),
            timers: parts::timers(findings, &fields),
            unexpected,
            unexpected_events,
        };
        self.check_initial(findings, index, &mut state);
        state
    }

    /// Checks that a state with inner states has one of them as its first.
    fn check_initial(&self, findings: &mut Findings, index: StateIndex, state: &mut State) {
        let has_inner = self.0.iter().any(|other| other.parent == Some(index));
        let path = &self.0[index].path;
        match state.initial {
            None if has_inner => {
                findings.add(state.position, path, "\"initial\" is missing: name the inner state to enter first")
            }
            Some(initial) if self.0[initial].parent != Some(index) => {
                findings.add(state.position, path, "\"initial\" must be a state directly inside this one");
                state.initial = None;
            }
            _ => {}
        }
    }

    fn transitions(&self, findings: &mut Findings, fields: &Fields<'_>) -> Vec<(String, Vec<Transition>)> {
        let Some((node, path)) = fields.get("on") else { return Vec::new() };
        let mut on = Vec::new();
        for entry in findings.entries(node, &path) {
            let path = join(&path, &entry.key);
            let items = findings.items(&entry.value);
            if items.is_empty() {
                findings.add(entry.position, &path, "needs at least one transition");
            }
            let event = entry.key.clone();
            findings.mentioned.push(Mention { event, is_handled: true, position: entry.position, path: path.clone() });
            on.push((entry.key.clone(), items.iter().map(|item| self.transition(findings, item, &path)).collect()));
        }
        on
    }

    /// Reads a transition: a map, or only the name of a state.
    fn transition(&self, findings: &mut Findings, node: &Node, path: &str) -> Transition {
        if matches!(node.value, NodeValue::Text(_)) {
            return Transition {
                position: node.position,
                to: self.index(findings, node, path),
                ..Transition::default()
            };
        }
        let fields = findings.fields(node, path, &format::TRANSITION);
        if let Some((node, path)) = fields.get("exceeded").filter(|_| fields.get("loop").is_none()) {
            findings.add(node.position, &path, "has no effect without loop");
        }
        let mut actions = parts::actions_of(findings, &fields);
        actions.extend(parts::action_list(findings, &fields, "do"));
        let reset = fields.get("reset").map(|(node, path)| {
            let items = findings.items(node);
            items.iter().filter_map(|item| findings.text(item, &path)).collect()
        });
        Transition {
            position: node.position,
            guard: fields.read("if", |node, path| findings.expression(node, path)),
            to: self.target(findings, &fields, "to"),
            counter: fields.read("loop", |node, path| findings.text(node, path)),
            exceeded: self.target(findings, &fields, "exceeded"),
            reset: reset.unwrap_or_default(),
            decision: fields.read("approve", |node, path| findings.flag(node, path)),
            actions,
        }
    }

    /// Reads `unexpected: ignore`, or a policy per event.
    fn unexpected(
        &self,
        findings: &mut Findings,
        fields: &Fields<'_>,
    ) -> (Option<Unexpected>, BTreeMap<String, Unexpected>) {
        let Some((node, path)) = fields.get("unexpected") else { return (None, BTreeMap::new()) };
        if !matches!(node.value, NodeValue::Map(_)) {
            return (policy(findings, node, &path), BTreeMap::new());
        }
        let entries = findings.entries(node, &path).iter();
        let read = entries.filter_map(|entry| {
            findings.mention(&entry.key, entry.position, &join(&path, &entry.key));
            let policy = policy(findings, &entry.value, &join(&path, &entry.key))?;
            Some((entry.key.clone(), policy))
        });
        (None, read.collect())
    }
}

/// Reads `final: true`, with `ends: success | failure | cancelled`.
fn ending(findings: &mut Findings, fields: &Fields<'_>) -> Option<Ending> {
    let is_final = fields.read("final", |node, path| findings.flag(node, path)).unwrap_or_default();
    let ends = fields.read("ends", |node, path| match findings.text(node, path)?.as_str() {
        "success" => Some(Ending::Success),
        "failure" => Some(Ending::Failure),
        "cancelled" => Some(Ending::Cancelled),
        _ => {
            findings.add(node.position, path, "must be success, failure or cancelled");
            None
        }
    });
    if let (false, Some((node, path))) = (is_final, fields.get("ends")) {
        findings.add(node.position, &path, "only a state with \"final: true\" ends a task");
    }
    is_final.then(|| ends.unwrap_or_default())
}
