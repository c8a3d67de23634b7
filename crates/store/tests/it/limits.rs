//! Limits of the system, queues, types and keys.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicI64, Ordering},
};

use faena_domain::{ErrorReason, JobId, JobState, Limit, NodeId, Priority, Scope, WorkerId};
use faena_store::{
    AuditFilter, ClaimRequest, ClaimedJob, ConfiguredRules, Owner, RunEnd, RunOutcome, Signal, StoreOptions, Tally,
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

pub async fn ids(fixture: &Fixture, limit: usize, ms: i64) -> Vec<JobId> {
    fixture.claim(limit, ms).await.into_iter().map(|job| job.id).collect()
}

/// Returns the number of jobs in flight by the name of each limit. Reads each table with one statement.
async fn in_flight(fixture: &Fixture) -> BTreeMap<String, i64> {
    let mut in_flight_by_limit = BTreeMap::new();
    let sql =
        "SELECT l.queue, l.type, sum(c.n) FROM counter c JOIN lane l ON l.id = c.lane WHERE c.tally = 2 GROUP BY 1, 2";
    for row in fixture.database.rows(sql).await {
        let n: i64 = row[2].parse().unwrap();
        for name in ["system".to_owned(), format!("queue {}", row[0]), format!("type {}", row[1])] {
            *in_flight_by_limit.entry(name).or_default() += n;
        }
    }
    for row in fixture.database.rows("SELECT key, count(*) FROM key_in_flight GROUP BY key").await {
        in_flight_by_limit.insert(format!("key {}", row[0]), row[1].parse().unwrap());
    }
    in_flight_by_limit
}

async fn assert_within(fixture: &Fixture, limits: &[(&str, i64)]) {
    for (name, n) in in_flight(fixture).await {
        let most = limits.iter().filter(|(begin, _)| name.starts_with(begin)).map(|(_, most)| *most).min();
        assert!(n <= most.unwrap_or(i64::MAX), "{name}: {n} in flight, {most:?} allowed");
    }
}

struct RandomLoad<'a> {
    now: &'a AtomicI64,
    limits: &'a [(&'a str, i64)],
}

impl RandomLoad<'_> {
    fn tick(&self) -> i64 {
        self.now.fetch_add(1, Ordering::Relaxed)
    }

    /// Claims and ends jobs at random until all have finished.
    async fn run(&self, fixture: &Fixture, seed: u64) {
        let mut random = SeededRandom(seed);
        let mut claimed: Vec<ClaimedJob> = Vec::new();
        for round in 0..4_000 {
            let now = self.tick();
            match random.below(10) {
                0..4 => {
                    // Jobs claimed for an unknown node are released by a recovery.
                    let node = if random.chance(10) { NodeId::new() } else { fixture.node };
                    let jobs = fixture.claim_as(node, 1 + random.below(4), now).await;
                    if node == fixture.node {
                        claimed.extend(jobs);
                    }
                }
                4..8 if !claimed.is_empty() => {
                    let job = claimed.swap_remove(random.below(claimed.len()));
                    let outcome = match random.below(12) {
                        0 => fixture.retry(now + 1),
                        1 => RunOutcome::Released,
                        2 => failed("no"),
                        3 => cancelled(),
                        _ => completed(),
                    };
                    assert!(fixture.end(&job, outcome, now).await);
                }
                8 => {
                    fixture.promote(now).await;
                    fixture.recover(0, now).await;
                }
                9 if random.chance(20) => {
                    let all = fixture.list(Default::default()).await;
                    if let Some(id) = random.pick(&all) {
                        let _ = fixture.store.job_cancel(*id, "not wanted", None, fixture.at(now)).await;
                    }
                }
                _ => {}
            }
            assert_within(fixture, self.limits).await;
            let counts = fixture.store.counts().await.unwrap();
            let [queued, pending, in_flight, retrying] =
                [Tally::Queued, Tally::Pending, Tally::InFlight, Tally::Retrying].map(|tally| counts.total(tally));
            if queued + pending + in_flight + retrying == 0 {
                return;
            }
            if claimed.is_empty() && queued == 0 && in_flight > 0 && round > 3_000 {
                break;
            }
        }
        panic!("jobs are left: {:?}", in_flight(fixture).await);
    }
}

