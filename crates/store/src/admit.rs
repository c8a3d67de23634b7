//! Whom the limits let go (SPEC 3.4): what both engines decide alike, once they have read what is running.
//!
//! A gate (`claim_limits.rs`) is one limit as a claim finds it. A claim passes the gates of
//! the system, the queue and the type of a lane, and in a keyed lane the gate of the key. Jobs that do not pass stay where they are; the
//! line of a key without room is closed, so that the next claim does not look at it, and opened when one of the key's jobs ends.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
};

use faena_domain::{Bucket, Fairness, JobId, Rules, Scope, Timestamp};
use parking_lot::Mutex;

use crate::{
    ClaimResult, Lane, LaneId, Limited,
    claim_limits::{ClaimLimit, ClaimLimits},
    fair_share::{Candidate, deal},
};

/// A line that waits for its rate is looked at again after this time at the latest: the rule may have changed while it was closed.
const LONGEST_WAIT_MS: i64 = 60_000;

/// Lines that are busy in another claim are looked at again after this time.
pub const BUSY_MS: i64 = 10;

/// What an ask got under the rules.
#[derive(Default)]
pub struct LimitedClaim {
    pub claim: ClaimResult,
    /// Lanes of which it may not claim more ahead, but others may take.
    pub for_others: Vec<LaneId>,
}

impl From<ClaimResult> for LimitedClaim {
    fn from(claim: ClaimResult) -> LimitedClaim {
        LimitedClaim { claim, for_others: Vec::new() }
    }
}

/// Since when a job that waits in a line had to wait for which limit, as the line tells it.
pub fn waited_in_key_queue(limited: Option<(i64, String)>, ready_at: Timestamp) -> Option<(Timestamp, String)> {
    let (at, by) = limited?;
    (at >= ready_at.as_ms()).then(|| (Timestamp::from_ms(at), by))
}

/// A line that a claim looks at.
#[derive(Clone, Debug)]
pub struct OpenKeyQueue {
    pub lane: LaneId,
    pub key: i64,
    pub turn: i64,
    /// Since when it had to wait for which limit, the last time.
    pub limited: Option<(i64, String)>,
}

/// A job of a line that may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    pub lane: LaneId,
    pub key: Option<i64>,
    pub ready_at: Timestamp,
    pub id: JobId,
}

#[derive(Debug)]
struct ReadKeyQueue {
    key_queue: OpenKeyQueue,
    asked: usize,
    jobs: Vec<(Timestamp, JobId)>,
    taken: usize,
}

/// What a claim writes into a line's row.
#[derive(Clone, PartialEq, Debug)]
pub struct KeyQueueChange {
    pub lane: LaneId,
    pub key: i64,
    /// `None`: the ready time of its first job.
    pub turn: Option<i64>,
    pub open: bool,
    pub opens_at: Option<i64>,
    pub limited: Option<(i64, String)>,
}

/// How many jobs of which line are to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRequest {
    pub lane: LaneId,
    pub key: i64,
    pub count: usize,
}

/// When jobs without a key of queues that are fair were served last. Only in memory: after a restart, and on another node, they begin
/// with the ready time of their first job.
#[derive(Default)]
pub struct RoundRobin {
    served: Mutex<HashMap<String, i64>>,
    claims: AtomicUsize,
}

impl RoundRobin {
    /// Which queue is served first changes from claim to claim.
    fn next(&self) -> usize {
        self.claims.fetch_add(1, Ordering::Relaxed)
    }
}

/// One ask at the gates.
pub struct Admission<'a> {
    pub claim_limits: &'a mut ClaimLimits,
    lanes: HashMap<LaneId, Lane>,
    rules: &'a Rules,
    round_robin: &'a RoundRobin,
    /// Which queue is served first.
    turn: usize,
    limit: usize,
    now: Timestamp,
    keys: HashMap<i64, ClaimLimit>,
    key_queues: BTreeMap<(LaneId, i64), ReadKeyQueue>,
    /// Lines that are there without a job.
    empty: Vec<(LaneId, i64)>,
    plain: Vec<(LaneId, Timestamp, JobId)>,
    chosen: Vec<Waiting>,
    limited: BTreeMap<LaneId, Option<Timestamp>>,
}

