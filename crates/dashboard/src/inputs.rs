//! Forms whose fields have the names of the API: what a person typed, the values of the API, and how the fields look.

use std::collections::BTreeMap;

use faena_domain::parse_duration;
use serde_json::{Map, Value, json};

use crate::{content::pretty, error::Failure, texts::Texts};

/// How the text of a field becomes a value of the API. An empty text is `null`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Text,
    Number,
    /// Like `15m`; milliseconds in the API.
    Duration,
    Json,
    /// Separated by commas.
    List,
    /// One per line.
    Lines,
}

/// The fields of a form: their names in the API, and how they are written.
pub type FieldKinds = &'static [(&'static str, Kind)];

/// Name of the hidden field with the entries that the form was filled with.
pub const ORIGINAL: &str = "original";

/// What the fields contain, as a person typed it.
#[derive(Clone, Default, PartialEq)]
pub struct Entries(pub BTreeMap<String, String>);

impl Entries {
    pub fn get(&self, name: &str) -> &str {
        self.0.get(name).map(String::as_str).unwrap_or_default()
    }

    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Entries {
        // Browsers send line breaks as CR LF.
        Entries(pairs.into_iter().map(|(name, text)| (name, text.replace("\r\n", "\n"))).collect())
    }

    /// Returns the entries that show an object of the API.
    pub fn of(fields: FieldKinds, object: &Value) -> Entries {
        let entry = |&(name, kind): &(&str, Kind)| (name.to_owned(), text_of(&object[name], kind));
        Entries(fields.iter().map(entry).collect())
    }

    /// Returns the entries that the form was filled with.
    ///
    /// # Errors
    /// If the request does not come from the form.
    pub fn original(&self) -> Result<Entries, Failure> {
        serde_json::from_str(self.get(ORIGINAL)).map(Entries).map_err(|error| Failure::bad_request(error.to_string()))
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    /// Returns the values of the wanted fields, or an error for each field that cannot be parsed.
    pub fn values(
        &self,
        t: &Texts,
        fields: FieldKinds,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Map<String, Value>, Failure> {
        let (mut values, mut errors) = (Map::new(), Vec::new());
        for (name, kind) in fields.iter().filter(|(name, _)| is_wanted(name)) {
            match value_of(t, self.get(name), *kind) {
                Ok(value) => drop(values.insert((*name).to_owned(), value)),
                Err(message) => errors.push(((*name).to_owned(), message)),
            }
        }
        if errors.is_empty() { Ok(values) } else { Err(Failure::invalid(errors)) }
    }

    /// Returns the values of the fields that are not empty.
    pub fn filled(&self, t: &Texts, fields: FieldKinds) -> Result<Map<String, Value>, Failure> {
        self.values(t, fields, |name| !self.get(name).trim().is_empty())
    }

    /// Returns the values of the fields that differ from `original`, so that a change does not undo what another person
    /// changed meanwhile in other fields.
    pub fn changed(&self, t: &Texts, fields: FieldKinds, original: &Entries) -> Result<Map<String, Value>, Failure> {
        let mut values = self.values(t, fields, |name| self.get(name) != original.get(name))?;
        // Another layout of the same JSON changes nothing.
        for (name, _) in fields.iter().filter(|(_, kind)| *kind == Kind::Json) {
            if serde_json::from_str::<Value>(original.get(name)).ok().as_ref() == values.get(*name) {
                values.remove(*name);
            }
        }
        Ok(values)
    }
}

/// Converts a value of the API to the text of a field.
fn text_of(value: &Value, kind: Kind) -> String {
    let list = |separator: &str| {
        let texts: Vec<&str> = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        texts.join(separator)
    };
    match (kind, value) {
        (_, Value::Null) => String::new(),
        (Kind::Json, value) => pretty(value),
        (Kind::List, _) => list(", "),
        (Kind::Lines, _) => list("\n"),
        (Kind::Duration, Value::Number(ms)) => duration_text(ms.as_u64().unwrap_or_default()),
        (_, Value::String(text)) => text.clone(),
        (_, other) => other.to_string(),
    }
}

/// Writes a duration in the largest unit that divides it, as [`parse_duration`] reads it: `15m`.
fn duration_text(ms: u64) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    match units.into_iter().find(|(size, _)| ms > 0 && ms.is_multiple_of(*size)) {
        Some((size, unit)) => format!("{}{unit}", ms / size),
        None => format!("{ms}ms"),
    }
}

/// Converts the text of a field to a value of the API.
pub fn value_of(t: &Texts, text: &str, kind: Kind) -> Result<Value, String> {
    let trimmed = text.trim();
    let list = |parts: std::str::Split<'_, char>| -> Value {
        parts.map(str::trim).filter(|part| !part.is_empty()).map(Value::from).collect()
    };
    if trimmed.is_empty() {
        return Ok(Value::Null);
    }
    match kind {
        Kind::Text => Ok(json!(trimmed)),
        Kind::Number => trimmed.parse::<u64>().map(Value::from).map_err(|_| t.must_be_a_number.to_owned()),
        Kind::Duration => {
            let ms = parse_duration(trimmed).and_then(|duration| u64::try_from(duration.as_millis()).ok());
            ms.map(Value::from).ok_or_else(|| t.must_be_a_duration.to_owned())
        }
        Kind::Json => serde_json::from_str(trimmed).map_err(|error| format!("{}: {error}", t.not_json)),
        Kind::List => Ok(list(trimmed.split(','))),
        Kind::Lines => Ok(list(trimmed.split('\n'))),
    }
}

