//! Limits of running tasks per machine: never exceeded, first come first served, changeable at run time.

use std::{collections::BTreeSet, sync::Arc};

use faena_domain::{Limit, Scope, TaskId};
use faena_machine::{Definition, Input, Outcome, Status};
use faena_store::{AuditFilter, EventQuery, TaskFilter, TaskPosition};
use serde_json::json;

use crate::{
    doctor::assert_findings,
    support::Fixture,
    tasks::{apply, fire, history, new_task, register, send, unstored_task},
};

const BATCH: &str = "
machine: batch
version: 1
limits: {running: 2}
events: {note: {}, finish: {}}
initial: WORK
states:
  WORK: {forever: true, entry: [{job: noop, name: work}], on: {note: {set: {notes: 'ctx.notes + 1'}}, finish: DONE}}
  DONE: {final: true}
";

async fn batch(fixture: &Fixture) -> Arc<Definition> {
    let definition = Arc::new(Definition::parse(BATCH).unwrap());
    register(fixture, &definition).await;
    definition
}

async fn create(fixture: &Fixture, definition: &Arc<Definition>, count: i64) -> Vec<TaskId> {
    let mut tasks = Vec::new();
    for ms in 0..count {
        tasks.push(new_task(fixture, definition, json!({"notes": 0}), ms).await);
    }
    tasks
}

async fn status(fixture: &Fixture, task: TaskId) -> Status {
    fixture.store.task_get(task).await.unwrap().unwrap().task.status
}

async fn statuses(fixture: &Fixture, tasks: &[TaskId]) -> Vec<Status> {
    let mut found = Vec::new();
    for task in tasks {
        found.push(status(fixture, *task).await);
    }
    found
}

async fn set_limit(fixture: &Fixture, most: Option<u32>) {
    let limit = Limit { concurrency: most, rate: None };
    fixture.store.limit_set(Scope::Machine("batch".into()), limit, "ana", fixture.at(50)).await.unwrap();
}

pub async fn a_task_beyond_the_limit_is_queued_and_starts_when_another_ends(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let tasks = create(fixture, &definition, 4).await;
    use Status::{Completed, Queued, Running};
    assert_eq!(statuses(fixture, &tasks).await, [Running, Running, Queued, Queued]);
    assert_eq!(fixture.database.number("SELECT count(*) FROM task_job").await, 2, "a queued task submits nothing");
    assert_eq!(fire(fixture, 10).await.started, 0);
    apply(fixture, tasks[0], Input::Pause { actor: "ana".into() }, 11).await;
    assert_eq!(fire(fixture, 12).await.started, 0, "a paused task counts as running");
    apply(fixture, tasks[0], Input::Resume { actor: "ana".into() }, 13).await;
    send(fixture, tasks[1], "e1", "finish", 20).await;
    assert_eq!(fire(fixture, 21).await.started, 1);
    assert_eq!(
        statuses(fixture, &tasks).await,
        [Running, Completed, Running, Queued],
        "the task that was queued first has started"
    );
    let records: Vec<String> = history(fixture, tasks[2]).await.into_iter().map(|record| record.event).collect();
    assert_eq!(records, ["task.queued", "task.created"]);
    let subject = |id: TaskId| EventQuery::Subject { id: id.0, after: 0 };
    let events = fixture.store.event_list(subject(tasks[2]), 10).await.unwrap();
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["task.queued", "task.created"]);
    let late = new_task(fixture, &definition, json!({"notes": 0}), 30).await;
    send(fixture, tasks[0], "e1", "finish", 31).await;
    let later = new_task(fixture, &definition, json!({"notes": 0}), 32).await;
    assert_eq!(statuses(fixture, &[late, later]).await, [Queued, Queued], "free capacity goes to earlier tasks first");
    fire(fixture, 33).await;
    assert_eq!(statuses(fixture, &[tasks[3], late, later]).await, [Running, Queued, Queued]);
    assert_findings(fixture, &[]).await;
}

