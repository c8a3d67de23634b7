//! Rates, pauses and fairness of queues.

use std::collections::BTreeMap;

use faena_domain::{Fairness, Limit, NewJob, Pause, Rate, Scope};
use faena_store::{ConfiguredRules, QueuePatch, StoreOptions};

use crate::{
    limits::{ids, key, kind, queue},
    support::*,
};

/// Claims up to 50 jobs at each of these times, through the fixtures in turn. Returns how many jobs each claim got.
async fn claimed_at(fixtures: &[&Fixture], times: &[i64]) -> Vec<usize> {
    let mut claimed = Vec::new();
    for (n, ms) in times.iter().enumerate() {
        claimed.push(fixtures[n % fixtures.len()].claim(50, *ms).await.len());
    }
    claimed
}

pub async fn a_rate_allows_a_burst_of_its_count_and_then_one_start_at_a_time(fixture: &Fixture) {
    let mut others = Vec::new();
    if fixture.store.database_kind() == "postgres" {
        others.push(fixture.reopen(StoreOptions::default()).await);
    }
    let fixtures: Vec<&Fixture> = std::iter::once(fixture).chain(&others).collect();
    let mut base = 0;
    for (scope, name) in [(Scope::System, None), (queue("default"), None), (kind("a"), None), (key("k*"), Some("k1"))] {
        fixture.rate(scope.clone(), 4, 1_000, base).await;
        for other in &others {
            other.store.rules_load().await.unwrap();
        }
        let jobs = (0..12).map(|_| match name {
            Some(name) => fixture.job("a", base).concurrency_key(name),
            None => fixture.job("a", base),
        });
        let all = fixture.submit_all(jobs.collect()).await;
        let at = |ms: i64| base + ms;
        let claim = fixture.claim_with_limits(3, at(1)).await;
        assert_eq!(claim.jobs.len(), 3, "{scope}");
        let claim = fixture.claim_with_limits(50, at(1)).await;
        assert_eq!(claim.jobs.len(), 1, "{scope}");
        let lane = fixture.lane_of(all[0]).await.id;
        let limited = claim.limited.iter().find(|limited| limited.lane == lane).unwrap();
        assert_eq!(limited.until, Some(fixture.at(at(251))), "{scope}");
        let times = [at(1), at(250), at(251), at(252), at(500), at(501), at(1_250), at(1_251)];
        assert_eq!(claimed_at(&fixtures, &times).await, [0, 0, 1, 0, 0, 1, 2, 1], "{scope}");
        fixture.store.limit_set(scope, Default::default(), "test", fixture.at(at(1_300))).await.unwrap();
        for other in &others {
            other.store.rules_load().await.unwrap();
        }
        assert_eq!(fixture.claim(50, at(1_400)).await.len(), 3);
        base += 5_000;
    }
    for other in &others {
        other.store.close().await;
    }
}

pub async fn a_rate_is_charged_only_for_claimed_jobs(fixture: &Fixture) {
    fixture.rate(kind("a"), 5, 1_000, 0).await;
    fixture.submit_all((0..2).map(|n| fixture.job("a", n)).collect()).await;
    assert_eq!(fixture.claim(50, 10).await.len(), 2);
    fixture.submit_all((0..9).map(|n| fixture.job("a", 11 + n)).collect()).await;
    assert_eq!(fixture.claim(50, 20).await.len(), 3);
}

fn pause(fixture: &Fixture, ms: i64) -> QueuePatch {
    let pause = Pause { at: fixture.at(ms), by: "ana".into(), reason: None };
    QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() }
}

