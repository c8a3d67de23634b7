//! What a definition may contain, and how its faults are reported.

use faena_machine::Definition;

use crate::support::{coding_task, definition};

/// The smallest definition, with room for a fault.
fn with_states(states: &str) -> String {
    format!("machine: m\nversion: 1\nevents: {{go: {{}}, back: {{}}}}\ninitial: A\nstates:\n{states}")
}

fn findings(text: &str) -> Vec<(u64, String)> {
    let findings = Definition::parse(text).expect_err("the definition has a fault");
    findings.into_iter().map(|finding| (finding.place.line, finding.to_string())).collect()
}

#[test]
fn every_fault_is_refused_with_its_line() {
    let end = "  Z: {final: true}\n";
    let limited = "deadline: {total: 1h, to: Z}";
    for (states, line, part) in [
        (format!("  A:\n    {limited}\n    on: {{go: B}}\n{end}"), 8, "there is no state \"B\""),
        (format!("  A:\n    {limited}\n    on: {{jump: Z}}\n{end}"), 8, "\"jump\" is not declared"),
        (
            format!("  A:\n    {limited}\n    on: {{go: Z}}\n  B: {{forever: true, on: {{go: Z}}}}\n{end}"),
            9,
            "no transition leads",
        ),
        ("  A: {}\n".to_owned(), 6, "could never leave this state"),
        (format!("  A:\n    on: {{go: Z}}\n{end}"), 6, "could wait here for ever"),
        (
            format!("  A: {{forever: true, on: {{go: B}}}}\n  B: {{forever: true, on: {{back: A, go: Z}}}}\n{end}"),
            6,
            "come back to this state for ever",
        ),
        (
            format!(
                "  A:\n    deadline: {{silence: 3m, to: Z}}\n    poll: {{every: 2m, emit: go}}\n    on: {{go: Z}}\n{end}"
            ),
            6,
            "at least twice",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: {{if: \"1 +\", to: Z}}}}\n{end}"), 8, "not a valid expression"),
        (format!("  A:\n    {limited}\n    on: {{go: {{if: \"'text'\", to: Z}}}}\n{end}"), 8, "must be true or false"),
        (
            format!("  A:\n    {limited}\n    on: {{go: {{to: Z, loop: rounds}}}}\n{end}"),
            8,
            "not declared under \"counters\"",
        ),
        (format!("  A:\n    {limited}\n    on: {{go: {{to: Z, emit: news}}}}\n{end}"), 6, "emits \"news\""),
        (format!("  A:\n    {limited}\n    deadlines: 5\n    on: {{go: Z}}\n{end}"), 8, "unknown key \"deadlines\""),
        (format!("  A:\n    deadline: {{total: soon, to: Z}}\n    on: {{go: Z}}\n{end}"), 7, "must be a duration"),
        (format!("  A:\n    deadline: {{total: 1h}}\n    on: {{go: Z}}\n{end}"), 7, "\"to\" is missing"),
        (format!("  A:\n    {limited}\n    on: {{go: {{approve: true}}, back: Z}}\n{end}"), 8, "this state has none"),
        (
            format!("  A:\n    {limited}\n    approval: {{subject: ctx}}\n    on: {{approval.granted: Z}}\n{end}"),
            6,
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
    ] {
        let text = with_states(&states);
        let found = findings(&text);
        assert!(
            found.iter().any(|(at, message)| *at == line && message.contains(part)),
            "{part} at {line}: {found:#?}"
        );
    }
}

#[test]
fn all_faults_are_reported_at_once_in_the_order_of_the_text() {
    let found = findings("version: none\nmachine: m m\nstates:\n  A:\n    on: {x: B}\n    deadline: 7\n");
    let lines: Vec<u64> = found.iter().map(|(line, _)| *line).collect();
    assert!(found.len() >= 5, "{found:#?}");
    assert!(lines.is_sorted(), "{found:#?}");
}

#[test]
fn counters_must_be_used_and_say_what_follows() {
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
