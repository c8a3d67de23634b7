//! Webhooks to real receivers on loopback that work, fail or disappear.

use std::{
    collections::{HashMap, HashSet},
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use faena_domain::AddressRule;
use faena_domain::{JobId, JobState, LogEvent, NewJob, NodeId, Timestamp, WebhookId, WebhookState, WebhookView};
use faena_engine::{EngineConfig, WebhookConfig, Webhooks};
use faena_store::{Store, WebhookFilter, WebhookTakeRequest};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::fixture::{Fixture, eventually, open_postgres, open_sqlite, submit};

const NEW_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD_SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// A receiver in a runtime of its own, so that it can die with all its connections.
struct Receiver {
    port: u16,
    state: Arc<ReceiverState>,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct ReceiverState {
    calls: Mutex<Vec<Call>>,
    /// Percentage of calls that fail, and the state of the random numbers that decide which.
    failing: Mutex<(u64, u64)>,
}

#[derive(Clone)]
struct Call {
    headers: HeaderMap,
    body: Bytes,
    from: SocketAddr,
    response: StatusCode,
}

impl Call {
    fn id(&self) -> String {
        self.header("webhook-id")
    }

    fn header(&self, name: &str) -> String {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}")).to_str().unwrap().to_owned()
    }
}

impl Receiver {
    fn start() -> Receiver {
        let mut receiver = Receiver { port: 0, state: Arc::default(), runtime: None };
        receiver.open();
        receiver
    }

    fn open(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).unwrap();
        self.port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let router = Router::new().fallback(answer).with_state(self.state.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Closes all connections.
    fn close(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if self.runtime.is_some() {
            self.close();
        }
    }
}

async fn answer(
    State(state): State<Arc<ReceiverState>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let fails = {
        let mut failing = state.failing.lock();
        failing.1 = failing.1.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (failing.1 >> 33) % 100 < failing.0
    };
    let response = match parts.uri.path() {
        _ if fails => (StatusCode::INTERNAL_SERVER_ERROR, "random failure").into_response(),
        "/broken" => (StatusCode::INTERNAL_SERVER_ERROR, "broken").into_response(),
        "/missing" => StatusCode::NOT_FOUND.into_response(),
        "/busy" => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "7")]).into_response(),
        "/very-busy" => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "100000")]).into_response(),
        "/elsewhere" => (StatusCode::TEMPORARY_REDIRECT, [("location", "/good")]).into_response(),
        "/endless" => {
            let parts = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 100])));
            Body::from_stream(parts).into_response()
        }
        "/slow-end" => {
            let parts = futures_util::stream::once(async { Ok::<_, std::io::Error>(Bytes::from_static(b"soon")) });
            Body::from_stream(futures_util::StreamExt::chain(parts, futures_util::stream::pending())).into_response()
        }
        "/silent" => {
            let call = Call { headers: parts.headers, body, from, response: StatusCode::PROCESSING };
            state.calls.lock().push(call);
            return std::future::pending().await;
        }
        _ => "thanks".into_response(),
    };
    state.calls.lock().push(Call { headers: parts.headers, body, from, response: response.status() });
    response
}

fn config(webhooks: WebhookConfig) -> EngineConfig {
    EngineConfig { allowed_networks: vec!["127.0.0.0/8".parse().unwrap()], webhooks, ..EngineConfig::default() }
}

fn short_delays() -> WebhookConfig {
    WebhookConfig {
        base_delay: Duration::from_millis(5),
        breaker: Duration::from_millis(50),
        secrets: vec![NEW_SECRET.parse().unwrap(), OLD_SECRET.parse().unwrap()],
        ..WebhookConfig::default()
    }
}

fn job_with_webhook(url: String) -> NewJob {
    let mut job = NewJob::new("noop");
    job.options.webhook_url = Some(url);
    job
}

async fn webhook_of(store: &dyn Store, job: JobId) -> WebhookView {
    let filter = WebhookFilter { job: Some(job), ..WebhookFilter::default() };
    let found = store.webhook_list(filter, None, 10).await.unwrap();
    store.webhook_get(found[0].id).await.unwrap().unwrap()
}

