//! Shows the graph around a job as a drawing and as a list: what it depends on to its left, what depends on it to its
//! right.

use std::collections::HashMap;

use askama::Template;
use faena_domain::{GraphJob, JobGraph, JobId};

use crate::{
    error::Failure,
    format::short_id,
    markup::{Markup, StateStyle, badge, icon_at, job_state},
    query::segment,
    table::{Cell, Row, Table, extra_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

/// Maximum number of jobs to draw.
const LIMIT: usize = 60;
/// Sizes of the drawing, in pixels. The text is not scaled; the box scrolls.
const WIDTH: usize = 176;
const HEIGHT: usize = 42;
const GAP_X: usize = 48;
const GAP_Y: usize = 10;
const MARGIN: usize = 8;
/// Characters of a name that fit into a box.
const NAME_CHARS: usize = 22;

struct Node {
    x: usize,
    y: usize,
    link: String,
    title: String,
    name: String,
    state: String,
    class: &'static str,
    icon: Markup,
    /// How many jobs around it are not drawn.
    hidden: String,
    is_current: bool,
}

#[derive(Template)]
#[template(path = "job_graph.html")]
struct Graph {
    t: &'static Texts,
    width: usize,
    height: usize,
    nodes: Vec<Node>,
    edges: Vec<String>,
    hidden: Option<String>,
    list: String,
}

/// Returns the graph around a job. Empty if no other job belongs to it.
pub async fn read(viewer: &Viewer, id: &str) -> Result<Markup, Failure> {
    let path = format!("/api/v1/jobs/{}/dependencies?limit={LIMIT}", segment(id));
    let Ok(graph) = viewer.get::<JobGraph>(&path).await else { return Ok(Markup::default()) };
    if graph.jobs.len() < 2 {
        return Ok(Markup::default());
    }
    let (t, formats) = (viewer.texts(), viewer.formats());
    let positions = positions(&graph.jobs);
    let columns = positions.iter().map(|position| position.column + 1).max().unwrap_or(1);
    let tallest = positions.iter().map(|position| position.y + HEIGHT).max().unwrap_or(HEIGHT);
    let hidden = (graph.hidden > 0).then(|| t.hidden_dependencies(&formats.count(graph.hidden), graph.hidden_is_exact));
    Ok(Markup::of(&Graph {
        t,
        width: 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP_X,
        height: tallest + MARGIN,
        nodes: graph.jobs.iter().zip(&positions).map(|(job, position)| node(viewer, job, *position)).collect(),
        edges: edges(&graph.jobs, &positions),
        hidden,
        list: list(viewer, &graph.jobs).render().map_err(Failure::internal)?,
    }))
}

/// Position of a job in the drawing.
#[derive(Clone, Copy, Default)]
struct Position {
    column: usize,
    y: usize,
}

impl Position {
    fn x(self) -> usize {
        MARGIN + self.column * (WIDTH + GAP_X)
    }

    fn middle(self) -> usize {
        self.y + HEIGHT / 2
    }
}

/// Returns the column of each job: every job is to the right of its parents. The first job is the one that the page shows.
fn columns(jobs: &[GraphJob]) -> Vec<usize> {
    let index: HashMap<JobId, usize> = jobs.iter().enumerate().map(|(index, job)| (job.id, index)).collect();
    let mut layers: Vec<i64> = jobs.iter().map(|job| i64::from(job.depth)).collect();
    // Ends after one round per job, because no path has more jobs than the graph.
    for _ in 0..jobs.len() {
        let mut has_moved = false;
        for (child, job) in jobs.iter().enumerate() {
            for parent in job.depends_on.iter().filter_map(|id| index.get(id).copied()) {
                if layers[child] > layers[parent] {
                    continue;
                }
                has_moved = true;
                // Jobs that the first one depends on move to the left, the others to the right.
                if jobs[child].depth <= 0 {
                    layers[parent] = layers[child] - 1;
                } else {
                    layers[child] = layers[parent] + 1;
                }
            }
        }
        if !has_moved {
            break;
        }
    }
    let first = layers.iter().copied().min().unwrap_or(0);
    layers.into_iter().map(|layer| usize::try_from(layer - first).unwrap_or(0)).collect()
}

/// Stacks the jobs of each column in the order of their neighbours, and centres the columns vertically.
fn positions(jobs: &[GraphJob]) -> Vec<Position> {
    let columns = columns(jobs);
    let step = HEIGHT + GAP_Y;
    let count = columns.iter().copied().max().unwrap_or(0) + 1;
    let mut sizes = vec![0; count];
    columns.iter().for_each(|column| sizes[*column] += 1);
    let tallest = sizes.iter().copied().max().unwrap_or(1);
    let mut positions: Vec<Position> = columns.iter().map(|column| Position { column: *column, y: 0 }).collect();
    let mut links: Vec<Vec<usize>> = vec![Vec::new(); jobs.len()];
    let index: HashMap<JobId, usize> = jobs.iter().enumerate().map(|(index, job)| (job.id, index)).collect();
    for (child, job) in jobs.iter().enumerate() {
        for parent in job.depends_on.iter().filter_map(|id| index.get(id).copied()) {
            links[child].push(parent);
            links[parent].push(child);
        }
    }
    let mut is_placed = vec![false; jobs.len()];
    let middle = columns.first().copied().unwrap_or(0);
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|column| column.abs_diff(middle));
    for column in order {
        let mut here: Vec<usize> = (0..jobs.len()).filter(|job| columns[*job] == column).collect();
        let weight = |job: &usize| {
            let near: Vec<usize> =
                links[*job].iter().filter(|other| is_placed[**other]).map(|other| positions[*other].y).collect();
            if near.is_empty() { usize::MAX } else { near.iter().sum::<usize>() / near.len() }
        };
        here.sort_by_cached_key(weight);
        let top = MARGIN + (tallest - here.len()) * step / 2;
        for (row, job) in here.into_iter().enumerate() {
            positions[job].y = top + row * step;
            is_placed[job] = true;
        }
    }
    positions
}

/// Returns a curve from each job to each job that depends on it.
fn edges(jobs: &[GraphJob], positions: &[Position]) -> Vec<String> {
    let index: HashMap<JobId, usize> = jobs.iter().enumerate().map(|(index, job)| (job.id, index)).collect();
    let mut edges = Vec::new();
    for (child, job) in jobs.iter().enumerate() {
        for parent in job.depends_on.iter().filter_map(|id| index.get(id).copied()) {
            let (from, to) = (positions[parent], positions[child]);
            let (x1, y1, x2, y2) = (from.x() + WIDTH, from.middle(), to.x(), to.middle());
            let half = GAP_X / 2;
            edges.push(format!("M{x1} {y1}C{} {y1} {} {y2} {x2} {y2}", x1 + half, x2.saturating_sub(half)));
        }
    }
    edges
}

fn node(viewer: &Viewer, job: &GraphJob, position: Position) -> Node {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let name = job.name.clone().unwrap_or_else(|| short_id(&job.id.to_string()));
    let (style, state) = state_style(t, job);
    let hidden = match (job.hidden_parents, job.hidden_children) {
        (0, 0) => String::new(),
        (0, children) => format!("{} →", formats.count(children)),
        (parents, 0) => format!("← {}", formats.count(parents)),
        (parents, children) => format!("← {} · {} →", formats.count(parents), formats.count(children)),
    };
    Node {
        x: position.x(),
        y: position.y,
        link: format!("{}/jobs/{}", viewer.base(), job.id),
        title: format!("{name}, {state}"),
        name: shortened(&name),
        class: style.class(),
        icon: icon_at(style, 10, 24),
        state,
        hidden,
        is_current: job.depth == 0,
    }
}

/// Shortens a name to fit into a box. The drawing clips a name that is still too wide.
fn shortened(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS - 1).chain(['…']).collect()
}

