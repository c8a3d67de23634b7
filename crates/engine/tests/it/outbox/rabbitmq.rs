//! Relays events to RabbitMQ.

use std::time::Duration;

use faena_brokers::{BrokerUrl, rabbitmq::RabbitMqSinkOptions};
use faena_domain::Timestamp;
use faena_engine::{SinkConfig, Target};
use faena_store::{DeadFilter, MAX_ATTEMPTS, OnRejected};
use lapin::{
    ExchangeKind,
    options::{ExchangeDeclareOptions, ExchangeDeleteOptions},
    types::FieldTable,
};

use super::{
    a_wrong_password_is_not_shown, assert_envelope, build_idle_engine, config,
    destination::{Destination, Queue, channel},
    events_of_a_job_arrive, faults_lose_nothing, sales, sell, sink, submit_many,
    support::{Broker, Proxy, required_variable},
    unique, view,
};
use crate::fixture::{Fixture, job, open_postgres, open_sqlite, submit};

fn shared_broker_url() -> String {
    required_variable("FAENA_TEST_RABBITMQ")
}

pub fn target(url: &str, exchange: &str) -> Target {
    let options = RabbitMqSinkOptions::new(BrokerUrl::parse(url).unwrap(), exchange);
    Target::RabbitMq(RabbitMqSinkOptions { timeout: Duration::from_secs(3), ..options })
}

