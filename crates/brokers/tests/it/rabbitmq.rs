//! Tests of the RabbitMQ sink and consumer.

use std::time::{Duration, Instant};

use faena_brokers::{
    BrokerUrl, Consumer, Declare, PublishOutcome, Sink,
    rabbitmq::{Binding, RabbitMqConsumer, RabbitMqConsumerOptions, RabbitMqSink, RabbitMqSinkOptions},
};
use futures_util::StreamExt;
use lapin::{
    Channel, Connection, ConnectionProperties, ExchangeKind,
    message::Delivery,
    options::{
        BasicConsumeOptions, BasicPublishOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions,
        QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable},
};

use crate::{
    messages::{
        assert_all_arrived, assert_no_duplicates, assert_notices_silence, assert_resumes, message, message_of_kind,
        message_of_size, messages, outage, publish_through_kills, rejection, unique,
    },
    support::{Broker, Proxy, required_variable},
};

fn shared_broker_url() -> String {
    required_variable("FAENA_TEST_RABBITMQ")
}

fn parsed(url: &str) -> BrokerUrl {
    BrokerUrl::parse(url).unwrap()
}

fn options(url: &str, exchange: &str) -> RabbitMqSinkOptions {
    RabbitMqSinkOptions { timeout: Duration::from_secs(60), ..RabbitMqSinkOptions::new(parsed(url), exchange) }
}

/// The test's own connection, separate from the code under test.
struct TestClient {
    _connection: Connection,
    channel: Channel,
}

impl TestClient {
    async fn connect(url: &str) -> TestClient {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        TestClient { _connection: connection, channel }
    }

    async fn create_exchange(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        self.channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await.unwrap();
    }

    /// Creates a durable queue bound with the pattern, and returns its name.
    async fn create_queue(&self, exchange: &str, pattern: &str) -> String {
        self.create_exchange(exchange, ExchangeKind::Topic).await;
        let queue = format!("{exchange}-queue");
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(queue.as_str().into(), durable, FieldTable::default()).await.unwrap();
        let (queue_name, exchange) = (queue.as_str().into(), exchange.into());
        self.channel
            .queue_bind(queue_name, exchange, pattern.into(), QueueBindOptions::default(), FieldTable::default())
            .await
            .unwrap();
        queue
    }

    async fn message_count(&self, queue: &str) -> u32 {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap().message_count()
    }

    /// Consumes every message in the queue.
    async fn drain(&self, queue: &str) -> Vec<Delivery> {
        let count = self.message_count(queue).await as usize;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let consumer =
            self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await.unwrap();
        consumer.take(count).map(Result::unwrap).collect().await
    }

    async fn drain_ids(&self, queue: &str) -> Vec<String> {
        let arrived = self.drain(queue).await;
        arrived.iter().map(|delivery| delivery.properties.message_id().clone().unwrap().to_string()).collect()
    }

    async fn wait_for(&self, queue: &str, count: u32) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.message_count(queue).await != count {
            assert!(Instant::now() < deadline, "{queue} never had {count} messages");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let (client, exchange) = (TestClient::connect(&shared_broker_url()).await, unique("many"));
    let queue = client.create_queue(&exchange, "job.#").await;
    let sink = RabbitMqSink::new(options(&shared_broker_url(), &exchange));
    let report = sink.publish(&messages(10_000)).await;
    assert_eq!((report.confirmed(), &report.outage), (10_000, &None));
    let arrived = client.drain_ids(&queue).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn a_message_carries_the_fields_that_receivers_need() {
    let (client, exchange) = (TestClient::connect(&shared_broker_url()).await, unique("fields"));
    let queue = client.create_queue(&exchange, "ticket.status.changed").await;
    let kind = "TicketFlow.Domain.Events.TicketStatusChangedEvent";
    let report = RabbitMqSink::new(options(&shared_broker_url(), &exchange)).publish(&[message_of_kind(5, kind)]).await;
    assert_eq!(report.outcomes, [Some(PublishOutcome::Confirmed)]);
    let delivery = client.drain(&queue).await.remove(0);
    let properties = &delivery.properties;
    assert_eq!(delivery.routing_key.as_str(), "ticket.status.changed");
    assert_eq!(delivery.data, br#"{"number":5}"#);
    assert_eq!(properties.delivery_mode(), &Some(2));
    assert_eq!(properties.timestamp(), &Some(1_700_000_000));
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "id-5");
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), kind);
    assert_eq!(properties.correlation_id().as_ref().unwrap().as_str(), "c-1");
    assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
    let headers = properties.headers().as_ref().unwrap().inner();
    assert_eq!(headers["Type"], AMQPValue::LongString(kind.into()));
    assert_eq!(headers["CorrelationId"], AMQPValue::LongString("c-1".into()));
    assert_eq!(headers["Timestamp"], AMQPValue::LongLongInt(1_700_000_000));
    assert_eq!(headers["x-seq"], AMQPValue::LongLongInt(5));
    assert!(headers.contains_key("traceparent"));
}

