//! Events: recorded in the transaction in which they happen, in order, for subscriptions and for nothing else.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, Timestamp};
use faena_store::{EventQuery, EventSubscription, JobPatch, NoteKind, OnRejected, StoredEvent, SubscriptionMode};

use crate::support::{Build, Dice, World, failed};

pub fn want(types: &[&str], mode: SubscriptionMode) -> EventSubscription {
    EventSubscription {
        name: "watcher".into(),
        types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        mode,
        until: Timestamp::MAX,
    }
}

async fn listen(world: &World, types: &[&str]) {
    world.store.event_subscribe(vec![want(types, SubscriptionMode::Keep)], world.at(0)).await.unwrap();
}

async fn stored_events(world: &World) -> Vec<StoredEvent> {
    world.store.event_list(EventQuery::After(0), 10_000).await.unwrap()
}

fn field(event: &StoredEvent, name: &str) -> Option<String> {
    let data: serde_json::Value = serde_json::from_str(&event.data).unwrap();
    data.get(name).map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// `type previous>status` of each event of a job, in order; sequences have no gap.
async fn story(world: &World, id: JobId) -> Vec<String> {
    let events: Vec<StoredEvent> =
        stored_events(world).await.into_iter().filter(|event| event.subject == id.0).collect();
    for (n, event) in events.iter().enumerate() {
        assert_eq!(event.sequence, n as i64 + 1);
        assert_eq!(field(event, "jobId"), Some(id.to_string()));
    }
    let line = |event: &StoredEvent| {
        let (from, to) = (field(event, "previousStatus"), field(event, "status"));
        format!("{} {}>{}", event.kind, from.unwrap_or_default(), to.unwrap())
    };
    events.iter().map(line).collect()
}

pub async fn a_job_has_its_events_in_order(world: &World) {
    listen(world, &["*"]).await;
    let job = world.running(world.job("mail", 0)).await;
    world.complete(&job, 500).await;
    assert_eq!(
        story(world, job.id).await,
        [
            "job.created >PENDING",
            "job.status.changed PENDING>QUEUED",
            "job.status.changed QUEUED>ASSIGNED",
            "job.status.changed ASSIGNED>PROCESSING",
            "job.completed PROCESSING>COMPLETED",
        ]
    );
}

pub async fn a_job_has_an_event_for_each_failed_attempt(world: &World) {
    listen(world, &["job.*"]).await;
    let id = world.submit(world.job("mail", 0)).await;
    let job = world.claim_one(1).await;
    world.begin(&job, 2).await;
    world.retry_at(&job, 1_000, 300).await;
    world.promote(1_000).await;
    let job = world.claim_one(1_001).await;
    world.end(&job, failed("no such host"), 1_200).await;
    let story = story(world, id).await;
    let tail: Vec<&str> = story[3..].iter().map(String::as_str).collect();
    assert_eq!(
        tail,
        [
            "job.status.changed ASSIGNED>PROCESSING",
            "job.status.changed PROCESSING>RETRYING",
            "job.status.changed RETRYING>QUEUED",
            "job.status.changed QUEUED>ASSIGNED",
            "job.status.changed ASSIGNED>PROCESSING",
            "job.failed PROCESSING>FAILED",
            "job.dead_lettered FAILED>FAILED",
        ]
    );
    let events = stored_events(world).await;
    let last = events.last().unwrap();
    assert_eq!((field(last, "error"), field(last, "errorReason")), (Some("no such host".into()), Some("error".into())));
    assert_eq!(last.correlation_id, id.to_string());
}

pub async fn events_name_their_actor(world: &World) {
    listen(world, &["job.status.changed"]).await;
    let id = world.submit(world.job("mail", 0)).await;
    world.store.job_cancel(id, "not needed", Some("key:ops"), world.at(5)).await.unwrap();
    let other = world.submit(world.job("mail", 10)).await;
    let events = stored_events(world).await;
    let actors: Vec<(&str, bool)> =
        events.iter().map(|event| (event.actor.as_str(), event.subject == other.0)).collect();
    assert_eq!(actors, [("system", false), ("key:ops", false), ("system", true)]);
}

pub async fn only_events_with_a_subscription_are_recorded(world: &World) {
    let before = world.running(world.job("mail", 0)).await;
    assert_eq!(stored_events(world).await, [], "there is no subscription");
    listen(world, &["job.completed"]).await;
    world.complete(&before, 5).await;
    let job = world.running(world.job("mail", 10)).await;
    world.complete(&job, 20).await;
    let job = world.running(world.job("mail", 30)).await;
    world.fail(&job, 40).await;
    let kinds: Vec<(String, i64)> =
        stored_events(world).await.into_iter().map(|event| (event.kind, event.sequence)).collect();
    assert_eq!(kinds, [("job.completed".to_owned(), 1), ("job.completed".to_owned(), 1)]);
}

pub async fn an_expired_subscription_is_deleted_and_events_cost_nothing_again(world: &World) {
    let until = world.at(1_000);
    world
        .store
        .event_subscribe(vec![EventSubscription { until, ..want(&["*"], SubscriptionMode::Keep) }], world.at(0))
        .await
        .unwrap();
    world.submit(world.job("mail", 0)).await;
    assert_eq!((stored_events(world).await.len(), world.store.has_event_subscriptions()), (2, true));
    world.store.event_settle(world.at(0), 100, world.at(1_000)).await.unwrap();
    assert!(!world.store.has_event_subscriptions());
    world.submit(world.job("mail", 1_001)).await;
    assert_eq!(stored_events(world).await.len(), 2);
    world.store.event_subscribe(vec![want(&["*"], SubscriptionMode::Keep)], world.at(2_000)).await.unwrap();
    world.submit(world.job("mail", 2_001)).await;
    assert_eq!(stored_events(world).await.len(), 4, "and again with a subscription");
}

pub async fn subscriptions_outlive_the_server_that_made_them(world: &World) {
    listen(world, &["job.*"]).await;
    let again = world.reopen(Default::default()).await;
    assert!(again.store.has_event_subscriptions());
    let id = again.submit(again.job("mail", 0)).await;
    assert_eq!(story(&again, id).await.len(), 2);
}

pub async fn a_rejected_action_records_no_event(world: &World) {
    listen(world, &["*"]).await;
    let job = world.running(world.job("mail", 0)).await;
    world.complete(&job, 5).await;
    let before = stored_events(world).await.len();
    world.store.job_cancel(job.id, "too late", Some("me"), world.at(6)).await.unwrap_err();
    assert_eq!(stored_events(world).await.len(), before);
    let job = world.submit(world.job("mail", 7)).await;
    let actors: Vec<String> = stored_events(world).await.into_iter().map(|event| event.actor).collect();
    assert!(actors[before..].iter().all(|actor| actor == "system"), "{actors:?} {job}");
}

pub async fn a_queued_event_waits_once_for_every_sink_that_wants_it(world: &World) {
    let sink = |name: &str, types: &[&str]| EventSubscription {
        name: name.into(),
        ..want(types, SubscriptionMode::Queue(OnRejected::Skip))
    };
    let wants = vec![sink("all", &["*"]), sink("ends", &["job.completed", "job.f*"]), sink("others", &["worker.*"])];
    world.store.event_subscribe(wants, world.at(0)).await.unwrap();
    let job = world.running(world.job("mail", 0)).await;
    world.complete(&job, 5).await;
    let waiting = world
        .ledger
        .rows("SELECT s.name, count(*) FROM outbox o JOIN subscription s ON s.id = o.sink GROUP BY s.name ORDER BY s.name")
        .await;
    assert_eq!(waiting, [["all", "5"], ["ends", "1"]]);
}

/// Whatever happens to jobs, the last event of each has its state, every recorded transition is legal, and sequences have no
/// gaps.
pub async fn the_last_event_of_a_job_always_has_its_state(world: &World) {
    listen(world, &["*"]).await;
    let mut dice = Dice(7);
    let mut ids = Vec::new();
    let mut held = Vec::new();
    for n in 0..400 {
        let ms = n * 10;
        match dice.below(9) {
            0 | 1 => ids.push(world.submit(world.job("mail", ms)).await),
            2 => {
                let mut child = world.job("mail", ms);
                child.options.depends_on = dice.pick(&ids).copied().into_iter().collect();
                ids.push(world.submit(child).await);
            }
            3 => held.extend(world.claim(1 + dice.below(3), ms).await),
            4 | 5 if !held.is_empty() => {
                let job = held.swap_remove(dice.below(held.len()));
                match dice.below(5) {
                    0 => world.fail(&job, ms).await,
                    1 => world.retry_at(&job, ms + 25, ms).await,
                    2 => world.hand_back(&job, ms).await,
                    _ => world.complete(&job, ms).await,
                }
            }
            6 => {
                if let Some(job) = dice.pick(&held) {
                    world.note(job, NoteKind::Started, ms).await;
                }
            }
            7 => drop(world.promote(ms).await),
            _ => {
                if let Some(id) = dice.pick(&ids) {
                    let by = Some("operator");
                    if dice.chance(50) {
                        let _ = world.store.job_cancel(*id, "why not", by, world.at(ms)).await;
                    } else {
                        let _ = world.store.job_retry(*id, by, world.at(ms)).await;
                    }
                }
            }
        }
    }
    let mut stories: HashMap<uuid::Uuid, Vec<StoredEvent>> = HashMap::new();
    for event in stored_events(world).await {
        stories.entry(event.subject).or_default().push(event);
    }
    for id in ids {
        let story = &stories[&id.0];
        let state = |event: &StoredEvent, name: &str| field(event, name).map(|text| text.parse::<JobState>().unwrap());
        for (n, event) in story.iter().enumerate() {
            assert_eq!(event.sequence, n as i64 + 1);
            let (from, to) = (state(event, "previousStatus"), state(event, "status").unwrap());
            let again = event.kind == "job.dead_lettered";
            assert!(again || from.is_none_or(|from| from.can_transition_to(to)), "{from:?} {to:?} {story:#?}");
            assert_eq!(from, n.checked_sub(1).and_then(|last| state(&story[last], "status")));
        }
        assert_eq!(state(story.last().unwrap(), "status"), Some(world.state(id).await), "{story:#?}");
    }
}

pub async fn a_changed_job_from_before_the_subscription_has_no_created_event(world: &World) {
    let patched = world.submit(world.job("mail", 0)).await;
    let late = world.submit(world.job("mail", 0).expires(world.at(50))).await;
    world.store.job_expire(9, world.at(60)).await.unwrap();
    assert_eq!(world.state(late).await, JobState::Failed);
    listen(world, &["*"]).await;
    let patch = JobPatch { scheduled_at: Some(Some(world.at(5_000))), ..JobPatch::default() };
    world.patch(patched, patch, 100).await;
    world.retry_by_person(late, 100).await;
    assert_eq!(story(world, patched).await, ["job.status.changed >PENDING"]);
    assert_eq!(story(world, late).await, ["job.status.changed >PENDING"]);
}

pub async fn a_delivery_has_the_number_of_its_attempt(world: &World) {
    listen(world, &["*"]).await;
    let id = world.submit(world.job("mail", 0)).await;
    for n in 0..3 {
        let job = world.claim_one(n * 1_000 + 1).await;
        let last = stored_events(world).await.pop().unwrap();
        assert_eq!((last.subject, field(&last, "status")), (id.0, Some("ASSIGNED".into())));
        assert_eq!(field(&last, "retryCount"), Some(n.to_string()));
        world.retry_at(&job, (n + 1) * 1_000, n * 1_000 + 2).await;
        world.promote((n + 1) * 1_000).await;
    }
}

pub async fn deleted_jobs_leave_no_counter(world: &World) {
    listen(world, &["*"]).await;
    let id = world.submit(world.job("mail", 0)).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM event_head").await, 1);
    world.cancel(id, 1).await;
    world.store.job_delete(id, None, world.at(2)).await.unwrap();
    assert_eq!(world.ledger.number("SELECT count(*) FROM event_head").await, 0);
}

pub async fn events_without_a_subscription_are_still_pruned(world: &World) {
    let until = world.at(1_000);
    world
        .store
        .event_subscribe(vec![EventSubscription { until, ..want(&["*"], SubscriptionMode::Keep) }], world.at(0))
        .await
        .unwrap();
    world.submit(world.job("mail", 0)).await;
    world.store.event_settle(world.at(0), 100, world.at(1_000)).await.unwrap();
    assert_eq!(stored_events(world).await.len(), 2);
    assert_eq!(world.store.event_settle(Timestamp::MAX, 100, world.at(2_000)).await.unwrap(), 2);
    assert_eq!(stored_events(world).await, []);
}
