//! Computes the positions of everything in a drawing.
//!
//! The states form one column, in the order of the definition, the final ones last. An arrow to the state directly
//! below is a straight line; every other arrow leaves its state at the side, runs in a lane beside the column, and
//! arrives at the side: downward arrows on the right, upward arrows on the left. Its label is above its start, in a
//! strip between the column and the lanes that no other line crosses at that height. So no label can overlap another
//! label or a line.
//!
//! Arrows to the same state share a lane and their end.

use super::{
    Edge, EdgeKind,
    text::{INNER_LABEL_WIDTH, LABEL_WIDTH, LINE, shorten, width, wrap},
};
use crate::definition::{Definition, StateIndex};

pub(super) const MARGIN: i32 = 16;
const LANE: i32 = 14;
const INSET: i32 = 14;
const MIN_HEIGHT: i32 = 34;
const GAP: i32 = 30;
/// Room for the dot and its arrow above a first state.
const START: i32 = 30;
const LINE_HEIGHT: i32 = LINE as i32;

/// The box of a state. A state with inner states has a frame around them; its row is the head of the frame.
pub(super) struct Frame {
    pub state: StateIndex,
    pub name: String,
    pub x: i32,
    pub y: i32,
    pub width: i32,
    /// Height of the state, or of the head of its frame.
    pub row_height: i32,
    pub height: i32,
    /// Whether a dot and an arrow from above mark it as the first state.
    pub is_first: bool,
    depth: i32,
}

/// Text beside an arrow.
pub(super) struct Label {
    pub lines: Vec<String>,
    pub x: i32,
    /// Baseline of the last line of text.
    pub y: i32,
    /// Whether the text ends at `x`. Otherwise it begins there.
    pub ends_at_x: bool,
}

pub(super) struct Arrow {
    pub points: Vec<(i32, i32)>,
    pub has_head: bool,
    pub kind: EdgeKind,
    pub label: Label,
}

pub(super) struct Layout {
    pub width: i32,
    pub height: i32,
    pub frames: Vec<Frame>,
    pub arrows: Vec<Arrow>,
}

/// The side of the column on which an arrow runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

/// The arrows on one side that lead to the same state.
struct Lane {
    side: Side,
    to: usize,
    kind: EdgeKind,
    /// Frames and labels of the sources.
    from: Vec<(usize, Vec<String>)>,
    /// Heights at which the arrows leave and arrive.
    leaves: Vec<i32>,
    arrives: i32,
    slot: i32,
}

pub(super) fn layout(definition: &Definition, edges: &[Edge]) -> Layout {
    let mut frames = frames(definition);
    let row =
        |state: StateIndex, frames: &[Frame]| frames.iter().position(|frame| frame.state == state).unwrap_or_default();
    let mut straight: Vec<(usize, Vec<String>)> = Vec::new();
    let mut lanes: Vec<Lane> = Vec::new();
    for edge in edges {
        let (from, to) = (row(edge.from, &frames), row(edge.to, &frames));
        if edge.kind == EdgeKind::Event && to == from + 1 && definition.states[edge.from].initial.is_none() {
            straight.push((from, wrap(&edge.label, INNER_LABEL_WIDTH)));
            continue;
        }
        let lines = wrap(&edge.label, LABEL_WIDTH);
        let side = if to > from { Side::Right } else { Side::Left };
        match lanes.iter_mut().find(|lane| (lane.side, lane.to, lane.kind) == (side, to, edge.kind)) {
            Some(lane) => lane.from.push((from, lines)),
            None => {
                let from = vec![(from, lines)];
                lanes.push(Lane { side, to, kind: edge.kind, from, leaves: Vec::new(), arrives: 0, slot: 0 });
            }
        }
    }
    place_rows(definition, &mut frames, &straight, &mut lanes);
    let names = frames.iter().map(|frame| frame.width + 2 * INSET * frame.depth);
    // The label of a straight arrow is right of the middle, inside the frames around both of its states.
    let labels = straight.iter().map(|(from, lines)| {
        let depth = frames[*from].depth.min(frames[from + 1].depth);
        2 * (widest(lines) + 16 + INSET * depth)
    });
    let column = names.chain(labels).max().unwrap_or_default();
    let (left, right) = (strip(&lanes, Side::Left), strip(&lanes, Side::Right));
    let (left_slots, right_slots) = (assign_slots(&mut lanes, Side::Left), assign_slots(&mut lanes, Side::Right));
    let start = MARGIN + left_slots * LANE + left;
    for frame in &mut frames {
        frame.x = start + INSET * frame.depth;
        frame.width = column - 2 * INSET * frame.depth;
    }
    let sides =
        Sides { left: start, left_lanes: start - left, right: start + column, right_lanes: start + column + right };
    let mut arrows: Vec<Arrow> =
        straight.into_iter().map(|(from, lines)| straight_arrow(&frames, from, lines)).collect();
    for lane in &lanes {
        arrows.extend(side_arrows(&frames, lane, &sides));
    }
    let beside = arrows.iter().map(|arrow| &arrow.label).filter(|label| !label.ends_at_x);
    let texts = beside.map(|label| label.x + widest(&label.lines)).max().unwrap_or_default();
    let width = (sides.right_lanes + right_slots * LANE).max(texts) + MARGIN;
    let height = frames.iter().map(|frame| frame.y + frame.height).max().unwrap_or_default() + MARGIN;
    Layout { width, height, frames, arrows }
}

