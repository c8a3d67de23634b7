//! Reads the values of a definition and collects everything that is wrong with them.

use crate::{
    Expression, Finding, Template,
    format::Object,
    node::{Entry, Node, NodeValue, Position},
};

/// Collects findings while a definition is read, so that all of them are reported together.
#[derive(Default)]
pub(super) struct Findings {
    pub found: Vec<Finding>,
    /// Events that states handle, publish or have a policy for. All names are known only at the end.
    pub mentioned: Vec<Mention>,
    /// Whether a transition or a limit leads to a state that does not exist.
    pub has_unknown_target: bool,
    /// Number of patterns in the schemas.
    pub patterns: usize,
}

/// An event that a state mentions.
pub(super) struct Mention {
    pub event: String,
    /// Whether a state handles it. Only then may it be one of Faena's own events, such as `timer.NAME`.
    pub is_handled: bool,
    pub position: Position,
    pub path: String,
}

/// Shortest time between two firings of a repeated timer.
const MIN_PERIOD_MS: i64 = 1_000;

impl Findings {
    pub fn add(&mut self, position: Position, path: &str, message: impl Into<String>) {
        self.found.push(Finding::new(position, path, message));
    }

    /// Records that a state publishes an event or has a policy for it.
    pub fn mention(&mut self, event: &str, position: Position, path: &str) {
        let (event, path) = (event.to_owned(), path.to_owned());
        self.mentioned.push(Mention { event, is_handled: false, position, path });
    }

    fn expected(&mut self, node: &Node, path: &str, expected: &str) {
        self.add(node.position, path, format!("must be {expected}, is {}", node.kind()));
    }

