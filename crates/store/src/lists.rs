//! How a list is answered: from which index its ids come, and what bounds them. The engines only run the queries.
//!
//! Every place where a job can stand keeps its ids in order per lane, so a page is the newest few of each lane and place, put
//! together; the cost does not grow with the history. Tags, schedules and correlation ids have narrow indexes of their own.

use faena_domain::{Fault, JobId, JobState};
use uuid::Uuid;

use crate::{
    Counts, Filter, Lane, LaneId, Page, Result, StoreError, Tally,
    plan::LabelKind,
    types::{CANCELLED, FAILED, PENDING, RETRYING},
};

/// Counting goes up to here where no counter knows the answer.
pub const COUNT_LIMIT: usize = 10_000;

pub enum Source {
    Nothing,
    Lanes(Vec<LaneId>),
    Label { kind: LabelKind, value: String },
    Correlation(String),
    Ids(Vec<JobId>),
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
    states: Vec<JobState>,
    lanes: Option<Vec<LaneId>>,
    offset: usize,
    limit: usize,
    bounded: bool,
}

impl Ask {
    /// `key_holders` finds the jobs that have a text as their unique or idempotency key.
    pub fn new(
        filter: &Filter,
        page: Page,
        lanes: &[Lane],
        key_holders: impl FnOnce(&str) -> Result<Vec<JobId>>,
    ) -> Result<Ask> {
        let by_name = filter.kind.is_some() || filter.queue.is_some() || filter.priority.is_some();
        let mut matching: Vec<&Lane> = lanes
            .iter()
            .filter(|lane| filter.kind.as_ref().is_none_or(|kind| *kind == lane.kind))
            .filter(|lane| filter.queue.as_ref().is_none_or(|queue| *queue == lane.queue))
            .filter(|lane| filter.priority.is_none_or(|priority| priority == lane.priority))
            .collect();
        let ids = |lanes: &[&Lane]| lanes.iter().map(|lane| lane.id).collect::<Vec<_>>();
        let restrict = by_name.then(|| ids(&matching));

        let source = if let Some(value) = &filter.tag {
            Source::Label { kind: LabelKind::Tag, value: value.clone() }
        } else if let Some(value) = &filter.schedule_id {
            Source::Label { kind: LabelKind::Schedule, value: value.clone() }
        } else if let Some(text) = &filter.correlation_id {
            Source::Correlation(text.clone())
        } else if let Some(text) = &filter.q {
            let mut holders = key_holders(text)?;
            holders.extend(Uuid::parse_str(text).ok().map(JobId));
            let needle = text.to_lowercase();
            matching.retain(|lane| {
                lane.kind.to_lowercase().contains(&needle) || lane.queue.to_lowercase().contains(&needle)
            });
            if !holders.is_empty() {
                holders.sort_unstable_by(|a, b| b.cmp(a));
                holders.dedup();
                Source::Ids(holders)
            } else if matching.is_empty() {
                Source::Correlation(text.clone())
            } else {
                Source::Lanes(ids(&matching))
            }
        } else if matching.is_empty() {
            Source::Nothing
        } else {
            Source::Lanes(ids(&matching))
        };
        let upper = filter.created_before.map_or(JobId(Uuid::max()), |at| JobId::first_at_ms(at.as_ms()));
        let from = filter.created_after.map_or(JobId(Uuid::nil()), |at| JobId::first_at_ms(at.as_ms()));
        let (offset, limit, before) = match page {
            Page::Offset { offset, limit } => (offset, limit, upper),
            Page::After { id, limit } => (0, limit, id.map_or(upper, |id| id.min(upper))),
        };
        if offset + limit > COUNT_LIMIT {
            return Err(StoreError::Invalid(vec![Fault::new(
                "page",
                format!("pages end at job {COUNT_LIMIT}; go on with cursor"),
            )]));
        }
        Ok(Ask {
            source,
            before,
            upper,
            from,
            wanted: offset + limit,
            states: filter.states.clone(),
            lanes: restrict,
            offset,
            limit,
            bounded: filter.created_after.is_some() || filter.created_before.is_some(),
        })
    }

    pub fn wants(&self, state: JobState) -> bool {
        self.states.is_empty() || self.states.contains(&state)
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
        let held = [JobState::Assigned, JobState::Processing].map(|state| self.wants(state));
        if self.bounded || held[0] != held[1] {
            return None;
        }
        let tallies: Vec<Tally> = JobState::ALL.into_iter().filter(|state| self.wants(*state)).map(Tally::of).collect();
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

    /// A job without a correlation id of its own has its id for one.
    pub fn own_correlation(&self, text: &str) -> Option<JobId> {
        Uuid::parse_str(text).ok().map(JobId)
    }

    pub fn matches(&self, state: JobState, lane: LaneId) -> bool {
        self.wants(state) && self.lanes.as_ref().is_none_or(|lanes| lanes.contains(&lane))
    }
}