pub async fn no_job_of_a_paused_queue_is_claimed_until_it_is_resumed(fixture: &Fixture) {
    let a = fixture.submit(fixture.job("a", 0).queue("p")).await;
    let b = fixture.submit(fixture.job("a", 1).queue("p").concurrency_key("k")).await;
    let c = fixture.submit(fixture.job("a", 2)).await;
    fixture.store.queue_set("p", pause(fixture, 3), "ana", fixture.at(3)).await.unwrap();
    let claim = fixture.claim_with_limits(5, 4).await;
    assert_eq!(claim.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [c]);
    assert_eq!(claim.limited.len(), 2);
    assert!(claim.limited.iter().all(|limited| limited.until.is_none()));
    let next = fixture.reopen(StoreOptions::default()).await;
    assert!(next.claim(5, 5).await.is_empty(), "after a restart, on another node");
    let resume = QueuePatch { paused: Some(None), ..QueuePatch::default() };
    next.store.queue_set("p", resume, "ana", next.at(6)).await.unwrap();
    assert_eq!(ids(&next, 5, 7).await, [a, b]);
    next.store.close().await;
}

async fn make_fair(fixture: &Fixture, name: &str) {
    let patch = QueuePatch { fairness: Some(Fairness::Key), ..QueuePatch::default() };
    fixture.store.queue_set(name, patch, "test", fixture.start).await.unwrap();
}

pub async fn a_fair_queue_serves_its_keys_round_robin(fixture: &Fixture) {
    make_fair(fixture, "default").await;
    let jobs = |key: &str, count: i64, ms: i64| -> Vec<NewJob> {
        (0..count).map(|_| fixture.job("a", ms).concurrency_key(key)).collect()
    };
    fixture.submit_all(jobs("big", 2_000, 0)).await;
    fixture.submit_all(jobs("small", 10, 1)).await;
    fixture.submit_all((0..30).map(|_| fixture.job("a", 2)).collect()).await;
    let mut served: BTreeMap<String, usize> = BTreeMap::new();
    for n in 0..10 {
        for job in fixture.claim(3, 10 + n).await {
            *served.entry(job.options.concurrency_key.unwrap_or_default()).or_default() += 1;
        }
    }
    assert_eq!(served.into_iter().collect::<Vec<_>>(), [("".into(), 10), ("big".into(), 10), ("small".into(), 10)]);
    fixture.submit_all(jobs("small", 10, 30)).await;
    let mut keys = Vec::new();
    for _ in 0..9 {
        keys.push(fixture.claim_one(40).await.options.concurrency_key.unwrap_or_default());
    }
    for key in ["", "big", "small"] {
        assert_eq!(
            keys.iter().filter(|served| *served == key).count(),
            3,
            "one job per claim, all at the same time: {keys:?}"
        );
    }
}

pub async fn without_fairness_the_longest_waiting_job_goes_first(fixture: &Fixture) {
    let jobs =
        (0..60).map(|n| fixture.job("a", n).concurrency_key(&format!("k{}", if n < 40 { 0 } else { n }))).collect();
    let all = fixture.submit_all(jobs).await;
    assert_eq!(ids(fixture, 45, 100).await, all[..45]);
    assert_eq!(ids(fixture, 50, 101).await, all[45..]);
}

pub async fn the_tokens_of_a_rate_survive_a_restart(fixture: &Fixture) {
    let rate = Rate { count: 4, period_ms: 1_000 };
    let configured = |rate| {
        let limit = Limit { concurrency: None, rate: Some(rate) };
        ConfiguredRules { limits: vec![(kind("a"), limit), (Scope::System, limit)], queues: Vec::new() }
    };
    fixture.store.rules_configure(configured(rate), fixture.at(0)).await.unwrap();
    fixture.submit_all((0..20).map(|n| fixture.job("a", n)).collect()).await;
    assert_eq!(fixture.claim(3, 100).await.len(), 3);
    let next = fixture.reopen(StoreOptions::default()).await;
    next.store.rules_configure(configured(rate), next.at(100)).await.unwrap();
    assert_eq!(next.claim(9, 100).await.len(), 1, "the configuration has not changed");
    next.store.rules_configure(configured(Rate { count: 5, ..rate }), next.at(101)).await.unwrap();
    assert_eq!(next.claim(9, 101).await.len(), 5, "a changed rate begins with a full bucket");
    next.store.rules_configure(ConfiguredRules::default(), next.at(102)).await.unwrap();
    assert!(next.store.limits().await.unwrap().is_empty());
    assert_eq!(next.claim(50, 103).await.len(), 11);
    next.store.close().await;
}
