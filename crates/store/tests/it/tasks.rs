//! Tasks: one event is one transaction with everything that follows from it.

use std::sync::Arc;

use faena_domain::{JobState, TaskId, Timestamp};
use faena_machine::{BUILT_IN, Definition, Event, Input, Outcome, Record, Status, create, step};
use faena_store::{
    EventQuery, KeyedTask, NewMachine, NewTask, Registered, StoreError, StoreOptions, TaskAnswer, TaskFilter,
    TaskInput, TaskKey, TasksFired,
};
use serde_json::{Value, json};

use crate::support::{Fixture, SeededRandom};

pub fn coding_task() -> Arc<Definition> {
    Arc::new(Definition::parse(BUILT_IN[0].1).unwrap())
}

const ORDER: &str = "
machine: order
version: 1
events: {pay: {}, ship: {}, cancel: {unexpected: reject}}
initial: NEW
states:
  NEW:
    deadline: {total: 1m, to: EXPIRED}
    on: {pay: CHARGING}
  CHARGING:
    deadline: {total: 1h, to: EXPIRED}
    entry: [{job: card.charge, name: charge, data: {amount: ctx.amount}, options: {queue: cards}}]
    on:
      job.charge.completed: {to: PAID, set: {receipt: event.result}}
      job.charge.failed: {to: EXPIRED, set: {error: event.error.message}}
  PAID: {forever: true, on: {ship: DONE}}
  DONE: {final: true}
  EXPIRED: {final: true, ends: failure}
";

pub async fn register(fixture: &Fixture, definition: &Arc<Definition>) {
    let machine = NewMachine { definition: definition.clone() };
    fixture.store.machine_register(machine, "ana", fixture.at(0)).await.unwrap();
}

pub async fn new_task(fixture: &Fixture, definition: &Arc<Definition>, data: Value, ms: i64) -> TaskId {
    let new = unstored_task(fixture, definition, data, ms);
    let id = new.id;
    fixture.store.task_create(new, fixture.at(ms)).await.unwrap();
    id
}

pub fn unstored_task(fixture: &Fixture, definition: &Arc<Definition>, data: Value, ms: i64) -> NewTask {
    let id = TaskId::new();
    let first = create(definition, id.to_string(), "ana".into(), data, fixture.at(ms)).unwrap();
    NewTask {
        id,
        definition: definition.clone(),
        title: Some("a task".into()),
        correlation: format!("c-{id}"),
        tags: vec!["sample".into()],
        first,
        audit: None,
    }
}

pub async fn a_task_that_exists_fails_only_its_own_creation(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(ORDER).unwrap());
    register(fixture, &definition).await;
    let existing = new_task(fixture, &definition, json!({"amount": 5}), 0).await;
    let create = async |n: usize| {
        let id = if n == 7 { existing } else { TaskId::new() };
        let first = create(&definition, id.to_string(), "ana".into(), json!({"amount": n}), fixture.at(1)).unwrap();
        let (definition, tags) = (definition.clone(), vec!["new".to_owned(), format!("n{n}")]);
        let new = NewTask { id, definition, title: None, correlation: "c".into(), tags, first, audit: None };
        (id, fixture.store.task_create(new, fixture.at(1)).await)
    };
    let results = futures_util::future::join_all((0..20).map(create)).await;
    for (n, (id, result)) in results.iter().enumerate() {
        assert_eq!(result.is_err(), n == 7, "{n}: {result:?}");
        let view = fixture.store.task_get(*id).await.unwrap().unwrap();
        assert_eq!(view.task.data["amount"], if n == 7 { 5 } else { n });
        assert_eq!((view.events, history(fixture, *id).await.len()), (1, 1));
    }
    let tagged = TaskFilter { tag: Some("new".into()), ..TaskFilter::default() };
    assert_eq!(fixture.store.task_list(tagged, None, 100).await.unwrap().1, 19);
}

pub async fn order(fixture: &Fixture) -> TaskId {
    let definition = Arc::new(Definition::parse(ORDER).unwrap());
    register(fixture, &definition).await;
    new_task(fixture, &definition, json!({"amount": 5}), 0).await
}

pub fn event(id: &str, kind: &str, payload: Value, at: Timestamp) -> Input {
    let (id, kind, actor) = (id.to_owned(), kind.to_owned(), "service".to_owned());
    let decider = Some(actor.as_str().into());
    Input::Event(Event { id, kind, payload, actor, decider, at })
}