#[tokio::test]
async fn events_of_a_job_arrive_as_cloud_events_in_order() {
    for database in [open_sqlite().await, open_postgres().await] {
        let exchange = unique("story");
        let queue = Queue::bound(&shared_broker_url(), &exchange, "#").await;
        let fixture = Fixture::over(database, config(vec![sink("bus", target(&shared_broker_url(), &exchange))])).await;
        events_of_a_job_arrive(&fixture, &queue).await;
        fixture.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_of_the_broker_loses_or_reorders_one_of_100_000_events() {
    let mut broker = Broker::rabbitmq("").await;
    let proxy = Proxy::to(broker.port()).await;
    let queue = Queue::bound(&broker.url(), "events", "#").await;
    let bus = sink("bus", target(&broker.url_with_port(proxy.port()), "events"));
    let fixture = Fixture::over(open_postgres().await, config(vec![bus])).await;
    faults_lose_nothing(&fixture, &mut broker, &proxy, &queue, 20_000).await;
    fixture.stop().await;
}

/// Runs the relay `rounds` times, each at a time when every message is due again.
async fn run_relay(engine: &std::sync::Arc<faena_engine::Engine>, now: Timestamp, rounds: i64) {
    for round in 0..rounds {
        engine.run_loop("relay:bus", now.plus_ms(round * 120_000)).await.unwrap();
    }
}

#[tokio::test]
async fn an_unroutable_message_is_dead_lettered_after_five_attempts_and_the_others_continue() {
    for (store, _database) in [open_sqlite().await, open_postgres().await] {
        let exchange = unique("unroutable");
        let queue = Queue::bound(&shared_broker_url(), &exchange, "job.status.*").await;
        let now = Timestamp::now();
        let engine = build_idle_engine(&store, vec![sink("bus", target(&shared_broker_url(), &exchange))], now).await;
        submit_many(&*store, 10).await;
        run_relay(&engine, now.plus_ms(60_000), 1).await;
        assert_eq!(queue.arrived().await.len(), 10, "the routable ones arrive immediately");
        assert_eq!((view(&*store, "bus").await.pending, view(&*store, "bus").await.dead), (10, 0));
        run_relay(&engine, now.plus_ms(600_000), i64::from(MAX_ATTEMPTS) - 1).await;
        let sink = view(&*store, "bus").await;
        assert_eq!((sink.pending, sink.dead, sink.down_since), (0, 10, None));
        let dead = store.outbox_dead(DeadFilter::default(), None, 100).await.unwrap();
        assert!(dead.iter().all(|letter| letter.event_type == "job.created" && letter.retry_count == MAX_ATTEMPTS));
        assert_eq!(dead[0].error_message, "no queue is bound for routing key \"job.created\"");

        queue.bind("job.created").await;
        let replayed = store.outbox_replay(DeadFilter::default(), None, "test", now.plus_ms(3_600_000)).await.unwrap();
        run_relay(&engine, now.plus_ms(3_700_000), 1).await;
        assert_eq!((replayed, queue.arrived().await.len()), (10, 10), "replayed");
    }
}

#[tokio::test]
async fn messages_behind_a_rejected_one_are_parked_until_it_is_resolved() {
    for (store, _database) in [open_sqlite().await, open_postgres().await] {
        let exchange = unique("parked");
        let queue = Queue::bound(&shared_broker_url(), &exchange, "job.status.*").await;
        let now = Timestamp::now();
        let bus = SinkConfig { on_rejected: OnRejected::Park, ..sink("bus", target(&shared_broker_url(), &exchange)) };
        let engine = build_idle_engine(&store, vec![bus], now).await;
        let parked = submit(&*store, job("noop", "{}")).await.to_string();
        run_relay(&engine, now.plus_ms(60_000), i64::from(MAX_ATTEMPTS) + 2).await;
        let sink = view(&*store, "bus").await;
        assert_eq!((sink.pending, sink.dead), (1, 1), "the next event of the job waits behind the dead letter");
        assert_eq!(queue.arrived().await, []);

        let later = now.plus_ms(3_600_000);
        assert_eq!(store.outbox_resolve(DeadFilter::default(), "reported by phone", "test", later).await.unwrap(), 1);
        run_relay(&engine, later, 1).await;
        let arrived = queue.arrived().await;
        assert_eq!(arrived.len(), 1);
        assert_eq!((arrived[0].text("subject"), arrived[0].text("sequence")), (parked.as_str(), "2"));
    }
}

#[tokio::test]
async fn events_of_machines_arrive_as_envelopes_under_their_names_in_order() {
    for (store, _database) in [open_sqlite().await, open_postgres().await] {
        let exchange = unique("sales");
        let queue = Queue::bound(&shared_broker_url(), &exchange, "Sale.Paid").await;
        queue.bind("sale.done").await;
        let now = Timestamp::now();
        let engine = build_idle_engine(&store, vec![sales(target(&shared_broker_url(), &exchange))], now).await;
        let tasks = [sell(&*store, 1, now).await, sell(&*store, 2, now).await];
        run_relay(&engine, now.plus_ms(60_000), 1).await;
        let arrived = queue.arrived().await;
        assert_eq!(arrived.len(), 4, "{arrived:?}");
        for (task, amount) in tasks.into_iter().zip([1, 2]) {
            let events = store.event_list(faena_store::EventQuery::Correlation(format!("sale-{amount}")), 100);
            let events = events.await.unwrap().into_iter().filter(|event| !event.kind.starts_with("task."));
            let sent: Vec<String> = events.map(|event| event.id.to_string()).collect();
            let of_task = arrived.iter().filter(|message| message.body["metadata"]["taskId"] == task.to_string());
            let of_task: Vec<_> = of_task.collect();
            assert_eq!(
                of_task.iter().map(|message| &message.message_id).collect::<Vec<_>>(),
                sent.iter().collect::<Vec<_>>()
            );
            of_task.iter().for_each(|message| assert_envelope(message, task, amount));
        }
        let sink = view(&*store, "bus").await;
        assert_eq!((sink.pending, sink.dead), (0, 0), "other events of tasks are not sent");
    }
}

#[tokio::test]
async fn a_rejected_event_of_a_task_stops_its_later_ones_only_if_they_are_parked() {
    for on_rejected in [OnRejected::Park, OnRejected::Skip] {
        for (store, _database) in [open_sqlite().await, open_postgres().await] {
            let exchange = unique("sales");
            // No queue is bound for Sale.Paid.
            let queue = Queue::bound(&shared_broker_url(), &exchange, "sale.done").await;
            let now = Timestamp::now();
            let bus = SinkConfig { on_rejected, ..sales(target(&shared_broker_url(), &exchange)) };
            let engine = build_idle_engine(&store, vec![bus], now).await;
            let task = sell(&*store, 1, now).await;
            run_relay(&engine, now.plus_ms(60_000), i64::from(MAX_ATTEMPTS) + 2).await;
            let dead = store.outbox_dead(DeadFilter::default(), None, 10).await.unwrap();
            assert_eq!(dead.len(), 1);
            assert_eq!(dead[0].error_message, "no queue is bound for routing key \"Sale.Paid\"");
            let later = now.plus_ms(3_600_000);
            if on_rejected == OnRejected::Park {
                assert_eq!((queue.arrived().await.len(), view(&*store, "bus").await.pending), (0, 1));
                assert_eq!(store.outbox_resolve(DeadFilter::default(), "by hand", "test", later).await.unwrap(), 1);
                run_relay(&engine, later, 1).await;
            }
            let arrived = queue.arrived().await;
            assert_eq!(arrived.len(), 1, "{arrived:?}");
            assert_envelope(&arrived[0], task, 1);
        }
    }
}

#[tokio::test]
async fn an_exchange_of_another_type_is_reported_and_its_events_wait() {
    let exchange = unique("fanout");
    let (_connection, channel) = channel(&shared_broker_url()).await;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel
        .exchange_declare(exchange.as_str().into(), ExchangeKind::Fanout, durable, FieldTable::default())
        .await
        .unwrap();
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let engine = build_idle_engine(&store, vec![sink("bus", target(&shared_broker_url(), &exchange))], now).await;
    submit_many(&*store, 1).await;
    run_relay(&engine, now, 3).await;
    let sink = view(&*store, "bus").await;
    let reason = sink.down_reason.unwrap();
    assert!(reason.contains(&exchange) && reason.contains("type"), "{reason}");
    assert_eq!((sink.pending, sink.dead), (2, 0));

    channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
    let queue = Queue::bound(&shared_broker_url(), &exchange, "#").await;
    run_relay(&engine, now.plus_ms(3_600_000), 1).await;
    assert_eq!(queue.arrived().await.len(), 2);
    assert_eq!(view(&*store, "bus").await.down_since, None);
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let url = shared_broker_url().replace("guest:guest", "guest:hush%2Fhush");
    a_wrong_password_is_not_shown(target(&url, "any"), &["hush/hush", "hush%2Fhush"]).await;
}

#[tokio::test]
async fn sent_events_can_be_republished() {
    for (store, _database) in [open_sqlite().await, open_postgres().await] {
        let exchange = unique("again");
        let queue = Queue::bound(&shared_broker_url(), &exchange, "#").await;
        let now = Timestamp::now();
        let engine = build_idle_engine(&store, vec![sink("bus", target(&shared_broker_url(), &exchange))], now).await;
        submit_many(&*store, 5).await;
        run_relay(&engine, now.plus_ms(60_000), 1).await;
        let first = queue.arrived().await;
        let what = faena_store::Republish {
            sink: "bus".into(),
            from: now.plus_ms(-60_000),
            to: now.plus_ms(60_000),
            event_type: None,
        };
        let count = store.outbox_republish(what, None, "test", now.plus_ms(120_000)).await.unwrap();
        run_relay(&engine, now.plus_ms(120_000), 1).await;
        let second = queue.arrived().await;
        assert_eq!((first.len(), second.len(), count), (10, 10, Some(10)));
        let ids = |all: &[super::Arrived]| {
            all.iter().map(|message| message.message_id.clone()).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(ids(&first), ids(&second), "with the same ids");
    }
}
