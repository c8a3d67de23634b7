//! Writes a machine as a Mermaid state diagram.

use std::fmt::Write as _;

use crate::definition::{Definition, StateIndex};

/// Words of Mermaid that cannot be the id of a state.
const RESERVED: [&str; 5] = ["end", "state", "note", "direction", "class"];

impl Definition {
    /// Returns the text of a Mermaid state diagram.
    pub fn to_mermaid(&self) -> String {
        let ids = self.mermaid_ids();
        let mut text = String::from("stateDiagram-v2\n");
        let _ = writeln!(text, "    [*] --> {}", ids[self.initial]);
        for (index, state) in self.states.iter().enumerate() {
            if state.parent.is_none() {
                self.write_state(&mut text, &ids, index, 1);
            }
        }
        for edge in self.edges() {
            let label = edge.label.replace([':', ';'], " ");
            let _ = writeln!(text, "    {} --> {}: {label}", ids[edge.from], ids[edge.to]);
        }
        for (index, _) in self.states.iter().enumerate().filter(|(_, state)| state.ends.is_some()) {
            let _ = writeln!(text, "    {} --> [*]", ids[index]);
        }
        text
    }

    /// Returns the id of every state: letters, digits and underscores, each id once.
    fn mermaid_ids(&self) -> Vec<String> {
        let mut ids: Vec<String> = Vec::with_capacity(self.states.len());
        for state in &self.states {
            let plain = |character: char| if character.is_alphanumeric() { character } else { '_' };
            let mut id: String = state.name.chars().map(plain).collect();
            while ids.contains(&id) || RESERVED.contains(&id.to_lowercase().as_str()) {
                id.push('_');
            }
            ids.push(id);
        }
        ids
    }

    fn write_state(&self, text: &mut String, ids: &[String], index: StateIndex, depth: usize) {
        let state = &self.states[index];
        let indent = "    ".repeat(depth);
        let id = &ids[index];
        match state.initial {
            None => {
                let _ = writeln!(text, "{indent}state \"{}\" as {id}", state.name);
            }
            Some(initial) => {
                let _ = writeln!(text, "{indent}state \"{}\" as {id} {{", state.name);
                let _ = writeln!(text, "{indent}    [*] --> {}", ids[initial]);
                for (inner, _) in self.states.iter().enumerate().filter(|(_, inner)| inner.parent == Some(index)) {
                    self.write_state(text, ids, inner, depth + 1);
                }
                let _ = writeln!(text, "{indent}}}");
            }
        }
    }
}
