//! Sinks: which events of real jobs arrive, in which order, and what happens during outages.

pub mod destination;
mod file;
mod nats;
mod rabbitmq;
mod redis;
mod several;
mod webhook;

#[path = "../../../../brokers/tests/it/support/mod.rs"]
pub mod support;

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    sync::{Arc, Once},
    time::Duration,
};

use faena_domain::{NewJob, TaskId, Timestamp};
use faena_engine::{Engine, EngineConfig, OutboxConfig, SinkBody, SinkConfig, Target};
use faena_machine::{Definition, Input};
use faena_store::{DeadFilter, EventQuery, NewMachine, NewTask, OnRejected, SinkView, Store, Tally, TaskInput};
use serde_json::json;
use support::{Broker, Proxy};
use tracing_subscriber::{Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::fixture::{Fixture, job, unique};
use destination::Destination;

/// A job has five events: created, queued, assigned, started, completed.
const EVENTS_PER_JOB: usize = 5;

/// An event at the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The id by which the receiver recognises repetitions.
    pub message_id: String,
    pub body: serde_json::Value,
}

impl Arrived {
    fn new(message_id: impl Into<String>, body: &[u8]) -> Arrived {
        Arrived { message_id: message_id.into(), body: serde_json::from_slice(body).unwrap() }
    }

    fn text(&self, field: &str) -> &str {
        self.body[field].as_str().unwrap_or_else(|| panic!("no {field} in {}", self.body))
    }
}

fn sink(name: &str, target: Target) -> SinkConfig {
    let (types, on_rejected, body) = (vec!["*".into()], OnRejected::Skip, SinkBody::CloudEvent);
    SinkConfig { name: name.into(), types, on_rejected, body, target }
}

fn config(sinks: Vec<SinkConfig>) -> EngineConfig {
    let outbox = OutboxConfig { sinks, first_backoff: Duration::from_millis(50), ..OutboxConfig::default() };
    EngineConfig { outbox, concurrency: 20, ..EngineConfig::default() }
}

/// Starts an engine whose relays only run when the test runs them.
async fn build_idle_engine(store: &Arc<dyn Store>, sinks: Vec<SinkConfig>, now: Timestamp) -> Arc<Engine> {
    let engine = Engine::without_loops(store.clone(), config(sinks), now).await.unwrap();
    engine.events.outbox.subscribe(&*engine.store, now).await.unwrap();
    engine
}

async fn submit_many(store: &dyn Store, count: usize) {
    for first in (0..count).step_by(1_000) {
        let jobs: Vec<NewJob> = (first..count.min(first + 1_000)).map(|_| job("noop", "{}")).collect();
        store.job_submit(jobs, None, Timestamp::now()).await.unwrap();
    }
}

async fn view(store: &dyn Store, name: &str) -> SinkView {
    // A test may have ended the sessions of the database just before.
    let sinks = eventually_long("the sinks are listed", async || store.outbox_sinks(Timestamp::now()).await.ok()).await;
    sinks.into_iter().find(|sink| sink.name == name).unwrap_or_else(|| panic!("there is no sink {name}"))
}

async fn wait_for_completed(store: &dyn Store, count: usize) {
    eventually_long("all jobs are done", async || {
        (store.counts().await.unwrap().total(Tally::Completed) == count as i64).then_some(())
    })
    .await;
}

/// Like `eventually`, for conditions that take minutes on a busy machine.
async fn eventually_long<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..3_000 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("timed out: {what}");
}

async fn all_sent(store: &dyn Store, name: &str) {
    eventually_long("the outbox is empty", async || (view(store, name).await.pending == 0).then_some(())).await;
}

/// Returns all stored events, in order.
async fn stored_events(store: &dyn Store) -> Vec<(String, String, i64)> {
    let (mut all, mut position) = (Vec::new(), 0);
    loop {
        let page = store.event_list(EventQuery::After(position), 5_000).await.unwrap();
        let Some(last) = page.last() else { return all };
        position = last.position;
        all.extend(page.iter().map(|event| (event.id.to_string(), event.subject.to_string(), event.sequence)));
    }
}

/// Checks that every stored event has arrived and no other, that repetitions are identical, and that the first arrivals
/// of each subject are in order.
fn assert_all_arrived(stored: &[(String, String, i64)], arrived: &[Arrived]) {
    let expected: HashSet<&str> = stored.iter().map(|(id, ..)| id.as_str()).collect();
    let mut seen: HashMap<&str, &serde_json::Value> = HashMap::new();
    let mut latest: HashMap<&str, i64> = HashMap::new();
    for message in arrived {
        assert_eq!(message.message_id, message.text("id"), "the message id is the id of the event");
        if let Some(before) = seen.insert(&message.message_id, &message.body) {
            assert_eq!(*before, message.body, "a repetition is identical");
            continue;
        }
        let sequence: i64 = message.text("sequence").parse().unwrap();
        let before = latest.insert(message.text("subject"), sequence);
        assert!(
            before.is_none_or(|before| before < sequence),
            "{} came after number {before:?} of its subject",
            message.body
        );
    }
    let missing: Vec<&&str> = expected.iter().filter(|id| !seen.contains_key(**id)).collect();
    assert!(missing.is_empty(), "{} of {} are missing: {:?}", missing.len(), expected.len(), missing.first());
    assert_eq!(seen.len(), expected.len(), "an event arrived that was never stored");
}

