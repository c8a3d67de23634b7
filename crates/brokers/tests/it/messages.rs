//! Messages for tests, and what a test looks at when they have arrived.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use bytes::Bytes;
use faena_brokers::{Message, Sink, Verdict};
use faena_domain::Timestamp;

/// A name nobody else uses on a broker that tests share.
pub fn unique(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::now_v7().simple())
}

pub fn message(number: i64) -> Message {
    Message {
        id: format!("id-{number}"),
        kind: "job.status.changed".into(),
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

pub fn of_kind(number: i64, kind: &str) -> Message {
    Message { kind: kind.into(), ..message(number) }
}

pub fn of_size(number: i64, bytes: usize) -> Message {
    Message { body: Bytes::from(format!("\"{}\"", "x".repeat(bytes - 2))), ..message(number) }
}

/// The words of a refusal; fails if it was none.
pub fn refusal(verdict: &Option<Verdict>) -> &str {
    match verdict {
        Some(Verdict::Refused(reason)) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

/// What the relay does: publishes what has no verdict again and again, in order, until everything is confirmed.
pub async fn publish_all(sink: &dyn Sink, messages: &[Message], confirmed: &AtomicUsize) {
    let deadline = Instant::now() + Duration::from_secs(120);
    for batch in messages.chunks(250) {
        let mut left: Vec<Message> = batch.to_vec();
        while !left.is_empty() {
            assert!(Instant::now() < deadline, "not everything was confirmed in time");
            let published = sink.publish(&left).await;
            let mut verdicts = published.verdicts.into_iter();
            left.retain(|_| match verdicts.next().expect("one verdict per message") {
                Some(Verdict::Confirmed) => {
                    confirmed.fetch_add(1, Ordering::SeqCst);
                    false
                }
                Some(Verdict::Refused(reason)) => panic!("refused: {reason}"),
                None => true,
            });
            if published.down.is_some() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Everything is there, in order at its first arrival.
pub fn assert_all_arrived(count: i64, arrived: &[String]) {
    let distinct: HashSet<&String> = arrived.iter().collect();
    let missing: Vec<i64> = (0..count).filter(|number| !distinct.contains(&format!("id-{number}"))).collect();
    assert!(missing.is_empty(), "{} missing, the first: {:?}", missing.len(), missing.first());
    assert_eq!(distinct.len() as i64, count, "something arrived that was never sent");
    let mut latest: HashMap<i64, i64> = HashMap::new();
    let mut seen = HashSet::new();
    for id in arrived.iter().filter(|id| seen.insert(*id)) {
        let number: i64 = id.strip_prefix("id-").and_then(|number| number.parse().ok()).expect("one of our ids");
        let before = latest.insert(number % 7, number);
        assert!(before.is_none_or(|before| before < number), "{number} arrived after {before:?}, of the same key");
    }
}

pub fn assert_no_duplicates(arrived: &[String]) {
    let distinct: HashSet<&String> = arrived.iter().collect();
    assert_eq!(distinct.len(), arrived.len(), "some arrived twice");
}
