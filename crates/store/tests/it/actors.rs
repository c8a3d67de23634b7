//! The actors of events: callers, workers, and the parts of the server that act by themselves.

use std::collections::HashMap;

use faena_domain::{BulkId, JobId, JobState, NodeId, Timestamp, WorkerKind};
use faena_store::{
    BulkAction, BulkStep, BulkWork, EventQuery, EventSubscription, Filter, GUARDIAN, NewBulk, RunEnd, RunOutcome,
    StoredEvent, SubscriptionMode,
};
use futures_util::future::join_all;

use crate::{
    schedules::{create, every},
    support::*,
    workers::named,
};

async fn subscribe(fixture: &Fixture) {
    let subscription = EventSubscription {
        name: "watcher".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Keep,
        until: Timestamp::MAX,
    };
    fixture.store.event_subscribe(vec![subscription], fixture.at(0)).await.unwrap();
}

async fn events_of(fixture: &Fixture, subject: uuid::Uuid) -> Vec<StoredEvent> {
    let events = fixture.store.event_list(EventQuery::After(0), 10_000).await.unwrap();
    events.into_iter().filter(|event| event.subject == subject).collect()
}

/// Returns `status actor` for each event of a job.
async fn actors(fixture: &Fixture, id: JobId) -> Vec<String> {
    let line = |event: &StoredEvent| {
        let data: serde_json::Value = serde_json::from_str(&event.data).unwrap();
        format!("{} {}", data["status"].as_str().unwrap(), event.actor)
    };
    events_of(fixture, id.0).await.iter().map(line).collect()
}

async fn last_actor(fixture: &Fixture, id: JobId) -> String {
    actors(fixture, id).await.pop().unwrap()
}

pub async fn a_created_job_names_its_caller_also_in_shared_transactions(fixture: &Fixture) {
    subscribe(fixture).await;
    let callers = ["key:shop", "loopback", "ip 10.0.0.1"];
    let mut expected: HashMap<JobId, &str> = HashMap::new();
    let mut jobs = Vec::new();
    for n in 0..60 {
        let job = fixture.job("mail", n);
        // Some wait for their time, some have a key.
        let job = match n % 4 {
            1 => job.scheduled(fixture.at(100_000)),
            2 => job.unique(&format!("u{n}")),
            3 => job.concurrency_key("k"),
            _ => job,
        };
        expected.insert(job.id, callers[n as usize % callers.len()]);
        jobs.push(job);
    }
    let submits = jobs.into_iter().map(|job| {
        let by = expected[&job.id];
        fixture.store.job_submit(vec![job], Some(by), fixture.at(100))
    });
    for submitted in join_all(submits).await {
        submitted.unwrap();
    }
    for (id, by) in expected {
        let first = &actors(fixture, id).await[0];
        assert_eq!(*first, format!("PENDING {by}"));
    }
    let unnamed = fixture.submit(fixture.job("mail", 200)).await;
    assert_eq!(actors(fixture, unnamed).await, ["PENDING system", "QUEUED system"]);
}

pub async fn jobs_of_schedules_and_brokers_name_what_created_them(fixture: &Fixture) {
    subscribe(fixture).await;
    let stored = fixture.store.inbox_submit("inbox:orders", "m1", vec![fixture.job("mail", 0)], fixture.at(1)).await;
    let id = stored.unwrap().unwrap()[0].id;
    assert_eq!(actors(fixture, id).await, ["PENDING inbox:orders", "QUEUED inbox:orders"]);

    let schedule = create(fixture, every(60_000, "tick")).await;
    let fired = fixture.store.schedule_fire(10, fixture.at(60_000)).await.unwrap();
    let id = fired.ticks[0].job_id.unwrap();
    assert_eq!(actors(fixture, id).await[0], "PENDING system:scheduler");
    let id = fixture.store.schedule_trigger(schedule, "key:ops", fixture.at(61_000)).await.unwrap().unwrap();
    assert_eq!(actors(fixture, id).await[0], "PENDING key:ops");
    let ticks: Vec<String> = events_of(fixture, schedule.0).await.into_iter().map(|event| event.actor).collect();
    assert_eq!(ticks, ["system:scheduler", "key:ops"]);
    let after = fixture.submit(fixture.job("mail", 62_000)).await;
    assert_eq!(last_actor(fixture, after).await, "QUEUED system");
}

