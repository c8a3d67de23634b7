//! Reads a JSON object field by field, so that every bad field is reported and not only the first one.
//!
//! Values stay as the caller wrote them until a field is read with its type: a payload passes through unchanged.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::{Value, value::RawValue};

use super::{ParseError, check_json};
use crate::{FieldError, Timestamp};

/// Fields of a JSON object that have not been read yet, and the errors found so far.
#[derive(Debug)]
pub struct Fields<'a> {
    fields: BTreeMap<String, &'a RawValue>,
    prefix: String,
    pub errors: Vec<FieldError>,
}

impl<'a> Fields<'a> {
    /// Splits a body into its fields. Fails if it is larger than `max_bytes`, not UTF-8, or not a JSON object.
    pub fn parse(body: &'a [u8], max_bytes: usize) -> Result<Fields<'a>, ParseError> {
        if body.len() > max_bytes {
            return Err(ParseError::TooLarge { max_bytes });
        }
        let text = std::str::from_utf8(body).map_err(|_| ParseError::body("must be UTF-8"))?;
        let fields = serde_json::from_str(text).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => ParseError::body("must be a JSON object"),
            _ => ParseError::body(format!("is not valid JSON: {error}")),
        })?;
        Ok(Fields { fields, prefix: String::new(), errors: Vec::new() })
    }

    /// Splits an object inside another one. The paths of its errors start with `prefix`.
    pub fn nested(raw: &'a RawValue, prefix: String) -> Result<Fields<'a>, FieldError> {
        match serde_json::from_str(raw.get()) {
            Ok(fields) => Ok(Fields { fields, prefix, errors: Vec::new() }),
            Err(_) => Err(FieldError::new(prefix.trim_end_matches('.'), "must be a JSON object")),
        }
    }

    /// Records an error about the field `name`.
    pub fn reject(&mut self, name: &str, message: impl Into<String>) {
        self.errors.push(FieldError::new(format!("{}{name}", self.prefix), message));
    }

    /// Takes a field as it was written; `null` counts as absent.
    pub fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        self.fields.remove(name).filter(|raw| raw.get() != "null")
    }

    /// Returns whether the field is present, even if it is `null`.
    pub fn is_present(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Takes a field of type `T`. `expected` completes the error "must be …".
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Option<T> {
        let raw = self.raw(name)?;
        let value = serde_json::from_str(raw.get()).ok().or_else(|| with_whole_numbers(raw));
        if value.is_none() {
            self.reject(name, format!("must be {expected}"));
        }
        value
    }

    /// Sets `target` to the field's value, or to `default` if the field is `null`. An absent field changes nothing.
    pub fn update<T: DeserializeOwned>(&mut self, name: &str, expected: &str, target: &mut T, default: T) {
        if !self.is_present(name) {
            return;
        }
        let errors_before = self.errors.len();
        match self.take(name, expected) {
            Some(value) => *target = value,
            None if self.errors.len() == errors_before => *target = default,
            None => {}
        }
    }

    /// Reads `alias` as another name of the field `name`. Both may be present if they have the same value.
    pub fn alias(&mut self, alias: &str, name: &str) {
        let Some(raw) = self.fields.remove(alias) else { return };
        match self.fields.get(name) {
            Some(other) if other.get() != raw.get() => {
                self.reject(alias, format!("differs from {name}; set only one of them"))
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
        self.take(name, "a non-negative integer")
    }

    pub fn time(&mut self, name: &str) -> Option<Timestamp> {
        self.take(name, Timestamp::EXPECTED)
    }

    /// Takes a JSON object, stored unchanged.
    pub fn object(&mut self, name: &str) -> Option<String> {
        let raw = self.raw(name)?;
        if !raw.get().starts_with('{') {
            self.reject(name, "must be a JSON object");
            None
        } else if let Err(message) = check_json(raw.get()) {
            self.reject(name, message);
            None
        } else {
            Some(raw.get().to_owned())
        }
    }

    pub fn list<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Vec<T> {
        self.take(name, expected).unwrap_or_default()
    }

    /// Rejects every field that was not read, and returns all errors.
    pub fn finish(mut self) -> Vec<FieldError> {
        let unknown: Vec<String> = self.fields.keys().cloned().collect();
        for name in unknown {
            self.reject(&name, "unknown field");
        }
        self.errors
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

/// Reads a value in which whole numbers may be written like `4.0`, as JSON permits and some programs do.
fn with_whole_numbers<T: DeserializeOwned>(raw: &RawValue) -> Option<T> {
    /// A floating-point number represents every whole number up to this one exactly.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    fn convert(value: &mut Value) {
        match value {
            Value::Number(number) if number.is_f64() => {
                let whole = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() <= MAX_EXACT);
                if let Some(whole) = whole {
                    *value = Value::from(whole as i64);
                }
            }
            Value::Array(items) => items.iter_mut().for_each(convert),
            Value::Object(fields) => fields.values_mut().for_each(convert),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(raw.get()).ok()?;
    convert(&mut value);
    serde_json::from_value(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_number_may_be_written_with_a_fraction_of_zero() {
        let mut fields =
            Fields::parse(br#"{"a": 4.0, "b": [1e3, 2], "c": 4.5, "d": 1e300, "e": 1763164800000.0}"#, 1_000)
                .expect("an object");
        assert_eq!(fields.number("a"), Some(4));
        assert_eq!(fields.take::<Vec<u64>>("b", "numbers"), Some(vec![1_000, 2]));
        assert_eq!(fields.time("e"), Some(Timestamp::from_ms(1_763_164_800_000)));
        assert_eq!((fields.number("c"), fields.number("d")), (None, None));
        assert_eq!(fields.finish().len(), 2);
    }
}
