//! Reads a definition from YAML or JSON.

mod parts;
mod reader;
mod states;

use std::collections::BTreeMap;

use serde_json::Value;
use sha2::{Digest, Sha256};

use self::reader::{Fields, Findings, join};
use crate::{
    Finding,
    check::check,
    definition::{Counter, Definition, EventType, Limits, Schema, StateIndex, Unexpected},
    node::{Node, Place},
};

const KEYS: [&str; 13] = [
    "machine",
    "version",
    "title",
    "description",
    "input",
    "start",
    "cancel",
    "events",
    "unexpected",
    "limits",
    "counters",
    "initial",
    "states",
];

impl Definition {
    /// Reads and checks a definition. Returns every fault, in the order of the text.
    pub fn parse(text: &str) -> Result<Definition, Vec<Finding>> {
        let node = Node::parse(text).map_err(|finding| vec![finding])?;
        let mut findings = Findings::default();
        let definition = read(&node, &mut findings);
        // The checks need a whole definition: what is missing would be reported as a second fault.
        let mut findings = findings.0;
        if let Some(definition) = definition.as_ref().filter(|_| findings.is_empty()) {
            findings = check(definition);
        }
        match definition {
            Some(definition) if findings.is_empty() => Ok(definition),
            _ => {
                findings.sort_by_key(|finding| finding.place);
                findings.dedup();
                Err(findings)
            }
        }
    }
}

fn read(node: &Node, findings: &mut Findings) -> Option<Definition> {
    let fields = findings.fields(node, "", &KEYS);
    for key in ["machine", "version", "initial", "states"] {
        if fields.get(key).is_none() {
            findings.add(node.place, "", format!("\"{key}\" is missing"));
        }
    }
    let machine = fields.read("machine", |node, path| {
        let text = findings.text(node, path)?;
        findings.name(&text, node.place, path)
    });
    let version = fields.read("version", |node, path| findings.whole_number(node, path, 1));
    let names = fields.get("states").map(|(node, path)| states::collect(findings, node, &path)).unwrap_or_default();
    let mut definition = Definition {
        machine: machine.unwrap_or_default(),
        version: version.unwrap_or_default(),
        title: fields.read("title", |node, path| findings.text(node, path)),
        description: fields.read("description", |node, path| findings.text(node, path)),
        input: fields.read("input", |node, path| schema(findings, node, path)),
        start: fields.read("start", |node, path| findings.text(node, path)),
        cancel: names.target(findings, &fields, "cancel"),
        events: fields.get("events").map(|(node, path)| events(findings, node, &path)).unwrap_or_default(),
        unexpected: fields.read("unexpected", |node, path| policy(findings, node, path)).unwrap_or_default(),
        limits: limits(findings, &fields, &names),
        counters: fields
            .get("counters")
            .map(|(node, path)| counters(findings, &names, node, &path))
            .unwrap_or_default(),
        initial: names.target(findings, &fields, "initial").unwrap_or_default(),
        states: Vec::new(),
        hash: hash(&node.to_json()),
        source: node.to_json(),
    };
    definition.states = names.read(findings);
    findings.0.is_empty().then_some(definition)
}

/// The names of all states, before their contents are read.
#[derive(Default)]
pub(in crate::parse) struct Names<'a>(Vec<NamedState<'a>>);

pub(in crate::parse) struct NamedState<'a> {
    name: String,
    place: Place,
    path: String,
    parent: Option<StateIndex>,
    node: &'a Node,
}

impl Names<'_> {
    fn index(&self, findings: &mut Findings, node: &Node, path: &str) -> Option<StateIndex> {
        let name = findings.text(node, path)?;
        // A path of nested states means its last one.
        let last = name.rsplit('.').next().unwrap_or(&name);
        let index = self.0.iter().position(|state| state.name == last);
        if index.is_none() {
            findings.add(node.place, path, format!("there is no state \"{name}\""));
        }
        index
    }

    fn target(&self, findings: &mut Findings, fields: &Fields<'_>, key: &str) -> Option<StateIndex> {
        let (node, path) = fields.get(key)?;
        self.index(findings, node, &path)
    }
}

