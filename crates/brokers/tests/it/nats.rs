//! Tests of the NATS sink and consumer.

use std::{
    sync::atomic::AtomicUsize,
    time::{Duration, Instant},
};

use async_nats::jetstream::{self, stream};
use faena_brokers::{
    BrokerUrl, Consumer, Declare, PublishOutcome, Sink,
    nats::{NatsConsumer, NatsConsumerOptions, NatsSink, NatsSinkOptions},
};
use futures_util::StreamExt;

use crate::{
    messages::{
        assert_all_arrived, assert_no_duplicates, assert_notices_silence, assert_resumes, message, message_of_kind,
        message_of_size, messages, outage, publish_all, publish_through_kills, rejection, unique,
    },
    support::{Broker, Proxy, required_variable},
};

fn shared_broker_url() -> String {
    required_variable("FAENA_TEST_NATS")
}

fn shared_broker_port() -> u16 {
    shared_broker_url().rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port in the URL")
}

fn parsed(url: &str) -> BrokerUrl {
    BrokerUrl::parse(url).unwrap()
}

/// Returns options in which the stream and the subject prefix have the same name.
fn options(url: &str, name: &str) -> NatsSinkOptions {
    NatsSinkOptions { timeout: Duration::from_secs(60), ..NatsSinkOptions::new(parsed(url), name, name) }
}

async fn context(url: &str) -> jetstream::Context {
    jetstream::new(async_nats::connect(url).await.unwrap())
}

/// Returns every message of the stream, from its beginning.
async fn stored_messages(url: &str, name: &str) -> Vec<jetstream::Message> {
    let mut stream = context(url).await.get_stream(name).await.unwrap();
    let count = stream.info().await.unwrap().state.messages as usize;
    let reader = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    reader.messages().await.unwrap().take(count).map(Result::unwrap).collect().await
}

async fn stored_ids(url: &str, name: &str) -> Vec<String> {
    stored_messages(url, name)
        .await
        .iter()
        .map(|message| message.headers.as_ref().unwrap().get("Nats-Msg-Id").unwrap().to_string())
        .collect()
}