pub async fn no_claim_and_no_outcome_exceeds_a_limit(fixture: &Fixture) {
    fixture.limit(Scope::System, Some(7), 0).await;
    fixture.limit(queue("slow"), Some(3), 0).await;
    fixture.limit(kind("b"), Some(4), 0).await;
    fixture.limit(key("*"), Some(2), 0).await;
    let limits = [("system", 7), ("queue slow", 3), ("type b", 4), ("key ", 2)];
    let mut others = Vec::new();
    if fixture.store.database_kind() == "postgres" {
        for _ in 0..2 {
            others.push(fixture.reopen(StoreOptions::default()).await);
        }
    }
    let mut random = SeededRandom(7);
    let mut jobs = Vec::new();
    for n in 0..160 {
        let mut job =
            fixture.job(["a", "b"][random.below(2)], n / 40).queue(["default", "slow"][random.below(2)]).retries(9);
        if random.chance(60) {
            job = job.concurrency_key(&format!("k{}", random.below(5)));
        }
        jobs.push(job.priority(Priority::ALL[random.below(4)]));
    }
    fixture.submit_all(jobs).await;
    let load = RandomLoad { now: &AtomicI64::new(10), limits: &limits };
    let stores: Vec<&Fixture> = std::iter::once(fixture).chain(&others).collect();
    join_all((0..8_u64).map(|n| load.run(stores[n as usize % stores.len()], 100 + n))).await;
    let reached = "SELECT count(*) FROM limit_rule WHERE scope < 3 AND reached_at IS NOT NULL";
    assert_eq!(fixture.database.number(reached).await, 3, "each limit was reached");
    for other in &others {
        other.store.close().await;
    }
}

/// Submits two jobs under a limit of one, and checks that the next job starts only when the first is no longer in flight.
async fn assert_capacity_is_freed(fixture: &Fixture, scope: Scope, key_of_job: Option<&str>) {
    fixture.limit(scope.clone(), Some(1), 0).await;
    let new = |ms| {
        let job = fixture.job("a", ms).queue("q").retries(5);
        match key_of_job {
            Some(name) => job.concurrency_key(name),
            None => job,
        }
    };
    let without_other_rows =
        |job: &ClaimedJob, ms| RunEnd { may_have_other_rows: false, ..fixture.run_end(job, completed(), ms) };
    let mut now = 10;
    for ending in [
        "complete",
        "complete without other rows",
        "fail",
        "retry",
        "cancel",
        "release",
        "worker lost",
        "worker left",
        "node died",
        "time out",
    ] {
        let first = fixture.submit(new(now)).await;
        let second = fixture.submit(new(now + 1)).await;
        let worker = fixture.admit(fixture.worker(ending), now).await;
        let owner = match ending {
            "worker lost" | "worker left" => Owner::Worker { id: worker.id, session: worker.session },
            "node died" => Owner::Node(NodeId::new()),
            _ => Owner::Node(fixture.node),
        };
        let job = fixture.claim_for(owner, fixture.lanes().await, 5, now + 2).await;
        assert_eq!(job.iter().map(|job| job.id).collect::<Vec<_>>(), [first], "{scope}, {ending}: one is claimed");
        assert!(fixture.claim(5, now + 3).await.is_empty(), "{scope}, {ending}: the other waits");
        let job = &job[0];
        match ending {
            "complete" => fixture.complete(job, now + 4).await,
            "complete without other rows" => assert!(fixture.report_end(without_other_rows(job, now + 4)).await),
            "fail" => fixture.fail(job, now + 4).await,
            "retry" => fixture.retry_at(job, 90_000, now + 4).await,
            "cancel" => assert!(fixture.end(job, cancelled(), now + 4).await),
            "release" => fixture.release(job, now + 4).await,
            "worker lost" => drop(fixture.end_as_lost(&worker, 80_000, now + 4).await.unwrap()),
            "worker left" => {
                let end = faena_store::WorkerEnd::Left { reason: "done".into() };
                fixture.store.worker_end(worker.id, worker.session, end, fixture.at(now + 4)).await.unwrap().unwrap();
            }
            "node died" => assert_eq!(fixture.recover(0, now + 4).await.returned, 1),
            _ => {
                let expired = RunOutcome::Failed { error: "too late".into(), reason: ErrorReason::Timeout };
                assert!(fixture.end(job, expired, now + 4).await);
            }
        }
        let next = fixture.claim(5, now + 5).await;
        assert_eq!(next.len(), 1, "{scope}, {ending}: the next one is claimed");
        let is_requeued = matches!(ending, "release" | "worker left" | "node died");
        assert_eq!(next[0].id, if is_requeued { first } else { second }, "{scope}, {ending}");
        fixture.complete(&next[0], now + 6).await;
        if is_requeued {
            fixture.complete(&fixture.claim_one(now + 7).await, now + 8).await;
        }
        fixture.database.assert_consistent().await;
        now += 20;
    }
    fixture.limit(scope, None, now).await;
}

