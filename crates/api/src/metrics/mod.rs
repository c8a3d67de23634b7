//! `GET /metrics`: metrics for Prometheus, read from the engine and the store on each scrape.
//!
//! Each scrape fills a new registry, so the samples of a worker disappear when this node no longer knows the worker.

mod table;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use faena_domain::{Timestamp, schedule::TickOutcome};
use faena_engine::{breaker::BreakerState, guardian::Check};
use faena_store::{Counts, Tally};
use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::Gauge,
    },
    registry::Registry,
};

pub use table::{METRICS, Metric, MetricKind};

use crate::{Api, ApiResult};

pub async fn metrics(State(api): State<Api>) -> ApiResult<Response> {
    let mut scrape = Scrape::default();
    workers(&api, &mut scrape);
    jobs(&api, &mut scrape).await?;
    webhooks(&api, &mut scrape).await?;
    schedules(&api, &mut scrape).await?;
    outbox(&api, &mut scrape).await?;
    sources_and_inboxes(&api, &mut scrape);
    let mut text = String::new();
    encode(&mut text, &scrape.0).expect("writing to a String cannot fail");
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, content_type)], text).into_response())
}

type Labels = Vec<(&'static str, String)>;

/// Metrics of one scrape.
#[derive(Default)]
struct Scrape(Registry);

impl Scrape {
    /// Adds a gauge. A sample consists of the label values, in the order of `metric.labels`, and the number.
    ///
    /// A metric without labels has exactly one sample.
    fn gauge<const N: usize>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = ([String; N], i64)>) {
        let family = Family::<Labels, Gauge<i64, AtomicI64>>::default();
        for (values, number) in samples {
            if N == 0 {
                let gauge = Gauge::<i64, AtomicI64>::default();
                gauge.set(number);
                return self.0.register(metric.name, metric.help, gauge);
            }
            family.get_or_create(&labels(metric, values)).set(number);
        }
        self.0.register(metric.name, metric.help, family);
    }

    /// Adds a gauge without labels whose value is a number of seconds.
    fn seconds(&mut self, metric: &Metric, seconds: f64) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(seconds);
        self.0.register(metric.name, metric.help, gauge);
    }

    /// Adds a counter. Its samples have the same form as those of a gauge.
    fn counter<const N: usize>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = ([String; N], u64)>) {
        let family = Family::<Labels, Counter>::default();
        for (values, number) in samples {
            if N == 0 {
                return self.0.register(metric.name, metric.help, ConstCounter::new(number));
            }
            family.get_or_create(&labels(metric, values)).inc_by(number);
        }
        self.0.register(metric.name, metric.help, family);
    }
}

fn labels<const N: usize>(metric: &Metric, values: [String; N]) -> Labels {
    debug_assert_eq!(metric.labels.len(), N, "{}", metric.name);
    metric.labels.iter().copied().zip(values).collect()
}