pub async fn apply(fixture: &Fixture, task: TaskId, input: Input, ms: i64) -> TaskAnswer {
    let inputs = vec![TaskInput { task, input }];
    fixture.store.task_apply(inputs, fixture.at(ms)).await.unwrap().remove(0).expect("a known task")
}

pub async fn send(fixture: &Fixture, task: TaskId, id: &str, kind: &str, ms: i64) -> TaskAnswer {
    apply(fixture, task, event(id, kind, json!({}), fixture.at(ms)), ms).await
}

pub async fn state(fixture: &Fixture, task: TaskId) -> String {
    fixture.store.task_get(task).await.unwrap().unwrap().task.state()
}

pub async fn fire(fixture: &Fixture, ms: i64) -> TasksFired {
    fixture.store.task_fire(100, fixture.at(ms)).await.unwrap()
}

pub async fn history(fixture: &Fixture, task: TaskId) -> Vec<Record> {
    fixture.store.task_history(task, 0, 1_000).await.unwrap()
}

pub async fn a_version_of_a_machine_never_changes(fixture: &Fixture) {
    let definition = coding_task();
    let machine = |definition: &Arc<Definition>| NewMachine { definition: definition.clone() };
    let store = &fixture.store;
    assert_eq!(store.machine_register(machine(&definition), "ana", fixture.at(0)).await.unwrap(), Registered::New);
    assert_eq!(store.machine_register(machine(&definition), "ana", fixture.at(1)).await.unwrap(), Registered::Known);
    let other = Arc::new(
        Definition::parse(&BUILT_IN[0].1.replace("correcciones: { max: 3", "correcciones: { max: 4")).unwrap(),
    );
    let refused = store.machine_register(machine(&other), "ana", fixture.at(2)).await.unwrap_err();
    assert!(
        matches!(&refused, StoreError::Conflict { message, .. } if message.contains("another version")),
        "{refused}"
    );
    let second = Arc::new(Definition::parse(&BUILT_IN[0].1.replace("version: 1", "version: 2")).unwrap());
    store.machine_register(machine(&second), "ana", fixture.at(3)).await.unwrap();
    let newest = store.machine_get("coding-task", None).await.unwrap().unwrap();
    assert_eq!((newest.definition.version, &newest.definition.hash), (2, &second.hash));
    let first = store.machine_get("coding-task", Some(1)).await.unwrap().unwrap();
    assert_eq!(first.definition.hash, definition.hash, "the stored text has the same hash");
    assert!(store.machine_get("coding-task", Some(9)).await.unwrap().is_none());
    let task = new_task(fixture, &definition, json!({"prompt": "p", "repositorioOrigen": "r"}), 4).await;
    let versions = store.machine_list().await.unwrap();
    assert_eq!(versions.iter().map(|one| (one.version, one.tasks.len())).collect::<Vec<_>>(), [(2, 0), (1, 1)]);
    assert_eq!(versions[1].tasks["running"], 1);
    assert_eq!(state(fixture, task).await, "PLANIFICANDO");
}

pub async fn a_repeated_event_is_applied_once_and_gets_the_same_answer(fixture: &Fixture) {
    let task = order(fixture).await;
    let first = send(fixture, task, "e1", "pay", 10).await;
    assert_eq!((first.outcome, first.state.as_str(), first.duplicate), (Outcome::Applied, "CHARGING", false));
    let second = send(fixture, task, "e1", "pay", 20).await;
    assert_eq!(second, TaskAnswer { duplicate: true, ..first });
    // In one batch as well.
    let inputs = ["e2", "e2"].map(|id| TaskInput { task, input: event(id, "ship", json!({}), fixture.at(30)) });
    let answers = fixture.store.task_apply(inputs.to_vec(), fixture.at(30)).await.unwrap();
    let answers: Vec<(Outcome, bool)> = answers.into_iter().flatten().map(|one| (one.outcome, one.duplicate)).collect();
    assert_eq!(answers, [(Outcome::Deferred, false), (Outcome::Deferred, true)]);
    let unknown = vec![TaskInput { task: TaskId::new(), input: Input::Timers }];
    assert_eq!(fixture.store.task_apply(unknown, fixture.at(40)).await.unwrap(), [None]);
    let records = history(fixture, task).await;
    let events: Vec<(u64, &str)> = records.iter().map(|record| (record.sequence, record.event.as_str())).collect();
    assert_eq!(events, [(1, "task.created"), (2, "pay"), (3, "ship")]);
}

