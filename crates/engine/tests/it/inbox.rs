//! Inboxes: messages from a broker become jobs.

use std::sync::{Arc, atomic::Ordering};

use faena_domain::Priority;
use faena_engine::{Deliver, Engine, EngineConfig, InboxBroker, InboxConfig, JobTemplate};
use faena_store::{Store, Tally};

use crate::{
    fixture::{Fixture, eventually, open_postgres, open_sqlite, unique},
    inbox_messages::{InboxMessage, during_database_outage},
    outbox::support::{Broker, required_variable},
    sources::application::all_jobs,
};

fn config(broker: InboxBroker) -> EngineConfig {
    let inbox = InboxConfig {
        name: "orders".into(),
        broker,
        deliver: Deliver::Jobs(JobTemplate {
            job_type: "noop".into(),
            queue: Some("shipping".into()),
            priority: Some(Priority::High),
        }),
    };
    EngineConfig { inboxes: vec![inbox], ..EngineConfig::default() }
}

/// Returns messages with these ids and bodies.
fn orders(messages: &[(Option<&str>, &[u8])]) -> Vec<InboxMessage> {
    let message = |&(id, body): &(Option<&str>, &[u8])| InboxMessage {
        key: "order.paid".into(),
        id: id.map(str::to_owned),
        correlation: Some("order-7"),
        body: body.to_vec(),
        ..InboxMessage::default()
    };
    messages.iter().map(message).collect()
}

async fn wait_for_completed(store: &Arc<dyn Store>, count: i64) {
    eventually(&format!("{count} jobs are completed"), async || {
        let counts = store.counts().await.ok()?;
        assert!(counts.total(Tally::Completed) <= count, "more jobs than messages");
        (counts.total(Tally::Completed) == count).then_some(())
    })
    .await;
}

/// Returns the counts of the inbox: jobs, duplicates, rejected messages.
fn inbox_counts(fixture: &Fixture) -> (u64, u64, u64) {
    let inbox = &fixture.engine.inputs.inboxes[0];
    let value = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    (value(&inbox.jobs), value(&inbox.duplicates), value(&inbox.rejected))
}

mod rabbitmq {
    use super::*;
    use crate::{
        inbox_messages::rabbitmq::{inbox_broker, message_count, publish, wait_for_consumer},
        outbox::support::Proxy,
    };

