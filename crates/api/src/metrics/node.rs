//! Metrics of the node that is scraped. While the database is down, only the metrics with the names of queues are
//! missing.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use faena_domain::{Timestamp, schedule::TickOutcome};
use faena_engine::{
    QueueStatus,
    breaker::BreakerState,
    guardian::Check,
    measure::{Histogram, RUN_OUTCOMES, TIMED_STATES},
};
use faena_store::{InputKind, InputState, InputView, named_queues};

use super::{MAX_HOSTS, MAX_QUEUES, MAX_WORKERS, scrape::Scrape, signed, table};
use crate::{Api, RejectReason};

/// How long the database may take to respond before it counts as down.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

pub async fn add(api: &Api, scrape: &mut Scrape) {
    let now = Timestamp::now();
    let is_up = database(api, scrape).await;
    jobs(api, scrape, is_up).await;
    workers(api, scrape, now);
    slots(api, scrape);
    events(api, scrape);
    webhooks(api, scrape, now);
    schedules(api, scrape);
    tasks(api, scrape);
    sources_and_inboxes(api, scrape, now);
    requests(api, scrape);
    traces(api, scrape);
    loops(api, scrape, now);
    redis_queue(api, scrape);
    let build = [env!("CARGO_PKG_VERSION").to_owned(), api.engine.store.database_kind().to_owned()];
    scrape.gauge(&table::BUILD_INFO, [(build, 1)]);
    if let Some(at) = api.certificate.get() {
        scrape.gauge(&table::TLS_CERTIFICATE_EXPIRY, [([], at)]);
    }
    scrape.decimal(&table::START_TIME_SECONDS, api.engine.started_at.as_ms() as f64 / 1_000.0);
}

fn requests(api: &Api, scrape: &mut Scrape) {
    let rejected = RejectReason::ALL.into_iter();
    let rejected = rejected.map(|reason| ([reason.as_str().to_owned()], api.traffic.rejected(reason)));
    scrape.counter(&table::REQUESTS_REJECTED, rejected);
}

/// Adds the counts of spans. Without a collector they are 0.
fn traces(api: &Api, scrape: &mut Scrape) {
    let exporter = api.engine.tracer.as_ref().map(|tracer| &tracer.exporter);
    let count = |counter: Option<&AtomicU64>| [([], counter.map_or(0, |counter| counter.load(Ordering::Relaxed)))];
    scrape.counter(&table::TRACE_SPANS_EXPORTED, count(exporter.map(|exporter| &exporter.exported)));
    scrape.counter(&table::TRACE_SPANS_DROPPED, count(exporter.map(|exporter| &exporter.dropped)));
}

/// Adds the metrics of the queue in Redis. Without one, its gauge is absent and its counts are 0.
fn redis_queue(api: &Api, scrape: &mut Scrape) {
    let status = api.engine.queue.status();
    let up = status.as_ref().map(|status| ([], i64::from(status.outage.is_none())));
    scrape.gauge(&table::QUEUE_REDIS_UP, up);
    let round_trips = status.as_ref().map(|status| status.round_trips.clone()).unwrap_or_default();
    scrape.histogram(&table::QUEUE_REDIS_ROUND_TRIP, [([], round_trips)]);
    let drift = status.as_ref().map_or(0, |status| status.last_drift);
    scrape.gauge(&table::QUEUE_REDIS_DRIFT, [([], signed(drift))]);
    let count = |of: fn(&QueueStatus) -> u64| [([], status.as_ref().map_or(0, of))];
    scrape.counter(&table::QUEUE_REDIS_REPAIRED, count(|status| status.repaired));
    scrape.counter(&table::QUEUE_REDIS_FILLS, count(|status| status.fills));
    scrape.counter(&table::QUEUE_REDIS_STALE, count(|status| status.stale));
    scrape.counter(&table::QUEUE_REDIS_FALLBACK, count(|status| status.fallback_claims));
}

async fn database(api: &Api, scrape: &mut Scrape) -> bool {
    let started = Instant::now();
    let is_up = matches!(tokio::time::timeout(PING_TIMEOUT, api.engine.store.ping()).await, Ok(Ok(())));
    scrape.gauge(&table::DATABASE_UP, [([], i64::from(is_up))]);
    scrape.decimal(&table::DATABASE_PING_SECONDS, started.elapsed().as_secs_f64());
    is_up
}

