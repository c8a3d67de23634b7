//! The built-in coding task: every row of its table, its limits, and what each state does with each event.

use std::{collections::BTreeSet, fmt::Write as _};

use faena_machine::{Event, Input, Outcome, Status};
use serde_json::{Value, json};

use crate::support::{Trial, coding_task, request};

const MONITORED: &str = "EJECUTANDO_CODIGO.MONITOREANDO_EJECUCION";

/// Makes a task leave its state.
type Leave<'a> = &'a dyn Fn(&mut Trial<'_>);

/// Brings a task to a state through the usual sequence of events.
fn bring_to<'a>(definition: &'a faena_machine::Definition, state: &str) -> Trial<'a> {
    let mut trial = Trial::new(definition, request());
    let way: [(&str, Leave<'_>); 6] = [
        ("PLANIFICANDO", &|trial| {
            trial.event("resultado.plan_generado", json!({"planId": "p1", "plan": "1. do it"}));
        }),
        ("ESPERANDO_APROBACION_PLAN", &|trial| {
            trial.event("tarea.aprobar_plan", json!({"planId": "p1"}));
        }),
        ("EJECUTANDO_CODIGO.INICIANDO", &|trial| {
            trial.event("resultado.estado_actualizado", json!({"sessionId": "s1", "estado": "1"}));
        }),
        (MONITORED, &|trial| {
            trial.event("resultado.pr_generada", json!({"pullRequestUrl": "file:///repo#branch"}));
        }),
        ("PROBANDO_INTEGRACION", &|trial| {
            trial.event("resultado.integracion_finalizada", json!({"exito": false, "log": "assertion failed"}));
        }),
        ("ESPERANDO_FEEDBACK_INTERNO", &|_| {}),
    ];
    for (next, leave) in way {
        assert_eq!(trial.task.state(), next);
        if next == state {
            return trial;
        }
        leave(&mut trial);
    }
    panic!("no way to {state}");
}

#[test]
fn every_row_of_the_transition_table_holds() {
    let definition = coding_task();
    let created = Trial::new(&definition, request());
    let path: Vec<(&str, Option<&str>)> =
        created.records.iter().map(|record| (record.event.as_str(), record.to.as_deref())).collect();
    assert_eq!(path, [("task.created", Some("NUEVA")), ("tarea.crear", Some("PLANIFICANDO"))]);
    assert_eq!(created.emitted(), ["tarea.generar_plan"]);

    let rows: [(&str, &str, Value, &str, &[&str]); 5] = [
        (
            "PLANIFICANDO",
            "resultado.plan_generado",
            json!({"planId": "p1", "plan": "x"}),
            "ESPERANDO_APROBACION_PLAN",
            &[],
        ),
        (
            "ESPERANDO_APROBACION_PLAN",
            "tarea.aprobar_plan",
            json!({"planId": "p1"}),
            "EJECUTANDO_CODIGO.INICIANDO",
            &["tarea.aprobar_plan"],
        ),
        (
            MONITORED,
            "resultado.pr_generada",
            json!({"pullRequestUrl": "u"}),
            "PROBANDO_INTEGRACION",
            &["tarea.probar_integracion"],
        ),
        ("PROBANDO_INTEGRACION", "resultado.integracion_finalizada", json!({"exito": true}), "COMPLETADA", &[]),
        (
            "PROBANDO_INTEGRACION",
            "resultado.integracion_finalizada",
            json!({"exito": false, "log": "x"}),
            "ESPERANDO_FEEDBACK_INTERNO",
            &[],
        ),
    ];
    for (from, event, payload, to, emitted) in rows {
        let mut trial = bring_to(&definition, from);
        trial.effects.clear();
        assert_eq!(trial.event(event, payload), Outcome::Applied, "{from} {event}");
        assert_eq!((trial.task.state().as_str(), trial.emitted()), (to, emitted.to_vec()), "{from} {event}");
    }
}

#[test]
fn feedback_returns_to_the_code_with_or_without_a_language_model() {
    let definition = coding_task();
    for (end, payload, expected) in [
        ("completed", json!({"result": {"text": "fix the sum"}}), "fix the sum"),
        ("failed", json!({"error": {"message": "no server"}}), "assertion failed"),
    ] {
        let mut trial = bring_to(&definition, "ESPERANDO_FEEDBACK_INTERNO");
        trial.job_ended("correccion", end, payload);
        assert_eq!(trial.task.state(), "EJECUTANDO_CODIGO.INICIANDO");
        let feedback = trial.last_payload("tarea.enviar_feedback");
        assert_eq!(feedback["sessionId"], "s1");
        assert!(feedback["promptCorreccion"].as_str().unwrap().contains(expected), "{feedback}");
        assert_eq!(trial.task.data["correccion"], feedback["promptCorreccion"], "the task keeps what it asked for");
        assert_eq!(feedback["repositorioOrigen"], request()["repositorioOrigen"]);
    }
}

