//! Inboxes for task events: messages from a broker reach their tasks exactly once.

use std::sync::Arc;

use faena_domain::{TaskId, Timestamp};
use faena_engine::{Deliver, Engine, EngineConfig, InboxBroker, InboxConfig, TaskEvents};
use faena_machine::{Definition, Outcome};
use faena_store::{InputState, InputView, NewMachine, Store, TaskFilter, TaskView};
use serde_json::{Value, json};

use crate::{
    fixture::{Fixture, eventually, open_postgres, open_sqlite, unique},
    inbox_messages::{InboxMessage, during_database_outage},
    outbox::support::{Broker, required_variable},
};

/// Returns a message with the event `kind`, which is also its routing key.
fn sent(kind: &str, body: &Value) -> InboxMessage {
    InboxMessage { key: kind.into(), body: body.to_string().into_bytes(), ..InboxMessage::default() }
}

fn envelope(task: Option<TaskId>, trace: &str, payload: Value) -> Value {
    let metadata = json!({"taskId": task, "traceId": trace, "timestamp": Timestamp::now(), "originator": "test"});
    json!({"metadata": metadata, "payload": payload})
}

/// Returns the message that creates a coding task whose plan needs no approval.
fn start(trace: &str) -> InboxMessage {
    let rules = json!({"requiereAprobacionPlan": false});
    let data = json!({"prompt": "p", "repositorioOrigen": "r", "reglas": rules});
    sent("tarea.crear", &envelope(None, trace, data))
}

fn event(task: TaskId, trace: &str, kind: &str, payload: Value) -> InboxMessage {
    sent(kind, &envelope(Some(task), trace, payload))
}

fn plan(task: TaskId, trace: &str) -> InboxMessage {
    event(task, trace, "resultado.plan_generado", json!({"planId": "1", "plan": "do it"}))
}

fn change(task: TaskId, trace: &str) -> InboxMessage {
    event(task, trace, "resultado.pr_generada", json!({"pullRequestUrl": "u"}))
}

fn config(broker: InboxBroker, machine: &str, subject_prefix: &str) -> EngineConfig {
    let rule = TaskEvents { machine: Some(machine.into()), subject_prefix: subject_prefix.into() };
    let inbox = InboxConfig { name: "events".into(), broker, deliver: Deliver::TaskEvents(rule) };
    EngineConfig { inboxes: vec![inbox], ..EngineConfig::default() }
}

fn inbox_view(engine: &Engine) -> InputView {
    engine.inputs.inboxes[0].view()
}

/// Waits until the inbox has processed exactly these messages.
async fn wait_for_counts(engine: &Engine, expected: &[(&str, u64)]) {
    eventually(&format!("the inbox has counted {expected:?}"), async || {
        let processed = inbox_view(engine).processed;
        expected.iter().all(|(outcome, count)| processed[*outcome] == *count).then_some(())
    })
    .await;
}

async fn tasks(store: &Arc<dyn Store>) -> Vec<TaskView> {
    store.task_list(TaskFilter::default(), None, 1_000).await.unwrap().0
}

async fn wait_for_tasks(store: &Arc<dyn Store>, count: usize) -> Vec<TaskId> {
    let found = eventually(&format!("there are {count} tasks"), async || {
        // The database may be down.
        let found = store.task_list(TaskFilter::default(), None, 1_000).await.ok()?.0;
        assert!(found.len() <= count, "more tasks than messages that start one");
        (found.len() == count).then_some(found)
    })
    .await;
    found.iter().map(|task| task.task.id.parse().unwrap()).collect()
}

async fn wait_for_state(store: &Arc<dyn Store>, task: TaskId, state: &str) {
    eventually(&format!("the task is in {state}"), async || {
        let found = store.task_get(task).await.ok()??.task.state();
        (found == state).then_some(())
    })
    .await;
}

/// Returns what each event with an id did to a task, in order.
async fn outcomes(store: &Arc<dyn Store>, task: TaskId) -> Vec<(String, Outcome)> {
    let history = store.task_history(task, 0, 1_000).await.unwrap();
    history.into_iter().filter(|record| !record.event_id.is_empty()).map(|one| (one.event_id, one.outcome)).collect()
}

