//! YAML and JSON as a tree in which every value knows its line.

use std::{cell::Cell, fmt};

use serde::{Deserialize, Deserializer, de};
use serde_saphyr::Spanned;

use crate::Finding;

/// A value of a definition, with the position where it starts.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub position: Position,
    pub value: NodeValue,
}

/// A line and a column, both counted from 1. Line 0 means that the position is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub line: u64,
    pub column: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum NodeValue {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
    List(Vec<Node>),
    /// In the order of the text.
    Map(Vec<Entry>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub position: Position,
    pub key: String,
    pub value: Node,
}

const MAX_BYTES: usize = 1 << 20;
const MAX_DEPTH: usize = 48;

/// Maximum number of values of a definition, and of bytes of its texts, after each alias has been replaced by its
/// content.
const MAX_NODES: usize = 50_000;
const MAX_EXPANDED_BYTES: usize = 4 << 20;

thread_local! {
    /// Number of values and bytes that this thread has read so far from the definition it is reading.
    static EXPANDED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

impl Node {
    /// Parses YAML, or JSON, which is YAML too.
    pub fn parse(text: &str) -> Result<Node, Finding> {
        if text.len() > MAX_BYTES {
            let message = format!("a definition may have at most {MAX_BYTES} bytes; this one has {}", text.len());
            return Err(Finding::new(Position::default(), "", message));
        }
        EXPANDED.set((0, 0));
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_depth: MAX_DEPTH,
                max_nodes: MAX_NODES,
                max_total_scalar_bytes: MAX_EXPANDED_BYTES,
                max_recorded_anchor_bytes: MAX_EXPANDED_BYTES,
            },
            strict_booleans: true,
            with_snippet: false,
        };
        let parsed: Result<Spanned<Node>, _> = serde_saphyr::from_str_with_options(text, options);
        parsed.map(Node::from_spanned).map_err(|error| {
            let position = error.location().map(Position::from).unwrap_or_default();
            Finding::new(position, "", format!("not valid YAML or JSON: {}", error.without_snippet()))
        })
    }

    fn from_spanned(node: Spanned<Node>) -> Node {
        Node { position: node.referenced.into(), ..node.value }
    }

    /// Returns the value as JSON, without the positions.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value;
        match &self.value {
            NodeValue::Null => Value::Null,
            NodeValue::Bool(value) => Value::Bool(*value),
            NodeValue::Number(value) => Value::Number(value.clone()),
            NodeValue::Text(value) => Value::String(value.clone()),
            NodeValue::List(items) => items.iter().map(Node::to_json).collect(),
            NodeValue::Map(entries) => entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect(),
        }
    }

    /// Returns what the value is, for messages such as "must be a map, is text".
    pub fn kind(&self) -> &'static str {
        match self.value {
            NodeValue::Null => "empty",
            NodeValue::Bool(_) => "true or false",
            NodeValue::Number(_) => "a number",
            NodeValue::Text(_) => "text",
            NodeValue::List(_) => "a list",
            NodeValue::Map(_) => "a map",
        }
    }
}

impl From<serde_saphyr::Location> for Position {
    fn from(location: serde_saphyr::Location) -> Position {
        Position { line: location.line(), column: location.column() }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Node, D::Error> {
        let value = deserializer.deserialize_any(NodeVisitor)?;
        Ok(Node { position: Position::default(), value })
    }
}

/// Counts a value, so that a few aliases cannot expand to gigabytes.
fn count<E: de::Error>(bytes: usize) -> Result<(), E> {
    let (nodes, total) = EXPANDED.get();
    let (nodes, total) = (nodes + 1, total.saturating_add(bytes));
    EXPANDED.set((nodes, total));
    if nodes > MAX_NODES || total > MAX_EXPANDED_BYTES {
        let message = format!("a definition may expand to at most {MAX_NODES} values and {MAX_EXPANDED_BYTES} bytes");
        return Err(E::custom(message));
    }
    Ok(())
}

struct NodeVisitor;

impl<'de> de::Visitor<'de> for NodeVisitor {
    type Value = NodeValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<NodeValue, E> {
        Ok(NodeValue::Null)
    }

    fn visit_none<E>(self) -> Result<NodeValue, E> {
        Ok(NodeValue::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<NodeValue, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, value: bool) -> Result<NodeValue, E> {
        Ok(NodeValue::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<NodeValue, E> {
        Ok(NodeValue::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<NodeValue, E> {
        Ok(NodeValue::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<NodeValue, E> {
        serde_json::Number::from_f64(value).map(NodeValue::Number).ok_or_else(|| E::custom("a number must be finite"))
    }

    fn visit_i128<E: de::Error>(self, _: i128) -> Result<NodeValue, E> {
        Err(E::custom("a whole number must have at most 64 bits"))
    }

    fn visit_u128<E: de::Error>(self, _: u128) -> Result<NodeValue, E> {
        Err(E::custom("a whole number must have at most 64 bits"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<NodeValue, E> {
        count(value.len())?;
        Ok(NodeValue::Text(value.to_owned()))
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<NodeValue, A::Error> {
        let mut nodes = Vec::new();
        while let Some(item) = items.next_element::<Spanned<Node>>()? {
            count(0)?;
            nodes.push(Node::from_spanned(item));
        }
        Ok(NodeValue::List(nodes))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<NodeValue, A::Error> {
        let mut nodes = Vec::new();
        while let Some((key, value)) = entries.next_entry::<Spanned<String>, Spanned<Node>>()? {
            count(key.value.len())?;
            let position = key.referenced.into();
            nodes.push(Entry { position, key: key.value, value: Node::from_spanned(value) });
        }
        Ok(NodeValue::Map(nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_knows_its_line() {
        let node =
            Node::parse("machine: a\nstates:\n  A:\n    on:\n      go: B\n    list: [1, two]\n").expect("it is valid");
        let NodeValue::Map(entries) = &node.value else { panic!("{node:?}") };
        let NodeValue::Map(states) = &entries[1].value.value else { panic!() };
        assert_eq!((states[0].key.as_str(), states[0].position.line), ("A", 3));
        let NodeValue::Map(state) = &states[0].value.value else { panic!() };
        assert_eq!((state[0].key.as_str(), state[0].position.line), ("on", 4), "\"on\" is a key, not a boolean");
        let NodeValue::List(list) = &state[1].value.value else { panic!() };
        assert_eq!((list[1].position.line, list[1].to_json()), (6, "two".into()));
    }

    #[test]
    fn json_is_read_with_its_lines() {
        let node = Node::parse("{\n  \"machine\": \"a\",\n  \"version\": 1\n}").expect("it is valid");
        let NodeValue::Map(entries) = &node.value else { panic!("{node:?}") };
        assert_eq!(entries[1].position.line, 3);
        assert_eq!(node.to_json(), serde_json::json!({"machine": "a", "version": 1}));
    }

    #[test]
    fn invalid_text_is_reported_with_its_line() {
        let finding = Node::parse("a: 1\nb: [1\n").expect_err("an error");
        assert!(finding.position.line >= 2, "{finding:?}");
        let finding = Node::parse("a: 1\na: 2\n").expect_err("an error");
        assert_eq!(finding.position.line, 2, "{finding:?}");
    }
}
