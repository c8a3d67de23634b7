use faena_domain::{Limit, Priority, QueueRule, Rate};

use super::*;
use crate::claim_limits::PREFETCH_RETRY_MS;

const NOW: i64 = 100_000;

fn now() -> Timestamp {
    Timestamp::from_ms(NOW)
}

fn lane(id: LaneId, queue: &str, keyed: bool) -> Lane {
    Lane { id, queue: queue.into(), kind: format!("type-{id}"), priority: Priority::Normal, keyed }
}

fn concurrency_limit(concurrency: u32) -> Limit {
    Limit { concurrency: Some(concurrency), rate: None }
}

fn claim_limit(scope: Scope, limit: Limit, in_flight: usize) -> ClaimLimit {
    ClaimLimit::new(scope, limit, in_flight, None, now())
}

fn key_queue(lane: LaneId, key: i64) -> OpenKeyQueue {
    OpenKeyQueue { lane, key, rank: 0, limited: None }
}

/// What a claim request reads, except the key queues, which a test adds to the admission.
struct Setup {
    lanes: Vec<Lane>,
    claim_limits: ClaimLimits,
    rules: Rules,
    round_robin: RoundRobin,
}

impl Setup {
    fn new(lanes: Vec<Lane>, claim_limits: Vec<ClaimLimit>) -> Setup {
        let claim_limits = ClaimLimits::new(claim_limits, &lanes);
        Setup { lanes, claim_limits, rules: Rules::default(), round_robin: RoundRobin::default() }
    }

    fn request(&mut self, limit: usize, idle_slots: usize) -> Admission<'_> {
        let settings = (&self.rules, &self.round_robin);
        Admission::new(&mut self.claim_limits, self.lanes.clone(), settings, (limit, idle_slots), now())
    }
}

/// Reads the requested rows from `jobs` (lane, key, ready time) until the choice is final.
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
            return chosen.map(|ready_job| (ready_job.lane, ready_job.ready_at.as_ms())).collect();
        }
    }
    panic!("the choice did not become final");
}

#[test]
fn lanes_share_a_limit_by_waiting_time_and_are_reported_as_limited() {
    let lanes = vec![lane(1, "q", false), lane(2, "q", false)];
    let mut setup = Setup::new(lanes, vec![claim_limit(Scope::Queue("q".into()), concurrency_limit(5), 2)]);
    let mut admission = setup.request(10, 10);
    assert_eq!(admission.open_lanes().len(), 2);
    assert_eq!(admission.plain_jobs_wanted(1), 4, "one more than may start");
    for (lane, ready_at) in [(1, 10), (1, 11), (1, 12), (2, 1), (2, 20)] {
        let id = JobId(uuid::Uuid::from_u128(ready_at as u128));
        admission.add_plain_job(lane, Timestamp::from_ms(ready_at), id);
    }
    assert!(admission.choose().is_empty());
    assert_eq!(admission.quotas(), BTreeMap::from([(1, 2), (2, 1)]));
    assert_eq!(admission.limited(), [1, 2].map(|lane| Limited { lane, until: None }));
    let changes = setup.claim_limits.changes(now());
    assert_eq!(changes[0].reached_at, Some(now()));
}

#[test]
fn a_request_may_claim_its_idle_slots_or_a_quarter_of_the_free_concurrency() {
    let mut free = claim_limit(Scope::System, concurrency_limit(100), 60);
    let mut room = |idle_slots| {
        free.begin(idle_slots);
        free.room()
    };
    assert_eq!((room(1), room(30), room(400)), (10, 30, 40));
    let mut setup = Setup::new(vec![lane(1, "q", false)], vec![claim_limit(Scope::System, concurrency_limit(100), 98)]);
    let mut admission = setup.request(10, 0);
    assert!(admission.open_lanes().is_empty());
    assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(PREFETCH_RETRY_MS)) }]);
    assert_eq!(admission.prefetch_limited(), [1], "a request with idle slots may claim");
    assert!(setup.claim_limits.changes(now()).is_empty(), "the limit was not reached");
}

#[test]
fn an_empty_bucket_limits_its_lane_until_the_next_token() {
    let limit = Limit { concurrency: None, rate: Some(Rate { count: 2, period_ms: 1_000 }) };
    let mut setup = Setup::new(vec![lane(1, "q", false)], vec![claim_limit(Scope::Type("type-1".into()), limit, 0)]);
    let mut admission = setup.request(9, 9);
    for ready_at in 1..=3 {
        let id = JobId(uuid::Uuid::from_u128(ready_at as u128));
        admission.add_plain_job(1, Timestamp::from_ms(ready_at), id);
    }
    assert!(admission.choose().is_empty());
    assert_eq!(admission.chosen().len(), 2);
    assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(500)) }]);
    setup.claim_limits.release(1, 1);
    let left = setup.claim_limits.changes(now())[0].bucket.expect("it has a rate");
    assert_eq!(left.available(), 1, "a token that was not used is returned");
}

