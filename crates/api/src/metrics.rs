//! `GET /metrics`: figures for Prometheus, read from the engine when they are asked for.
//!
//! Nothing is kept between two scrapes: a worker that is gone is gone from the figures too.

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

use crate::{Api, ApiError};

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge<i64, AtomicI64>>;

pub async fn metrics(State(api): State<Api>) -> Result<Response, ApiError> {
    let mut registry = Registry::default();
    workers(&api, &mut registry);
    jobs(&api, &mut registry).await?;
    webhooks(&api, &mut registry).await?;
    schedules(&api, &mut registry).await?;
    outbox(&api, &mut registry).await?;
    from_outside(&api, &mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).expect("a String takes everything");
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

fn workers(api: &Api, registry: &mut Registry) {
    let workers = &api.engine.workers;
    let now = Timestamp::now();
    let (states, breakers, held) = (Gauges::default(), Gauges::default(), Gauges::default());
    for (state, count) in workers.states() {
        states.get_or_create(&vec![("state", state.as_str().to_owned())]).set(count as i64);
    }
    for worker in workers.all() {
        let label = vec![("worker_id", worker.key.clone())];
        let state = match worker.breaker_state(now) {
            BreakerState::Closed => 0,
            BreakerState::Open => 1,
            BreakerState::HalfOpen => 2,
        };
        breakers.get_or_create(&label).set(state);
        held.get_or_create(&label).set(worker.load().0 as i64);
    }
    registry.register("workers_in_state", "Workers connected to this node, by state", states);
    registry.register("circuit_breaker_state", "0 closed, 1 open, 2 half open, of each worker of this node", breakers);
    registry.register("worker_jobs_held", "Jobs in the hands of each worker of this node", held);
    let failures = ConstCounter::new(workers.dispatch_failures.load(Ordering::Relaxed));
    registry.register("dispatch_failures", "Jobs that a worker was handed and did not take or start", failures);
    let stale = ConstCounter::new(api.engine.report_handler.stale_reports.load(Ordering::Relaxed));
    let actions = Family::<Labels, Counter>::default();
    for check in Check::ALL {
        let label = vec![("check", check.as_str().to_owned())];
        actions.get_or_create(&label).inc_by(api.engine.actions.of(check));
    }
    registry.register("guardian_acts", "What the guardian of this node had to do, by what it watches", actions);
    registry.register("stale_reports", "Reports that were refused: too late, or about a job in other hands", stale);
}

async fn webhooks(api: &Api, registry: &mut Registry) -> Result<(), ApiError> {
    let webhooks = &api.engine.webhooks;
    let (states, breakers) = (Gauges::default(), Gauges::default());
    for (state, count) in api.engine.store.webhook_counts().await? {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        states.get_or_create(&vec![("state", state.as_str().to_owned())]).set(count);
    }
    for (host, state) in webhooks.breakers(Timestamp::now()) {
        breakers.get_or_create(&vec![("host", host)]).set(if state == BreakerState::Open { 1 } else { 2 });
    }
    registry.register("webhooks_in_state", "Webhooks that are not delivered, by state, each up to 100000", states);
    registry.register("webhook_breaker_state", "1 open, 2 half open, of each host that keeps failing", breakers);
    for (name, help, counter) in [
        ("webhook_attempts_delivered", "Attempts of this node that were delivered", &webhooks.delivered),
        ("webhook_attempts_failed", "Attempts of this node that were not", &webhooks.failed),
        ("webhook_attempts_late", "Attempts of this node whose outcome came after their lease", &webhooks.late),
    ] {
        registry.register(name, help, ConstCounter::new(counter.load(Ordering::Relaxed)));
    }
    Ok(())
}

async fn schedules(api: &Api, registry: &mut Registry) -> Result<(), ApiError> {
    let counts = api.engine.store.schedule_counts().await?;
    let states = Gauges::default();
    for (state, count) in [("active", counts.active), ("inactive", counts.inactive)] {
        states.get_or_create(&vec![("state", state.to_owned())]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    registry.register("faena_schedules", "Schedules, by whether they fire", states);
    let ticks = Family::<Labels, Counter>::default();
    for outcome in TickOutcome::ALL {
        let label = vec![("outcome", outcome.as_str().to_owned())];
        ticks.get_or_create(&label).inc_by(api.engine.schedules.count(outcome));
    }
    registry.register("faena_schedule_ticks", "What became of due times that this node dealt with", ticks);
    let late = Gauge::<f64, AtomicU64>::default();
    late.set(api.engine.schedules.late_ms() as f64 / 1_000.0);
    registry.register("faena_schedule_late_seconds", "By how much the latest due time of this node was met late", late);
    Ok(())
}

async fn outbox(api: &Api, registry: &mut Registry) -> Result<(), ApiError> {
    let now = Timestamp::now();
    let (pending, oldest, dead, up) = (Gauges::default(), Gauges::default(), Gauges::default(), Gauges::default());
    let sent = Family::<Labels, Counter>::default();
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    for sink in api.engine.store.outbox_sinks(now).await? {
        let label = vec![("sink", sink.name)];
        pending.get_or_create(&label).set(number(sink.pending));
        let waits_ms = sink.oldest_pending_at.map_or(0, |at| now.ms_since(at));
        oldest.get_or_create(&label).set(waits_ms.max(0) / 1_000);
        dead.get_or_create(&label).set(number(sink.dead));
        up.get_or_create(&label).set(i64::from(sink.down_since.is_none()));
        sent.get_or_create(&label).inc_by(sink.sent);
    }
    registry.register("faena_outbox_pending", "Events that wait for a sink, up to 1000000", pending);
    registry.register("faena_outbox_oldest_seconds", "Since when the oldest of them has waited", oldest);
    registry.register("faena_outbox_dead", "Messages that a sink would not take and nobody has resolved", dead);
    registry.register("faena_outbox_sent", "Events that a sink has confirmed", sent);
    registry.register("faena_outbox_sink_up", "0 while a sink is unusable", up);
    Ok(())
}

/// What came from outboxes of applications and from brokers.
fn from_outside(api: &Api, registry: &mut Registry) {
    let (rows, messages) = (Family::<Labels, Counter>::default(), Family::<Labels, Counter>::default());
    let add =
        |family: &Family<Labels, Counter>, (key, name): (&'static str, &str), outcome: &str, counter: &AtomicU64| {
            let name = name.split_once(':').map_or(name, |(_, name)| name);
            let label = vec![(key, name.to_owned()), ("outcome", outcome.to_owned())];
            family.get_or_create(&label).inc_by(counter.load(Ordering::Relaxed));
        };
    for source in &api.engine.sources {
        let name = ("source", source.name.as_str());
        add(&rows, name, "sent", &source.sent);
        add(&rows, name, "refused", &source.refused);
        add(&rows, name, "job", &source.jobs);
    }
    for inbox in &api.engine.inboxes {
        let name = ("inbox", inbox.name.as_str());
        add(&messages, name, "job", &inbox.jobs);
        add(&messages, name, "known", &inbox.known);
        add(&messages, name, "rejected", &inbox.rejected);
    }
    registry.register("faena_source_rows", "What became of rows of applications' outboxes through this node", rows);
    registry.register("faena_inbox_messages", "What became of messages of brokers through this node", messages);
}

async fn queues(api: &Api, counts: &Counts, registry: &mut Registry) -> Result<(), ApiError> {
    let (depth, paused) = (Gauges::default(), Gauges::default());
    let rules = api.engine.store.rules();
    for lane in api.engine.store.lanes().await? {
        let label = vec![("queue", lane.queue.clone()), ("priority", lane.priority.as_str().to_owned())];
        let queued = counts.by_lane.get(&(lane.id, Tally::Queued)).copied().unwrap_or(0);
        depth.get_or_create(&label).inc_by(queued);
        paused.get_or_create(&vec![("queue", lane.queue)]).set(0);
    }
    for (queue, rule) in &rules.queues {
        paused.get_or_create(&vec![("queue", queue.clone())]).set(i64::from(rule.paused.is_some()));
    }
    registry.register("queue_depth", "Jobs that could run now, by queue and priority", depth);
    registry.register("queue_paused", "1 while a queue is paused", paused);
    Ok(())
}

async fn jobs(api: &Api, registry: &mut Registry) -> Result<(), ApiError> {
    let counts = api.engine.store.counts().await?;
    let gauges = Gauges::default();
    for (tally, name) in [
        (Tally::Pending, "PENDING"),
        (Tally::Queued, "QUEUED"),
        (Tally::InFlight, "HELD"),
        (Tally::Retrying, "RETRYING"),
        (Tally::Completed, "COMPLETED"),
        (Tally::Failed, "FAILED"),
        (Tally::Cancelled, "CANCELLED"),
    ] {
        gauges.get_or_create(&vec![("state", name.to_owned())]).set(counts.total(tally));
    }
    let dead = Gauge::<i64, AtomicI64>::default();
    dead.set(counts.total(Tally::Failed));
    registry.register("dlq_size", "Dead letters", dead);
    queues(api, &counts, registry).await?;
    registry.register(
        "jobs_in_state",
        "Jobs by state; HELD: in a worker's hands (SCHEDULED, ASSIGNED, PROCESSING)",
        gauges,
    );
    Ok(())
}