pub async fn a_refused_event_changes_nothing_and_may_be_sent_again(fixture: &Fixture) {
    let task = order(fixture).await;
    let before = fixture.store.task_get(task).await.unwrap();
    for _ in 0..2 {
        let answer = send(fixture, task, "e1", "cancel", 10).await;
        assert_eq!((answer.outcome, answer.duplicate), (Outcome::Rejected, false));
    }
    assert_eq!(fixture.store.task_get(task).await.unwrap(), before);
}

pub async fn the_end_of_a_job_continues_its_task(fixture: &Fixture) {
    let task = order(fixture).await;
    send(fixture, task, "e1", "pay", 10).await;
    let job = fixture.claim_one(20).await;
    assert_eq!(job.payload.as_str(), "{\"amount\":5}");
    let view = fixture.store.job_get(job.id).await.unwrap().unwrap();
    assert_eq!((view.kind.as_str(), view.queue.as_str()), ("card.charge", "cards"));
    assert_eq!(view.correlation_id, format!("c-{task}"));
    assert_eq!(fire(fixture, 25).await.jobs, 0, "the job runs");
    fixture.complete(&job, 30).await;
    let fired = fire(fixture, 40).await;
    assert_eq!(fired.jobs, 1);
    let view = fixture.store.task_get(task).await.unwrap().unwrap();
    assert_eq!((view.task.state().as_str(), &view.task.data["receipt"]), ("PAID", &json!({"ok": true})));
}

pub async fn a_failed_or_cancelled_job_continues_its_task_too(fixture: &Fixture) {
    let failed = order(fixture).await;
    send(fixture, failed, "e1", "pay", 10).await;
    let job = fixture.claim_one(20).await;
    fixture.fail(&job, 30).await;
    fire(fixture, 40).await;
    let view = fixture.store.task_get(failed).await.unwrap().unwrap();
    assert_eq!((view.task.state().as_str(), &view.task.data["error"]), ("EXPIRED", &json!("no")));

    let cancelled = order(fixture).await;
    send(fixture, cancelled, "e1", "pay", 50).await;
    let waiting = fixture.list(faena_store::Filter { states: vec![JobState::Queued], ..Default::default() }).await;
    fixture.store.job_cancel(waiting[0], "not wanted", None, fixture.at(60)).await.unwrap();
    fire(fixture, 70).await;
    assert_eq!(state(fixture, cancelled).await, "EXPIRED");
}

pub async fn timers_fire_when_they_are_due_and_not_before(fixture: &Fixture) {
    let task = order(fixture).await;
    let fired = fire(fixture, 59_999).await;
    assert_eq!((fired.tasks, fired.next_at), (0, Some(fixture.at(60_000))));
    assert_eq!(fire(fixture, 60_000).await.tasks, 1);
    let view = fixture.store.task_get(task).await.unwrap().unwrap();
    assert_eq!((view.task.state().as_str(), view.task.status), ("EXPIRED", Status::Failed));
    assert_eq!(fire(fixture, 70_000).await, TasksFired::default());
}

pub async fn a_task_and_its_timers_survive_a_restart(fixture: &Fixture) {
    let task = order(fixture).await;
    send(fixture, task, "e1", "pay", 10).await;
    let job = fixture.claim_one(20).await;
    fixture.complete(&job, 30).await;
    let again = fixture.reopen(StoreOptions::default()).await;
    assert!(
        again
            .store
            .task_apply(vec![TaskInput { task, input: event("e1", "pay", json!({}), again.at(40)) }], again.at(40))
            .await
            .unwrap()[0]
            .as_ref()
            .unwrap()
            .duplicate
    );
    assert_eq!(fire(&again, 50).await.jobs, 1);
    assert_eq!(state(&again, task).await, "PAID");
    again.store.close().await;
}

