//! Events on PostgreSQL: two nodes, switching events on and off under load, and a role that does not own the tables.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
};

use faena_domain::{JobState, NodeId, Timestamp};
use faena_store::{
    EventQuery, EventSubscription, OnRejected, OutboxResult, OutboxTakeRequest, StoreOptions, StoredEvent,
    SubscriptionMode,
};
use futures_util::future::join_all;

use crate::support::*;

fn subscription(name: &str, mode: SubscriptionMode, until: Timestamp) -> EventSubscription {
    EventSubscription { name: name.into(), types: vec!["*".into()], mode, until }
}

/// Submits and runs jobs with keys, dependents and retries.
async fn work(fixture: &Fixture, seed: u64, rounds: i64) {
    let mut random = SeededRandom(seed);
    let mut last = None;
    for n in 0..rounds {
        let ms = n * 10;
        let mut jobs =
            vec![fixture.job("mail", ms), fixture.job("mail", ms).concurrency_key(&format!("k{}", random.below(3)))];
        jobs[1].options.depends_on = last.into_iter().collect();
        last = Some(jobs[0].id);
        fixture.submit_all(jobs).await;
        for job in fixture.claim(4, ms + 1).await {
            match random.below(5) {
                0 => drop(fixture.end(&job, fixture.retry(ms + 5), ms + 2).await),
                1 => drop(fixture.end(&job, failed("no"), ms + 2).await),
                2 => {
                    fixture.report_update(&job, faena_store::RunUpdateKind::Started, ms + 1).await;
                    fixture.end(&job, completed(), ms + 2).await;
                }
                _ => drop(fixture.end(&job, completed(), ms + 2).await),
            }
        }
        fixture.promote(ms + 9).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_nodes_record_complete_events_and_publish_them_in_order_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let other = fixture.reopen(StoreOptions::default()).await;
        let mode = SubscriptionMode::Queue(OnRejected::Skip);
        fixture.store.event_subscribe(vec![subscription("s", mode, Timestamp::MAX)], fixture.at(0)).await.unwrap();
        let all_done = AtomicBool::new(false);
        let relay = async |fixture: &Fixture| {
            let node = NodeId::new();
            let mut sent: Vec<StoredEvent> = Vec::new();
            loop {
                let was_done = all_done.load(Ordering::Relaxed);
                let request = OutboxTakeRequest { sink: "s".into(), node, lease_ms: 60_000, limit: 50 };
                let taken = fixture.store.outbox_take(request, fixture.at(0)).await.unwrap();
                let result = |event: &faena_store::OutboxEvent| OutboxResult {
                    partition: event.partition,
                    position: event.event.position,
                    rejected: None,
                    retry_at: fixture.at(0),
                };
                let results = taken.events.iter().map(result).collect();
                fixture.store.outbox_settle("s", taken.partitions.clone(), results, fixture.at(0)).await.unwrap();
                if taken.events.is_empty() && was_done {
                    return sent;
                }
                sent.extend(taken.events.into_iter().map(|event| event.event));
            }
        };
        // Renews the subscription all the time, as servers do.
        let renewals = async {
            while !all_done.load(Ordering::Relaxed) {
                other
                    .store
                    .event_subscribe(vec![subscription("s", mode, Timestamp::MAX)], fixture.at(0))
                    .await
                    .unwrap();
                other.store.event_prune(fixture.at(-1_000), 10, fixture.at(0)).await.unwrap();
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let jobs = async {
            join_all([work(fixture, 1, 30), work(&other, 2, 30), work(fixture, 3, 30), work(&other, 4, 30)]).await;
            all_done.store(true, Ordering::Relaxed);
        };
        let (_, _, one, two) = tokio::join!(jobs, renewals, relay(fixture), relay(&other));
        let mut sequences: HashMap<uuid::Uuid, i64> = HashMap::new();
        for event in fixture.store.event_list(EventQuery::After(0), 1_000_000).await.unwrap() {
            let sequence = sequences.entry(event.subject).or_default();
            *sequence += 1;
            assert_eq!(event.sequence, *sequence, "sequences follow the order of positions: {event:?}");
        }
        for sent in [&one, &two] {
            let mut last: HashMap<uuid::Uuid, i64> = HashMap::new();
            for event in sent {
                let before = last.insert(event.subject, event.sequence);
                assert!(before.is_none_or(|before| before < event.sequence), "{event:?} after {before:?}");
            }
        }
        let recorded: i64 = sequences.values().sum();
        assert_eq!(one.len() + two.len(), usize::try_from(recorded).unwrap());
        assert!(recorded > 500);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn switching_events_on_and_off_under_load_loses_no_job_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let other = fixture.reopen(StoreOptions::default()).await;
        let all_done = AtomicBool::new(false);
        let switch = async {
            let mut times = 0;
            while !all_done.load(Ordering::Relaxed) {
                let (now, until) = (fixture.at(times), fixture.at(times + 1));
                // Under load these two calls may fail and are repeated. No other call may fail.
                let on = other.store.event_subscribe(vec![subscription("w", SubscriptionMode::Keep, until)], now).await;
                let off = other.store.event_prune(fixture.at(-1_000), 10, until).await;
                times += i64::from(on.is_ok() && off.is_ok());
            }
            times
        };
        let jobs = async {
            join_all([work(fixture, 1, 10), work(&other, 2, 10), work(fixture, 3, 10)]).await;
            all_done.store(true, Ordering::Relaxed);
        };
        let ((), times) = tokio::join!(jobs, switch);
        assert!(times > 0, "events were switched on and off");
        assert_eq!(fixture.list(Default::default()).await.len(), 60);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_does_not_own_the_tables_can_switch_events_on_and_record_them_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let role = format!("faena_guest_{}", uuid::Uuid::new_v4().simple());
        run_on(&fixture.url, &format!("CREATE ROLE {role} LOGIN")).await;
        for grant in [
            "USAGE ON SCHEMA faena",
            "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA faena",
            "USAGE ON ALL SEQUENCES IN SCHEMA faena",
        ] {
            run_on(&fixture.url, &format!("GRANT {grant} TO {role}")).await;
        }
        let mut url: url::Url = fixture.url.parse().unwrap();
        url.set_username(&role).unwrap();
        let options = StoreOptions { migrate: false, ..StoreOptions::default() };
        let guest = Fixture::open(url.into(), fixture.database.clone(), options).await;
        guest
            .store
            .event_subscribe(
                vec![subscription("s", SubscriptionMode::Queue(OnRejected::Skip), Timestamp::MAX)],
                guest.at(0),
            )
            .await
            .unwrap();
        let job = guest.submit_and_claim(guest.job("mail", 0)).await;
        guest.complete(&job, 1).await;
        assert_eq!(guest.state(job.id).await, JobState::Completed);
        assert_eq!(guest.store.event_list(EventQuery::After(0), 100).await.unwrap().len(), 5);
        let request = OutboxTakeRequest { sink: "s".into(), node: guest.node, lease_ms: 1_000, limit: 10 };
        assert_eq!(guest.store.outbox_take(request, guest.at(2)).await.unwrap().events.len(), 5);
        guest.store.close().await;
        run_on(&fixture.url, &format!("DROP OWNED BY {role}")).await;
        run_on(&fixture.url, &format!("DROP ROLE {role}")).await;
    })
    .await;
}
