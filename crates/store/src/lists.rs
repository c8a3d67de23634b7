//! How a list is answered: from which index its ids come, and what bounds them. The engines only run the queries.
//!
//! Every place where a job can stand keeps its ids in order per lane, so a page is the newest few of each lane and place, put
//! together; the cost does not grow with the history. Tags, schedules and correlation ids have narrow indexes of their own.

use faena_domain::{Fault, JobId, JobOptions, JobState};
use uuid::Uuid;

use crate::{
    Counts, Filter, Lane, LaneId, Page, Result, StoreError, Tally,
    plan::LabelKind,
    types::{CANCELLED, FAILED, PENDING, RETRYING},
};

/// Counting goes up to here where no counter knows the answer.
pub const COUNT_LIMIT: usize = 10_000;

pub enum Source {
    /// The newest few of each lane and place.
    Lanes(Vec<LaneId>),
    Label {
        kind: LabelKind,
        value: String,
    },
    Correlation(String),
}

pub struct Ask {
    pub source: Source,
    /// Ids below this one, the cursor included.
    pub before: JobId,
    /// Ids below this one, without the cursor.
    pub upper: JobId,
    pub from: JobId,
    /// How many ids each index has to give.
    pub wanted: usize,
    filter: Filter,
    /// The lanes that the filter's type, queue and priority leave.
    lanes: Vec<LaneId>,
    /// Those of them whose names the search finds.
    found: Vec<LaneId>,
    offset: usize,
    limit: usize,
}

/// What a job's own row says, as far as filters ask for it.
pub struct Candidate<'a> {
    pub id: JobId,
    pub state: JobState,
    pub lane: LaneId,
    pub correlation: Option<&'a str>,
    pub options: &'a JobOptions,
}

impl Ask {
    pub fn new(filter: &Filter, page: Page, lanes: &[Lane]) -> Result<Ask> {
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
        let source = if let Some(value) = &filter.tag {
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
        let (offset, limit, before) = match page {
            Page::Offset { offset, limit } => (offset, limit, upper),
            Page::After { id, limit } => (0, limit, id.map_or(upper, |id| id.min(upper))),
        };
        let wanted = offset.saturating_add(limit);
        if wanted > COUNT_LIMIT {
            return Err(StoreError::Invalid(vec![Fault::new(
                "page",
                format!("pages end at job {COUNT_LIMIT}; go on with cursor"),
            )]));
        }
        let lanes = matching.iter().map(|lane| lane.id).collect();
        Ok(Ask { source, before, upper, from, wanted, filter: filter.clone(), lanes, found, offset, limit })
    }

    /// The text that may be a whole key, id or correlation id, when the ids come from the lanes.
    pub fn search(&self) -> Option<&str> {
        match self.source {
            Source::Lanes(_) => self.filter.q.as_deref(),
            _ => None,
        }
    }

    pub fn wants(&self, state: JobState) -> bool {
        self.filter.states.is_empty() || self.filter.states.contains(&state)
    }

    pub fn wants_held(&self) -> bool {
        [JobState::Scheduled, JobState::Assigned, JobState::Processing].into_iter().any(|state| self.wants(state))
    }

    /// The queries of the places that can hold what is asked for.
    pub fn places(
        &self,
        ready: &str,
        waiting: impl Fn(i16) -> String,
        done: &str,
        ended: impl Fn(i16) -> String,
    ) -> Vec<String> {
        let mut queries = Vec::new();
        if self.wants(JobState::Queued) {
            queries.push(ready.to_owned());
        }
        for (state, code) in [(JobState::Pending, PENDING), (JobState::Retrying, RETRYING)] {
            if self.wants(state) {
                queries.push(waiting(code));
            }
        }
        if self.wants(JobState::Completed) {
            queries.push(done.to_owned());
        }
        for (state, code) in [(JobState::Failed, FAILED), (JobState::Cancelled, CANCELLED)] {
            if self.wants(state) {
                queries.push(ended(code));
            }
        }
        queries
    }

    /// The exact total, where the counters know it.
    pub fn counted(&self, counts: &Counts, lanes: &[LaneId]) -> Option<u64> {
        // These share a counter.
        let held = [JobState::Scheduled, JobState::Assigned, JobState::Processing].map(|state| self.wants(state));
        let bounded = self.filter.created_after.is_some() || self.filter.created_before.is_some();
        if bounded || held.contains(&true) && held.contains(&false) {
            return None;
        }
        let states = JobState::ALL.into_iter().filter(|state| self.wants(*state));
        let tallies: Vec<Tally> = states.map(Tally::of).collect();
        let total: i64 = counts
            .by_lane
            .iter()
            .filter(|((lane, tally), _)| lanes.contains(lane) && tallies.contains(tally))
            .map(|(_, n)| n)
            .sum();
        Some(u64::try_from(total).unwrap_or(0))
    }

    /// Newest first, without what comes before the page.
    pub fn cut_sorted(&self, mut ids: Vec<JobId>) -> Vec<JobId> {
        ids.sort_unstable_by(|a, b| b.cmp(a));
        ids.dedup();
        self.cut(ids)
    }

    pub fn cut(&self, ids: Vec<JobId>) -> Vec<JobId> {
        ids.into_iter().skip(self.offset).take(self.limit).collect()
    }

    pub fn next(&self, page: &[JobId]) -> Option<JobId> {
        if page.len() == self.limit { page.last().copied() } else { None }
    }

    /// Whether a job has everything that is asked for.
    pub fn matches(&self, job: &Candidate) -> bool {
        let Filter { tag, schedule_id, correlation_id, q, .. } = &self.filter;
        let own = job.id.to_string();
        let correlation = job.correlation.unwrap_or(&own);
        let options = job.options;
        let is = |value: &Option<String>, text: &str| value.as_deref() == Some(text);
        self.wants(job.state)
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

    /// Whether the lanes of the search give this job anyway.
    pub fn is_in_lanes(&self, lane: LaneId) -> bool {
        self.found.contains(&lane)
    }

    pub fn is_on_page(&self, id: JobId) -> bool {
        id < self.before
    }
}