pub async fn events_of_a_task_are_kept_without_a_subscription(fixture: &Fixture) {
    let definition = coding_task();
    register(fixture, &definition).await;
    let task = new_task(fixture, &definition, json!({"prompt": "p", "repositorioOrigen": "r"}), 0).await;
    let events = fixture.store.event_list(EventQuery::After(0), 100).await.unwrap();
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["task.created", "task.state.changed", "tarea.generar_plan"]);
    let command = &events[2];
    let data: Value = serde_json::from_str(&command.data).unwrap();
    assert_eq!((command.subject, &data["payload"]), (task.0, &json!({"prompt": "p", "repositorioOrigen": "r"})));
    assert_eq!(data["metadata"]["taskId"], task.to_string());
    assert_eq!(data["metadata"]["traceId"], command.id.to_string(), "the trace id is the id of the event");
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2, 3]);
}

pub async fn tasks_are_listed_by_machine_state_and_approval(fixture: &Fixture) {
    let definition = coding_task();
    register(fixture, &definition).await;
    let data = json!({"prompt": "p", "repositorioOrigen": "r"});
    let mut ids = Vec::new();
    for ms in 0..3 {
        ids.push(new_task(fixture, &definition, data.clone(), ms).await);
    }
    let order = order(fixture).await;
    let plan = json!({"planId": "p1", "plan": "x"});
    apply(fixture, ids[1], event("p", "resultado.plan_generado", plan.clone(), fixture.at(10)), 10).await;
    apply(fixture, ids[2], event("p", "resultado.plan_generado", plan, fixture.at(10)), 10).await;
    apply(fixture, ids[2], event("a", "tarea.aprobar_plan", json!({"planId": "p1"}), fixture.at(11)), 11).await;
    let list = async |filter: TaskFilter| {
        let (tasks, total) = fixture.store.task_list(filter, None, 100).await.unwrap();
        assert_eq!(tasks.len() as u64, total);
        tasks.into_iter().map(|view| view.task.id).collect::<Vec<_>>()
    };
    let all: Vec<String> = [order, ids[2], ids[1], ids[0]].map(|id| id.to_string()).to_vec();
    assert_eq!(list(TaskFilter::default()).await, all, "the newest first");
    let machine = TaskFilter { machine: Some("order".into()), ..TaskFilter::default() };
    assert_eq!(list(machine).await, [order.to_string()]);
    assert_eq!(list(TaskFilter { approval: true, ..TaskFilter::default() }).await, [ids[1].to_string()]);
    for state in ["EJECUTANDO_CODIGO", "INICIANDO", "EJECUTANDO_CODIGO.INICIANDO"] {
        let filter = TaskFilter { state: Some(state.into()), ..TaskFilter::default() };
        assert_eq!(list(filter).await, [ids[2].to_string()], "{state}");
    }
    let correlation = TaskFilter { correlation: Some(format!("c-{}", ids[0])), ..TaskFilter::default() };
    assert_eq!(list(correlation).await, [ids[0].to_string()]);
    let (page, total) = fixture.store.task_list(TaskFilter::default(), Some(ids[2]), 1).await.unwrap();
    assert_eq!((page.len(), page[0].task.id.as_str(), total), (1, ids[1].to_string().as_str(), 4));
}

pub async fn old_tasks_are_deleted_with_everything_they_wrote(fixture: &Fixture) {
    let task = order(fixture).await;
    let other = order(fixture).await;
    send(fixture, task, "e1", "pay", 10).await;
    apply(fixture, task, Input::Cancel { actor: "ana".into(), reason: None }, 20).await;
    assert_eq!(fixture.store.task_prune(fixture.at(20), 10).await.unwrap(), 0);
    assert_eq!(fixture.store.task_prune(fixture.at(21), 10).await.unwrap(), 1);
    assert!(fixture.store.task_get(task).await.unwrap().is_none());
    assert!(history(fixture, task).await.is_empty());
    assert_eq!(state(fixture, other).await, "NEW");
}

