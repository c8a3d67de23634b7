//! What a definition may contain, and how its errors are reported.

use faena_machine::Definition;

use crate::support::{coding_task, definition};

/// Returns a small definition with these states.
fn with_states(states: &str) -> String {
    format!("machine: m\nversion: 1\nevents: {{go: {{}}, back: {{}}}}\ninitial: A\nstates:\n{states}")
}

fn findings(text: &str) -> Vec<(u64, String)> {
    let findings = Definition::parse(text).expect_err("the definition has an error");
    findings.into_iter().map(|finding| (finding.position.line, finding.to_string())).collect()
}

const END: &str = "  Z: {final: true}\n";
const LIMITED: &str = "deadline: {total: 1h, to: Z}";

/// Asserts that a definition with these states has an error in this line, and that the error contains this text.
fn assert_errors(cases: impl IntoIterator<Item = (String, u64, &'static str)>) {
    for (states, line, part) in cases {
        let found = findings(&with_states(&states));
        assert!(
            found.iter().any(|(at, message)| *at == line && message.contains(part)),
            "{part} at {line}: {found:#?}"
        );
    }
}

#[test]
fn every_error_is_reported_with_its_line() {
    let (end, limited) = (END, LIMITED);
    assert_errors([
        (format!("  A:\n    {limited}\n    on: {{go: B}}\n{end}"), 8, "there is no state \"B\""),
        (format!("  A:\n    {limited}\n    on: {{jump: Z}}\n{end}"), 8, "\"jump\" is not declared"),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n  B: {{forever: true, on: {{go: Z}}}}\n{end}"),
            9,
            "no transition leads",
        ),
        ("  A: {}\n".to_owned(), 6, "could never leave this state"),
        (format!("  A:\n    on: {{go: Z}}\n{end}"), 6, "could wait here forever"),
        (
            format!("  A: {{forever: true, on: {{go: B}}}}\n  B: {{forever: true, on: {{back: A, go: Z}}}}\n{end}"),
            6,
            "come back to this state forever",
        ),
        (
            format!(
                "  A:\n    deadline: {{silence: 3m, to: Z}}\n    poll: {{every: 2m, emit: go}}\n    on: {{go: Z}}\n{end}"
            ),
            8,
            "at least twice",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: {{if: \"1 +\", to: Z}}}}\n{end}"), 8, "not a valid expression"),
        (format!("  A:\n    {limited}\n    on: {{go: {{if: \"'text'\", to: Z}}}}\n{end}"), 8, "must be true or false"),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, loop: rounds}}}}\n{end}"),
            8,
            "not declared under \"counters\"",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: {{to: Z, emit: news}}}}\n{end}"), 8, "\"news\" is not declared"),
        (format!("  A:\n    {limited}\n    deadlines: 5\n    on: {{go: Z}}\n{end}"), 8, "unknown key \"deadlines\""),
        (format!("  A:\n    deadline: {{total: soon, to: Z}}\n    on: {{go: Z}}\n{end}"), 7, "must be a duration"),
        (format!("  A:\n    deadline: {{total: 1h}}\n    on: {{go: Z}}\n{end}"), 7, "\"to\" is missing"),
        (format!("  A:\n    {limited}\n    on: {{go: {{approve: true}}, back: Z}}\n{end}"), 8, "this state has none"),
        (
            format!("  A:\n    {limited}\n    approval: {{subject: ctx}}\n    on: {{approval.granted: Z}}\n{end}"),
            8,
            "\"approval.denied\"",
        ),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n    states: {{B: {{}}}}\n{end}"),
            6,
            "\"initial\" is missing",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: Z}}\n    initial: Z\n{end}"), 6, "directly inside"),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, emit: go, job: x, name: x}}}}\n{end}"),
            8,
            "separate actions",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: {{to: Z, job: send}}}}\n{end}"), 8, "needs a \"name\""),
        (
            format!(
                "  A:\n    {limited}\n    on: {{go: {{to: Z, job: send, name: s, options: {{priority: huge}}}}}}\n{end}"
            ),
            8,
            "options.priority: ",
        ),
        (
            format!(
                "  A:\n    {limited}\n    on: {{go: {{to: Z, job: send, name: s, options: {{uniqueKey: k}}}}}}\n{end}"
            ),
            8,
            "options.uniqueKey: cannot be an option",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: Z}}\n  A.B: {{final: true}}\n{end}"), 9, "must not contain a dot"),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n  Z: {{final: true, on: {{go: A}}}}\n"),
            9,
            "a final state has no transitions",
        ),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n    ends: failure\n{end}"),
            9,
            "only a state with \"final: true\"",
        ),
    ]);
}

