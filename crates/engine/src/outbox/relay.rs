//! Publishes the events of one sink.
//!
//! A round takes a batch from this node's partitions of the outbox, publishes it in order and stores the answers in one
//! statement. A message that was published, but whose confirmation was not stored (this process died, the connection
//! broke), is published again under the same id, so the first deliveries of each subject stay in order. A call to the
//! sink starts only if its timeout passes before the lease ends, so no other node publishes these subjects meanwhile.
//!
//! Two kinds of failure: if the sink is down, it is retried with a growing delay and no message uses an attempt; if a
//! message is rejected, only that message is delayed, and after `MAX_ATTEMPTS` it becomes a dead letter. If later
//! messages of its subject wait for it (`park`), each call contains at most one message of a subject.
//!
//! Safe to run on all nodes concurrently: a partition belongs to one node, and the store rejects a node that has lost it.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use faena_brokers::{Message, PublishOutcome, PublishReport, Sink};
use faena_domain::{CloudEvent, EVENT_TYPES, NodeId, Timestamp};
use faena_store::{
    OnRejected, OutboxEvent, OutboxResult, OutboxTakeRequest, OutboxTaken, Store, StoreError, StoredEvent,
};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{OutboxConfig, SinkBody, SinkConfig};
use crate::{Round, config::ms, measure::Histogram};

const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// How often the subscription is renewed. It is kept for days.
const RENEW_MS: i64 = 3_600_000;
/// What must remain of a lease after a call to the sink. Taking a batch renews a lease that is more than half over.
const MARGIN: Duration = Duration::from_secs(1);
/// How long a stopping server waits for confirmations. Messages confirmed later are published again by other nodes.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Relay {
    pub(super) config: SinkConfig,
    pub wakeup: Arc<Notify>,
    confirmed: AtomicU64,
    rejected: AtomicU64,
    /// Messages that a call to the sink did not confirm.
    failed: AtomicU64,
    calls: Mutex<Histogram>,
    time_spent: Mutex<TimeSpent>,
    sink: Box<dyn Sink>,
    source: String,
    lease: Duration,
    batch: usize,
    first_backoff: Duration,
    renewed_at: AtomicI64,
    health: Mutex<Health>,
    stop: CancellationToken,
}

/// Time that a relay has spent in each phase of its rounds.
#[derive(Clone, Copy, Default, Debug)]
pub struct TimeSpent {
    pub taking: Duration,
    pub publishing: Duration,
    pub settling: Duration,
}

/// Returns the message of an event.
fn message(event: &StoredEvent, source: &str, body: SinkBody) -> Message {
    // An event of a machine has the name that its author chose; services subscribe to exactly that name.
    let is_ours = EVENT_TYPES.contains(&event.kind.as_str());
    let (content_type, body) = match body {
        SinkBody::CloudEvent => (CloudEvent::CONTENT_TYPE, event.cloud_event(source).to_json()),
        SinkBody::Data => ("application/json", event.data.clone()),
    };
    Message {
        id: event.id.to_string(),
        kind: event.kind.clone(),
        routing_key: (!is_ours).then(|| event.kind.clone()),
        key: event.subject.to_string(),
        sequence: event.sequence,
        at: event.at,
        correlation_id: Some(event.correlation_id.clone()).filter(|id| !id.is_empty()),
        traceparent: event.traceparent.clone(),
        content_type: content_type.into(),
        body: body.into(),
    }
}

/// Health of the sink, as far as this node knows.
#[derive(Default)]
struct Health {
    /// `None`: this node has not used it yet.
    is_down: Option<bool>,
    /// Since when and why it is down.
    outage: Option<(Timestamp, String)>,
    failures: u32,
    retry_at: Option<Timestamp>,
}

/// Results of publishing a batch.
#[derive(Default)]
struct Answers {
    results: Vec<OutboxResult>,
    confirmed: usize,
    rejected: usize,
    /// Why the sink is down, if it is.
    down: Option<String>,
    /// Not every message was published: there was no time, or the sink did not answer for it.
    is_partial: bool,
}

