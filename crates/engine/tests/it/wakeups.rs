//! A change wakes the loops immediately. On SQLite the next poll would come after 30 seconds.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use faena_domain::{EventKind, JobState, NewJob, TaskId, Timestamp};
use faena_machine::{Definition, Event, Input, Outcome, Status, create};
use faena_store::{NewMachine, NewTask, TaskInput};
use serde_json::json;

use crate::fixture::{Fixture, eventually};

const WELL_BELOW_THE_POLL: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_wakes_the_dispatcher_and_every_job_is_announced() {
    let fixture = Fixture::new().await;
    let mut changes = fixture.engine.bus.subscribe();
    let started = Instant::now();
    let batch = vec![NewJob::new("noop"), NewJob::new("noop"), NewJob::new("noop")];
    let submitted = fixture.engine.submit(batch, "test", Timestamp::now()).await.unwrap();
    for job in &submitted {
        fixture.wait_for_state(job.id, JobState::Completed).await;
    }
    assert!(started.elapsed() < WELL_BELOW_THE_POLL, "{:?}", started.elapsed());
    let mut announced = HashSet::new();
    while let Ok(change) = changes.try_recv() {
        if change.kind == EventKind::of_state(JobState::Queued) {
            announced.insert(change.job_id);
        }
    }
    assert_eq!(announced, submitted.iter().map(|job| job.id).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_delayed_jobs_wakes_the_promoter() {
    let fixture = Fixture::new().await;
    let started = Instant::now();
    let delayed = || {
        let mut job = NewJob::new("noop");
        job.options.scheduled_at = Some(Timestamp::now().plus_ms(300));
        job
    };
    let submitted = fixture.engine.submit(vec![delayed(), delayed()], "test", Timestamp::now()).await.unwrap();
    assert!(submitted.iter().all(|job| job.status == JobState::Pending));
    for job in &submitted {
        fixture.wait_for_state(job.id, JobState::Completed).await;
    }
    assert!(started.elapsed() < WELL_BELOW_THE_POLL, "{:?}", started.elapsed());
}

async fn create_task(fixture: &Fixture, machine: &str) -> TaskId {
    let (id, now) = (TaskId::new(), Timestamp::now());
    let definition = Arc::new(Definition::parse(machine).unwrap());
    fixture.store.machine_register(NewMachine { definition: definition.clone() }, "test", now).await.unwrap();
    let first = create(&definition, id.to_string(), "test".into(), json!({}), now).unwrap();
    let (correlation, tags) = (id.to_string(), Vec::new());
    let task = NewTask { id, definition, title: None, correlation, tags, first, audit: None };
    fixture.store.task_create(task, now).await.unwrap();
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_job_continues_its_task_immediately() {
    // If every job were noticed only by a poll, this would take a minute.
    const JOBS: usize = 7;
    let states = (0..JOBS).map(|n| {
        let to = if n + 1 == JOBS { "DONE".to_owned() } else { format!("S{}", n + 1) };
        format!("  S{n}: {{forever: true, entry: [{{job: noop, name: step}}], on: {{job.step.completed: {to}, job.step.failed: {to}}}}}\n")
    });
    let states: String = states.collect();
    let machine = format!("machine: chain\nversion: 1\ninitial: S0\nstates:\n{states}  DONE: {{final: true}}\n");
    let fixture = Fixture::new().await;
    let started = Instant::now();
    let task = create_task(&fixture, &machine).await;
    eventually("the task ends", async || {
        let view = fixture.store.task_get(task).await.unwrap().unwrap();
        (view.task.status == Status::Completed).then_some(())
    })
    .await;
    assert!(started.elapsed() < WELL_BELOW_THE_POLL * 3, "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_makes_nothing_due_earlier_does_not_wake_the_task_loop() {
    const EVENTS: u64 = 100;
    let machine = "{machine: ping, version: 1, events: {go: {}}, initial: A, states: {
        A: {deadline: {silence: 6h, to: LATE}, on: {go: B}}, B: {deadline: {silence: 6h, to: LATE}, on: {go: A}},
        LATE: {final: true, ends: failure}}}";
    let fixture = Fixture::new().await;
    let task = create_task(&fixture, machine).await;
    let rounds = || fixture.engine.loops.health.all()["tasks"].rounds;
    let (before, started) = (rounds(), Instant::now());
    for n in 0..EVENTS {
        let now = Timestamp::now();
        let (kind, payload, actor) = ("go".to_owned(), json!({}), "test".to_owned());
        let event = Event { id: n.to_string(), kind, payload, actor, decider: None, at: now };
        let input = TaskInput { task, input: Input::Event(event) };
        let answers = fixture.store.task_apply(vec![input], now).await.unwrap();
        assert_eq!(answers[0].as_ref().unwrap().outcome, Outcome::Applied);
    }
    // The creation of the task may still have woken the loop, and the loop runs every ten seconds anyway.
    let expected = 3 + started.elapsed().as_secs() / 10;
    assert!(rounds() - before <= expected, "{} rounds, at most {expected} expected", rounds() - before);
}