/// Waits until the webhook of a job is in this state.
async fn wait_for_webhook_state(store: &dyn Store, job: JobId, state: WebhookState) -> WebhookView {
    let filter = WebhookFilter { job: Some(job), state: Some(state), ..WebhookFilter::default() };
    eventually(state.as_str(), async || {
        let found = store.webhook_list(filter.clone(), None, 10).await.unwrap();
        store.webhook_get(found.first()?.id).await.unwrap()
    })
    .await
}

fn verifies(call: &Call, secret: &str) -> bool {
    standardwebhooks::Webhook::new(secret).unwrap().verify(&call.body, &call.headers).is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_contains_the_end_of_the_job_and_a_signature() {
    let (fixture, receiver) = (Fixture::with(config(short_delays())).await, Receiver::start());
    let mut job = job_with_webhook(receiver.url("/good?token=1"));
    job.correlation_id = Some("order-7".into());
    job.options.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    let id = fixture.submit(job).await;
    let webhook = wait_for_webhook_state(&*fixture.store, id, WebhookState::Delivered).await;
    let calls = receiver.calls();
    assert_eq!(calls.len(), 1);
    let call = &calls[0];
    assert_eq!(call.body, webhook.body.unwrap().get().as_bytes());
    let body: serde_json::Value = serde_json::from_slice(&call.body).unwrap();
    assert_eq!(
        (&body["jobId"], &body["jobType"], &body["status"]),
        (&id.to_string().into(), &"noop".into(), &"completed".into())
    );
    assert_eq!(call.id(), webhook.id.to_string());
    assert_eq!(call.header("x-webhook-event"), "job.status");
    assert_eq!(call.header("content-type"), "application/json");
    assert_eq!((call.header("x-job-id"), call.header("x-correlation-id")), (id.to_string(), "order-7".into()));
    assert_eq!(call.header("traceparent"), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    assert!(verifies(call, NEW_SECRET) && verifies(call, OLD_SECRET), "either secret verifies it");
    assert!(!verifies(call, "whsec_QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJC"));
    let mut forged = call.clone();
    forged.body = Bytes::from_static(b"{}");
    assert!(!verifies(&forged, NEW_SECRET));
    assert_eq!((webhook.history[0].status, webhook.history[0].answer.as_deref()), (Some(200), Some("thanks")));
    let log = fixture.job(id).await.execution_log;
    let line = log.iter().find(|entry| entry.event == LogEvent::WebhookSent).unwrap();
    assert!(
        line.details.contains("/good: HTTP 200 in") && line.details.ends_with("attempt 1 of 3"),
        "{}",
        line.details
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_secrets_nothing_is_signed() {
    let unsigned = WebhookConfig { secrets: Vec::new(), ..short_delays() };
    let (fixture, receiver) = (Fixture::with(config(unsigned)).await, Receiver::start());
    let id = fixture.submit(job_with_webhook(receiver.url("/good"))).await;
    wait_for_webhook_state(&*fixture.store, id, WebhookState::Delivered).await;
    assert!(!receiver.calls()[0].headers.contains_key("webhook-signature"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_fails_and_restarts_receives_everything_on_sqlite() {
    assert_everything_arrives(open_sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_fails_and_restarts_receives_everything_on_postgres() {
    assert_everything_arrives(open_postgres().await).await;
}

async fn assert_everything_arrives(database: (Arc<dyn Store>, crate::fixture::TestDatabase)) {
    const JOBS: usize = 300;
    const ATTEMPTS: u32 = 12;
    let mut receiver = Receiver::start();
    *receiver.state.failing.lock() = (30, 4_711);
    let fixture = Fixture::over(database, config(WebhookConfig { attempts: ATTEMPTS, ..short_delays() })).await;
    let jobs: Vec<NewJob> = (0..JOBS).map(|_| job_with_webhook(receiver.url("/good"))).collect();
    let ids: Vec<JobId> =
        fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap().into_iter().map(|job| job.id).collect();
    eventually("a third of the calls", async || (receiver.calls().len() > JOBS / 3).then_some(())).await;
    receiver.close();
    let waiting = WebhookFilter { state: Some(WebhookState::Waiting), ..WebhookFilter::default() };
    eventually("some attempts without a receiver", async || {
        let found = fixture.store.webhook_list(waiting.clone(), None, 1).await.unwrap();
        found.first().filter(|webhook| webhook.attempts > 0).map(|_| ())
    })
    .await;
    receiver.open();
    let mut webhooks = HashMap::new();
    for id in &ids {
        let webhook = wait_for_webhook_state(&*fixture.store, *id, WebhookState::Delivered).await;
        webhooks.insert(webhook.id.to_string(), webhook);
    }
    let calls = receiver.calls();
    assert!(calls.len() > JOBS, "some were sent again: {}", calls.len());
    let mut per_id: HashMap<String, u32> = HashMap::new();
    for call in &calls {
        assert!(verifies(call, NEW_SECRET) && verifies(call, OLD_SECRET));
        *per_id.entry(call.id()).or_default() += 1;
    }
    let arrived: HashSet<String> = calls.iter().filter(|call| call.response.is_success()).map(Call::id).collect();
    assert_eq!(arrived, webhooks.keys().cloned().collect(), "all webhooks have arrived, and no others");
    for (id, webhook) in &webhooks {
        assert!(per_id[id] <= webhook.attempts && webhook.attempts <= ATTEMPTS, "{} calls: {webhook:?}", per_id[id]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_receiver_does_not_delay_others() {
    let silent = Receiver::start();
    let (endless, slow_end, broken, elsewhere, good) =
        (Receiver::start(), Receiver::start(), Receiver::start(), Receiver::start(), Receiver::start());
    let closing = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closing_url = format!("http://{}/", closing.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            drop(closing.accept().await.unwrap());
        }
    });
    let long_timeout =
        WebhookConfig { timeout: Duration::from_secs(50), base_delay: Duration::from_secs(100), ..short_delays() };
    let fixture = Fixture::with(config(long_timeout)).await;
    let mut bad = Vec::new();
    for _ in 0..20 {
        bad.push(fixture.submit(job_with_webhook(silent.url("/silent"))).await);
    }
    eventually("as many calls as one host may have", async || (silent.calls().len() == 8).then_some(())).await;
    let broken = fixture.submit(job_with_webhook(broken.url("/broken"))).await;
    let elsewhere_id = fixture.submit(job_with_webhook(elsewhere.url("/elsewhere"))).await;
    let closing = fixture.submit(job_with_webhook(closing_url)).await;
    let endless = fixture.submit(job_with_webhook(endless.url("/endless"))).await;
    let slow_end = fixture.submit(job_with_webhook(slow_end.url("/slow-end"))).await;
    let mut submitted = Vec::new();
    for _ in 0..40 {
        submitted.push(fixture.submit(job_with_webhook(good.url("/good"))).await);
    }
    for id in submitted {
        wait_for_webhook_state(&*fixture.store, id, WebhookState::Delivered).await;
    }
    assert_eq!(silent.calls().len(), 8, "no more concurrent calls than allowed");
    for id in bad {
        let webhook = webhook_of(&*fixture.store, id).await;
        assert!(!webhook.state.is_terminal(), "{webhook:?}");
    }
    let endless = wait_for_webhook_state(&*fixture.store, endless, WebhookState::Delivered).await;
    assert_eq!(endless.history[0].answer.as_ref().unwrap().len(), 1_024);
    let slow_end = wait_for_webhook_state(&*fixture.store, slow_end, WebhookState::Delivered).await;
    assert_eq!(slow_end.history[0].answer.as_deref(), Some("soon"), "the rest of the body is not awaited");
    for (id, error) in [(broken, "HTTP 500"), (elsewhere_id, "redirects are not followed"), (closing, "error sending")]
    {
        let webhook = eventually("a failed attempt", async || {
            Some(webhook_of(&*fixture.store, id).await).filter(|webhook| !webhook.history.is_empty())
        })
        .await;
        assert_eq!((webhook.state, webhook.history.len()), (WebhookState::Waiting, 1), "it is not lost");
        assert!(webhook.history[0].error.as_ref().unwrap().contains(error), "{:?}", webhook.history);
    }
    assert_eq!(elsewhere.calls().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_does_not_answer_in_time_counts_as_failed() {
    let short_timeout = WebhookConfig { timeout: Duration::from_millis(50), attempts: 2, ..short_delays() };
    let (fixture, receiver) = (Fixture::with(config(short_timeout)).await, Receiver::start());
    let id = fixture.submit(job_with_webhook(receiver.url("/silent"))).await;
    let webhook = wait_for_webhook_state(&*fixture.store, id, WebhookState::Failed).await;
    let errors: Vec<&str> = webhook.history.iter().map(|attempt| attempt.error.as_deref().unwrap()).collect();
    assert_eq!(errors, ["no answer within 50ms", "no answer within 50ms"]);
    assert_eq!(receiver.calls().len(), 2, "no more attempts than allowed");
    assert_eq!(fixture.job(id).await.status, JobState::Completed, "the job is not affected");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_address_is_rejected_immediately_whatever_its_name() {
    let receiver = Receiver::start();
    let forbidden = EngineConfig { allowed_networks: Vec::new(), ..config(short_delays()) };
    let fixture = Fixture::with(forbidden).await;
    for host in ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "0x7f.1"] {
        let id = fixture.submit(job_with_webhook(format!("http://{host}:{}/good", receiver.port))).await;
        let webhook = wait_for_webhook_state(&*fixture.store, id, WebhookState::Failed).await;
        assert_eq!(webhook.attempts, 1, "{host}: a retry would be rejected too");
        let error = webhook.history[0].error.as_ref().unwrap();
        assert!(error.contains("private or reserved address"), "{host}: {error}");
    }
    assert_eq!(receiver.calls().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_attempt_checks_its_address_again() {
    let (fixture, receiver) = (Fixture::with(config(short_delays())).await, Receiver::start());
    for _ in 0..3 {
        let id = fixture.submit(job_with_webhook(receiver.url("/good"))).await;
        wait_for_webhook_state(&*fixture.store, id, WebhookState::Delivered).await;
    }
    let connections: HashSet<SocketAddr> = receiver.calls().iter().map(|call| call.from).collect();
    assert_eq!(connections.len(), 3, "no connection is reused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_can_be_redelivered_manually() {
    let (fixture, receiver) = (Fixture::with(config(short_delays())).await, Receiver::start());
    let id = fixture.submit(job_with_webhook(receiver.url("/good"))).await;
    let webhook = wait_for_webhook_state(&*fixture.store, id, WebhookState::Delivered).await;
    fixture.store.webhook_redeliver(webhook.id, "ana", Timestamp::now()).await.unwrap();
    let redelivered = eventually("delivered again", async || {
        Some(webhook_of(&*fixture.store, id).await)
            .filter(|webhook| webhook.history.len() == 2 && webhook.state.is_terminal())
    })
    .await;
    assert_eq!(redelivered.state, WebhookState::Delivered);
    let ids: Vec<String> = receiver.calls().iter().map(Call::id).collect();
    assert_eq!(ids, [webhook.id.to_string(), webhook.id.to_string()], "both have the same id");
}

// Rounds at simulated times.

/// A sender without an engine.
struct Rounds {
    store: Arc<dyn Store>,
    webhooks: Arc<Webhooks>,
    node: NodeId,
    start: Timestamp,
    _database: crate::fixture::TestDatabase,
}

impl Rounds {
    async fn new(config: WebhookConfig) -> Rounds {
        let (store, database) = open_sqlite().await;
        let webhooks = sender(config);
        Rounds { store, webhooks, node: NodeId::new(), start: Timestamp::now(), _database: database }
    }

    /// Creates a job that has ended.
    async fn finished_job(&self, url: String) -> JobId {
        let id = submit(&*self.store, job_with_webhook(url)).await;
        self.store.job_cancel(id, "not wanted", None, self.start).await.unwrap();
        id
    }

    /// Runs one round at `ms`, waits until its attempts have ended, and stores their results.
    async fn round(&self, ms: i64) -> Option<Timestamp> {
        let now = self.start.plus_ms(ms);
        let round = self.webhooks.run_once(&*self.store, self.node, now).await.unwrap();
        eventually("all attempts have ended", async || {
            self.webhooks.store_results(&*self.store, now).await.unwrap();
            tokio::time::timeout(Duration::from_millis(1), self.webhooks.wait_until_flushed()).await.ok()
        })
        .await;
        round.next_at
    }

    async fn webhook(&self, job: JobId) -> WebhookView {
        webhook_of(&*self.store, job).await
    }
}

fn sender(config: WebhookConfig) -> Arc<Webhooks> {
    Arc::new(Webhooks::new(config, AddressRule::new(&["127.0.0.0/8".parse().unwrap()])))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_webhooks_of_a_dead_sender_are_sent_by_another() {
    let (rounds, receiver) = (Rounds::new(WebhookConfig::default()).await, Receiver::start());
    let job = rounds.finished_job(receiver.url("/good")).await;
    let dead = WebhookTakeRequest {
        node: NodeId::new(),
        limit: 10,
        per_host: 10,
        host_capacities: Vec::new(),
        allowed: 3,
        lease_ms: 40_000,
    };
    let taken = rounds.store.webhook_take(dead, rounds.start).await.unwrap();
    assert_eq!(taken.deliveries.len(), 1);
    let next_at = rounds.round(39_999).await;
    assert_eq!((next_at, receiver.calls().len()), (Some(rounds.start.plus_ms(40_000)), 0), "not early");
    rounds.round(40_000).await;
    let webhook = rounds.webhook(job).await;
    assert_eq!((webhook.state, webhook.history.len()), (WebhookState::Delivered, 2));
    assert_eq!(receiver.calls()[0].id(), taken.deliveries[0].id.to_string(), "with the same id");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delay_between_attempts_grows_or_follows_retry_after() {
    let (rounds, receiver) = (Rounds::new(WebhookConfig::default()).await, Receiver::start());
    for (path, wanted) in [("/missing", 1_000), ("/busy", 7_000), ("/very-busy", 300_000)] {
        let job = rounds.finished_job(receiver.url(path)).await;
        rounds.round(0).await;
        let webhook = rounds.webhook(job).await;
        assert_eq!(webhook.due_at.unwrap().ms_since(webhook.history[0].at), wanted, "{path}");
    }
    let job = rounds.finished_job(receiver.url("/missing")).await;
    let mut now = 0;
    for wanted in [Some(1_000), Some(2_000), None] {
        rounds.round(now).await;
        let webhook = rounds.webhook(job).await;
        let last = webhook.history.last().unwrap();
        assert_eq!(webhook.due_at.map(|at| at.ms_since(last.at)), wanted);
        now = webhook.due_at.map_or(0, |at| at.ms_since(rounds.start));
    }
    assert_eq!(rounds.webhook(job).await.state, WebhookState::Failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_circuit_uses_no_attempts() {
    let once = WebhookConfig { attempts: 1, per_host: 5, ..WebhookConfig::default() };
    let (rounds, receiver) = (Rounds::new(once).await, Receiver::start());
    *receiver.state.failing.lock() = (100, 1);
    let mut jobs = Vec::new();
    for _ in 0..10 {
        jobs.push(rounds.finished_job(receiver.url("/good")).await);
    }
    rounds.round(0).await;
    assert_eq!(receiver.calls().len(), 5);
    *receiver.state.failing.lock() = (0, 1);
    let next_at = rounds.round(10_000).await.unwrap();
    assert_eq!(receiver.calls().len(), 5, "its circuit is open");
    let reason = rounds.webhooks.delay_reason(&receiver.url("/good"), rounds.start.plus_ms(10_000)).unwrap();
    assert!(reason.contains("its circuit is open until"), "{reason}");
    assert!((29_000..=35_000).contains(&next_at.ms_since(rounds.start)), "{next_at}");
    for (ms, expected_calls) in [(36_000, 8), (36_001, 10)] {
        rounds.round(ms).await;
        assert_eq!(receiver.calls().len(), expected_calls, "three probes, and the rest when they succeeded");
    }
    let mut states = HashMap::new();
    for job in jobs {
        *states.entry(rounds.webhook(job).await.state).or_insert(0) += 1;
    }
    assert_eq!(states, HashMap::from([(WebhookState::Failed, 5), (WebhookState::Delivered, 5)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_failing_hosts_are_all_retried_on_time() {
    let rounds = Rounds::new(WebhookConfig::default()).await;
    let receivers: Vec<Receiver> = (0..6).map(|_| Receiver::start()).collect();
    for receiver in &receivers {
        *receiver.state.failing.lock() = (100, 1);
        rounds.finished_job(receiver.url("/good")).await;
    }
    for (ms, calls) in [(0, 1), (1_500, 2), (5_000, 3)] {
        rounds.round(ms).await;
        let call_counts: Vec<usize> = receivers.iter().map(|receiver| receiver.calls().len()).collect();
        assert_eq!(call_counts, [calls; 6], "after {ms} ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_error_does_not_open_the_circuit_of_a_host() {
    let once = WebhookConfig { attempts: 1, ..WebhookConfig::default() };
    let (rounds, receiver) = (Rounds::new(once).await, Receiver::start());
    for _ in 0..8 {
        rounds.finished_job(receiver.url("/missing")).await;
    }
    rounds.round(0).await;
    let job = rounds.finished_job(receiver.url("/good")).await;
    rounds.round(1).await;
    assert_eq!(
        rounds.webhook(job).await.state,
        WebhookState::Delivered,
        "other webhooks to the same host are not delayed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_hosts_use_at_most_half_of_the_capacity() {
    let few = WebhookConfig {
        concurrency: 4,
        base_delay: Duration::ZERO,
        timeout: Duration::from_secs(20),
        ..WebhookConfig::default()
    };
    let rounds = Rounds::new(few).await;
    let failing: Vec<Receiver> = (0..3).map(|_| Receiver::start()).collect();
    let good = Receiver::start();
    for receiver in &failing {
        rounds.finished_job(receiver.url("/broken")).await;
    }
    rounds.round(0).await;
    let all = || failing.iter().map(|receiver| receiver.calls().len()).sum::<usize>();
    assert_eq!(all(), 3);
    // From now on they do not answer; their webhooks are due earlier than those of the healthy host.
    for receiver in &failing {
        for _ in 0..5 {
            rounds.finished_job(receiver.url("/silent")).await;
        }
    }
    for _ in 0..5 {
        rounds.finished_job(good.url("/good")).await;
    }
    let now = rounds.start.plus_ms(5_000);
    eventually("the healthy host has received everything", async || {
        rounds.webhooks.run_once(&*rounds.store, rounds.node, now).await.unwrap();
        (good.calls().len() == 5).then_some(())
    })
    .await;
    let silent =
        |receiver: &Receiver| receiver.calls().iter().filter(|call| call.response == StatusCode::PROCESSING).count();
    let in_progress: usize = failing.iter().map(silent).sum();
    assert!(in_progress <= 2, "{in_progress} of 4 attempts wait for failing hosts");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_senders_send_each_webhook_once() {
    let (rounds, receiver) = (Rounds::new(WebhookConfig::default()).await, Receiver::start());
    for _ in 0..60 {
        rounds.finished_job(receiver.url("/good")).await;
    }
    let senders: Vec<Arc<Webhooks>> = (0..4).map(|_| sender(WebhookConfig::default())).collect();
    let all = WebhookFilter { state: Some(WebhookState::Delivered), ..WebhookFilter::default() };
    eventually("all delivered", async || {
        for webhooks in &senders {
            webhooks.run_once(&*rounds.store, NodeId::new(), rounds.start.plus_ms(1)).await.unwrap();
        }
        (rounds.store.webhook_list(all.clone(), None, 100).await.unwrap().len() == 60).then_some(())
    })
    .await;
    let ids: Vec<String> = receiver.calls().iter().map(Call::id).collect();
    assert_eq!((ids.len(), ids.iter().collect::<HashSet<_>>().len()), (60, 60));
    assert!(ids.iter().all(|id| id.parse::<WebhookId>().is_ok()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_stores_the_last_results_and_does_not_wait_for_a_silent_receiver() {
    let receiver = Receiver::start();
    let fixture = Fixture::with(config(short_delays())).await;
    let silent = fixture.submit(job_with_webhook(receiver.url("/silent"))).await;
    eventually("the call", async || (receiver.calls().len() == 1).then_some(())).await;
    let began = std::time::Instant::now();
    fixture.stop().await;
    assert!(began.elapsed() < Duration::from_secs(9), "it waited {:?}", began.elapsed());
    assert_eq!(webhook_of(&*fixture.store, silent).await.state, WebhookState::Sending, "its lease will expire");
}
