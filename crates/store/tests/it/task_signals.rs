//! Only these changes wake the loop of tasks: a timer is due earlier than before, a job ends, or a queued task may
//! start.

use std::sync::Arc;

use faena_domain::{JobState, NewJob};
use faena_machine::Definition;
use faena_store::{Filter, Signal};
use serde_json::json;
use tokio::sync::broadcast::Receiver;

use crate::{
    support::Fixture,
    tasks::{fire, new_task, order, register, send, state},
};

/// Returns the signals for the loop of tasks since the last call.
fn received(signals: &mut Receiver<Signal>) -> Vec<Signal> {
    std::iter::from_fn(|| signals.try_recv().ok())
        .filter(|signal| matches!(signal, Signal::TaskDue(_) | Signal::TaskJobEnded | Signal::TaskQueue))
        .collect()
}

pub async fn every_end_of_a_job_wakes_its_task(fixture: &Fixture) {
    let mut signals = fixture.store.signals();
    for (how, ends_in) in [("complete", "PAID"), ("fail", "EXPIRED"), ("cancel", "EXPIRED"), ("delete", "EXPIRED")] {
        let task = order(fixture).await;
        send(fixture, task, "e1", "pay", 10).await;
        let queued = fixture.list(Filter { states: vec![JobState::Queued], ..Filter::default() }).await;
        received(&mut signals);
        match how {
            "complete" => fixture.complete(&fixture.claim_one(20).await, 30).await,
            "fail" => fixture.fail(&fixture.claim_one(20).await, 30).await,
            "cancel" => drop(fixture.store.job_cancel(queued[0], "not wanted", None, fixture.at(30)).await.unwrap()),
            _ => fixture.store.job_delete(queued[0], None, fixture.at(30)).await.unwrap(),
        }
        assert_eq!(received(&mut signals), [Signal::TaskJobEnded], "{how}");
        assert_eq!(fire(fixture, 40).await.jobs, 1, "{how}");
        assert_eq!(state(fixture, task).await, ends_in, "{how}");
        assert_eq!(fire(fixture, 50).await.jobs, 0, "{how}: the end is processed once");
    }
    let job = NewJob::new("card.charge");
    fixture.store.job_submit(vec![job], None, fixture.at(60)).await.unwrap();
    fixture.complete(&fixture.claim_one(70).await, 80).await;
    assert_eq!(received(&mut signals), [], "no task waits for this job");
}

const STAGES: &str = "
machine: stages
version: 1
events: {later: {}, sooner: {}, alive: {heartbeat: true}}
initial: A
states:
  A: {deadline: {total: 10m, to: LATE}, on: {later: B}}
  B: {deadline: {total: 20m, to: LATE}, on: {sooner: C}}
  C: {deadline: {total: 1m, to: LATE}}
  LATE: {final: true, ends: failure}
";

pub async fn only_an_earlier_due_time_is_announced(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(STAGES).unwrap());
    register(fixture, &definition).await;
    let mut signals = fixture.store.signals();
    let task = new_task(fixture, &definition, json!({}), 0).await;
    assert_eq!(received(&mut signals), [Signal::TaskDue(fixture.at(600_000))]);
    send(fixture, task, "e1", "alive", 10).await;
    send(fixture, task, "e2", "later", 20).await;
    assert_eq!(received(&mut signals), [], "nothing is due earlier than before");
    send(fixture, task, "e3", "sooner", 30).await;
    assert_eq!(received(&mut signals), [Signal::TaskDue(fixture.at(60_030))]);
    assert_eq!(fire(fixture, 40).await.next_at, Some(fixture.at(60_030)));
}

const NARROW: &str = "
machine: narrow
version: 1
limits: {running: 1}
events: {note: {}, finish: {}}
initial: WORK
states:
  WORK: {forever: true, on: {note: {set: {noted: 'true'}}, finish: DONE}}
  DONE: {final: true}
";

pub async fn a_queued_task_and_a_freed_slot_are_announced(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(NARROW).unwrap());
    register(fixture, &definition).await;
    let mut signals = fixture.store.signals();
    let first = new_task(fixture, &definition, json!({}), 0).await;
    assert!(!received(&mut signals).contains(&Signal::TaskQueue), "it has started");
    new_task(fixture, &definition, json!({}), 1).await;
    assert_eq!(received(&mut signals), [Signal::TaskQueue], "another task may have ended while it was stored");
    send(fixture, first, "e1", "note", 2).await;
    assert_eq!(received(&mut signals), []);
    send(fixture, first, "e2", "finish", 3).await;
    assert_eq!(received(&mut signals), [Signal::TaskQueue]);
    send(fixture, first, "e3", "note", 4).await;
    assert_eq!(received(&mut signals), [], "it ends once");
    assert_eq!(fire(fixture, 5).await.started, 1);
    let started = received(&mut signals);
    assert!(matches!(started[..], [Signal::TaskDue(_)]), "{started:?}: the lifetime of the started task");
}
