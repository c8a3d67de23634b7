//! Selects the jobs that the dependency graph around a job shows, and counts the others.
//!
//! A job may have thousands of dependents, and each of them thousands more. So a walk selects the nearest jobs first
//! and stops at its limit. Each direction may use half of the limit, plus what the other direction does not use.

use std::collections::{HashMap, HashSet, VecDeque};

use faena_domain::{GraphJob, JobGraph, JobId, JobState};

/// Maximum number of dependents that are counted: of the job itself, and of each other job.
const MAX_COUNTED: usize = 10_000;
const MAX_COUNTED_AROUND: usize = 1_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// To jobs that a job depends on.
    Parents,
    /// To jobs that depend on a job.
    Children,
}

/// What a walk has to read next: up to `limit` neighbours of each of these jobs.
#[derive(PartialEq, Eq, Debug)]
pub struct NeighbourQuery {
    pub direction: Direction,
    pub jobs: Vec<JobId>,
    pub limit: usize,
}

/// One direction of a walk.
#[derive(Default)]
struct Side {
    /// Neighbours that were found and not selected yet, the nearest first.
    found: VecDeque<(JobId, i32)>,
    /// Jobs whose neighbours were not read yet.
    open: Vec<JobId>,
}

/// A walk through the graph around a job.
pub struct Walk {
    limit: usize,
    /// The selected jobs, in this order, and their distances.
    selected: Vec<JobId>,
    depths: HashMap<JobId, i32>,
    seen: HashSet<JobId>,
    sides: [Side; 2],
    /// Parents up to half of the limit, then children, then parents again.
    phase: usize,
}

const PHASES: [Direction; 3] = [Direction::Parents, Direction::Children, Direction::Parents];

impl Walk {
    pub fn new(job: JobId, limit: usize) -> Walk {
        let side = || Side { found: VecDeque::new(), open: vec![job] };
        Walk {
            limit: limit.max(1),
            selected: vec![job],
            depths: HashMap::from([(job, 0)]),
            seen: HashSet::from([job]),
            sides: [side(), side()],
            phase: 0,
        }
    }

    /// Returns what to read next. `None`: the walk has ended.
    pub fn next(&mut self) -> Option<NeighbourQuery> {
        while let Some(direction) = PHASES.get(self.phase).copied() {
            let max = if self.phase == 0 { self.limit.div_ceil(2) } else { self.limit };
            let side = &mut self.sides[direction as usize];
            while self.selected.len() < max
                && let Some((job, depth)) = side.found.pop_front()
            {
                self.selected.push(job);
                self.depths.insert(job, depth);
                side.open.push(job);
            }
            if self.selected.len() < max && !side.open.is_empty() {
                let jobs = std::mem::take(&mut side.open);
                return Some(NeighbourQuery { direction, jobs, limit: self.limit });
            }
            self.phase += 1;
        }
        None
    }

    /// Adds what was read: pairs of a job and its neighbour, in the direction of the query.
    pub fn add_neighbours(&mut self, direction: Direction, links: impl IntoIterator<Item = (JobId, JobId)>) {
        let step = if direction == Direction::Parents { -1 } else { 1 };
        for (from, to) in links {
            if self.seen.insert(to) {
                let depth = self.depths.get(&from).copied().unwrap_or(0) + step;
                self.sides[direction as usize].found.push_back((to, depth));
            }
        }
    }

    pub fn jobs(&self) -> &[JobId] {
        &self.selected
    }

    /// Returns how many dependents of a job to count at most. A result above `max_counted` means that there are more.
    pub fn count_limit(&self, job: JobId) -> usize {
        self.max_counted(job) + 1
    }

    fn max_counted(&self, job: JobId) -> usize {
        if job == self.selected[0] { MAX_COUNTED } else { MAX_COUNTED_AROUND }
    }

    /// Returns the graph of the selected jobs. A job without facts was deleted.
    pub fn graph(self, mut facts: HashMap<JobId, JobFacts>, children: &HashMap<JobId, usize>) -> JobGraph {
        let mut shown_children: HashMap<JobId, usize> = HashMap::new();
        let mut jobs = Vec::with_capacity(self.selected.len());
        for id in &self.selected {
            let depth = self.depths[id];
            let Some(facts) = facts.remove(id) else {
                jobs.push(deleted(*id, depth));
                continue;
            };
            let all: HashSet<JobId> = facts.depends_on.iter().copied().collect();
            let mut shown: Vec<JobId> = all.iter().copied().filter(|parent| self.depths.contains_key(parent)).collect();
            shown.sort_unstable();
            for parent in &shown {
                *shown_children.entry(*parent).or_default() += 1;
            }
            jobs.push(GraphJob {
                name: Some(facts.name),
                kind: Some(facts.kind),
                queue: Some(facts.queue),
                status: Some(facts.state),
                hidden_parents: (all.len() - shown.len()) as u64,
                depends_on: shown,
                ..deleted(*id, depth)
            });
        }
        let mut is_exact = true;
        for job in &mut jobs {
            let (counted, max) = (children.get(&job.id).copied().unwrap_or(0), self.max_counted(job.id));
            is_exact &= counted <= max;
            let shown = shown_children.get(&job.id).copied().unwrap_or(0);
            job.hidden_children = counted.min(max).saturating_sub(shown) as u64;
        }
        let hidden = jobs.iter().map(|job| job.hidden_parents + job.hidden_children).sum();
        JobGraph { job_id: self.selected[0], jobs, hidden, hidden_is_exact: is_exact }
    }
}

