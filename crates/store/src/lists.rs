//! Decides how a list is answered: which index gives the ids, and what bounds them. The engines only run the queries.
//!
//! Every table of jobs has its ids in order per lane, so a page consists of the newest few ids of each lane and table; the
//! cost does not grow with the history. Tags, schedules and correlation ids have narrow indexes of their own.

use faena_domain::{ErrorReason, FieldError, JobId, JobOptions, JobState};
use uuid::Uuid;

use crate::{
    Counts, DeadLetterStats, Filter, Lane, LaneId, Page, Result, StoreError, Tally,
    plan::LabelKind,
    sql::{CANCELLED, FAILED, PENDING, RETRYING},
};

/// Counting stops here where no counter has the answer.
pub const COUNT_LIMIT: usize = 10_000;

pub enum Source {
    /// The newest few of each lane and table.
    Lanes(Vec<LaneId>),
    Label {
        kind: LabelKind,
        value: String,
    },
    Correlation(String),
    /// The newest (or oldest) failed jobs of each lane, searched by error and reason.
    DeadLetterMatches(Vec<LaneId>),
}

pub struct ListQuery {
    pub source: Source,
    /// Ids below this one, including the cursor.
    pub before: JobId,
    /// Ids below this one, without the cursor.
    pub upper: JobId,
    pub from: JobId,
    /// How many ids each index must give.
    pub wanted: usize,
    filter: Filter,
    /// The lanes that match type, queue and priority of the filter.
    lanes: Vec<LaneId>,
    /// Those of them whose names match the search text.
    found: Vec<LaneId>,
    offset: usize,
    limit: usize,
    direction: Direction,
}

/// Which end of the ids comes first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Down,
    Up,
}

/// How much of an error is searched. Errors written by people are short, those of programs may not be.
pub const SEARCHED: usize = 2_000;

/// Result of a search through one lane.
#[derive(Default)]
pub struct Scan {
    pub seen: usize,
    /// The last job that was read.
    pub last: Option<JobId>,
    pub ids: Vec<JobId>,
}

impl Scan {
    pub fn record(&mut self, id: JobId, fits: bool) {
        self.seen += 1;
        self.last = Some(id);
        if fits {
            self.ids.push(id);
        }
    }
}

/// Returns how many failed jobs of each lane one search reads.
pub fn per_lane(lanes: usize) -> usize {
    (20 * COUNT_LIMIT / lanes.max(1)).clamp(100, COUNT_LIMIT)
}

/// Returns the lanes that have failed jobs.
pub fn failing(counts: &Counts) -> Vec<LaneId> {
    let failed = counts.by_lane.iter().filter(|((_, tally), n)| *tally == Tally::Failed && **n > 0);
    failed.map(|((lane, _), _)| *lane).collect()
}

/// Returns those of these lanes that have failed jobs.
pub fn failing_of(lanes: &[LaneId], counts: &Counts) -> Vec<LaneId> {
    let has = |lane: &LaneId| counts.by_lane.get(&(*lane, Tally::Failed)).is_some_and(|n| *n > 0);
    lanes.iter().copied().filter(has).collect()
}

impl DeadLetterStats {
    /// Adds the newest dead letters of each lane, with their reasons.
    pub fn add_reasons(&mut self, mut dead_letters: Vec<(JobId, String)>) {
        dead_letters.sort_unstable_by_key(|(id, _)| std::cmp::Reverse(*id));
        dead_letters.truncate(COUNT_LIMIT);
        self.newest = dead_letters.first().map(|(id, _)| *id);
        self.looked_at = dead_letters.len() as u64;
        for (_, reason) in dead_letters {
            *self.by_reason.entry(reason).or_default() += 1;
        }
    }
}

/// Failed jobs that match a search.
pub struct DeadLetterMatches {
    pub ids: Vec<JobId>,
    /// Where the search ended, if not with the last job.
    pub end: Option<JobId>,
}

/// Returns the first id after this one.
fn following(id: JobId) -> JobId {
    JobId(Uuid::from_u128(id.0.as_u128().saturating_add(1)))
}

/// The columns of a job that filters compare.
pub struct Candidate<'a> {
    pub id: JobId,
    pub state: JobState,
    pub lane: LaneId,
    pub correlation: Option<&'a str>,
    pub options: &'a JobOptions,
}