pub async fn events_of_a_queued_task_wait_for_its_start(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let tasks = create(fixture, &definition, 3).await;
    assert_eq!(send(fixture, tasks[2], "e1", "note", 5).await.outcome, Outcome::Deferred);
    assert!(send(fixture, tasks[2], "e1", "note", 6).await.duplicate, "an event counts once");
    assert_eq!(send(fixture, tasks[2], "e2", "note", 7).await.outcome, Outcome::Deferred);
    send(fixture, tasks[0], "e1", "finish", 8).await;
    fire(fixture, 9).await;
    let started = fixture.store.task_get(tasks[2]).await.unwrap().unwrap().task;
    assert_eq!((started.status, &started.data["notes"], started.deferred.len()), (Status::Running, &json!(2), 0));
}

pub async fn a_queued_task_can_be_cancelled(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let tasks = create(fixture, &definition, 4).await;
    let cancel = Input::Cancel { actor: "ana".into(), reason: None };
    assert_eq!(apply(fixture, tasks[2], cancel, 5).await.outcome, Outcome::Applied);
    assert_eq!(status(fixture, tasks[2]).await, Status::Cancelled);
    send(fixture, tasks[0], "e1", "finish", 6).await;
    fire(fixture, 7).await;
    assert_eq!(statuses(fixture, &tasks[2..]).await, [Status::Cancelled, Status::Running]);
    assert_findings(fixture, &[]).await;
    assert_eq!(fixture.store.task_prune(fixture.at(100), 10).await.unwrap(), 2);
}

pub async fn an_operator_changes_the_limit_of_a_machine(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let of_machine = || async {
        let limits = fixture.store.limits().await.unwrap();
        let found = limits.into_iter().find(|stored| stored.scope == Scope::Machine("batch".into()));
        found.map(|stored| (stored.limit.concurrency, stored.origin))
    };
    assert_eq!(of_machine().await, Some((Some(2), "machine".into())));
    let tasks = create(fixture, &definition, 7).await;
    set_limit(fixture, Some(3)).await;
    assert_eq!(of_machine().await, Some((Some(3), "api".into())));
    assert_eq!(fire(fixture, 51).await.started, 1);
    set_limit(fixture, Some(1)).await;
    send(fixture, tasks[0], "e1", "finish", 52).await;
    assert_eq!(fire(fixture, 53).await.started, 0, "two still run; none of them is stopped");
    set_limit(fixture, None).await;
    assert_eq!(fire(fixture, 54).await.started, 4, "without a limit all start");
    let late = new_task(fixture, &definition, json!({"notes": 0}), 55).await;
    assert_eq!(status(fixture, late).await, Status::Running);
    let machine = Scope::Machine("batch".into());
    let own = faena_store::limit_of(&definition);
    fixture.store.limit_reset(machine, own, "ana", fixture.at(60)).await.unwrap();
    assert_eq!(of_machine().await, Some((Some(2), "machine".into())), "the limit of the definition applies again");
    let late = new_task(fixture, &definition, json!({"notes": 0}), 61).await;
    assert_eq!(status(fixture, late).await, Status::Queued);
    let audit = fixture.store.audit_list(AuditFilter::default(), 10).await.unwrap();
    let actions: Vec<(&str, &str)> =
        audit.iter().rev().map(|entry| (entry.action.as_str(), entry.target.as_str())).collect();
    let set = ("limit.set", "machine batch");
    assert_eq!(actions[1..], [set, set, set, ("limit.reset", "machine batch")]);
}

pub async fn the_newest_version_of_a_machine_decides_its_limit(fixture: &Fixture) {
    batch(fixture).await;
    let version = |number: u32, limits: &str| {
        let text = BATCH.replace("version: 1", &format!("version: {number}")).replace("limits: {running: 2}\n", limits);
        Arc::new(Definition::parse(&text).unwrap())
    };
    let limit = || fixture.store.rules().machines.get("batch").copied();
    assert_eq!(limit(), Some(2));
    register(fixture, &version(3, "limits: {running: 5}\n")).await;
    assert_eq!(limit(), Some(5));
    register(fixture, &version(2, "limits: {running: 7}\n")).await;
    assert_eq!(limit(), Some(5), "an older version that is registered later changes nothing");
    register(fixture, &version(4, "")).await;
    assert_eq!(limit(), None);
    set_limit(fixture, Some(1)).await;
    register(fixture, &version(5, "limits: {running: 9}\n")).await;
    assert_eq!(limit(), Some(1), "a limit that an operator set is kept");
}