pub async fn a_limit_allows_another_job_however_the_first_ends(fixture: &Fixture) {
    assert_capacity_is_freed(fixture, Scope::System, None).await;
    assert_capacity_is_freed(fixture, queue("q"), None).await;
    assert_capacity_is_freed(fixture, kind("a"), None).await;
    assert_capacity_is_freed(fixture, key("tenant"), Some("tenant")).await;
    assert_capacity_is_freed(fixture, key("tenant-*"), Some("tenant-1")).await;
    assert_capacity_is_freed(fixture, queue("q"), Some("other")).await;
}

pub async fn a_limit_of_two_allows_only_the_first_two_jobs(fixture: &Fixture) {
    fixture.limit(queue("mail"), Some(2), 0).await;
    let all = fixture.submit_all((0..5).map(|n| fixture.job("a", n).queue("mail")).collect()).await;
    let other = fixture.submit(fixture.job("a", 9)).await;
    let claim = fixture.claim_with_limits(10, 10).await;
    let mut got: Vec<JobId> = claim.jobs.iter().map(|job| job.id).collect();
    got.sort_unstable();
    assert_eq!(got, [all[0], all[1], other], "the first two, and the job without a limit");
    let lane = fixture.lane_of(all[0]).await.id;
    assert_eq!(claim.limited.iter().map(|l| (l.lane, l.until)).collect::<Vec<_>>(), [(lane, None)]);
    let job = claim.jobs.iter().find(|job| job.id == all[1]).unwrap();
    fixture.complete(job, 11).await;
    assert_eq!(ids(fixture, 10, 12).await, [all[2]]);
}

pub async fn a_shared_limit_orders_by_score_and_not_by_lane(fixture: &Fixture) {
    fixture.limit(Scope::System, Some(3), 0).await;
    let late = fixture.submit(fixture.job("a", 30)).await;
    let early = fixture.submit_all((0..2).map(|n| fixture.job("b", n)).collect()).await;
    let urgent = fixture.submit(fixture.job("c", 40).priority(Priority::Critical)).await;
    assert_eq!(ids(fixture, 10, 50).await, [urgent, early[0], early[1]]);
    assert_eq!(fixture.state(late).await, JobState::Queued);
}