impl<'a> Admission<'a> {
    pub fn new(
        claim_limits: &'a mut ClaimLimits,
        lanes: impl IntoIterator<Item = Lane>,
        (rules, round_robin): (&'a Rules, &'a RoundRobin),
        (limit, at_once): (usize, usize),
        now: Timestamp,
    ) -> Admission<'a> {
        claim_limits.begin(at_once);
        Admission {
            claim_limits,
            lanes: lanes.into_iter().map(|lane| (lane.id, lane)).collect(),
            rules,
            round_robin,
            turn: round_robin.next(),
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

    /// The lanes whose gates let something through; the others are held back.
    pub fn open_lanes(&mut self) -> Vec<Lane> {
        let mut open: Vec<Lane> = self.lanes.values().cloned().collect();
        open.sort_by_key(|lane| lane.id);
        open.retain(|lane| {
            if self.claim_limits.room(lane.id) > 0 {
                return true;
            }
            let Limited { lane, until } = self.claim_limits.hold_back(lane.id);
            self.limited.insert(lane, until);
            false
        });
        open
    }

    /// How many ready jobs of a lane without keys are worth looking at: one more than may go, to see whether any is held back.
    pub fn heads_wanted(&self, lane: LaneId) -> usize {
        self.limit.min(self.claim_limits.room(lane).saturating_add(1))
    }

    pub fn add_head(&mut self, lane: LaneId, ready_at: Timestamp, id: JobId) {
        self.plain.push((lane, ready_at, id));
    }

    /// A line of which nothing is ready.
    pub fn add_empty(&mut self, key_queue: &OpenKeyQueue) {
        self.empty.push((key_queue.lane, key_queue.key));
    }

    /// A line, with the gate of its key.
    pub fn add_key_queue(&mut self, key_queue: OpenKeyQueue, claim_limit: impl FnOnce() -> ClaimLimit, at_once: usize) {
        self.keys.entry(key_queue.key).or_insert_with(|| {
            let mut claim_limit = claim_limit();
            claim_limit.begin(at_once);
            claim_limit
        });
        self.key_queues
            .insert((key_queue.lane, key_queue.key), ReadKeyQueue { key_queue, asked: 0, jobs: Vec::new(), taken: 0 });
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    fn key_room(&self, key: i64) -> usize {
        self.keys.get(&key).map_or(usize::MAX, ClaimLimit::room)
    }

    /// What to read first of each line.
    pub fn wanted(&mut self) -> Vec<ReadRequest> {
        let share = (self.limit * 2 / self.key_queues.len().max(1)).max(4);
        let key_queues: Vec<(LaneId, i64)> = self.key_queues.keys().copied().collect();
        key_queues.into_iter().filter_map(|(lane, key)| self.want(lane, key, share)).collect()
    }

    fn want(&mut self, lane: LaneId, key: i64, share: usize) -> Option<ReadRequest> {
        // One more than may go shows whether there is more.
        let room = self.key_room(key).min(self.claim_limits.room(lane));
        let count = if room == 0 { 0 } else { self.limit.min(room).saturating_add(1).min(share) };
        let seen = self.key_queues.get_mut(&(lane, key))?;
        seen.asked = count;
        seen.jobs.clear();
        (count > 0).then_some(ReadRequest { lane, key, count })
    }

    pub fn add_job(&mut self, lane: LaneId, key: i64, ready_at: Timestamp, id: JobId) {
        if let Some(seen) = self.key_queues.get_mut(&(lane, key)) {
            seen.jobs.push((ready_at, id));
        }
    }

    /// Chooses who goes. Answers with lines of which more must be read before the choice is final.
    pub fn choose(&mut self) -> Vec<ReadRequest> {
        let candidates = self.candidates();
        let count = candidates.len();
        let mut claim_limits = self.claim_limits.clone();
        let mut keys = self.keys.clone();
        let mut chosen = Vec::new();
        let mut held_back = BTreeSet::new();
        self.key_queues.values_mut().for_each(|seen| seen.taken = 0);
        for candidate in deal(candidates, count, self.turn) {
            if chosen.len() == self.limit {
                break;
            }
            let waiting = candidate.row;
            if claim_limits.room(waiting.lane) == 0 {
                held_back.insert(waiting.lane);
                continue;
            }
            if let Some(key) = waiting.key {
                let Some(claim_limit) = keys.get_mut(&key).filter(|claim_limit| claim_limit.room() > 0) else {
                    continue;
                };
                claim_limit.take(1);
                if let Some(seen) = self.key_queues.get_mut(&(waiting.lane, key)) {
                    seen.taken += 1;
                }
            }
            claim_limits.take(waiting.lane, 1);
            chosen.push(waiting);
        }
        let dry: Vec<(LaneId, i64, usize)> = self
            .key_queues
            .iter()
            .filter(|(_, seen)| seen.taken > 0 && seen.taken == seen.jobs.len() && seen.jobs.len() == seen.asked)
            .filter(|((lane, key), seen)| {
                seen.asked <= self.limit.min(self.key_room(*key)).min(self.claim_limits.room(*lane))
            })
            .map(|((lane, key), seen)| (*lane, *key, seen.asked * 8))
            .collect();
        if !dry.is_empty() {
            return dry.into_iter().filter_map(|(lane, key, share)| self.want(lane, key, share)).collect();
        }
        *self.claim_limits = claim_limits;
        self.keys = keys;
        self.chosen = chosen;
        for ((lane, key), seen) in &self.key_queues {
            let ahead = self
                .keys
                .get(key)
                .filter(|claim_limit| seen.asked == 0 && claim_limit.free() > 0 && claim_limit.tokens() > 0);
            if let Some(at) = ahead.and_then(ClaimLimit::opens_at) {
                self.limited.entry(*lane).or_insert(Some(at));
            }
        }
        for lane in held_back {
            let Limited { lane, until } = self.claim_limits.hold_back(lane);
            self.limited.insert(lane, until);
        }
        Vec::new()
    }

    fn candidates(&self) -> Vec<Candidate<Waiting>> {
        let served = self.round_robin.served.lock();
        let mut first_ready_at: HashMap<&str, i64> = HashMap::new();
        for (lane, ready_at, _) in &self.plain {
            let Some(lane) = self.lanes.get(lane) else { continue };
            let first = first_ready_at.entry(&lane.queue).or_insert(i64::MAX);
            *first = (*first).min(ready_at.as_ms());
        }
        let plain = self.plain.iter().map(|(lane, ready_at, id)| (*lane, None, 0, *ready_at, *id));
        let keyed = self.key_queues.iter().flat_map(|((lane, key), seen)| {
            seen.jobs.iter().map(|(ready_at, id)| (*lane, Some(*key), seen.key_queue.turn, *ready_at, *id))
        });
        plain
            .chain(keyed)
            .filter_map(|(id_of_lane, key, turn, ready_at, id)| {
                let lane = self.lanes.get(&id_of_lane)?;
                let turn = match key {
                    Some(_) => turn,
                    None => served.get(&lane.queue).or(first_ready_at.get(lane.queue.as_str())).copied().unwrap_or(0),
                };
                Some(Candidate {
                    queue: lane.queue.clone(),
                    ordering: self.rules.ordering(&lane.queue),
                    fairness: self.rules.fairness(&lane.queue),
                    key,
                    turn,
                    priority: lane.priority,
                    ready_at,
                    id,
                    row: Waiting { lane: lane.id, key, ready_at, id },
                })
            })
            .collect()
    }

    /// Who goes, in the order in which they shall run.
    pub fn chosen(&self) -> &[Waiting] {
        &self.chosen
    }

    /// How many jobs each lane without keys may give.
    pub fn quotas(&self) -> BTreeMap<LaneId, usize> {
        let mut quotas = BTreeMap::new();
        for waiting in self.chosen.iter().filter(|waiting| waiting.key.is_none()) {
            *quotas.entry(waiting.lane).or_insert(0) += 1;
        }
        quotas
    }

    /// Jobs with keys that were chosen and then not there: somebody is just cancelling or moving them. Their keys have room still.
    pub fn missed(&mut self, is_missed: impl Fn(&Waiting) -> bool) {
        let missed: Vec<Waiting> = self.chosen.iter().copied().filter(is_missed).collect();
        self.chosen.retain(|waiting| !missed.contains(waiting));
        for Waiting { lane, key, .. } in missed {
            self.claim_limits.give_back(lane, 1);
            if let Some(claim_limit) = key.and_then(|key| self.keys.get_mut(&key)) {
                claim_limit.give_back(1);
            }
            if let Some(seen) = key.and_then(|key| self.key_queues.get_mut(&(lane, key))) {
                seen.taken -= 1;
            }
            self.look_again(lane, self.now.plus_ms(BUSY_MS));
        }
    }

    /// What becomes of the lines: who was served goes to the end of the turn, who has no room is closed. Of the served ones the place
    /// in turn is remembered.
    pub fn key_queue_changes(&mut self) -> Vec<KeyQueueChange> {
        let last_turn = self.key_queues.values().map(|seen| seen.key_queue.turn).max().unwrap_or(i64::MIN);
        let mut served = self.round_robin.served.lock();
        let next_turn = last_turn.max(self.now.as_ms()).saturating_add(1);
        let mut next: HashMap<&str, i64> = HashMap::new();
        for waiting in self.chosen.iter().filter(|waiting| waiting.key.is_none()) {
            let Some(lane) = self.lanes.get(&waiting.lane) else { continue };
            if self.rules.fairness(&lane.queue) == Fairness::Key {
                let before = served.get(&lane.queue).copied().unwrap_or(i64::MIN);
                next.insert(&lane.queue, next_turn.max(before.saturating_add(1)));
            }
        }
        served.extend(next.into_iter().map(|(queue, turn)| (queue.to_owned(), turn)));
        drop(served);
        let mut changes = Vec::new();
        for ((lane, key), seen) in &self.key_queues {
            let fair = self.lanes.get(lane).is_some_and(|lane| self.rules.fairness(&lane.queue) == Fairness::Key);
            let more = seen.jobs.len() > seen.taken || seen.asked == 0;
            let claim_limit =
                self.keys.get(key).filter(|claim_limit| more && (claim_limit.free() == 0 || claim_limit.tokens() == 0));
            if claim_limit.is_none() && seen.taken == 0 {
                continue;
            }
            let opens_at = claim_limit.and_then(ClaimLimit::opens_at);
            changes.push(KeyQueueChange {
                lane: *lane,
                key: *key,
                turn: match (fair, seen.taken) {
                    (true, 0) => Some(seen.key_queue.turn),
                    (true, _) => Some(next_turn),
                    (false, _) => None,
                },
                open: claim_limit.is_none(),
                opens_at: opens_at.map(|at| at.min(self.now.plus_ms(LONGEST_WAIT_MS)).as_ms()),
                limited: claim_limit.map(|claim_limit| (self.now.as_ms(), claim_limit.text())),
            });
        }
        changes
    }

    /// Lines that have, or may have, no job left.
    pub fn maybe_empty(&self) -> Vec<(LaneId, i64)> {
        let emptied =
            self.key_queues.iter().filter(|(_, seen)| seen.jobs.len() == seen.taken && seen.jobs.len() < seen.asked);
        let mut all: Vec<(LaneId, i64)> =
            emptied.map(|(key_queue, _)| *key_queue).chain(self.empty.iter().copied()).collect();
        all.sort_unstable();
        all
    }

    /// What is left of the rates of keys that were served.
    pub fn buckets(&self) -> Vec<(i64, Bucket)> {
        let served = self.keys.iter().filter(|(_, claim_limit)| claim_limit.taken > 0);
        let mut buckets: Vec<(i64, Bucket)> =
            served.filter_map(|(key, claim_limit)| Some((*key, claim_limit.left()?))).collect();
        buckets.sort_by_key(|(key, _)| *key);
        buckets
    }

    /// Since when this job had to wait for which limit, if it had to.
    pub fn waited(&self, lane: LaneId, key: Option<i64>, ready_at: Timestamp) -> Option<(Timestamp, String)> {
        let key_queue = key.and_then(|key| self.key_queues.get(&(lane, key)));
        key_queue
            .and_then(|seen| waited_in_key_queue(seen.key_queue.limited.clone(), ready_at))
            .or_else(|| self.claim_limits.waited(lane, ready_at))
    }

    /// Lanes that are held back, but not for those who can start jobs at once.
    pub fn for_others(&self) -> Vec<LaneId> {
        let by_key = self.key_queues.iter().filter(|((_, key), seen)| {
            let ahead = |claim_limit: &ClaimLimit| {
                claim_limit.room() == 0 && claim_limit.free() > 0 && claim_limit.tokens() > 0
            };
            (seen.asked == 0 || seen.jobs.len() > seen.taken) && self.keys.get(key).is_some_and(ahead)
        });
        let by_lane = self.limited.keys().copied().filter(|lane| self.claim_limits.has_room_for_others(*lane));
        distinct(by_key.map(|((lane, _), _)| *lane).chain(by_lane))
    }

    /// A lane of which something may go on at this time.
    pub fn look_again(&mut self, lane: LaneId, at: Timestamp) {
        let until = self.limited.entry(lane).or_insert(Some(at));
        *until = until.map(|until| until.min(at));
    }

    pub fn limited(&self) -> Vec<Limited> {
        self.limited.iter().map(|(lane, until)| Limited { lane: *lane, until: *until }).collect()
    }
}

/// The lanes of an ask that may be served at all, and those whose queue is paused.
pub fn unpaused(rules: &Rules, lanes: Vec<Lane>) -> (Vec<Lane>, Vec<Limited>) {
    if rules.queues.values().all(|rule| rule.paused.is_none()) {
        return (lanes, Vec::new());
    }
    let (open, paused): (Vec<Lane>, Vec<Lane>) = lanes.into_iter().partition(|lane| rules.pause(&lane.queue).is_none());
    (open, paused.into_iter().map(|lane| Limited { lane: lane.id, until: None }).collect())
}

/// Whether a claim of these lanes has to look at rules or keys.
pub fn concerns<'a>(rules: &Rules, lanes: impl IntoIterator<Item = &'a Lane>) -> bool {
    lanes.into_iter().any(|lane| lane.keyed || !rules.lane_limits(&lane.queue, &lane.kind).is_empty())
}

/// Whether the end of a job in one of these lanes may let another one go.
pub fn counts<'a>(rules: &Rules, lanes: impl IntoIterator<Item = &'a Lane>) -> bool {
    lanes.into_iter().any(|lane| rules.has_concurrency_limit(&lane.queue, &lane.kind))
}

