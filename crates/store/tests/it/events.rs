//! Events of jobs: recorded in order, in the transaction that causes them, and only while a subscription exists.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, Timestamp};
use faena_store::{EventQuery, EventSubscription, JobPatch, OnRejected, RunUpdateKind, StoredEvent, SubscriptionMode};

use crate::support::{Fixture, JobBuilder, SeededRandom, failed};

pub fn subscription(types: &[&str], mode: SubscriptionMode) -> EventSubscription {
    EventSubscription {
        name: "watcher".into(),
        types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        mode,
        until: Timestamp::MAX,
    }
}

async fn subscribe(fixture: &Fixture, types: &[&str]) {
    fixture.store.event_subscribe(vec![subscription(types, SubscriptionMode::Keep)], fixture.at(0)).await.unwrap();
}

/// Submits a job with a subscription that ends after a second.
async fn submit_with_expiring_subscription(fixture: &Fixture) {
    let until = fixture.at(1_000);
    let all = EventSubscription { until, ..subscription(&["*"], SubscriptionMode::Keep) };
    fixture.store.event_subscribe(vec![all], fixture.at(0)).await.unwrap();
    fixture.submit(fixture.job("mail", 0)).await;
}

async fn stored_events(fixture: &Fixture) -> Vec<StoredEvent> {
    fixture.store.event_list(EventQuery::After(0), 10_000).await.unwrap()
}