#[tokio::test]
async fn a_message_that_no_queue_accepts_is_rejected_and_the_others_are_confirmed() {
    let (client, exchange) = (TestClient::connect(&shared_broker_url()).await, unique("unroutable"));
    let queue = client.create_queue(&exchange, "job.#").await;
    let mut mixed = messages(3_000);
    for number in (0..3_000).step_by(7) {
        mixed[number].kind = "unbound.key".into();
    }
    let report = RabbitMqSink::new(options(&shared_broker_url(), &exchange)).publish(&mixed).await;
    assert_eq!(report.outage, None);
    for (number, outcome) in report.outcomes.iter().enumerate() {
        if number % 7 == 0 {
            assert_eq!(rejection(outcome), "no queue is bound for routing key \"unbound.key\"");
        } else {
            assert_eq!(outcome, &Some(PublishOutcome::Confirmed), "{number}");
        }
    }
    assert_eq!(client.message_count(&queue).await as usize, report.confirmed());
}

#[tokio::test]
async fn a_message_without_a_routing_key_is_rejected_without_asking_the_broker() {
    let sink = RabbitMqSink::new(options("amqp://127.0.0.1:1", "none"));
    let report = sink.publish(&[message_of_kind(1, "no key"), message_of_kind(2, "")]).await;
    assert_eq!(report.outage, None);
    assert!(rejection(&report.outcomes[0]).contains("no routing key"));
    assert!(rejection(&report.outcomes[1]).contains("no routing key"));
}

#[tokio::test]
async fn a_message_that_is_too_large_is_rejected_and_the_next_call_delivers_the_others() {
    let broker = Broker::rabbitmq("max_message_size = 100000").await;
    let client = TestClient::connect(&broker.url()).await;
    let queue = client.create_queue("sized", "job.#").await;
    let sink = RabbitMqSink::new(options(&broker.url(), "sized"));
    let mixed = [message(0), message_of_size(1, 200_000), message(2)];
    let report = sink.publish(&mixed).await;
    assert_eq!(report.outage, None, "the broker works");
    assert_eq!(rejection(&report.outcomes[1]), "body has 200000 bytes; the broker accepts at most 100000");
    let unknown: Vec<_> = mixed
        .iter()
        .zip(&report.outcomes)
        .filter(|(_, outcome)| outcome.is_none())
        .map(|(message, _)| message.clone())
        .collect();
    assert_eq!(sink.publish(&unknown).await.confirmed(), unknown.len());
    // The sink knows the limit now, so the channel stays open.
    let report = sink.publish(&[message_of_size(3, 200_000), message(4)]).await;
    assert_eq!((report.confirmed(), report.outage), (1, None));
    let mut arrived = client.drain_ids(&queue).await;
    arrived.sort();
    arrived.dedup();
    assert_eq!(arrived, ["id-0", "id-2", "id-4"]);
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let url = shared_broker_url().replace("guest:guest", "guest:hush%2Fhush");
    let report = RabbitMqSink::new(options(&url, "any")).publish(&messages(2)).await;
    assert_eq!(report.outcomes, [None, None]);
    let error = outage(&report);
    assert!(error.contains("denied access") && error.contains("guest:***@"), "{error}");
    assert!(!error.contains("hush"), "{error}");
    let mut consumer = RabbitMqConsumer::new(RabbitMqConsumerOptions::new(parsed(&url), "any"));
    let error = format!("{:#}", consumer.next().await.unwrap_err());
    assert!(error.contains("denied access") && !error.contains("hush"), "{error}");
}

