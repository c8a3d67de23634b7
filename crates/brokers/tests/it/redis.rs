//! Tests of the Redis sink.

use std::{
    sync::atomic::AtomicUsize,
    time::{Duration, Instant},
};

use faena_brokers::{
    BrokerUrl, PublishOutcome, Sink,
    redis::{RedisSink, RedisSinkOptions},
};
use redis::{AsyncCommands, aio::MultiplexedConnection, streams::StreamRangeReply};

use crate::{
    messages::{
        assert_all_arrived, assert_no_duplicates, message, message_of_size, messages, outage, publish_all,
        publish_through_kills, rejection, unique,
    },
    support::{Broker, Proxy, required_variable},
};

fn shared_broker_url() -> String {
    required_variable("FAENA_TEST_REDIS")
}

fn options(url: &str, stream: &str) -> RedisSinkOptions {
    RedisSinkOptions {
        timeout: Duration::from_secs(60),
        ..RedisSinkOptions::new(BrokerUrl::parse(url).unwrap(), stream)
    }
}

async fn connect(url: &str) -> MultiplexedConnection {
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    redis::Client::open(url).unwrap().get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

async fn stored_ids(url: &str, stream: &str) -> Vec<String> {
    let stored: StreamRangeReply = connect(url).await.xrange_all(stream).await.unwrap();
    stored.ids.iter().map(|entry| entry.get("id").unwrap()).collect()
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let stream = unique("many");
    let sink = RedisSink::new(options(&shared_broker_url(), &stream));
    let report = sink.publish(&messages(10_000)).await;
    assert_eq!((report.confirmed(), &report.outage), (10_000, &None));
    let arrived = stored_ids(&shared_broker_url(), &stream).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn an_entry_carries_the_fields_that_receivers_need() {
    let stream = unique("fields");
    let report = RedisSink::new(options(&shared_broker_url(), &stream)).publish(&[message(5)]).await;
    assert_eq!(report.outcomes, [Some(PublishOutcome::Confirmed)]);
    let stored: StreamRangeReply = connect(&shared_broker_url()).await.xrange_all(&stream).await.unwrap();
    let field = |name: &str| stored.ids[0].get::<String>(name).unwrap();
    assert_eq!(
        (field("id"), field("type"), field("key")),
        ("id-5".into(), "job.status.changed".into(), "key-5".into())
    );
    assert_eq!((field("sequence"), field("at")), ("5".into(), "2023-11-14T22:13:20.123Z".into()));
    assert_eq!((field("correlationId"), field("body")), ("c-1".into(), r#"{"number":5}"#.into()));
    assert!(field("traceparent").starts_with("00-"));
}

#[tokio::test]
async fn a_stream_is_trimmed_to_about_its_maximum_length() {
    let stream = unique("bounded");
    let sink = RedisSink::new(RedisSinkOptions { max_length: Some(500), ..options(&shared_broker_url(), &stream) });
    assert_eq!(sink.publish(&messages(5_000)).await.confirmed(), 5_000);
    let stored = stored_ids(&shared_broker_url(), &stream).await;
    assert!((500..1_000).contains(&stored.len()), "{}", stored.len());
    assert_eq!(stored.last().unwrap(), "id-4999");
}

#[tokio::test]
async fn a_body_that_is_too_large_is_rejected_and_the_others_are_confirmed() {
    let stream = unique("sized");
    let sink = RedisSink::new(RedisSinkOptions { max_body_bytes: 1_000, ..options(&shared_broker_url(), &stream) });
    let report = sink.publish(&[message(0), message_of_size(1, 2_000), message(2)]).await;
    assert_eq!((report.confirmed(), &report.outage), (2, &None));
    assert!(rejection(&report.outcomes[1]).contains("2000 bytes"));
    assert_eq!(stored_ids(&shared_broker_url(), &stream).await, ["id-0", "id-2"]);
}

#[tokio::test]
async fn a_server_that_accepts_no_messages_is_an_outage_and_no_message_is_rejected() {
    let broker = Broker::redis("maxmemory 1\nmaxmemory-policy noeviction").await;
    let report = RedisSink::new(options(&broker.url(), "full")).publish(&messages(20)).await;
    assert_eq!(report.confirmed(), 0);
    assert!(report.outcomes.iter().all(Option::is_none));
    let error = outage(&report);
    assert!(error.contains("OOM"), "{error}");

    let mut admin = connect(&broker.url()).await;
    let _: () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(0).query_async(&mut admin).await.unwrap();
    let _: () = redis::cmd("REPLICAOF").arg("127.0.0.1").arg("1").query_async(&mut admin).await.unwrap();
    let error = outage(&RedisSink::new(options(&broker.url(), "readonly")).publish(&messages(1)).await);
    assert!(error.to_lowercase().contains("read"), "{error}");
}

#[tokio::test]
async fn a_key_of_another_type_is_reported_with_advice() {
    let stream = unique("text");
    let _: () = connect(&shared_broker_url()).await.set(&stream, "text").await.unwrap();
    let report = RedisSink::new(options(&shared_broker_url(), &stream)).publish(&messages(1)).await;
    let error = outage(&report);
    assert!(error.contains("is not a stream"), "{error}");
}

#[tokio::test]
async fn a_wrong_password_is_reported_but_not_shown() {
    let broker = Broker::redis("").await;
    let mut admin = connect(&broker.url()).await;
    let _: () = redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("right").query_async(&mut admin).await.unwrap();
    let with_password = |password: &str| broker.url().replace("redis://", &format!("redis://:{password}@"));
    assert_eq!(RedisSink::new(options(&with_password("right"), "auth")).publish(&messages(1)).await.confirmed(), 1);
    for url in [with_password("hush%2Fhush"), broker.url()] {
        let report = RedisSink::new(options(&url, "auth")).publish(&messages(1)).await;
        assert_eq!(report.outcomes, [None]);
        let error = outage(&report);
        assert!(error.to_lowercase().contains("auth") && !error.contains("hush"), "{error}");
    }
}

#[tokio::test]
async fn no_confirmed_message_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::redis("").await;
    let sink = RedisSink::new(options(&broker.url(), "killed"));
    publish_through_kills(&mut broker, sink, 30_000, [5_000, 15_000]).await;
    assert_all_arrived(30_000, &stored_ids(&broker.url(), "killed").await);
}

#[tokio::test]
async fn a_connection_cut_or_stalled_in_the_middle_of_a_window_leaves_unknown_outcomes_and_recovers() {
    let port = shared_broker_url().rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port in the URL");
    let (proxy, stream) = (Proxy::to(port).await, unique("cut"));
    let proxied = options(&format!("redis://127.0.0.1:{}", proxy.port()), &stream);
    let sink = RedisSink::new(RedisSinkOptions { timeout: Duration::from_secs(2), ..proxied });
    assert_eq!(sink.publish(&[message(0)]).await.confirmed(), 1);
    proxy.cut_after(300_000);
    let report = sink.publish(&messages(5_000)).await;
    assert!(!proxy.is_open() && report.confirmed() < 5_000 && report.outage.is_some());
    assert!(sink.publish(&messages(1)).await.outage.is_some());
    proxy.restore();
    proxy.stall_after(300_000);
    let started = Instant::now();
    let report = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(report.confirmed() < 5_000 && report.outage.is_some());
    proxy.restore();
    publish_all(&sink, &messages(5_000), &AtomicUsize::new(0)).await;
    assert_all_arrived(5_000, &stored_ids(&shared_broker_url(), &stream).await);
}