/// Whether any key has a rate.
pub fn keys_have_rates(rules: &Rules) -> bool {
    rules.limits.iter().any(|(scope, limit)| matches!(scope, Scope::Key(_)) && limit.rate.is_some())
}

/// The most jobs in hands that any key may have, as far as it has to be counted.
pub fn most_of_a_key(rules: &Rules) -> usize {
    let keys = rules.limits.iter().filter(|(scope, _)| matches!(scope, Scope::Key(_)));
    keys.filter_map(|(_, limit)| limit.concurrency).max().unwrap_or(0) as usize
}

/// How many lines of a lane one claim looks at.
pub fn key_queues_read(limit: usize, lanes: usize) -> usize {
    let most = (256 / lanes.max(1)).max(16);
    limit.saturating_mul(2).clamp(16, most)
}

/// The lanes that a claim asks for, each once.
pub fn distinct(lanes: impl IntoIterator<Item = LaneId>) -> Vec<LaneId> {
    let mut seen = HashSet::new();
    let mut lanes: Vec<LaneId> = lanes.into_iter().filter(|lane| seen.insert(*lane)).collect();
    lanes.sort_unstable();
    lanes
}

#[cfg(test)]
mod tests {
    use faena_domain::{Limit, Priority, QueueRule, Rate};