#[tokio::test]
async fn an_exchange_of_another_type_is_reported_with_advice() {
    let (client, exchange) = (TestClient::connect(&shared_broker_url()).await, unique("direct"));
    client.create_exchange(&exchange, ExchangeKind::Direct).await;
    let report = RabbitMqSink::new(options(&shared_broker_url(), &exchange)).publish(&messages(1)).await;
    let error = outage(&report);
    assert!(error.contains("is not a durable topic exchange") && error.contains("declare = false"), "{error}");
    // With `declare = false` it is used unchanged.
    let unchanged = RabbitMqSinkOptions { declare: Declare::Never, ..options(&shared_broker_url(), &exchange) };
    let report = RabbitMqSink::new(unchanged).publish(&messages(1)).await;
    assert!(rejection(&report.outcomes[0]).contains("no queue is bound"));
}

#[tokio::test]
async fn a_missing_exchange_that_may_not_be_declared_is_reported_and_used_once_it_exists() {
    let exchange = unique("missing");
    let sink =
        RabbitMqSink::new(RabbitMqSinkOptions { declare: Declare::Never, ..options(&shared_broker_url(), &exchange) });
    let report = sink.publish(&messages(1)).await;
    let error = outage(&report);
    assert!(error.contains("does not exist; create it"), "{error}");
    TestClient::connect(&shared_broker_url()).await.create_queue(&exchange, "#").await;
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn a_deleted_exchange_is_created_again() {
    let (client, exchange) = (TestClient::connect(&shared_broker_url()).await, unique("vanishing"));
    client.create_queue(&exchange, "#").await;
    let sink = RabbitMqSink::new(options(&shared_broker_url(), &exchange));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    client.channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
    let report = sink.publish(&messages(10)).await;
    assert_eq!(report.confirmed(), 0);
    assert!(outage(&report).contains("NOT_FOUND"));
    let report = sink.publish(&messages(1)).await;
    assert!(rejection(&report.outcomes[0]).contains("no queue is bound"), "it exists again, without a bound queue");
}

#[tokio::test]
async fn no_confirmed_message_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::rabbitmq("").await;
    let queue = TestClient::connect(&broker.url()).await.create_queue("killed", "job.#").await;
    let sink = RabbitMqSink::new(options(&broker.url(), "killed"));
    publish_through_kills(&mut broker, sink, 10_000, [2_000, 6_000]).await;
    let arrived = TestClient::connect(&broker.url()).await.drain_ids(&queue).await;
    assert_all_arrived(10_000, &arrived);
}

#[tokio::test]
async fn a_connection_cut_in_the_middle_of_a_window_leaves_unknown_outcomes_and_recovers() {
    let url = shared_broker_url();
    let proxy = Proxy::to(port_of(&url)).await;
    let (client, exchange) = (TestClient::connect(&url).await, unique("cut"));
    let queue = client.create_queue(&exchange, "job.#").await;
    let sink = RabbitMqSink::new(options(&with_port(&url, proxy.port()), &exchange));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut confirmed = 1;
    for _ in 0..3 {
        proxy.cut_after(200_000);
        let report = sink.publish(&messages(5_000)).await;
        assert!(!proxy.is_open() && report.confirmed() < 5_000);
        assert!(outage(&report).starts_with("lost the connection to amqp://guest:***@"));
        confirmed += report.confirmed() as u32;
        let report = sink.publish(&messages(1)).await;
        assert!(report.outage.is_some() && report.outcomes == [None]);
        proxy.restore();
        assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
        confirmed += 1;
    }
    assert!(client.message_count(&queue).await >= confirmed, "a confirmed message is missing");
}

#[tokio::test]
async fn a_stalled_connection_is_abandoned_after_the_timeout() {
    let url = shared_broker_url();
    let proxy = Proxy::to(port_of(&url)).await;
    let (client, exchange) = (TestClient::connect(&url).await, unique("stalled"));
    client.create_queue(&exchange, "job.#").await;
    let proxied = options(&with_port(&url, proxy.port()), &exchange);
    let sink = RabbitMqSink::new(RabbitMqSinkOptions { timeout: Duration::from_secs(2), ..proxied });
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    proxy.stall_after(200_000);
    let started = Instant::now();
    let report = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(report.confirmed() < 5_000 && outage(&report).contains("did not confirm"));
    let started = Instant::now();
    assert!(sink.publish(&messages(1)).await.outage.is_some(), "a new connection stalls too");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.restore();
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
}

#[tokio::test]
async fn a_broker_that_blocks_publishers_is_an_outage_after_the_timeout_and_leaks_no_connection() {
    let broker = Broker::rabbitmq("disk_free_limit.absolute = 900000GB").await;
    let proxy = Proxy::to(broker.port()).await;
    let proxied = options(&broker.url_with_port(proxy.port()), "blocked");
    let sink = RabbitMqSink::new(RabbitMqSinkOptions { timeout: Duration::from_secs(1), ..proxied });
    for _ in 0..4 {
        let started = Instant::now();
        let report = sink.publish(&messages(100)).await;
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        assert_eq!(report.confirmed(), 0);
        assert!(outage(&report).contains("alarm"));
    }
    proxy.wait_until_unused().await;
}

