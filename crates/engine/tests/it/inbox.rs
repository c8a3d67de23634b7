//! Inboxes: messages of a broker become jobs.

use std::sync::{Arc, atomic::Ordering};

use faena_brokers::{
    BrokerUrl,
    nats::NatsConsumerOptions,
    rabbitmq::{Binding, RabbitMqConsumerOptions},
};
use faena_domain::Priority;
use faena_engine::{Deliver, Engine, EngineConfig, InboxBroker, InboxConfig, JobTemplate};
use faena_store::{Store, Tally};
use lapin::{
    BasicProperties,
    options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};

use crate::{
    fixture::{Fixture, TestDatabase, eventually},
    outbox::{destination::channel, support::required_variable},
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

fn unique(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::now_v7().simple())
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

/// Publishes while the database rejects connections, and ends the outage when a message waits for the database.
async fn during_database_outage(engine: &Engine, database: &TestDatabase, publish: impl AsyncFnOnce()) {
    database.reject_connections().await;
    publish().await;
    eventually("a message waits for the database", async || {
        (engine.inputs.inboxes[0].waiting.load(Ordering::Relaxed) > 0).then_some(())
    })
    .await;
    database.accept_connections().await;
}

mod rabbitmq {
    use super::*;
    use crate::{
        fixture::{open_postgres, open_sqlite},
        outbox::support::{Broker, Proxy},
    };

    fn inbox_broker(url: &str, name: &str) -> InboxBroker {
        let options = RabbitMqConsumerOptions::new(BrokerUrl::parse(url).unwrap(), name);
        let bindings = vec![Binding { exchange: name.into(), pattern: "order.#".into() }];
        InboxBroker::RabbitMq(RabbitMqConsumerOptions { bindings, ..options })
    }

    async fn publish(url: &str, exchange: &str, messages: &[(Option<&str>, &[u8])]) {
        let (_connection, channel) = channel(url).await;
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        for (id, body) in messages {
            let mut headers = FieldTable::default();
            headers.insert("CorrelationId".into(), AMQPValue::LongString("order-7".into()));
            let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
            if let Some(id) = id {
                properties = properties.with_message_id((*id).into());
            }
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let key = "order.paid".into();
            channel.basic_publish(exchange.into(), key, options, body, properties).await.unwrap().await.unwrap();
        }
    }

    /// Waits until the inbox consumes from its queue.
    async fn wait_for_consumer(url: &str, queue: &str) {
        eventually("the inbox consumes from the queue", async || {
            let (_connection, channel) = channel(url).await;
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
            (queue.consumer_count() > 0).then_some(())
        })
        .await;
    }

    async fn message_count(url: &str, queue: &str) -> u32 {
        let (_connection, channel) = channel(url).await;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap().message_count()
    }

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
            publish(&url, &name, &messages).await;
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
        publish(&url, &name, &[(Some("before"), b"{}")]).await;
        during_database_outage(&engine, &database, async || {
            publish(&url, &name, &[(Some("1"), b"{}"), (Some("2"), b"{}"), (Some("1"), b"{}")]).await;
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
        publish(&broker.url(), "orders", &[(Some("1"), b"{}"), (Some("2"), b"{}")]).await;
        proxy.cut();
        publish(&broker.url(), "orders", &[(Some("3"), b"{}"), (Some("2"), b"{}")]).await;
        proxy.restore();
        wait_for_completed(&fixture.store, 3).await;
        broker.kill();
        broker.start().await;
        publish(&broker.url(), "orders", &[(Some("4"), b"{}"), (Some("1"), b"{}")]).await;
        wait_for_completed(&fixture.store, 4).await;
        fixture.stop().await;
    }
}

mod nats {
    use async_nats::jetstream::context::PublishErrorKind;

    use super::*;
    use crate::{
        fixture::{open_postgres, open_sqlite},
        outbox::support::Broker,
    };

    fn inbox_broker(url: &str, name: &str) -> InboxBroker {
        let url = BrokerUrl::parse(url).unwrap();
        let options = NatsConsumerOptions::new(url, name, format!("{name}.>"), format!("inbox-{name}"));
        InboxBroker::Nats(options)
    }

    async fn publish(url: &str, name: &str, messages: &[(Option<&str>, &str)]) {
        let context = async_nats::jetstream::new(async_nats::connect(url).await.unwrap());
        for (id, body) in messages {
            let mut headers = async_nats::HeaderMap::new();
            headers.insert("CorrelationId", "order-7");
            if let Some(id) = id {
                headers.insert("Nats-Msg-Id", *id);
            }
            // The NATS server reports a stream as existing before it accepts messages, so only an acknowledgement counts.
            // Without a stream the message is not stored, so it can be sent again.
            eventually("the stream accepts the message", async || {
                let published =
                    context.publish_with_headers(format!("{name}.paid"), headers.clone(), body.to_string().into());
                match published.await.unwrap().await {
                    Err(error) if error.kind() == PublishErrorKind::StreamNotFound => None,
                    answer => Some(answer.unwrap()),
                }
            })
            .await;
        }
    }

    #[tokio::test]
    async fn each_message_becomes_one_job_and_invalid_ones_are_dead_lettered() {
        let (url, name) = (required_variable("FAENA_TEST_NATS"), unique("inbox"));
        let fixture = Fixture::over(open_sqlite().await, config(inbox_broker(&url, &name))).await;
        // A message without an id is identified by its position in the stream, so the same text twice is two messages.
        let messages = [(Some("a"), "{}"), (None, "{}"), (None, "{}"), (Some("b"), "7")];
        publish(&url, &name, &messages).await;
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
        publish(&url, "orders", &[(Some("before"), "{}")]).await;
        during_database_outage(&engine, &database, async || {
            publish(&url, "orders", &[(Some("1"), "{}"), (Some("2"), "{}")]).await;
        })
        .await;
        wait_for_completed(&store, 3).await;
        broker.kill();
        broker.start().await;
        publish(&url, "orders", &[(Some("3"), "{}")]).await;
        wait_for_completed(&store, 4).await;
        engine.stop(tokio_util::sync::CancellationToken::new()).await;
    }
}
