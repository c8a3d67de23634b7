//! Doctor on tasks: sound tasks have no finding, and each fault is found, and repaired if doctor can repair it.

use faena_domain::{JobId, TaskId};
use faena_machine::{Input, Task};
use faena_store::{StoreOptions, TaskFilter};
use serde_json::json;

use crate::{
    doctor::{assert_findings, assert_repairs, assert_reported_only},
    support::Fixture,
    tasks::{apply, coding_task, fire, history, new_task, order, register, send, state},
};

fn literal(fixture: &Fixture, task: TaskId) -> String {
    fixture.database.literal(JobId(task.0))
}

async fn body(fixture: &Fixture, task: TaskId) -> Task {
    fixture.store.task_get(task).await.unwrap().unwrap().task
}

/// Returns the statement that replaces the body of a task.
fn write_body(fixture: &Fixture, id: TaskId, task: &Task) -> String {
    let body = serde_json::to_string(task).unwrap().replace('\'', "''");
    format!("UPDATE task SET body = '{body}' WHERE id = {}", literal(fixture, id))
}

pub async fn healthy_tasks_in_various_states_have_no_finding(fixture: &Fixture) {
    let paid = order(fixture).await;
    assert_findings(fixture, &[]).await;
    for (id, kind) in [("e1", "pay"), ("e2", "ship")] {
        send(fixture, paid, id, kind, 10).await;
    }
    let paused = order(fixture).await;
    apply(fixture, paused, Input::Pause { actor: "ana".into() }, 20).await;
    send(fixture, paused, "e3", "pay", 21).await;
    let cancelled = order(fixture).await;
    apply(fixture, cancelled, Input::Cancel { actor: "ana".into(), reason: None }, 30).await;
    let definition = coding_task();
    register(fixture, &definition).await;
    let data = json!({"prompt": "p", "repositorioOrigen": "r", "reglas": {"requiereAprobacionPlan": true}});
    let coding = new_task(fixture, &definition, data, 40).await;
    let plan = crate::tasks::event("p", "resultado.plan_generado", json!({"planId": "1", "plan": "x"}), fixture.at(50));
    apply(fixture, coding, plan, 50).await;
    assert_eq!(state(fixture, coding).await, "ESPERANDO_APROBACION_PLAN");
    let (tasks, _) = fixture.store.task_list(TaskFilter::default(), None, 10).await.unwrap();
    assert_eq!(tasks.len(), 4);
    assert_findings(fixture, &[]).await;
}

pub async fn a_task_without_its_timers_gets_them_again(fixture: &Fixture) {
    let task = order(fixture).await;
    let before = body(fixture, task).await;
    let stuck = write_body(fixture, task, &Task { timers: Vec::new(), ..before.clone() });
    let unindexed = format!("UPDATE task SET due_at = NULL WHERE id = {}", literal(fixture, task));
    assert_repairs(fixture, &[stuck, unindexed], &["task-timers"]).await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    let mut after = body(&fixture, task).await;
    after.timers.sort_by_key(|timer| timer.due);
    let mut expected = before.clone();
    expected.timers.sort_by_key(|timer| timer.due);
    assert_eq!(after, expected, "due as before");
    fire(&fixture, 60_001).await;
    assert_eq!(state(&fixture, task).await, "EXPIRED", "the deadline fires");
    fixture.store.close().await;
}

pub async fn a_task_with_a_timer_of_another_state_loses_it(fixture: &Fixture) {
    let task = order(fixture).await;
    let first = body(fixture, task).await;
    send(fixture, task, "e1", "pay", 10).await;
    let mut damaged = body(fixture, task).await;
    let stale = first.timers.iter().find(|timer| timer.state == "NEW").unwrap().clone();
    let due = stale.due;
    damaged.timers.push(stale);
    let indexed = format!("UPDATE task SET due_at = {} WHERE id = {}", due.as_ms(), literal(fixture, task));
    assert_repairs(fixture, &[write_body(fixture, task, &damaged), indexed], &["task-timers"]).await;
}

pub async fn wrong_columns_of_a_task_are_written_again(fixture: &Fixture) {
    let task = order(fixture).await;
    let damage = format!("UPDATE task SET due_at = NULL, state = 'PAID' WHERE id = {}", literal(fixture, task));
    fixture.database.run(&damage).await;
    let found = assert_findings(fixture, &["task-columns"]).await.findings.remove(0);
    assert!(found.text.contains("state is PAID, not NEW"), "{}", found.text);
    assert_repairs(fixture, &[], &["task-columns"]).await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    assert_eq!(fire(&fixture, 60_001).await.tasks, 1, "its timer is found again");
    fixture.store.close().await;
}

