//! Sources that publish to RabbitMQ.

use std::{collections::HashSet, sync::Arc, time::Duration};

use faena_brokers::{BrokerUrl, rabbitmq::RabbitMqSinkOptions};
use faena_domain::Timestamp;
use faena_engine::{EngineConfig, Target};
use faena_store::Store;
use serde_json::json;

use super::application::{Application, LOCK, LOCK_IS_HELD, OutboxRow, SourceRunner, connect};
use crate::{
    fixture::{Fixture, TestDatabase, eventually, open_sqlite, unique},
    outbox::{
        destination::{Destination, Queue},
        support::{Broker, Proxy, required_variable},
    },
};

fn shared_broker_url() -> String {
    required_variable("FAENA_TEST_RABBITMQ")
}

fn target(url: &str, exchange: &str) -> Target {
    let options = RabbitMqSinkOptions::new(BrokerUrl::parse(url).unwrap(), exchange);
    Target::RabbitMq(RabbitMqSinkOptions { timeout: Duration::from_secs(3), ..options })
}

fn later(now: Timestamp, minutes: i64) -> Timestamp {
    now.plus_ms(minutes * 60_000)
}

/// Creates an application, a queue on a new exchange, and a source that relays from one to the other.
async fn setup(pattern: &str) -> (Application, Queue, SourceRunner, (Arc<dyn Store>, TestDatabase)) {
    let database = open_sqlite().await;
    let (application, exchange) = (Application::new().await, unique("app"));
    let queue = Queue::bound(&shared_broker_url(), &exchange, pattern).await;
    let runner = application.runner(&database.0, Some(target(&shared_broker_url(), &exchange)));
    (application, queue, runner, database)
}

