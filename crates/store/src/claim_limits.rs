//! Limits as seen by a claim: jobs in flight and tokens left in each rate bucket.
//!
//! No I/O: the SQLite and PostgreSQL stores read the numbers, call this module to decide, and write the changes.

use std::collections::{BTreeSet, HashMap};

use faena_domain::{Bucket, Limit, LogDetails, Rate, Rules, Scope, Timestamp};

use crate::{Lane, LaneId, Limited, StoredLimit};

/// Delay before the next claim request, if this one got no jobs only because of the bound on prefetching.
///
/// Prefetching is claiming more jobs than there are idle slots.
pub const PREFETCH_RETRY_MS: i64 = 50;

/// A limit as a claim reads it.
#[derive(Clone, Debug)]
pub struct ClaimLimit {
    scope: Scope,
    limit: Limit,
    in_flight: usize,
    bucket: Option<Bucket>,
    reached_at: Option<Timestamp>,
    /// Number of jobs that the current request may still claim, including prefetched jobs.
    allowed: usize,
    pub taken: usize,
    delayed_a_job: bool,
    now: Timestamp,
}

impl ClaimLimit {
    pub fn new(scope: Scope, limit: Limit, in_flight: usize, bucket: Option<Bucket>, now: Timestamp) -> ClaimLimit {
        let bucket = limit.rate.map(|rate| rate.refilled(bucket, now));
        ClaimLimit {
            scope,
            limit,
            in_flight,
            bucket,
            reached_at: None,
            allowed: usize::MAX,
            taken: 0,
            delayed_a_job: false,
            now,
        }
    }

    pub fn stored(stored: StoredLimit, in_flight: usize, now: Timestamp) -> ClaimLimit {
        let claim_limit = ClaimLimit::new(stored.scope, stored.limit, in_flight, stored.bucket, now);
        ClaimLimit { reached_at: stored.reached_at, ..claim_limit }
    }

    pub fn of_key(rules: &Rules, key: String, in_flight: usize, bucket: Option<Bucket>, now: Timestamp) -> ClaimLimit {
        let limit = rules.key_limit(&key).unwrap_or_default();
        ClaimLimit::new(Scope::Key(key), limit, in_flight, bucket, now)
    }

    /// Returns how many more jobs may be in flight.
    pub fn free_concurrency(&self) -> usize {
        self.limit.concurrency.map_or(usize::MAX, |max| (max as usize).saturating_sub(self.in_flight + self.taken))
    }

    pub fn tokens(&self) -> usize {
        self.bucket.map_or(usize::MAX, |bucket| bucket.available().saturating_sub(self.taken))
    }

    /// Begins a request. Bounds how many jobs it may prefetch, so that other requests also get some.
    pub fn begin(&mut self, idle_slots: usize) {
        self.allowed = idle_slots.max(self.free_concurrency() / 4);
    }

    /// Returns how many more jobs the current request may claim.
    pub fn room(&self) -> usize {
        let allowed = if self.limit.concurrency.is_some() { self.allowed } else { usize::MAX };
        self.free_concurrency().min(self.tokens()).min(allowed)
    }

    pub fn take(&mut self, count: usize) {
        self.taken += count;
        self.allowed = self.allowed.saturating_sub(count);
    }

    pub fn release(&mut self, count: usize) {
        self.taken = self.taken.saturating_sub(count);
    }

    pub fn remaining_bucket(&self) -> Option<Bucket> {
        self.bucket.map(|bucket| bucket.without(self.taken))
    }

    /// Returns when the limit allows the next job; `None` if that depends on a job that must end first.
    pub fn next_allowed_at(&self) -> Option<Timestamp> {
        if self.free_concurrency() == 0 {
            return None;
        }
        if self.tokens() > 0 {
            // A worker that got jobs sends its next request when they finish.
            return (self.room() == 0 && self.taken == 0).then(|| self.now.plus_ms(PREFETCH_RETRY_MS));
        }
        self.limit.rate.zip(self.remaining_bucket()).map(|(rate, bucket)| rate.next_at(bucket))
    }

