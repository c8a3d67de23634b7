//! Drawings of the built-in machine.

use crate::support::{coding_task, definition};

#[test]
fn the_mermaid_diagram_shows_states_and_events() {
    insta::assert_snapshot!(coding_task().to_mermaid());
}

#[test]
fn the_drawing_lights_the_active_states_and_escapes_names() {
    let machine = coding_task();
    let svg = machine.to_svg(&["EJECUTANDO_CODIGO", "INICIANDO"]);
    assert_eq!(svg.matches("class=\"state active\"").count(), 2);
    for state in &machine.states {
        assert!(svg.contains(&format!(">{}</text>", state.name)), "{}", state.name);
    }
    assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    let strange = "machine: m\nversion: 1\ntitle: \"<script>\"\ninitial: A\nstates: {A: {final: true}}\n";
    let svg = definition(strange).to_svg(&[]);
    assert!(svg.contains("&lt;script&gt;") && !svg.contains("<script>"));
}
