//! Reads `faena.toml` and keeps the position of every value, so that an error names its line.

use std::{fmt::Display, ops::Range};

use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeTable, DeValue, ValueDeserializer},
};

use super::{ConfigError, rules::QUEUES_HINT};

/// A key and its value with their positions.
pub type KeyValue<'a> = (Spanned<String>, Spanned<DeValue<'a>>);

/// The text of a configuration file and its name.
pub struct File<'a> {
    name: String,
    text: &'a str,
}

impl<'a> File<'a> {
    pub fn new(name: impl Into<String>, text: &'a str) -> File<'a> {
        File { name: name.into(), text }
    }

    /// Returns the sections in the order in which they are written.
    pub fn sections(&self) -> Result<Vec<KeyValue<'a>>, ConfigError> {
        let table = DeTable::parse(self.text).map_err(|error| self.toml_error(&error))?.into_inner();
        Ok(in_file_order(table))
    }

    /// Returns the position of `span` as text: the file and the line.
    pub fn position(&self, span: &Range<usize>) -> String {
        let before = self.text.get(..span.start).unwrap_or_default();
        format!("{}, line {}", self.name, before.matches('\n').count() + 1)
    }

    pub fn error(&self, span: &Range<usize>, message: impl Display) -> ConfigError {
        ConfigError(format!("{}: {message}", self.position(span)))
    }

    fn toml_error(&self, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or(0..0);
        // TOML allows no section to be both a table and a list.
        if error.message().contains("duplicate key") && self.text.lines().any(|line| line.trim() == "[[queue]]") {
            return self.error(&span, QUEUES_HINT);
        }
        self.error(&span, error.message())
    }
}

/// Returns the keys of a table in the order in which they are written.
pub fn in_file_order<'a>(table: DeTable<'a>) -> Vec<KeyValue<'a>> {
    let mut keys: Vec<_> = table
        .into_iter()
        .map(|(key, value)| (Spanned::new(key.span(), key.into_inner().into_owned()), value))
        .collect();
    keys.sort_by_key(|(key, _)| key.span().start);
    keys
}

/// A value that is written in a file, with its position.
#[derive(Clone)]
pub struct Located<T> {
    pub value: T,
    pub position: String,
}

/// One `[[section]]` of a file.
pub struct Entry<'f, 'a> {
    file: &'f File<'a>,
    section: &'static str,
    value: Spanned<DeValue<'a>>,
}

/// What is wrong with one key of an entry.
#[derive(Debug)]
pub struct Problem {
    key: String,
    message: String,
}

/// Describes what is wrong with `key`. The message never repeats a value that may be a secret.
pub fn problem(key: impl Into<String>, message: impl Into<String>) -> Problem {
    Problem { key: key.into(), message: message.into() }
}

impl<'f, 'a> Entry<'f, 'a> {
    /// Returns the entries of an array of tables, at most `max` of them.
    pub fn list(
        file: &'f File<'a>,
        section: &'static str,
        value: Spanned<DeValue<'a>>,
        max: usize,
    ) -> Result<Vec<Entry<'f, 'a>>, ConfigError> {
        let span = value.span();
        let DeValue::Array(list) = value.into_inner() else {
            return Err(file.error(&span, format!("{section} must be written [[{section}]], with two brackets")));
        };
        if list.len() > max {
            let message = format!("[[{section}]]: at most {max} are allowed, found {}", list.len());
            return Err(file.error(&span, message));
        }
        Ok(list.into_iter().map(|value| Entry { file, section, value }).collect())
    }

    pub fn read<T: for<'de> Deserialize<'de>>(&self) -> Result<T, ConfigError> {
        T::deserialize(ValueDeserializer::from(self.value.clone())).map_err(|error| {
            let span = error.span().unwrap_or_else(|| self.value.span());
            self.file.error(&span, format!("[[{}]] {}", self.section, error.message()))
        })
    }

    /// Returns an error at the position of the key if the entry has it, otherwise at that of the entry.
    pub fn error(&self, problem: Problem) -> ConfigError {
        let mut at = &self.value;
        let mut span = self.value.span();
        for part in problem.key.split('.') {
            let table = at.get_ref().as_table();
            let Some((key, value)) = table.and_then(|table| table.iter().find(|(key, _)| key.get_ref() == part)) else {
                break;
            };
            (at, span) = (value, key.span());
        }
        self.file.error(&span, format!("[[{}]] {}: {}", self.section, problem.key, problem.message))
    }

    pub fn located<T>(&self, value: T) -> Located<T> {
        Located { value, position: self.file.position(&self.value.span()) }
    }
}
