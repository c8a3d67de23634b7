//! Measures the outbox relay: events that RabbitMQ confirms per second through one relay and through two.
//!
//! The baseline is the rate at which the broker confirms bare messages of the same size, published in batches of a thousand.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use faena_brokers::{BrokerUrl, rabbitmq::RabbitMqSinkOptions};
use faena_domain::{NewJob, Timestamp};
use faena_engine::{Engine, EngineConfig, OutboxConfig, Roles, SinkBody, SinkConfig, Target, outbox::TimeSpent};
use faena_store::{EventSubscription, OnRejected, Store, SubscriptionMode};
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind,
    options::{
        BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions,
        QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions,
    },
    types::FieldTable,
};
use tokio_util::sync::CancellationToken;

use super::{baseline_sqlite::PAYLOAD, report::Report, scratch::Scratch, submit};

const SINK: &str = "bench";
/// Messages that a relay publishes at a time.
const BATCH: usize = 1_000;
/// The size of a job event in transit.
const BODY_BYTES: usize = 500;
const GOAL: f64 = 5_000.0;

pub async fn outbox(scratch: &mut Scratch, broker: &str, events: usize, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let broker_url = BrokerUrl::parse(broker).context("--broker")?;
    let queue = BenchQueue::create(broker).await.with_context(|| format!("cannot use {broker_url}"))?;
    let measured = async {
        report.step(&format!("{database}: {events} events to RabbitMQ"));
        let bare = queue.bare_publish_rate(events).await?;
        report.plain(database, "RabbitMQ, bare pipelined publishes", bare, "messages/s");
        let relays: &[usize] = if database == "sqlite" { &[1] } else { &[1, 2] };
        for count in relays {
            let url = scratch.fresh().await?;
            let waiting = fill(&url, events).await?;
            let RelayResult { rate, spent } = measure_relays(&url, &broker_url, &queue.name, *count, waiting).await?;
            queue.purge().await?;
            let what = if *count == 1 { "1 relay".to_owned() } else { format!("{count} relays") };
            report.against(database, &format!("outbox, {what}, confirmed"), rate, "events/s", bare, None);
            if *count == 1 {
                for (what, time) in
                    [("reading", spent.taking), ("publishing", spent.publishing), ("settling", spent.settling)]
                {
                    let ms = time.as_secs_f64() * 1_000.0 / (waiting as f64 / BATCH as f64);
                    report.plain(database, &format!("outbox, {what} 1 000 events"), ms, "ms");
                }
                report.at_least(database, "outbox, 1 relay, goal", rate, "events/s", GOAL);
            }
        }
        anyhow::Ok(())
    };
    let result = measured.await;
    // Removes the exchange and the queue even if the measurement failed.
    queue.remove().await?;
    result
}

/// Submits jobs that no worker runs. Each causes two events: created and queued.
async fn fill(url: &str, events: usize) -> Result<u64> {
    let store = submit::open(url).await?;
    let now = Timestamp::now();
    let until = now.plus_ms(24 * 3_600_000);
    let subscription = EventSubscription {
        name: SINK.into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Queue(OnRejected::Skip),
        until,
    };
    store.event_subscribe(vec![subscription], now).await?;
    let mut remaining = events / 2;
    while remaining > 0 {
        let count = remaining.min(BATCH);
        let jobs = (0..count).map(|_| NewJob { payload: PAYLOAD.into(), ..NewJob::new("noop") }).collect();
        store.job_submit(jobs, None, Timestamp::now()).await?;
        remaining -= count;
    }
    let waiting = pending_and_sent(&*store).await?.0;
    store.close().await;
    Ok(waiting)
}

/// Returns the number of waiting and of sent events.
async fn pending_and_sent(store: &dyn Store) -> Result<(u64, u64)> {
    let sinks = store.outbox_sinks(Timestamp::now()).await?;
    let sink = sinks.into_iter().find(|sink| sink.name == SINK).context("the sink does not exist")?;
    ensure!(sink.down_reason.is_none(), "the broker is down: {}", sink.down_reason.unwrap_or_default());
    Ok((sink.pending, sink.sent))
}

struct RelayResult {
    rate: f64,
    /// Time spent by the first relay.
    spent: TimeSpent,
}

