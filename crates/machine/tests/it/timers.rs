//! Named timers, the lifetime of a task, and reminders over weeks.

use serde_json::json;

use crate::support::{Trial, definition};

const REMINDERS: &str = "
machine: reminders
version: 1
limits: {lifetime: 60d, to: EXPIRED}
events: {remind: {}, done: {}}
initial: WAITING
states:
  WAITING:
    forever: true
    timers: {first: {after: 3d}, weekly: {every: 7d}}
    on:
      timer.first: {emit: remind, data: {kind: \"'first'\"}}
      timer.weekly: {emit: remind, data: {kind: \"'weekly'\"}}
      done: COMPLETE
  COMPLETE: {final: true}
  EXPIRED: {final: true, ends: failure}
";

#[test]
fn timers_fire_once_or_repeatedly_until_the_state_is_left() {
    let definition = definition(REMINDERS);
    let mut trial = Trial::new(&definition, json!({}));
    trial.wait("3d");
    assert_eq!(trial.emitted().len(), 1);
    trial.wait("25d");
    assert_eq!(trial.emitted().len(), 1 + 4);
    trial.event("done", json!({}));
    trial.wait("30d");
    assert_eq!((trial.emitted().len(), trial.task.due()), (5, None));
}

#[test]
fn a_repeated_timer_skips_what_an_outage_missed() {
    let definition = definition(REMINDERS);
    let mut trial = Trial::new(&definition, json!({}));
    // The server was stopped for five weeks: one step at the end, not five.
    trial.now = trial.now.plus_ms(36 * 86_400_000);
    trial.apply(faena_machine::Input::Timers);
    assert_eq!(trial.emitted().len(), 2, "one of each timer");
    assert_eq!(trial.task.due().unwrap().ms_since(trial.now), 6 * 86_400_000, "the interval stays");
}

#[test]
fn the_lifetime_ends_a_task_that_may_wait_for_ever() {
    let definition = definition(REMINDERS);
    let mut trial = Trial::new(&definition, json!({}));
    trial.wait("60d");
    assert_eq!(trial.task.state(), "EXPIRED");
    let last = trial.records.iter().rev().find(|record| record.to.is_some()).unwrap();
    assert_eq!(last.event, "deadline.lifetime");
}

#[test]
fn a_timer_never_fires_early_even_if_the_clock_moves_back() {
    let definition = definition(REMINDERS);
    let mut trial = Trial::new(&definition, json!({}));
    trial.now = trial.now.plus_ms(-1_000_000);
    trial.apply(faena_machine::Input::Timers);
    assert!(trial.emitted().is_empty());
}