#[test]
fn an_error_deep_inside_a_state_is_reported_with_its_own_line() {
    let (end, limited) = (END, LIMITED);
    assert_errors([
        (format!("  A:\n    deadline: {{total: 1h, to: B}}\n    on: {{go: Z}}\n{end}"), 7, "there is no state \"B\""),
        (format!("  A:\n    {limited}\n    on:\n      jump:\n        - to: Z\n{end}"), 9, "\"jump\" is not declared"),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n    unexpected:\n      jump: ignore\n{end}"),
            10,
            "\"jump\" is not declared",
        ),
        (
            format!("  A:\n    {limited}\n    on:\n      go: Z\n      timer.late: Z\n{end}"),
            10,
            "\"timer.late\" is not an event that Faena creates for this machine",
        ),
        (
            format!("  A:\n    {limited}\n    on:\n      go: Z\n      job.send.completed: Z\n{end}"),
            10,
            "\"job.send.completed\" is not an event that Faena creates for this machine",
        ),
        (
            format!("  A:\n    forever: true\n    on:\n      go: {{to: A}}\n      back: Z\n{end}"),
            6,
            "come back to this state forever, through A",
        ),
        (
            format!(
                "  A:\n    deadline: {{total: 1h, to: Z}}\n    poll: {{every: 10ms, emit: go}}\n    on: {{go: Z}}\n{end}"
            ),
            8,
            "must be at least 1s",
        ),
        (
            format!(
                "  A:\n    {limited}\n    entry:\n      - set: {{x: 1}}\n      - {{emit: go, data: {{x: 1 + 'a'}}}}\n    on: {{go: Z}}\n{end}"
            ),
            10,
            "+ cannot be used with a number and text",
        ),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, exceeded: Z}}}}\n{end}"),
            8,
            "has no effect without loop",
        ),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, emit: go, name: x}}}}\n{end}"),
            8,
            "has no effect without job",
        ),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, data: 1}}}}\n{end}"),
            8,
            "has no effect without emit, job or llm",
        ),
        (
            format!("  A:\n    {limited}\n    timers: {{x: {{after: 1h, every: 1h}}}}\n    on: {{go: Z}}\n{end}"),
            8,
            "either \"after\" or \"every\"",
        ),
        (
            format!(
                "  A:\n    {limited}\n    on: {{go: Z}}\n    initial: B\n    states:\n      B:\n        on: {{back: C}}\n{end}"
            ),
            12,
            "there is no state \"C\"",
        ),
    ]);
}

#[test]
fn all_errors_are_reported_together_in_the_order_of_the_text() {
    let found = findings("version: none\nmachine: m m\nstates:\n  A:\n    on: {x: B}\n    deadline: 7\n");
    let lines: Vec<u64> = found.iter().map(|(line, _)| *line).collect();
    assert!(found.len() >= 5, "{found:#?}");
    assert!(lines.is_sorted(), "{found:#?}");
}

/// One error of each kind that the specification names, and some that only the parser finds, in one definition.
const MANY_FAULTS: &str = "machine: m
version: 1
start: begin
input: {type: object, properties: {count: {type: integer}}}
events:
  go: {}
  back: {}
  alive: {heartbeat: true, progress: event.state + 1, schema: {properties: {state: {type: string}}}}
counters: {rounds: {max: 3, exceeded: Z}}
initial: A
states:
  A:
    forever: true
    on:
      go: B
      alive: {if: ctx.count, to: E}
  B:
    forever: true
    on: {back: A, go: {to: C, loop: turns}}
  C:
    deadline: {silence: 3m, to: Z}
    poll: {every: 2m, emit: go}
    on: {go: D}
  D:
    on: {go: Z}
  E:
    deadline: {total: 1h, to: Z}
    on: {go: {if: size(event) > 1, to: G}}
  G: {}
  H:
    forever: true
    on: {go: Z}
  Y:
    deadline: {total: soon, to: Z}
    on: {go: {to: Z, set: {x: 1 +}}}
  Z: {final: true}
";