impl Relay {
    pub(super) fn new(
        config: &OutboxConfig,
        sink_config: &SinkConfig,
        sink: Box<dyn Sink>,
        stop: CancellationToken,
    ) -> Relay {
        Relay {
            config: sink_config.clone(),
            wakeup: Arc::new(Notify::new()),
            confirmed: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            calls: Mutex::default(),
            time_spent: Mutex::default(),
            sink,
            source: config.source.clone(),
            lease: config.lease.max(2 * (sink_config.target.timeout() + 2 * MARGIN)),
            batch: config.batch,
            first_backoff: config.first_backoff,
            renewed_at: AtomicI64::new(i64::MIN),
            health: Mutex::default(),
            stop,
        }
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns how many messages of this node the sink confirmed.
    pub fn confirmed(&self) -> u64 {
        self.confirmed.load(Ordering::Relaxed)
    }

    /// Returns how many messages of this node the sink rejected.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Returns since when and why the sink is down, as far as this node knows.
    pub fn outage(&self) -> Option<(Timestamp, String)> {
        self.health.lock().outage.clone()
    }

    /// Returns how many messages were passed to the sink and not confirmed. A retried message counts again.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Returns how long the calls to the sink took.
    pub fn calls(&self) -> Histogram {
        self.calls.lock().clone()
    }

    pub fn time_spent(&self) -> TimeSpent {
        *self.time_spent.lock()
    }

    pub async fn run_once(&self, store: &dyn Store, node: NodeId, now: Timestamp) -> Result<Round, StoreError> {
        self.renew_subscription(store, now).await?;
        let retry_at = self.health.lock().retry_at.filter(|at| *at > now);
        if retry_at.is_some() {
            return Ok(Round::idle_until(retry_at));
        }
        // Measured from before the call, because the lease may start as soon as the store receives it.
        let started = Instant::now();
        let request =
            OutboxTakeRequest { sink: self.config.name.clone(), node, lease_ms: ms(self.lease), limit: self.batch };
        let taken = store.outbox_take(request, now).await?;
        if taken.events.is_empty() {
            return Ok(Round::idle_until(taken.next_at));
        }
        let is_full = taken.events.len() >= self.batch;
        let taking = started.elapsed();
        let answers = self.publish(&taken, started, now).await;
        let publishing = started.elapsed() - taking;
        let at = now.plus_ms(ms(started.elapsed()));
        let handled = answers.results.len();
        let more = answers.down.is_none() && (is_full || answers.is_partial) && !self.stop.is_cancelled();
        // The store knows when each rejected message is due again; this loop has to run then.
        let retry_at = answers.results.iter().filter(|result| result.rejected.is_some()).map(|result| result.retry_at);
        let next_at = retry_at.chain(taken.next_at).min();
        if handled > 0 {
            store.outbox_settle(&self.config.name, taken.partitions, answers.results, at).await?;
        } else if answers.down.is_none() {
            // There was no time to publish anything.
            return Ok(Round { more, ..Round::default() });
        }
        {
            let mut time_spent = self.time_spent.lock();
            time_spent.taking += taking;
            time_spent.publishing += publishing;
            time_spent.settling += started.elapsed() - taking - publishing;
        }
        self.confirmed.fetch_add(answers.confirmed as u64, Ordering::Relaxed);
        self.rejected.fetch_add(answers.rejected as u64, Ordering::Relaxed);
        let retry_at = self.update_health(store, answers.down, answers.confirmed, at).await?;
        Ok(Round { handled, more, next_at: retry_at.or(next_at) })
    }

    async fn renew_subscription(&self, store: &dyn Store, now: Timestamp) -> Result<(), StoreError> {
        if now.ms_since(Timestamp::from_ms(self.renewed_at.load(Ordering::Relaxed))) >= RENEW_MS {
            store.event_subscribe(vec![self.config.subscription(now)], now).await?;
            self.record_renewal(now);
        }
        Ok(())
    }

    pub(super) fn record_renewal(&self, now: Timestamp) {
        self.renewed_at.store(now.as_ms(), Ordering::Relaxed);
    }

    async fn publish(&self, taken: &OutboxTaken, started: Instant, now: Timestamp) -> Answers {
        let mut answers = Answers::default();
        let calls = match self.config.on_rejected {
            OnRejected::Skip => vec![taken.events.iter().collect()],
            OnRejected::Park => split_by_subject(&taken.events),
        };
        let mut blocked: HashSet<Uuid> = HashSet::new();
        for call in calls {
            let call: Vec<&OutboxEvent> =
                call.into_iter().filter(|one| !blocked.contains(&one.event.subject)).collect();
            if call.is_empty() {
                continue;
            }
            if answers.down.is_some() || started.elapsed() + self.config.target.timeout() + MARGIN > self.lease / 2 {
                answers.is_partial = true;
                break;
            }
            let messages: Vec<Message> =
                call.iter().map(|one| message(&one.event, &self.source, self.config.body)).collect();
            let called = Instant::now();
            let Some(report) = self.publish_unless_stopped(&messages).await else {
                answers.is_partial = true;
                break;
            };
            self.measure_call(&report, messages.len(), called.elapsed());
            let at = now.plus_ms(ms(started.elapsed()));
            self.add_answers(&call, report, at, &mut answers, &mut blocked);
        }
        answers
    }

    fn measure_call(&self, report: &PublishReport, messages: usize, took: Duration) {
        let confirmed = report.outcomes.iter().filter(|outcome| matches!(outcome, Some(PublishOutcome::Confirmed)));
        self.failed.fetch_add(messages.saturating_sub(confirmed.count()) as u64, Ordering::Relaxed);
        self.calls.lock().observe(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
    }

    /// Publishes messages. Returns `None` if this server stops and has waited long enough.
    async fn publish_unless_stopped(&self, messages: &[Message]) -> Option<PublishReport> {
        let stopped = async {
            self.stop.cancelled().await;
            tokio::time::sleep(STOP_TIMEOUT).await;
        };
        tokio::select! {
            report = self.sink.publish(messages) => Some(report),
            () = stopped => None,
        }
    }

    /// Adds the answers to one call. Subjects with a message that was not confirmed are blocked for the rest of the round.
    fn add_answers(
        &self,
        call: &[&OutboxEvent],
        report: PublishReport,
        at: Timestamp,
        answers: &mut Answers,
        blocked: &mut HashSet<Uuid>,
    ) {
        let before = answers.results.len();
        for (one, outcome) in call.iter().zip(report.outcomes) {
            let rejected = match outcome {
                Some(PublishOutcome::Confirmed) => {
                    answers.confirmed += 1;
                    None
                }
                Some(PublishOutcome::Rejected(reason)) => {
                    answers.rejected += 1;
                    blocked.insert(one.event.subject);
                    Some(reason)
                }
                None => {
                    answers.is_partial = true;
                    blocked.insert(one.event.subject);
                    continue;
                }
            };
            answers.results.push(OutboxResult {
                partition: one.partition,
                position: one.event.position,
                rejected,
                retry_at: at.plus_ms(ms(backoff(self.first_backoff, one.attempts))),
            });
        }
        answers.down = report.outage.map(|error| format!("{error:#}"));
        if answers.down.is_none() && answers.results.len() == before {
            answers.down = Some("the sink reported no outcome for any message".into());
        }
    }

    /// Stores the health of the sink if it has changed. Returns when to retry if it is down.
    async fn update_health(
        &self,
        store: &dyn Store,
        down: Option<String>,
        confirmed: usize,
        at: Timestamp,
    ) -> Result<Option<Timestamp>, StoreError> {
        let was_down = self.health.lock().is_down;
        let name = self.name();
        let Some(reason) = down else {
            if was_down != Some(false) {
                store.outbox_down(name, None, at).await?;
            }
            if was_down == Some(true) {
                tracing::info!(sink = name, "sink is up again");
            }
            *self.health.lock() = Health { is_down: Some(false), ..Health::default() };
            return Ok(None);
        };
        let retry_at = {
            let mut health = self.health.lock();
            // It confirmed something before it went down, so this is a new outage.
            health.failures = if confirmed > 0 { 1 } else { health.failures + 1 };
            let delay = jittered(backoff(self.first_backoff, health.failures - 1));
            let retry_at = at.plus_ms(ms(delay));
            health.retry_at = Some(retry_at);
            let since = health.outage.as_ref().map_or(at, |(since, _)| *since);
            health.outage = Some((since, reason.clone()));
            retry_at
        };
        if was_down != Some(true) {
            store.outbox_down(name, Some(reason.clone()), at).await?;
            tracing::warn!(sink = name, reason, "sink is down");
            self.health.lock().is_down = Some(true);
        }
        Ok(Some(retry_at))
    }

    pub(super) async fn close(&self) {
        self.sink.close().await;
    }
}

/// Splits a batch into calls with at most one message of a subject each, in order.
fn split_by_subject(events: &[OutboxEvent]) -> Vec<Vec<&OutboxEvent>> {
    let mut calls: Vec<Vec<&OutboxEvent>> = Vec::new();
    let mut count = std::collections::HashMap::new();
    for one in events {
        let number: &mut usize = count.entry(one.event.subject).or_default();
        if calls.len() == *number {
            calls.push(Vec::new());
        }
        calls[*number].push(one);
        *number += 1;
    }
    calls
}

/// Returns the delay after a failure that follows `before` others.
fn backoff(first: Duration, before: u32) -> Duration {
    first.saturating_mul(2u32.saturating_pow(before)).min(MAX_BACKOFF)
}

/// Shortens a delay at random, so that relays that lost their broker together do not reconnect together.
fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(0.75 + 0.25 * rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use faena_store::StoredEvent;

    use super::*;

    fn event(position: i64, subject: u128) -> OutboxEvent {
        let event = StoredEvent {
            position,
            id: Uuid::from_u128(position.unsigned_abs().into()),
            kind: "job.created".into(),
            subject: Uuid::from_u128(subject),
            sequence: position,
            at: Timestamp::from_ms(0),
            correlation_id: String::new(),
            actor: String::new(),
            traceparent: None,
            data: "{}".into(),
        };
        OutboxEvent { partition: 0, event, attempts: 0 }
    }

    #[test]
    fn a_call_contains_at_most_one_message_of_a_subject_in_order() {
        let events = [event(1, 7), event(2, 8), event(3, 7), event(4, 7), event(5, 8)];
        let positions: Vec<Vec<i64>> =
            split_by_subject(&events).iter().map(|call| call.iter().map(|one| one.event.position).collect()).collect();
        assert_eq!(positions, [vec![1, 2], vec![3, 5], vec![4]]);
    }

    #[test]
    fn the_delay_doubles_up_to_a_minute() {
        let seconds = [0, 1, 2, 5, 6, 40].map(|before| backoff(Duration::from_secs(1), before).as_secs());
        assert_eq!(seconds, [1, 2, 4, 32, 60, 60]);
    }
}
