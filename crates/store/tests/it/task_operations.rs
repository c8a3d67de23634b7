//! Actions on tasks: tags, forks, bulk actions and migrations.

use std::{collections::BTreeMap, sync::Arc};

use faena_domain::{BulkId, TaskId};
use faena_machine::{Caller, Definition, HistoryPoint, Input, Origin, Outcome, Status, fork};
use faena_store::{
    AuditEntry, AuditFilter, Bulk, BulkStep, BulkWork, EventQuery, NewBulk, NewTask, TaskAction, TaskBulk, TaskFilter,
};
use serde_json::{Map, json};
use uuid::Uuid;

use crate::{
    doctor::assert_findings,
    support::Fixture,
    tasks::{apply, fire, history, new_task, order, register, send, state},
};

/// Version 2 of `order`: NEW is called OPEN, and CHARGING is inside PAYING.
const ORDER_2: &str = "
machine: order
version: 2
events: {pay: {}, ship: {}, refund: {}}
initial: OPEN
states:
  OPEN:
    deadline: {total: 2m, to: EXPIRED}
    on: {pay: CHARGING}
  PAYING:
    initial: CHARGING
    deadline: {total: 3h, to: EXPIRED}
    states:
      CHARGING:
        forever: true
        entry: [{job: card.charge, name: charge}]
        on: {job.charge.completed: DONE, job.charge.failed: EXPIRED, ship: DONE}
  DONE: {final: true}
  EXPIRED: {final: true, ends: failure}
";

async fn order_2(fixture: &Fixture) -> Arc<Definition> {
    let definition = Arc::new(Definition::parse(ORDER_2).unwrap());
    register(fixture, &definition).await;
    definition
}

fn of_order() -> TaskFilter {
    TaskFilter { machine: Some("order".into()), open: true, ..TaskFilter::default() }
}

async fn begin(fixture: &Fixture, action: TaskAction, filter: TaskFilter, up_to: TaskId, ms: i64) -> Bulk {
    let id = BulkId::new();
    let work = BulkWork::Tasks(TaskBulk { action, filter });
    let new = NewBulk { id, work, actor: "ops".into(), per_second: Some(100), up_to: up_to.0, matched: 3 };
    fixture.store.bulk_begin(new, fixture.at(ms), fixture.at(ms)).await.unwrap();
    fixture.store.bulk_get(id).await.unwrap().unwrap()
}

/// Makes a step with the tasks that match now, and returns the action afterwards.
async fn step(fixture: &Fixture, bulk: &Bulk, limit: usize, ms: i64) -> Bulk {
    let BulkWork::Tasks(work) = &bulk.work else { panic!("not an action on tasks") };
    let (after, up_to) = (bulk.last.map(TaskId), TaskId(bulk.up_to));
    let found = fixture.store.task_find(&work.filter, after, up_to, limit).await.unwrap();
    let ids: Vec<Uuid> = found.iter().map(|id| id.0).collect();
    let due_at = (ids.len() == limit).then(|| fixture.at(ms + 10));
    let step = BulkStep { bulk: bulk.clone(), last: ids.last().copied(), ids, due_at };
    assert!(fixture.store.bulk_step(step, fixture.at(ms)).await.unwrap());
    fixture.store.bulk_get(bulk.id).await.unwrap().unwrap()
}

pub async fn a_task_is_found_by_its_tags(fixture: &Fixture) {
    let task = order(fixture).await;
    let view = fixture.store.task_get(task).await.unwrap().unwrap();
    assert_eq!(view.tags, ["sample"]);
    for (tag, count) in [("sample", 1), ("other", 0)] {
        let filter = TaskFilter { tag: Some(tag.into()), ..TaskFilter::default() };
        assert_eq!(filter.matches(&view), count == 1);
        let (found, total) = fixture.store.task_list(filter, None, 10).await.unwrap();
        assert_eq!((found.len(), total), (count, count as u64), "{tag}");
    }
    apply(fixture, task, Input::Cancel { actor: "ana".into(), reason: None }, 5).await;
    assert_eq!(fixture.store.task_prune(fixture.at(10), 10).await.unwrap(), 1);
    assert_eq!(fixture.database.number("SELECT count(*) FROM task_tag").await, 0);
}