pub async fn a_bulk_action_names_who_began_it(fixture: &Fixture) {
    subscribe(fixture).await;
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.fail(&job, 1).await;
    let filter = Filter { states: vec![JobState::Failed], ..Filter::default() };
    let id = BulkId::new();
    let (action, actor) = (BulkAction::Retry, "key:ops".into());
    let work = BulkWork::Jobs { action, filter };
    let new = NewBulk { id, work, actor, per_second: None, up_to: job.id.0, matched: 1 };
    fixture.store.bulk_begin(new, fixture.at(2), fixture.at(2)).await.unwrap();
    let bulk = fixture.store.bulk_get(id).await.unwrap().unwrap();
    // The second job is skipped. The actor of the bulk action must not stay set after that.
    let ids = vec![job.id.0, fixture.submit(fixture.job("a", 2)).await.0];
    let step = BulkStep { bulk, last: ids.last().copied(), ids, due_at: None };
    assert!(fixture.store.bulk_step(step, fixture.at(3)).await.unwrap());
    assert_eq!(last_actor(fixture, job.id).await, "PENDING key:ops");
    let after = fixture.submit(fixture.job("a", 4)).await;
    assert_eq!(last_actor(fixture, after).await, "QUEUED system");
}

pub async fn everything_that_the_guardian_does_names_the_guardian(fixture: &Fixture) {
    subscribe(fixture).await;
    let (worker, jobs) = fixture.worker_with_jobs("lost", 1, 0).await;
    let child = fixture.submit(fixture.job("c", 0).after(&[jobs[0].id])).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.end_as_lost(&worker, 0, 2).await;
    assert_eq!(
        actors(fixture, jobs[0].id).await[3..],
        [format!("PROCESSING worker:{}", "unknown"), format!("RETRYING {GUARDIAN}")],
        "the worker starts the job, and the guardian ends the lost run"
    );
    let ended = events_of(fixture, worker.id.0).await.pop().unwrap();
    assert_eq!((ended.kind.as_str(), ended.actor.as_str()), ("worker.terminated", GUARDIAN));
    assert_eq!(last_actor(fixture, child).await, "PENDING system");

    let dead = NodeId::new();
    let inside = fixture.admit(named("inside", fixture, WorkerKind::BuiltIn, dead), 3).await;
    let ids = fixture.submit_all((0..2).map(|_| fixture.job("b", 3)).collect()).await;
    let lanes = vec![fixture.lane_of(ids[0]).await.id];
    let claimed = fixture.claim_lanes(dead, lanes, 2, 4).await;
    fixture.report_start(&claimed[0], 5).await;
    fixture.recover(0, 6).await;
    assert_eq!(last_actor(fixture, claimed[0].id).await, format!("RETRYING {GUARDIAN}"));
    assert_eq!(last_actor(fixture, claimed[1].id).await, format!("QUEUED {GUARDIAN}"));
    assert_eq!(events_of(fixture, inside.id.0).await.pop().unwrap().actor, GUARDIAN);

    let expired = fixture.submit(fixture.job("d", 7).expires(fixture.at(8))).await;
    fixture.promote(9).await;
    assert_eq!(last_actor(fixture, expired).await, format!("FAILED {GUARDIAN}"));
}

pub async fn a_run_that_the_guardian_ends_names_the_guardian_and_others_do_not(fixture: &Fixture) {
    subscribe(fixture).await;
    fixture.submit_all((0..4).map(|n| fixture.job("a", n)).collect()).await;
    let jobs = fixture.claim(4, 10).await;
    let end = |n: usize, outcome, by_guardian| RunEnd { by_guardian, ..fixture.run_end(&jobs[n], outcome, 11) };
    let ends = vec![
        end(0, RunOutcome::Released, true),
        end(1, RunOutcome::Released, false),
        end(2, cancelled(), true),
        end(3, cancelled(), false),
    ];
    assert_eq!(fixture.store.job_end(ends, fixture.at(11)).await.unwrap(), [true; 4]);
    assert_eq!(last_actor(fixture, jobs[0].id).await, format!("QUEUED {GUARDIAN}"));
    assert_eq!(last_actor(fixture, jobs[1].id).await, "QUEUED system");
    assert_eq!(last_actor(fixture, jobs[2].id).await, format!("CANCELLED {GUARDIAN}"));
    assert_eq!(last_actor(fixture, jobs[3].id).await, "CANCELLED worker:unknown");
}