pub async fn prefetching_leaves_jobs_for_other_workers(fixture: &Fixture) {
    fixture.limit(kind("a"), Some(8), 0).await;
    fixture.submit_all((0..20).map(|n| fixture.job("a", n)).collect()).await;
    let claim = async |limit, idle_slots, ms| {
        let request = ClaimRequest {
            owner: Owner::Node(fixture.node),
            lanes: fixture.lanes().await,
            limit,
            idle_slots,
            candidates: None,
        };
        fixture.store.job_claim(vec![request], fixture.at(ms)).await.unwrap().remove(0)
    };
    assert_eq!(claim(20, 1, 50).await.jobs.len(), 2, "a quarter of the free concurrency");
    assert_eq!(claim(20, 4, 51).await.jobs.len(), 4, "as many as can start immediately");
    let none = claim(20, 0, 52).await;
    assert!(none.jobs.is_empty());
    assert!(none.limited[0].until.is_some(), "the limit is not reached, so the next claim comes soon");
    assert_eq!(claim(20, 20, 53).await.jobs.len(), 2);
    assert_eq!(claim(20, 20, 54).await.limited[0].until, None);
}

pub async fn a_blocked_key_does_not_delay_others(fixture: &Fixture) {
    fixture.limit(key("*"), Some(1), 0).await;
    let busy = fixture.submit_all((0..200).map(|n| fixture.job("a", n / 10).concurrency_key("busy")).collect()).await;
    let first = fixture.claim_one(30).await;
    assert_eq!(first.id, busy[0]);
    let other = fixture.submit(fixture.job("a", 40).concurrency_key("other")).await;
    let free = fixture.submit(fixture.job("a", 41)).await;
    let mut got = ids(fixture, 10, 50).await;
    got.sort_unstable();
    assert_eq!(got, [other, free]);
    fixture.complete(&first, 60).await;
    assert_eq!(ids(fixture, 10, 61).await, [busy[1]], "its own jobs first in, first out");
}

pub async fn a_key_below_its_limit_is_found_behind_many_keys_at_their_limit(fixture: &Fixture) {
    fixture.limit(key("*"), Some(1), 0).await;
    let jobs = (0..900).map(|n| fixture.job("a", n / 300).concurrency_key(&format!("k{}", n % 300))).collect();
    fixture.submit_all(jobs).await;
    assert_eq!(fixture.claim(1_000, 10).await.len(), 300);
    let last = fixture.submit(fixture.job("a", 20).concurrency_key("last")).await;
    assert_eq!(ids(fixture, 1, 30).await, [last]);
    fixture.limit(key("*"), Some(2), 40).await;
    assert_eq!(fixture.claim(1_000, 50).await.len(), 300);
}

pub async fn one_key_in_two_lanes_shares_its_limit(fixture: &Fixture) {
    fixture.limit(key("k"), Some(1), 0).await;
    let a = fixture.submit(fixture.job("a", 0).concurrency_key("k")).await;
    let b = fixture.submit(fixture.job("b", 1).queue("q").concurrency_key("k")).await;
    let first = fixture.claim_one(2).await;
    assert_eq!(first.id, a);
    assert!(fixture.claim(5, 3).await.is_empty());
    let mut signals = fixture.store.signals();
    fixture.complete(&first, 4).await;
    let lane = fixture.lane_of(b).await.id;
    loop {
        if signals.recv().await.unwrap() == Signal::Ready(lane) {
            break;
        }
    }
    assert_eq!(fixture.claim_one(5).await.id, b);
}

pub async fn the_end_of_a_job_under_a_limit_is_signalled(fixture: &Fixture) {
    fixture.limit(kind("a"), Some(1), 0).await;
    for may_have_other_rows in [false, true] {
        let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
        let mut signals = fixture.store.signals();
        let end = RunEnd { may_have_other_rows, ..fixture.run_end(&job, completed(), 1) };
        assert!(fixture.report_end(end).await);
        while signals.recv().await.unwrap() != Signal::Capacity {}
    }
    fixture.submit(fixture.job("a", 2)).await;
    fixture.claim_as(NodeId::new(), 1, 3).await;
    let mut signals = fixture.store.signals();
    fixture.recover(0, 4).await;
    while signals.recv().await.unwrap() != Signal::Capacity {}
}

