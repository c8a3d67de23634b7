//! The JSON Schema of definitions accepts every valid definition, and describes every key.

use std::sync::LazyLock;

use faena_machine::{BUILT_IN, schema};
use serde_json::{Value, json};

use crate::support::{EXAMPLES, definition, example};

fn validator() -> jsonschema::Validator {
    jsonschema::draft7::new(&schema()).expect("the schema is valid")
}

static VALIDATOR: LazyLock<jsonschema::Validator> = LazyLock::new(validator);

fn errors(definition: &Value) -> Vec<String> {
    VALIDATOR.iter_errors(definition).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[test]
fn the_schema_itself_is_valid() {
    assert!(jsonschema::draft7::meta::is_valid(&schema()));
}

#[test]
fn the_machines_of_the_repository_are_valid() {
    for (name, text) in BUILT_IN {
        assert_eq!(errors(&definition(text).source), Vec::<String>::new(), "{name}");
    }
    for name in EXAMPLES {
        assert_eq!(errors(&example(name).source), Vec::<String>::new(), "{name}");
    }
}

/// A definition that uses every key.
const EVERY_KEY: &str = r#"
machine: every-key
version: 1
title: Every key
description: Uses every key of the format.
input: { type: object, properties: { text: { type: string } } }
start: go
cancel: STOPPED
events:
  go: { description: Starts., schema: { type: object }, heartbeat: true, progress: event.step, unexpected: ignore }
  ask:
unexpected: reject
limits: { transitions: 50, lifetime: 1h30m, context: 64KiB, to: STOPPED, running: 5, llm_tokens: 100000 }
counters: { rounds: 3, turns: { max: 2, exceeded: STOPPED } }
initial: A
states:
  A:
    title: First
    description: The first state.
    initial: B
    entry: { set: { text: ctx.text } }
    exit: [{ emit: ask, data: { text: ctx.text } }, { llm: answer, data: { prompt: ctx.text }, options: { timeoutMs: 1000 } }]
    deadline: { silence: 5m, no_progress: 10m, total: 1h, to: STOPPED }
    poll: { every: 2m, emit: ask, data: { text: ctx.text } }
    approval:
      subject: ctx.text
      quorum: 2
      self: true
      groups: [one, two]
      remind: 1h
      escalate: { after: 1d, groups: three }
      expires: { after: 2d, to: STOPPED }
      webhook: ["https://example.org/approvals", ctx.text]
    timers: { once: { after: 1m }, often: { every: 1m } }
    unexpected: { ask: defer }
    on:
      go: { approve: true, if: "true" }
      ask: [{ to: B, loop: turns, reset: rounds, do: [{ job: noop, name: sent, options: { queue: mail, priority: HIGH, tags: [x] } }] }]
      timer.once: { loop: rounds, exceeded: STOPPED, job: noop, name: work, data: 7 }
      approval.granted: DONE
      approval.denied: { to: DONE, set: { text: "'no'", list: [1, ctx.text, { a: null }] }, emit: ask }
    states:
      B: { forever: true, unexpected: defer }
  DONE: { final: true }
  STOPPED: { final: true, ends: failure }
"#;

#[test]
fn a_definition_with_every_key_is_valid() {
    let every = definition(EVERY_KEY);
    assert_eq!(errors(&every.source), Vec::<String>::new());
    // Each key of the schema is used above, so the parser knows every key that the schema offers.
    let schema = schema();
    let mut tables: Vec<&Value> = schema["definitions"].as_object().unwrap().values().collect();
    tables.push(&schema);
    let mut used = Vec::new();
    keys(&every.source, &mut used);
    for (key, _) in tables.iter().filter_map(|table| table["properties"].as_object()).flatten() {
        let is_job_field = schema["definitions"]["jobOptions"]["properties"].get(key).is_some();
        assert!(is_job_field || used.contains(&key.as_str()), "{key} is not used");
    }
}

fn keys<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
        Value::Object(entries) => entries.iter().for_each(|(key, value)| {
            found.push(key);
            keys(value, found);
        }),
        _ => {}
    }
}

