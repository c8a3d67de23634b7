//! What is wrong with a definition, with its place in the text.

use std::fmt;

use serde::Serialize;

use crate::node::Place;

/// A fault in a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub place: Place,
    /// Path of the value, as in `states.PLANNING.on`.
    pub path: String,
    pub message: String,
}

impl Finding {
    pub fn new(place: Place, path: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { place, path: path.into(), message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.place.line > 0 {
            write!(f, "line {}: ", self.place.line)?;
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
        let Place { line, column } = self.place;
        FindingView { line, column, path: &self.path, message: &self.message }.serialize(serializer)
    }
}
