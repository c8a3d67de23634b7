//! What limits let through: a gate is one limit as a claim finds it, with what is running and what is left of its rate.
//!
//! Pure; both engines read the numbers, ask here, and write down what has changed.

use std::collections::{BTreeSet, HashMap};

use faena_domain::{Bucket, Limit, Rules, Scope, Timestamp};

use crate::{Lane, LaneId, Limited, StoredLimit};

/// Who can start nothing at once and was given nothing ahead asks again after this time.
pub const AHEAD_MS: i64 = 50;

/// A limit as a claim finds it.
#[derive(Clone, Debug)]
pub struct ClaimLimit {
    scope: Scope,
    limit: Limit,
    held: usize,
    bucket: Option<Bucket>,
    reached_at: Option<Timestamp>,
    /// What the ask that is served now may take besides.
    allowed: usize,
    pub taken: usize,
    /// It held a job back.
    cut: bool,
    now: Timestamp,
}

impl ClaimLimit {
    pub fn new(scope: Scope, limit: Limit, held: usize, bucket: Option<Bucket>, now: Timestamp) -> ClaimLimit {
        let bucket = limit.rate.map(|rate| rate.refilled(bucket, now));
        ClaimLimit { scope, limit, held, bucket, reached_at: None, allowed: usize::MAX, taken: 0, cut: false, now }
    }

    pub fn stored(stored: StoredLimit, held: usize, now: Timestamp) -> ClaimLimit {
        let claim_limit = ClaimLimit::new(stored.scope, stored.limit, held, stored.bucket, now);
        ClaimLimit { reached_at: stored.reached_at, ..claim_limit }
    }

    pub fn of_key(rules: &Rules, key: String, held: usize, bucket: Option<Bucket>, now: Timestamp) -> ClaimLimit {
        let limit = rules.key_limit(&key).unwrap_or_default();
        ClaimLimit::new(Scope::Key(key), limit, held, bucket, now)
    }

    /// How many more may be in hands at once.
    pub fn free(&self) -> usize {
        self.limit.concurrency.map_or(usize::MAX, |most| (most as usize).saturating_sub(self.held + self.taken))
    }

    pub fn tokens(&self) -> usize {
        self.bucket.map_or(usize::MAX, |bucket| bucket.available().saturating_sub(self.taken))
    }

    /// What is claimed ahead of what can start at once must leave room for others.
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

    /// When it lets the next one go, if that hangs on time.
    pub fn opens_at(&self) -> Option<Timestamp> {
        if self.free() == 0 {
            return None;
        }
        if self.tokens() > 0 {
            // Whoever was given something asks again when that has ended.
            return (self.room() == 0 && self.taken == 0).then(|| self.now.plus_ms(AHEAD_MS));
        }
        self.limit.rate.zip(self.left()).map(|(rate, bucket)| rate.next_at(bucket))
    }

    /// For people, with real values: `queue mail: 2 of 2 running`.
    pub fn text(&self) -> String {
        limit_text(&self.scope, &self.limit, self.held + self.taken, self.left())
    }
}

/// What is held by a limit, for people: `queue mail: 2 of 2 running`, `type x: rate of 10 starts per 1000 ms`.
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

/// What a claim writes into a limit's row.
#[derive(Clone, PartialEq, Debug)]
pub struct LimitChange {
    pub scope: Scope,
    pub bucket: Option<Bucket>,
    pub reached_at: Option<Timestamp>,
}

impl ClaimLimits {
    /// The scopes whose limits a claim of these lanes has to look at, in the order in which they are locked.
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

    /// From here on another ask is served.
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

    /// Less was there than a lane might have given.
    pub fn give_back(&mut self, lane: LaneId, count: usize) {
        for at in self.of_lane.get(&lane).into_iter().flatten() {
            self.claim_limits[*at].give_back(count);
        }
    }

    /// This lane has, or may have, jobs that its gates do not let through now.
    pub fn hold_back(&mut self, lane: LaneId) -> Limited {
        let mut until: Option<Timestamp> = None;
        let mut by_time_only = true;
        for at in self.of_lane.get(&lane).into_iter().flatten() {
            let claim_limit = &mut self.claim_limits[*at];
            if claim_limit.room() == 0 {
                // What was claimed ahead is no reason to say that the limit is reached.
                claim_limit.cut |= claim_limit.free() == 0 || claim_limit.tokens() == 0;
                match claim_limit.opens_at() {
                    Some(at) => until = until.max(Some(at)),
                    None => by_time_only = false,
                }
            }
        }
        Limited { lane, until: until.filter(|_| by_time_only) }
    }

    /// Whether nothing but what may be claimed ahead holds this lane back.
    pub fn has_room_for_others(&self, lane: LaneId) -> bool {
        let claim_limits = || self.of(lane).iter().map(|at| &self.claim_limits[*at]);
        claim_limits().any(|claim_limit| claim_limit.room() == 0)
            && claim_limits().all(|claim_limit| claim_limit.free() > 0 && claim_limit.tokens() > 0)
    }

    /// Since when a job of this lane that has been ready since `ready_at` had to wait for which limit.
    pub fn waited(&self, lane: LaneId, ready_at: Timestamp) -> Option<(Timestamp, String)> {
        self.of(lane).iter().map(|at| &self.claim_limits[*at]).find_map(|claim_limit| {
            let reached_at = claim_limit.reached_at.filter(|at| *at >= ready_at)?;
            Some((reached_at, reached_text(&claim_limit.scope, &claim_limit.limit, claim_limit.bucket)))
        })
    }

    /// What is to be written. That a limit was reached is told once a second if nothing else is written.
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

/// Whether a limit counts the jobs of a lane.
pub fn applies_to(scope: &Scope, lane: &Lane) -> bool {
    match scope {
        Scope::System => true,
        Scope::Queue(name) => *name == lane.queue,
        Scope::Type(name) => *name == lane.kind,
        Scope::Key(_) => false,
    }
}

/// Since when a job that is ready since `ready_at` waits for which of these limits.
pub fn waits_for(limits: &[StoredLimit], lane: &Lane, ready_at: Timestamp) -> Option<(Timestamp, String)> {
    limits.iter().filter(|stored| applies_to(&stored.scope, lane) && !stored.limit.is_none()).find_map(|stored| {
        let reached_at = stored.reached_at.filter(|at| *at >= ready_at)?;
        Some((reached_at, reached_text(&stored.scope, &stored.limit, stored.bucket)))
    })
}

/// It was full when it was reached, whatever has ended since.
fn reached_text(scope: &Scope, limit: &Limit, bucket: Option<Bucket>) -> String {
    let out_of_tokens = bucket.is_some_and(|bucket| bucket.available() == 0);
    let running = limit.concurrency.filter(|_| !out_of_tokens).unwrap_or(0);
    limit_text(scope, limit, running as usize, bucket)
}