pub async fn records_events_and_jobs_of_a_missing_task_are_deleted(fixture: &Fixture) {
    order(fixture).await;
    let missing = literal(fixture, TaskId::new());
    let damage = [
        format!("INSERT INTO task_record (task, sequence, record) VALUES ({missing}, 1, '{{}}')"),
        format!("INSERT INTO task_inbox (task, event_id, answer) VALUES ({missing}, 'e', '{{}}')"),
        format!("INSERT INTO task_key (key, task, fingerprint) VALUES ('k', {missing}, '\\x6b')"),
        format!("INSERT INTO task_job (job, task, name, state, epoch) VALUES ({missing}, {missing}, 'n', 's', 1)"),
    ];
    for sql in &damage {
        fixture.database.run(sql).await;
    }
    let found = assert_findings(fixture, &["orphaned-rows"]).await.findings.remove(0);
    assert_eq!(found.count, 4, "{}", found.text);
    assert_repairs(fixture, &[], &["orphaned-rows"]).await;
}

pub async fn a_broken_history_is_reported(fixture: &Fixture) {
    let task = order(fixture).await;
    send(fixture, task, "e1", "pay", 10).await;
    assert_eq!(history(fixture, task).await.len(), 2);
    let id = literal(fixture, task);
    let moved =
        |from: u32, to: u32| format!("UPDATE task_record SET sequence = {to} WHERE task = {id} AND sequence = {from}");
    assert_reported_only(fixture, &moved(2, 3), &moved(3, 2), &["task-history"]).await;
    assert_reported_only(fixture, &moved(1, 7), &moved(7, 1), &["task-history"]).await;
    let renamed = |from: &str, to: &str| {
        format!(
            "UPDATE task_record SET record = replace(record, '\"to\":\"{from}\"', '\"to\":\"{to}\"') WHERE task = {id}"
        )
    };
    assert_reported_only(fixture, &renamed("CHARGING", "PAID"), &renamed("PAID", "CHARGING"), &["task-history"]).await;
}

pub async fn a_contradictory_or_unreadable_task_is_reported(fixture: &Fixture) {
    let task = order(fixture).await;
    send(fixture, task, "e1", "pay", 10).await;
    let id = literal(fixture, task);
    let sound = body(fixture, task).await;
    let undo = write_body(fixture, task, &sound);
    let damaged = write_body(fixture, task, &Task { epoch: 9, ..sound.clone() });
    assert_reported_only(fixture, &damaged, &undo, &["task-inconsistent"]).await;
    let unreadable = format!("UPDATE task SET body = 'x' WHERE id = {id}");
    assert_reported_only(fixture, &unreadable, &undo, &["task-unreadable"]).await;
    let later = format!("UPDATE task_job SET epoch = 9 WHERE task = {id}");
    let undo = format!("UPDATE task_job SET epoch = 2 WHERE task = {id}");
    assert_reported_only(fixture, &later, &undo, &["task-inconsistent"]).await;
}

pub async fn a_changed_or_missing_machine_is_reported(fixture: &Fixture) {
    order(fixture).await;
    let changed = "UPDATE machine SET hash = '0' || hash";
    assert_reported_only(fixture, changed, "UPDATE machine SET hash = substr(hash, 2)", &["machine-changed"]).await;
    let unreadable = "UPDATE machine SET definition = '!' || definition";
    let undo = "UPDATE machine SET definition = substr(definition, 2)";
    assert_reported_only(fixture, unreadable, undo, &["machine-unreadable"]).await;
    let (missing, undo) = ("UPDATE task SET version = 9", "UPDATE task SET version = 1");
    assert_reported_only(fixture, missing, undo, &["task-without-machine"]).await;
}

pub async fn an_overdue_timer_is_reported(fixture: &Fixture) {
    let task = order(fixture).await;
    let mut late = body(fixture, task).await;
    let due = fixture.at(-400_000);
    late.timers.iter_mut().filter(|timer| timer.state == "NEW").for_each(|timer| timer.due = due);
    fixture.database.run(&write_body(fixture, task, &late)).await;
    let indexed = format!("UPDATE task SET due_at = {} WHERE id = {}", due.as_ms(), literal(fixture, task));
    fixture.database.run(&indexed).await;
    let found = assert_findings(fixture, &["task-overdue"]).await.findings.remove(0);
    assert!(!found.fixable && found.text.contains("order"), "{}", found.text);
}
