//! Deferred events are offered again after every transition, in the order of their arrival, until they are applied.

use faena_machine::{Outcome, create, step};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{START, Trial, definition};

const STEPS: &str = "
machine: steps
version: 1
events: {take: {}, open: {}, close: {}, note: {unexpected: ignore}}
initial: WORK
counters: {opened: {max: 2, exceeded: DONE}}
states:
  WORK:
    forever: true
    on:
      open: {set: {level: event.level}}
      take: {if: 'event.level <= ctx.level', set: {taken: 'ctx.taken + [event.level]', level: 'ctx.level + 1'}}
      close: {if: 'task.counters.opened > 0', to: DONE}
      note: {loop: opened}
  DONE: {final: true}
";

fn outcomes(trial: &Trial) -> Vec<(String, Outcome)> {
    trial.records.iter().skip(1).map(|record| (record.event.clone(), record.outcome)).collect()
}

#[test]
fn a_deferred_event_is_offered_again_after_a_transition_without_a_target() {
    let definition = definition(STEPS);
    let mut trial = Trial::new(&definition, json!({"level": 0, "taken": []}));
    assert_eq!(trial.event("take", json!({"level": 3})), Outcome::Deferred);
    trial.event("open", json!({"level": 3}));
    assert_eq!((&trial.task.data["taken"], trial.task.deferred.len()), (&json!([3]), 0));
    assert_eq!((trial.task.state().as_str(), trial.task.epoch), ("WORK", 1), "no state was entered");
}

#[test]
fn a_counter_that_changes_lets_a_deferred_event_apply() {
    let definition = definition(STEPS);
    let mut trial = Trial::new(&definition, json!({"level": 0, "taken": []}));
    assert_eq!(trial.event("close", json!({})), Outcome::Deferred);
    trial.event("note", json!({}));
    assert_eq!(trial.task.state(), "DONE");
}

#[test]
fn deferred_events_apply_in_the_order_of_their_arrival_and_after_each_the_first_is_offered_again() {
    let definition = definition(STEPS);
    let mut trial = Trial::new(&definition, json!({"level": 0, "taken": []}));
    for level in [4, 2, 1, 3] {
        assert_eq!(trial.event("take", json!({"level": level})), Outcome::Deferred);
    }
    trial.event("open", json!({"level": 1}));
    // Each event that is applied raises the level by 1, which lets the next one apply. The first event, 4, has to wait for 3.
    assert_eq!(trial.task.data["taken"], json!([1, 2, 3, 4]));
    let kinds: Vec<(String, Outcome)> = outcomes(&trial).split_off(4);
    let take = ("take".to_owned(), Outcome::Applied);
    assert_eq!(kinds, [vec![("open".to_owned(), Outcome::Applied)], vec![take; 4]].concat());
}

#[test]
fn a_hundred_deferred_events_that_change_the_task_are_each_applied_once() {
    let definition = definition(STEPS);
    let mut trial = Trial::new(&definition, json!({"level": 0, "taken": []}));
    for _ in 0..100 {
        assert_eq!(trial.event("take", json!({"level": 1})), Outcome::Deferred);
    }
    let step = trial.event_from("key:bob", "open", json!({"level": 1}));
    assert_eq!((step.outcome, step.records.len(), trial.task.deferred.len()), (Outcome::Applied, 101, 0));
    assert_eq!(trial.task.data["level"], json!(101));
}

#[test]
fn an_ignored_event_does_not_offer_deferred_events_again() {
    let text = STEPS
        .replace("      note: {loop: opened}\n", "")
        .replace("counters: {opened: {max: 2, exceeded: DONE}}\n", "")
        .replace("close: {if: 'task.counters.opened > 0', to: DONE}", "close: DONE");
    let definition = definition(&text);
    let mut trial = Trial::new(&definition, json!({"level": 0, "taken": []}));
    trial.event("take", json!({"level": 3}));
    let step = trial.event_from("key:bob", "note", json!({}));
    assert_eq!((step.outcome, step.records.len()), (Outcome::Ignored, 1));
}

proptest! {
    /// Every event is applied at most once, and none that could apply is left after a step.
    #[test]
    fn no_event_that_could_apply_stays_deferred(events in prop::collection::vec((any::<bool>(), 1..8i64), 1..40)) {
        let definition = definition(STEPS);
        let first = create(&definition, "t".into(), "key:a".into(), json!({"level": 0, "taken": []}), START).unwrap();
        let mut task = first.task;
        let mut sent = 0;
        for (number, (opens, level)) in events.into_iter().enumerate() {
            let kind = if opens { "open" } else { "take" };
            sent += usize::from(!opens);
            let event = faena_machine::Event {
                id: number.to_string(), kind: kind.into(), payload: json!({"level": level}),
                actor: "key:b".into(), decider: None, at: START,
            };
            let done = step(&definition, &task, faena_machine::Input::Event(event), START);
            task = done.task;
            let level = task.data["level"].as_i64().unwrap();
            let left = task.deferred.iter().map(|event| event.payload["level"].as_i64().unwrap());
            prop_assert!(left.clone().all(|wanted| wanted > level), "level {level}, left {:?}", left.collect::<Vec<_>>());
            prop_assert_eq!(task.data["taken"].as_array().unwrap().len() + task.deferred.len(), sent);
        }
    }
}