/// Where the strips for labels and the lanes begin.
struct Sides {
    left: i32,
    left_lanes: i32,
    right: i32,
    right_lanes: i32,
}

/// Returns the states in the order of their rows: initial states first, final states last, each before the states inside it.
fn frames(definition: &Definition) -> Vec<Frame> {
    let mut frames = Vec::with_capacity(definition.states.len());
    add_frames(definition, None, Some(definition.initial), 0, &mut frames);
    frames
}

fn add_frames(
    definition: &Definition,
    parent: Option<StateIndex>,
    initial: Option<StateIndex>,
    depth: i32,
    frames: &mut Vec<Frame>,
) {
    let mut states: Vec<StateIndex> =
        (0..definition.states.len()).filter(|index| definition.states[*index].parent == parent).collect();
    // The first state of the machine may be an inner one, which then stays inside its frame.
    states.sort_by_key(|index| (Some(*index) != initial, definition.states[*index].ends.is_some(), *index));
    for state in states {
        let name = shorten(&definition.states[state].name);
        let is_first = Some(state) == initial;
        let width = width(&name).ceil() as i32 + 28;
        frames.push(Frame { state, name, x: 0, y: 0, width, row_height: 0, height: 0, is_first, depth });
        let inner = definition.states[state].initial;
        if inner.is_some() {
            add_frames(definition, Some(state), inner, depth + 1, frames);
        }
    }
}

/// Gives every state and the ends of all arrows their heights.
fn place_rows(definition: &Definition, frames: &mut [Frame], straight: &[(usize, Vec<String>)], lanes: &mut [Lane]) {
    let mut y = MARGIN;
    for row in 0..frames.len() {
        if frames[row].is_first {
            y += START;
        }
        frames[row].y = y;
        let left = place_ports(row, y, Side::Left, lanes);
        let right = place_ports(row, y, Side::Right, lanes);
        frames[row].row_height = MIN_HEIGHT.max(left).max(right);
        frames[row].height = frames[row].row_height;
        y += frames[row].row_height;
        let next_depth = frames.get(row + 1).map_or(0, |next| next.depth);
        if definition.states[frames[row].state].initial.is_some() {
            continue;
        }
        // The frames that end here.
        for depth in (next_depth..frames[row].depth).rev() {
            y += INSET;
            if let Some(around) = frames[..row].iter_mut().rev().find(|frame| frame.depth == depth) {
                around.height = y - around.y;
            }
        }
        let lines = straight.iter().find(|(from, _)| *from == row).map_or(0, |(_, lines)| lines.len());
        y += GAP.max(lines as i32 * LINE_HEIGHT + 18);
    }
}