pub async fn a_fork_starts_where_the_history_says(fixture: &Fixture) {
    let original = order(fixture).await;
    send(fixture, original, "e1", "pay", 10).await;
    apply(fixture, original, Input::Cancel { actor: "ana".into(), reason: None }, 20).await;
    let mut point = HistoryPoint::default();
    history(fixture, original).await.iter().take(2).for_each(|record| point.advance(record));
    assert_eq!((point.record, point.version, point.state.as_str()), (2, 1, "CHARGING"));
    assert_eq!(point.data, *json!({"amount": 5}).as_object().unwrap());
    let definition = fixture.store.machine_get("order", Some(1)).await.unwrap().unwrap().definition;
    let (id, now) = (TaskId::new(), fixture.at(30));
    let origin = Origin { task_id: original.to_string(), record: 2 };
    let data = Map::from_iter([("amount".to_owned(), json!(7))]);
    let first = fork(&definition, id.to_string(), Caller::from("ops"), point, origin.clone(), data, now).unwrap();
    let audit = AuditEntry {
        actor: "ops".into(),
        action: "task.fork".into(),
        target: original.to_string(),
        details: json!({"fork": id}),
        count: 1,
    };
    let (title, correlation) = (None, "c".to_owned());
    let new = NewTask { id, definition, title, correlation, tags: Vec::new(), first, audit: Some(audit) };
    fixture.store.task_create(new, now).await.unwrap();
    let task = fixture.store.task_get(id).await.unwrap().unwrap().task;
    assert_eq!((task.state().as_str(), &task.data), ("CHARGING", &json!({"amount": 7})));
    assert_eq!(task.forked_from, Some(origin));
    let records = history(fixture, id).await;
    assert_eq!((records[0].event.as_str(), records[0].to.as_deref()), ("task.forked", Some("CHARGING")));
    assert_eq!(records[0].reason.as_deref(), Some(format!("from record 2 of task {original}").as_str()));
    let links = fixture.database.number("SELECT count(*) FROM task_job").await;
    assert_eq!(links, 2, "the job of the original, and a new one");
    let filter = AuditFilter { target: Some(original.to_string()), ..AuditFilter::default() };
    assert_eq!(fixture.store.audit_list(filter, 10).await.unwrap()[0].action, "task.fork");
    assert_findings(fixture, &[]).await;
}

pub async fn an_event_reaches_every_matching_task_once(fixture: &Fixture) {
    let tasks = [order(fixture).await, order(fixture).await, order(fixture).await];
    let (paid, later) = (order(fixture).await, order(fixture).await);
    send(fixture, paid, "e1", "pay", 5).await;
    let filter = TaskFilter { state: Some("NEW".into()), ..of_order() };
    let action = TaskAction::Send { event: "pay".into(), payload: json!({}) };
    let bulk = begin(fixture, action, filter, paid, 10).await;
    let stale = bulk.clone();
    let bulk = step(fixture, &bulk, 2, 20).await;
    assert_eq!((bulk.done, bulk.skipped, bulk.finished_at), (2, 0, None));
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.0).collect();
    let repeated = BulkStep { bulk: stale, last: None, ids, due_at: None };
    assert!(!fixture.store.bulk_step(repeated, fixture.at(25)).await.unwrap(), "another node made this step");
    let bulk = step(fixture, &bulk, 2, 30).await;
    assert_eq!((bulk.done, bulk.skipped, bulk.finished_at), (3, 0, Some(fixture.at(30))));
    for task in tasks {
        let records = history(fixture, task).await;
        assert_eq!(records.len(), 2);
        assert_eq!((records[1].event.as_str(), records[1].actor.as_str()), ("pay", "ops"));
        assert_eq!(records[1].event_id, format!("bulk:{}", bulk.id));
    }
    assert_eq!(state(fixture, later).await, "NEW", "its id is above the last id of the action");
    let filter = AuditFilter { target: Some(bulk.id.to_string()), ..AuditFilter::default() };
    let audit = fixture.store.audit_list(filter, 10).await.unwrap();
    let actions: Vec<(&str, u64)> = audit.iter().map(|entry| (entry.action.as_str(), entry.count)).collect();
    assert_eq!(actions, [("bulk.tasks.send.end", 3), ("bulk.tasks.send", 3)]);
}