pub async fn concurrent_creations_and_starts_never_exceed_the_limit(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let mut all_tasks: BTreeSet<TaskId> = BTreeSet::new();
    for round in 0..6i64 {
        let created =
            futures_util::future::join_all((0..8).map(|_| new_task(fixture, &definition, json!({"notes": 0}), round)));
        let fired = futures_util::future::join_all((0..3).map(|_| fire(fixture, 1_000 + round)));
        let ended = async {
            let filter = TaskFilter { status: Some(Status::Running), ..TaskFilter::default() };
            for view in fixture.store.task_list(filter, None, 10).await.unwrap().0 {
                let id: TaskId = view.task.id.parse().unwrap();
                send(fixture, id, "end", "finish", 1_000 + round).await;
            }
        };
        let (created, _, ()) = tokio::join!(created, fired, ended);
        all_tasks.extend(created);
        let running = fixture.database.number("SELECT count(*) FROM task WHERE status = 'running'").await;
        assert!(running <= 2, "{running} run after round {round}");
    }
    let mut started = Vec::new();
    while fixture.database.number("SELECT count(*) FROM task WHERE ended_at IS NULL").await > 0 {
        fire(fixture, 5_000).await;
        let filter = TaskFilter { status: Some(Status::Running), ..TaskFilter::default() };
        let running = fixture.store.task_list(filter, None, 10).await.unwrap().0;
        assert!((1..=2).contains(&running.len()), "{}", running.len());
        for view in running {
            let id: TaskId = view.task.id.parse().unwrap();
            send(fixture, id, "end", "finish", 5_000).await;
            started.push(id);
        }
    }
    assert!(started.chunks(2).map(|pair| pair.iter().max()).is_sorted(), "in the order of their creation");
    assert_eq!(
        fixture.database.number("SELECT count(*) FROM task WHERE status = 'completed'").await,
        all_tasks.len() as i64
    );
    assert_findings(fixture, &[]).await;
}

pub async fn a_task_that_a_message_creates_counts_too(fixture: &Fixture) {
    let definition = batch(fixture).await;
    for (number, expected) in [(1, Status::Running), (2, Status::Running), (3, Status::Queued)] {
        let new = unstored_task(fixture, &definition, json!({"notes": 0}), number);
        let (id, message) = (new.id, format!("m{number}"));
        assert!(fixture.store.inbox_task("gate", &message, new, fixture.at(number)).await.unwrap());
        assert_eq!(status(fixture, id).await, expected);
    }
}

pub async fn queued_tasks_are_listed_counted_and_know_their_position(fixture: &Fixture) {
    let definition = batch(fixture).await;
    let tasks = create(fixture, &definition, 5).await;
    let filter = TaskFilter { status: Some(Status::Queued), ..TaskFilter::default() };
    let (found, total) = fixture.store.task_list(filter.clone(), None, 10).await.unwrap();
    assert_eq!((found.len(), total), (3, 3));
    assert!(found.iter().all(|view| filter.matches(view) && view.task.state().is_empty()));
    let figures = fixture.store.task_figures().await.unwrap();
    let queued: Vec<(&str, u64)> = figures.queued.iter().map(|one| (one.machine.as_str(), one.tasks)).collect();
    assert_eq!((queued, figures.queued[0].since), (vec![("batch", 3)], fixture.at(2)));
    assert_eq!(figures.states.iter().map(|state| state.tasks).sum::<u64>(), 2);
    let counts = fixture.store.task_counts().await.unwrap();
    let expected = [("cancelled", 0), ("completed", 0), ("failed", 0), ("paused", 0), ("queued", 3), ("running", 2)];
    assert_eq!(counts, expected.map(|(status, tasks)| (status.to_owned(), tasks)).into());
    let machines = fixture.store.machine_list().await.unwrap();
    assert_eq!((machines[0].tasks["queued"], machines[0].tasks["running"]), (3, 2));
    let position = fixture.store.task_position("batch", tasks[4]).await.unwrap();
    assert_eq!(position, TaskPosition { running: 2, limit: Some(2), ahead: 2 });
}