pub async fn settings_made_through_the_api_override_the_configuration_until_they_are_reset(fixture: &Fixture) {
    let scope = Scope::Queue("mail".into());
    let limit = |most| Limit { concurrency: Some(most), rate: None };
    let configured = ConfiguredRules { limits: vec![(scope.clone(), limit(2))], ..ConfiguredRules::default() };
    fixture.store.rules_configure(configured.clone(), fixture.start).await.unwrap();
    fixture.store.limit_set(scope.clone(), Limit::default(), "ana", fixture.at(1)).await.unwrap();
    fixture.store.rules_configure(configured, fixture.at(2)).await.unwrap();
    assert_eq!(fixture.store.rules().limits.get(&scope), None, "it stays removed");
    fixture.store.limit_reset(scope.clone(), Some(limit(2)), "ana", fixture.at(3)).await.unwrap();
    assert_eq!(fixture.store.rules().limits.get(&scope), Some(&limit(2)));
    assert_eq!(fixture.store.limits().await.unwrap()[0].origin, "config");
    fixture.store.limit_reset(scope, None, "ana", fixture.at(4)).await.unwrap();
    assert_eq!(fixture.store.limits().await.unwrap(), []);
    let reported = fixture
        .store
        .audit_list(AuditFilter { actor: Some("ana".into()), ..AuditFilter::default() }, 10)
        .await
        .unwrap();
    let actions: Vec<&str> = reported.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["limit.reset", "limit.reset", "limit.set"]);
}

pub async fn a_limit_can_be_raised_lowered_and_removed_while_jobs_run(fixture: &Fixture) {
    for (scope, name) in [(key("k"), Some("k")), (queue("default"), None)] {
        let new = |ms| match name {
            Some(name) => fixture.job("a", ms).concurrency_key(name),
            None => fixture.job("a", ms),
        };
        fixture.limit(scope.clone(), Some(2), 0).await;
        fixture.submit_all((0..12).map(new).collect()).await;
        let mut claimed = fixture.claim(20, 20).await;
        assert_eq!(claimed.len(), 2);
        fixture.limit(scope.clone(), Some(5), 21).await;
        claimed.extend(fixture.claim(20, 22).await);
        assert_eq!(claimed.len(), 5);
        fixture.limit(scope.clone(), Some(3), 23).await;
        for job in claimed.drain(..2) {
            assert!(fixture.claim(20, 24).await.is_empty());
            fixture.complete(&job, 25).await;
        }
        assert!(fixture.claim(20, 26).await.is_empty(), "three of three");
        fixture.complete(&claimed.remove(0), 27).await;
        claimed.extend(fixture.claim(20, 28).await);
        assert_eq!(claimed.len(), 3);
        fixture.limit(scope, None, 29).await;
        claimed.extend(fixture.claim(20, 30).await);
        assert_eq!(claimed.len(), 9);
        for job in &claimed {
            fixture.complete(job, 31).await;
        }
    }
}

