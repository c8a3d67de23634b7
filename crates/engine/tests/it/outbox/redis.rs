//! Relays events to Redis streams.

use std::time::Duration;

use faena_brokers::{BrokerUrl, redis::RedisSinkOptions};
use faena_engine::Target;

use super::{
    a_wrong_password_is_not_shown, config,
    destination::RedisStream,
    events_of_a_job_arrive, faults_lose_nothing, sink,
    support::{Broker, Proxy, required_variable},
    unique,
};
use crate::fixture::{Fixture, open_sqlite};

fn target(url: &str, key: &str) -> Target {
    let options = RedisSinkOptions::new(BrokerUrl::parse(url).unwrap(), key);
    Target::Redis(RedisSinkOptions { timeout: Duration::from_secs(3), ..options })
}

#[tokio::test]
async fn events_of_a_job_arrive_as_cloud_events_in_order() {
    let (url, name) = (required_variable("FAENA_TEST_REDIS"), unique("story"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![sink("bus", target(&url, &name))])).await;
    events_of_a_job_arrive(&fixture, &RedisStream { url, name }).await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_of_the_broker_loses_or_reorders_one_of_30_000_events() {
    let mut broker = Broker::redis("").await;
    let proxy = Proxy::to(broker.port()).await;
    let bus = sink("bus", target(&broker.url_with_port(proxy.port()), "events"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![bus])).await;
    let destination = RedisStream { url: broker.url(), name: "events".into() };
    faults_lose_nothing(&fixture, &mut broker, &proxy, &destination, 6_000).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let broker = Broker::redis("").await;
    let client = redis::Client::open(broker.url()).unwrap();
    let mut admin = client.get_multiplexed_async_connection().await.unwrap();
    let _: () = redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("right").query_async(&mut admin).await.unwrap();
    let url = broker.url().replace("redis://", "redis://:hushhush@");
    a_wrong_password_is_not_shown(target(&url, "any"), &["hushhush"]).await;
}
