//! Relays events to NATS JetStream.

use std::time::Duration;

use faena_brokers::{BrokerUrl, nats::NatsSinkOptions};
use faena_domain::Timestamp;
use faena_engine::Target;

use super::{
    a_wrong_password_is_not_shown, assert_envelope, build_idle_engine, config,
    destination::{Destination, Stream},
    events_of_a_job_arrive, faults_lose_nothing, sales, sell, sink,
    support::{Broker, Proxy, required_variable},
    unique,
};
use crate::fixture::{Fixture, open_sqlite};

fn target(url: &str, name: &str) -> Target {
    let options = NatsSinkOptions::new(BrokerUrl::parse(url).unwrap(), name, name);
    Target::Nats(NatsSinkOptions { timeout: Duration::from_secs(3), ..options })
}

#[tokio::test]
async fn events_of_a_job_arrive_as_cloud_events_in_order() {
    let (url, name) = (required_variable("FAENA_TEST_NATS"), unique("story"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![sink("bus", target(&url, &name))])).await;
    events_of_a_job_arrive(&fixture, &Stream { url, name }).await;
    fixture.stop().await;
}

#[tokio::test]
async fn events_of_machines_arrive_as_envelopes_under_their_names_in_order() {
    let (url, name) = (required_variable("FAENA_TEST_NATS"), unique("sales"));
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let engine = build_idle_engine(&store, vec![sales(target(&url, &name))], now).await;
    let task = sell(&*store, 1, now).await;
    engine.run_loop("relay:bus", now.plus_ms(60_000)).await.unwrap();
    let context = async_nats::jetstream::new(async_nats::connect(&url).await.unwrap());
    let stream = context.get_stream(&name).await.unwrap();
    for (position, kind) in [(1, "Sale.Paid"), (2, "sale.done")] {
        let message = stream.get_raw_message(position).await.unwrap();
        assert_eq!(message.subject.as_str(), format!("{name}.{kind}"));
        assert_eq!(message.headers.get("Content-Type").unwrap().as_str(), "application/json");
    }
    let arrived = Stream { url, name }.arrived().await;
    assert_eq!(arrived.len(), 2);
    arrived.iter().for_each(|message| assert_envelope(message, task, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_of_the_broker_loses_or_reorders_one_of_100_000_events() {
    let mut broker = Broker::nats("").await;
    let proxy = Proxy::to(broker.port()).await;
    let bus = sink("bus", target(&broker.url_with_port(proxy.port()), "events"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![bus])).await;
    let destination = Stream { url: broker.url(), name: "events".into() };
    faults_lose_nothing(&fixture, &mut broker, &proxy, &destination, 20_000).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let broker = Broker::nats("authorization { user: faena, password: right }").await;
    let url = broker.url().replace("nats://", "nats://faena:hushhush@");
    a_wrong_password_is_not_shown(target(&url, "any"), &["hushhush"]).await;
}