async fn jobs(api: &Api, scrape: &mut Scrape, is_up: bool) {
    let measured = api.engine.measures.jobs.snapshot();
    let states = TIMED_STATES.iter().map(|state| [state.to_string()]).zip(measured.states);
    scrape.histogram(&table::JOB_STATE_DURATION, states);
    let outcomes = RUN_OUTCOMES.iter().map(|outcome| [(*outcome).to_owned()]).zip(measured.outcomes);
    scrape.counter(&table::JOB_RUNS, outcomes);
    // The names of the queues are read from the database only if a new lane may exist.
    let lanes = if is_up { api.engine.store.lanes().await.unwrap_or_default() } else { Vec::new() };
    let queues = named_queues(&lanes, MAX_QUEUES);
    let mut by_queue: BTreeMap<&str, (Histogram, Histogram)> = BTreeMap::new();
    for (lane, times) in &measured.lanes {
        let Some(queue) = queues.get(lane) else { continue };
        let (wait, run) = by_queue.entry(queue).or_default();
        wait.merge(&times.wait);
        run.merge(&times.run);
    }
    let (waits, runs): (Vec<_>, Vec<_>) = by_queue
        .into_iter()
        .map(|(queue, (wait, run))| (([queue.to_owned()], wait), ([queue.to_owned()], run)))
        .unzip();
    scrape.histogram(&table::JOB_WAIT_SECONDS, waits);
    scrape.histogram(&table::JOB_RUN_SECONDS, runs);
}

/// Returns the number of a breaker state in the metrics.
fn breaker_number(state: BreakerState) -> i64 {
    match state {
        BreakerState::Closed => 0,
        BreakerState::Open => 1,
        BreakerState::HalfOpen => 2,
    }
}