impl ListQuery {
    pub fn new(filter: &Filter, page: Page, lanes: &[Lane]) -> Result<ListQuery> {
        let matching: Vec<&Lane> = lanes
            .iter()
            .filter(|lane| filter.kind.as_ref().is_none_or(|kind| *kind == lane.kind))
            .filter(|lane| filter.queue.as_ref().is_none_or(|queue| *queue == lane.queue))
            .filter(|lane| filter.priority.is_none_or(|priority| priority == lane.priority))
            .collect();
        let needle = filter.q.as_ref().map(|text| text.to_lowercase());
        let named = |lane: &&&Lane| {
            needle.as_ref().is_none_or(|needle| {
                lane.kind.to_lowercase().contains(needle) || lane.queue.to_lowercase().contains(needle)
            })
        };
        let found: Vec<LaneId> = matching.iter().filter(named).map(|lane| lane.id).collect();
        let source = if filter.error.is_some() || filter.reason.is_some() {
            if filter.states != [JobState::Failed] {
                let path = if filter.error.is_some() { "error" } else { "reason" };
                return Err(StoreError::Invalid(vec![FieldError::new(path, "is only for failed jobs")]));
            }
            Source::DeadLetterMatches(matching.iter().map(|lane| lane.id).collect())
        } else if let Some(value) = &filter.tag {
            Source::Label { kind: LabelKind::Tag, value: value.clone() }
        } else if let Some(value) = &filter.schedule_id {
            Source::Label { kind: LabelKind::Schedule, value: value.clone() }
        } else if let Some(text) = &filter.correlation_id {
            Source::Correlation(text.clone())
        } else {
            Source::Lanes(found.clone())
        };
        let upper = filter.created_before.map_or(JobId(Uuid::max()), |at| JobId::first_at_ms(at.as_ms()));
        let from = filter.created_after.map_or(JobId(Uuid::nil()), |at| JobId::first_at_ms(at.as_ms()));
        let (offset, limit, before, from, direction) = match page {
            Page::Offset { offset, limit } => (offset, limit, upper, from, Direction::Down),
            Page::After { id, limit } => (0, limit, id.map_or(upper, |id| id.min(upper)), from, Direction::Down),
            Page::Upward { after, upto, limit } => {
                let from = after.map_or(from, |id| from.max(following(id)));
                (0, limit, upper.min(following(upto)), from, Direction::Up)
            }
        };
        let wanted = offset.saturating_add(limit);
        if wanted > COUNT_LIMIT {
            return Err(StoreError::Invalid(vec![FieldError::new(
                "page",
                format!("pages end at job {COUNT_LIMIT}; go on with cursor"),
            )]));
        }
        let lanes = matching.iter().map(|lane| lane.id).collect();
        Ok(ListQuery {
            source,
            before,
            upper,
            from,
            wanted,
            filter: filter.clone(),
            lanes,
            found,
            offset,
            limit,
            direction,
        })
    }

    /// Returns the text that may be a whole key, id or correlation id, when the ids come from the lanes.
    pub fn search(&self) -> Option<&str> {
        match self.source {
            Source::Lanes(_) => self.filter.q.as_deref(),
            _ => None,
        }
    }

    pub fn includes(&self, state: JobState) -> bool {
        self.filter.states.is_empty() || self.filter.states.contains(&state)
    }

    pub fn includes_in_flight(&self) -> bool {
        [JobState::Scheduled, JobState::Assigned, JobState::Processing].into_iter().any(|state| self.includes(state))
    }

    /// Returns the queries of the tables that can contain matching jobs.
    pub fn queries(
        &self,
        ready: &str,
        waiting: impl Fn(i16) -> String,
        done: &str,
        ended: impl Fn(i16) -> String,
    ) -> Vec<String> {
        let mut queries = Vec::new();
        if self.includes(JobState::Queued) {
            queries.push(ready.to_owned());
        }
        for (state, code) in [(JobState::Pending, PENDING), (JobState::Retrying, RETRYING)] {
            if self.includes(state) {
                queries.push(waiting(code));
            }
        }
        if self.includes(JobState::Completed) {
            queries.push(done.to_owned());
        }
        for (state, code) in [(JobState::Failed, FAILED), (JobState::Cancelled, CANCELLED)] {
            if self.includes(state) {
                queries.push(ended(code));
            }
        }
        queries
    }

    /// Returns the exact total, if the counters have it.
    pub fn counted(&self, counts: &Counts, lanes: &[LaneId]) -> Option<u64> {
        // These share a counter.
        let in_flight =
            [JobState::Scheduled, JobState::Assigned, JobState::Processing].map(|state| self.includes(state));
        let bounded = self.filter.created_after.is_some() || self.filter.created_before.is_some();
        if bounded || in_flight.contains(&true) && in_flight.contains(&false) {
            return None;
        }
        let states = JobState::ALL.into_iter().filter(|state| self.includes(*state));
        let tallies: Vec<Tally> = states.map(Tally::of).collect();
        let total: i64 = counts
            .by_lane
            .iter()
            .filter(|((lane, tally), _)| lanes.contains(lane) && tallies.contains(tally))
            .map(|(_, n)| n)
            .sum();
        Some(u64::try_from(total).unwrap_or(0))
    }