/// A group of fields with a title.
pub struct Section {
    pub title: &'static str,
    pub inputs: Vec<Input>,
}

pub struct Input {
    pub name: &'static str,
    pub label: &'static str,
    pub value: String,
    pub placeholder: &'static str,
    pub control: Control,
    pub is_required: bool,
    /// Whether it decides when a schedule runs, which the form explains.
    pub is_timing: bool,
    pub is_invalid: bool,
}

pub enum Control {
    Line,
    /// Several lines.
    Area,
    /// Many lines.
    Json,
    /// Values and the words for them.
    Choice(Vec<(&'static str, &'static str)>),
}

impl Input {
    pub fn required(mut self) -> Input {
        self.is_required = true;
        self
    }

    pub fn placeholder(mut self, text: &'static str) -> Input {
        self.placeholder = text;
        self
    }

    /// Returns the class of the label: what has several lines gets the whole width.
    pub fn class(&self) -> &'static str {
        if matches!(self.control, Control::Area | Control::Json) { "wide" } else { "" }
    }
}

/// Makes the inputs of a form.
pub struct Inputs<'a> {
    pub t: &'static Texts,
    pub entries: &'a Entries,
    /// The fields with errors, and what is wrong with them.
    pub invalid: &'a [(String, String)],
    /// The fields that decide when a schedule runs.
    pub timing: &'static [&'static str],
}

impl Inputs<'_> {
    pub fn line(&self, name: &'static str, label: &'static str) -> Input {
        self.input(name, label, Control::Line)
    }

    pub fn area(&self, name: &'static str, label: &'static str) -> Input {
        self.input(name, label, Control::Area)
    }

    pub fn json(&self, name: &'static str) -> Input {
        self.input(name, self.t.payload_json, Control::Json)
    }

    /// An empty value stands for the choice of the server.
    pub fn choice(&self, name: &'static str, label: &'static str, values: &[&'static str]) -> Input {
        let word =
            |value: &&'static str| (*value, if value.is_empty() { self.t.automatic } else { self.t.word(value) });
        self.input(name, label, Control::Choice(values.iter().map(word).collect()))
    }

    pub fn priority(&self, name: &'static str) -> Input {
        let priorities =
            ["LOW", "NORMAL", "HIGH", "CRITICAL"].map(|priority| (priority, self.t.priority_word(priority)));
        self.input(name, self.t.priority_title, Control::Choice(priorities.to_vec()))
    }

    fn input(&self, name: &'static str, label: &'static str, control: Control) -> Input {
        Input {
            name,
            label,
            value: self.entries.get(name).to_owned(),
            placeholder: "",
            control,
            is_required: false,
            is_timing: self.timing.contains(&name),
            is_invalid: self.invalid.iter().any(|(path, _)| is_about(path, name)),
        }
    }
}

/// Example of a time, as a placeholder.
pub const TIME_EXAMPLE: &str = "2026-12-01T00:00:00Z";

/// Returns whether an error of the API at `path` is about a field: `except[2]` is about `except`.
fn is_about(path: &str, name: &str) -> bool {
    path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns what is wrong, with the labels of the form instead of the names of the API.
pub fn message(sections: &[Section], failure: &Failure) -> String {
    if failure.fields.is_empty() {
        return failure.message.clone();
    }
    let label = |path: &str| {
        let mut inputs = sections.iter().flat_map(|section| &section.inputs);
        inputs.find(|input| is_about(path, input.name)).map_or_else(|| path.to_owned(), |input| input.label.to_owned())
    };
    let errors = failure.fields.iter().map(|(path, message)| format!("{}: {message}", label(path)));
    errors.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    #[test]
    fn every_field_that_cannot_be_read_is_named() {
        const FIELDS: FieldKinds =
            &[("jitterMs", Kind::Duration), ("maxRetries", Kind::Number), ("payload", Kind::Json)];
        let edit = [("jitterMs", "soon"), ("maxRetries", "-1"), ("payload", "{")];
        let entries = Entries::from_pairs(edit.map(|(name, text)| (name.to_owned(), text.to_owned())));
        let failure = entries.filled(Language::English.texts(), FIELDS).expect_err("three errors");
        let names: Vec<&str> = failure.fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["jitterMs", "maxRetries", "payload"]);
    }

    #[test]
    fn a_duration_is_written_as_it_is_read() {
        for (ms, text) in [(0, "0ms"), (250, "250ms"), (90_000, "90s"), (7_200_000, "2h"), (172_800_000, "2d")] {
            assert_eq!(duration_text(ms), text);
            assert_eq!(value_of(Language::English.texts(), text, Kind::Duration), Ok(json!(ms)));
        }
    }
}
