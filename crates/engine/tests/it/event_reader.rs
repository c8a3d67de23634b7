//! Watching what happens: all of it, once, in order, whoever else is slow, wherever it happens.

use std::{sync::Arc, time::Duration};

use faena_domain::{JobState, NewJob, Timestamp};
use faena_engine::{
    Engine, EngineConfig,
    event_reader::{EventFilter, MAX_SUBSCRIBERS, StreamItem, SubscribeError, Subscription},
};
use faena_store::{EventPosition, EventQuery, EventSubscription, OnRejected, StoredEvent, SubscriptionMode};

use crate::world::{World, eventually, job, open_postgres, open_sqlite, submit};

async fn watch(engine: &Arc<Engine>, from: Option<EventPosition>, filter: EventFilter) -> Subscription {
    engine.events.reader.subscribe(from, filter, Timestamp::now()).await.unwrap()
}

async fn everything(engine: &Arc<Engine>) -> Subscription {
    watch(engine, None, EventFilter::default()).await
}

async fn next(subscription: &mut Subscription) -> StreamItem {
    tokio::time::timeout(Duration::from_secs(60), subscription.next()).await.expect("something comes").unwrap()
}

async fn event(subscription: &mut Subscription) -> Arc<StoredEvent> {
    match next(subscription).await {
        StreamItem::Event(event) => event,
        StreamItem::Gap(gap) => panic!("nothing was lost, and yet {gap:?}"),
    }
}

