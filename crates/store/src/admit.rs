//! Decides which jobs a claim may take under limits. The SQLite and PostgreSQL stores read the rows and write the changes.
//!
//! A claim must respect the limits of the system, the queue and the type of a lane and, in a keyed lane, the limit of the key
//! (`claim_limits.rs`). Jobs beyond a limit stay where they are. The key queue of a key at its limit is closed, so that the
//! next claim does not read it, and is opened when a job of the key ends.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
};

use faena_domain::{Bucket, Fairness, JobId, Rules, Scope, Timestamp};
use parking_lot::Mutex;

use crate::{
    ClaimResult, Lane, LaneId, Limited,
    claim_limits::{ClaimLimit, ClaimLimits},
    fair_share::{Candidate, select_fairly},
};

/// Longest time for which a key queue stays closed because of its rate. The limit may have changed while it was closed.
const LONGEST_WAIT_MS: i64 = 60_000;

/// Delay before key queues that another claim has locked are read again.
pub const BUSY_MS: i64 = 10;

/// Result of a request under limits.
#[derive(Default)]
pub struct LimitedClaim {
    pub claim: ClaimResult,
    /// Lanes from which this request may not prefetch more jobs. Requests with idle slots may still claim from them.
    pub prefetch_limited: Vec<LaneId>,
}

impl From<ClaimResult> for LimitedClaim {
    fn from(claim: ClaimResult) -> LimitedClaim {
        LimitedClaim { claim, prefetch_limited: Vec::new() }
    }
}

/// Returns when a job of a key queue began to wait for a limit, and a description of that limit.
pub fn key_queue_wait_cause(limited: Option<(i64, String)>, ready_at: Timestamp) -> Option<(Timestamp, String)> {
    let (at, by) = limited?;
    (at >= ready_at.as_ms()).then(|| (Timestamp::from_ms(at), by))
}

/// A key queue that a claim reads.
#[derive(Clone, Debug)]
pub struct OpenKeyQueue {
    pub lane: LaneId,
    pub key: i64,
    /// Position in the order of the key queues of a lane: the ready time of its first job or, in a fair queue, when it was last
    /// served.
    pub rank: i64,
    /// When it last began to wait for a limit, and a description of that limit.
    pub limited: Option<(i64, String)>,
}

/// A ready job that a claim may choose. `key` is `None` in a lane without keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadyJob {
    pub lane: LaneId,
    pub key: Option<i64>,
    pub ready_at: Timestamp,
    pub id: JobId,
}

/// A key queue with the jobs that were read from it.
#[derive(Debug)]
struct ReadKeyQueue {
    key_queue: OpenKeyQueue,
    requested: usize,
    jobs: Vec<(Timestamp, JobId)>,
    taken: usize,
}

/// Change of the row of a key queue.
#[derive(Clone, PartialEq, Debug)]
pub struct KeyQueueChange {
    pub lane: LaneId,
    pub key: i64,
    /// New rank. `None`: the ready time of its first job.
    pub rank: Option<i64>,
    pub open: bool,
    /// When its rate allows the next start.
    pub opens_at: Option<i64>,
    pub limited: Option<(i64, String)>,
}

/// How many jobs to read from a key queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRequest {
    pub lane: LaneId,
    pub key: i64,
    pub count: usize,
}

/// Times at which fair queues last served their jobs without a key, by queue.
///
/// Kept only in memory: another node, or this one after a restart, begins with the ready time of the first such job.
#[derive(Default)]
pub struct RoundRobin {
    served: Mutex<HashMap<String, i64>>,
    claims: AtomicUsize,
}

impl RoundRobin {
    /// Returns which queue is served first; it changes from claim to claim.
    fn next(&self) -> usize {
        self.claims.fetch_add(1, Ordering::Relaxed)
    }
}

/// One request under the limits.
pub struct Admission<'a> {
    pub claim_limits: &'a mut ClaimLimits,
    lanes: HashMap<LaneId, Lane>,
    rules: &'a Rules,
    round_robin: &'a RoundRobin,
    /// Which queue is served first.
    first_queue: usize,
    limit: usize,
    now: Timestamp,
    keys: HashMap<i64, ClaimLimit>,
    key_queues: BTreeMap<(LaneId, i64), ReadKeyQueue>,
    /// Key queues without jobs.
    empty: Vec<(LaneId, i64)>,
    /// Ready jobs of lanes without keys.
    plain: Vec<(LaneId, Timestamp, JobId)>,
    chosen: Vec<ReadyJob>,
    limited: BTreeMap<LaneId, Option<Timestamp>>,
}

