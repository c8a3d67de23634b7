//! Tests that nothing in a drawing hides something else.

use super::{
    layout::{Layout, layout},
    text::{LINE, width},
};
use crate::{BUILT_IN, Definition};

/// A rectangle by its left, top, right and bottom.
type Area = (f64, f64, f64, f64);

fn overlap(one: Area, other: Area) -> bool {
    one.0 < other.2 && other.0 < one.2 && one.1 < other.3 && other.1 < one.3
}

/// Returns every line of every label, with its area.
fn labels(layout: &Layout) -> Vec<(String, Area)> {
    let labels = layout.arrows.iter().map(|arrow| &arrow.label);
    let lines = labels.flat_map(|label| {
        label.lines.iter().rev().enumerate().map(|(index, line)| {
            let base = f64::from(label.y) - index as f64 * LINE;
            let left = f64::from(label.x) - if label.ends_at_x { width(line) } else { 0.0 };
            (line.clone(), (left, base - 10.0, left + width(line), base + 3.0))
        })
    });
    lines.collect()
}

/// Returns the areas of the states' names.
fn names(layout: &Layout) -> Vec<(String, Area)> {
    let name = |frame: &super::layout::Frame| {
        let middle = f64::from(frame.x) + f64::from(frame.width) / 2.0;
        let base = f64::from(frame.y + frame.row_height / 2 + 4);
        let half = width(&frame.name) / 2.0;
        (frame.name.clone(), (middle - half, base - 10.0, middle + half, base + 3.0))
    };
    layout.frames.iter().map(name).collect()
}

fn check(definition: &Definition) {
    let layout = layout(definition, &definition.edges());
    let what = &definition.machine;
    let (labels, names) = (labels(&layout), names(&layout));
    let texts: Vec<&(String, Area)> = labels.iter().chain(&names).collect();
    for (index, (text, area)) in texts.iter().enumerate() {
        for (other, other_area) in &texts[index + 1..] {
            assert!(!overlap(*area, *other_area), "{what}: \"{text}\" and \"{other}\" overlap");
        }
        let is_inside =
            area.0 >= 0.0 && area.1 >= 0.0 && area.2 <= f64::from(layout.width) && area.3 <= f64::from(layout.height);
        assert!(is_inside, "{what}: \"{text}\" is outside at {area:?} of {} x {}", layout.width, layout.height);
    }
    for arrow in &layout.arrows {
        for pair in arrow.points.windows(2) {
            let ((x1, y1), (x2, y2)) = (pair[0], pair[1]);
            let line = (
                f64::from(x1.min(x2)) - 0.5,
                f64::from(y1.min(y2)) - 0.5,
                f64::from(x1.max(x2)) + 0.5,
                f64::from(y1.max(y2)) + 0.5,
            );
            assert!(line.0 >= 0.0 && line.2 <= f64::from(layout.width), "{what}: a line is outside");
            assert!(line.1 >= 0.0 && line.3 <= f64::from(layout.height), "{what}: a line is outside");
            for (text, area) in &texts {
                assert!(!overlap(line, *area), "{what}: a line crosses \"{text}\"");
            }
        }
    }
    check_frames(&layout, definition, &labels);
}

/// Checks that every state is inside the frame around it and apart from its neighbours, and that no label overlaps a
/// border.
fn check_frames(layout: &Layout, definition: &Definition, labels: &[(String, Area)]) {
    let area = |frame: &super::layout::Frame| {
        let (x, y) = (f64::from(frame.x), f64::from(frame.y));
        (x, y, x + f64::from(frame.width), y + f64::from(frame.height))
    };
    let contains =
        |outer: Area, inner: Area| outer.0 < inner.0 && outer.1 < inner.1 && inner.2 < outer.2 && inner.3 < outer.3;
    for (index, frame) in layout.frames.iter().enumerate() {
        let name = &frame.name;
        assert!(width(name) <= f64::from(frame.width) - 8.0, "{name} is wider than its box");
        for other in &layout.frames[index + 1..] {
            let is_inner = definition.ancestors(other.state).any(|around| around == frame.state);
            let is_correct =
                if is_inner { contains(area(frame), area(other)) } else { !overlap(area(frame), area(other)) };
            assert!(is_correct, "{}: {name} and {} overlap", definition.machine, other.name);
        }
        for (label, label_area) in labels {
            let is_apart = !overlap(area(frame), *label_area) || contains(area(frame), *label_area);
            assert!(is_apart, "{}: \"{label}\" overlaps the border of {name}", definition.machine);
        }
    }
}

fn parse(text: &str) -> Definition {
    Definition::parse(text).unwrap_or_else(|findings| panic!("{findings:?}"))
}

#[test]
fn nothing_overlaps_in_the_machines_of_the_repository() {
    for (_, text) in BUILT_IN {
        check(&parse(text));
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/machines");
    let files: Vec<_> = std::fs::read_dir(folder).expect("the folder is there").flatten().collect();
    assert!(files.len() >= 3);
    for file in files {
        check(&parse(&std::fs::read_to_string(file.path()).expect("a text")));
    }
}

/// Returns a machine of `count` states whose arrows, names and inner states follow from `seed`.
fn random_machine(seed: u64, count: u64) -> String {
    let mut number = seed;
    let mut next = |below: u64| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (number >> 33) % below
    };
    let mut text = String::from("machine: random\nversion: 1\nevents:\n");
    for event in 0..5 {
        text.push_str(&format!("  {}{event}: {{}}\n", ["e", "a.long.name-of_an_event.with.parts"][event % 2]));
    }
    let name =
        |state: u64| format!("{}{state}", ["S", "A_STATE_WITH_A_VERY_LONG_NAME_", "ÄÖ", "w"][(state % 4) as usize]);
    text.push_str(&format!("initial: {}\nstates:\n", name(0)));
    for state in 0..count {
        let is_outer = state % 5 == 3;
        text.push_str(&format!(
            "  {}:\n    deadline: {{total: 1h, to: {}}}\n    on:\n",
            name(state),
            name(next(count))
        ));
        for event in 0..5 {
            let to = if event == 0 { (state + 1) % count } else { next(count) };
            if event == 0 || next(2) == 0 {
                text.push_str(&format!(
                    "      {}{event}: {}\n",
                    ["e", "a.long.name-of_an_event.with.parts"][event % 2],
                    name(to)
                ));
            }
        }
        if is_outer {
            text.push_str(&format!("    initial: I{state}\n    states:\n"));
            text.push_str(&format!("      I{state}: {{on: {{e0: J{state}, e2: {}}}}}\n", name(next(count))));
            text.push_str(&format!(
                "      J{state}: {{initial: K{state}, states: {{K{state}: {{on: {{e2: I{state}}}}}}}}}\n"
            ));
        }
    }
    text
}

#[test]
fn nothing_overlaps_in_random_machines() {
    for seed in 0..40 {
        check(&parse(&random_machine(seed, 3 + seed % 9)));
    }
}