/// The types that come, up to and with this one.
async fn until(subscription: &mut Subscription, kind: &str) -> Vec<String> {
    let mut kinds = Vec::new();
    while kinds.last().map(String::as_str) != Some(kind) {
        kinds.push(event(subscription).await.kind.clone());
    }
    kinds
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_who_watches_is_told_from_then_on() {
    let world = World::new().await;
    assert!(!world.store.has_event_subscriptions(), "nobody watches, so nothing is written down");
    let mut watcher =
        watch(&world.engine, None, EventFilter { types: vec!["job.*".into()], ..Default::default() }).await;
    world.ends(job("noop", "{}"), JobState::Completed).await;
    let kinds = until(&mut watcher, "job.completed").await;
    assert_eq!(kinds.first().map(String::as_str), Some("job.created"), "{kinds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_back_goes_on_where_it_was_without_a_gap_and_nothing_twice() {
    let world = World::new().await;
    let mut watcher = everything(&world.engine).await;
    let mut places = Vec::new();
    for round in 0..5 {
        let ids: Vec<_> = (0..20).map(|_| job("noop", "{}")).collect();
        world.store.job_submit(ids, Timestamp::now()).await.unwrap();
        // It leaves in the middle, while more happens.
        for _ in 0..17 + round {
            places.push(event(&mut watcher).await.position);
        }
        let place = watcher.position();
        assert_eq!(Some(&place), places.last());
        drop(watcher);
        world.ends(job("noop", "{}"), JobState::Completed).await;
        watcher = watch(&world.engine, Some(place), EventFilter::default()).await;
    }
    eventually("everything has ended", async || {
        let stored = world.store.event_list(EventQuery::After(0), 10_000).await.unwrap();
        let ended = stored.iter().filter(|event| event.kind == "job.completed").count();
        (ended == 105).then_some(())
    })
    .await;
    let first = places[0];
    let stored = world.store.event_list(EventQuery::After(first - 1), 10_000).await.unwrap();
    while places.len() < stored.len() {
        places.push(event(&mut watcher).await.position);
    }
    assert_eq!(places, stored.iter().map(|event| event.position).collect::<Vec<_>>());
}

/// What a sink alone wanted before anybody watched is kept, and so it is told.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_kept_for_others_before_anybody_watched_is_told_too() {
    for (types, is_complete) in [("*", true), ("job.*", false)] {
        let world = World::new().await;
        let mode = SubscriptionMode::Queue(OnRejected::Skip);
        let sink = EventSubscription { name: "sink".into(), types: vec![types.into()], mode, until: Timestamp::MAX };
        world.store.event_subscribe(vec![sink], Timestamp::now()).await.unwrap();
        world.store.job_submit((0..300).map(|_| job("noop", "{}")).collect(), Timestamp::now()).await.unwrap();
        let stored = eventually("all have ended", async || {
            let stored = world.store.event_list(EventQuery::After(0), 10_000).await.unwrap();
            (stored.iter().filter(|event| event.kind == "job.completed").count() == 300).then_some(stored)
        })
        .await;
        let mut first = watch(&world.engine, Some(0), EventFilter::default()).await;
        for expected in &stored {
            assert_eq!(event(&mut first).await.position, expected.position);
        }
        let (before, after) = stored.split_at(700);
        let mut back = watch(&world.engine, Some(before[699].position), EventFilter::default()).await;
        if !is_complete {
            assert!(matches!(next(&mut back).await, StreamItem::Gap(_)), "of workers and schedules nobody was told");
        }
        for expected in after {
            assert_eq!(event(&mut back).await.position, expected.position);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_let_through_what_was_asked_for() {
    let world = World::new().await;
    let mut wanted = NewJob::new("noop");
    wanted.queue = "mail".into();
    wanted.correlation_id = Some("order-7".into());
    let id = wanted.id;
    let filters = [
        EventFilter { queue: Some("mail".into()), ..Default::default() },
        EventFilter { correlation_id: Some("order-7".into()), ..Default::default() },
        EventFilter { job: Some(id), types: vec!["job.c*".into(), "job.status.*".into()], ..Default::default() },
    ];
    let mut watchers = Vec::new();
    for filter in filters {
        watchers.push(watch(&world.engine, None, filter).await);
    }
    world.ends(job("noop", "{}"), JobState::Completed).await;
    world.ends(wanted, JobState::Completed).await;
    world.ends(job("noop", "{}"), JobState::Completed).await;
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

/// An engine whose reader takes a step when it is told to.
async fn at_rest() -> (Arc<Engine>, crate::world::Place) {
    let (store, place) = open_sqlite().await;
    (Engine::without_loops(store, EngineConfig::default(), Timestamp::now()).await.unwrap(), place)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_who_is_slow_holds_nobody_up_and_catches_up_by_itself() {
    let (engine, _place) = at_rest().await;
    let mut slow = everything(&engine).await;
    let mut fast = everything(&engine).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    // More steps than are kept for those who are slow.
    let mut seen = Vec::new();
    for _ in 0..200 {
        submit(&*engine.store, NewJob::new("nobody")).await;
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
    // And hears the rest like everybody else.
    submit(&*engine.store, NewJob::new("nobody")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut slow).await, event(&mut fast).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_before_the_reader_has_begun_is_told_without_waiting_for_more() {
    let (engine, _place) = at_rest().await;
    let mut watcher = everything(&engine).await;
    let nothing = tokio::time::timeout(Duration::from_millis(200), watcher.next()).await;
    assert!(nothing.is_err(), "it has looked, and found nothing");
    let id = submit(&*engine.store, NewJob::new("nobody")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut watcher).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_who_was_too_slow_for_what_is_kept_is_told_and_goes_on() {
    let (engine, _place) = at_rest().await;
    let mut slow = everything(&engine).await;
    let began = slow.position();
    for _ in 0..100 {
        submit(&*engine.store, NewJob::new("nobody")).await;
        engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    }
    let end = engine.store.event_end().await.unwrap();
    engine.store.event_settle(Timestamp::now().plus_ms(60_000), 1_000, Timestamp::now()).await.unwrap();
    let StreamItem::Gap(gap) = next(&mut slow).await else { panic!("what is gone is not told as if it were not") };
    assert_eq!((gap.after, gap.first), (began, end + 1));
    let id = submit(&*engine.store, NewJob::new("nobody")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut slow).await.subject, id.0);
    // Whoever comes back to a place before that is told the same, and whoever comes back to one after it is not.
    let mut again = watch(&engine, Some(began), EventFilter::default()).await;
    assert_eq!(next(&mut again).await, StreamItem::Gap(gap));
    assert_eq!(event(&mut again).await.subject, id.0);
    let mut after = watch(&engine, Some(end), EventFilter::default()).await;
    assert_eq!(event(&mut after).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_of_another_database_is_a_gap_and_not_silence() {
    let (engine, _place) = at_rest().await;
    let mut lost = watch(&engine, Some(1_000_000), EventFilter::default()).await;
    assert!(matches!(next(&mut lost).await, StreamItem::Gap(gap) if gap.after == 1_000_000 && gap.first < 10));
    let id = submit(&*engine.store, NewJob::new("nobody")).await;
    engine.run_loop("event-reader", Timestamp::now()).await.unwrap();
    assert_eq!(event(&mut lost).await.subject, id.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_hour_after_the_last_who_watched_nothing_is_wanted_any_more() {
    let (engine, _place) = at_rest().await;
    let start = Timestamp::now();
    let minutes = |count: i64| start.plus_ms(count * 60_000);
    let watcher = engine.events.reader.subscribe(None, EventFilter::default(), start).await.unwrap();
    for minute in (0..120).step_by(5) {
        engine.run_loop("event-reader", minutes(minute)).await.unwrap();
        engine.run_loop("retention", minutes(minute)).await.unwrap();
        assert!(engine.store.has_event_subscriptions(), "{minute} minutes, and somebody watches");
    }
    drop(watcher);
    for minute in 120..250 {
        engine.run_loop("event-reader", minutes(minute)).await.unwrap();
        engine.run_loop("retention", minutes(minute)).await.unwrap();
        let away = minute - 120;
        assert!(
            engine.store.has_event_subscriptions() || away >= 55,
            "whoever comes back within the hour misses nothing: {away}"
        );
    }
    assert!(!engine.store.has_event_subscriptions(), "two hours later it costs nothing again");
}

#[tokio::test(flavor = "multi_thread")]
async fn there_may_be_so_many_and_no_more() {
    let (engine, _place) = at_rest().await;
    let mut watchers = Vec::new();
    for _ in 0..MAX_SUBSCRIBERS {
        watchers.push(everything(&engine).await);
    }
    let refused = engine.events.reader.subscribe(None, EventFilter::default(), Timestamp::now()).await;
    assert!(matches!(refused.err(), Some(SubscribeError::TooManySubscribers)));
    watchers.pop();
    assert_eq!(engine.events.reader.subscribers(), MAX_SUBSCRIBERS - 1);
    everything(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_on_one_node_is_told_on_the_other() {
    let (store, place) = open_postgres().await;
    let watching = World::over((store, place), EngineConfig::default()).await;
    let other = crate::world::beside(&watching).await;
    let working = Engine::start(other.clone(), EngineConfig::default()).await.unwrap();
    let mut watcher = everything(&watching.engine).await;
    let mut places = Vec::new();
    for cut in [false, true, true] {
        if cut {
            // Nobody hears of the other for a while; everything is found all the same.
            crate::world::end_listening(&watching).await;
        }
        for _ in 0..50 {
            submit(&*other, NewJob::new("noop")).await;
            submit(&*watching.store, NewJob::new("noop")).await;
        }
        let mut ended = 0;
        while ended < 100 {
            let event = event(&mut watcher).await;
            ended += usize::from(event.kind == "job.completed");
            places.push(event.position);
        }
    }
    let stored = watching.store.event_list(EventQuery::After(places[0] - 1), places.len()).await.unwrap();
    assert_eq!(places, stored.iter().map(|event| event.position).collect::<Vec<_>>(), "each once, none passed by");
    working.stop(Default::default()).await;
    watching.stop().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_can_listen_what_others_do_is_found_by_looking() {
    let (store, place) = open_postgres().await;
    let working = World::over((store, place), EngineConfig::default()).await;
    let deaf = crate::world::without_listening(&working).await;
    let engine = Engine::start(deaf.clone(), EngineConfig::default()).await.unwrap();
    let mut watcher = everything(&engine).await;
    for _ in 0..3 {
        let id = submit(&*working.store, NewJob::new("nobody")).await;
        while event(&mut watcher).await.subject != id.0 {}
    }
    engine.stop(Default::default()).await;
    working.stop().await;
    deaf.close().await;
}
