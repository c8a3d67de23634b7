//! NATS JetStream.

use std::time::Duration;

use faena_brokers::{BrokerUrl, nats::NatsSinkOptions};
use faena_engine::Target;

use super::{
    a_wrong_password_is_not_shown, config,
    destination::Stream,
    events_of_a_job_arrive, faults_lose_nothing, sink,
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