#[tokio::test]
async fn an_unreachable_broker_is_an_outage() {
    let report = RabbitMqSink::new(options("amqp://guest:guest@127.0.0.1:1", "any")).publish(&messages(3)).await;
    assert_eq!(report.outcomes, [None, None, None]);
    assert!(outage(&report).starts_with("cannot connect to amqp://guest:***@127.0.0.1:1"));
}

fn new_consumer(url: &str, exchange: &str, queue: &str) -> RabbitMqConsumer {
    let bindings = vec![Binding { exchange: exchange.into(), pattern: "ticket.#".into() }];
    RabbitMqConsumer::new(RabbitMqConsumerOptions {
        bindings,
        prefetch: 10,
        ..RabbitMqConsumerOptions::new(parsed(url), queue)
    })
}

#[tokio::test]
async fn a_delivery_carries_the_published_fields_and_is_not_redelivered_after_its_acknowledgement() {
    let (exchange, queue) = (unique("consumed"), unique("inbox"));
    let mut consumer = new_consumer(&shared_broker_url(), &exchange, &queue);
    let sink = RabbitMqSink::new(options(&shared_broker_url(), &exchange));
    // No message exists yet; this call only creates the queue.
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err());
    assert_eq!(
        sink.publish(&[message_of_kind(1, "TicketCreatedEvent"), message_of_kind(2, "TicketCreatedEvent")])
            .await
            .confirmed(),
        2
    );
    let delivery = consumer.next().await.unwrap();
    assert_eq!(delivery.id.as_deref(), Some("id-1"));
    assert_eq!((delivery.kind.as_str(), delivery.subject.as_str()), ("TicketCreatedEvent", "ticket.created"));
    assert_eq!(delivery.correlation_id.as_deref(), Some("c-1"));
    assert!(delivery.traceparent.as_ref().unwrap().starts_with("00-"));
    assert_eq!(delivery.content_type.as_deref(), Some("application/json"));
    assert_eq!((&delivery.body[..], delivery.redelivered), (&br#"{"number":1}"#[..], false));
    delivery.ack().await.unwrap();
    let unacknowledged = consumer.next().await.unwrap();
    consumer.close().await;
    assert!(unacknowledged.ack().await.is_err(), "its connection is closed");
    let mut consumer = new_consumer(&shared_broker_url(), &exchange, &queue);
    let redelivered = consumer.next().await.unwrap();
    assert_eq!((redelivered.id.as_deref(), redelivered.redelivered), (Some("id-2"), true));
    redelivered.ack().await.unwrap();
    consumer.close().await;
    assert_eq!(TestClient::connect(&shared_broker_url()).await.message_count(&queue).await, 0);
}

#[tokio::test]
async fn a_rejected_message_goes_to_the_dead_letter_queue_and_a_requeued_message_is_redelivered() {
    let (exchange, queue) = (unique("poison"), unique("inbox"));
    let (client, mut consumer) =
        (TestClient::connect(&shared_broker_url()).await, new_consumer(&shared_broker_url(), &exchange, &queue));
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err());
    let sink = RabbitMqSink::new(options(&shared_broker_url(), &exchange));
    assert_eq!(
        sink.publish(&[message_of_kind(1, "ticket.poison"), message_of_kind(2, "ticket.later")]).await.confirmed(),
        2
    );
    consumer.next().await.unwrap().reject("no ticket").await.unwrap();
    let later = consumer.next().await.unwrap();
    later.requeue().await.unwrap();
    let later = consumer.next().await.unwrap();
    assert_eq!((later.id.as_deref(), later.redelivered), (Some("id-2"), true));
    later.ack().await.unwrap();
    client.wait_for(&format!("{queue}.dead"), 1).await;
    let dead = client.drain(&format!("{queue}.dead")).await;
    assert_eq!(dead[0].properties.message_id().as_ref().unwrap().as_str(), "id-1");
    let headers = dead[0].properties.headers().as_ref().unwrap().inner();
    for (name, text) in [("x-reason", "no ticket"), ("x-routing-key", "ticket.poison")] {
        assert_eq!(headers.get(name), Some(&AMQPValue::LongString(text.into())), "{headers:?}");
    }
}