impl<'a> Admission<'a> {
    pub fn new(
        claim_limits: &'a mut ClaimLimits,
        lanes: impl IntoIterator<Item = Lane>,
        (rules, round_robin): (&'a Rules, &'a RoundRobin),
        (limit, idle_slots): (usize, usize),
        now: Timestamp,
    ) -> Admission<'a> {
        claim_limits.begin(idle_slots);
        Admission {
            claim_limits,
            lanes: lanes.into_iter().map(|lane| (lane.id, lane)).collect(),
            rules,
            round_robin,
            first_queue: round_robin.next(),
            limit,
            now,
            keys: HashMap::new(),
            key_queues: BTreeMap::new(),
            empty: Vec::new(),
            plain: Vec::new(),
            chosen: Vec::new(),
            limited: BTreeMap::new(),
        }
    }

    /// Returns the lanes whose limits allow at least one start; the others are marked as limited.
    pub fn open_lanes(&mut self) -> Vec<Lane> {
        let mut open: Vec<Lane> = self.lanes.values().cloned().collect();
        open.sort_by_key(|lane| lane.id);
        open.retain(|lane| {
            if self.claim_limits.room(lane.id) > 0 {
                return true;
            }
            let Limited { lane, until } = self.claim_limits.mark_limited(lane.id);
            self.limited.insert(lane, until);
            false
        });
        open
    }

    /// Returns how many ready jobs of a lane without keys to read: one more than may start, to see whether any is
    /// delayed.
    pub fn plain_jobs_wanted(&self, lane: LaneId) -> usize {
        self.limit.min(self.claim_limits.room(lane).saturating_add(1))
    }

    pub fn add_plain_job(&mut self, lane: LaneId, ready_at: Timestamp, id: JobId) {
        self.plain.push((lane, ready_at, id));
    }

    /// Adds a key queue without ready jobs.
    pub fn add_empty(&mut self, key_queue: &OpenKeyQueue) {
        self.empty.push((key_queue.lane, key_queue.key));
    }

    /// Adds a key queue with the limit of its key.
    pub fn add_key_queue(
        &mut self,
        key_queue: OpenKeyQueue,
        claim_limit: impl FnOnce() -> ClaimLimit,
        idle_slots: usize,
    ) {
        self.keys.entry(key_queue.key).or_insert_with(|| {
            let mut claim_limit = claim_limit();
            claim_limit.begin(idle_slots);
            claim_limit
        });
        self.key_queues.insert(
            (key_queue.lane, key_queue.key),
            ReadKeyQueue { key_queue, requested: 0, jobs: Vec::new(), taken: 0 },
        );
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    fn key_room(&self, key: i64) -> usize {
        self.keys.get(&key).map_or(usize::MAX, ClaimLimit::room)
    }

    /// Returns the first read request for each key queue.
    pub fn wanted(&mut self) -> Vec<ReadRequest> {
        let share = (self.limit * 2 / self.key_queues.len().max(1)).max(4);
        let key_queues: Vec<(LaneId, i64)> = self.key_queues.keys().copied().collect();
        key_queues.into_iter().filter_map(|(lane, key)| self.read_request(lane, key, share)).collect()
    }

    fn read_request(&mut self, lane: LaneId, key: i64, share: usize) -> Option<ReadRequest> {
        // One more than may start shows whether there are more.
        let room = self.key_room(key).min(self.claim_limits.room(lane));
        let count = if room == 0 { 0 } else { self.limit.min(room).saturating_add(1).min(share) };
        let read_queue = self.key_queues.get_mut(&(lane, key))?;
        read_queue.requested = count;
        read_queue.jobs.clear();
        (count > 0).then_some(ReadRequest { lane, key, count })
    }

    pub fn add_job(&mut self, lane: LaneId, key: i64, ready_at: Timestamp, id: JobId) {
        if let Some(read_queue) = self.key_queues.get_mut(&(lane, key)) {
            read_queue.jobs.push((ready_at, id));
        }
    }

    /// Chooses the jobs. Returns key queues from which more must be read before the choice is final.
    pub fn choose(&mut self) -> Vec<ReadRequest> {
        let candidates = self.candidates();
        let count = candidates.len();
        let mut claim_limits = self.claim_limits.clone();
        let mut keys = self.keys.clone();
        let mut chosen = Vec::new();
        let mut limited_lanes = BTreeSet::new();
        self.key_queues.values_mut().for_each(|read_queue| read_queue.taken = 0);
        for candidate in select_fairly(candidates, count, self.first_queue) {
            if chosen.len() == self.limit {
                break;
            }
            let ready_job = candidate.row;
            if claim_limits.room(ready_job.lane) == 0 {
                limited_lanes.insert(ready_job.lane);
                continue;
            }
            if let Some(key) = ready_job.key {
                let Some(claim_limit) = keys.get_mut(&key).filter(|claim_limit| claim_limit.room() > 0) else {
                    continue;
                };
                claim_limit.take(1);
                if let Some(read_queue) = self.key_queues.get_mut(&(ready_job.lane, key)) {
                    read_queue.taken += 1;
                }
            }
            claim_limits.take(ready_job.lane, 1);
            chosen.push(ready_job);
        }
        let exhausted: Vec<(LaneId, i64, usize)> = self
            .key_queues
            .iter()
            .filter(|(_, read_queue)| {
                read_queue.taken > 0
                    && read_queue.taken == read_queue.jobs.len()
                    && read_queue.jobs.len() == read_queue.requested
            })
            .filter(|((lane, key), read_queue)| {
                read_queue.requested <= self.limit.min(self.key_room(*key)).min(self.claim_limits.room(*lane))
            })
            .map(|((lane, key), read_queue)| (*lane, *key, read_queue.requested * 8))
            .collect();
        if !exhausted.is_empty() {
            return exhausted
                .into_iter()
                .filter_map(|(lane, key, share)| self.read_request(lane, key, share))
                .collect();
        }
        *self.claim_limits = claim_limits;
        self.keys = keys;
        self.chosen = chosen;
        for ((lane, key), read_queue) in &self.key_queues {
            let prefetch_only = self.keys.get(key).filter(|claim_limit| {
                read_queue.requested == 0 && claim_limit.free_concurrency() > 0 && claim_limit.tokens() > 0
            });
            if let Some(at) = prefetch_only.and_then(ClaimLimit::next_allowed_at) {
                self.limited.entry(*lane).or_insert(Some(at));
            }
        }
        for lane in limited_lanes {
            let Limited { lane, until } = self.claim_limits.mark_limited(lane);
            self.limited.insert(lane, until);
        }
        Vec::new()
    }

    fn candidates(&self) -> Vec<Candidate<ReadyJob>> {
        let served = self.round_robin.served.lock();
        let mut first_ready_at: HashMap<&str, i64> = HashMap::new();
        for (lane, ready_at, _) in &self.plain {
            let Some(lane) = self.lanes.get(lane) else { continue };
            let first = first_ready_at.entry(&lane.queue).or_insert(i64::MAX);
            *first = (*first).min(ready_at.as_ms());
        }
        let plain = self.plain.iter().map(|(lane, ready_at, id)| (*lane, None, 0, *ready_at, *id));
        let keyed = self.key_queues.iter().flat_map(|((lane, key), read_queue)| {
            read_queue.jobs.iter().map(|(ready_at, id)| (*lane, Some(*key), read_queue.key_queue.rank, *ready_at, *id))
        });
        plain
            .chain(keyed)
            .filter_map(|(lane_id, key, rank, ready_at, id)| {
                let lane = self.lanes.get(&lane_id)?;
                let last_served_at = match key {
                    Some(_) => rank,
                    None => served.get(&lane.queue).or(first_ready_at.get(lane.queue.as_str())).copied().unwrap_or(0),
                };
                Some(Candidate {
                    queue: lane.queue.clone(),
                    claim_order: self.rules.claim_order(&lane.queue),
                    fairness: self.rules.fairness(&lane.queue),
                    key,
                    last_served_at,
                    priority: lane.priority,
                    ready_at,
                    id,
                    row: ReadyJob { lane: lane.id, key, ready_at, id },
                })
            })
            .collect()
    }

    /// Returns the chosen jobs in the order in which they run.
    pub fn chosen(&self) -> &[ReadyJob] {
        &self.chosen
    }

    /// Returns how many jobs to claim from each lane without keys.
    pub fn quotas(&self) -> BTreeMap<LaneId, usize> {
        let mut quotas = BTreeMap::new();
        for ready_job in self.chosen.iter().filter(|ready_job| ready_job.key.is_none()) {
            *quotas.entry(ready_job.lane).or_insert(0) += 1;
        }
        quotas
    }

    /// Removes chosen jobs that could not be claimed, because another transaction was cancelling or moving them, and
    /// releases the capacity that they had reserved.
    pub fn remove_missed(&mut self, is_missed: impl Fn(&ReadyJob) -> bool) {
        let missed: Vec<ReadyJob> = self.chosen.iter().copied().filter(is_missed).collect();
        self.chosen.retain(|ready_job| !missed.contains(ready_job));
        for ReadyJob { lane, key, .. } in missed {
            self.claim_limits.release(lane, 1);
            if let Some(claim_limit) = key.and_then(|key| self.keys.get_mut(&key)) {
                claim_limit.release(1);
            }
            if let Some(read_queue) = key.and_then(|key| self.key_queues.get_mut(&(lane, key))) {
                read_queue.taken -= 1;
            }
            self.recheck_at(lane, self.now.plus_ms(BUSY_MS));
        }
    }

    /// Returns the changes of key queues: served ones move to the end of the round robin, those at their limit are closed.
    pub fn key_queue_changes(&mut self) -> Vec<KeyQueueChange> {
        let last_rank = self.key_queues.values().map(|read_queue| read_queue.key_queue.rank).max().unwrap_or(i64::MIN);
        let mut served = self.round_robin.served.lock();
        let next_turn = last_rank.max(self.now.as_ms()).saturating_add(1);
        let mut next: HashMap<&str, i64> = HashMap::new();
        for ready_job in self.chosen.iter().filter(|ready_job| ready_job.key.is_none()) {
            let Some(lane) = self.lanes.get(&ready_job.lane) else { continue };
            if self.rules.fairness(&lane.queue) == Fairness::Key {
                let before = served.get(&lane.queue).copied().unwrap_or(i64::MIN);
                next.insert(&lane.queue, next_turn.max(before.saturating_add(1)));
            }
        }
        served.extend(next.into_iter().map(|(queue, rank)| (queue.to_owned(), rank)));
        drop(served);
        let mut changes = Vec::new();
        for ((lane, key), read_queue) in &self.key_queues {
            let fair = self.lanes.get(lane).is_some_and(|lane| self.rules.fairness(&lane.queue) == Fairness::Key);
            let more = read_queue.jobs.len() > read_queue.taken || read_queue.requested == 0;
            let claim_limit = self
                .keys
                .get(key)
                .filter(|claim_limit| more && (claim_limit.free_concurrency() == 0 || claim_limit.tokens() == 0));
            if claim_limit.is_none() && read_queue.taken == 0 {
                continue;
            }
            let opens_at = claim_limit.and_then(ClaimLimit::next_allowed_at);
            changes.push(KeyQueueChange {
                lane: *lane,
                key: *key,
                rank: match (fair, read_queue.taken) {
                    (true, 0) => Some(read_queue.key_queue.rank),
                    (true, _) => Some(next_turn),
                    (false, _) => None,
                },
                open: claim_limit.is_none(),
                opens_at: opens_at.map(|at| at.min(self.now.plus_ms(LONGEST_WAIT_MS)).as_ms()),
                limited: claim_limit.map(|claim_limit| (self.now.as_ms(), claim_limit.description())),
            });
        }
        changes
    }

    /// Returns key queues that have no job left, or may have none.
    pub fn maybe_empty(&self) -> Vec<(LaneId, i64)> {
        let emptied = self.key_queues.iter().filter(|(_, read_queue)| {
            read_queue.jobs.len() == read_queue.taken && read_queue.jobs.len() < read_queue.requested
        });
        let mut all: Vec<(LaneId, i64)> =
            emptied.map(|(key_queue, _)| *key_queue).chain(self.empty.iter().copied()).collect();
        all.sort_unstable();
        all
    }

    /// Returns the remaining rate tokens of the keys that were served.
    pub fn buckets(&self) -> Vec<(i64, Bucket)> {
        let served = self.keys.iter().filter(|(_, claim_limit)| claim_limit.taken > 0);
        let mut buckets: Vec<(i64, Bucket)> =
            served.filter_map(|(key, claim_limit)| Some((*key, claim_limit.remaining_bucket()?))).collect();
        buckets.sort_by_key(|(key, _)| *key);
        buckets
    }

    /// Returns when this job began to wait for a limit, and a description of that limit.
    pub fn wait_cause(&self, lane: LaneId, key: Option<i64>, ready_at: Timestamp) -> Option<(Timestamp, String)> {
        let key_queue = key.and_then(|key| self.key_queues.get(&(lane, key)));
        key_queue
            .and_then(|read_queue| key_queue_wait_cause(read_queue.key_queue.limited.clone(), ready_at))
            .or_else(|| self.claim_limits.wait_cause(lane, ready_at))
    }

    /// Returns lanes in which only the bound on prefetching limits this request.
    pub fn prefetch_limited(&self) -> Vec<LaneId> {
        let by_key = self.key_queues.iter().filter(|((_, key), read_queue)| {
            let prefetch_only = |claim_limit: &ClaimLimit| {
                claim_limit.room() == 0 && claim_limit.free_concurrency() > 0 && claim_limit.tokens() > 0
            };
            (read_queue.requested == 0 || read_queue.jobs.len() > read_queue.taken)
                && self.keys.get(key).is_some_and(prefetch_only)
        });
        let by_lane = self.limited.keys().copied().filter(|lane| self.claim_limits.is_limited_by_prefetch_only(*lane));
        distinct(by_key.map(|((lane, _), _)| *lane).chain(by_lane))
    }

    /// Marks a lane as limited until `at`, when it may have jobs to claim.
    pub fn recheck_at(&mut self, lane: LaneId, at: Timestamp) {
        let until = self.limited.entry(lane).or_insert(Some(at));
        *until = until.map(|until| until.min(at));
    }

    pub fn limited(&self) -> Vec<Limited> {
        self.limited.iter().map(|(lane, until)| Limited { lane: *lane, until: *until }).collect()
    }
}

