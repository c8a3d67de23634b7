//! Events on PostgreSQL: many nodes, switching under load, and a role that does not own the tables.

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

fn want(name: &str, mode: SubscriptionMode, until: Timestamp) -> EventSubscription {
    EventSubscription { name: name.into(), types: vec!["*".into()], mode, until }
}

/// Jobs with keys, dependents and retries, until all have finished.
async fn work(world: &World, seed: u64, rounds: i64) {
    let mut dice = Dice(seed);
    let mut last = None;
    for n in 0..rounds {
        let ms = n * 10;
        let mut jobs = vec![world.job("mail", ms), world.job("mail", ms).of(&format!("k{}", dice.below(3)))];
        jobs[1].options.depends_on = last.into_iter().collect();
        last = Some(jobs[0].id);
        world.submit_all(jobs).await;
        for job in world.claim(4, ms + 1).await {
            match dice.below(5) {
                0 => drop(world.end(&job, world.retry(ms + 5), ms + 2).await),
                1 => drop(world.end(&job, failed("no"), ms + 2).await),
                2 => {
                    world.note(&job, faena_store::NoteKind::Started, ms + 1).await;
                    world.end(&job, completed(), ms + 2).await;
                }
                _ => drop(world.end(&job, completed(), ms + 2).await),
            }
        }
        world.promote(ms + 9).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_nodes_record_complete_events_and_publish_them_in_order() {
    on_postgres(async |world: &World| {
        let other = world.reopen(StoreOptions::default()).await;
        let mode = SubscriptionMode::Queue(OnRejected::Skip);
        world.store.event_subscribe(vec![want("s", mode, Timestamp::MAX)], world.at(0)).await.unwrap();
        let over = AtomicBool::new(false);
        let relay = async |world: &World| {
            let node = NodeId::new();
            let mut sent: Vec<StoredEvent> = Vec::new();
            loop {
                let was_over = over.load(Ordering::Relaxed);
                let ask = OutboxTakeRequest { sink: "s".into(), node, lease_ms: 60_000, limit: 50 };
                let taken = world.store.outbox_take(ask, world.at(0)).await.unwrap();
                let result = |event: &faena_store::OutboxEvent| OutboxResult {
                    partition: event.partition,
                    position: event.event.position,
                    refused: None,
                    again_at: world.at(0),
                };
                let results = taken.events.iter().map(result).collect();
                world.store.outbox_settle("s", taken.partitions.clone(), results, world.at(0)).await.unwrap();
                if taken.events.is_empty() && was_over {
                    return sent;
                }
                sent.extend(taken.events.into_iter().map(|event| event.event));
            }
        };
        // Subscriptions are renewed all the time, as servers do.
        let repeat = async {
            while !over.load(Ordering::Relaxed) {
                other.store.event_subscribe(vec![want("s", mode, Timestamp::MAX)], world.at(0)).await.unwrap();
                other.store.event_settle(world.at(-1_000), 10, world.at(0)).await.unwrap();
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let jobs = async {
            join_all([work(world, 1, 30), work(&other, 2, 30), work(world, 3, 30), work(&other, 4, 30)]).await;
            over.store(true, Ordering::Relaxed);
        };
        let (_, _, one, two) = tokio::join!(jobs, repeat, relay(world), relay(&other));
        let mut reported: HashMap<uuid::Uuid, i64> = HashMap::new();
        for event in world.store.event_list(EventQuery::After(0), 1_000_000).await.unwrap() {
            let sequence = reported.entry(event.subject).or_default();
            *sequence += 1;
            assert_eq!(event.sequence, *sequence, "in the order of their places: {event:?}");
        }
        for sent in [&one, &two] {
            let mut last: HashMap<uuid::Uuid, i64> = HashMap::new();
            for event in sent {
                let before = last.insert(event.subject, event.sequence);
                assert!(before.is_none_or(|before| before < event.sequence), "{event:?} after {before:?}");
            }
        }
        let made: i64 = reported.values().sum();
        assert_eq!(one.len() + two.len(), usize::try_from(made).unwrap());
        assert!(made > 500);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn switching_events_on_and_off_under_load_costs_no_job() {
    on_postgres(async |world: &World| {
        let other = world.reopen(StoreOptions::default()).await;
        let over = AtomicBool::new(false);
        let switch = async {
            let mut times = 0;
            while !over.load(Ordering::Relaxed) {
                let (now, until) = (world.at(times), world.at(times + 1));
                // Under load it may have to be repeated; what matters is that no other call has to.
                let on = other.store.event_subscribe(vec![want("w", SubscriptionMode::Keep, until)], now).await;
                let off = other.store.event_settle(world.at(-1_000), 10, until).await;
                times += i64::from(on.is_ok() && off.is_ok());
            }
            times
        };
        let jobs = async {
            join_all([work(world, 1, 10), work(&other, 2, 10), work(world, 3, 10)]).await;
            over.store(true, Ordering::Relaxed);
        };
        let ((), times) = tokio::join!(jobs, switch);
        assert!(times > 0, "it was switched");
        assert_eq!(world.list(Default::default()).await.len(), 60);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_does_not_own_the_tables_can_switch_events_on_and_record_them() {
    on_postgres(async |world: &World| {
        let role = format!("faena_guest_{}", uuid::Uuid::new_v4().simple());
        run_on(&world.url, &format!("CREATE ROLE {role} LOGIN")).await;
        for grant in [
            "USAGE ON SCHEMA faena",
            "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA faena",
            "USAGE ON ALL SEQUENCES IN SCHEMA faena",
        ] {
            run_on(&world.url, &format!("GRANT {grant} TO {role}")).await;
        }
        let mut url: url::Url = world.url.parse().unwrap();
        url.set_username(&role).unwrap();
        let options = StoreOptions { migrate: false, ..StoreOptions::default() };
        let guest = World::open(url.into(), world.ledger.clone(), options).await;
        guest
            .store
            .event_subscribe(vec![want("s", SubscriptionMode::Queue(OnRejected::Skip), Timestamp::MAX)], guest.at(0))
            .await
            .unwrap();
        let job = guest.running(guest.job("mail", 0)).await;
        guest.complete(&job, 1).await;
        assert_eq!(guest.state(job.id).await, JobState::Completed);
        assert_eq!(guest.store.event_list(EventQuery::After(0), 100).await.unwrap().len(), 5);
        let ask = OutboxTakeRequest { sink: "s".into(), node: guest.node, lease_ms: 1_000, limit: 10 };
        assert_eq!(guest.store.outbox_take(ask, guest.at(2)).await.unwrap().events.len(), 5);
        guest.store.close().await;
        run_on(&world.url, &format!("DROP OWNED BY {role}")).await;
        run_on(&world.url, &format!("DROP ROLE {role}")).await;
    })
    .await;
}