#[test]
fn a_key_at_its_limit_is_closed_and_other_keys_are_served() {
    let mut setup = Setup::new(vec![lane(1, "q", true)], Vec::new());
    let mut admission = setup.request(10, 10);
    for (key, in_flight) in [(7, 1), (8, 0), (9, 0)] {
        let scope = Scope::Key(format!("k{key}"));
        admission.add_key_queue(key_queue(1, key), || claim_limit(scope, concurrency_limit(1), in_flight), 10);
    }
    admission.add_empty(&key_queue(1, 99));
    let jobs = [(1, 7, 1), (1, 7, 2), (1, 8, 3), (1, 8, 4), (1, 9, 5)];
    assert_eq!(choose(&mut admission, &jobs), [(1, 3), (1, 5)]);
    let changes = admission.key_queue_changes();
    let summaries: Vec<_> =
        changes.iter().map(|c| (c.key, c.open, c.limited.as_ref().map(|(_, by)| by.as_str()))).collect();
    let (seven, eight) = ("concurrencyKey k7: 1 of 1 running", "concurrencyKey k8: 1 of 1 running");
    assert_eq!(summaries, [(7, false, Some(seven)), (8, false, Some(eight)), (9, true, None)]);
    assert_eq!(admission.maybe_empty(), [(1, 9), (1, 99)]);
}

#[test]
fn a_chosen_job_that_no_longer_exists_leaves_its_key_queue_open() {
    let mut setup = Setup::new(vec![lane(1, "q", true)], Vec::new());
    let mut admission = setup.request(10, 10);
    admission.add_key_queue(key_queue(1, 7), || claim_limit(Scope::Key("k".into()), concurrency_limit(1), 0), 10);
    assert_eq!(choose(&mut admission, &[(1, 7, 1), (1, 7, 2)]), [(1, 1)]);
    admission.remove_missed(|_| true);
    assert!(admission.key_queue_changes().is_empty() && admission.maybe_empty().is_empty());
    assert_eq!(admission.limited(), [Limited { lane: 1, until: Some(now().plus_ms(BUSY_MS)) }]);
}

#[test]
fn one_key_in_two_lanes_shares_its_limit() {
    let mut setup = Setup::new(vec![lane(1, "q", true), lane(2, "q", true)], Vec::new());
    let mut admission = setup.request(10, 10);
    for lane in [1, 2] {
        admission.add_key_queue(
            key_queue(lane, 7),
            || claim_limit(Scope::Key("k".into()), concurrency_limit(2), 0),
            10,
        );
    }
    let jobs = [(1, 7, 1), (1, 7, 4), (2, 7, 2), (2, 7, 3)];
    assert_eq!(choose(&mut admission, &jobs), [(1, 1), (2, 2)]);
    assert!(admission.key_queue_changes().iter().all(|change| !change.open));
}

#[test]
fn a_key_queue_that_may_have_more_jobs_is_read_again() {
    let mut setup = Setup::new(vec![lane(1, "q", true)], Vec::new());
    let mut admission = setup.request(50, 50);
    for key in 0..40 {
        admission.add_key_queue(key_queue(1, key), || claim_limit(Scope::Key("k".into()), Limit::default(), 0), 50);
    }
    let old = (0..60).map(|n| (1, 0, n));
    let jobs: Vec<_> = old.chain((1..40).map(|key| (1, key, 1_000 + key))).collect();
    let chosen = choose(&mut admission, &jobs);
    assert_eq!(chosen, (0..50).map(|n| (1, n)).collect::<Vec<_>>(), "the oldest, all of one key");
}

#[test]
fn a_served_key_goes_to_the_end_of_the_round_in_a_fair_queue() {
    let mut setup = Setup::new(vec![lane(1, "q", true)], Vec::new());
    let fair = QueueRule { fairness: Some(Fairness::Key), ..QueueRule::default() };
    setup.rules.queues.insert("q".into(), fair);
    let mut admission = setup.request(1, 1);
    for key in [7, 8] {
        let rank = if key == 7 { NOW + 5 } else { NOW };
        let key_queue = OpenKeyQueue { rank, ..key_queue(1, key) };
        admission.add_key_queue(key_queue, || claim_limit(Scope::Key("k".into()), Limit::default(), 0), 1);
    }
    assert_eq!(choose(&mut admission, &[(1, 7, 1), (1, 7, 2), (1, 8, 3), (1, 8, 4)]), [(1, 3)]);
    let changes = admission.key_queue_changes();
    assert_eq!((changes.len(), changes[0].key, changes[0].rank), (1, 8, Some(NOW + 6)), "behind all others");
}

#[test]
fn a_paused_queue_is_left_out() {
    let pause = faena_domain::Pause { at: now(), by: "ana".into(), reason: None };
    let mut rules = Rules::default();
    rules.queues.insert("p".into(), QueueRule { paused: Some(pause), ..QueueRule::default() });
    let (open, limited) = split_paused(&rules, vec![lane(1, "p", false), lane(2, "q", false)]);
    assert_eq!(open.iter().map(|lane| lane.id).collect::<Vec<_>>(), [2]);
    assert_eq!(limited, [Limited { lane: 1, until: None }]);
}