/// Checks that nothing was rejected or dead-lettered.
async fn assert_nothing_rejected(store: &dyn Store, engine: &Engine) {
    assert_eq!(store.outbox_dead(DeadFilter::default(), None, 10).await.unwrap(), []);
    for relay in &engine.events.outbox.relays {
        assert_eq!(relay.rejected(), 0);
    }
}

/// A machine whose tasks emit `Sale.Paid` at their start and `sale.done` at their end.
const SALE: &str = "
machine: sale
version: 1
start: sale.placed
events: {sale.placed: {}, sale.finish: {}, Sale.Paid: {}, sale.done: {}}
initial: NEW
states:
  NEW: {forever: true, on: {sale.placed: PAID}}
  PAID: {forever: true, entry: [{emit: Sale.Paid, data: {amount: ctx.amount}}], on: {sale.finish: DONE}}
  DONE: {final: true, entry: [{emit: sale.done, data: {amount: ctx.amount}}]}
";

/// Creates a task of `SALE` and finishes it.
async fn sell(store: &dyn Store, amount: i64, now: Timestamp) -> TaskId {
    let definition = Arc::new(Definition::parse(SALE).unwrap());
    store.machine_register(NewMachine { definition: definition.clone() }, "test", now).await.unwrap();
    let id = TaskId::new();
    let first = faena_machine::create(&definition, id.to_string(), "test".into(), json!({"amount": amount}), now);
    let task = NewTask {
        id,
        definition,
        title: None,
        correlation: format!("sale-{amount}"),
        tags: Vec::new(),
        first: first.unwrap(),
        audit: None,
    };
    store.task_create(task, now).await.unwrap();
    let (kind, actor) = ("sale.finish".to_owned(), "test".to_owned());
    let event = faena_machine::Event { id: "f".into(), kind, payload: json!({}), actor, decider: None, at: now };
    store.task_apply(vec![TaskInput { task: id, input: Input::Event(event) }], now).await.unwrap();
    id
}

/// Returns a sink for the events of `SALE`, as bare envelopes.
fn sales(target: Target) -> SinkConfig {
    let types = vec!["Sale.*".into(), "sale.done".into()];
    SinkConfig { types, body: SinkBody::Data, ..sink("bus", target) }
}

/// Checks that a message is the bare envelope of an event.
fn assert_envelope(message: &Arrived, task: TaskId, amount: i64) {
    let metadata = &message.body["metadata"];
    assert_eq!((&metadata["taskId"], &metadata["originator"]), (&json!(task), &json!("faena")));
    assert_eq!(metadata["traceId"], message.message_id, "the message id is the id of the event");
    assert_eq!(message.body["payload"], json!({"amount": amount}));
    assert_eq!(message.body.as_object().unwrap().len(), 2, "{}", message.body);
}

/// Checks the events of a real job at the receiver.
async fn events_of_a_job_arrive(fixture: &Fixture, destination: &dyn Destination) {
    let mut ordered = job("noop", "{}");
    ordered.correlation_id = Some("order-7".into());
    let id = fixture.run_to(ordered, faena_domain::JobState::Completed).await.id.to_string();
    all_sent(&*fixture.store, "bus").await;
    let arrived: Vec<Arrived> =
        destination.arrived().await.into_iter().filter(|message| message.text("subject") == id).collect();
    let kinds: Vec<(&str, &str)> = arrived
        .iter()
        .map(|message| (message.text("type"), message.body["data"]["status"].as_str().unwrap()))
        .collect();
    assert_eq!(
        kinds,
        [
            ("job.created", "PENDING"),
            ("job.status.changed", "QUEUED"),
            ("job.status.changed", "ASSIGNED"),
            ("job.status.changed", "PROCESSING"),
            ("job.completed", "COMPLETED")
        ]
    );
    for (at, message) in arrived.iter().enumerate() {
        assert_eq!((message.text("specversion"), message.text("source")), ("1.0", "/faena"));
        assert_eq!(message.text("datacontenttype"), "application/json");
        assert_eq!(
            (message.text("correlationid"), message.text("sequence")),
            ("order-7", (at + 1).to_string().as_str())
        );
        assert!(Timestamp::parse(message.text("time")).is_some() && !message.text("actor").is_empty());
    }
}

