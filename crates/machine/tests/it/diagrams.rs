//! Drawings of the built-in machine.

use crate::support::{coding_task, definition};

#[test]
fn the_mermaid_diagram_shows_states_and_events() {
    insta::assert_snapshot!(coding_task().to_mermaid());
}

#[test]
fn the_drawing_highlights_the_active_states_and_escapes_texts() {
    let machine = coding_task();
    let svg = machine.to_svg(&["EJECUTANDO_CODIGO", "INICIANDO"]);
    assert!(svg.contains("class=\"group active\"") && svg.contains("class=\"state active\""));
    assert_eq!(svg.matches(" active\"").count(), 2);
    for state in &machine.states {
        assert!(svg.contains(&format!(">{}</text>", state.name)), "{}", state.name);
    }
    assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    let strange = "machine: m\nversion: 1\ntitle: \"<script>\\u0001\"\ninitial: A\nstates:\n  A: {final: true, description: \"</title><script>\"}\n";
    let svg = definition(strange).to_svg(&[]);
    assert!(svg.contains("<title id=\"machine-title\">&lt;script&gt;\u{fffd}</title>") && !svg.contains("<script>"));
}

#[test]
fn the_drawing_has_a_text_description() {
    let svg = coding_task().to_svg(&[]);
    assert!(svg.contains("role=\"img\" aria-labelledby=\"machine-title machine-desc\""));
    assert!(svg.contains("It starts in NUEVA. NUEVA to PLANIFICANDO: tarea.crear."));
    assert!(svg.contains("prefers-color-scheme:dark"));
}

#[test]
fn states_whose_names_differ_only_in_punctuation_have_different_ids() {
    let text = "machine: m\nversion: 1\nevents: {go: {}}\ninitial: a-b\nstates:\n  a-b: {forever: true, on: {go: a_b}}\n  \
                a_b: {forever: true, on: {go: end}}\n  end: {final: true}\n";
    let mermaid = definition(text).to_mermaid();
    assert!(mermaid.contains("a_b --> a_b_: go") && mermaid.contains("a_b_ --> end_: go"), "{mermaid}");
}