#[tokio::test]
async fn no_more_messages_than_the_prefetch_are_delivered() {
    let (exchange, queue) = (unique("bounded"), unique("inbox"));
    let (client, mut consumer) =
        (TestClient::connect(&shared_broker_url()).await, new_consumer(&shared_broker_url(), &exchange, &queue));
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err());
    let many: Vec<_> = (0..50).map(|number| message_of_kind(number, "ticket.created")).collect();
    assert_eq!(RabbitMqSink::new(options(&shared_broker_url(), &exchange)).publish(&many).await.confirmed(), 50);
    client.wait_for(&queue, 40).await;
    consumer.next().await.unwrap().ack().await.unwrap();
    client.wait_for(&queue, 39).await;
}

#[tokio::test]
async fn a_queue_that_may_not_be_declared_must_exist_and_is_used_unchanged() {
    let (exchange, client) = (unique("owned"), TestClient::connect(&shared_broker_url()).await);
    let queue = format!("{exchange}-queue");
    let passive_options = RabbitMqConsumerOptions {
        declare: Declare::Never,
        ..RabbitMqConsumerOptions::new(parsed(&shared_broker_url()), &queue)
    };
    let mut consumer = RabbitMqConsumer::new(passive_options);
    let error = consumer.next().await.unwrap_err().to_string();
    assert!(error.contains("does not exist; create it"), "{error}");
    client.create_queue(&exchange, "#").await;
    let sent = client.channel.basic_publish(
        exchange.into(),
        "any.key".into(),
        BasicPublishOptions::default(),
        b"plain",
        Default::default(),
    );
    sent.await.unwrap();
    let delivery = consumer.next().await.unwrap();
    assert_eq!((delivery.id.as_deref(), delivery.kind.as_str(), &delivery.body[..]), (None, "any.key", &b"plain"[..]));
    delivery.reject("not needed").await.unwrap();
    consumer.close().await;
    assert_eq!(client.message_count(&queue).await, 0);
}

#[tokio::test]
async fn a_queue_with_other_properties_is_reported_with_advice() {
    let (exchange, client) = (unique("other"), TestClient::connect(&shared_broker_url()).await);
    let queue = client.create_queue(&exchange, "#").await;
    let error = new_consumer(&shared_broker_url(), &exchange, &queue).next().await.unwrap_err().to_string();
    assert!(error.contains("exists with other properties") && error.contains("declare = false"), "{error}");
}

#[tokio::test]
async fn a_consumer_resumes_after_a_cut_connection_and_a_broker_restart() {
    let mut broker = Broker::rabbitmq("").await;
    let proxy = Proxy::to(broker.port()).await;
    let mut consumer = new_consumer(&broker.url_with_port(proxy.port()), "tickets", "inbox");
    assert!(tokio::time::timeout(Duration::from_secs(5), consumer.next()).await.is_err());
    let sink = RabbitMqSink::new(options(&broker.url(), "tickets"));
    // Only one message: acknowledgements are not confirmed, and the message of a lost one would be redelivered.
    assert_eq!(sink.publish(&[message_of_kind(1, "ticket.created")]).await.confirmed(), 1);
    let unacknowledged = consumer.next().await.unwrap();
    assert_resumes(&mut consumer, unacknowledged, &proxy, &mut broker).await;
}

#[tokio::test]
async fn a_consumer_notices_a_silent_connection() {
    let proxy = Proxy::to(port_of(&shared_broker_url())).await;
    let (exchange, queue) = (unique("silent"), unique("inbox"));
    let mut consumer = new_consumer(&with_port(&shared_broker_url(), proxy.port()), &exchange, &queue);
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err(), "no message exists yet");
    assert_notices_silence(&mut consumer, &proxy).await;
    let sink = RabbitMqSink::new(options(&shared_broker_url(), &exchange));
    assert_eq!(sink.publish(&[message_of_kind(1, "ticket.created")]).await.confirmed(), 1);
    assert_eq!(consumer.next().await.unwrap().id.as_deref(), Some("id-1"));
}

fn port_of(url: &str) -> u16 {
    url.rsplit(':')
        .next()
        .and_then(|rest| rest.split('/').next())
        .and_then(|port| port.parse().ok())
        .expect("a port in the URL")
}

fn with_port(url: &str, port: u16) -> String {
    url.replace(&format!(":{}", port_of(url)), &format!(":{port}"))
}
