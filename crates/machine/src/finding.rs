//! Errors in a definition, each with its position in the text.

use std::fmt;

use serde::Serialize;

use crate::node::Position;

/// An error in a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub position: Position,
    /// Path of the value, as in `states.PLANNING.on`.
    pub path: String,
    pub message: String,
}

impl Finding {
    pub fn new(position: Position, path: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { position, path: path.into(), message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.position.line > 0 {
            write!(f, "line {}: ", self.position.line)?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

#[derive(Serialize)]
struct FindingView<'a> {
    line: u64,
    column: u64,
    path: &'a str,
    message: &'a str,
}

impl Serialize for Finding {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Position { line, column } = self.position;
        FindingView { line, column, path: &self.path, message: &self.message }.serialize(serializer)
    }
}
