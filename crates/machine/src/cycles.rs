//! Finds cycles in which a task could run forever.

use std::collections::BTreeSet;

use crate::definition::{Definition, StateIndex, Transition};

/// A transition between two states that have neither a deadline nor an approval.
struct Edge<'a> {
    from: StateIndex,
    to: StateIndex,
    /// The counter that limits it.
    counter: Option<&'a str>,
    resets: &'a [String],
}

/// Returns groups of states that a task could pass through again and again without a limit.
///
/// A counter limits a cycle only if no transition of the cycle resets it. The `exceeded` edge of a counter is not counted, so it
/// limits nothing. States in `assumed_limited` count as limited.
pub(crate) fn unlimited(definition: &Definition, assumed_limited: &BTreeSet<StateIndex>) -> Vec<Vec<StateIndex>> {
    let mut edges = edges(definition, assumed_limited);
    loop {
        let groups = strongly_connected(definition.states.len(), &edges);
        let group_of = |state: StateIndex| groups.iter().position(|group| group.contains(&state));
        let before = edges.len();
        // Within a group, a counted edge that no edge of the group resets is taken a limited number of times.
        let limited: Vec<bool> = edges
            .iter()
            .map(|edge| {
                let group = group_of(edge.from);
                let resets = |other: &Edge<'_>, counter: &str| {
                    group_of(other.from) == group
                        && group_of(other.to) == group
                        && other.resets.iter().any(|name| name == counter)
                };
                edge.counter.is_some_and(|counter| !edges.iter().any(|other| resets(other, counter)))
            })
            .collect();
        let mut index = 0;
        edges.retain(|_| {
            index += 1;
            !limited[index - 1]
        });
        if edges.len() == before {
            let is_cycle = |group: &Vec<StateIndex>| {
                group.len() > 1 || edges.iter().any(|edge| edge.from == group[0] && edge.to == group[0])
            };
            return groups.into_iter().filter(is_cycle).collect();
        }
    }
}

fn edges<'a>(definition: &'a Definition, assumed_limited: &BTreeSet<StateIndex>) -> Vec<Edge<'a>> {
    let is_limited = |index: StateIndex| {
        assumed_limited.contains(&index)
            || definition.ancestors(index).any(|index| {
                let state = &definition.states[index];
                state.deadline.is_some() || state.approval.is_some()
            })
    };
    let mut edges = Vec::new();
    for leaf in (0..definition.states.len()).filter(|&index| definition.states[index].initial.is_none()) {
        if is_limited(leaf) {
            continue;
        }
        let mut add = |to: StateIndex, counter, resets| {
            let to = definition.innermost_initial(to);
            if !is_limited(to) {
                edges.push(Edge { from: leaf, to, counter, resets });
            }
        };
        for owner in definition.ancestors(leaf) {
            for transition in definition.states[owner].on.iter().flat_map(|(_, transitions)| transitions) {
                let counter = transition.counter.as_deref();
                if let Some(to) = transition.to {
                    add(to, counter, transition.reset.as_slice());
                }
                if let Some(to) = exceeded(definition, transition) {
                    add(to, None, &[]);
                }
            }
        }
    }
    edges
}

fn exceeded(definition: &Definition, transition: &Transition) -> Option<StateIndex> {
    let counter = transition.counter.as_ref().and_then(|name| definition.counters.get(name));
    transition.exceeded.or(counter.and_then(|counter| counter.exceeded)).filter(|_| transition.counter.is_some())
}

/// Returns the strongly connected groups in the order of their first states: Kosaraju's two walks, without recursion.
fn strongly_connected(states: usize, edges: &[Edge<'_>]) -> Vec<Vec<StateIndex>> {
    let (mut forward, mut backward) = (vec![Vec::new(); states], vec![Vec::new(); states]);
    for edge in edges {
        forward[edge.from].push(edge.to);
        backward[edge.to].push(edge.from);
    }
    let mut seen = vec![false; states];
    let mut finished = Vec::with_capacity(states);
    for state in 0..states {
        walk(state, &forward, &mut seen, &mut finished);
    }
    let mut seen = vec![false; states];
    let mut groups = Vec::new();
    for state in finished.into_iter().rev() {
        let mut group = Vec::new();
        walk(state, &backward, &mut seen, &mut group);
        if !group.is_empty() {
            group.sort_unstable();
            groups.push(group);
        }
    }
    groups.sort_unstable();
    groups
}

/// Visits everything that can be reached from `start`, and lists each state after those that follow it.
fn walk(start: StateIndex, next: &[Vec<StateIndex>], seen: &mut [bool], finished: &mut Vec<StateIndex>) {
    let mut open = vec![(start, 0)];
    if std::mem::replace(&mut seen[start], true) {
        return;
    }
    while let Some((state, position)) = open.last_mut() {
        match next[*state].get(*position) {
            Some(&to) => {
                *position += 1;
                if !std::mem::replace(&mut seen[to], true) {
                    open.push((to, 0));
                }
            }
            None => {
                finished.push(*state);
                open.pop();
            }
        }
    }
}
