//! Invariants for every order of events, decisions, pauses and clock jumps.

use faena_machine::{Definition, Event, Input, Outcome, Status};
use proptest::prelude::*;
use serde_json::json;

use crate::{
    reference::{Message, Model},
    support::{START, Trial, coding_task, request},
};

#[derive(Clone, Debug)]
enum Act {
    Event(usize, bool),
    Decide(bool),
    JobEnded(bool),
    Wait(u32),
    ClockBack(u32),
    Pause,
    Resume,
    Cancel,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        8 => (0_usize..10, any::<bool>()).prop_map(|(event, ok)| Act::Event(event, ok)),
        2 => any::<bool>().prop_map(Act::Decide),
        2 => any::<bool>().prop_map(Act::JobEnded),
        4 => (0_u32..20).prop_map(Act::Wait),
        1 => (0_u32..20).prop_map(Act::ClockBack),
        1 => Just(Act::Pause),
        1 => Just(Act::Resume),
    ];
    prop::collection::vec(act, 0..80).prop_map(|mut acts| {
        // Some tasks are cancelled in the middle.
        if acts.len() > 60 {
            acts.insert(50, Act::Cancel);
        }
        acts
    })
}

fn payload(event: &str, ok: bool) -> serde_json::Value {
    match event {
        "tarea.crear" => request(),
        "tarea.generar_plan" => json!({"prompt": "x"}),
        "resultado.plan_generado" => json!({"planId": "p1", "plan": "x"}),
        "tarea.aprobar_plan" => json!({"planId": if ok { "p1" } else { "p2" }}),
        "resultado.pr_generada" | "tarea.probar_integracion" => json!({"pullRequestUrl": "u"}),
        "resultado.integracion_finalizada" => json!({"exito": ok, "log": "failure"}),
        "tarea.enviar_feedback" => json!({"promptCorreccion": "x"}),
        _ => json!({"sessionId": "s1", "estado": ok}),
    }
}