fn field(event: &StoredEvent, name: &str) -> Option<String> {
    let data: serde_json::Value = serde_json::from_str(&event.data).unwrap();
    data.get(name).map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Returns `type previous>status` for each event of a job, in order. Asserts that their sequence numbers have no gap.
async fn transitions(fixture: &Fixture, id: JobId) -> Vec<String> {
    let events: Vec<StoredEvent> =
        stored_events(fixture).await.into_iter().filter(|event| event.subject == id.0).collect();
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

pub async fn a_job_has_its_events_in_order(fixture: &Fixture) {
    subscribe(fixture, &["*"]).await;
    let job = fixture.submit_and_claim(fixture.job("mail", 0)).await;
    fixture.complete(&job, 500).await;
    assert_eq!(
        transitions(fixture, job.id).await,
        [
            "job.created >PENDING",
            "job.status.changed PENDING>QUEUED",
            "job.status.changed QUEUED>ASSIGNED",
            "job.status.changed ASSIGNED>PROCESSING",
            "job.completed PROCESSING>COMPLETED",
        ]
    );
}

pub async fn a_job_has_an_event_for_each_failed_attempt(fixture: &Fixture) {
    subscribe(fixture, &["job.*"]).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    let job = fixture.claim_one(1).await;
    fixture.report_start(&job, 2).await;
    fixture.retry_at(&job, 1_000, 300).await;
    fixture.promote(1_000).await;
    let job = fixture.claim_one(1_001).await;
    fixture.end(&job, failed("no such host"), 1_200).await;
    let transitions = transitions(fixture, id).await;
    let tail: Vec<&str> = transitions[3..].iter().map(String::as_str).collect();
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
    let events = stored_events(fixture).await;
    let last = events.last().unwrap();
    assert_eq!((field(last, "error"), field(last, "errorReason")), (Some("no such host".into()), Some("error".into())));
    assert_eq!(last.correlation_id, id.to_string());
}

pub async fn events_name_their_actor(fixture: &Fixture) {
    subscribe(fixture, &["job.status.changed"]).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    fixture.store.job_cancel(id, "not needed", Some("key:ops"), fixture.at(5)).await.unwrap();
    let other = fixture.submit(fixture.job("mail", 10)).await;
    let events = stored_events(fixture).await;
    let actors: Vec<(&str, bool)> =
        events.iter().map(|event| (event.actor.as_str(), event.subject == other.0)).collect();
    assert_eq!(actors, [("system", false), ("key:ops", false), ("system", true)]);
}

pub async fn only_events_with_a_subscription_are_recorded(fixture: &Fixture) {
    let before = fixture.submit_and_claim(fixture.job("mail", 0)).await;
    assert_eq!(stored_events(fixture).await, [], "there is no subscription");
    subscribe(fixture, &["job.completed"]).await;
    fixture.complete(&before, 5).await;
    let job = fixture.submit_and_claim(fixture.job("mail", 10)).await;
    fixture.complete(&job, 20).await;
    let job = fixture.submit_and_claim(fixture.job("mail", 30)).await;
    fixture.fail(&job, 40).await;
    let kinds: Vec<(String, i64)> =
        stored_events(fixture).await.into_iter().map(|event| (event.kind, event.sequence)).collect();
    assert_eq!(kinds, [("job.completed".to_owned(), 1), ("job.completed".to_owned(), 1)]);
}

pub async fn an_expired_subscription_is_deleted_and_events_are_no_longer_recorded(fixture: &Fixture) {
    submit_with_expiring_subscription(fixture).await;
    assert_eq!((stored_events(fixture).await.len(), fixture.store.has_event_subscriptions()), (2, true));
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(1_000)).await.unwrap();
    assert!(!fixture.store.has_event_subscriptions());
    fixture.submit(fixture.job("mail", 1_001)).await;
    assert_eq!(stored_events(fixture).await.len(), 2);
    fixture.store.event_subscribe(vec![subscription(&["*"], SubscriptionMode::Keep)], fixture.at(2_000)).await.unwrap();
    fixture.submit(fixture.job("mail", 2_001)).await;
    assert_eq!(stored_events(fixture).await.len(), 4, "recorded again with a subscription");
}

pub async fn subscriptions_outlive_the_server_that_made_them(fixture: &Fixture) {
    subscribe(fixture, &["job.*"]).await;
    let reopened = fixture.reopen(Default::default()).await;
    assert!(reopened.store.has_event_subscriptions());
    let id = reopened.submit(reopened.job("mail", 0)).await;
    assert_eq!(transitions(&reopened, id).await.len(), 2);
}

pub async fn a_rejected_action_records_no_event(fixture: &Fixture) {
    subscribe(fixture, &["*"]).await;
    let job = fixture.submit_and_claim(fixture.job("mail", 0)).await;
    fixture.complete(&job, 5).await;
    let before = stored_events(fixture).await.len();
    fixture.store.job_cancel(job.id, "too late", Some("me"), fixture.at(6)).await.unwrap_err();
    assert_eq!(stored_events(fixture).await.len(), before);
    let job = fixture.submit(fixture.job("mail", 7)).await;
    let actors: Vec<String> = stored_events(fixture).await.into_iter().map(|event| event.actor).collect();
    assert!(actors[before..].iter().all(|actor| actor == "system"), "{actors:?} {job}");
}

pub async fn a_queued_event_waits_once_for_every_subscribed_sink(fixture: &Fixture) {
    let sink = |name: &str, types: &[&str]| EventSubscription {
        name: name.into(),
        ..subscription(types, SubscriptionMode::Queue(OnRejected::Skip))
    };
    let subscriptions =
        vec![sink("all", &["*"]), sink("ends", &["job.completed", "job.f*"]), sink("others", &["worker.*"])];
    fixture.store.event_subscribe(subscriptions, fixture.at(0)).await.unwrap();
    let job = fixture.submit_and_claim(fixture.job("mail", 0)).await;
    fixture.complete(&job, 5).await;
    let waiting = fixture
        .database
        .rows("SELECT s.name, count(*) FROM outbox o JOIN subscription s ON s.id = o.sink GROUP BY s.name ORDER BY s.name")
        .await;
    assert_eq!(waiting, [["all", "5"], ["ends", "1"]]);
}

/// Runs random actions. Afterwards the last event of each job has its state, every recorded transition is legal, and sequences
/// have no gaps.
pub async fn the_last_event_of_a_job_always_has_its_state(fixture: &Fixture) {
    subscribe(fixture, &["*"]).await;
    let mut random = SeededRandom(7);
    let mut ids = Vec::new();
    let mut in_flight = Vec::new();
    for n in 0..400 {
        let ms = n * 10;
        match random.below(9) {
            0 | 1 => ids.push(fixture.submit(fixture.job("mail", ms)).await),
            2 => {
                let mut child = fixture.job("mail", ms);
                child.options.depends_on = random.pick(&ids).copied().into_iter().collect();
                ids.push(fixture.submit(child).await);
            }
            3 => in_flight.extend(fixture.claim(1 + random.below(3), ms).await),
            4 | 5 if !in_flight.is_empty() => {
                let job = in_flight.swap_remove(random.below(in_flight.len()));
                match random.below(5) {
                    0 => fixture.fail(&job, ms).await,
                    1 => fixture.retry_at(&job, ms + 25, ms).await,
                    2 => fixture.release(&job, ms).await,
                    _ => fixture.complete(&job, ms).await,
                }
            }
            6 => {
                if let Some(job) = random.pick(&in_flight) {
                    fixture.report_update(job, RunUpdateKind::Started, ms).await;
                }
            }
            7 => drop(fixture.promote(ms).await),
            _ => {
                if let Some(id) = random.pick(&ids) {
                    let by = Some("operator");
                    if random.chance(50) {
                        let _ = fixture.store.job_cancel(*id, "why not", by, fixture.at(ms)).await;
                    } else {
                        let _ = fixture.store.job_retry(*id, by, fixture.at(ms)).await;
                    }
                }
            }
        }
    }
    let mut events_by_job: HashMap<uuid::Uuid, Vec<StoredEvent>> = HashMap::new();
    for event in stored_events(fixture).await {
        events_by_job.entry(event.subject).or_default().push(event);
    }
    for id in ids {
        let events = &events_by_job[&id.0];
        let state = |event: &StoredEvent, name: &str| field(event, name).map(|text| text.parse::<JobState>().unwrap());
        for (n, event) in events.iter().enumerate() {
            assert_eq!(event.sequence, n as i64 + 1);
            let (from, to) = (state(event, "previousStatus"), state(event, "status").unwrap());
            let repeats_state = event.kind == "job.dead_lettered";
            assert!(repeats_state || from.is_none_or(|from| from.can_transition_to(to)), "{from:?} {to:?} {events:#?}");
            assert_eq!(from, n.checked_sub(1).and_then(|last| state(&events[last], "status")));
        }
        assert_eq!(state(events.last().unwrap(), "status"), Some(fixture.state(id).await), "{events:#?}");
    }
}

pub async fn a_changed_job_from_before_the_subscription_has_no_created_event(fixture: &Fixture) {
    let patched = fixture.submit(fixture.job("mail", 0)).await;
    let late = fixture.submit(fixture.job("mail", 0).expires(fixture.at(50))).await;
    fixture.store.job_expire(9, fixture.at(60)).await.unwrap();
    assert_eq!(fixture.state(late).await, JobState::Failed);
    subscribe(fixture, &["*"]).await;
    let patch = JobPatch { scheduled_at: Some(Some(fixture.at(5_000))), ..JobPatch::default() };
    fixture.patch(patched, patch, 100).await;
    fixture.retry_manually(late, 100).await;
    assert_eq!(transitions(fixture, patched).await, ["job.status.changed >PENDING"]);
    assert_eq!(transitions(fixture, late).await, ["job.status.changed >PENDING"]);
}

pub async fn the_event_of_an_assignment_has_the_retry_count(fixture: &Fixture) {
    subscribe(fixture, &["*"]).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    for n in 0..3 {
        let job = fixture.claim_one(n * 1_000 + 1).await;
        let last = stored_events(fixture).await.pop().unwrap();
        assert_eq!((last.subject, field(&last, "status")), (id.0, Some("ASSIGNED".into())));
        assert_eq!(field(&last, "retryCount"), Some(n.to_string()));
        fixture.retry_at(&job, (n + 1) * 1_000, n * 1_000 + 2).await;
        fixture.promote((n + 1) * 1_000).await;
    }
}

pub async fn deleted_jobs_leave_no_event_sequence(fixture: &Fixture) {
    subscribe(fixture, &["*"]).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM event_head").await, 1);
    fixture.cancel(id, 1).await;
    fixture.store.job_delete(id, None, fixture.at(2)).await.unwrap();
    assert_eq!(fixture.database.number("SELECT count(*) FROM event_head").await, 0);
}

pub async fn events_without_a_subscription_are_still_pruned(fixture: &Fixture) {
    submit_with_expiring_subscription(fixture).await;
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(1_000)).await.unwrap();
    assert_eq!(stored_events(fixture).await.len(), 2);
    assert_eq!(fixture.store.event_prune(Timestamp::MAX, 100, fixture.at(2_000)).await.unwrap(), 2);
    assert_eq!(stored_events(fixture).await, []);
}
