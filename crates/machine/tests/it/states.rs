//! Nested states, the order of actions, guards, limits, pause and cancellation.

use faena_machine::{Effect, Event, Input, Outcome, Status, create, step, why};
use serde_json::{Value, json};

use crate::support::{START, Trial, definition};

const NESTED: &str = "
machine: nested
version: 1
events: {go: {}, up: {}, inner: {}, log: {}, again: {}}
initial: OUTER
counters: {rounds: 9}
states:
  OUTER:
    forever: true
    initial: ONE
    entry: [{emit: log, data: {at: \"'enter OUTER'\"}}]
    exit: [{emit: log, data: {at: \"'exit OUTER'\"}}]
    on:
      go: {to: END, emit: log, data: {at: \"'go'\"}}
      inner: {set: {handled: \"'outer'\"}}
      again: {to: OUTER, loop: rounds, exceeded: END}
    states:
      ONE:
        entry: [{emit: log, data: {at: \"'enter ONE'\"}}]
        exit: [{emit: log, data: {at: \"'exit ONE'\"}}]
        on: {up: TWO, inner: {set: {handled: \"'inner'\"}}}
      TWO:
        entry: [{emit: log, data: {at: \"'enter TWO'\"}}]
        exit: [{emit: log, data: {at: \"'exit TWO'\"}}]
  END: {final: true, entry: [{emit: log, data: {at: \"'enter END'\"}}]}
";

fn log(trial: &mut Trial<'_>) -> Vec<String> {
    let effects = std::mem::take(&mut trial.effects);
    let lines = effects.into_iter().filter_map(|effect| match effect {
        Effect::Emit { payload, .. } => Some(payload["at"].as_str().unwrap().to_owned()),
        _ => None,
    });
    lines.collect()
}

#[test]
fn inner_states_are_left_first_and_outer_states_are_entered_first() {
    let definition = definition(NESTED);
    let mut trial = Trial::new(&definition, json!({}));
    assert_eq!(trial.task.state(), "OUTER.ONE");
    assert_eq!(log(&mut trial), ["enter OUTER", "enter ONE"]);
    trial.event("up", json!({}));
    assert_eq!(log(&mut trial), ["exit ONE", "enter TWO"], "the outer state stays active");
    trial.event("again", json!({}));
    assert_eq!(
        log(&mut trial),
        ["exit TWO", "exit OUTER", "enter OUTER", "enter ONE"],
        "a transition to itself enters again"
    );
    trial.event("go", json!({}));
    assert_eq!(log(&mut trial), ["exit ONE", "exit OUTER", "go", "enter END"]);
    assert_eq!(trial.task.status, Status::Completed);
}

#[test]
fn the_inner_state_sees_an_event_first() {
    let definition = definition(NESTED);
    let mut trial = Trial::new(&definition, json!({}));
    trial.event("inner", json!({}));
    assert_eq!(trial.task.data["handled"], "inner");
    trial.event("up", json!({}));
    trial.event("inner", json!({}));
    assert_eq!((&trial.task.data["handled"], trial.task.state().as_str()), (&json!("outer"), "OUTER.TWO"));
}

const GUARDED: &str = "
machine: guarded
version: 1
limits: {transitions: 5, context: 1KiB}
events: {try: {}, note: {unexpected: ignore}, no: {unexpected: reject}, later: {}, big: {}}
initial: A
states:
  A:
    forever: true
    on:
      try:
        - {if: event.n > 10, to: B, set: {n: event.n, before: \"has(ctx.n) ? ctx.n : 0\"}}
        - {if: event.n > 5}
      big: {set: {text: event.text}}
  B: {deadline: {total: 1h, to: Z}, on: {later: A}}
  Z: {final: true}
";

#[test]
fn the_first_condition_that_holds_decides() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({"n": 1}));
    assert_eq!(trial.event("try", json!({"n": 7})), Outcome::Applied);
    assert_eq!(trial.task.state(), "A");
    let step = trial.event_from("key:x", "try", json!({"n": 3}));
    assert_eq!(step.outcome, Outcome::Deferred);
    assert_eq!(
        step.reason.as_deref(),
        Some("the condition \"event.n > 10\" is false; the condition \"event.n > 5\" is false")
    );
    trial.event("try", json!({"n": 11}));
    assert_eq!((trial.task.state().as_str(), &trial.task.data), ("B", &json!({"n": 11, "before": 1})));
}

#[test]
fn an_unexpected_event_is_deferred_ignored_or_rejected() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    assert_eq!(trial.event("note", json!({})), Outcome::Ignored);
    assert_eq!(trial.event("no", json!({})), Outcome::Rejected);
    assert_eq!(trial.event("later", json!({})), Outcome::Deferred);
    trial.event("try", json!({"n": 20}));
    assert_eq!(trial.task.state(), "A", "the deferred event was applied immediately afterwards");
    let outcomes: Vec<(&str, Outcome)> =
        trial.records.iter().map(|record| (record.event.as_str(), record.outcome)).collect();
    assert_eq!(
        outcomes,
        [
            ("task.created", Outcome::Applied),
            ("note", Outcome::Ignored),
            ("later", Outcome::Deferred),
            ("try", Outcome::Applied),
            ("later", Outcome::Applied)
        ]
    );
}

#[test]
fn at_most_a_hundred_events_wait() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    for _ in 0..100 {
        assert_eq!(trial.event("later", json!({})), Outcome::Deferred);
    }
    assert_eq!(trial.event("later", json!({})), Outcome::Rejected);
}

#[test]
fn limits_on_transitions_and_data_are_enforced() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    for _ in 0..2 {
        trial.event("try", json!({"n": 20}));
        trial.event("later", json!({}));
    }
    trial.event("try", json!({"n": 20}));
    trial.event("later", json!({}));
    assert_eq!(trial.task.status, Status::Failed);
    assert!(trial.task.fault.as_deref().unwrap().contains("limit of 5 transitions"), "{:?}", trial.task.fault);

    let mut trial = Trial::new(&definition, json!({}));
    let step = trial.event_from("key:x", "big", json!({"text": "x".repeat(2_000)}));
    assert_eq!(step.outcome, Outcome::Rejected);
    assert!(step.reason.unwrap().contains("the limit is 1024"));
    let large = json!({"text": "x".repeat(2_000)});
    assert!(create(&definition, "t".into(), "key:a".into(), large, START).is_err());
}

#[test]
fn a_paused_task_waits_and_the_pause_does_not_count() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    trial.event("try", json!({"n": 20}));
    trial.wait("30m");
    trial.apply(Input::Pause { actor: "key:a".into() });
    assert_eq!((trial.task.status, trial.task.due()), (Status::Paused, None));
    assert_eq!(trial.event("later", json!({})), Outcome::Deferred);
    trial.wait("10h");
    trial.apply(Input::Resume { actor: "key:a".into() });
    assert_eq!(trial.task.state(), "A", "what arrived during the pause is applied now");
    trial.event("try", json!({"n": 20}));
    trial.wait("59m");
    assert_eq!(trial.task.state(), "B");
    trial.apply(Input::Pause { actor: "key:a".into() });
    trial.wait("10h");
    trial.apply(Input::Resume { actor: "key:a".into() });
    trial.wait("59s");
    assert_eq!(trial.task.state(), "B");
    trial.wait("1s");
    assert_eq!(trial.task.state(), "Z");
}

#[test]
fn a_task_is_cancelled_in_its_state_unless_the_machine_has_a_cancel_state() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    trial.event("later", json!({}));
    trial.apply(Input::Cancel { actor: "key:a".into(), reason: Some("not needed".into()) });
    assert_eq!((trial.task.status, trial.task.state().as_str()), (Status::Cancelled, "A"));
    let last: Vec<(&str, Outcome)> =
        trial.records.iter().rev().take(2).map(|record| (record.event.as_str(), record.outcome)).collect();
    assert_eq!(last, [("later", Outcome::Ignored), ("task.cancelled", Outcome::Applied)]);
    assert_eq!(trial.notices(), ["task.ended"]);
}

#[test]
fn the_end_of_a_job_applies_only_to_its_own_stay() {
    let definition = definition(
        "
machine: jobs
version: 1
events: {retry: {}}
initial: A
states:
  A:
    deadline: {total: 1h, to: Z}
    entry: [{job: send.mail, name: mail, data: {n: task.counters.rounds}, options: {queue: mails}}]
    on: {job.mail.completed: {to: Z, set: {sent: event.result}}, retry: {to: A, loop: rounds, exceeded: Z}}
  Z: {final: true}
counters: {rounds: 3}
",
    );
    let mut trial = Trial::new(&definition, json!({}));
    let Some(Effect::Job(first)) = trial.effects.first().cloned() else { panic!("{:?}", trial.effects) };
    assert_eq!((first.job_type.as_str(), &first.payload), ("send.mail", &json!({"n": 0})));
    assert_eq!(Value::Object(first.options.clone()), json!({"queue": "mails"}));
    trial.event("retry", json!({}));
    let event = |result: i64| Event {
        id: String::new(),
        kind: "job.mail.completed".into(),
        payload: json!({"result": result}),
        actor: "system:jobs".into(),
        decider: None,
        at: START,
    };
    let stale = trial.apply(Input::JobEnded { state: first.state, epoch: first.epoch, event: event(1) });
    assert_eq!((stale.outcome, trial.task.state().as_str()), (Outcome::Stale, "A"));
    trial.job_ended("mail", "completed", json!({"result": 2}));
    assert_eq!((trial.task.state().as_str(), &trial.task.data["sent"]), ("Z", &json!(2)));
}

#[test]
fn an_error_in_the_machine_itself_fails_the_task() {
    let definition = definition(
        "
machine: faulty
version: 1
initial: A
states:
  A: {deadline: {total: 1m, to: B}}
  B: {forever: true, entry: [{set: {x: ctx.missing.field}}], on: {approval.granted: Z}}
  Z: {final: true}
",
    );
    let mut trial = Trial::new(&definition, json!({}));
    trial.wait("1m");
    assert_eq!((trial.task.status, trial.task.state().as_str()), (Status::Failed, "A"));
    assert!(trial.task.fault.as_deref().unwrap().contains("ctx.missing.field"));
    assert_eq!(trial.task.due(), None);
}

#[test]
fn a_step_is_repeatable_and_does_not_change_its_input() {
    let definition = definition(GUARDED);
    let trial = Trial::new(&definition, json!({}));
    let before = trial.task.clone();
    let event = Event {
        id: "e".into(),
        kind: "try".into(),
        payload: json!({"n": 20}),
        actor: "key:x".into(),
        decider: None,
        at: START,
    };
    let one = step(&definition, &trial.task, Input::Event(event.clone()), START);
    let two = step(&definition, &trial.task, Input::Event(event), START);
    assert_eq!((one, trial.task), (two, before));
}

#[test]
fn a_task_says_what_it_waits_for() {
    let definition = definition(GUARDED);
    let mut trial = Trial::new(&definition, json!({}));
    trial.event("try", json!({"n": 3}));
    trial.event("later", json!({}));
    let reasons = why(&definition, &trial.task, trial.now);
    let shown: Vec<(&str, &str)> = reasons.iter().map(|reason| (reason.code, reason.message.as_str())).collect();
    assert_eq!(shown[0], ("event", "it waits for try, big"));
    assert!(shown[1].0 == "timer" && shown[1].1.starts_with("its lifetime ends at "), "{shown:?}");
    let condition = "the condition \"event.n > 10\" is false; the condition \"event.n > 5\" is false";
    assert_eq!(shown[2], ("deferred", format!("try from key:service is deferred: {condition}").as_str()));
    assert_eq!(shown[3], ("deferred", "later from key:service is deferred: A does not handle it"));
    trial.apply(Input::Cancel { actor: "key:a".into(), reason: None });
    assert_eq!(why(&definition, &trial.task, trial.now)[0].message, "it has ended in A");
}
