//! Limits of the system, queues, types and keys.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicI64, Ordering},
};

use faena_domain::{ErrorReason, JobId, JobState, Limit, NodeId, Priority, Scope, WorkerId};
use faena_store::{
    AuditFilter, ClaimRequest, ClaimedJob, Configured, Owner, RunEnd, RunOutcome, Signal, StoreOptions, Tally,
};
use futures_util::future::join_all;

use crate::support::*;

pub fn queue(name: &str) -> Scope {
    Scope::Queue(name.into())
}

pub fn kind(name: &str) -> Scope {
    Scope::Type(name.into())
}

pub fn key(name: &str) -> Scope {
    Scope::Key(name.into())
}

pub async fn ids(world: &World, limit: usize, ms: i64) -> Vec<JobId> {
    world.claim(limit, ms).await.into_iter().map(|job| job.id).collect()
}

/// Jobs in flight at this instant, by the name of each limit; each table is read in one statement.
async fn in_flight(world: &World) -> BTreeMap<String, i64> {
    let mut held = BTreeMap::new();
    let sql =
        "SELECT l.queue, l.type, sum(c.n) FROM counter c JOIN lane l ON l.id = c.lane WHERE c.tally = 2 GROUP BY 1, 2";
    for row in world.ledger.rows(sql).await {
        let n: i64 = row[2].parse().unwrap();
        for name in ["system".to_owned(), format!("queue {}", row[0]), format!("type {}", row[1])] {
            *held.entry(name).or_default() += n;
        }
    }
    for row in world.ledger.rows("SELECT key, count(*) FROM key_in_flight GROUP BY key").await {
        held.insert(format!("key {}", row[0]), row[1].parse().unwrap());
    }
    held
}

async fn assert_within(world: &World, limits: &[(&str, i64)]) {
    for (name, n) in in_flight(world).await {
        let most = limits.iter().filter(|(begin, _)| name.starts_with(begin)).map(|(_, most)| *most).min();
        assert!(n <= most.unwrap_or(i64::MAX), "{name}: {n} in hands, {most:?} allowed");
    }
}

struct Storm<'a> {
    now: &'a AtomicI64,
    limits: &'a [(&'a str, i64)],
}

impl Storm<'_> {
    fn tick(&self) -> i64 {
        self.now.fetch_add(1, Ordering::Relaxed)
    }

    /// Claims and ends jobs at random until all have finished.
    async fn rage(&self, world: &World, seed: u64) {
        let mut dice = Dice(seed);
        let mut hands: Vec<ClaimedJob> = Vec::new();
        for round in 0..4_000 {
            let now = self.tick();
            match dice.below(10) {
                0..4 => {
                    // A claim for an unknown node is as good as lost.
                    let node = if dice.chance(10) { NodeId::new() } else { world.node };
                    let jobs = world.claim_as(node, 1 + dice.below(4), now).await;
                    if node == world.node {
                        hands.extend(jobs);
                    }
                }
                4..8 if !hands.is_empty() => {
                    let job = hands.swap_remove(dice.below(hands.len()));
                    let outcome = match dice.below(12) {
                        0 => world.retry(now + 1),
                        1 => RunOutcome::HandedBack,
                        2 => failed("no"),
                        3 => cancelled(),
                        _ => completed(),
                    };
                    assert!(world.end(&job, outcome, now).await);
                }
                8 => {
                    world.promote(now).await;
                    world.recover(0, now).await;
                }
                9 if dice.chance(20) => {
                    let all = world.list(Default::default()).await;
                    if let Some(id) = dice.pick(&all) {
                        let _ = world.store.job_cancel(*id, "not wanted", None, world.at(now)).await;
                    }
                }
                _ => {}
            }
            assert_within(world, self.limits).await;
            let counts = world.store.counts().await.unwrap();
            let open = [Tally::Queued, Tally::Pending, Tally::InFlight, Tally::Retrying].map(|t| counts.total(t));
            if open.iter().sum::<i64>() == 0 {
                return;
            }
            if hands.is_empty() && open[0] == 0 && open[2] > 0 && round > 3_000 {
                break;
            }
        }
        panic!("jobs are left: {:?}", in_flight(world).await);
    }
}

