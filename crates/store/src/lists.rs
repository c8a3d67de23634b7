//! Decides how a list is answered: which index gives the ids, and what bounds them. The two databases only run the queries.
//!
//! Every table of jobs has its ids in order per lane, so a page consists of the newest few ids of each lane and table; the
//! cost does not grow with the history. Tags, schedules and correlation ids have narrow indexes of their own.

use std::collections::HashSet;

use faena_domain::{ErrorReason, JobId, JobOptions, JobState};
use uuid::Uuid;

use crate::{
    Counts, Cursor, DeadLetterStats, Filter, Lane, LaneId, Order, Page, Result, Sort, SortBy, Tally,
    pages::{Listed, page_start},
    plan::LabelKind,
    sql::{CANCELLED, FAILED, PENDING, RETRYING},
};

/// Maximum number of jobs that a list counts, searches, sorts or skips by page number, if no counter or index has the answer.
pub const COUNT_LIMIT: usize = 10_000;

pub enum Source {
    /// The newest few jobs of each lane and table.
    Lanes(Vec<LaneId>),
    Label {
        kind: LabelKind,
        value: String,
    },
    Correlation(String),
    /// The newest (or oldest) failed jobs of each lane, searched by error and reason.
    DeadLetterMatches(Vec<LaneId>),
    /// The newest (or oldest) jobs of these lanes, and the jobs that were submitted with this name, compared one by
    /// one.
    Scan {
        lanes: Vec<LaneId>,
        name: Option<String>,
    },
}

/// Ids from `from`, inclusive, to `before`, exclusive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub from: JobId,
    pub before: JobId,
}

impl Range {
    pub fn contains(&self, id: JobId) -> bool {
        id >= self.from && id < self.before
    }
}

/// Part of a list in order of creation.
#[derive(Clone, Copy)]
pub struct Span {
    pub after: Option<JobId>,
    pub up_to: Option<JobId>,
    pub offset: usize,
    pub limit: usize,
    pub order: Order,
}

impl Span {
    /// Returns the part that a page shows, if the list is sorted by creation. Other lists only need their total.
    pub fn of(page: Page) -> Result<Span> {
        let Sort { by, order } = page.sort;
        let (offset, cursor) = page_start(page)?;
        Ok(match by {
            SortBy::Created => {
                Span { after: cursor.map(|cursor| cursor.id), up_to: None, offset, limit: page.limit, order }
            }
            SortBy::Updated | SortBy::Scheduled | SortBy::Priority => Span::newest(1),
        })
    }

    /// Returns the newest jobs.
    pub fn newest(limit: usize) -> Span {
        Span { after: None, up_to: None, offset: 0, limit, order: Order::Desc }
    }

    /// Returns jobs that are newer than `after` and not newer than `up_to`, oldest first.
    pub fn upward(after: Option<JobId>, up_to: JobId, limit: usize) -> Span {
        Span { after, up_to: Some(up_to), offset: 0, limit, order: Order::Asc }
    }
}

pub struct ListQuery {
    pub source: Source,
    /// The ids that the filter allows.
    pub allowed: Range,
    /// Those of them that come after the cursor.
    pub page: Range,
    /// How many ids each index must return.
    pub wanted: usize,
    /// The registrations of the worker in the filter.
    pub workers: Vec<Uuid>,
    filter: Filter,
    /// The states in which jobs can match.
    states: Vec<JobState>,
    /// The lanes that match type, queue and priority of the filter.
    lanes: HashSet<LaneId>,
    /// Those of them whose type is the name in the filter.
    named: HashSet<LaneId>,
    /// Those of them whose type or queue contains the search text.
    found: HashSet<LaneId>,
    offset: usize,
    limit: usize,
    order: Order,
}

/// How much of an error is searched. Errors written by people are short, those of programs may not be.
pub const SEARCHED_ERROR_CHARS: usize = 2_000;

