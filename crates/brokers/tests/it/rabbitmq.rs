//! RabbitMQ.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use faena_brokers::{
    BrokerUrl, Consumer, Declare, Sink, Verdict,
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
        assert_all_arrived, assert_no_duplicates, message, messages, of_kind, of_size, publish_all, refusal, unique,
    },
    support::{Broker, Proxy, setting},
};

fn shared() -> String {
    setting("FAENA_TEST_RABBITMQ")
}

fn parsed(url: &str) -> BrokerUrl {
    BrokerUrl::parse(url).unwrap()
}

fn options(url: &str, exchange: &str) -> RabbitMqSinkOptions {
    RabbitMqSinkOptions { timeout: Duration::from_secs(60), ..RabbitMqSinkOptions::new(parsed(url), exchange) }
}

/// What a test does on its own account, beside the code under test.
struct Observer {
    _connection: Connection,
    channel: Channel,
}

impl Observer {
    async fn at(url: &str) -> Observer {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Observer { _connection: connection, channel }
    }

    async fn exchange(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        self.channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await.unwrap();
    }

    /// A durable queue that gets everything of that pattern.
    async fn queue(&self, exchange: &str, pattern: &str) -> String {
        self.exchange(exchange, ExchangeKind::Topic).await;
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

    async fn waiting(&self, queue: &str) -> u32 {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap().message_count()
    }

    /// Takes everything that waits.
    async fn drain(&self, queue: &str) -> Vec<Delivery> {
        let count = self.waiting(queue).await as usize;
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
        while self.waiting(queue).await != count {
            assert!(Instant::now() < deadline, "{queue} never held {count}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let (observer, exchange) = (Observer::at(&shared()).await, unique("many"));
    let queue = observer.queue(&exchange, "job.#").await;
    let sink = RabbitMqSink::new(options(&shared(), &exchange));
    let published = sink.publish(&messages(10_000)).await;
    assert_eq!((published.confirmed(), &published.down), (10_000, &None));
    let arrived = observer.drain_ids(&queue).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn a_message_carries_what_receivers_go_by() {
    let (observer, exchange) = (Observer::at(&shared()).await, unique("fields"));
    let queue = observer.queue(&exchange, "ticket.status.changed").await;
    let kind = "TicketFlow.Domain.Events.TicketStatusChangedEvent";
    let published = RabbitMqSink::new(options(&shared(), &exchange)).publish(&[of_kind(5, kind)]).await;
    assert_eq!(published.verdicts, [Some(Verdict::Confirmed)]);
    let delivery = observer.drain(&queue).await.remove(0);
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
async fn a_message_that_no_queue_takes_is_refused_and_the_others_are_confirmed() {
    let (observer, exchange) = (Observer::at(&shared()).await, unique("unroutable"));
    let queue = observer.queue(&exchange, "job.#").await;
    let mut mixed = messages(3_000);
    for number in (0..3_000).step_by(7) {
        mixed[number].kind = "nobody.listens".into();
    }
    let published = RabbitMqSink::new(options(&shared(), &exchange)).publish(&mixed).await;
    assert_eq!(published.down, None);
    for (number, verdict) in published.verdicts.iter().enumerate() {
        if number % 7 == 0 {
            assert_eq!(refusal(verdict), "no queue is bound for routing key nobody.listens");
        } else {
            assert_eq!(verdict, &Some(Verdict::Confirmed), "{number}");
        }
    }
    assert_eq!(observer.waiting(&queue).await as usize, published.confirmed());
}

#[tokio::test]
async fn a_message_without_a_routing_key_is_refused_without_asking_the_broker() {
    let sink = RabbitMqSink::new(options("amqp://127.0.0.1:1", "none"));
    let published = sink.publish(&[of_kind(1, "no key"), of_kind(2, "")]).await;
    assert_eq!(published.down, None);
    assert!(refusal(&published.verdicts[0]).contains("makes no routing key"));
    assert!(refusal(&published.verdicts[1]).contains("makes no routing key"));
}

#[tokio::test]
async fn a_message_that_is_too_large_is_refused_and_the_next_call_delivers_the_others() {
    let broker = Broker::rabbitmq("max_message_size = 100000").await;
    let observer = Observer::at(&broker.url()).await;
    let queue = observer.queue("sized", "job.#").await;
    let sink = RabbitMqSink::new(options(&broker.url(), "sized"));
    let mixed = [message(0), of_size(1, 200_000), message(2)];
    let published = sink.publish(&mixed).await;
    assert_eq!(published.down, None, "the broker is well");
    assert_eq!(refusal(&published.verdicts[1]), "it has 200000 bytes, and the broker takes 100000 at most");
    let again: Vec<_> = mixed
        .iter()
        .zip(&published.verdicts)
        .filter(|(_, verdict)| verdict.is_none())
        .map(|(message, _)| message.clone())
        .collect();
    assert_eq!(sink.publish(&again).await.confirmed(), again.len());
    // The limit is known now: the channel survives.
    let published = sink.publish(&[of_size(3, 200_000), message(4)]).await;
    assert_eq!((published.confirmed(), published.down), (1, None));
    let mut arrived = observer.drain_ids(&queue).await;
    arrived.sort();
    arrived.dedup();
    assert_eq!(arrived, ["id-0", "id-2", "id-4"]);
}

#[tokio::test]
async fn a_wrong_password_is_told_but_not_shown() {
    let url = shared().replace("guest:guest", "guest:hush%2Fhush");
    let published = RabbitMqSink::new(options(&url, "any")).publish(&messages(2)).await;
    assert_eq!(published.verdicts, [None, None]);
    let reason = published.down.unwrap();
    assert!(reason.contains("does not let us in") && reason.contains("guest:***@"), "{reason}");
    assert!(!reason.contains("hush"), "{reason}");
    let error = RabbitMqConsumer::new(RabbitMqConsumerOptions::new(parsed(&url), "any")).next().await.unwrap_err();
    assert!(!error.to_string().contains("hush") && error.to_string().contains("does not let us in"), "{error}");
}

#[tokio::test]
async fn an_exchange_of_another_type_is_told_with_what_to_do() {
    let (observer, exchange) = (Observer::at(&shared()).await, unique("direct"));
    observer.exchange(&exchange, ExchangeKind::Direct).await;
    let published = RabbitMqSink::new(options(&shared(), &exchange)).publish(&messages(1)).await;
    let reason = published.down.unwrap();
    assert!(reason.contains("is no durable topic exchange") && reason.contains("declare = false"), "{reason}");
    // As it is, it may be used.
    let as_it_is = RabbitMqSinkOptions { declare: Declare::Never, ..options(&shared(), &exchange) };
    let published = RabbitMqSink::new(as_it_is).publish(&messages(1)).await;
    assert!(refusal(&published.verdicts[0]).contains("no queue is bound"));
}

#[tokio::test]
async fn a_missing_exchange_that_may_not_be_declared_is_told_and_used_once_it_is_there() {
    let exchange = unique("missing");
    let sink = RabbitMqSink::new(RabbitMqSinkOptions { declare: Declare::Never, ..options(&shared(), &exchange) });
    let published = sink.publish(&messages(1)).await;
    let reason = published.down.unwrap();
    assert!(reason.contains("does not exist and may not be declared"), "{reason}");
    Observer::at(&shared()).await.queue(&exchange, "#").await;
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn an_exchange_that_vanishes_is_made_again() {
    let (observer, exchange) = (Observer::at(&shared()).await, unique("vanishing"));
    observer.queue(&exchange, "#").await;
    let sink = RabbitMqSink::new(options(&shared(), &exchange));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    observer.channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
    let published = sink.publish(&messages(10)).await;
    assert_eq!(published.confirmed(), 0);
    assert!(published.down.unwrap().contains("NOT_FOUND"));
    let published = sink.publish(&messages(1)).await;
    assert!(refusal(&published.verdicts[0]).contains("no queue is bound"), "it is there again, with nobody bound");
}

#[tokio::test]
async fn nothing_confirmed_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::rabbitmq("").await;
    let queue = Observer::at(&broker.url()).await.queue("killed", "job.#").await;
    let confirmed = std::sync::Arc::new(AtomicUsize::new(0));
    let (sink, counter) = (RabbitMqSink::new(options(&broker.url(), "killed")), confirmed.clone());
    let publishing = tokio::spawn(async move { publish_all(&sink, &messages(10_000), &counter).await });
    for threshold in [2_000, 6_000] {
        while confirmed.load(Ordering::SeqCst) < threshold {
            assert!(!publishing.is_finished(), "it was over before the broker was killed");
            tokio::task::yield_now().await;
        }
        broker.kill();
        broker.start().await;
    }
    publishing.await.unwrap();
    let arrived = Observer::at(&broker.url()).await.drain_ids(&queue).await;
    assert_all_arrived(10_000, &arrived);
}

#[tokio::test]
async fn a_line_cut_in_the_middle_of_a_window_leaves_the_rest_unknown_and_heals() {
    let url = shared();
    let proxy = Proxy::to(parsed_port(&url)).await;
    let (observer, exchange) = (Observer::at(&url).await, unique("cut"));
    let queue = observer.queue(&exchange, "job.#").await;
    let sink = RabbitMqSink::new(options(&by_way_of(&url, proxy.port()), &exchange));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut published = 1;
    for _ in 0..3 {
        proxy.cut_after(200_000);
        let outcome = sink.publish(&messages(5_000)).await;
        assert!(!proxy.is_whole() && outcome.confirmed() < 5_000);
        assert!(outcome.down.as_ref().unwrap().starts_with("lost amqp://guest:***@"));
        published += outcome.confirmed() as u32;
        let refused = sink.publish(&messages(1)).await;
        assert!(refused.down.is_some() && refused.verdicts == [None]);
        proxy.heal();
        assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
        published += 1;
    }
    assert!(observer.waiting(&queue).await >= published, "confirmed ones are missing");
}

#[tokio::test]
async fn a_line_that_stalls_is_given_up_after_the_timeout() {
    let url = shared();
    let proxy = Proxy::to(parsed_port(&url)).await;
    let (observer, exchange) = (Observer::at(&url).await, unique("stalled"));
    observer.queue(&exchange, "job.#").await;
    let through = options(&by_way_of(&url, proxy.port()), &exchange);
    let sink = RabbitMqSink::new(RabbitMqSinkOptions { timeout: Duration::from_secs(2), ..through });
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    proxy.stall_after(200_000);
    let started = Instant::now();
    let outcome = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(outcome.confirmed() < 5_000 && outcome.down.unwrap().contains("did not confirm"));
    let started = Instant::now();
    assert!(sink.publish(&messages(1)).await.down.is_some(), "a new connection gets no further");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.heal();
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
}

#[tokio::test]
async fn a_broker_that_blocks_publishers_is_down_after_the_timeout_and_no_connection_stays_behind() {
    let broker = Broker::rabbitmq("disk_free_limit.absolute = 900000GB").await;
    let proxy = Proxy::to(broker.port()).await;
    let through = options(&broker.url_by(proxy.port()), "blocked");
    let sink = RabbitMqSink::new(RabbitMqSinkOptions { timeout: Duration::from_secs(1), ..through });
    for _ in 0..4 {
        let started = Instant::now();
        let outcome = sink.publish(&messages(100)).await;
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        assert_eq!(outcome.confirmed(), 0);
        assert!(outcome.down.unwrap().contains("alarm"));
    }
    proxy.wait_until_unused().await;
}

#[tokio::test]
async fn a_broker_that_is_not_there_is_down() {
    let outcome = RabbitMqSink::new(options("amqp://guest:guest@127.0.0.1:1", "any")).publish(&messages(3)).await;
    assert_eq!(outcome.verdicts, [None, None, None]);
    assert!(outcome.down.unwrap().starts_with("cannot connect to amqp://guest:***@127.0.0.1:1"));
}

fn consumer(url: &str, exchange: &str, queue: &str) -> RabbitMqConsumer {
    let bindings = vec![Binding { exchange: exchange.into(), pattern: "ticket.#".into() }];
    RabbitMqConsumer::new(RabbitMqConsumerOptions {
        bindings,
        prefetch: 10,
        ..RabbitMqConsumerOptions::new(parsed(url), queue)
    })
}

#[tokio::test]
async fn what_is_consumed_carries_what_was_sent_and_does_not_come_again_once_acknowledged() {
    let (exchange, queue) = (unique("consumed"), unique("inbox"));
    let mut inbox = consumer(&shared(), &exchange, &queue);
    let sink = RabbitMqSink::new(options(&shared(), &exchange));
    // Nothing is there yet; what `next` prepares while it waits is the queue.
    assert!(tokio::time::timeout(Duration::from_secs(2), inbox.next()).await.is_err());
    assert_eq!(
        sink.publish(&[of_kind(1, "TicketCreatedEvent"), of_kind(2, "TicketCreatedEvent")]).await.confirmed(),
        2
    );
    let delivery = inbox.next().await.unwrap();
    assert_eq!(delivery.id.as_deref(), Some("id-1"));
    assert_eq!((delivery.kind.as_str(), delivery.subject.as_str()), ("TicketCreatedEvent", "ticket.created"));
    assert_eq!(delivery.correlation_id.as_deref(), Some("c-1"));
    assert!(delivery.traceparent.as_ref().unwrap().starts_with("00-"));
    assert_eq!(delivery.content_type.as_deref(), Some("application/json"));
    assert_eq!((&delivery.body[..], delivery.redelivered), (&br#"{"number":1}"#[..], false));
    delivery.ack().await.unwrap();
    let unanswered = inbox.next().await.unwrap();
    inbox.close().await;
    assert!(unanswered.ack().await.is_err(), "its connection is gone");
    let mut inbox = consumer(&shared(), &exchange, &queue);
    let again = inbox.next().await.unwrap();
    assert_eq!((again.id.as_deref(), again.redelivered), (Some("id-2"), true));
    again.ack().await.unwrap();
    inbox.close().await;
    assert_eq!(Observer::at(&shared()).await.waiting(&queue).await, 0);
}

#[tokio::test]
async fn a_rejected_message_goes_to_the_dead_queue_and_one_given_back_comes_again() {
    let (exchange, queue) = (unique("poison"), unique("inbox"));
    let (observer, mut inbox) = (Observer::at(&shared()).await, consumer(&shared(), &exchange, &queue));
    assert!(tokio::time::timeout(Duration::from_secs(2), inbox.next()).await.is_err());
    let sink = RabbitMqSink::new(options(&shared(), &exchange));
    assert_eq!(sink.publish(&[of_kind(1, "ticket.poison"), of_kind(2, "ticket.later")]).await.confirmed(), 2);
    inbox.next().await.unwrap().reject("no ticket").await.unwrap();
    let later = inbox.next().await.unwrap();
    later.give_back().await.unwrap();
    let later = inbox.next().await.unwrap();
    assert_eq!((later.id.as_deref(), later.redelivered), (Some("id-2"), true));
    later.ack().await.unwrap();
    observer.wait_for(&format!("{queue}.dead"), 1).await;
    let dead = observer.drain(&format!("{queue}.dead")).await;
    assert_eq!(dead[0].properties.message_id().as_ref().unwrap().as_str(), "id-1");
    assert!(dead[0].properties.headers().as_ref().unwrap().contains_key("x-death"));
}

#[tokio::test]
async fn no_more_than_the_prefetch_is_handed_out() {
    let (exchange, queue) = (unique("bounded"), unique("inbox"));
    let (observer, mut inbox) = (Observer::at(&shared()).await, consumer(&shared(), &exchange, &queue));
    assert!(tokio::time::timeout(Duration::from_secs(2), inbox.next()).await.is_err());
    let many: Vec<_> = (0..50).map(|number| of_kind(number, "ticket.created")).collect();
    assert_eq!(RabbitMqSink::new(options(&shared(), &exchange)).publish(&many).await.confirmed(), 50);
    observer.wait_for(&queue, 40).await;
    inbox.next().await.unwrap().ack().await.unwrap();
    observer.wait_for(&queue, 39).await;
}

#[tokio::test]
async fn a_queue_that_may_not_be_declared_must_be_there_and_is_used_as_it_is() {
    let (exchange, observer) = (unique("owned"), Observer::at(&shared()).await);
    let queue = format!("{exchange}-queue");
    let never =
        RabbitMqConsumerOptions { declare: Declare::Never, ..RabbitMqConsumerOptions::new(parsed(&shared()), &queue) };
    let mut inbox = RabbitMqConsumer::new(never);
    let error = inbox.next().await.unwrap_err().to_string();
    assert!(error.contains("does not exist and may not be declared"), "{error}");
    observer.queue(&exchange, "#").await;
    let sent = observer.channel.basic_publish(
        exchange.into(),
        "any.key".into(),
        BasicPublishOptions::default(),
        b"plain",
        Default::default(),
    );
    sent.await.unwrap();
    let delivery = inbox.next().await.unwrap();
    assert_eq!((delivery.id.as_deref(), delivery.kind.as_str(), &delivery.body[..]), (None, "any.key", &b"plain"[..]));
    delivery.reject("nobody wants it").await.unwrap();
    inbox.close().await;
    assert_eq!(observer.waiting(&queue).await, 0);
}

#[tokio::test]
async fn a_queue_with_other_properties_is_told_with_what_to_do() {
    let (exchange, observer) = (unique("other"), Observer::at(&shared()).await);
    let queue = observer.queue(&exchange, "#").await;
    let error = consumer(&shared(), &exchange, &queue).next().await.unwrap_err().to_string();
    assert!(error.contains("exists with other properties") && error.contains("declare = false"), "{error}");
}

#[tokio::test]
async fn a_consumer_goes_on_after_its_line_was_cut_or_its_broker_restarted() {
    let mut broker = Broker::rabbitmq("").await;
    let proxy = Proxy::to(broker.port()).await;
    let mut inbox = consumer(&broker.url_by(proxy.port()), "tickets", "inbox");
    assert!(tokio::time::timeout(Duration::from_secs(5), inbox.next()).await.is_err());
    let sink = RabbitMqSink::new(options(&broker.url(), "tickets"));
    // One alone: acknowledgements are not confirmed, and one that the cut swallows would bring its message again.
    assert_eq!(sink.publish(&[of_kind(1, "ticket.created")]).await.confirmed(), 1);
    let held = inbox.next().await.unwrap();
    proxy.cut();
    assert!(inbox.next().await.is_err());
    assert!(held.ack().await.is_err());
    assert!(inbox.next().await.is_err(), "still cut");
    proxy.heal();
    let again = inbox.next().await.unwrap();
    assert_eq!((again.id.as_deref(), again.redelivered), (Some("id-1"), true));
    broker.kill();
    assert!(inbox.next().await.is_err());
    broker.start().await;
    let again = inbox.next().await.unwrap();
    assert_eq!(again.id.as_deref(), Some("id-1"));
    again.ack().await.unwrap();
}

#[tokio::test]
async fn a_consumer_notices_that_its_line_is_silent() {
    let proxy = Proxy::to(parsed_port(&shared())).await;
    let (exchange, queue) = (unique("silent"), unique("inbox"));
    let mut inbox = consumer(&by_way_of(&shared(), proxy.port()), &exchange, &queue);
    assert!(tokio::time::timeout(Duration::from_secs(2), inbox.next()).await.is_err(), "nothing has come yet");
    proxy.stall();
    let noticed = tokio::time::timeout(Duration::from_secs(40), inbox.next()).await.expect("it is noticed");
    assert!(noticed.is_err());
    proxy.heal();
    let sink = RabbitMqSink::new(options(&shared(), &exchange));
    assert_eq!(sink.publish(&[of_kind(1, "ticket.created")]).await.confirmed(), 1);
    assert_eq!(inbox.next().await.unwrap().id.as_deref(), Some("id-1"));
}

fn parsed_port(url: &str) -> u16 {
    url.rsplit(':')
        .next()
        .and_then(|rest| rest.split('/').next())
        .and_then(|port| port.parse().ok())
        .expect("a port in the URL")
}

fn by_way_of(url: &str, port: u16) -> String {
    url.replace(&format!(":{}", parsed_port(url)), &format!(":{port}"))
}