#[test]
fn errors_of_every_kind_are_found_in_one_run() {
    let found = findings(MANY_FAULTS);
    for (line, part) in [
        (3, "start: \"begin\" is not declared"),
        (8, "events.alive.progress: "),
        (12, "come back to this state forever, through A, B"),
        (16, "a condition must be true or false"),
        (19, "counts \"turns\""),
        (22, "at least twice"),
        (24, "could wait here forever"),
        (29, "could never leave this state"),
        (30, "no transition leads to this state"),
        (34, "must be a duration"),
        (35, "not a valid expression"),
    ] {
        assert!(
            found.iter().any(|(at, message)| *at == line && message.contains(part)),
            "{part} at {line}: {found:#?}"
        );
    }
    let spurious = ["E", "B", "C", "Z"].map(|state| format!("states.{state}: no transition"));
    assert!(!found.iter().any(|(_, message)| spurious.iter().any(|part| message.contains(part))), "{found:#?}");
}

#[test]
fn a_counter_limits_a_cycle_only_if_the_cycle_does_not_reset_it() {
    let text = |on_b: &str, exceeded: &str| {
        format!(
            "machine: m\nversion: 1\nevents: {{go: {{}}, back: {{}}, end: {{}}}}\n\
             counters: {{n: {{max: 3, exceeded: {exceeded}}}}}\ninitial: A\nstates:\n  \
             A: {{forever: true, on: {{go: {{to: B, loop: n}}, end: Z}}}}\n  \
             B: {{forever: true, on: {{{on_b}}}}}\n  Z: {{final: true}}\n"
        )
    };
    definition(&text("back: A", "Z"));
    for (on_b, exceeded) in [("back: {to: A, reset: n}", "Z"), ("back: A", "B")] {
        let found = findings(&text(on_b, exceeded));
        assert!(found.iter().any(|(line, message)| *line == 7 && message.contains("forever")), "{found:#?}");
    }
}

#[test]
fn the_state_for_exceeded_limits_must_be_final() {
    let text = "machine: m\nversion: 1\nlimits: {lifetime: 1d, to: A}\nevents: {go: {}}\ninitial: A\nstates:\n  \
                A: {forever: true, on: {go: Z}}\n  Z: {final: true}\n";
    let found = findings(text);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].0 == 3 && found[0].1.contains("limits.to: must be a final state"), "{found:#?}");
}

#[test]
fn a_counter_must_be_used_and_have_a_limit_and_a_target() {
    let text = |counters: &str, on: &str| {
        format!(
            "machine: m\nversion: 1\nevents: {{go: {{}}}}\ncounters: {{{counters}}}\ninitial: A\nstates:\n  A:\n    deadline: {{total: 1h, to: Z}}\n    on: {{go: {on}}}\n  Z: {{final: true}}\n"
        )
    };
    assert!(Definition::parse(&text("n: {max: 3, exceeded: Z}", "{to: A, loop: n}")).is_ok());
    for (counters, on, part) in [
        ("n: 3", "{to: A, loop: n}", "\"exceeded\" is missing"),
        ("n: 0", "{to: A, loop: n, exceeded: Z}", "a whole number from 1"),
        ("n: 3", "Z", "no transition has this counter"),
        ("n: {exceeded: Z}", "{to: A, loop: n}", "\"max\" is missing"),
    ] {
        let found = findings(&text(counters, on));
        assert!(found.iter().any(|(_, message)| message.contains(part)), "{part}: {found:#?}");
    }
}

#[test]
fn the_hash_depends_on_the_content_only() {
    let yaml = "machine: m\nversion: 1\ninitial: A\nstates: {A: {final: true}}\n";
    let reordered = "# a comment\nstates:\n  A: { final: true }\ninitial: A\nversion: 1\nmachine: m\n";
    let json = r#"{"version": 1, "machine": "m", "initial": "A", "states": {"A": {"final": true}}}"#;
    let hash = |text: &str| definition(text).hash;
    assert_eq!((hash(yaml), hash(yaml)), (hash(reordered), hash(json)));
    assert_ne!(hash(yaml), hash(&yaml.replace("version: 1", "version: 2")));
}

#[test]
fn the_built_in_machine_has_its_states() {
    let names: Vec<String> = coding_task().states.into_iter().map(|state| state.name).collect();
    let expected = [
        "NUEVA",
        "PLANIFICANDO",
        "ESPERANDO_APROBACION_PLAN",
        "EJECUTANDO_CODIGO",
        "INICIANDO",
        "MONITOREANDO_EJECUCION",
        "PROBANDO_INTEGRACION",
        "ESPERANDO_FEEDBACK_INTERNO",
        "COMPLETADA",
        "FALLIDA_LOGICA",
        "FALLIDA_INFRAESTRUCTURA",
        "CANCELADA",
    ];
    assert_eq!(names, expected);
}