async fn measure_relays(
    url: &str,
    broker: &BrokerUrl,
    exchange: &str,
    relays: usize,
    waiting: u64,
) -> Result<RelayResult> {
    let mut engines: Vec<(Arc<Engine>, Arc<dyn Store>)> = Vec::new();
    let started = Instant::now();
    for _ in 0..relays {
        let store = submit::open(url).await?;
        engines.push((Engine::start(store.clone(), config(broker, exchange)).await?, store));
    }
    let sent = || {
        engines.iter().flat_map(|(engine, _)| &engine.events.outbox.relays).map(|relay| relay.confirmed()).sum::<u64>()
    };
    // The clock starts with the first confirmed event, because connecting is not part of publishing.
    let deadline = started + Duration::from_secs(600);
    let mut first = 0;
    while first == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        first = sent();
        ensure!(Instant::now() < deadline, "nothing is published");
    }
    let began = Instant::now();
    while sent() < waiting {
        tokio::time::sleep(Duration::from_millis(5)).await;
        ensure!(Instant::now() < deadline, "{} of {waiting} were published", sent());
    }
    let rate = (sent() - first) as f64 / began.elapsed().as_secs_f64();
    let spent = engines[0].0.events.outbox.relays[0].time_spent();
    for (engine, store) in engines {
        engine.stop(CancellationToken::new()).await;
        store.close().await;
    }
    Ok(RelayResult { rate, spent })
}

/// Returns the configuration of a relay without a worker, so that no job runs.
fn config(broker: &BrokerUrl, exchange: &str) -> EngineConfig {
    let target = Target::RabbitMq(RabbitMqSinkOptions::new(broker.clone(), exchange));
    let (types, on_rejected, body) = (vec!["*".into()], OnRejected::Skip, SinkBody::CloudEvent);
    let sink = SinkConfig { name: SINK.into(), types, on_rejected, body, target };
    EngineConfig {
        roles: Roles { api: false, engine: true, worker: false },
        outbox: OutboxConfig { sinks: vec![sink], ..OutboxConfig::default() },
        ..EngineConfig::default()
    }
}

/// An exchange with one durable queue bound to every routing key.
struct BenchQueue {
    _connection: Connection,
    channel: Channel,
    name: String,
}

impl BenchQueue {
    async fn create(url: &str) -> Result<BenchQueue> {
        let name = format!("faena-bench-{}", std::process::id());
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel.exchange_declare(name.as_str().into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.as_str().into(), durable, FieldTable::default()).await?;
        let bind = QueueBindOptions::default();
        channel.queue_bind(name.as_str().into(), name.as_str().into(), "#".into(), bind, FieldTable::default()).await?;
        Ok(BenchQueue { _connection: connection, channel, name })
    }

    /// Publishes persistent messages and waits for their confirmations.
    async fn bare_publish_rate(&self, count: usize) -> Result<f64> {
        let body = vec![b'x'; BODY_BYTES];
        let began = Instant::now();
        let mut remaining = count;
        while remaining > 0 {
            let batch = remaining.min(BATCH);
            let mut confirms = VecDeque::with_capacity(batch);
            for _ in 0..batch {
                let properties = BasicProperties::default().with_delivery_mode(2);
                let (exchange, options) = (self.name.as_str().into(), BasicPublishOptions::default());
                let sent = self.channel.basic_publish(exchange, "job.created".into(), options, &body, properties);
                confirms.push_back(sent.await?);
            }
            for confirm in confirms {
                ensure!(confirm.await?.is_ack(), "the broker did not confirm a message");
            }
            remaining -= batch;
        }
        let rate = count as f64 / began.elapsed().as_secs_f64();
        self.purge().await?;
        Ok(rate)
    }

    async fn purge(&self) -> Result<()> {
        self.channel.queue_purge(self.name.as_str().into(), QueuePurgeOptions::default()).await?;
        Ok(())
    }

    async fn remove(&self) -> Result<()> {
        self.channel.queue_delete(self.name.as_str().into(), QueueDeleteOptions::default()).await?;
        self.channel.exchange_delete(self.name.as_str().into(), ExchangeDeleteOptions::default()).await?;
        Ok(())
    }
}