/// Converts a count to the number type of gauges; a count that does not fit becomes `i64::MAX`.
fn signed(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// Returns the number that stands for a breaker state in the metrics.
fn breaker_number(state: BreakerState) -> i64 {
    match state {
        BreakerState::Closed => 0,
        BreakerState::Open => 1,
        BreakerState::HalfOpen => 2,
    }
}

fn workers(api: &Api, scrape: &mut Scrape) {
    let workers = &api.engine.workers;
    let now = Timestamp::now();
    let states = workers.states().into_iter();
    scrape.gauge(&table::WORKERS_IN_STATE, states.map(|(state, count)| ([state.as_str().to_owned()], signed(count))));
    let all = workers.all();
    let breakers = all.iter().map(|worker| ([worker.key.clone()], breaker_number(worker.breaker_state(now))));
    scrape.gauge(&table::CIRCUIT_BREAKER_STATE, breakers);
    let in_flight = all.iter().map(|worker| ([worker.key.clone()], signed(worker.load().0)));
    scrape.gauge(&table::WORKER_JOBS_IN_FLIGHT, in_flight);
    let failures = workers.dispatch_failures.load(Ordering::Relaxed);
    scrape.counter(&table::DISPATCH_FAILURES, [([], failures)]);
    let actions =
        Check::ALL.into_iter().map(|check| ([check.as_str().to_owned()], api.engine.guardian.actions.of(check)));
    scrape.counter(&table::GUARDIAN_ACTIONS, actions);
    let stale = api.engine.reports.handler.stale_reports.load(Ordering::Relaxed);
    scrape.counter(&table::STALE_REPORTS, [([], stale)]);
}

async fn jobs(api: &Api, scrape: &mut Scrape) -> ApiResult<()> {
    let counts = api.engine.store.counts().await?;
    let states = [
        (Tally::Pending, "PENDING"),
        (Tally::Queued, "QUEUED"),
        (Tally::InFlight, "IN_FLIGHT"),
        (Tally::Retrying, "RETRYING"),
        (Tally::Completed, "COMPLETED"),
        (Tally::Failed, "FAILED"),
        (Tally::Cancelled, "CANCELLED"),
    ];
    scrape.gauge(&table::JOBS_IN_STATE, states.map(|(tally, name)| ([name.to_owned()], counts.total(tally))));
    scrape.gauge(&table::DLQ_SIZE, [([], counts.total(Tally::Failed))]);
    queues(api, &counts, scrape).await
}

async fn queues(api: &Api, counts: &Counts, scrape: &mut Scrape) -> ApiResult<()> {
    let lanes = api.engine.store.lanes().await?;
    let mut depth = std::collections::BTreeMap::new();
    for lane in &lanes {
        let queued = counts.by_lane.get(&(lane.id, Tally::Queued)).copied().unwrap_or(0);
        *depth.entry([lane.queue.clone(), lane.priority.as_str().to_owned()]).or_default() += queued;
    }
    scrape.gauge(&table::QUEUE_DEPTH, depth);
    let rules = api.engine.store.rules();
    // The last sample of a queue counts: a queue with settings replaces the 0 of its lanes.
    let running = lanes.into_iter().map(|lane| ([lane.queue], 0));
    let ruled = rules.queues.iter().map(|(queue, rule)| ([queue.clone()], i64::from(rule.paused.is_some())));
    scrape.gauge(&table::QUEUE_PAUSED, running.chain(ruled));
    Ok(())
}

async fn webhooks(api: &Api, scrape: &mut Scrape) -> ApiResult<()> {
    let webhooks = &api.engine.events.webhooks;
    let states = api.engine.store.webhook_counts().await?.into_iter();
    scrape.gauge(&table::WEBHOOKS_IN_STATE, states.map(|(state, count)| ([state.as_str().to_owned()], signed(count))));
    let breakers = webhooks.breakers(Timestamp::now()).into_iter();
    scrape.gauge(&table::WEBHOOK_BREAKER_STATE, breakers.map(|(host, state)| ([host], breaker_number(state))));
    for (metric, counter) in [
        (&table::WEBHOOK_ATTEMPTS_DELIVERED, &webhooks.delivered),
        (&table::WEBHOOK_ATTEMPTS_FAILED, &webhooks.failed),
        (&table::WEBHOOK_ATTEMPTS_LATE, &webhooks.late),
    ] {
        scrape.counter(metric, [([], counter.load(Ordering::Relaxed))]);
    }
    Ok(())
}

async fn schedules(api: &Api, scrape: &mut Scrape) -> ApiResult<()> {
    let counts = api.engine.store.schedule_counts().await?;
    let states = [("active", counts.active), ("inactive", counts.inactive)];
    scrape.gauge(&table::SCHEDULES, states.map(|(state, count)| ([state.to_owned()], signed(count))));
    let ticks = TickOutcome::ALL.into_iter();
    let ticks = ticks.map(|outcome| ([outcome.as_str().to_owned()], api.engine.schedules.count(outcome)));
    scrape.counter(&table::SCHEDULE_TICKS, ticks);
    scrape.seconds(&table::SCHEDULE_LATE_SECONDS, api.engine.schedules.late_ms() as f64 / 1_000.0);
    Ok(())
}

async fn outbox(api: &Api, scrape: &mut Scrape) -> ApiResult<()> {
    let now = Timestamp::now();
    let sinks = api.engine.store.outbox_sinks(now).await?;
    scrape.gauge(&table::OUTBOX_PENDING, sinks.iter().map(|sink| ([sink.name.clone()], signed(sink.pending))));
    let oldest = sinks.iter().map(|sink| {
        let waiting_ms = sink.oldest_pending_at.map_or(0, |at| now.ms_since(at));
        ([sink.name.clone()], waiting_ms.max(0) / 1_000)
    });
    scrape.gauge(&table::OUTBOX_OLDEST_SECONDS, oldest);
    scrape.gauge(&table::OUTBOX_DEAD, sinks.iter().map(|sink| ([sink.name.clone()], signed(sink.dead))));
    scrape.counter(&table::OUTBOX_SENT, sinks.iter().map(|sink| ([sink.name.clone()], sink.sent)));
    let up = sinks.iter().map(|sink| ([sink.name.clone()], i64::from(sink.down_since.is_none())));
    scrape.gauge(&table::OUTBOX_SINK_UP, up);
    Ok(())
}

fn sources_and_inboxes(api: &Api, scrape: &mut Scrape) {
    let sample = |name: &str, outcome: &str, counter: &AtomicU64| {
        // The label is the configured name, without the prefix `source:` or `inbox:`.
        let name = name.split_once(':').map_or(name, |(_, name)| name);
        ([name.to_owned(), outcome.to_owned()], counter.load(Ordering::Relaxed))
    };
    let rows = api.engine.inputs.sources.iter().flat_map(|source| {
        [("sent", &source.sent), ("refused", &source.rejected), ("job", &source.jobs)]
            .map(|(outcome, counter)| sample(&source.name, outcome, counter))
    });
    scrape.counter(&table::SOURCE_ROWS, rows);
    let messages = api.engine.inputs.inboxes.iter().flat_map(|inbox| {
        [("job", &inbox.jobs), ("known", &inbox.duplicates), ("rejected", &inbox.rejected)]
            .map(|(outcome, counter)| sample(&inbox.name, outcome, counter))
    });
    scrape.counter(&table::INBOX_MESSAGES, messages);
}