    use super::*;
    use crate::claim_limits::AHEAD_MS;

    const NOW: i64 = 100_000;

    fn now() -> Timestamp {
        Timestamp::from_ms(NOW)
    }

    fn lane(id: LaneId, queue: &str, keyed: bool) -> Lane {
        Lane { id, queue: queue.into(), kind: format!("type-{id}"), priority: Priority::Normal, keyed }
    }

    fn most(concurrency: u32) -> Limit {
        Limit { concurrency: Some(concurrency), rate: None }
    }

    fn claim_limit(scope: Scope, limit: Limit, held: usize) -> ClaimLimit {
        ClaimLimit::new(scope, limit, held, None, now())
    }

    fn key_queue(lane: LaneId, key: i64) -> OpenKeyQueue {
        OpenKeyQueue { lane, key, turn: 0, limited: None }
    }

    /// Everything an ask sees: lanes, limits, lines with their keys' gates and the ready times of their jobs.
    struct Scene {
        lanes: Vec<Lane>,
        claim_limits: ClaimLimits,
        rules: Rules,
        round_robin: RoundRobin,
    }

    impl Scene {
        fn new(lanes: Vec<Lane>, claim_limits: Vec<ClaimLimit>) -> Scene {
            let claim_limits = ClaimLimits::new(claim_limits, &lanes);
            Scene { lanes, claim_limits, rules: Rules::default(), round_robin: RoundRobin::default() }
        }