/// How much of a payload is searched, so that a page of a search reads at most 40 MB of them.
pub const SEARCHED_PAYLOAD_CHARS: usize = 4_000;

/// Result of a search through one lane.
#[derive(Default)]
pub struct LaneSearch {
    pub seen: usize,
    /// The last job that was read.
    pub last: Option<JobId>,
    pub ids: Vec<JobId>,
}

impl LaneSearch {
    pub fn record(&mut self, id: JobId, is_match: bool) {
        self.seen += 1;
        self.last = Some(id);
        if is_match {
            self.ids.push(id);
        }
    }

    /// Returns what a search that reads up to `bound` jobs has found.
    pub fn window(self, bound: usize) -> Window {
        Window { end: self.last.filter(|_| self.seen == bound), ids: self.ids }
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
    with_jobs(lanes, Tally::Failed, counts)
}

/// Returns those of these lanes that have jobs of this tally.
pub fn with_jobs(lanes: &[LaneId], tally: Tally, counts: &Counts) -> Vec<LaneId> {
    let has = |lane: &LaneId| counts.by_lane.get(&(*lane, tally)).is_some_and(|n| *n > 0);
    lanes.iter().copied().filter(has).collect()
}

impl DeadLetterStats {
    /// Adds the newest dead letters of each lane, with their reasons.
    pub fn add_reasons(&mut self, mut dead_letters: Vec<(JobId, String)>) {
        dead_letters.sort_unstable_by_key(|(id, _)| std::cmp::Reverse(*id));
        dead_letters.truncate(COUNT_LIMIT);
        self.newest = dead_letters.first().map(|(id, _)| *id);
        self.reason_sample_size = dead_letters.len() as u64;
        for (_, reason) in dead_letters {
            *self.by_reason.entry(reason).or_default() += 1;
        }
    }
}

/// Jobs that a bounded search found.
#[derive(Clone, Default)]
pub struct Window {
    pub ids: Vec<JobId>,
    /// Where the search ended, if not with the last job.
    pub end: Option<JobId>,
}

/// Page of a list by creation, with its total.
pub struct Selected {
    pub ids: Vec<JobId>,
    pub total: u64,
    pub total_is_exact: bool,
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
    pub last_run: LastRun,
}

/// The worker and the error that a job shows. Only read if the filter compares them.
#[derive(Clone, Default)]
pub struct LastRun {
    pub worker: Option<Uuid>,
    pub error: Option<String>,
    pub reason: Option<String>,
}

fn contains(text: &str, lower_needle: &str) -> bool {
    text.to_lowercase().contains(lower_needle)
}

impl ListQuery {
    pub fn new(filter: &Filter, span: Span, lanes: &[Lane]) -> ListQuery {
        let matching: Vec<&Lane> = lanes
            .iter()
            .filter(|lane| filter.kind.as_ref().is_none_or(|kind| *kind == lane.kind))
            .filter(|lane| filter.queue.as_ref().is_none_or(|queue| *queue == lane.queue))
            .filter(|lane| filter.queues.as_ref().is_none_or(|queues| queues.contains(&lane.queue)))
            .filter(|lane| filter.priorities.is_empty() || filter.priorities.contains(&lane.priority))
            .collect();
        let needle = filter.q.as_ref().map(|text| text.to_lowercase());
        let is_found = |lane: &&&Lane| {
            needle.as_ref().is_none_or(|text| contains(&lane.kind, text) || contains(&lane.queue, text))
        };
        let is_named = |lane: &&&Lane| filter.name.as_ref().is_none_or(|name| *name == lane.kind);
        let found: Vec<LaneId> = matching.iter().filter(is_found).map(|lane| lane.id).collect();
        let named: Vec<LaneId> = matching.iter().filter(is_named).map(|lane| lane.id).collect();
        let lanes: Vec<LaneId> = matching.iter().map(|lane| lane.id).collect();
        let upper = filter.created_before.map_or(JobId(Uuid::max()), |at| JobId::first_at_ms(at.as_ms()));
        let upper = span.up_to.map_or(upper, |up_to| upper.min(following(up_to)));
        let lower = filter.created_after.map_or(JobId(Uuid::nil()), |at| JobId::first_at_ms(at.as_ms()));
        let allowed = Range { from: lower, before: upper };
        let page = match (span.order, span.after) {
            (_, None) => allowed,
            (Order::Desc, Some(id)) => Range { before: id.min(upper), ..allowed },
            (Order::Asc, Some(id)) => Range { from: lower.max(following(id)), ..allowed },
        };
        ListQuery {
            source: source_of(filter, &lanes, &named, &found),
            allowed,
            page,
            wanted: span.offset.saturating_add(span.limit),
            workers: Vec::new(),
            filter: filter.clone(),
            states: possible_states(filter),
            lanes: lanes.into_iter().collect(),
            named: named.into_iter().collect(),
            found: found.into_iter().collect(),
            offset: span.offset,
            limit: span.limit,
            order: span.order,
        }
    }