async fn create_stream(url: &str, config: stream::Config) {
    context(url).await.create_stream(config).await.unwrap();
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let name = unique("many");
    let sink = NatsSink::new(options(&shared_broker_url(), &name));
    let report = sink.publish(&messages(10_000)).await;
    assert_eq!((report.confirmed(), &report.outage), (10_000, &None));
    // Duplicates within the stream's window are confirmed and dropped.
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
    let arrived = stored_ids(&shared_broker_url(), &name).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn a_message_carries_the_fields_that_receivers_need() {
    let name = unique("fields");
    let report = NatsSink::new(options(&shared_broker_url(), &name))
        .publish(&[message_of_kind(5, "TicketStatusChangedEvent")])
        .await;
    assert_eq!(report.outcomes, [Some(PublishOutcome::Confirmed)]);
    let arrived = stored_messages(&shared_broker_url(), &name).await.remove(0);
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
async fn bad_messages_are_rejected_and_the_others_are_confirmed() {
    let name = unique("bad");
    let subjects = vec![format!("{name}.job.>")];
    create_stream(
        &shared_broker_url(),
        stream::Config { name: name.clone(), subjects, max_message_size: 50_000, ..Default::default() },
    )
    .await;
    let mixed = [
        message(0),
        message_of_kind(1, "unbound.key"),
        message_of_kind(2, "no key"),
        message_of_size(3, 2_000_000),
        message_of_size(4, 60_000),
        message(5),
    ];
    let report = NatsSink::new(options(&shared_broker_url(), &name)).publish(&mixed).await;
    assert_eq!(report.outage, None);
    assert_eq!(
        (&report.outcomes[0], &report.outcomes[5]),
        (&Some(PublishOutcome::Confirmed), &Some(PublishOutcome::Confirmed))
    );
    assert_eq!(rejection(&report.outcomes[1]), format!("no stream accepts subject \"{name}.unbound.key\""));
    assert!(rejection(&report.outcomes[2]).contains("no routing key"));
    assert!(rejection(&report.outcomes[3]).contains("max payload"), "{:?}", report.outcomes[3]);
    assert!(rejection(&report.outcomes[4]).contains("message size exceeds"), "{:?}", report.outcomes[4]);
    assert_eq!(stored_ids(&shared_broker_url(), &name).await, ["id-0", "id-5"]);
}

#[tokio::test]
async fn with_declare_never_a_missing_stream_is_reported_and_used_once_it_exists() {
    let name = unique("missing");
    let sink = NatsSink::new(NatsSinkOptions { declare: Declare::Never, ..options(&shared_broker_url(), &name) });
    let error = outage(&sink.publish(&messages(1)).await);
    assert!(error.contains("does not exist; create it"), "{error}");
    create_stream(
        &shared_broker_url(),
        stream::Config { name: name.clone(), subjects: vec![format!("{name}.>")], ..Default::default() },
    )
    .await;
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    context(&shared_broker_url()).await.delete_stream(&name).await.unwrap();
    let report = sink.publish(&messages(2)).await;
    assert_eq!(report.outcomes, [None, None]);
    assert!(outage(&report).contains("does not exist; create it"));
}

#[tokio::test]
async fn a_deleted_stream_is_created_again() {
    let name = unique("vanishing");
    let sink = NatsSink::new(options(&shared_broker_url(), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    context(&shared_broker_url()).await.delete_stream(&name).await.unwrap();
    assert!(outage(&sink.publish(&messages(1)).await).contains("was deleted"));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn a_full_stream_is_an_outage_and_no_message_is_rejected() {
    let name = unique("full");
    let config = stream::Config {
        name: name.clone(),
        subjects: vec![format!("{name}.>")],
        max_messages: 3,
        discard: stream::DiscardPolicy::New,
        ..Default::default()
    };
    create_stream(&shared_broker_url(), config).await;
    let report = NatsSink::new(options(&shared_broker_url(), &name)).publish(&messages(5)).await;
    assert_eq!((report.confirmed(), &report.outcomes[4]), (3, &None));
    let error = outage(&report);
    assert!(error.contains("maximum messages exceeded"), "{error}");
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let broker = Broker::nats("authorization { user: me, password: right }").await;
    let with_credentials = |credentials: &str| broker.url().replace("nats://", &format!("nats://{credentials}@"));
    let good = NatsSink::new(options(&with_credentials("me:right"), "auth"));
    assert_eq!(good.publish(&messages(1)).await.confirmed(), 1);
    for credentials in ["me:hush%2Fhush", "hush-token"] {
        let url = with_credentials(credentials);
        let report = NatsSink::new(options(&url, "auth")).publish(&messages(1)).await;
        assert_eq!(report.outcomes, [None]);
        let error = outage(&report);
        assert!(error.contains("denied access") && !error.contains("hush"), "{error}");
        let options = NatsConsumerOptions::new(parsed(&url), "auth", "auth.>", "inbox");
        let error = format!("{:#}", NatsConsumer::new(options).next().await.unwrap_err());
        assert!(error.contains("denied access") && !error.contains("hush"), "{error}");
    }
}

#[tokio::test]
async fn an_unreachable_server_is_an_outage() {
    let report = NatsSink::new(options("nats://127.0.0.1:1", "any")).publish(&messages(2)).await;
    assert_eq!(report.outcomes, [None, None]);
    assert!(outage(&report).starts_with("cannot connect to nats://127.0.0.1:1"));
}

#[tokio::test]
async fn no_confirmed_message_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::nats("").await;
    let sink = NatsSink::new(options(&broker.url(), "killed"));
    publish_through_kills(&mut broker, sink, 20_000, [4_000, 12_000]).await;
    assert_all_arrived(20_000, &stored_ids(&broker.url(), "killed").await);
}

#[tokio::test]
async fn a_connection_cut_in_the_middle_of_a_window_leaves_unknown_outcomes_and_recovers() {
    let (proxy, name) = (Proxy::to(shared_broker_port()).await, unique("cut"));
    let sink = NatsSink::new(options(&format!("nats://127.0.0.1:{}", proxy.port()), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut number = 1;
    for _ in 0..3 {
        proxy.cut_after(200_000);
        let batch: Vec<_> = (number..number + 5_000).map(message).collect();
        let started = Instant::now();
        let report = sink.publish(&batch).await;
        assert!(started.elapsed() < Duration::from_secs(5), "a broken connection is noticed immediately");
        assert!(!proxy.is_open() && report.confirmed() < 5_000 && report.outage.is_some(), "{:?}", report.outage);
        assert_eq!(sink.publish(&messages(1)).await.outcomes, [None]);
        proxy.restore();
        publish_all(&sink, &batch, &AtomicUsize::new(0)).await;
        number += 5_000;
    }
    let arrived = stored_ids(&shared_broker_url(), &name).await;
    assert_all_arrived(number, &arrived);
    assert_no_duplicates(&arrived);
}

#[tokio::test]
async fn a_stalled_connection_is_abandoned_after_the_timeout() {
    let (proxy, name) = (Proxy::to(shared_broker_port()).await, unique("stalled"));
    let proxied = options(&format!("nats://127.0.0.1:{}", proxy.port()), &name);
    let sink = NatsSink::new(NatsSinkOptions { timeout: Duration::from_secs(2), ..proxied });
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    proxy.stall_after(200_000);
    let started = Instant::now();
    let report = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(report.confirmed() < 5_000 && report.outage.is_some());
    let started = Instant::now();
    assert!(sink.publish(&messages(1)).await.outage.is_some(), "a new connection stalls too");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.restore();
    assert_eq!(sink.publish(&messages(100)).await.confirmed(), 100);
}

fn new_consumer(url: &str, name: &str) -> NatsConsumer {
    let options = NatsConsumerOptions::new(parsed(url), name, format!("{name}.>"), format!("{name}-inbox"));
    NatsConsumer::new(NatsConsumerOptions { prefetch: 10, ack_wait: Duration::from_secs(1), ..options })
}

#[tokio::test]
async fn a_delivery_carries_the_published_fields_and_is_not_redelivered_after_its_acknowledgement() {
    let name = unique("consumed");
    let sink = NatsSink::new(options(&shared_broker_url(), &name));
    assert_eq!(
        sink.publish(&[message_of_kind(1, "TicketCreatedEvent"), message_of_kind(2, "TicketCreatedEvent")])
            .await
            .confirmed(),
        2
    );
    let mut consumer = new_consumer(&shared_broker_url(), &name);
    let delivery = consumer.next().await.unwrap();
    assert_eq!(delivery.id.as_deref(), Some("id-1"));
    assert_eq!(delivery.kind, "TicketCreatedEvent");
    assert_eq!(delivery.subject, format!("{name}.ticket.created"));
    assert_eq!(delivery.correlation_id.as_deref(), Some("c-1"));
    assert!(delivery.traceparent.as_ref().unwrap().starts_with("00-"));
    assert_eq!((&delivery.body[..], delivery.redelivered), (&br#"{"number":1}"#[..], false));
    delivery.ack().await.unwrap();
    let unacknowledged = consumer.next().await.unwrap();
    assert_eq!(unacknowledged.id.as_deref(), Some("id-2"));
    drop((unacknowledged, consumer));
    let mut consumer = new_consumer(&shared_broker_url(), &name);
    let redelivered = consumer.next().await.unwrap();
    assert_eq!((redelivered.id.as_deref(), redelivered.redelivered), (Some("id-2"), true));
    redelivered.ack().await.unwrap();
    // A message without an id gets its position in the stream as its id.
    async_nats::connect(shared_broker_url())
        .await
        .unwrap()
        .request(format!("{name}.plain"), "body".into())
        .await
        .unwrap();
    let plain = consumer.next().await.unwrap();
    assert_eq!(plain.id.as_deref(), Some(format!("{name}:3").as_str()));
    assert_eq!(plain.kind, format!("{name}.plain"));
    plain.ack().await.unwrap();
    consumer.close().await;
}

#[tokio::test]
async fn a_rejected_message_goes_to_the_dead_letters_and_a_requeued_message_is_redelivered() {
    let name = unique("poison");
    let mut consumer = new_consumer(&shared_broker_url(), &name);
    let sink = NatsSink::new(options(&shared_broker_url(), &name));
    assert_eq!(
        sink.publish(&[message_of_kind(1, "ticket.poison"), message_of_kind(2, "ticket.later")]).await.confirmed(),
        2
    );
    consumer.next().await.unwrap().reject("no\nticket").await.unwrap();
    consumer.next().await.unwrap().requeue().await.unwrap();
    let later = consumer.next().await.unwrap();
    assert_eq!((later.id.as_deref(), later.redelivered), (Some("id-2"), true));
    later.ack().await.unwrap();
    let dead = stored_messages(&shared_broker_url(), &format!("{name}-{name}-inbox-dead")).await;
    assert_eq!(dead.len(), 1);
    assert_eq!(&dead[0].payload[..], br#"{"number":1}"#);
    let headers = dead[0].headers.as_ref().unwrap();
    for (header, value) in [("Nats-Msg-Id", "dead id-1"), ("x-reason", "no ticket"), ("Type", "ticket.poison")] {
        assert_eq!(headers.get(header).unwrap().as_str(), value);
    }
    assert_eq!(headers.get("x-subject").unwrap().as_str(), format!("{name}.ticket.poison"));
    // Longer than `ack_wait`, after which an unacknowledged message would be redelivered.
    assert!(tokio::time::timeout(Duration::from_secs(2), consumer.next()).await.is_err(), "a message was redelivered");
}

#[tokio::test]
async fn with_declare_never_a_missing_consumer_is_reported() {
    let name = unique("owned");
    create_stream(
        &shared_broker_url(),
        stream::Config { name: name.clone(), subjects: vec![format!("{name}.>")], ..Default::default() },
    )
    .await;
    let options = NatsConsumerOptions::new(parsed(&shared_broker_url()), &name, format!("{name}.>"), "inbox");
    let mut consumer = NatsConsumer::new(NatsConsumerOptions { declare: Declare::Never, ..options });
    let error = consumer.next().await.unwrap_err().to_string();
    assert!(error.contains("create it, or set declare = true"), "{error}");
}

#[tokio::test]
async fn a_consumer_resumes_after_a_cut_connection_and_a_broker_restart() {
    let mut broker = Broker::nats("").await;
    let proxy = Proxy::to(broker.port()).await;
    let sink = NatsSink::new(options(&broker.url(), "tickets"));
    assert_eq!(
        sink.publish(&[message_of_kind(1, "ticket.created"), message_of_kind(2, "ticket.created")]).await.confirmed(),
        2
    );
    let mut consumer = new_consumer(&broker.url_with_port(proxy.port()), "tickets");
    let unacknowledged = consumer.next().await.unwrap();
    consumer.next().await.unwrap().ack().await.unwrap();
    assert_resumes(&mut consumer, unacknowledged, &proxy, &mut broker).await;
}

#[tokio::test]
async fn a_consumer_notices_a_silent_connection() {
    let (proxy, name) = (Proxy::to(shared_broker_port()).await, unique("silent"));
    let sink = NatsSink::new(options(&shared_broker_url(), &name));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let mut consumer = new_consumer(&format!("nats://127.0.0.1:{}", proxy.port()), &name);
    consumer.next().await.unwrap().ack().await.unwrap();
    assert_notices_silence(&mut consumer, &proxy).await;
    assert_eq!(sink.publish(&[message(1)]).await.confirmed(), 1);
    assert_eq!(consumer.next().await.unwrap().id.as_deref(), Some("id-1"));
}
