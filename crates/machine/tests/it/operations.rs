//! Forks, migrations, and what a history records about data.

use std::{collections::BTreeMap, sync::Arc};

use faena_machine::{
    Caller, Definition, Effect, HistoryPoint, Input, Migration, Origin, Outcome, Status, Step, fork, with_timers,
};
use serde_json::{Map, Value, json};

use crate::support::{START, Trial, definition};

const FIRST: &str = "
machine: order
version: 1
events: {pay: {}, again: {}, ship: {}, note: {}}
counters: {tries: {max: 3, exceeded: LATE}}
initial: NEW
states:
  NEW:
    deadline: {total: 1h, to: LATE}
    entry: [{set: {seen: true}}]
    on: {pay: {to: OPEN, set: {amount: event.amount}}}
  OPEN:
    initial: WAITING
    deadline: {total: 1h, to: LATE}
    states:
      WAITING:
        forever: true
        entry: [{job: card.charge, name: charge}]
        on: {again: {to: WAITING, loop: tries}, ship: DONE, job.charge.completed: DONE, job.charge.failed: LATE}
  DONE: {final: true}
  LATE: {final: true, ends: failure}
";

fn second() -> Arc<Definition> {
    let text = FIRST
        .replace("version: 1", "version: 2")
        .replace("  NEW:", "  START:")
        .replace("initial: NEW", "initial: START")
        .replace("total: 1h", "total: 2h")
        .replace(", note: {}", "");
    Arc::new(definition(&text))
}

fn migration(definition: Arc<Definition>, map: &[(&str, &str)], runs_entry: bool) -> Migration {
    let states: BTreeMap<String, String> =
        map.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect();
    Migration { from: 1, definition, states, runs_entry, actor: "key:ops".into() }
}

fn point_after(trial: &Trial<'_>, record: u64) -> HistoryPoint {
    let mut point = HistoryPoint::default();
    trial.records.iter().take_while(|one| one.sequence <= record).for_each(|one| point.advance(one));
    point
}

fn forked(definition: &Definition, point: HistoryPoint, data: Value) -> Result<Step, String> {
    let origin = Origin { task_id: "task-1".into(), record: point.record };
    let data: Map<String, Value> = data.as_object().unwrap().clone();
    fork(definition, "task-2".into(), Caller::from("key:ops"), point, origin, data, START.plus_ms(60_000))
}

#[test]
fn a_history_has_the_data_and_counters_of_every_record() {
    let definition = definition(FIRST);
    let mut trial = Trial::new(&definition, json!({"customer": 7}));
    trial.event("pay", json!({"amount": 5}));
    trial.event("again", json!({}));
    let at = |record| point_after(&trial, record);
    assert_eq!(json!(at(1).data), json!({"customer": 7, "seen": true}));
    assert_eq!((at(1).state.as_str(), at(1).version), ("NEW", 1));
    assert_eq!(json!(at(2).data), json!({"customer": 7, "seen": true, "amount": 5}));
    assert_eq!((at(2).state.as_str(), at(2).counters.len()), ("OPEN.WAITING", 0));
    assert_eq!(at(3).counters, BTreeMap::from([("tries".to_owned(), 1)]));
    assert_eq!(json!(at(3).data), trial.task.data, "the history leads to the data of the task");
    assert!(trial.records[2].set.is_empty(), "only what changed is recorded");
}

#[test]
fn a_fork_enters_its_state_with_the_data_of_that_point() {
    let definition = definition(FIRST);
    let mut trial = Trial::new(&definition, json!({"customer": 7}));
    trial.event("pay", json!({"amount": 5}));
    trial.event("again", json!({}));
    trial.event("ship", json!({}));
    assert_eq!(trial.task.status, Status::Completed);
    let step = forked(&definition, point_after(&trial, 3), json!({"amount": 9})).unwrap();
    let task = step.task;
    assert_eq!(
        (task.state().as_str(), task.status, task.created_by.as_str()),
        ("OPEN.WAITING", Status::Running, "key:ops")
    );
    assert_eq!(task.data, json!({"customer": 7, "seen": true, "amount": 9}));
    assert_eq!(task.counters["tries"], 1, "a loop cannot be prolonged by a fork");
    assert_eq!(task.forked_from, Some(Origin { task_id: "task-1".into(), record: 3 }));
    assert!(with_timers(&definition, &task, START).is_none());
    assert!(step.effects.iter().any(|effect| matches!(effect, Effect::Job(job) if job.name == "charge")));
    assert_eq!((step.records.len(), step.records[0].event.as_str()), (1, "task.forked"));
    let mut again = HistoryPoint::default();
    again.advance(&step.records[0]);
    assert_eq!((json!(again.data), again.counters), (task.data, task.counters), "a fork can be forked");

    let last = forked(&definition, point_after(&trial, 4), json!({})).unwrap_err();
    assert!(last.contains("final state DONE"), "{last}");
    let large = "x".repeat(300_000);
    let error = forked(&definition, point_after(&trial, 1), json!({"text": large})).unwrap_err();
    assert!(error.contains("the limit is"), "{error}");
}

