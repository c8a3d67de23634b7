//! Relays events to a URL.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use faena_domain::Timestamp;
use faena_engine::{Engine, EngineConfig, Target, outbox::WebhookSinkOptions};
use parking_lot::Mutex;

use super::{Arrived, all_sent, config, destination::Destination, events_of_a_job_arrive, sink, submit_many, view};
use crate::fixture::{Fixture, open_sqlite, serve};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

#[derive(Clone, Default)]
struct Receiver {
    calls: Arc<Mutex<Vec<(HeaderMap, Bytes)>>>,
    /// Statuses of its next answers. Once they are used, it answers 200.
    next_answers: Arc<Mutex<VecDeque<StatusCode>>>,
}

impl Receiver {
    async fn start() -> (Receiver, String) {
        let receiver = Receiver::default();
        let url = serve(Router::new().fallback(answer).with_state(receiver.clone())).await;
        (receiver, url)
    }

    fn answer_with(&self, statuses: &[u16]) {
        self.next_answers.lock().extend(statuses.iter().map(|status| StatusCode::from_u16(*status).unwrap()));
    }
}

async fn answer(State(receiver): State<Receiver>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let status = receiver.next_answers.lock().pop_front().unwrap_or(StatusCode::OK);
    if status.is_success() {
        receiver.calls.lock().push((headers, body));
    }
    status
}

#[async_trait]
impl Destination for Receiver {
    async fn arrived(&self) -> Vec<Arrived> {
        let calls = self.calls.lock();
        calls.iter().map(|(headers, body)| Arrived::new(headers["webhook-id"].to_str().unwrap(), body)).collect()
    }
}

fn config_with_webhook(url: &str) -> EngineConfig {
    let options = WebhookSinkOptions {
        url: format!("{url}/events?token=hushhush").parse().unwrap(),
        secret: Some(SECRET.parse().unwrap()),
        timeout: Duration::from_secs(4),
    };
    EngineConfig {
        allowed_networks: vec!["127.0.0.0/8".parse().unwrap()],
        ..config(vec![sink("bus", Target::Webhook(options))])
    }
}

#[tokio::test]
async fn events_of_a_job_arrive_as_cloud_events_in_order_and_signed() {
    let (receiver, url) = Receiver::start().await;
    let fixture = Fixture::over(open_sqlite().await, config_with_webhook(&url)).await;
    events_of_a_job_arrive(&fixture, &receiver).await;
    let verifier = standardwebhooks::Webhook::new(SECRET).unwrap();
    for (headers, body) in receiver.calls.lock().iter() {
        verifier.verify(body, headers).unwrap();
        assert_eq!(headers["content-type"], "application/cloudevents+json");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn a_failing_receiver_uses_no_attempt_and_a_rejected_message_uses_one() {
    let (receiver, url) = Receiver::start().await;
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let engine = Engine::without_loops(store.clone(), config_with_webhook(&url), now).await.unwrap();
    engine.events.outbox.subscribe(&*store, now).await.unwrap();
    submit_many(&*store, 1).await;
    for (round, status) in [500, 429, 408, 503, 302].into_iter().enumerate() {
        receiver.answer_with(&[status]);
        engine.run_loop("relay:bus", now.plus_ms(round as i64 * 120_000)).await.unwrap();
        let sink = view(&*store, "bus").await;
        assert!(sink.down_since.is_some() && sink.pending == 2 && sink.dead == 0, "{status}: {sink:?}");
    }
    let reason = view(&*store, "bus").await.down_reason.unwrap();
    assert!(reason.starts_with(&format!("{url}/events: HTTP 500")), "{reason}");
    assert!(!reason.contains("hushhush"), "{reason}");

    receiver.answer_with(&[422]);
    engine.run_loop("relay:bus", now.plus_ms(3_600_000)).await.unwrap();
    let sink = view(&*store, "bus").await;
    assert_eq!((sink.down_since, sink.pending), (None, 1), "the other message was sent");
    engine.run_loop("relay:bus", now.plus_ms(3_800_000)).await.unwrap();
    let mut sequences: Vec<String> =
        receiver.arrived().await.iter().map(|message| message.text("sequence").to_owned()).collect();
    sequences.sort();
    assert_eq!(sequences, ["1", "2"]);
}

#[tokio::test]
async fn a_private_address_that_is_not_allowed_is_never_called() {
    let (receiver, url) = Receiver::start().await;
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let forbidden = EngineConfig { allowed_networks: Vec::new(), ..config_with_webhook(&url) };
    let engine = Engine::without_loops(store.clone(), forbidden, now).await.unwrap();
    engine.events.outbox.subscribe(&*store, now).await.unwrap();
    submit_many(&*store, 1).await;
    engine.run_loop("relay:bus", now).await.unwrap();
    let reason = view(&*store, "bus").await.down_reason.unwrap();
    assert!(reason.contains("private or reserved"), "{reason}");
    assert_eq!(receiver.arrived().await, []);
}

#[tokio::test]
async fn a_thousand_events_reach_an_unreliable_receiver_in_order() {
    let (receiver, url) = Receiver::start().await;
    for round in 0..30 {
        receiver.answer_with(&vec![200; round]);
        receiver.answer_with(&[503]);
    }
    let fixture = Fixture::over(open_sqlite().await, config_with_webhook(&url)).await;
    submit_many(&*fixture.store, 200).await;
    super::wait_for_completed(&*fixture.store, 200).await;
    all_sent(&*fixture.store, "bus").await;
    super::assert_all_arrived(&super::stored_events(&*fixture.store).await, &receiver.arrived().await);
    super::assert_nothing_rejected(&*fixture.store, &fixture.engine).await;
    fixture.stop().await;
}