pub async fn the_log_of_a_job_names_the_limit_it_waited_for(fixture: &Fixture) {
    fixture.limit(key("k"), Some(1), 0).await;
    fixture.limit(queue("mail"), Some(1), 0).await;
    fixture.rate(kind("r"), 1, 10_000, 0).await;
    let cases = [
        (
            fixture.job("a", 0).concurrency_key("k"),
            fixture.job("a", 1).concurrency_key("k"),
            "concurrencyKey k: 1 of 1 running",
        ),
        (fixture.job("a", 2).queue("mail"), fixture.job("a", 3).queue("mail"), "queue mail: 1 of 1 running"),
        (fixture.job("r", 4), fixture.job("r", 5), "type r: rate of 1 start per 10 s"),
    ];
    let mut now = 2_000;
    for (first, second, text) in cases {
        let (first, second) = (fixture.submit(first).await, fixture.submit(second).await);
        let job = fixture.claim_one(now).await;
        assert_eq!((job.id, job.limited.clone()), (first, None));
        assert!(fixture.claim(5, now + 1_500).await.is_empty());
        let log = fixture.get(second).await.execution_log;
        let last = log.last().unwrap();
        assert_eq!((last.event.as_str(), last.details.as_str()), ("limited", text));
        assert!(last.timestamp >= fixture.at(now), "{text}");
        fixture.complete(&job, now + 1_600).await;
        let job = fixture.claim_one(now + 15_000).await;
        let (since, by) = job.limited.clone().expect(text);
        assert_eq!((job.id, by.as_str()), (second, text));
        assert!(since >= fixture.at(now) && since <= fixture.at(now + 1_500));
        fixture.complete(&job, now + 15_001).await;
        now += 20_000;
    }
    let free = fixture.submit(fixture.job("free", 0)).await;
    assert_eq!(fixture.claim_one(now).await.limited, None);
    assert_eq!(fixture.events(free).await, ["created", "queued", "assigned"]);
}

pub async fn keyed_jobs_have_a_key_queue_however_they_became_ready(fixture: &Fixture) {
    fixture.limit(key("k"), Some(1), 0).await;
    let parent = fixture.submit(fixture.job("p", 0)).await;
    let child = fixture.submit(fixture.job("a", 1).concurrency_key("k").after(&[parent])).await;
    let delayed = fixture.submit(fixture.job("a", 2).concurrency_key("k").scheduled(fixture.at(100))).await;
    let expired = fixture.submit(fixture.job("a", 3).concurrency_key("k").expires(fixture.at(50))).await;
    let cancelled_id = fixture.submit(fixture.job("a", 4).concurrency_key("k")).await;
    let moved = fixture.submit(fixture.job("a", 5).concurrency_key("k")).await;
    fixture.database.assert_consistent().await;
    fixture.cancel(cancelled_id, 10).await;
    fixture.patch(moved, faena_store::JobPatch { priority: Some(Priority::Critical), ..Default::default() }, 11).await;
    fixture.database.assert_consistent().await;
    let job = fixture.claim_one(12).await;
    fixture.complete(&job, 13).await;
    let first = if job.id == parent { fixture.claim_one(14).await } else { job };
    assert_eq!(first.id, moved, "the key's job with the highest priority");
    if fixture.state(moved).await == JobState::Assigned {
        fixture.complete(&first, 15).await;
    }
    fixture.promote(60).await;
    fixture.promote(110).await;
    fixture.database.assert_consistent().await;
    assert_eq!(fixture.state(expired).await, JobState::Failed);
    if fixture.state(parent).await == JobState::Queued {
        let jobs = fixture.claim(5, 111).await;
        assert!(jobs.iter().any(|job| job.id == parent));
        for job in jobs {
            fixture.complete(&job, 112).await;
        }
    }
    fixture.retry_manually(cancelled_id, 120).await;
    fixture.promote(121).await;
    fixture.database.assert_consistent().await;
    for now in (130..200).step_by(2) {
        let jobs = fixture.claim(9, now).await;
        assert!(jobs.len() <= 1);
        for job in jobs {
            fixture.complete(&job, now + 1).await;
        }
    }
    let done = JobState::Completed;
    assert_eq!(fixture.states([child, delayed, cancelled_id, moved, parent]).await, [done; 5]);
    assert_eq!(fixture.database.number("SELECT count(*) FROM key_queue").await, 0, "no key queue is left");
}