#[test]
fn a_service_that_cannot_do_its_part_ends_the_task_with_its_reason() {
    let definition = coding_task();
    for state in ["PLANIFICANDO", MONITORED, "PROBANDO_INTEGRACION"] {
        let mut trial = bring_to(&definition, state);
        trial.event("resultado.error", json!({"motivo": "no such repository"}));
        assert_eq!(trial.task.state(), "FALLIDA_INFRAESTRUCTURA", "{state}");
        assert_eq!(trial.task.data["error"], "no such repository");
    }
    let mut trial = bring_to(&definition, "ESPERANDO_APROBACION_PLAN");
    assert_eq!(trial.event("resultado.error", json!({"motivo": "late"})), Outcome::Ignored);
}

#[test]
fn too_many_corrections_and_the_same_failure_twice_end_in_a_logical_failure() {
    let definition = coding_task();
    let round = |trial: &mut Trial<'_>, log: &str| {
        trial.job_ended("correccion", "failed", json!({}));
        trial.event("resultado.pr_generada", json!({"pullRequestUrl": "u"}));
        trial.event("resultado.integracion_finalizada", json!({"exito": false, "log": log}));
    };
    let mut trial = bring_to(&definition, "ESPERANDO_FEEDBACK_INTERNO");
    round(&mut trial, "another failure");
    round(&mut trial, "a third failure");
    assert_eq!(trial.task.state(), "ESPERANDO_FEEDBACK_INTERNO", "three corrections are allowed");
    round(&mut trial, "a fourth failure");
    assert_eq!((trial.task.state().as_str(), trial.task.status), ("FALLIDA_LOGICA", Status::Failed));

    let mut trial = bring_to(&definition, "ESPERANDO_FEEDBACK_INTERNO");
    round(&mut trial, "assertion failed");
    assert_eq!(trial.task.state(), "FALLIDA_LOGICA");
}

#[test]
fn a_denied_plan_is_made_again_with_the_comment_at_most_twice() {
    let definition = coding_task();
    let mut trial = bring_to(&definition, "ESPERANDO_APROBACION_PLAN");
    for round in 1..=3 {
        let comment = Some(format!("smaller steps {round}"));
        let caller = "key:bob".into();
        trial.apply(faena_machine::Input::Decision { caller, approve: false, hash: None, comment });
        if round < 3 {
            assert_eq!(trial.task.state(), "PLANIFICANDO");
            let prompt = trial.last_payload("tarea.generar_plan")["prompt"].as_str().unwrap().to_owned();
            assert!(
                prompt.starts_with("add a test") && prompt.ends_with(&format!("smaller steps {round}")),
                "{prompt}"
            );
            trial.event("resultado.plan_generado", json!({"planId": format!("p{round}"), "plan": "x"}));
        }
    }
    assert_eq!(trial.task.state(), "FALLIDA_LOGICA", "a plan may be made again only twice");
}

#[test]
fn only_an_explicit_no_skips_the_approval() {
    let definition = coding_task();
    let mut data = request();
    data["reglas"] = json!({"requiereAprobacionPlan": false});
    let mut trial = Trial::new(&definition, data);
    trial.event("resultado.plan_generado", json!({"planId": "p1", "plan": "x"}));
    assert_eq!(trial.task.state(), "EJECUTANDO_CODIGO.INICIANDO");
    let approval = trial.last_payload("tarea.aprobar_plan");
    assert_eq!((&approval["planId"], &approval["plan"]), (&json!("p1"), &json!("x")));
    assert_eq!(
        approval["repositorioOrigen"],
        request()["repositorioOrigen"],
        "the event names the repository, so that any worker can start on it"
    );
}

#[test]
fn silence_ends_a_task_and_heartbeats_keep_it_alive() {
    let definition = coding_task();
    let mut trial = bring_to(&definition, "PLANIFICANDO");
    trial.wait("4m59s");
    assert_eq!(trial.task.state(), "PLANIFICANDO");
    trial.wait("1s");
    assert_eq!(trial.task.state(), "FALLIDA_INFRAESTRUCTURA");

    let mut trial = bring_to(&definition, MONITORED);
    trial.effects.clear();
    for minute in 0..40 {
        trial.wait("1m");
        trial.event("resultado.estado_actualizado", json!({"sessionId": "s1", "estado": minute}));
    }
    assert_eq!((trial.task.state().as_str(), trial.emitted().len()), (MONITORED, 20), "asked every two minutes");
    trial.wait("5m");
    assert_eq!(trial.task.state(), "FALLIDA_INFRAESTRUCTURA");
    assert_eq!(trial.records.last().unwrap().event, "deadline.silence");
}

