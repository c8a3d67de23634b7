//! The cache of tasks: the only writer of SQLite keeps tasks in memory, and reads them again after a rollback. Nodes on one
//! PostgreSQL see each other's changes.

use std::sync::Arc;

use faena_domain::TaskId;
use faena_machine::{Definition, Outcome};
use faena_store::{StoreOptions, TaskInput};
use futures_util::future::join_all;
use serde_json::json;

use crate::{
    doctor::assert_findings,
    support::*,
    tasks::{event, history, new_task, register, send},
};

const PING: &str = "
machine: ping
version: 1
events: {go: {}}
initial: LEFT
states:
  LEFT:  {deadline: {silence: 6h, to: LATE}, on: {go: {to: RIGHT, set: {last: meta.id}}}}
  RIGHT: {deadline: {silence: 6h, to: LATE}, on: {go: {to: LEFT, set: {last: meta.id}}}}
  LATE:  {final: true, ends: failure}
";

async fn ping(fixture: &Fixture) -> Arc<Definition> {
    let definition = Arc::new(Definition::parse(PING).unwrap());
    register(fixture, &definition).await;
    definition
}

async fn try_send(fixture: &Fixture, task: TaskId, id: &str, ms: i64) -> bool {
    let inputs = vec![TaskInput { task, input: event(id, "go", json!({}), fixture.at(ms)) }];
    fixture.store.task_apply(inputs, fixture.at(ms)).await.is_ok()
}

/// Asserts that the stored task matches its history.
async fn assert_matches_history(fixture: &Fixture, task: TaskId) {
    let view = fixture.store.task_get(task).await.unwrap().unwrap();
    let records = history(fixture, task).await;
    assert!(records.iter().map(|record| record.sequence).eq(1..=view.task.sequence));
    let last = records.last().unwrap();
    assert_eq!(last.to, Some(view.task.state()));
    assert_eq!(view.task.data.get("last"), last.set.get("last"));
    assert_eq!(view.events, view.task.sequence, "one event per record");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_of_a_transaction_that_was_rolled_back_is_read_again() {
    on_sqlite(async |fixture: &Fixture| {
        let definition = ping(fixture).await;
        for (word, action) in [("poison", "ABORT"), ("venom", "ROLLBACK")] {
            let sql = format!(
                "CREATE TRIGGER {word} BEFORE INSERT ON task_record WHEN instr(new.record, '\"{word}') > 0
                 BEGIN SELECT RAISE({action}, '{word}'); END"
            );
            fixture.database.run(&sql).await;
        }
        let mut tasks = Vec::new();
        for _ in 0..30 {
            tasks.push(new_task(fixture, &definition, json!({}), 0).await);
        }
        // Only the writes of the failed call are rolled back.
        assert!(try_send(fixture, tasks[0], "e1", 1).await);
        assert!(!try_send(fixture, tasks[0], "poison", 2).await);
        assert_eq!(send(fixture, tasks[0], "e2", "go", 3).await.outcome, Outcome::Applied);
        assert_matches_history(fixture, tasks[0]).await;
        let sends = tasks.iter().enumerate().map(async |(n, task)| {
            let id = if n == 10 { "poison".to_owned() } else { format!("p{n}") };
            try_send(fixture, *task, &id, 4).await
        });
        let accepted = join_all(sends).await;
        assert!(
            accepted.iter().enumerate().all(|(n, accepted)| *accepted == (n != 10)),
            "the other calls are applied without the failed one"
        );
        // The whole transaction is rolled back, with the writes of the other calls in it. Their tasks are read again too.
        let sends = tasks.iter().enumerate().map(async |(n, task)| {
            let id = if n == 20 { "venom".to_owned() } else { format!("x{n}") };
            try_send(fixture, *task, &id, 5).await
        });
        let accepted = join_all(sends).await;
        assert!(!accepted[20]);
        for (task, accepted) in tasks.iter().zip(accepted) {
            assert_matches_history(fixture, *task).await;
            let has_record = history(fixture, *task).await.iter().any(|record| record.event_id.starts_with('x'));
            assert_eq!(has_record, accepted);
            assert_eq!(send(fixture, *task, "last", "go", 6).await.outcome, Outcome::Applied);
            assert_matches_history(fixture, *task).await;
        }
        assert_findings(fixture, &[]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_another_connection_has_changed_is_read_again() {
    on_sqlite(async |fixture: &Fixture| {
        let task = new_task(fixture, &ping(fixture).await, json!({"n": 1}), 0).await;
        send(fixture, task, "e1", "go", 1).await;
        fixture.database.run("UPDATE task SET body = replace(body, '\"n\":1', '\"n\":2')").await;
        send(fixture, task, "e2", "go", 2).await;
        assert_eq!(fixture.store.task_get(task).await.unwrap().unwrap().task.data["n"], 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_change_one_task_alternately_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let task = new_task(fixture, &ping(fixture).await, json!({}), 0).await;
        let other = fixture.reopen(StoreOptions::default()).await;
        for n in 0..10 {
            let node = if n % 2 == 0 { fixture } else { &other };
            let expected = if n % 2 == 0 { "RIGHT" } else { "LEFT" };
            let answer = send(node, task, &format!("e{n}"), "go", n).await;
            assert_eq!((answer.outcome, answer.state.as_str()), (Outcome::Applied, expected));
            assert!(send(node, task, "e0", "go", n).await.duplicate);
        }
        // And both at the same time.
        let nodes = [fixture, &other];
        let sends = (0..40).map(async |n: usize| try_send(nodes[n % 2], task, &format!("c{n}"), 20).await);
        assert!(join_all(sends).await.into_iter().all(|accepted| accepted));
        assert_matches_history(fixture, task).await;
        assert_eq!(history(fixture, task).await.len(), 51);
        other.store.close().await;
    })
    .await;
}
