//! Reads a definition from YAML or JSON.

mod json_schema;
mod parts;
mod reader;
mod states;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sha2::{Digest, Sha256};

use self::reader::{Fields, Findings, Mention, join};
use crate::{
    Finding,
    check::{Gaps, check},
    definition::{Action, Counter, Definition, EventType, Limits, MAX_RUNNING, StateIndex, Unexpected},
    format,
    node::{Node, NodeValue, Position},
};

/// Maximum number of findings that are returned. A text that is not a definition can have thousands.
const MAX_FINDINGS: usize = 100;

/// Maximum number of events of one machine.
const MAX_EVENTS: usize = 500;

impl Definition {
    /// Reads and checks a definition. Returns every error, in the order of the text.
    ///
    /// Uses a bounded amount of time and memory for any text.
    pub fn parse(text: &str) -> Result<Definition, Vec<Finding>> {
        let node = Node::parse(text).map_err(|finding| vec![finding])?;
        let mut findings = Findings::default();
        let definition = read(&node, &mut findings);
        if let Some(definition) = &definition {
            let gaps = gaps(definition, &findings);
            findings.found.extend(check(definition, &gaps));
        }
        match definition {
            Some(definition) if findings.found.is_empty() => Ok(definition),
            _ => Err(sorted(findings.found)),
        }
    }
}

/// Returns what is missing in a definition because it could not be read.
fn gaps(definition: &Definition, findings: &Findings) -> Gaps {
    let has_error = |index: StateIndex| {
        let outermost = definition.ancestors(index).last().unwrap_or(index);
        let path = join("states", &definition.states[outermost].name);
        let inside = |finding: &Finding| {
            finding.path.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        findings.found.iter().any(inside)
    };
    Gaps {
        any: !findings.found.is_empty(),
        targets: findings.has_unknown_target,
        states: (0..definition.states.len()).filter(|index| has_error(*index)).collect(),
    }
}

fn sorted(mut found: Vec<Finding>) -> Vec<Finding> {
    found.sort_by_key(|finding| finding.position);
    found.dedup();
    if found.len() > MAX_FINDINGS {
        let more = found.len() - MAX_FINDINGS;
        found.truncate(MAX_FINDINGS);
        let position = found.last().map(|finding| finding.position).unwrap_or_default();
        found.push(Finding::new(position, "", format!("and {more} more errors")));
    }
    found
}

/// Reads what can be read. Parts with errors are left out, or kept without their value.
fn read(node: &Node, findings: &mut Findings) -> Option<Definition> {
    let fields = findings.fields(node, "", &format::DEFINITION);
    let machine = fields.read("machine", |node, path| {
        let text = findings.text(node, path)?;
        findings.name(&text, node.position, path)
    });
    let version = fields.read("version", |node, path| findings.whole_number(node, path, 1));
    let names = match fields.get("states") {
        Some((node, path)) => states::collect(findings, node, &path)?,
        None => Names::default(),
    };
    let mut definition = Definition {
        machine: machine.unwrap_or_default(),
        version: version.unwrap_or_default(),
        title: fields.read("title", |node, path| findings.text(node, path)),
        description: fields.read("description", |node, path| findings.text(node, path)),
        input: fields.read("input", |node, path| json_schema::read(findings, node, path)),
        start: fields.read("start", |node, path| {
            let event = findings.text(node, path)?;
            findings.mention(&event, node.position, path);
            Some(event)
        }),
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
    check_final_limit(findings, &fields, &definition);
    check_events(findings, &definition);
    (!definition.states.is_empty()).then_some(definition)
}

/// Checks that a task that exceeds a limit ends. Otherwise it would exceed the limit again.
fn check_final_limit(findings: &mut Findings, fields: &Fields<'_>, definition: &Definition) {
    if let Some(to) = definition.limits.to.filter(|to| definition.states[*to].ends.is_none())
        && let Some((node, path)) = fields.get("limits")
    {
        let name = &definition.states[to].name;
        findings.add(node.position, &join(&path, "to"), format!("must be a final state, and \"{name}\" is not"));
    }
}

/// Checks that every event that the states mention is declared or created by Faena.
fn check_events(findings: &mut Findings, definition: &Definition) {
    let created = faena_events(definition);
    let has_errors = !findings.found.is_empty();
    for mention in std::mem::take(&mut findings.mentioned) {
        let Mention { event, is_handled, position, path } = mention;
        let is_created = is_handled && (created.contains(&event) || (has_errors && is_reserved(&event)));
        if !is_created && !definition.events.contains_key(&event) {
            let message = match is_reserved(&event) {
                false => format!("\"{}\" is not declared under \"events\"", event.escape_debug()),
                true => format!("\"{}\" is not an event that Faena creates for this machine", event.escape_debug()),
            };
            findings.add(position, &path, message);
        }
    }
}

/// Returns the events that Faena creates for this machine.
fn faena_events(definition: &Definition) -> BTreeSet<String> {
    let mut events = BTreeSet::from(["approval.granted".to_owned(), "approval.denied".to_owned()]);
    for state in &definition.states {
        events.extend(state.timers.iter().map(|timer| format!("timer.{}", timer.name)));
        for action in state.actions() {
            if let Action::Job(job) = action {
                events.extend(["completed", "failed"].map(|end| format!("job.{}.{end}", job.name)));
            }
        }
    }
    events
}

fn is_reserved(event: &str) -> bool {
    RESERVED.iter().any(|prefix| event.starts_with(prefix))
}

/// The names of all states, before their contents are read.
#[derive(Default)]
pub(in crate::parse) struct Names<'a>(Vec<NamedState<'a>>);

pub(in crate::parse) struct NamedState<'a> {
    name: String,
    position: Position,
    path: String,
    parent: Option<StateIndex>,
    node: &'a Node,
}

