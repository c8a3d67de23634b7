//! Draws a machine as part of a page.

use faena_machine::Definition;
use serde::Deserialize;
use serde_json::Value;

use crate::{error::Failure, markup::Markup, query::segment, viewer::Viewer};

/// Reads a version of a machine and draws it. `active` are the names of the states to highlight.
pub async fn read(viewer: &Viewer, machine: &str, version: u64, active: &[&str]) -> Result<Markup, Failure> {
    #[derive(Deserialize)]
    struct Machine {
        definition: Value,
    }
    let machine: Machine = viewer.get(&format!("/api/v1/machines/{}?version={version}", segment(machine))).await?;
    draw(&machine.definition, active)
}

/// Draws a machine. `active` are the names of the states to highlight.
pub fn draw(definition: &Value, active: &[&str]) -> Result<Markup, Failure> {
    let definition =
        Definition::parse(&definition.to_string()).map_err(|_| Failure::internal("the machine is not readable"))?;
    Ok(Markup::drawing(without_style(&definition.to_svg(active))))
}

/// Removes the styles inside a drawing. The policy of the pages allows only their style sheet, which has rules for drawings.
fn without_style(svg: &str) -> String {
    let parts = svg.split_once("<style>").and_then(|(before, rest)| Some((before, rest.split_once("</style>")?.1)));
    parts.map_or_else(|| svg.to_owned(), |(before, after)| format!("{before}{after}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_drawing_has_no_styles_of_its_own_and_marks_the_active_state() {
        let machine = json!({"machine": "order", "version": 1, "initial": "OPEN", "states": {"OPEN": {"final": true}}});
        let svg = draw(&machine, &["OPEN"]).expect("a drawing").to_string();
        assert!(svg.starts_with("<svg") && svg.contains("OPEN") && svg.ends_with("</svg>\n"), "{svg}");
        assert!(!svg.contains("<style") && !svg.contains("style="), "{svg}");
        assert!(svg.contains("final success active"), "{svg}");
    }
}
