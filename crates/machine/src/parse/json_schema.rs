//! Reads the JSON Schemas of a definition.
//!
//! A machine must not be able to overload the server: a schema refers only to itself and not in cycles, and the size of
//! its expanded references and of its patterns is limited. So a payload is checked in bounded time.

use std::collections::HashMap;

use serde_json::Value;

use super::reader::Findings;
use crate::{definition::Schema, node::Node};

/// Maximum number of parts of one schema, with its references followed.
const MAX_PARTS: usize = 20_000;

/// Maximum number of patterns in all schemas of one definition, and of bytes of one compiled pattern.
const MAX_PATTERNS: usize = 50;
const MAX_PATTERN_BYTES: usize = 2 << 20;

/// Keywords whose values are data, not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "required"];

/// Keywords that move the target of a reference, or leave it open until the schema is used.
const UNSUPPORTED: [&str; 7] =
    ["$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"];

pub(super) fn read(findings: &mut Findings, node: &Node, path: &str) -> Option<Schema> {
    let source = node.to_json();
    let mut walk = Walk { root: &source, sizes: HashMap::new(), open: Vec::new(), patterns: 0 };
    let checked = walk.parts(&source, true).and_then(|_| {
        findings.patterns += walk.patterns;
        match findings.patterns > MAX_PATTERNS {
            true => Err(format!("the schemas of a machine may have at most {MAX_PATTERNS} patterns")),
            false => Ok(()),
        }
    });
    let patterns = jsonschema::PatternOptions::regex().size_limit(MAX_PATTERN_BYTES);
    let built = checked.and_then(|()| {
        let options = jsonschema::options().with_pattern_options(patterns);
        options.build(&source).map_err(|error| format!("not a valid JSON Schema: {error}"))
    });
    match built {
        Ok(validator) => Some(Schema { source, validator }),
        Err(message) => {
            findings.add(node.position, path, message);
            None
        }
    }
}

struct Walk<'a> {
    root: &'a Value,
    /// Number of parts by reference.
    sizes: HashMap<&'a str, usize>,
    /// References that are being followed.
    open: Vec<&'a str>,
    patterns: usize,
}

impl<'a> Walk<'a> {
    /// Returns the number of parts of a schema, with its references followed.
    fn parts(&mut self, schema: &'a Value, is_schema: bool) -> Result<usize, String> {
        let mut parts = 1_usize;
        match schema {
            Value::Array(items) => {
                for item in items {
                    parts += self.parts(item, is_schema)?;
                }
            }
            Value::Object(entries) => {
                for (key, value) in entries {
                    parts += if is_schema { self.keyword(key, value)? } else { self.parts(value, true)? };
                }
            }
            _ => {}
        }
        match parts > MAX_PARTS {
            true => Err(format!("a schema may have at most {MAX_PARTS} parts, with its references followed")),
            false => Ok(parts),
        }
    }

    fn keyword(&mut self, key: &'a str, value: &'a Value) -> Result<usize, String> {
        match (key, value) {
            ("$ref", Value::String(reference)) => self.reference(reference),
            (key, _) if UNSUPPORTED.contains(&key) => Err(format!("\"{key}\" is not supported in a schema")),
            (key, _) if DATA.contains(&key) => Ok(1),
            ("pattern", _) => {
                self.patterns += 1;
                Ok(1)
            }
            ("patternProperties", Value::Object(entries)) => {
                self.patterns += entries.len();
                self.parts(value, false)
            }
            // The keys of these maps are names, not keywords.
            ("properties" | "$defs" | "definitions" | "dependentSchemas" | "dependencies", _) => {
                self.parts(value, false)
            }
            _ => self.parts(value, true),
        }
    }

    fn reference(&mut self, reference: &'a str) -> Result<usize, String> {
        if let Some(parts) = self.sizes.get(reference) {
            return Ok(*parts);
        }
        let target = reference.strip_prefix('#').filter(|pointer| !pointer.contains('%'));
        let Some(target) = target.and_then(|pointer| self.root.pointer(pointer)) else {
            let reference = reference.escape_debug();
            return Err(format!(
                "\"$ref\" must refer to a part of the same schema, as in #/$defs/name; \"{reference}\" does not"
            ));
        };
        if self.open.contains(&reference) {
            return Err(format!("\"$ref\" must not be circular; \"{}\" is", reference.escape_debug()));
        }
        self.open.push(reference);
        let parts = self.parts(target, true)?;
        self.open.pop();
        self.sizes.insert(reference, parts);
        Ok(parts)
    }
}
