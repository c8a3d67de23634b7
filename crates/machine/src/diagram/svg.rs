//! A machine as an SVG drawing.
//!
//! The colours follow the reader's light or dark colour scheme. A page that contains the drawing can set them with the variables
//! `--machine-…`. The states that a task is in have the class `active`.

use std::fmt::Write as _;

use super::{
    EdgeKind,
    layout::{Arrow, Frame, Layout, layout},
    text::{LINE, escape},
};
use crate::definition::{Definition, Ending};

/// Maximum number of transitions that the description for screen readers lists.
const MAX_DESCRIBED: usize = 100;

const STYLE: &str = "\
.machine{--line:var(--machine-line,#57606a);--text:var(--machine-text,#1f2328);--box:var(--machine-box,#fff);\
--group:var(--machine-group,#f3f5f7);--back:var(--machine-back,#fff);--limit:var(--machine-limit,#9a6700);\
--good:var(--machine-good,#1a7f37);--bad:var(--machine-bad,#cf222e);--accent:var(--machine-accent,#0969da);\
--glow:var(--machine-glow,#ddf4ff)}\
@media (prefers-color-scheme:dark){.machine{--line:var(--machine-line,#8b949e);--text:var(--machine-text,#e6edf3);\
--box:var(--machine-box,#161b22);--group:var(--machine-group,#1c2128);--back:var(--machine-back,#0d1117);\
--limit:var(--machine-limit,#d29922);--good:var(--machine-good,#3fb950);--bad:var(--machine-bad,#f85149);\
--accent:var(--machine-accent,#58a6ff);--glow:var(--machine-glow,#0c2d6b)}}\
.machine .back{fill:var(--back)}.machine text{fill:var(--text)}.machine .edge path{stroke:var(--line)}\
.machine .edge .head,.machine .start{fill:var(--line);stroke:var(--line)}.machine .limit path{stroke:var(--limit)}\
.machine .limit text,.machine .limit .head{fill:var(--limit)}.machine .limit .head{stroke:var(--limit)}\
.machine .state rect{fill:var(--box);stroke:var(--line)}.machine .group>rect{fill:var(--group);stroke:var(--line)}\
.machine .success rect{stroke:var(--good)}.machine .failure rect{stroke:var(--bad)}\
.machine .active>rect{fill:var(--glow);stroke:var(--accent);stroke-width:2.5}.machine .active text{font-weight:600}";

impl Definition {
    /// Returns an SVG drawing. `active` are the names of the states to highlight.
    pub fn to_svg(&self, active: &[&str]) -> String {
        let edges = self.edges();
        let layout = layout(self, &edges);
        let Layout { width, height, frames, arrows } = &layout;
        let title = escape(self.title.as_deref().unwrap_or(&self.machine));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"machine-title machine-desc\" class=\"machine\" \
             font-family=\"system-ui,sans-serif\" font-size=\"12\" fill=\"none\" stroke=\"currentColor\">\n\
             <title id=\"machine-title\">{title}</title>\n<desc id=\"machine-desc\">{}</desc>\n<style>{STYLE}</style>\n\
             <rect class=\"back\" width=\"{width}\" height=\"{height}\" stroke=\"none\"/>\n",
            escape(&self.describe())
        );
        // A frame comes before the states inside it, so that it is drawn below them.
        for frame in frames {
            self.draw_state(&mut svg, frame, active);
        }
        for arrow in arrows {
            draw_arrow(&mut svg, arrow);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Describes the drawing as text.
    fn describe(&self) -> String {
        let mut text = format!("{} states. It starts in {}.", self.states.len(), self.path(self.initial));
        let edges = self.edges();
        for edge in edges.iter().take(MAX_DESCRIBED) {
            let (from, to) = (&self.states[edge.from].name, &self.states[edge.to].name);
            let _ = write!(text, " {from} to {to}: {}.", edge.label);
        }
        if edges.len() > MAX_DESCRIBED {
            let _ = write!(text, " And {} more transitions.", edges.len() - MAX_DESCRIBED);
        }
        text
    }

    fn draw_state(&self, svg: &mut String, frame: &Frame, active: &[&str]) {
        let state = &self.states[frame.state];
        let Frame { x, y, width, height, row_height, .. } = *frame;
        let kind = if state.initial.is_some() { "group" } else { "state" };
        let ending = match state.ends {
            None => "",
            Some(Ending::Success) => " final success",
            Some(Ending::Failure) => " final failure",
            Some(Ending::Cancelled) => " final cancelled",
        };
        let active = if active.contains(&state.name.as_str()) { " active" } else { "" };
        let about = state.description.as_ref().or(state.title.as_ref());
        let tooltip = about.map(|about| format!(": {about}")).unwrap_or_default();
        let _ = writeln!(
            svg,
            "<g class=\"{kind}{ending}{active}\"><title>{}</title>\
             <rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"7\"/>",
            escape(&format!("{}{tooltip}", self.path(frame.state)))
        );
        if state.ends.is_some() {
            // A final state has a double border.
            let (width, height) = (width - 6, height - 6);
            let _ =
                writeln!(svg, "<rect x=\"{}\" y=\"{}\" width=\"{width}\" height=\"{height}\" rx=\"5\"/>", x + 3, y + 3);
        }
        let weight = if state.initial.is_some() { " font-weight=\"600\"" } else { "" };
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"currentColor\" stroke=\"none\"{weight}>{}</text></g>",
            x + width / 2,
            y + row_height / 2 + 4,
            escape(&frame.name)
        );
        if frame.is_first {
            let x = x + width / 2;
            let _ = writeln!(
                svg,
                "<g class=\"edge\"><circle class=\"start\" cx=\"{x}\" cy=\"{}\" r=\"4\" fill=\"currentColor\"/>\
                 <path d=\"M{x} {}V{y}\"/>{}</g>",
                y - 22,
                y - 18,
                head((x, y - 10), (x, y))
            );
        }
    }
}

fn draw_arrow(svg: &mut String, arrow: &Arrow) {
    let class = match arrow.kind {
        EdgeKind::Limit => "edge limit",
        EdgeKind::Event => "edge",
    };
    let dashes = if arrow.kind == EdgeKind::Limit { " stroke-dasharray=\"4 3\"" } else { "" };
    let _ = write!(svg, "<g class=\"{class}\"><path{dashes} d=\"");
    for (index, (x, y)) in arrow.points.iter().enumerate() {
        let _ = write!(svg, "{}{x} {y}", if index == 0 { "M" } else { "L" });
    }
    svg.push_str("\"/>");
    if let [.., before, end] = arrow.points.as_slice()
        && arrow.has_head
    {
        svg.push_str(&head(*before, *end));
    }
    let label = &arrow.label;
    let anchor = if label.ends_at_x { "end" } else { "start" };
    for (index, line) in label.lines.iter().rev().enumerate() {
        let y = label.y - index as i32 * LINE as i32;
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"currentColor\" stroke=\"none\">{}</text>",
            label.x,
            escape(line)
        );
    }
    svg.push_str("</g>\n");
}

/// Draws the head of an arrow at the end of a line that is horizontal or vertical.
fn head(before: (i32, i32), (x, y): (i32, i32)) -> String {
    let (dx, dy) = ((x - before.0).signum(), (y - before.1).signum());
    let (back_x, back_y) = (x - 8 * dx, y - 8 * dy);
    format!(
        "<path class=\"head\" fill=\"currentColor\" d=\"M{x} {y}L{} {}L{} {}z\"/>",
        back_x + 4 * dy,
        back_y + 4 * dx,
        back_x - 4 * dy,
        back_y - 4 * dx
    )
}