/// Messages that can never reach a task, and what the reason for each contains.
fn invalid(task: TaskId) -> Vec<(InboxMessage, &'static str)> {
    let unknown = TaskId::new();
    let large = json!({"planId": "1", "plan": "x".repeat(2 << 20)});
    vec![
        (InboxMessage { body: b"{".to_vec(), ..sent("resultado.plan_generado", &json!({})) }, "is not JSON"),
        (sent("resultado.plan_generado", &json!({"planId": "1"})), "metadata: is required"),
        (event(unknown, "i1", "resultado.plan_generado", json!({"planId": "1", "plan": 1})), "there is no task"),
        (event(task, "i2", "resultado.plan_generado", json!({"plan": 1})), "planId"),
        (event(task, "i3", "resultado.otra", json!({})), "has no event"),
        (event(task, "i4", "resultado.plan_generado", large), "the limit is"),
        (sent("resultado.pr_generada", &envelope(None, "i5", json!({}))), "only the event tarea.crear of coding-task"),
        (sent("tarea.crear", &envelope(None, "i6", json!({"prompt": "p"}))), "repositorioOrigen"),
        (event(task, "i7", "tarea.generar_plan", json!({"prompt": "p"})), "does not handle it"),
    ]
}

/// Sends the messages of a whole task, some twice and some in the wrong order, and checks what they did.
async fn complete_a_task(fixture: &Fixture, publish: impl AsyncFn(Vec<InboxMessage>)) -> TaskId {
    let (store, engine) = (&fixture.store, &fixture.engine);
    let with_id = InboxMessage { id: Some("another id".into()), ..start("t1") };
    publish(vec![start("t1"), with_id]).await;
    let task = wait_for_tasks(store, 1).await[0];
    wait_for_counts(engine, &[("created", 1), ("duplicate", 1)]).await;
    let created = store.task_get(task).await.unwrap().unwrap();
    assert_eq!((created.correlation.as_str(), created.task.created_by.as_str()), ("t1", "inbox:events"));
    // The change arrives before the plan, and the plan twice.
    publish(vec![change(task, "e2"), plan(task, "e1"), plan(task, "e1")]).await;
    wait_for_state(store, task, "PROBANDO_INTEGRACION").await;
    let own = json!({"metadata": {"taskId": task, "traceId": "own", "originator": "faena"}, "payload": {}});
    let result = envelope(Some(task), "e3", json!({"exito": true}));
    let wrapped = json!({"specversion": "1.0", "id": "ce", "source": "/test", "type": "resultado.integracion_finalizada", "data": result});
    publish(vec![sent("tarea.generar_plan", &own), sent("any.key", &wrapped)]).await;
    wait_for_state(store, task, "COMPLETADA").await;
    let late = change(task, "e4");
    publish(vec![InboxMessage { kind: Some(late.key), key: "any.key".into(), ..late }]).await;
    let expected = [
        ("created", 1),
        ("applied", 2),
        ("deferred", 1),
        ("ignored", 1),
        ("own", 1),
        ("duplicate", 2),
        ("rejected", 0),
    ];
    wait_for_counts(engine, &expected).await;
    let (applied, deferred, ignored) = (Outcome::Applied, Outcome::Deferred, Outcome::Ignored);
    let expected = [("e2", deferred), ("e1", applied), ("e2", applied), ("e3", applied), ("e4", ignored)];
    let found = outcomes(store, task).await;
    assert_eq!(found.iter().map(|(id, outcome)| (id.as_str(), *outcome)).collect::<Vec<_>>(), expected);
    task
}

mod rabbitmq {
    use lapin::{options::BasicGetOptions, types::AMQPValue};

    use super::*;
    use crate::{
        inbox_messages::rabbitmq::{inbox_broker, message_count, publish, wait_for_consumer},
        outbox::{destination::channel, support::Proxy},
    };

    /// Returns the reasons of all messages in a dead-letter queue.
    async fn reasons(url: &str, queue: &str) -> Vec<String> {
        let (_connection, channel) = channel(url).await;
        let mut reasons = Vec::new();
        while let Some(message) = channel.basic_get(queue.into(), BasicGetOptions::default()).await.unwrap() {
            let headers = message.properties.headers().clone().unwrap_or_default();
            let Some(AMQPValue::LongString(reason)) = headers.inner().get("x-reason") else { panic!("no reason") };
            reasons.push(reason.to_string());
        }
        reasons
    }