impl Names<'_> {
    fn index(&self, findings: &mut Findings, node: &Node, path: &str) -> Option<StateIndex> {
        let name = findings.text(node, path)?;
        // A path of nested states refers to its last state.
        let last = name.rsplit('.').next().unwrap_or(&name);
        let index = self.0.iter().position(|state| state.name == last);
        if index.is_none() {
            findings.has_unknown_target = true;
            findings.add(node.position, path, format!("there is no state \"{}\"", name.escape_debug()));
        }
        index
    }

    fn target(&self, findings: &mut Findings, fields: &Fields<'_>, key: &str) -> Option<StateIndex> {
        let (node, path) = fields.get(key)?;
        self.index(findings, node, &path)
    }
}

fn limits(findings: &mut Findings, fields: &Fields<'_>, names: &Names<'_>) -> Limits {
    let mut limits = Limits {
        transitions: 500,
        lifetime_ms: 30 * 86_400_000,
        context: 256 << 10,
        to: None,
        running: None,
        llm_tokens: None,
    };
    if let Some((node, path)) = fields.get("limits") {
        let fields = findings.fields(node, &path, &format::LIMITS);
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
        limits.llm_tokens = fields.read("llm_tokens", |node, path| findings.whole_number(node, path, 1));
        limits.running = fields.read("running", |node, path| {
            let count: u32 = findings.whole_number(node, path, 1)?;
            if count > MAX_RUNNING {
                findings.add(node.position, path, format!("must be at most {MAX_RUNNING}"));
            }
            Some(count)
        });
    }
    limits
}

fn events(findings: &mut Findings, node: &Node, path: &str) -> BTreeMap<String, EventType> {
    let mut events = BTreeMap::new();
    let entries = findings.entries(node, path);
    if entries.len() > MAX_EVENTS {
        findings.add(node.position, path, format!("a machine may have at most {MAX_EVENTS} events"));
    }
    for entry in entries.iter().take(MAX_EVENTS) {
        let path = join(path, &entry.key);
        let name = entry.key.clone();
        findings.name(&name, entry.position, &path);
        if is_reserved(&name) {
            let message = format!("the prefixes {} are reserved for events that Faena creates", RESERVED.join(", "));
            findings.add(entry.position, &path, message);
        }
        let fields = findings.fields(&entry.value, &path, &format::EVENT);
        let event = EventType {
            description: fields.read("description", |node, path| findings.text(node, path)),
            schema: fields.read("schema", |node, path| json_schema::read(findings, node, path)),
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
        findings.name(&entry.key, entry.position, &path);
        let (max, exceeded) = if matches!(entry.value.value, NodeValue::Map(_)) {
            let fields = findings.fields(&entry.value, &path, &format::COUNTER);
            let max = fields.read("max", |node, path| findings.whole_number(node, path, 1));
            (max, names.target(findings, &fields, "exceeded"))
        } else {
            (findings.whole_number(&entry.value, &path, 1), None)
        };
        counters.insert(entry.key.clone(), Counter { position: entry.position, max: max.unwrap_or(1), exceeded });
    }
    counters
}

pub(in crate::parse) fn policy(findings: &mut Findings, node: &Node, path: &str) -> Option<Unexpected> {
    match findings.text(node, path)?.as_str() {
        "defer" => Some(Unexpected::Defer),
        "ignore" => Some(Unexpected::Ignore),
        "reject" => Some(Unexpected::Reject),
        _ => {
            findings.add(node.position, path, "must be defer, ignore or reject");
            None
        }
    }
}

/// Returns the hash of a definition. Neither the order of keys nor the format of the text changes it.
fn hash(source: &Value) -> String {
    Sha256::digest(canonical(source).as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes JSON without spaces and with sorted keys.
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