    /// Reads a map and reports unknown and missing keys.
    pub fn fields<'a>(&mut self, node: &'a Node, path: &str, known: &Object) -> Fields<'a> {
        let before = self.found.len();
        let entries = self.entries(node, path);
        for entry in entries {
            if !known.has(&entry.key) {
                let message = format!("unknown key \"{}\"; known keys are {}", entry.key.escape_debug(), known.names());
                self.add(entry.position, path, message);
            }
        }
        let fields = Fields { position: node.position, path: path.to_owned(), entries };
        // A value that is not a map is reported once, not once for each missing key.
        let is_map = self.found.len() == before || matches!(node.value, NodeValue::Map(_));
        for key in known.keys.iter().filter(|key| is_map && key.is_required && fields.get(key.name).is_none()) {
            self.add(node.position, path, format!("\"{}\" is missing: {}", key.name, key.hint()));
        }
        fields
    }

    /// Returns the entries of a map whose keys may be any text.
    pub fn entries<'a>(&mut self, node: &'a Node, path: &str) -> &'a [Entry] {
        match &node.value {
            NodeValue::Map(entries) => entries,
            NodeValue::Null => &[],
            _ => {
                self.expected(node, path, "a map");
                &[]
            }
        }
    }

    /// Returns the items of a list, or the value itself: a single item can be written without brackets.
    pub fn items<'a>(&mut self, node: &'a Node) -> &'a [Node] {
        match &node.value {
            NodeValue::List(items) => items,
            NodeValue::Null => &[],
            _ => std::slice::from_ref(node),
        }
    }

    pub fn text(&mut self, node: &Node, path: &str) -> Option<String> {
        match &node.value {
            NodeValue::Text(text) => Some(text.clone()),
            _ => {
                self.expected(node, path, "text");
                None
            }
        }
    }

    /// Reads a name: letters, digits, `_`, `-` and `.`, at most 100 characters.
    pub fn name(&mut self, text: &str, position: Position, path: &str) -> Option<String> {
        let valid = |character: char| character.is_alphanumeric() || matches!(character, '_' | '-' | '.');
        if text.is_empty() || text.chars().count() > 100 || !text.chars().all(valid) {
            let message = format!("\"{}\" is not a name: use 1 to 100 letters, digits, _, - or .", text.escape_debug());
            self.add(position, path, message);
            return None;
        }
        Some(text.to_owned())
    }

    pub fn flag(&mut self, node: &Node, path: &str) -> Option<bool> {
        match node.value {
            NodeValue::Bool(value) => Some(value),
            _ => {
                self.expected(node, path, "true or false");
                None
            }
        }
    }

    pub fn whole_number(&mut self, node: &Node, path: &str, least: u64) -> Option<u32> {
        let number = match &node.value {
            NodeValue::Number(number) => number.as_u64().and_then(|number| u32::try_from(number).ok()),
            _ => None,
        };
        if number.is_none_or(|number| u64::from(number) < least) {
            self.expected(node, path, &format!("a whole number from {least}"));
            return None;
        }
        number
    }

    /// Reads a duration such as `5m`, in milliseconds.
    pub fn duration(&mut self, node: &Node, path: &str) -> Option<i64> {
        let duration = match &node.value {
            NodeValue::Text(text) => faena_domain::parse_duration(text),
            _ => None,
        };
        let ms = duration.and_then(|duration| i64::try_from(duration.as_millis()).ok()).filter(|ms| *ms > 0);
        if ms.is_none() {
            self.add(node.position, path, "must be a duration like 90s, 5m, 1h30m or 7d");
        }
        ms
    }

    /// Reads the time between two firings of a repeated timer, in milliseconds.
    pub fn period(&mut self, node: &Node, path: &str) -> Option<i64> {
        let ms = self.duration(node, path)?;
        if ms < MIN_PERIOD_MS {
            self.add(node.position, path, "must be at least 1s");
            return None;
        }
        Some(ms)
    }

    /// Reads a size such as `256KiB`, in bytes.
    pub fn size(&mut self, node: &Node, path: &str) -> Option<usize> {
        let size = match &node.value {
            NodeValue::Number(number) => number.as_u64(),
            NodeValue::Text(text) => {
                let digits = text.trim_end_matches(|character: char| !character.is_ascii_digit());
                let factor = match text[digits.len()..].trim() {
                    "" | "B" => Some(1),
                    "KiB" => Some(1 << 10),
                    "MiB" => Some(1 << 20),
                    _ => None,
                };
                factor.zip(digits.parse::<u64>().ok()).and_then(|(factor, number)| number.checked_mul(factor))
            }
            _ => None,
        };
        let size = size.filter(|size| (1..=16 << 20).contains(size));
        if size.is_none() {
            self.add(node.position, path, "must be a size like 64KiB or 2MiB, at most 16MiB");
        }
        size.and_then(|size| usize::try_from(size).ok())
    }

    pub fn expression(&mut self, node: &Node, path: &str) -> Option<Expression> {
        let source = match &node.value {
            NodeValue::Text(text) => text.clone(),
            NodeValue::Bool(value) => value.to_string(),
            _ => {
                self.expected(node, path, "an expression");
                return None;
            }
        };
        Expression::compile(&source)
            .map(|expression| expression.at(node.position))
            .map_err(|error| self.add(node.position, path, error))
            .ok()
    }

    /// Reads a value whose texts are expressions.
    pub fn template(&mut self, node: &Node, path: &str) -> Option<Template> {
        match &node.value {
            NodeValue::Text(_) => self.expression(node, path).map(Template::Expression),
            NodeValue::List(items) => {
                let items: Vec<_> = items.iter().map(|item| self.template(item, path)).collect();
                items.into_iter().collect::<Option<_>>().map(Template::List)
            }
            NodeValue::Map(entries) => {
                let values: Vec<_> = entries
                    .iter()
                    .map(|entry| Some((entry.key.clone(), self.template(&entry.value, &join(path, &entry.key))?)))
                    .collect();
                values.into_iter().collect::<Option<_>>().map(Template::Map)
            }
            _ => Some(Template::Constant(node.to_json())),
        }
    }
}

/// The entries of a map with known keys.
pub(super) struct Fields<'a> {
    pub position: Position,
    pub path: String,
    entries: &'a [Entry],
}

impl<'a> Fields<'a> {
    /// Returns the value of a key and its path. An empty value counts as missing.
    pub fn get(&self, key: &str) -> Option<(&'a Node, String)> {
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        (entry.value.value != NodeValue::Null).then(|| (&entry.value, join(&self.path, key)))
    }

    /// Reads the value of a key, if there is one.
    pub fn read<T>(&self, key: &str, read: impl FnOnce(&'a Node, &str) -> Option<T>) -> Option<T> {
        self.get(key).and_then(|(node, path)| read(node, &path))
    }
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