/// Gives the arrows on one side of a state their heights, and returns the height that they need.
fn place_ports(row: usize, top: i32, side: Side, lanes: &mut [Lane]) -> i32 {
    let mut y = top + 3;
    for lane in lanes.iter_mut().filter(|lane| lane.side == side) {
        for (_, lines) in lane.from.iter().filter(|(from, _)| *from == row) {
            y += lines.len() as i32 * LINE_HEIGHT + 6;
            lane.leaves.push(y);
        }
    }
    for lane in lanes.iter_mut().filter(|lane| lane.side == side && lane.to == row) {
        y += 12;
        lane.arrives = y;
    }
    y + 6 - top
}

/// Returns the width of the strip for the labels on one side.
fn strip(lanes: &[Lane], side: Side) -> i32 {
    let labels = lanes.iter().filter(|lane| lane.side == side).flat_map(|lane| &lane.from);
    labels.map(|(_, lines)| widest(lines) + 24).max().unwrap_or_default()
}

fn widest(lines: &[String]) -> i32 {
    lines.iter().map(|line| width(line).ceil() as i32).max().unwrap_or_default()
}

/// Puts lanes that do not overlap into the same slot, short ones next to the column. Returns the number of slots.
fn assign_slots(lanes: &mut [Lane], side: Side) -> i32 {
    let span = |lane: &Lane| {
        let ends = lane.leaves.iter().chain([&lane.arrives]);
        (ends.clone().min().copied().unwrap_or_default(), ends.max().copied().unwrap_or_default())
    };
    let mut order: Vec<usize> = (0..lanes.len()).filter(|index| lanes[*index].side == side).collect();
    order.sort_by_key(|index| {
        let (top, bottom) = span(&lanes[*index]);
        bottom - top
    });
    let mut slots: Vec<Vec<(i32, i32)>> = Vec::new();
    for index in order {
        let (top, bottom) = span(&lanes[index]);
        let is_free = |used: &Vec<(i32, i32)>| used.iter().all(|(start, end)| bottom + 6 < *start || *end + 6 < top);
        let slot = slots.iter().position(is_free).unwrap_or_else(|| {
            slots.push(Vec::new());
            slots.len() - 1
        });
        slots[slot].push((top, bottom));
        lanes[index].slot = slot as i32 + 1;
    }
    slots.len() as i32
}

fn straight_arrow(frames: &[Frame], from: usize, lines: Vec<String>) -> Arrow {
    let (source, target) = (&frames[from], &frames[from + 1]);
    let x = source.x + source.width / 2;
    let y = target.y - 10;
    let label = Label { lines, x: x + 8, y, ends_at_x: false };
    let points = vec![(x, source.y + source.height), (x, target.y)];
    Arrow { points, has_head: true, kind: EdgeKind::Event, label }
}

fn side_arrows(frames: &[Frame], lane: &Lane, sides: &Sides) -> Vec<Arrow> {
    let edge = |frame: &Frame| match lane.side {
        Side::Left => frame.x,
        Side::Right => frame.x + frame.width,
    };
    let x = match lane.side {
        Side::Left => sides.left_lanes - lane.slot * LANE,
        Side::Right => sides.right_lanes + lane.slot * LANE,
    };
    let target = (edge(&frames[lane.to]), lane.arrives);
    // Sources are placed row by row, so `leaves` is sorted by row.
    let mut rows: Vec<&(usize, Vec<String>)> = lane.from.iter().collect();
    rows.sort_by_key(|(row, _)| *row);
    // The longest arrow draws the whole lane; the others only join it.
    let (first, last) = (lane.leaves.iter().min(), lane.leaves.iter().max());
    let draws_lane = |y: &i32| match *y < lane.arrives {
        true => Some(y) == first,
        false => Some(y) == last,
    };
    let arrows = rows.into_iter().zip(&lane.leaves).map(|((row, lines), y)| {
        let label = match lane.side {
            Side::Left => Label { lines: lines.clone(), x: sides.left - 8, y: y - 4, ends_at_x: true },
            Side::Right => Label { lines: lines.clone(), x: sides.right + 8, y: y - 4, ends_at_x: false },
        };
        let mut points = vec![(edge(&frames[*row]), *y), (x, *y)];
        if draws_lane(y) {
            points.extend([(x, lane.arrives), target]);
        }
        Arrow { has_head: points.len() > 2, points, kind: lane.kind, label }
    });
    arrows.collect()
}