pub async fn limits_are_never_exceeded_whoever_claims_and_however_jobs_end(world: &World) {
    world.limit(Scope::System, Some(7), 0).await;
    world.limit(queue("slow"), Some(3), 0).await;
    world.limit(kind("b"), Some(4), 0).await;
    world.limit(key("*"), Some(2), 0).await;
    let limits = [("system", 7), ("queue slow", 3), ("type b", 4), ("key ", 2)];
    let mut others = Vec::new();
    if world.store.engine() == "postgres" {
        for _ in 0..2 {
            others.push(world.reopen(StoreOptions::default()).await);
        }
    }
    let mut dice = Dice(7);
    let mut jobs = Vec::new();
    for n in 0..160 {
        let mut job = world.job(["a", "b"][dice.below(2)], n / 40).queue(["default", "slow"][dice.below(2)]).retries(9);
        if dice.chance(60) {
            job = job.of(&format!("k{}", dice.below(5)));
        }
        jobs.push(job.priority(Priority::ALL[dice.below(4)]));
    }
    world.submit_all(jobs).await;
    let storm = Storm { now: &AtomicI64::new(10), limits: &limits };
    let stores: Vec<&World> = std::iter::once(world).chain(&others).collect();
    join_all((0..8_u64).map(|n| storm.rage(stores[n as usize % stores.len()], 100 + n))).await;
    let reached = "SELECT count(*) FROM limit_rule WHERE scope < 3 AND reached_at IS NOT NULL";
    assert_eq!(world.ledger.number(reached).await, 3, "each limit was felt");
    for other in &others {
        other.store.close().await;
    }
}

/// Two jobs under a limit of one: the second starts only after the first has left.
async fn comes_back(world: &World, scope: Scope, key_of_job: Option<&str>) {
    world.limit(scope.clone(), Some(1), 0).await;
    let new = |ms| {
        let job = world.job("a", ms).queue("q").retries(5);
        match key_of_job {
            Some(name) => job.of(name),
            None => job,
        }
    };
    let plainly = |job: &ClaimedJob, ms| RunEnd { on_record: false, ..world.an_end(job, completed(), ms) };
    let mut now = 10;
    for way in ["complete", "plainly", "fail", "retry", "cancel", "back", "worker", "left", "node", "expired"] {
        let first = world.submit(new(now)).await;
        let second = world.submit(new(now + 1)).await;
        let worker = world.admit(world.worker(way), now).await;
        let owner = match way {
            "worker" | "left" => Owner::Worker { id: worker.id, session: worker.session },
            "node" => Owner::Node(NodeId::new()),
            _ => Owner::Node(world.node),
        };
        let job = world.claim_for(owner, world.lanes().await, 5, now + 2).await;
        assert_eq!(job.iter().map(|job| job.id).collect::<Vec<_>>(), [first], "{scope}, {way}: one goes");
        assert!(world.claim(5, now + 3).await.is_empty(), "{scope}, {way}: the other waits");
        let job = &job[0];
        match way {
            "complete" => world.complete(job, now + 4).await,
            "plainly" => assert!(world.report_end(plainly(job, now + 4)).await),
            "fail" => world.fail(job, now + 4).await,
            "retry" => world.retry_at(job, 90_000, now + 4).await,
            "cancel" => assert!(world.end(job, cancelled(), now + 4).await),
            "back" => world.hand_back(job, now + 4).await,
            "worker" => drop(world.lose(&worker, 80_000, now + 4).await.unwrap()),
            "left" => {
                let end = faena_store::WorkerEnd::Left { reason: "done".into() };
                world.store.worker_end(worker.id, worker.session, end, world.at(now + 4)).await.unwrap().unwrap();
            }
            "node" => assert_eq!(world.recover(0, now + 4).await.returned, 1),
            _ => {
                let expired = RunOutcome::Failed { error: "too late".into(), reason: ErrorReason::Timeout };
                assert!(world.end(job, expired, now + 4).await);
            }
        }
        let next = world.claim(5, now + 5).await;
        assert_eq!(next.len(), 1, "{scope}, {way}: one goes again");
        let came_back = matches!(way, "back" | "left" | "node");
        assert_eq!(next[0].id, if came_back { first } else { second }, "{scope}, {way}");
        world.complete(&next[0], now + 6).await;
        if came_back {
            world.complete(&world.claim_one(now + 7).await, now + 8).await;
        }
        world.ledger.prove().await;
        now += 20;
    }
    world.limit(scope, None, now).await;
}

