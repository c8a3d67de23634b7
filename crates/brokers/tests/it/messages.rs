//! Messages for tests, and assertions about their arrival.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use faena_brokers::{Consumer, Delivery, Message, PublishOutcome, PublishReport, Sink};
use faena_domain::Timestamp;

use crate::support::{Broker, Proxy};

/// Returns a name that no other test uses on the shared broker.
pub fn unique(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::now_v7().simple())
}

pub fn message(number: i64) -> Message {
    Message {
        id: format!("id-{number}"),
        kind: "job.status.changed".into(),
        routing_key: None,
        key: format!("key-{}", number % 7),
        sequence: number,
        at: Timestamp::from_ms(1_700_000_000_123),
        correlation_id: Some("c-1".into()),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        content_type: "application/json".into(),
        body: Bytes::from(format!(r#"{{"number":{number}}}"#)),
    }
}

pub fn messages(count: i64) -> Vec<Message> {
    (0..count).map(message).collect()
}

pub fn message_of_kind(number: i64, kind: &str) -> Message {
    Message { kind: kind.into(), ..message(number) }
}

pub fn message_of_size(number: i64, bytes: usize) -> Message {
    Message { body: Bytes::from(format!("\"{}\"", "x".repeat(bytes - 2))), ..message(number) }
}

/// Returns the reason of a rejection. Panics if the message was not rejected.
pub fn rejection(outcome: &Option<PublishOutcome>) -> &str {
    match outcome {
        Some(PublishOutcome::Rejected(reason)) => reason,
        other => panic!("not rejected: {other:?}"),
    }
}

/// Returns the outage with its causes. Panics if there was none.
pub fn outage(report: &PublishReport) -> String {
    let error = report.outage.as_ref().expect("an outage");
    format!("{error:#}")
}

/// Publishes like the relay: repeats the messages of unknown outcome, in order, until all are confirmed.
pub async fn publish_all(sink: &dyn Sink, messages: &[Message], confirmed: &AtomicUsize) {
    let deadline = Instant::now() + Duration::from_secs(120);
    for batch in messages.chunks(250) {
        let mut remaining: Vec<Message> = batch.to_vec();
        while !remaining.is_empty() {
            assert!(Instant::now() < deadline, "not every message was confirmed in time");
            let report = sink.publish(&remaining).await;
            let mut outcomes = report.outcomes.into_iter();
            remaining.retain(|_| match outcomes.next().expect("one outcome per message") {
                Some(PublishOutcome::Confirmed) => {
                    confirmed.fetch_add(1, Ordering::SeqCst);
                    false
                }
                Some(PublishOutcome::Rejected(reason)) => panic!("rejected: {reason}"),
                None => true,
            });
            if report.outage.is_some() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Publishes `count` messages. Kills and restarts the broker whenever one of the `kills` thresholds of confirmed messages
/// is reached.
pub async fn publish_through_kills(broker: &mut Broker, sink: impl Sink + 'static, count: i64, kills: [usize; 2]) {
    let confirmed = Arc::new(AtomicUsize::new(0));
    let counter = confirmed.clone();
    let publishing = tokio::spawn(async move { publish_all(&sink, &messages(count), &counter).await });
    for threshold in kills {
        while confirmed.load(Ordering::SeqCst) < threshold {
            assert!(!publishing.is_finished(), "publishing ended before the broker was killed");
            tokio::task::yield_now().await;
        }
        broker.kill();
        broker.start().await;
    }
    publishing.await.unwrap();
}

/// Asserts that a consumer receives `id-1` again after its connection was cut, and again after the broker was restarted.
pub async fn assert_resumes(
    consumer: &mut impl Consumer,
    unacknowledged: Delivery,
    proxy: &Proxy,
    broker: &mut Broker,
) {
    proxy.cut();
    assert!(consumer.next().await.is_err());
    assert!(unacknowledged.ack().await.is_err());
    assert!(consumer.next().await.is_err(), "the connection is still cut");
    proxy.restore();
    let redelivered = consumer.next().await.unwrap();
    assert_eq!((redelivered.id.as_deref(), redelivered.redelivered), (Some("id-1"), true));
    broker.kill();
    assert!(consumer.next().await.is_err());
    broker.start().await;
    let redelivered = consumer.next().await.unwrap();
    assert_eq!(redelivered.id.as_deref(), Some("id-1"));
    redelivered.ack().await.unwrap();
}

/// Asserts that a consumer fails when its connection carries no more data, then ends the stall.
pub async fn assert_notices_silence(consumer: &mut impl Consumer, proxy: &Proxy) {
    proxy.stall();
    let result = tokio::time::timeout(Duration::from_secs(40), consumer.next()).await.expect("an error");
    assert!(result.is_err());
    proxy.restore();
}

/// Asserts that every message arrived, and that the first arrivals of each key are in order.
pub fn assert_all_arrived(count: i64, arrived: &[String]) {
    let distinct: HashSet<&String> = arrived.iter().collect();
    let missing: Vec<i64> = (0..count).filter(|number| !distinct.contains(&format!("id-{number}"))).collect();
    assert!(missing.is_empty(), "{} messages missing, first: {:?}", missing.len(), missing.first());
    assert_eq!(distinct.len() as i64, count, "a message arrived that was never sent");
    let mut latest: HashMap<i64, i64> = HashMap::new();
    let mut seen = HashSet::new();
    for id in arrived.iter().filter(|id| seen.insert(*id)) {
        let number: i64 = id.strip_prefix("id-").and_then(|number| number.parse().ok()).expect("an id of these tests");
        let previous = latest.insert(number % 7, number);
        assert!(
            previous.is_none_or(|previous| previous < number),
            "{number} arrived after {previous:?} of the same key"
        );
    }
}

pub fn assert_no_duplicates(arrived: &[String]) {
    let distinct: HashSet<&String> = arrived.iter().collect();
    assert_eq!(distinct.len(), arrived.len(), "a message arrived twice");
}
