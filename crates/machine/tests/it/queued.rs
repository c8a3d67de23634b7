//! Queued tasks: what they keep, and how they start.

use std::{collections::BTreeMap, sync::Arc};

use faena_machine::{
    Definition, Effect, Input, Migration, Outcome, Status, Step, Task, contradictions, create, queue, step, why,
    with_timers,
};
use serde_json::json;

use crate::support::{START, Trial, definition};

const BATCH: &str = "
machine: batch
version: 1
start: begin
cancel: STOPPED
limits: {running: 2, lifetime: 1h}
events: {begin: {}, note: {unexpected: reject}, finish: {}, alive: {heartbeat: true}}
initial: NEW
states:
  NEW: {forever: true, entry: [{set: {entered: 'true'}}], on: {begin: WORK}}
  WORK: {forever: true, on: {note: {set: {notes: 'ctx.notes + 1'}}, finish: DONE}}
  DONE: {final: true}
  STOPPED: {final: true, ends: cancelled, entry: [{set: {stopped: 'true'}}]}
";

fn queued<'a>(definition: &'a Definition) -> Trial<'a> {
    let first = create(definition, "task-1".into(), "key:alice".into(), json!({"notes": 0}), START).unwrap();
    let Step { task, records, effects, .. } = queue(definition, &first.unstarted.unwrap(), START);
    Trial { definition, task, now: START, records, effects, ids: 0 }
}

#[test]
fn a_queued_task_is_in_no_state_and_has_done_nothing() {
    let definition = definition(BATCH);
    let trial = queued(&definition);
    assert_eq!((trial.task.status, trial.task.state().as_str(), trial.task.due()), (Status::Queued, "", None));
    assert_eq!(trial.task.data, json!({"notes": 0}));
    assert_eq!(trial.notices(), ["task.queued"]);
    assert!(
        contradictions(&definition, &trial.task).is_empty() && with_timers(&definition, &trial.task, START).is_none()
    );
    let running = create(&definition, "task-2".into(), "key:alice".into(), json!({"notes": 0}), START).unwrap().task;
    let contradictory = Task { status: Status::Queued, ..running };
    assert_eq!(contradictions(&definition, &contradictory), ["it is queued and in a state"]);
    let reasons = why(&definition, &trial.task, START);
    assert_eq!((reasons.len(), reasons[0].code), (1, "queued"));
}

#[test]
fn a_queued_task_starts_like_a_new_one_and_the_time_in_the_queue_does_not_count() {
    let definition = definition(BATCH);
    let mut trial = queued(&definition);
    trial.wait("10h");
    assert_eq!(trial.apply(Input::Start).outcome, Outcome::Applied);
    let fresh = create(&definition, "task-1".into(), "key:alice".into(), json!({"notes": 0}), trial.now).unwrap();
    assert_eq!((trial.task.state().as_str(), &trial.task.data), ("WORK", &fresh.task.data));
    assert_eq!((trial.task.timers.clone(), trial.task.created_at), (fresh.task.timers, START));
    let records: Vec<(&str, u64)> = trial.records.iter().map(|one| (one.event.as_str(), one.sequence)).collect();
    assert_eq!(records, [("task.queued", 1), ("task.created", 2), ("begin", 3)]);
    assert_eq!(trial.apply(Input::Start).outcome, Outcome::Ignored, "a task starts once");
    let without_timers = Task { timers: Vec::new(), ..trial.task.clone() };
    let repaired = with_timers(&definition, &without_timers, trial.now).unwrap();
    assert_eq!(repaired.timers, trial.task.timers, "also if doctor has to restore its timers");
    trial.wait("1h");
    assert!(trial.task.status.has_ended(), "its lifetime began with its start");
}

#[test]
fn events_of_a_queued_task_are_deferred_and_follow_its_start() {
    let definition = definition(BATCH);
    let mut trial = queued(&definition);
    for _ in 0..2 {
        assert_eq!(trial.event("note", json!({})), Outcome::Deferred, "although a running task would refuse it");
    }
    assert_eq!(trial.event("other", json!({})), Outcome::Invalid);
    for _ in 0..200 {
        assert_eq!(trial.event("alive", json!({})), Outcome::Ignored, "it would fill the list of deferred events");
    }
    assert_eq!(trial.event("finish", json!({})), Outcome::Deferred);
    trial.apply(Input::Start);
    assert_eq!((trial.task.state().as_str(), &trial.task.data["notes"]), ("DONE", &json!(2)), "in their order");
}

#[test]
fn a_queued_task_can_be_cancelled_and_not_paused() {
    let definition = definition(BATCH);
    let cancel = || Input::Cancel { actor: "key:ops".into(), reason: Some("not needed".into()) };
    let mut trial = queued(&definition);
    let step = trial.apply(Input::Pause { actor: "key:ops".into() });
    assert_eq!(
        (step.outcome, step.reason.as_deref()),
        (Outcome::Rejected, Some("the task is queued; it has not started"))
    );
    assert_eq!(trial.decide("key:ops", &[], true).outcome, Outcome::Rejected);
    trial.apply(cancel());
    assert_eq!((trial.task.status, trial.task.state().as_str()), (Status::Cancelled, "STOPPED"));
    assert_eq!(trial.task.data, json!({"notes": 0, "stopped": true}), "it was never in NEW");
    let text = BATCH.replace("cancel: STOPPED\n", "").replace("finish: DONE", "finish: DONE, begin: STOPPED");
    let definition = crate::support::definition(&text);
    let mut trial = queued(&definition);
    trial.apply(cancel());
    assert_eq!((trial.task.status, trial.task.state().as_str()), (Status::Cancelled, ""));
    assert!(contradictions(&definition, &trial.task).is_empty(), "it ended where it was: in no state");
}

#[test]
fn a_queued_task_moves_to_another_version_and_starts_there() {
    let definition = definition(BATCH);
    let mut trial = queued(&definition);
    trial.event("note", json!({}));
    trial.event("finish", json!({}));
    let text = BATCH.replace("version: 1", "version: 2").replace("note: {unexpected: reject}, ", "");
    let text = text.replace("note: {set: {notes: 'ctx.notes + 1'}}, ", "");
    let second = Arc::new(crate::support::definition(&text));
    let migration = Migration {
        from: 1,
        definition: second.clone(),
        states: BTreeMap::new(),
        runs_entry: true,
        actor: "key:ops".into(),
    };
    let moved = trial.apply(Input::Migrate(Arc::new(migration)));
    assert_eq!((moved.outcome, moved.task.status, moved.task.deferred.len()), (Outcome::Applied, Status::Queued, 1));
    assert_eq!(moved.records[0].version, Some(2));
    let started = step(&second, &moved.task, Input::Start, START);
    assert_eq!((started.task.state().as_str(), &started.task.data["notes"]), ("DONE", &json!(0)));
}

#[test]
fn an_error_at_the_start_of_a_queued_task_fails_it() {
    let definition = definition(BATCH);
    let trial = queued(&definition);
    let broken = crate::support::definition(&BATCH.replace("entered: 'true'", "entered: 'ctx.missing.field'"));
    let step = step(&broken, &trial.task, Input::Start, START);
    assert_eq!(step.task.status, Status::Failed);
    assert!(step.task.fault.is_some_and(|fault| fault.contains("missing")));
    assert!(step.effects.iter().any(|effect| matches!(effect, Effect::Notice { event: "task.ended", .. })));
}