    /// Sorts the ids and leaves out those before the page.
    pub fn cut_sorted(&self, mut ids: Vec<JobId>) -> Vec<JobId> {
        self.sort(&mut ids);
        self.cut(ids)
    }

    pub fn sort(&self, ids: &mut Vec<JobId>) {
        match self.direction {
            Direction::Down => ids.sort_unstable_by(|a, b| b.cmp(a)),
            Direction::Up => ids.sort_unstable(),
        }
        ids.dedup();
    }

    /// Returns the sort order for SQL.
    pub fn order(&self) -> &'static str {
        match self.direction {
            Direction::Down => "DESC",
            Direction::Up => "ASC",
        }
    }

    /// Returns whether the error and reason of a failed job match.
    pub fn fits(&self, error: Option<&str>, reason: Option<&str>) -> bool {
        let needle = self.filter.error.as_ref().map(|text| text.to_lowercase());
        needle.is_none_or(|needle| error.is_some_and(|error| error.to_lowercase().contains(&needle)))
            && self.filter.reason.is_none_or(|wanted| reason == Some(wanted.as_str()))
    }

    /// Returns what a failed job must contain: part of its error, its reason.
    pub fn search_terms(&self) -> (Option<&str>, Option<&'static str>) {
        (self.filter.error.as_deref(), self.filter.reason.map(ErrorReason::as_str))
    }

    /// Joins the searches of all lanes. Ids behind the point where the first search stopped early are not certain.
    pub fn dead_letters(&self, scans: Vec<Scan>, per_lane: usize) -> DeadLetterMatches {
        let stopped = scans.iter().filter(|scan| scan.seen == per_lane).filter_map(|scan| scan.last);
        let end = match self.direction {
            Direction::Down => stopped.max(),
            Direction::Up => stopped.min(),
        };
        let is_certain = |id: &JobId| match (end, self.direction) {
            (None, _) => true,
            (Some(end), Direction::Down) => *id >= end,
            (Some(end), Direction::Up) => *id <= end,
        };
        let mut ids: Vec<JobId> = scans.into_iter().flat_map(|scan| scan.ids).filter(is_certain).collect();
        self.sort(&mut ids);
        DeadLetterMatches { ids, end }
    }

    /// Returns whether the filter compares more than the error, reason and lane of a failed job.
    pub fn asks_for_more(&self) -> bool {
        let Filter { tag, schedule_id, correlation_id, q, .. } = &self.filter;
        [tag, schedule_id, correlation_id, q].into_iter().any(Option::is_some)
    }

    pub fn cut(&self, ids: Vec<JobId>) -> Vec<JobId> {
        ids.into_iter().skip(self.offset).take(self.limit).collect()
    }

    /// Returns where the next page starts. `window`: where the search ended, if not with the last job.
    pub fn next(&self, page: &[JobId], window: Option<JobId>) -> Option<JobId> {
        if page.len() == self.limit { page.last().copied() } else { window }
    }

    /// Returns whether a job matches the whole filter.
    pub fn matches(&self, job: &Candidate) -> bool {
        let Filter { tag, schedule_id, correlation_id, q, .. } = &self.filter;
        let own = job.id.to_string();
        let correlation = job.correlation.unwrap_or(&own);
        let options = job.options;
        let is = |value: &Option<String>, text: &str| value.as_deref() == Some(text);
        self.includes(job.state)
            && self.lanes.contains(&job.lane)
            && tag.as_ref().is_none_or(|tag| options.tags.contains(tag))
            && schedule_id.as_ref().is_none_or(|schedule| is(&options.schedule_id, schedule))
            && correlation_id.as_ref().is_none_or(|wanted| wanted == correlation)
            && q.as_ref().is_none_or(|text| {
                self.found.contains(&job.lane)
                    || own == *text
                    || correlation == text
                    || is(&options.unique_key, text)
                    || is(&options.idempotency_key, text)
            })
    }

    /// Returns whether the lanes of the search contain this job anyway.
    pub fn is_in_lanes(&self, lane: LaneId) -> bool {
        self.found.contains(&lane)
    }

    pub fn is_on_page(&self, id: JobId) -> bool {
        id < self.before
    }
}