pub async fn tasks_that_changed_meanwhile_are_skipped(fixture: &Fixture) {
    let tasks = [order(fixture).await, order(fixture).await];
    let filter = TaskFilter { state: Some("NEW".into()), ..of_order() };
    let bulk = begin(fixture, TaskAction::Pause, filter, tasks[1], 10).await;
    send(fixture, tasks[0], "e1", "pay", 15).await;
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.0).chain([TaskId::new().0]).collect();
    let step = BulkStep { bulk: bulk.clone(), last: ids.last().copied(), ids, due_at: None };
    assert!(fixture.store.bulk_step(step, fixture.at(20)).await.unwrap());
    let bulk = fixture.store.bulk_get(bulk.id).await.unwrap().unwrap();
    assert_eq!((bulk.done, bulk.skipped), (1, 2), "one has left the state, one does not exist");
    let status = |task| async move { fixture.store.task_get(task).await.unwrap().unwrap().task.status };
    assert_eq!((status(tasks[0]).await, status(tasks[1]).await), (Status::Running, Status::Paused));
}

fn migration(map: &[(&str, &str)]) -> (TaskAction, TaskFilter) {
    let map: BTreeMap<String, String> = map.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect();
    (TaskAction::Migrate { to: 2, map, runs_entry: false }, TaskFilter { version: Some(1), ..of_order() })
}

pub async fn tasks_move_to_another_version_unless_it_lacks_their_state(fixture: &Fixture) {
    let (new, charging, paid, paused) =
        (order(fixture).await, order(fixture).await, order(fixture).await, order(fixture).await);
    for task in [charging, paid] {
        send(fixture, task, "e1", "pay", 10).await;
    }
    complete_charge(fixture, paid).await;
    assert_eq!(state(fixture, paid).await, "PAID");
    apply(fixture, paused, Input::Pause { actor: "ana".into() }, 30).await;
    send(fixture, new, "e2", "ship", 40).await;
    order_2(fixture).await;
    let (action, filter) = migration(&[("NEW", "OPEN")]);
    let bulk = begin(fixture, action, filter, paused, 50).await;
    let bulk = step(fixture, &bulk, 10, 1_000).await;
    assert_eq!((bulk.done, bulk.skipped), (3, 1), "version 2 has no state PAID");

    let view = |task| async move { fixture.store.task_get(task).await.unwrap().unwrap() };
    let moved = view(new).await;
    assert_eq!((moved.version, moved.task.state().as_str()), (2, "OPEN"));
    assert_eq!(moved.task.due(), Some(fixture.at(121_000)), "the deadline of the new state");
    assert_eq!(moved.task.deferred.len(), 1, "an event that the new version knows still waits");
    let last = history(fixture, new).await.pop().unwrap();
    assert_eq!((last.event.as_str(), last.from.as_str(), last.to.as_deref()), ("task.migrated", "NEW", Some("OPEN")));
    assert_eq!((last.version, last.reason.as_deref()), (Some(2), Some("from version 1 to 2")));
    assert_eq!(view(charging).await.task.state(), "PAYING.CHARGING");
    assert_eq!((view(paid).await.version, view(paid).await.task.state().as_str()), (1, "PAID"), "left alone");
    assert_eq!((view(paused).await.version, view(paused).await.task.status), (2, Status::Paused));
    assert_findings(fixture, &[]).await;

    // The job of the old stay is stale, and the deadline of the new state counts.
    let before = view(charging).await.task;
    let job = fixture.claim(10, 2_000).await.remove(0);
    fixture.complete(&job, 2_001).await;
    assert_eq!(fire(fixture, 2_002).await.jobs, 1);
    let after = view(charging).await.task;
    assert_eq!((after.state(), after.epoch), (before.state(), before.epoch));
    assert_eq!(history(fixture, charging).await.pop().unwrap().outcome, Outcome::Stale);
    fire(fixture, 121_000).await;
    assert_eq!(state(fixture, new).await, "EXPIRED");
    apply(fixture, paused, Input::Resume { actor: "ana".into() }, 200_000).await;
    let resumed = view(paused).await.task;
    assert_eq!(resumed.due(), Some(fixture.at(200_000 + 120_000)), "the pause counts towards no deadline");
    assert_findings(fixture, &[]).await;
}

