//! Reads JSON objects field by field, so that every bad field is named and not just the first one.
//!
//! Values stay as the caller wrote them until a field asks for its type: a payload passes through untouched.

use std::collections::BTreeMap;

use faena_domain::{FieldError, Timestamp};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::ApiError;

pub struct Fields<'a> {
    fields: BTreeMap<String, &'a RawValue>,
    prefix: String,
    pub faults: Vec<FieldError>,
}

/// The largest body, read whole.
pub fn body_object<'a>(bytes: &'a [u8], limit: usize) -> Result<Fields<'a>, ApiError> {
    if bytes.len() > limit {
        return Err(ApiError::too_large(limit));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| whole("must be UTF-8"))?;
    let fields = serde_json::from_str(text).map_err(|e| {
        whole(&match e.classify() {
            serde_json::error::Category::Data => "must be a JSON object".to_owned(),
            _ => format!("is not valid JSON: {e}"),
        })
    })?;
    Ok(Fields { fields, prefix: String::new(), faults: Vec::new() })
}

fn whole(message: &str) -> ApiError {
    ApiError::invalid(vec![FieldError::new("body", message)])
}

/// Half a surrogate pair is JSON by its grammar and no text: most parsers refuse everything around it. Text that cannot hold
/// one is not parsed for it.
fn has_broken_characters(json: &str) -> bool {
    if !json.contains("\\ud") && !json.contains("\\uD") {
        return false;
    }
    let mut characters = json.as_bytes();
    while let Some(at) = characters.iter().position(|byte| *byte == b'\\') {
        let half = |bytes: &[u8]| {
            let digits = bytes.strip_prefix(b"\\u")?.get(..4)?;
            u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        };
        let escape = &characters[at..];
        let length = match half(escape) {
            Some(0xd800..=0xdbff) => match half(escape.get(6..).unwrap_or_default()) {
                Some(0xdc00..=0xdfff) => 12,
                _ => return true,
            },
            Some(0xdc00..=0xdfff) => return true,
            Some(_) => 6,
            None => 2,
        };
        characters = escape.get(length..).unwrap_or_default();
    }
    false
}

/// What other programs can read: many parsers stop at 128 or 256.
const MAX_DEPTH: usize = 100;

/// How deep objects and arrays stand in each other.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_text, mut escaped) = (0usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b'{' | b'[' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Whether other programs can read this JSON; if not, what is in the way.
pub fn sound_json(json: &str) -> Result<(), String> {
    if depth(json) > MAX_DEPTH {
        return Err(format!("must not be nested deeper than {MAX_DEPTH}"));
    }
    if has_broken_characters(json) {
        return Err("must not contain half a character (a surrogate without its other half)".into());
    }
    Ok(())
}

impl<'a> Fields<'a> {
    /// An object inside an array; its faults carry `prefix`.
    pub fn inner(raw: &'a RawValue, prefix: String) -> Result<Fields<'a>, FieldError> {
        match serde_json::from_str(raw.get()) {
            Ok(fields) => Ok(Fields { fields, prefix, faults: Vec::new() }),
            Err(_) => Err(FieldError::new(prefix.trim_end_matches('.'), "must be a JSON object")),
        }
    }

    pub fn fault(&mut self, name: &str, message: impl Into<String>) {
        self.faults.push(FieldError::new(format!("{}{name}", self.prefix), message));
    }

    /// The field as it was written; `null` counts as absent.
    pub fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        self.fields.remove(name).filter(|raw| raw.get() != "null")
    }

    /// Whether the field is there at all, be it `null`.
    pub fn is_present(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    pub fn take<T: DeserializeOwned>(&mut self, name: &str, wanted: &str) -> Option<T> {
        let raw = self.raw(name)?;
        match serde_json::from_str(raw.get()) {
            Ok(value) => Some(value),
            Err(_) => {
                self.fault(name, format!("must be {wanted}"));
                None
            }
        }
    }

    /// Puts the field into its place: a value as it was written, `null` as the default. One that is not there changes nothing.
    pub fn change<T: DeserializeOwned>(&mut self, name: &str, wanted: &str, place: &mut T, default: T) {
        if !self.is_present(name) {
            return;
        }
        let broken = self.faults.len();
        match self.take(name, wanted) {
            Some(value) => *place = value,
            None if self.faults.len() == broken => *place = default,
            None => {}
        }
    }

    /// Another name of a field. Both are allowed if they say the same.
    pub fn alias(&mut self, alias: &str, name: &str) {
        let Some(raw) = self.fields.remove(alias) else { return };
        match self.fields.get(name) {
            Some(other) if other.get() != raw.get() => {
                self.fault(alias, format!("differs from {name}; give one of them"))
            }
            Some(_) => {}
            None => {
                self.fields.insert(name.to_owned(), raw);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    pub fn text(&mut self, name: &str) -> Option<String> {
        self.take(name, "a string")
    }

    pub fn number(&mut self, name: &str) -> Option<u64> {
        self.take(name, "a whole number, not negative")
    }

    pub fn time(&mut self, name: &str) -> Option<Timestamp> {
        self.take(name, "a time like 2026-11-15T20:00:00Z")
    }

    /// A JSON object, kept to the letter.
    pub fn object(&mut self, name: &str) -> Option<String> {
        let raw = self.raw(name)?;
        if !raw.get().starts_with('{') {
            self.fault(name, "must be a JSON object");
            None
        } else if let Err(what) = sound_json(raw.get()) {
            self.fault(name, what);
            None
        } else {
            Some(raw.get().to_owned())
        }
    }

    pub fn list<T: DeserializeOwned>(&mut self, name: &str, wanted: &str) -> Vec<T> {
        self.take(name, wanted).unwrap_or_default()
    }

    /// Everything that nobody asked for is refused.
    pub fn finish(mut self) -> Vec<FieldError> {
        let unknown: Vec<String> = self.fields.keys().cloned().collect();
        for name in unknown {
            self.fault(&name, "is not a known field");
        }
        self.faults
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}
