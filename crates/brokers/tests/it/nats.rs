//! NATS JetStream.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_nats::jetstream::{self, stream};
use faena_brokers::{
    BrokerUrl, Consumer, Declare, Sink, Verdict,
    nats::{NatsConsumer, NatsConsumerOptions, NatsSink, NatsSinkOptions},
};
use futures_util::StreamExt;

use crate::{
    messages::{
        assert_all_arrived, assert_no_duplicates, message, messages, of_kind, of_size, publish_all, refusal, unique,
    },
    support::{Broker, Proxy, setting},
};

fn shared() -> String {
    setting("FAENA_TEST_NATS")
}

fn shared_port() -> u16 {
    shared().rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port in the URL")
}

fn parsed(url: &str) -> BrokerUrl {
    BrokerUrl::parse(url).unwrap()
}

/// A stream and the prefix of its subjects are called the same.
fn options(url: &str, name: &str) -> NatsSinkOptions {
    NatsSinkOptions { timeout: Duration::from_secs(60), ..NatsSinkOptions::new(parsed(url), name, name) }
}

async fn context(url: &str) -> jetstream::Context {
    jetstream::new(async_nats::connect(url).await.unwrap())
}

/// Everything the stream holds, from its beginning.
async fn held(url: &str, name: &str) -> Vec<jetstream::Message> {
    let mut stream = context(url).await.get_stream(name).await.unwrap();
    let count = stream.info().await.unwrap().state.messages as usize;
    let reader = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    reader.messages().await.unwrap().take(count).map(Result::unwrap).collect().await
}

async fn held_ids(url: &str, name: &str) -> Vec<String> {
    held(url, name)
        .await
        .iter()
        .map(|message| message.headers.as_ref().unwrap().get("Nats-Msg-Id").unwrap().to_string())
        .collect()
}