fn apply(trial: &mut Trial<'_>, definition: &Definition, act: &Act) {
    match act {
        Act::Event(index, ok) => {
            let name = definition.events.keys().nth(index % definition.events.len()).unwrap();
            trial.event(name, payload(name, *ok));
        }
        Act::Decide(approve) => {
            trial.decide("key:bob", &[], *approve);
        }
        Act::JobEnded(ok) => {
            let job = trial.effects.iter().rev().find_map(|effect| match effect {
                faena_machine::Effect::Job(job) => Some(job.clone()),
                _ => None,
            });
            if let Some(job) = job {
                let kind = format!("job.{}.{}", job.name, if *ok { "completed" } else { "failed" });
                let payload = json!({"result": {"text": "fix"}});
                let (id, actor) = (String::new(), "system:jobs".to_owned());
                let event = Event { id, kind, payload, actor, decider: None, at: trial.now };
                trial.apply(Input::JobEnded { state: job.state, epoch: job.epoch, event });
            }
        }
        Act::Wait(minutes) => trial.wait(&format!("{}s", minutes * 60 + 1)),
        Act::ClockBack(minutes) => trial.now = trial.now.plus_ms(-60_000 * i64::from(*minutes)).max(START),
        Act::Pause => {
            trial.apply(Input::Pause { actor: "key:a".into() });
        }
        Act::Resume => {
            trial.apply(Input::Resume { actor: "key:a".into() });
        }
        Act::Cancel => {
            trial.apply(Input::Cancel { actor: "key:a".into(), reason: None });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_task_is_never_stuck_and_its_history_is_complete(acts in acts()) {
        let definition = coding_task();
        let mut trial = Trial::new(&definition, request());
        for act in &acts {
            let ended_before = trial.task.status.has_ended();
            let state_before = trial.task.state();
            apply(&mut trial, &definition, act);
            let task = &trial.task;
            prop_assert!(task.fault.is_none(), "{:?}", task.fault);
            if ended_before {
                prop_assert_eq!(task.state(), state_before, "an ended task never moves");
            }
            match task.status {
                Status::Running => prop_assert!(task.due().is_some(), "a running task has a deadline"),
                Status::Paused => prop_assert!(task.paused_at.is_some()),
                _ => prop_assert!(task.timers.is_empty() && task.deferred.is_empty() && task.approval.is_none()),
            }
            prop_assert_eq!(faena_machine::contradictions(&definition, task), Vec::<String>::new());
            prop_assert_eq!(faena_machine::with_timers(&definition, task, trial.now), None);
            for (name, count) in &task.counters {
                prop_assert!(*count <= definition.counters[name].max);
            }
            let stored = serde_json::to_string(task).unwrap();
            prop_assert_eq!(&serde_json::from_str::<faena_machine::Task>(&stored).unwrap(), task, "survives storage");
        }
        let sequence: Vec<u64> = trial.records.iter().map(|record| record.sequence).collect();
        prop_assert_eq!(&sequence, &(1..=sequence.len() as u64).collect::<Vec<_>>());
        let mut state = String::new();
        for record in &trial.records {
            prop_assert_eq!(&record.from, &state, "each record starts where the one before ended");
            if let Some(to) = &record.to {
                state.clone_from(to);
            }
        }
        let applied = trial.records.iter().filter(|record| !record.event_id.is_empty() && record.outcome == Outcome::Applied);
        let mut ids: Vec<&str> = applied.map(|record| record.event_id.as_str()).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), all, "an event is applied at most once");
    }

    #[test]
    fn the_same_inputs_give_the_same_task(acts in acts()) {
        let definition = coding_task();
        let run = || {
            let mut trial = Trial::new(&definition, request());
            acts.iter().for_each(|act| apply(&mut trial, &definition, act));
            (trial.task, trial.records, trial.effects)
        };
        prop_assert_eq!(run(), run());
    }

    /// Pauses are left out: `a_paused_task_waits_and_the_pause_does_not_count` tests them.
    #[test]
    fn the_machine_agrees_with_a_model_that_was_written_by_hand(acts in acts()) {
        let definition = coding_task();
        let mut trial = Trial::new(&definition, request());
        let mut model = Model::new(START.as_ms());
        for (number, act) in acts.iter().enumerate() {
            let now_ms = trial.now.as_ms();
            let (expected, outcome) = match act {
                Act::Event(index, ok) => {
                    let kind = definition.events.keys().nth(index % definition.events.len()).unwrap().clone();
                    let (plan, log) = (["p1", "p2"][number % 2], ["broken", "odd", "late"][number % 3]);
                    let message = Message { id: number.to_string(), kind, plan, passed: *ok, log, progress: number % 2 };
                    let expected = model.receive(&message, now_ms);
                    (Some(expected), trial.event(&message.kind, message.payload()))
                }
                Act::Decide(approve) => {
                    (Some(model.decide(*approve, now_ms)), trial.decide("key:bob", &[], *approve).outcome)
                }
                Act::JobEnded(_) => {
                    model.review(now_ms);
                    apply(&mut trial, &definition, act);
                    (None, Outcome::Applied)
                }
                Act::Wait(minutes) => {
                    trial.now = trial.now.plus_ms(i64::from(*minutes) * 60_000 + 1_000);
                    model.apply_deadlines(trial.now.as_ms());
                    trial.apply(Input::Timers);
                    (None, Outcome::Applied)
                }
                Act::ClockBack(_) => {
                    apply(&mut trial, &definition, act);
                    (None, Outcome::Applied)
                }
                Act::Cancel => {
                    let outcome = trial.apply(Input::Cancel { actor: "key:a".into(), reason: None }).outcome;
                    (Some(model.cancel(now_ms)), outcome)
                }
                Act::Pause | Act::Resume => continue,
            };
            if let Some(expected) = expected {
                prop_assert_eq!(format!("{expected:?}"), format!("{outcome:?}"), "{:?} in {}", act, trial.task.state());
            }
            prop_assert_eq!(model.state, trial.task.state(), "after {:?}", act);
            let waiting: Vec<&str> = model.waiting.iter().map(|message| message.kind.as_str()).collect();
            let deferred: Vec<&str> = trial.task.deferred.iter().map(|event| event.kind.as_str()).collect();
            prop_assert_eq!(waiting, deferred);
            let count = |name: &str| trial.task.counters.get(name).copied().unwrap_or(0);
            prop_assert_eq!((model.corrections, model.plans_again), (count("correcciones"), count("replanes")));
        }
    }
}