#[test]
fn every_key_and_part_has_a_description() {
    let schema = schema();
    assert!(schema["description"].is_string());
    let parts = schema["definitions"].as_object().unwrap();
    for (name, part) in parts.iter().map(|(name, part)| (name.as_str(), part)).chain([("definition", &schema)]) {
        assert!(part["description"].is_string(), "{name}");
        for (key, property) in part["properties"].as_object().into_iter().flatten() {
            assert!(property["description"].as_str().is_some_and(|text| !text.is_empty()), "{name}.{key}");
        }
    }
}

#[test]
fn errors_that_an_editor_can_see_are_refused() {
    let valid = json!({
        "machine": "m", "version": 1, "events": {"go": {}}, "counters": {"n": 2}, "initial": "A",
        "states": {"A": {"forever": true, "on": {"go": {"to": "Z"}}}, "Z": {"final": true}},
    });
    assert_eq!(errors(&valid), Vec::<String>::new());
    for (pointer, value) in [
        ("/machine", json!("two words")),
        ("/machine", json!(null)),
        ("/version", json!(0)),
        ("/version", json!(1.5)),
        ("/version", json!("1")),
        ("/unexpected", json!("later")),
        ("/more", json!(1)),
        ("/limits", json!({"lifetime": "long"})),
        ("/limits", json!({"context": "2GiB"})),
        ("/limits", json!({"states": 3})),
        ("/limits", json!({"running": 0})),
        ("/limits", json!({"running": 10_001})),
        ("/limits", json!({"llm_tokens": 0})),
        ("/counters", json!({"n": 0})),
        ("/counters", json!({"n": {"exceeded": "Z"}})),
        ("/events", json!({"go": {"heartbeats": true}})),
        ("/events", json!({"go": {"schema": 7}})),
        ("/events", json!({"go on": {}})),
        ("/states/A/deadline", json!({"total": "1h"})),
        ("/states/A/deadline", json!({"to": "Z"})),
        ("/states/A/deadline", json!({"total": 5, "to": "Z"})),
        ("/states/A/poll", json!({"every": "1m"})),
        ("/states/A/timers", json!({"t": {"after": "1m", "every": "1m"}})),
        ("/states/A/timers", json!({"t": {}})),
        ("/states/A/approval", json!({"quorum": 2})),
        ("/states/A/approval", json!({"subject": "ctx", "quorum": 0})),
        ("/states/A/approval", json!({"subject": "ctx", "expires": {"after": "1d"}})),
        ("/states/A/approval", json!({"subject": "ctx", "webhook": 7})),
        ("/states/A/entry", json!([{"data": 1}])),
        ("/states/A/entry", json!([{"emit": "go", "job": "x", "name": "x"}])),
        ("/states/A/entry", json!([{"job": "x"}])),
        ("/states/A/entry", json!([{"emit": "go", "name": "x"}])),
        ("/states/A/entry", json!([{"job": "x", "name": "x.y"}])),
        ("/states/A/entry", json!([{"job": "x", "name": "x", "options": {"priority": "huge"}}])),
        ("/states/A/entry", json!([{"job": "x", "name": "x", "options": {"uniqueKey": "x"}}])),
        ("/states/A/ends", json!("failure")),
        ("/states/A/final", json!("yes")),
        ("/states/A/on", json!({"go": []})),
        ("/states/A/on", json!({"go": 7})),
        ("/states/A/on", json!({"go": {"goto": "Z"}})),
        ("/states/A/on", json!({"go": {"to": "Z", "exceeded": "Z"}})),
        ("/states/A/states", json!({"B": {}})),
        ("/states/Z/ends", json!("well")),
    ] {
        let mut faulty = valid.clone();
        let (map, key) = pointer.rsplit_once('/').unwrap();
        faulty.pointer_mut(map).unwrap()[key] = value;
        assert!(!errors(&faulty).is_empty(), "{pointer}: {faulty}");
        assert!(
            faena_machine::Definition::parse(&faulty.to_string()).is_err(),
            "the parser agrees: {pointer}: {faulty}"
        );
    }
    for key in ["machine", "version", "initial", "states"] {
        let mut faulty = valid.clone();
        faulty.as_object_mut().unwrap().remove(key);
        assert!(!errors(&faulty).is_empty(), "{key}");
    }
}