pub async fn a_key_has_room_again_however_its_job_ends(world: &World) {
    comes_back(world, Scope::System, None).await;
    comes_back(world, queue("q"), None).await;
    comes_back(world, kind("a"), None).await;
    comes_back(world, key("tenant"), Some("tenant")).await;
    comes_back(world, key("tenant-*"), Some("tenant-1")).await;
    comes_back(world, queue("q"), Some("other")).await;
}

pub async fn a_limit_allows_exactly_its_number_in_order(world: &World) {
    world.limit(queue("mail"), Some(2), 0).await;
    let all = world.submit_all((0..5).map(|n| world.job("a", n).queue("mail")).collect()).await;
    let other = world.submit(world.job("a", 9)).await;
    let claim = world.claim_whole(10, 10).await;
    let mut got: Vec<JobId> = claim.jobs.iter().map(|job| job.id).collect();
    got.sort_unstable();
    assert_eq!(got, [all[0], all[1], other], "the first two, and what no limit holds back");
    let lane = world.lane_of(all[0]).await.id;
    assert_eq!(claim.limited.iter().map(|l| (l.lane, l.until)).collect::<Vec<_>>(), [(lane, None)]);
    let job = claim.jobs.iter().find(|job| job.id == all[1]).unwrap();
    world.complete(job, 11).await;
    assert_eq!(ids(world, 10, 12).await, [all[2]]);
}

pub async fn a_shared_limit_orders_by_score_and_not_by_lane(world: &World) {
    world.limit(Scope::System, Some(3), 0).await;
    let late = world.submit(world.job("a", 30)).await;
    let early = world.submit_all((0..2).map(|n| world.job("b", n)).collect()).await;
    let urgent = world.submit(world.job("c", 40).priority(Priority::Critical)).await;
    assert_eq!(ids(world, 10, 50).await, [urgent, early[0], early[1]]);
    assert_eq!(world.state(late).await, JobState::Queued);
}

pub async fn claiming_ahead_leaves_room_for_other_workers(world: &World) {
    world.limit(kind("a"), Some(8), 0).await;
    world.submit_all((0..20).map(|n| world.job("a", n)).collect()).await;
    let claim = async |limit, at_once, ms| {
        let ask = ClaimRequest { owner: Owner::Node(world.node), lanes: world.lanes().await, limit, at_once };
        world.store.job_claim(vec![ask], world.at(ms)).await.unwrap().remove(0)
    };
    assert_eq!(claim(20, 1, 50).await.jobs.len(), 2, "a quarter of what is free");
    assert_eq!(claim(20, 4, 51).await.jobs.len(), 4, "as many as can start at once");
    let none = claim(20, 0, 52).await;
    assert!(none.jobs.is_empty());
    assert!(none.limited[0].until.is_some(), "there is room, so it is asked again soon");
    assert_eq!(claim(20, 20, 53).await.jobs.len(), 2);
    assert_eq!(claim(20, 20, 54).await.limited[0].until, None);
}

pub async fn a_blocked_key_does_not_delay_others(world: &World) {
    world.limit(key("*"), Some(1), 0).await;
    let busy = world.submit_all((0..200).map(|n| world.job("a", n / 10).of("busy")).collect()).await;
    let first = world.claim_one(30).await;
    assert_eq!(first.id, busy[0]);
    let other = world.submit(world.job("a", 40).of("other")).await;
    let free = world.submit(world.job("a", 41)).await;
    let mut got = ids(world, 10, 50).await;
    got.sort_unstable();
    assert_eq!(got, [other, free]);
    world.complete(&first, 60).await;
    assert_eq!(ids(world, 10, 61).await, [busy[1]], "its own jobs first in, first out");
}