#[tokio::test]
async fn one_source_publishes_everything_in_order_and_releases_the_lock() {
    let (application, queue, runner, _database) = setup("ticket.created").await;
    application.insert_many(120).await;
    assert_eq!(runner.drain(Timestamp::now()).await, 120, "several batches of 50 in one period");
    let arrived = queue.arrived().await;
    let numbers: Vec<i64> = arrived.iter().map(|message| message.body["number"].as_i64().unwrap()).collect();
    assert_eq!(numbers, (1..=120).collect::<Vec<i64>>());
    assert_eq!(arrived.iter().map(|message| &message.message_id).collect::<HashSet<_>>().len(), 120);
    assert_eq!((application.pending().await, application.count("\"ProcessedEvents\"").await), (0, 120));
    let free: bool = application.client.query_one("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await.unwrap().get(0);
    assert!(free);
}

#[tokio::test]
async fn of_two_sources_one_has_the_lock_and_the_other_waits() {
    let (application, queue, first, (store, _database)) = setup("#").await;
    let second = application.runner(&store, Some(target(&shared_broker_url(), &queue.exchange)));
    application.insert_many(60).await;
    let now = Timestamp::now();
    assert_eq!(first.round(now).await.handled, 50);
    assert_eq!(second.round(now).await.handled, 0, "another source has the lock");
    assert_eq!(first.drain(now).await, 10);
    application.insert_many(1).await;
    assert_eq!(second.drain(now).await, 1, "the lock is released when nothing is left");
    assert_eq!(queue.arrived().await.len(), 61);
}

#[tokio::test]
async fn a_broker_that_is_down_uses_no_attempts() {
    let mut broker = Broker::rabbitmq("").await;
    let queue = Queue::bound(&broker.url(), "app", "#").await;
    let (store, _database) = open_sqlite().await;
    let application = Application::new().await;
    application.insert_many(60).await;
    let runner = application.runner(&store, Some(target(&broker.url(), "app")));
    let now = Timestamp::now();
    broker.kill();
    for round in 0..12 {
        assert_eq!(runner.round(later(now, round)).await.handled, 0);
    }
    assert!(runner.round(later(now, 11).plus_ms(500)).await.next_at.is_some(), "it waits");
    assert_eq!((application.pending().await, application.attempts().await), (60, 0));
    broker.start().await;
    assert_eq!(runner.drain(later(now, 20)).await, 60);
    assert_eq!(queue.arrived().await.len(), 60);
}

#[tokio::test]
async fn a_connection_that_breaks_while_publishing_loses_nothing() {
    let broker = Broker::rabbitmq("").await;
    let proxy = Proxy::to(broker.port()).await;
    let queue = Queue::bound(&broker.url(), "app", "#").await;
    let (store, _database) = open_sqlite().await;
    let application = Application::new().await;
    application.insert_many(200).await;
    let runner = application.runner(&store, Some(target(&broker.url_with_port(proxy.port()), "app")));
    let now = Timestamp::now();
    proxy.cut_after(8_000);
    runner.drain(now).await;
    assert!(!proxy.is_open() && application.pending().await > 0, "the connection broke while publishing");
    proxy.restore();
    runner.drain(later(now, 1)).await;
    assert_eq!((application.pending().await, application.attempts().await), (0, 0));
    let ids: HashSet<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!(ids.len(), 200);
}

#[tokio::test]
async fn a_message_that_is_already_in_processed_events_is_marked_and_not_published() {
    let (application, queue, runner, _database) = setup("#").await;
    let id = application.insert("TicketCreatedEvent", json!({})).await;
    application
        .client
        .batch_execute("INSERT INTO \"ProcessedEvents\" SELECT \"Id\", now() FROM \"OutboxMessages\"")
        .await
        .unwrap();
    runner.drain(Timestamp::now()).await;
    assert!(application.row(&id).await.is_dispatched);
    assert_eq!(queue.arrived().await, []);
}

#[tokio::test]
async fn an_unroutable_row_uses_attempts_and_the_others_continue() {
    // `ticket.*` does not match `ticket.status.changed`.
    let (application, queue, runner, _database) = setup("ticket.*").await;
    let unroutable = application.insert("TicketFlow.Domain.Events.TicketStatusChangedEvent", json!({})).await;
    let good = application.insert("TicketCreatedEvent", json!({"a": 1})).await;
    let now = Timestamp::now();
    runner.drain(now).await;
    let reason = Some("no queue is bound for routing key \"ticket.status.changed\"".to_owned());
    assert_eq!(
        application.row(&unroutable).await,
        OutboxRow { is_dispatched: false, attempts: 1, error: reason.clone() }
    );
    assert!(application.row(&good).await.is_dispatched);
    assert_eq!(runner.drain(now.plus_ms(4_000)).await, 0, "it waits, and uses no attempt meanwhile");
    for minute in 1..10 {
        runner.drain(later(now, minute)).await;
    }
    assert_eq!(application.row(&unroutable).await, OutboxRow { is_dispatched: false, attempts: 5, error: reason });
    queue.bind("ticket.status.changed").await;
    application.client.batch_execute("UPDATE \"OutboxMessages\" SET \"Attempts\" = 0").await.unwrap();
    runner.drain(later(now, 20)).await;
    let ids: Vec<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!(ids, [good, unroutable]);
}

#[tokio::test]
async fn rows_with_an_invalid_payload_or_type_are_marked_with_the_reason() {
    let (application, queue, runner, _database) = setup("#").await;
    application.client.batch_execute("ALTER TABLE \"OutboxMessages\" ALTER \"PayloadJson\" TYPE text").await.unwrap();
    let insert = "INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\") VALUES ($1, $2) RETURNING \"Id\"::text";
    let mut ids: Vec<String> = Vec::new();
    for (kind, payload) in
        [("TicketCreatedEvent", "{\"a\":"), ("no key", "{}"), ("", "{}"), ("TicketCreatedEvent", "{}")]
    {
        ids.push(application.client.query_one(insert, &[&kind, &payload]).await.unwrap().get(0));
    }
    runner.drain(Timestamp::now()).await;
    let error = async |number: usize| application.row(&ids[number]).await.error.unwrap_or_default();
    assert!(error(0).await.starts_with("the payload is not JSON: EOF while parsing"), "{}", error(0).await);
    assert_eq!(error(1).await, "type \"no key\" has no routing key: it contains \" \"");
    assert_eq!(error(2).await, "type is empty and has no routing key");
    assert_eq!(queue.arrived().await.len(), 1);
}

#[tokio::test]
async fn rows_written_during_a_round_are_not_lost() {
    let (application, queue, runner, _database) = setup("#").await;
    let writers = (0..4).map(|writer| {
        let url = application.url.clone();
        tokio::spawn(async move {
            let client = connect(&url).await;
            for number in 0..100 {
                // Every fourth transaction is rolled back.
                let end = if number % 4 == 0 { "ROLLBACK" } else { "COMMIT" };
                let sql = format!(
                    "BEGIN; INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\") VALUES ('a.b', '{{\"w\": {writer}}}'); {end}"
                );
                client.batch_execute(&sql).await.unwrap();
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    while writers.iter().any(|writer| !writer.is_finished()) {
        runner.drain(Timestamp::now()).await;
    }
    runner.drain(Timestamp::now()).await;
    let ids: HashSet<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!((ids.len(), application.pending().await), (300, 0));
}

#[tokio::test]
async fn after_a_crash_between_publishing_and_marking_a_message_is_published_again_with_the_same_id() {
    let (application, queue, runner, (store, _database)) = setup("#").await;
    let id = application.insert("TicketCreatedEvent", json!({})).await;
    // The crash: a trigger ends the session that marks rows.
    application
        .client
        .batch_execute(
            "CREATE FUNCTION crash() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF current_setting('application_name') = 'faena outbox' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER crash BEFORE UPDATE ON \"OutboxMessages\" FOR EACH ROW EXECUTE FUNCTION crash()",
        )
        .await
        .unwrap();
    let now = Timestamp::now();
    assert_eq!(runner.round(now).await.handled, 0);
    assert_eq!((application.pending().await, application.count("\"ProcessedEvents\"").await), (1, 0));
    application.client.batch_execute("DROP TRIGGER crash ON \"OutboxMessages\"").await.unwrap();
    let second = application.runner(&store, Some(target(&shared_broker_url(), &queue.exchange)));
    assert_eq!(second.drain(now).await, 1);
    assert_eq!(runner.drain(later(now, 1)).await, 0, "it is never published after it is recorded");
    let ids: Vec<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!(ids, [id.clone(), id]);
}

/// Runs two servers with their loops, while an administrator ends database sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_sessions_lose_no_message_and_never_give_the_lock_to_two_servers() {
    let application = Application::new().await;
    let exchange = unique("app");
    let queue = Queue::bound(&shared_broker_url(), &exchange, "#").await;
    let config = || EngineConfig {
        sources: vec![application.config(Some(target(&shared_broker_url(), &exchange)))],
        ..EngineConfig::default()
    };
    let servers = [Fixture::with(config()).await, Fixture::with(config()).await];
    let mut ended = 0;
    for round in 1..=10 {
        application.insert_many(300).await;
        while application.pending().await > 0 {
            if application.end_lock_session().await {
                ended += 1;
                break;
            }
        }
        let locks = format!("pg_locks WHERE {LOCK_IS_HELD}");
        assert!(application.count(&locks).await <= 1, "round {round}");
    }
    eventually("everything is dispatched", async || (application.pending().await == 0).then_some(())).await;
    for server in &servers {
        server.stop().await;
    }
    assert_eq!(application.attempts().await, 0);
    let ids: HashSet<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!(ids.len(), 3_000);
    assert!(ended > 2, "only {ended} sessions had the lock when they were ended");
}