#[test]
fn a_migrated_task_drops_its_earlier_timers_approvals_and_jobs() {
    let (first, second) = (definition(FIRST), second());
    let mut trial = Trial::new(&first, json!({}));
    trial.event("pay", json!({"amount": 5}));
    trial.event("note", json!({}));
    let before = trial.task.clone();
    assert_eq!(before.deferred.len(), 1);
    trial.now = trial.now.plus_ms(600_000);
    let step = trial.apply(Input::Migrate(Arc::new(migration(second.clone(), &[], false))));
    assert_eq!(step.outcome, Outcome::Applied, "{:?}", step.reason);
    assert!(step.effects.is_empty(), "no entry actions");
    assert_eq!((trial.task.state(), &trial.task.data), (before.state(), &before.data));
    assert!(trial.task.epoch > before.epoch);
    assert_eq!(with_timers(&second, &trial.task, trial.now), None);
    assert_eq!(trial.task.due(), Some(trial.now.plus_ms(2 * 3_600_000)), "two hours from now");
    let records: Vec<(&str, Outcome)> = step.records.iter().map(|one| (one.event.as_str(), one.outcome)).collect();
    assert_eq!(records, [("task.migrated", Outcome::Applied), ("note", Outcome::Ignored)]);
    let mut trial = Trial { definition: &second, ..trial };
    assert_eq!(trial.job_ended("charge", "completed", json!({})).outcome, Outcome::Stale);
    assert_eq!(trial.event("ship", json!({})), Outcome::Applied);
    assert_eq!(trial.task.status, Status::Completed);
}

#[test]
fn a_migration_runs_entry_actions_if_requested() {
    let (first, second) = (definition(FIRST), second());
    let mut trial = Trial::new(&first, json!({}));
    trial.event("pay", json!({"amount": 5}));
    let step = trial.apply(Input::Migrate(Arc::new(migration(second, &[], true))));
    assert!(matches!(&step.effects[..], [Effect::Job(job)] if job.epoch == step.task.epoch), "{:?}", step.effects);
}

#[test]
fn a_task_that_cannot_move_stays_as_it_is() {
    let (first, second) = (definition(FIRST), second());
    let mut trial = Trial::new(&first, json!({}));
    let before = trial.task.clone();
    let unmapped = migration(second.clone(), &[], true);
    let step = trial.apply(Input::Migrate(Arc::new(unmapped)));
    assert_eq!(step.outcome, Outcome::Rejected);
    assert_eq!(step.reason.as_deref(), Some("version 2 has no state NEW; add NEW to the map"));
    assert_eq!((&trial.task, step.records.len()), (&before, 0));
    let mapped = migration(second.clone(), &[("NEW", "START")], true);
    assert!(mapped.check(&first).is_empty());
    assert_eq!(trial.apply(Input::Migrate(Arc::new(mapped))).outcome, Outcome::Applied);
    assert_eq!(trial.task.state(), "START");
    let twice = migration(second.clone(), &[("NEW", "START")], true);
    let mut trial = Trial { definition: &second, ..trial };
    assert_eq!(trial.apply(Input::Migrate(Arc::new(twice))).outcome, Outcome::Rejected, "it has version 2");
    let faulty = migration(second.clone(), &[("NOTHING", "START"), ("NEW", "NOWHERE")], true);
    assert_eq!(faulty.check(&first).len(), 2);
}

#[test]
fn the_mapping_of_an_outer_state_applies_to_the_states_inside_it() {
    let (first, second) = (definition(FIRST), second());
    let outer = migration(second.clone(), &[("OPEN", "START")], true);
    assert_eq!(second.states[outer.target("OPEN.WAITING").unwrap()].name, "START");
    let inner = migration(second.clone(), &[("OPEN", "START"), ("OPEN.WAITING", "DONE")], true);
    assert_eq!(second.states[inner.target("OPEN.WAITING").unwrap()].name, "DONE");
    assert!(inner.check(&first).is_empty());
}
