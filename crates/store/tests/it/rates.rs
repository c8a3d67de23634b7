//! Rates, pauses and fairness of queues.

use std::collections::BTreeMap;

use faena_domain::{Fairness, Limit, NewJob, Pause, Rate, Scope};
use faena_store::{Configured, QueuePatch, StoreOptions};

use crate::{
    limits::{ids, key, kind, queue},
    support::*,
};

/// Claims everything at each of these times; returns how many jobs started.
async fn started(worlds: &[&World], times: &[i64]) -> Vec<usize> {
    let mut started = Vec::new();
    for (n, ms) in times.iter().enumerate() {
        started.push(worlds[n % worlds.len()].claim(50, *ms).await.len());
    }
    started
}

pub async fn a_rate_allows_its_count_and_then_one_by_one(world: &World) {
    let mut others = Vec::new();
    if world.store.engine() == "postgres" {
        others.push(world.reopen(StoreOptions::default()).await);
    }
    let worlds: Vec<&World> = std::iter::once(world).chain(&others).collect();
    let mut base = 0;
    for (scope, name) in [(Scope::System, None), (queue("default"), None), (kind("a"), None), (key("k*"), Some("k1"))] {
        world.rate(scope.clone(), 4, 1_000, base).await;
        for other in &others {
            other.store.rules_load().await.unwrap();
        }
        let jobs = (0..12).map(|_| match name {
            Some(name) => world.job("a", base).of(name),
            None => world.job("a", base),
        });
        let all = world.submit_all(jobs.collect()).await;
        let at = |ms: i64| base + ms;
        let claim = world.claim_whole(3, at(1)).await;
        assert_eq!(claim.jobs.len(), 3, "{scope}");
        let claim = world.claim_whole(50, at(1)).await;
        assert_eq!(claim.jobs.len(), 1, "{scope}");
        let lane = world.lane_of(all[0]).await.id;
        let limited = claim.limited.iter().find(|limited| limited.lane == lane).unwrap();
        assert_eq!(limited.until, Some(world.at(at(251))), "{scope}");
        let times = [at(1), at(250), at(251), at(252), at(500), at(501), at(1_250), at(1_251)];
        assert_eq!(started(&worlds, &times).await, [0, 0, 1, 0, 0, 1, 2, 1], "{scope}");
        world.store.limit_set(scope, Default::default(), "test", world.at(at(1_300))).await.unwrap();
        for other in &others {
            other.store.rules_load().await.unwrap();
        }
        assert_eq!(world.claim(50, at(1_400)).await.len(), 3);
        base += 5_000;
    }
    for other in &others {
        other.store.close().await;
    }
}

pub async fn a_rate_takes_no_more_than_was_started(world: &World) {
    world.rate(kind("a"), 5, 1_000, 0).await;
    world.submit_all((0..2).map(|n| world.job("a", n)).collect()).await;
    assert_eq!(world.claim(50, 10).await.len(), 2);
    world.submit_all((0..9).map(|n| world.job("a", 11 + n)).collect()).await;
    assert_eq!(world.claim(50, 20).await.len(), 3);
}

fn pause(world: &World, ms: i64) -> QueuePatch {
    let pause = Pause { at: world.at(ms), by: "ana".into(), reason: None };
    QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() }
}

pub async fn a_paused_queue_gives_nothing_until_it_is_resumed(world: &World) {
    let a = world.submit(world.job("a", 0).queue("p")).await;
    let b = world.submit(world.job("a", 1).queue("p").of("k")).await;
    let c = world.submit(world.job("a", 2)).await;
    world.store.queue_set("p", pause(world, 3), "ana", world.at(3)).await.unwrap();
    let claim = world.claim_whole(5, 4).await;
    assert_eq!(claim.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [c]);
    assert_eq!(claim.limited.len(), 2);
    assert!(claim.limited.iter().all(|limited| limited.until.is_none()));
    let next = world.reopen(StoreOptions::default()).await;
    assert!(next.claim(5, 5).await.is_empty(), "after a restart, on another node");
    let resume = QueuePatch { paused: Some(None), ..QueuePatch::default() };
    next.store.queue_set("p", resume, "ana", next.at(6)).await.unwrap();
    assert_eq!(ids(&next, 5, 7).await, [a, b]);
    next.store.close().await;
}

async fn make_fair(world: &World, name: &str) {
    let patch = QueuePatch { fairness: Some(Fairness::Key), ..QueuePatch::default() };
    world.store.queue_set(name, patch, "test", world.start).await.unwrap();
}

pub async fn keys_take_turns_in_a_fair_queue(world: &World) {
    make_fair(world, "default").await;
    let jobs =
        |key: &str, count: i64, ms: i64| -> Vec<NewJob> { (0..count).map(|_| world.job("a", ms).of(key)).collect() };
    world.submit_all(jobs("big", 2_000, 0)).await;
    world.submit_all(jobs("small", 10, 1)).await;
    world.submit_all((0..30).map(|_| world.job("a", 2)).collect()).await;
    let mut served: BTreeMap<String, usize> = BTreeMap::new();
    for n in 0..10 {
        for job in world.claim(3, 10 + n).await {
            *served.entry(job.options.concurrency_key.unwrap_or_default()).or_default() += 1;
        }
    }
    assert_eq!(served.into_iter().collect::<Vec<_>>(), [("".into(), 10), ("big".into(), 10), ("small".into(), 10)]);
    world.submit_all(jobs("small", 10, 30)).await;
    let mut keys = Vec::new();
    for _ in 0..9 {
        keys.push(world.claim_one(40).await.options.concurrency_key.unwrap_or_default());
    }
    for key in ["", "big", "small"] {
        assert_eq!(keys.iter().filter(|served| *served == key).count(), 3, "one by one, at one time: {keys:?}");
    }
}

pub async fn without_fairness_the_longest_waiting_job_goes_first(world: &World) {
    let jobs = (0..60).map(|n| world.job("a", n).of(&format!("k{}", if n < 40 { 0 } else { n }))).collect();
    let all = world.submit_all(jobs).await;
    assert_eq!(ids(world, 45, 100).await, all[..45]);
    assert_eq!(ids(world, 50, 101).await, all[45..]);
}

pub async fn the_tokens_of_a_rate_survive_a_restart(world: &World) {
    let rate = Rate { count: 4, period_ms: 1_000 };
    let configured = |rate| {
        let limit = Limit { concurrency: None, rate: Some(rate) };
        Configured { limits: vec![(kind("a"), limit), (Scope::System, limit)], queues: Vec::new() }
    };
    world.store.rules_configure(configured(rate), world.at(0)).await.unwrap();
    world.submit_all((0..20).map(|n| world.job("a", n)).collect()).await;
    assert_eq!(world.claim(3, 100).await.len(), 3);
    let next = world.reopen(StoreOptions::default()).await;
    next.store.rules_configure(configured(rate), next.at(100)).await.unwrap();
    assert_eq!(next.claim(9, 100).await.len(), 1, "the configuration said nothing new");
    next.store.rules_configure(configured(Rate { count: 5, ..rate }), next.at(101)).await.unwrap();
    assert_eq!(next.claim(9, 101).await.len(), 5, "another rate begins anew");
    next.store.rules_configure(Configured::default(), next.at(102)).await.unwrap();
    assert!(next.store.limits().await.unwrap().is_empty());
    assert_eq!(next.claim(50, 103).await.len(), 11);
    next.store.close().await;
}