    /// Describes the limit with its current values: `queue mail: 2 of 2 running`.
    pub fn description(&self) -> String {
        limit_text(&self.scope, &self.limit, self.in_flight + self.taken, self.remaining_bucket())
    }
}

/// Describes a limit: `queue mail: 2 of 2 running`, `type x: rate of 10 starts per 1 s`.
pub fn limit_text(scope: &Scope, limit: &Limit, running: usize, bucket: Option<Bucket>) -> String {
    let full = limit.concurrency.filter(|max| running >= *max as usize);
    let by_rate =
        |rate: Rate| LogDetails::LimitedByRate { scope: &scope.to_string(), rate: &rate.to_string() }.to_string();
    match (full, limit.concurrency, limit.rate) {
        (None, _, Some(rate)) if bucket.is_none_or(|bucket| bucket.available() == 0) => by_rate(rate),
        (_, Some(max), _) => {
            let (scope, running, max) = (&scope.to_string(), running as u64, u64::from(max));
            LogDetails::Limited { scope, running, max }.to_string()
        }
        (_, None, Some(rate)) => by_rate(rate),
        (_, None, None) => format!("{scope}: no limit"),
    }
}

/// The limits of the system, queues and types that apply to the lanes of a claim.
#[derive(Clone, Debug, Default)]
pub struct ClaimLimits {
    claim_limits: Vec<ClaimLimit>,
    /// Indexes into `claim_limits`.
    by_lane: HashMap<LaneId, Vec<usize>>,
}

/// New values for the row of a limit.
#[derive(Clone, PartialEq, Debug)]
pub struct LimitChange {
    pub scope: Scope,
    pub bucket: Option<Bucket>,
    pub reached_at: Option<Timestamp>,
}