/// Splits the lanes of a request into those that may be claimed and those whose queue is paused.
pub fn split_paused(rules: &Rules, lanes: Vec<Lane>) -> (Vec<Lane>, Vec<Limited>) {
    if rules.queues.values().all(|rule| rule.paused.is_none()) {
        return (lanes, Vec::new());
    }
    let (open, paused): (Vec<Lane>, Vec<Lane>) = lanes.into_iter().partition(|lane| rules.pause(&lane.queue).is_none());
    (open, paused.into_iter().map(|lane| Limited { lane: lane.id, until: None }).collect())
}

/// Returns whether a claim of these lanes has to respect limits or keys.
pub fn has_limits_or_keys<'a>(rules: &Rules, lanes: impl IntoIterator<Item = &'a Lane>) -> bool {
    lanes.into_iter().any(|lane| lane.keyed || !rules.lane_limits(&lane.queue, &lane.kind).is_empty())
}

/// Returns whether the end of a job in one of these lanes may allow another job to start.
pub fn has_concurrency_limit<'a>(rules: &Rules, lanes: impl IntoIterator<Item = &'a Lane>) -> bool {
    lanes.into_iter().any(|lane| rules.has_concurrency_limit(&lane.queue, &lane.kind))
}

/// Returns whether any key has a rate.
pub fn keys_have_rates(rules: &Rules) -> bool {
    rules.limits.iter().any(|(scope, limit)| matches!(scope, Scope::Key(_)) && limit.rate.is_some())
}

/// Returns the highest concurrency limit of any key. Jobs in flight need not be counted beyond it.
pub fn max_key_concurrency(rules: &Rules) -> usize {
    let keys = rules.limits.iter().filter(|(scope, _)| matches!(scope, Scope::Key(_)));
    keys.filter_map(|(_, limit)| limit.concurrency).max().unwrap_or(0) as usize
}

/// Returns the maximum number of key queues that one claim reads per lane.
pub fn key_queues_per_lane(limit: usize, lanes: usize) -> usize {
    let max = (256 / lanes.max(1)).max(16);
    limit.saturating_mul(2).clamp(16, max)
}

/// Returns the lanes of a claim, each once.
pub fn distinct(lanes: impl IntoIterator<Item = LaneId>) -> Vec<LaneId> {
    let mut seen = HashSet::new();
    let mut lanes: Vec<LaneId> = lanes.into_iter().filter(|lane| seen.insert(*lane)).collect();
    lanes.sort_unstable();
    lanes
}

#[cfg(test)]
mod tests;
