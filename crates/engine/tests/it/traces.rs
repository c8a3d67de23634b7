//! Runs the span exporter at chosen times: which spans it sends again, and which it drops.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, atomic::Ordering},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use faena_domain::{JobId, Timestamp};
use faena_engine::{
    Engine, EngineConfig,
    traces::{Span, SpanKind, TraceConfig, Tracer},
};

use crate::fixture::{TestDatabase, open_sqlite, serve};

/// Answers of a collector, in order: status, `Retry-After`, body. After the last it answers 200.
type Answers = Arc<Mutex<VecDeque<(u16, Option<&'static str>, Vec<u8>)>>>;

struct Fixture {
    engine: Arc<Engine>,
    /// Requests that the collector has answered.
    requests: Arc<Mutex<usize>>,
    start: Timestamp,
    _database: TestDatabase,
}

async fn answer(State((answers, requests)): State<(Answers, Arc<Mutex<usize>>)>) -> (StatusCode, HeaderMap, Vec<u8>) {
    *requests.lock().unwrap() += 1;
    let (status, retry_after, body) = answers.lock().unwrap().pop_front().unwrap_or((200, None, Vec::new()));
    let headers = retry_after.map(|seconds| (axum::http::header::RETRY_AFTER, seconds.parse().unwrap()));
    (StatusCode::from_u16(status).unwrap(), headers.into_iter().collect(), body)
}

impl Fixture {
    async fn new(answers: impl IntoIterator<Item = (u16, Option<&'static str>, Vec<u8>)>) -> Fixture {
        let answers: Answers = Arc::new(Mutex::new(answers.into_iter().collect()));
        let requests: Arc<Mutex<usize>> = Arc::default();
        let router = Router::new().fallback(answer).with_state((answers, requests.clone()));
        let url = serve(router).await + "/v1/traces";
        let (store, database) = open_sqlite().await;
        let config = EngineConfig { traces: Some(TraceConfig::new(url.parse().unwrap())), ..EngineConfig::default() };
        let start = Timestamp::now();
        let engine = Engine::without_loops(store, config, start).await.unwrap();
        Fixture { engine, requests, start, _database: database }
    }

    fn tracer(&self) -> &Tracer {
        self.engine.tracer.as_deref().unwrap()
    }

    fn record(&self, count: usize) {
        for _ in 0..count {
            let context = self.tracer().begin(JobId::new().0);
            self.tracer().record(Span::new(context, None, SpanKind::Internal, "test", (1, 2)));
        }
    }

    /// Runs a round this many milliseconds after the start. Returns the number of requests so far.
    async fn run_at(&self, after_ms: i64) -> usize {
        self.engine.run_loop("trace-exporter", self.start.plus_ms(after_ms)).await.unwrap();
        *self.requests.lock().unwrap()
    }

    /// Returns the number of exported and of dropped spans.
    fn counts(&self) -> (u64, u64) {
        let exporter = &self.tracer().exporter;
        (exporter.exported.load(Ordering::Relaxed), exporter.dropped.load(Ordering::Relaxed))
    }
}

fn status(status: u16) -> (u16, Option<&'static str>, Vec<u8>) {
    (status, None, Vec::new())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_sent_again_after_a_growing_delay() {
    let fixture = Fixture::new([status(503), status(503)]).await;
    fixture.record(2);
    assert_eq!(fixture.run_at(0).await, 1);
    assert_eq!(fixture.run_at(999).await, 1);
    assert_eq!(fixture.run_at(1_000).await, 2);
    assert_eq!(fixture.run_at(2_999).await, 2);
    assert_eq!(fixture.counts(), (0, 0));
    assert_eq!(fixture.run_at(3_000).await, 3);
    assert_eq!(fixture.counts(), (2, 0));
    assert_eq!(fixture.run_at(3_000).await, 3, "there is nothing left to send");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_collector_decides_when_it_is_tried_again() {
    let fixture = Fixture::new([(429, Some("7"), Vec::new())]).await;
    fixture.record(1);
    fixture.run_at(0).await;
    assert_eq!(fixture.run_at(6_999).await, 1);
    assert_eq!(fixture.run_at(7_000).await, 2);
    assert_eq!(fixture.counts(), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_the_collector_rejects_is_dropped_and_counted() {
    let fixture = Fixture::new([status(400)]).await;
    fixture.record(3);
    fixture.run_at(0).await;
    assert_eq!(fixture.counts(), (0, 3));
    fixture.record(1);
    fixture.run_at(1_000).await;
    assert_eq!(fixture.counts(), (1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn individually_rejected_spans_are_counted() {
    // A partial success with one rejected span.
    let fixture = Fixture::new([(200, None, vec![0x0a, 0x02, 0x08, 0x01])]).await;
    fixture.record(3);
    fixture.run_at(0).await;
    assert_eq!(fixture.counts(), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_beyond_the_bound_are_dropped_and_counted() {
    let fixture = Fixture::new([]).await;
    fixture.record(20_005);
    assert_eq!(fixture.counts(), (0, 5));
    let round = fixture.engine.run_loop("trace-exporter", fixture.start).await.unwrap();
    assert!((round.handled, round.more) == (1_000, true), "a batch is bounded: {round:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_collector_there_is_no_exporter() {
    let (store, _database) = open_sqlite().await;
    let engine = Engine::without_loops(store, EngineConfig::default(), Timestamp::now()).await.unwrap();
    assert!(engine.tracer.is_none());
    assert!(engine.run_loop("trace-exporter", Timestamp::now()).await.is_err());
}