pub async fn many_limited_keys_in_front_hide_no_other(world: &World) {
    world.limit(key("*"), Some(1), 0).await;
    let jobs = (0..900).map(|n| world.job("a", n / 300).of(&format!("k{}", n % 300))).collect();
    world.submit_all(jobs).await;
    assert_eq!(world.claim(1_000, 10).await.len(), 300);
    let last = world.submit(world.job("a", 20).of("last")).await;
    assert_eq!(ids(world, 1, 30).await, [last]);
    world.limit(key("*"), Some(2), 40).await;
    assert_eq!(world.claim(1_000, 50).await.len(), 300);
}

pub async fn one_key_in_two_lanes_shares_its_limit(world: &World) {
    world.limit(key("k"), Some(1), 0).await;
    let a = world.submit(world.job("a", 0).of("k")).await;
    let b = world.submit(world.job("b", 1).queue("q").of("k")).await;
    let first = world.claim_one(2).await;
    assert_eq!(first.id, a);
    assert!(world.claim(5, 3).await.is_empty());
    let mut signals = world.store.signals();
    world.complete(&first, 4).await;
    let lane = world.lane_of(b).await.id;
    loop {
        if signals.recv().await.unwrap() == Signal::Ready(lane) {
            break;
        }
    }
    assert_eq!(world.claim_one(5).await.id, b);
}

pub async fn the_end_of_a_job_under_a_limit_is_signalled(world: &World) {
    world.limit(kind("a"), Some(1), 0).await;
    for plainly in [true, false] {
        let job = world.running(world.job("a", 0)).await;
        let mut signals = world.store.signals();
        let end = RunEnd { on_record: !plainly, ..world.an_end(&job, completed(), 1) };
        assert!(world.report_end(end).await);
        while signals.recv().await.unwrap() != Signal::Room {}
    }
    world.submit(world.job("a", 2)).await;
    world.claim_as(NodeId::new(), 1, 3).await;
    let mut signals = world.store.signals();
    world.recover(0, 4).await;
    while signals.recv().await.unwrap() != Signal::Room {}
}

pub async fn api_settings_outlive_the_configuration_until_they_are_reset(world: &World) {
    let scope = Scope::Queue("line".into());
    let limit = |most| Limit { concurrency: Some(most), rate: None };
    let configured = Configured { limits: vec![(scope.clone(), limit(2))], ..Configured::default() };
    world.store.rules_configure(configured.clone(), world.start).await.unwrap();
    world.store.limit_set(scope.clone(), Limit::default(), "ana", world.at(1)).await.unwrap();
    world.store.rules_configure(configured, world.at(2)).await.unwrap();
    assert_eq!(world.store.rules().limits.get(&scope), None, "it stays taken away");
    world.store.limit_reset(scope.clone(), Some(limit(2)), "ana", world.at(3)).await.unwrap();
    assert_eq!(world.store.rules().limits.get(&scope), Some(&limit(2)));
    assert_eq!(world.store.limits().await.unwrap()[0].origin, "config");
    world.store.limit_reset(scope, None, "ana", world.at(4)).await.unwrap();
    assert_eq!(world.store.limits().await.unwrap(), []);
    let reported =
        world.store.audit_list(AuditFilter { actor: Some("ana".into()), ..AuditFilter::default() }, 10).await.unwrap();
    let actions: Vec<&str> = reported.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["limit.reset", "limit.reset", "limit.set"]);
}

pub async fn a_limit_can_be_raised_lowered_and_removed_while_jobs_run(world: &World) {
    for (scope, name) in [(key("k"), Some("k")), (queue("default"), None)] {
        let new = |ms| match name {
            Some(name) => world.job("a", ms).of(name),
            None => world.job("a", ms),
        };
        world.limit(scope.clone(), Some(2), 0).await;
        world.submit_all((0..12).map(new).collect()).await;
        let mut hands = world.claim(20, 20).await;
        assert_eq!(hands.len(), 2);
        world.limit(scope.clone(), Some(5), 21).await;
        hands.extend(world.claim(20, 22).await);
        assert_eq!(hands.len(), 5);
        world.limit(scope.clone(), Some(3), 23).await;
        for job in hands.drain(..2) {
            assert!(world.claim(20, 24).await.is_empty());
            world.complete(&job, 25).await;
        }
        assert!(world.claim(20, 26).await.is_empty(), "three of three");
        world.complete(&hands.remove(0), 27).await;
        hands.extend(world.claim(20, 28).await);
        assert_eq!(hands.len(), 3);
        world.limit(scope, None, 29).await;
        hands.extend(world.claim(20, 30).await);
        assert_eq!(hands.len(), 9);
        for job in &hands {
            world.complete(job, 31).await;
        }
    }
}