    #[tokio::test]
    async fn each_message_becomes_one_job_and_invalid_ones_are_dead_lettered() {
        for database in [open_sqlite().await, open_postgres().await] {
            let (url, name) = (required_variable("FAENA_TEST_RABBITMQ"), unique("inbox"));
            let fixture = Fixture::over(database, config(inbox_broker(&url, &name))).await;
            wait_for_consumer(&url, &name).await;
            let messages: [(Option<&str>, &[u8]); 8] = [
                (Some("a"), b"{\"order\":1}"),
                (Some("a"), b"{\"order\":1}"),
                (None, b"{\"order\":2}"),
                (None, b"{\"order\":2}"),
                (Some("b"), b"{\"order\":"),
                (Some("c"), b"[1]"),
                (Some("d"), b"\xff\xfe"),
                (Some("e"), b"{\"order\":3}"),
            ];
            publish(&url, &name, orders(&messages)).await;
            wait_for_completed(&fixture.store, 3).await;
            eventually("all messages are processed", async || (inbox_counts(&fixture) == (3, 2, 3)).then_some(()))
                .await;
            eventually("the invalid messages are in the dead-letter queue", async || {
                (message_count(&url, &format!("{name}.dead")).await == 3).then_some(())
            })
            .await;
            let job = all_jobs(&fixture.store).await.remove(0);
            assert_eq!((job.correlation_id.as_str(), job.priority), ("order-7", Priority::High));
            fixture.stop().await;
            assert_eq!(message_count(&url, &name).await, 0, "all messages are acknowledged");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_database_outage_neither_loses_nor_duplicates_messages() {
        let (url, name) = (required_variable("FAENA_TEST_RABBITMQ"), unique("inbox"));
        let (store, database) = open_postgres().await;
        let engine = Engine::start(store.clone(), config(inbox_broker(&url, &name))).await.unwrap();
        wait_for_consumer(&url, &name).await;
        publish(&url, &name, orders(&[(Some("before"), b"{}")])).await;
        during_database_outage(&engine, &database, async || {
            publish(&url, &name, orders(&[(Some("1"), b"{}"), (Some("2"), b"{}"), (Some("1"), b"{}")])).await;
        })
        .await;
        wait_for_completed(&store, 3).await;
        engine.stop(tokio_util::sync::CancellationToken::new()).await;
        assert_eq!(message_count(&url, &format!("{name}.dead")).await, 0, "an outage rejects no message");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_inbox_reconnects_to_a_killed_broker_and_duplicates_nothing() {
        let mut broker = Broker::rabbitmq("").await;
        let proxy = Proxy::to(broker.port()).await;
        let fixture =
            Fixture::over(open_sqlite().await, config(inbox_broker(&broker.url_with_port(proxy.port()), "orders")))
                .await;
        wait_for_consumer(&broker.url(), "orders").await;
        publish(&broker.url(), "orders", orders(&[(Some("1"), b"{}"), (Some("2"), b"{}")])).await;
        proxy.cut();
        publish(&broker.url(), "orders", orders(&[(Some("3"), b"{}"), (Some("2"), b"{}")])).await;
        proxy.restore();
        wait_for_completed(&fixture.store, 3).await;
        broker.kill();
        broker.start().await;
        publish(&broker.url(), "orders", orders(&[(Some("4"), b"{}"), (Some("1"), b"{}")])).await;
        wait_for_completed(&fixture.store, 4).await;
        fixture.stop().await;
    }
}

mod nats {
    use super::*;
    use crate::inbox_messages::nats::{inbox_broker, publish};

    #[tokio::test]
    async fn each_message_becomes_one_job_and_invalid_ones_are_dead_lettered() {
        let (url, name) = (required_variable("FAENA_TEST_NATS"), unique("inbox"));
        let fixture = Fixture::over(open_sqlite().await, config(inbox_broker(&url, &name))).await;
        // A message without an id is identified by its position in the stream, so the same text twice is two messages.
        let messages: [(Option<&str>, &[u8]); 4] =
            [(Some("a"), b"{}"), (None, b"{}"), (None, b"{}"), (Some("b"), b"7")];
        publish(&url, &name, orders(&messages)).await;
        wait_for_completed(&fixture.store, 3).await;
        eventually("all messages are processed", async || (inbox_counts(&fixture) == (3, 0, 1)).then_some(())).await;
        let context = async_nats::jetstream::new(async_nats::connect(&url).await.unwrap());
        let dead = context.get_stream(format!("{name}-inbox-{name}-dead")).await.unwrap();
        assert_eq!(dead.cached_info().state.messages, 1);
        fixture.stop().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn outages_of_database_and_broker_neither_lose_nor_duplicate_messages() {
        let mut broker = Broker::nats("").await;
        let (store, database) = open_postgres().await;
        let engine = Engine::start(store.clone(), config(inbox_broker(&broker.url(), "orders"))).await.unwrap();
        let url = broker.url();
        publish(&url, "orders", orders(&[(Some("before"), b"{}")])).await;
        during_database_outage(&engine, &database, async || {
            publish(&url, "orders", orders(&[(Some("1"), b"{}"), (Some("2"), b"{}")])).await;
        })
        .await;
        wait_for_completed(&store, 3).await;
        broker.kill();
        broker.start().await;
        publish(&url, "orders", orders(&[(Some("3"), b"{}")])).await;
        wait_for_completed(&store, 4).await;
        engine.stop(tokio_util::sync::CancellationToken::new()).await;
    }
}