/// Applies random inputs to the store and to the pure function, and compares the tasks and their histories.
pub async fn random_inputs_give_the_same_history_as_the_pure_step(fixture: &Fixture) {
    let definition = coding_task();
    register(fixture, &definition).await;
    let mut random = SeededRandom(11);
    let data = json!({"prompt": "p", "repositorioOrigen": "r"});
    let mut models = Vec::new();
    for _ in 0..4 {
        let id = new_task(fixture, &definition, data.clone(), 0).await;
        let first = create(&definition, id.to_string(), "ana".into(), data.clone(), fixture.at(0)).unwrap();
        models.push((id, first.task, first.records, std::collections::HashSet::new()));
    }
    let mut ms = 0;
    for round in 0..150 {
        ms += random.below(90_000) as i64;
        let mut inputs = Vec::new();
        for _ in 0..=random.below(4) {
            let chosen = random.below(models.len());
            let (id, task, records, seen) = &mut models[chosen];
            let input = random_input(&mut random, &definition, round, fixture.at(ms));
            if let Input::Event(event) = &input
                && seen.contains(&event.id)
            {
                inputs.push(TaskInput { task: *id, input });
                continue;
            }
            let expected = step(&definition, task, input.clone(), fixture.at(ms));
            if let Input::Event(event) = &input
                && !expected.records.is_empty()
            {
                seen.insert(event.id.clone());
            }
            *task = expected.task;
            records.extend(expected.records);
            inputs.push(TaskInput { task: *id, input });
        }
        fixture.store.task_apply(inputs, fixture.at(ms)).await.unwrap();
    }
    for (id, task, records, _) in models {
        assert_eq!(fixture.store.task_get(id).await.unwrap().unwrap().task, task);
        assert_eq!(history(fixture, id).await, records);
    }
}

fn random_input(random: &mut SeededRandom, definition: &Definition, round: usize, now: Timestamp) -> Input {
    let kinds: Vec<&String> = definition.events.keys().collect();
    match random.below(10) {
        0 => Input::Decision {
            caller: format!("person {}", random.below(3)).as_str().into(),
            approve: random.below(2) == 0,
            hash: None,
            comment: None,
        },
        1 | 2 => Input::Timers,
        3 if random.below(8) == 0 => Input::Pause { actor: "ana".into() },
        4 => Input::Resume { actor: "ana".into() },
        _ => {
            let kind = kinds[random.below(kinds.len())];
            let payload = json!({
                "prompt": "p", "repositorioOrigen": "r", "planId": "p1", "plan": "x", "pullRequestUrl": "u",
                "exito": random.below(2) == 0, "log": format!("failure {}", ["a", "b", "c"][random.below(3)]),
                "sessionId": "s1", "promptCorreccion": "c", "estado": random.below(3),
            });
            // Some ids come twice.
            event(&format!("e{}", round.saturating_sub(random.below(3))), kind, payload, now)
        }
    }
}

pub async fn a_message_creates_its_task_once(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(ORDER).unwrap());
    register(fixture, &definition).await;
    let create = async |consumer: &str, message: &str| {
        let id = TaskId::new();
        let first = create(&definition, id.to_string(), "ana".into(), json!({"amount": 5}), fixture.at(1)).unwrap();
        let task = NewTask {
            id,
            definition: definition.clone(),
            title: None,
            correlation: "c".into(),
            tags: Vec::new(),
            first,
            audit: None,
        };
        fixture.store.inbox_task(consumer, message, task, fixture.at(1)).await.unwrap()
    };
    let results = futures_util::future::join_all((0..8).map(|_| create("inbox:a", "m"))).await;
    assert_eq!(results.into_iter().filter(|is_new| *is_new).count(), 1);
    assert!(create("inbox:b", "m").await && create("inbox:a", "m2").await && !create("inbox:a", "m").await);
    let (tasks, total) = fixture.store.task_list(TaskFilter::default(), None, 10).await.unwrap();
    assert_eq!((tasks.len(), total), (3, 3));
    assert_eq!(history(fixture, tasks[0].task.id.parse().unwrap()).await.len(), 1, "with its history");
}