fn state_style(t: &Texts, job: &GraphJob) -> (StateStyle, String) {
    match job.status {
        Some(status) => {
            let state = status.to_string();
            (StateStyle::of(&state), t.job_state(&state).to_owned())
        }
        None => (StateStyle::Cancelled, t.deleted.to_owned()),
    }
}

fn list(viewer: &Viewer, jobs: &[GraphJob]) -> Table {
    let t = viewer.texts();
    let mut sorted: Vec<&GraphJob> = jobs.iter().collect();
    sorted.sort_by_key(|job| job.depth);
    let relation = |depth: i32| match depth {
        0 => t.this_job.to_owned(),
        -1 => t.depends_on.to_owned(),
        1 => t.needed_by.to_owned(),
        ..0 => format!("{} ({})", t.depends_on, -depth),
        _ => format!("{} ({depth})", t.needed_by),
    };
    let row = |job: &&GraphJob| {
        let id = job.id.to_string();
        let short = short_id(&id);
        let name = job.name.as_deref().unwrap_or(&short);
        let state = match job.status {
            Some(status) => job_state(t, &status.to_string()),
            None => badge(StateStyle::Cancelled, t.deleted),
        };
        let link = Cell::link(&format!("{}/jobs/{id}", viewer.base()), name);
        Row {
            cells: vec![
                if job.status.is_some() { link } else { Cell::text(name) },
                Cell::markup(state),
                Cell::text(&relation(job.depth)),
                Cell::text(job.queue.as_deref().unwrap_or_default()).extra(),
                Cell::text(&short).extra(),
            ],
            key: id,
        }
    };
    Table {
        columns: vec![
            text_column(t.job),
            text_column(t.state),
            text_column(t.relation),
            extra_column(t.queue),
            extra_column(t.id),
        ],
        rows: sorted.iter().map(row).collect(),
        ..Table::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: JobId, depth: i32, depends_on: &[JobId]) -> GraphJob {
        GraphJob {
            id,
            depth,
            name: Some("n".into()),
            kind: Some("n".into()),
            queue: Some("q".into()),
            status: None,
            depends_on: depends_on.to_vec(),
            hidden_parents: 0,
            hidden_children: 0,
        }
    }

    #[test]
    fn every_job_is_to_the_right_of_what_it_depends_on() {
        let ids: Vec<JobId> = (0..7).map(|_| JobId::new()).collect();
        let jobs = [
            job(ids[0], 0, &[ids[1], ids[2]]),
            job(ids[1], -1, &[]),
            // Depends on the job's other parent, which is therefore two columns before the job.
            job(ids[2], -1, &[ids[1]]),
            job(ids[3], 1, &[ids[0]]),
            job(ids[4], 1, &[ids[0], ids[3]]),
            job(ids[5], 1, &[ids[0], ids[4], ids[1]]),
            job(ids[6], 2, &[ids[5]]),
        ];
        assert_eq!(columns(&jobs), [2, 0, 1, 3, 4, 5, 6]);
        let positions = positions(&jobs);
        for (child, job) in jobs.iter().enumerate() {
            for parent in &job.depends_on {
                let parent = ids.iter().position(|id| id == parent).expect("all are listed");
                assert!(positions[parent].x() + WIDTH < positions[child].x());
            }
        }
    }

    #[test]
    fn a_long_name_ends_with_an_ellipsis() {
        assert_eq!(shortened("invoice.send"), "invoice.send");
        assert_eq!(shortened(&"é".repeat(300)), format!("{}…", "é".repeat(21)));
    }

    #[test]
    fn no_two_jobs_share_a_position() {
        let root = JobId::new();
        let mut jobs = vec![job(root, 0, &[])];
        jobs.extend((0..59).map(|_| job(JobId::new(), 1, &[root])));
        let mut seen: Vec<_> = positions(&jobs).iter().map(|position| (position.column, position.y)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 60);
        assert!(seen.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[1].1 - pair[0].1 >= HEIGHT + GAP_Y));
        assert_eq!(edges(&jobs, &positions(&jobs)).len(), 59);
    }
}