impl ClaimLimits {
    /// Returns the scopes whose limits apply to these lanes, in the order in which they are locked.
    pub fn scopes<'a>(rules: &Rules, lanes: impl IntoIterator<Item = &'a Lane>) -> Vec<Scope> {
        let scopes: BTreeSet<Scope> = lanes
            .into_iter()
            .flat_map(|lane| rules.lane_limits(&lane.queue, &lane.kind))
            .map(|(scope, _)| scope)
            .collect();
        scopes.into_iter().collect()
    }

    pub fn new<'a>(claim_limits: Vec<ClaimLimit>, lanes: impl IntoIterator<Item = &'a Lane>) -> ClaimLimits {
        let by_lane = lanes.into_iter().map(|lane| {
            let applies = |claim_limit: &ClaimLimit| applies_to(&claim_limit.scope, lane);
            (lane.id, (0..claim_limits.len()).filter(|index| applies(&claim_limits[*index])).collect())
        });
        ClaimLimits { by_lane: by_lane.collect(), claim_limits }
    }

    /// Begins another request.
    pub fn begin(&mut self, idle_slots: usize) {
        self.claim_limits.iter_mut().for_each(|claim_limit| claim_limit.begin(idle_slots));
    }

    pub fn limit_indexes(&self, lane: LaneId) -> &[usize] {
        self.by_lane.get(&lane).map_or(&[], Vec::as_slice)
    }

    pub fn room(&self, lane: LaneId) -> usize {
        self.limit_indexes(lane).iter().map(|index| self.claim_limits[*index].room()).min().unwrap_or(usize::MAX)
    }

    pub fn take(&mut self, lane: LaneId, count: usize) {
        for index in self.by_lane.get(&lane).into_iter().flatten() {
            self.claim_limits[*index].take(count);
        }
    }

    /// Releases capacity that `take` reserved, because the lane had fewer jobs than that.
    pub fn release(&mut self, lane: LaneId, count: usize) {
        for index in self.by_lane.get(&lane).into_iter().flatten() {
            self.claim_limits[*index].release(count);
        }
    }

    /// Records which limits delay a lane, and returns until when.
    ///
    /// Call it when the lane has, or may have, jobs that its limits do not allow.
    pub fn mark_limited(&mut self, lane: LaneId) -> Limited {
        let mut until: Option<Timestamp> = None;
        let mut by_time_only = true;
        for index in self.by_lane.get(&lane).into_iter().flatten() {
            let claim_limit = &mut self.claim_limits[*index];
            if claim_limit.room() == 0 {
                // The bound on prefetching alone does not mean that the limit is reached.
                claim_limit.delayed_a_job |= claim_limit.free_concurrency() == 0 || claim_limit.tokens() == 0;
                match claim_limit.next_allowed_at() {
                    Some(at) => until = until.max(Some(at)),
                    None => by_time_only = false,
                }
            }
        }
        Limited { lane, until: until.filter(|_| by_time_only) }
    }

    /// Returns whether the bound on prefetching limits this lane, and nothing else does.
    pub fn is_limited_by_prefetch_only(&self, lane: LaneId) -> bool {
        let claim_limits = || self.limit_indexes(lane).iter().map(|index| &self.claim_limits[*index]);
        claim_limits().any(|claim_limit| claim_limit.room() == 0)
            && claim_limits().all(|claim_limit| claim_limit.free_concurrency() > 0 && claim_limit.tokens() > 0)
    }

    /// Returns when a job that became ready at `ready_at` began to wait for a limit, and a description of that limit.
    pub fn wait_cause(&self, lane: LaneId, ready_at: Timestamp) -> Option<(Timestamp, String)> {
        self.limit_indexes(lane).iter().map(|index| &self.claim_limits[*index]).find_map(|claim_limit| {
            let reached_at = claim_limit.reached_at.filter(|at| *at >= ready_at)?;
            Some((reached_at, describe_when_reached(&claim_limit.scope, &claim_limit.limit, claim_limit.bucket)))
        })
    }

    /// Returns the changes to write. `reached_at` alone is written at most once a second.
    pub fn changes(&self, now: Timestamp) -> Vec<LimitChange> {
        let mut changes = Vec::new();
        for claim_limit in &self.claim_limits {
            let stale = claim_limit.reached_at.is_none_or(|at| now.ms_since(at) >= 1_000 || claim_limit.taken > 0);
            let reached = claim_limit.delayed_a_job && stale;
            if reached || (claim_limit.taken > 0 && claim_limit.bucket.is_some()) {
                let reached_at = if reached { Some(now) } else { claim_limit.reached_at };
                changes.push(LimitChange {
                    scope: claim_limit.scope.clone(),
                    bucket: claim_limit.remaining_bucket(),
                    reached_at,
                });
            }
        }
        changes
    }
}

/// Returns whether a limit counts the jobs of a lane.
pub fn applies_to(scope: &Scope, lane: &Lane) -> bool {
    match scope {
        Scope::System => true,
        Scope::Queue(name) => *name == lane.queue,
        Scope::Type(name) => *name == lane.kind,
        Scope::Key(_) | Scope::Machine(_) => false,
    }
}

/// Returns the same as [`ClaimLimits::wait_cause`], for limits as they are stored.
pub fn stored_wait_cause(limits: &[StoredLimit], lane: &Lane, ready_at: Timestamp) -> Option<(Timestamp, String)> {
    limits.iter().filter(|stored| applies_to(&stored.scope, lane) && !stored.limit.is_none()).find_map(|stored| {
        let reached_at = stored.reached_at.filter(|at| *at >= ready_at)?;
        Some((reached_at, describe_when_reached(&stored.scope, &stored.limit, stored.bucket)))
    })
}

/// Describes a limit as it was when it was reached, even if jobs have finished since.
fn describe_when_reached(scope: &Scope, limit: &Limit, bucket: Option<Bucket>) -> String {
    let out_of_tokens = bucket.is_some_and(|bucket| bucket.available() == 0);
    let running = limit.concurrency.filter(|_| !out_of_tokens).unwrap_or(0);
    limit_text(scope, limit, running as usize, bucket)
}
