//! A machine as an SVG drawing: the ordinary way from top to bottom, corrections on the left, limits on the right.
//!
//! The drawing has the colour of the text around it. Its classes let a page decide otherwise; the states that a task is in have
//! the class `active` and a thick frame.

use std::fmt::Write as _;

use super::{Edge, EdgeKind};
use crate::definition::{Definition, StateIndex};

const BOX_WIDTH: i32 = 250;
const BOX_HEIGHT: i32 = 34;
const ROW: i32 = 78;
const LANE: i32 = 16;
const MARGIN: i32 = 20;

/// Where the states are.
struct Layout {
    /// States that are drawn as boxes in a row each, from top to bottom.
    rows: Vec<StateIndex>,
    left: i32,
    right: i32,
}

impl Layout {
    fn row(&self, state: StateIndex) -> i32 {
        let row = self.rows.iter().position(|index| *index == state).unwrap_or_default();
        i32::try_from(row).unwrap_or_default()
    }

    fn top(&self, state: StateIndex) -> i32 {
        MARGIN + self.row(state) * ROW
    }

    fn middle(&self, state: StateIndex) -> i32 {
        self.top(state) + BOX_HEIGHT / 2
    }
}

impl Definition {
    /// Returns an SVG drawing. `active` are the names of the states to light up.
    pub fn to_svg(&self, active: &[&str]) -> String {
        let edges = self.edges();
        let rows = self.rows();
        let (back, side): (Vec<&Edge>, Vec<&Edge>) = edges
            .iter()
            .filter(|edge| !is_next(&rows, edge))
            .partition(|edge| edge.kind == EdgeKind::Event && position(&rows, edge.to) <= position(&rows, edge.from));
        let left = MARGIN + LANE * lanes(back.len()) + 150;
        let layout = Layout { rows, left, right: left + BOX_WIDTH };
        let width = layout.right + LANE * lanes(side.len()) + 190 + MARGIN;
        let height = MARGIN * 2 + ROW * lanes(layout.rows.len());
        let title = escape(self.title.as_deref().unwrap_or(&self.machine));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" class=\"machine\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"none\" stroke=\"currentColor\">\n\
             <title>{title}</title>\n<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" \
             markerHeight=\"7\" orient=\"auto-start-reverse\"><path d=\"M0 0 8 4 0 8z\" fill=\"currentColor\"/></marker></defs>\n"
        );
        self.draw_groups(&mut svg, &layout);
        for edge in edges.iter().filter(|edge| is_next(&layout.rows, edge)) {
            draw_next(&mut svg, &layout, edge);
        }
        for (lane, edge) in back.iter().enumerate() {
            draw_side(&mut svg, &layout, edge, -lanes(lane + 1));
        }
        for (lane, edge) in side.iter().enumerate() {
            draw_side(&mut svg, &layout, edge, lanes(lane + 1));
        }
        for &index in &layout.rows {
            self.draw_state(&mut svg, &layout, index, active);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Orders the states: those of the ordinary way in the order of the definition, the final ones last.
    fn rows(&self) -> Vec<StateIndex> {
        let all = 0..self.states.len();
        let (ends, others): (Vec<_>, Vec<_>) = all.partition(|&index| self.states[index].ends.is_some());
        others.into_iter().chain(ends).collect()
    }

    fn draw_state(&self, svg: &mut String, layout: &Layout, index: StateIndex, active: &[&str]) {
        let state = &self.states[index];
        let (x, y) = (layout.left, layout.top(index));
        let mut classes = String::from("state");
        if state.ends.is_some() {
            classes.push_str(" final");
        }
        if active.contains(&state.name.as_str()) {
            classes.push_str(" active");
        }
        let weight = if active.contains(&state.name.as_str()) { " stroke-width=\"3\"" } else { "" };
        let inset = if state.parent.is_some() { 14 } else { 0 };
        let _ = writeln!(
            svg,
            "<g class=\"{classes}\"{weight}><rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{BOX_HEIGHT}\" rx=\"6\"/>\
             <text fill=\"currentColor\" stroke=\"none\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text></g>",
            x + inset,
            BOX_WIDTH - 2 * inset,
            x + BOX_WIDTH / 2,
            y + BOX_HEIGHT / 2 + 5,
            escape(&state.name)
        );
    }

    /// Draws a frame around a state and the states inside it.
    fn draw_groups(&self, svg: &mut String, layout: &Layout) {
        for (index, _) in self.states.iter().enumerate().filter(|(_, state)| state.initial.is_some()) {
            let inner = layout.rows.iter().filter(|&&other| self.ancestors(other).any(|around| around == index));
            let last = inner.map(|&other| layout.top(other)).max().unwrap_or_default();
            let (x, y) = (layout.left - 8, layout.top(index) - 8);
            let height = last + BOX_HEIGHT + 16 - y - 8;
            let width = BOX_WIDTH + 16;
            let _ = writeln!(
                svg,
                "<rect class=\"group\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"8\"/>"
            );
        }
    }
}

fn lanes(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX / (ROW * 4))
}

fn position(rows: &[StateIndex], state: StateIndex) -> usize {
    rows.iter().position(|index| *index == state).unwrap_or_default()
}

/// Whether an arrow leads to the box directly below.
fn is_next(rows: &[StateIndex], edge: &Edge) -> bool {
    edge.kind == EdgeKind::Event && position(rows, edge.to) == position(rows, edge.from) + 1
}

fn draw_next(svg: &mut String, layout: &Layout, edge: &Edge) {
    let x = layout.left + BOX_WIDTH / 2;
    let (from, to) = (layout.top(edge.from) + BOX_HEIGHT, layout.top(edge.to));
    let _ = writeln!(
        svg,
        "<g class=\"edge\"><path d=\"M{x} {from}V{to}\" marker-end=\"url(#arrow)\"/>\
         <text fill=\"currentColor\" stroke=\"none\" x=\"{}\" y=\"{}\">{}</text></g>",
        x + 8,
        (from + to) / 2 + 4,
        escape(&edge.label)
    );
}

/// Draws an arrow around the boxes: on the left with a negative lane, on the right with a positive one.
fn draw_side(svg: &mut String, layout: &Layout, edge: &Edge, lane: i32) {
    let offset = lane.abs() * 3 % (BOX_HEIGHT - 8);
    let (from, to) = (layout.top(edge.from) + 4 + offset, layout.top(edge.to) + 4 + offset);
    let (side, x, anchor, shift) = match lane < 0 {
        true => (layout.left, layout.left + lane * LANE, "end", -5),
        false => (layout.right, layout.right + lane * LANE, "start", 5),
    };
    let class = match edge.kind {
        EdgeKind::Limit => "edge limit\" stroke-dasharray=\"4 3",
        EdgeKind::Event => "edge",
    };
    let label_y = (layout.middle(edge.from) + layout.middle(edge.to)) / 2 + (lane.abs() % 5) * 11 - 22;
    let _ = writeln!(
        svg,
        "<g class=\"{class}\"><path d=\"M{side} {from}H{x}V{to}H{side}\" marker-end=\"url(#arrow)\"/>\
         <text fill=\"currentColor\" stroke=\"none\" x=\"{}\" y=\"{label_y}\" text-anchor=\"{anchor}\">{}</text></g>",
        x + shift,
        escape(&edge.label)
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