async fn make_stream(url: &str, config: stream::Config) {
    context(url).await.create_stream(config).await.unwrap();
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let name = unique("many");
    let sink = NatsSink::new(options(&shared(), &name));
    let published = sink.publish(&messages(10_000)).await;
    assert_eq!((published.confirmed(), &published.down), (10_000, &None));
    // Repetitions within the stream's window are confirmed and dropped.
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
    let arrived = held_ids(&shared(), &name).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn a_message_carries_what_receivers_go_by() {
    let name = unique("fields");
    let published = NatsSink::new(options(&shared(), &name)).publish(&[of_kind(5, "TicketStatusChangedEvent")]).await;
    assert_eq!(published.verdicts, [Some(Verdict::Confirmed)]);
    let arrived = held(&shared(), &name).await.remove(0);
    assert_eq!(arrived.subject.as_str(), format!("{name}.ticket.status.changed"));
    assert_eq!(&arrived.payload[..], br#"{"number":5}"#);
    let headers = arrived.headers.as_ref().unwrap();
    for (header, value) in
        [("Nats-Msg-Id", "id-5"), ("Type", "TicketStatusChangedEvent"), ("CorrelationId", "c-1"), ("x-seq", "5")]
    {
        assert_eq!(headers.get(header).unwrap().as_str(), value);
    }
    assert!(headers.get("traceparent").is_some());
}

#[tokio::test]
async fn bad_messages_are_refused_and_the_others_are_confirmed() {
    let name = unique("bad");
    let subjects = vec![format!("{name}.job.>")];
    make_stream(
        &shared(),
        stream::Config { name: name.clone(), subjects, max_message_size: 50_000, ..Default::default() },
    )
    .await;
    let mixed = [
        message(0),
        of_kind(1, "nobody.listens"),
        of_kind(2, "no key"),
        of_size(3, 2_000_000),
        of_size(4, 60_000),
        message(5),
    ];
    let published = NatsSink::new(options(&shared(), &name)).publish(&mixed).await;
    assert_eq!(published.down, None);
    assert_eq!(
        (&published.verdicts[0], &published.verdicts[5]),
        (&Some(Verdict::Confirmed), &Some(Verdict::Confirmed))
    );
    assert_eq!(refusal(&published.verdicts[1]), format!("no stream takes subject {name}.nobody.listens"));
    assert!(refusal(&published.verdicts[2]).contains("makes no routing key"));
    assert!(refusal(&published.verdicts[3]).contains("max payload"), "{:?}", published.verdicts[3]);
    assert!(refusal(&published.verdicts[4]).contains("message size exceeds"), "{:?}", published.verdicts[4]);
    assert_eq!(held_ids(&shared(), &name).await, ["id-0", "id-5"]);
}

#[tokio::test]
async fn a_missing_stream_that_may_not_be_declared_is_told_and_used_once_it_is_there() {
    let name = unique("missing");
    let sink = NatsSink::new(NatsSinkOptions { declare: Declare::Never, ..options(&shared(), &name) });
    let reason = sink.publish(&messages(1)).await.down.unwrap();
    assert!(reason.contains("does not exist and may not be declared"), "{reason}");
    make_stream(
        &shared(),
        stream::Config { name: name.clone(), subjects: vec![format!("{name}.>")], ..Default::default() },
    )
    .await;
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    context(&shared()).await.delete_stream(&name).await.unwrap();
    let gone = sink.publish(&messages(2)).await;
    assert_eq!(gone.verdicts, [None, None]);
    assert!(gone.down.unwrap().contains("does not exist and may not be declared"));
}

#[tokio::test]
async fn a_stream_that_vanishes_is_made_again() {
    let name = unique("vanishing");
    let sink = NatsSink::new(options(&shared(), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    context(&shared()).await.delete_stream(&name).await.unwrap();
    assert!(sink.publish(&messages(1)).await.down.unwrap().contains("is gone"));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn a_full_stream_is_down_and_no_message_is_to_blame() {
    let name = unique("full");
    let config = stream::Config {
        name: name.clone(),
        subjects: vec![format!("{name}.>")],
        max_messages: 3,
        discard: stream::DiscardPolicy::New,
        ..Default::default()
    };
    make_stream(&shared(), config).await;
    let published = NatsSink::new(options(&shared(), &name)).publish(&messages(5)).await;
    assert_eq!((published.confirmed(), &published.verdicts[4]), (3, &None));
    let reason = published.down.unwrap();
    assert!(reason.contains("maximum messages exceeded"), "{reason}");
}

#[tokio::test]
async fn a_wrong_password_is_told_but_not_shown() {
    let broker = Broker::nats("authorization { user: me, password: right }").await;
    let with = |credentials: &str| broker.url().replace("nats://", &format!("nats://{credentials}@"));
    let good = NatsSink::new(options(&with("me:right"), "auth"));
    assert_eq!(good.publish(&messages(1)).await.confirmed(), 1);
    for credentials in ["me:hush%2Fhush", "hush-token"] {
        let url = with(credentials);
        let published = NatsSink::new(options(&url, "auth")).publish(&messages(1)).await;
        assert_eq!(published.verdicts, [None]);
        let reason = published.down.unwrap();
        assert!(reason.contains("does not let us in") && !reason.contains("hush"), "{reason}");
        let options = NatsConsumerOptions::new(parsed(&url), "auth", "auth.>", "inbox");
        let error = NatsConsumer::new(options).next().await.unwrap_err().to_string();
        assert!(error.contains("does not let us in") && !error.contains("hush"), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_down() {
    let published = NatsSink::new(options("nats://127.0.0.1:1", "any")).publish(&messages(2)).await;
    assert_eq!(published.verdicts, [None, None]);
    assert!(published.down.unwrap().starts_with("cannot connect to nats://127.0.0.1:1"));
}

#[tokio::test]
async fn nothing_confirmed_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::nats("").await;
    let confirmed = Arc::new(AtomicUsize::new(0));
    let (sink, counter) = (NatsSink::new(options(&broker.url(), "killed")), confirmed.clone());
    let publishing = tokio::spawn(async move { publish_all(&sink, &messages(20_000), &counter).await });
    for threshold in [4_000, 12_000] {
        while confirmed.load(Ordering::SeqCst) < threshold {
            assert!(!publishing.is_finished(), "it was over before the broker was killed");
            tokio::task::yield_now().await;
        }
        broker.kill();
        broker.start().await;
    }
    publishing.await.unwrap();
    assert_all_arrived(20_000, &held_ids(&broker.url(), "killed").await);
}

#[tokio::test]
async fn a_line_cut_in_the_middle_of_a_window_leaves_the_rest_unknown_and_heals() {
    let (proxy, name) = (Proxy::to(shared_port()).await, unique("cut"));
    let sink = NatsSink::new(options(&format!("nats://127.0.0.1:{}", proxy.port()), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut number = 1;
    for _ in 0..3 {
        proxy.cut_after(200_000);
        let batch: Vec<_> = (number..number + 5_000).map(message).collect();
        let started = Instant::now();
        let outcome = sink.publish(&batch).await;
        assert!(started.elapsed() < Duration::from_secs(5), "a broken line is noticed at once");
        assert!(!proxy.is_whole() && outcome.confirmed() < 5_000 && outcome.down.is_some(), "{:?}", outcome.down);
        assert_eq!(sink.publish(&messages(1)).await.verdicts, [None]);
        proxy.heal();
        publish_all(&sink, &batch, &AtomicUsize::new(0)).await;
        number += 5_000;
    }
    let arrived = held_ids(&shared(), &name).await;
    assert_all_arrived(number, &arrived);
    assert_no_duplicates(&arrived);
}

#[tokio::test]
async fn a_line_that_stalls_is_given_up_after_the_timeout() {
    let (proxy, name) = (Proxy::to(shared_port()).await, unique("stalled"));
    let through = options(&format!("nats://127.0.0.1:{}", proxy.port()), &name);
    let sink = NatsSink::new(NatsSinkOptions { timeout: Duration::from_secs(2), ..through });
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    proxy.stall_after(200_000);
    let started = Instant::now();
    let outcome = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(outcome.confirmed() < 5_000 && outcome.down.is_some());
    let started = Instant::now();
    assert!(sink.publish(&messages(1)).await.down.is_some(), "a new connection gets no further");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.heal();
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
}

fn inbox(url: &str, name: &str) -> NatsConsumer {
    let options = NatsConsumerOptions::new(parsed(url), name, format!("{name}.>"), format!("{name}-inbox"));
    NatsConsumer::new(NatsConsumerOptions { prefetch: 10, ack_wait: Duration::from_secs(1), ..options })
}

#[tokio::test]
async fn what_is_consumed_carries_what_was_sent_and_does_not_come_again_once_acknowledged() {
    let name = unique("consumed");
    let sink = NatsSink::new(options(&shared(), &name));
    assert_eq!(
        sink.publish(&[of_kind(1, "TicketCreatedEvent"), of_kind(2, "TicketCreatedEvent")]).await.confirmed(),
        2
    );
    let mut consumer = inbox(&shared(), &name);
    let delivery = consumer.next().await.unwrap();
    assert_eq!(delivery.id.as_deref(), Some("id-1"));
    assert_eq!(delivery.kind, "TicketCreatedEvent");
    assert_eq!(delivery.subject, format!("{name}.ticket.created"));
    assert_eq!(delivery.correlation_id.as_deref(), Some("c-1"));
    assert!(delivery.traceparent.as_ref().unwrap().starts_with("00-"));
    assert_eq!((&delivery.body[..], delivery.redelivered), (&br#"{"number":1}"#[..], false));
    delivery.ack().await.unwrap();
    let unanswered = consumer.next().await.unwrap();
    assert_eq!(unanswered.id.as_deref(), Some("id-2"));
    drop((unanswered, consumer));
    let mut consumer = inbox(&shared(), &name);
    let again = consumer.next().await.unwrap();
    assert_eq!((again.id.as_deref(), again.redelivered), (Some("id-2"), true));
    again.ack().await.unwrap();
    // Whoever sends without an id gets one: the place in the stream.
    async_nats::connect(shared()).await.unwrap().request(format!("{name}.plain"), "body".into()).await.unwrap();
    let plain = consumer.next().await.unwrap();
    assert_eq!(plain.id.as_deref(), Some(format!("{name}:3").as_str()));
    assert_eq!(plain.kind, format!("{name}.plain"));
    plain.ack().await.unwrap();
    consumer.close().await;
}

#[tokio::test]
async fn a_rejected_message_goes_to_the_dead_letters_and_one_given_back_comes_again() {
    let name = unique("poison");
    let mut consumer = inbox(&shared(), &name);
    let sink = NatsSink::new(options(&shared(), &name));
    assert_eq!(sink.publish(&[of_kind(1, "ticket.poison"), of_kind(2, "ticket.later")]).await.confirmed(), 2);
    consumer.next().await.unwrap().reject("no\nticket").await.unwrap();
    consumer.next().await.unwrap().give_back().await.unwrap();
    let later = consumer.next().await.unwrap();
    assert_eq!((later.id.as_deref(), later.redelivered), (Some("id-2"), true));
    later.ack().await.unwrap();
    let dead = held(&shared(), &format!("{name}-{name}-inbox-dead")).await;
    assert_eq!(dead.len(), 1);
    assert_eq!(&dead[0].payload[..], br#"{"number":1}"#);
    let headers = dead[0].headers.as_ref().unwrap();
    for (header, value) in [("Nats-Msg-Id", "dead id-1"), ("x-reason", "no ticket"), ("Type", "ticket.poison")] {
        assert_eq!(headers.get(header).unwrap().as_str(), value);
    }
    assert_eq!(headers.get("x-subject").unwrap().as_str(), format!("{name}.ticket.poison"));
    // Longer than the time after which an unanswered message would come again.
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err(), "it came again");
}

#[tokio::test]
async fn a_consumer_that_may_not_be_declared_must_be_there() {
    let name = unique("owned");
    make_stream(
        &shared(),
        stream::Config { name: name.clone(), subjects: vec![format!("{name}.>")], ..Default::default() },
    )
    .await;
    let options = NatsConsumerOptions::new(parsed(&shared()), &name, format!("{name}.>"), "inbox");
    let mut consumer = NatsConsumer::new(NatsConsumerOptions { declare: Declare::Never, ..options });
    let error = consumer.next().await.unwrap_err().to_string();
    assert!(error.contains("may not be declared"), "{error}");
}

#[tokio::test]
async fn a_consumer_goes_on_after_its_line_was_cut_or_its_broker_restarted() {
    let mut broker = Broker::nats("").await;
    let proxy = Proxy::to(broker.port()).await;
    let sink = NatsSink::new(options(&broker.url(), "tickets"));
    assert_eq!(sink.publish(&[of_kind(1, "ticket.created"), of_kind(2, "ticket.created")]).await.confirmed(), 2);
    let mut consumer = inbox(&broker.url_by(proxy.port()), "tickets");
    let held = consumer.next().await.unwrap();
    consumer.next().await.unwrap().ack().await.unwrap();
    proxy.cut();
    assert!(consumer.next().await.is_err());
    assert!(held.ack().await.is_err());
    assert!(consumer.next().await.is_err(), "still cut");
    proxy.heal();
    let again = consumer.next().await.unwrap();
    assert_eq!((again.id.as_deref(), again.redelivered), (Some("id-1"), true));
    broker.kill();
    assert!(consumer.next().await.is_err());
    broker.start().await;
    let again = consumer.next().await.unwrap();
    assert_eq!(again.id.as_deref(), Some("id-1"));
    again.ack().await.unwrap();
}

#[tokio::test]
async fn a_consumer_notices_that_its_line_is_silent() {
    let (proxy, name) = (Proxy::to(shared_port()).await, unique("silent"));
    let sink = NatsSink::new(options(&shared(), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut consumer = inbox(&format!("nats://127.0.0.1:{}", proxy.port()), &name);
    consumer.next().await.unwrap().ack().await.unwrap();
    proxy.stall();
    let noticed = tokio::time::timeout(Duration::from_secs(40), consumer.next()).await.expect("it is noticed");
    assert!(noticed.is_err());
    proxy.heal();
    assert_eq!(sink.publish(&[message(1)]).await.confirmed(), 1);
    assert_eq!(consumer.next().await.unwrap().id.as_deref(), Some("id-1"));
}