#[test]
fn no_progress_and_the_total_limit_end_a_task_that_still_answers() {
    let definition = coding_task();
    for (changes, minutes, deadline) in [(false, 45, "deadline.no_progress"), (true, 360, "deadline.total")] {
        let mut trial = bring_to(&definition, MONITORED);
        let mut passed = 0;
        while trial.task.status == Status::Running {
            trial.wait("1m");
            passed += 1;
            let state = if changes { json!(passed) } else { json!("same") };
            trial.event("resultado.estado_actualizado", json!({"sessionId": "s1", "estado": state}));
            assert!(passed <= 400, "the task never ends");
        }
        let ending = trial.records.iter().rev().find(|record| record.to.is_some()).unwrap();
        assert_eq!(ending.event, deadline);
        assert!((minutes..=minutes + 1).contains(&passed), "{deadline} after {passed} minutes");
    }
}

#[test]
fn early_events_wait_and_late_ones_are_recorded() {
    let definition = coding_task();
    let mut trial = Trial::new(&definition, request());
    assert_eq!(trial.event("resultado.pr_generada", json!({"pullRequestUrl": "early"})), Outcome::Deferred);
    trial.event("resultado.plan_generado", json!({"planId": "p1", "plan": "x"}));
    trial.event("tarea.aprobar_plan", json!({"planId": "p1"}));
    assert_eq!(trial.task.state(), "PROBANDO_INTEGRACION", "the deferred event was applied at its turn");
    trial.event("resultado.integracion_finalizada", json!({"exito": true}));
    assert_eq!(trial.event("resultado.plan_generado", json!({"planId": "p2", "plan": "x"})), Outcome::Ignored);
    let sequence: Vec<u64> = trial.records.iter().map(|record| record.sequence).collect();
    assert_eq!(sequence, (1..=sequence.len() as u64).collect::<Vec<_>>(), "the history has no gaps");
}

#[test]
fn a_result_of_the_last_round_does_not_count_for_the_next() {
    let definition = coding_task();
    let mut trial = bring_to(&definition, "PROBANDO_INTEGRACION");
    assert_eq!(trial.event("resultado.pr_generada", json!({"pullRequestUrl": "late"})), Outcome::Ignored);
    trial.event("resultado.integracion_finalizada", json!({"exito": false, "log": "x"}));
    assert_eq!(trial.event("resultado.integracion_finalizada", json!({"exito": true})), Outcome::Ignored);
    trial.job_ended("correccion", "failed", json!({}));
    assert_eq!(trial.task.state(), "EJECUTANDO_CODIGO.INICIANDO");
}

#[test]
fn a_plan_is_approved_by_its_id_only() {
    let definition = coding_task();
    let mut trial = bring_to(&definition, "ESPERANDO_APROBACION_PLAN");
    let step = trial.event_from("key:alice", "tarea.aprobar_plan", json!({"planId": "another"}));
    assert_eq!((step.outcome, trial.task.state().as_str()), (Outcome::Rejected, "ESPERANDO_APROBACION_PLAN"));
    assert!(step.reason.unwrap().contains("is false"));
}

#[test]
fn an_event_with_the_wrong_payload_changes_nothing() {
    let definition = coding_task();
    let mut trial = Trial::new(&definition, request());
    let before = trial.task.clone();
    for (event, payload, part) in [
        ("resultado.plan_generado", json!({"plan": "x"}), "planId"),
        ("resultado.plan_generado", json!({"planId": 7, "plan": "x"}), "payload.planId"),
        ("resultado.unknown", json!({}), "no event \"resultado.unknown\""),
        ("approval.granted", json!({}), "no event \"approval.granted\""),
    ] {
        let step = trial.event_from("key:service", event, payload);
        assert_eq!(step.outcome, Outcome::Invalid);
        assert!(step.reason.as_ref().unwrap().contains(part), "{step:?}");
    }
    assert_eq!(trial.task, before);
}