pub async fn a_job_that_waited_for_a_limit_has_it_in_its_log(world: &World) {
    world.limit(key("k"), Some(1), 0).await;
    world.limit(queue("mail"), Some(1), 0).await;
    world.rate(kind("r"), 1, 10_000, 0).await;
    let cases = [
        (world.job("a", 0).of("k"), world.job("a", 1).of("k"), "concurrencyKey k: 1 of 1 running"),
        (world.job("a", 2).queue("mail"), world.job("a", 3).queue("mail"), "queue mail: 1 of 1 running"),
        (world.job("r", 4), world.job("r", 5), "type r: rate of 1 start per 10 s"),
    ];
    let mut now = 2_000;
    for (first, second, text) in cases {
        let (first, second) = (world.submit(first).await, world.submit(second).await);
        let job = world.claim_one(now).await;
        assert_eq!((job.id, job.limited.clone()), (first, None));
        assert!(world.claim(5, now + 1_500).await.is_empty());
        let log = world.get(second).await.execution_log;
        let last = log.last().unwrap();
        assert_eq!((last.event.as_str(), last.details.as_str()), ("limited", text));
        assert!(last.timestamp >= world.at(now), "{text}");
        world.complete(&job, now + 1_600).await;
        let job = world.claim_one(now + 15_000).await;
        let (since, by) = job.limited.clone().expect(text);
        assert_eq!((job.id, by.as_str()), (second, text));
        assert!(since >= world.at(now) && since <= world.at(now + 1_500));
        world.complete(&job, now + 15_001).await;
        now += 20_000;
    }
    let free = world.submit(world.job("free", 0)).await;
    assert_eq!(world.claim_one(now).await.limited, None);
    assert_eq!(world.events(free).await, ["created", "queued", "assigned"]);
}

pub async fn keyed_jobs_have_a_key_queue_however_they_became_ready(world: &World) {
    world.limit(key("k"), Some(1), 0).await;
    let parent = world.submit(world.job("p", 0)).await;
    let child = world.submit(world.job("a", 1).of("k").after(&[parent])).await;
    let delayed = world.submit(world.job("a", 2).of("k").scheduled(world.at(100))).await;
    let gone = world.submit(world.job("a", 3).of("k").expires(world.at(50))).await;
    let cancelled_id = world.submit(world.job("a", 4).of("k")).await;
    let moved = world.submit(world.job("a", 5).of("k")).await;
    world.ledger.prove().await;
    world.cancel(cancelled_id, 10).await;
    world.patch(moved, faena_store::JobPatch { priority: Some(Priority::Critical), ..Default::default() }, 11).await;
    world.ledger.prove().await;
    let job = world.claim_one(12).await;
    world.complete(&job, 13).await;
    let first = if job.id == parent { world.claim_one(14).await } else { job };
    assert_eq!(first.id, moved, "the most urgent of the key's jobs");
    if world.state(moved).await == JobState::Assigned {
        world.complete(&first, 15).await;
    }
    world.promote(60).await;
    world.promote(110).await;
    world.ledger.prove().await;
    assert_eq!(world.state(gone).await, JobState::Failed);
    if world.state(parent).await == JobState::Queued {
        let jobs = world.claim(5, 111).await;
        assert!(jobs.iter().any(|job| job.id == parent));
        for job in jobs {
            world.complete(&job, 112).await;
        }
    }
    world.retry_by_person(cancelled_id, 120).await;
    world.promote(121).await;
    world.ledger.prove().await;
    for now in (130..200).step_by(2) {
        let jobs = world.claim(9, now).await;
        assert!(jobs.len() <= 1);
        for job in jobs {
            world.complete(&job, now + 1).await;
        }
    }
    let done = JobState::Completed;
    assert_eq!(world.states([child, delayed, cancelled_id, moved, parent]).await, [done; 5]);
    assert_eq!(world.ledger.number("SELECT count(*) FROM key_queue").await, 0, "no line is left behind");
}