pub async fn open_tasks_are_counted_by_machine_and_state(fixture: &Fixture) {
    assert_eq!(fixture.store.task_figures().await.unwrap(), Default::default());
    let first = order(fixture).await;
    let second = new_task(fixture, &Arc::new(Definition::parse(ORDER).unwrap()), json!({"amount": 5}), 20).await;
    let coding = coding_task();
    register(fixture, &coding).await;
    let task = new_task(fixture, &coding, json!({"prompt": "p", "repositorioOrigen": "r"}), 30).await;
    let plan = event("e", "resultado.plan_generado", json!({"planId": "1", "plan": 1}), fixture.at(40));
    apply(fixture, task, plan, 40).await;
    let figures = fixture.store.task_figures().await.unwrap();
    let mut states: Vec<_> =
        figures.states.iter().map(|one| (one.machine.as_str(), one.state.as_str(), one.tasks, one.since)).collect();
    states.sort_unstable();
    let waiting = ("coding-task", "ESPERANDO_APROBACION_PLAN", 1, fixture.at(40));
    assert_eq!(states, [waiting, ("order", "NEW", 2, fixture.at(0))]);
    assert_eq!((figures.approvals, figures.oldest_approval_at), (1, Some(fixture.at(40))));
    assert_eq!(figures.next_at, Some(fixture.at(60_000)), "the first deadline");
    send(fixture, first, "p", "pay", 50).await;
    let before = fixture.store.task_measures();
    let fired = fire(fixture, 60_020).await;
    assert_eq!(fired.deadlines_missed, 1, "the deadline of the second order");
    assert_eq!(fixture.store.task_measures().deadlines_missed, before.deadlines_missed + 1);
    assert_eq!(state(fixture, second).await, "EXPIRED");
    send(fixture, second, "p", "pay", 60_030).await;
    send(fixture, second, "p", "pay", 60_030).await;
    let after = fixture.store.task_measures();
    let more = |outcome| after.outcomes[outcome] - before.outcomes[outcome];
    assert_eq!((more("ignored"), more("duplicate"), more("applied")), (1, 1, 0));
    assert_eq!(after.commits.iter().sum::<u64>() - before.commits.iter().sum::<u64>(), 2);
    let states = fixture.store.task_figures().await.unwrap().states;
    let charging = states.iter().find(|one| one.machine == "order").unwrap();
    assert_eq!((charging.state.as_str(), charging.since), ("CHARGING", fixture.at(50)));
}

pub async fn a_key_creates_its_task_once(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(ORDER).unwrap());
    register(fixture, &definition).await;
    // Two nodes on PostgreSQL.
    let other = fixture.reopen(StoreOptions::default()).await;
    let fixtures = if fixture.store.database_kind() == "sqlite" { [&other, &other] } else { [fixture, &other] };
    let create_on = async |node: usize, key: &str, fingerprint: u8| {
        let task = unstored_task(fixture, &definition, json!({"amount": 5}), 1);
        let (id, key) = (task.id, TaskKey { key: key.into(), fingerprint: [fingerprint; 32] });
        (id, fixtures[node].store.task_create_once(key, task, fixture.at(1)).await.unwrap())
    };
    let create = async |key: &str, fingerprint: u8| create_on(1, key, fingerprint).await;
    let answers = futures_util::future::join_all((0..8).map(|n| create_on(n % 2, "k1", 7))).await;
    let created: Vec<TaskId> = answers.iter().filter(|(_, found)| found.is_none()).map(|(id, _)| *id).collect();
    assert_eq!(created.len(), 1, "{answers:?}");
    let same = KeyedTask { id: created[0], is_same_request: true };
    assert_eq!(answers.iter().filter(|(_, found)| *found == Some(same)).count(), 7, "{answers:?}");
    assert_eq!(create("k1", 8).await.1, Some(KeyedTask { is_same_request: false, ..same }));
    assert_eq!(create("k2", 7).await.1, None);
    let (tasks, _) = other.store.task_list(TaskFilter::default(), None, 10).await.unwrap();
    assert_eq!(tasks.len(), 2);
    // The key is deleted with its task.
    apply(&other, created[0], Input::Cancel { actor: "ana".into(), reason: None }, 5).await;
    assert_eq!(other.store.task_prune(fixture.at(10), 10).await.unwrap(), 1);
    assert_eq!(create("k1", 8).await.1, None);
    other.store.close().await;
}

pub async fn a_creation_that_fails_leaves_its_key_free(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(ORDER).unwrap());
    register(fixture, &definition).await;
    let existing = new_task(fixture, &definition, json!({"amount": 5}), 1).await;
    let key = || TaskKey { key: "k".into(), fingerprint: [7; 32] };
    let task = NewTask { id: existing, ..unstored_task(fixture, &definition, json!({"amount": 5}), 2) };
    fixture.store.task_create_once(key(), task, fixture.at(2)).await.unwrap_err();
    let task = unstored_task(fixture, &definition, json!({"amount": 5}), 3);
    assert_eq!(fixture.store.task_create_once(key(), task, fixture.at(3)).await.unwrap(), None);
}
