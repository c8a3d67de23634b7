//! Definitions that try to break the parser: each is refused with a reason, in bounded time and memory, or is harmless.

use faena_machine::{Definition, Finding, Outcome};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{Trial, coding_task, definition};

const VALID: &str = "machine: m\nversion: 1\nevents: {go: {}}\ninitial: A\nstates:\n  A: {forever: true, on: {go: Z}}\n  Z: {final: true}\n";

/// Reads a text on a stack as small as that of a thread of the server.
fn parse(text: String) -> Result<Definition, Vec<Finding>> {
    let thread = std::thread::Builder::new().stack_size(2 << 20);
    thread.spawn(move || Definition::parse(&text)).unwrap().join().expect("the parser does not panic")
}

fn refusal(text: impl Into<String>) -> String {
    let findings = parse(text.into()).expect_err("the definition is refused");
    assert!(findings.len() <= 101, "{} findings", findings.len());
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn deep_nesting_is_refused() {
    for text in [
        format!("machine: {}{}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("machine: {}", "[".repeat(500_000)),
        "a: {".repeat(200_000),
        (0..1_000).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect(),
        "- ".repeat(100_000),
        "? ".repeat(100_000),
        "!a ".repeat(100_000),
        "&a ".repeat(100_000),
    ] {
        let found = refusal(text);
        assert!(found.contains("not valid YAML or JSON"), "{found}");
    }
}

#[test]
fn aliases_cannot_expand_beyond_the_limits() {
    let mut laughs = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for level in 1..10 {
        let inner = vec![format!("*a{}", level - 1); 10].join(", ");
        laughs.push_str(&format!("a{level}: &a{level} [{inner}]\n"));
    }
    let large = format!("a: &a {}\nb: [{}]\n", "x".repeat(500_000), vec!["*a"; 99].join(", "));
    let anchors: String = (0..20_000).map(|index| format!("- &a{index} x\n")).collect();
    let many = format!("{anchors}- &big {}\n{}", "x".repeat(200_000), "- *big\n".repeat(40_000));
    for text in [laughs, large, many, "a: &a [*a]\n".to_owned(), "a: &a {b: *a}\n".to_owned()] {
        assert!(refusal(text).contains("not valid YAML or JSON"));
    }
}

#[test]
fn an_alias_is_replaced_by_its_value() {
    let text = "machine: m\nversion: 1\nevents: {go: {}}\ninitial: A\nstates:\n  \
                A: {deadline: &limit {total: 1h, to: Z}, on: {go: B}}\n  B: {deadline: *limit, on: {go: Z}}\n  Z: {final: true}\n";
    let machine = definition(text);
    assert_eq!(machine.states[1].deadline.as_ref().unwrap().total_ms, Some(3_600_000));
    assert_eq!(machine.source["states"]["B"]["deadline"], json!({"total": "1h", "to": "Z"}));
}

#[test]
fn only_one_document_of_plain_values_is_accepted() {
    for text in [
        "",
        "\u{feff}",
        "---\n---\n",
        "machine: m\n---\nmachine: n\n",
        "7",
        "null",
        "[]",
        "machine: m\nmachine: n\n",
        "machine:\tm\n\tversion: 1\n",
        "machine: .inf\n",
        "version: .nan\n",
        "version: 1e400\n",
        "version: 99999999999999999999999999\n",
        "version: -170141183460469231731687303715884105729\n",
        "version: 0x7fffffffffffffffffffffffff\n",
        "machine: !!binary aGVsbG8=\n",
        "machine: !include /etc/hostname\n",
        "machine: \"\\ud800\"\n",
        "machine: \u{0}\n",
        "machine: \u{85}\u{2028}\n",
        "? [a, b]\n: c\n",
        "1: 2\n",
        "{\"machine\": \"m\",",
        "%YAML 9.9\n---\nmachine: m\n",
        "machine: |\n",
    ] {
        refusal(text);
    }
}

#[test]
fn line_ends_and_tabs_between_values_do_not_matter() {
    let unix = definition(VALID);
    for text in [VALID.replace('\n', "\r\n"), VALID.replace(": ", ":\t"), format!("\u{feff}{VALID}")] {
        assert_eq!(definition(&text).hash, unix.hash, "{text:?}");
    }
    let found = Definition::parse(&VALID.replace("go: Z", "go: X").replace('\n', "\r\n")).unwrap_err();
    assert_eq!(found[0].position.line, 6, "{found:?}");
}

#[test]
fn numbers_out_of_range_are_refused() {
    for (from, to, part) in [
        ("version: 1", "version: 4294967296", "a whole number"),
        ("version: 1", "version: -1", "a whole number"),
        ("version: 1", "version: 1.5", "a whole number"),
        ("version: 1", "version: 18446744073709551616", "a whole number"),
        ("version: 1", "version: 1\nlimits: {lifetime: 99999999999d}", "must be a duration"),
        ("version: 1", "version: 1\nlimits: {lifetime: 18446744073709551615d}", "must be a duration"),
        ("version: 1", "version: 1\nlimits: {lifetime: 0s}", "must be a duration"),
        ("version: 1", "version: 1\nlimits: {context: 17MiB}", "must be a size"),
        ("version: 1", "version: 1\nlimits: {context: 18446744073709551615MiB}", "must be a size"),
        ("version: 1", "version: 1\nlimits: {context: ٣KiB}", "must be a size"),
    ] {
        let found = refusal(VALID.replace(from, to));
        assert!(found.contains(part), "{to}: {found}");
    }
}

#[test]
fn a_huge_definition_is_refused_or_read_in_bounded_time() {
    assert!(refusal("x".repeat((1 << 20) + 1)).contains("at most 1048576 bytes"));
    let states: String = (0..5_000).map(|index| format!("  S{index}: {{forever: true, on: {{go: S0}}}}\n")).collect();
    let text = VALID.replace("  Z:", &format!("{states}  Z:"));
    assert!(refusal(text).contains("at most 500 states"));
    let events: String = (0..2_000).map(|index| format!("  e{index}: {{}}\n")).collect();
    let text = VALID.replace("events: {go: {}}", &format!("events:\n  go: {{}}\n{events}"));
    assert!(refusal(text).contains("at most 500 events"));
    let errors: String = (0..2_000).map(|index| format!("  k{index}: x\n")).collect();
    assert!(refusal(VALID.replace("  Z:", &format!("{errors}  Z:"))).contains("at most 500 states"));
    let keys: String = (0..9_900).map(|index| format!("k{index}: x\n")).collect();
    assert!(refusal(format!("{VALID}{keys}")).contains("and 9800 more errors"));
}

#[test]
fn the_largest_machine_is_read() {
    // Every state leads to ten others.
    let states: String = (1..499)
        .map(|index| {
            let targets: Vec<String> =
                (1..=10).map(|step| format!("{{if: ctx.n == {step}, to: S{}}}", (index * step) % 498 + 1)).collect();
            format!("  S{index}: {{deadline: {{total: 1h, to: Z}}, on: {{go: [{}]}}}}\n", targets.join(", "))
        })
        .collect();
    let text = VALID.replace("go: Z", "go: S1").replace("  Z:", &format!("{states}  Z:"));
    let machine = parse(text).unwrap_or_else(|findings| panic!("{:?}", findings.first()));
    assert_eq!(machine.states.len(), 500);
    assert!(machine.to_svg(&[]).ends_with("</svg>\n"));
}

fn with_schema(schema: &str) -> String {
    VALID.replace("go: {}", &format!("go: {{schema: {schema}}}"))
}

#[test]
fn a_schema_refers_only_to_itself_and_not_in_cycles() {
    for (schema, part) in [
        ("{$ref: '#'}", "must not be circular"),
        ("{allOf: [{$ref: '#'}]}", "must not be circular"),
        ("{$defs: {a: {$ref: '#/$defs/b'}, b: {$ref: '#/$defs/a'}}, $ref: '#/$defs/a'}", "must not be circular"),
        ("{properties: {a: {$ref: '#'}}}", "must not be circular"),
        ("{$ref: 'http://127.0.0.1:1/schema.json'}", "a part of the same schema"),
        ("{$ref: 'file:///etc/passwd'}", "a part of the same schema"),
        ("{$ref: '#/$defs/none'}", "a part of the same schema"),
        ("{$ref: '#name'}", "a part of the same schema"),
        ("{$ref: '#/%24defs/a', $defs: {a: {}}}", "a part of the same schema"),
        ("{$id: 'http://example.com/', $ref: '#/a'}", "\"$id\" is not supported"),
        ("{$dynamicRef: '#a'}", "\"$dynamicRef\" is not supported"),
        ("{$schema: 'http://example.com/unknown'}", "not a valid JSON Schema"),
        ("{type: nothing}", "not a valid JSON Schema"),
        ("{pattern: '('}", "not a valid JSON Schema"),
        ("{pattern: '((a{1000}){1000}){1000}'}", "not a valid JSON Schema"),
        ("{pattern: '(?=a)'}", "not a valid JSON Schema"),
    ] {
        let found = refusal(with_schema(schema));
        assert!(found.contains(part), "{schema}: {found}");
    }
    let machine = definition(&with_schema(
        "{properties: {at: {$ref: '#/$defs/place'}, $ref: {type: string}}, $defs: {place: {type: string}}}",
    ));
    let mut trial = Trial::new(&machine, json!({}));
    assert_eq!(trial.event("go", json!({"at": 7})), Outcome::Invalid);
    assert_eq!(trial.event("go", json!({"at": "home", "$ref": "x"})), Outcome::Applied);
}

#[test]
fn references_and_patterns_of_schemas_have_limits() {
    let mut parts = String::from("a0: {type: string}");
    for level in 1..30 {
        let inner = format!("{{$ref: '#/$defs/a{}'}}", level - 1);
        parts.push_str(&format!(", a{level}: {{allOf: [{inner}, {inner}]}}"));
    }
    assert!(
        refusal(with_schema(&format!("{{$defs: {{{parts}}}, $ref: '#/$defs/a29'}}"))).contains("at most 20000 parts")
    );
    let patterns: Vec<String> = (0..51).map(|index| format!("p{index}: {{pattern: '^[a-z]{{1,9}}$'}}")).collect();
    assert!(
        refusal(with_schema(&format!("{{properties: {{{}}}}}", patterns.join(", ")))).contains("at most 50 patterns")
    );
}

#[test]
fn deeply_nested_expressions_are_refused() {
    for expression in [
        format!("ctx{}", ".a".repeat(1_000)),
        format!("1{}", "+1".repeat(1_000)),
        format!("{}true", "!".repeat(2_000)),
        format!("{}1", "- ".repeat(1_000)),
        format!("{}1", "true?1:".repeat(280)),
        format!("{}1{}", "[".repeat(1_000), "]".repeat(1_000)),
        format!("ctx{}", "[0]".repeat(600)),
        format!("ctx{}", ".a".repeat(250)),
        format!("1{}", "+1".repeat(250)),
        format!("{}1", "true?1:".repeat(250)),
        format!("ctx{}", "[0]".repeat(250)),
        format!("{}true{}", "[!".repeat(65), "]".repeat(65)),
        format!("'{}", "a".repeat(100)),
        format!("{}ctx{}", "ctx.a.map(x, ".repeat(60), ")".repeat(60)),
    ] {
        let quoted = json!(expression).to_string();
        let found = refusal(VALID.replace("go: Z", &format!("go: {{if: {quoted}, to: Z}}")));
        let reasons = ["nested at most", "at most 250 operators", "not a valid expression"];
        assert!(reasons.iter().any(|reason| found.contains(reason)), "{expression}: {found}");
    }
    for (open, close) in [("[!", "]"), ("(-", ")"), ("{'a':", "}"), ("size(", ")"), ("[true?[1]:", "]"), ("ctx[", "]")]
    {
        let deep = format!("{}1{}", open.repeat(60), close.repeat(60));
        let _ = parse(VALID.replace("go: Z", &format!("go: {{if: {}, to: Z}}", json!(deep))));
    }
    // The parser removes pairs of `!` and `-`, so these expressions are not nested at all.
    for expression in [format!("{}true", "!".repeat(200)), format!("{}1 == 1", "- ".repeat(200))] {
        let machine = definition(&VALID.replace("go: Z", &format!("go: {{if: {}, to: Z}}", json!(expression))));
        assert_eq!(Trial::new(&machine, json!({})).event("go", json!({})), Outcome::Applied);
    }
    let longest = format!("ctx{} == 1", ".a".repeat(50));
    definition(&VALID.replace("go: Z", &format!("go: {{if: {longest}, to: Z}}")));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
        let _ = Definition::parse(&text);
    }

    #[test]
    fn a_changed_definition_is_read_or_refused(at in 0_usize..9_000, length in 0_usize..60, insert in "[-{}\\[\\]&*!?:,|>#\"' \n\ta-z0-9]{0,12}") {
        let mut text = faena_machine::BUILT_IN[0].1.to_owned();
        let near = |position: usize| (0..=position.min(text.len())).rev().find(|index| text.is_char_boundary(*index)).unwrap_or(0);
        let (start, end) = (near(at), near(at + length));
        text.replace_range(start..end, &insert);
        if let Ok(machine) = Definition::parse(&text) {
            let _ = (machine.to_svg(&[]), machine.to_mermaid());
        }
    }
}

#[test]
fn the_built_in_machine_is_far_from_every_limit() {
    let machine = coding_task();
    assert!(machine.states.len() < 50 && machine.events.len() < 50);
}