pub async fn keyed_jobs_in_lanes_without_keys_still_run(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0).concurrency_key("k").retries(2)).await;
    // A keyed job in a lane without key queues.
    fixture
        .database
        .run(
            "DELETE FROM key_queue; UPDATE ready SET key = NULL;
             UPDATE lane SET keyed = (SELECT count(*) > 1 FROM lane)",
        )
        .await;
    let next = fixture.reopen(StoreOptions::default()).await;
    next.limit(key("k"), Some(1), 1).await;
    let job = next.claim_one(2).await;
    assert_eq!(job.id, id);
    next.retry_at(&job, 3, 3).await;
    next.promote(4).await;
    next.patch(id, faena_store::JobPatch { priority: Some(Priority::High), ..Default::default() }, 5).await;
    let new = next.submit(next.job("a", 6).concurrency_key("k")).await;
    let jobs = next.claim(5, 7).await;
    assert_eq!(jobs.len(), 2, "the old one does not count for the key");
    for job in &jobs {
        next.complete(job, 8).await;
    }
    assert_eq!(next.states([id, new]).await, [JobState::Completed; 2]);
    next.store.close().await;
}

pub async fn many_workers_in_one_call_share_what_a_limit_allows(fixture: &Fixture) {
    fixture.limit(kind("a"), Some(5), 0).await;
    fixture.limit(key("*"), Some(1), 0).await;
    fixture.submit_all((0..20).map(|n| fixture.job("a", n)).collect()).await;
    fixture.submit_all((0..6).map(|n| fixture.job("b", n).concurrency_key(&format!("k{}", n % 2))).collect()).await;
    let mut requests = Vec::new();
    for n in 0..8 {
        let worker = fixture.admit(fixture.worker(&format!("w{n}")), 30).await;
        let owner = Owner::Worker { id: worker.id, session: worker.session };
        let lanes = fixture.lanes().await;
        let lanes = if n % 2 == 0 { lanes } else { lanes[..1].to_vec() };
        requests.push(ClaimRequest { owner, lanes, limit: 2, idle_slots: 2, candidates: None });
    }
    let unknown = Owner::Worker { id: WorkerId::new(), session: 1 };
    requests.insert(
        0,
        ClaimRequest { owner: unknown, lanes: fixture.lanes().await, limit: 2, idle_slots: 2, candidates: None },
    );
    let claims = fixture.store.job_claim(requests, fixture.at(40)).await.unwrap();
    assert!(claims[0].rejected && claims[0].jobs.is_empty());
    let (keyed, plain): (Vec<&ClaimedJob>, Vec<&ClaimedJob>) =
        claims.iter().flat_map(|claim| &claim.jobs).partition(|job| job.options.concurrency_key.is_some());
    assert_eq!((plain.len(), keyed.len()), (5, 2));
    assert!(claims.iter().all(|claim| claim.jobs.len() <= 2));
}

pub async fn prefetching_does_not_delay_other_requests_of_the_same_call(fixture: &Fixture) {
    fixture.limit(kind("a"), Some(8), 0).await;
    fixture.limit(key("*"), Some(2), 0).await;
    fixture.submit_all((0..20).map(|n| fixture.job("a", n)).collect()).await;
    fixture.submit_all((0..20).map(|n| fixture.job("b", n).concurrency_key("k")).collect()).await;
    let lanes = fixture.lanes().await;
    for (lane, most) in [(lanes[0], 8), (lanes[1], 2)] {
        let mut requests = vec![ClaimRequest {
            owner: Owner::Node(fixture.node),
            lanes: vec![lane],
            limit: 20,
            idle_slots: 0,
            candidates: None,
        }];
        for n in 0..4 {
            let worker = fixture.admit(fixture.worker(&format!("w{n}")), 30).await;
            let owner = Owner::Worker { id: worker.id, session: worker.session };
            requests.push(ClaimRequest { owner, lanes: vec![lane], limit: 2, idle_slots: 2, candidates: None });
        }
        let claims = fixture.store.job_claim(requests, fixture.at(40)).await.unwrap();
        let got: Vec<usize> = claims.iter().map(|claim| claim.jobs.len()).collect();
        assert_eq!(got[0], most / 4, "{got:?}");
        assert_eq!(got.iter().sum::<usize>(), most, "{got:?}");
    }
}