/// Runs broker faults one after another while jobs run: the broker is down for longer than all attempts of a message take, is
/// killed while the relay publishes, loses the connection during a batch, and stops answering.
async fn faults_lose_nothing(
    fixture: &Fixture,
    broker: &mut Broker,
    proxy: &Proxy,
    destination: &dyn Destination,
    jobs: usize,
) {
    let (store, engine) = (&*fixture.store, &fixture.engine);
    let relay = engine.events.outbox.relays[0].clone();
    let confirmed = || relay.confirmed() as usize;
    let part = jobs / 4;
    let flowed = async |more: usize| {
        let before = confirmed();
        eventually_long("events flow", async || (confirmed() > before + more).then_some(())).await;
    };

    broker.kill();
    submit_many(store, part).await;
    wait_for_completed(store, part).await;
    let down = eventually_long("the outage is known", async || view(store, "bus").await.down_since).await;
    // Five rejections would take 50, 100, 200, 400 and 800 ms.
    eventually_long("five attempts' worth of time", async || (Timestamp::now().ms_since(down) > 3_000).then_some(()))
        .await;
    assert!(view(store, "bus").await.pending as usize >= part * EVENTS_PER_JOB);

    broker.start().await;
    submit_many(store, part).await;
    flowed(part).await;
    broker.kill();
    broker.start().await;

    submit_many(store, part).await;
    flowed(part).await;
    proxy.cut_after(100_000);
    eventually_long("the connection is cut", async || (!proxy.is_open()).then_some(())).await;
    proxy.restore();

    submit_many(store, jobs - 3 * part).await;
    flowed(part / 2).await;
    proxy.stall_after(100_000);
    eventually_long("the connection is silent", async || (!proxy.is_open()).then_some(())).await;
    eventually_long("the silence is noticed", async || view(store, "bus").await.down_since).await;
    proxy.restore();

    wait_for_completed(store, jobs).await;
    all_sent(store, "bus").await;
    let stored = stored_events(store).await;
    assert!(stored.len() >= jobs * EVENTS_PER_JOB, "{}", stored.len());
    assert_all_arrived(&stored, &destination.arrived().await);
    assert_nothing_rejected(store, engine).await;
    assert_eq!(view(store, "bus").await.down_since, None);
}

/// A server that can be killed with everything it has started.
struct KillableServer {
    engine: Arc<Engine>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl KillableServer {
    async fn start(url: &str, config: EngineConfig) -> KillableServer {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let url = url.to_owned();
        let starting = runtime.spawn(async move {
            let store = crate::fixture::open(&url).await;
            Engine::start(store, config).await.unwrap()
        });
        KillableServer { engine: starting.await.unwrap(), runtime: Some(runtime) }
    }

    fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for KillableServer {
    fn drop(&mut self) {
        self.kill();
    }
}

thread_local! {
    static CAPTURED: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// Captures the log of this test's thread at every level, until it is dropped.
struct Log;

impl Log {
    /// Starts capturing. Everything that logs must run on this thread, as it does in a `tokio::test`.
    ///
    /// The subscriber is global. If each thread had its own, `tracing` could disable an event for all threads, because
    /// the first thread that reaches the event has no subscriber.
    fn capture() -> Log {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(|| {
            let is_wanted = |metadata: &tracing::Metadata<'_>| {
                let is_library = ["lapin", "async_nats"].iter().any(|name| metadata.target().starts_with(name));
                !is_library && CAPTURED.with_borrow(Option::is_some)
            };
            let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| CapturedLog);
            let filter = tracing_subscriber::filter::dynamic_filter_fn(move |metadata, _| is_wanted(metadata));
            tracing_subscriber::registry().with(layer.with_filter(filter)).init();
        });
        CAPTURED.set(Some(Vec::new()));
        Log
    }

    fn text(&self) -> String {
        CAPTURED.with_borrow(|log| String::from_utf8_lossy(log.as_deref().unwrap_or_default()).into_owned())
    }

    fn count(&self, words: &str) -> usize {
        self.text().matches(words).count()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        CAPTURED.set(None);
    }
}

/// Writes to the log of this thread.
struct CapturedLog;

impl std::io::Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        CAPTURED.with_borrow_mut(|log| log.as_mut().map(|log| log.extend_from_slice(bytes)));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Checks that a sink with a wrong password is down, which is logged once, and that the password is not shown.
async fn a_wrong_password_is_not_shown(target: Target, secrets: &[&str]) {
    let log = Log::capture();
    let (store, _database) = crate::fixture::open_sqlite().await;
    let now = Timestamp::now();
    let engine = build_idle_engine(&store, vec![sink("bus", target)], now).await;
    submit_many(&*store, 1).await;
    for round in 0..3 {
        let done = engine.run_loop("relay:bus", now.plus_ms(round * 600_000)).await.unwrap();
        assert_eq!(done.handled, 0);
    }
    let view = view(&*store, "bus").await;
    let reason = view.down_reason.clone().unwrap();
    assert_eq!((view.pending, view.dead), (2, 0), "no attempt is used");
    assert_eq!(log.count("sink is down"), 1, "once per change, not per attempt: {}", log.text());
    for secret in secrets {
        assert!(!format!("{reason} {engine:?}", engine = engine.config).contains(secret), "{reason}");
        assert!(!log.text().contains(secret), "{}", log.text());
    }
}
