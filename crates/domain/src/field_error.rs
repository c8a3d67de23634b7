//! Errors in the fields of a request, each with the path of its field.

use std::{fmt, ops::RangeInclusive};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An invalid field: its path in the request, and what is wrong with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct FieldError {
    pub path: String,
    pub message: String,
}

impl FieldError {
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> FieldError {
        FieldError { path: path.into(), message: message.into() }
    }

    /// Joins several errors into one line, separated by semicolons.
    pub fn join(errors: &[FieldError]) -> String {
        errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// Adds an error unless `value` has 1 to `max` characters, none of them a control character.
pub(crate) fn check_text(errors: &mut Vec<FieldError>, path: &str, value: &str, max: usize) {
    let length = value.chars().count();
    if length == 0 || length > max {
        errors.push(FieldError::new(path, format!("must have 1 to {max} characters, has {length}")));
    } else if value.chars().any(char::is_control) {
        errors.push(FieldError::new(path, "must not contain control characters"));
    }
}

/// Adds an error unless `value` is in `range`.
pub(crate) fn check_range(errors: &mut Vec<FieldError>, path: &str, value: u64, range: RangeInclusive<u64>) {
    if !range.contains(&value) {
        let (min, max) = range.into_inner();
        errors.push(FieldError::new(path, format!("must be between {min} and {max}, got {value}")));
    }
}