fn workers(api: &Api, scrape: &mut Scrape, now: Timestamp) {
    let (workers, measured) = (&api.engine.workers, &api.engine.measures.workers);
    scrape.counter(&table::WORKERS_CREATED, [([], measured.created())]);
    scrape.counter(&table::WORKERS_TERMINATED, [([], measured.terminated())]);
    let states = measured.states().into_iter().map(|(state, times)| ([state.as_str().to_owned()], times));
    scrape.histogram(&table::WORKER_STATE_DURATION, states);
    let mut all = workers.all();
    all.sort_unstable_by_key(|worker| worker.id);
    all.truncate(MAX_WORKERS);
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

fn slots(api: &Api, scrape: &mut Scrape) {
    let (slots, busy) = api.engine.slots();
    scrape.gauge(&table::WORKER_SLOTS, [([], signed(slots))]);
    scrape.gauge(&table::WORKER_SLOTS_BUSY, [([], signed(busy))]);
    let utilization = if slots == 0 { 0.0 } else { busy as f64 / slots as f64 };
    scrape.decimal(&table::WORKER_UTILIZATION, utilization);
}

fn events(api: &Api, scrape: &mut Scrape) {
    let relays = &api.engine.events.outbox.relays;
    scrape.counter(&table::EVENTS_PUBLISHED, [([], relays.iter().map(|relay| relay.confirmed()).sum())]);
    scrape.counter(&table::EVENTS_FAILED, [([], relays.iter().map(|relay| relay.failed()).sum())]);
    let mut calls = Histogram::default();
    relays.iter().for_each(|relay| calls.merge(&relay.calls()));
    scrape.histogram(&table::EVENT_PUBLISH_DURATION, [([], calls)]);
}

fn webhooks(api: &Api, scrape: &mut Scrape, now: Timestamp) {
    let webhooks = &api.engine.events.webhooks;
    let breakers = webhooks.breakers(now).into_iter().take(MAX_HOSTS);
    scrape.gauge(&table::WEBHOOK_BREAKER_STATE, breakers.map(|(host, state)| ([host], breaker_number(state))));
    let outcomes = [("delivered", &webhooks.delivered), ("failed", &webhooks.failed), ("late", &webhooks.late)];
    let outcomes = outcomes.map(|(outcome, count)| ([outcome.to_owned()], count.load(Ordering::Relaxed)));
    scrape.counter(&table::WEBHOOK_ATTEMPTS, outcomes);
}

fn schedules(api: &Api, scrape: &mut Scrape) {
    let ticks = TickOutcome::ALL.into_iter();
    let ticks = ticks.map(|outcome| ([outcome.as_str().to_owned()], api.engine.schedules.count(outcome)));
    scrape.counter(&table::SCHEDULE_TICKS, ticks);
    scrape.decimal(&table::SCHEDULE_LATE_SECONDS, api.engine.schedules.late_ms() as f64 / 1_000.0);
}

fn tasks(api: &Api, scrape: &mut Scrape) {
    let measures = api.engine.store.task_measures();
    let outcomes = measures.outcomes.iter().map(|(outcome, count)| ([(*outcome).to_owned()], *count));
    scrape.counter(&table::TASK_EVENTS, outcomes);
    scrape.counter(&table::TASK_DEADLINES_MISSED, [([], measures.deadlines_missed)]);
    let commits = Histogram::from_counts(measures.commits, measures.commits_sum_ms);
    scrape.histogram(&table::TASK_COMMIT_SECONDS, [([], commits)]);
}

fn loops(api: &Api, scrape: &mut Scrape, now: Timestamp) {
    let all = api.engine.loops.health.all();
    let name = |name: &std::sync::Arc<str>| [name.to_string()];
    let late = all.iter().map(|(loop_name, status)| (name(loop_name), i64::from(status.is_late(now))));
    scrape.gauge(&table::LOOP_LATE, late);
    let beats = all
        .iter()
        .filter_map(|(loop_name, status)| Some((name(loop_name), now.ms_since(status.last_at?).max(0) / 1_000)));
    scrape.gauge(&table::LOOP_LAST_BEAT_SECONDS, beats);
    scrape.counter(&table::LOOP_FAILURES, all.iter().map(|(loop_name, status)| (name(loop_name), status.all_failures)));
}

fn sources_and_inboxes(api: &Api, scrape: &mut Scrape, now: Timestamp) {
    let (sources, inboxes): (Vec<InputView>, Vec<InputView>) =
        api.engine.input_views().into_iter().partition(|input| input.kind == InputKind::Source);
    scrape.counter(&table::SOURCE_ROWS, processed(&sources));
    scrape.gauge(&table::SOURCE_UP, up(&sources));
    scrape.gauge(&table::SOURCE_PENDING, pending(&sources));
    scrape.gauge(&table::SOURCE_OLDEST_SECONDS, oldest(&sources, now));
    scrape.counter(&table::INBOX_MESSAGES, processed(&inboxes));
    scrape.gauge(&table::INBOX_UP, up(&inboxes));
    scrape.gauge(&table::INBOX_PENDING, pending(&inboxes));
    scrape.gauge(&table::INBOX_OLDEST_SECONDS, oldest(&inboxes, now));
}

fn processed(inputs: &[InputView]) -> impl Iterator<Item = ([String; 2], u64)> {
    inputs.iter().flat_map(|input| {
        input.processed.iter().map(|(outcome, count)| ([input.name.clone(), outcome.clone()], *count))
    })
}

fn up(inputs: &[InputView]) -> impl Iterator<Item = ([String; 1], i64)> {
    inputs.iter().map(|input| ([input.name.clone()], i64::from(input.state == InputState::Up)))
}

/// Returns the number of pending rows or messages of each input, if this node knows it.
fn pending(inputs: &[InputView]) -> impl Iterator<Item = ([String; 1], i64)> {
    inputs.iter().filter_map(|input| Some(([input.name.clone()], signed(input.pending?))))
}

fn oldest(inputs: &[InputView], now: Timestamp) -> impl Iterator<Item = ([String; 1], i64)> {
    inputs.iter().filter(|input| input.pending.is_some()).map(move |input| {
        let waiting_ms = input.oldest_pending_at.map_or(0, |at| now.ms_since(at));
        ([input.name.clone()], waiting_ms.max(0) / 1_000)
    })
}