    #[tokio::test]
    async fn messages_reach_their_task_once_and_invalid_ones_are_dead_lettered_with_the_reason() {
        for database in [open_sqlite().await, open_postgres().await] {
            let (url, name) = (required_variable("FAENA_TEST_RABBITMQ"), unique("task-events"));
            let fixture = Fixture::over(database, config(inbox_broker(&url, &name), "coding-task", "")).await;
            wait_for_consumer(&url, &name).await;
            let task = complete_a_task(&fixture, async |messages| publish(&url, &name, messages).await).await;
            publish(&url, &name, vec![start("t2")]).await;
            let open = wait_for_tasks(&fixture.store, 2).await.into_iter().find(|id| *id != task).unwrap();
            let (invalid, mut expected): (Vec<InboxMessage>, Vec<&str>) = invalid(open).into_iter().unzip();
            let count = invalid.len() as u64;
            publish(&url, &name, invalid).await;
            let mut without_id = plan(open, "x");
            without_id.body = json!({"metadata": {"taskId": open}, "payload": {}}).to_string().into_bytes();
            publish(&url, &name, vec![without_id]).await;
            wait_for_counts(&fixture.engine, &[("created", 2), ("rejected", count + 1)]).await;
            eventually("the invalid messages are in the dead-letter queue", async || {
                (u64::from(message_count(&url, &format!("{name}.dead")).await) == count + 1).then_some(())
            })
            .await;
            expected.push("metadata.traceId: is required");
            let found = reasons(&url, &format!("{name}.dead")).await;
            for part in expected {
                assert!(found.iter().any(|reason| reason.contains(part)), "{part} is not in {found:?}");
            }
            assert_eq!(outcomes(&fixture.store, open).await, [], "an invalid message changes nothing");
            fixture.stop().await;
            assert_eq!(message_count(&url, &name).await, 0, "all messages are acknowledged");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_database_outage_neither_loses_nor_duplicates_messages() {
        let (url, name) = (required_variable("FAENA_TEST_RABBITMQ"), unique("task-events"));
        let (store, database) = open_postgres().await;
        let engine = Engine::start(store.clone(), config(inbox_broker(&url, &name), "coding-task", "")).await.unwrap();
        wait_for_consumer(&url, &name).await;
        publish(&url, &name, vec![start("t1")]).await;
        let task = wait_for_tasks(&store, 1).await[0];
        during_database_outage(&engine, &database, async || {
            let messages = vec![plan(task, "e1"), start("t2"), change(task, "e2"), start("t2"), plan(task, "e1")];
            publish(&url, &name, messages).await;
        })
        .await;
        wait_for_state(&store, task, "PROBANDO_INTEGRACION").await;
        wait_for_tasks(&store, 2).await;
        let expected = [("e1".to_owned(), Outcome::Applied), ("e2".to_owned(), Outcome::Applied)];
        assert_eq!(outcomes(&store, task).await, expected, "in the order in which they were sent");
        engine.stop(tokio_util::sync::CancellationToken::new()).await;
        assert_eq!(message_count(&url, &format!("{name}.dead")).await, 0, "an outage rejects no message");
        assert_eq!(tasks(&store).await.len(), 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lost_connection_and_a_killed_broker_lose_and_duplicate_nothing() {
        let mut broker = Broker::rabbitmq("").await;
        let proxy = Proxy::to(broker.port()).await;
        let inbox = inbox_broker(&broker.url_with_port(proxy.port()), "events");
        let fixture = Fixture::over(open_sqlite().await, config(inbox, "coding-task", "")).await;
        wait_for_consumer(&broker.url(), "events").await;
        publish(&broker.url(), "events", vec![start("t1")]).await;
        let task = wait_for_tasks(&fixture.store, 1).await[0];
        proxy.cut();
        publish(&broker.url(), "events", vec![start("t2"), plan(task, "e1"), start("t1")]).await;
        proxy.restore();
        wait_for_tasks(&fixture.store, 2).await;
        wait_for_state(&fixture.store, task, "EJECUTANDO_CODIGO.INICIANDO").await;
        broker.kill();
        broker.start().await;
        publish(&broker.url(), "events", vec![change(task, "e2"), start("t3"), plan(task, "e1")]).await;
        wait_for_tasks(&fixture.store, 3).await;
        wait_for_state(&fixture.store, task, "PROBANDO_INTEGRACION").await;
        fixture.stop().await;
        let expected = [("e1".to_owned(), Outcome::Applied), ("e2".to_owned(), Outcome::Applied)];
        assert_eq!(outcomes(&fixture.store, task).await, expected);
        assert_eq!(tasks(&fixture.store).await.len(), 3);
    }

    #[tokio::test]
    async fn a_message_that_starts_a_task_waits_for_its_machine() {
        let (url, name) = (required_variable("FAENA_TEST_RABBITMQ"), unique("task-events"));
        let fixture = Fixture::over(open_sqlite().await, config(inbox_broker(&url, &name), "order", "")).await;
        wait_for_consumer(&url, &name).await;
        publish(&url, &name, vec![sent("order.placed", &envelope(None, "t1", json!({"amount": 5})))]).await;
        let reason = eventually("the inbox is down", async || inbox_view(&fixture.engine).down_reason).await;
        assert!(reason.contains("machine \"order\" is not registered; register it with"), "{reason}");
        let definition = "
machine: order
version: 1
start: order.placed
events: {order.placed: {}}
initial: NEW
states: {NEW: {forever: true, on: {order.placed: PLACED}}, PLACED: {final: true}}
";
        let machine = NewMachine { definition: Arc::new(Definition::parse(definition).unwrap()) };
        fixture.store.machine_register(machine, "ana", Timestamp::now()).await.unwrap();
        let task = wait_for_tasks(&fixture.store, 1).await[0];
        wait_for_state(&fixture.store, task, "PLACED").await;
        eventually("the inbox is up", async || (inbox_view(&fixture.engine).state == InputState::Up).then_some(()))
            .await;
        fixture.stop().await;
    }
}

mod nats {
    use futures_util::StreamExt;

    use super::*;
    use crate::inbox_messages::nats::{inbox_broker, publish};

    /// Returns the reasons of the dead letters, in order.
    async fn reasons(url: &str, name: &str) -> Vec<String> {
        let context = async_nats::jetstream::new(async_nats::connect(url).await.unwrap());
        let mut stream = context.get_stream(format!("{name}-inbox-{name}-dead")).await.unwrap();
        let count = stream.info().await.unwrap().state.messages as usize;
        let ordered = async_nats::jetstream::consumer::pull::OrderedConfig::default();
        let reader = stream.create_consumer(ordered).await.unwrap();
        let reasons = reader.messages().await.unwrap().take(count);
        reasons
            .map(|message| message.unwrap().headers.as_ref().unwrap().get("x-reason").unwrap().to_string())
            .collect()
            .await
    }

    #[tokio::test]
    async fn messages_reach_their_task_once_and_invalid_ones_are_dead_lettered_with_the_reason() {
        let mut broker = Broker::nats("max_payload: 8MB\n").await;
        for database in [open_sqlite().await, open_postgres().await] {
            let (url, name) = (broker.url(), unique("task-events"));
            let fixture = Fixture::over(database, config(inbox_broker(&url, &name), "coding-task", &name)).await;
            let task = complete_a_task(&fixture, async |messages| publish(&url, &name, messages).await).await;
            publish(&url, &name, vec![start("t2")]).await;
            let open = wait_for_tasks(&fixture.store, 2).await.into_iter().find(|id| *id != task).unwrap();
            // One after another, so that the dead letters are in this order.
            let invalid = invalid(open);
            for (number, (message, _)) in invalid.iter().enumerate() {
                publish(&url, &name, vec![message.clone()]).await;
                wait_for_counts(&fixture.engine, &[("rejected", number as u64 + 1)]).await;
            }
            let found = reasons(&url, &name).await;
            assert_eq!(found.len(), invalid.len());
            for (found, (_, expected)) in found.iter().zip(&invalid) {
                assert!(found.contains(expected), "{found} does not contain {expected}");
            }
            assert_eq!(outcomes(&fixture.store, open).await, [], "an invalid message changes nothing");
            fixture.stop().await;
        }
        broker.kill();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn outages_of_database_and_broker_neither_lose_nor_duplicate_messages() {
        let mut broker = Broker::nats("").await;
        let (store, database) = open_postgres().await;
        let inbox = config(inbox_broker(&broker.url(), "tasks"), "coding-task", "tasks");
        let engine = Engine::start(store.clone(), inbox).await.unwrap();
        let url = broker.url();
        publish(&url, "tasks", vec![start("t1")]).await;
        let task = wait_for_tasks(&store, 1).await[0];
        during_database_outage(&engine, &database, async || {
            let messages = vec![plan(task, "e1"), start("t2"), change(task, "e2"), start("t2")];
            publish(&url, "tasks", messages).await;
        })
        .await;
        wait_for_state(&store, task, "PROBANDO_INTEGRACION").await;
        wait_for_tasks(&store, 2).await;
        broker.kill();
        broker.start().await;
        publish(&url, "tasks", vec![start("t3"), plan(task, "e1")]).await;
        wait_for_tasks(&store, 3).await;
        let expected = [("e1".to_owned(), Outcome::Applied), ("e2".to_owned(), Outcome::Applied)];
        assert_eq!(outcomes(&store, task).await, expected);
        engine.stop(tokio_util::sync::CancellationToken::new()).await;
        assert_eq!(tasks(&store).await.len(), 3);
    }
}