        fn request(&mut self, limit: usize, at_once: usize) -> Admission<'_> {
            let told = (&self.rules, &self.round_robin);
            Admission::new(&mut self.claim_limits, self.lanes.clone(), told, (limit, at_once), now())
        }
    }

    /// Reads what is wanted from `jobs` (lane, key, ready time) until the choice is final.
    fn choose(admission: &mut Admission, jobs: &[(LaneId, i64, i64)]) -> Vec<(LaneId, i64)> {
        let mut wanted = admission.wanted();
        for _ in 0..10 {
            for want in &wanted {
                let key_queue = jobs.iter().filter(|(lane, key, _)| (*lane, *key) == (want.lane, want.key));
                for (lane, key, ready_at) in key_queue.take(want.count) {
                    let id = JobId(uuid::Uuid::from_u128(*ready_at as u128));
                    admission.add_job(*lane, *key, Timestamp::from_ms(*ready_at), id);
                }
            }
            wanted = admission.choose();
            if wanted.is_empty() {
                let chosen = admission.chosen().iter();
                return chosen.map(|waiting| (waiting.lane, waiting.ready_at.as_ms())).collect();
            }
        }
        panic!("it never comes to an end");
    }

    #[test]
    fn a_limit_is_shared_by_waiting_time_and_says_which_lanes_it_holds_back() {
        let lanes = vec![lane(1, "q", false), lane(2, "q", false)];
        let mut scene = Scene::new(lanes, vec![claim_limit(Scope::Queue("q".into()), most(5), 2)]);
        let mut admission = scene.request(10, 10);
        assert_eq!(admission.open_lanes().len(), 2);
        assert_eq!(admission.heads_wanted(1), 4, "one more than may go");
        for (lane, ready_at) in [(1, 10), (1, 11), (1, 12), (2, 1), (2, 20)] {
            let id = JobId(uuid::Uuid::from_u128(ready_at as u128));
            admission.add_head(lane, Timestamp::from_ms(ready_at), id);
        }
        assert!(admission.choose().is_empty());
        assert_eq!(admission.quotas(), BTreeMap::from([(1, 2), (2, 1)]));
        assert_eq!(admission.limited(), [1, 2].map(|lane| Limited { lane, until: None }));
        let changes = scene.claim_limits.changes(now());
        assert_eq!(changes[0].reached_at, Some(now()));
    }

    #[test]
    fn what_is_claimed_ahead_is_a_quarter_or_what_can_start_at_once() {
        let mut free = claim_limit(Scope::System, most(100), 60);
        let mut room = |at_once| {
            free.begin(at_once);
            free.room()
        };
        assert_eq!((room(1), room(30), room(400)), (10, 30, 40));
        let mut scene = Scene::new(vec![lane(1, "q", false)], vec![claim_limit(Scope::System, most(100), 98)]);
        let mut admission = scene.request(10, 0);
        assert!(admission.open_lanes().is_empty());
        assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(AHEAD_MS)) }]);
        assert_eq!(admission.for_others(), [1], "who can start something may have it");
        assert!(scene.claim_limits.changes(now()).is_empty(), "the limit was not reached");
    }

    #[test]
    fn an_empty_bucket_says_when_it_goes_on() {
        let limit = Limit { concurrency: None, rate: Some(Rate { count: 2, period_ms: 1_000 }) };
        let mut scene =
            Scene::new(vec![lane(1, "q", false)], vec![claim_limit(Scope::Type("type-1".into()), limit, 0)]);
        let mut admission = scene.request(9, 9);
        for ready_at in 1..=3 {
            let id = JobId(uuid::Uuid::from_u128(ready_at as u128));
            admission.add_head(1, Timestamp::from_ms(ready_at), id);
        }
        assert!(admission.choose().is_empty());
        assert_eq!(admission.chosen().len(), 2);
        assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(500)) }]);
        scene.claim_limits.give_back(1, 1);
        let left = scene.claim_limits.changes(now())[0].bucket.expect("it has a rate");
        assert_eq!(left.available(), 1, "what was not started is not taken");
    }

    #[test]
    fn a_key_without_room_is_closed_and_the_others_go() {
        let mut scene = Scene::new(vec![lane(1, "q", true)], Vec::new());
        let mut admission = scene.request(10, 10);
        for (key, held) in [(7, 1), (8, 0), (9, 0)] {
            let scope = Scope::Key(format!("k{key}"));
            admission.add_key_queue(key_queue(1, key), || claim_limit(scope, most(1), held), 10);
        }
        admission.add_empty(&key_queue(1, 99));
        let jobs = [(1, 7, 1), (1, 7, 2), (1, 8, 3), (1, 8, 4), (1, 9, 5)];
        assert_eq!(choose(&mut admission, &jobs), [(1, 3), (1, 5)]);
        let changes = admission.key_queue_changes();
        let told: Vec<_> =
            changes.iter().map(|c| (c.key, c.open, c.limited.as_ref().map(|(_, by)| by.as_str()))).collect();
        let (seven, eight) = ("concurrencyKey k7: 1 of 1 running", "concurrencyKey k8: 1 of 1 running");
        assert_eq!(told, [(7, false, Some(seven)), (8, false, Some(eight)), (9, true, None)]);
        assert_eq!(admission.maybe_empty(), [(1, 9), (1, 99)]);
    }

    #[test]
    fn a_job_that_was_gone_when_it_was_taken_leaves_its_line_open() {
        let mut scene = Scene::new(vec![lane(1, "q", true)], Vec::new());
        let mut admission = scene.request(10, 10);
        admission.add_key_queue(key_queue(1, 7), || claim_limit(Scope::Key("k".into()), most(1), 0), 10);
        assert_eq!(choose(&mut admission, &[(1, 7, 1), (1, 7, 2)]), [(1, 1)]);
        admission.missed(|_| true);
        assert!(admission.key_queue_changes().is_empty() && admission.maybe_empty().is_empty());
        assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(BUSY_MS)) }]);
    }

    #[test]
    fn one_key_in_two_lanes_has_one_room() {
        let mut scene = Scene::new(vec![lane(1, "q", true), lane(2, "q", true)], Vec::new());
        let mut admission = scene.request(10, 10);
        for lane in [1, 2] {
            admission.add_key_queue(key_queue(lane, 7), || claim_limit(Scope::Key("k".into()), most(2), 0), 10);
        }
        let jobs = [(1, 7, 1), (1, 7, 4), (2, 7, 2), (2, 7, 3)];
        assert_eq!(choose(&mut admission, &jobs), [(1, 1), (2, 2)]);
        assert!(admission.key_queue_changes().iter().all(|change| !change.open));
    }

    #[test]
    fn a_line_that_may_give_more_is_read_again() {
        let mut scene = Scene::new(vec![lane(1, "q", true)], Vec::new());
        let mut admission = scene.request(50, 50);
        for key in 0..40 {
            admission.add_key_queue(key_queue(1, key), || claim_limit(Scope::Key("k".into()), Limit::default(), 0), 50);
        }
        let old = (0..60).map(|n| (1, 0, n));
        let jobs: Vec<_> = old.chain((1..40).map(|key| (1, key, 1_000 + key))).collect();
        let chosen = choose(&mut admission, &jobs);
        assert_eq!(chosen, (0..50).map(|n| (1, n)).collect::<Vec<_>>(), "the oldest, all of one key");
    }

    #[test]
    fn who_was_served_goes_to_the_end_of_the_turn_in_a_fair_queue() {
        let mut scene = Scene::new(vec![lane(1, "q", true)], Vec::new());
        let fair = QueueRule { fairness: Some(Fairness::Key), ..QueueRule::default() };
        scene.rules.queues.insert("q".into(), fair);
        let mut admission = scene.request(1, 1);
        for key in [7, 8] {
            let turn = if key == 7 { NOW + 5 } else { NOW };
            let key_queue = OpenKeyQueue { turn, ..key_queue(1, key) };
            admission.add_key_queue(key_queue, || claim_limit(Scope::Key("k".into()), Limit::default(), 0), 1);
        }
        assert_eq!(choose(&mut admission, &[(1, 7, 1), (1, 7, 2), (1, 8, 3), (1, 8, 4)]), [(1, 3)]);
        let changes = admission.key_queue_changes();
        assert_eq!((changes.len(), changes[0].key, changes[0].turn), (1, 8, Some(NOW + 6)), "behind everybody");
    }

    #[test]
    fn a_paused_queue_is_put_aside() {
        let pause = faena_domain::Pause { at: now(), by: "ana".into(), reason: None };
        let mut rules = Rules::default();
        rules.queues.insert("p".into(), QueueRule { paused: Some(pause), ..QueueRule::default() });
        let (open, limited) = unpaused(&rules, vec![lane(1, "p", false), lane(2, "q", false)]);
        assert_eq!(open.iter().map(|lane| lane.id).collect::<Vec<_>>(), [2]);
        assert_eq!(limited, [Limited { lane: 1, until: None }]);
    }
}