/// Claims all ready jobs, completes the job of `task` and releases the others.
async fn complete_charge(fixture: &Fixture, task: TaskId) {
    let link = fixture.database.literal(faena_domain::JobId(task.0));
    let jobs = fixture.database.number(&format!("SELECT count(*) FROM task_job WHERE task = {link}")).await;
    assert_eq!(jobs, 1);
    let claimed = fixture.claim(10, 15).await;
    for job in claimed {
        let of_task =
            format!("SELECT count(*) FROM task_job WHERE task = {link} AND job = {}", fixture.database.literal(job.id));
        if fixture.database.number(&of_task).await == 1 {
            fixture.complete(&job, 16).await;
        } else {
            fixture.release(&job, 16).await;
        }
    }
    fire(fixture, 17).await;
}

pub async fn a_migration_continues_where_another_node_stopped(fixture: &Fixture) {
    let mut tasks = Vec::new();
    for _ in 0..5 {
        tasks.push(order(fixture).await);
    }
    order_2(fixture).await;
    let (action, filter) = migration(&[("NEW", "OPEN")]);
    let bulk = begin(fixture, action, filter, tasks[4], 10).await;
    step(fixture, &bulk, 2, 20).await;
    // Another node reads the progress from the database.
    let due = fixture.store.bulk_due().await.unwrap().unwrap();
    assert_eq!((due.id, due.done, due.work == bulk.work), (bulk.id, 2, true));
    let due = step(fixture, &due, 2, 30).await;
    let due = step(fixture, &due, 2, 40).await;
    assert_eq!((due.done, due.skipped, due.finished_at), (5, 0, Some(fixture.at(40))));
    for task in tasks {
        assert_eq!(history(fixture, task).await.len(), 2, "moved once");
    }
    let versions = fixture.store.machine_list().await.unwrap();
    let running: Vec<(u32, u64)> =
        versions.iter().map(|one| (one.version, one.tasks.get("running").copied().unwrap_or(0))).collect();
    assert_eq!(running, [(2, 5), (1, 0)]);
}

pub async fn tasks_are_counted_by_state(fixture: &Fixture) {
    for _ in 0..2 {
        order(fixture).await;
    }
    let charging = order(fixture).await;
    send(fixture, charging, "e1", "pay", 5).await;
    let cancelled = order(fixture).await;
    apply(fixture, cancelled, Input::Cancel { actor: "ana".into(), reason: None }, 6).await;
    let counts = fixture.store.task_states("order", 1).await.unwrap();
    let counts: Vec<(&str, u64)> = counts.iter().map(|count| (count.state.as_str(), count.tasks)).collect();
    assert_eq!(counts, [("CHARGING", 1), ("NEW", 2)]);
    assert!(fixture.store.task_states("order", 2).await.unwrap().is_empty());
}

pub async fn the_events_of_one_task_are_listed(fixture: &Fixture) {
    let definition = order_2(fixture).await;
    let task = new_task(fixture, &definition, json!({}), 0).await;
    new_task(fixture, &definition, json!({}), 1).await;
    send(fixture, task, "e1", "pay", 10).await;
    let list = |after| fixture.store.event_list(EventQuery::Subject { id: task.0, after }, 10);
    let events: Vec<String> = list(0).await.unwrap().into_iter().map(|event| event.kind).collect();
    assert_eq!(events, ["task.created", "task.state.changed"]);
    assert_eq!(list(1).await.unwrap().len(), 1);
}
