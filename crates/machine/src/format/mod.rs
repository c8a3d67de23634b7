//! The format of a definition: which keys each part has, and what they mean.
//!
//! The parser rejects keys that these tables do not have and reports required ones that are missing. The JSON Schema
//! for editors and the reference page are generated from the same tables.

mod schema;
mod tables;

pub use schema::schema;
pub(crate) use tables::*;

/// A map of a definition whose keys are known.
pub(crate) struct Object {
    /// Name of the part in the JSON Schema.
    pub name: &'static str,
    pub about: &'static str,
    pub keys: &'static [Key],
    pub rule: Rule,
}

pub(crate) struct Key {
    pub name: &'static str,
    pub about: &'static str,
    pub shape: Shape,
    pub is_required: bool,
}

/// What a key may contain.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    Text,
    Flag,
    /// A whole number from 1.
    Count,
    /// A part of the JSON Schema, by its name.
    Part(&'static str),
    /// One part, or a list of them.
    List(&'static str),
    /// A map of parts; the author chooses their names.
    Named(&'static str),
}

/// Constraint on the combination of keys in a map.
#[derive(Clone, Copy)]
pub(crate) enum Rule {
    None,
    /// At least one of these keys.
    AnyOf(&'static [&'static str]),
    /// Exactly one of these keys.
    OneOf(&'static [&'static str]),
    /// A map that may also contain the keys of an action: at most one of `emit`, `job` and `llm`, and a job has a name.
    Action,
    /// A map that is an action: as `Action`, with at least one of these keys.
    WholeAction,
    /// `ends` only with `final`.
    State,
}

impl Object {
    pub fn has(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name)
    }

    pub fn names(&self) -> String {
        self.keys.iter().map(|key| key.name).collect::<Vec<_>>().join(", ")
    }
}

impl Key {
    /// Returns the first sentence about the key, to complete an error message.
    pub fn hint(&self) -> String {
        let sentence = self.about.split(". ").next().unwrap_or(self.about).trim_end_matches('.');
        let mut characters = sentence.chars();
        characters.next().map(|first| first.to_lowercase().chain(characters).collect()).unwrap_or_default()
    }
}