pub async fn keyed_jobs_in_lanes_without_keys_still_run(world: &World) {
    let id = world.submit(world.job("a", 0).of("k").retries(2)).await;
    // A keyed job in a lane without key queues.
    world
        .ledger
        .run(
            "DELETE FROM key_queue; UPDATE ready SET key = NULL;
             UPDATE lane SET keyed = (SELECT count(*) > 1 FROM lane)",
        )
        .await;
    let next = world.reopen(StoreOptions::default()).await;
    next.limit(key("k"), Some(1), 1).await;
    let job = next.claim_one(2).await;
    assert_eq!(job.id, id);
    next.retry_at(&job, 3, 3).await;
    next.promote(4).await;
    next.patch(id, faena_store::JobPatch { priority: Some(Priority::High), ..Default::default() }, 5).await;
    let new = next.submit(next.job("a", 6).of("k")).await;
    let jobs = next.claim(5, 7).await;
    assert_eq!(jobs.len(), 2, "the old one counts for no key");
    for job in &jobs {
        next.complete(job, 8).await;
    }
    assert_eq!(next.states([id, new]).await, [JobState::Completed; 2]);
    next.store.close().await;
}

pub async fn many_workers_in_one_call_share_what_a_limit_allows(world: &World) {
    world.limit(kind("a"), Some(5), 0).await;
    world.limit(key("*"), Some(1), 0).await;
    world.submit_all((0..20).map(|n| world.job("a", n)).collect()).await;
    world.submit_all((0..6).map(|n| world.job("b", n).of(&format!("k{}", n % 2))).collect()).await;
    let mut asks = Vec::new();
    for n in 0..8 {
        let worker = world.admit(world.worker(&format!("w{n}")), 30).await;
        let owner = Owner::Worker { id: worker.id, session: worker.session };
        let lanes = world.lanes().await;
        let lanes = if n % 2 == 0 { lanes } else { lanes[..1].to_vec() };
        asks.push(ClaimRequest { owner, lanes, limit: 2, at_once: 2 });
    }
    let gone = Owner::Worker { id: WorkerId::new(), session: 1 };
    asks.insert(0, ClaimRequest { owner: gone, lanes: world.lanes().await, limit: 2, at_once: 2 });
    let claims = world.store.job_claim(asks, world.at(40)).await.unwrap();
    assert!(claims[0].refused && claims[0].jobs.is_empty());
    let kinds = |with: bool| {
        claims.iter().flat_map(|claim| &claim.jobs).filter(|job| job.options.concurrency_key.is_some() == with).count()
    };
    assert_eq!((kinds(false), kinds(true)), (5, 2));
    assert!(claims.iter().all(|claim| claim.jobs.len() <= 2));
}

pub async fn claiming_ahead_does_not_delay_other_requests_of_the_same_call(world: &World) {
    world.limit(kind("a"), Some(8), 0).await;
    world.limit(key("*"), Some(2), 0).await;
    world.submit_all((0..20).map(|n| world.job("a", n)).collect()).await;
    world.submit_all((0..20).map(|n| world.job("b", n).of("k")).collect()).await;
    let lanes = world.lanes().await;
    for (lane, most) in [(lanes[0], 8), (lanes[1], 2)] {
        let mut asks = vec![ClaimRequest { owner: Owner::Node(world.node), lanes: vec![lane], limit: 20, at_once: 0 }];
        for n in 0..4 {
            let worker = world.admit(world.worker(&format!("w{n}")), 30).await;
            let owner = Owner::Worker { id: worker.id, session: worker.session };
            asks.push(ClaimRequest { owner, lanes: vec![lane], limit: 2, at_once: 2 });
        }
        let claims = world.store.job_claim(asks, world.at(40)).await.unwrap();
        let got: Vec<usize> = claims.iter().map(|claim| claim.jobs.len()).collect();
        assert_eq!(got[0], most / 4, "{got:?}");
        assert_eq!(got.iter().sum::<usize>(), most, "{got:?}");
    }
}
