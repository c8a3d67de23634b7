//! Event streams: every event, once, in order, on every node, however slow other subscribers are.

use std::{sync::Arc, time::Duration};

use faena_domain::{JobState, NewJob, Timestamp};
use faena_engine::{
    Engine, EngineConfig,
    event_reader::{EventFilter, MAX_SUBSCRIBERS, StreamItem, SubscribeError, Subscription},
};
use faena_store::{EventPosition, EventQuery, EventSubscription, OnRejected, StoredEvent, SubscriptionMode};

use crate::fixture::{Fixture, eventually, job, open_postgres, open_sqlite, submit};

async fn watch(engine: &Arc<Engine>, from: Option<EventPosition>, filter: EventFilter) -> Subscription {
    engine.events.reader.subscribe(from, filter, Timestamp::now()).await.unwrap()
}

async fn watch_all(engine: &Arc<Engine>) -> Subscription {
    watch(engine, None, EventFilter::default()).await
}

async fn next(subscription: &mut Subscription) -> StreamItem {
    tokio::time::timeout(Duration::from_secs(60), subscription.next()).await.expect("an item arrives").unwrap()
}

async fn event(subscription: &mut Subscription) -> Arc<StoredEvent> {
    match next(subscription).await {
        StreamItem::Event(event) => event,
        StreamItem::Gap(gap) => panic!("unexpected gap {gap:?}"),
    }
}

