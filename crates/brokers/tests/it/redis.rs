//! Redis streams.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use faena_brokers::{
    BrokerUrl, Sink, Verdict,
    redis::{RedisSink, RedisSinkOptions},
};
use redis::{AsyncCommands, aio::MultiplexedConnection, streams::StreamRangeReply};

use crate::{
    messages::{assert_all_arrived, assert_no_duplicates, message, messages, of_size, publish_all, unique},
    support::{Broker, Proxy, setting},
};

fn shared() -> String {
    setting("FAENA_TEST_REDIS")
}

fn options(url: &str, stream: &str) -> RedisSinkOptions {
    RedisSinkOptions {
        timeout: Duration::from_secs(60),
        ..RedisSinkOptions::new(BrokerUrl::parse(url).unwrap(), stream)
    }
}

async fn line(url: &str) -> MultiplexedConnection {
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    redis::Client::open(url).unwrap().get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

async fn held_ids(url: &str, stream: &str) -> Vec<String> {
    let held: StreamRangeReply = line(url).await.xrange_all(stream).await.unwrap();
    held.ids.iter().map(|entry| entry.get("id").unwrap()).collect()
}

#[tokio::test]
async fn ten_thousand_messages_arrive_in_order() {
    let stream = unique("many");
    let sink = RedisSink::new(options(&shared(), &stream));
    let published = sink.publish(&messages(10_000)).await;
    assert_eq!((published.confirmed(), &published.down), (10_000, &None));
    let arrived = held_ids(&shared(), &stream).await;
    assert_all_arrived(10_000, &arrived);
    assert_no_duplicates(&arrived);
    sink.close().await;
}

#[tokio::test]
async fn an_entry_carries_what_receivers_go_by() {
    let stream = unique("fields");
    let published = RedisSink::new(options(&shared(), &stream)).publish(&[message(5)]).await;
    assert_eq!(published.verdicts, [Some(Verdict::Confirmed)]);
    let held: StreamRangeReply = line(&shared()).await.xrange_all(&stream).await.unwrap();
    let field = |name: &str| held.ids[0].get::<String>(name).unwrap();
    assert_eq!(
        (field("id"), field("type"), field("key")),
        ("id-5".into(), "job.status.changed".into(), "key-5".into())
    );
    assert_eq!((field("sequence"), field("at")), ("5".into(), "2023-11-14T22:13:20.123Z".into()));
    assert_eq!((field("correlationId"), field("body")), ("c-1".into(), r#"{"number":5}"#.into()));
    assert!(field("traceparent").starts_with("00-"));
}

#[tokio::test]
async fn a_stream_is_kept_at_about_its_length() {
    let stream = unique("bounded");
    let sink = RedisSink::new(RedisSinkOptions { max_length: Some(500), ..options(&shared(), &stream) });
    assert_eq!(sink.publish(&messages(5_000)).await.confirmed(), 5_000);
    let held = held_ids(&shared(), &stream).await;
    assert!((500..1_000).contains(&held.len()), "{}", held.len());
    assert_eq!(held.last().unwrap(), "id-4999");
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_and_the_others_are_confirmed() {
    let stream = unique("sized");
    let sink = RedisSink::new(RedisSinkOptions { max_body_bytes: 1_000, ..options(&shared(), &stream) });
    let published = sink.publish(&[message(0), of_size(1, 2_000), message(2)]).await;
    assert_eq!((published.confirmed(), &published.down), (2, &None));
    assert!(crate::messages::refusal(&published.verdicts[1]).contains("2000 bytes"));
    assert_eq!(held_ids(&shared(), &stream).await, ["id-0", "id-2"]);
}

#[tokio::test]
async fn a_server_that_takes_nothing_is_down_and_no_message_is_to_blame() {
    let broker = Broker::redis("maxmemory 1\nmaxmemory-policy noeviction").await;
    let published = RedisSink::new(options(&broker.url(), "full")).publish(&messages(20)).await;
    assert_eq!(published.confirmed(), 0);
    assert!(published.verdicts.iter().all(Option::is_none));
    let reason = published.down.unwrap();
    assert!(reason.contains("OOM"), "{reason}");

    let mut admin = line(&broker.url()).await;
    let _: () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(0).query_async(&mut admin).await.unwrap();
    let _: () = redis::cmd("REPLICAOF").arg("127.0.0.1").arg("1").query_async(&mut admin).await.unwrap();
    let reason = RedisSink::new(options(&broker.url(), "readonly")).publish(&messages(1)).await.down.unwrap();
    assert!(reason.to_lowercase().contains("read"), "{reason}");
}

#[tokio::test]
async fn a_key_of_another_type_is_told_with_what_to_do() {
    let stream = unique("text");
    let _: () = line(&shared()).await.set(&stream, "no stream").await.unwrap();
    let published = RedisSink::new(options(&shared(), &stream)).publish(&messages(1)).await;
    let reason = published.down.unwrap();
    assert!(reason.contains("is no stream"), "{reason}");
}

#[tokio::test]
async fn a_wrong_password_is_told_but_not_shown() {
    let broker = Broker::redis("").await;
    let mut admin = line(&broker.url()).await;
    let _: () = redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("right").query_async(&mut admin).await.unwrap();
    let with = |password: &str| broker.url().replace("redis://", &format!("redis://:{password}@"));
    assert_eq!(RedisSink::new(options(&with("right"), "auth")).publish(&messages(1)).await.confirmed(), 1);
    for url in [with("hush%2Fhush"), broker.url()] {
        let published = RedisSink::new(options(&url, "auth")).publish(&messages(1)).await;
        assert_eq!(published.verdicts, [None]);
        let reason = published.down.unwrap();
        assert!(reason.to_lowercase().contains("auth") && !reason.contains("hush"), "{reason}");
    }
}

#[tokio::test]
async fn nothing_confirmed_is_lost_when_the_broker_is_killed_while_publishing() {
    let mut broker = Broker::redis("").await;
    let confirmed = Arc::new(AtomicUsize::new(0));
    let (sink, counter) = (RedisSink::new(options(&broker.url(), "killed")), confirmed.clone());
    let publishing = tokio::spawn(async move { publish_all(&sink, &messages(30_000), &counter).await });
    for threshold in [5_000, 15_000] {
        while confirmed.load(Ordering::SeqCst) < threshold {
            assert!(!publishing.is_finished(), "it was over before the broker was killed");
            tokio::task::yield_now().await;
        }
        broker.kill();
        broker.start().await;
    }
    publishing.await.unwrap();
    assert_all_arrived(30_000, &held_ids(&broker.url(), "killed").await);
}

#[tokio::test]
async fn a_line_cut_or_stalled_in_the_middle_of_a_window_leaves_the_rest_unknown_and_heals() {
    let port = shared().rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port in the URL");
    let (proxy, stream) = (Proxy::to(port).await, unique("cut"));
    let through = options(&format!("redis://127.0.0.1:{}", proxy.port()), &stream);
    let sink = RedisSink::new(RedisSinkOptions { timeout: Duration::from_secs(2), ..through });
    assert_eq!(sink.publish(&[message(0)]).await.confirmed(), 1);
    proxy.cut_after(300_000);
    let outcome = sink.publish(&messages(5_000)).await;
    assert!(!proxy.is_whole() && outcome.confirmed() < 5_000 && outcome.down.is_some());
    assert!(sink.publish(&messages(1)).await.down.is_some());
    proxy.heal();
    proxy.stall_after(300_000);
    let started = Instant::now();
    let outcome = sink.publish(&messages(5_000)).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(outcome.confirmed() < 5_000 && outcome.down.is_some());
    proxy.heal();
    publish_all(&sink, &messages(5_000), &AtomicUsize::new(0)).await;
    assert_all_arrived(5_000, &held_ids(&shared(), &stream).await);
}