fn limits(findings: &mut Findings, fields: &Fields<'_>, names: &Names<'_>) -> Limits {
    let mut limits = Limits { transitions: 500, lifetime_ms: 30 * 86_400_000, context: 256 << 10, to: None };
    if let Some((node, path)) = fields.get("limits") {
        let fields = findings.fields(node, &path, &["transitions", "lifetime", "context", "to"]);
        if let Some(count) = fields.read("transitions", |node, path| findings.whole_number(node, path, 1)) {
            limits.transitions = count;
        }
        if let Some(ms) = fields.read("lifetime", |node, path| findings.duration(node, path)) {
            limits.lifetime_ms = ms;
        }
        if let Some(bytes) = fields.read("context", |node, path| findings.size(node, path)) {
            limits.context = bytes;
        }
        limits.to = names.target(findings, &fields, "to");
    }
    limits
}

fn events(findings: &mut Findings, node: &Node, path: &str) -> BTreeMap<String, EventType> {
    let mut events = BTreeMap::new();
    for entry in findings.entries(node, path) {
        let path = join(path, &entry.key);
        let Some(name) = findings.name(&entry.key, entry.place, &path) else { continue };
        if RESERVED.iter().any(|prefix| name.starts_with(prefix)) {
            let message = format!("the prefixes {} are those of Faena's own events", RESERVED.join(", "));
            findings.add(entry.place, &path, message);
        }
        let known = ["description", "schema", "heartbeat", "progress", "unexpected"];
        let fields = findings.fields(&entry.value, &path, &known);
        let event = EventType {
            description: fields.read("description", |node, path| findings.text(node, path)),
            schema: fields.read("schema", |node, path| schema(findings, node, path)),
            heartbeat: fields.read("heartbeat", |node, path| findings.flag(node, path)).unwrap_or_default(),
            progress: fields.read("progress", |node, path| findings.expression(node, path)),
            unexpected: fields.read("unexpected", |node, path| policy(findings, node, path)),
        };
        events.insert(name, event);
    }
    events
}

/// Prefixes of events that Faena creates itself.
const RESERVED: [&str; 5] = ["approval.", "job.", "timer.", "deadline.", "task."];

fn counters(findings: &mut Findings, names: &Names<'_>, node: &Node, path: &str) -> BTreeMap<String, Counter> {
    let mut counters = BTreeMap::new();
    for entry in findings.entries(node, path) {
        let path = join(path, &entry.key);
        let Some(name) = findings.name(&entry.key, entry.place, &path) else { continue };
        let counter = if matches!(entry.value.value, crate::node::NodeValue::Map(_)) {
            let fields = findings.fields(&entry.value, &path, &["max", "exceeded"]);
            if fields.get("max").is_none() {
                findings.add(entry.place, &path, "\"max\" is missing");
            }
            let max = fields.read("max", |node, path| findings.whole_number(node, path, 1));
            Counter { max: max.unwrap_or(1), exceeded: names.target(findings, &fields, "exceeded") }
        } else {
            Counter { max: findings.whole_number(&entry.value, &path, 1).unwrap_or(1), exceeded: None }
        };
        counters.insert(name, counter);
    }
    counters
}

pub(in crate::parse) fn policy(findings: &mut Findings, node: &Node, path: &str) -> Option<Unexpected> {
    match findings.text(node, path)?.as_str() {
        "defer" => Some(Unexpected::Defer),
        "ignore" => Some(Unexpected::Ignore),
        "reject" => Some(Unexpected::Reject),
        _ => {
            findings.add(node.place, path, "must be defer, ignore or reject");
            None
        }
    }
}

fn schema(findings: &mut Findings, node: &Node, path: &str) -> Option<Schema> {
    let source = node.to_json();
    let options = jsonschema::options().with_pattern_options(jsonschema::PatternOptions::regex());
    match options.build(&source) {
        Ok(validator) => Some(Schema { source, validator }),
        Err(error) => {
            findings.add(node.place, path, format!("not a valid JSON Schema: {error}"));
            None
        }
    }
}

/// Returns the hash of a definition. Neither the order of keys nor the format of the text changes it.
fn hash(source: &Value) -> String {
    Sha256::digest(canonical(source).as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes JSON without blanks and with sorted keys.
pub(crate) fn canonical(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(entries) => {
            let sorted: BTreeMap<&String, &Value> = entries.iter().collect();
            let entries: Vec<String> = sorted
                .into_iter()
                .map(|(key, value)| format!("{}:{}", Value::String(key.clone()), canonical(value)))
                .collect();
            format!("{{{}}}", entries.join(","))
        }
        other => other.to_string(),
    }
}