#[test]
fn every_state_has_a_defined_outcome_for_every_event() {
    let definition = coding_task();
    let payload = |event: &str| match event {
        "tarea.crear" => request(),
        "tarea.generar_plan" => json!({"prompt": "x"}),
        "resultado.plan_generado" => json!({"planId": "p1", "plan": "x"}),
        "tarea.aprobar_plan" => json!({"planId": "p1"}),
        "resultado.pr_generada" | "tarea.probar_integracion" => json!({"pullRequestUrl": "u"}),
        "resultado.integracion_finalizada" => json!({"exito": true, "log": "fine"}),
        "tarea.enviar_feedback" => json!({"sessionId": "s1", "promptCorreccion": "x"}),
        "resultado.error" => json!({"motivo": "no such repository"}),
        _ => json!({"sessionId": "s1", "estado": "2"}),
    };
    let mut table = String::new();
    let mut states = BTreeSet::new();
    for state in STATES {
        writeln!(table, "{state}").unwrap();
        states.extend(state.split('.'));
        let mut line = |event: &str, outcome: Outcome, to: String| {
            let arrow = if to == state { String::new() } else { format!(" -> {to}") };
            writeln!(table, "  {event:<35} {outcome:?}{arrow}").unwrap();
        };
        for event in definition.events.keys() {
            let mut trial = bring_to_any(&definition, state);
            let outcome = trial.event(event, payload(event));
            line(event, outcome, trial.task.state());
        }
        for (name, act) in OTHER_INPUTS {
            let mut trial = bring_to_any(&definition, state);
            let outcome = act(&mut trial);
            line(name, outcome, trial.task.state());
        }
    }
    // No task stays in the first state: it receives its start event when it is created.
    states.insert("NUEVA");
    let all: BTreeSet<&str> = definition.states.iter().map(|state| state.name.as_str()).collect();
    assert_eq!(states, all, "every state is in the table");
    insta::assert_snapshot!(table);
}

/// The states in which a task can be found.
const STATES: [&str; 10] = [
    "PLANIFICANDO",
    "ESPERANDO_APROBACION_PLAN",
    "EJECUTANDO_CODIGO.INICIANDO",
    MONITORED,
    "PROBANDO_INTEGRACION",
    "ESPERANDO_FEEDBACK_INTERNO",
    "COMPLETADA",
    "FALLIDA_LOGICA",
    "FALLIDA_INFRAESTRUCTURA",
    "CANCELADA",
];

/// Brings a task to any state, including the final ones.
fn bring_to_any<'a>(definition: &'a faena_machine::Definition, state: &str) -> Trial<'a> {
    let (before, leave): (&str, Leave<'_>) = match state {
        "COMPLETADA" => ("PROBANDO_INTEGRACION", &|trial| {
            trial.event("resultado.integracion_finalizada", json!({"exito": true}));
        }),
        "FALLIDA_LOGICA" => ("ESPERANDO_FEEDBACK_INTERNO", &|trial| {
            trial.job_ended("correccion", "failed", json!({}));
            trial.event("resultado.pr_generada", json!({"pullRequestUrl": "u"}));
            trial.event("resultado.integracion_finalizada", json!({"exito": false, "log": "assertion failed"}));
        }),
        "FALLIDA_INFRAESTRUCTURA" => ("PLANIFICANDO", &|trial| trial.wait("5m")),
        "CANCELADA" => ("PLANIFICANDO", &|trial| {
            trial.apply(Input::Cancel { actor: "key:alice".into(), reason: None });
        }),
        _ => return bring_to(definition, state),
    };
    let mut trial = bring_to(definition, before);
    leave(&mut trial);
    assert_eq!(trial.task.state(), state);
    trial
}

type Act = fn(&mut Trial<'_>) -> Outcome;

/// What people and Faena itself can do to a task, in addition to the events of its machine.
const OTHER_INPUTS: [(&str, Act); 8] = [
    ("approve", |trial| trial.decide("key:bob", &[], true).outcome),
    ("deny", |trial| trial.decide("key:bob", &[], false).outcome),
    ("cancel", |trial| trial.apply(Input::Cancel { actor: "key:bob".into(), reason: None }).outcome),
    ("pause", |trial| trial.apply(Input::Pause { actor: "key:bob".into() }).outcome),
    ("resume", |trial| trial.apply(Input::Resume { actor: "key:bob".into() }).outcome),
    ("job.correccion.completed", |trial| report_job_end(trial, "completed")),
    ("job.correccion.failed", |trial| report_job_end(trial, "failed")),
    ("30 days without a message", |trial| {
        trial.now = trial.now.plus_ms(30 * 86_400_000);
        trial.apply(Input::Timers).outcome
    }),
];

/// Reports the end of the job `correccion` for the current epoch, even if the task is not in the state of this job.
fn report_job_end(trial: &mut Trial<'_>, end: &str) -> Outcome {
    let active = trial.task.active.last().cloned().unwrap();
    let state = "ESPERANDO_FEEDBACK_INTERNO".to_owned();
    let payload = json!({"result": {"text": "fix"}});
    let (kind, actor) = (format!("job.correccion.{end}"), "system:jobs".to_owned());
    let event = Event { id: String::new(), kind, payload, actor, decider: None, at: trial.now };
    trial.apply(Input::JobEnded { state, epoch: active.epoch, event }).outcome
}