/// What a graph shows of a job.
pub struct JobFacts {
    pub name: String,
    pub kind: String,
    pub queue: String,
    pub state: JobState,
    pub depends_on: Vec<JobId>,
}

fn deleted(id: JobId, depth: i32) -> GraphJob {
    GraphJob {
        id,
        depth,
        name: None,
        kind: None,
        queue: None,
        status: None,
        depends_on: Vec::new(),
        hidden_parents: 0,
        hidden_children: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(n: usize) -> Vec<JobId> {
        (0..n).map(|_| JobId::new()).collect()
    }

    /// Walks through a graph in memory. Returns the selected jobs.
    fn walk(edges: &[(JobId, JobId)], from: JobId, limit: usize) -> Vec<JobId> {
        let mut walk = Walk::new(from, limit);
        while let Some(query) = walk.next() {
            let mut links = Vec::new();
            for job in &query.jobs {
                let near = edges.iter().filter_map(|(parent, child)| match query.direction {
                    Direction::Parents => (child == job).then_some((*job, *parent)),
                    Direction::Children => (parent == job).then_some((*job, *child)),
                });
                links.extend(near.take(query.limit));
            }
            walk.add_neighbours(query.direction, links);
        }
        assert!(walk.jobs().len() <= limit.max(1));
        walk.selected
    }

    #[test]
    fn each_direction_gets_half_and_what_the_other_leaves() {
        let all = ids(41);
        let parents: Vec<_> = all[1..21].iter().map(|parent| (*parent, all[0])).collect();
        let children: Vec<_> = all[21..].iter().map(|child| (all[0], *child)).collect();
        let both = [parents.clone(), children.clone()].concat();
        let taken = walk(&both, all[0], 11);
        let is_parent = |id: &&JobId| parents.iter().any(|(parent, _)| parent == *id);
        assert_eq!((taken.len(), taken.iter().filter(is_parent).count()), (11, 5));
        assert_eq!(walk(&parents, all[0], 11).len(), 11, "there are no children");
        assert_eq!(walk(&children, all[0], 11).len(), 11, "there are no parents");
        assert_eq!(walk(&both, all[0], 100).len(), 41, "all of a small graph");
        assert_eq!(walk(&both, all[0], 1), [all[0]]);
    }

    #[test]
    fn a_job_that_can_be_reached_in_several_ways_is_selected_once() {
        let all = ids(4);
        let edges = [(all[0], all[1]), (all[0], all[2]), (all[1], all[3]), (all[2], all[3]), (all[0], all[3])];
        assert_eq!(walk(&edges, all[0], 60).len(), 4);
        assert_eq!(walk(&edges, all[3], 60).len(), 4);
    }

    #[test]
    fn hidden_jobs_are_counted() {
        let all = ids(3);
        let mut walk = Walk::new(all[0], 2);
        while let Some(query) = walk.next() {
            if query.direction == Direction::Children {
                walk.add_neighbours(Direction::Children, [(all[0], all[1]), (all[0], all[2])]);
            }
        }
        let facts = |depends_on: &[JobId]| JobFacts {
            name: "n".into(),
            kind: "k".into(),
            queue: "q".into(),
            state: JobState::Pending,
            depends_on: depends_on.to_vec(),
        };
        let unknown = JobId::new();
        let known = HashMap::from([(all[0], facts(&[unknown])), (all[1], facts(&[all[0]]))]);
        let counted = HashMap::from([(all[0], MAX_COUNTED + 1)]);
        let graph = walk.graph(known, &counted);
        assert_eq!((graph.jobs.len(), graph.jobs[0].hidden_parents), (2, 1));
        assert_eq!((graph.jobs[0].hidden_children, graph.hidden_is_exact), (MAX_COUNTED as u64 - 1, false));
        assert_eq!(graph.hidden, MAX_COUNTED as u64);
        assert_eq!((graph.jobs[1].depth, graph.jobs[1].depends_on.clone()), (1, vec![all[0]]));
    }
}