    /// Returns the text that may be a name, key, id or correlation id, when the ids come from the lanes.
    pub fn search(&self) -> Option<&str> {
        match self.source {
            Source::Lanes(_) => self.filter.q.as_deref(),
            _ => None,
        }
    }

    /// Returns the worker whose registrations must be looked up.
    pub fn worker(&self) -> Option<&str> {
        self.filter.worker_id.as_deref()
    }

    pub fn includes(&self, state: JobState) -> bool {
        self.states.contains(&state)
    }

    pub fn includes_in_flight(&self) -> bool {
        self.states.iter().any(|state| state.is_in_flight())
    }

    /// Returns the queries of the tables that can contain matching jobs, with the tally that counts the jobs of the table.
    pub fn queries(
        &self,
        ready: &str,
        waiting: impl Fn(i16) -> String,
        done: &str,
        ended: impl Fn(i16) -> String,
    ) -> Vec<(Tally, String)> {
        let mut queries = Vec::new();
        if self.includes(JobState::Queued) {
            queries.push((Tally::Queued, ready.to_owned()));
        }
        for (state, code) in [(JobState::Pending, PENDING), (JobState::Retrying, RETRYING)] {
            if self.includes(state) {
                queries.push((Tally::of(state), waiting(code)));
            }
        }
        if self.includes(JobState::Completed) {
            queries.push((Tally::Completed, done.to_owned()));
        }
        for (state, code) in [(JobState::Failed, FAILED), (JobState::Cancelled, CANCELLED)] {
            if self.includes(state) {
                queries.push((Tally::of(state), ended(code)));
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
        let tallies: Vec<Tally> = self.states.iter().copied().map(Tally::of).collect();
        let lanes: HashSet<LaneId> = lanes.iter().copied().collect();
        let total: i64 = counts
            .by_lane
            .iter()
            .filter(|((lane, tally), _)| lanes.contains(lane) && tallies.contains(tally))
            .map(|(_, n)| n)
            .sum();
        Some(u64::try_from(total).unwrap_or(0))
    }

    pub fn sort(&self, ids: &mut Vec<JobId>) {
        match self.order {
            Order::Desc => ids.sort_unstable_by(|a, b| b.cmp(a)),
            Order::Asc => ids.sort_unstable(),
        }
        ids.dedup();
    }

    /// Keeps the first `wanted` of these ids, and narrows the range to what can still come before the last of them.
    ///
    /// So a search that goes lane by lane reads few ids of most lanes, however many lanes there are.
    pub fn keep_first(&self, ids: &mut Vec<JobId>, wanted: usize, range: &mut Range) {
        if ids.len() < wanted.saturating_mul(2).max(100) {
            return;
        }
        self.sort(ids);
        ids.truncate(wanted);
        if let Some(last) = ids.last().filter(|_| ids.len() == wanted) {
            match self.order {
                Order::Desc => range.from = range.from.max(*last),
                Order::Asc => range.before = range.before.min(*last),
            }
        }
    }

    /// Returns the sort order for SQL.
    pub fn order(&self) -> &'static str {
        match self.order {
            Order::Desc => "DESC",
            Order::Asc => "ASC",
        }
    }

    /// Sorts the candidates of a search and cuts them at its bound. Each index has given its first `COUNT_LIMIT` ids.
    pub fn window(&self, mut ids: Vec<JobId>) -> Window {
        self.sort(&mut ids);
        ids.truncate(COUNT_LIMIT);
        let end = ids.last().copied().filter(|_| ids.len() == COUNT_LIMIT);
        Window { ids, end }
    }

    /// Sorts the ids and leaves out those after the point where a search ended, because matches may be missing there.
    pub fn certain(&self, mut ids: Vec<JobId>, end: Option<JobId>) -> Vec<JobId> {
        ids.retain(|id| match (end, self.order) {
            (None, _) => true,
            (Some(end), Order::Desc) => *id >= end,
            (Some(end), Order::Asc) => *id <= end,
        });
        self.sort(&mut ids);
        ids
    }

    /// Returns whether an error and its reason match.
    pub fn matches_error(&self, error: Option<&str>, reason: Option<&str>) -> bool {
        let needle = self.filter.error.as_ref().map(|text| text.to_lowercase());
        needle.is_none_or(|needle| error.is_some_and(|error| contains(error, &needle)))
            && self.filter.reason.is_none_or(|wanted| reason == Some(wanted.as_str()))
    }

    /// Returns what a failed job must contain: part of its error, its reason.
    pub fn search_terms(&self) -> (Option<&str>, Option<&'static str>) {
        (self.filter.error.as_deref(), self.filter.reason.map(ErrorReason::as_str))
    }

    /// Joins the searches of all lanes. Leaves out ids after the point where the first search stopped early, because
    /// matches may be missing there.
    pub fn dead_letters(&self, scans: Vec<LaneSearch>, per_lane: usize) -> Window {
        let stopped = scans.iter().filter(|scan| scan.seen == per_lane).filter_map(|scan| scan.last);
        let end = match self.order {
            Order::Desc => stopped.max(),
            Order::Asc => stopped.min(),
        };
        let ids = self.certain(scans.into_iter().flat_map(|scan| scan.ids).collect(), end);
        Window { ids, end }
    }

    /// Returns whether the filter compares more than the error, reason and lane of a failed job.
    pub fn compares_more_than_error(&self) -> bool {
        let Filter { tag, schedule_id, correlation_id, q, name, worker_id, payload, .. } = &self.filter;
        [tag, schedule_id, correlation_id, q, name, worker_id, payload].into_iter().any(Option::is_some)
    }

    /// Returns whether the filter compares the last run of a job.
    pub fn compares_last_run(&self) -> bool {
        self.filter.error.is_some() || self.filter.reason.is_some() || self.filter.worker_id.is_some()
    }

    /// Returns whether the filter compares the payload of a job.
    pub fn compares_payload(&self) -> bool {
        self.filter.payload.is_some()
    }

    /// Returns whether the beginning of a payload contains the text that the filter names.
    pub fn matches_payload(&self, payload: &str) -> bool {
        self.filter.payload.as_ref().is_none_or(|text| contains(payload, &text.to_lowercase()))
    }

    /// Returns whether the filter compares the worker of a job.
    pub fn compares_worker(&self) -> bool {
        self.filter.worker_id.is_some()
    }

    /// Returns the ids of the page among those of the list.
    pub fn page_of(&self, ids: Vec<JobId>) -> Vec<JobId> {
        ids.into_iter().skip(self.offset).take(self.limit).collect()
    }

    /// Returns where the next page starts. `end`: where the search ended, if not with the last job.
    pub fn next(&self, page: &[JobId], end: Option<JobId>) -> Option<JobId> {
        if page.len() == self.limit { page.last().copied() } else { end }
    }

    /// Returns the page of a list that is sorted by creation.
    pub fn listed(&self, selected: &Selected) -> Listed {
        let next = self.next(&selected.ids, selected.end).map(Cursor::created);
        Listed {
            ids: selected.ids.clone(),
            next,
            is_partial: selected.ids.len() < self.limit && selected.end.is_some(),
            sort_is_exact: true,
        }
    }

    /// Returns whether a job matches the whole filter.
    pub fn matches(&self, job: &Candidate) -> bool {
        let Filter { tag, schedule_id, correlation_id, q, name, .. } = &self.filter;
        let id = job.id.to_string();
        let correlation = job.correlation.unwrap_or(&id);
        let options = job.options;
        let is = |value: &Option<String>, text: &str| value.as_deref() == Some(text);
        self.includes(job.state)
            && self.lanes.contains(&job.lane)
            && tag.as_ref().is_none_or(|tag| options.tags.contains(tag))
            && schedule_id.as_ref().is_none_or(|schedule| is(&options.schedule_id, schedule))
            && correlation_id.as_ref().is_none_or(|wanted| wanted == correlation)
            && name.as_ref().is_none_or(|name| match &options.name {
                Some(own_name) => own_name == name,
                None => self.named.contains(&job.lane),
            })
            && q.as_ref().is_none_or(|text| {
                self.found.contains(&job.lane)
                    || id == *text
                    || correlation == text
                    || is(&options.unique_key, text)
                    || is(&options.idempotency_key, text)
                    || options.name.as_ref().is_some_and(|name| contains(name, &text.to_lowercase()))
            })
            && self.matches_last_run(&job.last_run)
    }

    fn matches_last_run(&self, run: &LastRun) -> bool {
        self.matches_error(run.error.as_deref(), run.reason.as_deref())
            && (!self.compares_worker() || run.worker.is_some_and(|worker| self.workers.contains(&worker)))
    }

    /// Returns whether a name that is not a type contains the search text.
    pub fn finds_name(&self, name: &str) -> bool {
        self.filter.q.as_ref().is_some_and(|text| contains(name, &text.to_lowercase()))
    }

    /// Returns whether all jobs of this lane match the search text.
    pub fn is_in_lanes(&self, lane: LaneId) -> bool {
        self.found.contains(&lane)
    }
}

/// Returns the states in which a job can match: only some have a worker, and a completed job shows no error.
fn possible_states(filter: &Filter) -> Vec<JobState> {
    let searches_errors = filter.error.is_some() || filter.reason.is_some();
    JobState::ALL
        .into_iter()
        .filter(|state| filter.states.is_empty() || filter.states.contains(state))
        .filter(|state| !searches_errors || *state != JobState::Completed)
        .filter(|state| filter.worker_id.is_none() || state.is_terminal() || state.is_in_flight())
        .collect()
}

/// Chooses the narrowest index. Conditions that the index does not cover are checked job by job.
fn source_of(filter: &Filter, lanes: &[LaneId], named: &[LaneId], found: &[LaneId]) -> Source {
    let searches_errors = filter.error.is_some() || filter.reason.is_some();
    if searches_errors && filter.states == [JobState::Failed] {
        Source::DeadLetterMatches(lanes.to_vec())
    } else if let Some(value) = &filter.tag {
        Source::Label { kind: LabelKind::Tag, value: value.clone() }
    } else if let Some(value) = &filter.schedule_id {
        Source::Label { kind: LabelKind::Schedule, value: value.clone() }
    } else if let Some(text) = &filter.correlation_id {
        Source::Correlation(text.clone())
    } else if filter.name.is_some() || filter.worker_id.is_some() || filter.payload.is_some() || searches_errors {
        Source::Scan { lanes: named.to_vec(), name: filter.name.clone() }
    } else {
        Source::Lanes(found.to_vec())
    }
}
