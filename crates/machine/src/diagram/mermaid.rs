//! A machine as a Mermaid state diagram.

use std::fmt::Write as _;

use crate::definition::{Definition, StateIndex};

impl Definition {
    /// Returns the text of a Mermaid state diagram.
    pub fn to_mermaid(&self) -> String {
        let mut text = String::from("stateDiagram-v2\n");
        let _ = writeln!(text, "    [*] --> {}", id(&self.states[self.initial].name));
        for (index, state) in self.states.iter().enumerate() {
            if state.parent.is_none() {
                self.write_state(&mut text, index, 1);
            }
        }
        for edge in self.edges() {
            let (from, to) = (&self.states[edge.from].name, &self.states[edge.to].name);
            let _ = writeln!(text, "    {} --> {}: {}", id(from), id(to), edge.label.replace([':', ';'], " "));
        }
        for state in self.states.iter().filter(|state| state.ends.is_some()) {
            let _ = writeln!(text, "    {} --> [*]", id(&state.name));
        }
        text
    }

    fn write_state(&self, text: &mut String, index: StateIndex, depth: usize) {
        let state = &self.states[index];
        let indent = "    ".repeat(depth);
        let name = id(&state.name);
        match state.initial {
            None => {
                let _ = writeln!(text, "{indent}state \"{}\" as {name}", state.name);
            }
            Some(initial) => {
                let _ = writeln!(text, "{indent}state \"{}\" as {name} {{", state.name);
                let _ = writeln!(text, "{indent}    [*] --> {}", id(&self.states[initial].name));
                for (inner, _) in self.states.iter().enumerate().filter(|(_, inner)| inner.parent == Some(index)) {
                    self.write_state(text, inner, depth + 1);
                }
                let _ = writeln!(text, "{indent}}}");
            }
        }
    }
}

/// Mermaid's names consist of letters, digits and underscores.
fn id(name: &str) -> String {
    name.chars().map(|character| if character.is_alphanumeric() { character } else { '_' }).collect()
}
