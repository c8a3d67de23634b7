//! Limits as a claim reads them: what is running, and what is left of a rate.
//!
//! Pure. Both engines read the numbers, decide here, and write what has changed.

use std::collections::{BTreeSet, HashMap};

use faena_domain::{Bucket, Limit, Rules, Scope, Timestamp};

use crate::{Lane, LaneId, Limited, StoredLimit};

/// A request that can start nothing immediately, and got nothing ahead, is repeated after this time.
pub const AHEAD_MS: i64 = 50;

/// A limit as a claim reads it.
#[derive(Clone, Debug)]
pub struct ClaimLimit {
    scope: Scope,
    limit: Limit,
    in_flight: usize,
    bucket: Option<Bucket>,
    reached_at: Option<Timestamp>,
    /// What the current request may still take.
    allowed: usize,
    pub taken: usize,
    /// Whether it delayed a job.
    cut: bool,
    now: Timestamp,
}

impl ClaimLimit {
    pub fn new(scope: Scope, limit: Limit, in_flight: usize, bucket: Option<Bucket>, now: Timestamp) -> ClaimLimit {
        let bucket = limit.rate.map(|rate| rate.refilled(bucket, now));
        ClaimLimit { scope, limit, in_flight, bucket, reached_at: None, allowed: usize::MAX, taken: 0, cut: false, now }
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
    pub fn free(&self) -> usize {
        self.limit.concurrency.map_or(usize::MAX, |most| (most as usize).saturating_sub(self.in_flight + self.taken))
    }

    pub fn tokens(&self) -> usize {
        self.bucket.map_or(usize::MAX, |bucket| bucket.available().saturating_sub(self.taken))
    }

    /// Begins a request. What it claims ahead of what can start immediately must leave room for other requests.
    pub fn begin(&mut self, at_once: usize) {
        self.allowed = at_once.max(self.free() / 4);
    }

    pub fn room(&self) -> usize {
        let allowed = if self.limit.concurrency.is_some() { self.allowed } else { usize::MAX };
        self.free().min(self.tokens()).min(allowed)
    }

    pub fn take(&mut self, count: usize) {
        self.taken += count;
        self.allowed = self.allowed.saturating_sub(count);
    }

    pub fn give_back(&mut self, count: usize) {
        self.taken = self.taken.saturating_sub(count);
    }

    pub fn left(&self) -> Option<Bucket> {
        self.bucket.map(|bucket| bucket.without(self.taken))
    }

    /// Returns when the limit allows the next job, if that depends on time.
    pub fn opens_at(&self) -> Option<Timestamp> {
        if self.free() == 0 {
            return None;
        }
        if self.tokens() > 0 {
            // A worker that got something asks again when that has ended.
            return (self.room() == 0 && self.taken == 0).then(|| self.now.plus_ms(AHEAD_MS));
        }
        self.limit.rate.zip(self.left()).map(|(rate, bucket)| rate.next_at(bucket))
    }

    /// Returns a text for people, with current values: `queue mail: 2 of 2 running`.
    pub fn text(&self) -> String {
        limit_text(&self.scope, &self.limit, self.in_flight + self.taken, self.left())
    }
}

/// Describes a limit for people: `queue mail: 2 of 2 running`, `type x: rate of 10 starts per 1000 ms`.
pub fn limit_text(scope: &Scope, limit: &Limit, running: usize, bucket: Option<Bucket>) -> String {
    let full = limit.concurrency.filter(|most| running >= *most as usize);
    match (full, limit.concurrency, limit.rate) {
        (None, _, Some(rate)) if bucket.is_none_or(|bucket| bucket.available() == 0) => {
            format!("{scope}: rate of {rate}")
        }
        (_, Some(most), _) => format!("{scope}: {running} of {most} running"),
        (_, None, Some(rate)) => format!("{scope}: rate of {rate}"),
        (_, None, None) => format!("{scope}: no limit"),
    }
}

/// The limits of the system, queues and types that apply to the lanes of a claim.
#[derive(Clone, Debug, Default)]
pub struct ClaimLimits {
    claim_limits: Vec<ClaimLimit>,
    of_lane: HashMap<LaneId, Vec<usize>>,
}

/// Change of the row of a limit.
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
        let of_lane = lanes.into_iter().map(|lane| {
            let holds = |claim_limit: &ClaimLimit| applies_to(&claim_limit.scope, lane);
            (lane.id, (0..claim_limits.len()).filter(|at| holds(&claim_limits[*at])).collect())
        });
        ClaimLimits { of_lane: of_lane.collect(), claim_limits }
    }

    /// Begins another request.
    pub fn begin(&mut self, at_once: usize) {
        self.claim_limits.iter_mut().for_each(|claim_limit| claim_limit.begin(at_once));
    }

    pub fn of(&self, lane: LaneId) -> &[usize] {
        self.of_lane.get(&lane).map_or(&[], Vec::as_slice)
    }

    pub fn room(&self, lane: LaneId) -> usize {
        self.of(lane).iter().map(|at| self.claim_limits[*at].room()).min().unwrap_or(usize::MAX)
    }

    pub fn take(&mut self, lane: LaneId, count: usize) {
        for at in self.of_lane.get(&lane).into_iter().flatten() {
            self.claim_limits[*at].take(count);
        }
    }

    /// Returns room: a lane had fewer jobs than it might have given.
    pub fn give_back(&mut self, lane: LaneId, count: usize) {
        for at in self.of_lane.get(&lane).into_iter().flatten() {
            self.claim_limits[*at].give_back(count);
        }
    }

    /// Marks a lane that has, or may have, jobs that its limits do not allow now.
    pub fn hold_back(&mut self, lane: LaneId) -> Limited {
        let mut until: Option<Timestamp> = None;
        let mut by_time_only = true;
        for at in self.of_lane.get(&lane).into_iter().flatten() {
            let claim_limit = &mut self.claim_limits[*at];
            if claim_limit.room() == 0 {
                // Claiming ahead does not mean that the limit is reached.
                claim_limit.cut |= claim_limit.free() == 0 || claim_limit.tokens() == 0;
                match claim_limit.opens_at() {
                    Some(at) => until = until.max(Some(at)),
                    None => by_time_only = false,
                }
            }
        }
        Limited { lane, until: until.filter(|_| by_time_only) }
    }

    /// Returns whether only the bound on claiming ahead limits this lane.
    pub fn has_room_for_others(&self, lane: LaneId) -> bool {
        let claim_limits = || self.of(lane).iter().map(|at| &self.claim_limits[*at]);
        claim_limits().any(|claim_limit| claim_limit.room() == 0)
            && claim_limits().all(|claim_limit| claim_limit.free() > 0 && claim_limit.tokens() > 0)
    }

    /// Returns since when a job that became ready at `ready_at` had to wait, and for which limit.
    pub fn waited(&self, lane: LaneId, ready_at: Timestamp) -> Option<(Timestamp, String)> {
        self.of(lane).iter().map(|at| &self.claim_limits[*at]).find_map(|claim_limit| {
            let reached_at = claim_limit.reached_at.filter(|at| *at >= ready_at)?;
            Some((reached_at, reached_text(&claim_limit.scope, &claim_limit.limit, claim_limit.bucket)))
        })
    }

    /// Returns the changes to write. If nothing else changes, the time at which a limit was reached is written once a
    /// second.
    pub fn changes(&self, now: Timestamp) -> Vec<LimitChange> {
        let mut changes = Vec::new();
        for claim_limit in &self.claim_limits {
            let stale = claim_limit.reached_at.is_none_or(|at| now.ms_since(at) >= 1_000 || claim_limit.taken > 0);
            let reached = claim_limit.cut && stale;
            if reached || (claim_limit.taken > 0 && claim_limit.bucket.is_some()) {
                let reached_at = if reached { Some(now) } else { claim_limit.reached_at };
                changes.push(LimitChange { scope: claim_limit.scope.clone(), bucket: claim_limit.left(), reached_at });
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
        Scope::Key(_) => false,
    }
}

/// Returns since when a job that became ready at `ready_at` waits, and for which of these limits.
pub fn waits_for(limits: &[StoredLimit], lane: &Lane, ready_at: Timestamp) -> Option<(Timestamp, String)> {
    limits.iter().filter(|stored| applies_to(&stored.scope, lane) && !stored.limit.is_none()).find_map(|stored| {
        let reached_at = stored.reached_at.filter(|at| *at >= ready_at)?;
        Some((reached_at, reached_text(&stored.scope, &stored.limit, stored.bucket)))
    })
}

/// Describes a limit as it was when it was reached, whatever has ended since.
fn reached_text(scope: &Scope, limit: &Limit, bucket: Option<Bucket>) -> String {
    let out_of_tokens = bucket.is_some_and(|bucket| bucket.available() == 0);
    let running = limit.concurrency.filter(|_| !out_of_tokens).unwrap_or(0);
    limit_text(scope, limit, running as usize, bucket)
}