/// Returns the types of the next events, up to and including this one.
async fn until(subscription: &mut Subscription, kind: &str) -> Vec<String> {
    let mut kinds = Vec::new();
    while kinds.last().map(String::as_str) != Some(kind) {
        kinds.push(event(subscription).await.kind.clone());
    }
    kinds
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_subscriber_receives_events_from_then_on() {
    let fixture = Fixture::new().await;
    assert!(!fixture.store.has_event_subscriptions(), "without subscribers no event of a job is stored");
    let mut watcher =
        watch(&fixture.engine, None, EventFilter { types: vec!["job.*".into()], ..Default::default() }).await;
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;
    let kinds = until(&mut watcher, "job.completed").await;
    assert_eq!(kinds.first().map(String::as_str), Some("job.created"), "{kinds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_reconnects_continues_without_a_gap_or_a_repetition() {
    let fixture = Fixture::new().await;
    let mut watcher = watch_all(&fixture.engine).await;
    let mut positions = Vec::new();
    for round in 0..5 {
        let jobs: Vec<_> = (0..20).map(|_| job("noop", "{}")).collect();
        fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap();
        // It disconnects in the middle, while more events are committed.
        for _ in 0..17 + round {
            positions.push(event(&mut watcher).await.position);
        }
        let position = watcher.position();
        assert_eq!(Some(&position), positions.last());
        drop(watcher);
        fixture.run_to(job("noop", "{}"), JobState::Completed).await;
        watcher = watch(&fixture.engine, Some(position), EventFilter::default()).await;
    }
    eventually("all jobs have ended", async || {
        let stored = fixture.store.event_list(EventQuery::After(0), 10_000).await.unwrap();
        let ended = stored.iter().filter(|event| event.kind == "job.completed").count();
        (ended == 105).then_some(())
    })
    .await;
    let first = positions[0];
    let stored = fixture.store.event_list(EventQuery::After(first - 1), 10_000).await.unwrap();
    while positions.len() < stored.len() {
        positions.push(event(&mut watcher).await.position);
    }
    assert_eq!(positions, stored.iter().map(|event| event.position).collect::<Vec<_>>());
}

/// Events that were kept only for a sink before there was a subscriber are delivered too.
#[tokio::test(flavor = "multi_thread")]
async fn events_kept_for_a_sink_are_delivered_to_a_later_subscriber() {
    for (types, is_complete) in [("*", true), ("job.*", false)] {
        let fixture = Fixture::new().await;
        let mode = SubscriptionMode::Queue(OnRejected::Skip);
        let sink = EventSubscription { name: "sink".into(), types: vec![types.into()], mode, until: Timestamp::MAX };
        fixture.store.event_subscribe(vec![sink], Timestamp::now()).await.unwrap();
        fixture.store.job_submit((0..300).map(|_| job("noop", "{}")).collect(), None, Timestamp::now()).await.unwrap();
        let stored = eventually("all jobs have ended", async || {
            let stored = fixture.store.event_list(EventQuery::After(0), 10_000).await.unwrap();
            (stored.iter().filter(|event| event.kind == "job.completed").count() == 300).then_some(stored)
        })
        .await;
        let mut first = watch(&fixture.engine, Some(0), EventFilter::default()).await;
        for expected in &stored {
            assert_eq!(event(&mut first).await.position, expected.position);
        }
        let (before, after) = stored.split_at(700);
        let mut second = watch(&fixture.engine, Some(before[699].position), EventFilter::default()).await;
        if !is_complete {
            assert!(
                matches!(next(&mut second).await, StreamItem::Gap(_)),
                "events of workers and schedules were not kept"
            );
        }
        for expected in after {
            assert_eq!(event(&mut second).await.position, expected.position);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_deliver_only_matching_events() {
    let fixture = Fixture::new().await;
    let mut wanted = NewJob::new("noop");
    wanted.queue = "mail".into();
    wanted.correlation_id = Some("order-7".into());
    let id = wanted.id;
    let filters = [
        EventFilter { queue: Some("mail".into()), ..Default::default() },
        EventFilter { queues: Some(vec!["other".into(), "mail".into()]), ..Default::default() },
        EventFilter { correlation_id: Some("order-7".into()), ..Default::default() },
        EventFilter { job: Some(id), types: vec!["job.c*".into(), "job.status.*".into()], ..Default::default() },
    ];
    let mut watchers = Vec::new();
    for filter in filters {
        watchers.push(watch(&fixture.engine, None, filter).await);
    }
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;
    fixture.run_to(wanted, JobState::Completed).await;
    fixture.run_to(job("noop", "{}"), JobState::Completed).await;
    for watcher in &mut watchers {
        loop {
            let event = event(watcher).await;
            assert_eq!(event.subject, id.0, "{event:?}");
            if event.kind == "job.completed" {
                break;
            }
        }
    }
}

/// Starts an engine whose reader only runs when the test runs it.
async fn build_idle_engine() -> (Arc<Engine>, crate::fixture::TestDatabase) {
    let (store, database) = open_sqlite().await;
    (Engine::without_loops(store, EngineConfig::default(), Timestamp::now()).await.unwrap(), database)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_subscriber_does_not_delay_others_and_catches_up_by_itself() {
    let (engine, _database) = build_idle_engine().await;
    let mut slow = watch_all(&engine).await;
    let mut fast = watch_all(&engine).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    // More batches than are buffered for slow subscribers.
    let mut seen = Vec::new();
    for _ in 0..200 {
        submit(&*engine.store, NewJob::new("unserved")).await;
        let round = engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
        assert_eq!(round.handled, 2);
        for _ in 0..2 {
            seen.push(event(&mut fast).await.position);
        }
    }
    let mut late = Vec::new();
    for _ in 0..400 {
        late.push(event(&mut slow).await.position);
    }
    assert_eq!(late, seen);
    // It receives the rest like every other subscriber.
    submit(&*engine.store, NewJob::new("unserved")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut slow).await, event(&mut fast).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_before_the_first_round_of_the_reader_are_delivered_without_a_further_event() {
    let (engine, _database) = build_idle_engine().await;
    let mut watcher = watch_all(&engine).await;
    let nothing = tokio::time::timeout(Duration::from_millis(200), watcher.next()).await;
    assert!(nothing.is_err(), "it has read, and found nothing");
    let id = submit(&*engine.store, NewJob::new("unserved")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut watcher).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_missed_pruned_events_receives_a_gap_and_continues() {
    let (engine, _database) = build_idle_engine().await;
    let mut slow = watch_all(&engine).await;
    let began = slow.position();
    for _ in 0..100 {
        submit(&*engine.store, NewJob::new("unserved")).await;
        engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    }
    let end = engine.store.event_last_position().await.unwrap();
    engine.store.event_prune(Timestamp::now().plus_ms(60_000), 1_000, Timestamp::now()).await.unwrap();
    let StreamItem::Gap(gap) = next(&mut slow).await else { panic!("pruned events must be reported as a gap") };
    assert_eq!((gap.after, gap.first), (began, end + 1));
    let id = submit(&*engine.store, NewJob::new("unserved")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut slow).await.subject, id.0);
    // A subscriber that continues before the gap receives the same gap, one that continues after it does not.
    let mut again = watch(&engine, Some(began), EventFilter::default()).await;
    assert_eq!(next(&mut again).await, StreamItem::Gap(gap));
    assert_eq!(event(&mut again).await.subject, id.0);
    let mut after = watch(&engine, Some(end), EventFilter::default()).await;
    assert_eq!(event(&mut after).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_of_another_database_is_reported_as_a_gap() {
    let (engine, _database) = build_idle_engine().await;
    let mut lost = watch(&engine, Some(1_000_000), EventFilter::default()).await;
    assert!(matches!(next(&mut lost).await, StreamItem::Gap(gap) if gap.after == 1_000_000 && gap.first < 10));
    let id = submit(&*engine.store, NewJob::new("unserved")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut lost).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_hour_after_the_last_subscriber_events_are_no_longer_kept() {
    let (engine, _database) = build_idle_engine().await;
    let start = Timestamp::now();
    let minutes = |count: i64| start.plus_ms(count * 60_000);
    let watcher = engine.events.reader.subscribe(None, EventFilter::default(), start).await.unwrap();
    for minute in (0..120).step_by(5) {
        engine.run_loop("event-reader", minutes(minute)).await.unwrap();
        engine.run_loop("retention", minutes(minute)).await.unwrap();
        assert!(engine.store.has_event_subscriptions(), "{minute} minutes, and there is a subscriber");
    }
    drop(watcher);
    for minute in 120..250 {
        engine.run_loop("event-reader", minutes(minute)).await.unwrap();
        engine.run_loop("retention", minutes(minute)).await.unwrap();
        let away = minute - 120;
        assert!(
            engine.store.has_event_subscriptions() || away >= 55,
            "a subscriber that reconnects within the hour misses nothing: {away}"
        );
    }
    assert!(!engine.store.has_event_subscriptions(), "two hours later no event of a job is stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_subscribers_is_limited() {
    let (engine, _database) = build_idle_engine().await;
    let mut watchers = Vec::new();
    for _ in 0..MAX_SUBSCRIBERS {
        watchers.push(watch_all(&engine).await);
    }
    let rejected = engine.events.reader.subscribe(None, EventFilter::default(), Timestamp::now()).await;
    assert!(matches!(rejected.err(), Some(SubscribeError::TooManySubscribers)));
    watchers.pop();
    assert_eq!(engine.events.reader.subscribers(), MAX_SUBSCRIBERS - 1);
    watch_all(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_one_node_are_delivered_on_another_on_postgres() {
    let watching = Fixture::over(open_postgres().await, EngineConfig::default()).await;
    let other = crate::fixture::open_for_another_node(&watching).await;
    let working = Engine::start(other.clone(), EngineConfig::default()).await.unwrap();
    let mut watcher = watch_all(&watching.engine).await;
    let mut positions = Vec::new();
    for cut in [false, true, true] {
        if cut {
            // Signals of the other node are lost for a while; its events are found nevertheless.
            crate::fixture::end_listening(&watching).await;
        }
        for _ in 0..50 {
            submit(&*other, NewJob::new("noop")).await;
            submit(&*watching.store, NewJob::new("noop")).await;
        }
        let mut ended = 0;
        while ended < 100 {
            let event = event(&mut watcher).await;
            ended += usize::from(event.kind == "job.completed");
            positions.push(event.position);
        }
    }
    let stored = watching.store.event_list(EventQuery::After(positions[0] - 1), positions.len()).await.unwrap();
    assert_eq!(positions, stored.iter().map(|event| event.position).collect::<Vec<_>>(), "each once, none skipped");
    working.stop(Default::default()).await;
    watching.stop().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_notifications_events_of_other_nodes_are_found_by_polling_on_postgres() {
    let working = Fixture::over(open_postgres().await, EngineConfig::default()).await;
    let store_without_listener = crate::fixture::open_without_listener(&working).await;
    let engine = Engine::start(store_without_listener.clone(), EngineConfig::default()).await.unwrap();
    let mut watcher = watch_all(&engine).await;
    for _ in 0..3 {
        let id = submit(&*working.store, NewJob::new("unserved")).await;
        while event(&mut watcher).await.subject != id.0 {}
    }
    engine.stop(Default::default()).await;
    working.stop().await;
    store_without_listener.close().await;
}
