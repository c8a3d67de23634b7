//! Drawings of a machine: Mermaid for documents, SVG for pages.

mod layout;
mod mermaid;
#[cfg(test)]
mod overlaps;
mod svg;
mod text;

use crate::definition::{Definition, StateIndex};

/// An arrow from a state to another.
struct Edge {
    from: StateIndex,
    to: StateIndex,
    label: String,
    kind: EdgeKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EdgeKind {
    Event,
    /// Followed when a time limit passes or a counter exceeds its maximum.
    Limit,
}

impl Definition {
    /// Returns every arrow. Arrows between the same two states are merged.
    fn edges(&self) -> Vec<Edge> {
        let mut edges: Vec<Edge> = Vec::new();
        let mut add = |from, to, label: String, kind| match edges
            .iter_mut()
            .find(|edge| edge.from == from && edge.to == to && edge.kind == kind)
        {
            Some(edge) if edge.label.split(", ").any(|known| known == label) => {}
            Some(edge) => {
                edge.label.push_str(", ");
                edge.label.push_str(&label);
            }
            None => edges.push(Edge { from, to, label, kind }),
        };
        for (from, state) in self.states.iter().enumerate() {
            for (event, transitions) in &state.on {
                for transition in transitions {
                    if let Some(to) = transition.to {
                        add(from, to, event.clone(), EdgeKind::Event);
                    }
                    let counter = transition.counter.as_ref().and_then(|name| Some((name, self.counters.get(name)?)));
                    if let Some((name, counter)) = counter
                        && let Some(to) = transition.exceeded.or(counter.exceeded)
                    {
                        add(from, to, format!("{name} > {}", counter.max), EdgeKind::Limit);
                    }
                }
            }
            if let Some(deadline) = &state.deadline {
                add(from, deadline.to, "deadline".to_owned(), EdgeKind::Limit);
            }
            if let Some(expiry) = state.approval.as_ref().and_then(|approval| approval.expires.as_ref()) {
                add(from, expiry.to, "expired".to_owned(), EdgeKind::Limit);
            }
        }
        edges
    }
}
